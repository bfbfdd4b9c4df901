"""The loop of a run on the disk, in the table engine and over OTLP: a row for each step that ran, recorded or not.

During a run, rows are appended to a file of 64-bit little-endian integers, in the order of `LOOP_COLUMNS`, so that a
killed process loses at most the last row. At the end of the run they become a Parquet file. Over OTLP, rows are sent as
spans of kind `loop` with many rows each, because OTLP has no message for tables and receivers accept spans.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import inside, rundir, semconv, table
from xsp.run import Otel, Run
from xsp.schema import LOOP_COLUMNS, PHASE_COLUMNS, Kind, Level, Span

BARE = int(Level.APPLICATION)
"""The rung of a step in which no collector was on."""

_WIDTH = len(LOOP_COLUMNS)
ROW_BYTES = 8 * _WIDTH

MAX_ROW_BYTES = 2 << 30
"""Largest file of rows that is read: some 15 million steps."""

_NAMES = [column.name for column in LOOP_COLUMNS]
_START = _NAMES.index("start_ns")
ROW_FILES = {rundir.LOOP_ROWS: _NAMES, rundir.LOOP_ROWS_BEFORE: _NAMES[: -len(PHASE_COLUMNS)]}
"""Files of rows in a run directory, and their columns."""

_STATUS = ("ok", "error", "unclosed")
_NULLABLE = ("before_ns", "samples", "steady", "faults", "system_ns", "thread", *PHASE_COLUMNS)
"""Columns in which -1 means null."""

_ADDED_COLUMNS = ("faults", "system_ns", "thread", "beside_ns", *PHASE_COLUMNS)
"""Columns that are missing in loops of earlier versions."""


def append(run: Path, rows: bytes, offset_ns: int) -> None:
    """Append rows to the loop file of a run in progress.

    Args:
        run: directory of the run.
        rows: from `xsp.record.loop.Loop.take`, with times of the monotonic clock.
        offset_ns: nanoseconds to add to these times to get nanoseconds since the epoch.
    """
    if not rows:
        return
    values = _numbers(rows)
    for index in range(_START, len(values), _WIDTH):
        values[index] += offset_ns
    if sys.byteorder == "big":
        values.byteswap()
    with open(run / rundir.LOOP_ROWS, "ab") as file:
        file.truncate(file.tell() // ROW_BYTES * ROW_BYTES)  # a full disk may have cut off the last row
        file.write(values.tobytes())


def _numbers(content: bytes) -> array.array[int]:
    """Return 64-bit little-endian integers as numbers of this machine."""
    numbers = array.array("q", content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def create_table(con: duckdb.DuckDBPyConnection, runs: Sequence[Path]) -> list[str]:
    """Make the table `loop` from the rows of run directories; it is empty if they have none.

    Returns:
        A sentence for each damaged file that was left out.
    """
    table.create(con, "loop", LOOP_COLUMNS)
    warnings = []
    for run in runs:
        name = next((run / each for each in (rundir.LOOP_FILE, *ROW_FILES) if os.path.lexists(run / each)), None)
        if name is None:
            continue
        try:
            if name.name == rundir.LOOP_FILE:
                with inside.engine_path(run, name, rundir.MAX_TABLE_BYTES) as path:
                    _insert_parquet(con, path)
            else:
                rows = _rows(inside.read_bytes(run, name, MAX_ROW_BYTES), ROW_FILES[name.name])
                table.insert(con, "loop", rows, LOOP_COLUMNS)
        except (duckdb.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            warnings.append(f"left out: {name}: {reason}")
    return warnings


COMPILING = "compiling"
"""Status of the steps in which code was compiled. No figure of the loop is taken from them."""

MIN_COMPILING_SHARE = 0.1
"""Least share of a row's time in compilations for that status."""


def mark_compiling(con: duckdb.DuckDBPyConnection, run: Run) -> None:
    """Give the steps of the table `loop` in which code was compiled, according to `run.json`, their status."""
    intervals = [
        (each.rank or 0, compiled.start_ns, compiled.start_ns + compiled.dur_ns)
        for each in run.rank_runs
        for compiled in each.compilations
    ]
    if not intervals:
        return
    values = ", ".join(f"({rank}, {start_ns}, {end_ns})" for rank, start_ns, end_ns in intervals)
    con.execute(
        f"""
        UPDATE loop SET status = '{COMPILING}' WHERE status = 'ok' AND (rank, step) IN (
            SELECT (loop.rank, step)
            FROM loop JOIN (VALUES {values}) compiled(rank, from_ns, until_ns)
            ON coalesce(loop.rank, 0) = compiled.rank AND from_ns < start_ns + steps * dur_ns AND until_ns > start_ns
            GROUP BY loop.rank, step, steps, dur_ns
            HAVING sum(least(until_ns, start_ns + steps * dur_ns) - greatest(from_ns, start_ns))
                   >= {MIN_COMPILING_SHARE} * steps * dur_ns
        )
        """
    )


