"""A table that fits a given width: names are shortened in the middle, numbers never.

In names of modules, parts that all names share at the same place are removed first, so that different names stay
different. Names of kernels are drawn as `xsp.device.kernelnames.readable` writes them. If that is not enough, columns
are left out, the last ones first, and the table lists them.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from xsp.device import kernelnames
from xsp.scrub import plain
from xsp.texts import shortened

LEAST_NAME_WIDTH, LEAST_MAIN_NAME_WIDTH = 14, 24
"""Least widths of names, and of the name that a table is about: columns are left out before names become shorter."""

_GAP, _EDGES = 3, 2


_PATH = re.compile(r"[\w-]+(\.[\w-]+)+")
"""The name of a module, a file or a function: parts with dots between them."""


def shorten_distinctly(names: Sequence[str], width: int) -> list[str]:
    """Return names in at most `width` columns of a terminal; different module names stay different if possible.

    Parts of the name of a module are removed from the left if no other part occurs at their place after the same
    prefix. If that is not enough, the remaining words are cut to their first letter, numbers never; and if that is not
    enough either, the middle is removed. Other names lose the words that all of them begin with, then the middle.
    """
    followers: dict[tuple[str, ...], set[str | None]] = defaultdict(set)
    paths = [tuple(name.split(".")) for name in names if _PATH.fullmatch(name)]
    for path in paths:
        for index, part in enumerate((*path, None)):
            followers[path[:index]].add(part)
    lead = _shared_lead([name for name in names if not _PATH.fullmatch(name)])
    # A name without the words that all names begin with, and without its middle, if necessary.
    return [
        _shorten_path(name, width, followers)
        if _PATH.fullmatch(name)
        else shortened(name if cell_len(name) <= width else f"…{name[len(lead) :]}" if lead else name, width)
        for name in names
    ]


def kernel_names(names: Sequence[str], width: int | None = None) -> list[str]:
    """Return names in at most `width` columns: those of kernels readable, others as `shorten_distinctly` does.

    Without a device, the names in a column of kernels are those of operators and primitives.
    """
    letters = max(map(len, names), default=0) if width is None else width
    flags = [kernelnames.is_cpp(name) or re.fullmatch(r"\w+", name) is not None for name in names]
    kernels = iter(
        kernelnames.readable_each([name for name, is_kernel in zip(names, flags, strict=True) if is_kernel], letters)
    )
    plain_names = iter(
        shorten_distinctly([name for name, is_kernel in zip(names, flags, strict=True) if not is_kernel], letters)
    )
    return [shortened(next(kernels if is_kernel else plain_names), letters) for is_kernel in flags]


def _shared_lead(names: Sequence[str]) -> str:
    """Return the words that all names begin with, if there are several names."""
    if len(set(names)) < 2 or all(name.startswith("[") for name in names):  # a shape needs its first sizes
        return ""
    pairs = zip(min(names), max(names), strict=False)  # all names between these two share their beginning
    lead = "".join(letter for letter, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return lead[: lead.rfind(" ") + 1]


def _shorten_path(name: str, width: int, followers: Mapping[tuple[str, ...], Collection[str | None]]) -> str:
    path = tuple(name.split("."))
    parts: list[str] = list(path)
    for index in range(len(path) - 1):
        if cell_len(_joined(parts)) <= width:
            break
        if len(followers[path[:index]]) == 1:
            parts[index] = ""
    for index in range(len(path) - 1):
        if cell_len(_joined(parts)) <= width:
            break
        if not parts[index].isdigit():
            parts[index] = parts[index][:1]
    return shortened(_joined(parts), width)


def _joined(parts: Sequence[str]) -> str:
    """Return parts with dots between them; one ellipsis replaces adjacent parts that are left out."""
    text = ""
    for part, previous in zip(parts, ("", *parts), strict=False):
        if part:
            text += f".{part}" if previous else part
        elif previous or not text:
            text += "…"
    return text


@dataclass
class FittingColumn:
    """A column: its heading, its cells as text, whether they are numbers or sentences, whether it is left out last."""

    heading: str
    cells: Sequence[str]
    is_numeric: bool = False
    is_main: bool = False
    is_prose: bool = False
    """Whether its cells are sentences, which may take several lines."""

    has_kernels: bool = False
    """Whether its cells can be names of kernels, which are drawn in their readable form."""

    full_width: int = field(init=False)

    def __post_init__(self) -> None:
        texts = kernel_names(self.cells) if self.has_kernels else self.cells
        self.full_width = max([self._longest_word, *map(cell_len, texts)])

    @property
    def _longest_word(self) -> int:
        return max(map(cell_len, self.heading.split()), default=1)

    @property
    def least_width(self) -> int:
        """The width below which the column is left out."""
        if self.is_numeric:
            return self.full_width
        return max(
            self._longest_word, min(self.full_width, LEAST_MAIN_NAME_WIDTH if self.is_main else LEAST_NAME_WIDTH)
        )


@dataclass
class FittingTable:
    """A table for the terminal; the widths of its columns are chosen when the width of the terminal is known."""

    title: str
    columns: Sequence[FittingColumn]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table and the notes below it."""
        columns = fitting(self.columns, options.max_width)
        grid = Table(
            title=Text(plain(self.title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column, width in zip(columns, widths(columns, options.max_width), strict=True):
            grid.add_column(Text(column.heading), width=width, justify="right" if column.is_numeric else "left")
        for row in zip(
            *(_cut(column, width.width) for column, width in zip(columns, grid.columns, strict=True)), strict=True
        ):
            grid.add_row(*row)
        yield grid
        hidden = [column.heading for column in self.columns if not any(column is candidate for candidate in columns)]
        for note in [*self.notes, *([f"columns that do not fit: {', '.join(hidden)}"] if hidden else [])]:
            yield Text(note, style="dim")


def _cut(column: FittingColumn, width: int | None) -> list[Text]:
    if column.is_prose:
        return [Text(cell) for cell in column.cells]
    room = width or column.full_width
    texts = kernel_names(column.cells, room) if column.has_kernels else shorten_distinctly(column.cells, room)
    return [Text(cell, no_wrap=True) for cell in texts]


def fitting(columns: Sequence[FittingColumn], room: int) -> list[FittingColumn]:
    """Return the columns that fit at their least width, at least one; drop the last ones first, main columns last."""
    fitted = list(columns)
    while len(fitted) > 1 and _total_width([column.least_width for column in fitted]) > room:
        optional = [index for index, column in enumerate(fitted) if not column.is_main]
        fitted.pop(optional[-1] if optional else -1)
    return fitted


def widths(columns: Sequence[FittingColumn], room: int) -> list[int]:
    """Return the width of each column: its least width, and a share of the rest, for names first, then for headings."""
    result = [column.least_width for column in columns]
    for targets in ([c.full_width for c in columns], [max(c.full_width, cell_len(c.heading)) for c in columns]):
        growing = [index for index in range(len(columns)) if result[index] < targets[index]]
        while growing and _total_width(result) < room:
            index = min(growing, key=lambda index: result[index])
            result[index] += 1
            growing = [index for index in growing if result[index] < targets[index]]
    return result


def _total_width(column_widths: Sequence[int]) -> int:
    return sum(column_widths) + _GAP * (len(column_widths) - 1) + _EDGES
