"""What profiling costs a program, kept step by step while it runs, in constant memory.

Four things cost: the time that xsp takes between steps (switching collectors, handing rows over, waiting until
they are stored), what collectors add inside a recorded step, what the step after it takes longer on cold caches, and
what others take longer while it is being stored. The first is read from the clock. The others are differences to the
bare steps of the same kind nearby, so that a drift of the machine cancels, and a long step among short ones costs
nothing by its length; their figure is the trimmed mean over the steps of a rung, with its interval.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

from xsp import summary
from xsp.clock import monotonic_ns
from xsp.levels import rung_name
from xsp.record.schedule import Turn

NEARBY = 15
"""Bare steps that a recorded one is compared with: their median."""

ENOUGH = 3
REMEMBERED = 64
"""Differences that a rung's figure is of: the last ones."""

UNUSUAL = 10
"""What xsp takes around a bare step is the same few microseconds each time. What is so many times as long was no work
of xsp's: the system had given the processor to another program, and the usual time is counted."""

LAST = 9
"""Steps that tell what the next one of a rung costs."""


class Differences:
    """How much longer the steps of one kind took than the bare ones nearby."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, difference_ns: float) -> None:
        """Count one step."""
        self.count += 1
        self._last.append(difference_ns)

    @property
    def total_ns(self) -> float:
        """What all of them took longer; 0 for none."""
        return self.count * summary.trimmed_mean(self._last) if self.count else 0.0

    @property
    def margin_ns(self) -> float:
        """How far `total_ns` can be off, at 95 %; of one or two steps, which tell nothing, by all that it is."""
        ends = summary.interval(self._last)
        if ends is None:
            return abs(self.total_ns)
        return self.count * max(ends.hi - ends.lo, 0.0) / 2


class RungAccount:
    """What the steps of one rung cost."""

    def __init__(self) -> None:
        self.inside = Differences()
        """Of steps that are timed."""

        self.once_ns = 0.0
        """What those that warm up or describe took longer: each its own amount, none like another."""

        self.around_ns = 0
        self.taken = 0
        self._costs: deque[float] = deque(maxlen=LAST)

    def add(self, turn: Turn, difference_ns: float | None, around_ns: int) -> None:
        """Count one step, whose difference is None if none of its kind ran bare yet; `tell` may follow.

        One that describes does not tell what others cost.
        """
        self.taken += 1
        self.around_ns += around_ns
        if difference_ns is not None:
            self.tell(turn, difference_ns)
        if not turn.describe:
            self._costs.append(max(0.0, difference_ns or 0.0) + around_ns)

    def tell(self, turn: Turn, difference_ns: float) -> None:
        """Count how much longer one step took than a bare one."""
        if turn.timed:
            self.inside.add(difference_ns)
        else:
            self.once_ns += difference_ns

    @property
    def spent_ns(self) -> float:
        """What all of them cost."""
        return self.inside.total_ns + self.once_ns + self.around_ns

    @property
    def cost_ns(self) -> float | None:
        """What one step costs, by the last ones; None if there was none."""
        return summary.percentile(self._costs, 0.5) if self._costs else None


class Bare:
    """What bare steps took lately: those that nothing disturbed, and the first ones after others were recorded."""

    def __init__(self) -> None:
        self.others: deque[int] = deque(maxlen=NEARBY)
        self.firsts: deque[int] = deque(maxlen=NEARBY)
        self.awaited: list[tuple[Turn, int]] = []
        """Steps that were recorded before the first bare one, with their durations."""

    @property
    def ns(self) -> float | None:
        """The median; None before the first one."""
        if len(self.others) >= ENOUGH:
            return summary.percentile(self.others, 0.5)
        return summary.percentile([*self.others, *self.firsts], 0.5) if self.others or self.firsts else None


class Account:
    """What all steps of a run cost."""

    def __init__(self) -> None:
        self.steps = self.bare = 0
        self.steps_ns = 0.0
        """What the steps would have taken bare; those of kinds of which none ran bare are not in it."""

        self.began_ns = monotonic_ns()
        """When the block was entered."""

        self.waited_ns = 0
        """What the program did between its steps: with `steps_ns` the time of its loop."""

        self.start_ns = 0
        """What it took to install collectors and to start the storing process, without the import of what they observe:
        the program needs that itself. It is no step's, and not in `spent_ns`."""

        self.end_ns = 0
        """What it took to take collectors out and to calibrate them; no step's either."""

        self.rungs: dict[int, RungAccount] = {}
        self._around_ns = 0  # of bare steps
        self._arounds: deque[int] = deque(maxlen=REMEMBERED)
        self._usual_ns: float | None = None
        self._after = Differences()
        self._beside = Differences()  # of bare steps that ran while another one was being stored
        self._spent_ns = 0.0  # of all but bare steps
        self._bare = Bare()
        self._of_kind: defaultdict[int, Bare] = defaultdict(Bare)
        self._follows = False

    @property
    def spent_ns(self) -> float:
        """What profiling has cost, in nanoseconds."""
        return self._spent_ns + self._around_ns

    @property
    def unknown(self) -> int:
        """How many steps were recorded whose kind did not run bare: what they cost is not known."""
        return sum(len(each.awaited) for each in self._of_kind.values())

    @property
    def bare_ns(self) -> float | None:
        """What a bare step takes at present: the median of those nearby, of all kinds; None before the first one."""
        return self._bare.ns

    @property
    def mean_ns(self) -> float | None:
        """What a step would have taken bare, in the mean of all kinds: what a budget is earned by."""
        known = self.steps - self.unknown
        return self.steps_ns / known if known and self.steps_ns else None

    @property
    def loop_ns(self) -> float:
        """What the program's loop would have taken bare: its steps, and what it did between them."""
        return self.steps_ns + self.waited_ns

    def cost_ns(self, rung: int) -> float | None:
        """Return what one step of a rung costs, by the last ones; None if there was none."""
        found = self.rungs.get(rung)
        return found.cost_ns if found is not None else None

    def add(
        self, turn: Turn, dur_ns: int, before_ns: int, end_ns: int, is_disturbed: bool = False, kind: int = 0
    ) -> None:  # fmt: skip
        """Count a step.

        Args:
            turn: what it was for.
            dur_ns: from its start to its end.
            before_ns: what xsp took before its start.
            end_ns: reading of the monotonic clock at its end; what was done since was for xsp.
            is_disturbed: another step was being stored meanwhile.
            kind: number of its kind.
        """
        self.steps += 1
        if turn.bare:
            self._add_bare(dur_ns, is_disturbed, self._of_kind[kind])
            self._add_around(before_ns + monotonic_ns() - end_ns)
        else:
            self._add_recorded(turn, dur_ns, before_ns + monotonic_ns() - end_ns, self._of_kind[kind])
        self._follows = not turn.bare

    def pass_by(self, steps: int, steps_ns: int, waited_ns: int) -> None:
        """Count bare steps that ran without anything around them."""
        self.steps += steps
        self.bare += steps
        self.steps_ns += steps_ns
        self.waited_ns += waited_ns

    def spend(self, taken_ns: int) -> None:
        """Count what xsp took beside the steps."""
        self._around_ns += taken_ns

    def _add_around(self, around_ns: int) -> None:
        self._arounds.append(around_ns)
        if self.bare % REMEMBERED == 0:
            self._usual_ns = summary.percentile(self._arounds, 0.5)
        strange = self._usual_ns is not None and around_ns > UNUSUAL * self._usual_ns
        self._around_ns += round(self._usual_ns) if strange and self._usual_ns is not None else around_ns

    def _add_bare(self, dur_ns: int, is_disturbed: bool, own: Bare) -> None:
        self.bare += 1
        if not (self._follows or is_disturbed):
            self._bare.others.append(dur_ns)
            own.others.append(dur_ns)
            self.steps_ns += dur_ns
            self._settle(own)
            return
        self._bare.firsts.append(dur_ns)
        own.firsts.append(dur_ns)
        if len(own.others) < ENOUGH:  # the only bare steps that there are
            self.steps_ns += dur_ns
            self._settle(own)
            return
        usual = summary.percentile(own.others, 0.5)
        self.steps_ns += usual
        (self._after if self._follows else self._beside).add(dur_ns - usual)
        self._sum_up()

    def _add_recorded(self, turn: Turn, dur_ns: int, around_ns: int, own: Bare) -> None:
        usual = own.ns
        if usual is None:
            own.awaited.append((turn, dur_ns))
        else:
            self.steps_ns += usual
        rung = self.rungs.setdefault(int(turn.rung), RungAccount())
        rung.add(turn, dur_ns - usual if usual is not None else None, around_ns)
        self._sum_up()

    def _settle(self, own: Bare) -> None:
        """Count what steps cost that were recorded before the first bare one of their kind.

        Those that describe or warm up are left out: at the begin of a kind the program itself warms up in them.
        """
        usual = own.ns
        if usual is None or not own.awaited:
            return
        for turn, dur_ns in own.awaited:
            self.steps_ns += usual
            if turn.timed:
                self.rungs[int(turn.rung)].tell(turn, dur_ns - usual)
        own.awaited.clear()
        self._sum_up()

    def _sum_up(self) -> None:
        slower_ns = self._after.total_ns + self._beside.total_ns
        self._spent_ns = slower_ns + sum(rung.spent_ns for rung in self.rungs.values())

    def interval_percent(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of `overhead_percent`. It takes milliseconds: the bootstrap resamples.

        A cost is not negative. Where the noise of the machine makes it seem so, the upper end is 0.
        """
        inside = [rung.inside for rung in self.rungs.values()]
        margin_ns = math.hypot(*(each.margin_ns for each in (*inside, self._after, self._beside)))
        low_ns, high_ns = self.spent_ns - margin_ns, self.spent_ns + margin_ns
        return _percent(low_ns, self.loop_ns), _percent(max(0.0, high_ns), self.loop_ns)

    def content(self) -> dict[str, Any]:
        """Return what is to be said of it; a share that is unknown is None."""
        return {
            "overhead_percent": _percent(max(0.0, self.spent_ns), self.loop_ns),
            "steps_ns": round(self.steps_ns),
            "waited_ns": self.waited_ns,
            "wall_ns": monotonic_ns() - self.began_ns,
            "spent_ns": round(self.spent_ns),
            "inside_ns": round(sum(rung.inside.total_ns + rung.once_ns for rung in self.rungs.values())),
            "around_ns": self._around_ns + sum(rung.around_ns for rung in self.rungs.values()),
            "after_ns": round(self._after.total_ns + self._beside.total_ns),
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "bare_step_ns": _rounded(self.bare_ns),
            "taken": {"bare": self.bare, **{rung_name(level): self.rungs[level].taken for level in sorted(self.rungs)}},
            "cost_ns": {rung_name(level): _rounded(self.rungs[level].cost_ns) for level in sorted(self.rungs)},
            "unknown_steps": self.unknown,
        }


def _percent(part: float, whole: float) -> float | None:
    return round(100 * part / whole, 4) if whole else None


def _rounded(value: float | None) -> int | None:
    return round(value) if value is not None else None
