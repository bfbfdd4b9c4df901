"""The spans of requests that an engine serves in steps, and of these steps.

A request is chosen as any other, by the trace in which it arrives; one that arrives in no trace gets its own. Its span
has children for its time in the queue, each part of its prompt, decoding, and preemption, which link to the steps that
served it. A step that serves a chosen request is a trace of its own: the model's call in it is recorded below it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar, Token
from functools import cached_property
from typing import Any

from xsp import clock
from xsp.instrumentation.sampling import TracedModel, is_chosen
from xsp.instrumentation.worker import FinishedSpan, attributes
from xsp.record.compilations import latest_compilations
from xsp.schema import Level, Span
from xsp.serving import MOST_OPEN, Engine, EngineStep, Log, Part, RequestAccount
from xsp.store.requestrows import request_row, step_row

served: ContextVar[tuple[Any, ...] | None] = ContextVar("xsp_served", default=None)
"""The requests that the model's calls in this context serve, as the program stated them; None if it did not."""

MOST_LINKS = 1024
"""Limit on the links of one span; `xsp.left_out` says how many are missing."""


class _Place:
    """A running step, and what is to be restored at its end."""

    def __init__(
        self, context: Any, links: tuple[Any, ...], served_token: Token[tuple[Any, ...] | None], context_token: Any
    ) -> None:
        self.context, self.links = context, links
        """Context of its span, None if it is not recorded; links to the spans of the chosen requests that it serves."""

        self.served_token, self.context_token = served_token, context_token

    @cached_property
    def link(self) -> Any:
        """Link to its span; None if it is not recorded."""
        from opentelemetry.trace import Link

        return Link(self.context) if self.context is not None else None


class RequestSpans(Log):
    """A sink that sends the requests of the engines that call a handle's models, and the steps that served them."""

    def __init__(self, models: Sequence[TracedModel], note: Callable[[str], object]) -> None:
        """Start without requests.

        Args:
            models: the models of the handle, at least one.
            note: takes sentences on what the program stated wrongly, and on what is lost.
        """
        super().__init__(self._deliver_spans, note, keeps_segments=True, compilations=latest_compilations)
        self._models, self._settings = models, models[0].settings
        self._accepted: weakref.WeakKeyDictionary[Engine, bool] = weakref.WeakKeyDictionary()
        self._chosen: dict[Engine, dict[Hashable, Any]] = {}
        """Links to the spans of chosen requests."""

    def accepts(self, engine: Engine) -> bool:
        """Return whether an engine calls a model of the handle, or a module that contains one."""
        try:
            return self._accepted[engine]
        except KeyError:
            modules = set(map(id, getattr(engine.model, "modules", tuple)()))
            is_accepted = any(id(model.module()) in modules for model in self._models)
            self._accepted[engine] = is_accepted
            return is_accepted

    def arrive(self, engine: Engine, request: Hashable, at_ns: int, prompt_tokens: int | None, is_stated: bool) -> None:
        """Choose a request by the trace in which it arrives."""
        from opentelemetry import trace

        parent = trace.get_current_span().get_span_context() if is_stated else trace.INVALID_SPAN_CONTEXT
        if not parent.is_valid:
            parent = trace.SpanContext(_random(16), 0, False, trace.TraceFlags(trace.TraceFlags.SAMPLED))
        if not is_chosen(parent, self._settings.bound):
            self.put(engine, "arrive", request, at_ns, prompt_tokens, is_stated, None, False)
            return
        own = trace.Link(trace.SpanContext(parent.trace_id, _random(8), False, parent.trace_flags))
        chosen = self._chosen.setdefault(engine, {})
        if len(chosen) >= MOST_OPEN:
            chosen.pop(next(iter(chosen)), None)
        chosen.setdefault(request, own)
        self.put(engine, "arrive", request, at_ns, prompt_tokens, is_stated, (own, parent.span_id))

    def begin(self, engine: Engine, parts: Sequence[Part]) -> _Place:
        """Make the step the parent of the model's call, if it serves a chosen request; else record nothing in it."""
        chosen = self._chosen.get(engine)
        links = tuple([own for part in parts if (own := chosen.get(part[0]))]) if chosen else ()
        if not links:
            return _Place(None, (), served.set(()), None)
        from opentelemetry import context, trace

        step = trace.SpanContext(_random(16), _random(8), False, trace.TraceFlags(trace.TraceFlags.SAMPLED))
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(step)))
        return _Place(step, links, served.set(tuple([link.context for link in links])), token)

    def end(self, engine: Engine, step: EngineStep) -> None:
        """Take a step, and restore the context."""
        place: _Place = step.place
        self.drop(engine, place)
        if place.context is None and step.parts:
            self.put(engine, "pass_step")
        else:
            self.put(engine, "step", step)

    def drop(self, engine: Engine, place: _Place) -> None:
        """Restore the context that `begin` changed."""
        with contextlib.suppress(ValueError):  # the step ended in another context than it began in
            served.reset(place.served_token)
        if place.context_token is not None:
            from opentelemetry import context

            context.detach(place.context_token)

    def finish(self, engine: Engine, request: Hashable, at_ns: int, status: str) -> None:
        """Take the end of a request."""
        if (chosen := self._chosen.get(engine)) is not None:
            chosen.pop(request, None)
        self.put(engine, "finish", request, at_ns, status)

    def end_engine(self, engine: Engine, at_ns: int) -> None:
        """Take the end of an engine."""
        self._chosen.pop(engine, None)
        self._accepted.pop(engine, None)
        self.put(engine, "close", at_ns)

    def renew(self) -> None:
        """Forget everything, in a forked child."""
        super().renew()
        self._chosen.clear()

    # --- on the thread --------------------------------------------------------------------------------------

    def _deliver_spans(
        self, engine: Engine, steps: Sequence[tuple[int, EngineStep]], accounts: Sequence[RequestAccount]
    ) -> None:
        offset_ns = clock.anchor().offset_ns
        spans = [
            _finished(step_row(engine, number, step, offset_ns), step.place.context, 0, step.place.links)
            for number, step in steps
            if step.place.context is not None
        ]
        for account in accounts:
            link, parent_id = account.context
            own = link.context
            row = request_row(engine, account, offset_ns)
            row_attributes = attributes(row)
            row_attributes["xsp.sample"] = self._settings.sample
            spans.append(_finished(row, own, parent_id, ())._replace(attributes=row_attributes))
            spans += _children(account, own, offset_ns)
        if not spans:
            return
        _, lost = self._settings.tracing.deliver(0, spans)
        if lost:
            self.note(f"{lost} spans of requests and engine steps were not taken by the service's processors in time")


