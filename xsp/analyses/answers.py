"""The tables of analyses that a report uses, each computed once."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple

import duckdb

from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.store.trace import Trace


class AnswerTable(NamedTuple):
    """The table of an analysis; if the trace does not support it, an empty one with the reason."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    reason: str | None = None

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows with the names of their columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Answers:
    """The tables of a trace by the ids of their analyses."""

    def __init__(self, trace: Trace) -> None:
        """Compute nothing yet: each table is computed on first access, once for all answers of the trace."""
        self.trace = trace

    def __getitem__(self, identity: str) -> AnswerTable:
        """Return the answer of the analysis with this id in `xsp.analyses.ANALYSES`."""
        return self.trace.cached(f"answer {identity} within {self.trace.limits}", lambda: self._compute(identity))

    def classes(self) -> list[dict[str, Any]]:
        """Return the rows of `kernel-classes` for all devices together, without its rows for each device."""
        return [row for row in self["kernel-classes"].dicts() if row["rank"] is None]

    def latency(self) -> dict[str, Any] | None:
        """Return the row of A1 for the batch size of most steps; None without a timed step.

        The last batch of an epoch is often smaller than the others, and A1 lists sizes from the smallest on.
        """
        return max(self["A1"].dicts(), key=lambda row: row["steps"], default=None)

    def _compute(self, identity: str) -> AnswerTable:
        try:
            relation = ANALYSES[identity](self.trace)
        except AnalysisError as error:
            return AnswerTable([], [], str(error))
        return AnswerTable(relation.columns, rows_of(relation))


def rows_of(relation: duckdb.DuckDBPyRelation) -> list[tuple[Any, ...]]:
    """Return the rows of a relation, with SQL decimals converted to floats."""
    rows = relation.fetchall()
    if not any(str(kind).startswith("DECIMAL") for kind in relation.types):
        return rows
    return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in rows]
