"""Profiling with a budget: it costs at most a given share of the program's time.

Bare steps earn: the given share of their time may be spent. A step is recorded once enough is earned for its cost, as
estimated from earlier steps of its rung. So the share holds at any time, and determines how often a step is recorded.
It also determines the depth: a rung is left out if one of its steps costs more than `RAREST` bare steps earn. A rung's
first step is a trial, because its cost is unknown; the cheapest rung is tried first. A trial can overdraw by its own
cost at most, which is earned again before the next trial.

Beyond its share, profiling may cost `ALLOWANCE_NS` of a program: for starting, for ending, and, in the default budget,
for the first few steps of each kind, so that short programs have results too. What these cost in excess of it, and what
idle collectors cost in unrecorded steps, is paid from the share before further steps are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xsp.errors import UsageError
from xsp.levels import rung_name
from xsp.record.overhead import Account
from xsp.record.schedule import FIRST, Plan, Schedule, Turn
from xsp.schema import Level

if TYPE_CHECKING:
    from xsp.record.settings import Settings

RAREST = 1000
"""Bare steps per recorded step of a rung, above which the rung is left out."""

FIRST_BARE = 10
"""Bare steps before the first earned step is recorded, to know how long a step takes."""

DEFAULT_BUDGET = "10%"
"""Default budget of `xsp run`."""

USE_DEFAULT = "usual"
"""Setting for the default budget: `DEFAULT_BUDGET`, with free first steps."""

EVERY_OF_RANKS = 20
"""If ranks must record the same steps, one step in this many is recorded after the first ones, in place of a budget."""

ALLOWANCE_NS = 1_000_000_000
"""Nanoseconds that profiling may cost a program beyond its share of the program's time."""

END_NS = 850_000_000
"""Part of it that is kept for the end: removing and calibrating collectors, merging, the first screen."""

LEAST_FIRST_NS = 250_000_000
"""Least part of it for the first steps, also if the start was slow: a short program has no other steps."""

LATER_KIND_NS = 100_000_000
"""What all kinds together have beyond it that occur when the first one has used it up: the first steps of these kinds,
too, may be all that a short program has."""

FREE_NS = 300_000_000
"""Largest expected cost of a step that is free although the allowance is used up: of the first describing one of a
program, since most questions of `xsp advise` need its shapes, of the first timed one of a kind with `OFTEN` steps and
the describing one before it, and of the first one of a rung down to operators."""

OFTEN = 20
"""Steps of a kind after which it has a timed recorded step in any case: else a trace knows little of it but its time,
and it may be the kind that takes most of a program that runs several models one after the other."""

MAIN_SHARE = 0.25
"""Share of the time of all steps so far from which a kind may be the one that a program of many kinds is judged by."""

IDLE_NS, IDLE_SHARE = 40_000, 0.07
"""Expected cost of idle collectors in an unrecorded step in nanoseconds, and as a share of it, whichever is less. It is
measured only at the end; see benchmarks/unrecorded_steps.py."""

MOST_IDLE = 0.5
"""Largest part of the budget's share that is kept for it: steps are recorded in any case."""

UNTRIED_FACTOR = 3
"""Expected cost of a rung that was not recorded yet, as a multiple of the cost of the deepest one that was."""

DESCRIBING_FACTOR = 2
"""Expected cost of a describing step, as a multiple of that of a timed step of its rung."""

REFERENCE_STEPS, REFERENCE_NS = 10, 300_000_000
"""Bare steps, or their time, before operators or device work are recorded for the first time. They show how long a step
takes before anything is used that cannot be switched off again, such as CUPTI; see `xsp.store.reference`."""

KINDS_UNEARNED = 4
"""Most kinds for which steps are free; once a program has run more kinds, no more steps are free, but for a few of
whatever kind after `MANY_KINDS_STEPS`."""

MANY_KINDS_STEPS = 400
"""Steps after which a program of many kinds is taken as one: before, its modules may turn out to be called in a
sequence that is one step."""

