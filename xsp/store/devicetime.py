"""The time of an iteration whose pace the device sets, from the waits for it before and after recorded steps.

A host that runs ahead of its device is not timed by its own steps: the first take as long as their launches, the later
ones, once the queue of launches is full, as long as the device. But each recorded step begins and ends when the device
is idle. So the unrecorded steps between two recorded ones, a **burst**, are timed from one idle device to the next,
with all of the work that was launched in them. That time contains the filling and the draining of the pipeline once,
and so does a single step that runs alone. Their difference is the time of the other steps at the pace of the device:

    (time of a burst of n steps - time of a step alone) / (n - 1)

The host's own time decides where the device did not lag behind at the end of a burst.

Collectors of a recorded step may be on before it begins (see `xsp.record.window`). Then the device was idle when they
were switched on: the burst ends there, and the iteration of the step alone lasts from there to the end of the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import duckdb

from xsp import stats, table
from xsp.schema import Kind, Level

BARE = int(Level.APPLICATION)

MIN_WAIT_SHARE = 0.05
"""Least wait for the device after a burst, as a share of a step alone, from which the device sets the pace."""


class LoopRow(NamedTuple):
    """What is read of a row of the loop; times in nanoseconds."""

    step: int
    steps: int
    kind: int
    rung: int
    start_ns: int
    dur_ns: int
    before_ns: int | None
    own_ns: int
    window_ns: int | None = None
    """Part of `before_ns` in which collectors were on; None if they were switched on with the step."""

    @property
    def end_ns(self) -> int:
        """End of its last step, without time between its steps."""
        return self.start_ns + self.dur_ns


@dataclass(frozen=True)
class Burst:
    """Unrecorded steps between two recorded ones."""

    total_ns: int
    """From one idle device to the next, without the time that xsp itself took while the device was idle."""

    wait_ns: float
    """Wait of the host for the device at the end."""

    own_ns: int
    """Time that xsp took between the steps."""

    kinds: tuple[tuple[int, int], ...]
    """Kinds of its rows with their numbers of steps, in order."""

    rows: frozenset[int]
    """Numbers of the first steps of its rows."""

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return sum(count for _, count in self.kinds)


@dataclass(frozen=True)
class DevicePace:
    """The iterations of a kind at the pace of the device."""

    values: tuple[tuple[float, int], ...]
    """For each burst at the pace of the device the time of an iteration in nanoseconds, and the number of steps."""

    host_rows: frozenset[int]
    """Numbers of the first steps of the rows in bursts at the pace of the host."""


def paces(con: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], DevicePace]:
    """Return the iterations at the pace of the device, by rank and kind; kinds with too few of them are left out.

    Args:
        con: holds `loop`, and `before` if anything was recorded before steps.
    """
    windows = "SELECT NULL::INTEGER AS rank, NULL::INTEGER AS step, NULL::BIGINT AS window_ns"
    if table.has_table(con, "before"):
        windows = f"SELECT rank, step, max(dur_ns) AS window_ns FROM before WHERE kind = '{Kind.BEFORE}' GROUP BY ALL"
    rows = con.execute(
        f"""
        SELECT rank, step, steps, kind, rung, start_ns, dur_ns, before_ns, coalesce(own_ns, 0), window_ns
        FROM loop LEFT JOIN ({windows}) USING (rank, step) WHERE status = 'ok' ORDER BY rank, step
        """
    ).fetchall()
    by_rank: defaultdict[int, list[LoopRow]] = defaultdict(list)
    for rank, *values in rows:
        by_rank[rank].append(LoopRow(*values))
    return {(rank, kind): pace for rank, rank_rows in by_rank.items() for kind, pace in paces_of(rank_rows).items()}


def paces_of(rows: Sequence[LoopRow]) -> dict[int, DevicePace]:
    """Return the iterations at the pace of the device in the loop of one rank, by kind.

    Args:
        rows: rows of the loop, in their order.
    """
    usual_ns = _usual_before(rows)
    alone_ns = _alone(rows, usual_ns)
    all_bursts = [
        burst
        for burst in _bursts(rows, usual_ns)
        if burst.steps > 1 and all(kind in alone_ns for kind, _ in burst.kinds)
    ]
    bursts = [burst for burst in all_bursts if burst.wait_ns > max(burst.own_ns, _least_wait_ns(burst, alone_ns))]
    if not bursts:
        return {}
    by_host = [burst.rows for burst in all_bursts if burst.wait_ns <= _least_wait_ns(burst, alone_ns)]
    host_rows: frozenset[int] = frozenset().union(*by_host)
    values: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for burst in bursts:
        last_ns = alone_ns[burst.kinds[-1][0]]
        # over the time that the steps of the burst would take one at a time, each with an idle device around it
        factor = (burst.total_ns - last_ns) / (sum(alone_ns[kind] * count for kind, count in burst.kinds) - last_ns)
        for kind, count in _counts(burst).items():
            values[kind].append((max(0.0, factor) * alone_ns[kind], count))
    return {kind: DevicePace(tuple(kind_values), host_rows) for kind, kind_values in values.items()}


def busy_ns(con: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], float]:
    """Return how long the device is busy in a step, in nanoseconds, by rank and kind.

    It is the mean over the recorded steps of the busiest device's time, shortened as much as a step is by recording
    less of it. No iteration takes less time.

    Args:
        con: holds `loop`, `alike` and `alike_spans`.
    """
    rows = con.execute(
        f"""
        WITH work AS (
            SELECT rank, step, device, start_ns, start_ns + dur_ns AS end_ns,
                   max(start_ns + dur_ns) OVER (
                       PARTITION BY rank, step, device ORDER BY start_ns, dur_ns
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                   ) AS busy_until_ns
            FROM alike_spans WHERE device IS NOT NULL AND timed
        ), by_device AS (
            SELECT rank, step, device, sum(greatest(0, end_ns - greatest(start_ns, coalesce(busy_until_ns, 0)))) AS ns
            FROM work GROUP BY ALL
        ), recorded AS (
            SELECT rank, kind, rung, avg(dur_ns) AS ns FROM loop WHERE rung <> {BARE} AND status = 'ok' GROUP BY ALL
        )
        SELECT loop.rank, loop.kind, avg(busy.ns), avg(loop.dur_ns),
               (SELECT arg_min(ns, rung) FROM recorded r WHERE r.rank = loop.rank AND r.kind = loop.kind)
        FROM (SELECT rank, step, max(ns) AS ns FROM by_device GROUP BY ALL) busy JOIN loop USING (rank, step)
        WHERE loop.rung <> {BARE} AND loop.status = 'ok' AND loop.dur_ns > 0
        GROUP BY loop.rank, loop.kind
        """
    ).fetchall()
    return {(rank, kind): busy * min(1.0, shallow_ns / deep_ns) for rank, kind, busy, deep_ns, shallow_ns in rows}


def _usual_before(rows: Sequence[LoopRow]) -> dict[int, float]:
    """Return the median time before an unrecorded step, by kind: it contains no wait for the device."""
    by_kind: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.rung == BARE and row.before_ns is not None:
            by_kind[row.kind].append(row.before_ns)
    return {kind: stats.percentile(times, 0.5) for kind, times in by_kind.items()}


def _alone(rows: Sequence[LoopRow], usual_ns: Mapping[int, float]) -> dict[int, float]:
    """Return the time of a step that begins and ends with an idle device, by kind.

    It is the mean of the recorded steps of the shallowest rung, whose collectors add least, and the time before: that
    of the window, else the usual one.
    """
    shallowest: dict[int, int] = {}
    for row in rows:
        if row.rung != BARE:
            shallowest[row.kind] = min(row.rung, shallowest.get(row.kind, row.rung))
    return {
        kind: stats.trimmed_mean(
            [
                row.dur_ns + (usual_ns.get(kind, 0.0) if row.window_ns is None else row.window_ns)
                for row in rows
                if row.kind == kind and row.rung == rung
            ]
        )
        for kind, rung in shallowest.items()
    }


def _bursts(rows: Sequence[LoopRow], usual_ns: Mapping[int, float]) -> Iterator[Burst]:
    """Yield the unrecorded steps between each two consecutive recorded ones."""
    before: LoopRow | None = None
    unrecorded: list[LoopRow] = []
    for row in rows:
        if row.rung == BARE:
            unrecorded.append(row)
            continue
        if before is not None and unrecorded and _is_gapless([before, *unrecorded, row]):
            window_ns = row.window_ns or 0
            own_before_ns = usual_ns.get(row.kind, 0.0) if row.window_ns is None else float(window_ns)
            yield Burst(
                row.start_ns - row.own_ns - window_ns - before.end_ns - unrecorded[0].own_ns,
                max(0.0, (row.before_ns or 0) - own_before_ns),
                sum(bare.own_ns * bare.steps for bare in unrecorded[1:]),
                tuple((bare.kind, bare.steps) for bare in unrecorded),
                frozenset(bare.step for bare in unrecorded),
            )
        before, unrecorded = row, []


def _is_gapless(rows: Sequence[LoopRow]) -> bool:
    """Return whether no step is missing between these, such as one that failed."""
    return all(row.step + row.steps == rows[index + 1].step for index, row in enumerate(rows[:-1]))


def _counts(burst: Burst) -> Counter[int]:
    counts: Counter[int] = Counter()
    for kind, count in burst.kinds:
        counts[kind] += count
    return counts


def _least_wait_ns(burst: Burst, alone_ns: Mapping[int, float]) -> float:
    """Return the wait at the end of a burst above which the device lagged behind the host.

    If it had less work left than xsp took time in the burst, it may have been idle meanwhile all the same.
    """
    return MIN_WAIT_SHARE * alone_ns[burst.kinds[-1][0]]
