"""The critical path: the chain of work, on the host and on devices, that determines the duration of a step.

At each moment of a step, one span is the one that the others wait for. The path is found backwards: from the end of the
step to the work that ended last, from there to the work that this waited for, and so on to the start of the step.
`xsp.analyses.waiting` has the rules for what waits for what. They follow from the guarantees of threads, streams (work
on one stream runs in order) and synchronising calls. Where a trace does not state the cause, they use times:
dependencies between streams through stream events are inferred. Each segment names the rule that led to it.

If a span on the path becomes shorter, the step becomes shorter by as much, until another path is the longest.

A launch that is late because its queue is full looks like any other long call: traces do not distinguish the two.
"""

from __future__ import annotations

from typing import NamedTuple

from xsp.analyses.contract import Table, analysis, values
from xsp.analyses.waiting import StepSpan, Thread, Walk
from xsp.device.kernelnames import COMMUNICATION, NAMES
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.table import literal

_LABELS = {
    "label": "INTEGER",
    "what": "VARCHAR",
    "name": "VARCHAR",
    "op": "VARCHAR",
    "layer_id": "VARCHAR",
    "thread": "BIGINT",
    "device": "INTEGER",
    "stream": "BIGINT",
    "after": "VARCHAR",
}
_PATH = f"""
    SELECT start_ns / 1e6 AS start_ms, (end_ns - start_ns) / 1e6 AS dur_ms, what, path_labels.name, op,
           layer_index, layers.name AS layer, thread, device, stream, after, after_step
    FROM path_segments JOIN path_labels USING (label)
    LEFT JOIN (SELECT span_id AS layer_id, layer_index, name FROM merged WHERE level = {int(Level.LAYER)}) layers
    USING (layer_id) ORDER BY start_ns
"""
"""Query of the path from the tables of its segments and labels; many segments share a label."""

_SUMMARY_COLUMNS = {
    "grouped_by": "VARCHAR",
    "name": "VARCHAR",
    "segments": "BIGINT",
    "dur_ms": "DOUBLE",
    "percent_of_path": "DOUBLE",
}
_OTHER_STEP = "(another step)"


class _Window(NamedTuple):
    """The step whose path is requested."""

    spans: str
    """SQL condition of its spans."""
    rank: int | None
    start: int
    end: int
    main: Thread


@analysis("critical-path", "Critical path")
def critical_path(trace: Trace) -> Table:
    """The critical path of the merged step in order of time: segments that follow each other without a gap.

    Their durations add up to the duration of the step plus the wait for its batch. If device work continues after the
    step has ended on the host, the path continues to the end of that work, and `after_step` marks the segments beyond
    the end of the step. `what` is host (the program itself between operators), op, launch, call, sync, data, overhead,
    kernel, copy, communication or idle; on a stream, launch is the time between the call and the start of the kernel.
    `after` is the rule for what had to end before the segment could begin. Times are as recorded, so they include the
    overhead of profiling.
    """
    if not trace.has_temp_table("path_segments"):
        # find the path, and make the tables of its segments and labels
        window = _window(trace)
        rows = [StepSpan._make(row) for row in trace.con.execute(_spans_query(window)).fetchall()]
        last_work = max(
            (row for row in rows if row.device is not None and row.in_step), key=lambda row: row.end, default=None
        )
        if last_work is not None and last_work.end <= window.end:
            last_work = None
        end = last_work.end if last_work is not None else window.end
        walk = Walk(rows, window.main, window.start, window.end)
        walk.trace_back(end, last_work)
        _store_path(trace, walk, window, end)
    return trace.sql(_PATH)


def _store_path(trace: Trace, walk: Walk, window: _Window, end: int) -> None:
    """Store the path in the engine, as text: a path can be long, and the engine is slow at reading Python lists."""
    values(trace, "path_labels", _LABELS, [(number, *label) for label, number in walk.labels.items()])
    path = walk.path[::-1]
    trace.create_temp_table(
        "path_segments",
        f"""
        SELECT start_ns, lead(start_ns, 1, {end - window.start}) OVER (ORDER BY start_ns) AS end_ns, label,
               start_ns >= {window.end - window.start} AS after_step
        FROM (SELECT try_cast(unnest(string_split(?, ' ')) AS BIGINT) AS start_ns,
                     try_cast(unnest(string_split(?, ' ')) AS INTEGER) AS label)
        WHERE label IS NOT NULL
        """,
        [" ".join(str(start - window.start) for start, _ in path), " ".join(str(label) for _, label in path)],
    )


@analysis("critical-path-summary", "Shares of the critical path")
def critical_path_summary(trace: Trace) -> Table:
    """The critical path summed by kind of segment, by layer, and by name.

    Each of the three groupings (column `grouped_by`) adds up to the whole path. The row of a layer includes its
    backward operators and kernels; segments without a layer are in a row without a name.
    """
    critical_path(trace)
    parts = " UNION ALL ".join(
        f"SELECT {position} AS position, '{column}' AS grouped_by, {column} AS name, count(*) AS segments, "
        "sum(dur_ms) AS dur_ms, 100 * sum(dur_ms) / nullif(sum(sum(dur_ms)) OVER (), 0) AS percent_of_path "
        f"FROM path GROUP BY {column}"
        for position, column in enumerate(("what", "layer", "name"))
    )
    rows = trace.con.execute(
        f"WITH path AS MATERIALIZED ({_PATH}) "
        f"SELECT grouped_by, name, segments, dur_ms, percent_of_path FROM ({parts}) "
        "ORDER BY position, dur_ms DESC, name"
    ).fetchall()
    return values(trace, "critical_path_summary", _SUMMARY_COLUMNS, rows)


