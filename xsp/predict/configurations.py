"""Recorded configurations and their times: from a table (CSV, JSON, Parquet) or from runs.

A row is one configuration: batch size, ranks, layers, …, and the seconds of its step. Rows without a time, or without
a value of a requested factor, are left out and counted.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp.errors import UsageError, nearest
from xsp.predict import quantities
from xsp.scrub import plain

Value = float | str
Row = Mapping[str, Any]


TimedRow = tuple[int, Row, float]
"""The number of a row, the row, and its seconds."""


class TableRow(dict[str, Any]):
    """A row of a file, which knows where it was read."""

    def __init__(self, cells: Mapping[str, Any], source: str, number: int) -> None:
        """Hold the cells of row `number` of a file, counted from 1 without a line of names."""
        super().__init__(cells)
        self.place = f"{source}, row {number:,}"


Floats = NDArray[np.float64]

MOST_BYTES = 64 << 20
MOST_ROWS = 100_000
MOST_COLUMNS = 256
MOST_LEVELS = 40
"""Maximum number of values of a category; a column with more of them contains names."""

MOST_FACTORS = 16

UNITS = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+([eE][+-]?[0-9]+)?")
_UNIT = re.compile(rf"(?:^|[\W_])({'|'.join(UNITS)})$")
_TIMES = ("step_s", "seconds", "time_s", "step_ms", "ms", "time_ms", "step_us", "us", "step_ns", "ns")
"""Default names of the column of times, of which the first present one is used."""

SHAPES = "a table is .csv, .tsv, .json, .jsonl or .parquet with a row for each configuration, or run directories"


@dataclass(frozen=True)
class Factor:
    """A column that a time may depend on."""

    name: str
    levels: tuple[str, ...] = ()
    """Values of a category, the most frequent first; empty for a number."""

    reference: float = 1.0
    """Median of a number; powers are relative to it."""

    low: float = 0.0
    high: float = 0.0
    unit: str = ""
    """Unit of the numbers; empty if cells have none."""

    @property
    def is_numeric(self) -> bool:
        """Whether the factor is a number and not a category."""
        return not self.levels


@dataclass(frozen=True)
class Configurations:
    """The complete rows of a table."""

    factors: tuple[Factor, ...]
    values: Mapping[str, NDArray[Any]]
    """Columns by factor: numbers above 0, or texts."""

    seconds: Floats
    groups: NDArray[np.int64]
    """Group of each row. Rows of one group are held out together, so that no repetition of a test row is trained on."""

    notes: tuple[str, ...] = ()
    row_numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Number of each row in the table that was read, from 1; empty if unknown."""

    def __len__(self) -> int:
        return len(self.seconds)

    def factor(self, name: str) -> Factor:
        """Return a factor by name.

        Raises:
            KeyError: there is no such factor.
        """
        return {entry.name: entry for entry in self.factors}[name]

    def take(self, indices: NDArray[Any]) -> Configurations:
        """Return some of the rows; levels and ranges of the factors stay those of the whole table."""
        values = {name: column[indices] for name, column in self.values.items()}
        numbers = self.row_numbers[indices] if len(self.row_numbers) else self.row_numbers
        return Configurations(self.factors, values, self.seconds[indices], self.groups[indices], self.notes, numbers)


def of_rows(
    rows: Sequence[Row],
    time: str | None = None,
    unit: str | None = None,
    factors: Sequence[str] = (),
    categories: Sequence[str] = (),
    group: Sequence[str] = (),
) -> Configurations:
    """Return configurations.

    Args:
        rows: rows of a table, each with its values by column.
        time: column of times; its unit is the end of its name (`step_ms`) unless `unit` is given.
        unit: unit of the times: s, ms, us or ns.
        factors: columns on which the time may depend; default: all others with more than one value.
        categories: columns whose numbers are categories.
        group: columns that define groups: rows with equal values are held out together; default: the factors.

    Raises:
        UsageError: no row is complete, or a column has values of the wrong type.
    """
    columns = _columns(rows)
    time, scale = _time_column(rows, columns, time, unit)
    for name in (*factors, *categories, *group):
        if name not in columns:
            raise UsageError(f"no column {name!r}{nearest(name, columns) or _column_list(columns)}")
    if time in factors:
        raise UsageError(f"{time} is the time itself, and cannot be a factor: name other columns")
    omissions: Counter[str] = Counter()
    timed_rows = _timed_rows(rows, time, scale, omissions)
    names = list(dict.fromkeys(factors))
    unused_notes: list[str] = []
    if not names:
        names, unused_notes = _default_factors(timed_rows, columns, time, group, categories)
    if not names:
        raise UsageError(
            f"no column has more than one value in the {len(timed_rows):,} of {len(rows):,} rows with a time: record "
            "different configurations"
        )
    if len(names) > MOST_FACTORS:
        raise UsageError(
            f"{len(names)} columns may be factors, more than {MOST_FACTORS}: name them with --intrinsic, --extrinsic"
        )
    unit_notes: list[str] = []
    is_text = {name: _is_category(timed_rows, name, name in categories, unit_notes) for name in names}
    complete_rows = _complete_rows(timed_rows, names, omissions)
    values: dict[str, NDArray[Any]] = {}
    table_factors = tuple(_factor(name, complete_rows, is_text[name], values, unit_notes) for name in names)
    key_columns = [  # numbers of a factor are in one unit
        values[name].tolist() if name in values else [_canonical_value(row.get(name)) for _, row, _ in complete_rows]
        for name in (group or names)
    ]
    keys = list(zip(*key_columns, strict=True))
    group_numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    notes = [f"{count:,} of {len(rows):,} rows are left out: {reason}" for reason, count in omissions.items() if count]
    return Configurations(
        table_factors, values, np.array([seconds for _, _, seconds in complete_rows]),
        np.array([group_numbers[key] for key in keys]), (*notes, *unit_notes, *unused_notes),
        np.array([number for number, _, _ in complete_rows], np.int64),
    )  # fmt: skip


