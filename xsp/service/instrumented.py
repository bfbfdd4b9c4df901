"""`xsp.instrument(model)`: the spans of a model's calls under the spans of a service's requests.

A request that the service's own OpenTelemetry samples may be chosen here too, by its trace id. During the
call of the model in such a request collectors are on; afterwards the model's span is made by the service's
own tracer, and the spans beneath it follow, made by a thread and a second process at their leisure. For all
other requests there is a look at the current span, and nothing else.

One call is recorded at a time: collectors see the whole process. A call that is chosen while another one is
being recorded gets its model span alone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp import clock
from xsp.collector import Collector, Signal
from xsp.errors import PluginError, UsageError
from xsp.exporters.endpoint import endpoint
from xsp.recording.collecting import Collecting
from xsp.recording.schedule import parse_levels
from xsp.service.choosing import Call, bound_of, chosen, whose
from xsp.service.correlating import Recorded, attributes
from xsp.span import Kind, Span

if TYPE_CHECKING:
    from xsp.service.handover import Tracing

CLOSING_S = 10.0
REQUEST_S = 0.05
"""How long a request may take to answer after the model's call before rows are read beside it."""

MOST_NOTES = 100
"""A service runs for months, and what collectors have to say may hold numbers."""

_FOR_TRAINING = ("training", "dataloading")
_SEES_CALLS = "modules"
_BUSY = "another call was being recorded"
_logger = logging.getLogger("xsp")
_active: Instrumented | None = None
_serving: ContextVar[tuple[Any, ...] | None] = ContextVar("xsp_serving", default=None)


class Counts(NamedTuple):
    """What became of the calls of an instrumented model, in this process."""

    calls: int
    """Calls of the model, in requests and outside them."""

    sampled: int
    """Calls in chosen requests: those that have a model span."""

    recorded: int
    """Of those, calls whose deeper levels were recorded."""

    delivered: int
    """Spans below the model's that the service's processors took, or that were sent."""

    strangers: int
    """Spans of other requests that were recorded at the same time, and left out."""

    lost: dict[str, int]
    """Chosen calls whose deeper spans are missing, in whole or in part, by reason."""


def instrument(
    model: Any,
    *others: Any,
    sample: float = 0.01,
    levels: str = "M/L/G",
    provider: Any = None,
    otlp: str | None = None,
    collectors: Sequence[str | Collector] | None = None,
) -> Instrumented:
    """Hang the layers, operators and kernels of a model under the requests of a service that has OpenTelemetry.

    >>> traced = xsp.instrument(model, sample=0.01)     # doctest: +SKIP

    Args:
        model: a `torch.nn.Module`; a call of a module that contains it counts as its call.
        others: more models of the same service.
        sample: share of requests that are recorded, of those that the service itself samples. All services
            that see a trace decide alike, by its id.
        levels: how deep to look, as in `profile`.
        provider: the tracer provider; the global one unless told otherwise.
        otlp: where the second process is to send the spans below the model's, as in `xsp export --to`; unless
            it is given they go through the provider's own processors.
        collectors: names of entry points, or instances; all that are of use to a service unless told otherwise.

    Returns:
        A handle with the counts; close it, or use it in a `with` block, to take everything out again.

    Raises:
        UsageError: no tracer provider, not a module, a share or target that is none, or another handle is open.
        PluginError: OpenTelemetry's SDK or a collector is missing.
    """
    return Instrumented((model, *others), sample, levels, provider, otlp, collectors)


