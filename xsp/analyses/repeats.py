"""Sequences of names that occur more than once in lines of names: their occurrences, and the sequences worth a row.

A sequence is found length by length: its number follows from the number of the sequence without its last name and from
that name, so that a length takes one sort of integers, however long the sequences are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]


class Lines(NamedTuple):
    """Kernels, line by line and in order of start in each; times in nanoseconds."""

    line: _Ints
    """The number of the line, in ascending order."""
    name: _Ints
    """The number of the name, less than 2^31."""
    start: _Ints
    duration: _Ints
    timed: npt.NDArray[np.bool_]
    """Whether the duration is known."""


class Repeated(NamedTuple):
    """A sequence that occurs more than once."""

    names: tuple[int, ...]
    times: int
    ns: int
    """Sum of its kernels' durations."""
    gap_ns: float
    """Mean time in an occurrence in which none of its kernels runs."""

    @property
    def text(self) -> str:
        """The numbers of its names as text, which decides between sequences of equal time."""
        return " ".join(map(str, self.names))


def numbered(columns: Iterable[npt.NDArray[Any]]) -> _Ints:
    """Return the number of the line of each row: rows of a line follow each other and are equal in all columns.

    Args:
        columns: of rows in order, at least one; masked where they are null.
    """
    changes: npt.NDArray[Any] = np.zeros(0, dtype=bool)
    for column in columns:
        missing = np.ma.getmaskarray(column)
        known = np.where(missing, 0, np.ma.getdata(column))
        differs = (known[1:] != known[:-1]) | (missing[1:] != missing[:-1])
        changes = changes | differs if len(changes) else differs
    return np.concatenate(([0], np.cumsum(changes)))


def repeated(lines: Lines, lengths: range, most: int) -> list[Repeated]:
    """Return the sequences of some lengths, without those that only occur in another one.

    Args:
        lines: the kernels.
        lengths: successive numbers of kernels in a sequence, from 2 on.
        most: number of sequences of each length that are compared, those of the longest time.
    """
    candidates: list[Repeated] = []
    first = np.arange(len(lines.name))  # where the sequences of the previous length begin
    number = lines.name
    for length in lengths:
        first, number = _longer(lines, first, number, length)
        if len(first) == 0:
            break
        candidates += _longest(lines, first, number, length, most)
    return list(_whole(candidates))


def _longer(lines: Lines, first: _Ints, number: _Ints, length: int) -> tuple[_Ints, _Ints]:
    """Return where sequences that repeat begin, sorted by sequence and place, and the number of each sequence.

    Args:
        lines: the kernels.
        first: where the sequences of one kernel less begin, sorted by sequence and place.
        number: the number of the sequence at each of these places.
        length: number of kernels in a sequence.
    """
    last = first + length - 1
    inside = last < len(lines.name)
    first, number, last = first[inside], number[inside], last[inside]
    inside = lines.line[first] == lines.line[last]
    first, number, last = first[inside], number[inside], last[inside]
    key = (number << 31) | lines.name[last]
    order = np.argsort(key, kind="stable")
    first, number = first[order], _numbered(key[order])
    if len(number) == 0:
        return first, number
    several = np.bincount(number)[number] > 1
    return first[several], number[several]


def _numbered(keys: _Ints) -> _Ints:
    """Return the number of each of sorted keys among the distinct ones."""
    return np.concatenate(([0], np.cumsum(keys[1:] != keys[:-1]))) if len(keys) else keys


def _longest(lines: Lines, first: _Ints, number: _Ints, length: int, most: int) -> list[Repeated]:
    """Return the sequences of one length that occur more than once, at most `most`, the longest time first."""
    last = first + length - 1
    timed = lines.timed[last]
    first, number, last = first[timed], number[timed], last[timed]
    counted = _apart(lines.line[first], first, number, length)
    first, number, last = first[counted], number[counted], last[counted]
    if len(first) == 0:
        return []
    ends = np.concatenate(([0], np.cumsum(lines.duration)))
    ns = ends[last + 1] - ends[first]
    gaps = np.maximum(lines.start[last] + lines.duration[last] - lines.start[first] - ns, 0)
    begins = np.flatnonzero(np.concatenate(([True], number[1:] != number[:-1])))
    times = np.diff(begins, append=len(number))
    total, gap = np.add.reduceat(ns, begins), np.add.reduceat(gaps, begins)
    several = np.flatnonzero(times > 1)
    if len(several) > most:  # all that are as long as the last that is taken: their texts decide
        several = several[total[several] >= np.partition(total[several], -most)[-most]]
    sequences = [
        Repeated(
            tuple(lines.name[first[begins[place]] : first[begins[place]] + length].tolist()),
            int(times[place]),
            int(total[place]),
            int(gap[place]) / int(times[place]),
        )
        for place in several
    ]
    return sorted(sequences, key=lambda sequence: (-sequence.ns, sequence.text))[:most]


def _apart(line: _Ints, first: _Ints, number: _Ints, length: int) -> npt.NDArray[np.bool_]:
    """Return which occurrences count: of overlapping ones at a distance of p, every ceil(length / p)-th."""
    if len(first) == 0:
        return np.zeros(0, dtype=bool)
    begins = np.concatenate(
        ([True], (number[1:] != number[:-1]) | (line[1:] != line[:-1]) | (first[1:] - first[:-1] >= length))
    )
    heads = np.flatnonzero(begins)
    island = np.cumsum(begins) - 1
    many = np.diff(heads, append=len(first))
    width = np.maximum(first[heads + many - 1] - first[heads], 1)
    gaps = np.maximum(many - 1, 1)
    distance = np.rint(np.ceil(length * gaps / width) * width / gaps).astype(np.int64)
    counts: npt.NDArray[np.bool_] = (many[island] == 1) | ((first - first[heads][island]) % distance[island] == 0)
    return counts


def _whole(candidates: Sequence[Repeated]) -> Iterator[Repeated]:
    """Yield the sequences that do not only occur inside a longer one, or as another one shifted by one kernel."""
    most_within: dict[tuple[int, ...], int] = {}
    by_head, by_tail = defaultdict(list), defaultdict(list)
    for outer in candidates:
        by_head[outer.names[:-1]].append(outer)
        by_tail[outer.names[1:]].append(outer)
        for part in _parts(outer.names):
            most_within[part] = max(most_within.get(part, 0), outer.times)
    for inner in candidates:
        shifted = [*by_head[inner.names[1:]], *by_tail[inner.names[:-1]]]
        if most_within.get(inner.names, 0) < inner.times and not _is_behind(inner, shifted):
            yield inner


def _parts(names: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the shorter sequences, of two names or more, inside a sequence."""
    for length in range(2, len(names)):
        for place in range(len(names) - length + 1):
            yield names[place : place + length]


def _is_behind(inner: Repeated, others: Iterable[Repeated]) -> bool:
    """Return whether another sequence occurs as often and takes longer; if the time is equal, the text decides."""
    return any(
        outer.times >= inner.times and (outer.ns > inner.ns or (outer.ns == inner.ns and outer.text < inner.text))
        for outer in others
    )
