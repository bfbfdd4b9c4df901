"""Run directories that are bad, foreign or in the way: one clear error each, and nothing half done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp import rundir, table
from xsp.correlate.evidence import correlate
from xsp.errors import OutputError, TraceError, UnwritableError
from xsp.ingest.load import parts
from xsp.record.description import of_parts
from xsp.record.loop import LoggedStep, Loop, Status
from xsp.report.loop import loop as drawn
from xsp.run import Run
from xsp.schema import Level
from xsp.store import loop
from xsp.store.iterations import iterations
from xsp.store.write import StepWriter
from xsp.testing import spans


def write(run: Path, steps: int = 3, rung: int = Level.LAYER, **content: Any) -> Path:
    """Write a finished run of a few steps."""
    rundir.create(run)
    store = StepWriter(run)
    for step in range(steps):
        text = "step s 0-100\nmodule net 10-90 type=Net"
        rows = spans(text, trace_id=f"{100 * rung + step:032x}", step=step, rung=int(rung), timed=True)
        store.add(step, list(zip(*rows, strict=True)))
    store.finish({"name": run.name, "finished": True, **content})
    return run


def listing(place: Path) -> list[str]:
    return sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())


def message(error: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message of exactly this error."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert type(caught.value) is error
    return str(caught.value)


def test_a_run_is_written_and_read_back(tmp_path: Path) -> None:
    run = write(tmp_path / "deep" / "run")
    assert listing(run) == ["merged.parquet", "run.json", *(f"steps/00000{step}.parquet" for step in range(3))]
    loaded = xsp.load(run)
    assert (loaded.name, len(loaded.spans), len(loaded.merged)) == ("run", 6, 2)
    assert len(xsp.load(run / "steps" / "000001.parquet").spans) == 2


# --- writing ----------------------------------------------------------------------------------------------


def test_a_run_that_is_there_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    before = listing(run)
    text = message(OutputError, rundir.create, run)
    assert text.startswith(f"{run}: a run is there already")
    assert listing(run) == before
    rundir.create(run, overwrite=True)
    assert listing(run) == []


def test_overwriting_deletes_what_xsp_wrote_and_nothing_else(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    write(run / "part", steps=1)
    rundir.write_run(run, {"parts": ["part", "../other", "gone"]})
    write(tmp_path / "other")
    others = listing(tmp_path / "other")
    mine = ["notes.txt", "steps/notes.txt", "part/notes.txt", "model/weights.parquet"]
    for name in mine:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    rundir.create(run, overwrite=True)
    assert listing(run) == sorted(mine)
    assert listing(tmp_path / "other") == others


def test_overwriting_does_not_follow_a_link_out_of_the_run(tmp_path: Path) -> None:
    other, run = write(tmp_path / "other"), tmp_path / "run"
    run.mkdir()
    rundir.write_run(run, {})
    (run / "steps").symlink_to(other / "steps")
    rundir.create(run, overwrite=True)
    assert len(rundir.segments(other)) == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_of_something_else_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert f"{tmp_path}: the directory is not empty and not a run" in message(
        OutputError, rundir.create, tmp_path, overwrite=overwrite
    )
    assert listing(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_the_way_stays(tmp_path: Path, overwrite: bool) -> None:
    file = tmp_path / "run"
    file.write_text("mine")
    assert message(OutputError, rundir.create, file, overwrite=overwrite).startswith(f"{file}: a file is in the way")
    below = file / "deeper"
    assert message(UnwritableError, rundir.create, below, overwrite=overwrite).startswith(f"{below}: cannot be written")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", ['{"format"', '{"format": 99}'])
def test_a_run_that_cannot_be_understood_is_not_overwritten(tmp_path: Path, content: str) -> None:
    run = write(tmp_path / "run")
    (run / "run.json").write_text(content)
    before = listing(run)
    text = message(OutputError, rundir.create, run, overwrite=True)
    assert str(run) in text
    assert "nothing was removed" in text
    assert listing(run) == before


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    assert rundir.create(tmp_path) == tmp_path


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    rundir.write_atomically(path, b"before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert (
        message(UnwritableError, rundir.write_atomically, path, b"after")
        == f"{path}: cannot be written (No space left on device)"
    )
    assert (listing(tmp_path), path.read_bytes()) == (["run.json"], b"before")


# --- reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "not a run directory, run.json is missing"),
        ("", "damaged"),
        ('{"format": 1, "na', "damaged"),
        ("[1]", "damaged"),
        ('{"name": "x"}', "damaged"),
        (b"\xff\xfe\x00", "damaged"),
        ('{"format": 2}', "written in format 2, this xsp reads up to 1; install a newer xsp"),
    ],
)
def test_a_bad_run_json_is_named(tmp_path: Path, content: str | bytes | None, expected: str) -> None:
    run = write(tmp_path / "run")
    (run / "run.json").unlink()
    if content is not None:
        (run / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    text = message(TraceError, xsp.load, run)
    assert text.startswith(str(run))
    assert expected in text


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert message(TraceError, xsp.load, gone) == f"{gone}: there is no such file or directory"


def test_a_run_without_steps_says_what_to_do(tmp_path: Path) -> None:
    run = write(tmp_path / "run", steps=0, warmup=4)
    text = message(TraceError, xsp.load, run)
    assert text.startswith(f"{run}: the run holds no step")
    assert "(4 steps)" in text
    rundir.write_run(run, {**rundir.read_run(run), "budget": {"asked_percent": 1.0}})
    assert message(TraceError, xsp.load, run).endswith("1 % of them pay for none: allow a larger budget")


def test_a_run_that_was_killed_before_its_first_step_is_told_so(tmp_path: Path) -> None:
    run = write(tmp_path / "run", steps=0)
    rundir.write_run(run, {**rundir.read_run(run), "finished": False})
    assert "it was interrupted before the first one was stored" in message(TraceError, xsp.load, run)


def test_a_run_that_was_killed_loads_with_the_steps_that_were_stored(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    (run / "merged.parquet").unlink()
    rundir.write_run(run, {"name": "killed", "finished": False})
    (run / "steps" / ".000003.parquet.77.part").write_bytes(b"PAR1 half")
    loaded = xsp.load(run)
    assert (len(loaded.spans), len(loaded.merged)) == (6, 2)


def damage(segment: Path) -> None:
    content = segment.read_bytes()
    segment.write_bytes(content[: len(content) // 2])


def test_a_truncated_segment_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    damage(bad := rundir.segment(run, 1))
    text = message(TraceError, xsp.load, run)
    assert text.startswith(f"{bad}: damaged")
    assert "2 other segments" in text
    loaded = xsp.load(run, skip_damaged=True)
    assert loaded.sql("SELECT DISTINCT step FROM spans ORDER BY 1").fetchall() == [(0,), (2,)]
    assert "steps/000001.parquet" in loaded.run["notes"][0]["text"]


def test_a_segment_whose_pages_are_damaged_is_found_although_its_footer_is_whole(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    bad = rundir.segment(run, 2)
    content = bytearray(bad.read_bytes())
    content[8:60] = bytes(52)
    bad.write_bytes(content)
    assert str(bad) in message(TraceError, xsp.load, run)


def test_a_damaged_merged_step_is_made_again_from_the_steps(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    damage(run / "merged.parquet")
    loaded = xsp.load(run)
    assert len(loaded.merged) == 2
    assert "merged.parquet" in loaded.run["notes"][0]["text"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT 1 AS pixels", "not a span table, it has no level, name, start_ns and dur_ns"),
        ("SELECT 'x' AS level, 'x' AS name, 0::BIGINT AS start_ns, 0::BIGINT AS dur_ns", "other types: level"),
    ],
)
def test_a_foreign_parquet_file_is_refused(tmp_path: Path, query: str, expected: str) -> None:
    file = tmp_path / "foreign.parquet"
    con = table.connect()
    table.write(con, con.sql(query), file, "parquet")
    text = message(TraceError, xsp.load, file)
    assert text.startswith(f"{file}: not a span table")
    assert expected in text


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("{}")
    assert message(TraceError, xsp.load, file).startswith(f"{file}: no importer recognises it")


def test_a_table_of_an_older_xsp_loads_and_what_it_lacks_is_null(tmp_path: Path) -> None:
    con = table.connect()
    table.create(con, "old")
    table.insert(con, "old", correlate(spans("step s 0-10", step=0, rung=20, timed=True)))
    table.write(con, con.sql("SELECT * EXCLUDE (attributes, flops) FROM old"), tmp_path / "old.parquet", "parquet")
    assert xsp.load(tmp_path / "old.parquet").sql("SELECT name, flops FROM spans").fetchall() == [("s", None)]


def test_steps_of_an_older_xsp_load_beside_those_of_this_one(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    con, old = table.connect(), rundir.segment(run, 0)
    con.execute(f"CREATE TABLE older AS SELECT * EXCLUDE (attributes, flops) FROM {table.parquet(old)}")
    table.write_parquet(con, "older", old)
    assert not table.are_intact_and_uniform(con, rundir.segments(run), [])
    assert len(xsp.load(run).spans) == 6


# --- directories of runs ----------------------------------------------------------------------------------


def levels_once_each(place: Path) -> Path:
    rundir.create(place)
    for name, rung in (("M", Level.MODEL), ("L", Level.LAYER)):
        write(place / name, rung=rung)
    rundir.write_run(place, {"name": "both", "parts": ["M", "L"]})
    return place


def test_a_program_that_was_run_once_per_level_loads_as_one(tmp_path: Path) -> None:
    loaded = xsp.load(levels_once_each(tmp_path / "runs"))
    assert [(rung.level, rung.steps) for rung in loaded.rungs] == [(Level.MODEL, 3), (Level.LAYER, 3)]


@pytest.mark.slow
def test_the_steps_of_programs_that_were_run_once_per_level_are_numbered_on(tmp_path: Path) -> None:
    runs = levels_once_each(tmp_path / "runs")
    for place, (name, rung) in enumerate((("M", Level.MODEL), ("L", Level.LAYER))):
        rows = Loop()
        for step in range(20):
            recorded = step < 3
            on, start_ns = int(rung if recorded else Level.APPLICATION), 10**9 * place + 1000 * step
            rows.add(LoggedStep(0, step, 1, 0, on, int(not recorded), start_ns, 500, 100, 0, 0, 8, Status.OK))
        loop.append(runs / name, rows.take(), 0)
    trace = xsp.load(runs)
    counted = "SELECT count(*), count(DISTINCT step), min(step), max(step) FROM loop"
    assert trace.sql(counted).fetchall() == [(40, 40, 0, 39)]
    recorded_steps = [(0, 20), (1, 20), (2, 20), (20, 30), (21, 30), (22, 30)]
    assert trace.sql("SELECT DISTINCT step, rung FROM spans ORDER BY step").fetchall() == recorded_steps
    [own] = iterations(trace)
    assert (own.steps, own.recorded) == (40, 6)
    page = drawn(trace)
    assert page is not None
    assert page["notes"] == ["40 steps, 6 of them recorded."], "a row is joined with itself only"


def test_kinds_of_a_program_that_was_run_once_per_level_count_the_steps_of_all_runs() -> None:
    output = [Run.of({"kinds": [{"kind": 0, "name": "train", "steps": steps}]}) for steps in (30, 31)]
    assert [kind["steps"] for kind in of_parts(output)["kinds"]] == [61]


@pytest.mark.slow
def test_a_damaged_segment_of_a_part_is_named_too_and_can_be_left_out(tmp_path: Path) -> None:
    runs = levels_once_each(tmp_path / "runs")
    damage(bad := rundir.segment(runs / "L", 0))
    assert message(TraceError, xsp.load, runs).startswith(f"{bad}: damaged")
    assert [rung.steps for rung in xsp.load(runs, skip_damaged=True).rungs] == [3, 2]


@pytest.mark.parametrize("part", ["../other", "/etc", "link", "."])
@pytest.mark.parametrize("kind", ["levels", "sweep"])
def test_parts_that_lead_outside_are_refused(tmp_path: Path, part: str, kind: str) -> None:
    write(tmp_path / "other")
    runs = rundir.create(tmp_path / "runs")
    (runs / "link").symlink_to(tmp_path / "other")
    rundir.write_run(runs, {"kind": kind, "parts": [part]})
    text = message(TraceError, parts if kind == "sweep" else xsp.load, runs)
    assert text.startswith(str(runs))
    assert f"the part {part!r} lies outside" in text


def test_a_sweep_is_no_single_trace_but_lists_its_runs(tmp_path: Path) -> None:
    sweep = rundir.create(tmp_path / "sweep")
    rundir.write_run(sweep, {"kind": "sweep", "parts": ["1", "2"]})
    assert message(TraceError, xsp.load, sweep) == f"{sweep}: holds several runs; load one of them: 1, 2"
    assert parts(sweep) == [sweep / "1", sweep / "2"]
    run = write(tmp_path / "run")
    assert parts(run) == [run]


def test_run_json_keeps_what_was_written(tmp_path: Path) -> None:
    rundir.write_run(tmp_path, {"name": "ä", "steps": {"seen": 3}})
    assert rundir.read_run(tmp_path) == {"format": 1, "name": "ä", "steps": {"seen": 3}}
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["name"] == "ä"


def test_a_copy_of_a_step_that_a_file_manager_made_does_not_count(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    for name in ("000001 2.parquet", "000001 (1).parquet", "000001-copy.parquet"):
        (run / rundir.STEPS / name).write_bytes(rundir.segment(run, 1).read_bytes())
    assert len(xsp.load(run).spans) == 6


def test_files_are_in_the_order_of_their_numbers_beyond_a_million_too(tmp_path: Path) -> None:
    numbers = (9, 999_999, 1_000_000, 1_000_001)
    for folder in (rundir.STEPS, rundir.SAMPLES):
        (tmp_path / folder).mkdir()
    for number in numbers:
        rundir.segment(tmp_path, number).touch()
        rundir.portion(tmp_path, number).touch()
    assert [int(file.stem) for file in rundir.segments(tmp_path)] == list(numbers)
    assert [int(file.stem) for file in rundir.portions(tmp_path)] == list(numbers)