class Instrumented:
    """Models that are instrumented, until `close`."""

    def __init__(
        self,
        models: tuple[Any, ...],
        sample: float,
        levels: str,
        provider: Any,
        otlp: str | None,
        collectors: Sequence[str | Collector] | None,
    ) -> None:
        """Install the collectors; see `instrument`."""
        global _active
        if _active is not None:
            raise UsageError("xsp.instrument() is at work in this process; name all models in one call")
        for model in models:
            if not isinstance(model, getattr(sys.modules.get("torch.nn"), "Module", ())):
                raise UsageError(f"xsp.instrument() takes a torch.nn.Module, and {type(model).__name__} is none")
        self._models, self._sample, self._otlp = models, sample, otlp
        self._rung = parse_levels(levels)[-1]
        self._tracing = _tracing(provider)
        self._bound = bound_of(sample)
        if otlp is not None and endpoint(otlp).is_file:
            raise UsageError(f"otlp={otlp!r}: a service sends to a receiver, such as http://localhost:4318")
        self._collecting = Collecting()
        self._find(collectors)
        self._closed = False
        self._renew()
        self._collecting.open(self._listener())
        _active = self
        _watch_forks()
        atexit.register(self.close)

    def _renew(self) -> None:
        """Make what belongs to one process and does not survive a fork: locks, counts, queues, threads."""
        from xsp.service.handover import Handover, Tally

        self._seen, self._looked = count(), 0
        self._tally = Tally()
        self._handover = Handover(self._tracing, self._tally, self._otlp)
        self._recording, self._draining, self._looking = threading.Lock(), threading.Lock(), threading.Lock()
        self._open: dict[int, Call] = {}
        self._undrained: Call | None = None
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def _find(self, wanted: Sequence[str | Collector] | None) -> None:
        self._collecting.find(wanted, self._rung)
        if wanted is None:
            found = self._collecting.collectors
            self._collecting.collectors = [each for each in found if each.name not in _FOR_TRAINING]
        if not any(each.name == _SEES_CALLS for each in self._collecting.collectors):
            reason = self._collecting.absent.get(_SEES_CALLS, "name it among the collectors")
            raise PluginError(f"the collector {_SEES_CALLS!r}, which sees the calls of models, is missing: {reason}")

    # --- the handle -----------------------------------------------------------------------------------------

    def __enter__(self) -> Instrumented:
        """Return the handle."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    @property
    def counts(self) -> Counts:
        """What became of the calls so far."""
        with self._looking:
            calls = next(self._seen) - self._looked
            self._looked += 1
        known = {name: self._tally.counts[name] for name in Counts._fields[1:-1]}
        return Counts(calls=calls, **known, lost=dict(self._tally.lost))

    @property
    def notes(self) -> list[str]:
        """Sentences on what collectors could not see, and on those that cannot work here."""
        said = [f"{note['source']}: {note['text']}" for note in self._collecting.notes]
        return said + [f"{name}: {reason}" for name, reason in sorted(self._collecting.absent.items())]

    @contextlib.contextmanager
    def batch(self, requests: Iterable[Any]) -> Iterator[None]:
        """Say which requests the model's calls in this block serve.

        A call is recorded if any of them is chosen. The model's span links to each of them, and those whose
        spans are still open link back to it. It is a child of the current span, if that is sampled; else of
        the first chosen request.

        Args:
            requests: OpenTelemetry contexts, spans or span contexts.
        """
        token = _serving.set(tuple(requests))
        try:
            yield
        finally:
            _serving.reset(token)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all that was recorded is delivered or lost; False if that took more than `timeout` seconds."""
        end = time.monotonic() + timeout
        return self._tally.wait(timeout) and bool(self._tracing.flush(max(0.0, end - time.monotonic())))

    def close(self, timeout: float = CLOSING_S) -> None:
        """Take everything out again, deliver what was recorded, and log what was lost."""
        global _active
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        end = time.monotonic() + timeout
        while self._open and time.monotonic() < end:
            time.sleep(0.001)
        self._drain()
        self._collecting.close(calibrate=False)
        _active = None
        if not self._tally.wait(max(0.0, end - time.monotonic())):
            self._tally.lose("not delivered when the handle was closed", self._tally.under_way)
        with contextlib.suppress(
            Exception
        ):  # the models' spans are the service's, and so is what fails in its exporter
            self._tracing.flush(max(0.0, end - time.monotonic()))
        self._ended.put(False)
        self._handover.close()
        if self._tally.lost:
            sampled, lost = self._tally.counts["sampled"], dict(self._tally.lost)
            _logger.warning("of %d sampled calls these miss spans: %s", sampled, lost)

    # --- in the request -------------------------------------------------------------------------------------

    def _listener(self) -> Callable[[Signal, object], None]:
        """Return what collectors signal to. A request that is not chosen pays for its first lines alone."""
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
        from opentelemetry.trace import get_current_span

        begin, seen, is_ours, serving = Signal.CALL_BEGIN, self._seen, whose(self._models), _serving.get
        bound, low_bits, still_open = self._bound, TraceIdRatioBased.TRACE_ID_LIMIT, self._open

        def listen(signal: Signal, subject: Any) -> None:
            if signal is begin:
                if not is_ours(subject):
                    return
                next(seen)
                requests = serving()
                if requests is None:
                    context = get_current_span().get_span_context()
                    if not context.trace_flags & 1 or context.trace_id & low_bits >= bound:
                        return
                self._begin(subject, requests)
            elif still_open:
                self._end()

        return listen

    def _begin(self, module: Any, requests: tuple[Any, ...] | None) -> None:
        try:
            call = chosen(module, requests, self._bound)
            if call is None or self._closed:
                return
            call.on, call.outer, call.thread = [], sys.exc_info()[1], threading.get_native_id()
            call.recorded = self._recording.acquire(blocking=False)
            self._open[threading.get_ident()] = call
            if call.recorded:
                self._drain()
                self._read_in_background()
                call.on = self._collecting.start(self._rung, describe=False)
            call.anchor = clock.anchor()
            call.start = clock.monotonic_ns()
        except Exception as error:
            self._fail(error)

    def _end(self) -> None:
        end = clock.monotonic_ns()
        call = self._open.get(threading.get_ident())
        if call is None:
            return
        try:
            call.end = end
            self._collecting.settle(call.on)
            self._collecting.stop(call.on)
            self._start_span(call)
            if call.recorded:
                self._tally.begin()
                self._undrained = call
        except Exception as error:
            self._fail(error)
        finally:
            del self._open[threading.get_ident()]
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
        self._tally.add("sampled")
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
            self._tally.lose(_BUSY, expected=True)

    def _fail(self, error: Exception, on_its_way: bool = False) -> None:
        reason = f"xsp failed: {type(error).__name__}: {error}"
        if on_its_way:
            self._tally.finish(reason)
        else:
            self._tally.lose(reason)

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
            self._drain()

    def _wait_for_the_request(self, call: Call | None) -> None:
        """Let the request end first: rows are read in Python, and hold up the threads that answer it."""
        from opentelemetry.trace import get_current_span

        end = time.monotonic() + REQUEST_S
        while call is not None and get_current_span(call.context).is_recording() and time.monotonic() < end:
            time.sleep(0.002)

    def _drain(self) -> None:
        """Take the rows of the last recorded call from the collectors, before the next one is recorded."""
        with self._draining:
            call, self._undrained = self._undrained, None
            if call is None:
                return
            try:
                self._hand_over(call, self._collecting.rows(call.anchor))
                del self._collecting.notes[MOST_NOTES:]
            except Exception as error:
                self._fail(error, on_its_way=True)
            finally:
                call.span.end(call.end + call.anchor.offset_ns)

    def _hand_over(self, call: Call, rows: list[Span]) -> None:
        """Complete the model's span, and put the rest into the queue of what is to be delivered."""
        own = next((row for row in rows if row.kind == Kind.FORWARD and row.thread == call.thread), None)
        context = call.span.get_span_context()
        if own is None or not call.span.is_recording():
            refused = "the service's sampler refused the model's span"
            self._tally.finish("no collector saw the call" if own is None else refused)
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
            self._tally.add("recorded")
        else:
            self._tally.finish("calls were recorded faster than they could be delivered")

    # --- forks ----------------------------------------------------------------------------------------------

    def _go_on_in_child(self) -> None:
        """Begin anew in a forked process: threads and the second process stayed with the parent."""
        recording = self._recording.locked()
        self._handover.forget()
        self._renew()
        if recording:
            self._closed = True
            self._tally.lose("the process was forked in the middle of a recording; xsp is off in the child")
            return
        # files that collectors hold open are shared with the parent
        self._collecting.close(calibrate=False)
        self._collecting.open(self._listener())
        self._collecting.rows(clock.anchor())


def _tracing(provider: Any) -> Tracing:
    try:
        from opentelemetry.trace import get_tracer_provider

        from xsp.service.handover import Tracing
    except ImportError as error:
        raise PluginError(f"xsp.instrument() needs OpenTelemetry's SDK ({error}): pip install 'xsp[otel]'") from error
    return Tracing(provider if provider is not None else get_tracer_provider())


_watching = False


def _watch_forks() -> None:
    global _watching
    if not _watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
        _watching = True


def _in_child() -> None:
    if _active is not None:
        _active._go_on_in_child()
