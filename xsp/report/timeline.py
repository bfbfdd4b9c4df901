"""The choice of the spans that the page's timeline draws, lane by lane, as packed columns.

For a run that xsp recorded it is the merged step, of all ranks. An imported trace was recorded once, as a whole, so as
many of its steps are shown as fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np

from xsp import table
from xsp.device.kernelnames import NAMES
from xsp.report.lanes import MISSING, MOST_LANES, Bars, lanes
from xsp.report.packed import Array, changes, pack
from xsp.schema import COLUMNS, MERGED_COLUMNS, Column, Kind, Level
from xsp.store.trace import Trace

MOST_SPANS = 200_000
"""Maximum number of spans. If there are more, the page shows the steps around the merged one that fit, or the longest
spans of a single longer step, and says so."""

MOST_TEXT = 4_000_000
"""Maximum letters of the different values of a column; a longer column is left out, and the page says so."""

_HIDDEN_COLUMNS = {"trace_id", "span_id", "parent_id", "start_ns", "dur_ns", "rung", "timed", "layer_id", "key", "rank"}
_SHOWN_COLUMNS = [column for column in (*COLUMNS, *MERGED_COLUMNS) if column.name not in _HIDDEN_COLUMNS]


def timeline(
    trace: Trace, max_spans: int | None = None, con: duckdb.DuckDBPyConnection | None = None
) -> dict[str, Any]:
    """Return the spans for the page: lanes, packed columns, and what was left out.

    Times are nanoseconds from the start of the first span; in a step that waited for data this is the wait, not the
    step span. `parent`, `layer` and `launch` are indices of spans; `key` identifies a span in links from elsewhere.

    Args:
        trace: any trace.
        max_spans: maximum number of spans (default: `MOST_SPANS`).
        con: a separate connection to the trace's engine, if other threads use the trace's own connection meanwhile.
    """
    max_spans = MOST_SPANS if max_spans is None else max_spans
    con = con or table.cursor(trace.con)
    steps = _choose_steps(con, trace, max_spans)
    total = _integer(con, "SELECT count(*) FROM chosen_spans")
    _create_drawn_spans(con, max_spans if total > max_spans else None)
    spans = _DrawnSpans(con)
    columns, too_long = _columns(spans)
    span_count, start_times, end_times = len(spans.numbers), spans.start_ns, spans.start_ns + spans.dur_ns
    origin = start_times.min() if span_count else 0
    bounds, start = [], 0
    for lane in spans.lanes:
        bounds.append((lane.track, lane.levels, start, start + len(lane.indices)))
        start += len(lane.indices)
    return {
        "count": span_count,
        "note": _note(
            span_count, steps, [(total - spans.count, "the shortest"), (spans.count - span_count, _TOO_DEEP)], too_long
        ),
        "lanes": bounds,
        "range": [0, (end_times.max() - origin).tolist()] if span_count else [None, None],
        "about": {column.name: column.description for column in _SHOWN_COLUMNS},
        "columns": {
            "start": _packed(start_times - origin),
            "dur_ns": _packed(spans.dur_ns),
            **{name: _packed(values) for name, values in spans.relations().items()},
            **columns,
        },
    }


_TOO_DEEP = f"which overlap more than {MOST_LANES} deep"


class ShownSteps(NamedTuple):
    """The numbers of shown and of all steps, and whether it is the merged step, with times averaged over others."""

    shown: int
    total: int
    is_merged: bool


def _choose_steps(con: duckdb.DuckDBPyConnection, trace: Trace, max_spans: int) -> ShownSteps:
    """Create the view `chosen_spans`: the merged step, or as many steps of an imported trace as fit."""
    is_recorded_once = trace.run.imported is not None and len(trace.rungs) <= 1
    rows = con.execute("SELECT step, rung, trace_id, rank FROM merged WHERE step IS NOT NULL LIMIT 1").fetchall()
    if not rows:
        _create_view(con, "true")
        return ShownSteps(0, 0, False)
    step, rung, trace_id, rank = rows[0]
    if is_recorded_once:
        return _steps_around(con, step, max_spans)
    _create_view(con, f"step = {step} AND rung = {rung} AND (trace_id = {table.literal(trace_id)} OR rank <> {rank})")
    return ShownSteps(1, 1, True)


def _steps_around(con: duckdb.DuckDBPyConnection, middle: int, max_spans: int) -> ShownSteps:
    """Choose the steps next to the merged one while they fit, and the spans outside of steps at that time."""
    counts = con.execute("SELECT step, count(*) FROM spans WHERE step IS NOT NULL GROUP BY step").fetchall()
    selected: list[int] = []
    room = max_spans
    for step, count in sorted(counts, key=lambda entry: (abs(entry[0] - middle), entry[0])):
        room -= count
        if selected and room < 0:
            break
        selected.append(step)
    first_step, last_step = min(selected), max(selected)
    if len(selected) == len(counts):
        _create_view(con, "true")
    else:
        window = _row(con, "SELECT min(start_ns), max(start_ns + dur_ns) FROM spans "
                           f"WHERE step BETWEEN {first_step} AND {last_step}")  # fmt: skip
        outside_condition = f"step IS NULL AND start_ns BETWEEN {window[0]} AND {window[1]}"
        _create_view(con, f"step BETWEEN {first_step} AND {last_step} OR {outside_condition}")
    return ShownSteps(len(selected), len(counts), False)


def _create_view(con: duckdb.DuckDBPyConnection, condition: str) -> None:
    """Create the view of chosen spans; spans of the merged step have its figures."""
    con.execute(
        f"""
        CREATE OR REPLACE TEMP VIEW chosen_spans AS
        SELECT * FROM merged UNION ALL BY NAME
        SELECT * FROM spans ANTI JOIN merged USING (trace_id, span_id, rank) WHERE {condition}
        """
    )


def _create_drawn_spans(con: duckdb.DuckDBPyConnection, max_spans: int | None) -> None:
    """Create the view `numbered` of the longest spans, or of all, and `related`: their parents, layers and launches."""
    longest = "" if max_spans is None else f"ORDER BY dur_ns DESC, start_ns LIMIT {max_spans}"
    con.execute(f"CREATE OR REPLACE TEMP TABLE drawn_spans AS FROM chosen_spans {longest}")
    con.execute("CREATE OR REPLACE TEMP VIEW numbered AS SELECT rowid AS number, * FROM drawn_spans")
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE related AS
        WITH ids AS (SELECT trace_id, span_id, min(number) AS number FROM numbered GROUP BY ALL),
        launches AS (
            SELECT rank, process, correlation_id, min(number) AS number FROM numbered
            WHERE device IS NULL AND correlation_id IS NOT NULL AND level = {int(Level.RUNTIME)} GROUP BY ALL
        ),
        processes AS (  -- Kineto does not record the process of device work
            SELECT rank, any_value(process) AS process FROM launches GROUP BY rank HAVING min(process) = max(process)
        )
        SELECT span.number, parents.number AS parent, layers.number AS layer, launches.number AS launch
        FROM numbered span
        LEFT JOIN ids parents ON parents.trace_id = span.trace_id AND parents.span_id = span.parent_id
        LEFT JOIN ids layers ON layers.trace_id = span.trace_id AND layers.span_id = span.layer_id
        LEFT JOIN processes ON processes.rank = span.rank
        LEFT JOIN launches ON span.device IS NOT NULL AND launches.correlation_id = span.correlation_id
            AND launches.rank = span.rank
            AND launches.process IS NOT DISTINCT FROM coalesce(span.process, processes.process)
        """
    )


