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
_HIGHEST_WALK = 64
_TRACKS = (
    Column("track", "INTEGER", ""), Column("rank", "INTEGER", ""), Column("process", "BIGINT", ""),
    Column("device", "INTEGER", ""), Column("line", "BIGINT", "thread or stream"),
)  # fmt: skip
_MOVES = (
    Column("move", "BIGINT", "a later one of the same span counts"), Column("trace_id", "VARCHAR", ""),
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


class _Open(NamedTuple):
    start: int
    end: int
    level: int
    trace_id: str
    span_id: str


@dataclass
class TrackLayout:
    """The tracks of the spans in the view `placed`, and the numbers of spans that were changed so that they nest."""

    tracks: list[Track]
    spans: int = 0
    cut: int = 0
    beside: int = 0
    without_time: int = 0

    changes_of_memory: int = 0
    """Number of spans that are not intervals."""

    def written(self, memory: bool = True) -> Written:
        """Return the result for a file with all placed spans; changes of memory are included only if `memory`."""
        changed = {
            f"that crossed others by at most {CUT_NS / 1e3:g} µs were cut so that they nest": self.cut,
            "that overlap others are on separate tracks": self.beside,
            "have no time, and are left out": self.without_time,
            "are changes of memory, which this format cannot show": 0 if memory else self.changes_of_memory,
        }
        return Written(self.spans - (0 if memory else self.changes_of_memory), Counter(changed))


def place(con: duckdb.DuckDBPyConnection, source: str, steps: Sequence[int] | None = None) -> TrackLayout:
    """Make the view `placed`: the spans of a source, their `track`, and drawn start and duration, `at_ns` and `for_ns`.

    Args:
        con: holds the source.
        source: `spans` or `merged`.
        steps: steps to include; None for all.

    Returns:
        The tracks, in display order. In each, the spans of `placed` nest.
    """
    condition = f"WHERE step IN ({', '.join(map(str, steps))})" if steps is not None else ""
    con.execute(f"CREATE OR REPLACE TEMP VIEW chosen AS SELECT * FROM {source} {condition}")
    con.execute("CREATE OR REPLACE TEMP VIEW timed_spans AS SELECT * FROM chosen WHERE start_ns + dur_ns IS NOT NULL")
    _find_homes(con)
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW located AS
        SELECT timed_spans.*, coalesce(rank, 0) AS of_rank,
               CASE WHEN device IS NULL THEN coalesce(homes.process, timed_spans.process) END AS of_process,
               CASE WHEN device IS NULL THEN coalesce(timed_spans.thread, homes.thread) ELSE stream END AS line
        FROM timed_spans LEFT JOIN homes USING (trace_id, span_id)
        """
    )
    layout = TrackLayout(_tracks(con))
    [(layout.spans, layout.changes_of_memory, total)] = con.execute(
        f"""
        SELECT count(*) FILTER (start_ns + dur_ns IS NOT NULL),
               count(*) FILTER (start_ns + dur_ns IS NOT NULL AND kind = '{Kind.ALLOC}'), count(*) FROM chosen
        """
    ).fetchall()
    layout.without_time = total - layout.spans
    _nest(con, layout)
    con.execute(
        """
        CREATE OR REPLACE TEMP VIEW placed AS
        SELECT l.* EXCLUDE (of_rank, of_process, line), coalesce(moved.track, tracks.track) AS track,
               coalesce(moved.start_ns, l.start_ns) AS at_ns, coalesce(moved.dur_ns, greatest(l.dur_ns, 0)) AS for_ns
        FROM located l LEFT JOIN moved USING (trace_id, span_id)
        JOIN tracks ON tracks.rank = of_rank AND tracks.process IS NOT DISTINCT FROM of_process
             AND tracks.device IS NOT DISTINCT FROM l.device AND tracks.line IS NOT DISTINCT FROM l.line
        """
    )
    return layout


def _find_homes(con: duckdb.DuckDBPyConnection) -> None:
    """Make `homes`: the threads of host spans without a thread (of a library), taken from the spans above them."""
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE homes AS
        WITH RECURSIVE up(trace_id, span_id, above, process, thread, height) AS (
            SELECT trace_id, span_id, parent_id, process, thread, 0 FROM timed_spans
            WHERE device IS NULL AND thread IS NULL AND parent_id IS NOT NULL
            UNION ALL
            SELECT up.trace_id, up.span_id, outer_span.parent_id, outer_span.process, outer_span.thread, height + 1
            FROM up JOIN timed_spans outer_span ON outer_span.trace_id = up.trace_id AND outer_span.span_id = up.above
            WHERE up.thread IS NULL AND height < {_HIGHEST_WALK}
        )
        SELECT trace_id, span_id, any_value(process) AS process, any_value(thread) AS thread
        FROM up WHERE thread IS NOT NULL GROUP BY trace_id, span_id
        """
    )


