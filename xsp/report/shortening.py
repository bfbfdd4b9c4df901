"""Texts that are shortened to columns of a terminal. Nothing here loads rich's tables: the first screen has none."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size


def shortened(text: str, width: int) -> str:
    """Return a text in at most `width` columns of a terminal, without its middle if necessary."""
    if cell_len(text) <= width:
        return text
    before = (width - 1) // 2
    after = width - 1 - before
    return set_cell_size(text, before) + "…" + set_cell_size(text[::-1], after)[::-1]