def create_table_in_sequence(con: duckdb.DuckDBPyConnection, runs: Sequence[Path]) -> tuple[list[str], dict[Path, int]]:
    """Make the table `loop` of several runs of one program, with the steps of a run numbered after those before it.

    Returns:
        A sentence for each damaged file that was left out, and the number that was added to the steps of each run.
    """
    warnings: list[str] = []
    offsets: dict[Path, int] = {}
    offset = 0
    table.create(con, "loop_sequence", LOOP_COLUMNS)
    for run in runs:
        warnings += create_table(con, [run])
        offsets[run] = offset
        con.execute(f"INSERT INTO loop_sequence SELECT * REPLACE (step + {offset} AS step) FROM loop")
        ((end,),) = con.execute("SELECT coalesce(max(step + steps), 0) FROM loop").fetchall()
        offset += max([int(end), *(int(file.stem) + 1 for file in rundir.segments(run))])
    con.execute("DROP TABLE loop")
    con.execute("ALTER TABLE loop_sequence RENAME TO loop")
    return warnings, offsets


def _insert_parquet(con: duckdb.DuckDBPyConnection, file: Path) -> None:
    existing = {name for name, *_ in con.execute(f"DESCRIBE SELECT * FROM {table.parquet(file)}").fetchall()}
    selected = ", ".join(
        f"{'NULL' if column.name in _ADDED_COLUMNS and column.name not in existing else column.name}::{column.type}"
        for column in LOOP_COLUMNS
    )
    con.execute(f"INSERT INTO loop SELECT {selected} FROM {table.parquet(file)}")


