"""Results of analyses as files for other programs: CSV, JSON and Parquet, of one run or of several together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb

from xsp import atomic, table
from xsp.errors import OutputError, UnwritableError
from xsp.rundir import write_atomically

SUFFIXES = {"csv": ".csv", "json": ".json", "parquet": ".parquet"}

Answer = tuple[str, duckdb.DuckDBPyConnection, duckdb.DuckDBPyRelation]
"""The result of an analysis on a run: the run's name, the engine, and the rows."""

Answers = Sequence[Answer]
"""The results of an analysis, one for each run."""


def write(answers: Answers, path: Path, form: str) -> None:
    """Write the results of an analysis on all runs to one file; for several runs the first column, `run`, has the name.

    Raises:
        OutputError: the file cannot be written.
    """
    if len(answers) == 1:
        _, con, relation = answers[0]
        table.write(con, relation, path, form)
        return
    with atomic.temporary_folder() as folder:
        parts = [Path(folder) / f"{number}.parquet" for number in range(len(answers))]
        for part, (run, con, relation) in zip(parts, answers, strict=True):
            table.write(con, relation.project(f"{table.literal(run)} AS run, *"), part, "parquet")
        combined = table.connect()
        table.write(combined, combined.sql(f"SELECT * FROM {table.parquet(parts)}"), path, form)


def text(answers: Answers, form: str) -> str:
    """Return the text that `write` would write, for CSV and JSON."""
    with atomic.temporary_folder() as folder:
        write(answers, Path(folder) / "rows", form)
        return (Path(folder) / "rows").read_bytes().decode()  # line breaks inside fields stay as they are


def several_as_json(answers_by_name: Mapping[str, Answers]) -> str:
    """Return one JSON object with the rows of several analyses, each under its name."""
    parts = [f"{json.dumps(name)}: {text(answers, 'json').strip()}" for name, answers in answers_by_name.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_each(answers_by_name: Mapping[str, Answers], folder: Path, form: str) -> None:
    """Write several analyses into a folder, each to a file with its name.

    Raises:
        OutputError: the folder cannot be created, or a file in it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder}: several analyses go into a folder, which cannot be made here ({error.strerror})"
        ) from error
    for name, answers in answers_by_name.items():
        write(answers, folder / f"{name}{SUFFIXES[form]}", form)


def write_text(content: str, path: Path) -> None:
    """Write text to a file atomically.

    Raises:
        OutputError: it cannot be written, or the path is a folder.
    """
    if path.is_dir():
        raise OutputError(f"{path}: a folder is in the way; name a file")
    try:
        write_atomically(path, content.encode())
    except UnwritableError as error:
        raise OutputError(str(error)) from error
