"""What an analysis is, and the tables that several of them start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from xsp import table
from xsp.errors import AnalysisError
from xsp.span import Column, Level
from xsp.trace import Trace

Table = duckdb.DuckDBPyRelation


@dataclass(frozen=True)
class Analysis:
    """A named question, and the function that answers it from a trace."""

    id: str
    title: str
    needs: tuple[Level, ...]
    function: Callable[[Trace], Table]
    counters: bool = False
    """Whether it also needs a device's counters."""
    everywhere: bool = False
    """Whether it asks all steps of all ranks, and not the merged step."""

    def __call__(self, trace: Trace) -> Table:
        """Return the table.

        Raises:
            AnalysisError: the trace does not hold what the analysis needs; the message says what and why.
        """
        reason = self.refusal(trace)
        if reason is not None:
            raise AnalysisError(reason)
        return self.function(trace)

    def refusal(self, trace: Trace) -> str | None:
        """Return why this trace cannot carry the analysis, or None."""
        missing = [level for level in self.needs if not self._holds(trace, level)]
        if missing:
            names = ", ".join(level.name.lower() for level in missing)
            took = trace.run.get("levels", "unknown levels")
            where = " on a machine with a GPU" if Level.KERNEL in missing else ""
            return (
                f"{self.id} ({self.title}) needs the {names} level, and {trace.name!r} holds no such span "
                f"(recorded with {took}); record again with --levels M/L/G{where}"
            )
        if self.counters:
            return (
                f"{self.id} ({self.title}) needs the DRAM traffic of each kernel from a device's counters, which no "
                "collector of this version records"
            )
        return None

    def _holds(self, trace: Trace, level: Level) -> bool:
        if not self.everywhere:
            return trace.has(level)
        return bool(trace.con.execute("SELECT 1 FROM spans WHERE level = ? LIMIT 1", [int(level)]).fetchall())

    @property
    def about(self) -> str:
        """The first paragraph of the function's documentation."""
        return (self.function.__doc__ or "").strip().split("\n\n")[0]


def analysis(
    identity: str, title: str, *needs: Level, counters: bool = False, everywhere: bool = False
) -> Callable[[Callable[[Trace], Table]], Analysis]:
    """Make a function an analysis."""

    def make(function: Callable[[Trace], Table]) -> Analysis:
        return Analysis(identity, title, needs, function, counters, everywhere)

    return make


def values(trace: Trace, name: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return a table that was computed in Python.

    Args:
        trace: whose engine holds it.
        name: of the table in the engine; the analysis's own.
        columns: name → type.
        rows: in the order of the table.
    """
    table.create(trace.con, name, [Column(each, kind, "") for each, kind in columns.items()])
    table.insert(trace.con, name, rows, [Column(each, kind, "") for each, kind in columns.items()])
    return trace.sql(f"SELECT * FROM {name}")
