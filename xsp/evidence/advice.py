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
    shown = found.advice[first:] if limit is None else found.advice[first : first + limit]
    notes = [left_out(f"advice that would {why}" if why.startswith("gain") else f"advice that {why}", count, None)
             for why, count in found.left_out.items()]  # fmt: skip
    more = len(found.advice) - first - len(shown)
    if more > 0:
        notes.append(left_out("advice", more, f"first={first + len(shown)}"))
    return document(
        "advice",
        source,
        statements=[
            *([_of_step(found, step)] if found.step is not None else []),
            *(statement(text, {}, NONE, "advice") for text in found.ideal),
            *([_of_plan(found)] if found.together is not None else []),
        ],
        step=None if found.step is None else asdict(found.step),
        advice=[_piece(each) for each in shown],
        asked=list(found.asked),
        unanswered=dict(found.unanswered),
        first=first,
        left_out=notes,
    )


def _of_step(found: Advised, cited: Citation) -> Document:
    assert found.step is not None
    what, ms = found.step.what, found.step.ms
    says = f"the {what} that gains are a part of takes {ms.value:.4g} ms"
    figures = {"low_ms": ms.low, "ms": ms.value, "high_ms": ms.high, "steps": found.step.steps}
    return statement(says, figures, cited, "advice")


def _of_plan(found: Advised) -> Document:
    assert found.together is not None
    numbers = {id(piece): number for number, piece in enumerate(found.advice)}
    order = [numbers[id(part.piece)] for part in found.together.parts]
    says = (
        f"pieces {', '.join(map(str, order))}, counted from 0, in this order, gain {found.together.ms:.4g} ms together"
    )
    figures = {"ms": found.together.ms, "not_in_it": found.together.unknown}
    return statement(says, figures, NONE, "advice")


def _piece(each: Advice) -> Document:
    """Return a piece; later fields of `Advice` that the form does not have are left out."""
    return {
        "question": each.question,
        "number": each.number,
        "what": each.what,
        "where": [asdict(place) for place in each.where],
        "gain_ms": asdict(each.gain),
        "at_most": each.at_most,
        "gain_known": each.gain_known,
        "of_step_percent": each.of_step_percent,
        "why": list(each.why),
        "do": each.do,
        "changes_numbers": each.changes_numbers,
        "option": each.option,
        "trial": each.trial,
    }
