"""The wire format of Protocol Buffers, without a schema: the fields of a message with their places in the file.

A reader knows the numbers of the fields that it needs, and passes over all others, so it also reads files of newer
versions. Nothing is copied: a nested message, a text or bytes are a range of the file, which is checked to lie inside
the message around it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAX_BYTES = 1 << 30
"""Maximum size of a file in bytes, decompressed; it is held in memory."""

MAX_TEXT = 4096
"""Maximum bytes of a text; the rest is cut off."""

NUMBER = -1
"""In place of the end of a range, for a field that is a number."""

Field = tuple[int, int, int]
"""The number of a field, and its value and `NUMBER`, or the start and the end of its range."""

_DOUBLE, _FIXED = struct.Struct("<d"), {1: 8, 5: 4}


class WireError(ValueError):
    """The bytes are no message; the text says where and why."""


def fields(data: bytes, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two places.

    Raises:
        WireError: a field is cut off, longer than the message, or of an unknown kind.
    """
    at = start
    while at < end:
        place = at
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, place, end)
        kind = tag & 7
        if not tag >> 3:
            raise WireError(f"byte {place}: a field with the number 0")
        if kind == 0 or kind == 2:
            value, at = _varint(data, at, end)
            if kind == 0:
                yield tag >> 3, value, NUMBER
                continue
            if value > end - at:
                raise WireError(f"byte {place}: a field of {value} bytes where {end - at} are left")
            yield tag >> 3, at, at + value
            at += value
        elif kind in _FIXED:
            size = _FIXED[kind]
            if size > end - at:
                raise WireError(f"byte {place}: a field of {size} bytes where {end - at} are left")
            yield tag >> 3, int.from_bytes(data[at : at + size], "little"), NUMBER
            at += size
        else:
            raise WireError(f"byte {place}: a field of the unknown kind {kind}")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return an unsigned number and the place after it."""
    place, value = at, 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise WireError(f"byte {place}: a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise WireError(f"byte {place}: a number of more than 10 bytes")


def message(data: bytes, low: int, high: int) -> Iterator[Field]:
    """Yield the fields of a field that is a message.

    Raises:
        WireError: it is a number, or as `fields`.
    """
    return fields(data, low, _range_end(low, high))


def text(data: bytes, low: int, high: int) -> str:
    """Return a field that is a text; bytes that are not UTF-8 are replaced.

    Raises:
        WireError: it is a number.
    """
    return data[low : min(_range_end(low, high), low + MAX_TEXT)].decode("utf-8", "replace")


def numbers(data: bytes, low: int, high: int) -> list[int]:
    """Return the unsigned numbers of a repeated field, which may be packed.

    Raises:
        WireError: they are cut off.
    """
    if high == NUMBER:
        return [low]
    found, at = [], low
    while at < high:
        value, at = _varint(data, at, high)
        found.append(value)
    return found


def signed(value: int) -> int:
    """Return a number of 64 bits as a signed one."""
    return value - (1 << 64) if value >> 63 else value


def double(value: int) -> float:
    """Return a number of 64 bits as a floating-point number."""
    return float(_DOUBLE.unpack(value.to_bytes(8, "little"))[0])


def _range_end(low: int, high: int) -> int:
    if high == NUMBER:
        raise WireError(f"a field is the number {low}, and no text or message")
    return high
