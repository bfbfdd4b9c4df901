"""Tables that fit a terminal.

Names in a trace are somebody else's text: they are shown as they are, never read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from xsp import analyses
from xsp.analyses import Analysis
from xsp.errors import AnalysisError
from xsp.health import Severity, health
from xsp.trace import Trace

MISSING = "–"
NAME_WIDTH = 44
_A1 = ("batch_size", "latency_ms", "low_ms", "high_ms", "p90_ms", "samples_per_s", "steps")
_LEDGER = ("rung", "steps", "step_ms", "added_ms", "low_ms", "high_ms", "added_percent", "ns_per_span")
_COLOURS = {Severity.WARNING: "yellow", Severity.NOTE: "dim", Severity.GOOD: "green"}


def table(
    relation: duckdb.DuckDBPyRelation,
    title: str,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> RenderableType:
    """Return a relation as a table.

    Args:
        relation: what to show, in its order.
        title: above it.
        limit: rows to show; below them stands how many were left out.
        columns: to show; all that hold anything unless told otherwise.
    """
    names, rows = relation.columns, relation.fetchall()
    shown = rows if limit is None else rows[:limit]
    chosen = [
        place
        for place, name in enumerate(names)
        if (name in columns if columns is not None else any(row[place] is not None for row in rows) or not rows)
    ]
    made = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place in chosen:
        numeric = any(isinstance(row[place], (int, float)) and not isinstance(row[place], bool) for row in rows)
        heading = Text(names[place].replace("_", " "))
        made.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in shown:
        made.add_row(*(Text(cell(row[place])) for place in chosen))
    if len(shown) < len(rows):
        left = len(rows) - len(shown)
        return Group(made, Text(f"{left} more row{'s' * (left > 1)}", style="dim"))
    return made


def cell(value: Any) -> str:
    """Return a value as a table shows it: four significant digits, long names shortened in the middle."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    text = str(value)
    if len(text) <= NAME_WIDTH:
        return text
    half = (NAME_WIDTH - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def number(value: float) -> str:
    """Return a number with about four significant digits, without an exponent where people expect none."""
    if value == 0 or 0.001 <= abs(value) < 100_000:
        digits = max(0, 3 - len(str(int(abs(value))))) + (1 if abs(value) < 1000 else 0)
        return f"{value:.{digits}f}"
    return f"{value:.3g}"


def health_table(trace: Trace) -> RenderableType:
    """Return the findings on a trace, the most important first."""
    made = Table(
        title=Text("What is missing or doubtful", style="bold"), title_justify="left", show_header=False, box=None
    )
    for finding in health(trace):
        style = _COLOURS[finding.severity]
        made.add_row(Text(str(finding.severity), style=style), Text(finding.subject), Text(finding.text))
    return made


def overview(trace: Trace) -> RenderableType:
    """Return what a person wants to see first: latency, dearest layers, time by type, ledger, health."""
    parts = [
        _of(analyses.A1, trace, columns=_A1),
        _of(analyses.A2, trace, 10, "self_ms", ("name", "type", "shape", "self_ms", "alloc_mib")),
        _of(analyses.A6, trace, 8),
        _of(analyses.ledger, trace, columns=_LEDGER),
        health_table(trace),
    ]
    return Group(*(part for pair in parts for part in (pair, Text())))


def _of(
    each: Analysis,
    trace: Trace,
    limit: int | None = None,
    dearest: str | None = None,
    columns: Sequence[str] | None = None,
) -> RenderableType:
    """Return an analysis as a table, or the reason why this trace cannot carry it."""
    try:
        relation = each(trace)
    except AnalysisError as error:
        return Text(str(error), style="dim")
    title = each.title if each.id.startswith("ledger") else f"{each.id} {each.title}"
    if dearest is not None:
        relation = relation.order(f"{dearest} DESC NULLS LAST")
        title += f", by {dearest}"
    return table(relation, title, limit, columns)
