"""The trace events of a Chrome JSON file, read into tables of the engine in bounded memory.

The format is an object with the array `traceEvents` among other keys, or that array alone, whose closing bracket may
be missing. The engine reads an array of objects quickly, but on one core, and not inside an object. So while the file
is decompressed it is cut where one event ends and another begins, and the pieces are read side by side, each as an
array of its own. A cut in the wrong place leaves brackets open, which cannot be read: then the file is read again in
one piece, and places in it are places in the file.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers.contract import broken, opened

CHUNK = 1 << 22
"""Bytes that are in Python at a time."""

PIECE = 1 << 25
"""Bytes of a piece, about; the first ones are smaller, so that all cores are soon at work."""

FIRST = 1 << 23
"""Bytes of the first piece; each further one is twice as long, up to `PIECE`."""

WORKERS = max(2, min(4, os.cpu_count() or 1))
"""Pieces that are read at a time; each takes some 100 MB of memory."""

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
_SEAM = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp)"\s*:)')


@dataclass
class Around:
    """What stands in a file beside its trace events."""

    keys: dict[str, Any] = field(default_factory=dict)
    """The other top-level keys."""

    open: bool = False
    """Whether the array was not closed: who wrote it ended early, as the format allows."""


class Taker(Protocol):
    """What becomes of trace events. They come in portions, in any order, from several threads."""

    args: ClassVar[str]
    """SQL of what is kept of `args`, which is JSON; other columns of the format may be used."""

    more: ClassVar[Mapping[str, str]]
    """SQL of further columns, by name; a later one may use an earlier one."""

    def begin(self, con: duckdb.DuckDBPyConnection, before: Mapping[str, Any]) -> None:
        """Make the tables that are filled, in place of those that are there.

        Args:
            con: an engine.
            before: top-level keys that stand before the events.
        """
        ...

    def take(self, con: duckdb.DuckDBPyConnection) -> None:
        """Move what is needed of the table `portion` into them.

        Its columns are `number` (which rises with the place in the file), those of the format as text (`ph`, `cat`,
        `name`, `pid`, `tid`, `id`, `bp`), `ts_ns` and `dur_ns` (nanoseconds as BIGINT; null where there is no such
        number), `args`, and `more`.
        """
        ...


class Events:
    """Takes all events, into the table `events`."""

    args: ClassVar[str] = "args"
    more: ClassVar[Mapping[str, str]] = {}

    def begin(self, con: duckdb.DuckDBPyConnection, before: Mapping[str, Any]) -> None:
        """Remove a table of that name."""
        con.execute("DROP TABLE IF EXISTS events")

    def take(self, con: duckdb.DuckDBPyConnection) -> None:
        """Append a portion."""
        con.execute("CREATE TABLE IF NOT EXISTS events AS FROM portion LIMIT 0")
        con.execute("INSERT INTO events FROM portion")


def read(con: duckdb.DuckDBPyConnection, source: str, taker: Taker) -> Around:
    """Let the trace events of a file be taken.

    Args:
        con: an engine.
        source: path of a file, perhaps gzip.
        taker: of the events; it may have to begin twice.

    Raises:
        TraceError: it cannot be read, or is no such JSON; with the place.
    """
    try:
        return _read(con, source, taker, PIECE)
    except _CutWrongly:
        return _read(con, source, taker, None)


class _CutWrongly(Exception):
    """One of several pieces could not be read."""


def _read(con: duckdb.DuckDBPyConnection, source: str, taker: Taker, size: int | None) -> Around:
    with tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True) as folder, opened(Path(source)) as file:
        first = _more(source, file, folder, 0)
        exact = _is_exact(first)
        rest = _chunks(source, file, folder, len(first))
        chunks = itertools.chain([first], rest)
        pieces = _pieces(chunks if exact else _times_as_text(chunks), Path(folder), size)
        reading = _Reading(con, source, taker, exact)
        try:
            reading.all(pieces)
        except (TraceError, duckdb.Error) as error:
            if reading.pieces > 1:
                raise _CutWrongly from error
            raise
    return reading.around


# --- pieces -----------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A part of a file that was decompressed, as an array; the first and the last hold what stands around it."""

    path: Path
    place: int
    """Of its first byte in the file."""

    first: bool
    last: bool


def _chunks(source: str, file: IO[bytes], folder: str, done: int) -> Iterator[bytes]:
    """Yield the rest of a file, decompressed."""
    while text := _more(source, file, folder, done):
        yield text
        done += len(text)


def _more(source: str, file: IO[bytes], folder: str, done: int) -> bytes:
    """Read a chunk."""
    if shutil.disk_usage(folder).free < SPARE:
        raise TraceError(
            f"{source}: decompresses to more than the disk holds ({done >> 20} MiB so far); "
            "set TMPDIR to a larger one if the file is what you think it is"
        )
    try:
        return file.read(CHUNK)
    except (EOFError, OSError, zlib.error) as error:
        raise broken(source, error, f"after {done} bytes of its content") from error


