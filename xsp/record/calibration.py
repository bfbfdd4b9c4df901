"""The cost of one span of a collector, measured separately from the run.

Leveled experimentation measures the time that a level added to a step. A calibration measures, without that step, the
time that its spans should have added; the difference between the two is the residual of the ledger.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from typing import Any

from xsp.clock import monotonic_ns
from xsp.collector import Collector
from xsp.schema import Level

ROUNDS, LEAST_ROUNDS = 7, 3
"""Number of rounds of a measurement, and the number of those that it takes however little time is left."""

LIMIT_SHARE = 0.001
"""Share of the program's time that each measurement at its end may take before it ends with `LEAST_ROUNDS`: all rounds
take 0.2 s together, which is much for a program of 3 s and little for one of 300 s."""


def rounds(limit_ns: float, is_enough: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Yield the numbers of the rounds of a measurement: `LEAST_ROUNDS`, and up to `ROUNDS` within a limit of time.

    Args:
        limit_ns: the limit in nanoseconds.
        is_enough: whether what was measured so far may be true; if not, the limit does not hold.
    """
    began_ns = monotonic_ns()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and monotonic_ns() - began_ns > limit_ns and is_enough():
            return
        yield number


def cost_per_span(collector: Collector, limit_ns: float = math.inf) -> dict[str, Any] | None:
    """Run a collector's probe alternately with the collector on and off.

    Args:
        collector: a closed collector; it is opened and closed here, and its spans are discarded.
        limit_ns: nanoseconds after which it takes no further rounds, see `rounds`.

    Returns:
        `ns_per_span` (difference of the least times of the rounds, never negative: what else the machine does only adds
        to a time), `level` and `rounds`; None if the collector has no probe.
    """
    probe = collector.probe()
    if probe is None:
        return None
    deepest = Level(max(collector.levels))
    off, on, calm = list[float](), list[float](), list[bool]()
    collector.open()
    try:
        probe.run()
        for _ in rounds(limit_ns, lambda: any(calm) and min(on) > min(off)):
            interruptions = _interruptions()
            off_ns = _time(probe.run)
            collector.start(deepest, describe=False)
            try:
                on_ns = _time(probe.run)
            finally:
                collector.stop()
            calm.append(_interruptions() == interruptions)
            span_count = max(sum(1 for _ in collector.spans()), probe.spans)
            off.append(off_ns / span_count)
            on.append(on_ns / span_count)
    finally:
        collector.close()
        list(collector.notes())
    return {
        "ns_per_span": max(0.0, min(on) - min(off)),
        "level": int(deepest if Level.KERNEL not in collector.levels else min(collector.levels)),
        "rounds": len(on),
    }


def _interruptions() -> int:
    """Return how often this thread had to leave its core to others, where the system counts that by thread; else 0."""
    of_thread = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_nivcsw


def _time(run: Any) -> int:
    start = monotonic_ns()
    run()
    return monotonic_ns() - start
