"""Calls of `torch.nn.Module`: the outermost calls at the model level, all calls at the layer level.

One wrapper around `Module.__call__` sees every module of every model in every thread, also modules that are built
later, copied, pickled or replicated. It is installed once per block: changing a class attribute at each step would
invalidate Python's caches of every module class, and exhaust them from 3.13 on. The wrapper does the work of the method
(one comparison, then `_call_impl`) without calling it, so it adds no Python frame; hooks stay in their layer.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from xsp import processes, scrub
from xsp.clock import monotonic_ns
from xsp.collector import Collector, Probe, Signal, ignore
from xsp.cost.held import bytes_of
from xsp.schema import INPUT_TENSORS, OUTPUT_TENSORS, OUTPUTS, PADDING, PARAMETERS, ROOT, TRAINABLE, Kind, Level, Span
from xsp.subjects import is_empty_module
from xsp_collectors import language
from xsp_collectors.cuda import devices
from xsp_collectors.tensors import (
    Numbers,
    Sketch,
    are_tensors,
    describe,
    first_shape,
    sketch,
    sketch_of,
    tensor_bytes,
)

_OFF, _INSIDE, _WATCH, _WATCH_ENDS, _SIGNAL, _OUTERMOST, _ALL, _DESCRIBE = range(8)
# _INSIDE: the program's only thread is in an outermost call, and inner calls are not needed
# _WATCH: an outermost call is signalled only if it is not in `Outline.usual`
# _WATCH_ENDS: as _WATCH, and the end of each outermost call is signalled

_FORWARD, _CALL_BEGIN, _CALL_END = Kind.FORWARD, Signal.CALL_BEGIN, Signal.CALL_END

MOST_LETTERS = 200
"""Longest text of a module's hyper-parameters."""

_PROBE_CALLS = 500

_NO_NUMBERS: tuple[int, ...] = ()
_NO_INPUTS: Sketch | bool | None = None


class _Call(NamedTuple):
    """One call, made by `_decode` from the wrapper's list; calls are in the order of their ends."""

    module: nn.Module
    thread: int
    depth: int
    start: int
    end: int
    inputs: Sketch | None = None
    outputs: Sketch | None = None
    """Sketch of the returned value; None in steps that do not describe."""

    error: str | None = None
    input_numbers: tuple[int, ...] = ()
    """Numbers of the tensors in its arguments and, in `output_numbers`, in its result; only in steps that describe."""

    output_numbers: tuple[int, ...] = ()
    padding: tuple[int, ...] | None = None
    """Of the outermost call, what `language.padding` returns; only in steps that describe."""


_FIELDS = 6
"""Number of entries per call in the wrapper's flat list: the first five fields of `_Call`, and a tuple of the others,
None for most calls. A flat list needs fewer cache lines than a list of tuples, and the garbage collector ignores it."""


def _decode(flat: list[Any]) -> list[_Call]:
    """Return the calls in one of the wrapper's lists."""
    values = iter(flat)
    calls = (_Call(*call[:-1], *(call[-1] or ())) for call in zip(*[values] * _FIELDS, strict=True))
    return [call for call in calls if call.depth < IN_DATA]


class _Threads(threading.local):
    """The wrapper's state in its thread: depth of calls, native id. One look-up gives both."""

    def __init__(self) -> None:
        self.state = [0, threading.get_native_id()]


THREADS = _Threads()


def _renumber_thread() -> None:
    THREADS.state[1] = threading.get_native_id()  # in a forked process the thread has another number


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renumber_thread)

IN_DATA = 1 << 20
"""Depth of a thread during a wait for data: modules that a loader calls in the program's own thread (transforms of
images) are part of the wait, and neither begin a step nor belong to one."""


