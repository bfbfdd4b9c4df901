"""The choice of the calls to record: calls of instrumented models in sampled requests with a chosen trace id.

The lower half of the request's trace id decides, so all services of a trace make the same choice.
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
    from xsp.instrumentation.windows import CallWindow


class SamplingSettings(NamedTuple):
    """How the calls of a model are recorded, and where their spans are sent."""

    sample: float
    bound: int
    """Upper limit of the chosen trace ids, see `bound_of`."""

    rung: Level
    """The deepest level to record."""

    collectors: frozenset[str]
    """Names of the collectors whose spans the calls get."""

    whole_process: bool
    """Whether any collector records the whole process and cannot separate the calls of different threads."""

    tracing: Tracing
    otlp: str | None
    """Target to send spans to; None to give them to the service's own processors."""


MOST_OUTSIDE = 20
"""Calls of a model on threads without an open span, and none with one, after which a hint is logged."""


class TracedModel:
    """An instrumented model: its settings, and the outcomes of its calls in this process."""

    def __init__(self, module: Any, name: str, settings: SamplingSettings) -> None:
        """Start to count.

        Args:
            module: the model; only a weak reference is kept, so the service can release it.
            name: name of the model in the counts.
            settings: settings of the handle that the model belongs to.
        """
        self.module, self.name, self.settings = weakref.ref(module), name, settings
        self.bound = settings.bound
        self.finalizer: weakref.finalize[..., Any]
        """Finalizer of the module, which removes the model when the service releases it."""

        self.renew()

    def renew(self) -> None:
        """Restart the counts, in a forked process."""
        self.tally = Tally()
        self.call_counter, self._counter_reads, self._read_lock = count(), 0, threading.Lock()
        self.calls_outside = 0
        """Calls outside any span; where threads call at the same time, some may be missing."""

    def hint(self) -> str | None:
        """Return why nothing of the model's calls is recorded, and what to type, if none was made in any span."""
        if self.calls_outside < max(MOST_OUTSIDE, self.counts.calls):
            return None
        return (
            f"{self.name}: its {self.calls_outside} calls ran outside any span, so none was recorded. If a thread "
            "calls it for requests of other threads, declare them: `with traced.batch(requests): model(…)`"
        )

    @property
    def counts(self) -> Counts:
        """Outcomes of its calls so far."""
        with self._read_lock:
            calls = next(self.call_counter) - self._counter_reads
            self._counter_reads += 1
        tallied = {name: self.tally.counts[name] for name in Counts._fields[1:-1]}
        return Counts(calls=calls, **tallied, lost=dict(self.tally.lost))


class Models:
    """The instrumented models of a process. A model belongs to the last handle that was created for it."""

    def __init__(self) -> None:
        self.by_id: dict[int, TracedModel] = {}
        """Models by the `id` of their module."""

        self._outermost: weakref.WeakKeyDictionary[Any, TracedModel | None] = weakref.WeakKeyDictionary()

    def add(self, models: Iterable[TracedModel]) -> None:
        """Add models."""
        for model in models:
            module = model.module()
            self.by_id[id(module)] = model
            model.finalizer = weakref.finalize(module, self._remove_deleted, id(module), model)
            model.finalizer.atexit = False
        self._outermost = weakref.WeakKeyDictionary()

    def remove(self, models: Iterable[TracedModel]) -> None:
        """Remove models, unless they belong to another handle by now."""
        removed_models = set(models)
        for key in [key for key, model in self.by_id.items() if model in removed_models]:
            del self.by_id[key]
        for model in removed_models:
            model.finalizer.detach()
        self._outermost = weakref.WeakKeyDictionary()

    def outermost(self, module: Any) -> TracedModel | None:
        """Return the outermost model that a module contains."""
        cache = self._outermost
        try:
            return cache[module]
        except KeyError:
            contained = (self.by_id.get(id(submodule)) for submodule in module.modules())
            outermost = cache[module] = next((model for model in contained if model is not None), None)
            return outermost

    def _remove_deleted(self, key: int, model: TracedModel) -> None:
        if self.by_id.get(key) is model:
            del self.by_id[key]
            self._outermost = weakref.WeakKeyDictionary()


class SampledCall:
    """A call of a model in a chosen request, from its begin until its rows were read."""

    __slots__ = (
        "anchor",
        "context",
        "end",
        "is_recorded",
        "links",
        "model",
        "name",
        "omission",
        "open_spans",
        "outer_error",
        "span",
        "start",
        "thread",
        "window",
    )
    anchor: clock.Anchor
    end: int
    outer_error: BaseException | None
    """The exception that was being handled when the call began."""

    start: int
    thread: int

    def __init__(
        self, model: TracedModel, name: str, context: Any, links: Sequence[Any], open_spans: Sequence[Any]
    ) -> None:
        self.model, self.name, self.context, self.links, self.open_spans = model, name, context, links, open_spans
        self.is_recorded = False
        self.window: CallWindow | None = None
        """The window in which the call's operators and deeper levels are recorded."""

        self.omission: str | None = None
        """Why requested levels are not recorded."""

        self.span: Any = None


def bound_of(sample: float) -> int:
    """Return the upper limit of the chosen trace ids, computed as in OpenTelemetry's own ratio sampler."""
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    try:
        return int(TraceIdRatioBased(sample).bound)
    except (TypeError, ValueError) as error:
        raise UsageError(f"sample={sample!r}: a share of the requests is between 0 and 1") from error


def choose_call(model: TracedModel, module: Any, requests: tuple[Any, ...] | None) -> SampledCall | None:
    """Return the call with its context in the requests' traces; None if none of a batch's requests is chosen.

    Args:
        model: the model that is called.
        module: the called module: the model, or a module that contains it.
        requests: the requests that the call serves, if declared with `batch`.
    """
    from opentelemetry import context, trace

    name = type(getattr(module, "_orig_mod", module)).__name__
    if requests is None:
        return SampledCall(model, name, context.get_current(), (), ())
    spans = [
        trace.get_current_span(request) if isinstance(request, context.Context) else request for request in requests
    ]
    span_contexts = [span if isinstance(span, trace.SpanContext) else span.get_span_context() for span in spans]
    eligible = [span_context for span_context in span_contexts if is_chosen(span_context, model.bound)]
    if not eligible:
        return None
    current = trace.get_current_span().get_span_context()
    if current.is_valid and current.trace_flags.sampled:
        parent_context = context.get_current()
    else:
        parent_context = trace.set_span_in_context(trace.NonRecordingSpan(eligible[0]))
    open_spans = [span for span in spans if isinstance(span, trace.Span) and span.is_recording()]
    return SampledCall(
        model,
        name,
        parent_context,
        [trace.Link(span_context) for span_context in span_contexts if span_context.is_valid],
        open_spans,
    )


def is_chosen(context: Any, bound: int) -> bool:
    """Return whether a request of this span context is sampled by the service, and chosen by its trace id."""
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    sampled: bool = context.trace_flags.sampled
    return sampled and context.trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound
