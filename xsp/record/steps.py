"""The steps of a block: their turns, the loop, and whether they were stored.

One step at a time has a turn, and may be recorded; steps of other threads meanwhile run beside it. Raw rows are handed
to a second process (`xsp.record.writer`) between steps. The program continues while they are stored, unless another
step may soon be recorded: see `xsp.record.schedule`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from xsp import clock, identity
from xsp.collector import Listener, Outline, Signal
from xsp.record import beside, blocks
from xsp.record import budget as budgets
from xsp.record.beside import EndedStep
from xsp.record.between import Between
from xsp.record.collecting import Collecting, without_collections
from xsp.record.kinds import Kinds
from xsp.record.loop import UNKNOWN, Loop, Status, Usage
from xsp.record.overhead import Account
from xsp.record.phases import PhaseTiming
from xsp.record.progress import ProgressDisplay
from xsp.record.quiet import Quiet
from xsp.record.schedule import NEW, SETTLE, Schedule, Turn
from xsp.record.storing import Storing
from xsp.record.threads import Threads
from xsp.record.window import Planned, Window, can_open

if TYPE_CHECKING:
    from xsp.record.step import Step
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
        self.timing = PhaseTiming(self.outline)
        self.kinds = Kinds(self.outline.subjects.layouts)
        self.loop = Loop()
        self.usage = Usage()
        self.between = Between()
        self.open: Step | None = None
        self.threads = Threads()
        self.beside: deque[EndedStep] = deque()
        """Steps that ended beside others, until the thread that has the turn adds them to the loop."""

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

        self.planned: Planned | None = None
        """The turn of the next step, if it was chosen at the end of the last one."""

        self.window: Window | None = None
        """The collectors of the next step, if they are on already."""

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

        def listen(signal: Signal, subject: Any) -> bool | None:
            if signal is data:
                thread = threading.get_native_id()
                if self.thread in (None, thread):
                    self.waited_ns += subject
                else:  # it runs steps beside others, or prefetches while the steps continue
                    self.threads.wait(thread, subject)
                self.between.exclude(subject)
            elif signal is unusual:
                self.quiet.break_off()
            else:
                was_traced = self.between.thread is not None and self.between.hold()
                try:
                    is_apart = inner(signal, subject) if inner is not None else None
                finally:
                    if was_traced or self.between.thread is not None:
                        self.between.go_on(was_traced)
                if not is_apart:
                    self.between.on_signal(signal)
                return is_apart
            return None

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
        """Count a step that began inside another one, on the same thread."""
        self.skipped += 1
        self.collecting.note("xsp", "steps that began inside another step were not recorded")

    @property
    def is_recording(self) -> bool:
        """Whether a step is being recorded now."""
        step = self.open
        return self.window is not None or (step is not None and not step.turn.is_bare)

    def reject(self) -> None:
        """Drop a step that was admitted and did not begin."""
        self.skipped += 1
        self.lock.release()

    def next_turn(self, by_call: bool) -> Turn:
        """Return the turn of a step that begins.

        Args:
            by_call: whether it begins with the call that this thread began last.
        """
        first_word = self.outline.begin(threading.get_native_id(), by_call)
        kind = self.kinds.expected_kind(first_word)
        if kind is None and first_word is not None and self.kinds.all:
            kind = NEW
        planned, self.planned = self.planned, None
        if planned is None:
            return self.schedule.next(kind)
        if planned.turn.is_bare:
            if first_word is None or kind == planned.kind:
                return planned.turn
            self.schedule.undo_bare()
            return self.schedule.next(kind)
        if kind == NEW:  # slower than the next of its kind
            self.planned = planned
            if self.window is not None:
                self.window.drop()
            else:
                self.schedule.take_back(planned.turn)
            self.planned = None
            return SETTLE
        return planned.turn

    def plan_after_stretch(self) -> None:
        """Choose the turn of the step after a stretch, which held no lock, at its end."""
        if self.lock.acquire(blocking=False):
            try:
                if not self._seek():
                    self._plan()
            finally:
                self.lock.release()

    def _seek(self) -> bool:
        """Trace the gap that begins, after an unrecorded step, if slow gaps are sought; return whether it is traced."""
        if not self.threads.is_one or self.quiet.leaves_no_gap or not self.between.slow.begin_seeking(self.step_count):
            return False
        self.between.begin(is_sought=True)
        return self.between.is_sought

    def _plan(self) -> None:
        """Choose the turn of the next step, at the end of the last one, and open its window if it will be recorded."""
        if self.quiet.has_begun or self.quiet.leaves_no_gap or not self.threads.is_one or self.thread is None:
            return
        kind = self.kinds.expected_kind()
        if kind is None:  # what follows is unknown until it begins
            return
        since_ns, began_ns, wait_ns = self.continued_ns - self.after_ns, clock.monotonic_ns(), 0
        turn = self.schedule.next(kind)
        self.planned = Planned(turn, kind)
        if can_open(self.collecting, turn):
            self.window = Window(self, turn)
            wait_ns = self.window.wait_ns
        self.continued_ns = clock.monotonic_ns()
        self.after_ns = self.continued_ns - since_ns - wait_ns
        self.threads.go_on(self.thread, self.continued_ns)
        if self.window is None:  # else it is a cost of the recorded step
            self.account.spend(self.continued_ns - began_ns)

    def drop_window(self) -> None:
        """Close the window of a step that will not come."""
        if self.window is not None:
            self.window.drop()
        self.planned = None

    def caller(self) -> identity.Caller | None:
        """Return the parent span of a step: the program's own, or the run's, if its trace is shared; else None."""
        run = self._identity
        return identity.current_caller() or (identity.Caller(run.trace_id, run.span_id) if run.shared else None)

    def add_to_loop(self, step: Step) -> int | None:
        """Add a step that ended to the loop, and return its number of samples; None if unknown."""
        kind, batch = self.kinds.count_step(self.outline, step.batch_size or self.batch_size)
        step.kind = kind.number
        if step.status_number is Status.OK:
            self.between.count_step(kind.number)
        turn, dur_ns = step.turn, step.end_ns - step.start_ns
        samples = batch.size if batch.size is not None else UNKNOWN
        is_steady = turn.is_bare and step.is_steady and not self.quiet.is_short
        self.quiet.count_step(turn.is_bare, dur_ns, step.waited_ns, kind, samples)
        is_disturbed = step.is_disturbed or step.is_after_search
        steady = UNKNOWN if is_disturbed else int(is_steady)
        if is_disturbed or not turn.is_bare:
            self.usage.forget()
        usage = self.usage.read() if turn.is_bare else (UNKNOWN, UNKNOWN)
        self.loop.add((
            self._identity.rank, step.number, 1, kind.number, turn.rung, steady, step.start_ns, dur_ns,
            step.waited_ns, self.waited_ns, step.own_ns, samples, step.status_number, *usage, step.thread,
            step.beside_ns, *step.phases,
        ))  # fmt: skip
        self.waited_ns = 0
        self.schedule.count_step(turn, kind.number, dur_ns)
        was_traced = step.number == self.last_recorded[0] + 1  # and so its gap took longer
        if not was_traced and not self.quiet.is_short:  # tracing would multiply the time of a short one
            self.between.slow.add(step.number, step.gap_ns, dur_ns)
        beside.add_to_loop(self)
        return batch.size

    def hand_over_loop(self) -> None:
        """Send the rows of the loop that were not stored yet to the storing process."""
        self._writer.add_to_loop(self.loop.take(), self.clock.anchor().offset_ns)
        self.schedule.restart_settling()

    @without_collections()
    def store(self, step: Step, samples: int | None) -> None:
        """Send the rows of a step to be stored, unless its turn keeps nothing."""
        spans, block_spans = self.collecting.rows(step.anchor), self.blocks.take(since_ns=step.since_ns)
        if not step.turn.is_kept:
            return
        rows = spans + [clock.on_epoch(span, step.anchor) for span in block_spans]
        if samples is None:
            samples = next((row.batch_size for row in rows if row.batch_size is not None), None)
        common = self._common(trace_id=step.trace_id, step=step.number, rung=int(step.turn.rung), timed=step.turn.timed)
        rows = [*step.spans(self.name, samples), *rows]
        self.storing.begin(step.number, rows, common, self.loop.take(), step.anchor.offset_ns)

    def store_rest(self) -> None:
        """Store the rest of the loop, and named blocks that belong to no single step, for instance around several."""
        beside.add_to_loop(self)
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
                costs = budgets.progress(self.schedule, self.account)
                display_ns = self.progress.show(
                    {
                        "seen": self.step_count,
                        "stored": self.stored,
                        "lost": self.lost,
                        "time_ns": time.time_ns(),
                        "budget": costs,
                    }
                )
                self.account.spend(display_ns)
                self.schedule.restart_settling()
            if self.loop.is_full and not self.storing.is_underway:
                self.hand_over_loop()
            if is_counted:
                self.account.waited_ns += max(0, step.waited_ns)
                self.account.add(
                    step.turn, end_ns - step.start_ns, step.before_ns + step.opening_ns, end_ns + display_ns,
                    step.is_disturbed, step.kind, step.gap_ns, step.has_window,
                )  # fmt: skip
        finally:
            try:
                is_sought = step.turn.is_bare and self._seek()
                if not step.turn.is_bare:
                    self.between.begin()
                self.continued_ns = clock.monotonic_ns()
                if not step.turn.is_bare:
                    self.last_recorded = step.number, self.continued_ns
                self.after_ns = self.continued_ns - step.end_ns
                self.threads.go_on(step.thread, self.continued_ns)
                if step.turn.is_bare and not is_sought:
                    self.quiet.begin()
                if is_counted and step.turn.is_bare and not is_sought:  # else lines are traced until the next step
                    self._plan()
            finally:
                self.lock.release()

    def forget(self) -> None:
        """Stop recording in a forked child, which leaves it to the parent."""
        if self.open is not None:
            self.open._recording = False
        self.threads = Threads()  # another thread may have held its lock
        self.between.forget()
        self.progress.forget()
        self.collecting.disable()
