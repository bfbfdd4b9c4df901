"""Steps of a program that names none: found at the boundaries that collectors signal.

A step of training begins with the first outermost call of a module after the last step and ends with the
optimizer's step. A step of inference is one outermost call. A call counts as training if its module is in
training mode and gradients are on.
"""

from __future__ import annotations

import enum
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

from xsp.collector import Signal
from xsp.recording.session import profile


class StepRule(enum.Enum):
    """What makes a step, where the program does not say."""

    AUTO = "auto"  # an optimizer's step if the program trains, else a call
    CALL = "call"  # a call of the outermost module
    OPTIMIZER = "optimizer"  # from one optimizer step to the next


class AutoStep:
    """Opens and closes the steps of a session as signals come in."""

    def __init__(self, session: profile, rule: StepRule = StepRule.AUTO) -> None:
        self._session = session
        self._rule = rule
        self._step: AbstractContextManager[object] | None = None
        self._owner: int | None = None
        self._waits_for_optimizer = False
        self._called: set[int] = set()

    def __call__(self, signal: Signal, subject: object) -> None:
        """Take a boundary of the program; those of other threads than the step's own are ignored."""
        if self._session.has_explicit_steps:
            return
        if self._step is not None and threading.get_ident() != self._owner:
            return
        if signal is Signal.CALL_BEGIN:
            self._begin(subject)
        elif signal is Signal.CALL_END and not self._waits_for_optimizer:
            self._end()
        elif signal is Signal.BACKWARD_END:
            self._called.clear()
        elif signal is Signal.OPTIMIZER_END and self._waits_for_optimizer:
            self._end()

    def _begin(self, module: object) -> None:
        if self._step is not None and id(module) in self._called and self._rule is StepRule.AUTO:
            # Called again without a backward pass in between: in training mode, but not being trained.
            self._rule = StepRule.CALL
            self._session.note(
                "a model in training mode was called again without a backward pass: its calls are the steps; "
                "call model.eval() for inference, or say --step optimizer"
            )
            self._session.discard_step()
            self._step = None
        if self._step is None:
            self._waits_for_optimizer = self._rule is not StepRule.CALL and (
                self._rule is StepRule.OPTIMIZER or _trains(module)
            )
            self._called.clear()
            self._owner = threading.get_ident()
            self._step = self._session.step()
            self._step.__enter__()
        self._called.add(id(module))

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


class OneAtATime:
    """Lets the outermost calls of several threads take turns, so that what runs in one is not ambiguous."""

    TIMEOUT_S = 10.0

    def __init__(self, session: profile, inner: AutoStep | None) -> None:
        self._session = session
        self._inner = inner
        self._turn = threading.RLock()
        self._held = threading.local()

    def __call__(self, signal: Signal, subject: object) -> None:
        """Take the turn at a call's begin and hand it on at its end; one that waits too long goes on without."""
        if signal is Signal.CALL_BEGIN:
            self._held.yes = self._turn.acquire(timeout=self.TIMEOUT_S)
            if not self._held.yes:
                self._session.note(
                    f"a call waited {self.TIMEOUT_S:.0f} s for another thread's and then ran beside it: "
                    "these calls depend on each other and cannot take turns"
                )
        if self._inner is not None:
            self._inner(signal, subject)
        if signal is Signal.CALL_END and getattr(self._held, "yes", False):
            self._held.yes = False
            self._turn.release()


def _trains(module: Any) -> bool:
    torch = sys.modules["torch"]
    return bool(module.training) and bool(torch.is_grad_enabled())
