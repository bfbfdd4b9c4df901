"""A1: latency and throughput of a model, and its optimal batch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from xsp import stats
from xsp.analyses.contract import Table, analysis, values
from xsp.analyses.loop import kinds_of
from xsp.analyses.roofline import kernels_by_model
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.store.iterations import (
    BareStep,
    bare_interval,
    disturbed_interval,
    disturbed_steps,
    iterations,
    mean_ns,
    percentile_ns,
    steady_steps,
    step_count,
)
from xsp.store.trace import Trace

MIN_GAIN = 0.05
"""Doubling the batch size must gain more throughput than this to be worth it (XSP, section III-D)."""


_COLUMNS = {
    "batch_size": "BIGINT",
    **dict.fromkeys(("latency_ms", "low_ms", "high_ms", "median_ms", "p90_ms", "p99_ms", "samples_per_s"), "DOUBLE"),
    "steps": "BIGINT",
    **dict.fromkeys(("loop_ms", "loop_low_ms", "loop_high_ms", "loop_samples_per_s"), "DOUBLE"),
    "samples_from": "VARCHAR",
}


@analysis("A1", "Model information", Level.MODEL)
def model_information(trace: Trace) -> Table:
    """Latency and throughput per batch size, of a step and of the loop that it runs in.

    Latency (trimmed mean, its confidence interval, percentiles) comes from undisturbed unrecorded steps; rows of
    the loop that represent several steps weigh as much as these. If there are too few, or a device still works after
    the host's step has ended, it comes from steps with the model level only. For steps below 3 ms it comes from
    unrecorded steps soon after a recorded one, which may take twice as long as others: the lower end of the interval
    is then halved, and `health` reports it.
    `samples_per_s` is batch size over latency, the throughput of the step alone. `loop_ms` is the time of an iteration
    as the program ran, including waiting for data and other time between steps (see `loop`); `loop_samples_per_s` is
    its throughput. Throughput is null if the batch size is unknown. The figures of the loop are null if there are only
    short steps soon after recorded ones. `samples_from` is the source of the batch size.
    """
    rows = []
    kind = kinds_of(trace, trace.rank).get(trace.kind) if trace.kind is not None else None
    for batch, steps, bounds in _bare_steps(trace) or _recorded_steps(trace):
        mean = mean_ns(steps)
        loop_figures = _loop_figures(trace, batch)
        rows.append(
            (
                batch,
                mean / 1e6,
                bounds.low / 1e6 if bounds else None,
                bounds.high / 1e6 if bounds else None,
                *(percentile_ns(steps, share) / 1e6 for share in (0.5, 0.9, 0.99)),
                batch / mean * 1e9 if batch else None,
                step_count(steps),
                *loop_figures,
                kind.batch_source if batch and kind is not None else None,
            )
        )
    if not rows:
        raise AnalysisError(f"A1: {trace.name!r} holds no timed step; call prof.step() more often")
    return values(trace, "a1", _COLUMNS, rows)


_SizeSteps: TypeAlias = tuple[int | None, list[BareStep], stats.Interval | None]
"""A batch size, its steps, and the interval of their trimmed mean in nanoseconds."""


def _bare_steps(trace: Trace) -> list[_SizeSteps]:
    """Return the bare steps by batch size: steady steps, else short ones; empty if there are neither."""
    if not trace.has_loop:
        return []
    steady = steady_steps(trace.con, trace.run)
    interval_of = bare_interval if steady else disturbed_interval
    by_size: dict[int | None, list[BareStep]] = defaultdict(list)
    for step in steady or disturbed_steps(trace.con):
        by_size[step.samples].append(step)
    sizes = sorted(by_size, key=lambda size: (size is None, size))
    return [(size, by_size[size], interval_of(by_size[size])) for size in sizes]


def _recorded_steps(trace: Trace) -> list[_SizeSteps]:
    """Return the recorded steps of the lowest rung by batch size; only their times are filled in."""
    rows = trace.con.execute(
        f"""
        SELECT batch_size, list(dur_ns::DOUBLE ORDER BY step) FROM alike_spans
        WHERE kind = '{Kind.STEP}' AND status = 'ok' AND timed
          AND rung = (SELECT min(rung) FROM alike_spans WHERE timed)
        GROUP BY batch_size ORDER BY batch_size
        """
    ).fetchall()
    return [
        (size, [BareStep(index, dur_ns, size) for index, dur_ns in enumerate(durations)], stats.interval(durations))
        for size, durations in rows
    ]


def _loop_figures(trace: Trace, batch: int | None) -> tuple[float | None, ...]:
    """Return the time of the loop's iteration and both ends of its interval in milliseconds, and samples per second."""
    key = (trace.rank, trace.kind)
    iteration = next(
        (candidate for candidate in iterations(trace, batch) if (candidate.rank, candidate.kind) == key), None
    )
    if iteration is None or iteration.mean_ns is None or not iteration.is_known:
        return (None, None, None, None)
    bounds = iteration.interval
    return (
        iteration.mean_ns / 1e6,
        bounds.low / 1e6 if bounds else None,
        bounds.high / 1e6 if bounds else None,
        iteration.samples_per_s,
    )


