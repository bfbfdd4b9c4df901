"""The protobuf wire format of OTLP, as far as spans need it: one value, one attribute, one message at a time.

`xsp.otlp.encode` makes its templates of these. Numbers of fields are those of `opentelemetry/proto`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

DEEPEST = 16
"""Lists and objects inside each other, from where on a value goes as JSON text: decoders give up at 100 messages."""

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
    """Return a field that holds a string or a message: tag, length, content."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def text(value: str) -> bytes:
    """Return UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    return value.encode("utf-8", "replace")


def attribute(key: str, value: Any) -> bytes:
    """Return a `KeyValue`."""
    return block(1, text(key)) + block(2, any_value(value))


def any_value(value: Any, depth: int = 0) -> bytes:
    """Return an `AnyValue` of what JSON can hold.

    An integer beyond 64 bits goes as its decimal digits in a string: a double would change it. Null is an
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
        pairs = (block(1, text(str(key))) + block(2, any_value(each, depth + 1)) for key, each in value.items())
        return block(6, b"".join(block(1, pair) for pair in pairs))
    return block(5, b"".join(block(1, any_value(each, depth + 1)) for each in value))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Return a repeated field of `KeyValue`s: 1 in a resource, 9 in a span."""
    return b"".join(block(field, attribute(key, value)) for key, value in values.items())


def links(targets: Iterable[tuple[str, str]]) -> bytes:
    """Return a span's links to other spans.

    Args:
        targets: trace id and span id of each, in hexadecimal.

    Raises:
        ValueError: one of them is no id.
    """
    return b"".join(block(13, block(1, _id(trace, 16)) + block(2, _id(span, 8))) for trace, span in targets)


def _id(digits: str, size: int) -> bytes:
    found = bytes.fromhex(digits)
    if len(found) != size or not any(found):
        raise ValueError(f"{digits!r} is no id of {2 * size} hexadecimal digits")
    return found