class ModuleCalls(Collector):
    """Forward passes (MODEL) and the calls of all modules in them (LAYER)."""

    name = "modules"
    levels = (Level.MODEL, Level.LAYER)
    by_thread = True

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._catalog = _Catalog()
        self._with_layers = False
        self._set_mode: Callable[[int], None] = lambda mode: None
        self._original: Any = None
        self._wrapper: Any = None
        self._numbers = Numbers()
        self._notes: set[str] = set()
        self._repr_errors: dict[str, str] = {}
        """Classes of modules whose `extra_repr` raised, and the class of the error."""

    def open(self) -> None:
        """Wrap `Module.__call__`; the wrapper passes calls through until the first `start`."""
        self._original = nn.Module.__call__
        self._wrapper, self._set_mode = _wrap(self._original, self._calls.extend, self)
        nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]
        self.stop()

    def close(self) -> None:
        """Remove the wrapper."""
        self._set_mode(_OFF)
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
        elif self._wrapper is not None:
            self._notes.add(
                "torch.nn.Module.__call__ was wrapped inside the block and not unwrapped: "
                "xsp's own wrapper stays below that one, switched off"
            )

    def start(self, rung: Level, describe: bool) -> None:
        """Record outermost calls only, all calls, or all calls with shapes and sizes."""
        self._with_layers = rung >= Level.LAYER
        self._numbers.clear()
        self._set_mode(_OUTERMOST if not self._with_layers else _DESCRIBE if describe else _ALL)

    def stop(self) -> None:
        """Stop recording; outermost calls are still signalled if a session listens."""
        self._set_mode(_OFF if self.notify is ignore and self.outline is None else _SIGNAL)

    def mute(self, quiet: bool, except_signal: Signal | None = None) -> None:
        """Ignore calls, or signal only their ends; a call that is not in `Outline.usual` is signalled first."""
        if quiet:
            watched = _OFF if self.outline is None else _WATCH
            self._set_mode(_WATCH_ENDS if except_signal is Signal.CALL_END else watched)
        else:
            self.stop()

    def settle(self) -> None:
        """Wait for all GPUs in use, so that a step ends when its work has ended."""
        devices.wait()

    def spans(self) -> Iterator[Span]:
        """Return a FORWARD span for each outermost call and, in layer rungs, a MODULE span for each call."""
        calls = self._calls[:]
        del self._calls[: len(calls)]  # other threads may append meanwhile
        return self._spans_of(_decode(calls))

    def spans_during(self, start: int, end: int, thread: int | None = None) -> Iterator[Span]:
        """Return the spans of calls that began and ended between two times, on one thread or on all."""
        calls = _decode(self._calls[:])
        matching = [call for call in calls if start <= call.start and call.end <= end and thread in (None, call.thread)]
        return self._spans_of(matching)

    def drop_before(self, time: int) -> None:
        """Discard the calls that ended before a time."""
        calls = self._calls[:]  # other threads append meanwhile
        positions = (position for position in range(0, len(calls), _FIELDS) if calls[position + 4] >= time)
        self._calls[: len(calls)] = [value for position in positions for value in calls[position : position + _FIELDS]]

    def _spans_of(self, calls: Sequence[_Call]) -> Iterator[Span]:
        subjects = self.outline.subjects if self.outline is not None else None
        for call in calls:
            if call.depth == 0:
                self._catalog.add(call.module, subjects.of(call.module) if subjects is not None else None)
        for call in calls:
            if call.depth == 0:
                yield self._forward(call)
            if self._with_layers:
                yield self._layer(call)

    def notes(self) -> Iterable[str]:
        """Return sentences on unseen calls inside compiled modules, and on other problems."""
        notes, self._notes = sorted(self._notes), set()
        failures, self._repr_errors = self._repr_errors, {}
        yield from notes
        for kind, error in failures.items():
            yield f"extra_repr of {kind} raised {error}: its parameters are unknown"

    def probe(self) -> Probe | None:
        """Return a probe of calls of an empty module in another one, the usual case; None if hooks would run too."""
        module, argument = _Repeat(nn.Identity(), _PROBE_CALLS), torch.empty(0, device="cpu")
        return None if _has_global_hooks() else Probe(lambda: module(argument), spans=_PROBE_CALLS)

    def _forward(self, call: _Call) -> Span:
        inputs = describe(call.inputs or [])
        attributes = language.attributes(call.module, inputs.shapes)
        if call.padding is not None:
            attributes[PADDING] = list(call.padding)
        return Span(
            level=Level.MODEL,
            kind=Kind.FORWARD.value,
            name=self._catalog.entry(call.module).type,
            phase="forward",
            start_ns=call.start,
            dur_ns=call.end - call.start,
            thread=call.thread,
            status=f"error:{call.error}" if call.error else "ok",
            batch_size=inputs.batch,
            input_shapes=inputs.shapes,
            dtype=inputs.dtype,
            collector=self.name,
            attributes=json.dumps(attributes) if attributes else None,
        )

    def _layer(self, call: _Call) -> Span:
        inputs = describe(call.inputs or [])
        entry = self._catalog.entry(call.module)
        if entry.is_compiled:
            self._notes.add(
                f"{entry.name} ({entry.type}) is compiled: it shows as one call, and of the "
                f"{entry.submodules} modules in it only those that are still called from Python"
            )
        return Span(
            level=Level.LAYER,
            kind=Kind.MODULE.value,
            name=entry.name,
            type=entry.type,
            phase="forward",
            start_ns=call.start,
            dur_ns=call.end - call.start,
            thread=call.thread,
            depth=call.depth,
            status=f"error:{call.error}" if call.error else "ok",
            input_shapes=inputs.shapes,
            dtype=inputs.dtype,
            param_bytes=entry.param_bytes,
            activation_bytes=tensor_bytes(call.outputs or []),
            collector=self.name,
            attributes=entry.attributes if call.outputs is None else self._full_attributes(call, call.outputs, entry),
        )

    def _full_attributes(self, call: _Call, outputs: Sketch, entry: _Entry) -> str:
        """Return the attributes of a module call as JSON, including those that only describing steps have."""
        attributes: dict[str, Any] = json.loads(entry.attributes)
        if outputs:
            attributes[OUTPUTS] = [list(shape) for shape, _ in outputs]
        lists = ((INPUT_TENSORS, call.input_numbers), (OUTPUT_TENSORS, call.output_numbers))
        attributes |= {name: list(numbers) for name, numbers in lists if numbers}
        if entry.param_bytes:  # a program may freeze parameters at any time, so this is determined in each step
            parameters = call.module.parameters()
            attributes[TRAINABLE] = sum(bytes_of(parameter) for parameter in parameters if parameter.requires_grad)
        try:
            description = call.module.extra_repr()
        except Exception as error:  # it is the program's own code
            self._repr_errors[type(call.module).__name__] = type(error).__name__
            description = None
        if isinstance(description, str) and description:
            attributes[PARAMETERS] = shortened(description)
        return json.dumps(attributes)


