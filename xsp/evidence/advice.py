"""Advice in the JSON form: pieces with their spans, the questions asked, and the unanswered questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xsp import advise
from xsp.advise import Advice, Advised, Needs
from xsp.evidence import citations
from xsp.evidence.form import NONE, Citation, Document, document, left_out, statement
from xsp.store.trace import Trace


def of_trace(trace: Trace, source: Mapping[str, Any], first: int, limit: int) -> Document:
    """Return the advice of the questions that a trace alone can answer: nothing is run or captured."""
    return of(advise.of(trace, most=Needs.TRACE), source, first, limit, citations.of_step(trace))


def of(
    found: Advised, source: Mapping[str, Any], first: int = 0, limit: int | None = None, step: Citation = NONE
) -> Document:
    """Return advice as a document.

    Args:
        found: the advice.
        source: the run that it is for.
        first: index of the first piece, from 0.
        limit: maximum number of pieces.
        step: spans of the step, which the statement on its time cites.
    """
    pieces = found.advice[first:] if limit is None else found.advice[first : first + limit]
    notes = [left_out(f"advice that would {cause}" if cause.startswith("gain") else f"advice that {cause}", count, None)
             for cause, count in found.left_out.items()]  # fmt: skip
    remaining = len(found.advice) - first - len(pieces)
    if remaining > 0:
        notes.append(left_out("advice", remaining, f"first={first + len(pieces)}"))
    return document(
        "advice",
        source,
        statements=[
            *([_of_step(found, step)] if found.step is not None else []),
            *(statement(text, {}, NONE, "advice") for text in found.ideal),
            *([_of_plan(found)] if found.together is not None else []),
        ],
        step=None if found.step is None else asdict(found.step),
        advice=[_piece(piece) for piece in pieces],
        asked=list(found.asked),
        unanswered=dict(found.unanswered),
        first=first,
        left_out=notes,
    )


def _of_step(report: Advised, cited: Citation) -> Document:
    assert report.step is not None
    unit, ms = report.step.what, report.step.ms
    says = f"the {unit} that gains are a part of takes {ms.value:.4g} ms"
    figures = {"low_ms": ms.low, "ms": ms.value, "high_ms": ms.high, "steps": report.step.steps}
    return statement(says, figures, cited, "advice")


def _of_plan(report: Advised) -> Document:
    assert report.together is not None
    numbers = {id(piece): index for index, piece in enumerate(report.advice)}
    order = [numbers[id(part.piece)] for part in report.together.parts]
    says = (
        f"pieces {', '.join(map(str, order))}, counted from 0, in this order, gain {report.together.ms:.4g} ms together"
    )
    figures = {"ms": report.together.ms, "not_in_it": report.together.unknown}
    return statement(says, figures, NONE, "advice")


def _piece(advice: Advice) -> Document:
    """Return a piece; later fields of `Advice` that the form does not have are left out."""
    return {
        "question": advice.question,
        "number": advice.number,
        "what": advice.what,
        "where": [asdict(place) for place in advice.where],
        "gain_ms": asdict(advice.gain),
        "at_most": advice.at_most,
        "gain_known": advice.gain_known,
        "of_step_percent": advice.of_step_percent,
        "why": list(advice.why),
        "do": advice.do,
        "changes_numbers": advice.changes_numbers,
        "option": advice.option,
        "trial": advice.trial,
    }
