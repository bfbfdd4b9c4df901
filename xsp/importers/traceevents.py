"""The trace events of a Chrome JSON file, read into tables of the engine in bounded memory.

The format is an object with the array `traceEvents` among other keys, or that array alone; its closing bracket may be
missing. The engine reads an array of objects quickly, but on one core only, and not inside an object. So the file is
cut between events while it is decompressed, and the pieces are read in parallel, each as an array of its own. A cut in
the wrong place leaves brackets open, which is an error: then the file is read again in one piece, so that places in
error messages are places in the file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

import duckdb

from xsp import atomic, table
from xsp.errors import TraceError
from xsp.importers import outside
from xsp.importers.contract import check_values, open_bytes, read_error
from xsp.importers.outside import CHUNK, Envelope

PIECE = 1 << 25
"""Approximate size of a piece in bytes; the first ones are smaller, so that all cores start early."""

FIRST_PIECE = 1 << 23
"""Size of the first piece in bytes; each of the next is twice as large, up to `PIECE`."""

WORKERS = max(2, min(4, os.cpu_count() or 1))
"""Number of pieces that are read in parallel; each takes about 100 MB of memory."""

MAX_EVENT_BYTES = 1 << 24
"""Maximum size of one trace event in bytes; a larger one is damage, or an attack."""

MIN_FREE_BYTES = 1 << 30
"""Bytes that must stay free on the disk, or a tenth of a disk that is smaller; a file that needs more is refused."""

MAX_EXACT_US = 2**43
"""Microseconds up to which a double resolves nanoseconds."""

_FINE = re.compile(rb'"ts"\s*:\s*-?(\d{13,})\.\d')
_TIME = re.compile(rb'("(?:ts|dur)"\s*:\s*)(-?\d[\d.eE+-]*)')
_SEAM = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp)"\s*:)')


class EventSink(Protocol):
    """Stores trace events. They arrive in portions, in any order, from several threads."""

    args: ClassVar[str]
    """SQL of the part of `args`, which is JSON, to keep; it may use other columns of the format."""

    extra_columns: ClassVar[Mapping[str, str]]
    """SQL of further columns, by name; a later one may use an earlier one."""

    def begin(self, con: duckdb.DuckDBPyConnection, keys: Mapping[str, Any]) -> None:
        """Create the tables to fill; replace existing ones.

        Args:
            con: an engine.
            keys: top-level keys of the file before the events.
        """
        ...

    def store(self, con: duckdb.DuckDBPyConnection) -> None:
        """Copy what is needed from the table `portion` into the tables that `begin` made.

        The columns of `portion` are `number` (increasing with the position in the file), those of the format as text
        (`ph`, `cat`, `name`, `pid`, `tid`, `id`, `bp`), `ts_ns` and `dur_ns` (nanoseconds as BIGINT; null if there is
        no number), `args`, and those of `extra_columns`.
        """
        ...


class Events:
    """Takes all events, into the table `events`."""

    args: ClassVar[str] = "args"
    extra_columns: ClassVar[Mapping[str, str]] = {}

    def begin(self, con: duckdb.DuckDBPyConnection, keys: Mapping[str, Any]) -> None:
        """Drop an existing table `events`."""
        con.execute("DROP TABLE IF EXISTS events")

    def store(self, con: duckdb.DuckDBPyConnection) -> None:
        """Append a portion to the table."""
        con.execute("CREATE TABLE IF NOT EXISTS events AS FROM portion LIMIT 0")
        con.execute("INSERT INTO events FROM portion")


def read(con: duckdb.DuckDBPyConnection, source: str, sink: EventSink) -> Envelope:
    """Read the trace events of a file.

    Args:
        con: an engine.
        source: path of a file, possibly gzip.
        sink: stores the events; its `begin` can be called twice.

    Raises:
        TraceError: the file cannot be read, or has another structure; the message gives the position.
    """
    try:
        return _read(con, source, sink, PIECE)
    except _WrongCut:
        return _read(con, source, sink, None)


class _WrongCut(Exception):
    """One of several pieces could not be read: the cut was not between two events."""


def _read(con: duckdb.DuckDBPyConnection, source: str, sink: EventSink, size: int | None) -> Envelope:
    with (
        atomic.temporary_folder() as folder,
        open_bytes(Path(source)) as file,
    ):
        first_chunk = _read_chunk(source, file, folder, 0)
        is_exact = _is_exact(first_chunk)
        later_chunks = _chunks(source, file, folder, len(first_chunk))
        chunks = itertools.chain([first_chunk], later_chunks)
        pieces = _pieces(chunks if is_exact else _times_as_text(chunks), Path(folder), size)
        reader = _PieceReader(con, source, sink, is_exact)
        try:
            with check_values(source):
                reader.read_all(pieces)
        except (TraceError, duckdb.Error) as error:
            if reader.is_split:
                raise _WrongCut from error
            raise
    return reader.envelope


# --- pieces -----------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A part of a decompressed file, as an array; the first and the last piece include the keys around the array."""

    path: Path
    offset: int
    """Position of its first byte in the file."""

    is_first: bool
    is_last: bool


