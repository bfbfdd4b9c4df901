"""A result document (`xsp.sections`) as text for a terminal of 80 columns: paragraphs are wrapped, columns aligned.

The values of a column whose name ends in a unit (`_ms`, `_bytes`, `_percent`) are shown with the unit that fits, and
its heading without it. Bars of one series and lines with many positions are drawn with blocks, a small grid is a
table; other charts are left out: whatever they show is in a table of the same document.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from xsp.scrub import plain
from xsp.sections import Branch, Cell, Chart, Part, Section, Table, Text, Tree
from xsp.texts import MISSING, amount, cut, ns_text, number

WIDTH = 79

MOST_ROWS = 20
"""Number of rows of a table that are shown; the others are in JSON and on the page."""

MOST_POSITIONS = 10
"""Most positions of a grid that is shown, and of lines that are not drawn: a table shows those."""

BLOCKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 22

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
"""A space at which lines are not wrapped; it is shown as a space."""

_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def page(section: Section, next_command: str = "", most_rows: int = MOST_ROWS) -> str:
    """Return a document as text: its title, its parts with an empty line between them, and the next command."""
    lines = wrapped(section.title)
    follows_text = False
    for part in section.parts:
        block = _part(part, most_rows)
        is_text = isinstance(part, Text)
        lines += [*([""] if block and not (is_text and follows_text) else []), *block]
        follows_text = is_text if block else follows_text
    return "\n".join([*lines, *(["", f"next: {next_command}"] if next_command else [])])


def _part(part: Part, most_rows: int) -> list[str]:
    if isinstance(part, Text):
        return wrapped(part.text)
    if isinstance(part, Tree):
        rows = [row for branch in part.branches for row in _rows(branch)]
        part = Table(("", *part.columns), tuple(rows), part.title)
    elif isinstance(part, Chart):
        if part.kind == "lines" and len(part.at) > MOST_POSITIONS:
            return _drawn_lines(part)
        if part.kind == "bars" and len(part.series) == 1:
            return _drawn_bars(part)
        if part.kind != "grid" or not 0 < len(part.at) <= MOST_POSITIONS:
            return []
        rows = [(f"{place} {row.name}", *row.values) for place, row in enumerate(part.series, 1)]
        part = Table(("", *(str(place + 1) for place in range(len(part.at)))), tuple(rows), part.title)
    hidden = len(part.rows) - most_rows
    more = [f"{hidden:,} more in --format json"] if hidden > 0 else []
    return [*([plain(part.title)] if part.title else []), *table_lines(part, most_rows), *more]


def _drawn_bars(chart: Chart) -> list[str]:
    """Return a row for each value: its interval, and a bar up to the largest, with a thin line over the interval."""
    (series,) = chart.series
    ends: Sequence[tuple[float | None, float | None]] = list(zip(series.low, series.high, strict=True))
    ends = ends or [(None, None)] * len(series.values)
    largest = max((value for value in (*series.values, *series.high) if value is not None), default=0.0) or 1.0
    rows = []
    for label, value, (low, high) in zip(chart.at, series.values, ends, strict=True):
        interval, bar = "", "█" * round(BAR_WIDTH * (value or 0.0) / largest)
        if value is not None and low is not None and high is not None and low < high:
            interval = f"{cell(low, chart.unit)} … {cell(high, chart.unit)}"
            first, last = (round(BAR_WIDTH * end / largest) for end in (low, high))
            bar = bar[:first].ljust(last, "─")
        rows.append((cell(label), cell(value, chart.unit), interval, bar))
    heading = cut(chart.title, 30)
    return column_lines((heading, series.name, "95 % interval" if series.low else "", ""), rows, (0, 3))


def _drawn_lines(chart: Chart) -> list[str]:
    """Return a row of blocks for each series: its values over the positions, up to its own largest value."""
    is_log = "at" in chart.log
    positions = [math.log(at) if is_log else at for at in chart.at if isinstance(at, (int, float))]
    first, extent = min(positions), (max(positions) - min(positions)) or 1.0
    name_width = min(30, max(len(plain(series.name)) for series in chart.series))
    width = WIDTH - name_width - 1
    over = f"{chart.over}, {chart.at[0]:,} to {chart.at[-1]:,}{' (logarithmic)' if is_log else ''}"
    lines = wrapped(f"{chart.title} by {over}: each row up to its own largest {chart.unit}")
    for series in chart.series:
        largest = max((value for value in series.values if value is not None), default=0.0) or 1.0
        blocks = [" "] * width
        for position, value in zip(positions, series.values, strict=True):
            if value is not None:
                column = round((width - 1) * (position - first) / extent)
                blocks[column] = BLOCKS[max(1, min(8, math.ceil(8 * value / largest)))]
        lines.append(f"{cut(plain(series.name), name_width):{name_width}} {''.join(blocks)}".rstrip())
    return lines


def _rows(branch: Branch, level: int = 0) -> Iterable[tuple[Cell, ...]]:
    yield (" " * 2 * level + branch.name, *branch.cells)
    for child in branch.inside:
        yield from _rows(child, level + 1)


def table_lines(table: Table, most_rows: int = MOST_ROWS) -> list[str]:
    """Return the headings and the first rows of a table as lines; a column without any value is left out."""
    rows = table.rows[:most_rows]
    shown = [place for place in range(len(table.columns)) if any(row[place] is not None for row in rows) or not rows]
    units = [_unit(table.columns[place]) for place in shown]
    is_text = [not any(isinstance(row[place], (int, float)) for row in rows) for place in shown]
    headings = [table.columns[place].removesuffix(f"_{unit}") for place, unit in zip(shown, units, strict=True)]
    cells = [[cell(row[place], unit) for place, unit in zip(shown, units, strict=True)] for row in rows]
    left = [place for place, text in enumerate(is_text) if text]
    return column_lines([heading.replace("_", " ") for heading in headings], cells, left)


def _unit(column: str) -> str:
    unit = column.rpartition("_")[2]
    return unit if unit in _NS or unit in ("bytes", "percent") else ""


def cell(value: Any, unit: str = "") -> str:
    """Return a value of a table as text, with its unit; a dash for None, names without control characters."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return plain(str(value))
    if unit in _NS:
        return ns_text(value * _NS[unit])
    if unit == "bytes":
        return amount(value, "B")
    if unit == "percent":
        return f"{value:,.{1 if abs(value) < 1000 else 0}f} %"
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if abs(value) >= 10_000 else str(value)


