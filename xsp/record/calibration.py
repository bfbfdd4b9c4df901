"""What one span of a collector costs, measured beside the run.

Leveled experimentation tells what a level added to a step. A calibration tells, without that step, what its
spans should have added; what is left between the two is the residual of the ledger.
"""

from __future__ import annotations

from typing import Any

from xsp.clock import monotonic_ns
from xsp.collector import Collector, Outline, Probe
from xsp.schema import Level
from xsp.summary import percentile

ROUNDS = 7


def cost_per_span(collector: Collector) -> dict[str, Any] | None:
    """Run a collector's probe with the collector on and off in turns.

    Args:
        collector: closed; it is opened and closed here, and its spans are thrown away.

    Returns:
        `ns_per_span` (median over the rounds of the difference, never negative), `ns_passing` (the same of the
        collector hushed and not there at all, of one that can be hushed), `ns_passing_outer` (that of outermost calls),
        `level` and `rounds`; None if the collector has no probe.
    """
    probe = collector.probe()
    if probe is None:
        return None
    deepest = Level(max(collector.levels))
    differences = []
    collector.open()
    try:
        probe.run()
        for _ in range(ROUNDS):
            off = _time(probe.run)
            collector.start(deepest, describe=False)
            try:
                on = _time(probe.run)
            finally:
                collector.stop()
            seen = sum(1 for _ in collector.spans())
            differences.append((on - off) / max(seen, probe.spans))
    finally:
        collector.close()
        list(collector.notes())
    return {
        "ns_per_span": max(0.0, percentile(differences, 0.5)),
        "ns_passing": _passing(collector, probe),
        "ns_passing_outer": _passing(collector, collector.outer_probe()),
        "level": int(deepest if Level.KERNEL not in collector.levels else min(collector.levels)),
        "rounds": ROUNDS,
    }


def _passing(collector: Collector, probe: Probe | None) -> float:
    """Return the nanoseconds by which a span's work takes longer where the collector is there and hushed."""
    if probe is None or type(collector).hush is Collector.hush:
        return 0.0
    differences = []
    try:
        for _ in range(ROUNDS):
            without = _time(probe.run)
            collector.outline = outline = Outline()
            collector.open()
            try:
                probe.run()
                outline.usual = set(outline)  # as in a stretch of steps that pass by, see `xsp.record.quiet`
                collector.hush(True)
                probe.run()
                outline.clear()
                differences.append((_time(probe.run) - without) / probe.spans)
            finally:
                collector.close()
    finally:
        collector.outline = None
    return max(0.0, percentile(differences, 0.5))


def _time(run: Any) -> int:
    start = monotonic_ns()
    run()
    return monotonic_ns() - start
