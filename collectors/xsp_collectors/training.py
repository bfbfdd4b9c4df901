"""Backward passes and optimizer steps, at the model level.

`torch.autograd.backward` and `torch.autograd.grad` both call one function, which is looked up at each call. For
optimizers, torch has hooks for all instances.

An optimizer may step inside a backward pass, in a hook that runs when a gradient is ready, one optimizer per parameter
(`_apply_optimizer_in_backward`). On a device, hooks run on a thread of the autograd engine. Such steps have spans, but
no words and signals of their own: the pass is signalled with the last optimizer that stepped in it.

An optimizer's step that a `GradScaler` skips, because gradients are not finite, is one that takes no time: it ends the
training step as any other.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xsp.clock import monotonic_ns
from xsp.collector import Collector, Outline, Probe, Signal
from xsp.schema import Kind, Level, Span

_ENGINE = "_engine_run_backward"

# words of an outline, see `xsp.collector.Token`; looking up enum members is expensive
_OPTIMIZER = Kind.OPTIMIZER
_BACKWARD_BEGIN, _BACKWARD_END = Signal.BACKWARD_BEGIN, Signal.BACKWARD_END
_OPTIMIZER_BEGIN, _OPTIMIZER_END = Signal.OPTIMIZER_BEGIN, Signal.OPTIMIZER_END
_BACKWARD_BEGINS, _BACKWARD_ENDS, _OPTIMIZER_BEGINS = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1), (Kind.OPTIMIZER, 0)
_GRADIENTS_END = (Kind.BACKWARD, 2)


_PROBE_STEPS = 40

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns the number of the backward pass that runs on this thread of the program or of the engine; -1 for none."""


