"""The spans of a table in the order in which they are sent, as arrays of numbers, and the templates that they share.

The order does not depend on the order of the table, so spans that are sent again give the same bytes.

The table is read three times: for the ranges of its numbers, for its distinct templates, and for its rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from xsp.errors import TraceError
from xsp.otlp import template
from xsp.otlp.template import APPENDED_COLUMNS, COUNTS, KEY, TEXT, Count, Template, TemplateLayout

CHUNK = 1 << 13
"""Number of spans that are encoded together, small enough for the processor's caches."""

WINDOW = 1 << 16
"""Number of spans whose numbers are fetched together."""

MIN_SPANS, MAX_TEMPLATES = 100_000, 1000
"""With at least `MIN_SPANS` spans and at most `MAX_TEMPLATES` templates, finding the columns that differ pays off."""

TEXT_BYTES = 1 << 26
"""Maximum bytes of text in a chunk, unless a single span has more."""

Numbers = npt.NDArray[Any]

_INVALID = {
    **{name: f"{name} IS NULL" for name in ("trace_id", "span_id", "level", "start_ns", "dur_ns")},
    **{
        f"{name} = {{}}": f"NOT regexp_full_match({name}, '[0-9a-fA-F]{{{digits}}}') OR {name} = '{'0' * digits}'"
        for name, digits in (("trace_id", 32), ("span_id", 16), ("parent_id", 16))
    },
    "start_ns = {}": "start_ns < 0",
    "start_ns + dur_ns = {}": "start_ns::HUGEINT + dur_ns < 0",
}
"""Conditions that spans to be sent must not meet: text for the error message, and SQL test."""


def check(con: duckdb.DuckDBPyConnection, source: str) -> None:
    """Check that all spans of a table are valid in a trace.

    Raises:
        TraceError: an id is not hexadecimal, or a time is missing or before 1970.
    """
    expressions = ", ".join(f"count(*) FILTER ({test})" for test in _INVALID.values())
    counts = con.execute(f"SELECT {expressions} FROM {source}").fetchall()[0]
    for (description, test), count in zip(_INVALID.items(), counts, strict=True):
        if count:
            column = description.partition(" = ")[0].replace("start_ns +", "start_ns::HUGEINT +")
            name, value = con.execute(f"SELECT name, {column} FROM {source} WHERE {test} LIMIT 1").fetchall()[0]
            problem = description.format(repr(value)) if "{" in description else f"{description} is missing"
            raise TraceError(
                f"{source}: {count} spans cannot be sent over OpenTelemetry, first {name!r}: {problem}; "
                "docs/understand/table.md describes the columns"
            )


class Chunk(NamedTuple):
    """Consecutive spans in the order in which they are sent."""

    start: int
    stop: int
    columns: Mapping[str, Numbers]


_SERIAL = itertools.count()
_HASH = "hash({})"
"""SQL hash that numbers templates and traces; a salt is changed until the numbers within a table are distinct."""

_SURVEY = {
    "spans": "count(*)",
    "is_valid": "count(level) = count(*) AND count(dur_ns) = count(*) AND coalesce(min(dur_ns) >= 0, true)",
    "count parent_id": "count(parent_id)",
    "count key": "count(key)",
    **{f"{aggregate} {c.name}": f"{aggregate}({c.name})" for c in COUNTS for aggregate in ("count", "min", "max")},
}
"""Query results that are needed first; if `is_valid` is false, `check` finds the reason."""


