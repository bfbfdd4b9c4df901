"""Limits of the concurrent work of a receiver, so that requests cannot fill its memory."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xsp.connections import ConnectionLimits
from xsp.errors import XspError

CHUNK = 1 << 16

MIN_CHECKED_BYTES = 2 << 20
"""Bytes of a protobuf body up to which its objects are not counted; an empty one has two, and a hundred in memory."""

MAX_OBJECTS = 1_000_000
"""Maximum messages, or JSON objects, in one request: some 20,000 spans with their attributes reach it."""

MAX_VALUES = 4 * MAX_OBJECTS
"""Maximum JSON values in one request."""


class BodyTooLarge(XspError):
    """A body that is larger than the limit, as sent or decompressed."""


class DamagedBody(XspError):
    """A body that cannot be decompressed."""


class MemoryFull(XspError):
    """Too many bytes in memory at a time; the same request may be sent again."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a receiver."""

    max_body: int = 64 << 20
    """Bytes of a request, decompressed."""

    clients: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Limits of connections over HTTP; over gRPC, of concurrent requests."""


class MemoryBudget:
    """A budget for the bytes of all bodies that are in memory at a time."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Yield the share of one request; its bytes are freed on exit."""
        share = Share(self)
        try:
            yield share
        finally:
            self._change(share.acquired)

    def _change(self, freed: int) -> bool:
        with self._lock:
            if self._free + freed < 0:
                return False
            self._free += freed
            return True


class Share:
    """The bytes that one request takes from the budget."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.acquired = 0

    def acquire(self, size: int) -> None:
        """Take more bytes.

        Raises:
            MemoryFull: other requests take the rest.
        """
        if not self._budget._change(-size):
            raise MemoryFull("too many spans at once; send again")
        self.acquired += size


def gunzip(content: bytes, limit: int, share: Share) -> bytes:
    """Return decompressed gzip content, piece by piece, so that a small body cannot exceed the limit before a check.

    Raises:
        BodyTooLarge: the content is larger than `limit` bytes.
        DamagedBody: it is not gzip, or ends in the middle.
        MemoryFull: there is no room for it now.
    """
    output = bytearray()
    remaining = content
    while remaining:
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not stream.eof:
            try:
                piece = stream.decompress(remaining, CHUNK)
            except zlib.error as error:
                raise DamagedBody(f"damaged gzip ({error})") from error
            remaining = stream.unconsumed_tail
            if not piece and not remaining and not stream.eof:
                raise DamagedBody("the gzip is truncated")
            output += piece
            if len(output) > limit:
                raise BodyTooLarge(f"more than {limit} bytes, decompressed")
            share.acquire(len(piece))
        remaining = stream.unused_data
    return bytes(output)


# --- contents ---------------------------------------------------------------------------------------------------

_ANY: dict[int, Any] = {}
_PAIR = {2: _ANY}
_ANY |= {5: {1: _ANY}, 6: {1: _PAIR}}
_SPAN = {9: _PAIR, 11: {3: _PAIR}, 13: {4: _PAIR}, 15: {}}
_REQUEST = {1: {1: {1: _PAIR}, 2: {1: {3: _PAIR}, 2: _SPAN}}}
"""Numbers of the fields that hold messages in an `ExportTraceServiceRequest`, with those of the fields inside."""


def check_protobuf(body: bytes) -> None:
    """Count the messages in a request before they become objects, if it is larger than `MIN_CHECKED_BYTES`.

    Raises:
        BodyTooLarge: there are more than `MAX_OBJECTS`.
    """
    if len(body) <= MIN_CHECKED_BYTES:
        return
    count = 0
    pending: list[tuple[int, int, dict[int, Any]]] = [(0, len(body), _REQUEST)]
    try:
        while pending:
            offset, end, fields = pending.pop()
            while offset < end:
                tag, offset = _varint(body, offset)
                kind = tag & 7
                if kind == 2:
                    size, offset = _varint(body, offset)
                    subfields = fields.get(tag >> 3)
                    if subfields is not None:
                        count += 1
                        if size:
                            pending.append((offset, min(offset + size, end), subfields))
                    offset += size
                elif kind == 0:
                    _, offset = _varint(body, offset)
                else:
                    offset += {1: 8, 5: 4}.get(kind, end)
                if count > MAX_OBJECTS:
                    raise BodyTooLarge(f"more than {MAX_OBJECTS} spans and attributes; send smaller requests")
    except IndexError:
        return  # cut off: decoding reports the place


def _varint(body: bytes, offset: int) -> tuple[int, int]:
    """Return a variable-length integer, and the position after it."""
    byte = body[offset]
    if byte < 0x80:
        return byte, offset + 1
    value = shift = 0
    while True:
        byte = body[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80 or shift > 63:
            return value, offset


def check_json(body: bytes) -> None:
    """Count the objects and values in a request before they are created; braces and commas in texts count too.

    Raises:
        BodyTooLarge: there are more than `MAX_OBJECTS` or `MAX_VALUES`.
    """
    objects = body.count(b"{") + body.count(b"[")
    if objects > MAX_OBJECTS or objects + body.count(b",") > MAX_VALUES:
        raise BodyTooLarge(f"more than {MAX_OBJECTS} spans and attributes; send smaller requests")
