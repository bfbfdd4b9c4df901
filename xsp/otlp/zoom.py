"""Traces that are too large for a viewer: an overview, and detail traces that it links to.

A trace with more spans than the budget is sent as several traces, none of them larger than the budget.

**The overview** has the original trace id. It contains the spans down to one level unchanged. Deeper spans are
folded: below the nearest kept span, spans of the same level, kind, name, device, stream, rank and process become one
span, from the first start to the last end. It carries `xsp.fold.count`, `xsp.fold.sum_ns`, `xsp.fold.min_ns`,
`xsp.fold.median_ns` (the lower of the two middle values of an even number), `xsp.fold.max_ns`, `xsp.fold.errors` if
some spans failed, `xsp.fold.details`, the number of detail traces that hold its spans, and links to the roots of the
first of these. If not all folds fit, the folds with the largest totals stay, and the rest is lumped together into one
`(others)` per kept span, level, kind, rank and process. The cut is at the deepest level at which the kept spans and
these lumps fit. If no level fits (a million steps in one trace, an outermost level that is too large), as many outer
levels are kept as fit into half of the budget, and there is one `(others)` per level, kind, rank and process of the
whole trace. These are never left out: if they alone exceed the budget, the overview exceeds it too.

For each level and kind, the number of spans and the sum of their `dur_ns`, kept and folded, equal the original's.

**A detail trace** has a root of kind `details`, which links back to the overview, and spans that the overview does
not contain, each in exactly one detail trace and with its own span id. Spans under one span stay together unless they
exceed the budget.

**To restore the original trace**, an importer follows two rules:

1. A span with the attribute `xsp.fold.count` is not a span of the program: leave it out. The attribute is the number
   of spans of the program that it represents; it is 0 for a root of kind `details`.
2. For every other span, the attribute `xsp.trace_id`, if present, is the original trace id, and `xsp.parent_id`, if
   present, is the original parent id, with `""` for none. Remove both attributes; the rest of the span is unchanged.

All ids made here are hashes of span ids and of the budgets, so the same trace always gives the same ids.
"""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from xsp.errors import UsageError
from xsp.otlp import folding, ordered
from xsp.otlp.folding import NONE, FoldingPlan, Indices, SpanColumns
from xsp.schema import COLUMNS, Level

BUDGET = 10_000
"""Number of spans per trace up to which Jaeger stays fast; its critical path fails between 10 and 20 thousand."""

OVERVIEW, DETAILS = "xsp_overview", "xsp_details"
LUMP_NAME = "(others)"
DETAILS_KIND = "details"
MAX_LINKS = 16
"""Maximum number of detail traces that a folded span links to; `xsp.fold.details` is their actual number."""


def split(con: duckdb.DuckDBPyConnection, source: str, budget: int = BUDGET, details: int | None = None) -> list[str]:
    """Split the traces that are larger than a budget.

    Args:
        con: the engine that holds the table.
        source: table or view with the columns of `xsp.schema.COLUMNS`, and optionally `links`.
        budget: maximum number of spans of a trace.
        details: maximum number of spans of a detail trace; default: the budget.

    Returns:
        Names of tables with the same columns and `links`: the source itself if no trace is too large; else first
        a table with all overviews and all traces that are small enough, then a table with all detail traces. These
        are temporary, and replaced by the next call on the same connection.

    Raises:
        UsageError: a budget of less than 2.
        TraceError: an id is not hexadecimal, or a time is missing.
    """
    details = details or budget
    if min(budget, details) < 2:
        smallest = min(budget, details)
        raise UsageError(f"traces of {smallest} spans at most are too small: allow 2 or more, a root and a span")
    query = f"SELECT trace_id FROM {source} GROUP BY trace_id HAVING count(*) > {budget} ORDER BY trace_id"
    large = [row[0] for row in con.execute(query).fetchall()]
    if not large:
        return [source]
    ordered.check(con, source)
    _number(con, source)
    plans, fold_count, detail_count = [], 0, 0
    for trace_id in large:
        plan = folding.plan(_read(con, trace_id), budget, details)
        plans.append(_rows(plan, fold_count, detail_count))
        fold_count += len(plan.folds.first)
        detail_count += len(plan.details)
    _store(con, plans)
    _write(con, f"{budget}/{details}")
    con.execute(";".join(f"DROP TABLE {name}" for name in _TEMPORARY))
    return [OVERVIEW, DETAILS]


