"""Page faults of memory that is returned and requested again: their cost, and when they are not reported."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp import advise
from xsp.advise import Advice, Interval, Needs, calls, registry
from xsp.analyses import program_loop
from xsp.bound import recordedcalls
from xsp.comparison.comparable import differences
from xsp.schema import Level
from xsp.store.loop import BARE
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000
STEP = """
    step s 0-10000
    forward Net 10-9900
    module net 20-9890 type=Net
    module net.a 30-4900 type=Linear
    op aten::linear 40-4890
    module net.b 4910-9880 type=Linear
    op aten::linear 4920-9870
"""


def trace_with_faults(
    faults: float | None, system_ms: float | None, step: str = STEP, bare_ms: float = 10.0, **run: Any
) -> xsp.Trace:
    """Return a trace of three recorded steps of 10 ms, in a loop of bare steps with this number of page faults."""
    machine = {"torch_threads": 4, "cores": 4, "system": "Linux"}
    description = {"machine": machine, "kinds": [{"kind": 0, "name": "Net"}], **run}
    rows = [row for number in range(3) for row in spans(step, step=number)]
    system_ns = None if system_ms is None else system_ms * MS
    bare = {"rung": BARE, "faults": faults, "system_ns": system_ns}
    loop: list[dict[str, Any]] = [{"step": number, "dur_ns": 10.0 * MS, "rung": Level.OP} for number in range(3)]
    loop += [{"step": number, "dur_ns": bare_ms * MS, **bare} for number in range(3, 20)]
    return with_loop(trace_of(rows, description), loop)


def report_of(faults: float | None, system_ms: float | None, step: str = STEP, **run: Any) -> advise.AdviceReport:
    """Return the advice on such a trace."""
    return advise.of(trace_with_faults(faults, system_ms, step, **run), max_needs=Needs.TRACE)


def piece(result: advise.AdviceReport, name: str = "page-faults") -> Advice | None:
    return next((entry for entry in result.advice if entry.question == name), None)


def test_the_gain_is_between_the_time_of_one_thread_and_of_all() -> None:
    result = piece(report_of(4000, 8.0))
    assert result is not None
    assert (result.gain.low, result.gain.value, result.gain.high) == pytest.approx((2.0, 4.0, 8.0))
    assert result.of_step_percent == pytest.approx(40, rel=0.01)
    assert "4,000 page faults" in result.what
    assert (result.trial, result.at_most) == ("malloc=keep", False)
    assert "MALLOC_TOP_PAD_" in result.do


def test_the_gain_is_not_more_than_the_step() -> None:
    result = piece(report_of(40_000, 80.0))
    assert result is not None
    assert result.gain.high == pytest.approx(10, rel=0.01)


def test_what_is_kept_for_gradients_that_nothing_uses_goes_before_the_allocator() -> None:
    """A validation without `no_grad` took 48 ms instead of 33 ms: recording is nothing of it, new memory is."""
    recorded = STEP + "".join(f"op aten::mul {50 + n}-{51 + n} sequence_nr={n}\n" for n in range(8))
    report = report_of(4000, 8.0, recorded)
    first, second = (entry for entry in report.advice if entry.question in ("gradients", "page-faults"))
    assert (first.question, first.at_most) == ("gradients", False)
    assert first.gain.value == pytest.approx(4.0 + 8 * 0.0015)
    assert second.at_most
    assert second.do.startswith("first torch.inference_mode()")
    few = piece(report_of(100, 0.2, recorded), "gradients")
    assert few is None or few.gain.value < 0.1


def test_other_system_time_does_not_count() -> None:
    result = piece(report_of(400, 8.0))
    assert result is not None
    assert result.gain.high == pytest.approx(2.0), "5 µs a fault at most"


@pytest.mark.parametrize(("faults", "system_ms"), [(0, 0.0), (0, 8.0), (150, 0.7), (4000, 0.3)])
def test_few_or_cheap_faults_are_not_reported(faults: float, system_ms: float) -> None:
    result = report_of(faults, system_ms)
    assert piece(result) is None
    assert "page-faults" not in result.unanswered


def test_a_run_without_counts_leaves_the_question_unanswered() -> None:
    assert "did not count page faults" in report_of(None, None).unanswered["page-faults"]


def test_variables_of_glibc_are_named_only_on_linux() -> None:
    result = piece(report_of(4000, 8.0, machine={"torch_threads": 1, "cores": 1, "system": "Darwin"}))
    assert result is not None
    assert result.trial is None
    assert "MALLOC" not in result.do
    assert result.gain.low == result.gain.high == pytest.approx(8.0)


def test_many_page_faults_make_gains_from_timings_unknown() -> None:
    @advise.question("of-timings", "?", needs=Needs.BOUND)
    def of_timings(_: advise.AdviceContext) -> Iterator[Advice]:
        yield Advice("of-timings", "slow", (), Interval(3.0, 4.0, 5.0), False, 40.0, (), "change it")

    try:
        few_faults, many_faults = (
            advise.of(trace_with_faults(4000, ms), only=["of-timings"]).advice for ms in (2.0, 8.0)
        )
    finally:
        del registry.QUESTIONS["of-timings"]
    assert few_faults[0].gain_known
    assert not many_faults[0].gain_known
    assert "page faults" in many_faults[0].why[-1]


def test_a_bound_reports_the_system_time_of_the_measured_step() -> None:
    text, figure = recordedcalls.page_faults(trace_with_faults(4000, 8.0)) or ("", None)
    assert "4,000 in a step, 8 ms in the system" in text
    assert figure is not None
    assert 8e6 / 4 < figure.ns <= 8e6
    assert recordedcalls.page_faults(trace_with_faults(4000, 0.5)) is None
    assert recordedcalls.page_faults(trace_with_faults(None, None)) is None


@pytest.mark.slow
def test_a_comparison_reports_far_more_page_faults_on_one_side() -> None:
    few_faults, many_faults = trace_with_faults(100, 0.1), trace_with_faults(4000, 8.0)
    (result,) = differences([few_faults, few_faults], [many_faults])
    assert result == ("page faults", "100 in a step", "4,000")
    assert differences([many_faults], [trace_with_faults(5000, 9.0)]) == []
    assert differences([few_faults], [trace_with_faults(500, 0.5)]) == [], "too few to matter"
    assert differences([few_faults], [trace_with_faults(None, None)]) == [], "not counted is not none"


def test_calls_without_a_true_time_take_their_share_of_the_step() -> None:
    trace = trace_with_faults(0, 0.0, bare_ms=2.0)
    trace.con.execute("CREATE OR REPLACE TEMP TABLE merged AS SELECT * FROM merged")
    trace.con.execute("UPDATE merged SET true_ns = CASE WHEN kind = 'step' THEN raw_ns / 5 END")
    all_calls = list(calls.walk(advise.AdviceContext(trace)))
    times = {entry.name: entry.ns / MS for entry in all_calls if entry.is_op or entry.kind == "step"}
    assert times["s"] == pytest.approx(2.0)
    assert times["aten::linear"] == pytest.approx(0.99)


def test_operators_inside_a_phase_take_what_the_account_states_for_it_but_what_was_recorded_between_them() -> None:
    """Half of the optimizer's time was stated for its operators, which take all of it: other steps had been shorter."""
    step = (
        "step s 0-10000\nforward Net 10-2000\nop aten::linear 20-1990\nbackward backward 2000-4000\n"
        "op aten::mm 2000-4000\noptimizer SGD 4000-10000\nop aten::add_ 4100-6900\nop aten::sub_ 7000-9900"
    )
    trace = trace_with_faults(0, 0.0, step)
    trace.con.execute("CREATE OR REPLACE TEMP TABLE merged AS SELECT * FROM merged")
    trace.con.execute("UPDATE merged SET true_ns = raw_ns / 2 WHERE name IN ('aten::add_', 'aten::sub_')")
    times = {call.name: call.ns / MS for call in calls.walk(advise.AdviceContext(trace))}
    assert times["SGD"] == pytest.approx(6.0)
    assert times["aten::add_"] == pytest.approx(2.8)
    assert times["aten::sub_"] == pytest.approx(2.9)
    trace.con.execute("UPDATE merged SET true_ns = raw_ns / 3 WHERE kind <> 'iteration'")
    times = {call.name: call.ns / MS for call in calls.walk(advise.AdviceContext(trace))}
    assert times["SGD"] == pytest.approx(6.0), "that of iterations without recording, not that of a few recorded steps"
    assert times["s"] == pytest.approx(10.0)


