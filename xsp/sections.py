"""Sections of the report from other writers: plain data in the run directory, which the page of the run shows.

The report does not know the writers. A writer puts one file under its own name into the run directory, and
`xsp report RUN` shows all sections in the order of their names, below the figures of the recording:

```python
from pathlib import Path

from xsp import sections
from xsp.sections import Chart, Section, Series, Table, Text

ladder = Chart("bars", "Rungs", "ms", at=("ceiling", "best", "as run"), series=(Series("step", (3.1, 4.4, None)),))
table = Table(("rung", "ms"), (("ceiling", 3.1), ("best", 4.4), ("as run", None)))
section = Section("Bound", (Text("What the layers cost by themselves."), ladder, table))
sections.write(Path("runs/demo"), "bound", section)  # runs/demo/sections/bound.json, in one piece
```

The file is JSON: `xsp_section` (the version of the form, 1), `title` and `parts`, a list of objects with one key each,
`text`, `table`, `chart` or `tree`, whose fields are those of the classes here. An unknown figure is None, never 0. All
content is text: the page shows it, and does not interpret it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from xsp import inside, rundir
from xsp.errors import OutputError, TraceError, UsageError

VERSION = 1

MAX_BYTES = 8 << 20
"""Largest file in bytes; with a larger one a page would not open at once."""

MAX_SECTIONS = 50

MAX_LEVELS = 60
"""Most levels of a tree."""

KINDS = ("bars", "stacked", "lines", "points", "grid")

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,59}")

Cell: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table, which can be sorted and filtered on the page."""

    columns: tuple[str, ...]
    """Names; the endings `_ms`, `_us`, `_ns`, `_mib`, `_bytes`, `_percent` are shown as units."""

    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Series:
    """A series of values with one name and one colour, a value for each position of the chart."""

    name: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    """Lower ends of intervals, drawn as whiskers; empty if there are none, like `high`."""

    high: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart of one or more series over the same positions."""

    kind: str
    """How it is drawn.

    `bars`: horizontal bars side by side; `stacked`: horizontal bars with a part for each series; `lines`; `points`;
    `grid`: a square for each value, in a row for each series and a column for each element of `at`.
    """

    title: str
    unit: str
    """Unit of the values."""

    at: tuple[Cell, ...]
    """Names of the bars, or the numbers over which lines and points are drawn."""

    series: tuple[Series, ...]
    """Where no series has a value, the lines are interrupted; where only others have one, a line goes on."""

    over: str = ""
    """Label of the axis of `at`, with its unit."""

    log: tuple[str, ...] = ()
    """Axes with a logarithmic scale: `at`, `values`."""

    labels: tuple[str, ...] = ()
    """Label of each point, for the tooltip; empty if `at` identifies the points."""


@dataclass(frozen=True)
class Branch:
    """A row of a tree, with the rows inside it."""

    name: str
    cells: tuple[Cell, ...] = ()
    marked: bool = False
    inside: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Tree:
    """A tree of rows; only the outermost are open at first."""

    columns: tuple[str, ...]
    """Names of the columns of the cells; the name of a row stands before its cells."""

    branches: tuple[Branch, ...]
    title: str = ""
    mark: str = ""
    """Meaning of a mark, such as "on the longest path"."""


Part: TypeAlias = Text | Table | Chart | Tree


@dataclass(frozen=True)
class Section:
    """A section of the report."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class SectionFiles:
    """The sections of a run."""

    sections: dict[str, Section]
    """By name, in the order of the names."""

    damaged: tuple[str, ...]
    """A line for each file that is not a section: its name, and the reason."""


def check(run: Path) -> None:
    """Check that a folder is a run directory.

    Raises:
        OutputError: it is not.
    """
    if not rundir.is_run_directory(run):
        raise OutputError(f"{run}: not a run directory; sections belong to a run")