MOST_DUE_NS = 400_000_000
"""Longest time of the program until it is computed again whether the next recorded step is affordable."""

MOST_MISSES = 2
"""Most free turns per free step: some turns turn out to be steps of another kind."""

STRETCH = 2
"""Steady steps in each block of rungs if the settings do not determine how often to record."""

RESTS = ((100_000_000, 12), (math.inf, 4))
"""Steady steps between earned blocks of rungs, by the longest step for which the number holds. Recorded steps come
close together and are followed by a pause: if they were spread evenly, every bare step would be near one of them."""

REST_NS = 400_000_000
"""Minimum time of such a pause in nanoseconds, including the time until steps are steady: most of it are stretches."""

RESERVE = 0.1
"""Part of the share that is reserved for steps that cost more than the ones before them."""

RESERVED_BLOCKS = 4
"""Most blocks of rungs for which earned time is saved for kinds that were recorded less often."""

STORING_PATIENCE_S = 0.1
"""Longest time in seconds that the program waits until a step is stored; a step of many spans is stored while
unrecorded steps run."""

CLOSEST = 3
"""Minimum distance of recorded steps: two bare steps between them, one on cold caches and one for comparison."""


def parse(budget: str | float) -> float:
    """Parse a budget, `"1%"` or 0.01, and return it as a share of the program's time.

    Raises:
        UsageError: the budget is neither form, or not between 0 and 100 %.
    """
    text = str(budget).strip()
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"budget={budget!r}: write a share of the program's time, '1%' or 0.01")
    return share


