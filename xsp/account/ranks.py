"""The rank of a job that others wait for: from collectives that several ranks recorded."""

from __future__ import annotations

from collections.abc import Sequence

from xsp.account import entries as names
from xsp.account.entries import Iterations, LateRank
from xsp.errors import AnalysisError
from xsp.store.collectives import reason_without_collectives
from xsp.store.skew import aligned_sql
from xsp.store.trace import Trace

MIN_WAITED_SHARE = 0.25
"""Least share of the exposed communication of all ranks that is waiting for one of them, for it to be named."""


def late_rank(trace: Trace, found: Sequence[Iterations]) -> LateRank | None:
    """Return the rank that costs the others most, with the collective at which it was latest; None if there is none."""
    by_rank = {each.rank: each for each in reversed(found)}
    if len(by_rank) < 2 or reason_without_collectives(trace) is not None:
        return None
    try:
        rows = trace.con.execute(
            f"""
            WITH {aligned_sql(trace, "account")},
            steps AS (
                SELECT shared.*, row_number() OVER (PARTITION BY step, collective ORDER BY (
                    SELECT min(arrival_ns) FROM arrived WHERE arrived.key = shared.key)) AS position FROM shared
                WHERE skew_ns > uncertainty_ns
            )
            SELECT last_rank, sum(waited_ns)::DOUBLE, max(skew_ns)::DOUBLE, arg_max(collective, skew_ns),
                   arg_max(position, skew_ns) FROM steps GROUP BY last_rank ORDER BY 2 DESC LIMIT 1
            """
        ).fetchall()
    except AnalysisError:
        return None  # the ranks' collectives cannot be matched; the analysis `stragglers` says why
    if not rows:
        return None
    rank, waited_ns, late_ns, collective, position = rows[0]
    steps = max(1, max(each.recorded for each in by_rank.values()))
    exposed_ms = sum(side.ms(names.COMMUNICATION) for each in by_rank.values() for side in each.devices)
    waited_ms = waited_ns / 1e6 / steps
    if not exposed_ms or waited_ms < MIN_WAITED_SHARE * exposed_ms:
        return None
    return LateRank(
        int(rank), late_ns / 1e6, str(collective), position == 1, min(waited_ms, exposed_ms), exposed_ms, len(by_rank)
    )
