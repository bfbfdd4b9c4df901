"""What idle collectors added to a whole program, for the cost of profiling that a run states."""

from __future__ import annotations

import duckdb

from xsp.run import Run
from xsp.store.iterations import idle_hook_costs
from xsp.store.loop import BARE


def total_ns(con: duckdb.DuckDBPyConnection, run: Run) -> float:
    """Return the nanoseconds that idle collectors took of all steps that were not recorded; 0 where it is unknown.

    Args:
        con: holds `spans` and `loop`.
        run: contains the calibration.
    """
    costs = idle_hook_costs(con, run)
    rows = con.execute(
        f"SELECT rank, kind, sum(steps), sum(steps * dur_ns) / sum(steps) FROM loop "
        f"WHERE rung = {BARE} AND dur_ns IS NOT NULL GROUP BY rank, kind"
    ).fetchall()
    return sum(
        float(steps) * costs[rank, kind].of(dur_ns) for rank, kind, steps, dur_ns in rows if (rank, kind) in costs
    )