def write(run: Path, name: str, section: Section) -> Path:
    """Write a section into a run directory; an existing section of that name is replaced.

    Args:
        run: the run directory.
        name: name of the section: lower-case letters, digits and hyphens.
        section: the section; numbers that are not finite become None.

    Returns:
        The path of the file.

    Raises:
        UsageError: the name is invalid, or the section is inconsistent (rows of different lengths, for example).
        OutputError: there is no run, or the file cannot be written; an existing section is unchanged.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name of a section: use lowercase letters, digits and hyphens")
    content = {"xsp_section": VERSION, **plain(section)}
    try:
        of(content)
    except ValueError as error:
        raise UsageError(f"the section {name}: {error}") from error
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    if len(text) > MAX_BYTES:
        raise UsageError(f"the section {name} has {len(text) >> 20} MB; a page shows up to {MAX_BYTES >> 20}")
    check(run)
    folder = run / rundir.SECTIONS
    try:
        folder.mkdir(exist_ok=True)
        rundir.check_inside(run, [folder / f"{name}.json"])
    except (OSError, TraceError) as error:
        raise OutputError(f"{folder}: cannot be written ({error})") from error
    rundir.write_atomically(folder / f"{name}.json", text)
    return folder / f"{name}.json"


def write_if_run(folder: Path, name: str, section: Section) -> Path | None:
    """Write a section into a run directory, and return its file; None if it is no run directory or not writable."""
    try:
        return write(folder, name, section) if rundir.is_run_directory(folder) else None
    except (OutputError, OSError):  # the name of a model may be too long for a path
        return None


def read(run: Path) -> SectionFiles:
    """Return the sections of a run directory; unreadable ones are listed, and do not affect the others."""
    sections: dict[str, Section] = {}
    damaged: list[str] = []
    files = sorted((run / rundir.SECTIONS).glob("*.json"))
    for file in files[:MAX_SECTIONS]:
        try:
            if not NAME.fullmatch(file.stem):
                raise ValueError("its name is not a name of a section")
            sections[file.stem] = of(inside.read_json(run, file, MAX_BYTES))
        except OSError as error:
            damaged.append(f"{file.name}: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            damaged.append(f"{file.name}: {error}")
    if len(files) > MAX_SECTIONS:
        damaged.append(f"{len(files) - MAX_SECTIONS} more files: a page has up to {MAX_SECTIONS} sections")
    return SectionFiles(sections, tuple(damaged))


def plain(section: Section) -> dict[str, Any]:
    """Return title and parts of a section in a form for JSON: numbers that are not finite become None."""
    parts = []
    for part in section.parts:
        content = finite(asdict(part))
        parts.append({type(part).__name__.lower(): content["text"] if isinstance(part, Text) else content})
    return {"title": section.title, "parts": parts}


def of(content: Any) -> Section:
    """Return the section that a JSON object describes.

    Raises:
        ValueError: it does not describe a section; the message says where.
    """
    fields = _object(content, "a section")
    version = fields.get("xsp_section")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"xsp_section is {version!r}; this xsp reads version {VERSION}")
    return Section(_text(fields, "title"), tuple(_part(part) for part in _list(fields, "parts")))


# --- reading ------------------------------------------------------------------------------------------------


def _part(value: Any) -> Part:
    part = _object(value, "a part")
    if len(part) != 1 or next(iter(part)) not in _PARTS:
        raise ValueError(f"a part has one key of {', '.join(_PARTS)}, not {', '.join(map(repr, part)) or 'none'}"[:200])
    ((kind, content),) = part.items()
    return _PARTS[kind](content)


def _table(content: Any) -> Table:
    table = _object(content, "a table")
    columns = _texts(table, "columns")
    rows = tuple(_cells(row, "a row", len(columns)) for row in _list(table, "rows"))
    return Table(columns, rows, _text(table, "title", ""))


def _chart(content: Any) -> Chart:
    chart = _object(content, "a chart")
    kind, at = _text(chart, "kind"), _cells(chart.get("at"), "at")
    if kind not in KINDS:
        raise ValueError(f"there is no chart {kind[:40]!r}; there are {', '.join(KINDS)}")
    if kind in ("lines", "points") and any(isinstance(position, (str, bool)) for position in at):
        raise ValueError(f"a chart of {kind} needs numbers as at")
    log, labels = _texts(chart, "log", ()), _texts(chart, "labels", ())
    if set(log) - {"at", "values"} or len(labels) not in (0, len(at)):
        raise ValueError("log must name axes (at, values), and labels must be as many as at")
    series = tuple(_series(element, len(at)) for element in _list(chart, "series"))
    return Chart(kind, _text(chart, "title"), _text(chart, "unit"), at, series, _text(chart, "over", ""), log, labels)


def _series(content: Any, length: int) -> Series:
    series = _object(content, "a series")
    low, high = (_numbers(series.get(name) or [], name, length) for name in ("low", "high"))
    if len(low) != len(high):
        raise ValueError("low and high must be given together")
    return Series(_text(series, "name"), _numbers(series.get("values"), "values", length, required=True), low, high)


def _tree(content: Any) -> Tree:
    tree = _object(content, "a tree")
    columns = _texts(tree, "columns")
    branches = tuple(_branch(branch, len(columns), 1) for branch in _list(tree, "branches"))
    return Tree(columns, branches, _text(tree, "title", ""), _text(tree, "mark", ""))


def _branch(content: Any, width: int, level: int) -> Branch:
    branch = _object(content, "a branch")
    if level > MAX_LEVELS:
        raise ValueError(f"a tree can have up to {MAX_LEVELS} levels")
    if not isinstance(branch.get("marked", False), bool):
        raise ValueError("marked must be true or false")
    cells = _cells(branch.get("cells", []), "cells")
    if len(cells) not in (0, width):
        raise ValueError(f"a branch has {len(cells)} cells, and {width} columns")
    children = tuple(_branch(child, width, level + 1) for child in _list(branch, "inside", ()))
    return Branch(_text(branch, "name"), cells, branch.get("marked", False), children)


_PARTS: Mapping[str, Callable[[Any], Part]] = {
    "text": lambda held: Text(_text({"text": held}, "text")),
    "table": _table,
    "chart": _chart,
    "tree": _tree,
}


def _object(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{label} must be an object")
    return value


def _text(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def _list(fields: Mapping[str, Any], name: str, default: Any = None) -> list[Any]:
    value = fields.get(name, default)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list")
    return list(value)


def _texts(fields: Mapping[str, Any], name: str, default: Any = None) -> tuple[str, ...]:
    values = _list(fields, name, default)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts")
    return tuple(values)


def _cells(value: Any, label: str, length: int | None = None) -> tuple[Cell, ...]:
    if not isinstance(value, (list, tuple)) or not all(cell is None or isinstance(cell, _SCALARS) for cell in value):
        raise ValueError(f"{label} must be a list of texts, numbers and nulls")
    if length is not None and len(value) != length:
        raise ValueError(f"{label} has {len(value)} cells, and {length} columns")
    return tuple(value)


_SCALARS = (str, int, float, bool)


def _numbers(value: Any, label: str, length: int, *, required: bool = False) -> tuple[float | None, ...]:
    cells = _cells(value, label)
    if any(isinstance(cell, (str, bool)) for cell in cells):
        raise ValueError(f"{label} must be a list of numbers and nulls")
    if len(cells) != length and (required or cells):
        raise ValueError(f"{label} has {len(cells)} figures, and the chart {length} places")
    return cells  # type: ignore[return-value]


def finite(value: Any) -> Any:
    """Return a value in a form for JSON: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {name: finite(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
