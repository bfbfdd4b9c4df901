"""Spans of a table as OTLP requests, many at once.

The OpenTelemetry SDK makes an object of each span and each attribute, and then bytes of the objects. Here the table
engine reduces the spans to the few distinct **templates** that they are instances of: spans that agree in all
columns of text (name, kind, type, shapes, …) and in which columns are null. A template is encoded once, as the
bytes of a whole span with zeros where ids, times and counts belong. A request is the templates of its spans in a
row, into which NumPy writes the numbers, one column of all spans at a time.

That works because protobuf lets an integer take more bytes than it needs: lengths and counts have a fixed width, so
that a number's place depends on the template alone. What is different in nearly every span and is no number (the
key, the JSON of `attributes`, links) is appended to its template span by span.

Spans leave ordered by level, rank, process and start. As a parent is of a level further out, or began earlier, it
leaves before its children.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from xsp import semconv
from xsp.errors import TraceError
from xsp.exporters import wire
from xsp.span import COLUMNS
from xsp.version import __version__

MAX_BYTES = 3_500_000
"""A gRPC receiver refuses more than 4 MiB unless it is told otherwise."""

MAX_SPANS = 8192
CHUNK = 16_384
"""Spans that are encoded together: as many as stay in the processor's caches."""

CACHE_BYTES = 1 << 26
"""Templates that are kept for the next chunks."""

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
    check(con, source)
    spans = _Ordered(con, source)
    templates = _Templates(spans)
    header = functools.lru_cache(maxsize=4096)(lambda owner: wire.block(1, wire.attributes(1, resource_of(*owner))))
    try:
        for start, stop in spans.chunks(2 * max_bytes):
            columns = spans.read(start, stop)
            found, which = templates.of(columns["template"], start, stop)
            content, ends = _encode(columns, spans.counts, found, which)
            owners = [template.owner for template in found]
            yield from _cut(_Chunk(content, ends, owners, which), header, max_bytes, max_spans)
    finally:
        spans.close()


# --- what is asked of the table ---------------------------------------------------------------------------

IDS = {"trace_id": 32, "span_id": 16, "parent_id": 16}
LOOSE = ("key", "attributes", "links")
"""Text that is another one in nearly every span; it is appended to the template."""

TEXT = [c for c in COLUMNS if c.type in ("VARCHAR", "SMALLINT", "BOOLEAN") and c.name not in (*IDS, *LOOSE)]
"""Columns whose values stand in the template."""

COUNTS = [c for c in COLUMNS if c.type in ("INTEGER", "BIGINT") and c.name not in ("start_ns", "process", "rank")]
"""Columns whose values are written into copies of the template."""

_SERIAL = itertools.count()