# --- one trace as arrays ----------------------------------------------------------------------------------

_TEMPORARY = [
    f"xsp_zoom_{name}"
    for name in ("spans", "classes", "assignments", "folds", "details", "referenced", "sums", "fold_links")
]
_CLASS = ("level", "kind", "name", "device", "stream", "rank", "process")
"""Columns in which spans must agree to be folded together."""


def _number(con: duckdb.DuckDBPyConnection, source: str) -> None:
    """Copy the spans, which assigns them row ids, and number their classes."""
    names = ", ".join(c.name for c in COLUMNS)
    columns = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    links = "links" if "links" in columns else "NULL::VARCHAR AS links"
    classes = ", ".join(_CLASS)
    con.execute(f"CREATE OR REPLACE TEMP TABLE xsp_zoom_spans AS SELECT {names}, {links} FROM {source}")
    con.execute(
        f"""CREATE OR REPLACE TEMP TABLE xsp_zoom_classes AS
            SELECT {classes}, row_number() OVER () AS class,
                   dense_rank() OVER (ORDER BY level, kind, rank, process) AS lump,
                   dense_rank() OVER (ORDER BY rank, process) AS owner
            FROM (SELECT DISTINCT {classes} FROM xsp_zoom_spans)"""
    )


def _read(con: duckdb.DuckDBPyConnection, trace_id: str) -> SpanColumns:
    condition = " AND ".join(f"s.{name} IS NOT DISTINCT FROM c.{name}" for name in _CLASS)
    columns = con.execute(
        f"""SELECT s.rowid AS row, ('0x' || s.span_id)::UBIGINT AS span,
                   coalesce(('0x' || s.parent_id)::UBIGINT, 0) AS parent, s.level::BIGINT AS level,
                   s.start_ns AS start, s.dur_ns AS dur, c.class AS fold_class, c.lump, c.owner
            FROM xsp_zoom_spans s JOIN xsp_zoom_classes c ON {condition} WHERE s.trace_id = ? ORDER BY s.rowid""",
        [trace_id],
    ).fetchnumpy()
    return folding.spans_of(columns)


# --- back into tables -------------------------------------------------------------------------------------


Table = dict[str, npt.NDArray[Any]]


def _rows(plan: FoldingPlan, fold_offset: int, detail_offset: int) -> dict[str, Table]:
    """Return the plan of one trace as rows; the numbers of folds and detail traces continue from earlier traces."""

    def row(places: Indices) -> Indices:
        return np.where(places >= 0, plan.spans.row[places], NONE)

    def numbered(numbers: Indices, offset: int) -> Indices:
        return np.where(numbers >= 0, numbers + offset, NONE)

    folds, part_count = plan.folds, len(plan.details)
    return {
        "assignments": {
            "row": plan.spans.row,
            "fold": numbered(plan.fold, fold_offset), "detail": numbered(plan.detail, detail_offset),
            "is_separated": plan.is_separated,
            "anchor": np.where(plan.is_separated & (plan.fold < 0), row(plan.anchor), NONE),
        },
        "folds": {
            "fold": np.arange(len(folds.first)) + fold_offset, "first": row(folds.first), "anchor": row(folds.anchor),
            "outer_fold": numbered(folds.outer, fold_offset), "top": row(folds.top), "lump": folds.lump,
        },
        "details": {
            "detail": np.arange(part_count) + detail_offset,
            "first": row(plan.details), "anchor": row(plan.anchor[plan.details]),
            "fold": numbered(plan.fold[plan.details], fold_offset),
            "part": np.arange(part_count) + 1, "parts": np.full(part_count, part_count),
        },
    }  # fmt: skip


def _store(con: duckdb.DuckDBPyConnection, plans: list[dict[str, Table]]) -> None:
    """Store the plans of all traces; the table of assignments has a row for each span, in the order of the spans."""
    spans = int(con.execute("SELECT count(*) FROM xsp_zoom_spans").fetchall()[0][0])
    merged = {
        name: {column: np.concatenate([plan[name][column] for plan in plans]) for column in plans[0][name]}
        for name in plans[0]
    }
    row = merged["assignments"].pop("row")
    for column, values in merged["assignments"].items():
        full = np.full(spans, NONE if values.dtype != np.bool_ else False, values.dtype)
        full[row] = values
        merged["assignments"][column] = full
    for name, columns in merged.items():
        con.register("xsp_zoom_arrays", columns)
        con.execute(f"CREATE OR REPLACE TEMP TABLE xsp_zoom_{name} AS SELECT * FROM xsp_zoom_arrays")
        con.unregister("xsp_zoom_arrays")


