"""Operators of ATen and autograd, and device work, through torch.profiler (Kineto).

Recording the shapes of an operator's inputs costs more than recording its time, and they are the same in every step
with the same inputs. So timed steps record times, and the describing step records shapes and memory;
`xsp.store.merge` joins the two by structure.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler

from xsp.callnames import kind_of
from xsp.collector import DeviceCollector, Kernels, Probe
from xsp.cost.flops import flops
from xsp.cost.traffic import traffic
from xsp.schema import Kind, Level, Span, spans_of
from xsp_collectors import collectives, compiledlayers, kinetouse, opinputs
from xsp_collectors.cuda import devices
from xsp_collectors.provenance import CompiledGraphs


class TorchOps(DeviceCollector):
    """Operators (OP), layers of operators in compiled code (LAYER), and the backend's part of collectives (LIBRARY).

    If it is the source of device work, also runtime calls (RUNTIME), kernels and copies (KERNEL) in the deeper rungs.
    """

    name = "torchops"
    levels = (Level.OP, Level.LIBRARY, Level.RUNTIME, Level.KERNEL)
    epoch = True
    device_work = Kernels.KINETO

    def __init__(self) -> None:
        self.on_one_thread = not _ALL_THREADS
        self._profile: autograd_profiler.profile | None = None
        self._stopped_profiles: list[_StoppedProfile] = []
        self._records_device = False
        self._counts = collectives.CollectiveCounts()
        self._graphs = CompiledGraphs()
        self._notes: set[str] = set()
        self._busy_steps = self._failed_steps = 0
        self._log = SuppressedWarnings()
        self._log_level: str | None = None

    def trial(self) -> str | None:
        """Return None if there is a device that Kineto can record."""
        return None if torch.cuda.is_available() else "there is no CUDA device"

    def open(self) -> None:
        """Lower Kineto's log level, because it logs two lines to stderr each time it is switched, and use it once."""
        kinetouse.let_children_exit()
        self._log_level = os.environ.get(kinetouse.LOG_LEVEL)
        os.environ.setdefault(kinetouse.LOG_LEVEL, "99")
        # Kineto's first use should be in the thread that loaded it, and takes long.
        with kinetouse.without_complaint():
            self.start(Level.OP, describe=False)
            self.stop()
        self._stopped_profiles.clear()
        self._busy_steps = 0
        self._graphs.open()

    def close(self) -> None:
        """Restore the environment, and stop listening to torch.compile."""
        self._graphs.close()
        if self._log_level is None:
            os.environ.pop(kinetouse.LOG_LEVEL, None)

    def start(self, rung: Level, describe: bool) -> None:
        """Switch the profiler on, unless the program itself is using it."""
        if kinetouse.is_enabled():
            self._busy_steps += 1
            return
        if describe:
            self._log.begin()
        self._counts = collectives.CollectiveCounts()
        self._counts.begin()
        self._records_device = self.is_device_source and rung >= Level.RUNTIME and torch.cuda.is_available()
        self._profile = autograd_profiler.profile(
            use_kineto=True,
            use_device="cuda" if self._records_device else None,
            record_shapes=describe,
            profile_memory=describe,
            experimental_config=_config(describe),
            **({} if self._records_device else _HOST_ONLY),
        )
        self._profile.__enter__()
        kinetouse.is_xsp_recording = True

    def stop(self) -> None:
        """Switch the profiler off."""
        if self._profile is not None:
            profile, self._profile = self._profile, None
            stop_point = threading.get_native_id(), time.time_ns()
            if self._records_device:
                try:
                    devices.wait()
                except Exception:  # the program's own error, which it gets at its next call
                    self._failed_steps += 1
                    profile.use_device = None  # else it waits again, raises, and does not stop recording
            profile.__exit__(None, None, None)
            kinetouse.is_xsp_recording = False
            self._log.end()
            self._counts.end()
            self._stopped_profiles.append(_StoppedProfile(profile, self._counts, self._records_device, *stop_point))

    def spans(self) -> Iterator[Span]:
        """Return operators, runtime calls, device work, and (describing) allocations."""
        profiles, self._stopped_profiles = self._stopped_profiles, []
        for recording in profiles:
            profile, counts = recording.profile, recording.counts
            if profile.kineto_results is not None:
                results = profile.kineto_results
                tree = getattr(results, "experimental_event_tree", list) if profile.record_shapes else None
                spans = _spans_of(results.events(), self.name, tree)
                # without a filter Kineto also records runtime calls along with the operators
                requested_spans = [
                    span
                    for span in spans
                    if span.level < _RUNTIME or (recording.has_device_work and not recording.is_own(span))
                ]
                label_result = collectives.label(requested_spans, counts)
                if label_result.note is not None:
                    self._notes.add(label_result.note)
                placement = compiledlayers.place(label_result.spans, self._graphs)
                self._notes.update(placement.notes)
                yield from placement.spans

    def notes(self) -> Iterator[str]:
        """Yield sentences on steps in which torch.profiler was in use, and on collectives that were not identified."""
        yield from sorted(self._notes)
        yield from (f"a compiled graph could not be read: {text}" for text in sorted(self._graphs.errors))
        self._notes.clear()
        self._graphs.errors.clear()
        if self._failed_steps:
            yield f"{self._failed_steps} steps after which the device had failed, and device work may be missing"
            self._failed_steps = 0
        if self._busy_steps:
            yield (
                f"in {self._busy_steps} steps the program itself was using torch.profiler, of which there is one "
                "per process: those steps have no operators"
            )
            self._busy_steps = 0

    def probe(self) -> Probe:
        """Return a probe of operators that do next to nothing."""
        tensor = torch.empty(1)

        def run() -> None:
            for _ in range(500):
                tensor.detach()

        return Probe(run, spans=500)


