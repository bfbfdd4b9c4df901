"""A comparison as tables on a terminal, and as Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from xsp.comparison import ComparedRow, Comparison
from xsp.comparison.conclusion import conclusion
from xsp.comparison.evidence import FASTER, FASTER_HERE, SLOWER, SLOWER_HERE
from xsp.report.fitting import FittingColumn, FittingTable
from xsp.scrub import plain
from xsp.terminal import cell
from xsp.texts import counted

TITLES = {
    "step": "The step",
    "loop": "The loop: a step with the time between it and the step before",
    "phase": "Phases of an iteration",
    "idle": "Why a device was idle, per step",
    "launch": "Launches, per step: time of the host",
    "kernel class": "Device work by class of kernel, per step of a device",
    "operator on device": "Operators by the time of their device work, per step",
    "call": "Calls of the model level",
    "layer": "Layers: time on the host, without the layers inside",
    "layer on device": "Layers: time of their device work",
    "kernel": "Device work by name, per step",
    "operator": "Operators by name, per step: time on the host, without the operators inside",
    "memory": "Memory",
}
_TIMES = (
    "name", "type", "a_ms", "b_ms", "change_percent", "low_percent", "high_percent", "detectable_percent", "change_ms",
    "a_between_percent", "b_between_percent", "a_calls", "b_calls", "verdict",
)  # fmt: skip
_MEMORY = ("name", "type", "a_mib", "b_mib", "change_mib", "verdict")
_MAIN = ("name", "verdict")
_CHANGE_VERDICTS = (SLOWER, FASTER, SLOWER_HERE, FASTER_HERE, "more", "less")


def tables(comparison: Comparison, limit: int | None = None) -> RenderableType:
    """Return the conclusion on the step, the differences, a table for each section, and the rule of the verdicts.

    Args:
        comparison: the comparison.
        limit: rows of a section; if not all fit, the changed ones are preferred.
    """
    parts: list[RenderableType] = [
        Text(plain(f"A: {comparison.a}{_runs(comparison.a_runs)}"), style="bold"),
        Text(plain(f"B: {comparison.b}{_runs(comparison.b_runs)}"), style="bold"),
    ]
    parts.append(Text())
    parts += [
        Text(plain(sentence), style="bold" if index == 0 else "")
        for index, sentence in enumerate(conclusion(comparison))
    ]
    if comparison.differences:
        parts += [Text(), _table(*_difference_section(comparison))]
    for title, names, rows, hidden in _sections(comparison, limit):
        parts += [Text(), _table(title, names, rows, hidden)]
    return Group(*parts, Text(), Text(comparison.repeats.rule, style="dim"))


def markdown(comparison: Comparison, limit: int | None = None) -> str:
    """Return the content of `tables` as Markdown."""
    lines = [f"A: `{comparison.a}`{_runs(comparison.a_runs)}, B: `{comparison.b}`{_runs(comparison.b_runs)}"]
    lines += [line for sentence in conclusion(comparison) for line in ("", _escaped(plain(sentence)))]
    if comparison.differences:
        lines += ["", *_markdown(*_difference_section(comparison))]
    for title, names, rows, hidden in _sections(comparison, limit):
        lines += ["", *_markdown(title, names, rows, hidden)]
    return "\n".join([*lines, "", comparison.repeats.rule, ""])


def _runs(runs: int) -> str:
    return f" ({runs} runs)" if runs > 1 else ""


_Section = tuple[str, Sequence[str], list[tuple[object, ...]], int]


def _difference_section(comparison: Comparison) -> _Section:
    rows: list[tuple[object, ...]] = [
        (difference.subject, difference.a, difference.b) for difference in comparison.differences
    ]
    return "Differences other than times", ("", "A", "B"), rows, 0


def _sections(comparison: Comparison, limit: int | None) -> Iterator[_Section]:
    """Yield title, names of columns, rows, and the number of rows that are left out."""
    for section, title in TITLES.items():
        rows = comparison.section(section)
        if not rows:
            continue
        shown_rows = rows if limit is None or len(rows) <= limit else _heaviest(rows, limit)
        columns = _MEMORY if section == "memory" else _TIMES
        names = [name for name in columns if any(_has_figure(row, name) for row in rows)]
        yield (
            title,
            [name.replace("_", " ") for name in names],
            [tuple(getattr(row, name) for name in names) for row in shown_rows],
            len(rows) - len(shown_rows),
        )


def _has_figure(row: ComparedRow, name: str) -> bool:
    value = getattr(row, name)
    return value is not None and not (name in ("a_calls", "b_calls") and value == 1)


def _heaviest(rows: Sequence[ComparedRow], limit: int) -> list[ComparedRow]:
    """Return the changed rows first, then the most expensive ones, in their original order."""

    def weight(index: int) -> tuple[bool, float]:
        row = rows[index]
        change = row.change_ms if row.change_ms is not None else row.change_mib
        size = max(
            abs(figure) for figure in (change, row.a_ms, row.b_ms, row.a_mib, row.b_mib, 0.0) if figure is not None
        )
        is_changed = row.verdict in _CHANGE_VERDICTS or row.aligned is None
        return is_changed, abs(change or 0.0) if is_changed and change is not None else size

    return [rows[index] for index in sorted(sorted(range(len(rows)), key=weight, reverse=True)[:limit])]


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[object, ...]], hidden: int) -> RenderableType:
    columns = []
    for index, name in enumerate(names):
        values = [row[index] for row in rows]
        column = FittingColumn(name, [cell(value) for value in values], any(isinstance(v, float) for v in values))
        column.is_main = name in _MAIN
        column.has_kernels = name == "name" and title == TITLES["kernel"]
        columns.append(column)
    return FittingTable(title, columns, [f"{counted(hidden, 'more row')}"] if hidden else [])


def _markdown(title: str, names: Sequence[str], rows: Sequence[tuple[object, ...]], hidden: int) -> Iterator[str]:
    yield f"**{title}**"
    yield ""
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(_escaped(cell(value)) for value in row) + " |"
    if hidden:
        yield f"\n{counted(hidden, 'more row')}"


_MARKUP = re.compile(r"([\\`*<|\[]|(?<![^\W_])_|_(?![^\W_]))")  # an underscore within a word is text


def _escaped(text: str) -> str:
    """Return text that Markdown shows unchanged: names of kernels are C++, with `<`, `*` and `|`."""
    return _MARKUP.sub(r"\\\1", text)