def _tracks(con: duckdb.DuckDBPyConnection) -> list[Track]:
    """Return the threads and streams, and make the table `tracks`: by rank, threads with steps first, then devices."""
    rows = con.execute(
        f"""
        WITH lines AS (
            SELECT of_rank, of_process, device, line, min(start_ns) AS began,
                   count(*) FILTER (kind = '{Kind.STEP}') AS steps
            FROM located GROUP BY ALL
        )
        SELECT of_rank, of_process, device, line FROM lines
        ORDER BY of_rank, device IS NOT NULL, device, line IS NULL, steps DESC, began, line
        """
    ).fetchall()
    tracks = [Track(number, *row) for number, row in enumerate(rows)]
    table.create(con, "tracks", _TRACKS)
    table.insert(con, "tracks", [track[:-1] for track in tracks], _TRACKS)
    return tracks


def _nest(con: duckdb.DuckDBPyConnection, layout: TrackLayout) -> None:
    """Make the table `moved` of the spans that do not nest at their recorded places."""
    table.create(con, "moves", _MOVES)
    rows = con.execute(
        """
        SELECT tracks.track, start_ns, start_ns + greatest(dur_ns, 0), level, trace_id, span_id
        FROM located JOIN tracks ON tracks.rank = of_rank AND tracks.process IS NOT DISTINCT FROM of_process
             AND tracks.device IS NOT DISTINCT FROM located.device AND tracks.line IS NOT DISTINCT FROM located.line
        ORDER BY tracks.track, start_ns, dur_ns DESC, level, depth, span_id
        """
    )
    moves = _moves(fetched(rows), layout.tracks)
    with con.cursor() as cursor:  # the first cursor is still yielding rows
        while batch := list(islice(moves, _BATCH)):
            table.insert(cursor, "moves", batch, _MOVES)
    con.execute(
        """
        CREATE OR REPLACE TEMP TABLE moved AS
        SELECT trace_id, span_id, arg_max(track, move) AS track, arg_max(start_ns, move) AS start_ns,
               arg_max(dur_ns, move) AS dur_ns, bool_or(cut) AS cut
        FROM moves GROUP BY trace_id, span_id
        """
    )
    con.execute("DROP TABLE moves")
    [(layout.cut, layout.beside)] = con.execute(
        "SELECT count(*) FILTER (cut), count(*) FILTER (track >= ?) FROM moved",
        [sum(track.lane == 0 for track in layout.tracks)],
    ).fetchall()


def fetched(rows: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query, with one batch in memory at a time."""
    while batch := rows.fetchmany(_BATCH):
        yield from batch


def _moves(rows: Iterable[tuple[Any, ...]], tracks: list[Track]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `moves`, and append the additional tracks that are needed to `tracks`."""
    move = 0
    for number, track in groupby(rows, itemgetter(0)):
        lanes: list[_Lane] = [_Lane(number)]
        for row in track:
            span = _Open._make(row[1:])
            lane, changed = _first_that_fits(lanes, span, tracks)
            for drawn in changed:
                move += 1
                cut = drawn is not span
                yield move, drawn.trace_id, drawn.span_id, lane.track, drawn.start, drawn.end - drawn.start, cut


def _first_that_fits(lanes: list[_Lane], span: _Open, tracks: list[Track]) -> tuple[_Lane, list[_Open]]:
    """Put a span in a lane; return the lane, and the spans that differ from their recorded places."""
    for lane in lanes:
        changed = lane.take(span)
        if changed is not None:
            return lane, changed if lane is lanes[0] or _has(changed, span) else [span, *changed]
    new_lane = _Lane(len(tracks))
    tracks.append(tracks[lanes[0].track]._replace(number=new_lane.track, lane=len(lanes)))
    lanes.append(new_lane)
    new_lane.take(span)
    return new_lane, [span]


def _has(changed: list[_Open], span: _Open) -> bool:
    """Return whether a span is among the changed ones, possibly cut."""
    return any((drawn.trace_id, drawn.span_id) == (span.trace_id, span.span_id) for drawn in changed)


class _Lane:
    """The open spans of a track, outermost first."""

    def __init__(self, track: int) -> None:
        self.track = track
        self.open: list[_Open] = []

    def take(self, span: _Open) -> list[_Open] | None:
        """Add a span, and return the spans that had to be cut; None if it crosses another by more than `CUT_NS`."""
        stack = self.open
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if not stack or span.end <= stack[-1].end:
            stack.append(span)
            return []
        if span.end - stack[-1].end <= CUT_NS:
            stack.append(span._replace(end=stack[-1].end))
            return stack[-1:]
        return self._take_around(span)

    def _take_around(self, span: _Open) -> list[_Open] | None:
        """Nest open spans in a span of an outer level that begins after them only because of another clock."""
        early = 0
        for inner in reversed(self.open):
            if inner.end >= span.end or inner.level <= span.level or span.start - inner.start > CUT_NS:
                break
            early += 1
        outside = self.open[: len(self.open) - early]
        if not early or (outside and outside[-1].end < span.end):
            return None
        cut = [inner._replace(start=span.start) for inner in self.open[-early:]]
        self.open = [*outside, span, *cut]
        return cut
