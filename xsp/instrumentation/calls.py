"""The calls of all instrumented models of a process: recorded concurrently, read after the request, then handed over.

Each thread records the layers of its own call, for any number of calls at once. Deeper levels are recorded in windows,
see `windows`. A forked process sets all of this up again: locks, counts, queues and threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xsp import clock, processes
from xsp.collector import Collector, Listener
from xsp.instrumentation.sampling import SampledCall, TracedModel
from xsp.instrumentation.windows import CallWindow, Windows
from xsp.instrumentation.worker import CallRequest, RecordedCalls, attributes
from xsp.record.collecting import Collecting
from xsp.schema import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.instrumentation.provider import Handover

REQUEST_WAIT_S = 0.05
"""Seconds to wait, after the model's call, for the request to finish before its rows are read."""

MOST_NOTES = 100
"""Limit on the collectors' notes: a service runs for months, and notes that contain numbers would accumulate."""

MOST_UNREAD = 256
"""Limit on ended calls and windows whose rows were not read yet; further calls are not recorded."""

OVERLOADED = "calls came faster than they could be delivered"


class CallRecorder:
    """The calls of this process, from the begin of a call until its spans are in the queue."""

    def __init__(self, collecting: Collecting) -> None:
        """Set up the state of one process; threads start with the first recorded call."""
        from xsp.instrumentation.provider import Handover

        self.running: dict[int, SampledCall] = {}
        """Running calls in chosen requests, by thread."""

        self.rung = Level.MODEL
        """The deepest level that any model requests."""

        self._collecting = collecting
        self._windows = Windows(collecting, lambda: self.rung, self.drain)
        self._handover: Handover = Handover()
        self._switch_lock, self._drain_lock = threading.Lock(), threading.Lock()
        self._recording_calls: set[SampledCall] = set()
        """Recorded calls that are still running."""

        self._unread_calls: set[SampledCall] = set()
        """Recorded calls whose rows were not read yet."""

        self._ended_queue: queue.SimpleQueue[SampledCall | CallWindow | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    # --- in the request -------------------------------------------------------------------------------------

    def begin(self, call: SampledCall) -> None:
        """Record a call that begins on this thread, as deep as possible. Never raises."""
        try:
            call.outer_error, call.thread = sys.exc_info()[1], threading.get_native_id()
            self.running[threading.get_ident()] = call
            call.anchor = clock.anchor()
            call.start = clock.monotonic_ns()  # earlier rows are not needed
            if self._ended_queue.qsize() < MOST_UNREAD:
                self._record(call)
            else:
                call.omission = OVERLOADED
            call.start = clock.monotonic_ns()
        except Exception as error:
            self.fail(call.model, error)

    def _record(self, call: SampledCall) -> None:
        """Switch the collectors on for a call, unless they are on for another one."""
        with self._switch_lock:
            if self._reader is None:
                # Start the threads, at the first recorded call: a service may fork its workers before it.
                self._handover.start()
                self._reader = processes.start_thread(self._read, "xsp reads")
            if not self._recording_calls:
                self._collecting.start(self.rung, describe=False, by_thread=True)
            self._recording_calls.add(call)
            self._unread_calls.add(call)
        call.is_recorded = True
        if call.model.settings.whole_process:
            call.omission = f"operators: {OVERLOADED}" if self._handover.is_half_full else self._windows.join(call)

    def end(self) -> None:
        """End this thread's call, if it has one. Never raises."""
        end = clock.monotonic_ns()
        call = self.running.get(threading.get_ident())
        if call is None:
            return
        try:
            call.end = end
            self._start_span(call)
        except Exception as error:
            self.fail(call.model, error)
        try:
            if call.is_recorded:
                self._stop(call)
        except Exception as error:
            self.fail(call.model, error)
        finally:
            self.running.pop(threading.get_ident(), None)

    def _stop(self, call: SampledCall) -> None:
        """Queue a recorded call, or the window that it was the last call of, for reading."""
        if call.span is not None:
            call.model.tally.begin()
        item = self._windows.leave(call) if call.window is not None else call
        with self._switch_lock:
            self._recording_calls.discard(call)
            if not self._recording_calls:
                self._collecting.stop(self._thread_collectors())
        if item is not None:
            self._ended_queue.put(item)

    def _start_span(self, call: SampledCall) -> None:
        """Start the model's span; the span of a recorded call is ended once its rows have been read."""
        from opentelemetry.trace import Status, StatusCode

        settings, tally = call.model.settings, call.model.tally
        span = settings.tracing.tracer.start_span(
            call.name, call.context, links=call.links, start_time=call.start + call.anchor.offset_ns
        )
        for request in call.open_spans:
            request.add_link(span.get_span_context())
        tally.add("sampled")
        span.set_attribute("xsp.sample", settings.sample)
        error = sys.exc_info()[1]
        if error is not None and error is not call.outer_error:
            # without the message, which may contain data of the request
            span.set_status(Status(StatusCode.ERROR, f"error:{type(error).__name__}"))
            span.set_attribute("error.type", type(error).__name__)
        call.outer_error = None
        if call.omission is not None:
            span.set_attribute("xsp.left_out", call.omission)
            tally.lose(call.omission, expected=True)
        if call.is_recorded:
            call.span = span
        else:
            span.end(call.end + call.anchor.offset_ns)

    def fail(self, model: TracedModel, error: Exception, is_pending: bool = False) -> None:
        """Count a call whose spans are lost because xsp failed."""
        reason = f"xsp failed: {type(error).__name__}: {error}"
        if is_pending:
            model.tally.finish(reason)
        else:
            model.tally.lose(reason)

    # --- after the request ----------------------------------------------------------------------------------

    def _read(self) -> None:
        while (item := self._ended_queue.get()) is not None:
            self._wait_for_requests(item.calls if isinstance(item, CallWindow) else [item])
            self.drain(item)

    def _wait_for_requests(self, calls: Sequence[SampledCall]) -> None:
        """Wait for the requests to end: reading rows runs Python, which would delay the threads that answer them."""
        from opentelemetry.trace import get_current_span

        deadline = time.monotonic() + REQUEST_WAIT_S
        open_requests = [call.context for call in calls]
        while open_requests and self._ended_queue.empty() and time.monotonic() < deadline:
            open_requests = [context for context in open_requests if get_current_span(context).is_recording()]
            if open_requests:
                time.sleep(0.002)

    def drain(self, item: SampledCall | CallWindow) -> None:
        """Read the rows of an ended call or window from the collectors, unless already read, and hand them over."""
        with self._drain_lock, self._handover.short_switch_interval():
            if isinstance(item, SampledCall):
                calls = [item] if item in self._unread_calls else []
            else:
                calls = [] if item.is_read else item.calls
                item.is_read = True
            traced_calls = [call for call in calls if call.span is not None]
            try:
                if traced_calls:
                    self._hand_over(traced_calls, self._rows(item))
                    del self._collecting.notes[MOST_NOTES:]
            except Exception as error:
                for call in traced_calls:
                    self.fail(call.model, error, is_pending=True)
            finally:
                for call in traced_calls:
                    with contextlib.suppress(Exception):  # a processor of the service may raise; the thread continues
                        call.span.end(call.end + call.anchor.offset_ns)
                self._forget(calls)

    def _rows(self, item: SampledCall | CallWindow) -> list[Span]:
        """Return the rows of a call; for a window, of all threads, because work may belong to any of its calls."""
        if isinstance(item, SampledCall):
            return self._collecting.rows_during(item.anchor, item.start, item.end, item.thread)
        layers = self._collecting.rows_during(item.anchor, item.start, item.end)
        return layers + self._collecting.rows(item.anchor, by_thread=False)

    def _forget(self, calls: Sequence[SampledCall]) -> None:
        """Make the collectors drop the rows that no call needs any more."""
        now = clock.monotonic_ns()
        with self._switch_lock:
            self._unread_calls.difference_update(calls)
            oldest = min((call.start for call in self._unread_calls), default=now)
        self._collecting.drop_before(oldest)

    def _hand_over(self, calls: Sequence[SampledCall], rows: list[Span]) -> None:
        """Complete the models' spans, and put the rows below them into the delivery queue."""
        accepted_calls: list[SampledCall] = []
        call_requests: list[CallRequest] = []
        for call in calls:
            index = _own_row(call, rows)
            if index is None or not call.span.is_recording():
                refusal = "the service's sampler refused the model's span"
                call.model.tally.finish("no collector saw the call" if index is None else refusal)
                continue
            settings, context = call.model.settings, call.span.get_span_context()
            rung = settings.rung if call.omission is None else min(settings.rung, Level.LAYER)
            model_row = rows[index]._replace(rung=int(rung), dur_ns=call.end - call.start)
            call.span.set_attributes(attributes(model_row))
            accepted_calls.append(call)
            call_requests.append(
                CallRequest(
                    row=index,
                    trace_id=f"{context.trace_id:032x}",
                    span_id=f"{context.span_id:016x}",
                    rung=int(rung),
                    collectors=sorted(settings.collectors),
                    otlp=settings.otlp,
                    resource=settings.tracing.resource,
                )
            )
        if not accepted_calls:
            return
        plain_rows = [tuple(row._replace(level=int(row.level))) for row in rows]
        is_queued = self._handover.put(
            RecordedCalls(os.getpid(), call_requests, plain_rows), [call.model for call in accepted_calls]
        )
        for call in accepted_calls:
            if not is_queued:
                call.model.tally.finish(OVERLOADED)
                continue
            call.model.tally.add("recorded")
            if call.omission is not None:
                call.model.tally.add("layers_only")

    # --- the models -----------------------------------------------------------------------------------------

    def widen(self, additional: Collecting, notify: Listener) -> None:
        """Add collectors while no collector that sees the whole process is on."""
        with self._windows.blocked(), self._drain_lock:
            self._collecting.widen(additional, notify)

    def set_depth(self, rung: Level) -> None:
        """Record down to this level from now on."""
        with self._switch_lock:
            if rung != self.rung and self._recording_calls:
                self._collecting.stop(self._thread_collectors())
                self._collecting.start(rung, describe=False, by_thread=True)
            self.rung = rung

    def _thread_collectors(self) -> list[Collector]:
        """Return the collectors that can separate calls by thread."""
        return [collector for collector in self._collecting.collectors if collector.by_thread]

    # --- the end --------------------------------------------------------------------------------------------

    def wait_until_ended(self, models: set[TracedModel], deadline: float) -> None:
        """Wait for running calls of these models until `deadline`, a time of `time.monotonic`."""
        while any(call.model in models for call in list(self.running.values())) and time.monotonic() < deadline:
            time.sleep(0.001)

    def drain_all(self) -> None:
        """Read all calls and windows that have ended."""
        items: list[SampledCall | CallWindow] = []
        while not self._ended_queue.empty():
            try:
                item = self._ended_queue.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                items.append(item)
        for item in items:
            self.drain(item)

    def close(self) -> None:
        """End the threads."""
        self._ended_queue.put(None)
        self._handover.close()

    def forget(self) -> bool:
        """Drop the state in a forked child, which sets up its own; return whether a call was being recorded."""
        self._handover.forget()
        self.running.clear()
        return bool(self._recording_calls) or self._windows.is_open


def _own_row(call: SampledCall, rows: Sequence[Span]) -> int | None:
    """Return the index of the row of the call itself, or None if there is none."""
    start, end = call.start + call.anchor.offset_ns, call.end + call.anchor.offset_ns
    for index, row in enumerate(rows):
        if row.kind == Kind.FORWARD and row.thread == call.thread and start <= row.start_ns and row.end_ns <= end:
            return index
    return None
