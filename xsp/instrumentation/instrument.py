"""`xsp.instrument(model)`: the spans of a model's calls under the spans of a service's requests.

A request that the service's own OpenTelemetry samples may also be chosen here, by its trace id. Collectors are on
during the model's call in such a request. Afterwards the service's own tracer makes the model's span, and a thread
and a second process make the spans below it in the background. For any other request, only the current span is read.

A process has one set of collectors for all models and handles: they are installed with the first handle and removed
with the last.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xsp import clock, processes, serving
from xsp.collector import Collector, Listener, Signal
from xsp.errors import PluginError, UsageError
from xsp.instrumentation.calls import CallRecorder
from xsp.instrumentation.counts import Counts, sum_counts
from xsp.instrumentation.requestspans import RequestSpans, served
from xsp.instrumentation.sampling import MOST_OUTSIDE, Models, SamplingSettings, TracedModel, bound_of, choose_call
from xsp.levels import parse_levels
from xsp.otlp.endpoint import endpoint
from xsp.record.collecting import Collecting
from xsp.schema import Level
from xsp.serving import Engine, RunningStep

if TYPE_CHECKING:
    from xsp.instrumentation.provider import Tracing

CLOSING_S = 10.0
_PROGRAM_COLLECTORS = ("training", "dataloading", "generation")
"""Collectors of whole programs: in a service the request that calls `generate` has a span already."""

_CALL_COLLECTOR = "modules"
_active: _Process | None = None
_lock = threading.RLock()
"""Held while handles are added and removed."""

_logger = logging.getLogger("xsp")


def instrument(
    model: Any,
    *more_models: Any,
    sample: float = 0.01,
    levels: str = "M/L/G",
    provider: Any = None,
    otlp: str | None = None,
    collectors: Sequence[str | Collector] | None = None,
) -> Instrumented:
    """Record the layers, operators and kernels of a model below the requests of a service that uses OpenTelemetry.

    >>> traced = xsp.instrument(model, sample=0.01)     # doctest: +SKIP

    Call it again for further models or other settings. A model belongs to the last handle that was created for it. A
    handle does not keep its models alive.

    Args:
        model: a `torch.nn.Module`. A call of a module that contains it counts as a call of the model, or of the
            outermost one if it contains several models.
        more_models: more models with the same settings.
        sample: share of requests to record, of those that the service itself samples, from 0 to 1. The decision
            depends on the trace id, so all services of a trace make the same one.
        levels: levels to record, as in `profile`.
        provider: the tracer provider; default: the global one.
        otlp: target to which a second process sends the spans below the span of the model, as in `xsp export --to`;
            default: they go through the processors of the provider.
        collectors: names of entry points, or instances; default: all that can be used in a service.

    Returns:
        A handle with counts. Close it, or use it in a `with` block, to remove the instrumentation.

    Raises:
        UsageError: there is no tracer provider, a model is not a module, or the share or target is invalid.
        PluginError: OpenTelemetry's SDK or a collector is missing.
    """
    return Instrumented((model, *more_models), sample, levels, provider, otlp, collectors)


class Instrumented:
    """A handle on models that are instrumented with the same settings, until `close`."""

    def __init__(
        self,
        models: tuple[Any, ...],
        sample: float,
        levels: str,
        provider: Any,
        otlp: str | None,
        collectors: Sequence[str | Collector] | None,
    ) -> None:
        """Install what is not installed yet; see `instrument`."""
        for model in models:
            if not isinstance(model, getattr(sys.modules.get("torch.nn"), "Module", ())):
                raise UsageError(f"xsp.instrument() takes a torch.nn.Module, and {type(model).__name__} is not one")
        rung = parse_levels(levels)[-1]
        self._tracing = _tracing(provider)
        bound = bound_of(sample)
        if otlp is not None and endpoint(otlp).is_file:
            raise UsageError(f"otlp={otlp!r}: a service sends to a receiver, such as http://localhost:4318")
        collecting = _find_collectors(collectors, rung)
        names = frozenset(collecting.names)
        whole_process = any(not collector.by_thread for collector in collecting.collectors)
        settings = SamplingSettings(sample, bound, rung, names, whole_process, self._tracing, otlp)
        self._models = [TracedModel(model, name, settings) for model, name in zip(models, _names(models), strict=True)]
        self._closed = False
        self._engine = Engine(self._models[0].name, models[0])
        self._engine_notes: list[str] = []
        self._requests = RequestSpans(self._models, self._note)
        with _lock:
            self._process = _active or _Process(collecting)
            self._process.add(self._models, collecting, self._requests)
        atexit.register(self.close)

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
        """Outcomes of the calls so far, of all models of this handle."""
        return sum_counts(model.counts for model in self._models)

    @property
    def models(self) -> dict[str, Counts]:
        """Outcomes of the calls of each model, by the name of its class, with a number where several share it."""
        return {model.name: model.counts for model in self._models}

    @property
    def notes(self) -> list[str]:
        """Sentences on what collectors could not see here or why they cannot work, and on models without requests."""
        collecting = self._process.collecting
        lines = [f"{note['source']}: {note['text']}" for note in collecting.notes]
        lines += [f"{name}: {reason}" for name, reason in sorted(collecting.absent.items())]
        return lines + self._engine_notes + [hint for model in self._models if (hint := model.hint()) is not None]

    def _note(self, text: str) -> None:
        """Keep a sentence on what an engine stated, and log it."""
        self._engine_notes.append(text)
        _logger.warning("%s", text)

    @contextlib.contextmanager
    def batch(self, requests: Iterable[Any]) -> Iterator[None]:
        """Declare which requests the model's calls in this block serve.

        A call is recorded if any of the requests is chosen. The model's span links to each request, and requests whose
        spans are still open link back to it. It is a child of the current span if that is sampled, else of the first
        chosen request.

        Args:
            requests: OpenTelemetry contexts, spans or span contexts.
        """
        token = served.set(tuple(requests))
        try:
            yield
        finally:
            served.reset(token)

    def engine(self, requests: Iterable[Sequence[Any]]) -> RunningStep:
        """Return the context of a step in which an engine calls the model for several requests.

        A request is served in many steps. Its span has its arrival, its end and what its time went to, and links to the
        steps; a step that serves a chosen request is a trace of its own, with the model's call in it. For engines of
        several models use `xsp.serving.Engine`. Nothing raises: what is stated wrongly is in `notes`, and logged once.

        Args:
            requests: for each request its id, `prefill` or `decode`, its tokens in this step, and optionally how many
                tokens the step generates for it; default: those of decode, and one at the end of a prompt.
        """
        return self._engine.step(requests)

    def arrive(self, request: Any, prompt_tokens: int | None = None, at_ns: int | None = None) -> None:
        """State that a request arrived, in the span that is current; without it its time in a queue is unknown.

        Args:
            request: its id, for `engine` and `finish`.
            prompt_tokens: tokens of its prompt; needed if its prefill is cut into several steps.
            at_ns: when it arrived, of `time.perf_counter_ns`; default: now.
        """
        self._engine.arrive(request, prompt_tokens, at_ns)

    def finish(self, request: Any, status: str = "ok", at_ns: int | None = None) -> None:
        """State that a request ended.

        Args:
            request: its id.
            status: `ok`, `cancelled` or `error:<exception type>`.
            at_ns: when it ended, of `time.perf_counter_ns`; default: now.
        """
        self._engine.finish(request, status, at_ns)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all recorded spans are delivered or lost; return False if that takes over `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._requests.drain()
        outcomes = [model.tally.wait(max(0.0, deadline - time.monotonic())) for model in self._models]
        return all(outcomes) and bool(self._tracing.flush(max(0.0, deadline - time.monotonic())))

    def close(self, timeout: float = CLOSING_S) -> None:
        """Remove the instrumentation of these models, deliver their spans, log losses; other handles are unaffected."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            deadline = time.monotonic() + timeout
            is_last = self._process.remove(self._models, deadline, self._requests)
        self._requests.close()
        for model in self._models:
            if not model.tally.wait(max(0.0, deadline - time.monotonic())):
                model.tally.give_up("not delivered when the handle was closed")
        with contextlib.suppress(Exception):  # flushes the service's spans too; its exporter may fail
            self._tracing.flush(max(0.0, deadline - time.monotonic()))
        if is_last:
            self._process.calls.close()
        for hint in [model.hint() for model in self._models if model.calls_outside < MOST_OUTSIDE]:
            if hint is not None:
                _logger.warning("%s", hint)
        counts = self.counts
        if counts.lost:
            _logger.warning("of %d sampled calls, these lack spans: %s", counts.sampled, counts.lost)


