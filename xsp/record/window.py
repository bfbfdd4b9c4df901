"""The window of a step that will be recorded: collectors are on from the end of the step before.

An iteration begins where the last step ended. What the program does before it calls its model (moving a batch to the
device, reading a metric, saving) is recorded as the step is, with its operators, copies and lines. The window is opened
only if the schedule chose the next step already, on the thread that ended the last one, and not for a describing step,
whose times do not count. It is closed again if no step follows soon: a program that has ended its loop would fill the
memory.
"""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple, Protocol

from xsp import clock
from xsp.collector import Collector
from xsp.record.collecting import Collecting
from xsp.record.overhead import Account
from xsp.record.schedule import Schedule, Turn
from xsp.record.storing import Storing
from xsp.schema import Kind, Level, Span

NAME = "before the step"

LONGEST_S = 5.0
"""Seconds after which a window without a step is closed."""


class Planned(NamedTuple):
    """The next step, as it was planned at the end of the last one."""

    turn: Turn
    kind: int | None
    """The kind that was expected."""


class Steps(Protocol):
    """The part of `xsp.record.steps.Steps` that is used here."""

    account: Account
    clock: clock.SteadyClock
    collecting: Collecting
    lock: threading.Lock
    planned: Planned | None
    schedule: Schedule
    storing: Storing
    window: Window | None


class Window:
    """Collectors that are on before a step begins."""

    def __init__(self, steps: Steps, turn: Turn) -> None:
        """Wait for the device, and switch the collectors of a turn on."""
        self._steps = steps
        steps.storing.await_opening()
        steps.storing.wait(counts_cost=True)
        drained_ns = clock.monotonic_ns()
        steps.collecting.settle(steps.collecting.collectors)
        self.idle_ns = clock.monotonic_ns()
        """When the device had no work left."""

        self.wait_ns = self.idle_ns - drained_ns
        """Time that it needed for the work of the steps before."""

        self.active: list[Collector] = steps.collecting.start(turn.rung, describe=False)
        self.anchor = steps.clock.anchor()
        self._timer = threading.Timer(LONGEST_S, self._expire)
        self._timer.daemon = True
        self._timer.start()
        self.began_ns = clock.monotonic_ns()
        self.opening_ns = self.began_ns - self.idle_ns
        """Time that xsp took to open it: a cost of the step that is recorded."""

    def adopt(self) -> list[Collector]:
        """Leave the collectors to the step that begins, and return them."""
        self._timer.cancel()
        return self.active

    def drop(self) -> None:
        """Switch the collectors off, and forget what they saw; the program's next step is not recorded."""
        self._timer.cancel()
        steps, dropped_ns = self._steps, clock.monotonic_ns()
        planned, steps.planned, steps.window = steps.planned, None, None
        steps.collecting.stop(self.active)
        steps.collecting.rows(self.anchor)
        steps.account.spend(self.opening_ns + clock.monotonic_ns() - dropped_ns)
        if planned is not None:
            steps.schedule.take_back(planned.turn)

    def _expire(self) -> None:
        """Close the window on another thread, unless a step has begun."""
        if self._steps.lock.acquire(blocking=False):
            try:
                if self._steps.window is self:
                    with contextlib.suppress(Exception):  # a failure costs a recording, not the program
                        self.drop()
            finally:
                self._steps.lock.release()

    def span(self, thread: int, end_ns: int) -> Span:
        """Return the span of the time before the step; the root of what is recorded in it."""
        return clock.on_epoch(
            Span(
                level=Level.APPLICATION,
                kind=Kind.BEFORE.value,
                name=NAME,
                start_ns=self.began_ns,
                dur_ns=end_ns - self.began_ns,
                thread=thread,
                collector="session",
            ),
            self.anchor,
        )


def can_open(collecting: Collecting, turn: Turn) -> bool:
    """Return whether the collectors may be switched on ahead of a step, and off on another thread."""
    return not (turn.is_bare or turn.describe or any(collector.on_one_thread for collector in collecting.collectors))
