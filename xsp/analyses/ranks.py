"""Ranks compared: which rank arrives late at which collective, and which ranks wait for it, see `xsp.store.skew`."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.schema import Level
from xsp.store.collectives import reason_without_collectives
from xsp.store.skew import RANKS, aligned_sql
from xsp.store.trace import Trace


def _reason_without_ranks(trace: Trace) -> str | None:
    """Return why ranks cannot be compared, or None if they can."""
    reason = reason_without_collectives(trace)
    if reason is None and len(trace.con.execute(RANKS).fetchall()) < 2:
        return f"compares ranks, and {trace.name!r} holds one; load the directory that holds all of them"
    return reason


@analysis(
    "collective-skew", "Who came late to which collective", Level.MODEL, unless=_reason_without_ranks, everywhere=True
)
def collective_skew(trace: Trace) -> Table:
    """Each collective of several ranks: which rank arrived first, which last, and how long the others waited.

    `arrivals_us` is the arrival of each rank relative to the first one; `skew_us` is that of the last. `transfer_us` is
    the shortest time that any rank spent in the collective, which is that of the last to arrive: the time of the
    transfer itself. `certain` is true if the skew is larger than the uncertainty of the clocks. Longest skew first.
    """
    return trace.sql(
        f"""
        WITH {aligned_sql(trace, collective_skew.id)}
        SELECT key AS id, collective, communicator, bytes, step, ranks, first_rank, last_rank, skew_ns / 1e3 AS skew_us,
               uncertainty_ns / 1e3 AS clock_uncertainty_us, skew_ns > uncertainty_ns AS certain,
               transfer_ns / 1e3 AS transfer_us, waited_ns / 1e3 AS waited_us, arrivals_us
        FROM shared ORDER BY skew_ns DESC, id
        """
    )


@analysis("stragglers", "Who waits for whom", Level.MODEL, unless=_reason_without_ranks, everywhere=True)
def collective_waiting(trace: Trace) -> Table:
    """Each rank: how often it was last at a collective, how long the others then waited, and how long it waited itself.

    `clock_offset_us` was subtracted from the times of the rank, to place them on the clock of the lowest rank.
    `last_for_certain` counts skews that are larger than the uncertainty of the clocks. Collectives that were not found
    on another rank are counted as `unmatched`. Sorted by the waiting that a rank causes, most first.
    """
    return trace.sql(
        f"""
        WITH {aligned_sql(trace, collective_waiting.id)},
        by_rank AS (
            SELECT arrived.rank, count(*) AS collectives,
                   count(*) FILTER (WHERE rank = last_rank) AS came_last,
                   count(*) FILTER (WHERE rank = last_rank AND skew_ns > shared.uncertainty_ns) AS last_for_certain,
                   coalesce(sum(waited_ns) FILTER (WHERE rank = last_rank), 0) AS others_waited_ns,
                   sum(last_ns - arrival_ns) AS own_wait_ns, avg(arrival_ns - first_ns) AS late_ns
            FROM arrived JOIN shared USING (key) GROUP BY arrived.rank
        ),
        totals AS (SELECT rank, count(*) AS total FROM collectives GROUP BY rank)
        SELECT rank, coalesce(by_rank.collectives, 0) AS collectives,
               total - coalesce(by_rank.collectives, 0) AS unmatched,
               came_last, last_for_certain, others_waited_ns / 1e6 AS others_waited_ms, own_wait_ns / 1e6 AS waited_ms,
               late_ns / 1e3 AS mean_late_us, offset_ns / 1e3 AS clock_offset_us,
               clocks.uncertainty_ns / 1e3 AS clock_uncertainty_us
        FROM totals LEFT JOIN by_rank USING (rank) LEFT JOIN clocks USING (rank)
        ORDER BY others_waited_ms DESC NULLS LAST, rank
        """
    )