class Budgeted(Schedule):
    """A schedule that records steps as far as an account allows it."""

    def __init__(
        self,
        share: float,
        account: Account,
        rungs: Sequence[Level],
        warmup: int | None = None,
        seed: int = 0,
        only: Level | None = None,
        every: int | None = None,
        spread: bool = False,
        gives_first: bool = False,
        has_rests: bool = False,
    ) -> None:
        """Make a schedule.

        Args:
            share: share of the program's time, from `parse`.
            account: the account of the costs, which is updated while steps run.
            rungs, seed, only, spread: as for `Schedule`.
            warmup: number of steps of which nothing is kept, and which must be earned as others; default: none.
            every: record at most one step in this many.
            gives_first: whether each kind has `FIRST` free timed steps of each rung, as far as the allowance pays.
            has_rests: whether steady steps run before each earned block of rungs.
        """
        every = max(every or CLOSEST, CLOSEST)
        super().__init__(rungs, warmup or 0, seed, only, every=every, spread=spread, stretch=int(has_rests))
        self.storing_patience_s = STORING_PATIENCE_S
        self._untried_rungs = list(self.rungs)
        self.share = share
        self._account = account
        self._unearned_steps = int(self._describes) + FIRST * len(self.rungs) if gives_first else 0
        self._unearned_ns = 0.0
        self._spent_before_ns: float | None = None

    @property
    def unearned_ns(self) -> int:
        """Cost of the free steps in nanoseconds."""
        return round(self._unearned_ns)

    def excluded_rungs(self) -> dict[str, int | None]:
        """Return the names of rungs that cost too much, with the bare steps that earn one step; None if not tried."""
        too_costly: dict[str, int | None] = {}
        for rung in self.rungs[1:]:
            mean_ns, cost_ns = self._account.mean_ns, self._account.cost_ns(rung)
            steps = round(cost_ns / (self.share * mean_ns)) if mean_ns and cost_ns is not None else None
            if too_costly or (steps or 0) > RAREST:  # rungs below a rung that is left out are left out too
                too_costly[rung_name(rung)] = steps
        return too_costly

    def _warmup_rung(self, index: int) -> Level:
        in_use = self._active_rungs()  # the cheapest first
        return in_use[min(index, len(in_use) - 1)]

    def _active_rungs(self) -> tuple[Level, ...]:
        if self._unearned_steps and min(self.repeats.values()) < FIRST and self._is_paid():
            return self.rungs
        return self.rungs[: len(self.rungs) - len(self.excluded_rungs())]

    def _gap_range(self, every: int) -> range:
        return range(every - 1, 2 * every - 1 if self._spread else every)

    def next(self, kind: int | None = None) -> Turn:
        """Return the turn of the next step, as `Schedule.next`; quickly, if none can be affordable yet."""
        plan = self._plans.get(kind)
        if plan is not None and self._account.loop_ns < plan.due_ns:
            return self._run_bare()
        return super().next(kind)

    def steps_until_due(self) -> int | None:
        """Return None: a step is due once it is earned, not after a number of steps."""
        return None

    def ns_until_due(self) -> float | None:
        """Return the least nanoseconds of the program before the next recorded step; None if that is not known."""
        due_ns = min((plan.due_ns for plan in self._plans.values() if plan.due_ns), default=0.0)
        return due_ns - self._account.loop_ns if due_ns > self._account.loop_ns else None

    @property
    def waits_for_storing(self) -> bool:
        """Whether the next step waits for storing. Only free steps wait; later ones are recorded after the storing."""
        return super().waits_for_storing and self._planned is not None and self._is_unearned(self._planned)

    def _is_settled(self) -> bool:
        return (
            super()._is_settled() and not self.is_storing and (self._steps_since_storing > 0 or not self._ended_steps)
        )

    def _must_rest(self, plan: Plan) -> bool:
        if not self._stretch or self._is_unearned(plan):
            return False
        step_ns = self._account.bare_ns or 0.0
        steps = next(steps for most_ns, steps in RESTS if step_ns <= most_ns) - self._steady_steps
        rest_ns = max(step_ns * steps, REST_NS - self._ns_since_storing)
        self._postpone(plan, rest_ns)
        return steps > 0 or rest_ns > 0

    def _choose(self, plan: Plan) -> Turn:
        trial = self._trial()
        if trial is not None and not (self._is_first_description(plan) and not self._is_paid(trial)):
            return trial
        turn = super()._choose(plan)
        if turn.timed and self._unearned_steps and not plan.timed_steps:
            # it may stay the only one of its kind: it should show operators
            rung = max((rung for rung in plan.block if rung <= Level.OP), default=turn.rung)
            plan.block.append(plan.block.pop(plan.block.index(rung)))
            turn = Turn(rung, timed=True, describe=False)
        return turn

    def _is_first_description(self, plan: Plan) -> bool:
        """Return whether a kind's next step should describe, and is free, because no step of the program does yet."""
        return (
            self._unearned_steps > 0
            and not plan.is_described
            and any(self.repeats[rung] for rung in self.rungs if rung >= min(Level.OP, self.rungs[-1]))
            and not any(each.described_turns for each in self._plans.values())
            and DESCRIBING_FACTOR * max((self._account.cost_ns(rung) or 0.0 for rung in self.rungs), default=0.0)
            < FREE_NS
        )

    def _trial(self) -> Turn | None:
        """Return the turn of a rung that was not tried yet, if it can be afforded; else None."""
        if self._warmup_done < self.warmup:
            return None
        while self._untried_rungs and self._untried_rungs[0] not in self._active_rungs():
            self._untried_rungs.pop(0)
        return Turn(self._untried_rungs[0], timed=True, describe=False) if self._untried_rungs else None

    def _use_turn(self, turn: Turn, plan: Plan) -> None:
        if turn.timed and self._untried_rungs and turn.rung is self._untried_rungs[0]:
            self._untried_rungs.pop(0)
        super()._use_turn(turn, plan)
        for other in self._plans.values():  # costs change
            other.due_ns = 0.0

    def _must_wait(self, turn: Turn, plan: Plan) -> bool:
        account = self._account
        if super()._must_wait(turn, plan):
            return True
        if turn.rung >= Level.OP and account.bare_steps < REFERENCE_STEPS and account.steps_ns < REFERENCE_NS:
            return True
        if self._spent_before_ns is not None:
            self._unearned_ns += max(0.0, account.spent_ns - self._spent_before_ns)
            self._spent_before_ns = None
        has_few_kinds = len(self._plans) <= KINDS_UNEARNED + 1
        is_payable = self._is_unearned(plan) and self._is_paid(turn, plan)
        is_unknown = self._is_unknown(turn, plan)
        is_of_many = not has_few_kinds and not self._is_short_of(turn)
        is_main = plan.steps_ns >= MAIN_SHARE * sum(each.steps_ns for each in self._plans.values())
        if (is_unknown and (is_main or not is_of_many)) or (
            not is_of_many and (is_payable or (turn.describe and self._is_first_description(plan)))
        ):
            self._spent_before_ns = account.spent_ns
            return False
        if account.bare_steps < FIRST_BARE:
            return True
        available_ns = (1 - RESERVE) * self.share * account.loop_ns - (account.spent_ns - self._unearned_ns)
        expected_ns = self._expected_ns(turn)
        if self._begins_block(turn, plan):  # so that its steps come close together
            costs = (account.cost_ns(rung) for rung in self._active_rungs())
            expected_ns = max(expected_ns, sum(cost_ns for cost_ns in costs if cost_ns is not None))
        missing_ns = expected_ns - (available_ns - self._owed_ns() - self._reserved_ns(plan))
        self._postpone(plan, missing_ns / ((1 - RESERVE) * self.share))
        return missing_ns > 0

    def _postpone(self, plan: Plan, ns: float) -> None:
        """Note that the turn of a plan cannot come for this time of the program."""
        if ns > 0:
            plan.due_ns = self._account.loop_ns + min(MOST_DUE_NS, ns)

    def _owed_ns(self) -> float:
        """Return what the share must pay besides recorded steps: idle collectors, and what the allowance does not."""
        account = self._account
        idle_ns = min(IDLE_NS, IDLE_SHARE * (account.mean_ns or 0.0)) * account.bare_steps
        idle_ns = min(idle_ns, MOST_IDLE * self.share * account.loop_ns)
        return idle_ns + max(0.0, account.start_ns + END_NS + self._unearned_ns - ALLOWANCE_NS)

    def _expected_ns(self, turn: Turn) -> float:
        """Return the expected cost of a turn; of a trial, the cost of the rungs before it."""
        costs = (self._account.cost_ns(rung) for rung in self.rungs if rung <= turn.rung)
        return max((cost_ns for cost_ns in costs if cost_ns is not None), default=0.0)

    def _is_unearned(self, plan: Plan) -> bool:
        """Return whether the next recorded step of a kind is one of its first, which are free.

        A step may turn out to be of another kind than expected. If most do, no more steps are free.
        """
        return (
            plan.recorded_steps < self._unearned_steps
            and plan.planned_turns < MOST_MISSES * self._unearned_steps
            and self._is_paid(plan=plan)
        )

    def _is_unknown(self, turn: Turn, plan: Plan) -> bool:
        """Return whether no timed step of a kind that occurs often is recorded, or none of a rung: that one is free."""
        is_first_of_kind = plan.timed_steps == 0 and plan.planned_turns < MOST_MISSES + plan.described_turns
        return (
            self._unearned_steps > 0
            and (is_first_of_kind or (turn.rung <= Level.OP and not self.repeats[turn.rung]))
            and plan.step_count >= OFTEN
            and self._factor(turn) * self._expected_ns(turn) < FREE_NS
        )

    def _is_short_of(self, turn: Turn) -> bool:
        """Return whether a program of many kinds has too few steps of a rung, or none that describes."""
        if self._ended_steps < MANY_KINDS_STEPS:
            return False
        if turn.describe:
            return not any(plan.described_turns for plan in self._plans.values())
        return self.repeats[turn.rung] < FIRST

    def _is_paid(self, turn: Turn | None = None, plan: Plan | None = None) -> bool:
        """Return whether the allowance has anything left for first steps, and pays for this one of a kind."""
        left_ns = max(LEAST_FIRST_NS, ALLOWANCE_NS - END_NS - self._account.start_ns) - self._unearned_ns
        if plan is not None and self._is_behind(plan):
            left_ns += LATER_KIND_NS
        if turn is None:
            return left_ns > 0
        return self._factor(turn) * self._expected_ns(turn) < left_ns

    def _factor(self, turn: Turn) -> int:
        """Return how many times its expected cost a turn may cost."""
        return DESCRIBING_FACTOR if turn.describe else UNTRIED_FACTOR if self._account.cost_ns(turn.rung) is None else 1

    def _reserved_ns(self, plan: Plan) -> float:
        """Return the time that is saved for kinds that were recorded less often and are likely to occur again.

        It pays for what they are behind, at most `RESERVED_BLOCKS` blocks. What is earned beyond that is for the other
        kinds: one that rarely occurs does not keep them from being recorded.
        """
        if self._is_behind(plan):
            return 0.0
        behind = [
            plan.recorded_steps - candidate.recorded_steps
            for candidate in self._plans.values()
            if self._is_behind(candidate) and self._may_come(candidate)
        ]
        rungs = self._active_rungs()
        costs = [cost_ns for rung in rungs if (cost_ns := self._account.cost_ns(rung)) is not None]
        return min(max(behind, default=0), RESERVED_BLOCKS * len(rungs)) * sum(costs) / max(1, len(costs))


