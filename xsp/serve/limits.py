"""How much a receiver does at a time, so that what is sent to it cannot fill its memory."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from xsp.errors import XspError

CHUNK = 1 << 16


class TooLarge(XspError):
    """A body that is larger than is taken, as sent or decompressed."""


class Broken(XspError):
    """A body that cannot be decompressed."""


class Full(XspError):
    """Too much at once; the same request may be sent again."""


@dataclass(frozen=True)
class Limits:
    """Of a receiver."""

    max_body: int = 64 << 20
    """Bytes of a request, decompressed."""

    connections: int = 64
    """Over HTTP, at a time; over gRPC, requests."""

    seconds: float = 30.0
    """For one request to arrive whole."""


class Room:
    """The bytes of all bodies that are in memory at a time."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Lend room to one request; what it took comes back in the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self._change(share.taken)

    def _change(self, freed: int) -> bool:
        with self._lock:
            if self._free + freed < 0:
                return False
            self._free += freed
            return True


class Share:
    """What one request has of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.taken = 0

    def take(self, size: int) -> None:
        """Take more of it.

        Raises:
            Full: other requests have the rest.
        """
        if not self._room._change(-size):
            raise Full("too many spans at once; send again")
        self.taken += size


def unzipped(content: bytes, most: int, share: Share) -> bytes:
    """Return gzip's content, a piece at a time, so that a small body cannot become a large one unseen.

    Raises:
        TooLarge: it is larger than `most` bytes.
        Broken: it is no gzip, or ends in the middle.
        Full: there is no room for it now.
    """
    found = bytearray()
    rest = content
    while rest:
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not stream.eof:
            try:
                piece = stream.decompress(rest, CHUNK)
            except zlib.error as error:
                raise Broken(f"damaged gzip ({error})") from error
            rest = stream.unconsumed_tail
            if not piece and not rest and not stream.eof:
                raise Broken("the gzip ends in the middle")
            found += piece
            if len(found) > most:
                raise TooLarge(f"more than {most} bytes, decompressed")
            share.take(len(piece))
        rest = stream.unused_data
    return bytes(found)
