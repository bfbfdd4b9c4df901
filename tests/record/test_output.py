"""A second run of the same program: where it goes when the directory is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from depth import deep

import xsp
from xsp import rundir
from xsp.errors import OutputError
from xsp.record import output
from xsp.record.session import profile
from xsp.record.settings import Settings

BARE: dict[str, Any] = {"levels": "M", "warmup": 0, "settle": False, "collectors": [], "samples": False}
SCRIPT = "def train():\n    pass\nfor _ in range(12):\n    train()\n"
XSP = (sys.executable, "-m", "xsp.cli")
RUN = (*XSP, "run", "-q", "--step", "train", "--levels", "M", "--warmup", "0", "--no-samples")
OWN = """
import sys, xsp
for _ in range(int(sys.argv[1])):
    with xsp.profile("own", out=sys.argv[2], levels="M", warmup=0, settle=False, collectors=[], samples=False) as prof:
        for _ in range(4):
            with prof.step(): pass
"""


def recorded(**settings: Any) -> Path:
    with profile("train", **{**BARE, **settings}) as prof:
        for _ in range(3):
            with prof.step():
                pass
    return prof.out


def seen(run: Path) -> int:
    """Return how many steps the program of a run did, once it is known to be whole."""
    trace = xsp.load(run)
    ranks = trace.run.get("ranks", [trace.run])
    assert trace.run["finished"] is True
    assert all(rank["steps"]["stored"] > 0 for rank in ranks)
    return sum(rank["steps"]["seen"] for rank in ranks)


def steps_in(place: Path) -> dict[str, int]:
    return {run.name: seen(run) for run in place.iterdir() if run.is_dir()}


@pytest.mark.slow
def test_a_block_that_is_entered_a_second_time_takes_the_next_free_name_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places = [recorded() for _ in range(3)] + [recorded(out="mine") for _ in range(2)]
    assert [str(place.relative_to(tmp_path)) for place in places] == [
        "runs/train", "runs/train-2", "runs/train-3", "mine", "mine-2",
    ]  # fmt: skip
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "xsp: runs/train is taken: this run goes to runs/train-2",
        "xsp: runs/train is taken: this run goes to runs/train-3",
        "xsp: mine is taken: this run goes to mine-2",
    ]
    assert [seen(place) for place in places] == [3] * 5


def test_overwriting_takes_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [recorded(out=tmp_path / "run", overwrite=True) for _ in range(2)] == [tmp_path / "run"] * 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["a file", "somebody's files", "a damaged run", "a run under way"])
def test_whatever_is_in_the_way_stays_and_no_program_stops_for_it(tmp_path: Path, what: str) -> None:
    place, held = tmp_path / "run", None
    if what == "a file":
        place.write_text("mine")
    elif what == "a run under way":
        held = rundir.reserve(rundir.create(place))
    else:
        place.mkdir()
        (place / ("notes.txt" if what == "somebody's files" else rundir.RUN_FILE)).write_text("mine")
    before = sorted(place.rglob("*")) if place.is_dir() else place.read_text()
    assert recorded(out=place) == tmp_path / "run-2"
    assert before == (sorted(place.rglob("*")) if place.is_dir() else place.read_text())
    if held is not None:
        os.close(held)


@pytest.mark.slow
def test_programs_that_are_started_at_once_each_get_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    commands = [(*RUN, "train.py")] * 2 + [(sys.executable, "-c", OWN, "1", "runs/train")] * 2
    started = [subprocess.Popen(each, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for each in commands]
    said = [each.communicate(timeout=120)[1] for each in started]
    assert [each.returncode for each in started] == [0] * 4, said
    found = steps_in(tmp_path / "runs")
    assert sorted(found) == ["train", "train-2", "train-3", "train-4"]
    assert sorted(found.values()) == [4, 4, 12, 12]
    assert sum("is taken: this run goes to runs/train-" in text for text in said) == 3


@pytest.mark.slow
def test_a_directory_that_was_named_on_the_command_line_is_refused_before_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n" + SCRIPT)
    codes = []
    for _ in range(2):
        done = subprocess.run((*RUN, "--out", "here", "train.py"), cwd=tmp_path, capture_output=True, text=True)
        codes.append((done.returncode, done.stdout))
    assert codes == [(0, "ran\n"), (2, "")]
    assert len(done.stderr.splitlines()) == 1
    assert "a run is there already; choose another directory, or say overwrite=True (--overwrite" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["here"]


@pytest.mark.slow
def test_what_is_printed_at_the_end_names_the_directory_that_was_taken(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "model.py").write_text("import torch\ndef one(n): return torch.nn.Linear(4, 2), torch.ones(n, 4)\n")
    command, said = (*XSP, "profile", "model.py:one", "--levels", "M", "--repeats", "2", "--batch"), ""
    for batch in ("1", "1", "1,2", "1,2"):
        said += subprocess.run((*command, batch), cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [line.partition(";")[0] for line in said.splitlines() if line.startswith("stored in")] == [
        f"stored in runs/model{number}" for number in ("", "-2", "-3", "-4")
    ]
    assert "next: xsp report runs/model-4/batch-0001" in said


@pytest.mark.slow
def test_a_program_that_is_run_once_per_level_takes_the_next_free_name_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for _ in range(2):
        done = subprocess.run((*RUN, "--levels", "M/L", "--once-each", "train.py"), cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr
    assert sorted(steps_in(tmp_path / "runs")) == ["train", "train-2"]


def test_a_set_of_runs_that_came_to_nothing_leaves_no_directory(tmp_path: Path) -> None:
    several = output.claim_for_runs(Settings(out=tmp_path / "runs"))
    rundir.write_run(several.__enter__(), {"parts": []})
    assert not several.__exit__(ValueError, ValueError("no model"), None)
    assert list(tmp_path.iterdir()) == []


# --- ranks --------------------------------------------------------------------------------------------------


def job(tmp_path: Path, ranks: int, blocks: int = 1, **environment: str) -> list[str]:
    """Run a program of so many ranks as torchrun starts them, and return what it said."""
    said = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", **environment}
    started = [
        subprocess.Popen(
            (sys.executable, "-c", OWN, str(blocks), "own"),
            cwd=tmp_path,
            env={**os.environ, **said, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    complaints = [each.communicate(timeout=120)[1] for each in started]
    assert [each.returncode for each in started] == [0] * ranks, complaints
    return complaints


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [[(2, "1"), (1, "2")], deep([(2, "1"), (3, "2"), (1, "3"), (2, "3")])])
def test_all_ranks_of_a_job_go_to_the_same_directory(tmp_path: Path, jobs: list[tuple[int, str]]) -> None:
    for ranks, port in jobs:
        job(tmp_path, ranks, MASTER_PORT=port, TORCHELASTIC_RUN_ID="none")
    parts = {run.name: [part.name for part in rundir.rank_parts(run)] for run in tmp_path.iterdir()}
    names = ["own", *(f"own-{number}" for number in range(2, len(jobs) + 1))]
    assert parts == {
        name: [f"rank-000{rank}" for rank in range(ranks)] for name, (ranks, _) in zip(names, jobs, strict=True)
    }


@pytest.mark.slow
def test_ranks_whose_jobs_cannot_be_told_apart_go_on_together_where_their_parts_are_free(tmp_path: Path) -> None:
    (said, silent) = job(tmp_path, 2, blocks=2)
    assert job(tmp_path, 2) != ["", ""]
    assert steps_in(tmp_path) == {"own": 8, "own-2": 8, "own-3": 8}
    assert (said.count("is taken"), silent) == (1, "")


@pytest.mark.slow
def test_a_job_whose_ranks_were_started_again_leaves_the_first_attempt_alone(tmp_path: Path) -> None:
    for attempt in "01":
        job(tmp_path, 2, TORCHELASTIC_RUN_ID="x", TORCHELASTIC_RESTART_COUNT=attempt)
    assert steps_in(tmp_path) == {"own": 8, "own-2": 8}


@pytest.mark.slow
def test_a_process_of_its_own_does_not_join_a_job(tmp_path: Path) -> None:
    job(tmp_path, 2)
    assert recorded(out=tmp_path / "own") == tmp_path / "own-2"
    with pytest.raises(OutputError):
        output.claim(tmp_path / "own", rundir.reserve)


@pytest.mark.slow
def test_a_rank_that_torchrun_starts_again_replaces_its_run_of_the_attempt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under `xsp run torchrun --max-restarts 1`, which names the directory to its ranks."""
    said = {"WORLD_SIZE": "2", "RANK": "1", output.JOB_VARIABLE: str(tmp_path), "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {**BARE, "out": tmp_path / "job", "next_free": False, "needs_run": True}
    for attempt in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        with profile.of(Settings(**settings)) as prof:
            for _ in range(3 + int(attempt)):
                with prof.step():
                    pass
    assert prof.out == tmp_path / "job" / "rank-0001"
    assert seen(prof.out) == 4
    assert capsys.readouterr().err == "xsp: rank 1 was restarted: its run replaces that of the previous attempt\n"
    monkeypatch.delenv(output.JOB_VARIABLE)
    with pytest.raises(OutputError, match="a run is there already"), profile.of(Settings(**settings)):
        pass


@pytest.mark.slow
def test_ranks_that_a_job_no_longer_has_after_a_restart_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under `xsp run torchrun --nnodes 1:2`, when one of two nodes is lost."""
    monkeypatch.setenv(output.JOB_VARIABLE, str(tmp_path))
    settings: dict[str, Any] = {**BARE, "out": tmp_path / "job", "next_free": False, "needs_run": True}
    for attempt, ranks in enumerate((3, 2)):
        for rank in range(ranks):
            said = {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": attempt}
            for name, value in said.items():
                monkeypatch.setenv(name, str(value))
            with profile.of(Settings(**settings)) as prof, prof.step():
                pass
    assert [part.name for part in rundir.rank_parts(tmp_path / "job")] == ["rank-0000", "rank-0001"]
    assert not (tmp_path / "job" / "rank-0002").exists()
    assert "restarted with 2 ranks: removed rank-0002 of the previous attempt" in capsys.readouterr().err


@pytest.mark.slow
def test_a_block_that_is_entered_again_counts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prof, places = profile("train", out=tmp_path / "run", **BARE), []
    for epoch in range(3):
        with prof:
            for _ in range(3 + epoch):
                with prof.step():
                    pass
        places.append((prof.out.name, seen(prof.out), prof.steps_stored))
    assert places == [("run", 3, 3), ("run-2", 4, 4), ("run-3", 5, 5)]
    assert capsys.readouterr().err.count("is taken") == 2
