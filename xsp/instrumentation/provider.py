"""Delivery of recorded calls into a service's own OpenTelemetry.

A call's rows wait in a short queue, a second process gives them parents, and the service's span processors get them as
finished spans: in portions with a flush after each, because the queue of a `BatchSpanProcessor` is short and drops
spans when it is full.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from xsp import processes
from xsp.errors import UsageError
from xsp.instrumentation.sampling import TracedModel
from xsp.instrumentation.worker import (
    CallOutcome,
    CallRequest,
    Correlator,
    CorrelatorError,
    FinishedSpan,
    RecordedCalls,
    level_resource,
    pack,
)
from xsp.schema import Level
from xsp.serving import CANCELLED
from xsp.version import __version__

SCOPE = "xsp"
PORTION = 128
PAUSE_S = 0.01
"""Seconds to pause between portions: an exporter encodes in Python, which delays the service's threads."""

SWITCH_S = 0.0002
"""Longest time in seconds that a thread of the service waits for the GIL while a thread of xsp holds it."""

PATIENCE_S, END_S = 30.0, 10.0
QUEUED_CALLS, QUEUED_BYTES = 256, 32 << 20
"""Limits on recorded calls that wait for the second process and the processors; calls beyond them count as lost."""


class Tracing:
    """A tracer provider of OpenTelemetry's SDK, with its tracer, resource and span processors."""

    def __init__(self, provider: Any) -> None:
        """Find the parts of the provider that are needed.

        Raises:
            UsageError: the provider is not the SDK's.
        """
        self.tracer = provider.get_tracer(SCOPE, __version__)
        self._processor: Any = getattr(self.tracer, "span_processor", None)
        self._resource: Resource | None = getattr(provider, "resource", None)
        if self._processor is None or self._resource is None:
            raise UsageError(
                f"no tracer provider of OpenTelemetry's SDK is set (found {type(provider).__name__}): call "
                "opentelemetry.trace.set_tracer_provider(TracerProvider(...)) before xsp.instrument(), "
                "or pass one: xsp.instrument(model, provider=...)"
            )
        self._scope = InstrumentationScope(SCOPE, __version__)
        self._resources: dict[int, Resource] = {}

    @property
    def resource(self) -> dict[str, Any]:
        """The attributes of the service's resource."""
        assert self._resource is not None
        return dict(self._resource.attributes)

    def deliver(self, trace_id: int, spans: Iterable[FinishedSpan]) -> tuple[int, int]:
        """Hand finished spans to the service's processors.

        Args:
            trace_id: the trace id of the spans that state none.
            spans: the spans, parents first.

        Returns:
            How many spans they accepted, and how many are lost because the processors did not flush in time.
        """
        remaining, accepted = iter(spans), 0
        while portion := list(islice(remaining, _portion_size())):
            for span in portion:
                self._processor.on_end(self._readable_span(trace_id, span))
            accepted += len(portion)
            if not self.flush(PATIENCE_S):
                return accepted, sum(1 for _ in remaining)
            time.sleep(PAUSE_S)
        return accepted, 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until the processors have passed on their spans; return False if they do not in time."""
        return bool(self._processor.force_flush(max(1, int(timeout_s * 1000))))

    def _readable_span(self, trace_id: int, span: FinishedSpan) -> ReadableSpan:
        sampled, parent = TraceFlags(TraceFlags.SAMPLED), None
        trace_id = int(span.trace_id, 16) if span.trace_id else trace_id
        if span.parent_id:
            parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=False, trace_flags=sampled)
        if span.level not in self._resources:
            own = self.resource if span.level == Level.APPLICATION else level_resource(self.resource, span.level)
            self._resources[span.level] = Resource(own)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=sampled),
            parent=parent,
            links=span.links,
            resource=self._resources[span.level],
            attributes=span.attributes,
            status=Status() if span.status in ("ok", CANCELLED) else Status(StatusCode.ERROR, span.status),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


class Handover:
    """The queue of recorded calls, and the thread that gets them correlated and delivers them."""

    def __init__(self) -> None:
        self._active_threads, self._default_interval_s, self._short_interval_s = 0, 0.0, 0.0
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._calls, self._bytes, self._lock = 0, 0, threading.Lock()
        self._correlator: Correlator | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; it starts the second process."""
        self._thread = processes.start_thread(self._run, "xsp delivers")

    @property
    def is_half_full(self) -> bool:
        """Whether the queue is so full that less should be recorded."""
        return 2 * self._bytes > QUEUED_BYTES or 2 * self._calls > QUEUED_CALLS

    def put(self, recorded: RecordedCalls, models: Sequence[TracedModel]) -> bool:
        """Queue calls, whose outcomes the tallies of their models will count; return False if the queue is full.

        Args:
            recorded: the calls.
            models: the model of each call.
        """
        packed = pack(recorded)
        with self._lock:
            is_full = self._bytes + len(packed) > QUEUED_BYTES or self._calls + len(models) > QUEUED_CALLS
            if self._calls and is_full:
                return False
            self._calls, self._bytes = self._calls + len(models), self._bytes + len(packed)
        self._queue.put(_Batch(packed, recorded.calls, models))
        return True

    def close(self) -> None:
        """End the thread and the second process, even in the middle of their work."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1)
        if self._correlator is not None:  # the thread still waits for its answer
            self._correlator.kill()

    def forget(self) -> None:
        """Drop the parent's second process, in a forked child."""
        if self._active_threads:
            self._restore()
        if self._correlator is not None:
            self._correlator.forget()

    @contextlib.contextmanager
    def short_switch_interval(self) -> Iterator[None]:
        """Give the GIL to the service's threads within `SWITCH_S` while a thread of xsp computes in Python.

        By default Python switches to a waiting thread after 5 ms. A request needs the GIL several times, so the delay
        would exceed the duration of the request itself.
        """
        with self._lock:
            if not self._active_threads:
                self._default_interval_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, self._default_interval_s))
                self._short_interval_s = sys.getswitchinterval()
            self._active_threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._active_threads -= 1
                if not self._active_threads:
                    self._restore()

    def _restore(self) -> None:
        if sys.getswitchinterval() == self._short_interval_s:  # else the service has set another interval meanwhile
            sys.setswitchinterval(self._default_interval_s)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            pending_models = list(batch.models)
            try:
                for call, answer in zip(batch.calls, self._answers(batch.packed), strict=True):
                    problem = self._deliver(call, pending_models[0], answer)
                    pending_models.pop(0).tally.finish(problem)
            except CorrelatorError as error:
                self._end_correlator()
                _finish(pending_models, str(error))
            except Exception as error:
                _finish(pending_models, f"xsp failed: {type(error).__name__}: {error}")
            with self._lock:
                self._calls, self._bytes = self._calls - len(batch.models), self._bytes - len(batch.packed)
        self._end_correlator()

    def _answers(self, packed: bytes) -> list[CallOutcome]:
        if self._correlator is None:
            self._correlator = Correlator()
        return self._correlator.correlate(packed)

    def _deliver(self, call: CallRequest, model: TracedModel, answer: CallOutcome) -> str | None:
        """Deliver a call's spans; return the problem, or None."""
        try:
            with self.short_switch_interval():
                accepted, lost = model.settings.tracing.deliver(int(call.trace_id, 16), answer.spans)
        except Exception as error:
            return f"the service's span processors failed: {type(error).__name__}: {error}"
        model.tally.add("delivered", accepted + answer.sent)
        model.tally.add("strangers", answer.strangers)
        model.tally.add("ambiguous", answer.ambiguous)
        return "the service's span processors did not take all spans in time" if lost else answer.problem

    def _end_correlator(self) -> None:
        correlator, self._correlator = self._correlator, None
        if correlator is not None:
            correlator.close(END_S, kill=True)


class _Batch(NamedTuple):
    packed: bytes
    calls: list[CallRequest]
    models: Sequence[TracedModel]


def _finish(models: Iterable[TracedModel], reason: str) -> None:
    for model in models:
        model.tally.finish(reason)


def _portion_size() -> int:
    """Return the number of spans in a portion; the service's own spans use the same queue."""
    size = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return max(1, min(PORTION, int(size) // 2)) if size.isdigit() else PORTION
