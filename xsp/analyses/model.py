"""A1: what a model takes, and how many samples at a time it likes best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from xsp import summary
from xsp.analyses.contract import Table, analysis, values
from xsp.errors import AnalysisError
from xsp.span import Kind, Level
from xsp.trace import Trace

PLATEAU = 0.05
"""Doubling the batch size must gain more throughput than this to be worth it (XSP, section III-D)."""


_COLUMNS = {
    "batch_size": "BIGINT",
    **dict.fromkeys(("latency_ms", "low_ms", "high_ms", "median_ms", "p90_ms", "p99_ms", "samples_per_s"), "DOUBLE"),
    "steps": "INTEGER",
}


@analysis("A1", "Model information", Level.MODEL)
def A1(trace: Trace) -> Table:
    """Latency and throughput of a step, per batch size: trimmed mean, its interval, and percentiles.

    Latency comes from the steps in which nothing deeper than the model level was on. Throughput is batch
    size over latency; it is null where the batch size is unknown.
    """
    rows = []
    for batch, durations in trace.con.execute(
        f"""
        SELECT batch_size, list(dur_ns::DOUBLE ORDER BY step) FROM alike_spans
        WHERE kind = '{Kind.STEP}' AND status = 'ok' AND timed
          AND rung = (SELECT min(rung) FROM alike_spans WHERE timed)
        GROUP BY batch_size ORDER BY batch_size
        """
    ).fetchall():
        mean = summary.trimmed_mean(durations)
        ends = summary.interval(durations)
        rows.append(
            (
                batch,
                mean / 1e6,
                ends.lo / 1e6 if ends else None,
                ends.hi / 1e6 if ends else None,
                *(summary.percentile(durations, share) / 1e6 for share in (0.5, 0.9, 0.99)),
                batch / mean * 1e9 if batch else None,
                len(durations),
            )
        )
    if not rows:
        raise AnalysisError(f"A1: {trace.name!r} holds no timed step; call prof.step() more often")
    return values(trace, "a1", _COLUMNS, rows)


class Optimum(NamedTuple):
    """The optimal batch size by each reading of the rule; None where it has none."""

    first_plateau: int | None
    """The smallest size whose doubling gains at most 5 %: the rule as XSP's paper states it."""

    max_throughput: int | None
    """The size of the highest throughput: what its figures follow."""

    within_target: int | None
    """The size of the highest throughput whose latency meets the target."""


def optimal_batch(sizes: Sequence[int], latencies_ms: Sequence[float], target_ms: float | None = None) -> Optimum:
    """Choose the optimal batch size of a sweep.

    XSP's rule, "where doubling it does not increase throughput by more than 5 %", and the sizes that XSP
    reports differ where throughput goes on rising slowly: on its own Table VI the rule gives 64 (doubling to
    128 gains 3.6 %), and the paper reports 256, the size of the highest throughput. Both are returned.

    Args:
        sizes: batch sizes, each about double the one before; in any order.
        latencies_ms: latency of a step at each size, in milliseconds.
        target_ms: the longest latency that is acceptable.

    Returns:
        The optimum by each reading; the target's is None without a target, or if no size meets it.

    Raises:
        AnalysisError: no sizes, or as many latencies are missing.
    """
    if not sizes or len(sizes) != len(latencies_ms):
        raise AnalysisError("the optimal batch size needs at least one size, and a latency for each")
    points = sorted(zip(sizes, latencies_ms, strict=True))
    rates = [size / latency for size, latency in points]
    gains = [after / before - 1 for before, after in pairwise(rates)]
    first = next((points[place][0] for place, gain in enumerate(gains) if gain <= PLATEAU), points[-1][0])
    best = points[rates.index(max(rates))][0]
    meeting = [(rate, size) for rate, (size, latency) in zip(rates, points, strict=True) if latency <= (target_ms or 0)]
    return Optimum(first, best, max(meeting)[1] if target_ms is not None and meeting else None)
