"""What is wrong with a step, what it costs, and what to type: one advisor over questions that register themselves.

>>> from xsp import advise, load                              # doctest: +SKIP
>>> for piece in advise.of(load("runs/demo")).advice:         # doctest: +SKIP
...     print(piece.what, piece.gain.value, piece.do)

A question is a function from what is asked about (a trace, or what a graph and a bound tell) to pieces of advice. It
registers itself with the decorator `question`; entry points `xsp.questions` name the modules that hold questions.
"""

from __future__ import annotations

from xsp.advise.advice import Advice, Asked, Interval, Needs, Place, Step
from xsp.advise.advisor import Advised, of
from xsp.advise.registry import Question, provides, question, questions

__all__ = [
    "Advice",
    "Advised",
    "Asked",
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