def _children(account: RequestAccount, own: Any, offset_ns: int) -> Iterator[FinishedSpan]:
    """Yield the times of a request's life as spans, with links to the steps that served it."""
    for segment in account.segments:
        links = [place.link for place in segment.steps if place.link is not None]
        row = Span(
            level=Level.APPLICATION,
            name=segment.name,
            start_ns=segment.start_ns + offset_ns,
            dur_ns=segment.end_ns - segment.start_ns,
            collector="serving",
        )
        span = _finished(row, None, own.span_id, links)
        span.attributes.pop("xsp.kind")  # a picture of the request's time, which its own attributes state
        if segment.tokens:
            span.attributes["xsp.serving.tokens"] = segment.tokens
        yield span._replace(trace_id=f"{own.trace_id:032x}", span_id=f"{_random(8):016x}")


def _finished(row: Span, own: Any, parent_id: int, links: Sequence[Any]) -> FinishedSpan:
    """Return a row as a span with links, in the trace of its context."""
    values = attributes(row)
    if len(links) > MOST_LINKS:
        values["xsp.left_out"] = f"links to {len(links) - MOST_LINKS:,} more steps"
    return FinishedSpan(
        name=row.name,
        level=row.level,
        span_id=f"{own.span_id:016x}" if own is not None else "",
        parent_id=f"{parent_id:016x}" if parent_id else "",
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        status=row.status,
        attributes=values,
        trace_id=f"{own.trace_id:032x}" if own is not None else "",
        links=tuple(links[:MOST_LINKS]),
    )


def _random(size: int) -> int:
    """Return a random id of `size` bytes that is not 0."""
    return int.from_bytes(os.urandom(size), "big") or 1
