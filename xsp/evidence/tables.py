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
    match = {key.lower(): analysis for key, analysis in ANALYSES.items()}.get(name.lower())
    if match is None:
        raise UsageError(f"there is no analysis {name!r}{nearest(name, ANALYSES) or '; tables without one lists them'}")
    return match


def listing(trace: Trace, source: Mapping[str, Any], first: int, limit: int) -> Document:
    """Return the analyses, with the reasons why some cannot run on this trace."""
    entries = [
        {"name": analysis.id, "title": analysis.title, "about": analysis.about, "refused": analysis.refusal(trace)}
        for analysis in list(ANALYSES.values())[first : first + limit]
    ]
    remaining = len(ANALYSES) - first - len(entries)
    notes = [left_out("analyses", remaining, f"first={first + len(entries)}")] if remaining > 0 else []
    return document("analyses", source, analyses=entries, first=first, left_out=notes)


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
    analysis = find(name)
    relation = analysis(trace)
    try:
        for condition in where:
            relation = relation.filter(_condition(relation, analysis.id, condition))
        if sort is not None:
            relation = relation.order(_order(relation, analysis.id, sort))
        content, notes = table(trace, analysis, relation, first, limit)
    except (duckdb.ConversionException, duckdb.BinderException, duckdb.InvalidInputException) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(
            f"where: a value that the column of {analysis.id} cannot be compared with ({reason})"
        ) from error
    return document("table", source, tables=[content], left_out=notes)


def table(
    trace: Trace, analysis: Analysis, relation: duckdb.DuckDBPyRelation, first: int, limit: int
) -> tuple[Document, list[Document]]:
    """Return rows of a relation as a table of the form, and notes on what is left out."""
    rows = relation.limit(limit, first).fetchall()
    ((row_count,),) = relation.aggregate("count(*)").fetchall()
    columns = relation.columns
    cited = citations.of_rows(trace, analysis.id, [dict(zip(columns, row, strict=True)) for row in rows])
    content = {
        "name": analysis.id,
        "title": analysis.title,
        "about": analysis.about,
        "columns": [
            {"name": column, "type": str(column_type)}
            for column, column_type in zip(columns, relation.types, strict=True)
        ],
        "rows": [list(row) for row in rows],
        "row_spans": [citation.spans for citation in cited],
        "row_spans_in_all": [citation.total for citation in cited],
        "first": first,
        "rows_in_all": row_count,
    }
    remaining = row_count - first - len(rows)
    return content, [
        left_out(f"rows of {analysis.id}", remaining, f"first={first + len(rows)}")
    ] if remaining > 0 else []


def top(trace: Trace, name: str, limit: int) -> tuple[Document, list[Document]] | None:
    """Return the first rows of an analysis, as `table` does; None if it cannot run on the trace, or has no rows."""
    analysis = ANALYSES[name]
    try:
        content, notes = table(trace, analysis, analysis(trace), 0, limit)
    except AnalysisError:
        return None
    notes = [{**note, "ask": f"tables with analysis={name}, {note['ask']}"} for note in notes]
    return (content, notes) if content["rows"] else None


def dicts(content: Document) -> list[dict[str, Any]]:
    """Return the rows of a table with the names of their columns."""
    names = [column["name"] for column in content["columns"]]
    return [dict(zip(names, row, strict=True)) for row in content["rows"]]


def _column(relation: duckdb.DuckDBPyRelation, name: str, target: str) -> str:
    by_lower_name = {column.lower(): column for column in relation.columns}
    match = by_lower_name.get(target.strip().lower())
    if match is None:
        raise UsageError(
            f"{name} has no column {target!r}{nearest(target, relation.columns)}; it has: {', '.join(relation.columns)}"
        )
    return match


def _order(relation: duckdb.DuckDBPyRelation, name: str, sort: str) -> str:
    target, separator, direction = sort.partition(":")
    if separator and direction not in ("asc", "desc"):
        raise UsageError(f"sort {sort!r}: a column may be followed by :asc or :desc")
    column = _column(relation, name, target)
    is_text = str(relation.types[relation.columns.index(column)]) == "VARCHAR"
    # the other columns make the order unique: else a row could be on two pages
    other_columns = (quoted(name) for name in relation.columns if name != column)
    return ", ".join([f"{quoted(column)} {direction or ('asc' if is_text else 'desc')} NULLS LAST", *other_columns])


def _condition(relation: duckdb.DuckDBPyRelation, name: str, condition: Mapping[str, Any]) -> str:
    """Return a condition as SQL, with a known column of the table and the value as a literal."""
    column, op, value = quoted(_column(relation, name, str(condition["column"]))), condition["op"], condition["value"]
    if op == CONTAINS:
        return f"contains(lower({column}::VARCHAR), {literal(str(value).lower())})"
    if value is None and op not in ("=", "!="):
        raise UsageError(f"where {condition['column']} {op} null: null goes with = and != only")
    if value is None:
        return f"{column} IS {'' if op == '=' else 'NOT '}NULL"
    operand = literal(value) if isinstance(value, str) else str(value).lower()
    return f"{column} {COMPARISONS[op]} {operand}"
