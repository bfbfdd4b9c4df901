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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from xsp import clock, forks
from xsp.collector import Collector, Signal
from xsp.errors import PluginError, UsageError
from xsp.exporters.endpoint import endpoint
from xsp.recording.collecting import Collecting
from xsp.recording.schedule import parse_levels
from xsp.service.calls import Calls
from xsp.service.choosing import bound_of, chosen, whose

if TYPE_CHECKING:
    from xsp.service.handover import Tracing

CLOSING_S = 10.0
_FOR_TRAINING = ("training", "dataloading")
_SEES_CALLS = "modules"
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
            raise UsageError(
                "xsp.instrument() is at work in this process; close its handle first, or name all models in one call"
            )
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
        forks.in_children(_begin_anew)
        atexit.register(self.close)

    def _renew(self) -> None:
        """Make what belongs to one process."""
        self._seen, self._looked, self._looking = count(), 0, threading.Lock()
        self._calls = Calls(self._collecting, self._rung, self._tracing, self._otlp, self._sample)

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
        tally = self._calls.tally
        known = {name: tally.counts[name] for name in Counts._fields[1:-1]}
        return Counts(calls=calls, **known, lost=dict(tally.lost))

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
        return self._calls.tally.wait(timeout) and bool(self._tracing.flush(max(0.0, end - time.monotonic())))

    def close(self, timeout: float = CLOSING_S) -> None:
        """Take everything out again, deliver what was recorded, and log what was lost."""
        global _active
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        end = time.monotonic() + timeout
        self._calls.wait_until_ended(end)
        self._calls.drain()
        self._collecting.close(calibrate=False)
        _active = None
        self._calls.close(end)

    # --- in the request -------------------------------------------------------------------------------------

    def _listener(self) -> Callable[[Signal, object], None]:
        """Return what collectors signal to. A request that is not chosen pays for its first lines alone."""
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
        from opentelemetry.trace import get_current_span

        begin, seen, is_ours, serving = Signal.CALL_BEGIN, self._seen, whose(self._models), _serving.get
        bound, low_bits, still_open = self._bound, TraceIdRatioBased.TRACE_ID_LIMIT, self._calls.open
        end = self._calls.end

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
                end()

        return listen

    def _begin(self, module: Any, requests: tuple[Any, ...] | None) -> None:
        try:
            call = chosen(module, requests, self._bound)
        except Exception as error:
            self._calls.fail(error)
            return
        if call is not None and not self._closed:
            self._calls.begin(call)

    # --- forks ----------------------------------------------------------------------------------------------

    def _go_on_in_child(self) -> None:
        """Begin anew in a forked process: threads and the second process stayed with the parent."""
        was_recording = self._calls.forget()
        self._renew()
        if was_recording:
            self._closed = True
            self._calls.tally.lose("the process was forked in the middle of a recording; xsp is off in the child")
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


def _begin_anew() -> None:
    if _active is not None:
        _active._go_on_in_child()
