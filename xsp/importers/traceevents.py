"""The trace events of a Chrome JSON file, read into tables of the engine in bounded memory.

The format is an object with the array `traceEvents` among other keys, or that array alone, whose closing bracket may
be missing. The engine reads an array of objects quickly, but on one core, and not inside an object. So while the file
is decompressed it is cut where one event ends and another begins, and the pieces are read side by side, each as an
array of its own. A cut in the wrong place leaves brackets open, which cannot be read: then the file is read again in
one piece, and places in it are places in the file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

import duckdb

from xsp import table
from xsp.errors import TraceError
from xsp.importers import outside
from xsp.importers.contract import broken, fitting, opened
from xsp.importers.outside import CHUNK, Around

PIECE = 1 << 25
"""Bytes of a piece, about; the first ones are smaller, so that all cores are soon at work."""

FIRST = 1 << 23
"""Bytes of the first piece; each further one is twice as long, up to `PIECE`."""

WORKERS = max(2, min(4, os.cpu_count() or 1))
"""Pieces that are read at a time; each takes some 100 MB of memory."""

MOST_IN_ONE = 1 << 24
"""Bytes of one trace event; a longer one is damage, or an attack."""

SPARE = 1 << 30
"""Bytes that stay free on the disk; a file that would take them is refused."""

EXACT = 2**43
"""Microseconds up to which a double still tells nanoseconds apart."""

_FINE = re.compile(rb'"ts"\s*:\s*-?(\d{13,})\.\d')
_TIME = re.compile(rb'("(?:ts|dur)"\s*:\s*)(-?\d[\d.eE+-]*)')
_SEAM = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp)"\s*:)')


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
            with fitting(source):
                reading.all(pieces)
        except (TraceError, duckdb.Error) as error:
            if reading.several:
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
        self.several = False
        """Whether the file was cut."""

        self._con, self._source, self._taker, self._exact = con, source, taker, exact
        self._bare = False

    def all(self, pieces: Iterable[_Piece]) -> None:
        """Read them; some are read while others are still to come."""
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WORKERS) as pool:
            for piece in pieces:
                self.several |= not piece.last
                self._isolate(piece)
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
                    start, self.around.keys = outside.before(self._source, text)
                    self._bare = text[:start].strip(b"\xef\xbb\xbf \t\r\n") == b""
                end = self._end(text, start) if piece.last else len(text)
                text[:start] = b" " * start
            file.seek(end if end is not None else outside.last(self._source, piece.path))
            file.truncate()
            if end is None:
                self.around.open = True
                file.write(b"]")

    def _end(self, text: mmap.mmap, start: int) -> int | None:
        """Return where the array ends, None if it is not closed; keep the keys after it."""
        end, keys = outside.after(self._source, text, start, self._bare)
        self.around.keys |= keys
        return end


# --- the table --------------------------------------------------------------------------------------------

_KINDS = {"ph": "VARCHAR", "cat": "VARCHAR", "name": "VARCHAR", "pid": "VARCHAR", "tid": "VARCHAR", "id": "VARCHAR",
          "bp": "VARCHAR"}  # fmt: skip


def _load(con: duckdb.DuckDBPyConnection, source: str, piece: _Piece, taker: Taker, exact: bool) -> None:
    """Let the engine read the array of a piece, into the table `portion`."""
    time = "DOUBLE" if exact else "VARCHAR"
    columns = {**_KINDS, "ts": time, "dur": time, "args": "JSON"}
    shown = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    query = f"""
        SELECT row_number() OVER () - 1 + {piece.place} AS number, {", ".join(_KINDS)},
               {_nanoseconds("ts", exact)} AS ts_ns, {_nanoseconds("dur", exact)} AS dur_ns, {taker.args} AS args
        FROM read_json({table.place(piece.path)}, format = 'array', columns = {{{shown}}},
                       maximum_object_size = {MOST_IN_ONE})
    """
    for name, value in taker.more.items():  # one inside the other: else a column is computed again wherever it is used
        query = f"SELECT *, {value} AS {name} FROM ({query})"
    try:
        con.execute(f"CREATE OR REPLACE TEMP TABLE portion AS {query}")
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
