"""The loop: rows of all steps, on the disk and in the analyses, and what they say of the headline."""

from __future__ import annotations

import itertools
import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xsp
from xsp import account, rundir, table
from xsp.advise.steptime import latency
from xsp.analyses import A1, program_loop
from xsp.analyses.answers import Answers
from xsp.comparison import series
from xsp.health import grade, health
from xsp.record.loop import FOLDED_NS, UNFOLDED_ROWS, UNKNOWN, LoggedStep, Loop, Status, Usage
from xsp.report import headline
from xsp.run import Otel
from xsp.schema import Level, Span
from xsp.store import loop
from xsp.store.iterations import BareStep, idle_hooks_ns, iterations, settling_ns
from xsp.store.reference import coldness
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000
BARE, M = int(Level.APPLICATION), int(Level.MODEL)


def row(step: int, dur_ns: int, **fields: Any) -> LoggedStep:
    usual = LoggedStep(0, step, 1, 0, BARE, 1, 1000 * step, dur_ns, 100, 0, 5, 8, Status.OK, 3, 40)
    return usual._replace(**fields)


# --- rows -----------------------------------------------------------------------------------------------------


def test_rows_go_to_the_disk_and_come_back_with_what_is_unknown_as_null(tmp_path: Path) -> None:
    rows = Loop()
    unknown = dict.fromkeys(("before_ns", "samples", "faults", "system_ns"), UNKNOWN)
    rows.add(row(0, 7, rung=M, steady=0, status=Status.ERROR, **unknown))
    rows.add(row(1, 9))
    rows.add(row(2, 9, steady=UNKNOWN))
    loop.append(tmp_path, rows.take(), offset_ns=10**18)
    con = table.connect()
    assert loop.create_table(con, [tmp_path]) == []
    told = """
        SELECT step, rung, steady, start_ns, dur_ns, before_ns, samples, status, faults, system_ns
        FROM loop ORDER BY step
    """
    expected = [
        (0, M, False, 10**18, 7.0, None, None, "error", None, None),
        (1, BARE, True, 10**18 + 1000, 9.0, 100.0, 8, "ok", 3.0, 40.0),
        (2, BARE, None, 10**18 + 2000, 9.0, 100.0, 8, "ok", 3.0, 40.0),
    ]
    assert con.execute(told).fetchall() == expected
    loop.write(con, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["loop.parquet"]
    loop.create_table(con, [tmp_path])
    assert con.execute(told).fetchall() == expected


def test_rows_have_the_same_byte_order_on_all_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Loop()
    rows.add(row(7, 9))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        loop.append(tmp_path, rows.take(), offset_ns=1000)
        ((rank, step, *_),) = loop._rows((tmp_path / rundir.LOOP_ROWS).read_bytes())
    assert (rank, step) == (0, 7)


def test_a_row_that_a_kill_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    rows = Loop()
    for step in range(3):
        rows.add(row(step, 5))
    file = tmp_path / rundir.LOOP_ROWS
    file.write_bytes(rows.take()[:-20])
    con = table.connect()
    loop.create_table(con, [tmp_path])
    assert con.execute("SELECT list(step ORDER BY step) FROM loop").fetchall() == [([0, 1],)]
    rows.add(row(3, 5))
    loop.append(tmp_path, rows.take(), 0)
    loop.create_table(con, [tmp_path])
    assert con.execute("SELECT list(step ORDER BY step) FROM loop").fetchall() == [([0, 1, 3],)]


def test_rows_of_a_run_that_an_earlier_version_left_unfinished_are_read_without_phases(tmp_path: Path) -> None:
    rows = Loop()
    for step in range(3):
        rows.add(row(step, 5))
    numbers = np.frombuffer(rows.take(), "<i8").reshape(3, -1)
    (tmp_path / "loop2.rows").write_bytes(numbers[:, :-3].tobytes())
    con = table.connect()
    assert loop.create_table(con, [tmp_path]) == []
    assert con.execute("SELECT list(step ORDER BY step), count(dur_ns), count(forward_ns) FROM loop").fetchall() == [
        ([0, 1, 2], 3, 0)
    ]


def test_a_damaged_file_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "loop.parquet").write_bytes(b"PAR1 no more")
    con = table.connect()
    [said] = loop.create_table(con, [tmp_path])
    assert "loop.parquet" in said
    assert con.execute("SELECT count(*) FROM loop").fetchall() == [(0,)]


def test_a_loop_of_a_version_that_counted_no_page_faults_has_none_and_not_zero(tmp_path: Path) -> None:
    con = stored(tmp_path / "now", row(0, 9), row(1, 9))
    (tmp_path / "before").mkdir()
    con.execute("CREATE TABLE earlier AS SELECT * EXCLUDE (faults, system_ns) FROM loop")
    table.write_parquet(con, "earlier", tmp_path / "before" / "loop.parquet")
    assert loop.create_table(con, [tmp_path / "before"]) == []
    assert con.execute("SELECT step, faults, system_ns FROM loop ORDER BY step").fetchall() == [
        (0, None, None),
        (1, None, None),
    ]


