"""One step: its two clock readings, and what is done just before and after them.

Nothing is done here between the two readings. Before and after, collectors are switched, and the rows are handed over.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from xsp import clock, processes
from xsp.collector import Collector
from xsp.record import blocks
from xsp.record.beside import BesideStep
from xsp.record.loop import UNKNOWN, Status
from xsp.record.phases import UNTIMED, of_step
from xsp.record.schedule import Turn
from xsp.record.window import Window
from xsp.schema import Kind, Level, Span

if TYPE_CHECKING:
    from xsp.record.steps import Steps

UNCLOSED = "unclosed"
"""Status of a step that the program did not close: its end is arbitrary."""


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

    is_after_search = False
    """Whether the gap before it was traced although the step before was not recorded."""

    awaits_work = False
    """Whether it began where the last one ended, and nothing yet shows that the program runs another step."""

    phases = UNTIMED
    """The times of its phases, if it was not recorded."""

    kind = 0
    """Number of its kind, known from its end on."""

    before_ns = 0
    """Nanoseconds that xsp took before its start."""

    waited_ns = UNKNOWN
    """Nanoseconds of the program between the previous step and this one; for a step that is recorded on a device
    including the wait until the device is idle."""

    own_ns = 0
    """Nanoseconds of xsp between the steps."""

    gap_ns = 0
    """Nanoseconds of the program between the steps, without waits for data and devices."""

    beside_ns = 0
    """Nanoseconds since the last step of its thread in which others ran steps, while steps of threads overlap."""

    thread = UNKNOWN
    """Native id of the thread that began it."""

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
        self._beside: BesideStep | None = None
        self._window: Window | None = None
        """The window that was open when it began."""

    def __enter__(self) -> Step:
        self._entered_ns = entered_ns = clock.monotonic_ns()
        steps = self._steps
        self.was_entered = True
        if steps.quiet.is_of_another_thread():
            self._beside = BesideStep(steps, self.batch_size, self._by_call, entered_ns)
            return self
        if not steps.lock.acquire(blocking=False):
            if steps.threads.is_open(threading.get_native_id()):
                steps.skip()
            else:
                self._beside = BesideStep(steps, self.batch_size, self._by_call, entered_ns)
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
            thread = self.thread = threading.get_native_id()
            gap = steps.threads.begin(thread, entered_ns)
            if gap is not None:
                self.waited_ns, self.beside_ns = gap
            self.gap_ns = max(0, self.waited_ns - steps.waited_ns)
            wait_ns = steps.storing.poll()
            entered_ns, self.own_ns = entered_ns + wait_ns, self.own_ns + wait_ns
            self.is_disturbed = steps.storing.is_underway
            self.is_after_search = steps.between.is_sought
            self.is_steady = steps.schedule.is_steady
            # before the outline is cleared: from here on no other thread writes to it
            steps.thread = steps.outline.thread = thread
            self.turn = steps.next_turn(self._by_call)
            if self.turn.is_bare:
                steps.timing.begin(steps.quiet.usual_ns)
            self._active = []
            self._window, steps.window = steps.window, None
            if not self.turn.is_bare:
                if self._window is None:
                    wait_ns = steps.storing.await_opening()
                    entered_ns, self.own_ns = entered_ns + wait_ns, self.own_ns + wait_ns
                    entered_ns += steps.storing.wait(counts_cost=True) + self._drain()
                self._active = self._switch_on()
            elif not steps.quiet.is_short:  # tracing would multiply the time of a short step
                steps.between.begin_step()
        except BaseException:  # an interrupt meant for the program: this step does not begin
            steps.between.drop_step()
            steps.threads.end(self.thread, clock.monotonic_ns())
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
        self._count_drain(ended_ns - began_ns, ended_ns)
        return ended_ns - began_ns

    def _count_drain(self, wait_ns: int, ended_ns: int) -> None:
        last, continued_ns = self._steps.last_recorded
        if self.waited_ns != UNKNOWN:
            self.waited_ns += wait_ns
        if continued_ns:
            self._steps.account.add_burst(self.number - last - 1, ended_ns - continued_ns, wait_ns)

    def _switch_on(self) -> list[Collector]:
        """Open the step's span, and switch on the collectors of its turn."""
        caller = self._steps.caller()
        self.trace_id = caller.trace_id if caller else os.urandom(16).hex()
        self._parent_id = caller.span_id if caller else None
        self.span_id = os.urandom(8).hex()
        blocks.enter(self.span_id)
        if self._window is not None:
            self._count_drain(self._window.wait_ns, self._window.idle_ns)
            self.anchor = self._window.anchor
            return self._window.adopt()
        collectors = self._steps.collecting.start(self.turn.rung, self.turn.describe)
        self.anchor = self._steps.clock.anchor()
        return collectors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording:
            self.close("ok" if kind is None else f"error:{kind.__name__}")
        elif self._beside is not None:
            step, self._beside = self._beside, None
            step.close(is_ok=kind is None)

    def close(self, status: str) -> None:
        """Read the clock, switch everything off, store the step."""
        self.end_ns = clock.monotonic_ns()
        steps, handled_before = self._steps, self._steps.storing.handled
        steps.between.end_step()
        self.phases = of_step(steps.timing.end(), self.start_ns, self.end_ns)
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
            steps.between.drop_step()
            steps.threads.end(self.thread, self.end_ns)
            self._recording, steps.open, steps.outline.thread = False, None, None
            steps.release(self, status != UNCLOSED)

    @property
    def has_window(self) -> bool:
        """Whether collectors were on before it began."""
        return self._window is not None

    @property
    def opening_ns(self) -> int:
        """Nanoseconds that xsp took to switch them on."""
        return self._window.opening_ns if self._window is not None else 0

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self._recording or self._beside is not None

    def abandon(self) -> None:
        """Discard the step: nothing of it is kept, and it is not counted."""
        steps = self._steps
        if self._beside is not None:
            step, self._beside = self._beside, None
            step.abandon()
            return
        steps.timing.end()
        steps.between.drop_step()
        steps.threads.end(self.thread, clock.monotonic_ns())
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

    def spans(self, name: str, batch_size: int | None) -> list[Span]:
        """Return its own span, and that of the time before it if its window was open then."""
        # The step's own span, the root of its trace.
        own = clock.on_epoch(
            Span(
                span_id=self.span_id,
                parent_id=self._parent_id,
                level=Level.MODEL,
                kind=Kind.STEP.value,
                name=name,
                start_ns=self.start_ns,
                dur_ns=self.end_ns - self.start_ns,
                thread=self.thread,
                status=self._status,
                batch_size=batch_size,
                collector="session",
            ),
            self.anchor,
        )
        return [own] if self._window is None else [own, self._window.span(self.thread, self._entered_ns)]
