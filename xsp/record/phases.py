"""The phases of steps that are not recorded: how long forward and backward passes and optimizers took in each.

Recorded steps are few, and run on cold caches: their phases are not those of the others. So collectors note the times
of the boundaries of phases in all steps (`Outline.times`), two readings of the clock for a phase, and a step's times
become part of its row of the loop. Each moment counts for the innermost phase that runs, see `counted`, as in
`xsp.account.onhost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from xsp.collector import Outline, Signal
from xsp.record.loop import UNKNOWN

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

BEGINS = {Signal.CALL_BEGIN: FORWARD, Signal.BACKWARD_BEGIN: BACKWARD, Signal.OPTIMIZER_BEGIN: OPTIMIZER}
ENDS = {Signal.CALL_END: FORWARD, Signal.BACKWARD_END: BACKWARD, Signal.OPTIMIZER_END: OPTIMIZER}
"""The signals with which phases begin and end."""


def counted(running: Sequence[str]) -> str:
    """Return the phase that time counts for: a call in a backward pass, as of activation checkpointing, is part of it.

    Args:
        running: the phases that run, outermost first; at least one.
    """
    return BACKWARD if running[-1] == FORWARD and BACKWARD in running else running[-1]


LEAST_NS = 300_000
"""Shortest steps whose phases are timed: each boundary takes 0.2 µs."""

MOST_TIMES = 512
"""Most boundaries of a step: of a program with more, no further steps are timed."""


class StepPhases(NamedTuple):
    """Nanoseconds of a step in each phase."""

    forward_ns: int = UNKNOWN
    backward_ns: int = UNKNOWN
    optimizer_ns: int = UNKNOWN


UNTIMED = StepPhases()


class PhaseTiming:
    """What collectors note of the phases of the current step."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._has_many = False
        """Whether a step had more boundaries than `MOST_TIMES`."""

    def begin(self, usual_ns: float) -> None:
        """Begin to time phases, if steps are long enough.

        Args:
            usual_ns: the usual time of a step; infinite if it is not known.
        """
        self._outline.times = [] if usual_ns >= LEAST_NS and not self._has_many else None

    def take(self) -> list[Any] | None:
        """Return what was noted of a step that ended, for `of_step`, and begin with the next one. Hot."""
        times = self._outline.times
        if times is not None:
            self._outline.times = []
            self._has_many |= len(times) > 2 * MOST_TIMES
        return times

    def end(self) -> list[Any] | None:
        """Return what was noted of a step that ended, and note nothing more."""
        times, self._outline.times = self.take(), None
        return times


def of_step(times: Sequence[Any] | None, start_ns: int, end_ns: int) -> StepPhases:
    """Return the time of each phase of a step.

    The step of an optimizer that runs one backward pass itself, in a closure, begins with the end of that pass.

    Args:
        times: signals, each followed by a reading of the monotonic clock, in their order; None if they were not noted.
        start_ns: start of the step.
        end_ns: its end.
    """
    if times is None:
        return UNTIMED
    spent = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER, ""), 0)
    running, last_ns = [""], start_ns
    optimizers: list[_Optimizer] = []
    for signal, time_ns in zip(times[::2], times[1::2], strict=True):
        now_ns = min(max(last_ns, time_ns), end_ns)
        spent[counted(running)] += now_ns - last_ns
        last_ns, begun, ended = now_ns, BEGINS.get(signal), ENDS.get(signal)
        if begun is not None:
            running.append(begun)
            if begun == OPTIMIZER:
                optimizers.append(_Optimizer(spent[OPTIMIZER]))
        elif ended in running:
            while (last := running.pop()) != ended:
                if last == OPTIMIZER:
                    optimizers.pop()
            if ended == OPTIMIZER:
                spent[OPTIMIZER] -= optimizers.pop().closure_ns
            elif ended == BACKWARD and optimizers:
                optimizers[-1].count_pass(spent[OPTIMIZER])
    spent[counted(running)] += max(0, end_ns - last_ns)
    return StepPhases(spent[FORWARD], spent[BACKWARD], spent[OPTIMIZER])


def mean(steps: Sequence[StepPhases]) -> StepPhases:
    """Return the mean times of steps; unknown if those of one of them are."""
    if UNTIMED in steps:
        return UNTIMED
    return StepPhases(*(round(sum(times) / len(steps)) for times in zip(*steps, strict=True)))


class _Optimizer:
    """A running step of an optimizer."""

    def __init__(self, spent_ns: int) -> None:
        self._began_ns = spent_ns
        self._passes = self.closure_ns = 0
        """Backward passes that ended in it; its time until then, if it is a single one: the closure's."""

    def count_pass(self, spent_ns: int) -> None:
        """Count a backward pass that ended, when optimizers had taken `spent_ns`."""
        self._passes += 1
        self.closure_ns = spent_ns - self._began_ns if self._passes == 1 else 0