@pytest.mark.slow
def test_returning_memory_is_no_stall() -> None:
    gap = STEP.replace("40-4890", "40-3390")
    stall = piece(report_of(0, 0.0, gap), "stall")
    assert stall is not None
    shorter = piece(report_of(5000, 10.0, gap), "stall")
    assert shorter is not None
    assert stall.gain.value - shorter.gain.value == pytest.approx(1.0, abs=0.15), "0.2 µs a page"
    assert "returning memory" in " ".join(shorter.why)
    assert piece(report_of(9000, 10.0, gap), "stall") is None


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="other systems count page faults otherwise")
def test_page_faults_of_a_real_program_are_counted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pages = 8192
    layer = torch.nn.Linear(8, 8).eval()

    def step() -> None:
        memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
        memory.close()
        layer(torch.ones(1, 8))

    with torch.inference_mode(), xsp.profile(out=tmp_path / "run", every=10) as prof:
        for _ in range(60):
            with prof.step():
                step()
    trace = xsp.load(tmp_path / "run")
    result = program_loop(trace)
    (row,) = (dict(zip(result.columns, entry, strict=True)) for entry in result.fetchall())
    assert pages <= row["page_faults"] < 1.5 * pages
    assert 0 < row["system_ms"] < row["iteration_ms"] * (os.cpu_count() or 1)


def test_calls_inside_another_one_take_no_longer_than_it() -> None:
    trace = trace_with_faults(0, 0.0)
    trace.con.execute("CREATE OR REPLACE TEMP TABLE merged AS SELECT * FROM merged")
    trace.con.execute("UPDATE merged SET true_ns = CASE WHEN name = 'net.a' THEN raw_ns / 5 ELSE raw_ns END")
    result = {entry.name: entry for entry in calls.walk(advise.AdviceContext(trace))}
    assert result["net.a"].ns / MS == pytest.approx(4.87 / 5)
    assert result["net.a"].children[0].ns / MS == pytest.approx(4.87 / 5), "it was recorded when all took longer"
    assert result["net.b"].children[0].ns / MS == pytest.approx(4.95)


def test_counts_of_another_rank_are_not_used() -> None:
    rows = [row for number in range(3) for rank in (0, 1) for row in spans(STEP, step=number, rank=rank)]
    loop = [
        {"step": number, "rank": rank, "dur_ns": 10.0 * MS, "rung": Level.OP if number < 3 else BARE,
         "faults": 4000.0 if rank else None, "system_ns": 8.0 * MS if rank else None}
        for rank in (0, 1)
        for number in range(20)
    ]  # fmt: skip
    machine = {"torch_threads": 4, "cores": 4, "system": "Linux"}
    result = advise.of(with_loop(trace_of(rows, {"machine": machine}), loop), only=["page-faults"])
    assert result.advice == ()
    assert "did not count page faults" in result.unanswered["page-faults"]
