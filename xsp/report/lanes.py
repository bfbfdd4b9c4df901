"""Lanes of the timeline: the spans of a lane do not overlap; a track has a lane for each depth of its spans.

There is a track for each thread and each stream of each rank. In a track a span is drawn below the spans that are open
when it starts. This is nesting in time, which differs from parent spans: the parent of a backward operator is the layer
of its forward operator, and the wait for data begins before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MOST_LANES = 64
"""Maximum lanes of a track; spans that overlap more deeply are counted instead."""

LEAST_SHARE = 0.1
"""Minimum share of the time of a lane for a level to be listed beside it."""

MISSING = np.iinfo(np.int64).min
"""Placeholder for an unknown value."""

Track = tuple[int, bool, int | None, int | None]
"""Rank, whether it belongs to a device, then process and thread, or device and stream."""


@dataclass
class Bars:
    """The columns of spans that determine their lanes; a parent is an index of a span, -1 for none."""

    parent: Array
    start: Array
    dur: Array
    level: Array
    depth: Array
    rank: Array
    process: Array
    thread: Array
    device: Array
    stream: Array


class Lane(NamedTuple):
    """The indices of spans that do not overlap, by start. A lane without spans is the heading of a rank."""

    track: str
    levels: list[int]
    indices: Array


def lanes(bars: Bars) -> list[Lane]:
    """Return spans in lanes: rank by rank, threads first, beginning with the busiest, then devices."""
    tracks = _tracks(bars)
    # by start; a span that another clock places just before its parent comes after the parent
    parent_start = np.where(bars.parent >= 0, bars.start[bars.parent], bars.start)
    is_late = (bars.start < parent_start) & (parent_start <= bars.start + bars.dur // 2)
    order: Array = np.lexsort((bars.depth, -bars.dur, bars.level, np.where(is_late, parent_start, bars.start)))
    return list(_ordered_lanes(bars, {track: order[mask[order]] for track, mask in tracks.items()}))


def _tracks(bars: Bars) -> dict[Track, Array]:
    """Return the tracks, each with a mask of the spans that ran on it.

    A span without a thread (a primitive) gets the thread of its nearest ancestor that has one.
    """
    on_device = bars.device != MISSING
    ancestor = np.arange(len(on_device))
    for _ in range(MOST_LANES):
        climbs = ~on_device & (bars.thread[ancestor] == MISSING) & (bars.parent[ancestor] >= 0)
        if not climbs.any():
            break
        ancestor[climbs] = bars.parent[ancestor[climbs]]
    outer = np.where(on_device, bars.device, bars.process[ancestor])
    inner = np.where(on_device, bars.stream, bars.thread[ancestor])
    rows = np.stack([bars.rank, on_device, outer, inner], axis=1)
    distinct, places, track_numbers = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    track_numbers = track_numbers.ravel()
    tracks: dict[Track, Array] = {}
    for number in np.argsort(places).tolist():
        rank, device, *location = distinct[number].tolist()
        outer_id, inner_id = (None if part == MISSING else part for part in location)
        tracks[rank, bool(device), outer_id, inner_id] = track_numbers == number
    return tracks


def _ordered_lanes(bars: Bars, tracks: Mapping[Track, Array]) -> Iterator[Lane]:
    several = len({rank for rank, *_ in tracks}) > 1
    rank, thread = None, 0
    for track in sorted(tracks, key=lambda track: (*track[:2], _sort_key(track, bars.dur[tracks[track]]))):
        if several and track[0] != rank:
            rank, thread = track[0], 0
            yield Lane(f"rank {rank}", [], np.zeros(0, np.int64))
        thread += not track[1]
        members = tracks[track]
        lane_numbers = _lane_numbers(bars.start[members].tolist(), (bars.start + bars.dur)[members].tolist())
        for number in range(lane_numbers.max(initial=-1) + 1):
            indices = members[lane_numbers == number]
            level, dur = bars.level[indices], bars.dur[indices]
            least = LEAST_SHARE * dur.sum()  # other levels take hardly any of the lane's time
            yield Lane(
                _title(track, thread),
                [int(value) for value in np.unique(level) if dur[level == value].sum() >= least],
                indices,
            )


def _sort_key(track: Track, dur: Array) -> tuple[int, ...]:
    """Return a key that sorts streams by their numbers, and threads by total time, the busiest first."""
    if track[1]:
        return tuple(-1 if number is None else number for number in track[2:])
    return (-int(dur.sum()),)


def _title(track: Track, thread: int) -> str:
    _, on_device, outer, inner = track
    if on_device:
        return f"device {outer}" + (f", stream {inner}" if inner is not None else "")
    return f"thread {thread}" if inner is not None else "no thread"


def _lane_numbers(starts: list[int], stops: list[int]) -> Array:
    """Return the lane of each span: the first below all lanes that are taken when it starts; -1 if that is too deep."""
    depths: list[int] = []
    lane_ends: list[int] = []
    for start, stop in zip(starts, stops, strict=True):
        depth = len(lane_ends)
        while depth and lane_ends[depth - 1] <= start:
            depth -= 1
        if depth == MOST_LANES:
            depths.append(-1)
            continue
        if depth == len(lane_ends):
            lane_ends.append(0)
        lane_ends[depth] = stop
        depths.append(depth)
    return np.array(depths, np.int64)
