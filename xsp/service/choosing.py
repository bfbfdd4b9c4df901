"""Which calls of a model are recorded: those in requests that the service samples and whose trace id is chosen.

A call is chosen by the lower half of its request's trace id, so all services of a trace decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from xsp import clock
from xsp.collector import Collector
from xsp.errors import UsageError


class Call:
    """A call of a model in a chosen request, from its begin until its rows were taken."""

    __slots__ = (
        "anchor",
        "context",
        "end",
        "links",
        "live",
        "name",
        "on",
        "outer",
        "recorded",
        "span",
        "start",
        "thread",
    )
    anchor: clock.Anchor
    end: int
    on: list[Collector]
    outer: BaseException | None
    """What was being handled when it began."""

    recorded: bool
    span: Any
    start: int
    thread: int

    def __init__(self, name: str, context: Any, links: Sequence[Any], live: Sequence[Any]) -> None:
        self.name, self.context, self.links, self.live = name, context, links, live


def bound_of(sample: float) -> int:
    """Return below which trace ids are chosen, as OpenTelemetry's own sampler by ratio does."""
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    try:
        return int(TraceIdRatioBased(sample).bound)
    except (TypeError, ValueError) as error:
        raise UsageError(f"sample={sample!r}: a share of the requests is between 0 and 1") from error


def whose(models: Sequence[Any]) -> Callable[[Any], bool]:
    """Return whether a call of a module is a call of a model: it is one, or it contains one."""
    own = {id(model) for model in models}
    known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def is_ours(module: Any) -> bool:
        if id(module) in own:
            return True
        if module not in known:
            known[module] = any(id(each) in own for each in module.modules())
        return known[module]

    return is_ours


def chosen(module: Any, requests: tuple[Any, ...] | None, bound: int) -> Call | None:
    """Return the call with its place in the requests' traces; None if none of a batch's requests is chosen."""
    from opentelemetry import context, trace

    name = type(getattr(module, "_orig_mod", module)).__name__
    if requests is None:
        return Call(name, context.get_current(), (), ())
    served = [trace.get_current_span(each) if isinstance(each, context.Context) else each for each in requests]
    named = [each if isinstance(each, trace.SpanContext) else each.get_span_context() for each in served]
    those = [each for each in named if _chooses(each, bound)]
    if not those:
        return None
    around = trace.get_current_span().get_span_context()
    if around.is_valid and around.trace_flags.sampled:
        place = context.get_current()
    else:
        place = trace.set_span_in_context(trace.NonRecordingSpan(those[0]))
    live = [each for each in served if isinstance(each, trace.Span) and each.is_recording()]
    return Call(name, place, [trace.Link(each) for each in named if each.is_valid], live)


def _chooses(context: Any, bound: int) -> bool:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    sampled: bool = context.trace_flags.sampled
    return sampled and context.trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound
