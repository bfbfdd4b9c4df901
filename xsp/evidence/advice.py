"""Advice in the JSON form: pieces with their spans, the questions asked, and the unanswered questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xsp import advise
from xsp.advise import Advice, AdviceReport, Needs
from xsp.evidence import citations
from xsp.evidence.form import NONE, Citation, Document, document, left_out, statement
from xsp.store.trace import Trace


def of_trace(trace: Trace, source: Mapping[str, Any], first: int, limit: int) -> Document:
    """Return the advice of the questions that a trace alone can answer: nothing is run or captured."""
    return of_report(advise.of(trace, max_needs=Needs.TRACE), source, first, limit, citations.of_step(trace))


def of_report(
    report: AdviceReport, source: Mapping[str, Any], first: int = 0, limit: int | None = None, cited: Citation = NONE
) -> Document:
    """Return advice as a document.

    Args:
        report: the advice.
        source: the run that it is for.
        first: index of the first piece, from 0.
        limit: maximum number of pieces.
        cited: spans of the step, which the statement on its time cites.
    """
    pieces = report.advice[first:] if limit is None else report.advice[first : first + limit]
    notes = [left_out(f"advice that would {cause}" if cause.startswith("gain") else f"advice that {cause}", count, None)
             for cause, count in report.left_out.items()]  # fmt: skip
    remaining = len(report.advice) - first - len(pieces)
    if remaining > 0:
        notes.append(left_out("advice", remaining, f"first={first + len(pieces)}"))
    return document(
        "advice",
        source,
        statements=[
            *([_of_step(report, cited)] if report.step is not None else []),
            *(statement(text, {}, NONE, "advice") for text in (report.note, *report.ideal) if text),
            *([_of_plan(report)] if report.combined_gain is not None else []),
        ],
        step=None
        if report.step is None
        else {"ms": asdict(report.step.ms), "what": report.step.unit, "steps": report.step.steps},
        advice=[_piece(piece) for piece in pieces],
        asked=list(report.answered),
        unanswered=dict(report.unanswered),
        first=first,
        left_out=notes,
    )


def _of_step(report: AdviceReport, citation: Citation) -> Document:
    assert report.step is not None
    unit, ms = report.step.unit, report.step.ms
    sentence = f"the {unit} that gains are shares of takes {ms.value:.4g} ms"
    figures = {"low_ms": ms.low, "ms": ms.value, "high_ms": ms.high, "steps": report.step.steps}
    return statement(sentence, figures, citation, "advice")


def _of_plan(report: AdviceReport) -> Document:
    combined = report.combined_gain
    assert combined is not None
    numbers = {id(piece): index for index, piece in enumerate(report.advice)}
    order = [numbers[id(part.piece)] for part in combined.parts]
    sentence = f"pieces {', '.join(map(str, order))}, counted from 0, in this order, gain {combined.ms:.4g} ms together"
    figures = {"ms": combined.ms, "not_in_it": combined.unknown_count}
    return statement(sentence, figures, NONE, "advice")


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
        "of": advice.of,
        "why": list(advice.why),
        "do": advice.do,
        "changes_numbers": advice.changes_numbers,
        "option": advice.option,
        "trial": advice.trial,
    }