def _write(con: duckdb.DuckDBPyConnection, budgets: str) -> None:
    """Make the tables of overviews and details from the spans and the plans."""
    names = ", ".join([*(c.name for c in COLUMNS), "links"])
    # each in a separate table: in a single query, the joins that DuckDB 2.0 plans fail one of its assertions
    for name, query in (("referenced", _REFERENCED), ("sums", _SUMS)):
        con.execute(f"CREATE OR REPLACE TEMP TABLE xsp_zoom_{name} AS {query}")
    for name in ("details", "folds"):
        con.execute(f"CREATE OR REPLACE TEMP TABLE xsp_zoom_{name} AS {_IDS.format(name=name, budgets=budgets)}")
    con.execute(f"CREATE OR REPLACE TEMP TABLE xsp_zoom_fold_links AS {_FOLD_LINKS}")
    for table, spans, additions in ((OVERVIEW, _OVERVIEW_SPANS, _FOLD_SPANS), (DETAILS, _DETAIL_SPANS, _DETAIL_ROOTS)):
        con.execute(f"CREATE OR REPLACE TEMP TABLE {table} AS SELECT {names} FROM ({spans})")
        con.execute(f"INSERT INTO {table} BY NAME {additions}")


def _prepend_entries(*entries: str) -> str:
    """Return the SQL of the column `attributes` with entries inserted at the front, its own text unchanged."""
    content = "ltrim(substr(ltrim(s.attributes), 2))"
    comma = f"CASE WHEN starts_with({content}, '}}') THEN '' ELSE ',' END"
    return f"'{{' || {' || '.join(entries)} || coalesce({comma} || {content}, '}}')"


_ORIGINAL_TRACE = "'\"xsp.trace_id\":\"' || s.trace_id || '\"'"
_ORIGINAL_PARENT = "'\"xsp.parent_id\":\"' || coalesce(s.parent_id, '') || '\"'"

_REFERENCED = """
    SELECT rowid AS row, trace_id, span_id, parent_id, level, kind, name, device, stream, rank, process, step
    FROM xsp_zoom_spans WHERE rowid IN (
        SELECT unnest([first, anchor, top]) FROM xsp_zoom_folds UNION ALL
        SELECT unnest([first, anchor]) FROM xsp_zoom_details UNION ALL
        SELECT anchor FROM xsp_zoom_assignments WHERE anchor >= 0
    )
"""
"""The spans whose ids and names are used in other rows."""

_IDS = """
    SELECT x.*, md5(concat_ws('/', '{name}', s.trace_id, s.span_id, '{budgets}')) AS trace_id,
           substr(md5(concat_ws('/', '{name} root', s.trace_id, s.span_id, '{budgets}')), 1, 16) AS span_id
    FROM xsp_zoom_{name} x JOIN xsp_zoom_referenced s ON s.row = x.first
"""

_SPANS_WITH_PLAN = "xsp_zoom_spans s POSITIONAL JOIN xsp_zoom_assignments p"

_OVERVIEW_SPANS = f"""
    SELECT s.* REPLACE (
        CASE WHEN p.is_separated THEN a.span_id ELSE s.parent_id END AS parent_id,
        CASE WHEN p.is_separated THEN {_prepend_entries(_ORIGINAL_PARENT)} ELSE s.attributes END AS attributes
    )
    FROM {_SPANS_WITH_PLAN} LEFT JOIN xsp_zoom_referenced a ON a.row = p.anchor
    WHERE p.fold < 0
"""

_SHARED = ("type", "phase", "step", "rung", "timed", "collector", "thread")
"""Columns that a fold keeps if all of its spans have the same value."""

_SUMS = f"""
    SELECT p.fold, min(start_ns) AS start_ns, max(start_ns + dur_ns) AS end_ns, count(*) AS spans,
           sum(dur_ns) AS sum_ns, min(dur_ns) AS min_ns, quantile_disc(dur_ns, 0.5) AS median_ns,
           max(dur_ns) AS max_ns, count(*) FILTER (status <> 'ok') AS errors,
           {", ".join(f"min({c}) AS {c}, min({c}) = max({c}) AND count({c}) = count(*) AS same_{c}" for c in _SHARED)}
    FROM {_SPANS_WITH_PLAN} WHERE p.fold >= 0 GROUP BY p.fold
"""