def test_page_faults_are_those_of_memory_that_is_touched_anew() -> None:
    usage = Usage()
    assert usage.read() == (UNKNOWN, UNKNOWN), "since when is not known"
    before = usage.read()
    pages = 4096
    for _ in range(2):
        new = mmap.mmap(-1, pages * mmap.PAGESIZE)
        for page in range(0, len(new), mmap.PAGESIZE):
            new[page] = 1
        new.close()
    faults, system_ns = usage.read(2)
    assert before[0] < pages <= faults < 2 * pages
    assert 0 < system_ns < 10**9
    usage.forget()
    assert usage.read() == (UNKNOWN, UNKNOWN), "xsp worked in between"


def test_a_long_loop_is_folded_and_keeps_its_time_and_its_recorded_steps() -> None:
    rows, steps = Loop(), UNFOLDED_ROWS + 5000
    for step in range(steps):
        recorded = step % 1000 == 999
        rows.add(row(step, MS, rung=M if recorded else BARE, steady=int(not recorded), before_ns=0))
    held = [LoggedStep(*each) for each in _whole(rows.take())]
    assert sum(each.steps for each in held) == steps
    assert sum(each.steps * each.dur_ns for each in held) == steps * MS
    assert sum(each.rung == M for each in held) == steps // 1000
    folded = [each for each in held if each.steps > 1]
    assert max(each.steps * each.dur_ns for each in folded) <= FOLDED_NS + MS
    assert len(held) < UNFOLDED_ROWS + 200
    assert {(each.faults, each.system_ns) for each in folded} == {(3, 40)}


def test_recorded_steps_in_a_row_are_not_folded() -> None:
    rows = Loop()
    for step in range(UNFOLDED_ROWS + 9):
        rows.add(row(step, 9, rung=M if step >= UNFOLDED_ROWS + 4 else BARE, steady=int(step < UNFOLDED_ROWS + 4)))
    held = [LoggedStep(*each) for each in _whole(rows.take())]
    assert [(each.step - UNFOLDED_ROWS, each.steps) for each in held[UNFOLDED_ROWS:]] == [
        (0, 4),
        *((n, 1) for n in range(4, 9)),
    ]


def test_what_is_unknown_of_a_step_is_folded_into_no_mean() -> None:
    rows = Loop()
    for step in range(UNFOLDED_ROWS + 30):
        rows.add(row(step, 9, faults=UNKNOWN if step % 3 == 0 else 6, system_ns=UNKNOWN if step % 3 == 0 else 8))
    held = [LoggedStep(*each) for each in _whole(rows.take())]
    assert {(each.faults, each.system_ns) for each in held} == {(UNKNOWN, UNKNOWN), (6, 8)}


def test_steps_that_were_timed_in_stretches_keep_their_times_when_they_are_folded() -> None:
    rows = Loop()
    for step in range(UNFOLDED_ROWS):
        rows.add(row(step, MS))
    rows.take()
    for place in range(12):
        rows.add(row(UNFOLDED_ROWS + 1000 * place, 7000, steps=1000, before_ns=1000, faults=3, system_ns=10))
    rows.add(row(UNFOLDED_ROWS + 12000, 500_000, steady=0))
    held = [LoggedStep(*each) for each in _whole(rows.take())]
    assert sum(each.steps for each in held) == 12001
    assert {each.dur_ns for each in held[:-1]} == {7000}
    assert {(each.before_ns, each.faults, each.system_ns) for each in held[:-1]} == {(1000, 3, 10)}
    assert (held[-1].steps, held[-1].dur_ns) == (1, 500_000)


def test_several_unknown_values_in_turn_are_folded_into_no_mean() -> None:
    rows = Loop()
    for step in range(UNFOLDED_ROWS + 30):
        unknown = step % 10 < 5
        rows.add(row(step, 9, faults=UNKNOWN if unknown else 6, system_ns=UNKNOWN if unknown else 8))
    held = [LoggedStep(*each) for each in _whole(rows.take())]
    assert {(each.faults, each.system_ns) for each in held} == {(UNKNOWN, UNKNOWN), (6, 8)}
    assert {each.steps for each in held[UNFOLDED_ROWS:]} == {5}


def _whole(content: bytes) -> list[tuple[int, ...]]:
    import array

    values = array.array("q", content)
    width = len(LoggedStep._fields)
    return [tuple(values[place : place + width]) for place in range(0, len(values), width)]


# --- figures --------------------------------------------------------------------------------------------------


def trace(rows: list[dict[str, Any]], kinds: list[dict[str, Any]] | None = None, **run: Any) -> xsp.Trace:
    """Return a trace of three recorded steps of 2 ms (numbers 1000 to 1002), with a loop of bare ones beside them."""
    recorded = [
        span
        for step in range(1000, 1003)
        for span in spans("step s 0-2000 batch_size=8\nforward Net 0-1900 batch_size=8", step=step, rung=M)
    ]
    told = [{"step": step, "rung": M, "steady": False, "dur_ns": 2 * MS, "samples": 8} for step in range(1000, 1003)]
    known = [{"kind": 0, "name": "Net 8", "batch_source": "input", "batch_size": 8, "steps": len(rows)}]
    return with_loop(trace_of(recorded, {"kinds": kinds or known, **run}), [*rows, *told])


