"""Whether unrecorded steps are slower since operators were first recorded, judged by the steps before that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from xsp.health import health
from xsp.schema import Level
from xsp.store import reference
from xsp.store.iterations import iterations
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000


def traced(before_ms: Sequence[float], after_ms: Sequence[float]) -> Trace:
    """Return a run whose operators were first recorded between these iterations."""
    times = [*before_ms, None, *after_ms]
    rows = [
        {
            "step": step,
            "dur_ns": round((9 if time is None else time) * MS),
            "rung": int(Level.APPLICATION if time is not None else Level.OP),
            "steady": time is not None,
        }
        for step, time in enumerate(times)
    ]
    return with_loop(trace_of(spans("step s 0-9000\nforward Net 0-8000\nop mm 10-20", step=len(before_ms))), rows)


def findings(trace: Trace) -> list[str]:
    return [finding.text for finding in health(trace) if "since operators" in finding.text]


def test_steps_that_take_longer_since_the_first_recording_are_reported_with_both_times() -> None:
    trace = traced([90, 7, 6, *[5.0, 5.1, 5.2] * 3], [7.7, 7.6, 7.8] * 10)
    found = reference.change(trace.con)
    assert found is not None
    assert (found.before_ns, found.after_ns) == (pytest.approx(5.1 * MS), pytest.approx(7.7 * MS))
    assert 1.4 < found.ratio.low <= 7.7 / 5.1 <= found.ratio.high < 1.6
    (text,) = findings(trace)
    assert "7.7 ms" in text
    assert "5.1 ms before (+51 % [" in text


@pytest.mark.parametrize("after", [[5.1, 5.2, 5.0] * 10, [4.0] * 30, [5.1, 9.0, 5.0, 5.2] * 8])
def test_equal_steps_faster_ones_and_single_slow_ones_are_no_change(after: list[float]) -> None:
    assert findings(traced([90, 7, 6, *[5.0, 5.1, 5.2] * 3], after)) == []


def test_too_few_steps_before_the_first_recording_are_no_reference() -> None:
    assert reference.change(traced([90, 7, 6, 5, 5], [7.7] * 30).con) is None


def test_iterations_that_differ_many_times_over_are_represented_by_all_that_were_not_recorded() -> None:
    """One iteration in ten takes 100 ms, the others 5 ms; only five are undisturbed, all of them fast."""
    rows = [
        {"step": step, "dur_ns": (100 if step % 10 == 5 else 5) * MS, "steady": step in (20, 21, 22, 23, 24)}
        for step in range(200)
    ]
    rows[40] |= {"rung": int(Level.OP), "steady": False}
    for place in (20, 21, 22, 23, 24):
        rows[place]["dur_ns"] = (4 + place % 3) * MS
    (row,) = iterations(with_loop(trace_of(spans("step s 0-9000\nforward Net 0-8000", step=40)), rows))
    assert row.mean_ns == pytest.approx(14.5 * MS, rel=0.1)
    assert row.share == 1


def test_steps_after_recorded_ones_are_traced_and_do_not_count_where_iterations_differ() -> None:
    rows = [
        {"step": step, "dur_ns": (100 if step % 10 == 5 else 5) * MS, "steady": step in (22, 24)} for step in range(200)
    ]
    for step in range(41, 200, 10):
        rows[step] |= {"rung": int(Level.OP), "steady": False}
        rows[step + 1]["dur_ns"] = 50 * MS
    (row,) = iterations(with_loop(trace_of(spans("step s 0-9000\nforward Net 0-8000", step=41)), rows))
    assert row.mean_ns == pytest.approx(14.5 * MS, rel=0.2)


def test_iterations_that_are_alike_are_represented_by_the_undisturbed_ones() -> None:
    rows = [{"step": step, "dur_ns": (5 if step % 20 > 8 else 6) * MS, "steady": step % 20 > 8} for step in range(200)]
    rows[40] |= {"rung": int(Level.OP), "steady": False}
    (row,) = iterations(with_loop(trace_of(spans("step s 0-9000\nforward Net 0-8000", step=40)), rows))
    assert row.mean_ns == pytest.approx(5 * MS, rel=0.001)
