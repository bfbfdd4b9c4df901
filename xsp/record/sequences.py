"""Sequences of calls that repeat: the steps of a program that has no outer module.

A program may call the layers of its model by hand, or a gate and its experts, so that each call of a module would be a
step. If modules are called in turn in the same order again and again, each once, and none contains the others, one pass
through them is the step. Two models that are called alternately are not a sequence, as they are just as often two
models that are served in turn; nor is one with calls of the same module in a row, such as a decoder after its encoder.
Modules without parameters, such as activations, may be called any number of times in between.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from xsp.subjects import Subjects, is_empty_module

NO_STEP = (
    "steps could not be found: several modules are called in turn, in no order that repeats, and none contains the "
    "others; each call counts as a step: give --step the name of the function that is called once per step"
)
"""Note in a run in which each call counts as a step for lack of a better one."""

SHORTEST = 3
"""Fewest modules in a sequence."""

LONGEST = 512
"""Most modules in a sequence."""

PASSES = 3
"""Passes through a sequence after which it counts as one."""

MOST_BREAKS = 3
"""Sequences that may end differently than they began before no others are looked for."""

FEWEST_CALLS = 16
"""Calls after which it is decided whether modules are called in turn."""


class Sequence:
    """The modules that a thread calls in turn."""

    def __init__(self, subjects: Subjects) -> None:
        self._number = subjects.of
        self._last: dict[int, int] = {}
        """The position of the last call of each module since something else was done."""

        self._calls: deque[int] = deque(maxlen=LONGEST)
        self._position = self._period = self._run = self._breaks = 0
        self._order: dict[int, int] = {}
        """The order in which the modules were first called since then."""

        self._empty_calls = self._empty_before = 0
        """Calls of modules without parameters since the last call of another one, and before the first one of all."""

        self._empty_after: dict[int, int] = {}
        """Such calls after the last call of each module."""

        self._modules: tuple[int, ...] = ()
        """The sequence that was found."""

        self.is_new = False
        """Whether no pass through it has begun yet."""

        self._next = self._tail = self._tail_left = 0
        """Position in the current pass; calls of modules without parameters after the last one, and those missing."""

        self._counts: Counter[int] = Counter()
        self._total = self._changes = 0
        self._previous: int | None = None

    def on_call(self, module: Any) -> None:
        """Note a call that is a step by itself so far. Hot."""
        if is_empty_module(module):
            self._empty_calls += 1
            return
        number = self._number(module)
        self._total += 1
        if number == self._previous and self._run < 0:
            return
        self._changes += number != self._previous
        if len(self._counts) < LONGEST or number in self._counts:
            self._counts[number] += 1
        if self._previous is None:
            self._empty_before = self._empty_calls
        else:
            self._empty_after[self._previous] = self._empty_calls
        self._previous, self._empty_calls = number, 0
        if self._breaks <= MOST_BREAKS:
            self._learn(number)

    def _learn(self, number: int) -> None:
        last = self._last.get(number)
        period = self._position - last if last is not None else 0
        self._run = -1 if not period or period != self._period else self._run + 1
        self._period, self._last[number] = period, self._position
        self._order.setdefault(number, len(self._order))
        self._calls.append(number)
        self._position += 1
        if SHORTEST <= period <= LONGEST and self._run >= (PASSES - 1) * period - 2:
            self._find(list(self._calls)[-period:])
        elif len(self._last) > LONGEST:
            self._last.clear()
            self._order.clear()

    def _find(self, modules: list[int]) -> None:
        """Make modules the sequence, beginning with the one that the program called first of all."""
        first = min(modules, key=lambda number: self._order.get(number, LONGEST))
        start = modules.index(first)
        self._modules = (*modules[start:], *modules[:start])
        self.is_new = True
        self._tail = max(0, self._empty_after.get(self._modules[-1], 0) - self._empty_before)

    def may_begin(self, module: Any) -> bool:
        """Return whether a call would begin a pass through the sequence."""
        if not self._modules:
            return False
        return self._empty_before > 0 if is_empty_module(module) else self._number(module) == self._modules[0]

    def begins(self, module: Any) -> bool:
        """Return whether a call begins a pass through the sequence."""
        if not self.may_begin(module):
            return False
        self._next, self._tail_left = 0, self._tail
        return self.continues(module)

    def continues(self, module: Any) -> bool:
        """Return whether a call continues the pass."""
        if is_empty_module(module):
            self._tail_left -= self._next >= len(self._modules)
            return True
        if self._next < len(self._modules) and self._number(module) == self._modules[self._next]:
            self._next += 1
            return True
        return False

    @property
    def is_complete(self) -> bool:
        """Whether the last call of the pass has begun."""
        return self._next >= len(self._modules) and self._tail_left <= 0

    def break_off(self) -> None:
        """Forget the sequence: a pass did not continue as the ones before."""
        self._breaks += 1
        self._modules = ()
        self.reset()

    def reset(self) -> None:
        """Forget the calls so far: a training step begins."""
        if self._calls:
            self._last.clear()
            self._calls.clear()
            self._order.clear()
        self._period, self._run = 0, -1

    @property
    def is_due(self) -> bool:
        """Whether `are_in_turn` should be read now: after 16, 32, 64 … calls."""
        return self._total >= FEWEST_CALLS and not self._total & (self._total - 1)

    @property
    def are_in_turn(self) -> bool:
        """Whether modules are called in turn, and yet no sequence was found.

        At least half of the calls are of another module than the one before, and at least `SHORTEST` modules were
        called `PASSES` times or more.
        """
        often = sum(count >= PASSES for count in self._counts.values())
        return not self._modules and 2 * self._changes >= self._total and often >= SHORTEST
