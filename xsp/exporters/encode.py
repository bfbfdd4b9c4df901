"""Spans of a table as OTLP requests, many at once.

The OpenTelemetry SDK makes an object of each span and each attribute, and then bytes of the objects. Here the table
engine finds the few distinct **templates** that the spans are instances of: spans that agree in all columns of text
(name, kind, type, shapes, …) and in which columns are null. A template is encoded once, as the bytes of a whole span
with room where ids, times and counts belong (see `xsp.exporters.template`). A request is copies of templates in a
row, into which NumPy writes the numbers, one column of all spans at a time.

Spans leave ordered by level, rank, process and start. As a parent is of a level further out, or began earlier, it
leaves before its children.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from xsp.errors import TraceError
from xsp.exporters import template, wire
from xsp.exporters.template import COUNTS, KEY, LOOSE, TEXT, Count, Owner, Template
from xsp.version import __version__

MAX_BYTES = 3_500_000
"""A gRPC receiver refuses more than 4 MiB unless it is told otherwise."""

MAX_SPANS = 8192
CHUNK = 1 << 13
"""Spans that are encoded together: as many as stay in the processor's caches."""

WINDOW = 1 << 16
"""Spans whose numbers are fetched together."""

MANY, FEW = 100_000, 1000
"""Spans from where on, and templates up to which, it pays to find out in which columns the templates differ."""

TEXT_BYTES = 1 << 26
"""Text that a chunk holds at most, unless a single span has more; also of the templates kept for the next chunks."""

ResourceOf = Callable[[int, int, "int | None"], Mapping[str, "str | int"]]
Numbers = npt.NDArray[Any]


class Request(NamedTuple):
    """One message to a receiver."""

    body: bytes
    """A serialized `ExportTraceServiceRequest`."""

    spans: int


def requests(
    con: duckdb.DuckDBPyConnection,
    source: str,
    resource_of: ResourceOf,
    *,
    max_bytes: int = MAX_BYTES,
    max_spans: int = MAX_SPANS,
) -> Iterator[Request]:
    """Yield the spans of a table as OTLP requests, parents before children.

    Args:
        con: the engine that holds the table; it can be used for other things between two requests.
        source: table or view with the columns of `xsp.span.COLUMNS`, and perhaps `links`: null, or a JSON array
            of the `[trace_id, span_id]` that a span refers to.
        resource_of: the attributes of the resource of a level, a rank and a process.
        max_bytes: of a request's body. A single span that is larger than this goes alone, whole: whether it is
            too large is for the receiver to say.
        max_spans: of a request.

    Raises:
        TraceError: an id is not hexadecimal, a time is missing or before 1970, `attributes` is no JSON object.
    """
    spans = _Ordered(con, source)
    templates = _Templates(spans)
    header = functools.lru_cache(maxsize=4096)(lambda owner: wire.block(1, wire.attributes(1, resource_of(*owner))))
    try:
        for chunk in spans.chunks():
            found, which = templates.of(chunk)
            content, ends = _encode(spans, chunk, found, which)
            owners = [each.owner for each in found]
            yield from _cut(_Encoded(content, ends, owners, which), header, max_bytes, max_spans)
    finally:
        spans.close()


# --- what is asked of the table ---------------------------------------------------------------------------

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
                "docs/table.md says what the columns hold"
            )


class _Chunk(NamedTuple):
    """Spans that stand together in the order in which they leave."""

    start: int
    stop: int
    columns: Mapping[str, Numbers]


_SERIAL = itertools.count()
_HASH = "hash({})"
"""Numbers templates and traces; checked to tell those of a table apart, and salted until it does."""

_RIGHT = [
    *(f"count({name}) = count(*)" for name in ("trace_id", "span_id", "level", "start_ns", "dur_ns")),
    *(
        f"min(strlen({name})) = {digits} AND max(strlen({name})) = {digits} AND min({name}) <> '{'0' * digits}'"
        for name, digits in (("trace_id", 32), ("span_id", 16), ("parent_id", 16))
    ),
    "min(start_ns) >= 0 AND min(dur_ns) >= 0",
]
"""What holds of a table that can go out, but for digits that are none; where one does not, `check` looks closer."""