class _DrawnSpans:
    """The drawn spans in order: lane after lane, and by start within a lane."""

    def __init__(self, con: duckdb.DuckDBPyConnection) -> None:
        """Put the spans of the view `numbered` into lanes; `numbers` has the number of the span at each position."""
        self.con = con
        self.count = _integer(con, "SELECT count(*) FROM numbered")
        self.numbers = np.arange(self.count)
        self._related = self.columns({relation: f"coalesce({relation}, -1)" for relation in _RELATIONS}, "related")
        nullable = {name: f"coalesce({name}, {MISSING})" for name in ("process", "thread", "device", "stream")}
        required = {
            "start": "start_ns",
            "dur": "dur_ns",
            "level": "level",
            "depth": "coalesce(depth, 0)",
            "rank": "rank",
        }
        bars = self.columns(required | nullable)
        self.lanes = lanes(
            Bars(self._related["parent"], **{name: values.astype(np.int64) for name, values in bars.items()})
        )
        self.numbers = np.concatenate([np.zeros(0, np.int64), *(lane.indices for lane in self.lanes)])
        self.start_ns, self.dur_ns = bars["start"][self.numbers], bars["dur"][self.numbers]

    def columns(self, expressions: Mapping[str, str], source: str = "numbered") -> dict[str, Array]:
        """Return columns by the names in `expressions`; missing values are masked."""
        selection = ", ".join(f"{expression} AS {name}" for name, expression in expressions.items())
        arrays = self.con.execute(f"SELECT number, {selection} FROM {source}").fetchnumpy()
        number = np.asarray(arrays["number"])
        rows = np.zeros(number.max(initial=-1) + 1, np.int64)  # the engine returns rows in any order
        rows[number] = np.arange(len(number))
        return {name: arrays[name][rows[self.numbers]] for name in expressions}

    def relations(self) -> dict[str, Array]:
        """Return the positions of parents, layers and launches; masked if there is none, or it is not drawn."""
        positions = np.full(self.count + 1, -1, np.int64)  # the last element is for index -1, no span
        positions[self.numbers] = np.arange(len(self.numbers))
        return {
            name: np.ma.masked_equal(positions[indices[self.numbers]], -1) for name, indices in self._related.items()
        }


