"""Device work of all steps and ranks, and what a device did at each moment, as SQL to put behind WITH.

The window of a device is the time from the begin of its first kernel or copy to the end of its last one; where
steps were recorded without device work (a leveled run takes turns) or only to describe, the window falls into
several recordings, and what lies between them counts for nothing.
Within a window each moment is either idle or busy, and what overlaps counts once.
"""

from __future__ import annotations

from xsp.kernelnames import COMMUNICATION, MATRIX, NAMES
from xsp.span import Kind, Level

COMPUTATION = "computation"
COPY = "copy"

LEVEL_NAMES = " ".join(f"WHEN {int(level)} THEN '{level.name.lower()}'" for level in Level)
"""To put between CASE and END: what levels are called."""

RECORDED = f"""
    recorded AS (
        SELECT rank, step, count(*) FILTER (WHERE rung < {int(Level.KERNEL)} OR timed = false)
                           OVER (PARTITION BY rank ORDER BY start_ns) AS recording
        FROM (
            SELECT rank, step, min(start_ns) AS start_ns, any_value(rung) AS rung, any_value(timed) AS timed
            FROM spans WHERE kind = '{Kind.STEP}' AND step IS NOT NULL GROUP BY rank, step
        )
    ),
    processes AS (
        SELECT rank, any_value(process) AS process FROM spans WHERE level = {int(Level.RUNTIME)}
        GROUP BY rank HAVING min(process) = max(process)
    ),
    on_device AS (
        SELECT s.*, s.start_ns + s.dur_ns AS end_ns, coalesce(recorded.recording, 0) AS recording,
               coalesce(s.process, processes.process, -1) AS on_process
        FROM spans s LEFT JOIN recorded ON recorded.rank = s.rank AND recorded.step = s.step
        LEFT JOIN processes ON processes.rank = s.rank
        WHERE s.level = {int(Level.KERNEL)} AND s.kind IN ('{Kind.KERNEL}', '{Kind.COPY}') AND s.timed IS NOT false
    )
"""
"""Each kernel and copy with its end, its recording, and the process that launched it: Kineto does not say it of
device work, but where all calls of a rank are of one process, it is that one."""

CLASSED = f"""
    {RECORDED}, {NAMES},
    classed AS (
        SELECT s.*, names.class, names.tensor_cores, names.collective,
               CASE WHEN s.kind = '{Kind.COPY}' THEN '{COPY}' WHEN names.class = '{COMMUNICATION}'
                    THEN '{COMMUNICATION}' ELSE '{COMPUTATION}' END AS purpose
        FROM on_device s LEFT JOIN names ON names.name = s.name AND s.kind = '{Kind.KERNEL}'
    )
"""
"""The same with what its name says, and its purpose: computation, communication, copy. `class` is null for
copies."""

WORK = f"""
    {CLASSED},
    work AS MATERIALIZED (SELECT rank, device, recording, step, start_ns, end_ns, purpose FROM classed)
"""
"""The same with nothing but when it ran and for what."""


def moments(*place: str) -> str:
    """Return the tables `edges` and `moments`: intervals between which nothing begins or ends, and how much runs.

    Args:
        place: columns that keep apart what is swept, a device for instance.
    """
    where = ", ".join(place)
    sides = " UNION ALL ".join(
        f"SELECT {where}, {side} AS time_ns, {sign} * (purpose = '{COMPUTATION}')::INT AS computing, "
        f"{sign} * (purpose = '{COMMUNICATION}')::INT AS communicating, {sign} * (purpose = '{COPY}')::INT AS copying "
        "FROM work"
        for side, sign in (("start_ns", 1), ("end_ns", -1))
    )
    return f"""
        edges AS ({sides}),
        moments AS (
            SELECT {where}, lead(time_ns) OVER sofar - time_ns AS ns,
                   sum(computing) OVER sofar AS computing, sum(communicating) OVER sofar AS communicating,
                   sum(copying) OVER sofar AS copying
            FROM edges
            WINDOW sofar AS (PARTITION BY {where} ORDER BY time_ns ROWS UNBOUNDED PRECEDING)
        )
    """


SHARES = """
    sum(ns)::BIGINT AS window_ns,
    coalesce(sum(ns) FILTER (WHERE computing > 0 OR communicating > 0 OR copying > 0), 0)::BIGINT AS busy_ns,
    coalesce(sum(ns) FILTER (WHERE computing > 0), 0)::BIGINT AS computation_ns,
    coalesce(sum(ns) FILTER (WHERE communicating > 0), 0)::BIGINT AS communication_ns,
    coalesce(sum(ns) FILTER (WHERE communicating > 0 AND computing <= 0), 0)::BIGINT AS exposed_communication_ns,
    coalesce(sum(ns) FILTER (WHERE copying > 0), 0)::BIGINT AS copy_ns,
    coalesce(sum(ns) FILTER (WHERE copying > 0 AND computing <= 0 AND communicating <= 0), 0)::BIGINT AS exposed_copy_ns
"""
"""What `moments` add up to: busy is computation, exposed communication and exposed copies together."""


def _matrix_ns(condition: str) -> str:
    return f"sum(CASE WHEN {condition} THEN dur_ns ELSE 0 END) FILTER (WHERE class IN {MATRIX})"


TENSOR_TIMES = f"""
    {_matrix_ns("true")} / 1e6 AS matrix_ms,
    {_matrix_ns("tensor_cores = 'yes'")} / 1e6 AS with_tensor_cores_ms,
    {_matrix_ns("tensor_cores = 'no'")} / 1e6 AS without_tensor_cores_ms,
    {_matrix_ns("tensor_cores IS NULL")} / 1e6 AS untold_ms,
    100.0 * {_matrix_ns("tensor_cores = 'yes'")} / nullif({_matrix_ns("tensor_cores IS NOT NULL")}, 0)
        AS tensor_core_percent
"""
"""Device time of matrix products, convolutions and attention by what names tell; null where there is none."""
