"""What several files of tests ask a trace: rows of an analysis, the account of its iterations, advice on devices."""

from __future__ import annotations

from typing import Any

from xsp import account
from xsp.account.entries import Iterations
from xsp.advise import advisor
from xsp.advise.advice import Advice, Needs
from xsp.analyses import ANALYSES
from xsp.store.trace import Trace


def ask(name: str, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the rows of an analysis."""
    return ANALYSES[name](trace).select(columns).fetchall()


def ask_rounded(name: str, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the rows of an analysis, numbers to six digits after the point."""
    rows = ask(name, trace, columns)
    return [tuple(round(cell, 6) if isinstance(cell, float) else cell for cell in row) for row in rows]


def main_of(trace: Trace) -> Iterations:
    """Return the account of the iterations of the main kind, which adds up."""
    result = account.of(trace)
    assert result.main is not None
    assert result.violations == ()
    return result.main


def device_advice_of(trace: Trace) -> list[Advice]:
    """Return the advice on device work that the trace alone gives."""
    return [piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.question.startswith("device-")]
