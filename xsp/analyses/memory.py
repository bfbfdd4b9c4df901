"""Memory in use over a step, by layer, and memory that a step does not free.

There are two kinds of sources. Some report each allocation and each deallocation (Kineto's `[memory]`) as spans of kind
alloc, with negative bytes for deallocations, and often the totals of the allocator. Others report only the bytes that
were allocated between the start and the end of a span (`alloc_bytes`); then deallocations are unknown, and the columns
that need them are null.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from xsp.analyses.contract import Table, analysis, values
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import LAYERS

MIB = 1048576

_COLUMNS = {
    "device": "INTEGER",
    "kind": "VARCHAR",
    "layer_index": "INTEGER",
    "name": "VARCHAR",
    "type": "VARCHAR",
    "start_mib": "DOUBLE",
    "peak_mib": "DOUBLE",
    "end_mib": "DOUBLE",
    "growth_mib": "DOUBLE",
    "allocated_mib": "DOUBLE",
    "left_mib": "DOUBLE",
    "live_at_peak_mib": "DOUBLE",
    "peak_at_ms": "DOUBLE",
    "peak_layer": "VARCHAR",
    "peak_op": "VARCHAR",
    "basis": "VARCHAR",
}

TOTALS = "totals of the allocator"
SUMS = "sums since the recording began"
NO_FREES = "allocations alone"
OF_DEVICES = "allocations alone, of several devices together"

_MEMORY_LEVELS = f"""
    WITH read AS (
        SELECT trace_id, step, rung, rank, start_ns, parent_id, layer_id, alloc_bytes, device,
               json_extract_string(attributes, ['$.device_type', '$.device', '$.address', '$.total_allocated_bytes'])
                   AS details
        FROM spans WHERE kind = '{Kind.ALLOC}' AND alloc_bytes IS NOT NULL
          AND rank IS NOT DISTINCT FROM (SELECT min(rank) FROM spans)
    ), allocations AS (
        SELECT * EXCLUDE (device, details),
               CASE WHEN coalesce(details[1], '0') <> '0' OR device IS NOT NULL
                    THEN coalesce(device, try_cast(details[2] AS INTEGER), 0) END AS pool,
               details[3] AS address, try_cast(details[4] AS BIGINT) AS total_bytes
        FROM read
    )
    SELECT *, total_bytes IS NOT NULL AS has_total,
           coalesce(total_bytes, sum(alloc_bytes) OVER (
               PARTITION BY pool ORDER BY start_ns ROWS UNBOUNDED PRECEDING))::BIGINT AS level_bytes,
           CASE WHEN alloc_bytes > 0 AND address IS NOT NULL
                THEN lead(start_ns) OVER (PARTITION BY pool, address ORDER BY start_ns) END AS freed_ns
    FROM allocations
"""
"""Each allocation and deallocation: its pool (null: host memory, else the device), the bytes in use after it, and when
the memory was freed (null if the trace does not show it)."""

_STEP_COLUMNS = {
    "device": "INTEGER",
    "step": "INTEGER",
    **dict.fromkeys(("start_mib", "peak_mib", "end_mib", "growth_mib", "allocated_mib", "left_mib"), "DOUBLE"),
    "allocations": "BIGINT",
    "basis": "VARCHAR",
}


class _Change(NamedTuple):
    """An allocation or a deallocation; times in nanoseconds."""

    time_ns: int
    bytes: int
    level: int
    """Bytes in use after it."""
    freed_ns: int | None
    layer_id: str | None
    op: str | None
    has_total: bool
    has_address: bool


class _Interval(NamedTuple):
    """A step, a call of the model level, or a layer."""

    start: int
    end: int
    span_id: str
    kind: str
    layer_index: int | None
    name: str
    type: str | None


def _reason_without_changes(trace: Trace) -> str | None:
    query = f"SELECT 1 FROM spans WHERE kind = '{Kind.ALLOC}' AND alloc_bytes IS NOT NULL AND step IS NOT NULL LIMIT 1"
    if trace.con.execute(query).fetchall():
        return None
    return (
        f"needs each allocation and deallocation of steps, and {trace.name!r} holds none: xsp's own runs record only "
        "allocations; import a trace of torch.profiler with profile_memory=True"
    )


def _reason_without_memory(trace: Trace) -> str | None:
    """Return why a trace has neither memory changes nor layers' allocations in the merged step, or None if it does."""
    if _reason_without_changes(trace) is None:
        return None
    query = f"SELECT 1 FROM ({_ALLOCATIONS_QUERY}) LIMIT 1"
    if trace.con.execute(query).fetchall():
        return None
    return (
        f"needs allocations, and {trace.name!r} holds none in its steps; record with xsp and --levels M/L/G, or with "
        "torch.profiler and profile_memory=True"
    )


