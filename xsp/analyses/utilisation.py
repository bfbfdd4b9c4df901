"""Model FLOPs utilisation: counted operations as a share of the operations that the device could do in the same time.

The operations of each kernel are compared with the peak of their own precision, so the peak of work of several types is
the sum of the operations over the sum of operations / peak. Operations are those of `xsp.cost.flops`, which counts
products, convolutions and attention, including recomputed ones (so with activation recomputation this is the hardware
FLOPs utilisation of the authors of PaLM; Chowdhery et al., arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xsp import account
from xsp.account.entries import RECORDED
from xsp.analyses.contract import Table, analysis, values
from xsp.analyses.kernel import MIN_KNOWN_PERCENT, common_tables
from xsp.analyses.modules import PATHS, make_paths
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

STEP, ALL_STEPS, PHASE, MODULE = "step", "all steps", "phase", "module"
WALL, LOOP, DEVICE, OPERATORS = "wall", "loop", "device time", "operators' time"

_COLUMNS = {
    "of": "VARCHAR", "name": "VARCHAR", "mfu_percent": "DOUBLE", "why_null": "VARCHAR", "ms": "DOUBLE",
    "time": "VARCHAR", "tflop_per_s": "DOUBLE", "precision": "VARCHAR", "peak_tflop_per_s": "DOUBLE",
    "tflop": "DOUBLE", "flops_known_percent": "DOUBLE", "calls": "BIGINT",
}  # fmt: skip


class CountedWork(NamedTuple):
    """Operations of some kernels: their number, time at the peak, element types, and the share that is known."""

    flops: float | None
    peaked_flops: float | None
    """Operations whose type has a known peak."""
    ideal_ns: float | None
    """Time of `peaked_flops` at the peak, in nanoseconds."""
    known_percent: float | None
    """Percent of the kernels' time for which the operations are known."""
    precision: str | None


_WORK = """
    sum(whole_flops)::DOUBLE AS flops,
    (sum(whole_flops) FILTER (peak_gflop_per_s IS NOT NULL))::DOUBLE AS peaked_flops,
    sum(whole_flops / peak_gflop_per_s)::DOUBLE AS ideal_ns,
    100.0 * coalesce(sum(ns) FILTER (whole_flops IS NOT NULL OR none_counted), 0)
        / nullif(sum(ns) FILTER (computes), 0) AS known_percent,
    nullif(array_to_string(
        list_sort(list(DISTINCT coalesce(precision, 'unknown')) FILTER (whole_flops > 0)), ', '), '') AS precision
"""


@analysis("mfu", "Model FLOPs utilisation", Level.OP)
def model_flops_utilisation(trace: Trace) -> Table:
    """Counted operations over time, in percent of the device's peak in their precision: of steps, phases, modules.

    The time of a step is the wall time until the next step begins (`wall`), for the last step until its last kernel
    ends; in a run of xsp's own it is the time of an iteration that was not recorded (`loop`). The time of a phase or a
    module is the time in which its kernels ran (`device time`; `operators' time` without a device): its value describes
    the kernels, that of a step the whole program. Kernels count for the innermost module; modules of one path, as in
    `modules`, are one row; they follow the phases, longest first.

    `mfu_percent` is null, with the reason in `why_null`, if operations are known for less than 90 % of the kernels'
    time, or a peak for less than 90 % of the operations: the share of a part would not be that of the whole. Peaks are
    measured or quoted, dense, see docs/understand/rooflines.md; `peak_tflop_per_s` is the combined peak of the types.
    """
    on_device = trace.has(Level.KERNEL)
    make_paths(trace)
    total = next((row[1] for row in _work(trace, "1", "true")), CountedWork(None, None, None, None, None))
    rows = [_row(scope, name, work, ns, time, devices, None)
            for scope, name, work, ns, time, devices in _steps(trace, total)]  # fmt: skip
    time = DEVICE if on_device else OPERATORS
    for scope, group, condition in (
        (PHASE, "coalesce(phase, 'forward')", "true"),
        (MODULE, "path", "path IS NOT NULL"),
    ):
        rows += [
            _row(scope, name, work, ns, time, 1, calls) for name, work, ns, calls in _work(trace, group, condition)
        ]
    return values(trace, "model_flops_utilisation", _COLUMNS, rows)


def _work(trace: Trace, group: str, condition: str) -> list[tuple[str, CountedWork, float, int]]:
    """Return groups of kernels: name, work, the nanoseconds in which a device ran any of them, number of calls."""
    previous_end = "max(start_ns + dur_ns) OVER (PARTITION BY device, group_name ORDER BY start_ns, span_id "
    previous_end += "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    running_ns = "ns"
    if trace.has(Level.KERNEL):
        running_ns = "ns * greatest(start_ns + dur_ns - greatest(start_ns, coalesce(until_ns, start_ns)), 0)"
        running_ns = f"{running_ns}::DOUBLE / nullif(dur_ns, 0)"
    rows = trace.sql(
        f"""
        WITH {common_tables(trace)}, {PATHS}, grouped AS (
            SELECT kernels.*, {group} AS group_name, placed.device
            FROM kernels LEFT JOIN (SELECT span_id, device FROM merged) placed ON placed.span_id = kernels.span_id
            LEFT JOIN paths ON paths.layer_id = kernels.layer_id
            WHERE computes AND {condition}
        ), running AS (
            SELECT *, {previous_end} AS until_ns FROM grouped
        )
        SELECT group_name, {_WORK}, sum({running_ns})::DOUBLE AS ran_ns, sum(calls)::BIGINT AS calls
        FROM running LEFT JOIN roofs USING (precision) GROUP BY group_name ORDER BY ran_ns DESC, group_name
        """
    ).fetchall()
    return [(row[0], CountedWork._make(row[1:6]), row[6] or 0.0, row[7]) for row in rows]


