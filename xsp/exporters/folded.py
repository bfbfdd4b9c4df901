"""Folded stacks: the text format from which speedscope and other tools draw flame graphs.

A stack is a span with its ancestors: model, layers, operators, kernel. Its weight is the self time of the span in
nanoseconds. On the host, self time excludes all spans that ran inside on the same thread, whatever their parents: a
backward operator is below the layer of its forward operator, but its time is subtracted from the backward pass in which
it ran. So the weights of a thread add up to the time that its spans cover.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb

from xsp import table
from xsp.errors import UsageError
from xsp.exporters import tracks
from xsp.exporters.contract import Choice, Weight, Written, atomic_file, check_steps
from xsp.schema import Column, Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import NS

ORPHANS = "(no parent)"
"""Frame for spans whose parent span is unknown."""

_BATCH = 50_000
_MAX_DEPTH = 2_000
"""Maximum number of ancestors; more than that are a cycle."""

_TIME_COLUMNS = (
    Column("trace_id", "VARCHAR", ""), Column("span_id", "VARCHAR", ""), Column("self_ns", "BIGINT", ""),
    Column("root", "BIGINT", "number of the outermost span around it"), Column("root_ns", "BIGINT", "of that one"),
)  # fmt: skip


def write(trace: Trace, path: Path, choice: Choice) -> Written:
    """Write a line for each stack: its frames, separated by `;`, and its weight.

    Args:
        trace: the trace to write.
        path: the file; compressed if it ends in `.gz`.
        choice: the kind of time, and the steps to add up. Without steps, the merged step is written, with true times
            where they are known.

    Raises:
        OutputError: the file cannot be written.
        UsageError: there is no such step, or the trace holds no time of that kind.
    """
    check_steps(trace, choice.steps)
    layout = tracks.lay_out_tracks(trace.con, "merged" if choice.steps is None else "spans", choice.steps)
    ns = NS if choice.steps is None else "dur_ns"
    table.create(trace.con, "folded_times", _TIME_COLUMNS)
    if choice.weight == Weight.DEVICE:
        trace.con.execute(
            f"INSERT INTO folded_times SELECT trace_id, span_id, {ns}, NULL, NULL FROM track_spans "
            "WHERE device IS NOT NULL"
        )
    else:
        _insert_times(trace.con, ns, [track.number for track in layout.tracks if track.line is not None])
    trace.con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE nodes AS
        SELECT hash(trace_id, span_id) AS node,
               CASE WHEN parent_id IS NOT NULL THEN hash(trace_id, parent_id) END AS parent,
               CASE WHEN kind = '{Kind.MODULE}' AND type IS NOT NULL AND type <> name
                    THEN name || ' (' || type || ')' ELSE name END AS name,
               level, start_ns, coalesce(self_ns, 0) AS self_ns
        FROM timed_spans LEFT JOIN folded_times USING (trace_id, span_id) WHERE kind <> '{Kind.ALLOC}'
        """
    )
    trace.con.execute("UPDATE nodes SET parent = NULL WHERE parent NOT IN (SELECT node FROM nodes)")
    stacks = _Stacks(_build_frames(trace.con))
    span_count = sum(frame.spans for frame in stacks.frames.values())
    stacks.written.spans = span_count
    if choice.weight == Weight.HOST:
        rows = trace.con.execute(
            f"SELECT count(*) FROM located_spans WHERE device IS NULL AND line IS NULL AND kind <> '{Kind.ALLOC}'"
        ).fetchall()
        stacks.written.changed["are on no thread, and so have no self time"] = int(rows[0][0])
    stacks.written.changed["have parents that form a cycle, and are left out"] = (
        layout.spans - layout.memory_changes - span_count
    )
    if not any(frame.self_ns for frame in stacks.frames.values()):
        raise UsageError(f"{trace.name}: it has no {choice.weight} time; choose the other --weight")
    with atomic_file(path) as file:
        for names, self_ns in _lines(stacks.frames):
            file.write(f"{';'.join(names)} {self_ns}\n")
    return stacks.written


@dataclass
class _Frame:
    """Spans with the same stack of names, combined into one frame."""

    name: str
    parent: int | None
    """Number of the parent frame; None for an outermost frame."""

    self_ns: int = 0
    """Self time in nanoseconds."""

    spans: int = 0


@dataclass
class _Stacks:
    """Frames by number, each after its parent, and the result to report."""

    frames: dict[int, _Frame] = field(default_factory=dict)
    written: Written = field(default_factory=Written)


