"""The runs of one side as one: each row with one figure a run, so that what differs between runs can be told."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xsp.comparison import series
from xsp.comparison.align import Pair
from xsp.comparison.series import Series
from xsp.errors import AnalysisError

Align = Callable[[Sequence[Series], Sequence[Series]], list[Pair]]


@dataclass
class _Row:
    """A row over the runs of a side."""

    first: Series
    """Of the first run that has it."""
    figures: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    steps: int = 0

    def add(self, row: Series) -> None:
        self.figures.append(series.figure(row))
        self.calls += [row.calls] if row.calls is not None else []
        self.steps += len(row.values)


def side(runs: Sequence[list[Series]], align: Align, absent_is_zero: bool) -> list[Series]:
    """Return the rows of the runs of a side, aligned, with one figure a run.

    Args:
        runs: the rows of each; one that has none was not recorded so deep, and counts nowhere.
        align: pairs the rows of two runs.
        absent_is_zero: what a run does not have took no time in it, as an operator; else it has no figure of it.

    Raises:
        AnalysisError: one of the runs has nothing in common with those before it, where structure is what is aligned.
    """
    rows: list[_Row] = []
    seen = 0
    for run in filter(None, runs):
        before, rows = len(rows), _with(rows, run, align)
        if not absent_is_zero and before and len(rows) == before + len(run):
            raise AnalysisError(
                f"the runs of a side have no {run[0].name!r}, or anything of its section, in common: "
                "runs of one program belong on a side"
            )
        seen += 1
    return [
        Series(
            row.first.key,
            row.first.name,
            row.first.type,
            row.figures + [0.0] * (seen - len(row.figures) if absent_is_zero else 0),
            statistics.median(row.calls) if row.calls else None,
            row.steps,
        )
        for row in rows
    ]


def _with(rows: list[_Row], run: list[Series], align: Align) -> list[_Row]:
    """Return the rows, in the order of a further run, with its figures."""
    of_series = {id(row.first): row for row in rows}
    found = []
    for pair in align([row.first for row in rows], run):
        row = of_series[id(pair.a)] if pair.a is not None else _Row(pair.b) if pair.b is not None else None
        assert row is not None
        if pair.b is not None:
            row.add(pair.b)
        found.append(row)
    return found