class _StoppedProfile(NamedTuple):
    """A stopped profile, and the communicators' counters of its step."""

    profile: autograd_profiler.profile
    counts: collectives.CollectiveCounts
    has_device_work: bool
    stopping_thread: int
    stopped_ns: int

    def is_own(self, span: Span) -> bool:
        """Return whether the span is a call of the profiler itself, which waits for devices when it is stopped."""
        return span.level == _RUNTIME and span.thread == self.stopping_thread and span.start_ns >= self.stopped_ns


def _host_only() -> dict[str, Any]:
    """Return the options that keep Kineto from recording runtime calls, if this torch has them.

    When Kineto records the host's activity, it also makes CUPTI record the runtime's calls.
    """
    if "activity_filters" not in inspect.signature(autograd_profiler.profile.__init__).parameters:
        return {}
    kinds = {"CPU_OP", "CPU_INSTANT_EVENT", "USER_ANNOTATION"}
    return {"activity_filters": {torch.profiler.ProfilerActivity.CPU: kinds}}


_HOST_ONLY = _host_only()


def _config(describe: bool) -> _ExperimentalConfig:
    """Return the requested options that this torch supports.

    If Kineto records all threads, it records no allocations. So a describing step omits threads that do not inherit the
    profiler's state, and their operators stay undescribed. It has overloads instead.
    """
    options: dict[str, Any] = {"profile_all_threads": not describe} if _ALL_THREADS else {}
    if _OVERLOADS:
        options["capture_overload_names"] = describe
    return _ExperimentalConfig(**options)


def _has_option(option: str) -> bool:
    """Return whether this torch has an option."""
    try:
        options: dict[str, Any] = {option: True}
        _ExperimentalConfig(**options)
    except TypeError:
        return False
    return True


_ALL_THREADS = _has_option("profile_all_threads")
_OVERLOADS = _has_option("capture_overload_names")


def _spans_of(events: list[Any], collector: str, tree: Callable[[], list[Any]] | None = list) -> Iterator[Span]:
    """Make spans of Kineto's events.

    Args:
        events: events of one step.
        collector: name of the collector.
        tree: returns the step's tree of events; None if the step does not describe: its operators have no shapes.
    """
    threads = _Threads(events)
    if hasattr(torch._C._autograd._KinetoEvent, "is_hidden_event"):
        events = [event for event in events if not event.is_hidden_event()]
    ops: list[Any] = []
    for event in events:
        category = _category(event)
        if category == "cpu_op":
            ops.append(event)
        elif (maker := _MAKERS.get(category)) is not None and (result := maker(event, threads, collector)) is not None:
            yield result
    if tree is None:
        yield from _ops(ops, threads, collector)
        return
    lists = opinputs.TensorLists(tree)
    for span, event in zip(_ops(ops, threads, collector), ops, strict=True):
        yield _with_inputs(span, event, lists) if event.shapes() else span