class Ordered:
    """The spans of a table, sorted by level, rank, process and start.

    Raises:
        TraceError: see `check`.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str) -> None:
        self._con = con
        self._source = source
        number = next(_SERIAL)
        self._rows, self._distinct = f"xsp_ordered_{number}", f"xsp_distinct_{number}"
        keeps_order = con.execute("SELECT current_setting('preserve_insertion_order')").fetchall()[0][0]
        self._row_order = "" if keeps_order else " ORDER BY rowid"
        self.has_fixed_keys = True
        """Whether all keys have the length `KEY`, so that they can be written like numbers."""

        self._survey()
        try:
            self._number()
        except duckdb.Error:  # an invalid id, or a key of another form than xsp's
            self.close()
            check(con, source)
            if not self.has_fixed_keys:
                raise
            self.has_fixed_keys = False
            self.appended.insert(0, "key")
            self._number()

    def close(self) -> None:
        """Remove the temporary tables; if the connection is closed, they are gone already."""
        with contextlib.suppress(duckdb.ConnectionException):
            self._con.execute(f"DROP TABLE IF EXISTS {self._rows}; DROP TABLE IF EXISTS {self._distinct}")

    def _survey(self) -> None:
        """Find the columns that are not empty, and the ranges of their values."""
        names = {row[0] for row in self._con.execute(f"DESCRIBE SELECT * FROM {self._source}").fetchall()}
        appended = [name for name in APPENDED_COLUMNS if name in names and name != "key"]
        expressions = {**_SURVEY, **{f"count {name}": f"count({name})" for name in appended}}
        values = self._con.execute(f"SELECT {', '.join(expressions.values())} FROM {self._source}").fetchall()[0]
        results = dict(zip(expressions, values, strict=True))
        if not results["is_valid"]:
            check(self._con, self._source)
        self.spans = int(results["spans"])
        self.appended = [name for name in appended if results[f"count {name}"]]
        self.has_fixed_keys = bool(results["count key"])
        self.counts = [
            Count(c.name, str(c.attribute), results[f"min {c.name}"], results[f"max {c.name}"])
            for c in COUNTS
            if results[f"count {c.name}"]
        ]
        present = ["parent_id", "key", *(c.column for c in self.counts)]
        self._partial_columns = [name for name in present if results[f"count {name}"] != self.spans]

    def _number(self) -> None:
        """Number templates and traces, and sort the spans."""
        self._layouts: dict[int, TemplateLayout] = {}
        self._find_templates()
        self.traces = self._find_traces()
        self._order()

    def _find_templates(self) -> None:
        """Store the distinct templates, and the SQL that gives the template number of a span."""
        bits = [f"(({name} IS NOT NULL)::BIGINT << {bit})" for bit, name in enumerate(self._partial_columns)]
        values = {c.name: c.name for c in TEXT}
        values |= {"rank": "coalesce(rank, 0)", "process": "process", "present": " | ".join(bits) or "0::BIGINT"}
        selection = ", ".join(f"{value} AS {name}" for name, value in values.items())
        table_name = f"{self._distinct}_all"
        self._con.execute(
            f"CREATE OR REPLACE TEMP TABLE {table_name} AS SELECT DISTINCT {selection} FROM {self._source}"
        )
        key_columns = self._distinguishing_columns(table_name, list(values))
        for salt in itertools.count():
            number = _HASH.format(", ".join([str(salt), *key_columns]))
            self._con.execute(
                f"CREATE OR REPLACE TEMP TABLE {self._distinct} AS SELECT {number} AS number, * FROM {table_name}"
            )
            is_distinct = f"SELECT count(*) = count(DISTINCT number) FROM {self._distinct}"
            if self._con.execute(is_distinct).fetchall()[0][0]:
                break
        self._con.execute(f"DROP TABLE {table_name}")
        self._template = _HASH.format(", ".join([str(salt), *(values[name] for name in key_columns)]))

    def _distinguishing_columns(self, table_name: str, names: list[str]) -> list[str]:
        """Return columns that distinguish the templates: hashing fewer columns is faster, which pays for many spans."""
        rows = self._con.execute(f"SELECT * FROM {table_name} LIMIT {MAX_TEMPLATES + 1}").fetchall()
        if len(rows) > MAX_TEMPLATES or self.spans < MIN_SPANS:
            return names
        indices = list(range(len(names)))
        for candidate in sorted(indices, key=lambda index: names[index] == "name"):
            remaining = [index for index in indices if index != candidate]
            if len({tuple(row[index] for index in remaining) for row in rows}) == len(rows):
                indices = remaining
        return [names[index] for index in indices]

    def _find_traces(self) -> dict[str, Numbers]:
        """Return the halves of the trace ids, sorted by the number of the trace."""
        distinct = f"SELECT DISTINCT trace_id FROM {self._source}"
        condition = f"strlen(trace_id) = 32 AND trace_id <> '{'0' * 32}'"
        for salt in itertools.count():
            self._trace = _HASH.format(f"{salt}, trace_id")
            traces = self._con.execute(
                f"SELECT {self._trace} AS number, {_guarded(condition, _word('left(trace_id, 16)'))} AS high, "
                f"{_word('right(trace_id, 16)')} AS low FROM ({distinct}) ORDER BY number"
            ).fetchnumpy()
            if not (np.diff(traces["number"]) == 0).any():
                return traces
        raise AssertionError("hashes without end are all alike")

    def _order(self) -> None:
        """Store the numbers and the loose text of the spans in the order in which they are sent."""
        columns = {
            "template": self._template,
            "trace": self._trace,
            "span": _id("span_id"),
            "parent": f"CASE WHEN parent_id IS NULL THEN 0 ELSE {_id('parent_id')} END",
            "start": _guarded("start_ns >= 0", "start_ns"),
            "dur_ns": "dur_ns",
            **{c.column: f"coalesce({c.column}, 0)::BIGINT" for c in self.counts if not c.is_constant},
        }
        if self.has_fixed_keys:
            condition = f"length(key) = {KEY} AND strlen(key) = {KEY}"
            for name, half in (("key_high", "left"), ("key_low", "is_valid")):
                word = _guarded(condition, f"encode({half}(key, 8))::BIT::UBIGINT")
                columns[name] = f"CASE WHEN key IS NULL THEN 0 ELSE {word} END"
        self._columns = ", ".join(columns)
        selection = ", ".join([*(f"{value} AS {name}" for name, value in columns.items()), *self.appended])
        owner_query = f"SELECT count(*) > 1 FROM (SELECT DISTINCT rank, process FROM {self._distinct})"
        owner = "rank, process, " if self._con.execute(owner_query).fetchall()[0][0] else ""  # fewer keys sort faster
        query = f"SELECT {selection} FROM {self._source} ORDER BY level, {owner}start_ns, dur_ns DESC, depth, span"
        self._con.execute(f"CREATE TEMP TABLE {self._rows} AS {query}")

    def chunks(self) -> Iterator[Chunk]:
        """Yield the spans in order, in chunks whose text fits into memory."""
        size = min(CHUNK, max(1, TEXT_BYTES // max(1, self._max_text_bytes())))
        for begin in range(0, self.spans, WINDOW):
            end = min(begin + WINDOW, self.spans)
            window = self._read(self._columns, begin, end)
            for start in range(begin, end, size):
                stop = min(start + size, end)
                yield Chunk(
                    start, stop, {name: column[start - begin : stop - begin] for name, column in window.items()}
                )

    def _max_text_bytes(self) -> int:
        """Return the maximum number of bytes of text in a span."""
        texts = " + ".join(f"coalesce(strlen({c.name}), 0)" for c in TEXT if c.type == "VARCHAR")
        queries = [f"SELECT max({texts}) FROM {self._distinct}"]
        queries += [f"SELECT max(strlen({name})) FROM {self._rows}" for name in self.appended]
        return sum(self._con.execute(query).fetchall()[0][0] or 0 for query in queries)

    def text(self, column: str, chunk: Chunk) -> list[str | None]:
        """Return the loose text of a chunk's spans."""
        values: list[str | None] = self._read(column, chunk.start, chunk.stop)[column].tolist()
        return values

    def _read(self, columns: str, start: int, stop: int) -> dict[str, Numbers]:
        query = f"SELECT {columns} FROM {self._rows} WHERE rowid >= {start} AND rowid < {stop}"
        return self._con.execute(query + self._row_order).fetchnumpy()

    def templates(self, numbers: list[int]) -> Iterator[tuple[int, Template]]:
        """Yield the templates with some numbers, as pairs of number and template."""
        query = f"SELECT * FROM {self._distinct} WHERE number IN (SELECT unnest(?::UBIGINT[]))"
        for number, *texts, rank, process, present in self._con.execute(query, [numbers]).fetchall():
            # the layout of spans, by the bits of the columns of `self._partial_columns` that are present
            if present not in self._layouts:
                missing = {name for bit, name in enumerate(self._partial_columns) if not present >> bit & 1}
                counts = [None if count.column in missing else count for count in self.counts]
                key = self.has_fixed_keys and "key" not in missing
                self._layouts[present] = template.layout("parent_id" not in missing, key, counts)
            yield number, template.template(self._layouts[present], texts, rank, process)


def _word(digits: str) -> str:
    """Return the SQL that converts 16 hexadecimal digits to a number; other text makes the query fail."""
    return f"unhex({digits})::BIT::UBIGINT"


def _id(column: str) -> str:
    return _guarded(f"strlen({column}) = 16 AND {column} <> '{'0' * 16}'", _word(column))


def _guarded(condition: str, value: str) -> str:
    """Return the SQL of a value that makes the query fail if a condition does not hold."""
    return f"CASE WHEN {condition} THEN {value} ELSE error('invalid') END"
