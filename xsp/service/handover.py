"""The way from recorded calls into a service's own OpenTelemetry.

A call's rows wait in a short queue, get their parents in a second process, and are handed as finished spans to
the span processors that the service has: a portion at a time with a flush after each, because the queue of a
`BatchSpanProcessor` is short, and it drops what does not fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from xsp.errors import UsageError
from xsp.service.correlating import Correlator, CorrelatorError, Finished, Recorded, level_resource, pack
from xsp.version import __version__

SCOPE = "xsp"
PORTION = 128
PAUSE_S = 0.01
"""Between portions: an exporter encodes in Python, and holds up the service's threads meanwhile."""

PATIENCE_S = 30.0
QUEUED_CALLS = 16
"""Recorded calls that wait for the second process and the processors; what comes on top is lost, and counted."""

MOST_REASONS, OTHER_REASONS = 50, "other reasons, too many to list"
_logger = logging.getLogger("xsp")


class Tally:
    """What became of the calls of one process; all threads may use it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.under_way = 0
        self._changed = threading.Condition()

    def add(self, name: str, number: int = 1) -> None:
        """Count."""
        with self._changed:
            self.counts[name] += number

    def lose(self, reason: str, calls: int = 1, expected: bool = False) -> None:
        """Count calls that miss spans; a reason that was not to be expected is logged when it first occurs."""
        with self._changed:
            first = reason not in self.lost
            if first and len(self.lost) >= MOST_REASONS:
                reason, first = OTHER_REASONS, OTHER_REASONS not in self.lost
            self.lost[reason] += calls
        if first and not expected:
            _logger.warning("spans of a sampled call are lost: %s", reason)

    def begin(self) -> None:
        """A recorded call is on its way."""
        with self._changed:
            self.under_way += 1

    def finish(self, reason: str | None = None) -> None:
        """It has arrived, or has not for a reason."""
        if reason is not None:
            self.lose(reason)
        with self._changed:
            self.under_way -= 1
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until no call is on its way; False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.under_way == 0, timeout)


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

    def __init__(self, tracing: Tracing, tally: Tally, otlp: str | None) -> None:
        self._tracing, self._tally, self._otlp = tracing, tally, otlp
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(QUEUED_CALLS)
        self._correlator: Correlator | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread; it starts the second process."""
        self._thread = threading.Thread(target=self._run, name="xsp delivers", daemon=True)
        self._thread.start()

    def put(self, recorded: Recorded) -> bool:
        """Put a call into the queue, whose end the tally then hears of; False if it is full."""
        try:
            self._queue.put_nowait((int(recorded.trace_id, 16), pack(recorded)))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """End the thread and the second process, whatever they are at; calls that wait are not counted any more."""
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=1)
        if self._thread is not None:
            self._thread.join(timeout=1)
        if self._correlator is not None:  # its answer did not come
            self._correlator.kill()

    def forget(self) -> None:
        """Let go of the parent's second process, in a forked child."""
        if self._correlator is not None:
            self._correlator.forget()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            reason = None
            try:
                reason = self._deliver(*call)
            except CorrelatorError as error:
                reason = str(error)
                self._end_correlator()
            except Exception as error:
                reason = f"the service's span processors failed: {type(error).__name__}: {error}"
            self._tally.finish(None if self._closing else reason)
        self._end_correlator()

    def _deliver(self, trace_id: int, packed: bytes) -> str | None:
        """Have a call correlated and its spans delivered; return what went wrong, or None."""
        if self._correlator is None:
            self._correlator = Correlator({"otlp": self._otlp, "resource": self._tracing.resource})
        answer = self._correlator.correlate(packed)
        given, refused = self._tracing.give(trace_id, answer.spans)
        self._tally.add("delivered", given + answer.sent)
        self._tally.add("strangers", answer.strangers)
        return "the service's span processors did not take all spans in time" if refused else answer.problem

    def _end_correlator(self) -> None:
        correlator, self._correlator = self._correlator, None
        if correlator is not None:
            correlator.close()


def _portion() -> int:
    """Return how many spans are handed over at a time; the service's own share the queue."""
    queue = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return max(1, min(PORTION, int(queue) // 2)) if queue.isdigit() else PORTION
