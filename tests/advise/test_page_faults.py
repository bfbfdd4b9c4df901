"""Memory that goes back to the system and comes again: what its page faults cost, and when nothing is said of them."""

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


def counted(faults: float | None, system_ms: float | None, step: str = STEP, **run: Any) -> xsp.Trace:
    """Return a trace of three recorded steps of 10 ms, in a loop of bare ones with so many page faults."""
    machine = {"torch_threads": 4, "cores": 4, "system": "Linux"}
    told = {"machine": machine, "kinds": [{"kind": 0, "name": "Net"}], **run}
    rows = [row for number in range(3) for row in spans(step, step=number)]
    system_ns = None if system_ms is None else system_ms * MS
    bare = {"rung": BARE, "faults": faults, "system_ns": system_ns}
    loop = [
        {"step": number, "dur_ns": 10.0 * MS, **({"rung": Level.OP} if number < 3 else bare)} for number in range(20)
    ]
    return with_loop(trace_of(rows, told), loop)


def asked(faults: float | None, system_ms: float | None, step: str = STEP, **run: Any) -> advise.Advised:
    """Return what is said of such a trace."""
    return advise.of(counted(faults, system_ms, step, **run), most=Needs.TRACE)


def piece(found: advise.Advised, name: str = "page-faults") -> Advice | None:
    return next((each for each in found.advice if each.question == name), None)


def test_their_time_is_between_that_of_one_thread_and_that_of_all() -> None:
    found = piece(asked(4000, 8.0))
    assert found is not None
    assert (found.gain.low, found.gain.value, found.gain.high) == pytest.approx((2.0, 4.0, 8.0))
    assert found.of_step_percent == pytest.approx(40, rel=0.01)
    assert "4,000 page faults" in found.what
    assert (found.trial, found.at_most) == ("malloc=keep", False)
    assert "MALLOC_TOP_PAD_" in found.do


def test_the_gain_is_not_more_than_the_step() -> None:
    found = piece(asked(40_000, 80.0))
    assert found is not None
    assert found.gain.high == pytest.approx(10, rel=0.01)


def test_time_of_the_system_for_something_else_is_not_theirs() -> None:
    found = piece(asked(400, 8.0))
    assert found is not None
    assert found.gain.high == pytest.approx(2.0), "5 µs a fault at most"


@pytest.mark.parametrize(("faults", "system_ms"), [(0, 0.0), (0, 8.0), (150, 0.7), (4000, 0.3)])
def test_few_or_cheap_ones_are_not_told(faults: float, system_ms: float) -> None:
    found = asked(faults, system_ms)
    assert piece(found) is None
    assert "page-faults" not in found.unanswered


def test_a_run_that_counted_none_is_said_to_tell_nothing() -> None:
    assert "did not count page faults" in asked(None, None).unanswered["page-faults"]


def test_elsewhere_than_on_linux_no_variable_of_glibc_is_named() -> None:
    found = piece(asked(4000, 8.0, machine={"torch_threads": 1, "cores": 1, "system": "Darwin"}))
    assert found is not None
    assert found.trial is None
    assert "MALLOC" not in found.do
    assert found.gain.low == found.gain.high == pytest.approx(8.0)


def test_where_they_are_much_of_a_step_timings_of_calls_tell_no_gain() -> None:
    @advise.question("of-timings", "?", needs=Needs.BOUND)
    def of_timings(_: advise.AdviceContext) -> Iterator[Advice]:
        yield Advice("of-timings", "slow", (), Interval(3.0, 4.0, 5.0), False, 40.0, (), "change it")

    try:
        few, many = (advise.of(counted(4000, ms), only=["of-timings"]).advice for ms in (2.0, 8.0))
    finally:
        del registry.QUESTIONS["of-timings"]
    assert few[0].gain_known
    assert not many[0].gain_known
    assert "page faults" in many[0].why[-1]


def test_a_bound_says_what_the_system_took_of_the_measured_step() -> None:
    assert "4,000 in a step, 8 ms in the system" in (recordedcalls.page_faults(counted(4000, 8.0)) or "")
    assert recordedcalls.page_faults(counted(4000, 0.5)) is None
    assert recordedcalls.page_faults(counted(None, None)) is None


