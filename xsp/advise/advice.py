"""A piece of advice, and what a question is asked about. Plain data: nothing here needs more than a trace."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from xsp.analyses.answers import Answers
from xsp.errors import AnalysisError, XspError

if TYPE_CHECKING:
    from xsp.store.trace import Trace

T = TypeVar("T")

MOST_SPANS = 20
"""Ids of spans that a place names; `calls` counts all."""


class OfOthers(AnalysisError):
    """A question has nothing to say of this because another one has: it is not listed as unanswered."""


class Needs(enum.IntEnum):
    """What a question needs: a trace alone, a graph, or a bound (a graph with timings)."""

    TRACE = 1
    GRAPH = 2
    BOUND = 3


@dataclass(frozen=True)
class Interval:
    """A time in milliseconds per step, with its 95 % confidence interval."""

    low: float
    value: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether it may be nothing, or less."""
        return self.low <= 0

    def times(self, factor: float) -> Interval:
        """Return it multiplied; a negative factor swaps the ends."""
        ends = sorted((self.low * factor, self.high * factor))
        return Interval(ends[0], self.value * factor, ends[1])

    def within(self, most: float) -> Interval:
        """Return it with no end above `most`."""
        return Interval(min(self.low, most), min(self.value, most), min(self.high, most))


@dataclass(frozen=True)
class Place:
    """A place: a module, an operator in it, and their spans."""

    module: str | None = None
    op: str | None = None
    spans: tuple[str, ...] = ()
    """Ids of the merged step, the column `span_id`, as `xsp analyze` and the exports have them; the first
    `MOST_SPANS`."""

    calls: int | None = None
    """All of them in a step, None if unknown."""


@dataclass(frozen=True)
class Advice:
    """A piece of advice: the flaw, its place, the gain of a change, the change, and its effect on results."""

    question: str
    """Name of the question that it answers."""

    what: str
    """What is wrong, in one line."""

    where: tuple[Place, ...]
    gain: Interval
    """Expected gain in milliseconds of a step. A piece whose interval holds zero is not shown."""

    at_most: bool
    """Whether the gain is an upper bound (all of the time concerned) and no expectation."""

    of_step_percent: float
    """The gain in percent of the time of a step."""

    why: tuple[str, ...]
    """The figures that it rests on."""

    do: str
    """What to type or to write."""

    changes_numbers: str | None = None
    """None if results stay as they are, bit for bit or within rounding; else what changes, with the error if known."""

    trial: str | None = None
    """Name of the trial that applies it from outside (`threads=2`, `channels_last`); None if only a person can."""

    number: str | None = None
    """Of the question, where it is one of Q1 to Q6; the registry fills it in."""

    by_call: Mapping[int, float] = field(default_factory=dict, repr=False)
    """Number of a call in the graph → what it gains of it, in milliseconds, below zero where it gets slower; empty
    where the question does not tell. Pieces that change the same calls are not added up, see `together`."""

    once_ms: float = 0.0
    """What it costs beside its calls, taken off its gain already."""

    gain_known: bool = True
    """Whether the gain says what can be expected. False where nothing tells it but a trial: the gain is then all of the
    time concerned, is shown as not known, and the piece stands behind those whose gain is known."""

    option: bool = False
    """Whether nothing is wrong with the step, and it is a trade: less time for results of less precision. Options stand
    behind all other pieces."""


@dataclass(frozen=True)
class Step:
    """The time of the step, of which gains are a part."""

    ms: Interval
    what: str = "step"
    """`step`; `iteration`, with the time since the step before; `window` where the trace tells no steps: from the first
    work of a device to the end of its last."""

    steps: int | None = None
    """That were timed."""


@dataclass
class Asked:
    """The subject of questions: a trace, or a model without one. Derived data is computed once."""

    trace: Trace | None
    source: str | None = None
    """What the user named: a run, a file, a model. None for a trace that was handed over."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command that the second line knows: `threads`, `timings`, `fill`, `batch`, `train`, `shape`,
    `sequence`, `device`, those that were given."""

    providers: Mapping[str, Callable[[Asked], Any]] = field(default_factory=dict)
    """Name → what makes that part; see `xsp.advise.registry.provides`."""

    _made: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def answers(self) -> Answers:
        """The tables of analyses of the trace, each computed once.

        Raises:
            AnalysisError: there is no trace.
        """
        return Answers(self.traced)

    @property
    def traced(self) -> Trace:
        """The trace.

        Raises:
            AnalysisError: there is none.
        """
        if self.trace is None:
            raise AnalysisError(f"{self.source or 'this'} was not run: `xsp profile {self.source or 'MODEL'}` records")
        return self.trace

    @cached_property
    def step(self) -> Step | None:
        """The time of a step of the trace; None where nothing tells it."""
        from xsp.advise import steptime

        return steptime.of(self.answers) if self.trace is not None else None

    @property
    def graph(self) -> Any:
        """The graph (`xsp.graph.Graph`) of what is asked about; raises as `part`."""
        return self.part("graph")

    @property
    def bound(self) -> Any:
        """The bound (`xsp.bound.Bound`), joined with the trace where there is one; raises as `part`."""
        return self.part("bound")

    def made(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` makes; several questions that start from the same have it made once."""
        if name not in self._made:
            self._made[name] = make()
        found: T = self._made[name]
        return found

    def part(self, name: str) -> Any:
        """Return what a provider makes of this; it is asked once, and so is one that fails.

        Raises:
            AnalysisError: nothing provides it.
            XspError: its provider says why it cannot be made.
        """
        if name not in self._made:
            make = self.providers.get(name)
            if make is None:
                raise AnalysisError(f"nothing that is installed makes the {name} of it; `xsp doctor` lists plugins")
            try:
                self._made[name] = make(self)
            except XspError as error:
                self._made[name] = error
        found = self._made[name]
        if isinstance(found, XspError):
            raise found
        return found