def _lines(frames: dict[int, _Frame]) -> Iterator[tuple[list[str], int]]:
    """Yield the stacks with self time: names from the outside in, and nanoseconds."""
    for frame in frames.values():
        if frame.self_ns:
            names = [_frame_name(frame.name)]
            parent = frame.parent
            while parent is not None:
                names.append(_frame_name(frames[parent].name))
                parent = frames[parent].parent
            yield names[::-1], frame.self_ns


def _frame_name(name: str) -> str:
    """Return a name without the separator of frames and without line breaks."""
    return " ".join(name.replace(";", ":").split()) or "(no name)"


def _insert_times(con: duckdb.DuckDBPyConnection, ns: str, threads: list[int]) -> None:
    """Fill `folded_times` with the self time of each host span, without the spans that ran inside it on its thread.

    A span without a thread (a whole window, the profiler's own work) has no self time.

    True times are independent estimates, so the times of inner spans may add up to more than the outermost span. Then
    all self times inside are scaled by one factor, so that the total equals the time of the outermost span.
    """
    rows = con.execute(
        f"""
        SELECT track, begin_ns, begin_ns + width_ns, trace_id, span_id, greatest({ns}, 0)::BIGINT FROM track_spans
        WHERE device IS NULL AND track IN (SELECT unnest(?::INTEGER[]))
        ORDER BY track, begin_ns, width_ns DESC, level, depth, span_id
        """,
        [threads],
    )
    times = _times(tracks.fetch_rows(rows))
    with con.cursor() as cursor:  # the first cursor is still yielding rows
        while batch := list(islice(times, _BATCH)):
            table.insert(cursor, "folded_times", batch, _TIME_COLUMNS)
    con.execute(
        """
        UPDATE folded_times SET self_ns = round(self_ns * factor) FROM (
            SELECT root, max(root_ns) / sum(self_ns) AS factor FROM folded_times
            GROUP BY root HAVING sum(self_ns) > max(root_ns)
        ) AS sums WHERE sums.root = folded_times.root
        """
    )


def _times(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `folded_times` for rows `track, start, end, trace_id, span_id, ns` that nest in each track."""
    stack: list[list[Any]] = []  # track, end, and a row from which the time of inner spans is subtracted
    root, root_ns = 0, 0
    for track, start, end, trace_id, span_id, ns in rows:
        while stack and (stack[-1][0] != track or stack[-1][1] <= start):
            yield _finished_row(stack.pop())
        if stack:
            stack[-1][4] -= ns
        else:
            root, root_ns = root + 1, ns
        stack.append([track, end, trace_id, span_id, ns, root, root_ns])
    while stack:
        yield _finished_row(stack.pop())


def _finished_row(span: list[Any]) -> tuple[Any, ...]:
    _, _, trace_id, span_id, ns, root, root_ns = span
    return trace_id, span_id, max(ns, 0), root, root_ns


def _build_frames(con: duckdb.DuckDBPyConnection) -> dict[int, _Frame]:
    """Return the frames of `nodes`, from the outside in, a pass per depth: spans of the same stack share one frame."""
    frames = {0: _Frame(ORPHANS, None)}
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE frontier AS
        SELECT *, CASE WHEN level > {int(Level.MODEL)} THEN 0 END AS stack FROM nodes WHERE parent IS NULL
        """
    )
    for _ in range(_MAX_DEPTH):
        con.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE frame_rows AS
            SELECT {len(frames)} - 1 + row_number() OVER (ORDER BY min(start_ns), name, level) AS number,
                   name, level, stack, sum(self_ns)::BIGINT AS self_ns, count(*) AS spans
            FROM frontier GROUP BY name, level, stack
            """
        )
        rows = con.execute("SELECT * EXCLUDE (level) FROM frame_rows ORDER BY number").fetchall()
        if not rows:
            break
        frames |= {number: _Frame(*fields) for number, *fields in rows}
        con.execute(
            """
            CREATE OR REPLACE TEMP TABLE frontier AS
            SELECT nodes.*, frame_rows.number AS stack FROM frontier JOIN frame_rows
                 ON frame_rows.name = frontier.name AND frame_rows.level = frontier.level
                 AND frame_rows.stack IS NOT DISTINCT FROM frontier.stack
            JOIN nodes ON nodes.parent = frontier.node
            """
        )
    return frames