class _Ordered:
    """The spans of a table in the order in which they leave: their numbers, and the numbers of their templates."""

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str) -> None:
        self._con = con
        self._source = source
        number = next(_SERIAL)
        self._rows, self._distinct = f"xsp_ordered_{number}", f"xsp_distinct_{number}"
        keeps_order = con.execute("SELECT current_setting('preserve_insertion_order')").fetchall()[0][0]
        self._in_order = "" if keeps_order else " ORDER BY rowid"
        self._survey()
        self._find_templates()
        try:
            self.traces = self._find_traces()
            self._order()
        except duckdb.Error:  # of an id that is not hexadecimal
            self.close()
            check(con, source)
            raise

    def close(self) -> None:
        """Remove the temporary tables; a connection that was closed has taken them with it."""
        with contextlib.suppress(duckdb.ConnectionException):
            self._con.execute(f"DROP TABLE IF EXISTS {self._rows}; DROP TABLE IF EXISTS {self._distinct}")

    def _survey(self) -> None:
        """Find which columns hold anything, and how large it is."""
        names = {row[0] for row in self._con.execute(f"DESCRIBE SELECT * FROM {self._source}").fetchall()}
        loose = [name for name in LOOSE if name in names]
        asked = {
            "spans": "count(*)",
            "right": f"coalesce({' AND '.join(f'coalesce({test}, true)' for test in _RIGHT)}, true)",
            "count parent_id": "count(parent_id)",
            "keyed": f"bool_and(length(key) = {KEY} AND strlen(key) = {KEY})",
            **{f"most {name}": f"max(strlen({name}))" for name in loose},
            **{f"{ask} {c.name}": f"{ask}({c.name})" for c in COUNTS for ask in ("count", "min", "max")},
        }
        values = self._con.execute(f"SELECT {', '.join(asked.values())} FROM {self._source}").fetchall()[0]
        found = dict(zip(asked, values, strict=True))
        if not found["right"]:
            check(self._con, self._source)
        self.spans = int(found["spans"])
        self.keyed = bool(found["keyed"])
        self.loose = [
            name for name in loose if found[f"most {name}"] is not None and not (name == "key" and self.keyed)
        ]
        self._text_bytes = sum(found[f"most {name}"] for name in self.loose)
        self.counts = [
            Count(c.name, str(c.attribute), found[f"min {c.name}"], found[f"max {c.name}"])
            for c in COUNTS
            if found[f"count {c.name}"]
        ]
        present = ["parent_id", *(["key"] if self.keyed else []), *(c.column for c in self.counts)]
        self._sometimes = [name for name in present if found.get(f"count {name}") != self.spans]

    def _find_templates(self) -> None:
        """Keep the distinct templates, and how to tell which of them a span has."""
        bits = [f"(({name} IS NOT NULL)::BIGINT << {bit})" for bit, name in enumerate(self._sometimes)]
        values = {c.name: c.name for c in TEXT}
        values |= {"rank": "coalesce(rank, 0)", "process": "process", "present": " | ".join(bits) or "0::BIGINT"}
        shown = ", ".join(f"{value} AS {name}" for name, value in values.items())
        self._con.execute(f"CREATE TEMP TABLE {self._distinct} AS SELECT DISTINCT {shown} FROM {self._source}")
        telling = self._telling(list(values))
        for salt in itertools.count():
            self._number = _HASH.format(", ".join([str(salt), *telling]))
            numbers = f"SELECT {self._number} AS number FROM {self._distinct}"
            if self._con.execute(f"SELECT count(*) = count(DISTINCT number) FROM ({numbers})").fetchall()[0][0]:
                break
        self._template = _HASH.format(", ".join([str(salt), *(values[name] for name in telling)]))
        sizes = " + ".join(f"coalesce(strlen({c.name}), 0)" for c in TEXT if c.type == "VARCHAR")
        self._text_bytes += self._con.execute(f"SELECT max({sizes}) FROM {self._distinct}").fetchall()[0][0] or 0

    def _telling(self, names: list[str]) -> list[str]:
        """Return columns that tell the templates apart: fewer are hashed faster, which pays where spans are many."""
        rows = self._con.execute(f"SELECT * FROM {self._distinct} LIMIT {FEW + 1}").fetchall()
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
        for salt in itertools.count():
            self._trace = _HASH.format(f"{salt}, trace_id")
            found = self._con.execute(
                f"SELECT {self._trace} AS number, {_word('left(trace_id, 16)')} AS high, "
                f"{_word('right(trace_id, 16)')} AS low FROM ({distinct}) ORDER BY number"
            ).fetchnumpy()
            if not (np.diff(found["number"]) == 0).any():
                return found
        raise AssertionError

    def _order(self) -> None:
        columns = {
            "template": self._template,
            "trace": self._trace,
            "span": _word("span_id"),
            "parent": f"coalesce({_word('parent_id')}, 0)",
            "start": "start_ns",
            "dur_ns": "dur_ns",
            **{c.column: f"coalesce({c.column}, 0)::BIGINT" for c in self.counts if not c.is_constant},
        }
        if self.keyed:
            halves = {"key_high": "left", "key_low": "right"}
            columns |= {name: f"coalesce(encode({half}(key, 8))::BIT::UBIGINT, 0)" for name, half in halves.items()}
        self._columns = ", ".join(columns)
        shown = ", ".join([*(f"{value} AS {name}" for name, value in columns.items()), *self.loose])
        self._con.execute(
            f"CREATE TEMP TABLE {self._rows} AS SELECT {shown} FROM {self._source} "
            "ORDER BY level, rank, process, start_ns, dur_ns DESC"
        )

    def chunks(self) -> Iterator[_Chunk]:
        """Yield the spans in their order, so many at once that their text fits into memory."""
        size = min(CHUNK, max(1, TEXT_BYTES // max(1, self._text_bytes)))
        for begin in range(0, self.spans, WINDOW):
            window = self._read(self._columns, begin, begin + WINDOW)
            for start in range(begin, min(begin + WINDOW, self.spans), size):
                stop = min(start + size, begin + WINDOW, self.spans)
                here = slice(start - begin, stop - begin)
                yield _Chunk(start, stop, {name: column[here] for name, column in window.items()})

    def text(self, column: str, chunk: _Chunk) -> list[str | None]:
        """Return the loose text of a chunk's spans."""
        values: list[str | None] = self._read(column, chunk.start, chunk.stop)[column].tolist()
        return values

    def _read(self, columns: str, start: int, stop: int) -> dict[str, Numbers]:
        query = f"SELECT {columns} FROM {self._rows} WHERE rowid >= {start} AND rowid < {stop}"
        return self._con.execute(query + self._in_order).fetchnumpy()

    def templates(self, chunk: _Chunk) -> Iterator[tuple[int, Template]]:
        """Yield the templates of a chunk's spans, each by its number."""
        numbers = f"SELECT template FROM {self._rows} WHERE rowid >= {chunk.start} AND rowid < {chunk.stop}"
        query = f"SELECT {self._number} AS number, * FROM {self._distinct} WHERE number IN ({numbers})"
        for number, *texts, rank, process, present in self._con.execute(query).fetchall():
            text = dict(zip((c.name for c in TEXT), texts, strict=True))
            missing = {name for bit, name in enumerate(self._sometimes) if not present >> bit & 1}
            counts = [None if count.column in missing else count for count in self.counts]
            parent, key = "parent_id" not in missing, self.keyed and "key" not in missing
            yield number, template.template(text, (text["level"], rank, process), parent, key, counts)


def _word(digits: str) -> str:
    """Return the SQL of 16 hexadecimal digits as a number."""
    return f"unhex({digits})::BIT::UBIGINT"


class _Templates:
    """The templates that were met, but for those that memory has no room for."""

    def __init__(self, spans: _Ordered) -> None:
        self._spans = spans
        self._known: dict[int, Template] = {}
        self._bytes = 0

    def of(self, chunk: _Chunk) -> tuple[list[Template], Numbers]:
        """Return the templates of a chunk, and which of them each span has."""
        distinct, which = np.unique(chunk.columns["template"], return_inverse=True)
        wanted = distinct.tolist()
        if not self._known.keys() >= set(wanted):
            self._load(chunk)
        return [self._known[number] for number in wanted], which

    def _load(self, chunk: _Chunk) -> None:
        if self._bytes > TEXT_BYTES:
            self._known.clear()
            self._bytes = 0
        for number, found in self._spans.templates(chunk):
            if number not in self._known:
                self._known[number] = found
                self._bytes += len(found.body)


# --- a chunk of spans -------------------------------------------------------------------------------------


def _encode(spans: _Ordered, chunk: _Chunk, templates: Sequence[Template], which: Numbers) -> tuple[bytearray, Numbers]:
    """Copy the templates and write the numbers into them; return the spans' bytes, and where each one ends."""
    bodies = [each.body for each in templates]
    copies = map(bodies.__getitem__, which.tolist())
    lengths = np.array([len(body) for body in bodies])[which]
    loose = [template.loose(name, spans.text(name, chunk)) for name in spans.loose]
    for pieces in loose:
        lengths += np.fromiter(map(len, pieces), np.int64, len(pieces))
    content = bytearray().join(itertools.chain.from_iterable(zip(copies, *loose, strict=True)) if loose else copies)
    ends = np.cumsum(lengths)
    places = np.array([each.places for each in templates]).T
    for place, words in zip(places, _words(spans, chunk.columns, lengths), strict=True):
        _write(content, words, place[which], ends - lengths)
    return content, ends


Word = tuple[Numbers, int]
"""Numbers, and how many of their bytes are written."""


def _words(spans: _Ordered, columns: Mapping[str, Numbers], lengths: Numbers) -> Iterator[Sequence[Word]]:
    """Yield what goes into each place of the templates, in their order: words that follow each other."""
    yield _varints(lengths - 5, 4)
    trace = np.searchsorted(spans.traces["number"], columns["trace"])
    for digits in (spans.traces["high"][trace], spans.traces["low"][trace], columns["span"], columns["parent"]):
        yield [(digits.byteswap(), 8)]
    yield [(columns["start"], 8)]
    yield [(columns["start"].view(np.uint64) + columns["dur_ns"].view(np.uint64), 8)]
    yield [(columns[half].byteswap(), 8) for half in ("key_high", "key_low") if spans.keyed]
    for count in spans.counts:
        yield [] if count.is_constant else _varints(columns[count.column], count.width)


def _varints(values: Numbers, width: int) -> list[Word]:
    """Return integers as over-long varints: 7 bits in a byte, all bytes but the last marked to go on."""
    bits: Numbers = values.view(np.uint64)
    found = bits & 0x0FFF_FFFF | (bits & 0x00FF_FFFF_F000_0000) << 4
    found = found & 0x0000_3FFF_0000_3FFF | (found & 0x0FFF_C000_0FFF_C000) << 2
    found = found & 0x007F_007F_007F_007F | (found & 0x3F80_3F80_3F80_3F80) << 1
    if width < 10:
        return [(found | {4: 0x0080_8080, 8: 0x0080_8080_8080_8080}[width], width)]
    last = bits >> 56
    return [(found | 0x8080_8080_8080_8080, 8), (last & 0x7F | 0x80 | last >> 7 << 8, 2)]


def _write(content: bytearray, words: Sequence[Word], places: Numbers, starts: Numbers) -> None:
    """Write words into each span that has a place for them, through a view of the content in which words overlap."""
    there = places >= 0
    everywhere = bool(there.all())
    positions = starts + places if everywhere else (starts + places)[there]
    for values, size in words:
        view = np.ndarray((len(content) - size + 1,), f"<u{size}", content, strides=(1,))
        view[positions] = values if everywhere else values[there]
        positions = positions + size


class _Encoded(NamedTuple):
    """Encoded spans in a row."""

    content: bytearray
    ends: Numbers
    """Where each span ends in the content."""

    owners: list[Owner]
    """Of the templates."""

    which: Numbers
    """The template of each span; spans of the same owner stand together."""


SCOPE = wire.block(1, wire.block(1, b"xsp") + wire.block(2, wire.text(__version__)))
AROUND = 18
"""Bytes that tags and lengths around the spans of a resource take at most."""


def _cut(chunk: _Encoded, header: Callable[[Any], bytes], max_bytes: int, max_spans: int) -> Iterator[Request]:
    """Yield the spans of a chunk as requests that keep the limits."""
    distinct = {owner: code for code, owner in enumerate(dict.fromkeys(chunk.owners))}
    headers = [header(owner) for owner in distinct]
    owner = np.array([distinct[each] for each in chunk.owners])[chunk.which]
    around = np.array([len(each) + len(SCOPE) + AROUND for each in headers])[owner]
    changes = np.flatnonzero(np.diff(owner)) + 1
    lengths = np.diff(chunk.ends, prepend=0)
    start = 0
    while start < len(owner):
        costs = lengths[start : start + max_spans].copy()
        costs[0] += around[start]
        here = changes[(changes > start) & (changes < start + len(costs))]
        costs[here - start] += around[here]
        stop = start + max(1, int(np.searchsorted(np.cumsum(costs), max_bytes, side="right")))
        bounds = [start, *here[here < stop].tolist(), stop]
        parts = [(headers[owner[first]], _slice(chunk, first, last)) for first, last in itertools.pairwise(bounds)]
        yield Request(b"".join(itertools.chain.from_iterable(_resource_spans(*part) for part in parts)), stop - start)
        start = stop


def _slice(chunk: _Encoded, first: int, last: int) -> memoryview:
    return memoryview(chunk.content)[int(chunk.ends[first - 1]) if first else 0 : int(chunk.ends[last - 1])]


def _resource_spans(header: bytes, spans: memoryview) -> tuple[bytes | memoryview, ...]:
    """Return the parts of a `ResourceSpans`."""
    scope = b"\x12" + wire.varint(len(SCOPE) + len(spans)) + SCOPE
    return b"\x0a" + wire.varint(len(header) + len(scope) + len(spans)), header, scope, spans