_STEPS = f"""
    WITH steps AS (
        SELECT rank, step, any_value(name) AS name, min(start_ns) AS start_ns, max(start_ns + dur_ns) AS end_ns
        FROM spans WHERE kind = '{Kind.STEP}' AND step IS NOT NULL AND timed IS NOT false GROUP BY rank, step
    ), device_ends AS (
        SELECT rank, step, max(start_ns + dur_ns) AS device_end_ns, count(DISTINCT device) AS devices FROM spans
        WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}' GROUP BY rank, step
    ), counted AS (
        SELECT rank, step, sum(flops)::DOUBLE AS flops FROM spans
        WHERE device IS NULL AND level >= {int(Level.OP)} GROUP BY rank, step
    )
    SELECT steps.rank, steps.name,
           (CASE WHEN (lead(steps.step) OVER line) = steps.step + 1 THEN lead(start_ns) OVER line
                 ELSE greatest(end_ns, coalesce(device_end_ns, end_ns)) END - start_ns)::DOUBLE AS ns,
           greatest(coalesce(devices, 1), 1) AS devices, flops,
           (SELECT sum(flops)::DOUBLE FROM merged WHERE device IS NULL AND level >= {int(Level.OP)}) AS merged_flops
    FROM steps LEFT JOIN device_ends USING (rank, step) LEFT JOIN counted USING (rank, step)
    WINDOW line AS (PARTITION BY steps.rank ORDER BY steps.step)
    ORDER BY steps.rank, steps.step
"""

Step = tuple[str, str | None, CountedWork, float, str, int]


def _steps(trace: Trace, merged_work: CountedWork) -> list[Step]:
    """Return steps with their work, their time in nanoseconds, the kind of this time, and the number of devices.

    The operations of the merged step are scaled by the ratio of the operations that the operators of both steps state.
    """
    rows = trace.sql(_STEPS).fetchall()
    devices = max((row[3] for row in rows), default=1)
    main = account.of(trace).main
    if main is not None and main.time.ms is not None and main.time.source != RECORDED:
        return [(STEP, None, merged_work, 1e6 * main.time.ms, LOOP, devices)]
    steps: list[Step] = []
    ranks = len({row[0] for row in rows})
    for rank, name, ns, used_devices, flops, merged in rows:
        work = _scaled(merged_work, flops / merged if flops and merged else 1.0)
        steps.append((STEP, f"rank {rank} {name}" if ranks > 1 else name, work, ns, WALL, used_devices))
    if len(steps) > 1:
        total = _scaled(merged_work, sum((step[2].flops or 0.0) / (merged_work.flops or 1.0) for step in steps))
        steps.insert(0, (ALL_STEPS, None, total, sum(step[3] for step in steps), WALL, devices))
    return steps


def _scaled(work: CountedWork, factor: float) -> CountedWork:
    flops, peaked, ideal = (None if value is None else value * factor for value in work[:3])
    return work._replace(flops=flops, peaked_flops=peaked, ideal_ns=ideal)


def _row(
    scope: str, name: str | None, work: CountedWork, ns: float, time: str, devices: int, calls: int | None
) -> tuple[Any, ...]:
    reason = _null_reason(work, ns)
    is_rate_known = (work.known_percent or 0.0) >= MIN_KNOWN_PERCENT and work.flops is not None and ns > 0
    peak = work.peaked_flops / work.ideal_ns / 1e3 if work.peaked_flops and work.ideal_ns else None
    return (
        scope,
        name,
        100 * (work.ideal_ns or 0.0) / (ns * devices) if reason is None else None,
        reason,
        ns / 1e6,
        time,
        work.flops / ns / 1e3 if is_rate_known and work.flops is not None else None,
        work.precision,
        None if peak is None else peak * devices,
        None if work.flops is None else work.flops / 1e12,
        work.known_percent,
        calls,
    )


def _null_reason(work: CountedWork, ns: float) -> str | None:
    """Return why the share of the peak is unknown; None if it is known."""
    if (work.known_percent or 0.0) < MIN_KNOWN_PERCENT:
        return f"FLOPs {work.known_percent or 0.0:.0f} % known"
    if not work.flops:
        return "no FLOPs"
    if 100 * (work.peaked_flops or 0.0) < MIN_KNOWN_PERCENT * work.flops:
        return f"no peak for {work.precision}"
    return None if ns > 0 else "no time"
