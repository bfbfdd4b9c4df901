"""Stretches of steps of one kind in which xsp does next to nothing around a step, so that their time is the program's.

The work of xsp around a bare step takes some six microseconds, and changes the state of caches so that a step of ten
microseconds takes twice as long. After a step of milliseconds its own code is no longer in the caches, and it takes 0.2
to 0.3 ms. So if steps are shorter than `SHORT_NS`, stretches of them are timed as a whole: their steps are only
counted. A stretch is one row of the loop; in such programs, only these rows are steady. Of longer steps, the end of
each is noted, and each has its row.

The calls in a stretch are compared with those of its kind. A call of another model or with another shape ends the
stretch, for instance a training step after the calls of a rollout, and its step is counted as a step of its own kind.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import TracebackType
from typing import Protocol

from xsp.clock import monotonic_ns
from xsp.collector import Outline, Signal
from xsp.record.blocks import Blocks
from xsp.record.collecting import Collecting
from xsp.record.kinds import Kinds
from xsp.record.loop import UNKNOWN, Loop, Status, Usage
from xsp.record.overhead import Account
from xsp.record.schedule import SETTLE, Schedule
from xsp.record.threads import Threads
from xsp.stats import percentile

SHORT_NS = 3_000_000
STRETCH_NS = 8_000_000
FEWEST_STEPS = 5
"""Minimum number of steps in a stretch."""

SAME_KIND_STEPS = 50
"""Consecutive steps of one kind before a stretch: the next ones are then assumed to be of the same kind."""


LONG_STEPS, LONG_STRETCH_NS = 16, 400_000_000
"""Most steps of at least `SHORT_NS` in a stretch, and their time: then it is decided whether one is recorded."""

LONG_SAME_KIND_STEPS = 12
"""As `SAME_KIND_STEPS`, for steps of at least `SHORT_NS`."""


class _StretchStep:
    """The context of a step in a stretch."""

    __slots__ = ("_outline", "_quiet", "is_inside")

    def __init__(self, quiet: Quiet, outline: Outline) -> None:
        self._quiet, self._outline = quiet, outline
        self.is_inside = False

    def __enter__(self) -> None:
        self._outline.clear()
        self.is_inside = True
        self._outline.begin_step(monotonic_ns())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_inside = False
        self._quiet.on_step_end()
        self._quiet.end_if_last()


class StepsBetween(Protocol):
    """The part of `xsp.record.steps.Steps` that is used here."""

    account: Account
    batch_size: int | None
    blocks: Blocks
    collecting: Collecting
    kinds: Kinds
    loop: Loop
    outline: Outline
    schedule: Schedule
    step_count: int
    continued_ns: int
    after_ns: int
    waited_ns: int
    threads: Threads
    usage: Usage

    @property
    def rank(self) -> int:
        """Number of this process in its job."""

    def plan_after_stretch(self) -> None:
        """Choose the turn of the next step."""


class Quiet:
    """The current stretch: when it begins, and how it is counted."""

    def __init__(self, steps: StepsBetween) -> None:
        self._steps = steps
        self.remaining = 0
        """Steps that remain in the stretch."""

        self.has_passed = False
        """Whether any step ran in a stretch."""

        self.by_context = False
        """Whether the program delimits its steps by `with prof.step()`, so that they can be counted there."""

        self.by_mark = False
        """Whether the program marks the ends of its steps by a bare `prof.step()`, where they are counted."""

        self.is_gapless = False
        """Whether a step begins where the previous one ends, without a gap."""

        self.by_signal: Signal | None = None
        """The signal that ends a step and by which steps are counted, if steps are found at signals."""

        self.stretch_step = _StretchStep(self, steps.outline)
        self._thread = threading.get_ident()
        self._count = 0
        self._began_ns = self._last_ns = 0
        self._waited_ns = 0
        """Time that the program had waited for data when the last step of the stretch ended."""

        self._is_long = False
        """Whether each step of the stretch has its row."""

        self._ends: list[tuple[int, int, int]] = []
        """Of long steps: the end of each, and the waits for data and the time between steps until then."""

        self._other_start_ns: int | None = None
        """Start of the open step, if the program delimits it and its kind differs from its stretch's; else None."""

        self._kind = self._same_kind_steps = 0
        self._samples = UNKNOWN
        self._gap_shares: deque[float] = deque(maxlen=9)
        """Shares of an iteration that lie between steps, of the latest bare steps."""

        self._usual_ns = float("inf")

    @property
    def has_begun(self) -> bool:
        """Whether a stretch has begun that was not counted yet."""
        return self._count > 0

    @property
    def leaves_no_gap(self) -> bool:
        """Whether a step begins where the last one ends, so that nothing runs in between."""
        return self.is_gapless or self.by_mark

    def is_of_another_thread(self) -> bool:
        """Return whether a stretch of another thread than the current one has begun."""
        return self.remaining > 0 and threading.get_ident() != self._thread

    def hold(self) -> None:
        """Make the contexts of steps on this thread those of a stretch, until `remaining` is set to 0."""
        self._thread, self.remaining = threading.get_ident(), sys.maxsize

    @property
    def is_short(self) -> bool:
        """Whether the program's steps are now timed in stretches."""
        if not self._steps.threads.is_one:
            return False
        return self._usual_ns < SHORT_NS and self._same_kind_steps >= SAME_KIND_STEPS and self._is_counted()

    def _may_be_long(self) -> bool:
        """Return whether the next steps may be a stretch of steps that are not short."""
        is_alike = self._same_kind_steps >= LONG_SAME_KIND_STEPS and self._steps.threads.is_one
        return is_alike and SHORT_NS <= self._usual_ns < float("inf") and self._is_counted()

    def _is_counted(self) -> bool:
        if self.by_context or self.by_mark:
            return True
        if self.by_signal is None:
            return False
        return self._steps.kinds.all[self._kind].signal_counts.get(self.by_signal) == 1

    def count_step(self, is_bare: bool, dur_ns: int, before_ns: int, kind: int, samples: int) -> None:
        """Note a step outside stretches, and its values for the loop."""
        self._same_kind_steps = self._same_kind_steps + 1 if kind == self._kind else 0
        self._kind, self._samples = kind, samples
        if is_bare:  # the shortest of the latest: other programs delay some steps
            self._usual_ns = min(dur_ns, 1.05 * self._usual_ns)
            self._gap_shares.append(max(0, before_ns) / max(1, dur_ns + max(0, before_ns)))

    def begin(self) -> None:
        """Begin a stretch if it is time for one; called after a bare step."""
        if self._steps.schedule.is_steady and (self.is_short or self._may_be_long()):
            count, due = max(FEWEST_STEPS, round(STRETCH_NS / self._usual_ns)), self._steps.schedule.steps_until_due()
            self._is_long = not self.is_short
            if self._is_long:
                count = min(LONG_STEPS, int(LONG_STRETCH_NS / self._usual_ns))
                self._ends.clear()
            count = min(count, self._same_kind_steps, count if due is None else due)
            if count < FEWEST_STEPS:
                return
            self.remaining = self._count = count
            self._steps.outline.thread = threading.get_native_id()
            self._thread = threading.get_ident()
            self._steps.outline.clear()
            self._steps.outline.usual = self._steps.kinds.all[self._kind].words
            self._steps.collecting.mute(True, None if self.by_context or self.by_mark else self.by_signal)
            self._steps.usage.read()
            self._began_ns = self._last_ns = self._steps.outline.ended_ns = self._steps.continued_ns
            self._steps.outline.between_ns = self._steps.outline.begun = self._waited_ns = 0

    def on_signal(self, signal: Signal) -> None:
        """Handle a signal in a stretch: it may be the end of a step. Hot."""
        if signal is self.by_signal:
            self.remaining -= 1
            steps = self._steps
            outline, now_ns, waited_ns = steps.outline, monotonic_ns(), steps.waited_ns
            outline.clear()
            if self._is_long:
                self._ends.append((now_ns, waited_ns, outline.between_ns))
            self._last_ns = outline.ended_ns = now_ns
            self._waited_ns = waited_ns
            if not self.remaining:
                self.end()
                self._steps.plan_after_stretch()

    def on_mark(self) -> None:
        """Handle a mark of the program at the end of a step in a stretch, or of the step that broke it off."""
        if self.has_begun:
            self.remaining -= 1
            self._steps.outline.clear()
        if self.has_begun or self._other_start_ns is not None:
            self.on_step_end()
        if self.has_begun and not self.remaining:
            self.end()

    def on_step_end(self) -> None:
        """Handle the end of a step that the program delimits, in a stretch or after it was broken off."""
        now_ns = monotonic_ns()
        if self._other_start_ns is None:
            self._pass_step(now_ns)
        else:
            self._count_other(self._other_start_ns, now_ns)

    def end_if_last(self) -> None:
        """End the stretch after the last step that the program delimits, so that the next one can be planned."""
        if self.has_begun and not self.remaining and not self.by_mark:
            self.end()
            self._steps.plan_after_stretch()

    def _pass_step(self, now_ns: int) -> None:
        if self._is_long:
            self._ends.append((now_ns, self._steps.waited_ns, self._steps.outline.between_ns))
        self._last_ns = self._steps.outline.ended_ns = now_ns
        self._waited_ns = self._steps.waited_ns

    def break_off(self) -> None:
        """End the stretch with the last complete step: the program now runs a step of another kind."""
        if not self.has_begun:
            return
        if not self.stretch_step.is_inside and not self.by_mark:
            self.end()
            return
        outline = self._steps.outline
        self.remaining += not self.by_mark  # a mark counts a step at its end
        since_ns = self._last_ns if self.by_mark else monotonic_ns()
        self._other_start_ns, words, thread = since_ns, list(outline), outline.thread
        self.end()
        outline.thread = thread
        outline.clear()
        outline.extend(words)

    def _count_other(self, since_ns: int, now_ns: int) -> None:
        """Count the step that broke off a stretch as a row of the loop that is not steady: its start is unknown."""
        self._other_start_ns = None
        steps = self._steps
        kind, batch = steps.kinds.count_step(steps.outline, steps.batch_size)
        samples = UNKNOWN if batch.size is None else batch.size
        dur_ns, before_ns = now_ns - since_ns, max(0, since_ns - steps.continued_ns)
        self.count_step(False, dur_ns, before_ns, kind.number, samples)
        steps.loop.add((
            steps.rank, steps.step_count, 1, kind.number, SETTLE.rung, 0, since_ns, dur_ns, before_ns,
            steps.waited_ns, 0, samples, Status.OK, UNKNOWN, UNKNOWN, threading.get_native_id(), 0,
        ))  # fmt: skip
        steps.usage.forget()
        steps.waited_ns = 0
        steps.step_count += 1
        steps.account.add_bare_stretch(1, dur_ns, before_ns)
        steps.schedule.count_bare(kind.number, 1, dur_ns)
        steps.continued_ns, steps.after_ns = now_ns, 0
        steps.outline.clear()
        steps.outline.thread = None

    def end(self) -> None:
        """Count a stretch that ended or was broken off, up to the end of its last step: a row, or one for each step."""
        count, self._count, self.remaining = self._count - self.remaining, 0, 0
        steps = self._steps
        thread = steps.outline.thread or UNKNOWN
        steps.collecting.mute(False)
        before_ns = self._before_ns(count)
        steps.outline.usual = steps.outline.thread = steps.outline.ended_ns = None
        steps.collecting.forget()
        steps.blocks.drop(self._began_ns)
        steps.outline.clear()
        if not count:
            return
        self.has_passed = True
        step_ns, usage = round((self._last_ns - self._began_ns) / count), steps.usage.read(count)
        times = [(count, self._began_ns, step_ns - before_ns, before_ns, self._waited_ns // count)]
        if self._is_long:
            times = self._times_of_each(count, before_ns / step_ns if step_ns else 0.0)
        number = steps.step_count
        for row_steps, start_ns, dur_ns, row_before_ns, data_ns in times:
            steps.loop.add((
                steps.rank, number, row_steps, self._kind, SETTLE.rung, 1, start_ns, dur_ns, row_before_ns, data_ns, 0,
                self._samples, Status.OK, *usage, thread, 0,
            ))  # fmt: skip
            number += row_steps
        steps.waited_ns -= self._waited_ns
        self._same_kind_steps += count
        steps.step_count += count
        steps.kinds.all[self._kind].step_count += count
        steps.account.add_bare_stretch(count, (step_ns - before_ns) * count, before_ns * count)
        steps.schedule.count_bare(self._kind, count, step_ns * count)
        steps.continued_ns, steps.after_ns = self._last_ns, 0
        steps.threads.go_on(thread, self._last_ns)

    def _times_of_each(self, count: int, share: float) -> list[tuple[int, int, int, int, int]]:
        """Return for each step of the stretch 1, its start, its duration, the time before it, and its waits for data.

        Args:
            count: number of the steps.
            share: share of an iteration before its step, where it is not known when each step began.
        """
        times = []
        are_begins_known = not self.by_mark and not self.is_gapless and self._steps.outline.begun >= count
        last_ns, last_waited_ns, last_between_ns = self._began_ns, 0, 0
        for end_ns, waited_ns, between_ns in self._ends[:count]:
            iteration_ns = end_ns - last_ns
            before_ns = between_ns - last_between_ns if are_begins_known else round(share * iteration_ns)
            before_ns = min(max(0, before_ns), iteration_ns)
            times.append((1, last_ns + before_ns, iteration_ns - before_ns, before_ns, waited_ns - last_waited_ns))
            last_ns, last_waited_ns, last_between_ns = end_ns, waited_ns, between_ns
        return times

    def _before_ns(self, count: int) -> int:
        """Return the time before each step of the stretch, including waits for data; 0 between marks.

        If no call shows when the steps began, it is the usual share of the time, and at least the wait for data.
        """
        if self.by_mark or self.is_gapless or not count:
            return 0
        outline = self._steps.outline
        begun, between_ns = outline.begun, outline.between_ns
        if outline.began_ns > self._last_ns:  # it began after the stretch
            begun, between_ns = begun - 1, between_ns - (outline.began_ns - self._last_ns)
        if begun == count:
            return round(between_ns / count)
        step_ns = (self._last_ns - self._began_ns) / count
        return round(min(step_ns, max(percentile(list(self._gap_shares), 0.5) * step_ns, self._waited_ns / count)))
