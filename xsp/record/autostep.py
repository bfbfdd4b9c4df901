"""Steps of a program that does not mark its steps: detected at the boundaries that collectors signal.

A training step begins with the first outermost call of a module after the last step, or with the optimizer's step if
it makes the calls itself (a closure), and ends with the optimizer's step. If optimizers step inside a backward pass, in
hooks that run when gradients are ready, it ends with that pass. An inference step is one outermost call, or one pass
through modules that are called in turn (`xsp.record.sequences`). A call counts as training if its module is in training
mode and gradients are on. If training calls no module that has parameters, the start of its forward pass cannot be
seen: a step then begins where the last one ended.

A module that has no parameters (a transform of images, the loss of a validation) does not train by itself, and a call
of it between steps is part of none: its time is the program's between its steps. It is a step as long as no module with
parameters was called, or if the thread has called none for `MOST_APART` calls.

Repeated patterns are learned: optimizers that step directly one after the other end one step, not two; a call without
gradients that is always followed by training calls (of a teacher or an encoder) begins a training step, and so does a
call of a model in evaluation mode that is always followed by a backward pass (an image is optimised through it).
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from typing import Any

from xsp.collector import Signal
from xsp.record.evidence import MOST_BACKWARDS, TrainingEvidence
from xsp.record.order import Order
from xsp.record.sequences import NO_STEP, Sequence
from xsp.record.session import profile
from xsp.record.step import Step


class StepRule(enum.Enum):
    """The definition of a step in a program that does not mark its steps."""

    AUTO = "auto"  # an optimizer's step if the program trains, else a call
    CALL = "call"  # a call of the outermost module
    OPTIMIZER = "optimizer"  # from one optimizer step to the next


_NO_OPTIMIZER = (
    "the program trains without a torch optimizer: a step ends with the backward pass, and the parameter update lies "
    "between steps; for other steps give --step the name of a function"
)
_NO_MODULE = (
    "the program trains without calling a module that has parameters: a step begins where the previous one ends, and "
    "contains everything in between; for other steps give --step the name of a function"
)
_NEVER_ENDED = (
    "only one step was seen: gradients were computed, and no torch optimizer stepped; give --step the name of a "
    f"function that is called once per step, or run more than {MOST_BACKWARDS} steps"
)
_BROKEN_PASS = "passes through modules that are called in turn were left out where their order changed"
_NEVER_TRAINED = (
    "a model in training mode was called repeatedly without a backward pass: its calls are the steps; "
    "call model.eval() for inference, or use --step optimizer"
)


MOST_APART = 1024
"""Consecutive calls of modules without parameters after which these calls are what a thread does."""


class AutoStep:
    """A listener that opens and closes the steps of a session at signals, for each thread of the program."""

    MOST_THREADS = 64
    """Threads whose patterns are remembered while they have no step open."""

    def __init__(self, session: profile, rule: StepRule = StepRule.AUTO) -> None:
        self._session = session
        self._quiet = session.quiet
        self._newest = Finder(session, rule)
        self._finders: dict[int, Finder] = {}
        self._last_thread: int | None = None
        """The thread that began the last step."""

        self._running: set[int] = set()
        """The threads in an outermost call."""

        self._inside: set[int] = set()
        """The threads in a call that is part of another thread's call."""

        self._called: dict[int, weakref.ref[Any]] = {}
        """The outermost module that each thread called last."""

        self._modules_of: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def __call__(self, signal: Signal, subject: object) -> bool:
        """Handle a boundary of the program, and return whether it is the start of a call that is part of no step."""
        quiet, thread = self._quiet, threading.get_ident()
        if quiet.remaining and thread == self._last_thread:  # first: it takes time of the program
            quiet.on_signal(signal)
            if not quiet.remaining and (last_finder := self._finders.get(thread)) is not None:
                last_finder.open_next()
            return False
        if self._session.has_explicit_steps:
            return False
        finder = self._finders.get(thread)
        if finder is None:
            finder = self._add_finder(thread)
        if signal is Signal.CALL_BEGIN:
            if self._is_inside(subject, thread):
                self._inside.add(thread)
                return False
            if finder.is_apart(subject):
                return True
            self._note_call(subject, thread)
        elif signal is Signal.CALL_END:
            if thread in self._inside:
                self._inside.discard(thread)
                return False
            self._running.discard(thread)
        finder.handle(signal, subject)
        if finder.has_begun:
            self._last_thread = thread
        return False

    def _add_finder(self, thread: int) -> Finder:
        """Return a new finder for a thread; the first thread gets that of the rule."""
        if len(self._finders) >= self.MOST_THREADS:
            self._finders = {thread: finder for thread, finder in list(self._finders.items()) if finder.has_begun}
        finder = self._newest if not self._finders and not self._newest.has_begun else self._newest.for_another_thread()
        self._newest = self._finders[thread] = finder
        return finder

    def _note_call(self, module: Any, thread: int) -> None:
        self._running.add(thread)
        called = self._called.get(thread)
        if called is None or called() is not module:
            if len(self._called) >= self.MOST_THREADS:
                self._called.clear()
            self._called[thread] = weakref.ref(module)

    def _is_inside(self, module: Any, thread: int) -> bool:
        """Return whether a call is part of another thread's, as of a replica or a layer that runs in parallel."""
        if getattr(module, "_is_replica", False):
            return True
        running = self._running - {thread}
        if self._quiet.remaining and self._last_thread is not None:  # its calls are not signalled
            running.add(self._last_thread)
        outer_modules = [called() for other in running if (called := self._called.get(other)) is not None]
        return any(
            outer is not None and outer is not module and self._contains(outer, module) for outer in outer_modules
        )

    def _contains(self, outer: Any, module: object) -> bool:
        try:
            numbers = self._modules_of.get(outer)
            if numbers is None:
                numbers = self._modules_of[outer] = set(map(id, outer.modules()))
            return id(module) in numbers
        except Exception:  # the program's own classes may raise anything
            return False


