"""Rows for spreadsheets and other programs: CSV and Parquet of the span table, the merged step, or any other table."""

from __future__ import annotations

from pathlib import Path

from xsp import table
from xsp.errors import UsageError
from xsp.exporters.contract import Choice, Written, check_steps
from xsp.store.trace import Trace


def csv(trace: Trace, path: Path, choice: Choice) -> Written:
    """Write rows as text with a header; values that were not measured are empty.

    Args:
        trace: the trace to write.
        path: the file; compressed if it ends in `.gz`.
        choice: the table, and for `spans` the steps.

    Raises:
        OutputError: the file cannot be written.
        UsageError: there is no such step, or the table has no steps.
    """
    return _write(trace, path, choice, "csv")


def parquet(trace: Trace, path: Path, choice: Choice) -> Written:
    """Write rows as Parquet; for `spans`, `xsp.load` reads the file.

    Arguments and errors are the same as for `csv`.
    """
    return _write(trace, path, choice, "parquet")


def _write(trace: Trace, path: Path, choice: Choice, file_format: str) -> Written:
    if choice.steps is not None and choice.rows != "spans":
        raise UsageError(f"--steps: the rows of {choice.rows} are not by step; omit --steps, or write spans")
    check_steps(trace, choice.steps)
    condition = f" WHERE step IN ({', '.join(map(str, choice.steps))})" if choice.steps is not None else ""
    rows = trace.sql(f"SELECT * FROM {choice.rows}{condition}")
    table.write(trace.con, rows, path, file_format)
    [(count,)] = trace.sql(f"SELECT count(*) FROM {choice.rows}{condition}").fetchall()
    return Written(count)
