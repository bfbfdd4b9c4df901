"""Matching of the layers of two runs: by key, then by name, then by type and order."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xsp.comparison import series
from xsp.comparison.series import RowTimes
from xsp.errors import AnalysisError

MAX_TOKEN_PAIRS = 2_000_000
"""Maximum number of pairs of equal tokens; above it, the k-th token is paired with the k-th equal one."""


class MatchedPair(NamedTuple):
    """A row of one run and its counterpart in the other; None if there is none."""

    a: RowTimes | None
    b: RowTimes | None
    evidence: str | None
    """The evidence: key, name or type."""


def align(a: Sequence[RowTimes], b: Sequence[RowTimes]) -> list[MatchedPair]:
    """Pair the rows of two runs; a row without a counterpart is paired with None.

    The same key is the same place in the structure of a step. The remaining rows are aligned by the longest common
    subsequence of names, and those that still remain between two aligned neighbours by that of types.
    """
    matches: dict[int, tuple[int, str]] = {}
    index_by_key = {row.key: index for index, row in enumerate(b) if row.key is not None}
    for index, row in enumerate(a):
        if row.key in index_by_key:
            matches[index] = (index_by_key.pop(row.key), "key")
    _by_token(a, b, matches, "name")
    _by_token(a, b, matches, "type")
    return _ordered_pairs(a, b, matches)


def by_name(a: Sequence[RowTimes], b: Sequence[RowTimes]) -> list[MatchedPair]:
    """Pair rows with unique names, such as kernels and operators, by name."""
    unmatched = {row.name: row for row in b}
    pairs = [
        MatchedPair(row, unmatched.pop(row.name), "name") if row.name in unmatched else MatchedPair(row, None, None)
        for row in a
    ]
    return [*pairs, *(MatchedPair(None, row, None) for row in unmatched.values())]


def _by_token(
    a: Sequence[RowTimes], b: Sequence[RowTimes], matches: dict[int, tuple[int, str]], attribute: str
) -> None:
    """Align the remaining rows by name, or by type among rows that follow the same aligned neighbour."""
    matched = {index for index, _ in matches.values()}
    neighbours_a = _neighbours(len(a), matches)
    neighbours_b = _neighbours(len(b), {index_b: (index_a, "") for index_a, (index_b, _) in matches.items()})
    unmatched_a = [index for index in range(len(a)) if index not in matches]
    unmatched_b = [index for index in range(len(b)) if index not in matched]
    if attribute == "name":
        tokens: tuple[list[Hashable], list[Hashable]] = (
            [a[index].name for index in unmatched_a],
            [b[index].name for index in unmatched_b],
        )
    else:
        anchors = {index_a: index_b for index_a, (index_b, _) in matches.items()}
        tokens = (
            [(a[index].type, anchors.get(neighbours_a[index], -1)) for index in unmatched_a],
            [(b[index].type, neighbours_b[index]) for index in unmatched_b],
        )
    for index_a, index_b in common_subsequence(*tokens):
        matches[unmatched_a[index_a]] = (unmatched_b[index_b], attribute)


def _neighbours(size: int, matches: dict[int, tuple[int, str]]) -> list[int]:
    """Return, for each place, the last aligned place before it, or -1."""
    last_index, neighbours = -1, []
    for index in range(size):
        neighbours.append(last_index)
        if index in matches:
            last_index = index
    return neighbours


def common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the longest common subsequence as pairs of places.

    The algorithm of Hunt and Szymanski (1977) extends chains of matches: n log n if tokens are nearly unique.
    """
    indices = _indices(b)
    if sum(len(indices[token]) for token in a if token in indices) > MAX_TOKEN_PAIRS:
        return common_subsequence(_numbered(a), _numbered(b))
    tails: list[int] = []
    chains: list[tuple[int, int, object]] = []
    for index_a, token in enumerate(a):
        for index_b in reversed(indices.get(token, ())):
            length = bisect_left(tails, index_b)
            link = (index_a, index_b, chains[length - 1] if length else None)
            if length == len(tails):
                tails.append(index_b)
                chains.append(link)
            else:
                tails[length], chains[length] = index_b, link
    pairs: list[tuple[int, int]] = []
    chain: object = chains[-1] if chains else None
    while isinstance(chain, tuple):
        pairs.append((chain[0], chain[1]))
        chain = chain[2]
    return pairs[::-1]