class _Process:
    """State that the handles of a process share: the collectors and the calls."""

    def __init__(self, collecting: Collecting) -> None:
        global _active
        self.collecting, self._models = collecting, Models()
        self.calls = CallRecorder(collecting)
        self._handles: list[list[TracedModel]] = []
        self._requests: list[RequestSpans] = []
        collecting.open(self._listener())
        _active = self
        processes.call_in_children(_restart_in_child)

    def add(self, models: list[TracedModel], collecting: Collecting, requests: RequestSpans) -> None:
        """Instrument models.

        Args:
            models: the models of one handle.
            collecting: the collectors that the handle needs.
            requests: takes the requests of engines that call the models.
        """
        self._requests.append(requests)
        serving.attach(requests)
        if collecting is not self.collecting:
            self.calls.widen(collecting, self._listener())
        self._handles.append(models)
        self._models.add(models)
        self.calls.set_depth(self._rung())

    def remove(self, models: list[TracedModel], deadline: float, requests: RequestSpans) -> bool:
        """Remove the models of a handle once their calls have ended; return whether it was the last handle.

        Args:
            models: the models of the handle.
            deadline: deadline for the calls, of `time.monotonic`.
            requests: as for `add`.
        """
        global _active
        serving.detach(requests)
        self._requests.remove(requests)
        self._models.remove(models)
        self._handles = [handle for handle in self._handles if handle is not models]
        self.calls.wait_until_ended(set(models), deadline)
        self.calls.drain_all()
        if self._handles:
            self.calls.set_depth(self._rung())
            return False
        self.collecting.close(calibrate=False)
        _active = None
        return True

    def _rung(self) -> Level:
        return max(model.settings.rung for models in self._handles for model in models)

    # --- in the request -------------------------------------------------------------------------------------

    def _listener(self) -> Listener:
        """Return the listener for the collectors' signals. A request that is not chosen runs only its first lines."""
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
        from opentelemetry.trace import get_current_span

        begin, call_end, serving = Signal.CALL_BEGIN, Signal.CALL_END, served.get
        models_by_id, outermost = self._models.by_id, self._models.outermost
        low_bits, open_calls, end = TraceIdRatioBased.TRACE_ID_LIMIT, self.calls.running, self.calls.end

        def listen(signal: Signal, subject: Any) -> None:
            if signal is begin:
                model = models_by_id.get(id(subject)) or outermost(subject)
                if model is None:
                    return
                next(model.call_counter)
                requests = serving()
                if requests is None:
                    context = get_current_span().get_span_context()
                    if not context.trace_id:
                        model.calls_outside += 1
                        if model.calls_outside == MOST_OUTSIDE and (hint := model.hint()) is not None:
                            _logger.warning("%s", hint)
                    if not context.trace_flags & 1 or context.trace_id & low_bits >= model.bound:
                        return
                self._begin(model, subject, requests)
            elif signal is call_end and open_calls:
                end()

        return listen

    def _begin(self, model: TracedModel, module: Any, requests: tuple[Any, ...] | None) -> None:
        """Record a call, if it is chosen."""
        try:
            call = choose_call(model, module, requests)
        except Exception as error:
            self.calls.fail(model, error)
            return
        if call is not None and _active is self:
            self.calls.begin(call)

    # --- forks ----------------------------------------------------------------------------------------------

    def restart_in_child(self) -> None:
        """Start again in a forked process: the threads and the second process stayed with the parent."""
        global _active
        was_recording = self.calls.forget()
        for requests in self._requests:
            requests.renew()
        self.calls = CallRecorder(self.collecting)
        for model in (model for models in self._handles for model in models):
            model.renew()
            if was_recording:
                reason = "the process was forked in the middle of a recording; xsp is off in the child"
                model.tally.lose(reason, expected=model is not self._handles[0][0])
        if was_recording:
            self._models.remove(self._models.by_id.values())
            _active = None
            return
        # open files of the collectors are shared with the parent
        self.collecting.close(calibrate=False)
        self.collecting.open(self._listener())
        self.collecting.rows(clock.anchor())
        self.calls.set_depth(self._rung())


