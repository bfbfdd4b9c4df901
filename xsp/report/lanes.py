"""Lanes of the timeline: the spans of a lane do not overlap; a track has as many lanes as its spans nest.

There is a track for each thread and each stream of each rank. In a track a span is drawn below the spans that are open
when it starts. This is nesting in time, which differs from parent spans: the parent of a backward operator is the layer
of its forward operator, and the wait for data begins before the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

MOST_LANES = 64
"""Maximum lanes of a track; spans that overlap more deeply are counted instead."""

WORTH = 0.1
"""Minimum share of the time of a lane for a level to be named beside it."""

Track = tuple[int, bool, int | None, int | None]
"""Rank, whether it is a device's, process and thread or device and stream."""


class Bar(NamedTuple):
    """The columns of a span that determine its lane."""

    number: int
    parent: int | None
    start: int
    dur: int
    level: int
    depth: int
    rank: int
    process: int | None
    thread: int | None
    device: int | None
    stream: int | None


class Lane(NamedTuple):
    """Spans that do not overlap, by start. One without spans is the heading of a rank."""

    track: str
    levels: list[int]
    bars: list[Bar]


def lanes(bars: Sequence[Bar]) -> list[Lane]:
    """Put spans in lanes: rank by rank, threads first, the busiest foremost, then devices."""
    by_number = {bar.number: bar for bar in bars}
    tracks: dict[Track, list[Bar]] = defaultdict(list)
    for bar in bars:
        tracks[_track(bar, by_number)].append(bar)
    return list(_in_order(tracks, by_number))


def _in_order(tracks: Mapping[Track, list[Bar]], by_number: Mapping[int, Bar]) -> Iterator[Lane]:
    several = len({rank for rank, *_ in tracks}) > 1
    rank, thread = None, 0
    for track in sorted(tracks, key=lambda track: (*track[:2], _place(track, tracks[track]))):
        if several and track[0] != rank:
            rank, thread = track[0], 0
            yield Lane(f"rank {rank}", [], [])
        thread += not track[1]
        for lane in _nested(tracks[track], by_number):
            yield Lane(_title(track, thread), _levels(lane), lane)


def _place(track: Track, bars: Sequence[Bar]) -> tuple[int, ...]:
    """Sort streams by their numbers, threads by how busy they are."""
    if track[1]:
        return tuple(-1 if number is None else number for number in track[2:])
    return (-sum(bar.dur for bar in bars),)


def _track(bar: Bar, by_number: Mapping[int, Bar]) -> Track:
    """Return what a span ran on; a span without a thread (a primitive) stands on that of the spans above it."""
    if bar.device is not None:
        return (bar.rank, True, bar.device, bar.stream)
    outer, above = bar, 0
    while outer.thread is None and outer.parent is not None and above < MOST_LANES:
        outer, above = by_number[outer.parent], above + 1
    return (bar.rank, False, outer.process, outer.thread)


def _levels(lane: Sequence[Bar]) -> list[int]:
    """Return what a lane holds: the levels of its spans, without those of hardly any of its time, outermost first."""
    times: Counter[int] = Counter()
    for bar in lane:
        times[bar.level] += bar.dur
    return sorted(level for level, time in times.items() if time >= WORTH * times.total())


def _title(track: Track, thread: int) -> str:
    _, on_device, first, second = track
    if on_device:
        return f"device {first}" + (f", stream {second}" if second is not None else "")
    return f"thread {thread}" if second is not None else "no thread"


def _nested(track: Sequence[Bar], by_number: Mapping[int, Bar]) -> list[list[Bar]]:
    """Put each span in the first lane below all lanes that are taken when it starts."""
    found: list[list[Bar]] = []
    ends: list[int] = []
    for bar in sorted(track, key=lambda bar: _outer_first(bar, by_number)):
        place = len(ends)
        while place and ends[place - 1] <= bar.start:
            place -= 1
        if place == MOST_LANES:
            continue
        if place == len(ends):
            ends.append(0)
            found.append([])
        ends[place] = bar.start + bar.dur
        found[place].append(bar)
    return found


def _outer_first(bar: Bar, by_number: Mapping[int, Bar]) -> tuple[int, int, int, int]:
    """Sort by start; a span that another clock puts just before the parent that it runs in comes after it."""
    start = bar.start
    parent = by_number[bar.parent] if bar.parent is not None else None
    if parent is not None and start < parent.start <= start + bar.dur // 2:
        start = parent.start
    return start, bar.level, -bar.dur, bar.depth
