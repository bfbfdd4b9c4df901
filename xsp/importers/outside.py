"""The keys before and after the array of trace events in a file of Chrome's JSON format.

The array is found without parsing it: its start after the keys before it, its end by searching backwards from the end
of the file.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsp.errors import TraceError

CHUNK = 1 << 22
"""Bytes that are held in Python at a time."""

MAX_KEY_BYTES = 1 << 26
"""Maximum size in bytes of the keys before the array, and of those after it."""

MAX_SEARCH_BYTES = 1 << 28
"""Maximum number of bytes that are read to find the end of the array; a file that needs more is an attack."""

_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_KEY = re.compile(rb'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_SCALAR = re.compile(rb"[^,}\]\s]+")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_BRACKET = re.compile(rb"\]")
_DECODER = json.JSONDecoder()


@dataclass
class Envelope:
    """The content of a file besides its trace events."""

    keys: dict[str, Any] = field(default_factory=dict)
    """The other top-level keys."""

    is_unclosed: bool = False
    """Whether the closing bracket is missing, as the format allows: the program that wrote the file ended early."""


def read_head(source: str, text: mmap.mmap) -> tuple[int, dict[str, Any]]:
    """Return the start of the array, and the keys before it."""
    offset = _BLANK.match(text).end()  # type: ignore[union-attr]  # it matches always
    keys: dict[str, Any] = {}
    if text[offset : offset + 1] == b"[":
        return offset, keys
    if text[offset : offset + 1] != b"{":
        raise TraceError(f"{source}, byte {offset}: no trace events: not the start of a JSON object or array")
    offset += 1
    limit = offset + MAX_KEY_BYTES
    while (match := _KEY.match(text, offset, limit)) is not None:
        key, offset = _parse(source, match.group(1), match.start(1)), match.end()
        if key == "traceEvents" and text[offset : offset + 1] == b"[":
            return offset, keys
        end = _end_of_value(source, text, offset, limit)
        keys[key] = _parse(source, text[offset:end], offset)
        offset = end
    raise TraceError(f"{source}, byte {offset}: holds no array `traceEvents`, or too much before it")


def _end_of_value(source: str, text: mmap.mmap, offset: int, limit: int) -> int:
    """Return the end of the JSON value that begins at `offset`; it must end before `limit`."""
    if text[offset : offset + 1] not in (b"{", b"[", b'"'):
        match = _SCALAR.match(text, offset, limit)
        return match.end() if match else offset
    depth = 0
    for token in _TOKEN.finditer(text, offset, limit):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token.group(), 0)
        if depth == 0:
            return token.end()
    raise TraceError(f"{source}, byte {offset}: keys before `traceEvents` of more than {MAX_KEY_BYTES >> 20} MiB")


def _parse(source: str, text: bytes, offset: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}, byte {offset}: invalid JSON ({error})") from error


def read_tail(source: str, text: mmap.mmap, start: int, is_bare: bool) -> tuple[int | None, dict[str, Any]]:
    """Return the end of the array that begins at `start`, and the keys after it; None for an unclosed bare array.

    It is the first bracket after which the file is the rest of an object. It is searched in a window at the end of the
    file, which grows until it contains a trace event before the bracket: keys after the array may contain arrays too.
    """
    size, window, budget = len(text), 1 << 12, MAX_SEARCH_BYTES
    if is_bare:
        end = len(text[max(0, size - window) :].rstrip()) + max(0, size - window)
        return (end, {}) if text[end - 1 : end] == b"]" else (None, {})
    while True:
        low = max(start, size - window)
        for end in _ends(text, low):
            keys, bytes_tried = _parse_rest(text, end)
            if (budget := budget - bytes_tried) < 0:
                raise TraceError(f"{source}: holds too many arrays besides `traceEvents`")
            if keys is not None and (low == start or text.find(b'"ph"', low, end) >= 0):
                return end, keys
        if low == start:
            raise TraceError(f"{source}: is truncated after {size} bytes of its content; copy it again")
        window *= 8


def _ends(text: mmap.mmap, low: int) -> Iterator[int]:
    """Yield the positions after closing brackets, from `low` on, in bounded memory: pages read are released."""
    for offset in range(low, len(text), MAX_KEY_BYTES):
        for match in _BRACKET.finditer(text, offset, offset + MAX_KEY_BYTES):
            yield match.end()
        if hasattr(text, "madvise") and offset > low:
            text.madvise(mmap.MADV_DONTNEED, 0, offset - offset % mmap.PAGESIZE)


def _parse_rest(text: mmap.mmap, offset: int) -> tuple[dict[str, Any] | None, int]:
    """Return the keys from `offset` to the end of the file, and the number of bytes that were tried.

    The keys are None if anything but the rest of an object follows. A short piece is tried first: an object that ends
    inside the array is usually short.
    """
    length, bytes_tried = 1 << 9, 0
    while True:
        piece = text[offset : offset + length].decode("utf-8", "replace")
        bytes_tried += length
        if piece.lstrip()[:1] not in ("", ",", "}"):
            return None, 1
        try:
            keys, end = _DECODER.raw_decode('{"":0' + piece)
        except json.JSONDecodeError as error:
            is_cut_off = error.pos >= len(piece) or error.msg.startswith(("Unterminated", "Invalid \\"))
            if not is_cut_off or length > MAX_KEY_BYTES or offset + length >= len(text):
                return None, bytes_tried
            length *= 8
            continue
        except (ValueError, RecursionError):
            return None, bytes_tried
        remainder = piece[end - len('{"":0') :] + _excerpt(text, offset + length)
        return None if remainder.strip() else {key: value for key, value in keys.items() if key}, bytes_tried


def _excerpt(text: mmap.mmap, offset: int) -> str:
    """Return the first bytes from `offset` on, and the end of the file; blank if nothing follows."""
    return (text[offset : offset + 64] + text[max(offset, len(text) - 64) :]).decode("utf-8", "replace")


def end_of_last_event(source: str, copy: Path) -> int:
    """Return the end of the last event of an unclosed array."""
    with open(copy, "rb") as file:
        size = os.path.getsize(copy)
        file.seek(max(0, size - CHUNK))
        text = file.read().rstrip(b", \t\r\n")
    if not text.endswith((b"}", b"[")):
        raise TraceError(f"{source}: is truncated within an event, after {size} bytes of its content; copy it again")
    return max(0, size - CHUNK) + len(text)
