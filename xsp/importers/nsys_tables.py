"""Copy tables of an SQLite file that nsys exported into the engine.

The file is opened read-only and immutable. SQLite accepts any value in any column, and versions of nsys differ in
tables and columns: values of an unexpected type and missing columns become null. Rows go through a CSV file, which the
engine reads several times faster than rows from Python.
"""

from __future__ import annotations

import contextlib
import csv
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import table
from xsp.errors import TraceError

SQLITE = b"SQLite format 3\0"
"""First bytes of an SQLite file."""

MAX_TEXT = 4096
"""Maximum characters of a name; the rest is cut off."""

MAX_VALUE_BYTES = 1 << 26
"""Maximum bytes of one value that SQLite reads; a longer needed value is damage, or an attack."""


class Export:
    """An SQLite file of nsys, or of another profiler."""

    def __init__(self, source: str, folder: Path, remedy: str = "export it again from the .nsys-rep") -> None:
        """Open the file.

        Args:
            source: path of the file.
            folder: directory for temporary files.
            remedy: advice in error messages if the file cannot be read.

        Raises:
            TraceError: the file is not SQLite, or damaged.
        """
        self._source, self._folder, self._remedy = source, folder, remedy
        with contextlib.ExitStack() as stack:
            try:
                self._file = sqlite3.connect(f"{Path(source).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
                stack.callback(self._file.close)
                self._file.execute("PRAGMA trusted_schema = OFF")
                self._file.text_factory = lambda value: value.decode("utf-8", "replace").replace("\0", "")
                if sys.version_info >= (3, 11):
                    self._file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
                names = [name for (name,) in self._file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                for base, newest in _versions(names).items():  # such as NVTX_EVENTS_V2
                    query = f"SELECT * FROM {table.quoted(newest)}"
                    self._file.execute(f"CREATE TEMP VIEW {table.quoted(base)} AS {query}")
                    names[names.index(newest)] = base
                self.tables = {
                    name: {str(row[1]) for row in self._file.execute(f"PRAGMA table_info({table.quoted(name)})")}
                    for name in names
                }
            except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a message that quotes the file
                raise self._broken(error) from error
            stack.pop_all()  # open: `close` closes it

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def copy(self, con: duckdb.DuckDBPyConnection, name: str, target: str, columns: Mapping[str, str]) -> bool:
        """Copy a table of the file into the engine; make an empty table if the file has none.

        Args:
            con: the engine.
            name: name of the table in the file.
            target: its name in the engine.
            columns: names and types, BIGINT, DOUBLE or VARCHAR.

        Returns:
            Whether the table is in the file.

        Raises:
            TraceError: the table cannot be read.
        """
        available = self.tables.get(name, set())
        definitions = ", ".join(f'"{column}" {kind}' for column, kind in columns.items())
        con.execute(f"CREATE OR REPLACE TABLE {target} ({definitions})")
        if available:
            expressions = ", ".join(
                _typed(column, kind) if column in available else "NULL" for column, kind in columns.items()
            )
            self._insert_rows(con, self._rows(name, f"SELECT {expressions} FROM {table.quoted(name)}"), target, columns)
        return bool(available)

    def copy_strings(self, con: duckdb.DuckDBPyConnection, id_query: str) -> None:
        """Make the table `nsys_strings` of the strings whose ids a query of the engine returns.

        Other strings are not copied, because they may contain output of the program.
        """
        con.execute("CREATE OR REPLACE TABLE nsys_strings (id BIGINT, value VARCHAR)")
        if not {"id", "value"} <= self.tables.get("StringIds", set()):
            return
        ids = con.execute(id_query).fetchall()
        try:
            self._file.execute("CREATE TEMP TABLE needed (id INTEGER PRIMARY KEY)")
            self._file.executemany("INSERT OR IGNORE INTO needed VALUES (?)", ids)
        except sqlite3.Error as error:
            raise self._broken(error) from error
        value = _typed("value", "VARCHAR")
        rows = self._rows("StringIds", f"SELECT id, {value} FROM StringIds WHERE id IN (SELECT id FROM needed)")
        self._insert_rows(con, rows, "nsys_strings", {"id": "BIGINT", "value": "VARCHAR"})

    def rows(self, name: str, columns: Mapping[str, str]) -> list[tuple[Any, ...]]:
        """Return the rows of a small table, null for missing columns; an empty list if there is no such table."""
        available = self.tables.get(name, set())
        expressions = ", ".join(
            _typed(column, kind) if column in available else "NULL" for column, kind in columns.items()
        )
        return list(self._rows(name, f"SELECT {expressions} FROM {table.quoted(name)} LIMIT 1024")) if available else []

    def count(self, name: str) -> int:
        """Return the number of rows of a table."""
        return int(next(self._rows(name, f"SELECT count(*) FROM {table.quoted(name)}"))[0])

    def _rows(self, name: str, query: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._file.execute(query)
        except sqlite3.Error as error:
            raise self._broken(error, f", table {name}") from error

    def _insert_rows(
        self,
        con: duckdb.DuckDBPyConnection,
        rows: Iterator[tuple[Any, ...]],
        target: str,
        columns: Mapping[str, str],
    ) -> None:
        csv_path = self._folder / "rows.csv"
        try:
            with open(csv_path, "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows(rows)
            kinds = ", ".join(f"'{column}': '{kind}'" for column, kind in columns.items())
            con.execute(
                f"INSERT INTO {target} SELECT * FROM read_csv({table.path_literal(csv_path)}, header = false, "
                f"auto_detect = false, delim = ',', quote = '\"', escape = '\"', nullstr = '', parallel = false, "
                f"columns = {{{kinds}}})"
            )
        except duckdb.Error as error:
            reason = str(error).splitlines()[0].replace(str(csv_path), Path(self._source).name)
            raise TraceError(f"{self._source}: holds values that do not fit the span table ({reason})") from error
        except OSError as error:
            raise TraceError(
                f"{self._source}: {self._folder} cannot be written ({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        finally:
            csv_path.unlink(missing_ok=True)

    def _broken(self, error: Exception, place: str = "") -> TraceError:
        return TraceError(f"{self._source}{place}: not readable as SQLite ({error}); {self._remedy}")


def _versions(names: Sequence[str]) -> dict[str, str]:
    """Return the newest version of each table that exists only under names with a version, by its plain name."""
    matches = [match for name in names if (match := re.fullmatch(r"(.+)_V(\d+)", name))]
    ordered = sorted(matches, key=lambda match: int(match[2]))
    return {match[1]: match[0] for match in ordered if match[1] not in names}


def _typed(column: str, kind: str) -> str:
    """Return the SQLite expression of a column's value, null if the value has another type."""
    name = table.quoted(column)
    if kind == "VARCHAR":
        return f"CASE typeof({name}) WHEN 'text' THEN substr({name}, 1, {MAX_TEXT}) END"
    if kind == "DOUBLE":
        return f"CASE WHEN typeof({name}) IN ('integer', 'real') THEN CAST({name} AS REAL) END"
    return f"CASE typeof({name}) WHEN 'integer' THEN {name} WHEN 'real' THEN CAST({name} AS INTEGER) END"


def create_macros(con: duckdb.DuckDBPyConnection) -> None:
    """Create the SQL macros that unpack the ids of process and thread from one number."""
    con.execute("CREATE OR REPLACE MACRO pid_of(packed) AS (packed >> 24) & 16777215")
    con.execute("CREATE OR REPLACE MACRO tid_of(packed) AS packed & 16777215")


def drop_tables(con: duckdb.DuckDBPyConnection) -> None:
    """Drop the tables of the engine whose names begin with `nsys_`."""
    for (name,) in con.execute(
        "SELECT table_name FROM duckdb_tables() WHERE starts_with(table_name, 'nsys_')"
    ).fetchall():
        con.execute(f"DROP TABLE {name}")