def schedule_of(settings: Settings, account: Account, is_alone: bool) -> Schedule:
    """Return the schedule of a block; it keeps a budget if there is one.

    Args:
        settings: settings of the block.
        account: the account of the costs, which is updated while steps run.
        is_alone: False if other processes must choose the same turns.
    """
    rungs, warmup, seed, only = settings.rungs, settings.warmup, settings.seed, settings.only
    settle, every, spread, is_default = settings.settle, settings.every, settings.spread, settings.budget == USE_DEFAULT
    if is_default and not is_alone:
        return Schedule(
            rungs, warmup, seed, only, every=every, spread=spread, by_time=False, later_every=EVERY_OF_RANKS
        )
    if settings.budget is not None:
        share = parse(DEFAULT_BUDGET if is_default else settings.budget)
        return Budgeted(
            share, account, rungs, warmup, seed, only, every, spread, gives_first=is_default, has_rests=True
        )
    if only is not None:  # a process of a run once per level measures only that rung
        return Schedule(rungs, warmup, seed, only, 1 if settle is None else settle, every)
    stretch = STRETCH if settle is None and every is None and is_alone else 0
    return Schedule(rungs, warmup, seed, only, settle, every, spread, stretch, by_time=is_alone)


def progress(schedule: Schedule, account: Account) -> dict[str, Any]:
    """Return the cost of profiling so far, and the budget if there is one."""
    limit_percent = 100 * schedule.share if isinstance(schedule, Budgeted) else None
    return {
        "asked_percent": limit_percent,
        "given_ns": schedule.unearned_ns if isinstance(schedule, Budgeted) else 0,
        "every": schedule.every,
        "left_out": schedule.excluded_rungs() if isinstance(schedule, Budgeted) else {},
        **account.content(),
    }


def content(schedule: Schedule, account: Account) -> dict[str, Any]:
    """Return the final content for `run.json`: as `progress`, with the 95 % interval and whether the budget was kept.

    `kept` is None if there was no budget, or no bare step that shows how long a step takes.
    """
    figures = progress(schedule, account)
    limit_percent, spent_percent = figures["asked_percent"], figures["overhead_percent"]
    is_kept = None
    if limit_percent is not None and spent_percent is not None:
        earned_ns = account.spent_ns - figures["given_ns"]
        is_kept = earned_ns <= limit_percent / 100 * account.loop_ns and figures["given_ns"] <= ALLOWANCE_NS
    low, high = account.interval_percent()
    return {**figures, "low_percent": low, "high_percent": high, "kept": is_kept}