def _is_exact(text: bytes) -> bool:
    """Return whether doubles hold the times of a file that begins so."""
    fine = _FINE.search(text)
    return fine is None or int(fine.group(1)) < EXACT


def _times_as_text(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks with quotes around times, so that no digit of them is lost."""
    held = b""
    for text in chunks:
        held += text
        keep = held.rfind(b",") + 1 if len(held) < MOST_IN_ONE else len(held)  # no number is cut in two
        yield _TIME.sub(rb'\1"\2"', held[:keep])
        held = held[keep:]
    yield _TIME.sub(rb'\1"\2"', held)


def _pieces(chunks: Iterable[bytes], folder: Path, size: int | None) -> Iterator[_Piece]:
    """Write pieces of up to about a size (None: one of all), and yield each when it is written."""
    place = number = 0
    path = folder / "0.json"
    out = open(path, "wb")  # noqa: SIM115 (closed below, whichever it is then)
    try:
        for text in chunks:
            seam = _SEAM.search(text) if size and out.tell() >= min(size, FIRST << number) else None
            if seam is None:
                out.write(text)
                continue
            out.write(text[: seam.start() + 1])
            end = place + out.tell()
            out.write(b"]")
            out.close()
            yield _Piece(path, place, first=number == 0, last=False)
            place, number, path = end, number + 1, folder / f"{number + 1}.json"
            out = open(path, "wb")  # noqa: SIM115
            out.write(b"[" + text[seam.end() :])
    finally:
        out.close()
    yield _Piece(path, place, first=number == 0, last=True)


class _Reading:
    """The pieces of one file, read side by side."""

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str, taker: Taker, exact: bool) -> None:
        self.around = Around()
        self.pieces = 0
        self._con, self._source, self._taker, self._exact = con, source, taker, exact
        self._bare = False

    def all(self, pieces: Iterable[_Piece]) -> None:
        """Read them; some are read while others are still to come."""
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WORKERS) as pool:
            for piece in pieces:
                self.pieces += 1
                self._isolate(piece)
                if piece.first:
                    self._taker.begin(self._con, self.around.keys)
                if piece.first:
                    self._taker.begin(self._con, self.around.keys)
                waiting.append(pool.submit(self._take, piece, table.cursor(self._con)))
                while len(waiting) > WORKERS:
                    waiting.popleft().result()
            for each in waiting:
                each.result()

    def _take(self, piece: _Piece, con: duckdb.DuckDBPyConnection) -> None:
        with con:
            _load(con, self._source, piece, self._taker, self._exact)
            piece.path.unlink()
            self._taker.take(con)

    def _isolate(self, piece: _Piece) -> None:
        """Leave nothing in a piece but the array; keep what else there was."""
        if not (piece.first or piece.last):
            return
        if not os.path.getsize(piece.path):
            raise TraceError(f"{self._source}: is empty")
        with open(piece.path, "rb+") as file:
            with mmap.mmap(file.fileno(), 0) as text:
                start = 0
                if piece.first:
                    start, self.around.keys = _before(self._source, text)
                    self._bare = text[:start].strip(b"\xef\xbb\xbf \t\r\n") == b""
                end = self._end(text, start) if piece.last else len(text)
                text[:start] = b" " * start
            file.seek(end if end is not None else _last(self._source, piece.path))
            file.truncate()
            if end is None:
                self.around.open = True
                file.write(b"]")

    def _end(self, text: mmap.mmap, start: int) -> int | None:
        """Return where the array ends, None if it is not closed; keep the keys after it."""
        end, after = _after(self._source, text, start, self._bare)
        self.around.keys |= after
        return end


# --- around the array -------------------------------------------------------------------------------------


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


def _load(con: duckdb.DuckDBPyConnection, source: str, piece: _Piece, taker: Taker, exact: bool) -> None:
    """Let the engine read the array of a piece, into the table `portion`."""
    time = "DOUBLE" if exact else "VARCHAR"
    columns = {**_KINDS, "ts": time, "dur": time, "args": "JSON"}
    shown = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    wanted = {"args": taker.args, **taker.more}
    try:
        con.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE portion AS
            SELECT row_number() OVER () - 1 + {piece.place} AS number, {", ".join(_KINDS)},
                   {_nanoseconds("ts", exact)} AS ts_ns, {_nanoseconds("dur", exact)} AS dur_ns,
                   {", ".join(f"{value} AS {name}" for name, value in wanted.items())}
            FROM read_json({table.literal(str(piece.path))}, format = 'array', columns = {{{shown}}},
                           maximum_object_size = {MOST_IN_ONE})
            """
        )
    except duckdb.Error as error:
        reason = str(error).splitlines()[0].replace(str(piece.path), Path(source).name)
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
