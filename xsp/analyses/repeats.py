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


class RepeatedSequence(NamedTuple):
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


def line_numbers(columns: Iterable[npt.NDArray[Any]]) -> _Ints:
    """Return the number of the line of each row: rows of a line follow each other and are equal in all columns.

    Args:
        columns: of rows in order, at least one; masked where they are null.
    """
    changes: npt.NDArray[Any] = np.zeros(0, dtype=bool)
    for column in columns:
        is_missing = np.ma.getmaskarray(column)
        filled = np.where(is_missing, 0, np.ma.getdata(column))
        is_different = (filled[1:] != filled[:-1]) | (is_missing[1:] != is_missing[:-1])
        changes = changes | is_different if len(changes) else is_different
    return np.concatenate(([0], np.cumsum(changes)))


def repeated_sequences(lines: Lines, lengths: range, max_sequences: int) -> list[RepeatedSequence]:
    """Return the sequences of some lengths, without those that only occur in another one.

    Args:
        lines: the kernels.
        lengths: successive numbers of kernels in a sequence, from 2 on.
        max_sequences: number of sequences of each length that are compared, those of the longest time.
    """
    candidates: list[RepeatedSequence] = []
    starts = np.arange(len(lines.name))  # where the sequences of the previous length begin
    number = lines.name
    for length in lengths:
        starts, number = _extended(lines, starts, number, length)
        if len(starts) == 0:
            break
        candidates += _longest(lines, starts, number, length, max_sequences)
    return list(_maximal(candidates))


def _extended(lines: Lines, starts: _Ints, number: _Ints, length: int) -> tuple[_Ints, _Ints]:
    """Return where sequences that repeat begin, sorted by sequence and place, and the number of each sequence.

    Args:
        lines: the kernels.
        starts: where the sequences of one kernel less begin, sorted by sequence and place.
        number: the number of the sequence at each of these places.
        length: number of kernels in a sequence.
    """
    last_places = starts + length - 1
    is_inside = last_places < len(lines.name)
    starts, number, last_places = starts[is_inside], number[is_inside], last_places[is_inside]
    is_inside = lines.line[starts] == lines.line[last_places]
    starts, number, last_places = starts[is_inside], number[is_inside], last_places[is_inside]
    key = (number << 31) | lines.name[last_places]
    order = np.argsort(key, kind="stable")
    starts, number = starts[order], _key_numbers(key[order])
    if len(number) == 0:
        return starts, number
    is_repeated = np.bincount(number)[number] > 1
    return starts[is_repeated], number[is_repeated]


def _key_numbers(keys: _Ints) -> _Ints:
    """Return the number of each of sorted keys among the distinct ones."""
    return np.concatenate(([0], np.cumsum(keys[1:] != keys[:-1]))) if len(keys) else keys


def _longest(lines: Lines, starts: _Ints, number: _Ints, length: int, max_sequences: int) -> list[RepeatedSequence]:
    """Return the sequences of one length that occur more than once, at most `max_sequences`, the longest time first."""
    last_places = starts + length - 1
    timed = lines.timed[last_places]
    starts, number, last_places = starts[timed], number[timed], last_places[timed]
    separate = _separate_occurrences(lines.line[starts], starts, number, length)
    starts, number, last_places = starts[separate], number[separate], last_places[separate]
    if len(starts) == 0:
        return []
    cumulative_ns = np.concatenate(([0], np.cumsum(lines.duration)))
    ns = cumulative_ns[last_places + 1] - cumulative_ns[starts]
    gaps = np.maximum(lines.start[last_places] + lines.duration[last_places] - lines.start[starts] - ns, 0)
    begins = np.flatnonzero(np.concatenate(([True], number[1:] != number[:-1])))
    times = np.diff(begins, append=len(number))
    total, gap = np.add.reduceat(ns, begins), np.add.reduceat(gaps, begins)
    repeated = np.flatnonzero(times > 1)
    if len(repeated) > max_sequences:  # all that are as long as the last that is taken: their texts decide
        repeated = repeated[total[repeated] >= np.partition(total[repeated], -max_sequences)[-max_sequences]]
    sequences = [
        RepeatedSequence(
            tuple(lines.name[starts[begins[index]] : starts[begins[index]] + length].tolist()),
            int(times[index]),
            int(total[index]),
            int(gap[index]) / int(times[index]),
        )
        for index in repeated
    ]
    return sorted(sequences, key=lambda sequence: (-sequence.ns, sequence.text))[:max_sequences]


def _separate_occurrences(line: _Ints, starts: _Ints, number: _Ints, length: int) -> npt.NDArray[np.bool_]:
    """Return which occurrences count: of overlapping ones at a distance of p, every ceil(length / p)-th."""
    if len(starts) == 0:
        return np.zeros(0, dtype=bool)
    begins = np.concatenate(
        ([True], (number[1:] != number[:-1]) | (line[1:] != line[:-1]) | (starts[1:] - starts[:-1] >= length))
    )
    heads = np.flatnonzero(begins)
    island = np.cumsum(begins) - 1
    many = np.diff(heads, append=len(starts))
    width = np.maximum(starts[heads + many - 1] - starts[heads], 1)
    gaps = np.maximum(many - 1, 1)
    distance = np.rint(np.ceil(length * gaps / width) * width / gaps).astype(np.int64)
    counts: npt.NDArray[np.bool_] = (many[island] == 1) | ((starts - starts[heads][island]) % distance[island] == 0)
    return counts


def _maximal(candidates: Sequence[RepeatedSequence]) -> Iterator[RepeatedSequence]:
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
        if most_within.get(inner.names, 0) < inner.times and not _is_dominated(inner, shifted):
            yield inner


def _parts(names: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the shorter sequences, of two names or more, inside a sequence."""
    for length in range(2, len(names)):
        for start in range(len(names) - length + 1):
            yield names[start : start + length]


def _is_dominated(inner: RepeatedSequence, candidates: Iterable[RepeatedSequence]) -> bool:
    """Return whether another sequence occurs as often and takes longer; if the time is equal, the text decides."""
    return any(
        outer.times >= inner.times and (outer.ns > inner.ns or (outer.ns == inner.ns and outer.text < inner.text))
        for outer in candidates
    )