def _chunks(source: str, file: IO[bytes], folder: str, consumed: int) -> Iterator[bytes]:
    """Yield the rest of a file, decompressed."""
    while text := _read_chunk(source, file, folder, consumed):
        yield text
        consumed += len(text)


def _read_chunk(source: str, file: IO[bytes], folder: str, consumed: int) -> bytes:
    """Read a chunk."""
    disk = shutil.disk_usage(folder)
    if disk.free < min(MIN_FREE_BYTES, disk.total // 10):
        raise TraceError(
            f"{source}: decompresses to more than the disk has room for ({consumed >> 20} MiB so far); "
            "set TMPDIR to a larger disk if this size is expected"
        )
    try:
        return file.read(CHUNK)
    except (EOFError, OSError, zlib.error) as error:
        raise read_error(source, error, f"after {consumed} bytes of its content") from error


def _is_exact(text: bytes) -> bool:
    """Return whether doubles are exact enough for the times of a file, by its first chunk."""
    match = _FINE.search(text)
    return match is None or int(match.group(1)) < MAX_EXACT_US


def _times_as_text(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks with times in quotes, so that they are read as text and no digit is lost."""
    buffer = b""
    for text in chunks:
        buffer += text
        end = buffer.rfind(b",") + 1 if len(buffer) < MAX_EVENT_BYTES else len(buffer)  # no number is cut in two
        yield _TIME.sub(rb'\1"\2"', buffer[:end])
        buffer = buffer[end:]
    yield _TIME.sub(rb'\1"\2"', buffer)


def _pieces(chunks: Iterable[bytes], folder: Path, size: int | None) -> Iterator[_Piece]:
    """Write pieces of approximately `size` bytes (None: a single piece), and yield each when it is written."""
    offset = number = 0
    path = folder / "0.json"
    file = open(path, "wb")  # noqa: SIM115 (closed below, whichever it is then)
    try:
        for text in chunks:
            seam = _SEAM.search(text) if size and file.tell() >= min(size, FIRST_PIECE << number) else None
            if seam is None:
                file.write(text)
                continue
            file.write(text[: seam.start() + 1])
            end = offset + file.tell()
            file.write(b"]")
            file.close()
            yield _Piece(path, offset, is_first=number == 0, is_last=False)
            offset, number, path = end, number + 1, folder / f"{number + 1}.json"
            file = open(path, "wb")  # noqa: SIM115
            file.write(b"[" + text[seam.end() :])
    finally:
        file.close()
    yield _Piece(path, offset, is_first=number == 0, is_last=True)


class _PieceReader:
    """Reads the pieces of one file in parallel."""

    def __init__(self, con: duckdb.DuckDBPyConnection, source: str, sink: EventSink, is_exact: bool) -> None:
        self.envelope = Envelope()
        self.is_split = False
        """Whether the file was cut into pieces."""

        self._con, self._source, self._sink, self._is_exact = con, source, sink, is_exact
        self._is_bare = False

    def read_all(self, pieces: Iterable[_Piece]) -> None:
        """Read all pieces, while later ones are still being written."""
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(WORKERS) as pool:
            for piece in pieces:
                self.is_split |= not piece.is_last
                self._isolate(piece)
                if piece.is_first:
                    self._sink.begin(self._con, self.envelope.keys)
                pending.append(pool.submit(self._take, piece, table.cursor(self._con)))
                while len(pending) > WORKERS:
                    pending.popleft().result()
            for future in pending:
                future.result()

    def _take(self, piece: _Piece, con: duckdb.DuckDBPyConnection) -> None:
        with con:
            _load(con, self._source, piece, self._sink, self._is_exact)
            piece.path.unlink()
            self._sink.store(con)

    def _isolate(self, piece: _Piece) -> None:
        """Reduce a piece to the array, and keep the keys around it."""
        if not (piece.is_first or piece.is_last):
            return
        if not os.path.getsize(piece.path):
            raise TraceError(f"{self._source}: is empty")
        with open(piece.path, "rb+") as file:
            with mmap.mmap(file.fileno(), 0) as text:
                start = 0
                if piece.is_first:
                    start, self.envelope.keys = outside.read_head(self._source, text)
                    self._is_bare = text[:start].strip(b"\xef\xbb\xbf \t\r\n") == b""
                end = self._end(text, start) if piece.is_last else len(text)
                text[:start] = b" " * start
            file.seek(end if end is not None else outside.end_of_last_event(self._source, piece.path))
            file.truncate()
            if end is None:
                self.envelope.is_unclosed = True
                file.write(b"]")

    def _end(self, text: mmap.mmap, start: int) -> int | None:
        """Return the end of the array, None if it is not closed; keep the keys after it."""
        end, keys = outside.read_tail(self._source, text, start, self._is_bare)
        self.envelope.keys |= keys
        return end


# --- the table --------------------------------------------------------------------------------------------

_KINDS = {"ph": "VARCHAR", "cat": "VARCHAR", "name": "VARCHAR", "pid": "VARCHAR", "tid": "VARCHAR", "id": "VARCHAR",
          "bp": "VARCHAR"}  # fmt: skip


def _load(con: duckdb.DuckDBPyConnection, source: str, piece: _Piece, sink: EventSink, is_exact: bool) -> None:
    """Read the array of a piece into the table `portion`."""
    time = "DOUBLE" if is_exact else "VARCHAR"
    columns = {**_KINDS, "ts": time, "dur": time, "args": "JSON"}
    column_types = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    query = f"""
        SELECT row_number() OVER () - 1 + {piece.offset} AS number, {", ".join(_KINDS)},
               {_nanoseconds("ts", is_exact)} AS ts_ns, {_nanoseconds("dur", is_exact)} AS dur_ns, {sink.args} AS args
        FROM read_json({table.path_literal(piece.path)}, format = 'array', columns = {{{column_types}}},
                       maximum_object_size = {MAX_EVENT_BYTES})
    """
    for name, value in sink.extra_columns.items():  # nested: otherwise a column is computed again wherever it is used
        query = f"SELECT *, {value} AS {name} FROM ({query})"
    try:
        con.execute(f"CREATE OR REPLACE TEMP TABLE portion AS {query}")
    except duckdb.Error as error:
        reason = str(error).splitlines()[0].replace(str(piece.path), Path(source).name)
        hint = "; if names hold quotes or backslashes: xsp import FILE --repair -o RUN" if "Malformed" in reason else ""
        raise TraceError(f"{source}: the array `traceEvents` cannot be read ({reason}){hint}") from error


def _nanoseconds(name: str, is_exact: bool) -> str:
    """Return the SQL that converts microseconds to nanoseconds; null if it is not a number, or out of range."""
    if not is_exact:
        return f"TRY_CAST(round(TRY_CAST({name} AS DECIMAL(38, 6)) * 1000) AS BIGINT)"
    # whole and fractional microseconds separately: 1000 times the sum can exceed the precision of a double
    microseconds = f"TRY_CAST(trunc({name}) AS BIGINT)"
    return (
        f"CASE WHEN abs({name}) < 9e15 "
        f"THEN {microseconds} * 1000 + CAST(round(({name} - trunc({name})) * 1000) AS BIGINT) END"
    )