def _timed_rows(rows: Sequence[Row], time: str, scale: float | None, omissions: Counter[str]) -> list[TimedRow]:
    """Return the rows with a time above 0, each with its number and its seconds; count the others in `omissions`.

    Args:
        rows: rows of a table.
        time: column of times, whose cells may have units.
        scale: seconds of the unit of numbers without one; None if it is not known.
        omissions: rows that are left out, by reason.

    Raises:
        UsageError: there are none, or a cell has digits but is not a time.
    """
    timed_rows, words = [], set()
    for number, row in enumerate(rows, 1):
        cell = row.get(time)
        seconds = quantities.seconds(cell, scale)
        if seconds is not None and 0 < seconds < 1e100:
            timed_rows.append((number, row, seconds))
        elif seconds is None and not quantities.is_missing(cell):
            if not isinstance(cell, str) or any(character.isdigit() for character in cell):
                raise UsageError(
                    f"{_cell_text(row, number, time)} is not a time: write 12.3, or 12.3 with a unit, such as "
                    f"{quantities.UNITS_OF_TIME}"
                )
            words.add(plain(cell.strip())[:40])  # such as OOM
    reason = f"without a time above 0 in {time}"
    omissions[reason + (f" ({', '.join(map(repr, sorted(words)[:3]))})" if words else "")] = len(rows) - len(timed_rows)
    if not timed_rows:
        example = f", such as {min(words)!r}; write 12.3, or 12.3 ms" if words else ""
        raise UsageError(f"column {time} has no time above 0{example}")
    return timed_rows


def _cell_text(row: Row, number: int, column: str) -> str:
    """Return a cell with its place, such as `table.csv, row 3, column batch: 'x'`.

    Args:
        row: its row.
        number: number of the row among all rows, from 1, for rows that no file has.
        column: its column.
    """
    place = row.place if isinstance(row, TableRow) else f"row {number:,}"
    return f"{place}, column {plain(column)}: {plain(str(row.get(column)))[:40]!r}"


def _complete_rows(timed_rows: Sequence[TimedRow], names: Sequence[str], omissions: Counter[str]) -> list[TimedRow]:
    """Return the rows with a value for each name; count the others in `omissions`.

    Raises:
        UsageError: there are none.
    """
    complete_rows = []
    for number, row, seconds in timed_rows:
        missing_name = next((name for name in names if quantities.is_missing(row.get(name))), None)
        if missing_name is None:
            complete_rows.append((number, row, seconds))
        else:
            omissions[f"without {missing_name}"] += 1
    if not complete_rows:
        raise UsageError(f"no configuration has a value for all of {', '.join(names)}: leave out some")
    return complete_rows


