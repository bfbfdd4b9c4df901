"""Spans by id: the span itself, its ancestors and its children, with all their columns of the span table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xsp.errors import UsageError
from xsp.evidence.form import Document, bounded, document, left_out
from xsp.schema import DEEPEST, Level
from xsp.store.trace import Trace

MOST_AROUND = 20
"""Maximum number of ancestors that are shown."""

_AS_JSON = ("attributes", "input_shapes")
_LONGEST_JSON = 20_000
"""Maximum number of characters of a JSON column; longer values are shown as text, and cut."""


def under(trace: Trace, source: Mapping[str, Any], span_id: str, first: int, limit: int) -> Document:
    """Return a span (role `itself`), the spans around it (`around`, the innermost first) and its children (`child`).

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
    for place in ("merged", "spans"):
        rows = _rows(trace, f"SELECT * FROM {place} WHERE span_id = ? ORDER BY start_ns LIMIT 1", span_id)
        if rows:
            return _shown(trace, source, place, rows[0], first, limit)
    raise UsageError(f"there is no span {span_id!r} in {source.get('run')!r}: ids are those that other answers cite")


def _shown(
    trace: Trace, source: Mapping[str, Any], place: str, itself: dict[str, Any], first: int, limit: int
) -> Document:
    here = "" if place == "merged" else " AND trace_id IS NOT DISTINCT FROM ?"
    trace_id = [] if place == "merged" else [itself["trace_id"]]
    children = f"FROM {place} WHERE parent_id = ?{here} AND span_id IS DISTINCT FROM parent_id"
    same = "" if place == "merged" else " AND inner_.trace_id IS NOT DISTINCT FROM outer_.trace_id"
    ((count,),) = trace.con.execute(f"SELECT count(*) {children}", [itself["span_id"], *trace_id]).fetchall()
    shown = [_span(itself, "itself", count)]
    shown += [_span(each, "around") for each in _around(trace, place, itself, here, trace_id)]
    found = _rows(
        trace,
        f"SELECT *, (SELECT count(*) FROM {place} inner_ WHERE inner_.parent_id = outer_.span_id{same}) AS children "
        f"FROM (SELECT * {children} ORDER BY start_ns, span_id LIMIT {int(limit)} OFFSET {int(first)}) outer_ "
        "ORDER BY start_ns, span_id",
        itself["span_id"],
        *trace_id,
    )
    shown += [_span(each, "child", each.pop("children")) for each in found]
    more = count - first - len(found)
    notes = [left_out(f"children of {itself['span_id']}", more, f"first={first + len(found)}")] if more > 0 else []
    return document("spans", source, table=place, spans=shown, first=first, left_out=notes)


def _around(trace: Trace, place: str, itself: dict[str, Any], here: str, trace_id: list[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    seen, parent = {itself["span_id"]}, itself["parent_id"]
    while parent is not None and parent not in seen and len(found) < min(MOST_AROUND, DEEPEST):
        rows = _rows(trace, f"SELECT * FROM {place} WHERE span_id = ?{here} LIMIT 1", parent, *trace_id)
        if not rows:
            break
        found += rows
        seen.add(parent)
        parent = rows[0]["parent_id"]
    return found


def _rows(trace: Trace, query: str, *values: Any) -> list[dict[str, Any]]:
    asked = trace.con.execute(query, list(values))
    names = [column[0] for column in asked.description or ()]
    return [dict(zip(names, row, strict=True)) for row in asked.fetchall()]


def _span(row: Mapping[str, Any], role: str, children: int | None = None) -> Document:
    """Return the columns of a span that have a value."""
    known = {name: _value(name, value) for name, value in row.items() if value is not None}
    if "level" in known:
        known["level_name"] = _level(known["level"])
    return {"role": role, **({} if children is None else {"children": children}), **known}


def _value(name: str, value: Any) -> Any:
    if name in _AS_JSON and isinstance(value, str) and len(value) <= _LONGEST_JSON:
        try:
            return bounded(json.loads(value))
        except (ValueError, RecursionError):
            return value
    return value


def _level(number: int) -> str | None:
    return Level(number).name.lower() if number in set(Level) else None
