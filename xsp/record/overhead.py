"""The cost of profiling, accounted for step by step while the program runs, in constant memory.

There are four costs: the time that xsp takes between steps (switching collectors, handing rows over, waiting until they
are stored), the time that collectors add inside a recorded step, the extra time of the next step on cold caches, and
the extra time of steps that run while a step is being stored. The first is read from the clock. The others are
differences from the bare steps of the same kind nearby, so that drift of the machine cancels and a long step among
short ones is not taken for a cost; their figure is the trimmed mean over the steps of a rung, with its interval.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

from xsp import processes, stats
from xsp.clock import monotonic_ns
from xsp.levels import rung_name
from xsp.record.schedule import Turn
from xsp.texts import percent_of

NEARBY_STEPS = 15
"""Number of bare steps whose median a recorded step is compared with."""

FEWEST_STEPS = 3
KEPT_DIFFERENCES = 64
"""Number of latest differences from which a rung's figure is computed."""

UNUSUAL = 10
"""If the time around a bare step (usually the same few microseconds) exceeds the usual time by this factor, the usual
time is counted instead: the system gave the processor to another program, so the excess is not work of xsp."""

MIN_WAIT_SHARE = 0.05
"""Least wait for the device after a burst of unrecorded steps, as a share of one of them, that shows its pace."""

RECENT_COSTS = 9
"""Number of latest steps that predict the cost of the next one of a rung."""


