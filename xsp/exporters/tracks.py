"""Tracks, on which viewers draw spans: one for each thread and each stream, on which spans nest by time.

Viewers require that spans of a track nest. If two spans cross because of rounding, the inner one is cut. If they really
overlap (two kernels of a stream, concurrent requests), the later one goes to an additional track. Both are rare and are
counted; all other spans are unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

import duckdb

from xsp import table
from xsp.exporters.contract import Written
from xsp.schema import Column, Kind

CUT_NS = 2_000
"""Maximum nanoseconds by which nested spans may cross: start and duration are each rounded to a microsecond."""

_BATCH = 50_000
_MAX_ANCESTORS = 64
_TRACKS = (
    Column("track", "INTEGER", ""), Column("rank", "INTEGER", ""), Column("process", "BIGINT", ""),
    Column("device", "INTEGER", ""), Column("line", "BIGINT", "thread or stream"),
)  # fmt: skip
_ADJUSTMENTS = (
    Column("number", "BIGINT", "a later one of the same span counts"), Column("trace_id", "VARCHAR", ""),
    Column("span_id", "VARCHAR", ""), Column("track", "INTEGER", ""), Column("start_ns", "BIGINT", ""),
    Column("dur_ns", "BIGINT", ""), Column("cut", "BOOLEAN", ""),
)  # fmt: skip


class Track(NamedTuple):
    """A thread, a stream, or an additional track of one for spans that overlap."""

    number: int
    rank: int
    process: int | None
    """None for a device."""

    device: int | None
    """None on the host."""

    line: int | None
    """Number of the thread or of the stream; None if unknown."""

    lane: int = 0
    """0 for the thread or stream itself, 1 for its first additional track."""

    @property
    def name(self) -> str:
        """The name to show for the track."""
        word = "thread" if self.device is None else "stream"
        name = f"{word} {self.line}" if self.line is not None else f"no {word}"
        return f"{name}, overlapping {self.lane}" if self.lane else name

    @property
    def owner(self) -> str:
        """The name to show for the process or the device of the track."""
        if self.device is not None:
            return f"device {self.device}"
        return f"process {self.process}" if self.process is not None else "process"

    @property
    def title(self) -> str:
        """The name of the track after the name of its owner."""
        return f"{self.owner}, {self.name}"


class _OpenSpan(NamedTuple):
    start: int
    end: int
    level: int
    trace_id: str
    span_id: str


@dataclass
class TrackLayout:
    """The tracks of the spans in the view `track_spans`, and the numbers of spans that were changed to nest."""

    tracks: list[Track]
    spans: int = 0
    cut: int = 0
    overlapping: int = 0
    without_time: int = 0

    memory_changes: int = 0
    """Number of spans that are not intervals."""

    def result(self, memory: bool = True) -> Written:
        """Return the result for a file with all spans; changes of memory are included only if `memory`."""
        changed = {
            f"that crossed others by at most {CUT_NS / 1e3:g} µs were cut so that they nest": self.cut,
            "that overlap others are on separate tracks": self.overlapping,
            "have no time, and are left out": self.without_time,
            "are changes of memory, which this format cannot show": 0 if memory else self.memory_changes,
        }
        return Written(self.spans - (0 if memory else self.memory_changes), Counter(changed))


def lay_out_tracks(con: duckdb.DuckDBPyConnection, source: str, steps: Sequence[int] | None = None) -> TrackLayout:
    """Make the view `track_spans`: the spans of a source, their `track`, and the drawn `begin_ns` and `width_ns`.

    Args:
        con: holds the source.
        source: `spans` or `merged`.
        steps: steps to include; None for all.

    Returns:
        The tracks, in display order. In each, the spans of `track_spans` nest.
    """
    condition = f"WHERE step IN ({', '.join(map(str, steps))})" if steps is not None else ""
    con.execute(f"CREATE OR REPLACE TEMP VIEW selected_spans AS SELECT * FROM {source} {condition}")
    con.execute(
        "CREATE OR REPLACE TEMP VIEW timed_spans AS SELECT * FROM selected_spans WHERE start_ns + dur_ns IS NOT NULL"
    )
    _infer_threads(con)
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW located_spans AS
        SELECT timed_spans.*, coalesce(rank, 0) AS track_rank,
               CASE WHEN device IS NULL THEN coalesce(inferred_threads.process, timed_spans.process) END
                   AS track_process,
               CASE WHEN device IS NULL THEN coalesce(timed_spans.thread, inferred_threads.thread) ELSE stream END
                   AS line
        FROM timed_spans LEFT JOIN inferred_threads USING (trace_id, span_id)
        """
    )
    layout = TrackLayout(_tracks(con))
    [(layout.spans, layout.memory_changes, total)] = con.execute(
        f"""
        SELECT count(*) FILTER (start_ns + dur_ns IS NOT NULL),
               count(*) FILTER (start_ns + dur_ns IS NOT NULL AND kind = '{Kind.ALLOC}'), count(*) FROM selected_spans
        """
    ).fetchall()
    layout.without_time = total - layout.spans
    _nest(con, layout)
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW track_spans AS
        SELECT l.* EXCLUDE (track_rank, track_process, line), coalesce(adjusted_spans.track, tracks.track) AS track,
               coalesce(adjusted_spans.start_ns, l.start_ns) AS begin_ns,
               coalesce(adjusted_spans.dur_ns, greatest(l.dur_ns, 0)) AS width_ns
        FROM located_spans l LEFT JOIN adjusted_spans USING (trace_id, span_id)
        JOIN tracks ON tracks.rank = track_rank AND tracks.process IS NOT DISTINCT FROM track_process
             AND tracks.device IS NOT DISTINCT FROM l.device AND tracks.line IS NOT DISTINCT FROM l.line
        """
    )
    return layout


def _infer_threads(con: duckdb.DuckDBPyConnection) -> None:
    """Make `inferred_threads`: the threads of host spans without a thread (of a library), from the spans above them."""
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE inferred_threads AS
        WITH RECURSIVE ancestors(trace_id, span_id, outer_id, process, thread, distance) AS (
            SELECT trace_id, span_id, parent_id, process, thread, 0 FROM timed_spans
            WHERE device IS NULL AND thread IS NULL AND parent_id IS NOT NULL
            UNION ALL
            SELECT ancestors.trace_id, ancestors.span_id, outer_span.parent_id, outer_span.process,
                   outer_span.thread, distance + 1
            FROM ancestors JOIN timed_spans outer_span
                 ON outer_span.trace_id = ancestors.trace_id AND outer_span.span_id = ancestors.outer_id
            WHERE ancestors.thread IS NULL AND distance < {_MAX_ANCESTORS}
        )
        SELECT trace_id, span_id, any_value(process) AS process, any_value(thread) AS thread
        FROM ancestors WHERE thread IS NOT NULL GROUP BY trace_id, span_id
        """
    )


def _tracks(con: duckdb.DuckDBPyConnection) -> list[Track]:
    """Return the threads and streams, and make the table `tracks`: by rank, threads with steps first, then devices."""
    rows = con.execute(
        f"""
        WITH threads AS (
            SELECT track_rank, track_process, device, line, min(start_ns) AS first_ns,
                   count(*) FILTER (kind = '{Kind.STEP}') AS steps
            FROM located_spans GROUP BY ALL
        )
        SELECT track_rank, track_process, device, line FROM threads
        ORDER BY track_rank, device IS NOT NULL, device, line IS NULL, steps DESC, first_ns, line
        """
    ).fetchall()
    tracks = [Track(number, *row) for number, row in enumerate(rows)]
    table.create(con, "tracks", _TRACKS)
    table.insert(con, "tracks", [track[:-1] for track in tracks], _TRACKS)
    return tracks


def _nest(con: duckdb.DuckDBPyConnection, layout: TrackLayout) -> None:
    """Make the table `adjusted_spans` of the spans that do not nest at their recorded places."""
    table.create(con, "adjustments", _ADJUSTMENTS)
    rows = con.execute(
        """
        SELECT tracks.track, start_ns, start_ns + greatest(dur_ns, 0), level, trace_id, span_id
        FROM located_spans JOIN tracks ON tracks.rank = track_rank AND tracks.process IS NOT DISTINCT FROM track_process
             AND tracks.device IS NOT DISTINCT FROM located_spans.device
             AND tracks.line IS NOT DISTINCT FROM located_spans.line
        ORDER BY tracks.track, start_ns, dur_ns DESC, level, depth, span_id
        """
    )
    adjustments = _adjustments(fetch_rows(rows), layout.tracks)
    with con.cursor() as cursor:  # the first cursor is still yielding rows
        while batch := list(islice(adjustments, _BATCH)):
            table.insert(cursor, "adjustments", batch, _ADJUSTMENTS)
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE adjusted_spans AS
        SELECT trace_id, span_id, arg_max(track, number) AS track, arg_max(start_ns, number) AS start_ns,
               arg_max(dur_ns, number) AS dur_ns, bool_or(cut) AS cut
        FROM adjustments GROUP BY trace_id, span_id
        """
    )
    con.execute("DROP TABLE adjustments")
    [(layout.cut, layout.overlapping)] = con.execute(
        "SELECT count(*) FILTER (cut), count(*) FILTER (track >= ?) FROM adjusted_spans",
        [sum(track.lane == 0 for track in layout.tracks)],
    ).fetchall()


def fetch_rows(rows: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query, with one batch in memory at a time."""
    while batch := rows.fetchmany(_BATCH):
        yield from batch


