"""A table that fits the width it is given: names are shortened in the middle, numbers never.

Where even that is not enough columns are left out, the last ones first, and the table says which.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

LEAST_NAME, LEAST_MAIN_NAME = 14, 24
"""Names are not shortened below this, nor is the one that a table is about below that: columns go first."""

_BETWEEN, _EDGES = 3, 2


def plain(text: str) -> str:
    """Return text that a terminal only shows: control characters and changes of direction become signs."""
    return "".join(_sign(letter) for letter in text)


def _sign(letter: str) -> str:
    if ord(letter) < 0x20:
        return chr(0x2400 + ord(letter))
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") else letter


def shortened(text: str, width: int) -> str:
    """Return a text in at most so many columns of a terminal, without its middle if it must be."""
    if cell_len(text) <= width:
        return text
    before = (width - 1) // 2
    after = width - 1 - before
    return set_cell_size(text, before) + "…" + set_cell_size(text[::-1], after)[::-1]


@dataclass
class FittingColumn:
    """One column: its heading, its cells as text, whether they are numbers, and whether it goes last of all."""

    heading: str
    cells: Sequence[str]
    numeric: bool = False
    main: bool = False
    wanted: int = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = max([self._word, *map(cell_len, self.cells)])

    @property
    def _word(self) -> int:
        return max(map(cell_len, self.heading.split()), default=1)

    @property
    def least(self) -> int:
        """The width below which the column is rather left out."""
        if self.numeric:
            return self.wanted
        return max(self._word, min(self.wanted, LEAST_MAIN_NAME if self.main else LEAST_NAME))


@dataclass
class FittingTable:
    """A table for the terminal whose widths are chosen when its room is known."""

    title: str
    columns: Sequence[FittingColumn]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the table and the notes below it."""
        shown = fitting(self.columns, options.max_width)
        made = Table(
            title=Text(plain(self.title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column, width in zip(shown, widths(shown, options.max_width), strict=True):
            made.add_column(Text(column.heading), width=width, justify="right" if column.numeric else "left")
        for row in zip(
            *(_cut(column, width.width) for column, width in zip(shown, made.columns, strict=True)), strict=True
        ):
            made.add_row(*row)
        yield made
        left = [column.heading for column in self.columns if not any(column is each for each in shown)]
        for note in [*self.notes, *([f"columns that do not fit: {', '.join(left)}"] if left else [])]:
            yield Text(note, style="dim")


def _cut(column: FittingColumn, width: int | None) -> list[Text]:
    return [Text(shortened(cell, width or column.wanted), no_wrap=True) for cell in column.cells]


def fitting(columns: Sequence[FittingColumn], room: int) -> list[FittingColumn]:
    """Return the columns that fit at their least width, at least one; the last ones go first, main ones last."""
    shown = list(columns)
    while len(shown) > 1 and _total([column.least for column in shown]) > room:
        loose = [place for place, column in enumerate(shown) if not column.main]
        shown.pop(loose[-1] if loose else -1)
    return shown


def widths(columns: Sequence[FittingColumn], room: int) -> list[int]:
    """Return each column's width: the least, and what is left to names first, then to headings."""
    chosen = [column.least for column in columns]
    for wanted in ([c.wanted for c in columns], [max(c.wanted, cell_len(c.heading)) for c in columns]):
        growing = [place for place in range(len(columns)) if chosen[place] < wanted[place]]
        while growing and _total(chosen) < room:
            place = min(growing, key=lambda place: chosen[place])
            chosen[place] += 1
            growing = [place for place in growing if chosen[place] < wanted[place]]
    return chosen


def _total(chosen: Sequence[int]) -> int:
    return sum(chosen) + _BETWEEN * (len(chosen) - 1) + _EDGES
