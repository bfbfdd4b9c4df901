"""The steps of a block, one at a time: whose turn it is, what was seen in it, and what became of that.

Between the two clock readings of a step nothing is done here; before and after, collectors are switched, and raw
rows are handed to a second process (`xsp.recording.writer`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xsp import clock, identity
from xsp.collector import Collector
from xsp.recording import blocks
from xsp.recording import budget as budgets
from xsp.recording.account import Account
from xsp.recording.collecting import Collecting
from xsp.recording.schedule import Schedule, Turn
from xsp.recording.underway import Underway
from xsp.span import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.recording.writer import Writer


class Steps:
    """What the steps of a block share."""

    def __init__(self, name: str, schedule: Schedule, account: Account, batch_size: int | None) -> None:
        self.name = name
        self.schedule = schedule
        self.account = account
        self.batch_size = batch_size
        self.collecting = Collecting()
        self.blocks = blocks.Blocks()
        self.underway = Underway()
        self.open: Step | None = None
        self.seen = self.stored = self.lost = self.skipped = 0
        self.taken = threading.Lock()
        """Held by the open step."""

        self._own: identity.Identity
        self._writer: Writer

    def begin(self, own: identity.Identity, writer: Writer) -> None:
        """Say whose steps they are, and who stores them."""
        self._own, self._writer = own, writer

    # --- the way of a step ----------------------------------------------------------------------------

    def skip(self) -> None:
        """Count a step that began while another one was open."""
        self.skipped += 1
        self.collecting.note("xsp", "steps that began while another one was being recorded were not recorded")

    def turn_away(self) -> None:
        """Go on without a step that was admitted and did not begin."""
        self.skipped += 1
        self.taken.release()

    def caller(self) -> identity.Caller | None:
        """Return the span that a step is to hang under: the program's own, or the run's, if its trace is shared."""
        own = self._own
        return identity.caller_here() or (identity.Caller(own.trace_id, own.span_id) if own.shared else None)

    def store(self, step: Step) -> None:
        """Store what was seen in a step, unless its turn says that nothing is kept."""
        seen, named = self.collecting.rows(step.anchor), self.blocks.take()
        if not step.turn.kept:
            return
        rows = seen + [clock.on_epoch(span, step.anchor) for span in named]
        batch = step.batch_size or self.batch_size
        if batch is None:
            batch = next((row.batch_size for row in rows if row.batch_size is not None), None)
        rows = self._signed(
            [step.span(self.name, batch), *rows],
            trace_id=step.trace_id,
            step=step.number,
            rung=int(step.turn.rung),
            timed=step.turn.timed,
        )
        if self._writer.store(step.number, rows):
            self.stored += 1
        else:
            self.lost += 1

    def store_rest(self) -> None:
        """Store named blocks that ended after the last step, around several steps for instance."""
        rest = self.blocks.take()
        if rest and self.stored:
            anchor = clock.anchor()
            rows = [clock.on_epoch(span, anchor) for span in rest]
            self._writer.store(self.seen, self._signed(rows, trace_id=self._own.trace_id))

    def _signed(self, rows: Iterable[Span], **common: Any) -> list[Span]:
        """Return rows with what they have in common, in the form in which they travel."""
        common |= {"process": self._own.process, "rank": self._own.rank}
        return [row._replace(level=int(row.level), **common) for row in rows]

    def release(self, step: Step, counts: bool) -> None:
        """Count what a closed step cost, say how far the run is, and let the next one begin.

        Args:
            step: with its times.
            counts: False if it ended anywhere.
        """
        try:
            end_ns = step.end_ns
            shown_ns = self.underway.show(self._progress()) if self.underway.is_due(end_ns) else 0
            self.account.spend(shown_ns)
            if counts:
                self.account.add(step.turn, end_ns - step.start_ns, step.before_ns, end_ns + shown_ns)
        finally:
            self.taken.release()

    def _progress(self) -> dict[str, Any]:
        """Return how far the run has come, for those who watch it."""
        spent = budgets.progress(self.schedule, self.account)
        return {"seen": self.seen, "stored": self.stored, "lost": self.lost, "time_ns": time.time_ns(), "budget": spent}


class Step:
    """One step: the only place where the measured program's clock is read."""

    anchor: clock.Anchor
    number: int
    span_id: str
    trace_id: str
    turn: Turn
    before_ns = 0
    """What xsp took before its start."""

    start_ns = end_ns = 0
    """Readings of the monotonic clock."""

    def __init__(self, steps: Steps, batch_size: int | None) -> None:
        self.batch_size = batch_size
        self._steps = steps
        self._recording = False

    def __enter__(self) -> Step:
        entered, steps = clock.monotonic_ns(), self._steps
        if not steps.taken.acquire(blocking=False):
            steps.skip()
            return self
        try:
            self.number = steps.seen
            steps.seen += 1
            self.turn = steps.schedule.next()
            self._on = [] if self.turn.bare else self._switch_on()
        except BaseException:  # an interrupt of the program's own: this step does not begin
            steps.turn_away()
            raise
        self._recording, steps.open = True, self
        self.start_ns = self.end_ns = clock.monotonic_ns()
        self.before_ns = self.start_ns - entered
        return self

    def _switch_on(self) -> list[Collector]:
        caller = self._steps.caller()
        self.trace_id = caller.trace_id if caller else os.urandom(16).hex()
        self._parent_id = caller.span_id if caller else None
        self.span_id = os.urandom(8).hex()
        self._thread = threading.get_native_id()
        blocks.enter(self.span_id)
        on = self._steps.collecting.start(self.turn.rung, self.turn.describe)
        self.anchor = clock.anchor()
        return on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording:
            self.close("ok" if kind is None else f"error:{kind.__name__}")

    def close(self, status: str) -> None:
        """Read the clock, switch everything off, store the step."""
        steps, stored = self._steps, self._steps.stored
        try:
            steps.collecting.settle(self._on)
            self.end_ns = clock.monotonic_ns()
            self._recording, self._status, steps.open = False, status, None
            self._take_in()
        except Exception as error:
            steps.lost += 1
            steps.collecting.note("xsp", f"a step could not be stored: {type(error).__name__}: {error}")
        except BaseException as interrupt:  # the program's own affair
            steps.lost += steps.stored == stored
            steps.collecting.note("xsp", f"{type(interrupt).__name__} came while a step was stored: counted as lost")
            raise
        finally:
            self._recording, steps.open = False, None
            steps.release(self, status != UNCLOSED)

    def _take_in(self) -> None:
        if self.turn.bare:
            self._steps.blocks.ended.clear()
            return
        self._steps.collecting.stop(self._on)
        blocks.leave(self.span_id)
        self._steps.store(self)

    def span(self, name: str, batch_size: int | None) -> Span:
        """Return the step's own span, the root of its trace."""
        return clock.on_epoch(
            Span(
                span_id=self.span_id,
                parent_id=self._parent_id,
                level=Level.MODEL,
                kind=Kind.STEP.value,
                name=name,
                start_ns=self.start_ns,
                dur_ns=self.end_ns - self.start_ns,
                thread=self._thread,
                status=self._status,
                batch_size=batch_size,
                collector="session",
            ),
            self.anchor,
        )


UNCLOSED = "unclosed"
"""Status of a step that the program did not close: its end is anywhere."""