def _canonical_value(value: Any) -> Value:
    """Return a value in a form that is the same for all sources: 64, 64.0 and the text `64` become equal."""
    found = quantities.quantity(value)
    return str(value).strip() if found is None or found.unit else found.number


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns of a table, in the order of their first use.

    Raises:
        UsageError: there are no rows, or too many columns.
    """
    if not rows:
        raise UsageError(f"the table has no rows; {SHAPES}")
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    if len(columns) > MOST_COLUMNS:
        raise UsageError(f"the table has {len(columns):,} columns, more than {MOST_COLUMNS}")
    return columns


def _column_list(columns: Iterable[str]) -> str:
    names = list(columns)
    return f"; there are {', '.join(map(plain, names[:12]))}{', …' if len(names) > 12 else ''}"


def _time_column(
    rows: Sequence[Row], columns: Sequence[str], time: str | None, unit: str | None
) -> tuple[str, float | None]:
    """Return the column of times, and its unit in seconds; None if all its cells have units of their own."""
    if time is None:
        time = next((name for name in _TIMES if name in columns), None)
        if time is None:
            raise UsageError(f"no column is recognised as the time: name it, --time COLUMN{_column_list(columns)}")
    elif time not in columns:
        raise UsageError(f"--time {time}: there is no such column{nearest(time, columns) or _column_list(columns)}")
    unit = unit or _unit(time)
    if unit is None and any(quantities.number(row.get(time)) is not None for row in rows):
        raise UsageError(f"the unit of {time!r} is not known: --unit s, ms, us or ns")
    return time, None if unit is None else UNITS[unit]


def _unit(column: str) -> str | None:
    """Return the unit at the end of a column's name; None if there is none."""
    match = _UNIT.search(column.lower())
    return match[1] if match else None


def _default_factors(
    rows: Sequence[TimedRow], columns: Sequence[str], time: str, group: Sequence[str], categories: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the columns with more than one value that are neither times nor names of single rows, and texts on those
    that differ and are left out.
    """
    names: list[str] = []
    notes: list[str] = []
    for name in columns:
        if name == time or name in group or _unit(name) is not None:
            continue
        values = [row.get(name) for _, row, _ in rows if not quantities.is_missing(row.get(name))]
        distinct = len(set(map(str, values)))
        if distinct < 2:
            continue
        if not name:  # the index of pandas, for example
            notes.append("a column without a name is not used")
        elif distinct > MOST_LEVELS and _is_category(rows, name, name in categories, []):
            notes.append(f"column {name} is not used: it has {distinct:,} texts, more than {MOST_LEVELS}")
        elif len(values) * 2 <= len(rows):
            notes.append(f"column {name} is not used: only {len(values):,} of {len(rows):,} rows have a value")
        else:
            names.append(name)
    return names, notes


def _is_category(rows: Sequence[TimedRow], name: str, is_stated: bool, notes: list[str]) -> bool:
    """Return whether a column is a category; add a text to `notes` if only some or odd cells are texts.

    Raises:
        UsageError: the column is a mixture of texts and numbers, or has other values.
    """
    cells = [(number, row) for number, row, _ in rows if not quantities.is_missing(row.get(name))]
    values = [row.get(name) for _, row in cells]

    def first(is_wanted: Callable[[Any, quantities.Quantity | None], bool]) -> str | None:
        """Return the first cell of a kind, with its place."""
        matches = (is_wanted(value, entry) for value, entry in zip(values, found, strict=True))
        return next((_cell_text(row, number, name) for (number, row), match in zip(cells, matches, strict=True) if match
                     ), None)  # fmt: skip

    found = [quantities.quantity(value) for value in values]
    invalid = first(lambda value, _: not isinstance(value, (int, float, str, bool)))
    if invalid is not None:
        raise UsageError(f"{invalid} is neither a number nor a text: name the columns to use, --extrinsic A,B")
    if is_stated:
        return True
    units = {entry.unit for entry in found if entry is not None}
    text = first(lambda _, entry: entry is None)
    has_commas = all(isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()) for value in values)
    remedy = f"write them alike, or name it with --category {plain(name)}"
    if text is not None and units != {""}:  # texts of which some may begin with a number: 2d, v100
        if units or has_commas:
            notes.append(f"{text} is no number, so the column is read as texts; a number is written 0.5, or 0.5 ms")
        return True
    if "" in units and text is None:
        text = first(lambda _, entry: entry is not None and bool(entry.unit))
    if text is not None:
        raise UsageError(f"{text} is no number, and other rows of column {plain(name)} have numbers: {remedy}")
    if quantities.scales(units) is None:
        usual = Counter(entry.unit for entry in found if entry is not None).most_common(1)[0][0]
        other = next(unit for unit in sorted(units) if quantities.scales({usual, unit}) is None)
        text = first(lambda _, entry: entry is not None and entry.unit == other)
        example = first(lambda _, entry: entry is not None and entry.unit == usual)
        raise UsageError(
            f"{text} and {example} have units that cannot be converted: {remedy}; converted are units of time "
            f"({quantities.UNITS_OF_TIME}) and of memory ({quantities.UNITS_OF_MEMORY})"
        )
    return False


def _factor(
    name: str, rows: Sequence[TimedRow], is_text: bool, values: dict[str, NDArray[Any]], notes: list[str]
) -> Factor:
    """Return the factor of a column; add its array to `values`, and a text on its unit to `notes`."""
    column = [row.get(name) for _, row, _ in rows]
    if is_text:
        texts = [str(value).strip() for value in column]
        counts = Counter(texts)
        if len(counts) > MOST_LEVELS:
            raise UsageError(
                f"column {plain(name)} has {len(counts):,} different texts, more than {MOST_LEVELS} of a factor"
            )
        values[name] = np.array(texts, dtype=object)
        return Factor(name, tuple(sorted(counts, key=lambda text: (-counts[text], text))))
    found = [entry for entry in map(quantities.quantity, column) if entry is not None]
    units = {entry.unit for entry in found}
    by_unit = quantities.scales(units) or {}
    numbers = np.array([entry.number * by_unit[entry.unit] for entry in found], dtype=float)
    base = ""
    if units != {""}:
        base = (
            min(units)
            if set(by_unit.values()) == {1.0}
            else "s"
            if min(units).lower() in quantities.TIME_UNITS
            else "B"
        )
        notes.append(
            f"column {plain(name)} has numbers with units, read as numbers in {base}; --category {plain(name)} takes "
            "them as texts"
        )
    if numbers.min() <= 0:
        number, row, _ = rows[int(numbers.argmin())]
        raise UsageError(
            f"{_cell_text(row, number, name)} cannot be raised to a power: add a constant, leave the column out, or "
            f"name it with --category {plain(name)}"
        )
    values[name] = numbers
    median = np.sort(numbers)[len(numbers) // 2]
    return Factor(name, (), float(median), float(numbers.min()), float(numbers.max()), base)


# --- files -------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file.

    Raises:
        UsageError: the file cannot be read, is too large, or contains no table.
    """
    suffix = path.suffix.lower()
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(f"{path} has {size / 1e6:,.0f} MB, more than {MOST_BYTES >> 20} MiB: aggregate rows first")
        if suffix == ".parquet":
            rows = _read_parquet(path)
        elif suffix in (".csv", ".tsv"):
            rows = _read_csv(path, "\t" if suffix == ".tsv" else ",")
        elif suffix in (".json", ".jsonl"):
            rows = _read_json(path, lines=suffix == ".jsonl")
        else:
            raise UsageError(f"{path} is not a known kind of table: {SHAPES}")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); {SHAPES}") from error
    if len(rows) > MOST_ROWS:
        raise UsageError(f"{path} has {len(rows):,} rows, more than {MOST_ROWS:,}: aggregate repetitions first")
    return [TableRow(row, str(path), number) for number, row in enumerate(rows, 1)]


