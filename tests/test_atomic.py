"""Files appear in one piece, and what a killed process left half written goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xsp import atomic, rundir


def dead() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def made_long_ago(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("half")
    long_ago = time.time() - 2 * atomic.STALE_S
    for entry in (path, path.parent) if path.parent.name.endswith(".part") else (path,):
        os.utime(entry, (long_ago, long_ago))
    return path


def test_what_a_killed_process_left_half_written_goes_with_the_next_write_beside(tmp_path: Path) -> None:
    pid = dead()
    made_long_ago(tmp_path / f".a.json.{pid}-140001.part")
    made_long_ago(tmp_path / f".5f3c.{pid}-77.part" / "result.json")
    kept = {
        made_long_ago(tmp_path / f".a.json.{os.getpid()}-5.part").name,  # of a process that runs
        made_long_ago(tmp_path / f"a.json.{pid}-5.part").name,  # not a name of xsp's
        made_long_ago(tmp_path / f".notes.{pid}.part").name,
    }
    recent = tmp_path / f".b.json.{pid}-5.part"  # perhaps of a process of another machine
    recent.write_text("half")
    with atomic.replacing(tmp_path / "c.json") as beside:
        beside.write_text("{}")
    assert {entry.name for entry in tmp_path.iterdir()} == {*kept, recent.name, "c.json"}


LEAVES = """
import os, signal, sys, tempfile
from pathlib import Path
from xsp import atomic
atomic.temporary_path(Path(sys.argv[1]) / "out").mkdir()
atomic.temporary_path(Path(sys.argv[1]) / "out" ).joinpath("run.json").write_text("half")
atomic.temporary_path(Path(sys.argv[1]) / "file").write_text("half")
folder = atomic.temporary_folder()
Path(folder.name, "spill").write_text("half")
print(*sorted(os.listdir(sys.argv[1])), *sorted(os.listdir(tempfile.gettempdir())), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a folder of runs, and the folder for temporary files."""
    runs, temporary = tmp_path / "runs", tmp_path / "temporary"
    runs.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return runs, temporary


def start(runs: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LEAVES, str(runs), how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert len(process.stdout.readline().split()) == 3
    return process


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="owners are known only with /proc")
def test_what_no_process_owns_goes_at_once_and_what_one_owns_stays(places: tuple[Path, Path]) -> None:
    runs, temporary = places
    start(runs, "kill").wait()
    assert [len(list(place.iterdir())) for place in places] == [2, 1]
    alive = start(runs, "stay")  # which removes what the first one left
    owned = {entry.name for place in places for entry in place.iterdir()}
    assert [len(list(place.iterdir())) for place in places] == [2, 1]
    with atomic.replacing(runs / "c.json") as beside, atomic.temporary_folder():
        beside.write_text("{}")
    assert {entry.name for place in places for entry in place.iterdir()} == {*owned, "c.json"}
    alive.kill()
    alive.wait()
    atomic._cleaned_folders.clear()
    with atomic.replacing(runs / "c.json") as beside, atomic.temporary_folder():
        beside.write_text("{}")
    assert [entry.name for place in places for entry in place.iterdir()] == ["c.json"]
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="owners are known only with /proc")
def test_an_id_that_another_process_got_owns_nothing(places: tuple[Path, Path]) -> None:
    runs, temporary = places
    place, _, process = atomic._owner(os.getpid()).split("-")
    (runs / f".out.{place}-1-{process}-5.part").write_text("half")
    (temporary / f"xsp-{place}-1-{process}-abc").mkdir()
    elsewhere = runs / f".out.00000000-1-{dead()}-5.part"  # where this process cannot know ids
    elsewhere.write_text("half")
    with atomic.replacing(runs / "c.json") as beside, atomic.temporary_folder():
        beside.write_text("{}")
    assert {entry.name for entry in runs.iterdir()} == {"c.json", elsewhere.name}
    assert list(temporary.iterdir()) == []


def test_a_link_with_the_name_of_a_leftover_loses_nothing_behind_it(places: tuple[Path, Path]) -> None:
    runs, temporary = places
    (runs.parent / "kept").mkdir()
    (runs.parent / "kept" / "file").write_text("kept")
    name = atomic._owner(os.getpid()).rpartition("-")[0]
    (runs / f".out.{name}-{dead()}-5.part").symlink_to(runs.parent / "kept")
    (temporary / f"xsp-{name}-{dead()}-abc").symlink_to(runs.parent / "kept")
    with atomic.replacing(runs / "c.json") as beside, atomic.temporary_folder():
        beside.write_text("{}")
    assert (runs.parent / "kept" / "file").read_text() == "kept"


@pytest.mark.slow
def test_the_next_import_removes_what_a_killed_one_left(places: tuple[Path, Path]) -> None:
    runs, temporary = places
    events = [
        {"ph": "X", "name": f"aten::op{number}", "cat": "cpu_op", "ts": number, "dur": 1, "pid": 1, "tid": 1}
        for number in range(200_000)
    ]
    (runs.parent / "trace.json").write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, "-m", "xsp", "import", str(runs.parent / "trace.json"), "-o", str(runs / "out")]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (list(runs.iterdir()) and list(temporary.iterdir())) and killed.poll() is None:
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    left = [entry.name for place in places for entry in place.iterdir()]
    assert any(name.endswith(".part") for name in left), left
    assert any(name.startswith("xsp-") for name in left), left
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert [entry.name for place in places for entry in place.iterdir()] == ["out"]


def test_a_folder_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.write_atomically(tmp_path / "a.json", b"{}")
    monkeypatch.setattr("os.scandir", lambda *_: pytest.fail("looked through again"))
    rundir.write_atomically(tmp_path / "b.json", b"{}")


def test_a_run_that_is_replaced_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = rundir.create(tmp_path / "run")
    rundir.write_run(run, {"name": "killed"})
    (run / f".merged.parquet.{dead()}-5.part").write_bytes(b"PAR1 half")
    rundir.create(run, overwrite=True)
    assert [entry.name for entry in run.rglob("*")] == [rundir.STEPS]
