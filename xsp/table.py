"""Transfer of rows of spans to and from the table engine (DuckDB)."""

from __future__ import annotations

import array
import contextlib
import os
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from xsp import atomic, processes
from xsp.errors import OutputError, TraceError, UnwritableError
from xsp.schema import COLUMNS, Column, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GLOB = re.compile(r"[*?\[]")
_FORMULA = r"^[=+@\-\t\r]"
_NUMBER = r"[+-]?[0-9.]+(e[+-]?[0-9]+)?"


MOST_HELD = 20_000
"""Most rows of files that are read into memory before they are queried, which takes about 1 µs a row: with so few rows,
opening the files takes most of the time of a query. What has more is read by each query, in bounded memory."""


_engines: weakref.WeakSet[duckdb.DuckDBPyConnection] = weakref.WeakSet()
_engines_of_parent: list[duckdb.DuckDBPyConnection] = []


def _keep_in_child() -> None:
    """Keep what the parent has open: to end an engine is to wait for its threads, and a forked child has none of them.

    Without it a garbage collection in a worker of a loader ends the worker by a segmentation fault.
    """
    _engines_of_parent.extend(_engines)


def connect(threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return a private in-memory engine that reads files, but loads no extensions and uses no network.

    Args:
        threads: number of its threads; default: one for each core of the machine.
    """
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_unsigned_extensions": "false",
    }
    if threads is not None:
        config["threads"] = threads
    con = duckdb.connect(config=config)
    _engines.add(con)
    processes.call_in_children(_keep_in_child)
    # under `python -c` it is on, and draws on the measured program's stderr; Jupyter without widgets cannot set it
    if con.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [(True,)]:
        con.execute("SET enable_progress_bar = false")
    return con


def connect_spilling(folder: Path, memory: str, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """Return an engine as `connect` does, which spills to a folder beyond this much memory (`1GB`)."""
    con = connect(threads)
    con.execute(f"SET memory_limit = '{memory}'; SET temp_directory = {path_literal(folder / 'spill')}")
    return con


def cursor(con: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """Return a second connection to an engine, with the search path of the first one."""
    ((path,),) = con.execute("SELECT current_setting('search_path')").fetchall()
    connection = con.cursor()
    if path:
        connection.execute(f"SET search_path = {literal(path)}")
    return connection


def has_table(con: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Return whether an engine has a table or a view of a name; a query of its catalogue takes ten times as long."""
    try:
        con.execute(f"SELECT 1 FROM {name} LIMIT 0")
    except duckdb.CatalogException:
        return False
    return True


def is_empty(con: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Return whether a table or a view has no row."""
    return not con.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchall()


def hold(con: duckdb.DuckDBPyConnection, names: Iterable[str], max_rows: int) -> None:
    """Replace views of files by tables in memory with the same rows.

    Args:
        con: an engine.
        names: names of views; those of tables, of nothing, and of views of tables are left as they are.
        max_rows: maximum number of rows; a view with more stays.
    """
    views = {
        name
        for (name,) in con.execute(
            "SELECT view_name FROM duckdb_views() WHERE NOT internal AND contains(sql, 'read_parquet(')"
        ).fetchall()
    }
    for name in names:
        with contextlib.suppress(duckdb.Error):  # a damaged file is reported by the query that needs it
            if name not in views:
                continue
            ((count,),) = con.execute(f"SELECT count(*) FROM {name}").fetchall()
            if count <= max_rows:
                con.execute(f"CREATE OR REPLACE TABLE held_{name} AS FROM {name}")
                con.execute(f"DROP VIEW {name}")
                con.execute(f"ALTER TABLE held_{name} RENAME TO {name}")


def create(con: duckdb.DuckDBPyConnection, name: str, columns: Sequence[Column] = COLUMNS) -> None:
    """Create an empty table, replacing an existing one."""
    con.execute(f"CREATE OR REPLACE TABLE {name} ({', '.join(f'{c.name} {c.type}' for c in columns)})")


def insert(
    con: duckdb.DuckDBPyConnection,
    name: str,
    rows: Iterable[Sequence[Any]],
    columns: Sequence[Column] = COLUMNS,
) -> None:
    """Append rows, a column at a time (row by row, DuckDB is a hundred times slower)."""
    values = list(zip(*rows, strict=True))
    if not values:
        return
    try:
        arrays, expressions = _arrays(columns, values)
    except (KeyError, OverflowError, TypeError):  # a value that the engine has to convert or reject
        unnested = ", ".join(f"unnest(?::{column.type}[])" for column in columns)
        con.execute(f"INSERT INTO {name} SELECT {unnested}", [list(column_values) for column_values in values])
        return
    con.register("rows_as_arrays", arrays)  # by name: through a session of Spark the engine does not see this variable
    try:
        with _read_objects_as_text(con):
            names, selected = ", ".join(expressions), ", ".join(expressions.values())
            con.execute(f"INSERT INTO {name} ({names}) SELECT {selected} FROM rows_as_arrays")
    finally:
        con.unregister("rows_as_arrays")


def connect_storing() -> duckdb.DuckDBPyConnection:
    """Return an engine for `write_columns`, like `connect`: it has one thread, and reads arrays of objects as text."""
    con = connect(1)
    con.execute("SET pandas_analyze_sample = 0")
    return con


def write_columns(columns: Sequence[Sequence[Any]], path: Path, con: duckdb.DuckDBPyConnection) -> None:
    """Write spans atomically to a Parquet file, without an intermediate table: in a third of the time.

    Args:
        columns: the values of each of `COLUMNS`.
        path: path of the file.
        con: an engine from `connect_storing`.
    """
    try:
        arrays, expressions = _arrays(COLUMNS, columns)  # noqa: RUF059  (the query below reads the arrays)
    except (KeyError, OverflowError, TypeError):
        create(con, "rows_to_convert")
        insert(con, "rows_to_convert", zip(*columns, strict=True))
        write_parquet(con, "rows_to_convert", path)
        return
    selected = (f"{expressions.get(column.name, f'NULL::{column.type}')} AS {column.name}" for column in COLUMNS)
    options = _FORMAT if len(columns[0]) > MANY_ROWS else _SHORT_FORMAT
    with atomic.replacing(path) as temporary:
        con.execute(f"COPY (SELECT {', '.join(selected)} FROM arrays) TO {path_literal(temporary)} {options}")


_CODES = {"BIGINT": "q", "BOOLEAN": "b", "DOUBLE": "d", "INTEGER": "i", "SMALLINT": "h"}
"""Codes of `array.array` by type of column; it rejects values that NumPy would truncate."""


def _arrays(
    columns: Sequence[Column], values: Sequence[Sequence[Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the values of columns as arrays, which the engine reads without inspecting each value.

    Columns that hold nothing but None are left out, except the first. For other columns with None, a second array marks
    the positions of None: the engine before version 2 ignores the masks of masked arrays.

    Returns:
        The arrays, under generated names because a column's name may need quotes; and, by name of the column, the
        expression for its values in a query of the arrays.

    Raises:
        KeyError, OverflowError, TypeError: a column's values are of another type, or too large for it.
        UnicodeEncodeError: a text is not valid Unicode, from which the engine before version 2 would not recover.
    """
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    expressions: dict[str, str] = {}
    for number, (column, column_values) in enumerate(zip(columns, values, strict=True)):
        if arrays and column_values[0] is None and column_values.count(None) == len(column_values):
            continue
        value, missing = f"value{number}", f"missing{number}"
        expressions[column.name] = value
        if column.type == "VARCHAR":
            "".join(filter(None, column_values)).encode()
            text = np.empty(len(column_values), dtype=object)
            text[:] = column_values
            arrays[value] = text
            continue
        is_null = [entry is None for entry in column_values] if None in column_values else None
        filled = column_values if is_null is None else [0 if entry is None else entry for entry in column_values]
        array_ = np.asarray(array.array(_CODES[column.type], filled))
        arrays[value] = array_.astype(bool) if column.type == "BOOLEAN" else array_
        if is_null is not None:
            arrays[missing] = np.array(is_null)
            expressions[column.name] = f"CASE WHEN NOT {missing} THEN {value} END"
    return arrays, expressions


@contextlib.contextmanager
def _read_objects_as_text(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Make the engine read arrays of objects as text, without inspecting a sample, which may be all None."""
    ((previous,),) = con.execute("SELECT current_setting('pandas_analyze_sample')").fetchall()
    con.execute("SET pandas_analyze_sample = 0")
    try:
        yield
    finally:
        con.execute(f"SET pandas_analyze_sample = {previous}")


def text(value: Any) -> Any:
    """Return a value that the engine accepts: in text, question marks replace whatever is not valid UTF-8."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def write_parquet(con: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    """Write a table atomically to a Parquet file."""
    with atomic.replacing(path) as temporary:
        con.execute(f"COPY {name} TO {path_literal(temporary)} {_FORMAT}")


_FORMAT = "(FORMAT parquet, COMPRESSION zstd)"
_SHORT_FORMAT = "(FORMAT parquet, COMPRESSION snappy)"
MANY_ROWS = 4096
"""Number of rows below which zstd takes a third of the time of writing a file, most of it for its set-up."""


def path_literal(path: Path) -> str:
    """Return a path as an SQL literal that the engine can open.

    The engine accepts only text. A file or a folder whose name is not UTF-8 is opened here, and the engine reaches it
    through its descriptor.

    Raises:
        UnwritableError: it cannot be opened, or descriptors have no paths on this system.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return literal(_by_descriptor(path))
    return literal(str(path))


_DESCRIPTORS = Path("/proc/self/fd")
_open_descriptors: dict[tuple[int, int], int] = {}
"""Descriptors of files and folders, by device and inode. They stay open because views read files at any later time."""


def _by_descriptor(path: Path) -> str:
    """Return a path to the same file in UTF-8, through a descriptor of its folder.

    Raises:
        UnwritableError: there is no such path.
    """
    try:
        path.name.encode()
        target, name = path.parent, path.name
    except UnicodeEncodeError:
        target, name = path, ""
    try:
        status = os.stat(target)
        descriptor = _open_descriptors.get((status.st_dev, status.st_ino))
        if descriptor is None or not _is_same_file(descriptor, status):
            descriptor = _open_descriptors[status.st_dev, status.st_ino] = os.open(target, os.O_RDONLY)
        link = _DESCRIPTORS / str(descriptor)
        link.stat()
    except OSError as error:
        printable = os.fsencode(path).decode("utf-8", "replace")
        raise UnwritableError(f"{printable}: the path is no UTF-8; choose another one") from error
    return str(link / name)


def _is_same_file(descriptor: int, status: os.stat_result) -> bool:
    """Return whether a descriptor still belongs to that file; a program may close descriptors that are not its own."""
    try:
        return os.path.samestat(os.fstat(descriptor), status)
    except OSError:
        return False


def literal(text: str) -> str:
    """Quote text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Quote a name as an SQL identifier: a foreign file may use any names for its columns."""
    return '"' + name.replace('"', '""') + '"'


def check_parquet(
    con: duckdb.DuckDBPyConnection, path: Path, columns: Sequence[Column], is_intact: bool = False
) -> list[str]:
    """Return the names of the columns that a Parquet file holds.

    Args:
        con: an engine.
        path: path of the file.
        columns: the columns that it may hold.
        is_intact: whether it is known to be intact, so that its pages need not be read.

    Raises:
        TraceError: it is damaged, is not a span table, or has a column of ours with another type.
    """
    try:
        types = {row[0]: row[1] for row in con.execute(f"DESCRIBE SELECT * FROM {parquet(path)}").fetchall()}
        if not is_intact:
            con.execute(f"SELECT count(*) FROM {parquet(path)} WHERE {_touch(types)}").fetchall()
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise TraceError(f"{path}: damaged or not a Parquet file ({reason})") from error
    mismatched = [c.name for c in columns if c.name in types and types[c.name] != c.type]
    if mismatched:
        raise TraceError(f"{path}: not a span table, these columns have other types: {', '.join(mismatched)}")
    if not {"level", "name", "start_ns", "dur_ns"} <= set(types):
        raise TraceError(f"{path}: not a span table, it has no level, name, start_ns and dur_ns")
    return list(types)


def _touch(columns: Iterable[str]) -> str:
    """Return a condition that makes the engine read every page, so that it detects damage."""
    return "hash(" + ", ".join(map(quoted, columns)) + ") IS NOT NULL"


def are_intact_and_uniform(con: duckdb.DuckDBPyConnection, files: Sequence[Path], unchecked: Sequence[Path]) -> bool:
    """Return whether Parquet files have the same columns and none is damaged; one query checks all of them.

    Args:
        con: an engine.
        files: the files whose columns are compared.
        unchecked: the files among them that are not known to be unchanged, so that their pages are read.
    """
    fields = "(name, type, converted_type, logical_type)"
    try:
        ((layouts,),) = con.execute(
            f"SELECT count(DISTINCT layout) FROM (SELECT list({fields} ORDER BY name) AS layout "
            f"FROM parquet_schema({_names(files)}) GROUP BY file_name)"
        ).fetchall()
        if layouts == 1 and unchecked:
            source = parquet(unchecked, same_columns=True)
            names = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
            con.execute(f"SELECT count(*) FROM {source} WHERE {_touch(names)}").fetchall()
    except duckdb.Error:
        return False
    return bool(layouts == 1)


def parquet(path: Path | Sequence[Path], same_columns: bool = False) -> str:
    """Return the SQL that reads these Parquet files and no others, whatever the names of the files and folders are.

    The engine expands `*`, `?` and `[` in a name to other files, and takes a folder `name=x` for a column.

    Args:
        path: one file, or several.
        same_columns: whether they have the same columns. Else the engine opens each file before it reads the first one,
            and keeps its metadata, which for thousands of files takes most of the time and of the memory.
    """
    by_name = "" if same_columns else "union_by_name = true, "
    return f"read_parquet({_names([path] if isinstance(path, Path) else path)}, {by_name}hive_partitioning = false)"


def _names(files: Sequence[Path]) -> str:
    names = (_GLOB.sub(r"[\g<0>]", path_literal(file)) for file in files)
    return f"[{', '.join(names)}]"


def select_list(columns: Sequence[Column], file_columns: Collection[str]) -> str:
    """Return the SQL of all columns of a file; columns that an older xsp did not write hold their default.

    Args:
        columns: the columns, in their order.
        file_columns: names of the columns in the file.
    """
    return ", ".join(
        c.name if c.name in file_columns else f"CAST({_default(c)} AS {c.type}) AS {c.name}" for c in columns
    )


def _default(column: Column) -> str:
    default = Span._field_defaults.get(column.name)
    return "NULL" if default is None else repr(default)


def write(con: duckdb.DuckDBPyConnection, relation: duckdb.DuckDBPyRelation, path: Path, form: str) -> None:
    """Write the rows of a relation atomically to a file.

    In CSV a text that a spreadsheet would evaluate (it begins with `=`, `+`, `-` or `@`, and is not a number) gets a
    leading `'`.

    Args:
        con: the engine that the relation belongs to.
        relation: the rows, in their order.
        path: path of the file; CSV and JSON are compressed if it ends in `.gz`.
        form: csv, json or parquet.

    Raises:
        OutputError: the file cannot be written.
    """
    options = {"csv": "FORMAT csv, HEADER", "json": "FORMAT json, ARRAY true", "parquet": "FORMAT parquet"}[form]
    if path.suffix == ".gz" and form != "parquet":
        options += ", COMPRESSION gzip"
    try:
        query = _without_formulas(relation) if form == "csv" else relation.sql_query()
        with atomic.replacing(path, flush=False) as temporary:
            con.execute(f"COPY ({query}) TO {path_literal(temporary)} ({options})")
    except (duckdb.IOException, OSError) as error:
        raise OutputError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error


def _without_formulas(relation: duckdb.DuckDBPyRelation) -> str:
    """Return the query for a relation in which a `'` precedes texts that a spreadsheet would evaluate."""
    expressions = []
    for name, kind in zip(map(quoted, relation.columns), relation.types, strict=True):
        is_formula = f"regexp_matches({name}, '{_FORMULA}') AND NOT regexp_full_match({name}, '{_NUMBER}')"
        expression = f"CASE WHEN {is_formula} THEN '''' || {name} ELSE {name} END AS {name}"
        expressions.append(expression if str(kind) == "VARCHAR" else name)
    return f"SELECT {', '.join(expressions)} FROM ({relation.sql_query()})"
