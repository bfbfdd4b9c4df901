"""The loop of a run on the disk and in the table engine: a row for each step that ran, recorded or not.

While a run goes on its rows are appended to a file of 64-bit little-endian numbers, `LOOP_COLUMNS` in their order, so
that a kill costs at most the last one. When the run ends they become a Parquet file.
"""

from __future__ import annotations

import array
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import rundir, table
from xsp.errors import TraceError
from xsp.span import LOOP_COLUMNS, Level

BARE = int(Level.APPLICATION)
"""The rung of a step in which no collector was on."""

_WIDTH = len(LOOP_COLUMNS)
ROW_BYTES = 8 * _WIDTH

_NAMES = [column.name for column in LOOP_COLUMNS]
_START = _NAMES.index("start_ns")
_STATUS = ("ok", "error", "unclosed")
_UNKNOWN = ("before_ns", "samples")
"""Columns in which -1 stands for null."""


def append(run: Path, rows: bytes, offset_ns: int) -> None:
    """Append rows to the file of a run that goes on.

    Args:
        run: its directory.
        rows: of `xsp.recording.loop.Loop.take`; their times are of the monotonic clock.
        offset_ns: what puts them on the epoch.
    """
    if not rows:
        return
    values = array.array("q", rows)
    for place in range(_START, len(values), _WIDTH):
        values[place] += offset_ns
    with open(run / rundir.LOOP_ROWS, "ab") as file:
        file.truncate(file.tell() // ROW_BYTES * ROW_BYTES)  # a full disk may have cut off the last row
        file.write(values.tobytes())


def show(con: duckdb.DuckDBPyConnection, runs: Sequence[Path]) -> list[str]:
    """Make the table `loop` of the rows of some run directories; empty where they have none.

    Returns:
        A sentence on each file that is damaged and was left out.
    """
    table.create(con, "loop", LOOP_COLUMNS)
    said = []
    for run in runs:
        written, growing = run / rundir.LOOP_FILE, run / rundir.LOOP_ROWS
        try:
            if written.is_file():
                _read(con, run, written)
            elif growing.is_file():
                table.insert(con, "loop", _rows(growing), LOOP_COLUMNS)
        except (duckdb.Error, OSError, TraceError) as error:
            said.append(f"left out: {written if written.is_file() else growing}: {str(error).splitlines()[0]}")
    return said


def _read(con: duckdb.DuckDBPyConnection, run: Path, written: Path) -> None:
    rundir.check_inside(run, [written])
    names = ", ".join(f"{column.name}::{column.type}" for column in LOOP_COLUMNS)
    con.execute(f"INSERT INTO loop SELECT {names} FROM {table.parquet(written)}")


def _rows(file: Path) -> list[tuple[Any, ...]]:
    """Return the whole rows of a file of numbers; what a kill left of the last one is dropped."""
    values = array.array("q")
    content = file.read_bytes()
    values.frombytes(content[: len(content) // ROW_BYTES * ROW_BYTES])
    if sys.byteorder == "big":
        values.byteswap()
    columns: list[Sequence[Any]] = [values[place::_WIDTH] for place in range(_WIDTH)]
    for place, name in enumerate(_NAMES):
        if name in _UNKNOWN:
            columns[place] = [None if value == -1 else value for value in columns[place]]
        elif name == "steady":
            columns[place] = [bool(value) for value in columns[place]]
        elif name == "status":
            columns[place] = [_STATUS[value] if 0 <= value < len(_STATUS) else _STATUS[1] for value in columns[place]]
    return list(zip(*columns, strict=True))


def write(con: duckdb.DuckDBPyConnection, run: Path) -> None:
    """Write the table `loop` to its file, and take the file of numbers away."""
    if con.execute("SELECT 1 FROM loop LIMIT 1").fetchall():
        table.write_parquet(con, "loop", run / rundir.LOOP_FILE)
    with contextlib.suppress(OSError):
        (run / rundir.LOOP_ROWS).unlink(missing_ok=True)