class Differences:
    """Differences in duration between some steps and the bare steps nearby."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[float] = deque(maxlen=KEPT_DIFFERENCES)

    def add(self, difference_ns: float) -> None:
        """Add the difference of one step."""
        self.count += 1
        self._latest.append(difference_ns)

    @property
    def total_ns(self) -> float:
        """Total extra time of all steps; 0 without steps."""
        return self.count * stats.trimmed_mean(self._latest) if self.count else 0.0

    @property
    def margin_ns(self) -> float:
        """Half width of the 95 % interval of `total_ns`; `total_ns` itself after one or two steps, too few for one."""
        bounds = stats.interval(self._latest)
        if bounds is None:
            return abs(self.total_ns)
        return self.count * bounds.half


class RungAccount:
    """The cost of the steps of one rung."""

    def __init__(self) -> None:
        self.timed_differences = Differences()
        """Differences of the timed steps."""

        self.untimed_ns = 0.0
        """Extra time of warm-up and describing steps, summed individually because they all differ."""

        self.between_ns = 0
        self.steps = self.windows = 0
        self._window_differences: deque[float] = deque(maxlen=KEPT_DIFFERENCES)
        self._costs: deque[float] = deque(maxlen=RECENT_COSTS)

    def add(self, turn: Turn, difference_ns: float | None, between_ns: int) -> None:
        """Count one step. If no step of its kind ran bare yet, its difference is None; `add_difference` may follow.

        A describing step does not count in the predicted cost of the others.
        """
        self.steps += 1
        self.between_ns += between_ns
        if difference_ns is not None:
            self.add_difference(turn, difference_ns)
        if not turn.describe:
            self._costs.append(max(0.0, difference_ns or 0.0) + between_ns + self.ns_in_window)

    def add_window(self, difference_ns: float) -> None:
        """Count a step of which collectors were on before it began, with the extra time of the program then."""
        self.windows += 1
        self._window_differences.append(difference_ns)

    @property
    def ns_in_window(self) -> float:
        """Extra time of the program before a step while collectors are on: the median, as a rare save is no cost."""
        return max(0.0, stats.percentile(self._window_differences, 0.5)) if self._window_differences else 0.0

    def add_difference(self, turn: Turn, difference_ns: float) -> None:
        """Add the extra time of one step over a bare one."""
        if turn.timed:
            self.timed_differences.add(difference_ns)
        else:
            self.untimed_ns += difference_ns

    @property
    def spent_ns(self) -> float:
        """Total cost of the steps in nanoseconds."""
        return self.inside_ns + self.between_ns

    @property
    def inside_ns(self) -> float:
        """Part of it that collectors add while the program runs."""
        return self.timed_differences.total_ns + self.untimed_ns + self.windows * self.ns_in_window

    @property
    def cost_ns(self) -> float | None:
        """Cost of one step in nanoseconds, from the latest ones; None without any."""
        return stats.percentile(self._costs, 0.5) if self._costs else None


class BareSteps:
    """Durations of the latest bare steps: of undisturbed ones, and of those slowed by recording or storing another."""

    def __init__(self) -> None:
        self.undisturbed: deque[int] = deque(maxlen=NEARBY_STEPS)
        self.disturbed: deque[int] = deque(maxlen=NEARBY_STEPS)
        self.gaps: deque[int] = deque(maxlen=NEARBY_STEPS)
        """Time of the program before the latest ones."""

        self.pending: list[tuple[Turn, int]] = []
        """Steps that were recorded before the first bare one, with their durations."""

    @property
    def ns(self) -> float | None:
        """Median duration; None before the first bare step."""
        if len(self.undisturbed) >= FEWEST_STEPS:
            return stats.percentile(self.undisturbed, 0.5)
        return (
            stats.percentile([*self.undisturbed, *self.disturbed], 0.5) if self.undisturbed or self.disturbed else None
        )


class Account:
    """The cost of all steps of a run."""

    def __init__(self) -> None:
        self.steps = self.bare_steps = 0
        self.steps_ns = 0.0
        """Time that the steps would have taken bare, without steps of kinds that never ran bare."""

        self.began_ns = processes.start_ns()
        """Time at which the program's process started, of the monotonic clock."""

        self.launch_ns = 0
        """Time that `xsp run` took before the block was entered."""

        self.waited_ns = 0
        """Time of the program between its steps: with `steps_ns` the time of its loop."""

        self.start_ns = 0
        """Time to launch the program, to install collectors and to start the storing process, without importing the
        package that they observe, which the program needs itself. It belongs to no step, and is not in `spent_ns`."""

        self.end_ns = 0
        """Time to remove and calibrate collectors; it belongs to no step either."""

        self.rungs: dict[int, RungAccount] = {}
        self._between_ns = 0  # total of bare steps
        self._latest_between_ns: deque[int] = deque(maxlen=KEPT_DIFFERENCES)
        self._usual_ns: float | None = None
        self._after_recording = Differences()
        self._while_storing = Differences()  # bare steps that ran while another one was being stored
        self._spent_ns = 0.0  # total of all other steps
        self._bare = BareSteps()
        self._bare_by_kind: defaultdict[int, BareSteps] = defaultdict(BareSteps)
        self._follows_recorded = False
        self._paces: deque[float] = deque(maxlen=NEARBY_STEPS)  # iterations of the latest bursts, at a device's pace

    @property
    def spent_ns(self) -> float:
        """Cost of profiling so far in nanoseconds."""
        return self._spent_ns + self._between_ns

    @property
    def unknown(self) -> int:
        """Number of recorded steps whose kind never ran bare, so that their cost is unknown."""
        return sum(len(bare.pending) for bare in self._bare_by_kind.values())

    @property
    def bare_ns(self) -> float | None:
        """Current duration of a bare step: the median of the latest ones, of all kinds; None before the first one."""
        return self._bare.ns

    @property
    def mean_ns(self) -> float | None:
        """Mean bare duration of a step, over all kinds; a budget is earned from it."""
        known_steps = self.steps - self.unknown
        return self.steps_ns / known_steps if known_steps and self.steps_ns else None

    @property
    def loop_ns(self) -> float:
        """Time that the program's loop would have taken bare: its steps, and the time between them."""
        return self.steps_ns + self.waited_ns

    def cost_ns(self, rung: int) -> float | None:
        """Return the cost of one step of a rung, from the latest ones; None without any."""
        account = self.rungs.get(rung)
        return account.cost_ns if account is not None else None

    def add(
        self, turn: Turn, dur_ns: int, before_ns: int, end_ns: int, is_disturbed: bool = False, kind: int = 0,
        gap_ns: int = 0, has_window: bool = False,
    ) -> None:  # fmt: skip
        """Count a step.

        Args:
            turn: turn of the step.
            dur_ns: duration of the step.
            before_ns: time that xsp took before its start.
            end_ns: reading of the monotonic clock at its end; the time since then was spent by xsp.
            is_disturbed: whether another step was being stored meanwhile.
            kind: number of its kind.
            gap_ns: time of the program before it, without waits.
            has_window: whether collectors were on then.
        """
        self.steps += 1
        bare = self._bare_by_kind[kind]
        if turn.is_bare:
            bare.gaps.append(gap_ns)
        elif has_window and bare.gaps:
            rung = self.rungs.setdefault(int(turn.rung), RungAccount())
            rung.add_window(gap_ns - stats.percentile(bare.gaps, 0.5))
        if turn.is_bare:
            self._add_bare(dur_ns, is_disturbed, bare)
            between_ns = before_ns + monotonic_ns() - end_ns
            self._latest_between_ns.append(between_ns)
            if self.bare_steps % KEPT_DIFFERENCES == 0:
                self._usual_ns = stats.percentile(self._latest_between_ns, 0.5)
            is_unusual = self._usual_ns is not None and between_ns > UNUSUAL * self._usual_ns
            self._between_ns += round(self._usual_ns) if is_unusual and self._usual_ns is not None else between_ns
        else:
            self._add_recorded(turn, dur_ns, before_ns + monotonic_ns() - end_ns, bare)
        self._follows_recorded = not turn.is_bare

    def add_bare_stretch(self, steps: int, steps_ns: int, waited_ns: int) -> None:
        """Count bare steps around which xsp did nothing."""
        self.steps += steps
        self.bare_steps += steps
        self.steps_ns += steps_ns
        self.waited_ns += waited_ns

    def spend(self, spent_ns: int) -> None:
        """Count time that xsp took outside the steps."""
        self._between_ns += spent_ns

    def _add_bare(self, dur_ns: int, is_disturbed: bool, bare: BareSteps) -> None:
        self.bare_steps += 1
        if not (self._follows_recorded or is_disturbed):
            self._bare.undisturbed.append(dur_ns)
            bare.undisturbed.append(dur_ns)
            self.steps_ns += dur_ns
            self._settle_pending(bare)
            return
        self._bare.disturbed.append(dur_ns)
        bare.disturbed.append(dur_ns)
        if len(bare.undisturbed) < FEWEST_STEPS:  # too few undisturbed ones yet
            self.steps_ns += dur_ns
            self._settle_pending(bare)
            return
        usual_ns = stats.percentile(bare.undisturbed, 0.5)
        self.steps_ns += usual_ns
        (self._after_recording if self._follows_recorded else self._while_storing).add(dur_ns - usual_ns)
        self._sum_up()

    def add_burst(self, steps: int, total_ns: int, wait_ns: int) -> None:
        """Note unrecorded steps between two recorded ones, for which the host then waited until the device was idle.

        If the wait shows that the device set their pace, a recorded step, which contains the work of the device, is
        compared with that pace and not with the launches of unrecorded steps.

        Args:
            steps: their number.
            total_ns: time since the device was idle at the end of the recorded step before them.
            wait_ns: the part of it that the host waited at the end.
        """
        if steps and wait_ns * steps > MIN_WAIT_SHARE * total_ns:
            self._paces.append(total_ns / steps)

    def _add_recorded(self, turn: Turn, dur_ns: int, between_ns: int, bare: BareSteps) -> None:
        usual_ns = bare.ns
        if usual_ns is not None and self._paces:
            usual_ns = min(float(dur_ns), max(usual_ns, stats.percentile(self._paces, 0.5)))
        if usual_ns is None:
            bare.pending.append((turn, dur_ns))
        else:
            self.steps_ns += usual_ns
        rung = self.rungs.setdefault(int(turn.rung), RungAccount())
        rung.add(turn, dur_ns - usual_ns if usual_ns is not None else None, between_ns)
        self._sum_up()

    def _settle_pending(self, bare: BareSteps) -> None:
        """Count the cost of steps that were recorded before the first bare one of their kind.

        Describing and warm-up steps are left out: at the first steps of a kind the program itself warms up.
        """
        usual_ns = bare.ns
        if usual_ns is None or not bare.pending:
            return
        for turn, dur_ns in bare.pending:
            self.steps_ns += usual_ns
            if turn.timed:
                self.rungs[int(turn.rung)].add_difference(turn, dur_ns - usual_ns)
        bare.pending.clear()
        self._sum_up()

    def _sum_up(self) -> None:
        slower_ns = self._after_recording.total_ns + self._while_storing.total_ns
        self._spent_ns = slower_ns + sum(rung.spent_ns for rung in self.rungs.values())

    def interval_percent(self) -> tuple[float | None, float | None]:
        """Return the 95 % interval of `overhead_percent`. It takes milliseconds, because it resamples (bootstrap).

        A cost is not negative. If the noise of the machine makes it seem negative, the upper end is 0.
        """
        timed_differences = [rung.timed_differences for rung in self.rungs.values()]
        margin_ns = math.hypot(
            *(differences.margin_ns for differences in (*timed_differences, self._after_recording, self._while_storing))
        )
        low_ns, high_ns = self.spent_ns - margin_ns, self.spent_ns + margin_ns
        return _percent(low_ns, self.loop_ns), _percent(max(0.0, high_ns), self.loop_ns)

    def content(self) -> dict[str, Any]:
        """Return its content for `run.json`; an unknown share is None."""
        return {
            "overhead_percent": _percent(max(0.0, self.spent_ns), self.loop_ns),
            "steps_ns": round(self.steps_ns),
            "waited_ns": self.waited_ns,
            "wall_ns": monotonic_ns() - self.began_ns,
            "spent_ns": round(self.spent_ns),
            "inside_ns": round(sum(rung.inside_ns for rung in self.rungs.values())),
            "around_ns": self._between_ns + sum(rung.between_ns for rung in self.rungs.values()),
            "after_ns": round(self._after_recording.total_ns + self._while_storing.total_ns),
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "bare_step_ns": _rounded(self.bare_ns),
            "taken": {
                "bare": self.bare_steps,
                **{rung_name(level): self.rungs[level].steps for level in sorted(self.rungs)},
            },
            "cost_ns": {rung_name(level): _rounded(self.rungs[level].cost_ns) for level in sorted(self.rungs)},
            "unknown_steps": self.unknown,
        }


def _percent(part: float, total: float) -> float | None:
    percent = percent_of(part, total)
    return None if percent is None else round(percent, 4)


def _rounded(value: float | None) -> int | None:
    return round(value) if value is not None else None