def bare(count: int, dur_ms: float = 1.0, first: int = 0, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"step": first + step, "dur_ns": dur_ms * MS * (1 + step % 3 / 1000), "samples": 8, **fields}
        for step in range(count)
    ]


def answer(analysis: Any, of: xsp.Trace) -> dict[str, Any]:
    found = analysis(of)
    return dict(zip(found.columns, found.fetchall()[0], strict=True))


def test_a_step_takes_what_steady_bare_steps_take_and_the_loop_what_an_iteration_does() -> None:
    found = answer(A1, trace(bare(60, before_ns=21 * MS, data_ns=20 * MS)))
    assert found["latency_ms"] == pytest.approx(1.001, abs=0.002)
    assert found["low_ms"] <= 1.001 <= found["high_ms"]
    assert found["samples_per_s"] == pytest.approx(8 / 0.001001, rel=0.01)
    assert found["loop_ms"] == pytest.approx(22.001, abs=0.01)
    assert found["loop_samples_per_s"] == pytest.approx(8 / 0.022, rel=0.01)


def test_the_loop_tells_page_faults_of_an_iteration_and_nothing_where_none_were_counted() -> None:
    counted = [*bare(10), *bare(30, first=100, faults=600.0, system_ns=0.5 * MS)]
    found = answer(program_loop, trace(counted))
    assert (found["page_faults"], found["system_ms"]) == (600, 0.5), "of the steps that were counted"
    found = answer(program_loop, trace(bare(10)))
    assert (found["page_faults"], found["system_ms"]) == (None, None)


def test_steps_right_after_recorded_ones_tell_nothing_where_there_are_others() -> None:
    cold = bare(30, dur_ms=5, first=100, steady=False)
    found = answer(program_loop, trace([*bare(10), *cold]))
    assert found["iteration_ms"] == pytest.approx(1.001, abs=0.01)
    assert (found["steps"], found["recorded"], found["figures_from"]) == (43, 3, "steady")
    alone = trace(cold)
    assert answer(program_loop, alone)["figures_from"] == "bare"
    beside = trace([*bare(10, steady=False), *bare(30, dur_ms=5, first=100, steady=None)])
    (own,) = iterations(beside)
    assert own.mean_ns == pytest.approx(1.001e6, abs=1e4), "nor do those beside which a step was stored"
    found = answer(program_loop, beside)
    assert found["figures_from"] == "bare"
    assert (found["iteration_ms"], found["samples_per_s"]) == (None, None), "they are short, and may take twice as long"
    assert any("few undisturbed steps" in finding.text for finding in health(alone))


def test_what_is_rare_and_long_counts_in_the_loop() -> None:
    rows = [*bare(99), {"step": 99, "dur_ns": MS, "before_ns": 1000 * MS, "samples": 8}]
    assert answer(program_loop, trace(rows))["iteration_ms"] == pytest.approx(11.0, abs=0.1)


def test_the_figures_are_of_the_kind_that_takes_most_time_and_others_are_said() -> None:
    kinds = [{"kind": 0, "name": "decode", "steps": 50}, {"kind": 1, "name": "prefill", "steps": 10}]
    found = trace([*bare(50), *bare(10, dur_ms=30, first=100, kind=1)], kinds)
    assert found.kind == 0, "no step of the heaviest kind was recorded"
    said = [finding for finding in health(found) if finding.subject == "kinds"]
    assert any("prefill (8" in finding.text for finding in said)
    assert any("no step of kind prefill was recorded; 10 ran" in finding.text for finding in said)


def test_ranks_have_a_row_each_and_the_job_has_the_sum_of_their_throughputs() -> None:
    ranks = [{"rank": rank, "kinds": [{"kind": 0, "name": "Net 8"}]} for rank in range(2)]
    rows = [*bare(20), *bare(20, dur_ms=2, rank=1)]
    found = program_loop(trace(rows, ranks=ranks))
    table_ = [dict(zip(found.columns, each, strict=True)) for each in found.fetchall()]
    assert [each["scope"] for each in table_] == ["job of 2 ranks", "rank 0", "rank 1"]
    assert table_[0]["samples"] == 16
    assert table_[0]["samples_per_s"] == pytest.approx(16 / 0.002002, rel=0.01), "the slowest rank holds the others"


def letters(of: xsp.Trace) -> tuple[str, set[str]]:
    found = health(of)
    return grade(found).letter, {finding.subject for finding in found if finding.best_grade != "A"}


