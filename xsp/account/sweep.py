"""Unions of intervals as arrays: their length, their gaps, and how much of other intervals they cover; names as numbers
in arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Union = tuple[Times, Times]
"""Starts and ends of disjoint intervals, in order."""


def union(starts: Times, ends: Times) -> Union:
    """Return the union of intervals as disjoint intervals in order; intervals that touch become one."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, until = starts[order], np.maximum.accumulate(ends[order])
    begins = np.r_[True, starts[1:] > until[:-1]]
    return starts[begins], until[np.r_[np.flatnonzero(begins)[1:] - 1, len(starts) - 1]]


def length(intervals: Union) -> int:
    """Return the length of a union."""
    return int((intervals[1] - intervals[0]).sum())


def covered(intervals: Union, starts: Any, ends: Any) -> Times:
    """Return for each query interval how much of it a union covers; a query that ends before it starts gives 0."""
    begins, stops = intervals
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if not len(begins):
        return np.zeros(starts.shape, np.int64)
    before = np.r_[0, np.cumsum(stops - begins)]

    def until(times: Times) -> Times:
        index = np.searchsorted(begins, times, "right")
        last = np.maximum(index - 1, 0)
        inside = np.where(index > 0, np.clip(times - begins[last], 0, stops[last] - begins[last]), 0)
        return np.asarray(before[last] + inside, np.int64)

    return np.asarray(np.maximum(0, until(ends) - until(starts)), np.int64)


def clipped(intervals: Union, start: int, end: int) -> Union:
    """Return the part of a union between two times."""
    first, last = np.searchsorted(intervals[1], start, "right"), np.searchsorted(intervals[0], end, "left")
    starts, ends = intervals[0][first:last], intervals[1][first:last]
    return np.maximum(starts, start), np.minimum(ends, end)


def complement(intervals: Union, start: int, end: int) -> Union:
    """Return the gaps that a union leaves between two times."""
    starts, ends = clipped(intervals, start, end)
    begins, stops = np.r_[start, ends], np.r_[starts, end]
    keep = stops > begins
    return begins[keep], stops[keep]


def _marks(one: Union, other: Union) -> Times:
    """Return the starts and ends of two unions, in order; those that both have are there twice."""
    return np.sort(np.concatenate([*one, *other]), kind="stable")  # fast, because each part is in order


def intersection(one: Union, other: Union) -> Union:
    """Return what two unions have in common."""
    marks = _marks(one, other)
    starts, ends = marks[:-1], marks[1:]
    keep = (covered(one, starts, ends) > 0) & (covered(other, starts, ends) > 0)
    return union(starts[keep], ends[keep])


def without(one: Union, other: Union) -> Union:
    """Return the part of a union that another one does not cover."""
    marks = _marks(one, other)
    starts, ends = marks[:-1], marks[1:]
    keep = (covered(one, starts, ends) > 0) & (covered(other, starts, ends) == 0)
    return union(starts[keep], ends[keep])


def innermost(starts: Times, ends: Times) -> tuple[Times, Times, Times]:
    """Return disjoint segments of time with the index of the interval that began last among those that run.

    Args:
        starts: starts, of intervals that may nest or overlap.
        ends: their ends.

    Returns:
        Starts, ends and indices of the segments; time that no interval covers is in none.
    """
    count = len(starts)
    order = np.lexsort((-ends, starts))
    times = np.concatenate([starts, ends])
    kinds = np.r_[np.ones(count, np.int8), np.zeros(count, np.int8)]
    owners = np.r_[np.argsort(order), np.argsort(order)]  # the rank of an interval in order of its start
    marks = np.lexsort((owners, kinds, times))
    segments: list[tuple[int, int, int]] = []
    running: list[int] = []
    ended: set[int] = set()
    previous = 0
    for mark in marks:
        now, owner = int(times[mark]), int(owners[mark])
        while running and running[-1] in ended:
            running.pop()
        if running and now > previous:
            segments.append((previous, now, int(order[running[-1]])))
        previous = now
        if kinds[mark]:
            if ends[order[owner]] > starts[order[owner]]:
                running.append(owner)
        else:
            ended.add(owner)
    if not segments:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty
    columns = np.array(segments, np.int64).T
    return columns[0], columns[1], columns[2]


def coded(texts: Iterable[object]) -> tuple[list[str], Times]:
    """Return the distinct texts in order, and the place of each text among them.

    An array of texts would take the room of the longest one for each: kernels have names of a thousand characters.
    """
    written = [str(text) for text in texts]
    distinct = sorted(set(written))
    places = {text: place for place, text in enumerate(distinct)}
    return distinct, np.array([places[text] for text in written], np.int64)
