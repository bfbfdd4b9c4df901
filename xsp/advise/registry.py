"""The questions that there are, and what makes the parts that they ask of. Both register themselves by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from xsp import plugins
from xsp.advise.advice import Advice, Asked, Needs
from xsp.errors import PluginError, UsageError

GROUP = "xsp.questions"

Answerer = Callable[[Asked], Iterable[Advice]]


@dataclass(frozen=True)
class Question:
    """A named question, and the function that answers it."""

    name: str
    title: str
    needs: Needs
    function: Answerer
    number: str | None = None
    """`Q1` to `Q6` where it is part of one of Benanza's questions."""

    def __call__(self, asked: Asked) -> Iterable[Advice]:
        """Return pieces of advice, none if nothing is wrong.

        Raises:
            XspError: it cannot be answered of this; the message says why and what to type.
        """
        return self.function(asked)

    @property
    def about(self) -> str:
        """The first paragraph of the function's documentation."""
        return (self.function.__doc__ or "").strip().split("\n\n")[0]


QUESTIONS: dict[str, Question] = {}
"""Those that registered themselves, by name."""

PROVIDERS: dict[str, Callable[[Asked], Any]] = {}
"""What makes parts of `Asked`: `graph`, `bound`."""


def question(
    name: str, title: str, *, number: str | None = None, needs: Needs = Needs.TRACE
) -> Callable[[Answerer], Question]:
    """Make a function a question, and register it: `xsp advise` and the report ask it from then on.

    Args:
        name: what `--only` calls it.
        title: what it asks, in a few words.
        number: `Q1` to `Q6`.
        needs: what it asks of. The report asks those that need a trace alone.

    Raises:
        UsageError: another function is registered by that name.
    """

    def make(function: Answerer) -> Question:
        known = QUESTIONS.get(name)
        if known is not None and _named(known.function) != _named(function):
            raise UsageError(f"there is a question {name!r} already")
        QUESTIONS[name] = made = Question(name, title, needs, function, number)
        return made

    return make


def _named(function: Answerer) -> tuple[str, str]:
    """Return where a function stands: one that is made again, as its module is loaded anew, takes its own place."""
    return function.__module__, function.__qualname__


def provides(name: str) -> Callable[[Callable[[Asked], Any]], Callable[[Asked], Any]]:
    """Make a function what makes the part `name` (`graph`, `bound`) of what is asked about."""

    def make(function: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
        PROVIDERS[name] = function
        return function

    return make


def questions() -> dict[str, Question]:
    """Return all questions by name, ordered by what they need, number and name; those of entry points are loaded."""
    _load(tuple(plugins.names(GROUP)))
    order = sorted(QUESTIONS.values(), key=lambda each: (each.needs, each.number or "Q9", each.name))
    return {each.name: each for each in order}


@lru_cache(maxsize=8)
def _load(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            plugins.load(GROUP, name)
        except PluginError:
            pass  # `xsp doctor` says why
