"""The spans that a row of an analysis refers to, selected by the columns that name them.

The ids are those of the merged step, the longest spans first. A row that names no span refers to the step as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from xsp.analyses.modules import make_paths
from xsp.analyses.phases import PHASE_OF_KIND
from xsp.errors import XspError
from xsp.evidence.form import NONE, Citation
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import NS

MOST_IDS = 5
"""Maximum number of ids per row."""

_ID_COLUMNS = ("span_id", "call_span_id")
_LAYER = f"level = {int(Level.LAYER)}"
_SPAN_COLUMNS: dict[str, tuple[str, str]] = {
    "layer_name": ("name", _LAYER),
    "layer": ("name", _LAYER),
    "peak_layer": ("name", _LAYER),
    "next_layer": ("name", _LAYER),
    "name": ("name", "true"),
    "op": ("name", "true"),
    "call": ("name", "true"),
    "longest_kernel": ("name", "true"),
    "type": ("type", _LAYER),
    "kind": ("kind", "true"),
}
"""Columns of analyses that name spans → the corresponding column of spans, and a condition on the spans."""

_GROUP_COLUMNS = {"what": ("kind", "true"), "layer": ("name", _LAYER), "name": ("name", "true")}
_KIND_OF_PHASE = {phase: kind for kind, phase in PHASE_OF_KIND.items()}
_KERNEL_ANALYSES = ("A8", "A9")
_CLASSES = ("module-classes", "class")
_NARROWING_COLUMNS = {"shapes": "input_shapes", "device": "device", "type": "type"}
"""Columns of analyses that narrow down the spans named by `name` → columns of spans."""


def of_step(trace: Trace) -> Citation:
    """Return the span of the merged step, or the outermost spans of a trace without one."""
    citation = _cite(trace, f"kind = '{Kind.STEP}'")
    return citation if citation.total else _cite(trace, "parent_id IS NULL AND device IS NULL")


def of_phase(trace: Trace, phase: str) -> Citation:
    """Return the calls of a phase."""
    return _cite(trace, "kind = ?", [_KIND_OF_PHASE.get(phase, phase)])


def of_name(trace: Trace, name: str) -> Citation:
    """Return the spans with a name."""
    return _cite(trace, "name = ?", [name])


def _cite(trace: Trace, condition: str, values: Sequence[Any] = ()) -> Citation:
    """Return the merged spans that meet a condition."""
    rows = trace.con.execute(
        f"SELECT span_id, count(*) OVER () FROM merged WHERE ({condition}) AND span_id IS NOT NULL "
        f"ORDER BY {NS} DESC NULLS LAST, start_ns, span_id LIMIT {MOST_IDS}",
        list(values),
    ).fetchall()
    return Citation([row[0] for row in rows], rows[0][1]) if rows else NONE


def of_rows(trace: Trace, analysis: str, rows: Sequence[Mapping[str, Any]]) -> list[Citation]:
    """Return the spans of each row of an analysis.

    Args:
        trace: the analysed trace.
        analysis: name of the analysis.
        rows: columns with their values; only a page of rows, since each one is looked up.
    """
    step = of_step(trace)
    cache: dict[tuple[str, tuple[Any, ...]], Citation] = {}
    citations = []
    for row in rows:
        lookup = _condition(trace, analysis, row)
        if lookup is None:
            citations.append(step)
            continue
        condition, values = lookup
        if (condition, values) not in cache:
            cache[condition, values] = _cite_safely(trace, condition, values)
        citation = cache[condition, values]
        if not citation.total and isinstance(row.get("layer_index"), int):  # time of a layer without a span of its own
            citation = _cite_safely(trace, f"{_LAYER} AND layer_index = ?", (row["layer_index"],))
        citations.append(citation if citation.total else step)
    return citations


def _cite_safely(trace: Trace, condition: str, values: tuple[Any, ...]) -> Citation:
    try:
        return _cite(trace, condition, values)
    except (duckdb.Error, XspError):  # a column of a plugin's analysis with the name of a built-in one
        return NONE


def _condition(trace: Trace, analysis: str, row: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the SQL condition of a row's spans, with its values; None if the row names no spans."""
    for column in _ID_COLUMNS:
        if isinstance(row.get(column), str):
            return "span_id = ?", (row[column],)
    if isinstance(row.get("layer_index"), int):
        if analysis in _KERNEL_ANALYSES:
            in_layer = f"layer_id IN (SELECT span_id FROM merged WHERE {_LAYER} AND layer_index = ?)"
            return f"name = ? AND level > {int(Level.OP) - 1} AND {in_layer}", (row["name"], row["layer_index"])
        return f"{_LAYER} AND layer_index = ?", (row["layer_index"],)
    if analysis == "phases":
        return "kind = ?", (_KIND_OF_PHASE.get(str(row.get("phase")), str(row.get("phase"))),)
    if row.get("grouped_by") in _GROUP_COLUMNS and isinstance(row.get("name"), str):
        column, restriction = _GROUP_COLUMNS[str(row["grouped_by"])]
        return f"{column} = ? AND {restriction}", (row["name"],)
    if analysis == "modules" and isinstance(row.get("path"), str):
        make_paths(trace)
        layer_ids = "SELECT layer_id FROM module_chains JOIN chain_members USING (chain) WHERE own AND member = ?"
        return f"span_id IN ({layer_ids} AND grouped_by = 'path')", (row["path"],)
    if analysis == _CLASSES[0] and isinstance(row.get(_CLASSES[1]), str):
        return f"type = ? AND {_LAYER}", (row[_CLASSES[1]],)
    for column, (span_column, restriction) in _SPAN_COLUMNS.items():
        if isinstance(row.get(column), str):
            narrowed = {
                name: target
                for name, target in _NARROWING_COLUMNS.items()
                if column == "name" and row.get(name) is not None
            }
            if analysis == "ops":  # here `device` is that of the launched work, not of the operators' spans
                narrowed.pop("device", None)
            conditions = [f"{span_column} = ?", restriction, *(f"{target} = ?" for target in narrowed.values())]
            return " AND ".join(conditions), (row[column], *(row[name] for name in narrowed))
    return None
