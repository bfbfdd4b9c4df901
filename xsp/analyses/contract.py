"""The definition and registry of analyses, and the table of an analysis that computes in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from xsp import frameworks, table
from xsp.errors import AnalysisError, UsageError
from xsp.schema import Column, Level
from xsp.store.trace import Trace

Table = duckdb.DuckDBPyRelation


SUMS = frozenset(
    {"health", "kernel-classes", "tensor-cores", "attention", "fusible", "A8", "A9", "A10", "A11", "A14", "modules",
     "module-classes", "ops"}
)  # fmt: skip
"""Analyses that only add up durations: they also answer for a profile that has no moments."""


@dataclass(frozen=True)
class Analysis:
    """A named question, and the function that answers it from a trace."""

    id: str
    title: str
    needs: tuple[Level, ...]
    function: Callable[[Trace], Table]
    unless: Callable[[Trace], str | None] | None = None
    """A function that returns why a trace that holds these levels is still not sufficient, or None if it is."""
    everywhere: bool = False
    """Whether the analysis reads all steps of all ranks instead of the merged step."""

    def __call__(self, trace: Trace) -> Table:
        """Return the table.

        Raises:
            AnalysisError: the trace does not hold what the analysis needs; the message names what is missing and why.
        """
        reason = self.refusal(trace)
        if reason is not None:
            raise AnalysisError(reason)
        return self.function(trace)

    @property
    def name(self) -> str:
        """The name in Python: that of the function."""
        return self.function.__name__

    def refusal(self, trace: Trace) -> str | None:
        """Return why the analysis cannot run on this trace, or None if it can."""
        if trace.run.timeline is False and self.id not in SUMS:
            return (
                f"{self.id} ({self.title}) needs to know when spans ran, and {trace.name!r} has sums by place "
                "without a timeline; `ops` and `kernel-classes` answer"
            )
        missing = [level for level in self.needs if not self._holds(trace, level)]
        if missing:
            names = ", ".join(level.name.lower() for level in missing)
            requirement = "device work of a GPU" if missing == [Level.KERNEL] else f"the {names} level"
            reason: str | None = f"needs {requirement}, and {trace.name!r} holds no such span"
            return f"{self.id} ({self.title}) {reason} {_recording_hint(trace, missing)}"
        reason = self.unless(trace) if self.unless is not None else None
        # a reason that tells only users of PyTorch what to do ends before that
        reason = reason and (frameworks.in_words_of(trace.run.framework, reason) or reason.partition(";")[0])
        return reason and f"{self.id} ({self.title}): {reason}"

    def _holds(self, trace: Trace, level: Level) -> bool:
        """Return whether a trace holds a level; device kernels suffice where the op level is needed."""
        levels = (level, Level.KERNEL) if level == Level.OP else (level,)
        if not self.everywhere:
            return any(map(trace.has, levels))
        query = "SELECT DISTINCT level FROM spans"
        held = trace.cached("levels of all spans", lambda: {level for (level,) in trace.con.execute(query).fetchall()})
        return any(int(level) in held for level in levels)

    @property
    def about(self) -> str:
        """The first paragraph of the function's documentation."""
        return (self.function.__doc__ or "").strip().split("\n\n")[0]


def _recording_hint(trace: Trace, missing: Sequence[Level]) -> str:
    if trace.run.imported is not None and trace.run.xsp is None:  # recorded by another profiler
        hint = "(imported); torch.profiler records modules with with_stack and with_modules, shapes with record_shapes"
        return frameworks.in_words_of(trace.run.framework, hint) or "(imported)"
    if any(rung.level >= max(missing) and rung.steps for rung in trace.rungs) and Level.KERNEL not in missing:
        reason = ": no module was called in them" if Level.LAYER in missing else ""
        return f"(steps were recorded at this depth, and hold none{reason})"
    if trace.run.levels == "M/L/G" and Level.KERNEL not in missing:
        return "(of M/L/G, no step was recorded at this depth); run more steps, or use a larger budget"
    location = " on a machine with a GPU" if Level.KERNEL in missing else ""
    return f"(recorded with {trace.run.levels or 'unknown levels'}); record again with --levels M/L/G{location}"


def analysis(
    identity: str,
    title: str,
    *needs: Level,
    unless: Callable[[Trace], str | None] | None = None,
    everywhere: bool = False,
) -> Callable[[Callable[[Trace], Table]], Analysis]:
    """Make a function an analysis, and register it for `xsp analyze`, the report and `xsp.analyses`.

    Args:
        identity: name on the command line; analyses of XSP's Table I have its numbers.
        title: title of the table.
        needs: levels without which the analysis refuses a trace.
        unless: function that returns why a trace that holds these levels is still not sufficient, or None if it is.
        everywhere: whether the analysis reads all steps of all ranks instead of the merged step.

    Raises:
        UsageError: another function is registered under that name.
    """

    def make(function: Callable[[Trace], Table]) -> Analysis:
        entry = Analysis(identity, title, needs, function, unless, everywhere)
        for existing in ANALYSES.values():
            is_redefinition = (existing.function.__module__, existing.name) == (function.__module__, entry.name)
            if not is_redefinition and {existing.id.lower(), existing.name} & {identity.lower(), entry.name}:
                raise UsageError(f"there already is an analysis {existing.id!r} ({existing.name}); rename {entry.name}")
        ANALYSES[identity] = entry
        return entry

    return make


ANALYSES: dict[str, Analysis] = {}
"""All analyses by their names on the command line."""


def values(trace: Trace, name: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> Table:
    """Return rows that were computed in Python as a table.

    Args:
        trace: the trace whose engine is to hold the table.
        name: name of the table in the engine; no other analysis may use it.
        columns: name → type.
        rows: rows in the order of the table.
    """
    schema = [Column(column, kind, "") for column, kind in columns.items()]
    table.create(trace.con, name, schema)
    table.insert(trace.con, name, rows, schema)
    return trace.sql(f"SELECT * FROM {name}")
