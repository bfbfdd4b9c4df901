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

MOST_AROUND = 1 << 26
"""Maximum size in bytes of the keys before the array, and of those after it."""

MOST_TRIED = 1 << 28
"""Maximum number of bytes that are read to find the end of the array; a file that needs more is an attack."""

_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_KEY = re.compile(rb'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_SCALAR = re.compile(rb"[^,}\]\s]+")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_BRACKET = re.compile(rb"\]")
_DECODER = json.JSONDecoder()


@dataclass
class Around:
    """The content of a file besides its trace events."""

    keys: dict[str, Any] = field(default_factory=dict)
    """The other top-level keys."""

    open: bool = False
    """Whether the closing bracket is missing, as the format allows: the program that wrote the file ended early."""


def before(source: str, text: mmap.mmap) -> tuple[int, dict[str, Any]]:
    """Return the start of the array, and the keys before it."""
    place = _BLANK.match(text).end()  # type: ignore[union-attr]  # it matches always
    keys: dict[str, Any] = {}
    if text[place : place + 1] == b"[":
        return place, keys
    if text[place : place + 1] != b"{":
        raise TraceError(f"{source}, byte {place}: no trace events: not the start of a JSON object or array")
    place += 1
    most = place + MOST_AROUND
    while (found := _KEY.match(text, place, most)) is not None:
        key, place = _parsed(source, found.group(1), found.start(1)), found.end()
        if key == "traceEvents" and text[place : place + 1] == b"[":
            return place, keys
        end = _end_of_value(source, text, place, most)
        keys[key] = _parsed(source, text[place:end], place)
        place = end
    raise TraceError(f"{source}, byte {place}: holds no array `traceEvents`, or too much before it")


def _end_of_value(source: str, text: mmap.mmap, place: int, most: int) -> int:
    """Return the end of the JSON value that begins at `place`; it must end before `most`."""
    if text[place : place + 1] not in (b"{", b"[", b'"'):
        found = _SCALAR.match(text, place, most)
        return found.end() if found else place
    depth = 0
    for token in _TOKEN.finditer(text, place, most):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token.group(), 0)
        if depth == 0:
            return token.end()
    raise TraceError(f"{source}, byte {place}: keys before `traceEvents` of more than {MOST_AROUND >> 20} MiB")


def _parsed(source: str, text: bytes, place: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}, byte {place}: invalid JSON ({error})") from error


def after(source: str, text: mmap.mmap, start: int, bare: bool) -> tuple[int | None, dict[str, Any]]:
    """Return the end of the array that begins at `start`, and the keys after it; None for an unclosed bare array.

    It is the first bracket after which the file is the rest of an object. It is searched in a window at the end of the
    file, which grows until it contains a trace event before the bracket: keys after the array may contain arrays too.
    """
    size, window, left = len(text), 1 << 12, MOST_TRIED
    if bare:
        end = len(text[max(0, size - window) :].rstrip()) + max(0, size - window)
        return (end, {}) if text[end - 1 : end] == b"]" else (None, {})
    while True:
        low = max(start, size - window)
        for end in _ends(text, low):
            keys, tried = _rest(text, end)
            if (left := left - tried) < 0:
                raise TraceError(f"{source}: holds too many arrays besides `traceEvents`")
            if keys is not None and (low == start or text.find(b'"ph"', low, end) >= 0):
                return end, keys
        if low == start:
            raise TraceError(f"{source}: is truncated after {size} bytes of its content; copy it again")
        window *= 8


def _ends(text: mmap.mmap, low: int) -> Iterator[int]:
    """Yield the positions after closing brackets, from `low` on, in bounded memory: pages read are released."""
    for at in range(low, len(text), MOST_AROUND):
        for found in _BRACKET.finditer(text, at, at + MOST_AROUND):
            yield found.end()
        if hasattr(text, "madvise") and at > low:
            text.madvise(mmap.MADV_DONTNEED, 0, at - at % mmap.PAGESIZE)


def _rest(text: mmap.mmap, place: int) -> tuple[dict[str, Any] | None, int]:
    """Return the keys from `place` to the end of the file, and the number of bytes that were tried.

    The keys are None if anything but the rest of an object follows. A short piece is tried first: an object that ends
    inside the array is usually short.
    """
    held, tried = 1 << 9, 0
    while True:
        piece = text[place : place + held].decode("utf-8", "replace")
        tried += held
        if piece.lstrip()[:1] not in ("", ",", "}"):
            return None, 1
        try:
            keys, end = _DECODER.raw_decode('{"":0' + piece)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(piece) or error.msg.startswith(("Unterminated", "Invalid \\"))
            if not cut or held > MOST_AROUND or place + held >= len(text):
                return None, tried
            held *= 8
            continue
        except (ValueError, RecursionError):
            return None, tried
        more = piece[end - len('{"":0') :] + _head(text, place + held)
        return None if more.strip() else {key: value for key, value in keys.items() if key}, tried


def _head(text: mmap.mmap, place: int) -> str:
    """Return the first bytes from `place` on, and the end of the file; blank if nothing follows."""
    return (text[place : place + 64] + text[max(place, len(text) - 64) :]).decode("utf-8", "replace")


def last(source: str, copy: Path) -> int:
    """Return the end of the last event of an unclosed array."""
    with open(copy, "rb") as file:
        size = os.path.getsize(copy)
        file.seek(max(0, size - CHUNK))
        text = file.read().rstrip(b", \t\r\n")
    if not text.endswith((b"}", b"[")):
        raise TraceError(f"{source}: is truncated within an event, after {size} bytes of its content; copy it again")
    return max(0, size - CHUNK) + len(text)
