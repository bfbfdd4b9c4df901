"""Complete the spans of a Kineto trace with data that only all its events together give; count what is left out."""

from __future__ import annotations

from typing import Any

import duckdb

from xsp.importers import serving
from xsp.importers.contract import PYTHON_FRAMES, Losses
from xsp.importers.kineto_rows import OTHER_TABLES, STEP
from xsp.schema import ANNOTATION, Kind, Level

LEFT_OUT = {
    "python_function": PYTHON_FRAMES,
    "gpu_user_annotation": "the profiler's own projection of annotations onto the device",
    "cuda_sync": "synchronisation as the device saw it; the calls that waited are kept",
    "mtia_ccp_events": "events that a device waits for or records, which are no work",
    "trace": "the profiler's own window",
}
"""Categories of events that are not imported, with descriptions."""

_PASSIVE = (
    f"{STEP} OR name LIKE 'Optimizer.%' OR name LIKE 'enumerate(DataLoader)%' OR name LIKE 'PyTorch Profiler%' "
    "OR name LIKE 'nccl:%' OR name LIKE 'rccl:%' OR name LIKE 'gloo:%' OR name LIKE 'autograd::%'"
)


MAX_FRAMES = 200
"""Maximum number of calls of Python that are kept, the longest ones."""


def long_frames(con: duckdb.DuckDBPyConnection, shift_ns: int) -> list[dict[str, object]]:
    """Return the longest calls of Python, in order of their start, by file and function without the folders.

    They are evidence for what the host did while no operator ran. `finish` removes the table.
    """
    rows = con.execute(
        f"""
        SELECT regexp_replace(name, '^.*[/\\\\]', ''), thread, start_ns + {shift_ns}, dur_ns FROM frames
        WHERE NOT starts_with(name, '<') AND thread IS NOT NULL ORDER BY dur_ns DESC, start_ns LIMIT {MAX_FRAMES}
        """
    ).fetchall()
    columns = ("name", "thread", "start_ns", "dur_ns")
    return [dict(zip(columns, row, strict=True)) for row in sorted(rows, key=lambda row: (row[2], -row[3]))]


def finish(con: duckdb.DuckDBPyConnection, shift_ns: int, losses: Losses) -> list[dict[str, Any]]:
    """Complete the table `raw_spans`; return the kinds of steps as for `kinds` in `run.json`.

    Args:
        con: an engine into which `Rows` took all events.
        shift_ns: nanoseconds to add to all times.
        losses: counts what is left out.
    """
    _count_left_out(con, losses)
    kinds = serving.take_steps(con, losses)
    _forward_threads(con)
    _link_launches(con, losses)
    _link_operators(con, losses)
    _layers(con, losses)
    _remove_duplicates(con, losses)
    if shift_ns:
        con.execute(f"UPDATE raw_spans SET start_ns = start_ns + {shift_ns}")
    for name in set(OTHER_TABLES) - {"operators"}:
        con.execute(f"DROP TABLE {name}")
    return kinds