def _wrap(
    original: Callable[..., Any], extend: Callable[[tuple[Any, ...]], None], collector: ModuleCalls
) -> tuple[Callable[..., Any], Callable[[int], None]]:
    """Return the wrapper of `original`, which adds calls to a list by `extend`, and the function that sets its mode."""
    mode, outer_mode, is_recording = _OFF, _OFF, False  # now; outside of the outermost call; whether `mode` records
    since = 0  # when recording began: of a call that another thread began earlier, the inner calls were not recorded
    threads, numbers = THREADS, collector._numbers
    clock, grad_enabled, threads_running = monotonic_ns, torch.is_grad_enabled, _threads_running()
    # Dynamo traces through the wrapper. This check keeps clocks and lists out of compiled graphs; doing it first
    # keeps `mode` out of their guards, which would cause a recompilation for each mode.
    is_tracing = torch.compiler.is_dynamo_compiling
    # The body of the method may be inlined only if it is torch's own; else the method itself is called.
    is_plain = original is getattr(nn.Module, "_wrapped_call_impl", None) and hasattr(nn.Module, "_call_impl")

    def set_mode(new_mode: int) -> None:
        nonlocal mode, is_recording, since
        if new_mode > _SIGNAL and not is_recording:
            since = clock()
        mode, is_recording, __call__.__code__ = new_mode, new_mode > _SIGNAL, full

    def begin(module: Any, thread: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sketch | bool | None:
        """Note and signal an outermost call; return a sketch of its inputs if recorded, False if in no step."""
        nonlocal mode, outer_mode
        outline, is_beside = collector.outline, False
        hook_times = outline.hook_times if outline is not None else None
        if hook_times is not None:
            hook_times.append(-clock())
        if outline is not None:
            is_beside = outline.thread not in (None, thread)
            trains = module.training and grad_enabled()
            number = outline.numbers.get(id(module)) or outline.register(module, trains)
            word = (_FORWARD, number, type(module), trains, first_shape(args, kwargs))
            if mode > _WATCH_ENDS or outline.usual is None or is_beside:
                outline.note_call(thread, word)
            elif word in outline.usual:
                if outline.ended_ns is not None:
                    outline.begin_step(clock())
                outline.append(word)
            elif outline.ended_ns is not None and number in outline.apart:
                return False
            else:
                collector.notify(Signal.UNUSUAL, module)  # ends the stretch, and sets another mode
                outline.note_call(thread, word)
        if (mode > _WATCH_ENDS or is_beside) and collector.notify(_CALL_BEGIN, module):
            return False
        if outline is not None and outline.times is not None:
            outline.time(_CALL_BEGIN, thread, clock())
        inputs = sketch(args, kwargs) if is_recording else None
        # in a service (no outline), a thread that starts during a call serves another request
        if mode <= _OUTERMOST and outline is not None and threads_running() == 1:
            outer_mode, mode = mode, _INSIDE
            __call__.__code__ = inside
        if hook_times is not None:
            hook_times.append(clock())
        return inputs

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal mode
        call = self._call_impl if is_plain and self._compiled_call_impl is None else partial(original, self)
        if is_tracing() or mode <= _INSIDE:
            return call(*args, **kwargs)
        depth, thread = state = threads.state
        inputs, input_numbers, padding = _NO_INPUTS, _NO_NUMBERS, None
        if not depth:
            inputs = begin(self, thread, args, kwargs)
            if inputs is False:  # a model that is called in it is outermost
                return call(*args, **kwargs)
            if mode == _DESCRIBE:
                padding = language.padding(args, kwargs)
                input_numbers = numbers.of((args, kwargs)) if are_tensors(args, kwargs) else ()
        elif mode <= _OUTERMOST:
            return call(*args, **kwargs)
        elif mode == _DESCRIBE:
            inputs, input_numbers = sketch(args, kwargs), numbers.of((args, kwargs))
        state[0], result = depth + 1, None
        start = clock() if is_recording or mode != _INSIDE else 0
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            if is_recording and start >= since:
                extend((self, thread, depth, start, clock(), (inputs, None, type(error).__name__)))
            raise
        else:
            if is_recording and start >= since:
                end = clock()
                extras: Any = inputs and (inputs,)
                if mode == _DESCRIBE:
                    extras = (inputs, sketch_of(result), None, input_numbers, numbers.of(result), padding)
                extend((self, thread, depth, start, end, extras))
            return result
        finally:
            state[0] = depth
            if not depth:
                if mode == _INSIDE:
                    mode, __call__.__code__ = outer_mode, full
                outline = collector.outline
                hook_times = outline.hook_times if outline is not None else None
                if hook_times is not None:
                    hook_times.append(-clock())
                if outline is not None and outline.times is not None:
                    outline.time(_CALL_END, thread, clock())
                if mode != _WATCH or (outline is not None and outline.thread != thread):
                    collector.notify(_CALL_END, result)
                if hook_times is not None:
                    hook_times.append(clock())

    full = __call__.__code__
    # in inner calls whose times are not needed, the wrapper is torch's own method, at no cost
    inside = _plain_call.__code__.replace(co_freevars=full.co_freevars) if is_plain else full
    return __call__, set_mode


def _plain_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module as `Module.__call__` does."""
    if self._compiled_call_impl is not None:
        return self._compiled_call_impl(*args, **kwargs)
    return self._call_impl(*args, **kwargs)


def _threads_running() -> Callable[[], int]:
    """Return a function that counts the program's running threads: xsp's own ones call no module of it.

    It reads the dictionary of `threading.active_count` without its lock, which takes 0.4 µs.
    """
    running, own = getattr(threading, "_active", None), processes.OWN_THREADS
    if isinstance(running, dict):
        return lambda: len(running) - len(own)
    return lambda: threading.active_count() - len(own)


class _Entry(NamedTuple):
    """The properties of a module that are known without running it."""

    reference: weakref.ref[nn.Module]
    name: str
    type: str
    attributes: str
    """Attributes of its calls, as JSON."""

    param_bytes: int
    is_compiled: bool
    submodules: int


class _Catalog:
    """The full names of modules, learned from the outermost modules that were called."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._unnamed_entries: dict[int, _Entry] = {}
        """Entries of modules in trees whose outermost call has not been seen yet."""

        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._labels: dict[int, str | None] = {}
        """Labels of outermost modules, by their number in `xsp.subjects`."""

    def add(self, root: nn.Module, number: int | None = None) -> None:
        """Learn the names of all modules in `root` that are not known yet.

        Args:
            root: an outermost module.
            number: number that modules share if they replace each other; None if unknown.
        """
        if self._known_entry(root) is None:
            label = None
            if number is not None and number in self._labels:
                label = self._labels[number]
            elif not is_empty_module(root):
                label = self._label(root)
            if number is not None:
                self._labels[number] = label
            for name, module in root.named_modules():
                if self._known_entry(module) is None:
                    self._entries[id(module)] = _entry(module, name, label)

    def _label(self, root: nn.Module) -> str | None:
        """Return the numbered class of an outermost module; None for the first one, whose modules need no label."""
        class_name = type(root).__name__
        candidates = itertools.chain((class_name,), (f"{class_name}({number})" for number in itertools.count(2)))
        label = next(name for name in candidates if name not in self._roots or self._roots[name]() is None)
        is_first = not self._roots or next(iter(self._roots)) == label
        self._roots[label] = weakref.ref(root)
        return None if is_first else label

    def entry(self, module: nn.Module) -> _Entry:
        """Return a module's entry; a module in no tree that was called is named by its class."""
        entry = self._known_entry(module)
        if entry is None:
            entry = self._unnamed_entries.get(id(module))
            if entry is None or entry.reference() is not module:
                entry = self._unnamed_entries[id(module)] = _entry(module, "")
        return entry

    def _known_entry(self, module: nn.Module) -> _Entry | None:
        entry = self._entries.get(id(module))
        return entry if entry is not None and entry.reference() is module else None


def _entry(module: nn.Module, name: str, root: str | None = None) -> _Entry:
    class_name = type(module).__name__
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    attributes = {"code.function.name": _text(f"{type(module).__module__}.{type(module).__qualname__}.forward")}
    if root is not None:
        attributes[ROOT] = _text(root)
    return _Entry(
        weakref.ref(module),
        name or class_name,
        class_name,
        json.dumps({**attributes, "opaque": "torch.compile"} if is_compiled else attributes),
        sum(map(bytes_of, module.parameters())),
        is_compiled,
        sum(1 for _ in module.modules()) - 1,
    )


def _text(name: str) -> str:
    """Return a name with question marks for characters that UTF-8 cannot encode, which readers of JSON reject."""
    return name.encode("utf-8", "replace").decode()


def _has_global_hooks() -> bool:
    """Return whether the program hooks the calls of all modules."""
    forward = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    backward = torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks
    return any((*forward, *backward))


class _Repeat(nn.Module):
    """A module that calls another module many times."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, argument: torch.Tensor) -> None:
        for _ in range(self.times):
            self.module(argument)


def shortened(description: str) -> str:
    """Return a module's description on one line, without secrets, and cut if it is long."""
    description = description[: 4 * MOST_LETTERS].encode("utf-8", "replace").decode()
    line = scrub.scrub_settings(" ".join(description.split()))
    return line if len(line) <= MOST_LETTERS else line[: MOST_LETTERS - 1] + "…"