@pytest.mark.parametrize(
    ("rows", "subject"),
    [
        (bare(60, before_ns=21 * MS, data_ns=20 * MS), "data"),
        (bare(60, before_ns=2 * MS), "loop"),
        ([*bare(40), *bare(40, dur_ms=1.5, first=40)], "drift"),
        ([*bare(6), *bare(9, dur_ms=1.5, first=40)], "drift"),
        ([*bare(40), *bare(20, first=100, kind=1)], "kinds"),
        ([], "loop"),
    ],
)
def test_the_grade_judges_the_headline(rows: list[dict[str, Any]], subject: str) -> None:
    letter, subjects = letters(trace(rows))
    assert letter > "A"
    assert subject in subjects


@pytest.mark.slow
@pytest.mark.parametrize("cold", [3, 8, 11])
def test_first_steps_that_warm_up_are_no_drift(cold: int) -> None:
    rows = [*bare(cold, dur_ms=2.5), *bare(33 - cold, first=cold)]
    of = trace(rows)
    found = {finding.subject: finding.text for finding in health(of)}
    assert "drift" not in found
    if cold > 3:
        assert f"the first {cold} of the 33 unrecorded steps take 2.5 times as long as the others" in found["warm-up"]
    late = letters(trace([*bare(30, dur_ms=1.5), *bare(60, first=30)]))
    assert "drift" in late[1], "what changes after 30 steps"
    slowly = letters(trace([each for step in range(33) for each in bare(1, dur_ms=3 - step / 20, first=step)]))
    assert "drift" in slowly[1], "what changes all the time"


def test_without_steady_steps_a_short_step_takes_what_bare_ones_do_not_what_recorded_ones_do() -> None:
    rows = bare(40, dur_ms=0.3, steady=False)
    recorded = spans("step s 0-900\nforward Net 0-800", step=99, rung=M)
    of = with_loop(trace_of(recorded), [*rows, {"step": 99, "dur_ns": 0.9 * MS, "rung": M, "steady": False}])
    found = answer(A1, of)
    assert found["latency_ms"] == pytest.approx(0.3, rel=0.01)
    assert found["low_ms"] == pytest.approx(0.15, rel=0.01), "they may take twice as long as steady ones"
    assert found["high_ms"] == pytest.approx(0.3, rel=0.01)
    assert found["loop_ms"] is None
    said = next(finding for finding in health(of) if finding.subject == "loop")
    assert "A1's latency may be up to twice that of the step" in said.text
    assert said.best_grade == "B"


@pytest.mark.slow
def test_the_latency_may_be_less_by_what_xsp_does_between_steps_and_in_stretches_it_does_nothing() -> None:
    usual, beside = (answer(A1, trace(bare(60, **fields))) for fields in ({}, {"own_ns": 65_000}))
    assert beside["latency_ms"] == usual["latency_ms"]
    assert usual["low_ms"] - beside["low_ms"] == pytest.approx(0.065)
    assert usual["high_ms"] == beside["high_ms"]
    together = answer(A1, trace(bare(60, own_ns=65_000, steps=9)))
    assert together["low_ms"] == pytest.approx(usual["low_ms"])
    most = answer(A1, trace(bare(60, own_ns=9 * MS)))
    assert usual["low_ms"] - most["low_ms"] == pytest.approx(0.25, rel=0.01), "at most a quarter of the step"


def test_short_steps_are_too_long_by_at_most_what_has_faded_since_a_recorded_one() -> None:
    """Steps of 2.3 ms, of which those right after recorded ones take 0.1 ms longer."""
    near, later = bare(8, dur_ms=2.4, steady=None), bare(12, dur_ms=2.3, first=20, steady=False)
    of = trace([*near, *later])
    (own,) = iterations(of)
    assert own.disturbed == 1
    assert own.excess_ns == pytest.approx(0.1 * MS, rel=0.05)
    assert own.is_known
    main = account.of(of).main
    assert main is not None
    assert main.time.ms == pytest.approx(2.3, rel=0.01)
    assert main.time.low_ms == pytest.approx(2.2, rel=0.01)
    (unseen,) = iterations(trace(bare(12, dur_ms=2.3, steady=False)))
    assert unseen.excess_ns == pytest.approx(1.15 * MS, rel=0.01), "nothing shows how long a disturbance lasts"
    assert not unseen.is_known


@pytest.mark.parametrize(
    ("high_ms", "grade_of_time"), [(140, None), (149, None), (151, "B"), (199, "B"), (201, "C"), (399, "C"), (401, "D")]
)
def test_the_grade_follows_from_the_ratio_of_the_ends_of_an_interval(
    high_ms: float, grade_of_time: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = trace(bare(22))
    accounted = account.of(of)
    (main, *others) = accounted.iterations
    time = replace(main.time, low_ms=100.0, high_ms=float(high_ms))
    changed = replace(accounted, iterations=(replace(main, time=time), *others))
    monkeypatch.setattr(account, "of", lambda _: changed)
    found = [finding for finding in health(of) if finding.subject == "latency"]
    assert [finding.best_grade for finding in found] == ([grade_of_time] if grade_of_time else [])
    assert all(f"between 100 ms and {high_ms} ms: they vary" in finding.text for finding in found)


def test_a_program_that_grows_is_not_said_to_be_slowed_by_recording() -> None:
    times = [10 + step / 5 + (step % 3) / 10 for step in range(60)]
    rows = [each for step, ms in enumerate(times) for each in bare(1, dur_ms=ms, first=step)]
    rows[20]["rung"] = Level.OP
    found = {finding.subject: finding.text for finding in health(trace(rows))}
    assert "longer at the run's end" in found["drift"]
    assert "since operators" not in found.get("loop", "")


def test_steps_that_hardly_tell_what_a_step_takes_are_graded_down() -> None:
    lengths = (12, 100, 55, 57, 90, 20, 60, 70, 15, 85, 40)
    few = [each for place, ms in enumerate(lengths) for each in bare(2, dur_ms=ms, first=2 * place)]
    found = {finding.subject: finding for finding in health(trace(few))}
    assert "from 22 iterations the time of a step is only known to be between" in found["latency"].text
    assert found["latency"].best_grade == "C", "it may be three times as long"
    assert "latency" not in letters(trace(bare(22)))[1]


def test_a_guessed_batch_size_and_a_program_made_longer_are_said() -> None:
    kinds = [{"kind": 0, "name": "Net", "batch_source": "guess", "batch_size": 32, "steps": 9}]
    budget = {"program_percent": 40.0, "spent_ns": 3 * 10**9, "start_ns": 10**9, "end_ns": 10**9}
    found = {finding.subject: finding for finding in health(trace(bare(60), kinds, budget=budget))}
    assert "batch_size=N" in found["samples"].text
    assert found["samples"].best_grade == "B"
    assert "1.4 times as long" in found["profiling"].text
    assert "--budget 2%" in found["profiling"].text


def test_cold_caches_where_steps_are_recorded_widen_intervals_and_in_the_end_take_true_times_away() -> None:
    def before_recorded(slower: float) -> xsp.Trace:
        recorded = [
            span
            for step in range(10)
            for span in spans("step s 0-2000\nforward Net 0-1900", step=100 * step + 99, rung=M)
        ]
        rows: list[dict[str, Any]] = []
        for block in range(10):
            rows += bare(20, first=100 * block)
            rows.append({"step": 100 * block + 98, "dur_ns": slower * MS, "steady": False})
            rows.append({"step": 100 * block + 99, "dur_ns": 2 * MS, "rung": M, "steady": False})
        return with_loop(trace_of(recorded), rows)

    slightly, far = before_recorded(1.1), before_recorded(1.6)
    found = coldness(slightly.con)
    assert found is not None
    assert found.ratio == pytest.approx(1.1, rel=0.01)
    asked = "SELECT true_ns, true_lo_ns, cause FROM merged WHERE kind = 'forward'"
    ((true, low, _),) = slightly.sql(asked).fetchall()
    assert low < true / 1.05
    ((true, low, cause),) = far.sql(asked).fetchall()
    assert (true, low) == (None, None)
    assert "cold caches" in cause
    assert letters(far)[0] == "C"
    ((step,),) = far.sql("SELECT true_ns FROM merged WHERE kind = 'step'").fetchall()
    assert step == pytest.approx(1.001 * MS, rel=0.01), "the step itself is told by steady steps"


def test_what_idle_collectors_add_is_taken_off_the_steps_and_iterations_of_a_burst() -> None:
    text = "step s 0-100 collector=session\nforward Net 0-90\nmodule l 10-19"
    recorded = [span for step in range(5) for span in spans(text, step=200 + step, collector="modules")]
    in_loop = [{"step": 200 + n, "dur_ns": 100_000.0, "rung": int(Level.LAYER), "steady": False} for n in range(5)]
    rows = [{**each, "dur_ns": 80_000.0, "before_ns": 10_000.0, "own_ns": 0} for each in bare(9)]
    counted_singly = [{**each, "own_ns": 500} for each in rows]
    together = [{**each, "steps": 20} for each in rows]
    kind = {"kind": 0, "name": "Net", "hooks_ns": 2_000.0}
    # on caches that are evicted by four fifths: what hooks take, and nearly as much for what they evict
    for own_rows, expected, off in ((counted_singly, 0.08, 0), (rows, 0.0764, 0.0036), (together, 0.0764, 0.0036)):
        trace = with_loop(trace_of(recorded, {"kinds": [kind]}), own_rows + in_loop)
        [(latency, low, high)] = A1(trace).select("latency_ms, low_ms, high_ms").fetchall()
        evicted = 0.0005 if own_rows is counted_singly else 0.0
        assert (latency, low, high) == pytest.approx((expected, expected - off - evicted, expected + off))
        assert trace.rungs[0].step_ns == pytest.approx(expected * MS)
        steps = sum(row.get("steps", 1) for row in own_rows)
        assert idle_hooks_ns(trace.con, trace.run) == pytest.approx(3_600 * steps, rel=0.01)
        [own] = iterations(trace)
        assert own.interval is not None
        stated = own.mean_ns, own.interval.low, own.interval.high, own.step_ns, own.between_ns
        iteration = expected + 0.01
        assert stated == pytest.approx(
            tuple(MS * each for each in (iteration, iteration - off, iteration + off, expected, 0.01)), rel=0.003
        )
    unknown = with_loop(trace_of(recorded, {"kinds": [{**kind, "hooks_ns": None}]}), together + in_loop)
    assert unknown.rungs[0].step_ns == pytest.approx(80_000)


@pytest.mark.parametrize(("waited_ms", "ratio"), [(17.0, None), (0.05, 3.0)])
def test_launches_of_a_step_that_waits_for_the_device_are_not_cold_steps(waited_ms: float, ratio: float | None) -> None:
    text = "step s 0-2000\nlaunch cudaLaunchKernel 10-20 correlation_id=1\nkernel k 100-1900 correlation_id=1"
    rows: list[dict[str, Any]] = []
    for turn in range(12):
        rows += bare(8, dur_ms=0.1, first=10 * turn)
        rows.append({"step": 10 * turn + 8, "dur_ns": 0.3 * MS, "steady": False})
        waited = {"step": 10 * turn + 9, "dur_ns": 2 * MS, "rung": 70, "steady": False, "before_ns": waited_ms * MS}
        rows.append(waited)
    found = coldness(with_loop(trace_of(spans(text, step=9, rung=70)), rows).con)
    assert (found.ratio if found is not None else None) == (ratio if ratio is None else pytest.approx(ratio, rel=0.01))


def test_the_interval_of_an_iteration_counts_a_row_as_often_as_it_has_steps() -> None:
    [own] = iterations(trace([*bare(60), *bare(20, dur_ms=3, first=2000, steps=500)]))
    assert own.mean_ns == pytest.approx(3 * MS, rel=0.01)
    assert own.interval is not None
    assert 2.9 * MS < own.interval.low <= own.mean_ns <= own.interval.high


# --- over OTLP ------------------------------------------------------------------------------------------------

RUN = Otel.of({"trace_id": "ab" * 16, "span_id": "cd" * 8})


def stored(tmp_path: Path, *rows: LoggedStep) -> Any:
    """Return an engine whose table `loop` holds rows that went to the disk."""
    kept = Loop()
    for each in rows:
        kept.add(each)
    tmp_path.mkdir(exist_ok=True)
    loop.append(tmp_path, kept.take(), 0)
    con = table.connect()
    loop.create_table(con, [tmp_path])
    return con


def arrived(sent: list[Span]) -> Any:
    """Return an engine with an empty loop, and spans that arrived."""
    con = table.connect()
    loop.create_table(con, [])
    table.create(con, "arrived")
    table.insert(con, "arrived", sent)
    return con


def steps_of(con: Any) -> list[Any]:
    return [tuple(row) for row in con.execute("SELECT * FROM loop ORDER BY rank, start_ns").fetchall()]


def test_rows_travel_in_spans_below_the_run_and_come_back_as_they_were(tmp_path: Path) -> None:
    first = row(0, 7, before_ns=UNKNOWN, samples=UNKNOWN, rung=M, steady=0, status=Status.ERROR)
    others = (row(step, 9, rank=step % 2, steady=step % 3 - 1) for step in range(1, 2 * loop.ROWS_PER_SPAN))
    here = stored(tmp_path, first, *others)
    sent = list(loop.spans(here, RUN))
    assert [(each.rank, each.parent_id, each.kind) for each in sent] == [(0, "cd" * 8, "loop"), (1, "cd" * 8, "loop")]
    assert (sent[0].start_ns, sent[0].dur_ns) == (0, 1000 * (2 * loop.ROWS_PER_SPAN - 2) + 9)
    there = arrived([*reversed(sent), spans("step A 0-10")[0]])
    assert loop.add_received(there, "arrived") == 0
    assert steps_of(there) == steps_of(here)


def test_a_loop_that_is_sent_again_when_it_has_grown_counts_as_it_is_last(tmp_path: Path) -> None:
    early = stored(tmp_path / "early", row(0, 9), row(1, 9))
    late = stored(tmp_path / "late", row(0, 9, steps=2), row(2, 9))
    for order in ((early, late), (late, early)):
        there = arrived([])
        for each in order:
            table.create(there, "arrived")
            table.insert(there, "arrived", list(loop.spans(each, RUN)))
            assert loop.add_received(there, "arrived") == 0
        assert steps_of(there) == steps_of(late)


@pytest.mark.slow
def test_the_parts_of_a_loop_may_be_taken_one_after_the_other_in_any_order(tmp_path: Path) -> None:
    whole = stored(tmp_path / "late", *(row(step, 9) for step in range(3 * loop.ROWS_PER_SPAN)))
    early = stored(tmp_path / "early", *(row(step, 9, samples=4) for step in range(loop.ROWS_PER_SPAN)))
    parts = list(loop.spans(whole, RUN))
    assert len(parts) == 3
    for order in itertools.permutations(parts):
        there = arrived([])
        for each in ([*loop.spans(early, RUN)], *([part] for part in order), [*parts, _without_rows(parts[0])]):
            table.create(there, "arrived")
            table.insert(there, "arrived", each)
            assert loop.add_received(there, "arrived") == 0
        assert steps_of(there) == steps_of(whole)


def test_rows_of_a_rank_that_was_started_again_replace_all_rows_of_its_first_life(tmp_path: Path) -> None:
    first = stored(tmp_path / "first", *(row(step, 9) for step in range(20)))
    again = stored(tmp_path / "again", *(row(step, 9, start_ns=10**6 + 1000 * step, samples=4) for step in range(5)))
    there = arrived([])
    for each in (first, again):
        table.create(there, "arrived")
        table.insert(there, "arrived", list(loop.spans(each, RUN)))
        assert loop.add_received(there, "arrived") == 0
    assert steps_of(there) == steps_of(again)


def _without_rows(part: Span) -> Span:
    said = json.loads(json.loads(part.attributes or "")["xsp.loop"])
    empty = {name: [] if isinstance(value, list) else value for name, value in said.items()}
    return part._replace(span_id="ef" * 8, attributes=json.dumps({"xsp.loop": json.dumps(empty)}))


def test_rows_of_a_sender_that_counts_no_page_faults_arrive_without(tmp_path: Path) -> None:
    (good,) = loop.spans(stored(tmp_path, row(0, 9)), RUN)
    said = json.loads(json.loads(good.attributes or "")["xsp.loop"])
    del said["faults"], said["system_ns"]
    there = arrived([good._replace(attributes=json.dumps({"xsp.loop": json.dumps(said)}))])
    assert loop.add_received(there, "arrived") == 0
    assert there.execute("SELECT step, faults, system_ns FROM loop").fetchall() == [(0, None, None)]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"xsp.loop": 5}',
        '{"xsp.loop": "[1]"}',
        '{"xsp.loop": "{\\"step\\": 5}"}',
        '{"xsp.loop": "' + "[" * 100_000 + '"}',
        None,
    ],
)
def test_a_span_that_holds_no_rows_of_the_loop_is_counted_and_left_out(tmp_path: Path, text: str | None) -> None:
    (good,) = loop.spans(stored(tmp_path, row(0, 9)), RUN)
    there = arrived([good, good._replace(span_id="ef" * 8, attributes=text)])
    assert loop.add_received(there, "arrived") == 1
    assert len(steps_of(there)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("step", 1 << 70),
        ("steps", True),
        ("steps", 0),
        ("dur_ns", float("inf")),
        ("dur_ns", 10**400),
        ("dur_ns", "9"),
        ("before_ns", -5),
        ("steady", 1),
        ("status", "fine"),
        ("status", []),
        ("start_ns", None),
    ],
)
def test_values_that_no_row_of_the_loop_has_are_left_out(tmp_path: Path, name: str, value: Any) -> None:
    (good,) = loop.spans(stored(tmp_path, row(0, 9)), RUN)
    said = json.loads(json.loads(good.attributes or "")["xsp.loop"])
    bad = good._replace(attributes=json.dumps({"xsp.loop": json.dumps({**said, name: [value]})}))
    there = arrived([bad])
    assert loop.add_received(there, "arrived") == 1
    assert steps_of(there) == []


