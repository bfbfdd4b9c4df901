"""The calls of models in one process: recorded one at a time, read after the request, handed on.

All of this is made anew in a forked process: locks, counts, queues and threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from xsp import clock
from xsp.recording.collecting import Collecting
from xsp.service.choosing import Call
from xsp.service.correlating import Recorded, attributes
from xsp.span import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.service.handover import Tracing

REQUEST_S = 0.05
"""How long a request may take to answer after the model's call before rows are read beside it."""

MOST_NOTES = 100
"""A service runs for months, and what collectors have to say may hold numbers."""

_BUSY = "another call was being recorded"
_logger = logging.getLogger("xsp")


class Calls:
    """What becomes of the calls of this process, from a call's begin until its spans are in the queue."""

    def __init__(self, collecting: Collecting, rung: Level, tracing: Tracing, otlp: str | None, sample: float) -> None:
        """Make what one process needs; threads start with the first recorded call.

        Args:
            collecting: the collectors.
            rung: how deep to look.
            tracing: of the service.
            otlp: where spans are sent; None to give them to the service's own processors.
            sample: what the models' spans say of the share of requests that are recorded.
        """
        from xsp.service.handover import Handover, Tally

        self.open: dict[int, Call] = {}
        """The calls in chosen requests that go on, by thread."""

        self.tally = Tally()
        self._collecting, self._rung, self._tracing, self._sample = collecting, rung, tracing, sample
        self._handover = Handover(tracing, self.tally, otlp)
        self._recording, self._draining = threading.Lock(), threading.Lock()
        self._undrained: Call | None = None
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    # --- in the request -------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Record a call that begins on this thread, unless another one is being recorded. Never raises."""
        try:
            call.on, call.outer, call.thread = [], sys.exc_info()[1], threading.get_native_id()
            call.recorded = self._recording.acquire(blocking=False)
            self.open[threading.get_ident()] = call
            if call.recorded:
                self.drain()
                self._read_in_background()
                call.on = self._collecting.start(self._rung, describe=False)
            call.anchor = clock.anchor()
            call.start = clock.monotonic_ns()
        except Exception as error:
            self.fail(error)

    def end(self) -> None:
        """End this thread's call, if it has one. Never raises."""
        end = clock.monotonic_ns()
        call = self.open.get(threading.get_ident())
        if call is None:
            return
        try:
            call.end = end
            self._collecting.settle(call.on)
            self._collecting.stop(call.on)
            self._start_span(call)
            if call.recorded:
                self.tally.begin()
                self._undrained = call
        except Exception as error:
            self.fail(error)
        finally:
            del self.open[threading.get_ident()]
            if call.recorded:
                self._recording.release()
                self._ended.put(True)

    def _start_span(self, call: Call) -> None:
        """Make the model's span; that of a recorded call is ended when its rows are there."""
        from opentelemetry.trace import Status, StatusCode

        call.span = self._tracing.tracer.start_span(
            call.name, call.context, links=call.links, start_time=call.start + call.anchor.offset_ns
        )
        for request in call.live:
            request.add_link(call.span.get_span_context())
        self.tally.add("sampled")
        call.span.set_attribute("xsp.sample", self._sample)
        error = sys.exc_info()[1]
        if error is not None and error is not call.outer:
            # without its message, which may hold what the request held
            call.span.set_status(Status(StatusCode.ERROR, f"error:{type(error).__name__}"))
            call.span.set_attribute("error.type", type(error).__name__)
        call.outer = None
        if not call.recorded:
            call.span.set_attribute("xsp.left_out", _BUSY)
            call.span.end(call.end + call.anchor.offset_ns)
            self.tally.lose(_BUSY, expected=True)

    def fail(self, error: Exception, on_its_way: bool = False) -> None:
        """Count a call whose spans are lost by a fault of xsp's."""
        reason = f"xsp failed: {type(error).__name__}: {error}"
        if on_its_way:
            self.tally.finish(reason)
        else:
            self.tally.lose(reason)

    # --- after the request ----------------------------------------------------------------------------------

    def _read_in_background(self) -> None:
        """Start the threads with the first recorded call: a service may fork its workers before it."""
        if self._reader is None:
            self._handover.start()
            self._reader = threading.Thread(target=self._read, name="xsp reads", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        while self._ended.get():
            self._wait_for_the_request(self._undrained)
            self.drain()

    def _wait_for_the_request(self, call: Call | None) -> None:
        """Let the request end first: rows are read in Python, and hold up the threads that answer it."""
        from opentelemetry.trace import get_current_span

        end = time.monotonic() + REQUEST_S
        while call is not None and get_current_span(call.context).is_recording() and time.monotonic() < end:
            time.sleep(0.002)

    def drain(self) -> None:
        """Take the rows of the last recorded call from the collectors, before the next one is recorded."""
        with self._draining:
            call, self._undrained = self._undrained, None
            if call is None:
                return
            try:
                self._hand_over(call, self._collecting.rows(call.anchor))
                del self._collecting.notes[MOST_NOTES:]
            except Exception as error:
                self.fail(error, on_its_way=True)
            finally:
                call.span.end(call.end + call.anchor.offset_ns)

    def _hand_over(self, call: Call, rows: list[Span]) -> None:
        """Complete the model's span, and put the rest into the queue of what is to be delivered."""
        own = next((row for row in rows if row.kind == Kind.FORWARD and row.thread == call.thread), None)
        context = call.span.get_span_context()
        if own is None or not call.span.is_recording():
            refused = "the service's sampler refused the model's span"
            self.tally.finish("no collector saw the call" if own is None else refused)
            return
        call.span.set_attributes(attributes(own._replace(rung=int(self._rung), dur_ns=call.end - call.start)))
        recorded = Recorded(
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            thread=call.thread,
            process=os.getpid(),
            rung=int(self._rung),
            rows=[tuple(row._replace(level=int(row.level))) for row in rows],
        )
        if self._handover.put(recorded):
            self.tally.add("recorded")
        else:
            self.tally.finish("calls were recorded faster than they could be delivered")

    # --- the end --------------------------------------------------------------------------------------------

    def wait_until_ended(self, end: float) -> None:
        """Wait for the calls that go on, but not beyond a time of `time.monotonic`."""
        while self.open and time.monotonic() < end:
            time.sleep(0.001)

    def close(self, end: float) -> None:
        """Deliver what was recorded, until a time of `time.monotonic`; end the threads, and log what was lost."""
        if not self.tally.wait(max(0.0, end - time.monotonic())):
            self.tally.lose("not delivered when the handle was closed", self.tally.under_way)
        with contextlib.suppress(Exception):  # spans of the service's own go with them, and fail in its exporter
            self._tracing.flush(max(0.0, end - time.monotonic()))
        self._ended.put(False)
        self._handover.close()
        if self.tally.lost:
            sampled, lost = self.tally.counts["sampled"], dict(self.tally.lost)
            _logger.warning("of %d sampled calls these miss spans: %s", sampled, lost)

    def forget(self) -> bool:
        """Let go in a forked child, where others take their place; return whether a call was being recorded."""
        self._handover.forget()
        self.open.clear()
        return self._recording.locked()
