"""How much recording slows steps that are not recorded: those near recorded ones, and all since the first deep one.

Steps near recorded ones have cold caches and clocks. And some of what records operators or device work cannot be
switched off again: a profiler that has initialised itself, CUPTI, what libraries do once somebody listens. The
unrecorded steps before that first time are a reference inside the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import duckdb

from xsp import stats
from xsp.schema import Level
from xsp.store import devicetime
from xsp.store.iterations import IS_ALIKE, MIN_ROWS, WARM_UP_STEPS
from xsp.store.loop import BARE

MAX_COLD_SHARE = 0.25
"""If steps near recorded ones are slowed by more than this share, the true times of spans count as unknown."""

LATER_ROWS = 40
"""Number of rows after the first recording that are compared with the reference: few, so that a drift counts little."""


class Coldness(NamedTuple):
    """How much slower a bare step runs near recorded steps than far from them."""

    ratio: float
    steps: int


def coldness(con: duckdb.DuckDBPyConnection) -> Coldness | None:
    """Return how cold caches and clocks were when steps were recorded, from the bare steps just before them.

    Args:
        con: as in `steady_steps`.

    Returns:
        The ratio; None if there are too few such steps, or if recorded steps wait for a device longer than a step
        takes: then the steps of the host are launches, and the device decides how long a step takes.
    """
    ((count, cold_ns, steady_ns, weights, waited_ns),) = con.execute(
        f"""
        WITH followed AS (
            SELECT *, lead(rung) OVER (PARTITION BY rank ORDER BY step) AS next_rung FROM loop
        ), bare AS (
            SELECT * FROM followed WHERE rung = {BARE} AND status = 'ok' AND {IS_ALIKE}
        )
        SELECT count(*) FILTER (next_rung <> {BARE}), median(dur_ns) FILTER (next_rung <> {BARE}),
               list(dur_ns ORDER BY step) FILTER (steady), list(steps ORDER BY step) FILTER (steady),
               (SELECT median(before_ns) FROM loop WHERE rung <> {BARE} AND {IS_ALIKE}
                AND EXISTS (SELECT 1 FROM spans WHERE device IS NOT NULL))
        FROM bare
        """
    ).fetchall()
    usual_ns = stats.percentile(steady_ns, 0.5, weights) if steady_ns else 0.0
    if waited_ns is not None and waited_ns > usual_ns:
        return None
    return Coldness(cold_ns / usual_ns, count) if count >= MIN_ROWS and usual_ns else None


class ReferenceSlowdown(NamedTuple):
    """The median iterations before and after operators or device work were recorded first; nanoseconds."""

    before_ns: float
    after_ns: float
    ratio: stats.Interval
    """95 % interval of `after_ns` / `before_ns`."""


def change(con: duckdb.DuckDBPyConnection) -> ReferenceSlowdown | None:
    """Return how the iterations of the kind and rank of `alike` changed with the first deep recording.

    Args:
        con: holds `loop`, `alike` and `spans`.

    Returns:
        None if there are fewer than `MIN_ROWS` rows before or after it, if several threads ran steps at once, or if the
        device sets the pace: then the host's steps are launches.
    """
    if con.execute("SELECT 1 FROM loop WHERE beside_ns > 0 LIMIT 1").fetchall():
        return None
    if con.execute("SELECT 1 FROM spans WHERE device IS NOT NULL LIMIT 1").fetchall() and devicetime.paces(con):
        return None
    rows = con.execute(
        f"""
        WITH first AS (
            SELECT rank, min(step) AS step FROM loop WHERE rung >= {int(Level.OP)} GROUP BY rank
        ), earlier AS (
            SELECT *, lag(rung) OVER (PARTITION BY rank ORDER BY step) AS last_rung FROM loop
        )
        SELECT true AS is_before, e.step, e.dur_ns + coalesce(e.before_ns, 0) AS ns
        FROM earlier e JOIN first USING (rank)
        WHERE e.step < first.step AND e.step >= {WARM_UP_STEPS} AND e.rung = {int(Level.APPLICATION)}
          AND last_rung = e.rung AND e.status = 'ok' AND {IS_ALIKE}
        UNION ALL
        SELECT false, u.step, iteration_ns FROM undisturbed u JOIN first USING (rank)
        WHERE u.step > first.step AND {IS_ALIKE}
        ORDER BY 1, 2
        """
    ).fetchall()
    before = [ns for is_before, _, ns in rows if is_before]
    after = [ns for is_before, _, ns in rows if not is_before][:LATER_ROWS]
    return _change(before, after) if min(len(before), len(after)) >= MIN_ROWS else None


def _change(before: Sequence[float], after: Sequence[float]) -> ReferenceSlowdown:
    before_ns, after_ns = stats.percentile(before, 0.5), stats.percentile(after, 0.5)
    return ReferenceSlowdown(before_ns, after_ns, stats.median_ratio_interval(after, before))
