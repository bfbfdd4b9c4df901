"""Iterations of a kind that overlap, on several threads."""

from __future__ import annotations

import duckdb


def at_once(con: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], float]:
    """Return how many iterations ran at the same time, while there was at least one, in the mean, by rank and kind.

    An iteration of a thread lasts from the end of its last step to the end of its next one. Ranks are left out whose
    steps ran on one thread, or on several that took turns: their iterations follow each other.

    Args:
        con: holds `loop`.
    """
    rows = con.execute(
        """
        WITH lasting AS (
            SELECT rank, kind, steps, start_ns - coalesce(before_ns, 0) - coalesce(beside_ns, 0) AS began_ns,
                   steps * (dur_ns + coalesce(before_ns, 0) + coalesce(beside_ns, 0)) AS ns
            FROM loop WHERE rank IN (SELECT rank FROM loop GROUP BY rank HAVING sum(beside_ns) > 0)
        ), reached AS (
            SELECT *, max(began_ns + ns) OVER (
                PARTITION BY rank, kind ORDER BY began_ns, ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS reached_ns FROM lasting
        )
        SELECT rank, kind, sum(ns), sum(greatest(0, began_ns + ns - greatest(began_ns, coalesce(reached_ns, began_ns))))
        FROM reached GROUP BY rank, kind
        """
    ).fetchall()
    return {(rank, kind): total_ns / any_ns for rank, kind, total_ns, any_ns in rows if any_ns}


MOST_OF_ONE = 0.9
"""Least share of the steps on one thread for the steps on others to be exceptions."""


def threads(con: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], int]:
    """Return the number of threads that run steps, by rank and kind; 1 if nearly all steps are on one thread.

    Args:
        con: holds `loop`.
    """
    rows = con.execute(
        f"""
        SELECT rank, kind, CASE WHEN max(steps) >= {MOST_OF_ONE} * sum(steps) THEN 1 ELSE count(*) END
        FROM (SELECT rank, kind, thread, sum(steps) AS steps FROM loop GROUP BY ALL) GROUP BY rank, kind
        """
    ).fetchall()
    return {(rank, kind): count for rank, kind, count in rows}