def test_steady_steps_near_recorded_ones_widen_the_interval_downwards() -> None:
    steps = [BareStep(step, 110.0 if step % 12 < 4 else 100.0, None, position=step % 12 + 1) for step in range(48)]
    assert settling_ns(steps) == pytest.approx(10 * 4 / 12)
    assert settling_ns([each._replace(position=0) for each in steps]) == 0  # nothing tells which are near
    rows = [BareStep(step, 110.0 if step % 12 < 4 else 100.0, None, position=step % 12 + 1) for step in range(24)]
    rows += [BareStep(1000 * step, 100.0, None, position=100, steps=40) for step in range(1, 7)]
    assert settling_ns(rows) == pytest.approx(10 * 8 / 264), "a row of many steps has as many that are far"


def test_a_row_of_many_steps_weighs_as_much_as_these_in_all_figures_of_the_step() -> None:
    rows = [*bare(60), *bare(10, dur_ms=3, first=2000)]
    for place, each in enumerate(rows[60:]):
        each |= {"step": 2000 + 500 * place, "steps": 500}
    of = trace([{**each, "dur_ns": float(round(each["dur_ns"], -5))} for each in rows])
    found = answer(A1, of)
    assert found["latency_ms"] == pytest.approx(3, rel=0.01)
    assert found["median_ms"] == 3
    assert 2.5 < found["low_ms"] <= found["latency_ms"] <= found["high_ms"] <= 3.001
    assert found["steps"] == 5060
    assert (of.rungs[0].steps, of.rungs[0].step_ns) == (5060, pytest.approx(3 * MS, rel=0.01))
    steady = series.steps(of).steady
    assert steady is not None
    assert series.figure(steady.steps) == pytest.approx(3 * MS, rel=0.01)
    assert series.figure(steady.iterations) == pytest.approx(3 * MS, rel=0.01)
    assert steady.steps.repeats == 5060
    assert len(steady.steps.values) == 10, "repeats of about equal weight"


