"""The steps of a block, one at a time: their turns, their spans, and whether they were stored.

Nothing is done here between the two clock readings of a step. Before and after, collectors are switched, and raw rows
are handed to a second process (`xsp.record.writer`). The program continues while they are stored, unless another step
may soon be recorded: see `xsp.record.schedule`.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xsp import clock, identity, processes
from xsp.collector import Collector, Outline, Signal
from xsp.record import blocks
from xsp.record import budget as budgets
from xsp.record.between import Between
from xsp.record.collecting import Collecting, Listener
from xsp.record.kinds import Kinds
from xsp.record.loop import UNKNOWN, Loop, Status, Usage
from xsp.record.overhead import Account
from xsp.record.progress import ProgressDisplay
from xsp.record.quiet import Quiet
from xsp.record.schedule import NEW, Schedule, Turn
from xsp.record.storing import Storing
from xsp.schema import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.record.writer import Writer


class Steps:
    """The shared state of the steps of a block."""

    def __init__(self, name: str, schedule: Schedule, account: Account, batch_size: int | None) -> None:
        self.name = name
        self.schedule = schedule
        self.clock = clock.SteadyClock()
        self.account = account
        self.batch_size = batch_size
        self.collecting = Collecting()
        self.blocks = blocks.Blocks()
        self.progress = ProgressDisplay()
        self.outline = Outline()
        self.kinds = Kinds(self.outline.subjects.layouts)
        self.loop = Loop()
        self.usage = Usage()
        self.between = Between()
        self.open: Step | None = None
        self.thread: int | None = None
        """Native id of the thread of the last step."""

        self.step_count = self.skipped = 0
        self.lock = threading.Lock()
        """Held by the open step."""

        self.quiet = Quiet(self)
        self.storing = Storing(self)
        self.continued_ns = UNKNOWN
        """When the program continued after the last step; a reading of the monotonic clock."""

        self.after_ns = self.waited_ns = 0
        """Nanoseconds that xsp took after the last step, and that the program has waited for data since."""

        self.last_recorded = (0, 0)
        """Number of the last recorded step, and when the program continued after it; zeros before the first."""

        self._identity: identity.Identity
        self._writer: Writer

    def begin(self, run_identity: identity.Identity, writer: Writer) -> None:
        """Set the identity of the run and the process that stores its steps."""
        self._identity, self._writer, self.storing.writer = run_identity, writer, writer

    def listener(self, inner: Listener | None) -> Listener:
        """Return the listener for the collectors' signals at the program's boundaries.

        Args:
            inner: listener that gets the signals that are not handled here; None for none.
        """
        data, unusual = Signal.DATA_END, Signal.UNUSUAL

        def listen(signal: Signal, subject: Any) -> None:
            if signal is data:
                if self.thread in (None, threading.get_native_id()):  # other threads prefetch, while the steps continue
                    self.waited_ns += subject
                self.between.exclude(subject)
            elif signal is unusual:
                self.quiet.break_off()
            elif inner is not None:
                inner(signal, subject)

        return listen

    @property
    def stored(self) -> int:
        """Number of steps that are on the disk."""
        return self.storing.stored

    @property
    def lost(self) -> int:
        """Number of recorded steps that are not on the disk."""
        return self.storing.lost

    @property
    def rank(self) -> int:
        """Number of this process in its job."""
        return self._identity.rank

    # --- the lifecycle of a step ----------------------------------------------------------------------

    def skip(self) -> None:
        """Count a step that began while another one was open."""
        self.skipped += 1
        self.collecting.note("xsp", "steps that began while another one was being recorded were not recorded")

    def reject(self) -> None:
        """Drop a step that was admitted and did not begin."""
        self.skipped += 1
        self.lock.release()

    def next_turn(self, by_call: bool) -> Turn:
        """Return the turn of a step that begins.

        Args:
            by_call: whether it begins with the call that the outline ends with.
        """
        outline = self.outline
        first_word = outline[-1] if by_call and outline else None
        outline.clear()
        if first_word is not None:
            outline.append(first_word)
        kind = self.kinds.expected_kind(first_word)
        if kind is None and first_word is not None and self.kinds.all:
            kind = NEW
        return self.schedule.next(kind)

    def caller(self) -> identity.Caller | None:
        """Return the parent span of a step: the program's own, or the run's, if its trace is shared; else None."""
        run = self._identity
        return identity.current_caller() or (identity.Caller(run.trace_id, run.span_id) if run.shared else None)

    def add_to_loop(self, step: Step) -> int | None:
        """Add a step that ended to the loop, and return its number of samples; None if unknown."""
        kind, batch = self.kinds.count_step(self.outline, step.batch_size or self.batch_size)
        step.kind = kind.number
        turn, dur_ns = step.turn, step.end_ns - step.start_ns
        samples = batch.size if batch.size is not None else UNKNOWN
        is_steady = turn.is_bare and step.is_steady and not self.quiet.is_short
        self.quiet.count_step(turn.is_bare, dur_ns, step.waited_ns, kind.number, samples)
        steady = UNKNOWN if step.is_disturbed else int(is_steady)
        if step.is_disturbed or not turn.is_bare:
            self.usage.forget()
        usage = self.usage.read() if turn.is_bare else (UNKNOWN, UNKNOWN)
        self.loop.add((
            self._identity.rank, step.number, 1, kind.number, turn.rung, steady, step.start_ns, dur_ns,
            step.waited_ns, self.waited_ns, step.own_ns, samples, step.status_number, *usage,
        ))  # fmt: skip
        self.waited_ns = 0
        self.schedule.count_step(turn, kind.number, dur_ns)
        return batch.size

    def hand_over_loop(self) -> None:
        """Send the rows of the loop that were not stored yet to the storing process."""
        self._writer.add_to_loop(self.loop.take(), self.clock.anchor().offset_ns)
        self.schedule.restart_settling()

    def store(self, step: Step, samples: int | None) -> None:
        """Send the rows of a step to be stored, unless its turn keeps nothing."""
        spans, block_spans = self.collecting.rows(step.anchor), self.blocks.take(since_ns=step.since_ns)
        if not step.turn.is_kept:
            return
        rows = spans + [clock.on_epoch(span, step.anchor) for span in block_spans]
        if samples is None:
            samples = next((row.batch_size for row in rows if row.batch_size is not None), None)
        common = self._common(trace_id=step.trace_id, step=step.number, rung=int(step.turn.rung), timed=step.turn.timed)
        rows = [step.span(self.name, samples), *rows]
        self.storing.begin(step.number, rows, common, self.loop.take(), step.anchor.offset_ns)

    def store_rest(self) -> None:
        """Store the rest of the loop, and named blocks that belong to no single step, for instance around several."""
        self.hand_over_loop()
        block_spans = self.blocks.take()
        if block_spans and self.stored:
            anchor = self.clock.anchor()
            rows = [clock.on_epoch(span, anchor) for span in block_spans]
            self._writer.store(self.step_count, rows, self._common(trace_id=self._identity.trace_id), b"", 0)

    def _common(self, **values: Any) -> dict[str, Any]:
        """Return the values that rows have in common, by column."""
        return {**values, "process": self._identity.process, "rank": self._identity.rank}

    def release(self, step: Step, is_counted: bool) -> None:
        """Count the cost of a closed step, show progress, and let the next step begin.

        Args:
            step: the closed step, with its times.
            is_counted: False if the step has no meaningful end.
        """
        try:
            end_ns, display_ns = step.end_ns, 0
            if self.progress.is_due(end_ns):
                display_ns = self.progress.show(self._progress())
                self.account.spend(display_ns)
                self.schedule.restart_settling()
            if self.loop.is_full and not self.storing.is_underway:
                self.hand_over_loop()
            if is_counted:
                self.account.waited_ns += max(0, step.waited_ns)
                self.account.add(
                    step.turn, end_ns - step.start_ns, step.before_ns, end_ns + display_ns, step.is_disturbed, step.kind
                )
        finally:
            try:
                if not step.turn.is_bare:
                    self.between.begin()
                self.continued_ns = clock.monotonic_ns()
                if not step.turn.is_bare:
                    self.last_recorded = step.number, self.continued_ns
                self.after_ns = self.continued_ns - step.end_ns
                if step.turn.is_bare:
                    self.quiet.begin()
            finally:
                self.lock.release()

    def forget(self) -> None:
        """Stop recording in a forked child, which leaves it to the parent."""
        if self.open is not None:
            self.open._recording = False
        self.between.forget()
        self.progress.forget()
        self.collecting.disable()

    def _progress(self) -> dict[str, Any]:
        """Return the progress of the run, for `ProgressDisplay.show`."""
        costs = budgets.progress(self.schedule, self.account)
        return {
            "seen": self.step_count,
            "stored": self.stored,
            "lost": self.lost,
            "time_ns": time.time_ns(),
            "budget": costs,
        }


class Step:
    """One step; only here the measured program's clock is read."""

    anchor: clock.Anchor
    number: int
    span_id: str
    trace_id: str
    turn: Turn
    is_steady: bool
    """Whether it is unaffected by recording, if it runs bare."""

    is_disturbed = False
    """Whether another step is being stored when it begins."""

    awaits_work = False
    """Whether it began where the last one ended, and nothing yet shows that the program runs another step."""

    kind = 0
    """Number of its kind, known from its end on."""

    before_ns = 0
    """Nanoseconds that xsp took before its start."""

    waited_ns = UNKNOWN
    """Nanoseconds of the program between the previous step and this one; for a step that is recorded on a device
    including the wait until the device is idle."""

    own_ns = 0
    """Nanoseconds of xsp between the steps."""

    since_ns = 0
    """The end of the previous step."""

    start_ns = end_ns = 0
    """Readings of the monotonic clock."""

    def __init__(self, steps: Steps, batch_size: int | None, by_call: bool = False) -> None:
        self.batch_size = batch_size
        self.was_entered = False
        self._by_call = by_call
        self._steps = steps
        self._recording = False

    def __enter__(self) -> Step:
        entered_ns, steps = clock.monotonic_ns(), self._steps
        self.was_entered = True
        if not steps.lock.acquire(blocking=False):
            steps.skip()
            return self
        try:
            steps.between.end()
            if steps.quiet.has_begun:
                steps.quiet.end()
            self.number = steps.outline.subjects.step = steps.step_count
            steps.step_count += 1
            if steps.continued_ns >= 0:
                self.since_ns = steps.continued_ns - steps.after_ns
                self.waited_ns, self.own_ns = entered_ns - steps.continued_ns, steps.after_ns
            wait_ns = steps.storing.poll()
            entered_ns, self.own_ns = entered_ns + wait_ns, self.own_ns + wait_ns
            self.is_disturbed = steps.storing.is_underway
            self.is_steady = steps.schedule.is_steady
            # before the outline is cleared: from here on no other thread writes to it
            self._thread = steps.thread = steps.outline.thread = threading.get_native_id()
            self.turn = steps.next_turn(self._by_call)
            self._active = []
            if not self.turn.is_bare:
                entered_ns += steps.storing.wait(counts_cost=True) + self._drain()
                self._active = self._switch_on()
        except BaseException:  # an interrupt meant for the program: this step does not begin
            steps.outline.thread = None
            if hasattr(self, "span_id"):
                blocks.leave(self.span_id)
            steps.reject()
            raise
        self._recording, steps.open = True, self
        self.before_ns = clock.monotonic_ns() - entered_ns
        self.own_ns += self.before_ns
        self.start_ns = self.end_ns = clock.monotonic_ns()
        return self

    def _drain(self) -> int:
        """Wait for device work of the previous steps, and return how long that took; it counts for the program."""
        began_ns = clock.monotonic_ns()
        self._steps.collecting.settle(self._steps.collecting.collectors)
        ended_ns = clock.monotonic_ns()
        wait_ns, (last, continued_ns) = ended_ns - began_ns, self._steps.last_recorded
        if self.waited_ns != UNKNOWN:
            self.waited_ns += wait_ns
        if continued_ns:
            self._steps.account.add_burst(self.number - last - 1, ended_ns - continued_ns, wait_ns)
        return wait_ns

    def _switch_on(self) -> list[Collector]:
        """Open the step's span, and switch on the collectors of its turn."""
        caller = self._steps.caller()
        self.trace_id = caller.trace_id if caller else os.urandom(16).hex()
        self._parent_id = caller.span_id if caller else None
        self.span_id = os.urandom(8).hex()
        blocks.enter(self.span_id)
        collectors = self._steps.collecting.start(self.turn.rung, self.turn.describe)
        self.anchor = self._steps.clock.anchor()
        return collectors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording:
            self.close("ok" if kind is None else f"error:{kind.__name__}")

    def close(self, status: str) -> None:
        """Read the clock, switch everything off, store the step."""
        self.end_ns = clock.monotonic_ns()
        steps, handled_before = self._steps, self._steps.storing.handled
        try:
            if self._active:
                steps.collecting.settle(self._active)
                self.end_ns = clock.monotonic_ns()
            self._recording, self._status, steps.open = False, status, None
            self._finish()
        except BaseException as error:
            steps.storing.lost += self.turn.is_kept and steps.storing.handled == handled_before
            if not isinstance(error, Exception) or processes.is_from_signal_handler(error):  # meant for the program
                self._drop()
                steps.blocks.drop(self.since_ns)
                steps.waited_ns = 0
                steps.collecting.note("xsp", f"{type(error).__name__} came while a step was stored: counted as lost")
                raise
            steps.collecting.note("xsp", f"a step could not be stored: {type(error).__name__}: {error}")
        finally:
            self._recording, steps.open, steps.outline.thread = False, None, None
            steps.release(self, status != UNCLOSED)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self._recording

    def abandon(self) -> None:
        """Discard the step: nothing of it is kept, and it is not counted."""
        steps = self._steps
        self._recording, steps.open, steps.outline.thread = False, None, None
        try:
            self._drop()
            steps.schedule.take_back(self.turn)
            steps.step_count -= 1
        except Exception as error:
            if processes.is_from_signal_handler(error):
                raise
            steps.collecting.note("xsp", f"a step could not be left out: {type(error).__name__}: {error}")
        finally:
            steps.lock.release()

    def _drop(self) -> None:
        """Switch off the active collectors, and discard their spans, so that they do not get into another step."""
        if not self.turn.is_bare:
            self._switch_off()
            self._steps.collecting.rows(self.anchor)

    def _switch_off(self) -> None:
        self._steps.collecting.stop(self._active)
        self._active = []
        blocks.leave(self.span_id)

    @property
    def status_number(self) -> Status:
        """Its outcome as a number."""
        return Status.OK if self._status == "ok" else Status.UNCLOSED if self._status == UNCLOSED else Status.ERROR

    def _finish(self) -> None:
        steps = self._steps
        if not self.turn.is_bare:
            self._switch_off()
        samples = steps.add_to_loop(self)
        if self.turn.is_bare:
            steps.blocks.drop(self.since_ns)
            steps.collecting.forget()
        else:
            steps.store(self, samples)

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
"""Status of a step that the program did not close: its end is arbitrary."""