def _indices(tokens: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    indices: dict[Hashable, list[int]] = defaultdict(list)
    for index, token in enumerate(tokens):
        indices[token].append(index)
    return indices


def _numbered(tokens: Sequence[Hashable]) -> list[Hashable]:
    """Return unique tokens: each with the number of equal tokens before it."""
    counts: dict[Hashable, int] = defaultdict(int)
    unique_tokens: list[Hashable] = []
    for token in tokens:
        unique_tokens.append((token, counts[token]))
        counts[token] += 1
    return unique_tokens


def _ordered_pairs(
    a: Sequence[RowTimes], b: Sequence[RowTimes], matches: dict[int, tuple[int, str]]
) -> list[MatchedPair]:
    """Return the pairs in the order of the second run; rows of the first run alone follow their aligned neighbour."""
    entries: list[tuple[float, int, MatchedPair]] = []
    index_b = -1
    for index, row in enumerate(a):
        if index in matches:
            index_b, by = matches[index]
            entries.append((index_b, -1, MatchedPair(row, b[index_b], by)))
        else:
            entries.append((index_b + 0.5, index, MatchedPair(row, None, None)))
    matched = {index for index, _ in matches.values()}
    entries += [(index, -1, MatchedPair(None, row, None)) for index, row in enumerate(b) if index not in matched]
    return [pair for _, _, pair in sorted(entries, key=lambda entry: entry[:2])]


# --- sides -------------------------------------------------------------------------------------------------------
# The runs of one side merged into one: each row has one figure per run, to show how much runs differ.


Align = Callable[[Sequence[RowTimes], Sequence[RowTimes]], list[MatchedPair]]


@dataclass
class _SideRow:
    """A row over the runs of a side."""

    series: RowTimes
    """The row of the first run that has it."""
    figures: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    steps: int = 0

    def add(self, row: RowTimes) -> None:
        self.figures.append(series.figure(row))
        self.calls += [row.calls] if row.calls is not None else []
        self.steps += row.repeats


def merge_runs(runs: Sequence[list[RowTimes]], align: Align, absent_is_zero: bool) -> list[RowTimes]:
    """Return the aligned rows of the runs of a side, with one figure per run.

    Args:
        runs: the rows of each run; a run without rows was not recorded at this depth, and is ignored.
        align: function that pairs the rows of two runs.
        absent_is_zero: whether a row that a run lacks took no time in it, as for operators; else it has no figure.

    Raises:
        AnalysisError: rows are aligned by structure, and a run has nothing in common with the runs before it.
    """
    rows: list[_SideRow] = []
    count = 0
    for run in filter(None, runs):
        size_before, rows = len(rows), _merge_run(rows, run, align)
        if not absent_is_zero and size_before and len(rows) == size_before + len(run):
            raise AnalysisError(
                f"the runs of a side have neither {run[0].name!r} nor any other row of its section in common: "
                "a side takes runs of one program"
            )
        count += 1
    return [
        RowTimes(
            row.series.key,
            row.series.name,
            row.series.type,
            row.figures + [0.0] * (count - len(row.figures) if absent_is_zero else 0),
            statistics.median(row.calls) if row.calls else None,
            row.steps,
        )
        for row in rows
    ]


def _merge_run(rows: list[_SideRow], run: list[RowTimes], align: Align) -> list[_SideRow]:
    """Return the rows with the figures of a further run, in its order."""
    rows_by_id = {id(row.series): row for row in rows}
    merged = []
    for pair in align([row.series for row in rows], run):
        row = rows_by_id[id(pair.a)] if pair.a is not None else _SideRow(pair.b) if pair.b is not None else None
        assert row is not None
        if pair.b is not None:
            row.add(pair.b)
        merged.append(row)
    return merged
