"""A1 and A15 over the runs of a sweep: throughput and roofline of a model over its batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xsp.analyses.contract import Table, values
from xsp.analyses.model import A1, optimal_batch
from xsp.analyses.roofline import A15
from xsp.errors import AnalysisError
from xsp.store.trace import Trace


def model_sweep(traces: Sequence[Trace], target_ms: float | None = None) -> Table:
    """Return A1's latency and throughput by batch size, and which size is optimal by which reading of the rule.

    Args:
        traces: of one model; each may hold several batch sizes.
        target_ms: the longest latency that is acceptable.

    Returns:
        `gain_percent` is the throughput gained over the next smaller size. See `optimal_batch` for `first_plateau`,
        `max_throughput` and `within_target`, which are true at one size each, or at none.

    Raises:
        AnalysisError: no trace, or one without a timed step or a batch size.
    """
    measured = "batch_size, latency_ms, low_ms, high_ms, samples_per_s"
    found = (row for trace in traces for row in A1(trace).select(measured).fetchall())
    rows = sorted(found, key=lambda row: row[0] or 0)
    if not rows or rows[0][0] is None:
        raise AnalysisError("a sweep needs traces whose batch size is known; state it with profile(batch_size=…)")
    best = optimal_batch([row[0] for row in rows], [row[1] for row in rows], target_ms)
    table: list[tuple[Any, ...]] = []
    for place, row in enumerate(rows):
        gain = 100 * (row[4] / rows[place - 1][4] - 1) if place else None
        table.append((*row, gain, *(row[0] == size for size in best)))
    columns = {
        "batch_size": "BIGINT",
        **dict.fromkeys(("latency_ms", "low_ms", "high_ms", "samples_per_s", "gain_percent"), "DOUBLE"),
        **dict.fromkeys(best._fields, "BOOLEAN"),
    }
    return values(traces[0], "a1_sweep", columns, table)


def model_roofline(traces: Sequence[Trace]) -> Table:
    """Return A15's row of each trace, by batch size: the model's path under the roof.

    Raises:
        AnalysisError: no trace, or one that A15 refuses.
    """
    if not traces:
        raise AnalysisError("a model roofline needs at least one trace")
    tables = [A15(trace) for trace in traces]
    columns = dict(zip(tables[0].columns, map(str, tables[0].types), strict=True))
    rows = [row for table in tables for row in table.fetchall()]
    return values(traces[0], "a15_sweep", columns, sorted(rows, key=lambda row: row[0] or 0))