@pytest.mark.slow
def test_a_comparison_says_that_one_side_has_far_more() -> None:
    few, many = counted(100, 0.1), counted(4000, 8.0)
    (found,) = differences([few, few], [many])
    assert found == ("page faults", "100 in a step", "4,000")
    assert differences([many], [counted(5000, 9.0)]) == []
    assert differences([few], [counted(500, 0.5)]) == [], "too few to matter"
    assert differences([few], [counted(None, None)]) == [], "not counted is not none"


def test_calls_without_a_true_time_take_their_share_of_the_step() -> None:
    trace = counted(0, 0.0)
    trace.con.execute("CREATE OR REPLACE TEMP TABLE merged AS SELECT * FROM merged")
    trace.con.execute("UPDATE merged SET true_ns = CASE WHEN kind = 'step' THEN raw_ns / 5 END")
    every = list(calls.walk(advise.AdviceContext(trace)))
    times = {each.name: each.ns / MS for each in every if each.is_op or each.kind == "step"}
    assert times["s"] == pytest.approx(2.0)
    assert times["aten::linear"] == pytest.approx(0.99)


@pytest.mark.slow
def test_what_giving_memory_back_takes_is_no_stall() -> None:
    gap = STEP.replace("40-4890", "40-3390")
    stall = piece(asked(0, 0.0, gap), "stall")
    assert stall is not None
    freed = piece(asked(5000, 10.0, gap), "stall")
    assert freed is not None
    assert stall.gain.value - freed.gain.value == pytest.approx(1.0, abs=0.15), "0.2 µs a page"
    assert "returning memory" in " ".join(freed.why)
    assert piece(asked(9000, 10.0, gap), "stall") is None


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="other systems count page faults otherwise")
def test_a_program_that_gets_its_memory_anew_is_told_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pages = 8192
    layer = torch.nn.Linear(8, 8).eval()

    def step() -> None:
        new = mmap.mmap(-1, pages * mmap.PAGESIZE)
        for page in range(0, len(new), mmap.PAGESIZE):
            new[page] = 1
        new.close()
        layer(torch.ones(1, 8))

    with torch.inference_mode(), xsp.profile(out=tmp_path / "run", every=10) as prof:
        for _ in range(60):
            with prof.step():
                step()
    trace = xsp.load(tmp_path / "run")
    found = program_loop(trace)
    (row,) = (dict(zip(found.columns, each, strict=True)) for each in found.fetchall())
    assert pages <= row["page_faults"] < 1.5 * pages
    assert 0 < row["system_ms"] < row["iteration_ms"] * (os.cpu_count() or 1)


def test_calls_inside_another_one_take_no_longer_than_it() -> None:
    trace = counted(0, 0.0)
    trace.con.execute("CREATE OR REPLACE TEMP TABLE merged AS SELECT * FROM merged")
    trace.con.execute("UPDATE merged SET true_ns = CASE WHEN name = 'net.a' THEN raw_ns / 5 ELSE raw_ns END")
    found = {each.name: each for each in calls.walk(advise.AdviceContext(trace))}
    assert found["net.a"].ns / MS == pytest.approx(4.87 / 5)
    assert found["net.a"].children[0].ns / MS == pytest.approx(4.87 / 5), "it was recorded when all took longer"
    assert found["net.b"].children[0].ns / MS == pytest.approx(4.95)


def test_what_another_rank_counted_is_not_taken_for_what_this_one_did_not() -> None:
    rows = [row for number in range(3) for rank in (0, 1) for row in spans(STEP, step=number, rank=rank)]
    loop = [
        {"step": number, "rank": rank, "dur_ns": 10.0 * MS, "rung": Level.OP if number < 3 else BARE,
         "faults": 4000.0 if rank else None, "system_ns": 8.0 * MS if rank else None}
        for rank in (0, 1)
        for number in range(20)
    ]  # fmt: skip
    machine = {"torch_threads": 4, "cores": 4, "system": "Linux"}
    found = advise.of(with_loop(trace_of(rows, {"machine": machine}), loop), only=["page-faults"])
    assert found.advice == ()
    assert "did not count page faults" in found.unanswered["page-faults"]
