"""The tables of analyses that a report uses, each computed once."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple

import duckdb

from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.store.trace import Trace


class Answer(NamedTuple):
    """The table of an analysis; if the trace does not support it, an empty one with the reason."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    refused: str | None = None

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows with the names of their columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Answers:
    """What the analyses say of a trace, by their ids."""

    def __init__(self, trace: Trace) -> None:
        """Results are computed on first access."""
        self.trace = trace
        self._known: dict[str, Answer] = {}

    def __getitem__(self, identity: str) -> Answer:
        """Return the answer of one of `xsp.analyses.ANALYSES`."""
        if identity not in self._known:
            self._known[identity] = self._ask(identity)
        return self._known[identity]

    def classes(self) -> list[dict[str, Any]]:
        """Return the classes of kernels of all devices together: `kernel-classes` has those of each device as well."""
        return [row for row in self["kernel-classes"].dicts() if row["rank"] is None]

    def _ask(self, identity: str) -> Answer:
        try:
            relation = ANALYSES[identity](self.trace)
        except AnalysisError as error:
            return Answer([], [], str(error))
        return Answer(relation.columns, rows_of(relation))


def rows_of(relation: duckdb.DuckDBPyRelation) -> list[tuple[Any, ...]]:
    """Return the rows of a relation, with SQL's decimals as numbers like others."""
    rows = relation.fetchall()
    if not any(str(kind).startswith("DECIMAL") for kind in relation.types):
        return rows
    return [tuple(float(value) if isinstance(value, Decimal) else value for value in row) for row in rows]
