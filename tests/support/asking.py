"""The rows of an analysis, as the tests of analyses compare them."""

from __future__ import annotations

from typing import Any

from xsp.analyses import ANALYSES
from xsp.store.trace import Trace


def ask(name: str, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the rows of an analysis."""
    return ANALYSES[name](trace).select(columns).fetchall()


def ask_rounded(name: str, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the rows of an analysis, numbers to six digits after the point."""
    rows = ask(name, trace, columns)
    return [tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row) for row in rows]
