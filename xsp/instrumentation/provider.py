"""The way from recorded calls into a service's own OpenTelemetry.

A call's rows wait in a short queue, get their parents in a second process, and are handed as finished spans to
the span processors that the service has: a portion at a time with a flush after each, because the queue of a
`BatchSpanProcessor` is short, and it drops what does not fit.
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

from xsp.errors import UsageError
from xsp.instrumentation.sampling import Model
from xsp.instrumentation.worker import (
    Answer,
    Called,
    Correlator,
    CorrelatorError,
    Finished,
    Recorded,
    level_resource,
    pack,
)
from xsp.version import __version__

SCOPE = "xsp"
PORTION = 128
PAUSE_S = 0.01
"""Between portions: an exporter encodes in Python, and holds up the service's threads meanwhile."""

SWITCH_S = 0.0002
"""How long a thread of the service waits for the interpreter at most while one of ours has it."""

PATIENCE_S, END_S = 30.0, 10.0
QUEUED_CALLS, QUEUED_BYTES = 256, 32 << 20
"""Recorded calls that wait for the second process and the processors; what comes on top is lost, and counted."""


class Tracing:
    """A tracer provider of OpenTelemetry's SDK: its tracer, its resource, its span processors."""

    def __init__(self, provider: Any) -> None:
        """Look for what is needed of it.

        Raises:
            UsageError: it is not the SDK's.
        """
        self.tracer = provider.get_tracer(SCOPE, __version__)
        self._processor: Any = getattr(self.tracer, "span_processor", None)
        self._resource: Resource | None = getattr(provider, "resource", None)
        if self._processor is None or self._resource is None:
            raise UsageError(
                f"no tracer provider of OpenTelemetry's SDK is set (found {type(provider).__name__}): call "
                "opentelemetry.trace.set_tracer_provider(TracerProvider(...)) before xsp.instrument(), "
                "or say which one: xsp.instrument(model, provider=...)"
            )
        self._scope = InstrumentationScope(SCOPE, __version__)
        self._resources: dict[int, Resource] = {}

    @property
    def resource(self) -> dict[str, Any]:
        """The attributes of the service's resource."""
        assert self._resource is not None
        return dict(self._resource.attributes)

    def give(self, trace_id: int, spans: Iterable[Finished]) -> tuple[int, int]:
        """Hand finished spans to the service's processors.

        Args:
            trace_id: of all of them.
            spans: parents first.

        Returns:
            How many they took, and how many are lost because they did not take what they had in time.
        """
        rest, given = iter(spans), 0
        while portion := list(islice(rest, _portion())):
            for span in portion:
                self._processor.on_end(self._readable(trace_id, span))
            given += len(portion)
            if not self.flush(PATIENCE_S):
                return given, sum(1 for _ in rest)
            time.sleep(PAUSE_S)
        return given, 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until the processors have passed on what they hold; False if they do not do it."""
        return bool(self._processor.force_flush(max(1, int(timeout_s * 1000))))

    def _readable(self, trace_id: int, span: Finished) -> ReadableSpan:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=sampled),
            parent=SpanContext(trace_id, int(span.parent_id, 16), is_remote=False, trace_flags=sampled),
            resource=self._resource_of(span.level),
            attributes=span.attributes,
            status=Status() if span.status == "ok" else Status(StatusCode.ERROR, span.status),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _resource_of(self, level: int) -> Resource:
        if level not in self._resources:
            self._resources[level] = Resource(level_resource(self.resource, level))
        return self._resources[level]


class Handover:
    """The queue of recorded calls, and the thread that has them correlated and delivered."""

    def __init__(self) -> None:
        self._at_work, self._usual_s, self._own_s = 0, 0.0, 0.0
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._calls, self._bytes, self._changing = 0, 0, threading.Lock()
        self._correlator: Correlator | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; it starts the second process."""
        self._thread = threading.Thread(target=self._run, name="xsp delivers", daemon=True)
        self._thread.start()

    @property
    def is_half_full(self) -> bool:
        """Whether less should be recorded."""
        return 2 * self._bytes > QUEUED_BYTES or 2 * self._calls > QUEUED_CALLS

    def put(self, recorded: Recorded, models: Sequence[Model]) -> bool:
        """Put calls into the queue, whose models' tallies then hear of their ends; False if it is full.

        Args:
            recorded: the calls.
            models: of each call its model.
        """
        packed = pack(recorded)
        with self._changing:
            full = self._bytes + len(packed) > QUEUED_BYTES or self._calls + len(models) > QUEUED_CALLS
            if self._calls and full:
                return False
            self._calls, self._bytes = self._calls + len(models), self._bytes + len(packed)
        self._queue.put(_Waiting(packed, recorded.calls, models))
        return True

    def close(self) -> None:
        """End the thread and the second process, whatever they are at."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1)
        if self._correlator is not None:  # its answer did not come
            self._correlator.kill()

    def forget(self) -> None:
        """Let go of the parent's second process, in a forked child."""
        if self._at_work:
            self._restore()
        if self._correlator is not None:
            self._correlator.forget()

    @contextlib.contextmanager
    def yielding(self) -> Iterator[None]:
        """Let the service's threads have the interpreter within `SWITCH_S` while a thread of ours computes in Python.

        Python gives it to a thread that waits after 5 ms, unless the service said otherwise, and a request asks for it
        several times: it would be late by more than it takes.
        """
        with self._changing:
            if not self._at_work:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, self._usual_s))
                self._own_s = sys.getswitchinterval()
            self._at_work += 1
        try:
            yield
        finally:
            with self._changing:
                self._at_work -= 1
                if not self._at_work:
                    self._restore()

    def _restore(self) -> None:
        if sys.getswitchinterval() == self._own_s:  # else the service has set another one meanwhile
            sys.setswitchinterval(self._usual_s)

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            left = list(waiting.models)
            try:
                for call, answer in zip(waiting.calls, self._answers(waiting.packed), strict=True):
                    problem = self._deliver(call, left[0], answer)
                    left.pop(0).tally.finish(problem)
            except CorrelatorError as error:
                self._end_correlator()
                _finish(left, str(error))
            except Exception as error:
                _finish(left, f"xsp failed: {type(error).__name__}: {error}")
            with self._changing:
                self._calls, self._bytes = self._calls - len(waiting.models), self._bytes - len(waiting.packed)
        self._end_correlator()

    def _answers(self, packed: bytes) -> list[Answer]:
        if self._correlator is None:
            self._correlator = Correlator()
        return self._correlator.correlate(packed)

    def _deliver(self, call: Called, model: Model, answer: Answer) -> str | None:
        """Have a call's spans delivered; return what went wrong, or None."""
        try:
            with self.yielding():
                given, refused = model.settings.tracing.give(int(call.trace_id, 16), answer.spans)
        except Exception as error:
            return f"the service's span processors failed: {type(error).__name__}: {error}"
        model.tally.add("delivered", given + answer.sent)
        model.tally.add("strangers", answer.strangers)
        model.tally.add("ambiguous", answer.ambiguous)
        return "the service's span processors did not take all spans in time" if refused else answer.problem

    def _end_correlator(self) -> None:
        correlator, self._correlator = self._correlator, None
        if correlator is not None:
            correlator.close(END_S, kill=True)


class _Waiting(NamedTuple):
    packed: bytes
    calls: list[Called]
    models: Sequence[Model]


def _finish(models: Iterable[Model], reason: str) -> None:
    for model in models:
        model.tally.finish(reason)


def _portion() -> int:
    """Return how many spans are handed over at a time; the service's own share the queue."""
    queue = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return max(1, min(PORTION, int(queue) // 2)) if queue.isdigit() else PORTION
