"""The trace events of a Chrome JSON file, read into a table of the engine in bounded memory.

The format is an object with the array `traceEvents` among other keys, or that array alone, whose closing bracket may
be missing. The engine reads an array of objects quickly, in parallel, and a piece at a time, but not inside an object.
So it is given a copy of the file, decompressed, in which what stands before the array is blank and what follows is cut
off: places in the copy are places in the file.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers.contract import broken, opened

CHUNK = 1 << 22
"""Bytes that are in Python at a time."""

MOST_AROUND = 1 << 26
"""Bytes that the keys before the array, or after it, may take."""

MOST_IN_ONE = 1 << 24
"""Bytes of one trace event; a longer one is damage, or an attack."""

SPARE = 1 << 30
"""Bytes that stay free on the disk; a file that would take them is refused."""

EXACT = 2**43
"""Microseconds up to which a double still tells nanoseconds apart."""

_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_KEY = re.compile(rb'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_SCALAR = re.compile(rb"[^,}\]\s]+")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_BRACKET = re.compile(rb"\]")
_DECODER = json.JSONDecoder()
_FINE = re.compile(rb'"ts"\s*:\s*-?(\d{13,})\.\d')
_TIME = re.compile(rb'("(?:ts|dur)"\s*:\s*)(-?\d[\d.eE+-]*)')


@dataclass
class Around:
    """What stands in a file beside its trace events."""

    keys: dict[str, Any] = field(default_factory=dict)
    """The other top-level keys."""

    open: bool = False
    """Whether the array was not closed: who wrote it ended early, as the format allows."""


def read(
    con: duckdb.DuckDBPyConnection, source: str, args: str = "args", more: Mapping[str, str] | None = None
) -> Around:
    """Make the table `events` of a file's trace events.

    Its columns are `number` (the place in the file, from 0), those of the format as text (`ph`, `cat`, `name`, `pid`,
    `tid`, `id`, `bp`), `ts_ns` and `dur_ns` (nanoseconds as BIGINT; null where there is no such number), and `args`.

    Args:
        con: an engine.
        source: path of a file, perhaps gzip.
        args: SQL of what is kept of `args`, which is JSON; other columns of the format may be used.
        more: SQL of further columns, by name; a later one may use an earlier one.

    Raises:
        TraceError: it cannot be read, or is no such JSON; with the place.
    """
    with tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "events.json"
        with opened(Path(source)) as file:
            exact = _copy(source, file, copy)
        around = _isolate(source, copy)
        _load(con, source, copy, {"args": args, **(more or {})}, exact)
    return around


# --- the copy ---------------------------------------------------------------------------------------------


def _copy(source: str, file: IO[bytes], copy: Path) -> bool:
    """Decompress a file; return whether doubles hold its times exactly. Where not, they become text in the copy."""
    with open(copy, "wb") as out:
        text = _more(source, file, out)
        fine = _FINE.search(text)
        exact = fine is None or int(fine.group(1)) < EXACT
        held = b""
        while text:
            if exact:
                out.write(text)
            else:
                held += text
                keep = held.rfind(b",") + 1 if len(held) < MOST_IN_ONE else len(held)  # no number is cut in two
                out.write(_TIME.sub(rb'\1"\2"', held[:keep]))
                held = held[keep:]
            text = _more(source, file, out)
        out.write(_TIME.sub(rb'\1"\2"', held))
    return exact


def _more(source: str, file: IO[bytes], out: IO[bytes]) -> bytes:
    """Read a chunk."""
    if shutil.disk_usage(os.path.dirname(out.name)).free < SPARE:
        raise TraceError(
            f"{source}: decompresses to more than the disk holds ({out.tell() >> 20} MiB so far); "
            "set TMPDIR to a larger one if the file is what you think it is"
        )
    try:
        return file.read(CHUNK)
    except (EOFError, OSError, zlib.error) as error:
        raise broken(source, error, f"after {out.tell()} bytes of its content") from error


def _isolate(source: str, copy: Path) -> Around:
    """Leave nothing in the copy but the array, where it was; return what else there was."""
    with open(copy, "rb+") as file:
        if not os.path.getsize(copy):
            raise TraceError(f"{source}: is empty")
        with mmap.mmap(file.fileno(), 0) as text:
            start, keys = _before(source, text)
            end, after = _after(source, text, start, bare=text[:start].strip(b"\xef\xbb\xbf \t\r\n") == b"")
            text[:start] = b" " * start
        closed = end is not None
        file.seek(end if end is not None else _last(source, copy))
        file.truncate()
        if not closed:
            file.write(b"]")
    return Around({**keys, **after}, open=not closed)


def _before(source: str, text: mmap.mmap) -> tuple[int, dict[str, Any]]:
    """Return where the array begins, and the keys before it."""
    place = _BLANK.match(text).end()  # type: ignore[union-attr]  # it matches always
    keys: dict[str, Any] = {}
    if text[place : place + 1] == b"[":
        return place, keys
    if text[place : place + 1] != b"{":
        raise TraceError(f"{source}, byte {place}: no trace events: a JSON object or array begins otherwise")
    place += 1
    while (found := _KEY.match(text, place, place + MOST_AROUND)) is not None:
        key, place = _parsed(source, found.group(1), found.start(1)), found.end()
        if key == "traceEvents" and text[place : place + 1] == b"[":
            return place, keys
        end = _end_of_value(source, text, place)
        keys[key] = _parsed(source, text[place:end], place)
        place = end
    raise TraceError(f"{source}, byte {place}: holds no array `traceEvents`")


def _end_of_value(source: str, text: mmap.mmap, place: int) -> int:
    """Return where the JSON value ends that begins at a place."""
    if text[place : place + 1] not in (b"{", b"[", b'"'):
        found = _SCALAR.match(text, place)
        return found.end() if found else place
    depth = 0
    for token in _TOKEN.finditer(text, place, place + MOST_AROUND):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token.group(), 0)
        if depth == 0:
            return token.end()
    raise TraceError(f"{source}, byte {place}: a value that does not end within {MOST_AROUND >> 20} MiB")


def _parsed(source: str, text: bytes, place: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{source}, byte {place}: invalid JSON ({error})") from error


def _after(source: str, text: mmap.mmap, start: int, bare: bool) -> tuple[int | None, dict[str, Any]]:
    """Return where the array ends that begins at a place, and the keys after it; for a bare one not closed, None.

    Its bracket is the first one from which on the rest of the file is the rest of an object. It is sought from the end
    of the file backwards, further and further, until a trace event stands before it: keys after it may hold arrays.
    """
    size, window = len(text), 1 << 12
    if bare:
        end = len(text[max(0, size - window) :].rstrip()) + max(0, size - window)
        return (end, {}) if text[end - 1 : end] == b"]" else (None, {})
    while True:
        low = max(start, size - window)
        for end in _ends(text, low):
            keys = _rest(text, end)
            if keys is not None and (low == start or text.find(b'"ph"', low, end) >= 0):
                return end, keys
        if low == start:
            raise TraceError(f"{source}: ends in the middle, after {size} bytes of its content; copy it again")
        window *= 8


def _ends(text: mmap.mmap, low: int) -> Iterator[int]:
    """Yield where arrays may end, from a place on, in bounded memory: pages that were passed are let go."""
    for at in range(low, len(text), MOST_AROUND):
        for found in _BRACKET.finditer(text, at, at + MOST_AROUND):
            yield found.end()
        if hasattr(text, "madvise") and at > low:
            text.madvise(mmap.MADV_DONTNEED, 0, at - at % mmap.PAGESIZE)


def _rest(text: mmap.mmap, place: int) -> dict[str, Any] | None:
    """Return the keys from a place on to the end of the file, or None if the rest of an object is not all that follows.

    A little is tried first: an object that ends early, inside of the array, is most often short.
    """
    held = 1 << 9
    while True:
        piece = text[place : place + held].decode("utf-8", "replace")
        if piece.lstrip()[:1] not in ("", ",", "}"):
            return None
        try:
            keys, end = _DECODER.raw_decode('{"":0' + piece)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(piece) or error.msg.startswith(("Unterminated", "Invalid \\"))
            if not cut or held > MOST_AROUND or place + held >= len(text):
                return None
            held *= 8
            continue
        except (ValueError, RecursionError):
            return None
        more = piece[end - len('{"":0') :] + _head(text, place + held)
        return None if more.strip() else {key: value for key, value in keys.items() if key}


def _head(text: mmap.mmap, place: int) -> str:
    """Return a little of what stands from a place on, and the end of the file: blank where nothing more comes."""
    return (text[place : place + 64] + text[max(place, len(text) - 64) :]).decode("utf-8", "replace")


def _last(source: str, copy: Path) -> int:
    """Return where the last event ends of an array that is not closed."""
    with open(copy, "rb") as file:
        size = os.path.getsize(copy)
        file.seek(max(0, size - CHUNK))
        text = file.read().rstrip(b", \t\r\n")
    if not text.endswith((b"}", b"[")):
        raise TraceError(f"{source}: ends in the middle of an event, after {size} bytes of its content; copy it again")
    return max(0, size - CHUNK) + len(text)


# --- the table --------------------------------------------------------------------------------------------

_KINDS = {"ph": "VARCHAR", "cat": "VARCHAR", "name": "VARCHAR", "pid": "VARCHAR", "tid": "VARCHAR", "id": "VARCHAR",
          "bp": "VARCHAR"}  # fmt: skip


def _load(con: duckdb.DuckDBPyConnection, source: str, copy: Path, more: Mapping[str, str], exact: bool) -> None:
    """Let the engine read the array."""
    time = "DOUBLE" if exact else "VARCHAR"
    columns = {**_KINDS, "ts": time, "dur": time, "args": "JSON"}
    shown = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    try:
        con.execute(
            f"""
            CREATE OR REPLACE TABLE events AS
            SELECT row_number() OVER () - 1 AS number, {", ".join(_KINDS)},
                   {_nanoseconds("ts", exact)} AS ts_ns, {_nanoseconds("dur", exact)} AS dur_ns,
                   {", ".join(f"{value} AS {name}" for name, value in more.items())}
            FROM read_json({table.literal(str(copy))}, format = 'array', columns = {{{shown}}},
                           maximum_object_size = {MOST_IN_ONE})
            """
        )
    except duckdb.Error as error:
        reason = str(error).splitlines()[0].replace(str(copy), Path(source).name)
        raise TraceError(f"{source}: the array `traceEvents` cannot be read ({reason})") from error


def _nanoseconds(name: str, exact: bool) -> str:
    """Return the SQL of a time in microseconds as nanoseconds; null where it is no number, or out of range."""
    if not exact:
        return f"TRY_CAST(round(TRY_CAST({name} AS DECIMAL(38, 6)) * 1000) AS BIGINT)"
    # whole microseconds and the rest apart: their product with 1000 may be more than a double holds
    whole = f"TRY_CAST(trunc({name}) AS BIGINT)"
    return (
        f"CASE WHEN abs({name}) < 9e15 THEN {whole} * 1000 + CAST(round(({name} - trunc({name})) * 1000) AS BIGINT) END"
    )