def _find_collectors(requested: Sequence[str | Collector] | None, rung: Level) -> Collecting:
    """Return the collectors that a service needs."""
    collecting = Collecting()
    collecting.find(requested, rung)
    if requested is None:
        collecting.collectors = [
            collector for collector in collecting.collectors if collector.name not in _PROGRAM_COLLECTORS
        ]
    if not any(collector.name == _CALL_COLLECTOR for collector in collecting.collectors):
        reason = collecting.absent.get(_CALL_COLLECTOR, "name it among the collectors")
        raise PluginError(f"the collector {_CALL_COLLECTOR!r}, which sees the calls of models, is missing: {reason}")
    return collecting


def _names(models: Sequence[Any]) -> list[str]:
    """Name models by their classes, and number those that share one."""
    occurrences: Counter[str] = Counter()
    names = []
    for model in models:
        name = type(getattr(model, "_orig_mod", model)).__name__
        occurrences[name] += 1
        names.append(name if occurrences[name] == 1 else f"{name} {occurrences[name]}")
    return names


def _tracing(provider: Any) -> Tracing:
    try:
        from opentelemetry.trace import get_tracer_provider

        from xsp.instrumentation.provider import Tracing
    except ImportError as error:
        raise PluginError(f"xsp.instrument() needs OpenTelemetry's SDK ({error}): pip install 'xsp[otel]'") from error
    return Tracing(provider if provider is not None else get_tracer_provider())


def _restart_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    if _active is not None:
        _active.restart_in_child()
