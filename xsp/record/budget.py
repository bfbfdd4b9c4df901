"""Profiling that costs a program no more than a share of its time.

Bare steps earn: of what they take, the share may be spent. A step is recorded once enough is earned for what it
will cost, which the steps of its rung before it tell; so the share is kept at any moment, and how often a step is
recorded follows from it. A rung of which one step would take what more than `RAREST` bare steps earn is left out:
that is how deep. A rung's first step is a trial, the cheapest rung's first: nobody knows what it costs before. It
overdraws at most by itself, and what it overdraws is earned before the next one. A budget that nobody asked for gives
the first few steps of each kind away: a program that is short has something to say too, and one that is long has steps
from all of its run.
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
"""Bare steps: a rung that can be afforded less often than once in so many is left out."""

FIRST_BARE = 10
"""Steps before the first recorded one that is earned, to know what a step takes."""

USUAL = "10%"
"""The budget of `xsp run`, where none is asked for."""

UNASKED = "usual"
"""Asks for `USUAL`, and lets the first steps be recorded before they are earned."""

EVERY_OF_RANKS = 20
"""Instead of `USUAL`, where ranks must record the same steps: one step in so many, after the first ones."""

KINDS_UNEARNED = 4
"""Kinds that are given so much; programs with more have their first ones recorded so."""

MISSES = 2
"""So many times as many turns are given to a kind as steps: some turn out to be steps of another kind."""

STRETCH = 2
"""Steady steps in each block, where nothing says how often to record."""

RESTS = ((100_000_000, 12), (math.inf, 4))
"""Steady steps between blocks of rungs that are earned, by the longest step that it is for. Recorded steps come close
together, and then none, because one here and one there would leave no bare step that is not near one."""

REST_NS = 60_000_000
"""The least time of such a stretch, with what it takes to become steady."""

RESERVE = 0.1
"""Of the share, for steps that cost more than the ones before them."""

CLOSEST = 3
"""At least two bare steps stand between recorded ones: one on cold caches, and one to compare with."""


def parse(budget: str | float) -> float:
    """Read a budget, `"1%"` or 0.01, and return it as a share of the program's time.

    Raises:
        UsageError: it is neither, or not between 0 and 100 %.
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
    """Turns as an account allows them."""

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
        unearned: bool = False,
        rests: bool = False,
    ) -> None:
        """Make a schedule.

        Args:
            share: of the program's time, from `parse`.
            account: to which the costs of the steps are added as they run.
            rungs, seed, only, spread: as of a `Schedule`.
            warmup: steps of which nothing is kept, and which are paid as others are; none unless told otherwise.
            every: at most one step in so many is recorded.
            unearned: give each kind of step `FIRST` timed steps of each rung, which need not be earned.
            rests: let steady steps run before each block of rungs that is earned.
        """
        every = max(every or CLOSEST, CLOSEST)
        super().__init__(rungs, warmup or 0, seed, only, every=every, spread=spread, stretch=int(rests))
        self._untried = list(self.rungs)
        self.share = share
        self._account = account
        self._unearned = int(self._describes) + FIRST * len(self.rungs) if unearned else 0
        self._given_ns = 0.0
        self._before_gift_ns: float | None = None

    @property
    def given_ns(self) -> int:
        """What steps have cost that need not be earned."""
        return round(self._given_ns)

    def left_out(self) -> dict[str, int | None]:
        """Return the rungs that are too dear, by name, with the bare steps that earn one step; None if not tried."""
        dear: dict[str, int | None] = {}
        for rung in self.rungs[1:]:
            steps = self._earned_in(rung)
            if dear or (steps or 0) > RAREST:  # what lies below a rung that is left out is left out too
                dear[rung_name(rung)] = steps
        return dear

    def _earned_in(self, rung: Level) -> int | None:
        mean_ns, cost_ns = self._account.mean_ns, self._account.cost_ns(rung)
        return round(cost_ns / (self.share * mean_ns)) if mean_ns and cost_ns is not None else None

    def _warming(self, place: int) -> Level:
        in_use = self._in_use()  # the cheapest first
        return in_use[min(place, len(in_use) - 1)]

    def _in_use(self) -> tuple[Level, ...]:
        if self._unearned and min(self.repeats.values()) < FIRST:
            return self.rungs
        return self.rungs[: len(self.rungs) - len(self.left_out())]

    def _between(self, every: int) -> range:
        return range(every - 1, 2 * every - 1 if self._spread else every)

    def until_due(self) -> int | None:
        """Return None: a step is due when it is earned."""
        return None

    @property
    def waits_for_storing(self) -> bool:
        """Whether the next step waits: while steps are given away. Later ones are recorded when the last is stored."""
        return super().waits_for_storing and self._planned is not None and self._is_given(self._planned)

    def _is_settled(self) -> bool:
        return super()._is_settled() and not self.is_storing and (self._since > 0 or not self._ended)

    def _rests(self, plan: Plan) -> bool:
        if not self._stretch or self._is_given(plan):
            return False
        step_ns = self._account.bare_ns or 0.0
        return self._steady < next(steps for most_ns, steps in RESTS if step_ns <= most_ns) or self._since_ns < REST_NS

    def _choose(self, plan: Plan) -> Turn:
        return self._trial() or super()._choose(plan)

    def _trial(self) -> Turn | None:
        """Return the turn of a rung that was not tried, if it can be afforded; else None."""
        if self._warmed < self.warmup:
            return None
        while self._untried and self._untried[0] not in self._in_use():
            self._untried.pop(0)
        return Turn(self._untried[0], timed=True, describe=False) if self._untried else None

    def _take(self, turn: Turn, plan: Plan) -> None:
        if turn.timed and self._untried and turn.rung is self._untried[0]:
            self._untried.pop(0)
        super()._take(turn, plan)

    def _waits(self, turn: Turn, plan: Plan) -> bool:
        account = self._account
        if super()._waits(turn, plan):
            return True
        if self._before_gift_ns is not None:
            self._given_ns += max(0.0, account.spent_ns - self._before_gift_ns)
            self._before_gift_ns = None
        if self._is_given(plan) and len(self._plans) <= KINDS_UNEARNED + 1:
            self._before_gift_ns = account.spent_ns
            return False
        if account.bare < FIRST_BARE:
            return True
        known = (account.cost_ns(rung) for rung in self.rungs if rung <= turn.rung)  # of a trial: those before
        expected_ns = max((cost_ns for cost_ns in known if cost_ns is not None), default=0.0)
        if account.spent_ns - self._given_ns + expected_ns > (1 - RESERVE) * self.share * account.loop_ns:
            return True
        return self._is_kept_for_another(plan)

    def _is_given(self, plan: Plan) -> bool:
        """Return whether the next recorded step of a kind need not be earned.

        A step may turn out to be of another kind than was foretold. Where most do, nothing more is given away.
        """
        return plan.taken < self._unearned and plan.tried < MISSES * self._unearned

    def _is_kept_for_another(self, plan: Plan) -> bool:
        """Return whether what was earned is kept for a kind that was recorded less often, and may still come."""
        if self._lags(plan):
            return False
        return any(self._lags(other) and self._may_come(other) for other in self._plans.values())


