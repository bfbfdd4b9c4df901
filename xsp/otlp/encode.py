"""Encode the spans of a table as OTLP requests, many at once.

The OpenTelemetry SDK makes an object of each span and each attribute, and then encodes the objects. Here the table
engine finds the few distinct **templates** of the spans: spans share a template if they agree in all text columns
(name, kind, type, shapes, …) and in the set of null columns. A template is encoded once, as the bytes of a whole span
with placeholders for ids, times and counts (see `xsp.otlp.template`). A request is a sequence of copies of templates,
into which NumPy writes the numbers, one column of all spans at a time.

Spans are sent in order of level, rank, process and start. A parent has an outer level, or began earlier, so it is sent
before its children.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb
import numpy as np

from xsp.otlp import template
from xsp.otlp.ordered import Chunk, Numbers, Ordered
from xsp.otlp.template import Owner, Template
from xsp.version import __version__

MAX_BYTES = 3_500_000
"""Maximum bytes of a request; by default a gRPC receiver rejects more than 4 MiB."""

MAX_SPANS = 8192
TEMPLATE_BYTES = 1 << 26
"""Bytes of templates beyond which templates of earlier chunks are dropped."""

ResourceOf = Callable[[int, int, "int | None"], Mapping[str, "str | int"]]


class EncodedRequest(NamedTuple):
    """A message to a receiver."""

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
) -> Iterator[EncodedRequest]:
    """Yield the spans of a table as OTLP requests, parents before children.

    Args:
        con: the engine that holds the table; it can be used for other things between two requests.
        source: table or view with the columns of `xsp.schema.COLUMNS`, and optionally `links`: null, or a JSON array
            of the `[trace_id, span_id]` that a span refers to.
        resource_of: returns the attributes of the resource of a level, a rank and a process.
        max_bytes: maximum size of a request's body. A single span that is larger is sent alone, unsplit; the
            receiver decides whether it is too large.
        max_spans: maximum number of spans of a request.

    Raises:
        TraceError: an id is not hexadecimal, a time is missing or before 1970, `attributes` is not a JSON object.
    """
    spans = Ordered(con, source)
    templates = _Templates(spans)
    header = functools.lru_cache(maxsize=4096)(lambda owner: _resource(resource_of(*owner)))
    try:
        for chunk in spans.chunks():
            yield from _split_requests(_encode(spans, chunk, *templates.of(chunk)), header, max_bytes, max_spans)
    finally:
        spans.close()


class _Templates:
    """A cache of templates, bounded by `TEMPLATE_BYTES`."""

    def __init__(self, spans: Ordered) -> None:
        self._spans = spans
        self._templates: dict[int, Template] = {}
        self._bytes = 0

    def of(self, chunk: Chunk) -> tuple[list[Template], Numbers]:
        """Return the templates of a chunk, and the index of each span's template."""
        distinct, indices = np.unique(chunk.columns["template"], return_inverse=True)
        numbers = distinct.tolist()
        missing = [number for number in numbers if number not in self._templates]
        if missing:
            self._load(missing, numbers)
        return [self._templates[number] for number in numbers], indices

    def _load(self, missing: list[int], current: list[int]) -> None:
        if self._bytes > TEMPLATE_BYTES:
            self._templates = {number: self._templates[number] for number in current if number in self._templates}
            self._bytes = sum(len(entry.body) for entry in self._templates.values())
        for number, entry in self._spans.templates(missing):
            self._templates[number] = entry
            self._bytes += len(entry.body)


# --- a chunk of spans -------------------------------------------------------------------------------------


class _Encoded(NamedTuple):
    """Encoded spans, one after the other."""

    content: bytearray
    ends: Numbers
    """End of each span in the content."""

    owners: list[Owner]
    """Owners of the templates."""

    template_indices: Numbers
    """Index of the template of each span; spans of the same owner are adjacent."""


def _encode(spans: Ordered, chunk: Chunk, templates: Sequence[Template], indices: Numbers) -> _Encoded:
    """Copy the templates and write the numbers into them."""
    bodies = [entry.body for entry in templates]
    copies = map(bodies.__getitem__, indices.tolist())
    lengths = np.array([len(body) for body in bodies])[indices]
    appended = [template.encode_column(name, spans.text(name, chunk)) for name in spans.appended]
    for pieces in appended:
        lengths += np.fromiter(map(len, pieces), np.int64, len(pieces))
    content = bytearray().join(
        itertools.chain.from_iterable(zip(copies, *appended, strict=True)) if appended else copies
    )
    ends = np.cumsum(lengths)
    offsets = np.array([entry.offsets for entry in templates]).T
    for offset, words in zip(offsets, _words(spans, chunk.columns, lengths), strict=True):
        _write(content, words, offset[indices], ends - lengths)
    return _Encoded(content, ends, [entry.owner for entry in templates], indices)


