"""The registries of questions and of providers, which make the parts that questions use; decorators fill both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xsp import plugins
from xsp.advise.advice import Advice, AdviceContext, Needs
from xsp.errors import PluginError, UsageError

GROUP = "xsp.questions"
"""Entry points of modules with questions."""

GRAPH_GROUP = "xsp.graph_questions"
"""Entry points of modules whose questions all need more than a trace, and of providers: they are imported only where
such questions are asked."""

Answerer = Callable[[AdviceContext], Iterable[Advice]]


@dataclass(frozen=True)
class Question:
    """A named question, and the function that answers it."""

    name: str
    title: str
    needs: Needs
    function: Answerer
    number: str | None = None
    """`Q1` to `Q6` where it is part of one of Benanza's questions."""

    shapes: bool = False
    """Whether it finds nothing in a trace without the shapes of operators' inputs, and so has no answer there."""

    def __call__(self, context: AdviceContext) -> Iterable[Advice]:
        """Return pieces of advice, none if nothing is wrong.

        Raises:
            XspError: the question cannot be answered for this subject; the message gives the reason and what to type.
        """
        return self.function(context)

    @property
    def about(self) -> str:
        """The first paragraph of the function's docstring."""
        return (self.function.__doc__ or "").strip().split("\n\n")[0]


QUESTIONS: dict[str, Question] = {}
"""Registered questions by name."""

PROVIDERS: dict[str, Callable[[AdviceContext], Any]] = {}
"""Functions that make parts of `AdviceContext` (`graph`, `bound`), by the name of the part."""


def question(
    name: str, title: str, *, number: str | None = None, needs: Needs = Needs.TRACE, shapes: bool = False
) -> Callable[[Answerer], Question]:
    """Make a function a question, and register it: `xsp advise` and the report ask it from then on.

    Args:
        name: the name for `--only`.
        title: the question in a few words.
        number: `Q1` to `Q6`.
        needs: the data that the question needs. The report only asks questions that need a trace alone.
        shapes: whether the question needs the shapes of operators' inputs.

    Raises:
        UsageError: another function is registered under that name.
    """

    def register(function: Answerer) -> Question:
        existing = QUESTIONS.get(name)
        if existing is not None and _qualified_name(existing.function) != _qualified_name(function):
            raise UsageError(f"there already is a question {name!r}")
        QUESTIONS[name] = entry = Question(name, title, needs, function, number, shapes)
        return entry

    return register


def _qualified_name(function: Answerer) -> tuple[str, str]:
    """Return the module and qualified name of a function, so that a reloaded module may register its question again."""
    return function.__module__, function.__qualname__


def provides(name: str) -> Callable[[Callable[[AdviceContext], Any]], Callable[[AdviceContext], Any]]:
    """Register a function as the provider of the part `name` (`graph`, `bound`) of the subject of questions."""

    def register(function: Callable[[AdviceContext], Any]) -> Callable[[AdviceContext], Any]:
        PROVIDERS[name] = function
        return function

    return register


def questions(max_needs: Needs = Needs.BOUND) -> dict[str, Question]:
    """Load the entry points, and return all questions by name, ordered by their needs, number and name.

    Args:
        max_needs: leave out the questions that need more.
    """
    for group in (GROUP,) if max_needs is Needs.TRACE else (GROUP, GRAPH_GROUP):
        _load(group, tuple(plugins.names(group)))
    entries = sorted(QUESTIONS.values(), key=lambda entry: (entry.needs, entry.number or "Q9", entry.name))
    return {entry.name: entry for entry in entries if entry.needs <= max_needs}


@lru_cache(maxsize=8)
def _load(group: str, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            plugins.load(group, name)
        except PluginError:
            pass  # `xsp doctor` reports the reason