def schedule_of(settings: Settings, account: Account, alone: bool) -> Schedule:
    """Return the schedule of a block: one that keeps a budget, if there is one.

    Args:
        settings: of the block.
        account: to which the costs of the steps are added as they run.
        alone: False where other processes must come to the same turns.
    """
    rungs, warmup, seed, only = settings.rungs, settings.warmup, settings.seed, settings.only
    settle, every, spread, usual = settings.settle, settings.every, settings.spread, settings.budget == UNASKED
    if usual and not alone:
        return Schedule(rungs, warmup, seed, only, every=every, spread=spread, by_time=False, later=EVERY_OF_RANKS)
    if settings.budget is not None:
        share = parse(USUAL if usual else settings.budget)
        return Budgeted(share, account, rungs, warmup, seed, only, every, spread, unearned=usual, rests=True)
    if only is not None:  # once per level: all that such a process is for
        return Schedule(rungs, warmup, seed, only, 1 if settle is None else settle, every)
    stretch = STRETCH if settle is None and every is None and alone else 0
    return Schedule(rungs, warmup, seed, only, settle, every, spread, stretch, by_time=alone)


def progress(schedule: Schedule, account: Account) -> dict[str, Any]:
    """Return what profiling has cost until now, and of the budget if there is one."""
    asked = 100 * schedule.share if isinstance(schedule, Budgeted) else None
    return {
        "asked_percent": asked,
        "given_ns": schedule.given_ns if isinstance(schedule, Budgeted) else 0,
        "every": schedule.every,
        "left_out": schedule.left_out() if isinstance(schedule, Budgeted) else {},
        **account.content(),
    }


def content(schedule: Schedule, account: Account) -> dict[str, Any]:
    """Return what `run.json` says in the end: as `progress`, with the 95 % interval and whether the budget was kept.

    `kept` is None where nothing was asked, or where no bare step told what a step takes.
    """
    found = progress(schedule, account)
    asked, spent = found["asked_percent"], found["overhead_percent"]
    kept = spent <= asked if asked is not None and spent is not None else None
    low, high = account.interval_percent()
    return {**found, "low_percent": low, "high_percent": high, "kept": kept}
