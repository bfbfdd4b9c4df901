"""Advice: what to change in a program, where, and the expected gain, from questions that register themselves.

>>> from xsp import advise, load                              # doctest: +SKIP
>>> for piece in advise.of(load("runs/demo")).advice:         # doctest: +SKIP
...     print(piece.what, piece.gain.value, piece.do)

A question is a function from a trace, a graph or a bound (`AdviceContext`) to pieces of advice. It registers itself
with the decorator `question`; entry points `xsp.questions` name the modules that contain questions.
"""

from __future__ import annotations

from xsp.advise.advice import Advice, AdviceContext, Needs, Place, Step
from xsp.advise.advisor import AdviceReport, of
from xsp.advise.registry import Question, provides, question, questions
from xsp.stats import Interval

__all__ = [
    "Advice",
    "AdviceContext",
    "AdviceReport",
    "Interval",
    "Needs",
    "Place",
    "Question",
    "Step",
    "of",
    "provides",
    "question",
    "questions",
]
