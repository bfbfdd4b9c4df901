"""Waits of the ranks of a job for each other, from collectives that several ranks recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xsp.account import entries as names
from xsp.account.entries import Iterations, LateRank
from xsp.account.sweep import Union, union, without
from xsp.errors import AnalysisError
from xsp.store.collectives import COLLECTIVES, reason_without_collectives
from xsp.store.devicework import prepare
from xsp.store.skew import RANKS, aligned_sql
from xsp.store.trace import Trace


class Collectives(NamedTuple):
    """The time that a rank is in collectives, on its own clock."""

    waiting: Union
    """Until the last rank has arrived."""

    transfer: Union
    """From then on; the whole time of collectives that only one rank recorded."""

    on_device: bool


def collectives(trace: Trace) -> dict[int, Collectives]:
    """Return the collectives of each rank; none for a trace of a single rank without collectives of its host."""
    if reason_without_collectives(trace) is not None:
        return {}
    ranks = [rank for (rank,) in trace.con.execute(RANKS).fetchall()]
    prepare(trace)
    rows = trace.con.execute(
        f"WITH {COLLECTIVES} SELECT rank, start_ns, end_ns, 0, device IS NOT NULL FROM collectives"
    ).fetchall()
    if len(ranks) > 1:
        try:
            matched = trace.con.execute(
                f"""
                WITH {_aligned(trace)}
                SELECT a.rank, a.start_ns, a.end_ns, CASE WHEN skew_ns > shared.uncertainty_ns
                       THEN least(greatest(last_ns - arrival_ns, 0), a.end_ns - a.start_ns) ELSE 0 END
                FROM arrived a JOIN shared USING (key)
                """
            ).fetchall()
            waits = {(rank, start): waited for rank, start, _, waited in matched}
            rows = [(rank, start, end, waits.get((rank, start), 0), device) for rank, start, end, _, device in rows]
        except AnalysisError:
            pass  # the ranks' collectives cannot be matched; the analysis `stragglers` says why
    result = {}
    for rank in {row[0] for row in rows}:
        own = [row for row in rows if row[0] == rank]
        starts, ends, waited = (np.array([row[place] for row in own], np.int64) for place in (1, 2, 3))
        waiting = union(starts, starts + waited)
        result[int(rank)] = Collectives(waiting, without(union(starts, ends), waiting), any(row[4] for row in own))
    return result


MIN_WAITED_SHARE = 0.25
"""Least share of the exposed communication of all ranks that is waiting for one of them, for it to be named."""

MIN_WAITED_OF_ITERATION = 0.03
"""Least share of an iteration that each other rank waits for it."""

MIN_OF_ALL_WAITS = 0.5
"""Least share of all waits of ranks for each other that is waiting for it; of few ranks, half as much again as an equal
share."""


def late_rank(trace: Trace, found: Sequence[Iterations]) -> LateRank | None:
    """Return the rank that costs the others most, with the collective at which it was latest; None if there is none."""
    by_rank = {each.rank: each for each in reversed(found)}
    if len(by_rank) < 2 or reason_without_collectives(trace) is not None:
        return None
    try:
        rows = trace.con.execute(
            f"""
            WITH {_aligned(trace)},
            steps AS (
                SELECT shared.*, row_number() OVER (PARTITION BY step, collective ORDER BY (
                    SELECT min(arrival_ns) FROM arrived WHERE arrived.key = shared.key)) AS position FROM shared
                WHERE skew_ns > uncertainty_ns
            ), at_places AS (
                SELECT last_rank, collective, position, sum(waited_ns)::DOUBLE AS waited_ns,
                       median(skew_ns)::DOUBLE AS skew_ns FROM steps GROUP BY last_rank, collective, position
            )
            SELECT last_rank, sum(waited_ns), arg_max(skew_ns, waited_ns), arg_max(collective, waited_ns),
                   arg_max(position, waited_ns), (SELECT sum(waited_ns)::DOUBLE FROM steps),
                   (SELECT count(DISTINCT step) FROM shared)
            FROM at_places GROUP BY last_rank ORDER BY 2 DESC LIMIT 1
            """
        ).fetchall()
    except AnalysisError:
        return None  # the ranks' collectives cannot be matched; the analysis `stragglers` says why
    if not rows:
        return None
    rank, waited_ns, late_ns, collective, position, all_ns, steps = rows[0]
    steps = steps or max(1, max(each.recorded for each in by_rank.values()))
    on_devices = any(each.devices for each in by_rank.values())
    exposed_ms = sum(_exposed_ms(each, on_devices) for each in by_rank.values())
    waited_ms = waited_ns / 1e6 / steps
    iteration_ms = max((each.time.ms or 0.0 for each in by_rank.values()), default=0.0)
    least_ms = max(MIN_WAITED_SHARE * exposed_ms, MIN_WAITED_OF_ITERATION * iteration_ms * (len(by_rank) - 1))
    if not exposed_ms or waited_ms < least_ms or waited_ns < max(MIN_OF_ALL_WAITS, 1.5 / len(by_rank)) * all_ns:
        return None
    part, part_ms = _longer_part(by_rank, int(rank))
    if part_ms < late_ns / 2e6:
        part, part_ms = None, 0.0
    return LateRank(
        int(rank), late_ns / 1e6, str(collective), position == 1, min(waited_ms, exposed_ms), exposed_ms, len(by_rank),
        part, part_ms,
    )  # fmt: skip


def _aligned(trace: Trace) -> str:
    """Return the SQL of collectives on one clock; the clocks are computed once."""
    return trace.cached("aligned collectives", lambda: aligned_sql(trace, "account"))


def _exposed_ms(each: Iterations, on_devices: bool) -> float:
    """Return the exposed communication of a rank: of its devices, or of its host if no device communicates."""
    if on_devices:
        return sum(side.ms(names.COMMUNICATION) for side in each.devices)
    return sum(top.part(name) for top in each.host.entries for name in names.OF_COLLECTIVES)


def _longer_part(by_rank: Mapping[int, Iterations], rank: int) -> tuple[str | None, float]:
    """Return the part of the host's iteration that takes longest on a rank compared with the others, without waits."""

    def own_ms(each: Iterations) -> dict[str, float]:
        waits = (names.WAITING, *names.OF_COLLECTIVES)
        return {
            entry.name: (entry.ms or 0.0) - sum(entry.part(name) for name in waits)
            for entry in each.host.entries
            if entry.name != names.DRAINING
        }

    late = own_ms(by_rank[rank]) if rank in by_rank else {}
    others = [own_ms(each) for other, each in by_rank.items() if other != rank]
    longer = {
        name: ms - sum(other.get(name, 0.0) for other in others) / len(others) for name, ms in late.items() if others
    }
    part = max(longer, key=lambda name: longer[name], default=None)
    return part, longer[part] if part is not None else 0.0
