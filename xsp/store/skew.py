"""Ranks on one clock: when each of them arrived at each collective that they share.

A collective is matched across ranks by its id (communicator and number). If the source has no ids, the n-th collective
of a name on one rank is the n-th of that name on the others, provided that all ranks have the same number of them and
their ends then agree; otherwise there is no answer. Clocks are aligned by the ends (`align`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from xsp.errors import AnalysisError
from xsp.store.collectives import COLLECTIVES, SYNCHRONOUS
from xsp.store.devicework import prepare
from xsp.store.trace import Trace

RANKS = "SELECT DISTINCT rank FROM spans WHERE rank IS NOT NULL ORDER BY rank"
"""SQL of the ranks of a trace."""

_MATCHED = f"""
    {COLLECTIVES},
    counted AS (
        SELECT *, count(*) OVER (PARTITION BY rank, id) AS id_count,
               row_number() OVER (PARTITION BY rank, collective, communicator, full_name ORDER BY start_ns) AS position
        FROM collectives
    ),
    keyed AS (
        SELECT *, CASE WHEN {{by_id}} THEN CASE WHEN id IS NOT NULL AND id_count = 1 THEN id END
                       ELSE concat_ws(' ', communicator, collective, split_part(full_name, '(', 1), position) END AS key
        FROM counted
    ),
    matched AS MATERIALIZED (
        SELECT keyed.* FROM keyed JOIN (
            SELECT key FROM keyed WHERE key IS NOT NULL GROUP BY key HAVING count(DISTINCT rank) > 1
        ) USING (key)
    )
