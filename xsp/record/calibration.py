"""The cost of one span of a collector, measured separately from the run.

Leveled experimentation measures the time that a level added to a step. A calibration measures, without that step, the
time that its spans should have added; the difference between the two is the residual of the ledger.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

from xsp.clock import monotonic_ns
from xsp.collector import Collector, Outline, Probe
from xsp.schema import Level
from xsp.stats import percentile

ROUNDS, LEAST_ROUNDS = 7, 3
"""Number of rounds of a measurement, and the number of those that it takes however little time is left."""

SAMPLES = 16
"""Runs of a one-span probe in each round."""

LIMIT_SHARE = 0.001
"""Share of the program's time that each measurement at its end may take before it ends with `LEAST_ROUNDS`: all rounds
take 0.3 s together, which is much for a program of 3 s and little for one of 300 s."""

SWEEP_BYTES = 2 << 20
"""Bytes that are copied to evict the caches of a core."""


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


def cost_per_span(collector: Collector, with_passing: bool = True, limit_ns: float = math.inf) -> dict[str, Any] | None:
    """Run a collector's probe alternately with the collector on and off.

    Args:
        collector: a closed collector; it is opened and closed here, and its spans are discarded.
        with_passing: whether to measure also the cost of work that a muted collector ignores; needed after stretches.
        limit_ns: nanoseconds after which each of both measurements takes no further rounds, see `rounds`.

    Returns:
        `ns_per_span` (difference of the least times of the rounds, never negative: what else the machine does only adds
        to a time), `level`, `rounds`, and the result of `passing_costs`; None if the collector has no probe.
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
    passing = with_passing and type(collector).mute is not Collector.mute
    return {
        "ns_per_span": max(0.0, min(on) - min(off)),
        "level": int(deepest if Level.KERNEL not in collector.levels else min(collector.levels)),
        "rounds": len(on),
        **(passing_costs(collector, probe, limit_ns) if passing else {}),
    }


def passing_costs(collector: Collector, probe: Probe, limit_ns: float = math.inf) -> dict[str, float]:
    """Return the nanoseconds that an installed but muted collector adds to a span's work.

    Returns:
        `ns_passing` for the probe's spans. For a collector with an `outer_probe` also `ns_passing_outer`, with its code
        in the caches, `ns_passing_cold`, after its code was evicted, and `sweep_ns`, the duration of the eviction.
    """
    outer, sweep = collector.outer_probe(), _Sweep()
    differences = {"ns_passing": _Difference(probe)}
    if outer is not None:
        differences |= {"ns_passing_outer": _Difference(outer), "ns_passing_cold": _Difference(outer, sweep)}
    try:
        for _ in rounds(limit_ns):
            for difference in differences.values():
                difference.time(difference.without)
            collector.outline = outline = Outline()
            collector.open()
            try:
                for difference in differences.values():
                    difference.probe.run()
                outline.usual, outline.thread = set(outline), threading.get_native_id()  # as in `xsp.record.quiet`
                collector.mute(True)
                for difference in differences.values():
                    difference.time(difference.muted)
                    outline.clear()
            finally:
                collector.close()
    finally:
        collector.outline = None
    costs = {name: difference.ns for name, difference in differences.items()}
    return {**costs, "sweep_ns": percentile(sweep.times, 0.5)} if sweep.times else costs


def boundary_cost(boundary: Callable[[], object], limit_ns: float = math.inf) -> dict[str, Any]:
    """Return the cost of what xsp does at the boundary of a step in a burst, in the form of `cost_per_span`.

    Args:
        boundary: does it once; it is called some hundred times.
        limit_ns: nanoseconds after which there are no further rounds, see `rounds`.
    """
    sweep = _Sweep()
    warm, cold = _Difference(Probe(boundary, spans=1)), _Difference(Probe(boundary, spans=1), sweep)
    round_count = 0
    for _ in rounds(limit_ns):
        round_count += 1
        for difference in (warm, cold):
            difference.time(difference.without, lambda: None)
            difference.time(difference.muted)
    return {
        "ns_per_span": 0.0, "level": int(Level.APPLICATION), "rounds": round_count, "ns_passing": warm.ns,
        "ns_passing_outer": warm.ns, "ns_passing_cold": cold.ns, "sweep_ns": percentile(sweep.times, 0.5),
    }  # fmt: skip


class _Sweep:
    """An eviction of the caches that belong to a core."""

    def __init__(self) -> None:
        self._from, self._to = bytes(SWEEP_BYTES), bytearray(SWEEP_BYTES)
        self.times: list[int] = []

    def __call__(self) -> None:
        start = monotonic_ns()
        self._to[:] = self._from
        self.times.append(monotonic_ns() - start)


class _Difference:
    """Times of a probe without a collector and with a muted collector."""

    def __init__(self, probe: Probe, before: Callable[[], None] | None = None) -> None:
        self.probe = probe
        self._before = before
        self.without: list[int] = []
        self.muted: list[int] = []

    def time(self, times: list[int], run: Callable[[], object] | None = None) -> None:
        """Run the probe, or `run`, once to warm up and then timed, calling `before` ahead of each timed run."""
        run = run or self.probe.run
        run()
        for _ in range(max(1, SAMPLES // self.probe.spans)):
            if self._before is not None:
                self._before()
            times.append(_time(run))

    @property
    def ns(self) -> float:
        """Nanoseconds that are added to a span, never negative."""
        return max(0.0, percentile(self.muted, 0.5) - percentile(self.without, 0.5)) / self.probe.spans


def _interruptions() -> int:
    """Return how often this thread had to leave its core to others, where the system counts that by thread; else 0."""
    of_thread = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if of_thread is None else resource.getrusage(of_thread).ru_nivcsw


def _time(run: Any) -> int:
    start = monotonic_ns()
    run()
    return monotonic_ns() - start