_RELATIONS = ("parent", "layer", "launch")


def _columns(spans: _DrawnSpans) -> tuple[dict[str, Any], list[str]]:
    """Return the packed columns that hold a value, and the names of the columns whose texts are too long."""
    expressions = ", ".join(f"count({column.name}), {_letters_sql(column)}" for column in _SHOWN_COLUMNS)
    figures = _row(spans.con, f"SELECT {expressions} FROM numbered")
    texts, numbers, too_long = ["key"], {}, []
    for column, count, letters in zip(_SHOWN_COLUMNS, figures[::2], figures[1::2], strict=True):
        if letters > MOST_TEXT:
            too_long.append(column.name)
        elif (count or column.name in REQUIRED_COLUMNS) and column.type == "VARCHAR":
            texts.append(column.name)
        elif count or column.name in REQUIRED_COLUMNS:
            numbers[column.name] = _figure_sql(column)
    source = f"(WITH {NAMES} SELECT number, {_WORK_SQL} AS work FROM numbered LEFT JOIN names USING (name))"
    arrays = {**spans.columns(numbers), **spans.columns({"work": "work"}, source)}
    packed = {name: _packed(values) for name, values in arrays.items()}
    # one text column at a time: all of them at once take hundreds of megabytes
    return {**packed, **{name: _packed(spans.columns({name: name})[name]) for name in texts}}, too_long


_WORK_SQL = f"CASE kind WHEN '{Kind.COPY}' THEN 'copy' WHEN '{Kind.KERNEL}' THEN names.class END"

REQUIRED_COLUMNS = (
    "name",
    "level",
    "kind",
    "type",
    "phase",
    "true_ns",
    "true_lo_ns",
    "true_hi_ns",
    "cause",
    "parent_rule",
)
"""Columns that the page always reads."""


def _letters_sql(column: Column) -> str:
    text = f"(SELECT sum(length(value)) FROM (SELECT DISTINCT {column.name} AS value FROM numbered))"
    return f"coalesce({text}, 0)" if column.type == "VARCHAR" and column.name != "name" else "0"


def _figure_sql(column: Column) -> str:
    """Return a column's SQL; nanoseconds are rounded to integers, other figures to four decimals."""
    if column.type != "DOUBLE":
        return column.name
    return f"round({column.name})::BIGINT" if column.name.endswith("_ns") else f"round({column.name}, 4)"


def _packed(values: Array) -> dict[str, Any]:
    places = changes(values)
    return pack(places, values[places])


def _note(span_count: int, steps: ShownSteps, left_out: Sequence[tuple[int, str]], too_long: Sequence[str]) -> str:
    if steps.is_merged:
        text = (
            f"{span_count:,} spans of one real step that was recorded with all requested levels. "
            "Durations are as recorded; a click on a span shows its true time, without the overhead of recording."
        )
    elif steps.shown < steps.total:
        text = f"{span_count:,} spans: {steps.shown} of {steps.total} steps, those next to the merged one."
    else:
        text = f"{span_count:,} spans, as recorded."
    text += "".join(f" Left out: {count:,}, {reason}." for count, reason in left_out if count)
    if too_long:
        text += f" Left out for their length: {', '.join(too_long)}."
    return text


def _row(con: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    return tuple(con.execute(query).fetchall()[0])


def _integer(con: duckdb.DuckDBPyConnection, query: str) -> int:
    return int(_row(con, query)[0])
