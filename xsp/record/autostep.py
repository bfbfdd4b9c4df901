"""Steps of a program that does not mark its steps: detected at the boundaries that collectors signal.

A training step begins with the first outermost call of a module after the last step, or with the optimizer's step if
it makes the calls itself (a closure), and ends with the optimizer's step. If optimizers step inside a backward pass, in
hooks that run when gradients are ready, it ends with that pass. An inference step is one outermost call. A
call counts as training if its module is in training mode and gradients are on. If training calls no module that has
parameters, the start of its forward pass cannot be seen: a step then begins where the last one ended.

Repeated patterns are learned: optimizers that step directly one after the other end one step, not two; a call without
gradients that is always followed by training calls (of a teacher or an encoder) begins a training step.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Hashable
from typing import Any

from xsp.collector import Signal
from xsp.record.session import profile
from xsp.record.steps import Step
from xsp.subjects import Subjects, is_empty_module


class StepRule(enum.Enum):
    """The definition of a step in a program that does not mark its steps."""

    AUTO = "auto"  # an optimizer's step if the program trains, else a call
    CALL = "call"  # a call of the outermost module
    OPTIMIZER = "optimizer"  # from one optimizer step to the next


MOST_CALLS = 256
"""Calls without any backward pass after which a program is assumed not to train."""

MOST_BACKWARDS = 64
"""Backward passes without an optimizer step after which a program is assumed to use no optimizer of torch."""

LONGEST_PREFIX = 8
"""Most calls without gradients that may begin a training step."""

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
_NEVER_TRAINED = (
    "a model in training mode was called repeatedly without a backward pass: its calls are the steps; "
    "call model.eval() for inference, or use --step optimizer"
)


class AutoStep:
    """A listener that opens and closes the steps of a session at signals."""

    def __init__(self, session: profile, rule: StepRule = StepRule.AUTO) -> None:
        self._session = session
        self._rule = rule
        self._step: Step | None = None
        self._owner: int | None = None
        self._trains = False  # the open step is a training step
        self._running_optimizers = 0  # optimizers' steps that are running
        self._called_module = 0
        self._has_given_up = False
        self._has_weights = False
        """Whether a module that has parameters was called in the open step."""

        self._has_backward = self._has_called_weights = False
        """Whether gradients were computed, and a module with parameters called, since the last training step ended."""

        self._quiet = session.quiet
        self._evidence = TrainingEvidence()
        self._subjects = session.subjects
        self._order = Order(self._subjects)

    def __call__(self, signal: Signal, subject: object) -> None:
        """Handle a boundary of the program; boundaries on other threads than the step's own are ignored."""
        if self._session.has_explicit_steps:
            return
        if self._step is not None and threading.get_ident() != self._owner:
            return
        if self._quiet.remaining:
            if threading.get_ident() == self._owner:
                self._quiet.on_signal(signal)
                self._open_next()
            return
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

    def _call_begins(self, module: object) -> None:
        if _is_in_backward():
            return  # activation checkpointing calls it again
        trains = self._rule is StepRule.OPTIMIZER or (self._rule is StepRule.AUTO and _trains(module))
        if (
            self._rule is StepRule.AUTO
            and self._step is not None
            and self._trains
            and self._must_abandon(module, trains)
        ):
            self._abandon()
            trains = trains and self._rule is StepRule.AUTO
        has_weights = not is_empty_module(module)
        if has_weights and self._step is not None and self._step.awaits_work:
            self._abandon()
        if self._step is None:
            self._trains = trains or (self._rule is StepRule.AUTO and self._order.begins_prefix(module))
            self._open(by_call=True)
        self._has_weights |= has_weights
        self._has_called_weights |= has_weights
        self._mark_work()
        self._order.on_call(module, trains)
        self._called_module = self._subjects.of(module)

    def _must_abandon(self, module: object, trains: bool) -> bool:
        """Return whether the open step turns out not to be a training step, or its end was missed."""
        if self._order.has_missed_optimizer():
            self._session.note("training steps whose second optimizer did not step as before were left out")
            return True
        if trains and self._evidence.is_disproved():
            self._rule, self._has_given_up = StepRule.CALL, True
            self._session.note(_NEVER_TRAINED)
            return True
        return not trains and self._order.contradicts_prefix(module)

    def _call_ends(self, result: object) -> None:
        if _is_in_backward():
            return
        if self._trains:
            self._evidence.on_call(self._called_module, result)
        else:
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
            self._evidence.on_optimizer()
            ends = self._order.on_optimizer_in_backward(optimizer)
            is_first = self._order.is_first_pass
        if ends and not self._running_optimizers and self._rule is not StepRule.CALL:
            if self._step is not None and self._trains:
                self._end(Signal.BACKWARD_END)
            elif self._step is None and is_first:
                self._has_weights = False
                self._learn_start()
                self._has_called_weights = False
                self._open_next()

    def _optimizer_begins(self) -> None:
        self._running_optimizers += 1
        self._evidence.on_optimizer()
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

    def _open_next(self) -> None:
        """Begin a training step where the last one ended, if no call would signal its start."""
        if self._quiet.is_gapless and self._step is None and not self._quiet.remaining:
            self._trains = True
            self._open(by_call=False)
            if self._step is not None:
                self._step.awaits_work = True

    def _open(self, by_call: bool) -> None:
        self._has_weights = False
        self._owner = threading.get_ident()
        self._step = self._session.detected_step(by_call)
        self._step.__enter__()

    def _end(self, by_signal: Signal) -> None:
        step, self._step = self._step, None
        self._quiet.by_signal = by_signal
        if self._trains:
            self._learn_start()
            self._has_backward = self._has_called_weights = False
        if step is not None:
            step.__exit__(None, None, None)
        self._open_next()

    def _abandon(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.is_open:
            step.abandon()


class TrainingEvidence:
    """Evidence whether a program that calls a model in training mode trains it, and with an optimizer of torch.

    A backward pass proves training. Until the first one, the autograd graphs of the calls are observed: in training a
    graph lives until the backward pass. A module that is called repeatedly is not trained if all its graphs but the
    last are dead and no graph of another module lives. (Several calls may precede one backward pass: siamese networks,
    contrastive learning, summed losses. And a result may be detached, such as a generator's for its discriminator.)
    """

    def __init__(self) -> None:
        self.has_no_optimizer = False
        """Whether the program trains without an optimizer of torch: a step then ends with the backward pass."""

        self._backwards = self._calls = 0
        self._has_stepped = False
        self._graphs: dict[int, list[weakref.ref[Any]]] = {}

    def on_call(self, module: int, result: object) -> None:
        """Watch the graph of the result of a call of a module; `module` is its number."""
        if self._backwards:
            return
        self._calls += 1
        try:
            node = _graph(result)
        except Exception:  # a result of the program's own class may raise anything
            return
        if node is not None:
            mark = _Mark()
            node.metadata["xsp"] = mark
            self._graphs.setdefault(module, []).append(weakref.ref(mark))

    def on_backward(self) -> bool:
        """Count a backward pass, and return whether it is the one that shows that there is no optimizer."""
        self._backwards += 1
        self._graphs.clear()
        is_proven = not self._has_stepped and self._backwards == MOST_BACKWARDS
        self.has_no_optimizer |= is_proven
        return is_proven

    def on_optimizer(self) -> None:
        """Note that an optimizer stepped."""
        self._has_stepped, self.has_no_optimizer = True, False

    def is_disproved(self) -> bool:
        """Return whether the calls so far turned out not to be training."""
        if self._backwards or self._has_stepped:
            return False
        alive = [module for module, graphs in self._graphs.items() if any(graph() is not None for graph in graphs)]
        return self._calls >= MOST_CALLS or any(
            len(graphs) > 1 and all(graph() is None for graph in graphs[:-1]) and set(alive) <= {module}
            for module, graphs in self._graphs.items()
        )


class _Mark:
    """A mark on a graph, which lives as long as the graph."""


def _graph(value: Any, nesting: int = 3) -> Any:
    """Return the autograd node of the first tensor in a result that has one."""
    node = getattr(value, "grad_fn", None)
    if node is not None and hasattr(node, "metadata"):
        return node
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    nodes = (_graph(part, nesting - 1) for part in parts if nesting)
    return next((node for node in nodes if node is not None), None)


class Order:
    """The order of calls and optimizer steps (identified by number) and of backward passes, as far as steps need it."""

    def __init__(self, subjects: Subjects) -> None:
        self._number = subjects.of
        self._awaited_optimizer: Hashable = None
        self._follower: dict[Hashable, Hashable] = {}
        self._last_optimizer: Hashable = None
        self._passes = 0
        self._calls_before: list[int] = []
        self._previous_calls: list[int] = []
        self._prefix: list[int] = []
        self._evaluated: set[int] = set()
        self._has_trained = False

    def on_call(self, module: object, trains: bool) -> None:
        """Note a call.

        A model that is called in evaluation mode and trained afterwards, for instance in epochs of one batch, is being
        evaluated: that call begins no training step.
        """
        self._last_optimizer, self._passes = None, 0
        if self._has_trained:
            return
        number = self._number(module)
        if not trains:
            if len(self._calls_before) <= LONGEST_PREFIX:  # a longer sequence is not a prefix
                self._calls_before.append(number)
            if not getattr(module, "training", True):
                self._evaluated.add(number)
            return
        self._has_trained = True
        if number in self._evaluated:
            self._prefix = []
        elif self._calls_before == self._previous_calls and len(self._calls_before) <= LONGEST_PREFIX:
            self._prefix = self._calls_before
        self._previous_calls, self._calls_before = self._calls_before, []

    def begins_prefix(self, module: object) -> bool:
        """Return whether a call without gradients begins the sequence that preceded the last training calls."""
        return not self._calls_before and self._prefix[:1] == [self._number(module)]

    def contradicts_prefix(self, module: object) -> bool:
        """Return whether a call without gradients shows that an earlier one began no training step."""
        calls = [*self._calls_before, self._number(module)]
        if self._has_trained or self._prefix[: len(calls)] == calls:
            return False
        self._prefix, self._previous_calls = [], []
        return True

    def on_backward(self) -> None:
        """Note a backward pass."""
        self._last_optimizer = None

    def has_missed_optimizer(self) -> bool:
        """Return whether an optimizer that used to follow another one did not step; it is not awaited again."""
        if self._awaited_optimizer is None:
            return False
        self._follower = {
            previous: None if follower == self._awaited_optimizer else follower
            for previous, follower in self._follower.items()
        }
        self._awaited_optimizer = None
        return True

    def on_optimizer_step(self, optimizer: object) -> bool:
        """Note an optimizer's step, and return whether it ends the training step."""
        return self._ends_step(self._number(optimizer))

    def on_optimizer_in_backward(self, optimizer: object) -> bool:
        """Note a backward pass in which optimizers stepped, and return whether it ends the training step.

        Several such passes after one forward pass (a retained graph, two losses) are parts of one step.

        Args:
            optimizer: the last one that stepped.
        """
        self._passes += 1
        return self._ends_step((self._number(optimizer), self._passes))

    @property
    def is_first_pass(self) -> bool:
        """Whether a module was called before the last pass with optimizers, after the previous such pass."""
        return self._passes <= 1

    def _ends_step(self, key: Hashable) -> bool:
        """Return whether a training step ends with this optimizer step: none is known to follow directly."""
        previous = self._last_optimizer
        if previous is not None and previous != key:
            self._follower.setdefault(previous, key)
        self._last_optimizer = key
        self._calls_before, self._has_trained = [], False
        self._evaluated.clear()
        self._awaited_optimizer = self._follower.get(key)
        return self._awaited_optimizer is None


def _trains(module: Any) -> bool:
    torch = sys.modules["torch"]
    return bool(module.training) and bool(torch.is_grad_enabled())


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

    def __call__(self, signal: Signal, subject: object) -> None:
        """Acquire the turn at a call's start and release it at its end; after a timeout the call runs without it."""
        if signal is Signal.CALL_BEGIN:
            self._local.has_turn = self._turn.acquire(timeout=self.TIMEOUT_S)
            if not self._local.has_turn:
                self._session.note(
                    f"a call waited {self.TIMEOUT_S:.0f} s for one of another thread, then ran in parallel with it: "
                    "these calls depend on each other and cannot take turns"
                )
        if self._inner is not None:
            self._inner(signal, subject)
        if signal is Signal.CALL_END and getattr(self._local, "has_turn", False):
            self._local.has_turn = False
            self._turn.release()
