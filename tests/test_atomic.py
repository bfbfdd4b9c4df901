"""Files appear in one piece, and what a killed process left half written goes away."""

from __future__ import annotations

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