def test_where_two_rows_have_nearly_all_steps_the_interval_holds_both() -> None:
    rows = [*bare(10), {"step": 100, "dur_ns": 2.0 * MS, "samples": 8, "steps": 9000},
            {"step": 10_000, "dur_ns": 2.2 * MS, "samples": 8, "steps": 9000}]  # fmt: skip
    found = answer(A1, trace(rows))
    assert found["latency_ms"] == pytest.approx(2.1, rel=0.01)
    assert found["low_ms"] <= found["latency_ms"] <= found["high_ms"]
    assert found["low_ms"] < found["high_ms"]


def test_short_steps_that_were_disturbed_weigh_by_their_number_too() -> None:
    rows = [*bare(9, dur_ms=0.3, steady=False), *bare(9, dur_ms=0.2, first=1000, steady=False, steps=100)]
    for place, each in enumerate(rows[9:]):
        each["step"] = 1000 + 100 * place
    recorded = spans("step s 0-900\nforward Net 0-800", step=99, rung=M)
    of = with_loop(trace_of(recorded), [*rows, {"step": 99, "dur_ns": 0.9 * MS, "rung": M, "steady": False}])
    found = answer(A1, of)
    assert found["latency_ms"] == pytest.approx(0.2, rel=0.01)
    assert found["median_ms"] == pytest.approx(0.2, rel=0.01)
    assert found["steps"] == 808, "the first row of each came right after a recorded step, or is the first"


