"""Analyses in the JSON form: their list, and pages of one analysis, sorted and filtered without SQL from the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from xsp.analyses import ANALYSES, Analysis
from xsp.errors import AnalysisError, UsageError, nearest
from xsp.evidence import citations
from xsp.evidence.form import Document, document, left_out
from xsp.store.trace import Trace
from xsp.table import literal, quoted

COMPARISONS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
CONTAINS = "contains"


def find(name: str) -> Analysis:
    """Return an analysis by its name, ignoring case.

    Raises:
        UsageError: there is no such analysis.
    """
    found = {known.lower(): each for known, each in ANALYSES.items()}.get(name.lower())
    if found is None:
        raise UsageError(f"there is no analysis {name!r}{nearest(name, ANALYSES) or '; tables without one lists them'}")
    return found


def listed(trace: Trace, source: Mapping[str, Any], first: int, limit: int) -> Document:
    """Return the analyses, with the reasons why some cannot run on this trace."""
    every = [
        {"name": each.id, "title": each.title, "about": each.about, "refused": each.refusal(trace)}
        for each in list(ANALYSES.values())[first : first + limit]
    ]
    more = len(ANALYSES) - first - len(every)
    notes = [left_out("analyses", more, f"first={first + len(every)}")] if more > 0 else []
    return document("analyses", source, analyses=every, first=first, left_out=notes)


def page(
    trace: Trace,
    source: Mapping[str, Any],
    name: str,
    first: int,
    limit: int,
    sort: str | None = None,
    where: Sequence[Mapping[str, Any]] = (),
) -> Document:
    """Return rows of an analysis.

    Args:
        trace: the trace to analyse.
        source: its source.
        name: name of the analysis.
        first: index of the first row, from 0.
        limit: maximum number of rows.
        sort: a column, optionally with `:asc` or `:desc`; by default numbers descend and text ascends. Nulls are last.
        where: conditions, each a `column`, an `op` and a `value`; all of them must hold.

    Raises:
        UsageError: there is no such analysis or column, or a value cannot be compared with its column.
        AnalysisError: the analysis cannot run on the trace.
    """
    each = find(name)
    relation = each(trace)
    try:
        for condition in where:
            relation = relation.filter(_condition(relation, each.id, condition))
        if sort is not None:
            relation = relation.order(_order(relation, each.id, sort))
        made, notes = table(trace, each, relation, first, limit)
    except (duckdb.ConversionException, duckdb.BinderException, duckdb.InvalidInputException) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"where: a value that the column of {each.id} cannot be compared with ({reason})") from error
    return document("table", source, tables=[made], left_out=notes)


def table(
    trace: Trace, each: Analysis, relation: duckdb.DuckDBPyRelation, first: int, limit: int
) -> tuple[Document, list[Document]]:
    """Return rows of a relation as a table of the form, and notes on what is left out."""
    rows = relation.limit(limit, first).fetchall()
    ((in_all,),) = relation.aggregate("count(*)").fetchall()
    columns = relation.columns
    cited = citations.of_rows(trace, each.id, [dict(zip(columns, row, strict=True)) for row in rows])
    made = {
        "name": each.id,
        "title": each.title,
        "about": each.about,
        "columns": [{"name": n, "type": str(t)} for n, t in zip(columns, relation.types, strict=True)],
        "rows": [list(row) for row in rows],
        "row_spans": [one.spans for one in cited],
        "row_spans_in_all": [one.in_all for one in cited],
        "first": first,
        "rows_in_all": in_all,
    }
    more = in_all - first - len(rows)
    return made, [left_out(f"rows of {each.id}", more, f"first={first + len(rows)}")] if more > 0 else []


def top(trace: Trace, name: str, limit: int) -> tuple[Document, list[Document]] | None:
    """Return the first rows of an analysis, as `table` does; None if it cannot run on the trace, or has no rows."""
    each = ANALYSES[name]
    try:
        made, notes = table(trace, each, each(trace), 0, limit)
    except AnalysisError:
        return None
    notes = [{**note, "ask": f"tables with analysis={name}, {note['ask']}"} for note in notes]
    return (made, notes) if made["rows"] else None


def dicts(made: Document) -> list[dict[str, Any]]:
    """Return the rows of a table with the names of their columns."""
    names = [column["name"] for column in made["columns"]]
    return [dict(zip(names, row, strict=True)) for row in made["rows"]]


def _column(relation: duckdb.DuckDBPyRelation, name: str, asked: str) -> str:
    known = {column.lower(): column for column in relation.columns}
    found = known.get(asked.strip().lower())
    if found is None:
        raise UsageError(
            f"{name} has no column {asked!r}{nearest(asked, relation.columns)}; it has: {', '.join(relation.columns)}"
        )
    return found


def _order(relation: duckdb.DuckDBPyRelation, name: str, sort: str) -> str:
    asked, mark, way = sort.partition(":")
    if mark and way not in ("asc", "desc"):
        raise UsageError(f"sort {sort!r}: behind a column stands :asc or :desc")
    column = _column(relation, name, asked)
    is_text = str(relation.types[relation.columns.index(column)]) == "VARCHAR"
    others = (quoted(each) for each in relation.columns if each != column)  # else a row could be on two pages
    return ", ".join([f"{quoted(column)} {way or ('asc' if is_text else 'desc')} NULLS LAST", *others])


def _condition(relation: duckdb.DuckDBPyRelation, name: str, asked: Mapping[str, Any]) -> str:
    """Return a condition as SQL, with a known column of the table and the value as a literal."""
    column, op, value = quoted(_column(relation, name, str(asked["column"]))), asked["op"], asked["value"]
    if op == CONTAINS:
        return f"contains(lower({column}::VARCHAR), {literal(str(value).lower())})"
    if value is None and op not in ("=", "!="):
        raise UsageError(f"where {asked['column']} {op} null: null goes with = and != alone")
    if value is None:
        return f"{column} IS {'' if op == '=' else 'NOT '}NULL"
    said = literal(value) if isinstance(value, str) else str(value).lower()
    return f"{column} {COMPARISONS[op]} {said}"