class Optimum(NamedTuple):
    """The optimal batch size by each reading of the rule; None if there is none."""

    first_plateau: int | None
    """The smallest size whose doubling gains at most 5 %: the rule as XSP's paper states it."""

    max_throughput: int | None
    """The size of the highest throughput: the reading that the paper's figures follow."""

    within_target: int | None
    """The size of the highest throughput whose latency meets the target."""


def optimal_batch(sizes: Sequence[int], latencies_ms: Sequence[float], target_ms: float | None = None) -> Optimum:
    """Choose the optimal batch size of a sweep.

    XSP's rule, "where doubling it does not increase throughput by more than 5 %", and the sizes that XSP
    reports differ if throughput continues to rise slowly: on its own Table VI the rule gives 64 (doubling to
    128 gains 3.6 %), and the paper reports 256, the size of the highest throughput. Both are returned.

    Args:
        sizes: batch sizes, each about double the next smaller one; in any order.
        latencies_ms: latency of a step at each size, in milliseconds.
        target_ms: the longest latency that is acceptable.

    Returns:
        The optimum by each reading; `within_target` is None without a target, or if no size meets it.

    Raises:
        AnalysisError: there are no sizes, or not one latency per size.
    """
    if not sizes or len(sizes) != len(latencies_ms):
        raise AnalysisError("the optimal batch size needs at least one size, and a latency for each")
    points = sorted(zip(sizes, latencies_ms, strict=True))
    rates = [size / latency for size, latency in points]
    gains = [after / before - 1 for before, after in pairwise(rates)]
    first_plateau = next((points[index][0] for index, gain in enumerate(gains) if gain <= MIN_GAIN), points[-1][0])
    fastest = points[rates.index(max(rates))][0]
    acceptable = [
        (rate, size) for rate, (size, latency) in zip(rates, points, strict=True) if latency <= (target_ms or 0)
    ]
    return Optimum(first_plateau, fastest, max(acceptable)[1] if target_ms is not None and acceptable else None)


# --- sweep -------------------------------------------------------------------------------------------------------
# A1 and A15 over the runs of a sweep: throughput and roofline of a model over its batch sizes.


def model_sweep(traces: Sequence[Trace], target_ms: float | None = None) -> Table:
    """Return A1's latency and throughput by batch size, and which size is optimal by each reading of the rule.

    Args:
        traces: traces of one model; each may hold several batch sizes.
        target_ms: the longest latency that is acceptable.

    Returns:
        `gain_percent` is the throughput gained over the next smaller size. See `optimal_batch` for `first_plateau`,
        `max_throughput` and `within_target`, which are true at one size each, or at none.

    Raises:
        AnalysisError: there is no trace, or a trace has no timed step or no batch size.
    """
    selected = "batch_size, latency_ms, low_ms, high_ms, samples_per_s"
    model_rows = (row for trace in traces for row in model_information(trace).select(selected).fetchall())
    rows = sorted(model_rows, key=lambda row: row[0] or 0)
    if not rows or rows[0][0] is None:
        raise AnalysisError("a sweep needs traces whose batch size is known; set it with profile(batch_size=…)")
    optimum = optimal_batch([row[0] for row in rows], [row[1] for row in rows], target_ms)
    table: list[tuple[Any, ...]] = []
    for index, row in enumerate(rows):
        gain = 100 * (row[4] / rows[index - 1][4] - 1) if index else None
        table.append((*row, gain, *(row[0] == size for size in optimum)))
    columns = {
        "batch_size": "BIGINT",
        **dict.fromkeys(("latency_ms", "low_ms", "high_ms", "samples_per_s", "gain_percent"), "DOUBLE"),
        **dict.fromkeys(optimum._fields, "BOOLEAN"),
    }
    return values(traces[0], "a1_sweep", columns, table)


def model_roofline(traces: Sequence[Trace]) -> Table:
    """Return A15's row of each trace, by batch size: the model's points under the roof.

    Raises:
        AnalysisError: there is no trace, or A15 refuses one.
    """
    if not traces:
        raise AnalysisError("a model roofline needs at least one trace")
    tables = [kernels_by_model(trace) for trace in traces]
    columns = dict(zip(tables[0].columns, map(str, tables[0].types), strict=True))
    rows = [row for table in tables for row in table.fetchall()]
    return values(traces[0], "a15_sweep", columns, sorted(rows, key=lambda row: row[0] or 0))