def _adjustments(rows: Iterable[tuple[Any, ...]], tracks: list[Track]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `adjustments`, and append the additional tracks that are needed to `tracks`."""
    number = 0
    for track_number, track in groupby(rows, itemgetter(0)):
        lanes: list[_Lane] = [_Lane(track_number)]
        for row in track:
            span = _OpenSpan._make(row[1:])
            lane, adjusted = _assign_lane(lanes, span, tracks)
            for drawn in adjusted:
                number += 1
                cut = drawn is not span
                yield number, drawn.trace_id, drawn.span_id, lane.track, drawn.start, drawn.end - drawn.start, cut


def _assign_lane(lanes: list[_Lane], span: _OpenSpan, tracks: list[Track]) -> tuple[_Lane, list[_OpenSpan]]:
    """Put a span in a lane; return the lane, and the spans that differ from their recorded places."""
    for lane in lanes:
        cut_spans = lane.add(span)
        if cut_spans is not None:
            return lane, cut_spans if lane is lanes[0] or _contains(cut_spans, span) else [span, *cut_spans]
    new_lane = _Lane(len(tracks))
    tracks.append(tracks[lanes[0].track]._replace(number=new_lane.track, lane=len(lanes)))
    lanes.append(new_lane)
    new_lane.add(span)
    return new_lane, [span]


def _contains(spans: list[_OpenSpan], span: _OpenSpan) -> bool:
    """Return whether a span is among the changed ones, possibly cut."""
    return any((drawn.trace_id, drawn.span_id) == (span.trace_id, span.span_id) for drawn in spans)


class _Lane:
    """The open spans of a track, outermost first."""

    def __init__(self, track: int) -> None:
        self.track = track
        self.open_spans: list[_OpenSpan] = []

    def add(self, span: _OpenSpan) -> list[_OpenSpan] | None:
        """Add a span, and return the spans that had to be cut; None if it crosses another by more than `CUT_NS`."""
        stack = self.open_spans
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if not stack or span.end <= stack[-1].end:
            stack.append(span)
            return []
        if span.end - stack[-1].end <= CUT_NS:
            stack.append(span._replace(end=stack[-1].end))
            return stack[-1:]
        # nest open spans in a span of an outer level that begins after them only because of another clock
        early = 0
        for inner in reversed(self.open_spans):
            if inner.end >= span.end or inner.level <= span.level or span.start - inner.start > CUT_NS:
                break
            early += 1
        outside = self.open_spans[: len(self.open_spans) - early]
        if not early or (outside and outside[-1].end < span.end):
            return None
        cut = [inner._replace(start=span.start) for inner in self.open_spans[-early:]]
        self.open_spans = [*outside, span, *cut]
        return cut