def test_the_steps_that_recorded_ones_are_held_against_weigh_by_their_number() -> None:
    recorded = [
        span
        for block in range(10)
        for span in spans("step s 0-2000\nforward Net 0-1900", step=1000 * block + 999, rung=M)
    ]
    rows = [{"step": 1000 * block + 998, "dur_ns": 1.2 * MS, "steady": False} for block in range(10)]
    rows += [{"step": 1000 * block + 999, "dur_ns": 2 * MS, "rung": M, "steady": False} for block in range(10)]
    rows += [each for block in range(10) for each in bare(20, dur_ms=1.2, first=1000 * block)]
    rows += [{"step": 1000 * block + 100, "dur_ns": 1.0 * MS, "steps": 800} for block in range(10)]
    found = coldness(with_loop(trace_of(recorded), rows).con)
    assert found is not None
    assert found.ratio == pytest.approx(1.2)


def test_of_several_batch_sizes_the_step_is_that_of_most_steps() -> None:
    last = bare(6, 0.5, first=100, samples=5)
    found = Answers(trace([*bare(60), *last]))
    assert [(row["batch_size"], row["steps"]) for row in found["A1"].dicts()] == [(5, 6), (8, 60)]
    step = latency(found)
    assert step is not None
    assert (step.ms.value, step.steps) == (pytest.approx(1.001, abs=0.002), 60)
    shown = {name: value for name, value, _ in headline.headline(found, [])}
    assert shown["latency of a step"].startswith("1.0")


def test_the_loop_of_a_rank_without_recorded_steps_is_not_that_of_the_figures() -> None:
    recorded = [
        row for step in range(3) for row in spans("step s 0-2000\nforward Net 0-1900", step=step, rung=M, rank=1)
    ]
    rows = [
        {"step": step, "rank": rank, "dur_ns": (1 + 8 * rank) * MS, "before_ns": 0.0}
        for rank in (0, 1)
        for step in range(3, 40)
    ]
    of = with_loop(trace_of(recorded), [*rows, *({"step": step, "rank": 1, "rung": M, "steady": False, "dur_ns": 9 * MS}
                                                for step in range(3))])  # fmt: skip
    assert of.rank == 1
    assert answer(A1, of)["loop_ms"] == pytest.approx(9)
    steady = series.steps(of).steady
    assert steady is not None
    assert set(steady.steps.values) == {9 * MS}


def test_the_job_has_the_number_of_a_kind_on_its_lowest_rank() -> None:
    recorded = [
        row for step in range(3) for rank in (0, 1) for row in spans("step s 0-2000\nforward Net 0-1900", step=step,
                                                                     rung=M, rank=rank)
    ]  # fmt: skip
    names = ({"kind": 0, "name": "train"}, {"kind": 1, "name": "eval"})
    ranks = [{"rank": 0, "kinds": names}, {"rank": 1, "kinds": [{**each, "kind": 1 - each["kind"]} for each in names]}]
    rows = [
        {"step": 2 * step + kind, "rank": rank, "kind": kind, "dur_ns": (1 + rank) * MS, "before_ns": 0.0}
        for rank in (0, 1)
        for kind in (0, 1)
        for step in range(30)
    ]
    found = program_loop(with_loop(trace_of(recorded, {"kinds": names, "ranks": ranks}), rows))
    jobs = found.filter("scope LIKE 'job%'").project("kind, name").order("kind").fetchall()
    assert jobs == [(0, "train"), (1, "eval")]
