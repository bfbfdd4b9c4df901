"""The step that is on its way to the disk while the program goes on: one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from xsp import clock
from xsp.record.collecting import Collecting
from xsp.record.overhead import Account
from xsp.record.schedule import Schedule
from xsp.schema import Span

if TYPE_CHECKING:
    from xsp.record.writer import Writer


class Sent(NamedTuple):
    """A step that was sent."""

    number: int | None
    """Of the message; None if it could not be sent."""

    step: int
    rows: list[Span]
    common: dict[str, Any]
    of_loop: bytes
    offset_ns: int


class Steps(Protocol):
    """What of a block's steps takes part, see `xsp.record.steps.Steps`."""

    account: Account
    collecting: Collecting
    schedule: Schedule


class Storing:
    """Sends steps to the storing process, and counts what became of them."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._sent: Sent | None = None
        self.stored = self.lost = 0
        self.writer: Writer

    @property
    def is_underway(self) -> bool:
        """Whether a step is being stored."""
        return self._sent is not None

    @property
    def accounted(self) -> int:
        """Steps that are stored, lost, or being stored."""
        return self.stored + self.lost + self.is_underway

    def begin(self, step: int, rows: list[Span], common: dict[str, Any], of_loop: bytes, offset_ns: int) -> None:
        """Have a step stored, as `Writer.store` does; wait for it only if the schedule says so."""
        number = self.writer.send_step(step, rows, common, of_loop, offset_ns)
        self._sent = Sent(number, step, rows, common, of_loop, offset_ns)
        self._steps.schedule.is_storing = True
        if number is None or self._steps.schedule.waits_for_storing:
            self.wait()

    def look(self) -> int:
        """See whether the step is on the disk, before another one begins; wait if the schedule says so.

        Returns:
            How long that was waited for, in nanoseconds. It is counted as a cost of profiling.
        """
        if self._sent is None:
            return 0
        schedule, number = self._steps.schedule, self._sent.number
        schedule.paused()
        if number is not None and not schedule.waits_for_storing and not self.writer.is_answered(number):
            return 0
        return self.wait(counts=True)

    def wait(self, counts: bool = False) -> int:
        """Count the step as stored or lost, as soon as that is known; return how long that took, in nanoseconds.

        Args:
            counts: this time as a cost of profiling; False if it is part of what the caller counts.
        """
        began_ns = clock.monotonic_ns()
        sent, self._sent = self._sent, None
        if sent is None:
            return 0
        self._steps.schedule.is_storing = False
        try:
            is_stored = self._is_stored(sent)
        except BaseException:  # an interrupt of the program's own, as a rule
            self.lost += 1
            raise
        self.stored += is_stored
        self.lost += not is_stored
        taken_ns = clock.monotonic_ns() - began_ns
        if counts:
            self._steps.account.spend(taken_ns)
        return taken_ns

    def _is_stored(self, sent: Sent) -> bool:
        """Return whether a step is on the disk, if need be without rows of a collector with values of other types."""
        if sent.number is not None and self.writer.is_stored(sent.number):
            return True
        fitting = self._steps.collecting.without_misfits(sent.rows)
        if len(fitting) < len(sent.rows) and self.writer.store(sent.step, fitting, *sent[3:]):
            return True
        self.writer.add_to_loop(sent.of_loop, sent.offset_ns)  # the step is lost, not that it ran
        return False