class _Threads:
    """The system's thread ids. For the forward op of a backward op, Kineto uses thread numbers of its own."""

    def __init__(self, events: list[Any]) -> None:
        self._ids: dict[int, int] = {}
        self._remaining_events = filter(_is_on_host, events)  # these have both numbers

    def get(self, number: int) -> int | None:
        """Return the system's id for Kineto's number of a thread; None if no event ran there."""
        while number not in self._ids:
            event = next(self._remaining_events, None)
            if event is None:
                return None
            self._ids.setdefault(event.start_thread_id(), event.device_resource_id())
        return self._ids[number]


# looking up enum members is expensive for hundreds of events
_CPU, _OP, _RUNTIME = torch._C._autograd.DeviceType.CPU, Level.OP, Level.RUNTIME


_RUNTIME_CALL = re.compile(r"cu(?:da)?[A-Z]")
"""The start of the name of a call of CUDA's runtime (`cudaLaunchKernel`) or driver (`cuLaunchKernel`, Triton's)."""

_OVERHEADS = frozenset({
    "Driver Compiler", "Buffer Flush", "Instrumentation", "Resource", "Runtime Triggered Module Loading",
    "Lazy Function Loading", "Command Buffer Full", "Activity Buffer Request", "UVM Activity Init",
})  # fmt: skip
"""Kineto's names of the work of CUPTI and the driver themselves."""


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type() == _CPU)


def _category(event: Any) -> str:
    """Return Kineto's category of an event; in older versions of torch, which do not report it, from its name."""
    activity = getattr(event, "activity_type", None)
    if activity is not None:
        return activity()  # type: ignore[no-any-return]
    name = event.name()
    if name == "[memory]":
        return "cpu_instant_event"
    if getattr(event, "is_user_annotation", bool)():
        return "user_annotation" if _is_on_host(event) else "gpu_user_annotation"
    if _is_on_host(event):
        return "overhead" if name in _OVERHEADS else "cuda_runtime" if _RUNTIME_CALL.match(name) else "cpu_op"
    return "gpu_memcpy" if name.startswith(("Memcpy", "Memset")) else "kernel"


def _ops(events: list[Any], threads: _Threads, collector: str, kind: str = Kind.OP.value) -> Iterator[Span]:
    names = [event.name() for event in events]
    forward_threads = [event.fwd_thread_id() for event in events]
    sequence_numbers = [event.sequence_nr() for event in events]
    columns: dict[str, Sequence[Any]] = {
        "name": names,
        # RecordScope 1 is BACKWARD_FUNCTION; the engine's own frame around it has the default scope
        "phase": [
            "backward" if number > 0 or event.scope() == 1 or name.startswith("autograd::") else None
            for event, name, number in zip(events, names, forward_threads, strict=True)
        ],
        "start_ns": [event.start_ns() for event in events],
        "dur_ns": [event.duration_ns() for event in events],
        "thread": [event.device_resource_id() for event in events],
        "sequence_nr": [number if number >= 0 else None for number in sequence_numbers],
        "forward_thread": [threads.get(number) if number > 0 else None for number in forward_threads],
    }
    if collectives.PARAMETERS in names:
        columns["attributes"] = [
            collectives.parameters_json(event, name) for event, name in zip(events, names, strict=True)
        ]
    return spans_of(columns, level=_OP, kind=kind, collector=collector)


def _with_inputs(span: Span, event: Any, lists: opinputs.TensorLists) -> Span:
    shapes, dtypes, scalars = opinputs.shapes(event), event.dtypes(), event.concrete_inputs()
    operations, transfer = flops(span.name, shapes, scalars, dtypes), traffic(span.name, shapes, dtypes, scalars)
    return span._replace(
        input_shapes=json.dumps(shapes),
        dtype=next((name for name in dtypes if name), None),
        flops=operations,
        flops_source="shapes" if operations is not None else None,
        dram_read_bytes=transfer.read_bytes if transfer is not None else None,
        dram_write_bytes=transfer.write_bytes if transfer is not None else None,
        bytes_source="shapes" if transfer is not None else None,
        attributes=opinputs.attributes(span.attributes, event, shapes, lists),
    )


def _annotation(event: Any, threads: _Threads, collector: str) -> Span | None:
    # torch's own label around an optimizer's step duplicates the training collector's span, and ends after the
    # hooks that may have closed the step.
    if event.name().startswith("Optimizer.step#"):
        return None
    (span,) = _ops([event], threads, collector, Kind.USER.value)
    return collectives.as_call(span)


