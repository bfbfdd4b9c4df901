"""Phases of steps that are not recorded: their times from the boundaries that collectors note, and in an account."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
from depth import deep

import xsp
from xsp import account
from xsp.account import entries as names
from xsp.collector import Outline, Signal
from xsp.record.autostep import AutoStep
from xsp.record.phases import LEAST_NS, MOST_TIMES, UNTIMED, PhaseTiming, StepPhases, mean, of_step
from xsp.schema import Level
from xsp.store.loop import BARE
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

BOUNDARIES = {
    "F": Signal.CALL_BEGIN, "f": Signal.CALL_END, "B": Signal.BACKWARD_BEGIN, "b": Signal.BACKWARD_END,
    "O": Signal.OPTIMIZER_BEGIN, "o": Signal.OPTIMIZER_END,
}  # fmt: skip


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        ("F10 f30 B40 b70 O80 o100", (20, 30, 20)),
        ("F0 f10 F20 f30", (20, 0, 0)),
        ("F0 f20 B20 F30 f40 b50", (20, 30, 0)),  # a checkpoint calls the module again, in the pass
        ("F0 B10 F20 f30 b40 f50", (20, 30, 0)),
        ("O0 F10 f30 B40 b60 o100", (20, 20, 40)),  # a closure: what runs before the end of its pass is no optimizer's
        ("O0 B10 b20 B30 b40 o50", (0, 20, 30)),  # several passes are an optimizer's work
        ("F10 f30 B90", (20, 10, 0)),  # the step ends in a pass
        ("f10 o20 F30 f40", (10, 0, 0)),  # of calls that began before it, only the ends were noted
        ("F10 B20 f30 B40 b50", (10, 20, 0)),  # the end of a pass was missed: the call's end is its end, too
        ("F-50 f20 B90 b190", (20, 10, 0)),  # nothing counts outside of the step
        ("", (0, 0, 0)),
    ],
)
def test_each_moment_of_a_step_counts_for_the_innermost_phase(boundaries: str, expected: tuple[int, ...]) -> None:
    times = [value for word in boundaries.split() for value in (BOUNDARIES[word[0]], 1000 + int(word[1:]))]
    assert of_step(times, 1000, 1100) == StepPhases(*expected)


def test_phases_that_were_not_timed_are_unknown_and_so_is_their_mean() -> None:
    assert of_step(None, 0, 100) == UNTIMED
    assert mean([StepPhases(10, 20, 30), StepPhases(20, 40, 60)]) == StepPhases(15, 30, 45)
    assert mean([StepPhases(10, 20, 30), UNTIMED]) == UNTIMED


def test_short_steps_are_not_timed_and_none_after_one_with_thousands_of_calls() -> None:
    outline = Outline()
    outline.thread = 1
    timing = PhaseTiming(outline)
    timing.begin(LEAST_NS - 1)
    outline.time(Signal.CALL_BEGIN, 1, 5)
    assert timing.take() is None
    timing.begin(LEAST_NS)
    for thread in (1, 2):  # another thread's call is none of the step
        outline.time(Signal.CALL_BEGIN, thread, 5)
    assert (timing.take() or [])[::2] == [Signal.CALL_BEGIN]
    for _ in range(MOST_TIMES + 1):
        outline.time(Signal.CALL_BEGIN, 1, 5)
    assert len(timing.end() or ()) == 2 * MOST_TIMES + 2
    timing.begin(LEAST_NS)
    assert timing.end() is None


def recorded(forward_us: int, backward_us: int, optimizer_us: int) -> list:
    """Return two recorded steps of 10 ms."""
    first, second = forward_us, forward_us + backward_us
    text = f"""
        step s      0-10000
        forward Net 0-{first}
        backward b  {first}-{second}
        optimizer A {second}-{second + optimizer_us}
    """
    return [row for step in (10, 20) for row in spans(text, step=step)]


def with_phases(rows: list, phases: tuple[float, float, float] | None) -> Trace:
    """Return a trace with these recorded steps among 40 others of 5 ms, whose phases take these nanoseconds."""
    loop = []
    for step in range(42):
        is_recorded = step in (10, 20)
        row = {"step": step, "start_ns": step * 6_000_000, "dur_ns": 10_000_000.0 if is_recorded else 5_000_000.0}
        if is_recorded:
            row |= {"rung": Level.MODEL, "steady": False}
        elif phases is not None:
            row |= dict(zip(("forward_ns", "backward_ns", "optimizer_ns"), phases, strict=True))
        loop.append({"rung": BARE, **row})
    return with_loop(trace_of(rows), loop)


def times_ms(trace: Trace) -> dict[str, float]:
    result = account.of(trace)
    assert result.violations == ()
    assert result.main is not None
    return {entry.name: round(entry.ms or 0.0, 3) for entry in result.main.host.entries}


def test_phases_are_those_of_steps_that_were_not_recorded() -> None:
    rows = recorded(2000, 6000, 1000)
    timed = times_ms(with_phases(rows, (1.5e6, 2e6, 1e6)))
    assert timed == {names.BACKWARD: 2.0, names.FORWARD: 1.5, names.OPTIMIZER: 1.0, names.OUTSIDE: 0.5}
    # without such times, as in runs of earlier versions, in the shares of recorded steps
    assert times_ms(with_phases(rows, None))[names.BACKWARD] == pytest.approx(3.0)


def test_phases_that_only_recorded_steps_show_come_from_these() -> None:
    rows = recorded(2000, 6000, 1000)
    assert times_ms(with_phases(rows, (1.5e6, 2e6, 0.0)))[names.BACKWARD] == pytest.approx(3.0)
    block = spans("user validate 9000-9500", step=10)
    assert times_ms(with_phases([*rows, *block], (1.5e6, 2e6, 1e6)))[names.BACKWARD] == pytest.approx(2.0)


@pytest.mark.parametrize("wait_ms", [1, deep(6)])
def test_what_each_phase_takes_in_a_program_is_in_its_unrecorded_steps(tmp_path: Path, wait_ms: int) -> None:
    torch = pytest.importorskip("torch")
    own_s: dict[str, list[float]] = {"forward": [], "backward": []}

    def wait(phase: str, ms: int) -> None:
        began_s = time.perf_counter()
        time.sleep(ms / 1e3)
        own_s[phase].append(time.perf_counter() - began_s)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            wait("forward", wait_ms)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            wait("backward", 3 * wait_ms)
            return gradient

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            return Slow.apply(self.linear(x))

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    out = tmp_path / "run"
    with xsp.profile("train", out=out, levels="M", samples=False, every=8, listener=AutoStep):
        for _ in range(120):
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = xsp.load(out)
    query = "SELECT count(forward_ns) = count(*), median(forward_ns) / 1e6, median(backward_ns) / 1e6 FROM loop"
    ((are_timed, *medians_ms),) = trace.sql(f"{query} WHERE rung = {BARE}").fetchall()
    assert are_timed
    main = account.of(trace).main
    assert main is not None
    for phase, median_ms in zip((names.FORWARD, names.BACKWARD), medians_ms, strict=True):
        assert 1e3 * median(own_s[phase]) == pytest.approx(median_ms, rel=0.2, abs=0.3)
        assert main.host.ms(phase) >= 0.8 * 1e3 * median(own_s[phase])