_WRONG = {
    **{name: f"{name} IS NULL" for name in ("trace_id", "span_id", "level", "start_ns", "dur_ns")},
    **{
        f"{name} = {{}}": f"NOT regexp_full_match({name}, '[0-9a-fA-F]{{{digits}}}') OR {name} = '{'0' * digits}'"
        for name, digits in IDS.items()
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


class _Count(NamedTuple):
    """A column of integers, and how many bytes its values take."""

    name: str
    attribute: str
    width: int


class _Ordered:
    """The spans of a table in the order in which they leave, numbers and loose text only, and their templates."""

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str) -> None:
        self._con = con
        number = next(_SERIAL)
        self._rows, self._distinct = f"xsp_ordered_{number}", f"xsp_distinct_{number}"
        held = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
        self._survey(source, [name for name in LOOSE if name in held])
        self._number_templates(source)
        self._order(source)

    def close(self) -> None:
        """Remove the temporary tables; a connection that was closed has taken them with it."""
        with contextlib.suppress(duckdb.ConnectionException):
            self._con.execute(f"DROP TABLE IF EXISTS {self._rows}; DROP TABLE IF EXISTS {self._distinct}")

    def _survey(self, source: str, loose: Sequence[str]) -> None:
        """Find which columns hold anything, and how large their numbers are."""
        ranges = ", ".join(f"min({c.name}), max({c.name})" for c in COUNTS)
        counts = ", ".join(f"count({name})" for name in loose)
        found = self._con.execute(f"SELECT {ranges}, {counts}, count(*) FROM {source}").fetchall()[0]
        self.counts = [
            _Count(c.name, str(c.attribute), _width(low, high))
            for c, low, high in zip(COUNTS, found[: 2 * len(COUNTS) : 2], found[1 : 2 * len(COUNTS) : 2], strict=True)
            if low is not None
        ]
        self.loose = [name for name, count in zip(loose, found[2 * len(COUNTS) : -1], strict=True) if count]
        self.spans = int(found[-1])

    def _number_templates(self, source: str) -> None:
        """Keep the distinct templates; a number that two of them share makes another salt necessary."""
        present = ["parent_id", *(c.name for c in self.counts)]
        bits = " | ".join(f"(({name} IS NOT NULL)::BIGINT << {place})" for place, name in enumerate(present))
        values = ", ".join([*(c.name for c in TEXT), "coalesce(rank, 0)", "process", bits])
        names = ", ".join([*(c.name for c in TEXT), "rank", "process", "present"])
        for salt in itertools.count():
            self._template = f"hash({salt}, {values})"
            self._con.execute(
                f"CREATE OR REPLACE TEMP TABLE {self._distinct} AS "
                f"SELECT * FROM (SELECT DISTINCT {self._template}, {values} FROM {source}) AS _(template, {names})"
            )
            if self._con.execute(f"SELECT count(*) = count(DISTINCT template) FROM {self._distinct}").fetchall()[0][0]:
                return

    def _order(self, source: str) -> None:
        size = " + ".join(
            f"coalesce(strlen({name}), 0)" for name in [*(c.name for c in TEXT if c.type == "VARCHAR"), *self.loose]
        )
        columns = [
            f"{self._template} AS template",
            f"{size} AS size",
            "('0x' || substr(trace_id, 1, 16))::UBIGINT AS trace_high",
            "('0x' || substr(trace_id, 17))::UBIGINT AS trace_low",
            "('0x' || span_id)::UBIGINT AS span",
            "coalesce(('0x' || parent_id)::UBIGINT, 0) AS parent",
            "start_ns",
            *(f"coalesce({c.name}, 0)::BIGINT AS {c.name}" for c in self.counts),
            *(self.loose),
        ]
        self._con.execute(
            f"CREATE OR REPLACE TEMP TABLE {self._rows} AS SELECT {', '.join(columns)} FROM {source} "
            "ORDER BY level, rank, process, start_ns, dur_ns DESC"
        )

    def chunks(self, text_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield places in the order, from where to where, with about this much text between them."""
        start = 0
        while start < self.spans:
            sizes = self._numbers("size", start, start + CHUNK)["size"].cumsum()
            stop = start + max(1, int(np.searchsorted(sizes, text_bytes, side="right")))
            yield start, stop
            start = stop

    def read(self, start: int, stop: int) -> dict[str, Numbers]:
        """Return the columns between two places."""
        return self._numbers("*", start, stop)

    def _numbers(self, columns: str, start: int, stop: int) -> dict[str, Numbers]:
        query = f"SELECT {columns} FROM {self._rows} WHERE rowid >= {start} AND rowid < {stop} ORDER BY rowid"
        return self._con.execute(query).fetchnumpy()

    def templates(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        """Return the distinct templates between two places: number, columns of text, rank, process, presence."""
        query = (
            f"SELECT * FROM {self._distinct} WHERE template IN "
            f"(SELECT template FROM {self._rows} WHERE rowid >= {start} AND rowid < {stop})"
        )
        return self._con.execute(query).fetchall()


def _width(low: int, high: int) -> int:
    """Return the bytes in which all of a column's integers fit: 7 bits in each, a negative one takes ten."""
    return next((width for width in (4, 8) if low >= 0 and high < 1 << 7 * width), 10)


# --- templates --------------------------------------------------------------------------------------------

FIXED = ("length", "trace_high", "trace_low", "span", "parent", "start", "end")
"""What is written into each template, before the counts."""

FLAGS = b"\x85\x01" + (1).to_bytes(4, "little")
"""Sampled, as in W3C Trace Context."""

KIND = b"\x30\x01"
"""Internal: client and server would make viewers expect another process at the other end."""

ERROR = 2


class _Template(NamedTuple):
    """The bytes of a span but for its numbers."""

    body: bytes
    places: tuple[int, ...]
    """Where the numbers go, in the order of `FIXED` and of the counts; -1 where it has none."""

    owner: tuple[int, int, int | None]
    """Level, rank and process: whose resource it belongs to."""


class _Templates:
    """The templates that were met."""

    def __init__(self, spans: _Ordered) -> None:
        self._spans = spans
        self._known: dict[int, _Template] = {}
        self._bytes = 0

    def of(self, numbers: Numbers, start: int, stop: int) -> tuple[list[_Template], Numbers]:
        """Return the templates of a chunk, and which of them each span has."""
        distinct, which = np.unique(numbers, return_inverse=True)
        wanted = distinct.tolist()
        if not self._known.keys() >= set(wanted):
            self._load(start, stop)
        return [self._known[number] for number in wanted], which

    def _load(self, start: int, stop: int) -> None:
        if self._bytes > CACHE_BYTES:
            self._known.clear()
            self._bytes = 0
        for number, *values in self._spans.templates(start, stop):
            if number not in self._known:
                self._known[number] = template = _template(values, self._spans.counts)
                self._bytes += len(template.body)


def _template(values: Sequence[Any], counts: Sequence[_Count]) -> _Template:
    """Encode what spans of one template have in common.

    Args:
        values: the columns of `TEXT`, rank, process, and which of the parent and the counts are there, as bits.
        counts: the columns that the bits after the first are about.
    """
    *texts, rank, process, present = values
    known = dict(zip((c.name for c in TEXT), texts, strict=True))
    body = bytearray(b"\x12\0\0\0\0\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8))
    places = [1, 7, 15, 25]
    places.append(_room(body, b"\x22\x08", 8) if present & 1 else -1)
    places.append(_room(body, b"\x39", 8))
    places.append(_room(body, b"\x41", 8))
    for bit, count in enumerate(counts, 1):
        there = present >> bit & 1
        places.append(_room(body, _count_head(count.attribute, count.width), count.width) if there else -1)
    body += FLAGS + KIND + _texts(known)
    return _Template(bytes(body), tuple(places), (known["level"], rank, process))


def _room(body: bytearray, tag: bytes, width: int) -> int:
    """Append a tag and room for a number; return where the room begins."""
    body += tag
    body += bytes(width)
    return len(body) - width


@functools.lru_cache(maxsize=256)
def _count_head(attribute: str, width: int) -> bytes:
    """Return what stands before the digits of an integer attribute."""
    key = wire.block(1, attribute.encode()) + b"\x12" + wire.varint(1 + width) + b"\x18"
    return b"\x4a" + wire.varint(len(key) + width) + key


def _texts(known: Mapping[str, Any]) -> bytes:
    """Return the name, the status, and the attributes that are text."""
    parts = [wire.block(5, wire.text(known["name"] or ""))]
    for column in TEXT:
        value = known[column.name]
        if column.attribute is not None and value is not None:
            shown = semconv.level_name(value) if column.name == "level" else value
            parts.append(_text_attribute(column.attribute, shown))
    if known["status"] not in (None, "ok"):
        parts.append(_failure(known["status"]))
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _text_attribute(attribute: str, value: str | int) -> bytes:
    return wire.block(9, wire.attribute(attribute, value))


def _failure(status: str) -> bytes:
    """Return the status of a span that did not end well."""
    kind, _, what = status.partition(":")
    named = wire.attributes(9, {"error.type": what}) if kind == "error" and what else b""
    return named + wire.block(15, wire.block(2, wire.text(status)) + b"\x18" + wire.varint(ERROR))


# --- loose text -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _string_head(attribute: str, length: int) -> bytes:
    """Return what stands before a string attribute of so many bytes."""
    value = b"\x0a" + wire.varint(length)
    key = wire.block(1, attribute.encode()) + b"\x12" + wire.varint(len(value) + length) + value
    return b"\x4a" + wire.varint(len(key) + length) + key


def _key(value: str | None) -> bytes:
    if value is None:
        return b""
    content = value.encode()
    return _string_head("xsp.key", len(content)) + content


@functools.lru_cache(maxsize=4096)
def _attributes(value: str | None) -> bytes:
    """Return the JSON of the column `attributes` as attributes; a name that a column has goes under our own."""
    if value is None:
        return b""
    try:
        flat = semconv.flat(value)
        named = {semconv.OWN + key if key in semconv.COLUMN_OF else key: each for key, each in flat.items()}
        return wire.attributes(9, named)
    except (ValueError, AttributeError, RecursionError) as error:
        raise TraceError(
            f"attributes = {_short(value)}: no JSON object of a depth that can be read ({error})"
        ) from error


@functools.lru_cache(maxsize=4096)
def _links(value: str | None) -> bytes:
    if value is None:
        return b""
    try:
        return wire.links(json.loads(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"links = {_short(value)}: no JSON array of [trace_id, span_id] ({error})") from error


def _short(value: str) -> str:
    return value if len(value) <= 100 else value[:100] + "…"


_ENCODED_BY: Mapping[str, Callable[[str | None], bytes]] = {"key": _key, "attributes": _attributes, "links": _links}


# --- a chunk of spans -------------------------------------------------------------------------------------


def _encode(
    columns: Mapping[str, Numbers], counts: Sequence[_Count], templates: Sequence[_Template], which: Numbers
) -> tuple[bytearray, Numbers]:
    """Copy the templates and write the numbers into them; return the spans' bytes, and where each one ends."""
    bodies = [template.body for template in templates]
    copies = list(map(bodies.__getitem__, which.tolist()))
    loose = [list(map(_ENCODED_BY[name], _values(columns[name]))) for name in LOOSE if name in columns]
    lengths = np.zeros(len(copies), np.int64)
    for pieces in (copies, *loose):
        lengths += np.fromiter(map(len, pieces), np.int64, len(copies))
    content = bytearray().join(itertools.chain.from_iterable(zip(copies, *loose, strict=True)))
    ends = np.cumsum(lengths)
    places = np.array([template.places for template in templates]).T
    for place, (numbers, width) in zip(places, _numbers(columns, counts, lengths), strict=True):
        _write(content, numbers, width, place[which], ends - lengths)
    return content, ends


def _values(column: Numbers) -> list[Any]:
    """Return a column of text with None where it is null."""
    values: list[Any] = column.tolist()
    return values


def _numbers(
    columns: Mapping[str, Numbers], counts: Sequence[_Count], lengths: Numbers
) -> Iterator[tuple[Numbers, int]]:
    """Yield what goes into a template's places, in their order, each with its width in bytes."""
    yield _spread(lengths - 5, 4), 4
    for name in ("trace_high", "trace_low", "span", "parent"):
        yield columns[name].byteswap(), 8
    start = columns["start_ns"].view(np.uint64)
    yield start, 8
    yield start + columns["dur_ns"].view(np.uint64), 8
    for count in counts:
        yield _spread(columns[count.name], count.width), count.width


def _spread(values: Numbers, width: int) -> Numbers:
    """Return integers with the 7-bit groups of each in bytes of their own, all but the last marked to go on.

    Of those that are 10 bytes wide it is the first 8.
    """
    found: Numbers = values.view(np.uint64)
    found = found & 0x0FFF_FFFF | (found & 0x00FF_FFFF_F000_0000) << 4
    found = found & 0x0000_3FFF_0000_3FFF | (found & 0x0FFF_C000_0FFF_C000) << 2
    found = found & 0x007F_007F_007F_007F | (found & 0x3F80_3F80_3F80_3F80) << 1
    return found | {4: 0x0080_8080, 8: 0x0080_8080_8080_8080, 10: 0x8080_8080_8080_8080}[width]


def _write(content: bytearray, numbers: Numbers, width: int, places: Numbers, starts: Numbers) -> None:
    """Write a number into each span that has a place for it."""
    there = places >= 0
    if there.all():
        _put(content, numbers, width, starts + places)
    elif there.any():
        _put(content, numbers[there], width, (starts + places)[there])


def _put(content: bytearray, numbers: Numbers, width: int, positions: Numbers) -> None:
    """Write numbers at positions in bytes, through a view of the content in which words overlap."""
    word = np.dtype(f"<u{width}")
    view = np.ndarray((len(content) - width + 1,), word, content, strides=(1,))
    view[positions] = numbers.astype(word)


class _Chunk(NamedTuple):
    """Encoded spans in a row."""

    content: bytearray
    ends: Numbers
    """Where each span ends in the content."""

    owners: list[tuple[int, int, int | None]]
    """Level, rank and process, by template."""

    which: Numbers
    """The template of each span; spans of the same owner stand together."""


SCOPE = wire.block(1, wire.block(1, b"xsp") + wire.block(2, wire.text(__version__)))
AROUND = 18
"""Bytes that tags and lengths around the spans of a resource take at most."""


def _cut(chunk: _Chunk, header: Callable[[Any], bytes], max_bytes: int, max_spans: int) -> Iterator[Request]:
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


def _slice(chunk: _Chunk, first: int, last: int) -> memoryview:
    return memoryview(chunk.content)[int(chunk.ends[first - 1]) if first else 0 : int(chunk.ends[last - 1])]


def _resource_spans(header: bytes, spans: memoryview) -> tuple[bytes | memoryview, ...]:
    """Return the parts of a `ResourceSpans`."""
    scope = b"\x12" + wire.varint(len(SCOPE) + len(spans)) + SCOPE
    return b"\x0a" + wire.varint(len(header) + len(scope) + len(spans)), header, scope, spans