def _allocation(event: Any, threads: _Threads, collector: str) -> Span | None:
    if event.nbytes() <= 0:
        return None
    return Span(
        level=Level.OP,
        kind=Kind.ALLOC.value,
        name="alloc",
        start_ns=event.start_ns(),
        thread=event.device_resource_id() or threads.get(event.start_thread_id()),
        device=None if _is_on_host(event) else event.device_index(),
        alloc_bytes=event.nbytes(),
        collector=collector,
    )


def _runtime(event: Any, threads: _Threads, collector: str) -> Span:
    return Span(
        level=Level.RUNTIME,
        kind=kind_of(event.name()).value,
        name=event.name(),
        start_ns=event.start_ns(),
        dur_ns=event.duration_ns(),
        thread=event.device_resource_id(),
        correlation_id=event.correlation_id() or None,
        collector=collector,
    )


def _overhead(event: Any, threads: _Threads, collector: str) -> Span:
    span = _runtime(event, threads, collector)
    thread = span.thread or None  # 0: of no thread
    return span._replace(kind=Kind.OVERHEAD.value, name=span.name.lower(), thread=thread, correlation_id=None)


def _device(event: Any, threads: _Threads, collector: str) -> Span:
    is_kernel = _category(event) in ("kernel", "concurrent_kernel")
    return Span(
        level=Level.KERNEL,
        kind=Kind.KERNEL.value if is_kernel else Kind.COPY.value,
        name=event.name(),
        start_ns=event.start_ns(),
        dur_ns=event.duration_ns(),
        device=event.device_index(),
        stream=event.device_resource_id(),
        correlation_id=event.correlation_id() or None,
        collector=collector,
        attributes=attributes(event),
    )


_MAKERS: dict[str, Callable[[Any, _Threads, str], Span | None]] = {
    "user_annotation": _annotation,
    "cpu_instant_event": _allocation,
    "cuda_runtime": _runtime,
    "cuda_driver": _runtime,
    "overhead": _overhead,
    "kernel": _device,
    "concurrent_kernel": _device,
    "gpu_memcpy": _device,
    "gpu_memset": _device,
}


# --- launches from Kineto ---------------------------------------------------------------------------------------------
# Kineto's details of launches and copies, besides name and times.
#
# Kineto gives them as a JSON object without its braces: `"device": 0, …, "grid": [8, 1, 1], …`. Older versions of
# torch write them to the exported file, but do not expose them in the process.

_NAMES = {
    "grid": "grid",
    "block": "block",
    "registers per thread": "registers",
    "shared memory": "shared_bytes",
    "context": "context",
    "bytes": "bytes",
}
"""Kineto's names, and the names in the column `attributes`."""


def attributes(event: Any) -> str | None:
    """Return the attributes of device work in the form of the importer of Kineto's files; None without details."""
    read_metadata = getattr(event, "metadata_json", None)
    details = _parse(read_metadata()) if read_metadata is not None else {}
    fields = {name: details[key] for key, name in _NAMES.items() if key in details}
    if details.get("graph node id"):
        fields |= {"graph": True, "graph_node": details["graph node id"]}
    return json.dumps(fields) if fields else None


def _parse(text: str) -> dict[str, Any]:
    try:
        details = json.loads("{" + text + "}")
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


# --- torch's log ------------------------------------------------------------------------------------------------------
# The log level of torch's C++ code, which has no Python interface.
#
# While memory is recorded, torch warns on the program's stderr of every block that is older than the recording.
# These warnings are useless; so warnings, but not errors, are suppressed while a step is described.

_ERROR = 2


class SuppressedWarnings:
    """A raised log level between `begin` and `end`; does nothing if this torch does not expose the level."""

    def __init__(self) -> None:
        self._level = _find()
        self._previous: int | None = None

    def begin(self) -> None:
        """Suppress log messages below errors."""
        if self._level is not None:
            self._previous = self._level.value
            self._level.value = max(self._previous, _ERROR)

    def end(self) -> None:
        """Restore the previous level."""
        if self._level is not None and self._previous is not None:
            self._level.value, self._previous = self._previous, None


def _find() -> ctypes.c_int | None:
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            continue
    return None