def _count_left_out(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Count the events that are not imported, by category."""
    rows = con.execute(
        "SELECT phase, category, sum(number)::BIGINT FROM left_out GROUP BY ALL ORDER BY 3 DESC"
    ).fetchall()
    for phase, category, count in rows:
        reason = LEFT_OUT.get(category) or (f"category {category!r}" if category else f"events of phase {phase!r}")
        losses.skipped[reason] += count
    ((count, first),) = con.execute(
        """
        SELECT sum(untimed)::BIGINT, arg_min(before + first_untimed - place, place) FILTER (untimed > 0)
        FROM (SELECT *, sum(number) OVER (ORDER BY place) - number AS before FROM portions)
        """
    ).fetchall()
    if count:
        losses.skipped[f"without a time, or with a negative one (the first is event {first})"] += count


def _layers(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Use the blocks that the user named as layers, if a trace has no modules and no compiled regions."""
    condition = f"kind = '{Kind.USER}' AND level = {int(Level.OP)} AND NOT ({_PASSIVE})"
    ((modules, blocks),) = con.execute(
        f"SELECT count(*) FILTER (kind = '{Kind.MODULE}'), count(*) FILTER ({condition}) FROM raw_spans"
    ).fetchall()
    if not modules and blocks:
        con.execute(f"UPDATE raw_spans SET level = {int(Level.LAYER)}, type = '{ANNOTATION}' WHERE {condition}")
        losses.note(
            f"no module was recorded (with_stack=True, with_modules=True): {blocks} named blocks count as layers"
        )


def _flows_from(level: Level) -> str:
    """Return the SQL of flow events from the start of a span of this level to device work without a launch."""
    return f"""
        SELECT work.number AS work, call.number AS call
        FROM flows AS begins JOIN flows AS ends USING (id) JOIN raw_spans AS call
             ON call.process = begins.pid AND call.thread = begins.tid AND call.start_ns = begins.ts_ns
             JOIN raw_spans AS work ON work.stream = ends.tid AND work.start_ns = ends.ts_ns
        WHERE begins.ph = 's' AND ends.ph = 'f' AND call.level = {int(level)}
          AND work.level = {int(Level.KERNEL)} AND work.correlation_id IS NULL
        """


_LINKS = {
    "flow events": _flows_from(Level.RUNTIME),
    "external ids": f"""
        SELECT work.number AS work, call.number AS call
        FROM raw_spans AS work JOIN unnumbered_calls AS call ON work.operator = call.external
        WHERE work.level = {int(Level.KERNEL)} AND work.correlation_id IS NULL
        """,
}
"""Links between device work without a correlation id and the calls that launched it, the strongest first, as SQL."""


def _link_launches(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Give device work without a correlation id that of its launch, by other links; a work with several has none."""
    unlinked = f"SELECT count(*) FROM raw_spans WHERE level = {int(Level.KERNEL)} AND correlation_id IS NULL"
    ((count,),) = con.execute(unlinked).fetchall()
    for name, links in _LINKS.items() if count else ():
        if linked := _link(con, links, "correlation_id", "operator = CASE WHEN number <> work THEN operator END"):
            losses.note(f"{linked} of {count} kernels and copies without a correlation id were matched by {name}")


def _link_operators(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Give device work without a launch the operator from whose start a flow event leads to it, as Ascend writes them.

    Calls of Ascend's runtime get the process of the operators, if these have one: the file gives them one of their own.
    """
    con.execute(
        f"""
        UPDATE raw_spans SET process = coalesce((
            SELECT CASE WHEN min(process) = max(process) THEN min(process) END
            FROM raw_spans WHERE level = {int(Level.OP)}
        ), process) WHERE level = {int(Level.RUNTIME)} AND starts_with(name, 'AscendCL@')
        """
    )
    unlinked = f"level = {int(Level.KERNEL)} AND correlation_id IS NULL AND operator IS NULL"
    ((count,),) = con.execute(f"SELECT count(*) FROM raw_spans WHERE {unlinked}").fetchall()
    links = f"FROM ({_flows_from(Level.OP)}) WHERE work IN (SELECT number FROM raw_spans WHERE {unlinked})"
    if count and (linked := _link(con, links, "operator")):
        losses.note(
            f"{linked} of {count} kernels and copies without a launch were matched with operators by flow events"
        )


def _link(con: duckdb.DuckDBPyConnection, links: str, column: str, *changes: str) -> int:
    """Give device work with a single link, and the call that it leads to, the same number in a column.

    Args:
        con: holds `raw_spans`.
        links: SQL of pairs of `work` and `call`.
        column: the column; a call that has no number gets a new one.
        changes: SQL of further changes of the rows `work` and `call`.

    Returns:
        The number of pairs.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE links AS
        WITH single AS (SELECT work, min(call) AS call FROM ({links}) GROUP BY work HAVING min(call) = max(call))
        SELECT work, call, coalesce(
            {column}, (SELECT coalesce(max({column}), 0) FROM raw_spans) + 1 + call
        ) AS {column} FROM single JOIN raw_spans ON number = call
        """
    )
    assigned = ", ".join((f"{column} = links.{column}", *changes))
    con.execute(f"UPDATE raw_spans SET {assigned} FROM links WHERE number IN (work, call)")
    ((count,),) = con.execute("SELECT count(*) FROM links").fetchall()
    con.execute("DROP TABLE links")
    return int(count)


def _forward_threads(con: duckdb.DuckDBPyConnection) -> None:
    """Replace Kineto's numbers of forward threads by thread ids, where the evidence names exactly one thread.

    The flow events between forward and backward operators give the thread of a number. Without them it is known only if
    all forward operators ran on one thread.
    """
    if not con.execute("SELECT 1 FROM raw_spans WHERE forward_thread IS NOT NULL LIMIT 1").fetchall():
        return
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE forward_threads AS
        WITH ops AS (
            SELECT process AS pid, thread AS tid, start_ns AS ts_ns, coalesce(forward_thread, 0) AS forward, name
            FROM raw_spans WHERE sequence_nr IS NOT NULL
        ), arrow_ends AS (
            SELECT id, any_value(tid) FILTER (ph = 's') AS from_thread, any_value(pid) FILTER (ph = 'f') AS pid,
                   any_value(tid) FILTER (ph = 'f') AS tid, any_value(ts_ns) FILTER (ph = 'f') AS ts_ns
            FROM arrows GROUP BY id
        ), by_arrow AS (
            SELECT ops.pid, forward, from_thread AS thread FROM arrow_ends JOIN ops USING (pid, tid, ts_ns)
            WHERE forward > 0
        ), single_threads AS (
            SELECT pid, min(tid) AS thread FROM ops WHERE forward = 0 AND name NOT LIKE 'autograd::engine::%'
            GROUP BY pid HAVING min(tid) = max(tid)
        )
        SELECT pid AS process, forward, min(thread) AS thread FROM by_arrow
        GROUP BY pid, forward HAVING min(thread) = max(thread)
        UNION ALL
        SELECT pid, forward, thread
        FROM single_threads JOIN (SELECT DISTINCT pid, forward FROM ops WHERE forward > 0) USING (pid)
        WHERE (pid, forward) NOT IN (SELECT (pid, forward) FROM by_arrow)
        """
    )
    con.execute(
        """
        UPDATE raw_spans SET forward_thread = resolved.thread
        FROM (SELECT DISTINCT process, forward_thread FROM raw_spans WHERE forward_thread IS NOT NULL) numbers
        LEFT JOIN forward_threads resolved ON resolved.process = numbers.process
            AND resolved.forward = numbers.forward_thread
        WHERE raw_spans.forward_thread = numbers.forward_thread
            AND raw_spans.process IS NOT DISTINCT FROM numbers.process
        """
    )
    con.execute("DROP TABLE forward_threads")


def _remove_duplicates(con: duckdb.DuckDBPyConnection, losses: Losses) -> None:
    """Remove duplicates of device work: some profilers write the records of two activity sources."""
    columns = "device, stream, start_ns, dur_ns, correlation_id, name"
    work = f"raw_spans WHERE level = {int(Level.KERNEL)} AND correlation_id IS NOT NULL"
    ((duplicates,),) = con.execute(f"SELECT count(*) - count(DISTINCT hash({columns})) FROM {work}").fetchall()
    if duplicates:
        con.execute(
            f"DELETE FROM raw_spans WHERE number IN (SELECT number FROM {work} "
            f"QUALIFY row_number() OVER (PARTITION BY {columns} ORDER BY number) > 1)"
        )
        losses.skipped["device work that was recorded twice"] += duplicates