def _read_csv(path: Path, delimiter: str) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True, skipinitialspace=True)
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
            _check_names(path, names, delimiter)
            rows = []
            for row in reader:
                if None in row:
                    raise UsageError(
                        f"{path}, line {reader.line_num}: has more values than there are names in the first line"
                    )
                rows.append(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a CSV table ({plain(str(error))})") from error
    if not rows:
        raise UsageError(f"{path}: there are no rows; {SHAPES}")
    return rows


def _check_names(path: Path, names: Sequence[str], delimiter: str) -> None:
    """Check that no other character separates the names and that they are unique.

    Raises:
        UsageError: another character separates them, or two are equal.
    """
    symbol = next(
        (
            character
            for character in (";", "\t", ",", "|")
            if character != delimiter and len(names) == 1 and character in names[0]
        ),
        "",
    )
    if symbol:
        raise UsageError(
            f"{path}: columns are separated by {symbol!r}, and a {path.suffix} needs {delimiter!r}: convert it, with "
            "decimal points in numbers"
        )
    duplicate = next((name for name in names if name and names.count(name) > 1), None)
    if duplicate is not None:
        raise UsageError(f"{path}: two columns are called {plain(duplicate)}: rename one")


def _read_json(path: Path, lines: bool) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({plain(str(error))[:80]})") from error
    if isinstance(content, dict):
        content = content.get("rows", content.get("configurations"))
    if not isinstance(content, list) or not all(isinstance(element, dict) for element in content):
        raise UsageError(f"{path}: not a list of objects, one for each configuration")
    return content


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import duckdb

    from xsp import table

    con = table.connect()
    try:
        result = con.execute(f"SELECT * FROM read_parquet({table.path_literal(path)}) LIMIT {MOST_ROWS + 1}")
        names = [column[0] for column in result.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    except duckdb.Error as error:
        raise UsageError(f"{path}: not Parquet ({plain(str(error)).splitlines()[0][:80]})") from error
    finally:
        con.close()
    return [{name: _without_decimal(value) for name, value in row.items()} for row in rows]


def _without_decimal(value: Any) -> Any:
    """Return a value, with decimals converted to float."""
    from decimal import Decimal

    return float(value) if isinstance(value, Decimal) else value
