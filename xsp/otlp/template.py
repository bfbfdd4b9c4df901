"""Templates: the bytes of a span without its numbers, encoded once for all spans that agree in the rest.

protobuf allows an integer to take more bytes than necessary. So lengths, times and counts have a fixed width, and the
place of a number depends only on the template.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xsp import semconv
from xsp.errors import TraceError
from xsp.schema import COLUMNS

IDS = ("trace_id", "span_id", "parent_id")
APPENDED_COLUMNS = ("key", "attributes", "links")
"""Text columns that differ in nearly every span; their values are appended to the copy of the template."""

OMITTED = "layer_id"
"""Column that is not sent, because it follows from the parents."""

TEXT = [
    c
    for c in COLUMNS
    if c.type in ("VARCHAR", "SMALLINT", "BOOLEAN", "DOUBLE") and c.name not in (*IDS, *APPENDED_COLUMNS, OMITTED)
]
"""Columns whose values are part of the template."""

COUNTS = [c for c in COLUMNS if c.type in ("INTEGER", "BIGINT") and c.name not in ("start_ns", "process", "rank")]
"""Columns whose values are written into the copies of the template."""

KEY = 16
"""Length in bytes of the keys that xsp makes; if all keys have it, they are written like two numbers."""

FIXED = ("length", "trace_high", "trace_low", "span", "parent", "start", "end", "key")
"""Placeholders of each copy before the counts."""

FLAGS = b"\x85\x01" + (1).to_bytes(4, "little")
"""Sampled, as in W3C Trace Context."""

INTERNAL = b"\x30\x01"
"""The span kind of all spans: for client and server, viewers would expect another process at the other end."""

ERROR = b"\x18\x02"
"""The status code for an error."""

LEVEL = "xsp.level"
ABSENT = -1
Owner = tuple[int, int, "int | None"]
"""Level, rank and process of a span, which determine its resource."""


class Count(NamedTuple):
    """A column of integers, and the range of its values in all spans."""

    column: str
    attribute: str
    low: int
    high: int

    @property
    def is_constant(self) -> bool:
        """Whether all values are equal, so that the value can be part of the template like text."""
        return self.low == self.high

    @property
    def width(self) -> int:
        """Number of bytes in which all values fit, at 7 bits per byte; negative values take ten."""
        return next((size for size in (4, 8) if self.low >= 0 and self.high < 1 << 7 * size), 10)


class Template(NamedTuple):
    """The bytes of a span without its numbers."""

    body: bytes
    offsets: tuple[int, ...]
    """Offsets of the placeholders, in the order of `FIXED` and of the counts; `ABSENT` for those that are left out."""

    owner: Owner


class TemplateLayout(NamedTuple):
    """The head of a template and its placeholders: the same for all spans with the same set of numbers."""

    head: bytes
    offsets: tuple[int, ...]


def layout(parent: bool, key: bool, counts: Sequence[Count | None]) -> TemplateLayout:
    """Return the layout of spans.

    Args:
        parent: whether they have a parent.
        key: whether they have a key of `KEY` bytes.
        counts: the columns of counts; None for those that the spans lack.
    """
    head = bytearray(b"\x12\0\0\0\0\x0a\x10" + bytes(16) + b"\x12\x08" + bytes(8))
    offsets = [1, 7, 15, 25]
    offsets.append(_reserve(head, b"\x22\x08", 8) if parent else ABSENT)
    offsets += [_reserve(head, b"\x39", 8), _reserve(head, b"\x41", 8)]
    offsets.append(_reserve(head, _key_head(KEY), KEY) if key else ABSENT)
    for count in counts:
        if count is None or count.is_constant:
            offsets.append(ABSENT)
        else:
            offsets.append(_reserve(head, _count_head(count.attribute, count.width), count.width))
    head += b"".join(_attribute(count.attribute, count.low) for count in counts if count and count.is_constant)
    return TemplateLayout(bytes(head + FLAGS + INTERNAL), tuple(offsets))


def template(layout: TemplateLayout, texts: Sequence[Any], rank: int, process: int | None) -> Template:
    """Encode the common part of the spans of a template; `texts` are the values of the columns of `TEXT`."""
    parts = [layout.head, block(5, text(texts[_NAME] or ""))]
    parts += [_attribute(name, texts[index]) for index, name in _ATTRIBUTES if texts[index] is not None]
    if texts[_STATUS] not in (None, "ok"):
        # The encoded status of a span that failed or was not closed.
        status = texts[_STATUS]
        kind, _, detail = status.partition(":")
        error_type = attributes(9, {"error.type": detail}) if kind == "error" and detail else b""
        parts.append(error_type + block(15, block(2, text(status)) + ERROR))
    return Template(b"".join(parts), layout.offsets, (texts[_LEVEL], rank, process))


_LEVEL, _NAME, _STATUS = ([c.name for c in TEXT].index(name) for name in ("level", "name", "status"))
_ATTRIBUTES = [(place, c.attribute) for place, c in enumerate(TEXT) if c.attribute is not None]


def _reserve(body: bytearray, tag: bytes, size: int) -> int:
    """Append a tag and a placeholder for a number; return the offset of the placeholder."""
    body += tag
    body += bytes(size)
    return len(body) - size


@functools.lru_cache(maxsize=256)
def _count_head(attribute: str, size: int) -> bytes:
    """Return the bytes before the value of an integer attribute."""
    key = block(1, attribute.encode()) + b"\x12" + varint(1 + size) + b"\x18"
    return b"\x4a" + varint(len(key) + size) + key


def _attribute(attribute: str, value: str | float | bool) -> bytes:
    return _cached_attribute(attribute, value) if _is_short(value) else _encoded_attribute(attribute, value)


def _is_short(value: Any) -> bool:
    """Return whether a value may be cached: the cache limits the number of entries, not their bytes."""
    return not isinstance(value, str) or len(value) < 1000


def _encoded_attribute(key: str, value: str | float | bool) -> bytes:
    converted = semconv.level_name(value) if key == LEVEL and isinstance(value, int) else value
    return block(9, attribute(key, converted))


_cached_attribute = functools.lru_cache(maxsize=4096)(_encoded_attribute)


# --- appended columns -------------------------------------------------------------------------------------


def encode_column(column: str, values: Sequence[str | None]) -> list[bytes]:
    """Return the bytes that a column of `APPENDED_COLUMNS` appends to each span.

    Raises:
        TraceError: attributes are not a JSON object, or links are not pairs of ids.
    """
    encoder, cached = _ENCODERS[column]
    return [cached(value) if _is_short(value) else encoder(value) for value in values]


@functools.lru_cache(maxsize=4096)
def _key_head(length: int) -> bytes:
    """Return the bytes before the value of the attribute `xsp.key`, given the length of the value."""
    value = b"\x0a" + varint(length)
    key = block(1, b"xsp.key") + b"\x12" + varint(len(value) + length) + value
    return b"\x4a" + varint(len(key) + length) + key


def _key(value: str | None) -> bytes:
    if value is None:
        return b""
    content = value.encode()
    return _key_head(len(content)) + content


def _attributes(value: str | None) -> bytes:
    """Return the JSON of the column `attributes` as encoded attributes; names that columns use get a prefix."""
    if value is None:
        return b""
    try:
        flat = semconv.flat(value)
        return attributes(
            9, {semconv.PREFIX + key if key in _COLUMN_NAMES else key: entry for key, entry in flat.items()}
        )
    except (ValueError, AttributeError, RecursionError) as error:
        raise TraceError(f"attributes = {_short(value)}: not a JSON object that can be read ({error})") from error


_COLUMN_NAMES = {*semconv.COLUMN_OF, "error.type"}
"""Names that columns use; a span must not have two attributes of the same name."""


def _links(value: str | None) -> bytes:
    if value is None:
        return b""
    try:
        return links(json.loads(value))
    except (ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"links = {_short(value)}: not a JSON array of [trace_id, span_id] ({error})") from error


def _short(value: str) -> str:
    return value if len(value) <= 100 else value[:100] + "…"


_ENCODERS: Mapping[str, tuple[Callable[[str | None], bytes], Callable[[str | None], bytes]]] = {
    "key": (_key, _key),
    "attributes": (_attributes, functools.lru_cache(maxsize=4096)(_attributes)),
    "links": (_links, functools.lru_cache(maxsize=4096)(_links)),
}
"""The encoder of each column, and the same encoder with a cache."""


# --- wire --------------------------------------------------------------------------------------------------------
# The protobuf wire format of OTLP, as far as spans need it: one value, one attribute, one message at a time.
#
# Templates are built from these functions. Field numbers are those of `opentelemetry/proto`.


DEEPEST = 16
"""Nesting depth from which a value is sent as JSON text: decoders accept at most 100 nested messages."""

_INT64 = range(-(2**63), 2**63)


def varint(value: int) -> bytes:
    """Return an integer of at most 64 bits in base 128, least significant group first."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def block(field: int, content: bytes) -> bytes:
    """Return a field with a string or a message: tag, length, content."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def text(value: str) -> bytes:
    """Return UTF-8; a lone surrogate, which UTF-8 cannot represent, becomes a question mark."""
    return value.encode("utf-8", "replace")


def attribute(key: str, value: Any) -> bytes:
    """Return a `KeyValue`."""
    return block(1, text(key)) + block(2, any_value(value))


def any_value(value: Any, depth: int = 0) -> bytes:
    """Return an `AnyValue` of a JSON value.

    An integer beyond 64 bits is sent as a string of decimal digits, because a double would change it. Null is an
    `AnyValue` without a value.
    """
    if value is None:
        return b""
    if isinstance(value, str):
        return block(1, text(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value) if value in _INT64 else block(1, str(value).encode())
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    if depth >= DEEPEST:
        return block(1, json.dumps(value).encode())
    if isinstance(value, Mapping):
        pairs = (block(1, text(str(key))) + block(2, any_value(element, depth + 1)) for key, element in value.items())
        return block(6, b"".join(block(1, pair) for pair in pairs))
    return block(5, b"".join(block(1, any_value(element, depth + 1)) for element in value))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Return a repeated field of `KeyValue`s: 1 in a resource, 9 in a span."""
    return b"".join(block(field, attribute(key, value)) for key, value in values.items())


def links(targets: Iterable[tuple[str, str]]) -> bytes:
    """Return a span's links to other spans.

    Args:
        targets: trace id and span id of each link, in hexadecimal.

    Raises:
        ValueError: an id is invalid.
    """
    return b"".join(block(13, block(1, _id(trace, 16)) + block(2, _id(span, 8))) for trace, span in targets)


def _id(digits: str, size: int) -> bytes:
    decoded = bytes.fromhex(digits)
    if len(decoded) != size or not any(decoded):
        raise ValueError(f"{digits!r} is not an id of {2 * size} hexadecimal digits")
    return decoded