def _window(trace: Trace) -> _Window:
    """Return the merged step, or the whole time of the first rank if the trace has no step."""
    steps = trace.con.execute(
        "SELECT trace_id, step, rung, rank, start_ns, start_ns + dur_ns, process, thread FROM merged "
        f"WHERE kind = '{Kind.STEP}' ORDER BY dur_ns DESC, trace_id, span_id LIMIT 1"
    ).fetchall()
    if not steps:
        return _whole_trace(trace)
    trace_id, step, rung, rank, start, end, process, thread = steps[0]
    identity = {"trace_id": trace_id, "step": step, "rung": rung, "rank": rank}
    spans = " AND ".join(f"{name} IS NOT DISTINCT FROM {_sql(value)}" for name, value in identity.items())
    main = (process, thread) if thread is not None else _busiest(trace, spans)
    query = f"SELECT min(start_ns) FROM spans WHERE {spans} AND kind = '{Kind.DATA}' AND start_ns < {start}"
    ((data_start,),) = trace.con.execute(query).fetchall()
    return _Window(spans, rank, start if data_start is None else data_start, end, main)


def _busiest(trace: Trace, spans: str) -> Thread:
    """Return the thread with the longest time from its first span to its last, for a step that names no thread."""
    rows = trace.con.execute(
        f"SELECT process, thread FROM spans WHERE {spans} AND device IS NULL AND thread IS NOT NULL AND dur_ns > 0 "
        "GROUP BY process, thread ORDER BY max(start_ns + dur_ns) - min(start_ns) DESC, count(*) DESC, 1, 2 LIMIT 1"
    ).fetchall()
    return rows[0] if rows else (None, None)


def _whole_trace(trace: Trace) -> _Window:
    """Return the time of the first rank's spans, as if it were a step."""
    rows = trace.con.execute(
        "SELECT rank, min(start_ns), max(start_ns + dur_ns) FROM spans "
        "WHERE dur_ns > 0 GROUP BY rank ORDER BY rank LIMIT 1"
    ).fetchall()
    if not rows:
        raise AnalysisError(f"critical-path (Critical path) needs spans with durations, and {trace.name!r} holds none")
    rank, start, end = rows[0]
    spans = f"rank IS NOT DISTINCT FROM {_sql(rank)}"
    return _Window(spans, rank, start, end, _busiest(trace, spans))


def _sql(value: str | int | None) -> str:
    return "NULL" if value is None else literal(value) if isinstance(value, str) else str(value)


def _spans_query(window: _Window) -> str:
    """Return the SQL of the step's spans, and of the work that its devices did meanwhile for other steps.

    A host span without a thread is assigned to its parent's thread, else to the step's.
    """
    process, thread = (_sql(part) for part in window.main)
    return f"""
        WITH {NAMES}, step_spans AS (SELECT * FROM spans WHERE {window.spans}), step_work AS (
            SELECT *, true AS in_step FROM step_spans
            UNION ALL
            SELECT *, false AS in_step FROM spans
            WHERE rank IS NOT DISTINCT FROM {_sql(window.rank)} AND device IS NOT NULL
              AND NOT coalesce({window.spans}, false)
              AND start_ns < {window.end} AND start_ns + dur_ns > {window.start}
        )
        SELECT step_work.start_ns, step_work.start_ns + step_work.dur_ns AS end_ns, step_work.kind, step_work.name,
               CASE WHEN step_work.thread IS NULL AND step_work.device IS NULL
                    THEN coalesce(parent.process, {process}) ELSE step_work.process END,
               CASE WHEN step_work.device IS NULL THEN coalesce(step_work.thread, parent.thread, {thread}) END,
               step_work.device, step_work.stream, step_work.correlation_id, step_work.layer_id,
               CASE WHEN NOT step_work.in_step THEN '{_OTHER_STEP}' ELSE parent.op END,
               step_work.in_step,
               coalesce(class = '{COMMUNICATION}', false)
                   OR coalesce(contains(step_work.attributes, '"xsp.collective.name"'), false),
               coalesce(step_work.phase = 'backward', false)
                   OR coalesce(step_work.forward_thread <> step_work.thread, false),
               step_work.kind = '{Kind.SYNC}' AND NOT contains(step_work.name, 'WaitEvent'),
               CASE WHEN step_work.kind = '{Kind.SYNC}'
                    THEN try_cast(json_extract_string(step_work.attributes, '$.stream') AS BIGINT) END
        FROM step_work
        LEFT JOIN names ON step_work.device IS NOT NULL AND names.name = step_work.name
        LEFT JOIN (
            SELECT span_id, process, thread, CASE WHEN kind = '{Kind.OP}' THEN name END AS op FROM step_spans
        ) parent ON parent.span_id = step_work.parent_id
        WHERE step_work.kind NOT IN ('{Kind.RUN}', '{Kind.ALLOC}') AND step_work.dur_ns > 0
        ORDER BY step_work.start_ns, step_work.dur_ns DESC, step_work.level, step_work.depth, step_work.span_id
    """
