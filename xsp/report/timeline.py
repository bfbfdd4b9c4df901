"""The merged step as the timeline draws it: columns of spans, lane by lane.

A lane holds spans that do not overlap. There is a track of lanes for each thread and each stream, and in a
track a span stands below the spans that are open when it starts: nesting in time, not parenthood, for a
backward operator hangs under the layer of its forward operator, and the wait for data begins before the step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xsp.span import COLUMNS, MERGED_COLUMNS, Kind
from xsp.trace import Trace

MOST_SPANS = 200_000
"""Of a longer step the longest spans are shown, and the page says so."""

MOST_LANES = 64
"""In a track; what overlaps more deeply than that cannot be read, and is counted instead."""

_UNSEEN = {"trace_id", "span_id", "parent_id", "start_ns", "step", "rung", "timed", "key"}
_SHOWN = [column for column in (*COLUMNS, *MERGED_COLUMNS) if column.name not in _UNSEEN]

Row = dict[str, Any]


class Lane(NamedTuple):
    """Spans that do not overlap, by start."""

    track: str
    level: int
    rows: list[Row]


def timeline(trace: Trace) -> dict[str, Any]:
    """Return the merged step for the page: lanes, packed columns, and what was left out.

    Times are nanoseconds from the start of the step. `parent` is the place of the parent among the spans, `key`
    is what a link from elsewhere calls a span.
    """
    total = int(trace.con.execute("SELECT count(*) FROM merged").fetchall()[0][0])
    rows = _rows(trace)
    lanes = _lanes(rows)
    ordered = [row for lane in lanes for row in lane.rows]
    zero = _zero(ordered)
    place = {row["span_id"]: number for number, row in enumerate(ordered)}
    starts = [row["start_ns"] - zero for row in ordered]
    ends = [start + row["dur_ns"] for start, row in zip(starts, ordered, strict=True)]
    return {
        "note": _note(len(ordered), total - len(rows), len(rows) - len(ordered)),
        "lanes": _bounds(lanes),
        "range": (min(starts, default=0), max(ends, default=0)),
        "start": starts,
        "key": [row["key"] for row in ordered],
        "parent": pack(place.get(row["parent_id"]) for row in ordered),
        "about": {column.name: column.about for column in _SHOWN},
        "columns": {column.name: pack(row[column.name] for row in ordered) for column in _SHOWN},
    }


def pack(values: Iterable[Any]) -> Any:
    """Return a column as short JSON: one value for all, or the different values and who has which, or a list."""
    column = list(values)
    different = list(dict.fromkeys(column))
    if len(different) <= 1:
        return {"all": _plain(different[0]) if different else None}
    if 4 * len(different) > len(column) and not any(isinstance(value, str) for value in different):
        return [_plain(value) for value in column]
    number = {value: place for place, value in enumerate(different)}
    return {"values": [_plain(value) for value in different], "at": [number[value] for value in column]}


def _plain(value: Any) -> Any:
    """Return a value that JSON can say; fractions of a nanosecond are dropped."""
    if isinstance(value, float):
        return round(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _rows(trace: Trace) -> list[Row]:
    found = trace.con.execute(f"SELECT * FROM merged ORDER BY dur_ns DESC, start_ns LIMIT {MOST_SPANS}")
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def _zero(rows: Sequence[Row]) -> int:
    """Return when the step began, else when the first span did."""
    steps = [row["start_ns"] for row in rows if row["kind"] == Kind.STEP]
    return min(steps or [row["start_ns"] for row in rows], default=0)


def _note(shown: int, short: int, deep: int) -> str:
    text = f"{shown:,} spans of one real step of the deepest rung, as recorded; true times in the panel."
    if short:
        text += f" Left out: the {short:,} shortest."
    if deep:
        text += f" Left out: {deep:,} that overlap more than {MOST_LANES} deep."
    return text


def _bounds(lanes: Sequence[Lane]) -> list[tuple[str, int, int, int]]:
    """Return each lane's track, level, and the first and the last place of its spans."""
    bounds, first = [], 0
    for lane in lanes:
        bounds.append((lane.track, lane.level, first, first + len(lane.rows)))
        first += len(lane.rows)
    return bounds


def _lanes(rows: Sequence[Row]) -> list[Lane]:
    """Put spans in lanes; threads come first, the busiest foremost, then devices."""
    tracks: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    by_id = {row["span_id"]: row for row in rows}
    for row in rows:
        tracks[_track(row, by_id)].append(row)
    busiest = sorted(tracks, key=lambda track: (track[0], -sum(row["dur_ns"] for row in tracks[track])))
    return [
        Lane(_title(track, number), _level(lane), lane)
        for number, track in enumerate(busiest, start=1)
        for lane in _nested(tracks[track], by_id)
    ]


def _track(row: Row, by_id: dict[str, Row]) -> tuple[Any, ...]:
    """Return what a span ran on; a span without a thread (a primitive) stands on that of the spans above it."""
    if row["device"] is not None:
        return (1, row["device"], row["stream"])
    outer, steps = row, 0
    while outer["thread"] is None and outer["parent_id"] in by_id and steps < MOST_LANES:
        outer, steps = by_id[outer["parent_id"]], steps + 1
    return (0, outer["process"], outer["thread"])


def _level(lane: Sequence[Row]) -> int:
    """Return the level that most of a lane's time is of."""
    times: Counter[int] = Counter()
    for row in lane:
        times[row["level"]] += row["dur_ns"]
    return times.most_common(1)[0][0]


def _title(track: tuple[Any, ...], number: int) -> str:
    on_device, first, second = track
    if on_device:
        return f"device {first}" + (f", stream {second}" if second is not None else "")
    return f"thread {number}" if second is not None else "no thread"


def _nested(track: Sequence[Row], by_id: dict[str, Row]) -> list[list[Row]]:
    """Put each span in the first lane below all lanes that are taken when it starts."""
    lanes: list[list[Row]] = []
    ends: list[int] = []
    for row in sorted(track, key=lambda row: _outer_first(row, by_id.get(row["parent_id"]))):
        place = next((place for place in reversed(range(len(ends))) if ends[place] > row["start_ns"]), -1) + 1
        if place == MOST_LANES:
            continue
        if place == len(ends):
            ends.append(0)
            lanes.append([])
        ends[place] = row["start_ns"] + row["dur_ns"]
        lanes[place].append(row)
    return lanes


def _outer_first(row: Row, parent: Row | None) -> tuple[int, int, int, int]:
    """Sort by start; a span that another clock puts just before the parent that it runs in comes after it."""
    start = row["start_ns"]
    if parent is not None and start < parent["start_ns"] <= start + row["dur_ns"] // 2:
        start = parent["start_ns"]
    return start, row["level"], -row["dur_ns"], row["depth"] or 0
