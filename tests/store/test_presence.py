"""What `run.json` says is held against what is there; what is missing is said with every figure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from depth import first

import xsp
from xsp import rundir, table
from xsp.cli import main
from xsp.health import health
from xsp.health.finding import Severity
from xsp.run import MISSING
from xsp.testing import spans, trace_of

STEPS = 6


def recorded(run: Path, **changes: Any) -> Path:
    """Write the directory of a finished run of six steps."""
    (run / "steps").mkdir(parents=True)
    (run / "samples").mkdir()
    trace = trace_of(spans("step train 0-1000\n  module m 100-900"))
    for step in range(STEPS):
        query = f"SELECT * REPLACE ({step}::INTEGER AS step) FROM spans"
        trace.con.execute(f"COPY ({query}) TO {table.literal(str(rundir.segment(run, step)))}")
    for name in ("merged.parquet", "loop.parquet", "samples/000000.parquet"):
        trace.con.execute(f"COPY (FROM merged) TO {table.literal(str(run / name))}")
    content = {
        "format": 1, "name": "train", "finished": True, "steps": {"seen": 9, "stored": STEPS, "lost": 0, "skipped": 0},
        "samples": {"readings": 4}, **changes,
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(content))
    return run


def missing(run: Path) -> list[str]:
    return [note.text for note in xsp.load(run).run.notes if note.source == MISSING]


def test_a_complete_run_lacks_nothing(tmp_path: Path) -> None:
    assert missing(recorded(tmp_path / "run")) == []


def remove_steps(run: Path) -> None:
    for step in (1, 4):
        rundir.segment(run, step).unlink()


def copy_a_step(run: Path) -> None:
    shutil.copy(rundir.segment(run, 0), rundir.segment(run, STEPS))


LOSSES: dict[str, tuple[Callable[[Path], None], str]] = {
    "steps": (remove_steps, "2 of 6 stored steps are missing"),
    "more steps": (copy_a_step, "has 7 steps, 1 more than the run stored"),
    "the loop": (lambda run: (run / "loop.parquet").unlink(), "loop.parquet is missing"),
    "samples": (lambda run: shutil.rmtree(run / "samples"), "samples/ is missing or empty: 4 readings"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_what_is_missing_is_noted_and_named_by_health(tmp_path: Path, what: str) -> None:
    run = recorded(tmp_path / "run")
    lose, text = LOSSES[what]
    lose(run)
    assert [text in line for line in missing(run)] == [True]
    findings = [finding for finding in health(xsp.load(run)) if finding.subject == MISSING]
    assert [(finding.severity, finding.best_grade) for finding in findings] == [(Severity.WARNING, "C")]


@pytest.mark.parametrize("what", first(1, LOSSES))
def test_what_is_missing_is_said_with_figures(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run")
    lose, text = LOSSES[what]
    lose(run)
    for command in (["analyze", str(run), "A1", "--format", "csv"], ["compare", str(run), str(run)],
                    ["export", str(run), "--format", "csv", "-o", str(tmp_path / "spans.csv")],
                    ["report", str(run), "-o", str(tmp_path / "page.html")]):  # fmt: skip
        main(command)
        assert text in capsys.readouterr().err, command
    assert text in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_figures_are_those_of_the_steps_that_are_there(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    trace_of(spans("step train 0-777")).con.execute(
        f"COPY (SELECT * REPLACE ('of all steps' AS name) FROM merged) TO '{run / 'merged.parquet'}'"
    )
    assert xsp.load(run).sql("SELECT name FROM merged LIMIT 1").fetchall() == [("of all steps",)]
    remove_steps(run)
    assert xsp.load(run).sql("SELECT DISTINCT name FROM merged WHERE kind = 'step'").fetchall() == [("train",)]


def test_tables_that_are_listed_with_checksums_are_missed_by_name(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", imported={"sources": []}, steps=None)
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**content, "checksums": rundir.checksums(run)}))
    assert missing(run) == []
    remove_steps(run)
    (text,) = missing(run)
    assert text.startswith("2 of 7 listed tables are missing: steps/000001.parquet, steps/000004.parquet;")


def test_a_run_that_goes_on_may_have_more_steps_than_its_last_count(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", finished=False, steps={"seen": 0, "stored": 0})
    assert missing(run) == []


@pytest.mark.parametrize("stored", [-1, "6", 2**70, True, None])
def test_a_count_of_another_type_is_no_reason(tmp_path: Path, stored: Any) -> None:
    assert missing(recorded(tmp_path / "run", steps={"seen": 0, "stored": stored})) == []


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a\0b", "steps/../../x"])
def test_a_listed_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    run = recorded(tmp_path / "run", checksums={name: "00000000"})
    assert len(missing(run)) <= 1


def test_each_rank_of_a_job_is_held_against_its_own_directory(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for rank in range(2):
        recorded(job / rundir.rank_name(rank), rank=rank, world_size=2)
    (job / "run.json").write_text(json.dumps({"format": 1, "kind": "ranks", "finished": True}))
    assert missing(job) == []
    remove_steps(job / "rank-0001")
    (text,) = missing(job)
    assert text.startswith("rank-0001: 2 of 6 stored steps are missing")


def test_a_program_in_parts_that_lacks_one_is_said_to_lack_its_steps(tmp_path: Path) -> None:
    whole = tmp_path / "parts"
    for name in ("M", "L"):
        recorded(whole / name)
    content = {"format": 1, "finished": True, "parts": ["M", "L"], "steps": {"stored": 2 * STEPS}}
    (whole / "run.json").write_text(json.dumps(content))
    assert missing(whole) == []
    shutil.rmtree(whole / "L")
    (text,) = missing(whole)
    assert text.startswith("6 of 12 stored steps are missing")