Word = tuple[Numbers, int]
"""Numbers, and the number of bytes of each that are written."""


def _words(spans: Ordered, columns: Mapping[str, Numbers], lengths: Numbers) -> Iterator[Sequence[Word]]:
    """Yield the values for each placeholder of the templates, in their order, as consecutive words."""
    yield _varints(lengths - 5, 4)
    trace = np.searchsorted(spans.traces["number"], columns["trace"])
    for digits in (spans.traces["high"][trace], spans.traces["low"][trace], columns["span"], columns["parent"]):
        yield [(digits.byteswap(), 8)]
    yield [(columns["start"], 8)]
    yield [(columns["start"].view(np.uint64) + columns["dur_ns"].view(np.uint64), 8)]
    yield [(columns[half].byteswap(), 8) for half in ("key_high", "key_low") if spans.has_fixed_keys]
    for count in spans.counts:
        yield [] if count.is_constant else _varints(columns[count.column], count.width)


def _varints(values: Numbers, width: int) -> list[Word]:
    """Return integers as over-long varints: 7 bits per byte, with the continuation bit in all bytes but the last."""
    bits: Numbers = values.view(np.uint64)
    groups = bits & 0x0FFF_FFFF | (bits & 0x00FF_FFFF_F000_0000) << 4
    groups = groups & 0x0000_3FFF_0000_3FFF | (groups & 0x0FFF_C000_0FFF_C000) << 2
    groups = groups & 0x007F_007F_007F_007F | (groups & 0x3F80_3F80_3F80_3F80) << 1
    if width < 10:
        return [(groups | {4: 0x0080_8080, 8: 0x0080_8080_8080_8080}[width], width)]
    last = bits >> 56
    return [(groups | 0x8080_8080_8080_8080, 8), (last & 0x7F | 0x80 | last >> 7 << 8, 2)]


def _write(content: bytearray, words: Sequence[Word], offsets: Numbers, starts: Numbers) -> None:
    """Write words into each span that has a placeholder for them, through a view with overlapping words."""
    present = offsets >= 0
    all_present = bool(present.all())
    positions = starts + offsets if all_present else (starts + offsets)[present]
    for values, size in words:
        view = np.ndarray((len(content) - size + 1,), f"<u{size}", content, strides=(1,))
        view[positions] = values if all_present else values[present]
        positions = positions + size


SCOPE = template.block(1, template.block(1, b"xsp") + template.block(2, template.text(__version__)))
FRAMING_BYTES = 18
"""Maximum bytes of the tags and lengths around the spans of a resource."""


def _resource(attributes: Mapping[str, str | int]) -> bytes:
    """Return a `Resource`, as a field of `ResourceSpans`."""
    return template.block(1, template.attributes(1, attributes))


def _split_requests(
    chunk: _Encoded, header: Callable[[Any], bytes], max_bytes: int, max_spans: int
) -> Iterator[EncodedRequest]:
    """Yield the spans of a chunk as requests within the limits."""
    codes = {owner_codes: code for code, owner_codes in enumerate(dict.fromkeys(chunk.owners))}
    headers = [header(owner_codes) for owner_codes in codes]
    owner_codes = np.array([codes[owner] for owner in chunk.owners])[chunk.template_indices]
    overheads = np.array([len(prefix) + len(SCOPE) + FRAMING_BYTES for prefix in headers])[owner_codes]
    changes = np.flatnonzero(np.diff(owner_codes)) + 1
    lengths = np.diff(chunk.ends, prepend=0)
    start = 0
    while start < len(owner_codes):
        costs = lengths[start : start + max_spans].copy()
        costs[0] += overheads[start]
        inner_changes = changes[(changes > start) & (changes < start + len(costs))]
        costs[inner_changes - start] += overheads[inner_changes]
        stop = start + max(1, int(np.searchsorted(np.cumsum(costs), max_bytes, side="right")))
        bounds = [start, *inner_changes[inner_changes < stop].tolist(), stop]
        parts = [
            (
                headers[owner_codes[first]],
                memoryview(chunk.content)[int(chunk.ends[first - 1]) if first else 0 : int(chunk.ends[last - 1])],
            )
            for first, last in itertools.pairwise(bounds)
        ]
        yield EncodedRequest(
            b"".join(itertools.chain.from_iterable(_resource_spans(*part) for part in parts)), stop - start
        )
        start = stop


def _resource_spans(header: bytes, spans: memoryview) -> tuple[bytes | memoryview, ...]:
    """Return the parts of a `ResourceSpans`."""
    scope = b"\x12" + template.varint(len(SCOPE) + len(spans)) + SCOPE
    return b"\x0a" + template.varint(len(header) + len(scope) + len(spans)), header, scope, spans