class Finder:
    """Finds the steps of one thread."""

    def __init__(self, session: profile, rule: StepRule) -> None:
        self._session = session
        self._rule = rule
        self._step: Step | None = None
        self._trains = False  # the open step is a training step
        self._running_optimizers = 0  # optimizers' steps that are running
        self._called_module = 0
        self._has_given_up = False
        self._has_weights = False
        """Whether a module that has parameters was called in the open step."""

        self._is_assumed = False
        """Whether the open step is taken for training only because of the mode of a module without parameters."""

        self._has_backward = self._has_called_weights = False
        """Whether gradients were computed, and a module with parameters called, since the last training step ended."""

        self._quiet = session.quiet
        self._evidence = TrainingEvidence()
        self._subjects = session.subjects
        self._order = Order(self._subjects)
        self._sequence: Sequence | None = Sequence(self._subjects) if rule is StepRule.AUTO else None
        """The modules that are called in turn; None if the program is told what a step is."""

        self._is_pass = False
        """Whether the open step is a pass through the sequence."""

        self._passed_calls = 0
        """Calls that had passed in stretches at the last call that was seen."""

        self._apart = session.apart
        self._known_modules: dict[int, bool] = {}
        """Numbers of the modules that were called on any thread, and whether they hold parameters."""

        self._trained: set[int] = set()
        """Those with parameters that were called in training mode with gradients on."""

        self._apart_left = float("inf")
        """Calls that may still be part of no step; on a thread that calls no module with parameters, any number."""

    def for_another_thread(self) -> Finder:
        """Return a finder for another thread, which begins with what is known of the program."""
        finder = Finder(self._session, self._rule)
        if self._sequence is not None:
            finder._sequence = Sequence(self._subjects)
        finder._has_given_up = self._has_given_up
        finder._known_modules, finder._trained = self._known_modules, self._trained
        return finder

    @property
    def has_begun(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    def handle(self, signal: Signal, subject: object) -> None:
        """Handle a boundary of the thread."""
        if signal is Signal.CALL_BEGIN:
            self._call_begins(subject)
        elif signal is Signal.CALL_END:
            self._call_ends(subject)
        elif signal is Signal.BACKWARD_END:
            self._backward_ends(subject)
        elif signal is Signal.OPTIMIZER_BEGIN:
            self._optimizer_begins()
        elif signal is Signal.OPTIMIZER_END:
            self._optimizer_ends(subject)

    def is_apart(self, module: object) -> bool:
        """Return whether a call that begins is part of no step: of a module without parameters, between steps."""
        if self._step is not None or self._sequence is None or self._holds_parameters(module) or _is_in_backward():
            return False
        number, trains = self._subjects.of(module), _trains(module)
        if self._apart_left <= 0 or not any(self._known_modules.values()):
            self._apart.discard(number)
            return False
        self._note_unseen_calls()
        if self._evidence.has_trained if trains else self._order.begins_prefix(module):
            return False
        if not trains and self._sequence.may_begin(module):
            return False
        if not trains:
            self._order.on_call(module, trains=False)
            self._sequence.on_call(module)
        self._apart_left -= 1
        self._apart.add(number)
        return True

    def _holds_parameters(self, module: object) -> bool:
        number = self._subjects.of(module)
        holds = self._known_modules.get(number)
        if holds is None:
            holds = self._known_modules[number] = _holds_parameters(module)
        return holds

    def _note_unseen_calls(self) -> None:
        if self._quiet.passed_calls != self._passed_calls:
            self._passed_calls = self._quiet.passed_calls
            self._order.on_unseen_calls()

    def _call_begins(self, module: object) -> None:
        if _is_in_backward():
            return  # activation checkpointing calls it again
        trains = self._rule is StepRule.OPTIMIZER or (self._rule is StepRule.AUTO and _trains(module))
        self._note_unseen_calls()
        if (
            self._rule is StepRule.AUTO
            and self._step is not None
            and self._trains
            and self._must_abandon(module, trains)
        ):
            self._abandon()
            trains = trains and self._rule is StepRule.AUTO
        has_weights = self._holds_parameters(module)
        if has_weights:
            self._apart_left = MOST_APART
            if trains:
                self._trained.add(self._subjects.of(module))
        if has_weights and self._step is not None and self._step.awaits_work:
            self._abandon()
        if self._step is not None and self._is_pass and (trains or not self._continues_pass(module)):
            self._abandon()
        if self._step is None:
            self._trains = trains or (self._rule is StepRule.AUTO and self._order.begins_prefix(module))
            self._is_pass = self._begins_pass(module)
            self._open(by_call=True)
            self._is_assumed = trains
        self._is_assumed &= not has_weights
        self._has_weights |= has_weights
        self._has_called_weights |= has_weights
        self._mark_work()
        self._order.on_call(module, trains)
        self._called_module = self._subjects.of(module)

    def _begins_pass(self, module: object) -> bool:
        """Return whether a call that begins a step begins a pass through modules that are called in turn."""
        sequence = self._sequence
        if sequence is None:
            return False
        if self._trains:
            sequence.reset()
            return False
        if sequence.begins(module):
            if sequence.is_new:  # the calls that it consists of were steps of their own so far
                sequence.is_new = False
                self._apart.clear()
                self._session.withdraw(NO_STEP)
                self._session.schedule.forget_kinds()
            return True
        sequence.on_call(module)
        if sequence.is_due and not self._has_backward:
            (self._session.note if sequence.are_in_turn else self._session.withdraw)(NO_STEP)
        return False

    def _continues_pass(self, module: object) -> bool:
        if self._sequence is None or self._sequence.continues(module):
            return True
        if not self._sequence.begins(module):  # else the pass was left, for instance by an error
            self._sequence.break_off()
        self._session.note(_BROKEN_PASS)
        return False

    def _must_abandon(self, module: object, trains: bool) -> bool:
        """Return whether the open step turns out not to be a training step, or its end was missed."""
        if self._running_optimizers:  # an optimizer's closure calls it, in whatever mode
            return False
        if self._order.has_missed_optimizer():
            self._session.note("training steps whose second optimizer did not step as before were left out")
            return True
        if trains and self._evidence.is_disproved():
            self._rule, self._has_given_up = StepRule.CALL, True
            self._session.note(_NEVER_TRAINED)
            return True
        if trains:
            return False
        if self._is_assumed and not self._has_backward and self._holds_parameters(module):
            # a teacher, which is called in a training step, is never trained itself
            return not self._evidence.has_trained or self._subjects.of(module) in self._trained
        return self._order.contradicts_prefix(module)

    def _call_ends(self, result: object) -> None:
        if _is_in_backward():
            return
        if self._trains:
            self._evidence.on_call(self._called_module, result)
        elif not self._is_pass or self._sequence is None or self._sequence.is_complete:
            self._end(Signal.CALL_END)

    def _backward_ends(self, optimizer: object | None) -> None:
        """Handle the end of a backward pass, with the last optimizer that stepped in it."""
        self._has_backward = True
        self._mark_work()
        if self._has_given_up:  # the program was wrongly taken not to train
            self._rule, self._has_given_up = StepRule.AUTO, False
            self._session.withdraw(_NEVER_TRAINED)
        self._session.doubt = _NEVER_ENDED
        if self._evidence.on_backward():
            self._session.note(_NO_OPTIMIZER)
        if optimizer is None:
            self._order.on_backward()
            ends, is_first = self._evidence.has_no_optimizer, True
        else:
            self._note_optimizer()
            ends = self._order.on_optimizer_in_backward(optimizer)
            is_first = self._order.is_first_pass
        if ends and not self._running_optimizers and self._rule is not StepRule.CALL:
            if self._step is not None and self._trains:
                self._end(Signal.BACKWARD_END)
            elif self._step is None and is_first:
                self._has_weights = False
                self._learn_start()
                self._has_called_weights = False
                self.open_next()

    def _note_optimizer(self) -> None:
        if self._evidence.has_no_optimizer:  # what ran before computed gradients for something else
            self._session.withdraw(_NO_OPTIMIZER)
        self._evidence.on_optimizer()

    def _optimizer_begins(self) -> None:
        self._running_optimizers += 1
        self._note_optimizer()
        if self._step is None and self._rule is not StepRule.CALL:
            self._trains = True
            self._open(by_call=False)
        self._mark_work()

    def _optimizer_ends(self, optimizer: object) -> None:
        self._running_optimizers = max(0, self._running_optimizers - 1)
        if (
            self._step is not None
            and self._trains
            and not self._running_optimizers
            and self._order.on_optimizer_step(optimizer)
        ):
            self._end(Signal.OPTIMIZER_END)

    def _learn_start(self) -> None:
        """Learn, at the end of a training step, whether it called a module that has parameters."""
        if self._has_weights:
            self._quiet.is_gapless = False
            return
        is_new = self._has_backward and not self._has_called_weights and not self._quiet.is_gapless
        if is_new and self._rule is StepRule.AUTO:
            self._quiet.is_gapless = True
            self._session.withdraw(_NO_OPTIMIZER)
            self._session.note(_NO_MODULE)

    def _mark_work(self) -> None:
        if self._step is not None:
            self._step.awaits_work = False

    def open_next(self) -> None:
        """Begin a training step where the last one ended, if no call would signal its start."""
        if self._quiet.is_gapless and self._step is None and not self._quiet.remaining:
            self._trains = True
            self._open(by_call=False)
            if self._step is not None:
                self._step.awaits_work = True

    def _open(self, by_call: bool) -> None:
        self._has_weights = self._is_assumed = False
        self._step = self._session.detected_step(by_call)
        self._step.__enter__()

    def _end(self, by_signal: Signal) -> None:
        step, self._step, self._is_pass = self._step, None, False
        self._quiet.by_signal = by_signal
        if self._trains:
            self._learn_start()
            self._has_backward = self._has_called_weights = False
        if step is not None:
            step.__exit__(None, None, None)
        self.open_next()

    def _abandon(self) -> None:
        step, self._step, self._is_pass = self._step, None, False
        if step is not None and step.is_open:
            step.abandon()


def _trains(module: Any) -> bool:
    torch = sys.modules["torch"]
    return bool(module.training) and bool(torch.is_grad_enabled())


def _holds_parameters(module: Any) -> bool:
    """Return whether a module, with those inside, holds parameters, or other things that it saves: packed weights."""
    try:
        if next(iter(module.parameters()), None) is not None:
            return True
        return bool(set(module.state_dict()) - {name for name, _ in module.named_buffers()})
    except Exception:  # the program's own classes may raise anything
        return True


def _is_in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    graph_task = getattr(sys.modules["torch"]._C, "_current_graph_task_id", None)
    return graph_task is not None and graph_task() >= 0


class OneAtATime:
    """A listener that serializes the outermost calls of all threads, so that each span belongs to one call."""

    TIMEOUT_S = 10.0

    def __init__(self, session: profile, inner: AutoStep | None) -> None:
        self._session = session
        self._inner = inner
        self._turn = threading.RLock()
        self._local = threading.local()

    def __call__(self, signal: Signal, subject: object) -> bool:
        """Acquire the turn at a call's start and release it at its end; after a timeout the call runs without it."""
        if signal is Signal.CALL_BEGIN:
            self._local.has_turn = self._turn.acquire(timeout=self.TIMEOUT_S)
            if not self._local.has_turn:
                self._session.note(
                    f"a call waited {self.TIMEOUT_S:.0f} s for one of another thread, then ran in parallel with it: "
                    "these calls depend on each other and cannot take turns"
                )
        is_apart = self._inner is not None and self._inner(signal, subject)
        if (signal is Signal.CALL_END or is_apart) and getattr(self._local, "has_turn", False):
            self._local.has_turn = False
            self._turn.release()
        return is_apart
