"""The kit for people who write collectors, by collectors that keep the contract and by some that break it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import pytest

from xsp.collector import Collector
from xsp.schema import Kind, Level, Span
from xsp.testing import FakeClock, check_collector, spans, trace_of, tree


def test_a_fake_clock_goes_on_when_it_is_told_to() -> None:
    clock = FakeClock(100, tick=5)
    assert [clock(), clock()] == [100, 105]
    clock.advance(1000)
    assert clock() == 1110


def test_spans_are_written_down_as_text() -> None:
    op, kernel = spans("op aten::mm 1.5-4 sequence_nr=7 thread=None\n\n  kernel gemm 2-3 device=1", step=3)
    assert (op.level, op.kind, op.start_ns, op.dur_ns) == (Level.OP, "op", 1500, 2500)
    assert (op.sequence_nr, op.thread, op.step) == (7, None, 3)
    assert (kernel.level, kernel.device, kernel.stream, kernel.thread) == (Level.KERNEL, 1, 7, None)


def test_a_trace_is_made_of_them() -> None:
    rows = [*spans("step s 0-10", step=0), *spans("step s 0-30", step=1), *spans("step s 0-20", step=2)]
    trace = trace_of(rows, {"name": "three"})
    assert (trace.name, [(rung.level, rung.steps, rung.step_ns) for rung in trace.rungs]) == (
        "three", [(Level.MODEL, 3, 20_000)],
    )  # fmt: skip
    assert tree(rows[:1]) == "step s"
    assert repr(trace) == "<Trace 'three': 3 spans of 3 steps>"


# --- the contract -----------------------------------------------------------------------------------------


class Good(Collector):
    """Sees calls of `self.work`, a function that stands for a program."""

    name = "good"
    levels = (Level.OP,)

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.on = False

    def work(self) -> None:
        if self.on:
            self.calls.append(time.perf_counter_ns())

    def start(self, rung: Level, describe: bool) -> None:
        self.on = True

    def stop(self) -> None:
        self.on = False

    def spans(self) -> Iterable[Span]:
        calls, self.calls = self.calls, []
        return [Span(level=Level.OP, kind=Kind.OP.value, name="work", start_ns=c, collector=self.name) for c in calls]


def test_a_collector_that_keeps_the_contract_passes_and_shows_what_it_saw() -> None:
    collector = Good()
    assert [span.name for span in check_collector(collector, collector.work)] == ["work"]


class Remembers(Good):
    def spans(self) -> Iterable[Span]:
        result, kept = super().spans(), list(self.calls)
        self.calls = kept or [span.start_ns for span in result]
        return result


class NeverStops(Good):
    def stop(self) -> None:
        pass


class WrongLevel(Good):
    levels = (Level.KERNEL,)


class WrongTime(Good):
    def spans(self) -> Iterable[Span]:
        return [span._replace(start_ns=span.start_ns - 10**9) for span in super().spans()]


class LeavesSomething(Good):
    def open(self) -> None:
        os.environ["XSP_TEST_LEFT_BEHIND"] = "1"


class Blind(Good):
    def work(self) -> None:
        pass


class Absent(Good):
    def available(self) -> str | None:
        return "no such library; install it"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Remembers, "does not forget"),
        (NeverStops, "between steps"),
        (WrongLevel, "not of its levels"),
        (WrongTime, "outside its step"),
        (LeavesSomething, "left behind: .*XSP_TEST_LEFT_BEHIND"),
        (Blind, "made no spans"),
        (Absent, "not available: no such library"),
    ],
)
def test_a_collector_that_breaks_the_contract_is_told_what_it_broke(
    kind: type[Good], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XSP_TEST_LEFT_BEHIND", "")
    collector = kind()
    with pytest.raises(AssertionError, match=complaint):
        check_collector(collector, collector.work)


class Listens(Good):
    """Sees the program from `open` to `close`, as waits for data are seen."""

    def open(self) -> None:
        self.on = True

    def start(self, rung: Level, describe: bool) -> None:
        pass

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self.on = False


def test_a_collector_that_listens_between_steps_says_so() -> None:
    collector = Listens()
    assert len(check_collector(collector, collector.work, between_steps=True)) == 2
    with pytest.raises(AssertionError, match=r"between steps|outside its step"):
        check_collector(collector, collector.work)