class _Idle(Optimizer):
    """An optimizer whose steps do nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class _Thread(threading.local):
    """What is known of the current thread."""

    def __init__(self) -> None:
        self.id = threading.get_native_id()
        """Its native id, cached because reading it takes half a microsecond at each signal."""

        self.has_stepped = False
        """Whether an optimizer has stepped on it since a scaler was last called."""


class TrainingCalls(Collector):
    """Runs of the autograd engine (BACKWARD) and steps of optimizers (OPTIMIZER)."""

    name = "training"
    levels = (Level.MODEL,)

    def __init__(self) -> None:
        self._is_on = self._is_muted = False
        self._thread = _Thread()
        self._unmuted_signal: Signal | None = None
        self._has_run_backward = False
        self._rows: list[tuple[Kind, str, int, int, int, str]] = []
        self._running: dict[int, tuple[int, int]] = {}
        self._passes: dict[int, list[Optimizer]] = {}
        """The last optimizer that stepped in each running pass, by the thread that called the engine."""

        self._undo_steps: list[Callable[[], None]] = []
        self._notes: list[str] = []

    def open(self) -> None:
        """Wrap the entry to the autograd engine and register the optimizers' hooks."""
        pre_hook = register_optimizer_step_pre_hook(self._optimizer_begins)
        post_hook = register_optimizer_step_post_hook(self._optimizer_ends)
        scaler, scaler_step = torch.amp.GradScaler, torch.amp.GradScaler.step
        wrapped_step = self._wrap_scaler(scaler_step)
        scaler.step = wrapped_step  # type: ignore[method-assign]
        self._undo_steps = [
            pre_hook.remove,
            post_hook.remove,
            lambda: self._unwrap(scaler, "step", wrapped_step, scaler_step),
        ]
        original = getattr(torch.autograd, _ENGINE, None)
        if original is None:
            self._notes.append("xsp knows no entry to the autograd engine of this version of torch: no backward spans")
            return
        wrapper = self._wrap_engine(original)
        setattr(torch.autograd, _ENGINE, wrapper)
        self._undo_steps.append(lambda: self._unwrap(torch.autograd, _ENGINE, wrapper, original))

    def _unwrap(self, owner: Any, name: str, wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
        if getattr(owner, name, None) is wrapper:  # else the program has replaced it
            setattr(owner, name, original)

    def close(self) -> None:
        """Undo what `open` did."""
        while self._undo_steps:
            self._undo_steps.pop()()

    def start(self, rung: Level, describe: bool) -> None:
        """Start recording."""
        self._running.clear()
        self._is_on = True

    def stop(self) -> None:
        """Stop recording."""
        self._is_on = False

    def mute(self, quiet: bool, except_signal: Signal | None = None) -> None:
        """Ignore backward passes and optimizer steps, or signal only their ends."""
        self._is_muted, self._unmuted_signal = quiet, except_signal

    def spans(self) -> Iterator[Span]:
        """Return one span per backward pass and per optimizer step; an optimizer step that raised has none."""
        rows, self._rows = self._rows, []
        for kind, name, thread, start, end, status in rows:
            yield Span(
                level=Level.MODEL,
                kind=kind.value,
                name=name,
                phase="backward" if kind is Kind.BACKWARD else "optimizer",
                start_ns=start,
                dur_ns=end - start,
                thread=thread,
                status=status,
                collector=self.name,
            )

    def notes(self) -> list[str]:
        """Return sentences on what cannot be recorded with this torch."""
        notes, self._notes = self._notes, []
        return notes

    def probe(self) -> Probe | None:
        """Return a probe of backward passes and optimizer steps that do next to nothing.

        Return None if the program ran no backward pass, because the first one starts threads, or if hooks of the
        program would run.
        """
        if not self._has_run_backward or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return None
        with torch.inference_mode(False):
            weight = torch.zeros(1, device="cpu", dtype=torch.float32, requires_grad=True)
        # the first optimizer of a process imports Dynamo, for a second; a program without any has no optimizer's steps
        optimizer = _Idle([weight], {}) if "torch._dynamo" in sys.modules else None

        def run() -> None:
            with torch.inference_mode(False), torch.enable_grad():
                for _ in range(_PROBE_STEPS):
                    weight.sum().backward()
                    if optimizer is not None:
                        optimizer.step()

        return Probe(run, spans=_PROBE_STEPS if optimizer is None else 2 * _PROBE_STEPS)

    def _wrap_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            end_word = _BACKWARD_ENDS if kwargs.get("accumulate_grad", True) else _GRADIENTS_END
            outline = self.outline
            if (
                self._unmuted_signal is not _BACKWARD_END
                and outline is not None
                and self._is_usual(outline, _BACKWARD_BEGINS)
            ):
                hook_times = outline.hook_times
                if hook_times is not None:
                    hook_times.append(-monotonic_ns())
                outline.append(_BACKWARD_BEGINS)
                is_timed = outline.times is not None
                if is_timed:
                    outline.time(_BACKWARD_BEGIN, self._thread.id, monotonic_ns())
                if hook_times is not None:
                    hook_times.append(monotonic_ns())
                try:
                    return original(*args, **kwargs)
                finally:
                    if hook_times is not None:
                        hook_times.append(-monotonic_ns())
                    if is_timed:
                        outline.time(_BACKWARD_END, self._thread.id, monotonic_ns())
                    outline.append(end_word)
                    if hook_times is not None:
                        hook_times.append(monotonic_ns())
            if not self._belongs_to_stretch(_BACKWARD_BEGINS) or self._unmuted_signal is _BACKWARD_END:
                return record_backward(end_word, *args, **kwargs)
            self._time(_BACKWARD_BEGIN)
            try:
                return original(*args, **kwargs)
            finally:
                self._time(_BACKWARD_END)
                self._note(end_word)

        def record_backward(end_word: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            if not self._is_muted:  # else the start was noted already
                self._note(_BACKWARD_BEGINS)
            self._has_run_backward = True
            thread, is_outermost = self._thread.id, _graph_task() < 0
            if is_outermost:
                self._passes[thread] = []
                self.notify(_BACKWARD_BEGIN, None)
                self._time(_BACKWARD_BEGIN)
            start, status = monotonic_ns(), "ok"
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                status = f"error:{type(error).__name__}"
                raise
            finally:
                if self._is_on:
                    self._rows.append((Kind.BACKWARD, "backward", thread, start, monotonic_ns(), status))
                self._note(end_word)
                if is_outermost:
                    self._time(_BACKWARD_END)
                    optimizer = next(iter(self._passes.pop(thread, ())), None)
                    if optimizer is not None:
                        self._word(optimizer)  # registers it
                    self.notify(_BACKWARD_END, optimizer)

        return run_backward

    def _wrap_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method of gradient scalers that steps an optimizer or skips its step."""

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            thread = self._thread
            thread.has_stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            if not thread.has_stepped:
                self._optimizer_begins(optimizer)
                self._optimizer_ends(optimizer)
            return result

        return step

    def _note(self, word: tuple[Any, ...]) -> None:
        outline = self.outline
        if outline is not None:
            outline.note(self._thread.id, word)

    def _time(self, signal: Signal) -> None:
        outline = self.outline
        if outline is not None and outline.times is not None:
            outline.time(signal, self._thread.id, monotonic_ns())

    def _is_usual(self, outline: Outline, word: tuple[Any, ...]) -> bool:
        """Return whether a pass or step of the thread of the current stretch is one of its usual ones. Hot."""
        usual = outline.usual
        return self._is_muted and usual is not None and word in usual and outline.thread == self._thread.id

    def _belongs_to_stretch(self, word: tuple[Any, ...], noted_word: tuple[Any, ...] | None = None) -> bool:
        """Return whether a beginning pass or step belongs to the current stretch of steps, and note it if so. Hot.

        If it does not belong to the stretch, it is signalled, which ends the stretch.

        Args:
            word: its word in `Outline.usual`.
            noted_word: the word that is noted, if it is another one.
        """
        if not self._is_muted:
            return False
        outline = self.outline
        if outline is None:
            return True
        if outline.thread not in (None, self._thread.id):
            return True  # work of another thread
        if outline.usual is not None and word not in outline.usual:
            self.notify(Signal.UNUSUAL, None)
            return False
        outline.append(noted_word or word)
        return True

    def _word(self, optimizer: Optimizer) -> tuple[Any, ...]:
        outline = self.outline
        number = 0 if outline is None else outline.numbers.get(id(optimizer)) or outline.register(optimizer)
        return _OPTIMIZER, number, type(optimizer)

    def _optimizer_begins(self, optimizer: Optimizer, *_: Any) -> None:
        hook_times = None if self.outline is None else self.outline.hook_times
        if hook_times is not None:
            hook_times.append(-monotonic_ns())
        self._thread.has_stepped = True
        if _graph_task() >= 0:
            thread = self._thread.id
            own_pass = self._passes.get(thread)
            for steps in list(self._passes.values()) if own_pass is None else (own_pass,):
                steps[:] = [optimizer]
            self._running[id(optimizer)] = (thread, monotonic_ns())
            return
        if self._belongs_to_stretch(self._word(optimizer), _OPTIMIZER_BEGINS):
            self._time(_OPTIMIZER_BEGIN)
            if hook_times is not None:
                hook_times.append(monotonic_ns())
            return
        self.notify(_OPTIMIZER_BEGIN, optimizer)  # signalled first, because it may open a step
        self._note(_OPTIMIZER_BEGINS)
        self._time(_OPTIMIZER_BEGIN)
        self._running[id(optimizer)] = (self._thread.id, monotonic_ns())

    def _optimizer_ends(self, optimizer: Optimizer, *_: Any) -> None:
        hook_times = None if self.outline is None else self.outline.hook_times
        if hook_times is not None:
            hook_times.append(-monotonic_ns())
        is_in_backward = _graph_task() >= 0
        if not is_in_backward:
            self._time(_OPTIMIZER_END)
            self._note(self._word(optimizer))
            if self._is_muted:
                if self._unmuted_signal is _OPTIMIZER_END:
                    self.notify(_OPTIMIZER_END, optimizer)
                if hook_times is not None:
                    hook_times.append(monotonic_ns())
                return
        thread, start = self._running.pop(id(optimizer), (None, None))
        if self._is_on and thread is not None and start is not None:
            name = type(optimizer).__name__
            self._rows.append((Kind.OPTIMIZER, name, thread, start, monotonic_ns(), "ok"))
        if not is_in_backward:
            self.notify(_OPTIMIZER_END, optimizer)