def _rows(content: bytes, names: Sequence[str] = _NAMES) -> list[tuple[Any, ...]]:
    """Return the complete rows in the content of a file of numbers; a last row that a kill cut off is dropped.

    Args:
        content: the content.
        names: the columns of the file, the first ones of a row; others are unknown.
    """
    width = len(names)
    values = _numbers(content[: len(content) // (8 * width) * 8 * width])
    columns: list[Sequence[Any]] = [values[index::width] for index in range(width)]
    columns += [[-1] * len(columns[0])] * (_WIDTH - width)
    for index, name in enumerate(_NAMES):
        if name in _NULLABLE:
            columns[index] = [None if value == -1 else value for value in columns[index]]
        if name == "steady":
            columns[index] = [None if value is None else bool(value) for value in columns[index]]
        elif name == "status":
            columns[index] = [_STATUS[value] if 0 <= value < len(_STATUS) else _STATUS[1] for value in columns[index]]
    return list(zip(*columns, strict=True))


def write(con: duckdb.DuckDBPyConnection, run: Path) -> None:
    """Write the table `loop` to its Parquet file, and delete the file of numbers."""
    if con.execute("SELECT 1 FROM loop LIMIT 1").fetchall():
        table.write_parquet(con, "loop", run / rundir.LOOP_FILE)
    with contextlib.suppress(OSError):
        (run / rundir.LOOP_ROWS).unlink(missing_ok=True)


# --- over OTLP ------------------------------------------------------------------------------------------------

ROWS_PER_SPAN = 500
"""Maximum number of rows in one span: about 50 kB, which viewers still show."""

_SENT_COLUMNS = [column for column in LOOP_COLUMNS if column.name != "rank"]
"""Columns that are sent in an attribute of the span; the rank is the rank of the span itself."""

_END = "end_ns"
"""Key of the end of the rank's last row. A loop is sent repeatedly while it grows; the latest version replaces the
earlier ones, because rows are folded as the loop grows."""


def spans(con: duckdb.DuckDBPyConnection, run_span: Otel) -> Iterator[Span]:
    """Yield the rows of the table `loop` as children of the run's span."""
    names = ", ".join(column.name for column in _SENT_COLUMNS)
    query = f"SELECT rank, {names} FROM loop ORDER BY rank, start_ns, step"
    for rank, group in itertools.groupby(con.execute(query).fetchall(), key=lambda row: row[0]):
        rows = [row[1:] for row in group]
        end = max(_end(row) for row in rows)
        for offset in range(0, len(rows), ROWS_PER_SPAN):
            chunk = rows[offset : offset + ROWS_PER_SPAN]
            start = chunk[0][_SENT_START]
            columns = {column.name: [row[index] for row in chunk] for index, column in enumerate(_SENT_COLUMNS)}
            identity = hashlib.blake2b(f"{run_span.span_id}/loop/{rank}/{offset}/{end}".encode(), digest_size=8)
            yield Span(
                trace_id=run_span.trace_id,
                span_id=identity.hexdigest(),
                parent_id=run_span.span_id,
                level=Level.APPLICATION,
                kind=Kind.LOOP.value,
                name=f"steps {chunk[0][0]} to {chunk[-1][0] + chunk[-1][1] - 1}",
                start_ns=start,
                dur_ns=max(map(_end, chunk)) - start,
                rank=rank,
                collector="session",
                attributes=json.dumps({semconv.LOOP: json.dumps({_END: end, **columns})}),
            )


def add_received(con: duckdb.DuckDBPyConnection, source: str) -> int:
    """Add the rows that spans contain to the table `loop`; for each rank only the rows of the latest version.

    A version may arrive in parts, in any order. Rows of an earlier version stay where the latest one has none, unless
    they are of a process whose rank was started again: these began earlier, though their steps have higher numbers.

    Args:
        con: holds the tables `loop` and `source`.
        source: a table with the columns of spans, of any kinds.

    Returns:
        Number of spans of kind `loop` that were left out because their content is invalid.
    """
    received = con.execute(f"SELECT rank, attributes FROM {source} WHERE kind = '{Kind.LOOP}'").fetchall()
    invalid = 0
    latest: dict[int, tuple[int, list[list[tuple[Any, ...]]]]] = {}
    for rank, text in received:
        try:
            end, rows = _unpack(rank, text)
        except (ValueError, TypeError, LookupError, RecursionError):
            invalid += 1
            continue
        latest_version = latest.get(rank)
        if latest_version is None or end > latest_version[0]:
            latest[rank] = (end, [rows])
        elif end == latest_version[0]:
            latest_version[1].append(rows)
    for rank, (end, parts) in latest.items():
        ((last,),) = con.execute("SELECT max(start_ns + dur_ns * steps) FROM loop WHERE rank = ?", [rank]).fetchall()
        if last is not None and end < int(last):
            continue
        for rows in filter(None, parts if last is not None else ()):
            (first_step, start_ns), end_step = (
                min((row[1], row[_START]) for row in rows),
                max(row[1] + row[2] for row in rows),
            )
            con.execute(
                "DELETE FROM loop WHERE rank = ? AND step < ? AND step + steps > ?", [rank, end_step, first_step]
            )
            con.execute("DELETE FROM loop WHERE rank = ? AND step >= ? AND start_ns < ?", [rank, first_step, start_ns])
        table.insert(con, "loop", [row for rows in parts for row in rows], LOOP_COLUMNS)
    return invalid


_SENT_START = [column.name for column in _SENT_COLUMNS].index("start_ns")
_SENT_STEPS = [column.name for column in _SENT_COLUMNS].index("steps")
_VALIDATORS: Mapping[str, Callable[[Any], bool]] = {
    "INTEGER": lambda value: _is_whole(value, 31),
    "SMALLINT": lambda value: _is_whole(value, 15),
    "BIGINT": lambda value: _is_whole(value, 62),
    "DOUBLE": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 62,
    "BOOLEAN": lambda value: isinstance(value, bool),
    "VARCHAR": lambda value: value in _STATUS,
}


def _is_whole(value: Any, bits: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits


def _end(row: Sequence[Any]) -> int:
    """Return the end of a row with the columns `_SENT_COLUMNS`, in nanoseconds."""
    steps, start, dur = row[1], row[_SENT_START], row[_SENT_START + 1]
    return int(start + dur * steps)


def _unpack(rank: int, attributes: str) -> tuple[int, list[tuple[Any, ...]]]:
    """Return the end of a loop and the rows in a span; raise ValueError, TypeError or LookupError for other content."""
    content = json.loads(json.loads(attributes)[semconv.LOOP])
    missing = [None] * len(content["step"])
    columns = [
        content.get(column.name, missing) if column.name in _ADDED_COLUMNS else content[column.name]
        for column in _SENT_COLUMNS
    ]
    for column, values in zip(_SENT_COLUMNS, columns, strict=True):
        fits, nullable = _VALIDATORS[column.type], column.name in _NULLABLE
        if not all(fits(value) or (nullable and value is None) for value in values):
            raise ValueError(column.name)
    if not _is_whole(content[_END], 62):
        raise ValueError(_END)
    if not all(columns[_SENT_STEPS]):  # figures are weighted by the steps of a row
        raise ValueError("steps")
    return content[_END], [(rank, *row) for row in zip(*columns, strict=True)]