_ALLOCATIONS_QUERY = f"WITH {LAYERS} SELECT 1 AS one FROM layers WHERE self_alloc_bytes IS NOT NULL"


@analysis("memory-timeline", "Memory over the step, by layer", unless=_reason_without_memory)
def memory_timeline(trace: Trace) -> Table:
    """Memory in use at the start, at the peak and at the end of the step, of its calls and of each layer, per device.

    `growth_mib` is end minus start. `allocated_mib` is what a layer itself allocates (for the step and its calls: all
    allocations in that time), `left_mib` the part that is not freed before the end of the step, `live_at_peak_mib` the
    part that is in use at the peak of the step. `peak_layer` and `peak_op` were running at the peak of the row. A null
    device stands for host memory, or for several devices if `basis` reports that. `basis` is the source of the figures:
    totals of the allocator, sums since the recording began (memory in use before is unknown), or allocations alone
    (deallocations are unknown).
    """
    pools = _changes(trace)
    if not pools:
        return _allocations_only(trace)
    intervals = [_Interval._make(row) for row in trace.con.execute(_INTERVALS).fetchall()]
    layers = {interval.span_id: interval.name for interval in intervals if interval.layer_index is not None}
    rows = [row for device, changes in pools.items() for row in _Pool(device, changes, intervals, layers).rows()]
    return values(trace, "memory_timeline", _COLUMNS, rows)


@analysis("memory-steps", "Memory of each step", unless=_reason_without_changes)
def memory_steps(trace: Trace) -> Table:
    """Memory in use at the start, at the peak and at the end of each step, and memory that the step does not free.

    `left_mib` is what the step allocated and did not free before its end. If every step leaves memory, it is a leak; if
    only the first does, it is often state (of an optimizer, a cache). A null device stands for host memory.
    """
    trace.create_temp_table("memory_levels", _MEMORY_LEVELS)
    rows = trace.con.execute(
        f"""
        WITH steps AS (
            SELECT trace_id, step, rung, rank, max(start_ns + dur_ns) AS end_ns FROM spans
            WHERE kind = '{Kind.STEP}' AND step IS NOT NULL GROUP BY ALL
        ), ends AS (
            SELECT pool, levels.step, arg_min(level_bytes - alloc_bytes, start_ns) AS first, max(level_bytes) AS peak,
                   arg_max(level_bytes, start_ns) AS last, sum(alloc_bytes) FILTER (alloc_bytes > 0) AS allocated,
                   sum(alloc_bytes) FILTER (alloc_bytes > 0 AND coalesce(freed_ns > steps.end_ns, true)) AS left_bytes,
                   count(address) > 0 AS has_addresses, count(*) FILTER (alloc_bytes > 0) AS allocations,
                   bool_and(has_total) AS has_total
            FROM memory_levels levels JOIN steps
            ON levels.trace_id = steps.trace_id AND levels.step = steps.step
               AND levels.rung IS NOT DISTINCT FROM steps.rung AND levels.rank = steps.rank
            GROUP BY pool, levels.step
        )
        SELECT pool, step, first / {MIB}, peak / {MIB}, last / {MIB}, (last - first) / {MIB},
               coalesce(allocated, 0) / {MIB}, CASE WHEN has_addresses THEN coalesce(left_bytes, 0) / {MIB} END,
               allocations, CASE WHEN has_total THEN '{TOTALS}' ELSE '{SUMS}' END
        FROM ends ORDER BY pool NULLS FIRST, step
        """
    ).fetchall()
    return values(trace, "memory_steps", _STEP_COLUMNS, rows)


_INTERVALS = f"""
    SELECT start_ns, start_ns + dur_ns, span_id, kind, CASE WHEN level = {int(Level.LAYER)} THEN layer_index END,
           name, type
    FROM merged WHERE level IN ({int(Level.MODEL)}, {int(Level.LAYER)}) AND kind <> '{Kind.DATA}'
    ORDER BY level, layer_index, start_ns
"""


def _changes(trace: Trace) -> dict[int | None, list[_Change]]:
    """Return the allocations and deallocations of the merged step in order of time, per pool."""
    trace.create_temp_table("memory_levels", _MEMORY_LEVELS)
    rows = trace.con.execute(
        f"""
        WITH merged_step AS (
            SELECT trace_id, step, rung, rank FROM merged WHERE kind = '{Kind.STEP}' LIMIT 1
        ), ops AS (SELECT span_id, name FROM merged WHERE level >= {int(Level.OP)})
        SELECT pool, start_ns, alloc_bytes, level_bytes, freed_ns, layer_id, ops.name, has_total, address IS NOT NULL
        FROM memory_levels levels SEMI JOIN merged_step
        ON levels.trace_id = merged_step.trace_id AND levels.step IS NOT DISTINCT FROM merged_step.step
           AND levels.rung IS NOT DISTINCT FROM merged_step.rung AND levels.rank = merged_step.rank
        LEFT JOIN ops ON ops.span_id = parent_id
        ORDER BY pool NULLS FIRST, start_ns
        """
    ).fetchall()
    pools: dict[int | None, list[_Change]] = {}
    for device, *change in rows:
        pools.setdefault(device, []).append(_Change._make(change))
    return pools