_FOLD_LINKS = f"""
    WITH targets AS (
        SELECT p.fold, detail, '["' || d.trace_id || '","' || d.span_id || '"]' AS target
        FROM (SELECT DISTINCT fold, detail FROM xsp_zoom_assignments WHERE fold >= 0) p
        JOIN xsp_zoom_details d USING (detail)
    )
    SELECT fold, count(*) AS details, array_to_string(list(target ORDER BY detail)[:{MAX_LINKS}], ',') AS links
    FROM targets GROUP BY fold
"""

_FOLD_SPANS = f"""
    SELECT s.trace_id, f.span_id, s.level, s.kind, CASE WHEN f.lump THEN '{LUMP_NAME}' ELSE s.name END AS name,
           CASE WHEN f.anchor >= 0 THEN a.span_id WHEN f.outer_fold >= 0 THEN o.span_id
                ELSE t.parent_id END AS parent_id,
           CASE WHEN NOT f.lump THEN s.device END AS device, CASE WHEN NOT f.lump THEN s.stream END AS stream,
           s.rank, s.process, 'ok' AS status, sums.start_ns, sums.end_ns - sums.start_ns AS dur_ns,
           {", ".join(f"CASE WHEN same_{c} THEN sums.{c} END AS {c}" for c in _SHARED)},
           concat('{{"xsp.fold.count":', spans, ',"xsp.fold.sum_ns":', sum_ns, ',"xsp.fold.min_ns":', min_ns,
                  ',"xsp.fold.median_ns":', median_ns, ',"xsp.fold.max_ns":', max_ns,
                  ',"xsp.fold.details":', details, ',"xsp.fold.errors":' || nullif(errors, 0), '}}') AS attributes,
           '[' || fold_links.links || ']' AS links
    FROM xsp_zoom_folds f
    JOIN xsp_zoom_sums sums USING (fold)
    JOIN xsp_zoom_fold_links fold_links USING (fold)
    JOIN xsp_zoom_referenced s ON s.row = f.first
    LEFT JOIN xsp_zoom_referenced a ON a.row = f.anchor
    LEFT JOIN xsp_zoom_referenced t ON t.row = f.top
    LEFT JOIN xsp_zoom_folds o ON o.fold = f.outer_fold
"""

_DETAIL_SPANS = f"""
    SELECT s.* REPLACE (
        d.trace_id AS trace_id,
        CASE WHEN p.is_separated THEN d.span_id ELSE s.parent_id END AS parent_id,
        CASE WHEN p.is_separated THEN {_prepend_entries(_ORIGINAL_TRACE, "','", _ORIGINAL_PARENT)}
             ELSE {_prepend_entries(_ORIGINAL_TRACE)} END AS attributes
    )
    FROM {_SPANS_WITH_PLAN} JOIN xsp_zoom_details d ON d.detail = p.detail
"""

_DETAIL_ROOTS = f"""
    SELECT d.trace_id, d.span_id, {int(Level.APPLICATION)}::SMALLINT AS level, '{DETAILS_KIND}' AS kind,
           concat('details ', d.part, ' of ', d.parts, ': ', coalesce(a.name, s.name)) AS name,
           totals.start_ns, totals.end_ns - totals.start_ns AS dur_ns, s.process, s.rank, s.step, 'ok' AS status,
           concat('{{"xsp.fold.count":0,"xsp.details.of":"', s.trace_id, '","xsp.details.spans":', spans, '}}')
               AS attributes,
           concat('[["', s.trace_id, '","', f.span_id, '"]]') AS links
    FROM xsp_zoom_details d
    JOIN xsp_zoom_referenced s ON s.row = d.first
    JOIN xsp_zoom_folds f ON f.fold = d.fold
    LEFT JOIN xsp_zoom_referenced a ON a.row = d.anchor
    JOIN (
        SELECT detail, count(*) AS spans, min(start_ns) AS start_ns, max(start_ns + dur_ns) AS end_ns
        FROM {_SPANS_WITH_PLAN} WHERE detail >= 0 GROUP BY detail
    ) totals ON totals.detail = d.detail
"""
