"""The loop of a run on the disk and in the table engine: a row for each step that ran, recorded or not.

While a run goes on its rows are appended to a file of 64-bit little-endian numbers, `LOOP_COLUMNS` in their order, so
that a kill costs at most the last one. When the run ends they become a Parquet file.
"""

from __future__ import annotations

import array
import contextlib
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from xsp import rundir, summary, table
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


# --- what the steps that ran bare tell ----------------------------------------------------------------------

ENOUGH = 5
"""Steady steps from which a figure can be had."""

NEARBY = 5
"""Steady steps that a recorded one is held against: their median."""

TOO_COLD = 0.25
"""From this share on by which a step is slowed where steps are recorded, true times of spans inside are not known."""


class BareStep(NamedTuple):
    """A step in which no collector was on; several where the run was long."""

    step: int
    dur_ns: float
    samples: int | None


def steady_steps(con: duckdb.DuckDBPyConnection) -> list[BareStep]:
    """Return the steps that ran as if nothing were recorded, of the kind and rank of `alike`, in their order.

    Args:
        con: holds `loop`, `alike` and `spans`.

    Returns:
        Empty where there are fewer than `ENOUGH`, and where a device works on when the host's step has ended.
    """
    found = con.execute(
        f"""
        SELECT step, dur_ns, samples FROM loop
        WHERE steady AND rung = {BARE} AND status = 'ok' AND {OF_ALIKE}
          AND NOT EXISTS (SELECT 1 FROM spans WHERE device IS NOT NULL)
        ORDER BY step
        """
    ).fetchall()
    return [BareStep(*row) for row in found] if len(found) >= ENOUGH else []


OF_ALIKE = """
    kind IS NOT DISTINCT FROM (SELECT any_value(step_kind) FROM alike) AND rank = (SELECT any_value(rank) FROM alike)
"""
"""Whether a row of `loop` is of the kind and rank that a trace's figures are of."""


def nearby(bare: Sequence[BareStep], recorded: Sequence[tuple[int, float]]) -> list[float]:
    """Return, for each recorded step (number, nanoseconds), the median of the steady steps next to it."""
    numbers = [each.step for each in bare]
    found = []
    for number, _ in recorded:
        place = bisect_left(numbers, number)
        first = max(0, min(place - NEARBY // 2, len(bare) - NEARBY))
        found.append(summary.percentile([each.dur_ns for each in bare[first : first + NEARBY]], 0.5))
    return found


class Coldness(NamedTuple):
    """How much slower a bare step runs where steps are recorded than where none is."""

    ratio: float
    steps: int


def coldness(con: duckdb.DuckDBPyConnection) -> Coldness | None:
    """Return how cold caches and clocks were when steps were recorded: the bare steps just before them tell.

    Args:
        con: as of `steady_steps`.

    Returns:
        None where too few steps tell.
    """
    ((count, cold_ns, steady_ns),) = con.execute(
        f"""
        WITH followed AS (
            SELECT *, lead(rung) OVER (PARTITION BY rank ORDER BY step) AS next_rung FROM loop
        ), bare AS (
            SELECT * FROM followed WHERE rung = {BARE} AND status = 'ok' AND {OF_ALIKE}
        )
        SELECT count(*) FILTER (next_rung <> {BARE}), median(dur_ns) FILTER (next_rung <> {BARE}),
               median(dur_ns) FILTER (steady) FROM bare
        """
    ).fetchall()
    return Coldness(cold_ns / steady_ns, count) if count >= ENOUGH and steady_ns else None


# --- what an iteration takes ----------------------------------------------------------------------------------

UNDISTURBED = f"""
    undisturbed AS (
        WITH followed AS (
            SELECT *, lag(rung) OVER (PARTITION BY rank ORDER BY step) AS last_rung FROM loop
        ), nearness AS (
            SELECT *, CASE WHEN steady THEN 0 WHEN last_rung = {BARE} THEN 1 ELSE 2 END AS nearness
            FROM followed WHERE rung = {BARE} AND status = 'ok'
        ), counted AS (
            SELECT rank, kind, CASE WHEN count(*) FILTER (nearness = 0) >= {ENOUGH} THEN 0
                                    WHEN count(*) FILTER (nearness <= 1) >= {ENOUGH} THEN 1 ELSE 2 END AS most
            FROM nearness GROUP BY rank, kind
        )
        SELECT nearness.*, most, dur_ns + coalesce(before_ns, 0) AS iteration_ns
        FROM nearness JOIN counted USING (rank, kind) WHERE nearness <= most
    )
"""
"""The bare steps of each rank and kind that profiling disturbed least, to put behind WITH: steady ones where there are
`ENOUGH`, else those that follow a bare one, else all. `most` says which: 0, 1 or 2."""
