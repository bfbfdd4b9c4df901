"""Rows of spans to and from the table engine."""

from __future__ import annotations

import array
import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from xsp import atomic
from xsp.errors import OutputError, TraceError, UnwritableError
from xsp.schema import COLUMNS, Column, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PATTERN = re.compile(r"[*?\[]")
_FORMULA = r"^[=+@\-\t\r]"
_NUMBER = r"[+-]?[0-9.]+(e[+-]?[0-9]+)?"


def connect() -> duckdb.DuckDBPyConnection:
    """Return a private engine in memory that reads files, and neither extensions nor the network."""
    con = duckdb.connect(
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "allow_unsigned_extensions": "false",
        }
    )
    # `python -c` has a bar of progress, on the stderr of the measured program; Jupyter without widgets has none to set
    if con.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [(True,)]:
        con.execute("SET enable_progress_bar = false")
    return con


def spilling(folder: Path, memory: str) -> duckdb.DuckDBPyConnection:
    """Return an engine as `connect` does, which puts into a folder what does not fit into so much memory (`1GB`)."""
    con = connect()
    con.execute(f"SET memory_limit = '{memory}'; SET temp_directory = {place(folder / 'spill')}")
    return con


def cursor(con: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """Return a second connection to an engine, which finds tables where the first one does."""
    ((path,),) = con.execute("SELECT current_setting('search_path')").fetchall()
    own = con.cursor()
    if path:
        own.execute(f"SET search_path = {literal(path)}")
    return own


def holds(con: duckdb.DuckDBPyConnection, name: str) -> bool:
    """Return whether an engine has a table or a view of a name; to ask its catalogue takes ten times as long."""
    try:
        con.execute(f"SELECT 1 FROM {name} LIMIT 0")
    except duckdb.CatalogException:
        return False
    return True


def create(con: duckdb.DuckDBPyConnection, name: str, columns: Sequence[Column] = COLUMNS) -> None:
    """Make an empty table."""
    con.execute(f"CREATE OR REPLACE TABLE {name} ({', '.join(f'{c.name} {c.type}' for c in columns)})")


def insert(
    con: duckdb.DuckDBPyConnection,
    name: str,
    rows: Iterable[Sequence[Any]],
    columns: Sequence[Column] = COLUMNS,
) -> None:
    """Append rows, a column at a time (per row, DuckDB is a hundred times slower)."""
    values = list(zip(*rows, strict=True))
    if not values:
        return
    try:
        arrays, expressions = _arrays(columns, values)
    except (KeyError, OverflowError, TypeError):  # a value that the engine has to convert, or to refuse
        unnested = ", ".join(f"unnest(?::{column.type}[])" for column in columns)
        con.execute(f"INSERT INTO {name} SELECT {unnested}", [list(each) for each in values])
        return
    con.register("rows_as_arrays", arrays)  # by name: a session of Spark stands between this variable and the engine
    try:
        with _objects_are_text(con):
            held, chosen = ", ".join(expressions), ", ".join(expressions.values())
            con.execute(f"INSERT INTO {name} ({held}) SELECT {chosen} FROM rows_as_arrays")
    finally:
        con.unregister("rows_as_arrays")


def storing() -> duckdb.DuckDBPyConnection:
    """Return an engine as `connect` does for `write_columns`: of one thread, and arrays of objects are text to it."""
    con = connect()
    con.execute("SET threads = 1")
    con.execute("SET pandas_analyze_sample = 0")
    return con


def write_columns(columns: Sequence[Sequence[Any]], path: Path, con: duckdb.DuckDBPyConnection) -> None:
    """Write spans to a Parquet file that appears in one piece, without a table on the way: in a third of the time.

    Args:
        columns: the values of each of `COLUMNS`.
        path: of the file.
        con: from `storing`.
    """
    try:
        arrays, expressions = _arrays(COLUMNS, columns)  # noqa: RUF059  (the query below reads the arrays)
    except (KeyError, OverflowError, TypeError):
        create(con, "rows_to_convert")
        insert(con, "rows_to_convert", zip(*columns, strict=True))
        write_parquet(con, "rows_to_convert", path)
        return
    named = (f"{expressions.get(each.name, f'NULL::{each.type}')} AS {each.name}" for each in COLUMNS)
    form = _FORMAT if len(columns[0]) > MANY_ROWS else _SHORT_FORMAT
    with atomic.written(path) as beside:
        con.execute(f"COPY (SELECT {', '.join(named)} FROM arrays) TO {place(beside)} {form}")


_CODES = {"BIGINT": "q", "BOOLEAN": "b", "DOUBLE": "d", "INTEGER": "i", "SMALLINT": "h"}
"""The codes of `array.array` of a column's values; it refuses what NumPy would cut off."""


def _arrays(
    columns: Sequence[Column], values: Sequence[Sequence[Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the values of columns as arrays, which the engine reads without a look at each value.

    Columns that hold nothing but None are left out, except the first. Of others, a second array says where None is:
    the engine before version 2 reads masked arrays without their masks.

    Returns:
        The arrays, under names of their own since a column's may be quoted; and, by the names of the columns, the
        expression of its values in a query of the arrays.

    Raises:
        KeyError, OverflowError, TypeError: a column's values are of another type, or too large for it.
        UnicodeEncodeError: a text holds what is none, of which the engine before version 2 would not recover.
    """
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    expressions: dict[str, str] = {}
    for number, (column, each) in enumerate(zip(columns, values, strict=True)):
        if arrays and each[0] is None and each.count(None) == len(each):
            continue
        value, missing = f"value{number}", f"missing{number}"
        expressions[column.name] = value
        if column.type == "VARCHAR":
            "".join(filter(None, each)).encode()
            text = np.empty(len(each), dtype=object)
            text[:] = each
            arrays[value] = text
            continue
        holes = [one is None for one in each] if None in each else None
        filled = each if holes is None else [0 if one is None else one for one in each]
        array_ = np.asarray(array.array(_CODES[column.type], filled))
        arrays[value] = array_.astype(bool) if column.type == "BOOLEAN" else array_
        if holes is not None:
            arrays[missing] = np.array(holes)
            expressions[column.name] = f"CASE WHEN NOT {missing} THEN {value} END"
    return arrays, expressions


@contextlib.contextmanager
def _objects_are_text(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Let the engine take arrays of objects for text, without a look at a sample of them: it may hold None alone."""
    ((before,),) = con.execute("SELECT current_setting('pandas_analyze_sample')").fetchall()
    con.execute("SET pandas_analyze_sample = 0")
    try:
        yield
    finally:
        con.execute(f"SET pandas_analyze_sample = {before}")


def text(value: Any) -> Any:
    """Return a value as the engine takes it: of text that is no UTF-8 what is, and question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def write_parquet(con: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    """Write a table to a file that appears in one piece."""
    with atomic.written(path) as beside:
        con.execute(f"COPY {name} TO {place(beside)} {_FORMAT}")


_FORMAT = "(FORMAT parquet, COMPRESSION zstd)"
_SHORT_FORMAT = "(FORMAT parquet, COMPRESSION snappy)"
MANY_ROWS = 4096
"""Below it zstd takes a third of the time of writing a file, most of it for making ready."""


def place(path: Path) -> str:
    """Return a path as an SQL literal that the engine can open.

    The engine takes text alone. What has a name that is no UTF-8, the file or its folder, is opened here, and reached
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
_opened: dict[tuple[int, int], int] = {}
"""Descriptors of files and folders, by device and inode. They stay open: views read files whenever they are asked."""


def _by_descriptor(path: Path) -> str:
    try:
        path.name.encode()
        opened, within = path.parent, path.name
    except UnicodeEncodeError:
        opened, within = path, ""
    try:
        found = os.stat(opened)
        known = _opened.get((found.st_dev, found.st_ino))
        if known is None or not _is_still(known, found):
            known = _opened[found.st_dev, found.st_ino] = os.open(opened, os.O_RDONLY)
        beside = _DESCRIPTORS / str(known)
        beside.stat()
    except OSError as error:
        shown = os.fsencode(path).decode("utf-8", "replace")
        raise UnwritableError(f"{shown}: the path is no UTF-8; choose another one") from error
    return str(beside / within)


def _is_still(descriptor: int, found: os.stat_result) -> bool:
    """Return whether a descriptor is that file's; a program may close what it does not know."""
    try:
        return os.path.samestat(os.fstat(descriptor), found)
    except OSError:
        return False


def literal(text: str) -> str:
    """Quote text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Quote a name as an SQL identifier: a file of others may call its columns what it likes."""
    return '"' + name.replace('"', '""') + '"'


def check_parquet(
    con: duckdb.DuckDBPyConnection, path: Path, columns: Sequence[Column], whole: bool = False
) -> list[str]:
    """Return the names of the columns that a Parquet file holds.

    Args:
        con: an engine.
        path: of the file.
        columns: that it may hold.
        whole: it is known not to be damaged, so that its pages need not be read.

    Raises:
        TraceError: it is damaged, or holds a column of ours with a type of another kind.
    """
    try:
        found = {row[0]: row[1] for row in con.execute(f"DESCRIBE SELECT * FROM {parquet(path)}").fetchall()}
        if not whole:
            con.execute(f"SELECT count(*) FROM {parquet(path)} WHERE {_touch(found)}").fetchall()
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise TraceError(f"{path}: damaged or not a Parquet file ({reason})") from error
    wrong = [c.name for c in columns if c.name in found and found[c.name] != c.type]
    if wrong:
        raise TraceError(f"{path}: not a span table, these columns have other types: {', '.join(wrong)}")
    if not {"level", "name", "start_ns", "dur_ns"} <= set(found):
        raise TraceError(f"{path}: not a span table, it has no level, name, start_ns and dur_ns")
    return list(found)


def _touch(columns: Iterable[str]) -> str:
    """Return a condition that makes the engine read every page, so that damage shows."""
    return "hash(" + ", ".join(map(quoted, columns)) + ") IS NOT NULL"


def are_whole_and_alike(con: duckdb.DuckDBPyConnection, files: Sequence[Path], unread: Sequence[Path]) -> bool:
    """Return whether Parquet files have the same columns and none is damaged: all at once, not one after another.

    Args:
        con: an engine.
        files: of which the columns are looked at.
        unread: those of them that are not known to be as they were written, so that their pages are read.
    """
    fields = "(name, type, converted_type, logical_type)"
    try:
        ((kinds,),) = con.execute(
            f"SELECT count(DISTINCT held) FROM (SELECT list({fields} ORDER BY name) AS held "
            f"FROM parquet_schema({_names(files)}) GROUP BY file_name)"
        ).fetchall()
        if kinds == 1 and unread:
            source = parquet(unread, alike=True)
            found = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
            con.execute(f"SELECT count(*) FROM {source} WHERE {_touch(found)}").fetchall()
    except duckdb.Error:
        return False
    return bool(kinds == 1)


def parquet(path: Path | Sequence[Path], alike: bool = False) -> str:
    """Return the SQL that reads these Parquet files and no others, whatever their names and folders are called.

    To the engine `*`, `?` and `[` in a name stand for other files, and a folder `name=x` for a column.

    Args:
        path: one file, or several.
        alike: they have the same columns. Else the engine opens each file before it reads the first one and keeps
            what it saw, which for thousands of files is most of the time and of the memory.
    """
    by_name = "" if alike else "union_by_name = true, "
    return f"read_parquet({_names([path] if isinstance(path, Path) else path)}, {by_name}hive_partitioning = false)"


def _names(files: Sequence[Path]) -> str:
    names = (_PATTERN.sub(r"[\g<0>]", place(each)) for each in files)
    return f"[{', '.join(names)}]"


def shown(columns: Sequence[Column], held: Collection[str]) -> str:
    """Return the SQL of all columns of a file; those that an older xsp did not write hold their default.

    Args:
        columns: wanted, in their order.
        held: names of those that the file has.
    """
    return ", ".join(c.name if c.name in held else f"CAST({_default(c)} AS {c.type}) AS {c.name}" for c in columns)


def _default(column: Column) -> str:
    default = Span._field_defaults.get(column.name)
    return "NULL" if default is None else repr(default)


def write(con: duckdb.DuckDBPyConnection, relation: duckdb.DuckDBPyRelation, path: Path, form: str) -> None:
    """Write the rows of a relation to a file that appears in one piece.

    In CSV a text that a spreadsheet would compute (it begins with `=`, `+`, `-` or `@`, and is no number) has a `'`
    before it.

    Args:
        con: the engine that the relation belongs to.
        relation: what to write, in its order.
        path: where to; text is compressed if it ends in `.gz`.
        form: csv, json or parquet.

    Raises:
        OutputError: the file cannot be written.
    """
    options = {"csv": "FORMAT csv, HEADER", "json": "FORMAT json, ARRAY true", "parquet": "FORMAT parquet"}[form]
    if path.suffix == ".gz" and form != "parquet":
        options += ", COMPRESSION gzip"
    try:
        query = _without_formulas(relation) if form == "csv" else relation.sql_query()
        with atomic.written(path, flush=False) as beside:
            con.execute(f"COPY ({query}) TO {place(beside)} ({options})")
    except (duckdb.IOException, OSError) as error:
        raise OutputError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error


def _without_formulas(relation: duckdb.DuckDBPyRelation) -> str:
    """Return the query for a relation whose texts a spreadsheet only shows."""
    shown = []
    for name, kind in zip(map(quoted, relation.columns), relation.types, strict=True):
        is_formula = f"regexp_matches({name}, '{_FORMULA}') AND NOT regexp_full_match({name}, '{_NUMBER}')"
        made = f"CASE WHEN {is_formula} THEN '''' || {name} ELSE {name} END AS {name}"
        shown.append(made if str(kind) == "VARCHAR" else name)
    return f"SELECT {', '.join(shown)} FROM ({relation.sql_query()})"
