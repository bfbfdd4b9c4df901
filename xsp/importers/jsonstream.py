"""Read the elements of an array in a JSON file one by one, with memory proportional to the largest element."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from xsp.errors import TraceError
from xsp.importers.contract import open_bytes, read_error

CHUNK = 1 << 20
"""Minimum number of bytes that are read at a time."""

MAX_CHARACTERS = 1 << 24
"""Maximum characters of one element, and of a value outside the array; a longer one is damage, or an attack."""

_BLANK = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)  # NaN and infinities are not measured values


def elements(source: str, name: str) -> Iterator[Any]:
    """Yield the elements of an array that the top-level object of a file contains.

    Args:
        source: path of the file, possibly gzip.
        name: the top-level key of the array.

    Raises:
        TraceError: the file cannot be read, is truncated, or has another structure; the message gives the position.
    """
    with open_bytes(Path(source)) as file:
        text = _Text(source, file)
        if text.next() != "{":
            raise text.error("no JSON object begins here")
        text.skip(1)
        while text.next() != "}":
            key = text.value()
            text.skip_separator()
            if key == name and text.next() == "[":
                text.skip(1)
                break
            text.value()
        else:
            raise text.error(f"the object ends without an array {name!r}")
        while text.next() != "]":
            yield text.value()


class _Text:
    """A file that is read sequentially, with a part of it in memory."""

    def __init__(self, source: str, file: IO[bytes]) -> None:
        self._source, self._file = source, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._index, self._consumed, self._is_at_end = "", 0, 0, False

    def next(self) -> str:
        """Return the next character that is neither blank nor a comma."""
        while True:
            match = _BLANK.match(self._buffer, self._index)
            self._index = match.end() if match else self._index
            if self._index < len(self._buffer):
                return self._buffer[self._index]
            if self._is_at_end:
                raise self.error("is truncated; copy it again")
            self._read_more()

    def skip(self, count: int) -> None:
        """Advance by some characters."""
        self._index += count

    def skip_separator(self) -> None:
        """Skip the colon between a key and its value."""
        if self.next() != ":":
            raise self.error("a colon is missing")
        self.skip(1)

    def value(self) -> Any:
        """Return the next value."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._index)
            except RecursionError as error:
                raise self.error("nested too deeply") from error
            except json.JSONDecodeError as error:
                if self._is_at_end:
                    self._index = error.pos
                    raise self.error(f"invalid JSON, or cut off ({error.msg})") from error
            except ValueError as error:
                raise self.error(f"a value that cannot be read ({error})") from error
            else:
                if end < len(self._buffer) or self._is_at_end:
                    self._index = end
                    return value
            if len(self._buffer) - self._index > MAX_CHARACTERS:
                raise self.error(f"invalid JSON, or a value of more than {MAX_CHARACTERS >> 20} MiB")
            self._read_more()

    def error(self, reason: str) -> TraceError:
        """Return a TraceError with the reason and the current position."""
        return TraceError(f"{self._source}, character {self._consumed + self._index}: {reason}")

    def _read_more(self) -> None:
        """Drop the consumed text and read on, at least doubling the rest, so that long values are not parsed often."""
        try:
            chunk = self._file.read(max(CHUNK, len(self._buffer) - self._index))
            text = self._decoder.decode(chunk, final=not chunk)
        except (EOFError, OSError, zlib.error) as error:
            raise read_error(self._source, error, f"character {self._consumed + self._index}") from error
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8 ({error.reason})") from error
        self._is_at_end = not chunk
        self._consumed += self._index
        self._buffer, self._index = self._buffer[self._index :] + text, 0
