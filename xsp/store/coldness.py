"""How much recording slows the steps near it, by cold caches and clocks."""

from __future__ import annotations

from typing import NamedTuple

import duckdb

from xsp import stats
from xsp.store.iterations import IS_ALIKE, MIN_ROWS
from xsp.store.loop import BARE

MAX_COLD_SHARE = 0.25
"""If steps near recorded ones are slowed by more than this share, the true times of spans count as unknown."""


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