class _Pool:
    """The memory of one device, or the host's, over a step."""

    def __init__(
        self, device: int | None, changes: Sequence[_Change], intervals: Sequence[_Interval], layers: dict[str, str]
    ) -> None:
        self.device, self.changes, self.intervals, self.layers = device, changes, intervals, layers
        self.times = [change.time_ns for change in changes]
        self.levels = [change.level for change in changes]
        self.has_addresses = any(change.has_address for change in changes)
        self.basis = TOTALS if all(change.has_total for change in changes) else SUMS
        self.start = min((interval.start for interval in intervals), default=self.times[0])
        self.end = max((interval.end for interval in intervals), default=self.times[-1])
        self.peak_ns = self.times[self.levels.index(max(self.levels))]
        self.by_layer: dict[str | None, list[_Change]] = {}
        for change in changes:
            self.by_layer.setdefault(change.layer_id, []).append(change)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return a row of the timeline for each interval."""
        return [self._row(interval) for interval in self.intervals]

    def _row(self, interval: _Interval) -> tuple[Any, ...]:
        first, end = bisect_left(self.times, interval.start), bisect_right(self.times, interval.end)
        start_bytes = self.levels[first - 1] if first else self.levels[0] - self.changes[0].bytes
        levels = self.levels[first:end]
        highest = max(levels, default=start_bytes)
        peak = self.changes[first + levels.index(highest)] if levels and highest > start_bytes else None
        end_bytes = levels[-1] if levels else start_bytes
        changes = (
            self.by_layer.get(interval.span_id, []) if interval.layer_index is not None else self.changes[first:end]
        )
        allocations = [change for change in changes if change.bytes > 0]
        return (
            self.device,
            interval.kind,
            interval.layer_index,
            interval.name,
            interval.type,
            start_bytes / MIB,
            max(highest, start_bytes) / MIB,
            end_bytes / MIB,
            (end_bytes - start_bytes) / MIB,
            sum(change.bytes for change in allocations) / MIB,
            self._live_mib(allocations, self.end),
            self._live_mib([change for change in allocations if change.time_ns <= self.peak_ns], self.peak_ns),
            (peak.time_ns - self.start) / 1e6 if peak is not None else None,
            self.layers.get(peak.layer_id or "") if peak is not None else None,
            peak.op if peak is not None else None,
            self.basis,
        )

    def _live_mib(self, allocations: Sequence[_Change], time_ns: int) -> float | None:
        """Return the MiB of `allocations` that are still allocated at a moment; None without addresses in the trace."""
        if not self.has_addresses:
            return None
        return sum(change.bytes for change in allocations if change.freed_ns is None or change.freed_ns > time_ns) / MIB


def _allocations_only(trace: Trace) -> Table:
    """Return what each layer itself allocates, for a trace without deallocations.

    The step's attributes name the devices; for several devices only the sum is known, and `device` is null.
    """
    return trace.sql(
        f"""
        WITH {LAYERS}, devices AS (
            SELECT DISTINCT unnest(json_extract(attributes, '$.alloc_devices')::INTEGER[]) AS device
            FROM spans WHERE kind = '{Kind.STEP}' AND json_exists(attributes, '$.alloc_devices')
                AND rank IN (SELECT rank FROM merged)
        ), used AS (
            SELECT CASE WHEN count(*) = 1 THEN min(device) END AS device,
                   CASE WHEN count(*) > 1 THEN '{OF_DEVICES}' ELSE '{NO_FREES}' END AS basis FROM devices
        )
        SELECT used.device, kind, layer_index, name, type,
               {", ".join(f"NULL::DOUBLE AS {name}" for name in ("start_mib", "peak_mib", "end_mib", "growth_mib"))},
               self_alloc_bytes / {MIB} AS allocated_mib, NULL::DOUBLE AS left_mib, NULL::DOUBLE AS live_at_peak_mib,
               NULL::DOUBLE AS peak_at_ms, NULL AS peak_layer, NULL AS peak_op, used.basis
        FROM layers, used WHERE self_alloc_bytes IS NOT NULL ORDER BY layer_index
        """
    )
