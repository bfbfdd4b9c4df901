"""Spans by id: the span itself, its ancestors and its children, with all their columns of the span table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xsp.errors import UsageError
from xsp.evidence.form import Document, document, left_out, limit_items
from xsp.schema import MAX_NESTING, Level
from xsp.store.trace import Trace

MOST_ANCESTORS = 20
"""Maximum number of ancestors that are shown."""

_JSON_COLUMNS = ("attributes", "input_shapes")
_LONGEST_JSON = 20_000
"""Maximum number of characters of a JSON column; longer values are shown as text, and cut."""


def with_relatives(trace: Trace, source: Mapping[str, Any], span_id: str, first: int, limit: int) -> Document:
    """Return a span (role `itself`), its ancestors (`around`, the innermost first) and its children (`child`).

    The merged step, whose times exclude the cost of profiling, is searched first, then the recorded steps.

    Args:
        trace: the trace to search.
        source: its source.
        span_id: 16 hexadecimal digits, as cited in other answers.
        first: index of the first child, from 0, in order of time.
        limit: maximum number of children.

    Raises:
        UsageError: there is no such span.
    """
    for table in ("merged", "spans"):
        rows = _rows(trace, f"SELECT * FROM {table} WHERE span_id = ? ORDER BY start_ns LIMIT 1", span_id)
        if rows:
            return _with_relatives(trace, source, table, rows[0], first, limit)
    raise UsageError(f"there is no span {span_id!r} in {source.get('run')!r}: ids are those that other answers cite")


def _with_relatives(
    trace: Trace, source: Mapping[str, Any], table: str, span: dict[str, Any], first: int, limit: int
) -> Document:
    same_trace = "" if table == "merged" else " AND trace_id IS NOT DISTINCT FROM ?"
    trace_id = [] if table == "merged" else [span["trace_id"]]
    children = f"FROM {table} WHERE parent_id = ?{same_trace} AND span_id IS DISTINCT FROM parent_id"
    linked = "" if table == "merged" else " AND inner_.trace_id IS NOT DISTINCT FROM outer_.trace_id"
    ((count,),) = trace.con.execute(f"SELECT count(*) {children}", [span["span_id"], *trace_id]).fetchall()
    entries = [_span(span, "itself", count)]
    entries += [_span(row, "around") for row in _ancestors(trace, table, span, same_trace, trace_id)]
    rows = _rows(
        trace,
        f"SELECT *, (SELECT count(*) FROM {table} inner_ WHERE inner_.parent_id = outer_.span_id{linked}) AS children "
        f"FROM (SELECT * {children} ORDER BY start_ns, span_id LIMIT {int(limit)} OFFSET {int(first)}) outer_ "
        "ORDER BY start_ns, span_id",
        span["span_id"],
        *trace_id,
    )
    entries += [_span(row, "child", row.pop("children")) for row in rows]
    remaining = count - first - len(rows)
    notes = (
        [left_out(f"children of {span['span_id']}", remaining, f"first={first + len(rows)}")] if remaining > 0 else []
    )
    return document("spans", source, table=table, spans=entries, first=first, left_out=notes)


def _ancestors(
    trace: Trace, table: str, span: dict[str, Any], same_trace: str, trace_id: list[Any]
) -> list[dict[str, Any]]:
    ancestors: list[dict[str, Any]] = []
    visited, parent = {span["span_id"]}, span["parent_id"]
    while parent is not None and parent not in visited and len(ancestors) < min(MOST_ANCESTORS, MAX_NESTING):
        rows = _rows(trace, f"SELECT * FROM {table} WHERE span_id = ?{same_trace} LIMIT 1", parent, *trace_id)
        if not rows:
            break
        ancestors += rows
        visited.add(parent)
        parent = rows[0]["parent_id"]
    return ancestors


def _rows(trace: Trace, query: str, *values: Any) -> list[dict[str, Any]]:
    cursor = trace.con.execute(query, list(values))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _span(row: Mapping[str, Any], role: str, children: int | None = None) -> Document:
    """Return the columns of a span that have a value."""
    columns = {name: _value(name, value) for name, value in row.items() if value is not None}
    if "level" in columns:
        number = columns["level"]
        columns["level_name"] = Level(number).name.lower() if number in set(Level) else None
    return {"role": role, **({} if children is None else {"children": children}), **columns}


def _value(name: str, value: Any) -> Any:
    if name in _JSON_COLUMNS and isinstance(value, str) and len(value) <= _LONGEST_JSON:
        try:
            return limit_items(json.loads(value))
        except (ValueError, RecursionError):
            return value
    return value
