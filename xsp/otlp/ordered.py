"""The spans of a table in the order in which they leave, as arrays of numbers, and the templates that they share.

The order is the same whatever the order of the table, so what is sent twice is the same.

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
from xsp.otlp.template import COUNTS, KEY, LOOSE, TEXT, Count, Layout, Template

CHUNK = 1 << 13
"""Spans that are encoded together: as many as stay in the processor's caches."""

WINDOW = 1 << 16
"""Spans whose numbers are fetched together."""

MANY, FEW = 100_000, 1000
"""Spans from where on, and templates up to which, it pays to find out in which columns the templates differ."""

TEXT_BYTES = 1 << 26
"""Text that a chunk holds at most, unless a single span has more."""

Numbers = npt.NDArray[Any]

_WRONG = {
    **{name: f"{name} IS NULL" for name in ("trace_id", "span_id", "level", "start_ns", "dur_ns")},
    **{
        f"{name} = {{}}": f"NOT regexp_full_match({name}, '[0-9a-fA-F]{{{digits}}}') OR {name} = '{'0' * digits}'"
        for name, digits in (("trace_id", 32), ("span_id", 16), ("parent_id", 16))
    },
    "start_ns = {}": "start_ns < 0",
    "start_ns + dur_ns = {}": "start_ns::HUGEINT + dur_ns < 0",
}
"""What a span must not have that goes out, as the words for it and the test."""


def check(con: duckdb.DuckDBPyConnection, source: str) -> None:
    """Refuse a table with spans that have no place in a trace.

    Raises:
        TraceError: an id is not hexadecimal, or a time is missing or before 1970.
    """
    counted = ", ".join(f"count(*) FILTER ({test})" for test in _WRONG.values())
    counts = con.execute(f"SELECT {counted} FROM {source}").fetchall()[0]
    for (words, test), count in zip(_WRONG.items(), counts, strict=True):
        if count:
            column = words.partition(" = ")[0].replace("start_ns +", "start_ns::HUGEINT +")
            name, value = con.execute(f"SELECT name, {column} FROM {source} WHERE {test} LIMIT 1").fetchall()[0]
            what = words.format(repr(value)) if "{" in words else f"{words} is missing"
            raise TraceError(
                f"{source}: {count} spans cannot go out as OpenTelemetry's, first {name!r}: {what}; "
                "docs/understand/table.md says what the columns hold"
            )


class Chunk(NamedTuple):
    """Spans that stand together in the order in which they leave."""

    start: int
    stop: int
    columns: Mapping[str, Numbers]


_SERIAL = itertools.count()
_HASH = "hash({})"
"""Numbers templates and traces; checked to tell those of a table apart, and salted until it does."""

_SURVEY = {
    "spans": "count(*)",
    "right": "count(level) = count(*) AND count(dur_ns) = count(*) AND coalesce(min(dur_ns) >= 0, true)",
    "count parent_id": "count(parent_id)",
    "count key": "count(key)",
    **{f"{ask} {c.name}": f"{ask}({c.name})" for c in COUNTS for ask in ("count", "min", "max")},
}
"""What is asked of a table first; where `right` is false, `check` looks closer."""


