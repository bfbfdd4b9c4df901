"""The order of calls, backward passes and optimizer steps, from which the parts of a training step are learned."""

from __future__ import annotations

import sys
from collections.abc import Hashable

from xsp.subjects import Subjects

LONGEST_PREFIX = 64
"""Most calls of modules that are not in training mode, or without gradients, that may begin a training step."""

_Call = tuple[int, bool]
"""The number of a module, and whether gradients were on: a validation calls it without them."""


class Order:
    """The order of calls and optimizer steps (identified by number) and of backward passes, as far as steps need it."""

    def __init__(self, subjects: Subjects) -> None:
        self._number = subjects.of
        self._awaited_optimizer: Hashable = None
        self._follower: dict[Hashable, Hashable] = {}
        self._last_optimizer: Hashable = None
        self._passes = 0
        self._calls_before: list[_Call] = []
        self._previous_calls: list[_Call] = []
        self._prefix: list[_Call] = []
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
        call = self._call(module)
        if not trains:
            if len(self._calls_before) <= LONGEST_PREFIX:  # a longer sequence is not a prefix
                self._calls_before.append(call)
            if not getattr(module, "training", True):
                self._evaluated.add(call[0])
            return
        self._learn_prefix(is_evaluated=call[0] in self._evaluated)

    def _call(self, module: object) -> _Call:
        return self._number(module), bool(sys.modules["torch"].is_grad_enabled())

    def _learn_prefix(self, is_evaluated: bool) -> None:
        """Learn the calls that began a training step, if the step before began with the same ones."""
        self._has_trained = True
        if is_evaluated:
            self._prefix = []
        elif self._calls_before == self._previous_calls and len(self._calls_before) <= LONGEST_PREFIX:
            self._prefix = self._calls_before
        self._previous_calls, self._calls_before = self._calls_before, []

    def on_unseen_calls(self) -> None:
        """Note that many calls without gradients were made that were not noted: those before training are not known."""
        self._calls_before = [(0, False)] * (LONGEST_PREFIX + 1)

    def begins_prefix(self, module: object) -> bool:
        """Return whether a call that does not train begins the sequence that preceded the last training calls.

        Calls without gradients before one with them, as of a validation, do not belong to it.
        """
        call = self._call(module)
        if self._prefix[:1] != [call]:
            return False
        if call[1] and not any(has_gradients for _, has_gradients in self._calls_before):
            self._calls_before = []
        return not self._calls_before

    def contradicts_prefix(self, module: object) -> bool:
        """Return whether a call that does not train shows that an earlier one began no training step."""
        calls = [*self._calls_before, self._call(module)]
        if self._has_trained or self._prefix[: len(calls)] == calls:
            return False
        self._prefix, self._previous_calls = [], []
        return True

    def on_backward(self) -> None:
        """Note a backward pass.

        A model in evaluation mode that it goes through is part of the step: it is fixed while an input is optimised, or
        its statistics are.
        """
        self._last_optimizer = None
        if not self._has_trained and self._calls_before and self._calls_before[-1][1]:
            self._learn_prefix(is_evaluated=False)

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
