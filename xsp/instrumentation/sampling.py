"""Which calls are recorded: those of instrumented models, in requests that are sampled and whose trace id is chosen.

A call is chosen by the lower half of its request's trace id, so all services of a trace decide alike.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp import clock
from xsp.errors import UsageError
from xsp.instrumentation.counts import Counts, Tally
from xsp.schema import Level

if TYPE_CHECKING:
    from xsp.instrumentation.provider import Tracing
    from xsp.instrumentation.windows import Window


class Settings(NamedTuple):
    """How the calls of a model are recorded, and where they go."""

    sample: float
    bound: int
    """Below which trace ids are chosen, see `bound_of`."""

    rung: Level
    """How deep to look."""

    collectors: frozenset[str]
    """The names of those whose spans the calls are to have."""

    whole_process: bool
    """Whether one of them sees the whole process and cannot tell recordings apart by itself."""

    tracing: Tracing
    otlp: str | None
    """Where spans are sent; None to give them to the service's own processors."""


class Model:
    """An instrumented model: its settings, and what became of its calls in this process."""

    def __init__(self, module: Any, name: str, settings: Settings) -> None:
        """Begin to count.

        Args:
            module: may go when the service lets go of it; it is instrumented no longer then.
            name: under which it stands among the counts.
            settings: of the handle that it belongs to.
        """
        self.module, self.name, self.settings = weakref.ref(module), name, settings
        self.bound = settings.bound
        self.end: weakref.finalize[..., Any]
        """Of the module, if the service lets go of it."""

        self.renew()

    def renew(self) -> None:
        """Begin to count anew, in a forked process."""
        self.tally = Tally()
        self.seen, self._looked, self._looking = count(), 0, threading.Lock()

    @property
    def counts(self) -> Counts:
        """What became of its calls so far."""
        with self._looking:
            calls = next(self.seen) - self._looked
            self._looked += 1
        known = {name: self.tally.counts[name] for name in Counts._fields[1:-1]}
        return Counts(calls=calls, **known, lost=dict(self.tally.lost))


class Models:
    """The instrumented models of a process. A model belongs to the handle that named it last."""

    def __init__(self) -> None:
        self.own: dict[int, Model] = {}
        """By the `id` of the module."""

        self._around: weakref.WeakKeyDictionary[Any, Model | None] = weakref.WeakKeyDictionary()

    def add(self, models: Iterable[Model]) -> None:
        """Take models in."""
        for model in models:
            module = model.module()
            self.own[id(module)] = model
            model.end = weakref.finalize(module, self._gone, id(module), model)
            model.end.atexit = False
        self._around = weakref.WeakKeyDictionary()

    def remove(self, models: Iterable[Model]) -> None:
        """Leave models out again, unless they belong to another handle by now."""
        gone = set(models)
        for key in [key for key, model in self.own.items() if model in gone]:
            del self.own[key]
        for model in gone:
            model.end.detach()
        self._around = weakref.WeakKeyDictionary()

    def around(self, module: Any) -> Model | None:
        """Return the outermost model that a module contains."""
        known = self._around
        try:
            return known[module]
        except KeyError:
            inside = (self.own.get(id(each)) for each in module.modules())
            found = known[module] = next((model for model in inside if model is not None), None)
            return found

    def _gone(self, key: int, model: Model) -> None:
        if self.own.get(key) is model:
            del self.own[key]
            self._around = weakref.WeakKeyDictionary()


class Call:
    """A call of a model in a chosen request, from its begin until its rows were taken."""

    __slots__ = (
        "anchor",
        "context",
        "end",
        "left_out",
        "links",
        "live",
        "model",
        "name",
        "outer",
        "recorded",
        "span",
        "start",
        "thread",
        "window",
    )
    anchor: clock.Anchor
    end: int
    outer: BaseException | None
    """What was being handled when it began."""

    start: int
    thread: int

    def __init__(self, model: Model, name: str, context: Any, links: Sequence[Any], live: Sequence[Any]) -> None:
        self.model, self.name, self.context, self.links, self.live = model, name, context, links, live
        self.recorded = False
        self.window: Window | None = None
        """In which its operators are recorded, too."""

        self.left_out: str | None = None
        """Why what was asked for is not recorded."""

        self.span: Any = None


def bound_of(sample: float) -> int:
    """Return below which trace ids are chosen, as OpenTelemetry's own sampler by ratio does."""
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    try:
        return int(TraceIdRatioBased(sample).bound)
    except (TypeError, ValueError) as error:
        raise UsageError(f"sample={sample!r}: a share of the requests is between 0 and 1") from error


def chosen(model: Model, module: Any, requests: tuple[Any, ...] | None) -> Call | None:
    """Return the call with its place in the requests' traces; None if none of a batch's requests is chosen.

    Args:
        model: whose call it is.
        module: that was called, the model or one around it.
        requests: that it serves, where that was said.
    """
    from opentelemetry import context, trace

    name = type(getattr(module, "_orig_mod", module)).__name__
    if requests is None:
        return Call(model, name, context.get_current(), (), ())
    served = [trace.get_current_span(each) if isinstance(each, context.Context) else each for each in requests]
    named = [each if isinstance(each, trace.SpanContext) else each.get_span_context() for each in served]
    those = [each for each in named if _chooses(each, model.bound)]
    if not those:
        return None
    around = trace.get_current_span().get_span_context()
    if around.is_valid and around.trace_flags.sampled:
        place = context.get_current()
    else:
        place = trace.set_span_in_context(trace.NonRecordingSpan(those[0]))
    live = [each for each in served if isinstance(each, trace.Span) and each.is_recording()]
    return Call(model, name, place, [trace.Link(each) for each in named if each.is_valid], live)


def _chooses(context: Any, bound: int) -> bool:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    sampled: bool = context.trace_flags.sampled
    return sampled and context.trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound
