"""Storing of recorded steps, one at a time, while the program continues."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xsp import clock
from xsp.record.collecting import Collecting
from xsp.record.overhead import Account
from xsp.record.schedule import Schedule
from xsp.schema import Span

if TYPE_CHECKING:
    from xsp.record.writer import Writer


OPENING_PATIENCE_S = 0.4
"""Longest wait in seconds for the storing process to load before the first step is recorded. A step that runs beside it
on a machine of few cores takes much longer, and a short program would have ended before its second recorded step."""


class SentStep(NamedTuple):
    """A step that was sent."""

    number: int | None
    """Number of the message; None if it could not be sent."""

    step: int
    rows: list[Span]
    common: dict[str, Any]
    loop_rows: bytes
    offset_ns: int


class StepsStored(Protocol):
    """The part of `xsp.record.steps.Steps` that is used here."""

    account: Account
    collecting: Collecting
    schedule: Schedule


class Storing:
    """The connection to the storing process: sends steps, and counts their outcomes."""

    def __init__(self, steps: StepsStored) -> None:
        self._steps = steps
        self._sent: SentStep | None = None
        self.stored = self.lost = 0
        self._patience_s: float | None = None
        self.writer: Writer

    @property
    def is_underway(self) -> bool:
        """Whether a step is being stored."""
        return self._sent is not None

    @property
    def handled(self) -> int:
        """Steps that are stored, lost, or being stored."""
        return self.stored + self.lost + self.is_underway

    def await_opening(self) -> int:
        """Wait until the storing process has loaded, before the first step of a budget is recorded.

        Returns:
            Nanoseconds of waiting. They count as part of the start: they take nothing from the first steps.
        """
        if self.handled or self._steps.schedule.storing_patience_s is None or self.writer.is_open:
            return 0
        began_ns = clock.monotonic_ns()
        self.writer.wait_until_open(OPENING_PATIENCE_S)
        wait_ns = clock.monotonic_ns() - began_ns
        self._steps.account.start_ns += wait_ns
        return wait_ns

    def begin(self, step: int, rows: list[Span], common: dict[str, Any], loop_rows: bytes, offset_ns: int) -> None:
        """Send a step to be stored, as `Writer.store`; wait for it only if the schedule requires it."""
        number = self.writer.send_step(step, rows, common, loop_rows, offset_ns)
        self._sent = SentStep(number, step, rows, common, loop_rows, offset_ns)
        self._steps.schedule.is_storing = True
        self._patience_s = self._steps.schedule.storing_patience_s
        if number is None or (self._steps.schedule.waits_for_storing and self._is_answered(number)):
            self.wait()

    def _is_answered(self, number: int) -> bool:
        """Wait as long as the schedule still allows for this step, and return whether the answer is there."""
        if self._patience_s is None:
            return True
        began_s = time.monotonic()
        try:
            return self.writer.is_answered(number, self._patience_s)
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))

    def poll(self) -> int:
        """Check, before another step begins, whether the step is on the disk; wait if the schedule requires it.

        Returns:
            Nanoseconds of waiting. They are counted as a cost of profiling.
        """
        if self._sent is None:
            return 0
        schedule, number, began_ns = self._steps.schedule, self._sent.number, clock.monotonic_ns()
        schedule.restart_settling()
        is_answered = (
            number is None
            or (self._is_answered(number) if schedule.waits_for_storing else self.writer.is_answered(number))
        )  # fmt: skip
        if is_answered:
            self.wait()
        wait_ns = clock.monotonic_ns() - began_ns
        self._steps.account.spend(wait_ns)
        return wait_ns

    def wait(self, counts_cost: bool = False) -> int:
        """Wait until the step is stored or lost, and count it; return the nanoseconds that it took.

        Args:
            counts_cost: count this time as a cost of profiling; False if the caller counts it.
        """
        began_ns = clock.monotonic_ns()
        sent, self._sent = self._sent, None
        if sent is None:
            return 0
        self._steps.schedule.is_storing = False
        try:
            is_stored = self._is_stored(sent)
        except BaseException:  # usually an interrupt meant for the program
            self.lost += 1
            raise
        self.stored += is_stored
        self.lost += not is_stored
        wait_ns = clock.monotonic_ns() - began_ns
        if counts_cost:
            self._steps.account.spend(wait_ns)
        return wait_ns

    def _is_stored(self, sent: SentStep) -> bool:
        """Return whether a step is on the disk, if necessary without the rows of collectors that gave wrong types."""
        if sent.number is not None and self.writer.is_stored(sent.number):
            return True
        valid_rows = self._steps.collecting.drop_invalid_rows(sent.rows)
        if len(valid_rows) < len(sent.rows) and self.writer.store(sent.step, valid_rows, *sent[3:]):
            return True
        self.writer.add_to_loop(sent.loop_rows, sent.offset_ns)  # the step is lost, but its row in the loop is kept
        return False