class Ordered:
    """The spans of a table by level, rank, process and start.

    Raises:
        TraceError: see `check`.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str) -> None:
        self._con = con
        self._source = source
        number = next(_SERIAL)
        self._rows, self._distinct = f"xsp_ordered_{number}", f"xsp_distinct_{number}"
        keeps_order = con.execute("SELECT current_setting('preserve_insertion_order')").fetchall()[0][0]
        self._by = "" if keeps_order else " ORDER BY rowid"
        self.keyed = True
        """Whether all keys are as long as ours, and are written like numbers."""

        self._survey()
        try:
            self._number()
        except duckdb.Error:  # an id that is none, or a key that is not like ours
            self.close()
            check(con, source)
            if not self.keyed:
                raise
            self.keyed = False
            self.loose.insert(0, "key")
            self._number()

    def close(self) -> None:
        """Remove the temporary tables; a connection that was closed has taken them with it."""
        with contextlib.suppress(duckdb.ConnectionException):
            self._con.execute(f"DROP TABLE IF EXISTS {self._rows}; DROP TABLE IF EXISTS {self._distinct}")

    def _survey(self) -> None:
        """Find which columns hold anything, and how large it is."""
        names = {row[0] for row in self._con.execute(f"DESCRIBE SELECT * FROM {self._source}").fetchall()}
        loose = [name for name in LOOSE if name in names and name != "key"]
        asked = {**_SURVEY, **{f"count {name}": f"count({name})" for name in loose}}
        values = self._con.execute(f"SELECT {', '.join(asked.values())} FROM {self._source}").fetchall()[0]
        found = dict(zip(asked, values, strict=True))
        if not found["right"]:
            check(self._con, self._source)
        self.spans = int(found["spans"])
        self.loose = [name for name in loose if found[f"count {name}"]]
        self.keyed = bool(found["count key"])
        self.counts = [
            Count(c.name, str(c.attribute), found[f"min {c.name}"], found[f"max {c.name}"])
            for c in COUNTS
            if found[f"count {c.name}"]
        ]
        present = ["parent_id", "key", *(c.column for c in self.counts)]
        self._sometimes = [name for name in present if found[f"count {name}"] != self.spans]

    def _number(self) -> None:
        """Number templates and traces, and order the spans."""
        self._layouts: dict[int, Layout] = {}
        self._find_templates()
        self.traces = self._find_traces()
        self._order()

    def _find_templates(self) -> None:
        """Keep the distinct templates, and how to tell which of them a span has."""
        bits = [f"(({name} IS NOT NULL)::BIGINT << {bit})" for bit, name in enumerate(self._sometimes)]
        values = {c.name: c.name for c in TEXT}
        values |= {"rank": "coalesce(rank, 0)", "process": "process", "present": " | ".join(bits) or "0::BIGINT"}
        shown = ", ".join(f"{value} AS {name}" for name, value in values.items())
        found = f"{self._distinct}_found"
        self._con.execute(f"CREATE OR REPLACE TEMP TABLE {found} AS SELECT DISTINCT {shown} FROM {self._source}")
        telling = self._telling(found, list(values))
        for salt in itertools.count():
            number = _HASH.format(", ".join([str(salt), *telling]))
            self._con.execute(
                f"CREATE OR REPLACE TEMP TABLE {self._distinct} AS SELECT {number} AS number, * FROM {found}"
            )
            told_apart = f"SELECT count(*) = count(DISTINCT number) FROM {self._distinct}"
            if self._con.execute(told_apart).fetchall()[0][0]:
                break
        self._con.execute(f"DROP TABLE {found}")
        self._template = _HASH.format(", ".join([str(salt), *(values[name] for name in telling)]))

    def _telling(self, found: str, names: list[str]) -> list[str]:
        """Return columns that tell the templates apart: fewer are hashed faster, which pays where spans are many."""
        rows = self._con.execute(f"SELECT * FROM {found} LIMIT {FEW + 1}").fetchall()
        if len(rows) > FEW or self.spans < MANY:
            return names
        left = list(range(len(names)))
        for place in sorted(left, key=lambda each: names[each] == "name"):
            without = [each for each in left if each != place]
            if len({tuple(row[each] for each in without) for row in rows}) == len(rows):
                left = without
        return [names[each] for each in left]

    def _find_traces(self) -> dict[str, Numbers]:
        """Return the halves of the trace ids, by the number that tells them apart."""
        distinct = f"SELECT DISTINCT trace_id FROM {self._source}"
        right = f"strlen(trace_id) = 32 AND trace_id <> '{'0' * 32}'"
        for salt in itertools.count():
            self._trace = _HASH.format(f"{salt}, trace_id")
            found = self._con.execute(
                f"SELECT {self._trace} AS number, {_where(right, _word('left(trace_id, 16)'))} AS high, "
                f"{_word('right(trace_id, 16)')} AS low FROM ({distinct}) ORDER BY number"
            ).fetchnumpy()
            if not (np.diff(found["number"]) == 0).any():
                return found
        raise AssertionError("hashes without end are all alike")

    def _order(self) -> None:
        """Keep the numbers and the loose text of the spans in their order."""
        columns = {
            "template": self._template,
            "trace": self._trace,
            "span": _id("span_id"),
            "parent": f"CASE WHEN parent_id IS NULL THEN 0 ELSE {_id('parent_id')} END",
            "start": _where("start_ns >= 0", "start_ns"),
            "dur_ns": "dur_ns",
            **{c.column: f"coalesce({c.column}, 0)::BIGINT" for c in self.counts if not c.is_constant},
        }
        if self.keyed:
            right = f"length(key) = {KEY} AND strlen(key) = {KEY}"
            for name, half in (("key_high", "left"), ("key_low", "right")):
                word = _where(right, f"encode({half}(key, 8))::BIT::UBIGINT")
                columns[name] = f"CASE WHEN key IS NULL THEN 0 ELSE {word} END"
        self._columns = ", ".join(columns)
        shown = ", ".join([*(f"{value} AS {name}" for name, value in columns.items()), *self.loose])
        several = f"SELECT count(*) > 1 FROM (SELECT DISTINCT rank, process FROM {self._distinct})"
        owner = "rank, process, " if self._con.execute(several).fetchall()[0][0] else ""  # fewer keys sort faster
        query = f"SELECT {shown} FROM {self._source} ORDER BY level, {owner}start_ns, dur_ns DESC, depth, span"
        self._con.execute(f"CREATE TEMP TABLE {self._rows} AS {query}")

    def chunks(self) -> Iterator[Chunk]:
        """Yield the spans in their order, so many at once that their text fits into memory."""
        size = min(CHUNK, max(1, TEXT_BYTES // max(1, self._most_text())))
        for begin in range(0, self.spans, WINDOW):
            end = min(begin + WINDOW, self.spans)
            window = self._read(self._columns, begin, end)
            for start in range(begin, end, size):
                stop = min(start + size, end)
                yield Chunk(start, stop, {name: each[start - begin : stop - begin] for name, each in window.items()})

    def _most_text(self) -> int:
        """Return how many bytes the text of a span has at most."""
        texts = " + ".join(f"coalesce(strlen({c.name}), 0)" for c in TEXT if c.type == "VARCHAR")
        asked = [f"SELECT max({texts}) FROM {self._distinct}"]
        asked += [f"SELECT max(strlen({name})) FROM {self._rows}" for name in self.loose]
        return sum(self._con.execute(query).fetchall()[0][0] or 0 for query in asked)

    def text(self, column: str, chunk: Chunk) -> list[str | None]:
        """Return the loose text of a chunk's spans."""
        values: list[str | None] = self._read(column, chunk.start, chunk.stop)[column].tolist()
        return values

    def _read(self, columns: str, start: int, stop: int) -> dict[str, Numbers]:
        query = f"SELECT {columns} FROM {self._rows} WHERE rowid >= {start} AND rowid < {stop}"
        return self._con.execute(query + self._by).fetchnumpy()

    def templates(self, numbers: list[int]) -> Iterator[tuple[int, Template]]:
        """Yield templates, each after its number."""
        query = f"SELECT * FROM {self._distinct} WHERE number IN (SELECT unnest(?::UBIGINT[]))"
        for number, *texts, rank, process, present in self._con.execute(query, [numbers]).fetchall():
            yield number, template.template(self._layout(present), texts, rank, process)

    def _layout(self, present: int) -> Layout:
        """Return the layout of spans by the bits of what is there of `self._sometimes`."""
        if present not in self._layouts:
            missing = {name for bit, name in enumerate(self._sometimes) if not present >> bit & 1}
            counts = [None if count.column in missing else count for count in self.counts]
            key = self.keyed and "key" not in missing
            self._layouts[present] = template.layout("parent_id" not in missing, key, counts)
        return self._layouts[present]


def _word(digits: str) -> str:
    """Return the SQL of 16 hexadecimal digits as a number; what are no digits stops the query."""
    return f"unhex({digits})::BIT::UBIGINT"


def _id(column: str) -> str:
    return _where(f"strlen({column}) = 16 AND {column} <> '{'0' * 16}'", _word(column))


def _where(right: str, value: str) -> str:
    """Return the SQL of a value that stops the query where it is not right."""
    return f"CASE WHEN {right} THEN {value} ELSE error('not right') END"