def column_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int | Iterable[int] = (0,)) -> list[str]:
    """Return lines of aligned columns, within `WIDTH` characters.

    Args:
        headings: the headings of the columns.
        rows: the texts of the cells, by row.
        left: the columns that are left-aligned, by place, or the number of the first ones. If a line would be too
            long, the last of them is wrapped, if it is the last column, or the longest of them is cut.
    """
    cells = [list(headings), *map(list, rows)]
    left_columns = set(range(left)) if isinstance(left, int) else set(left)
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    last = len(widths) - 1
    is_wrapped = excess > 0 and last in left_columns and widths[last] > 24
    if is_wrapped:
        widths[last] = max(20, widths[last] - excess)
    elif excess > 0 and left_columns:
        longest = max(left_columns, key=lambda column: widths[column])
        widths[longest] = max(8, widths[longest] - excess)
    lines = []
    for row in cells:
        texts = [
            cut(text, width).ljust(width) if column in left_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        if is_wrapped and len(row[last]) > widths[last]:
            start = "".join(f"{text}  " for text in texts[:last])
            parts = textwrap.wrap(row[last], widths[last], break_on_hyphens=False)
            lines += [f"{start if not number else ' ' * len(start)}{part}" for number, part in enumerate(parts)]
        else:
            lines.append("  ".join(texts).rstrip())
    if len(widths) > 2 and max(map(len, lines)) > WIDTH:  # in two parts, both with the first column
        half = 1 + len(widths) // 2
        ranges = (range(half), (0, *range(half, len(widths))))
        first, second = (
            column_lines(
                [headings[column] for column in shown],
                [[row[column] for column in shown] for row in cells[1:]],
                [place for place, column in enumerate(shown) if column in left_columns],
            )
            for shown in ranges
        )
        return [*first, "", *second]
    return lines


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Return the lines of a text; those after the first are indented."""
    lines = textwrap.wrap(plain(text), WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(NO_BREAK_SPACE, " ") for line in lines]


def labelled_lines(label: str, texts: Sequence[str]) -> list[str]:
    """Return the wrapped lines of texts, each with `label` before it."""
    return [line for text in texts for line in wrapped(f"{label}: {text}")]