"""


def aligned_sql(trace: Trace, identity: str) -> str:
    """Return the SQL of `arrived` (per rank and collective) and `shared` (per collective), on one clock.

    Arrivals are relative to the first one: the sum of six ranks' nanoseconds since the epoch overflows 64 bits.
    """
    clocks, by_id = _clocks(trace, identity)
    rows = ", ".join(f"({rank}, {clock.offset_ns}, {clock.uncertainty_ns})" for rank, clock in clocks.items())
    return f"""
        {_MATCHED.format(by_id=by_id)},
        clocks AS (SELECT * FROM (VALUES {rows}) AS of_ranks(rank, offset_ns, uncertainty_ns)),
        arrived AS (
            SELECT matched.*, start_ns - (SELECT min(start_ns) FROM matched) - round(offset_ns)::BIGINT AS arrival_ns,
                   end_ns - start_ns AS ns, uncertainty_ns
            FROM matched JOIN clocks USING (rank)
        ),
        spread AS (
            SELECT key, any_value(collective) AS collective, any_value(communicator) AS communicator,
                   max(bytes) AS bytes, any_value(step) AS step, count(*) AS ranks,
                   min(arrival_ns) AS first_ns, max(arrival_ns) AS last_ns,
                   first(rank ORDER BY arrival_ns, rank) AS first_rank,
                   first(rank ORDER BY arrival_ns DESC, rank) AS last_rank, last_ns - first_ns AS skew_ns,
                   first(uncertainty_ns ORDER BY arrival_ns, rank)
                       + first(uncertainty_ns ORDER BY arrival_ns DESC, rank) AS uncertainty_ns, min(ns) AS transfer_ns,
                   count(*) * last_ns - sum(arrival_ns) AS waited_ns,
                   list((rank, arrival_ns) ORDER BY rank) AS arrivals
            FROM arrived GROUP BY key HAVING count(*) > 1
        ),
        shared AS (
            SELECT * EXCLUDE (arrivals), to_json(map_from_entries([
                       (arrival[1]::VARCHAR, (arrival[2] - first_ns) / 1e3) FOR arrival IN arrivals
                   ]))::VARCHAR AS arrivals_us
            FROM spread
        )
    """


def _clocks(trace: Trace, identity: str) -> tuple[dict[int, ClockOffset], bool]:
    """Return the clocks of the ranks that share collectives, and whether collectives are matched by ids."""
    prepare(trace)
    ranks = [rank for (rank,) in trace.con.execute(RANKS).fetchall()]
    by_id = _has_ids(trace, identity)
    differences, length_ns = _differences(trace, by_id)
    if not differences:
        raise AnalysisError(f"{identity}: the ranks of {trace.name!r} share no collective with an end on all of them")
    widest = max(difference.uncertainty_ns for difference in differences)
    if not by_id and widest > length_ns:
        raise AnalysisError(
            f"{identity}: the source does not number the collectives, and matched in order their ends differ by "
            f"{widest / 1e3:.0f} µs, more than their duration; record with a PyTorch that writes sequence numbers"
        )
    return align(ranks, differences), by_id


def _has_ids(trace: Trace, identity: str) -> bool:
    """Return whether collectives carry ids that ranks share.

    Raises:
        AnalysisError: collectives have no ids, and the ranks have different numbers of them.
    """
    shared = trace.con.execute(f"WITH {_MATCHED.format(by_id=True)} SELECT count(*) FROM matched").fetchall()[0][0]
    if shared:
        return True
    rows = trace.con.execute(
        f"""
        WITH {COLLECTIVES},
        counts AS (
            SELECT collective, communicator, full_name, rank, count(*) AS calls FROM collectives GROUP BY ALL
        )
        SELECT full_name, min(calls), max(calls) FROM counts GROUP BY collective, communicator, full_name
        HAVING min(calls) <> max(calls) OR count(*) <> (SELECT count(*) FROM ({RANKS})) LIMIT 1
        """
    ).fetchall()
    if rows:
        name, smallest, largest = rows[0]
        raise AnalysisError(
            f"{identity}: the source does not number the collectives, and the ranks hold different numbers of them "
            f"({str(name).split('(')[0]}: {smallest} to {largest}, or none on some); record whole steps on all ranks"
        )
    return False


def _differences(trace: Trace, by_id: bool) -> tuple[list[ClockDifference], float]:
    """Return the clock difference between each rank and the lowest rank of its collectives, and the longest of their
    median durations, in nanoseconds."""
    rows = trace.con.execute(
        f"""
        WITH {_MATCHED.format(by_id=by_id)},
        simultaneous AS (
            SELECT key, rank, end_ns, end_ns - start_ns AS ns, min(rank) OVER (PARTITION BY key) AS reference,
                   arg_min(end_ns, rank) OVER (PARTITION BY key) AS reference_ns
            FROM matched WHERE collective IN {SYNCHRONOUS} OR collective = 'unknown'
        )
        SELECT reference, rank, median(end_ns - reference_ns), quantile_cont(end_ns - reference_ns, [0.05, 0.95]),
               median(ns)
        FROM simultaneous WHERE rank <> reference GROUP BY reference, rank
        """
    ).fetchall()
    differences = [
        ClockDifference(reference, rank, middle, (quantiles[1] - quantiles[0]) / 2)
        for reference, rank, middle, quantiles, _ in rows
    ]
    return differences, max((row[-1] for row in rows), default=0.0)


# --- alignment ---------------------------------------------------------------------------------------------------
# Alignment of the clocks of several ranks, by collectives that end on all of them at once.
#
# A collective that all ranks take part in (all-reduce, all-gather …) cannot end on one rank before the last one has
# arrived, and ends on all of them within some microseconds. So the difference between two clocks is the median
# difference between the ends of the collectives that both ranks recorded; half the width of the middle 90 % of these
# differences is its uncertainty.


class ClockDifference(NamedTuple):
    """How far the clock of one rank is ahead of another's, in nanoseconds."""

    reference: int
    rank: int
    ahead_ns: float
    uncertainty_ns: float


class ClockOffset(NamedTuple):
    """The offset to subtract from a rank's times to place them on the lowest rank's clock, in nanoseconds."""

    offset_ns: float
    uncertainty_ns: float


def align(ranks: Iterable[int], differences: Iterable[ClockDifference]) -> dict[int, ClockOffset]:
    """Return the clock of each rank relative to the lowest rank's, along the most certain differences.

    Args:
        ranks: all ranks.
        differences: differences between pairs; a rank without a chain of pairs to the lowest rank is left out.

    Returns:
        Rank → clock. Uncertainties add up along the chain from the lowest rank.
    """
    neighbours: dict[int, list[ClockDifference]] = {rank: [] for rank in ranks}
    for difference in differences:
        neighbours[difference.reference].append(difference)
        neighbours[difference.rank].append(
            ClockDifference(difference.rank, difference.reference, -difference.ahead_ns, difference.uncertainty_ns)
        )
    clocks: dict[int, ClockOffset] = {}
    queue = [(0.0, min(neighbours), 0.0)] if neighbours else []
    while queue:
        uncertainty, rank, offset = heapq.heappop(queue)
        if rank in clocks:
            continue
        clocks[rank] = ClockOffset(offset, uncertainty)
        for difference in neighbours[rank]:
            if difference.rank not in clocks:
                heapq.heappush(
                    queue, (uncertainty + difference.uncertainty_ns, difference.rank, offset + difference.ahead_ns)
                )
    return clocks
