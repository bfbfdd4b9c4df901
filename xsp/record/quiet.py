"""Stretches of steps in which xsp does next to nothing around a step, so that their time is the program's.

The work of xsp around a bare step takes about 0.1 ms, and changes the state of caches so that a step of ten
microseconds takes twice as long, and one of milliseconds a tenth longer. So in a stretch only the end of each step is
noted, with its calls; their rows of the loop are made when it ends. Of steps shorter than `SHORT_NS`, a row is the mean
of several; in programs of such steps, only these rows are steady.

A stretch may contain steps of several kinds, if each ends with the only signal of its kind in it, or where the program
marks its end. A call that no such kind makes ends the stretch, for instance of training after the calls of a rollout,
and its step is counted by itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import groupby, pairwise
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias

from xsp.clock import monotonic_ns
from xsp.collector import Outline, Signal
from xsp.record import phases
from xsp.record.between import Between
from xsp.record.blocks import Blocks
from xsp.record.collecting import Collecting
from xsp.record.kinds import Kinds, StepKind
from xsp.record.loop import UNKNOWN, Loop, Status, Usage
from xsp.record.overhead import Account
from xsp.record.phases import UNTIMED, PhaseTiming, StepPhases
from xsp.record.schedule import SETTLE, Schedule
from xsp.record.threads import Threads
from xsp.stats import percentile

SHORT_NS = 3_000_000
ROW_NS = 8_000_000
"""Least time of the short steps whose mean is a row."""

FEWEST_STEPS = 5
"""Minimum number of steps in a stretch, and in a row that is a mean."""

MOST_STEPS, MOST_NS = 1024, 400_000_000
"""Most steps in a stretch, and their time."""

UNKNOWN_STEPS = 16
"""Most steps in a stretch if it is not known when the next one should be recorded; of short steps, those of a row."""

TIMED_STEP = 1
"""The step of a stretch, from 0, in which hooks are timed: the first one runs just after other work of xsp."""

COUNTED_STEPS, LONG_COUNTED_STEPS = 50, 12
"""Consecutive steps that end as in a stretch before one begins: short ones, and those of at least `SHORT_NS`."""


_End: TypeAlias = "tuple[int, int, int, tuple[tuple[Any, ...], ...], list[Any] | None]"
"""The end of a step, the waits for data and the time between steps since the stretch began, its words, and the times of
its phases."""


class _StretchStep:
    """The context of a step in a stretch."""

    __slots__ = ("_outline", "_quiet", "is_inside")

    def __init__(self, quiet: Quiet, outline: Outline) -> None:
        self._quiet, self._outline = quiet, outline
        self.is_inside = False

    def __enter__(self) -> None:
        hook_times = self._outline.hook_times
        if hook_times is not None:
            hook_times.append(-monotonic_ns())
        self._outline.clear()
        self._quiet.drop_times()
        self.is_inside = True
        self._outline.begin_step(monotonic_ns())
        if hook_times is not None:
            hook_times.append(monotonic_ns())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hook_times = self._outline.hook_times
        if hook_times is not None:
            hook_times.append(-monotonic_ns())
        self.is_inside = False
        self._quiet.on_step_end()
        self._quiet.end_if_last()
        if hook_times is not None:
            hook_times.append(monotonic_ns())


class StepsBetween(Protocol):
    """The part of `xsp.record.steps.Steps` that is used here."""

    account: Account
    batch_size: int | None
    blocks: Blocks
    collecting: Collecting
    kinds: Kinds
    between: Between
    loop: Loop
    outline: Outline
    schedule: Schedule
    step_count: int
    continued_ns: int
    after_ns: int
    waited_ns: int
    threads: Threads
    usage: Usage
    timing: PhaseTiming

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

        self.by_context = False
        """Whether the program delimits its steps by `with prof.step()`, so that they can be counted there."""

        self.by_mark = False
        """Whether the program marks the ends of its steps by a bare `prof.step()`, where they are counted."""

        self.passed_calls = 0
        """Steps that passed in stretches and were calls, which the detection of steps has not seen begin."""

        self.is_gapless = False
        """Whether a step begins where the previous one ends, without a gap."""

        self.by_signal: Signal | None = None
        """The signal that ends a step and by which steps are counted, if steps are found at signals."""

        self.stretch_step = _StretchStep(self, steps.outline)
        self._thread = threading.get_ident()
        self.has_begun = False
        """Whether a stretch has begun that was not counted yet."""

        self._began_ns = self._until_ns = 0
        self._ends: list[_End] = []
        """The ends of its steps."""

        self._hook_times: list[int] = []
        """`Outline.hook_times` of step `TIMED_STEP`."""

        self._other_start_ns: int | None = None
        """Start of the open step, if the program delimits it and it broke the stretch off; else None."""

        self._kind = self._counted_steps = 0
        self._samples = UNKNOWN
        self._words: tuple[tuple[tuple[int, int], ...], Set[tuple[Any, ...]]] = ((), frozenset())
        """Numbers of kinds with their numbers of words, and all of these words."""

        self._gap_shares: deque[float] = deque(maxlen=9)
        """Shares of an iteration that lie between steps, of the latest bare steps."""

        self.usual_ns = float("inf")
        """Duration of the shortest of the latest bare steps; infinite before the first."""

    @property
    def leaves_no_gap(self) -> bool:
        """Whether a step begins where the last one ends, so that nothing runs in between."""
        return self.is_gapless or self.by_mark

    def is_of_another_thread(self) -> bool:
        """Return whether a stretch of another thread than the current one has begun."""
        return self.remaining > 0 and threading.get_ident() != self._thread

    @property
    def is_short(self) -> bool:
        """Whether the program's steps are now timed in stretches, several in a row."""
        return self.usual_ns < SHORT_NS and self._counted_steps >= COUNTED_STEPS and self._steps.threads.is_one

    def _may_begin(self) -> bool:
        """Return whether the next steps may be a stretch."""
        least = COUNTED_STEPS if self.usual_ns < SHORT_NS else LONG_COUNTED_STEPS
        return self._counted_steps >= least and self.usual_ns < float("inf") and self._steps.threads.is_one

    def _is_counted(self, kind: StepKind) -> bool:
        """Return whether steps of a kind can be counted in a stretch."""
        if self.by_context or self.by_mark:
            return True
        signal = self.by_signal
        if signal is None or kind.ended_by is not signal or kind.signal_counts.get(signal) != 1:
            return False
        # calls of several modules may turn out to be parts of one step, see `xsp.record.sequences`
        return signal is not Signal.CALL_END or kind.modules == self._steps.kinds.all[self._kind].modules

    def count_step(self, is_bare: bool, dur_ns: int, before_ns: int, kind: StepKind, samples: int) -> None:
        """Note a step outside stretches, and its values for the loop."""
        kind.ended_by = self.by_signal
        self._counted_steps = self._counted_steps + 1 if self._is_counted(kind) else 0
        self._kind, self._samples = kind.number, samples
        if is_bare:  # the shortest of the latest: other programs delay some steps
            self.usual_ns = min(dur_ns, 1.05 * self.usual_ns)
            self._gap_shares.append(max(0, before_ns) / max(1, dur_ns + max(0, before_ns)))

    def begin(self) -> None:
        """Begin a stretch if it is time for one; called after a bare step."""
        steps = self._steps
        if not (steps.schedule.is_steady and self._may_begin()):
            return
        count, most_ns = self._length()
        if count < FEWEST_STEPS:
            return
        self.has_begun, self.remaining = True, count
        self._thread = threading.get_ident()
        self._ends.clear()
        self._hook_times = []
        outline = steps.outline
        outline.thread = threading.get_native_id()
        outline.clear()
        outline.usual = self._usual_words()
        steps.collecting.mute(True, None if self.by_context or self.by_mark else self.by_signal)
        steps.usage.read()
        self._began_ns = outline.ended_ns = steps.continued_ns
        self._until_ns = self._began_ns + int(most_ns)
        outline.between_ns = outline.begun = 0
        steps.timing.begin(self.usual_ns)

    def _length(self) -> tuple[int, float]:
        """Return the most steps of a stretch that begins now, and the most nanoseconds of the program in it."""
        due_ns, due_steps = self._steps.schedule.ns_until_due(), self._steps.schedule.steps_until_due()
        if due_ns is not None:
            most_ns, count = min(MOST_NS, due_ns), MOST_STEPS
        elif self.usual_ns >= SHORT_NS:
            most_ns, count = MOST_NS, UNKNOWN_STEPS
        else:
            most_ns, count = max(ROW_NS, FEWEST_STEPS * self.usual_ns), MOST_STEPS
        sought_steps = self._steps.between.slow.steps_until_due(self._steps.step_count)
        known = [steps for steps in (due_steps, sought_steps) if steps is not None]
        return min(count, round(most_ns / self.usual_ns), self._counted_steps, *known), most_ns

    def _usual_words(self) -> Set[tuple[Any, ...]]:
        """Return the words of all kinds whose steps can be counted in a stretch."""
        counted = [kind for kind in self._steps.kinds.all if self._is_counted(kind)]
        if len(counted) == 1:
            return counted[0].words
        sizes = tuple((kind.number, len(kind.words)) for kind in counted)
        if sizes != self._words[0]:
            self._words = sizes, frozenset().union(*(kind.words for kind in counted))
        return self._words[1]

    def on_signal(self, signal: Signal) -> None:
        """Handle a signal in a stretch: it may be the end of a step. Hot."""
        if signal is self.by_signal:
            outline, now_ns = self._steps.outline, monotonic_ns()
            self.remaining -= 1
            times = self._steps.timing.take()
            self._ends.append((now_ns, self._steps.waited_ns, outline.between_ns, tuple(outline), times))
            outline.clear()
            outline.ended_ns = now_ns
            outline.hook_times = self._hook_times if len(self._ends) == TIMED_STEP else None
            if not self.remaining or now_ns > self._until_ns:
                self.end()
                self._steps.plan_after_stretch()

    def drop_times(self) -> None:
        """Forget what was noted of phases since the last step ended: the program delimits its steps itself. Hot."""
        self._steps.timing.take()

    def on_mark(self) -> None:
        """Handle a mark of the program at the end of a step in a stretch, or of the step that broke it off."""
        if self.has_begun:
            self.remaining -= 1
        if self.has_begun or self._other_start_ns is not None:
            self.on_step_end()
        if self.has_begun and not self.remaining:
            self.end()
        elif self.has_begun and self._ends and self._ends[-1][0] > self._until_ns:
            self.remaining = 1  # the next mark is the last one

    def on_step_end(self) -> None:
        """Handle the end of a step that the program delimits, in a stretch or after it was broken off."""
        now_ns = monotonic_ns()
        if self._other_start_ns is None:
            outline = self._steps.outline
            times = self._steps.timing.take()
            self._ends.append((now_ns, self._steps.waited_ns, outline.between_ns, tuple(outline), times))
            outline.clear()
            outline.ended_ns = now_ns
            outline.hook_times = self._hook_times if len(self._ends) == TIMED_STEP else None
        else:
            self._count_other(self._other_start_ns, now_ns)

    def end_if_last(self) -> None:
        """End the stretch after the last step that the program delimits, so that the next one can be planned."""
        if not self.has_begun or self.by_mark:
            return
        if not self.remaining or (self._ends and self._ends[-1][0] > self._until_ns):
            self.end()
            self._steps.plan_after_stretch()

    def break_off(self) -> None:
        """End the stretch with the last complete step: the program now runs a step of another kind."""
        if not self.has_begun:
            return
        if not self.stretch_step.is_inside and not self.by_mark:
            self.end()
            return
        outline = self._steps.outline
        if self.by_mark:
            self._other_start_ns = self._ends[-1][0] if self._ends else self._began_ns
        else:
            self._other_start_ns = monotonic_ns()
        words, thread = list(outline), outline.thread
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
        self.count_step(False, dur_ns, before_ns, kind, samples)
        steps.loop.add((
            steps.rank, steps.step_count, 1, kind.number, SETTLE.rung, 0, since_ns, dur_ns, before_ns,
            steps.waited_ns, 0, samples, Status.OK, UNKNOWN, UNKNOWN, threading.get_native_id(), 0, *UNTIMED,
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
        """Count a stretch that ended or was broken off, up to the end of its last step."""
        self.has_begun, self.remaining = False, 0
        steps, outline, count = self._steps, self._steps.outline, len(self._ends)
        thread = outline.thread or UNKNOWN
        steps.timing.end()
        steps.collecting.mute(False)
        are_begins_known = self._are_begins_known(count)
        outline.usual = outline.thread = outline.ended_ns = outline.hook_times = None
        steps.collecting.forget()
        steps.blocks.drop(self._began_ns)
        outline.clear()
        if not count:
            return
        self.passed_calls += count if self.by_signal is Signal.CALL_END else 0
        usage = steps.usage.read(count)
        passed = self._passed(are_begins_known)
        if are_begins_known and self.usual_ns >= SHORT_NS:  # else a gap is a usual share, or too short to be traced
            for each in passed:
                steps.between.slow.add(each.number, each.before_ns - each.data_ns, each.dur_ns)
        self._count_hooks(passed)
        dur_ns = before_ns = 0
        for row in rows_of(passed):
            steps.loop.add((
                steps.rank, row.number, row.steps, row.kind, SETTLE.rung, 1, row.start_ns, row.dur_ns, row.before_ns,
                row.data_ns, 0, row.samples, Status.OK, *usage, thread, 0, *row.phases,
            ))  # fmt: skip
            dur_ns += row.dur_ns * row.steps
            before_ns += row.before_ns * row.steps
            steps.schedule.count_bare(row.kind, row.steps, (row.dur_ns + row.before_ns) * row.steps)
        last_ns, waited_ns, *_ = self._ends[-1]
        steps.waited_ns -= waited_ns
        self._counted_steps += count
        steps.step_count += count
        steps.account.add_bare_stretch(count, dur_ns, before_ns)
        steps.continued_ns, steps.after_ns = last_ns, 0
        steps.threads.go_on(thread, last_ns)

    def _count_hooks(self, passed: Sequence[Passed]) -> None:
        """Count what hooks took in the step in which they were timed, unless one of them did not get to its end."""
        took_ns, place = sum(self._hook_times), self._steps.step_count + TIMED_STEP
        timed = next((each for each in passed if each.number <= place < each.number + each.steps), None)
        if timed is not None and len(self._hook_times) % 2 == 0 and 0 < took_ns <= timed.dur_ns + timed.before_ns:
            self._steps.kinds.all[timed.kind].hooks_ns.append(took_ns)

    def _passed(self, are_begins_known: bool) -> list[Passed]:
        """Return the steps of the stretch, and count them in their kinds; means where that takes no look at each."""
        kinds, ends, share = self._steps.kinds, self._ends, 0.0
        if not are_begins_known and self._gap_shares:
            share = percentile(list(self._gap_shares), 0.5)
        count, (*_, words, times) = len(ends), ends[-1]
        if times is None and all(each[3] == words for each in ends):
            kind = kinds.count_equal_steps(words, count)
            dur_ns = self._mean_of(0, count, kind, are_begins_known, share).dur_ns
            is_short = count >= FEWEST_STEPS and dur_ns < SHORT_NS
            bounds = _bounds(count, dur_ns * count) if is_short else range(count + 1)
            return [self._mean_of(first, end, kind, are_begins_known, share) for first, end in pairwise(bounds)]
        return [
            self._mean_of(place, place + 1, kinds.count_step(each[3]).kind, are_begins_known, share)
            for place, each in enumerate(ends)
        ]

    def _mean_of(self, first: int, end: int, kind: StepKind, is_begin_known: bool, gap_share: float) -> Passed:
        """Return the mean of steps of the stretch that are of a kind, those at `first` to before `end`.

        Args:
            first: place of the first one.
            end: place after the last one.
            kind: their kind.
            is_begin_known: whether a call showed when each began.
            gap_share: else, the usual share of an iteration that lies between steps.
        """
        count = end - first
        last_ns, last_waited_ns, last_between_ns, *_ = self._ends[first - 1] if first else (self._began_ns, 0, 0)
        end_ns, waited_ns, between_ns, _, times = self._ends[end - 1]
        iteration_ns, data_ns = end_ns - last_ns, waited_ns - last_waited_ns
        if is_begin_known:
            before_ns = between_ns - last_between_ns
        else:
            before_ns = 0 if self.leaves_no_gap else max(round(gap_share * iteration_ns), data_ns)
        before_ns = min(max(0, before_ns), iteration_ns)
        start_ns = last_ns + before_ns // count
        samples = self._samples if kind.number == self._kind else kind.batch.size
        return Passed(
            self._steps.step_count + first, count, kind.number, start_ns, (iteration_ns - before_ns) // count,
            before_ns // count, data_ns // count, UNKNOWN if samples is None else samples,
            phases.of_step(times, start_ns, end_ns),
        )  # fmt: skip

    def _are_begins_known(self, count: int) -> bool:
        """Return whether a call showed when each step of the stretch began."""
        outline = self._steps.outline
        begun = outline.begun - (bool(count) and outline.began_ns > self._ends[-1][0])  # one began after the stretch
        return not self.by_mark and not self.is_gapless and begun == count


class Passed(NamedTuple):
    """A step that passed in a stretch, or the mean of several of one kind."""

    number: int
    steps: int
    kind: int
    start_ns: int
    dur_ns: int
    before_ns: int
    data_ns: int
    samples: int
    phases: StepPhases = UNTIMED


def rows_of(passed: Sequence[Passed]) -> Iterator[Passed]:
    """Return the rows of the loop for the steps of a stretch: consecutive short ones of a kind share one."""
    for _, group in groupby(passed, key=lambda step: (step.kind, step.samples)):
        steps = list(group)
        total_ns = sum(step.dur_ns for step in steps)
        are_means = any(step.steps > 1 for step in steps)
        if are_means or len(steps) < FEWEST_STEPS or total_ns >= SHORT_NS * len(steps):
            yield from steps
            continue
        for first, end in pairwise(_bounds(len(steps), total_ns)):
            yield _mean(steps[first:end])


def _bounds(steps: int, total_ns: int) -> list[int]:
    """Return where rows of short steps begin, and the number of steps; a rest too short for a row is part of the last.

    Args:
        steps: number of steps.
        total_ns: their time.
    """
    per_row = max(FEWEST_STEPS, round(ROW_NS * steps / max(1, total_ns)))
    rows = max(1, steps // per_row)
    return [round(steps * place / rows) for place in range(rows + 1)]


def _mean(steps: Sequence[Passed]) -> Passed:
    count = len(steps)
    return steps[0]._replace(
        steps=count,
        dur_ns=round(sum(step.dur_ns for step in steps) / count),
        before_ns=round(sum(step.before_ns for step in steps) / count),
        data_ns=sum(step.data_ns for step in steps) // count,
        phases=phases.mean([step.phases for step in steps]),
    )
