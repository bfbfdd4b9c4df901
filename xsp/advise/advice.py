"""A piece of advice, and the subject of a question. Plain data: nothing here needs more than a trace."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from xsp.analyses.answers import Answers
from xsp.errors import AnalysisError, XspError
from xsp.stats import Interval

if TYPE_CHECKING:
    from xsp.store.trace import Trace

T = TypeVar("T")

MOST_SPANS = 20
"""Maximum number of span ids in a place; `calls` counts all calls."""


class CoveredElsewhere(AnalysisError):
    """Another question covers this subject: the question is not listed as unanswered."""


class Needs(enum.IntEnum):
    """What a question needs: a trace alone, a graph, or a bound (a graph with timings)."""

    TRACE = 1
    GRAPH = 2
    BOUND = 3


@dataclass(frozen=True)
class Place:
    """A place: a module, an operator in it, and their spans."""

    module: str | None = None
    op: str | None = None
    spans: tuple[str, ...] = ()
    """Span ids of the merged step (column `span_id`), as in `xsp analyze` and the exports; the first `MOST_SPANS`."""

    calls: int | None = None
    """Number of calls in a step; None if unknown."""


@dataclass(frozen=True)
class Advice:
    """A piece of advice: the flaw, its place, the gain of a change, the change, and its effect on results."""

    question: str
    """Name of the question that the piece answers."""

    what: str
    """What is wrong, in one line."""

    where: tuple[Place, ...]
    gain: Interval
    """Expected gain in milliseconds per step. A piece whose interval contains zero is not shown."""

    at_most: bool
    """Whether the gain is an upper bound (all of the time concerned) and not an expectation."""

    of_step_percent: float
    """Gain in percent of the step time."""

    why: tuple[str, ...]
    """Figures that the piece is based on."""

    do: str
    """What to type, or what to change in the code."""

    changes_numbers: str | None = None
    """None if results are unchanged, bit for bit or within rounding; else what changes, with the error if known."""

    trial: str | None = None
    """Name of the trial that applies the change from outside (`threads=2`, `channels_last`); None if only a person can
    apply it."""

    number: str | None = None
    """Number of the question, where it is one of Q1 to Q6; the advisor fills it in."""

    by_call: Mapping[int, float] = field(default_factory=dict, repr=False)
    """Number of a call in the graph → gain for that call in milliseconds, negative where the call gets slower; empty
    where the question does not report it. Gains of pieces that change the same calls are not summed, see `together`."""

    once_ms: float = 0.0
    """Cost of the change beyond its calls, in milliseconds; already subtracted from the gain."""

    gain_known: bool = True
    """Whether the gain is an estimate. False where only a trial can measure it: the gain is then all of the time
    concerned and is shown as not known, and the piece is listed after the pieces whose gain is known."""

    side: str = "host"
    """The side of the iteration that becomes shorter: `host` or `device`."""

    entry: str | None = None
    """Name of the entry of the account that the piece shrinks; None for a part of the side that has no entry."""

    general: bool = False
    """Whether the piece is the general remedy for all that its side does; it is listed after specific ones."""

    of: str | None = None
    """What the gain is a share of, if not the step: `a request`, whose mean latency becomes shorter."""

    option: bool = False
    """Whether the piece is a trade-off and not a flaw: less time for less precise results. Options are listed after all
    other pieces."""


@dataclass(frozen=True)
class Step:
    """The step time that gains are shares of."""

    ms: Interval
    unit: str = "step"
    """`step`; `iteration`, which includes the time since the previous step; `window` where the trace has no steps: from
    the start of a device's first work to the end of its last."""

    steps: int | None = None
    """Number of timed steps."""


@dataclass
class AdviceContext:
    """The subject of questions: a trace, or a model without a trace. Derived data is computed once."""

    trace: Trace | None
    source: str | None = None
    """The run, file or model as the user named it. None for a trace that was passed in."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command that providers read, as far as they were given: `threads`, `timings`, `fill`, `batch`,
    `train`, `shape`, `sequence`, `device`."""

    providers: Mapping[str, Callable[[AdviceContext], Any]] = field(default_factory=dict)
    """Name of a part → the function that makes it; see `xsp.advise.registry.provides`."""

    known_only: bool = False
    """Whether only advice with a known gain will be used: a question need not look for other advice."""

    _cached: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def answers(self) -> Answers:
        """The tables of the trace's analyses, each computed once.

        Raises:
            AnalysisError: there is no trace.
        """
        return Answers(self.required_trace)

    @property
    def required_trace(self) -> Trace:
        """The trace.

        Raises:
            AnalysisError: there is no trace.
        """
        if self.trace is None:
            source = shlex.quote(self.source) if self.source else "MODEL"
            raise AnalysisError(f"{self.source or 'this'} was not run: record it with `xsp profile {source}`")
        return self.trace

    @cached_property
    def step(self) -> Step | None:
        """The step time of the trace; None where it is unknown."""
        from xsp.advise import steptime

        return steptime.of(self.answers) if self.trace is not None else None

    @property
    def graph(self) -> Any:
        """The graph (`xsp.graph.Graph`) of the subject; raises the errors of `part`."""
        return self.part("graph")

    @property
    def bound(self) -> Any:
        """The bound (`xsp.bound.Bound`), joined with the trace where there is one; raises the errors of `part`."""
        return self.part("bound")

    def cached(self, name: str, compute: Callable[[], T]) -> T:
        """Return the cached result of `compute` under `name`, so that questions which share it compute it once."""
        if name not in self._cached:
            self._cached[name] = compute()
        result: T = self._cached[name]
        return result

    def part(self, name: str) -> Any:
        """Return the part that a provider makes of this subject; the provider is called once, even if it fails.

        Raises:
            AnalysisError: no installed provider makes this part.
            XspError: the provider cannot make the part; the message gives the reason.
        """
        if name not in self._cached:
            provider = self.providers.get(name)
            if provider is None:
                raise AnalysisError(f"no installed plugin makes its {name}; `xsp doctor` lists plugins")
            try:
                self._cached[name] = provider(self)
            except XspError as error:
                self._cached[name] = error
        result = self._cached[name]
        if isinstance(result, XspError):
            raise result
        return result
