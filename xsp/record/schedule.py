"""The levels that are on in each step: leveled experimentation, interleaved.

A **rung** is a set of levels that are on together, named by the deepest of them. After warm-up and one step that
describes (shapes, memory; its time does not count), the steps take turns at the rungs in a balanced random order: each
block of steps contains every rung once, shuffled, so that drift of the machine affects all rungs alike. Each kind of
step has its own blocks.

Storing the spans of a step evicts caches and lets clocks drop, so the steps after it are slow: the first one by some
hundred microseconds, those of the next milliseconds by a few percent. So some bare steps run before each recorded step,
at least one and for `SETTLE_NS`. A bare step is **steady** once so many of them and so much time have passed since
anything was stored (`STEADY`); steady steps show the program without xsp. The next step to record is drawn at random,
so that work in every second or every tenth step is not missed.

A step is stored in another process while the program continues. Bare steps that run meanwhile are not steady, and none
is recorded: if only one bare step is left before the next recorded one, the program waits for the storing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from xsp.schema import Level


class Turn(NamedTuple):
    """The purpose of one step."""

    rung: Level
    timed: bool
    describe: bool

    @property
    def is_kept(self) -> bool:
        """Whether anything of the step is kept; False in warm-up steps and in those that settle the caches."""
        return self.timed or self.describe

    @property
    def is_bare(self) -> bool:
        """Whether no collector is on in the step."""
        return self.rung is Level.APPLICATION


SETTLE = Turn(Level.APPLICATION, timed=False, describe=False)
"""The turn of a step with all collectors off."""

SETTLE_NS = 2_000_000
"""Bare time in nanoseconds before a recorded step: see benchmarks/short_steps.py for the remaining effect."""

STEADY = ((20, 20_000_000), (8, 60_000_000), (5, 150_000_000), (3, 250_000_000), (2, 500_000_000))
"""Numbers of bare steps and their time in nanoseconds after which the next steps are steady; reaching one pair is
enough. Until then evicted caches fill again: consecutive steps of 4.6 ms are slower by 25, 11, 8, 4, 4, 2, 3 and 1 %,
of 18 ms (training) by 16, 7, 6 and 6 %; of 1.3 ms, the fourth is as fast as all that follow."""

FIRST = 3
"""Timed steps of each rung that every program should have: the fewest that give an interval."""

PATIENCE = 4
"""Multiple of the usual distance between two steps of a kind for which its next step is expected."""

MOST_DESCRIPTIONS = 3
"""Most describing turns that are planned for a kind: its steps may turn out to be of other kinds again and again."""

NEW = -1
"""The kind of a step with an unknown first call; it runs bare, because it is slower than the next of its kind."""


class Plan:
    """The turns of one kind of step: one that describes, then blocks of rungs."""

    def __init__(self, is_described: bool) -> None:
        self.is_described = is_described
        self.described_turns = 0
        """Describing turns that were planned for this kind."""

        self.block: list[Level] = []
        self.recorded_steps = 0
        """Steps that were recorded and kept."""

        self.timed_steps = 0
        """Those of them whose time counts."""

        self.planned_turns = 0
        """Turns that were planned for this kind, also if the step was of another kind in the end."""

        self.step_count = self.last_step = 0
        """Steps of this kind, and the number of the last one among all steps."""

        self.steps_ns = 0
        """Time of these steps in nanoseconds."""

        self.next_turn: Turn | None = None
        """The turn of its next recorded step, once chosen."""

        self.due_ns = 0.0
        """Time of the program's loop before which this turn is not affordable."""

    def add_turn(self, turn: Turn) -> None:
        """Count a turn that was planned for another kind and used by a step of this kind."""
        if turn.describe:
            self.is_described = True
        elif turn.rung in self.block:
            self.block.remove(turn.rung)
        self.recorded_steps += 1
        self.timed_steps += turn.timed

    def return_turn(self, turn: Turn) -> None:
        """Take back a turn of this kind that was used by a step of another kind."""
        if turn.describe:
            self.is_described = self.described_turns >= MOST_DESCRIPTIONS
        else:
            self.block.append(turn.rung)
        self.recorded_steps -= 1
        self.timed_steps -= turn.timed


class Schedule:
    """An endless sequence of turns: warm-up, one description, then balanced random blocks of rungs."""

    def __init__(
        self,
        rungs: Sequence[Level],
        warmup: int | None = None,
        seed: int = 0,
        only: Level | None = None,
        settle: int | None = None,
        every: int | None = None,
        spread: bool = False,
        stretch: int = 0,
        by_time: bool = True,
        later_every: int | None = None,
    ) -> None:
        """Make a schedule.

        Args:
            rungs: rungs from `parse_levels`.
            warmup: number of steps of which nothing is kept; default: one for each rung.
            seed: seed of the random order.
            only: measure only at this rung; the deepest one also describes.
            settle: number of bare steps before each recorded one; default: as many as run in `SETTLE_NS`.
            every: record one step in this many, on average; replaces `settle`.
            spread: draw the recorded steps at random, unless `settle` is given; else they are equally far apart.
            stretch: number of steady steps in each block of rungs.
            by_time: False if several processes must choose the same turns; then one step settles.
            later_every: record one step in this many once each rung was measured `FIRST` times.
        """
        self._describes = rungs[-1] >= Level.LAYER and only in (None, rungs[-1])
        self.rungs = tuple(rungs) if only is None else (only,)
        self.warmup = len(self.rungs) if warmup is None else warmup
        self.seed = seed
        self._random = random.Random(seed)
        default_every = 1 + settle if settle is not None else 3 if spread else 2
        self.every = every if every is not None else default_every
        self.settle = self.every > 1
        self._stretch = stretch
        self._by_time = by_time and settle is None and every is None
        self._spread, self._later_every = spread and self.settle and (settle is None or every is not None), later_every
        self._gaps = self._gap_range(self.every)
        self._gap = self._draw_gap()
        self._warmup_done = 0
        self._last_is_steady = False
        self._bare_steps = self._steady_steps = self._ended_steps = 0
        self._steps_since_storing = self._ns_since_storing = 0  # bare steps since anything was stored, and their time
        self._plans: dict[int | None, Plan] = {}
        self._planned: Plan | None = None
        self.storing_patience_s: float | None = None
        """Longest time in seconds that the program waits, where it waits, until a step is stored; None for no limit."""

        self.is_storing = False
        """Whether a step is being stored while others run."""

        self.repeats: dict[Level, int] = dict.fromkeys(self.rungs, 0)
        """Timed steps of each rung so far, of all kinds."""

    def _gap_range(self, every: int) -> range:
        """Return the possible numbers of bare steps between two recorded ones; `every - 1` on average."""
        if not self._spread:
            return range(every - 1, every)
        shortest = max(1, every // 2)
        return range(shortest, max(2 * (every - 1) - shortest, shortest + 1) + 1)

    def _draw_gap(self) -> int:
        return self._random.choice(self._gaps)

    @property
    def is_steady(self) -> bool:
        """Whether the next bare step is unaffected by recording."""
        return any(
            self._steps_since_storing >= steps and self._ns_since_storing >= taken_ns for steps, taken_ns in STEADY
        )

    @property
    def waits_for_storing(self) -> bool:
        """Whether the last recorded step must be stored before the next one begins: the one after may be recorded."""
        is_urgent = self._is_first or any(
            self._is_behind(plan) and self._may_come(plan) for plan in self._plans.values()
        )
        return (self._gaps[0] if is_urgent else self._gap) - self._bare_steps <= 1

    def next(self, kind: int | None = None) -> Turn:
        """Return the turn of the next step.

        Args:
            kind: expected kind of the step; `NEW` for one that never occurred before.
        """
        if self._warmup_done >= self.warmup and (kind == NEW or not self._is_settled()):
            return self._run_bare()
        plan = self._plan(kind)
        turn = plan.next_turn = plan.next_turn or self._choose(plan)
        if turn.is_kept and self._must_wait(turn, plan):
            return self._run_bare()
        self._use_turn(turn, plan)
        return turn

    def _run_bare(self) -> Turn:
        self._last_is_steady = self.is_steady
        self._steady_steps += self._last_is_steady
        self._bare_steps += 1
        return SETTLE

    def undo_bare(self) -> None:
        """Take the last turn back, which was bare: the step that begins is of another kind than expected."""
        self._steady_steps -= self._last_is_steady
        self._bare_steps -= 1

    def _plan(self, kind: int | None) -> Plan:
        plan = self._plans.get(kind)
        if plan is None:
            plan = self._plans[kind] = Plan(is_described=not self._describes)
        return plan

    def _use_turn(self, turn: Turn, plan: Plan) -> None:
        """Count a turn, and draw the distance to the next one."""
        if not turn.is_kept:
            self._warmup_done += 1
        else:
            plan.planned_turns += 1
            plan.described_turns += turn.describe
            plan.add_turn(turn)
        if turn.timed:
            self.repeats[turn.rung] += 1
        if turn.timed and not plan.block:
            self._steady_steps = 0
        if self._later_every is not None and min(self.repeats.values()) >= FIRST:
            self.every, self._later_every = self._later_every, None
            self._gaps = self._gap_range(self.every)
        self._planned, self._gap = plan, self._draw_gap()
        for pending in self._plans.values():
            pending.next_turn = None
        self._bare_steps = 0
        self.restart_settling()

    def count_step(self, turn: Turn, kind: int, dur_ns: int) -> None:
        """Note the actual kind and the duration of the step that had this turn."""
        self._ended_steps += 1
        actual = self._plan(kind)
        actual.step_count, actual.last_step = actual.step_count + 1, self._ended_steps
        actual.steps_ns += dur_ns
        if turn.is_bare:
            self._steps_since_storing += 1
            self._ns_since_storing += dur_ns
        elif turn.is_kept and self._planned is not None and actual is not self._planned:
            self._planned.return_turn(turn)
            actual.add_turn(turn)

    def count_bare(self, kind: int, steps: int, dur_ns: int) -> None:
        """Count bare steps that ran without a turn."""
        plan = self._plan(kind)
        self._ended_steps += steps
        plan.step_count, plan.last_step = plan.step_count + steps, self._ended_steps
        plan.steps_ns += dur_ns
        self._bare_steps += steps
        self._steady_steps += steps
        self._steps_since_storing += steps
        self._ns_since_storing += dur_ns

    def steps_until_due(self) -> int | None:
        """Return the number of bare steps before the next recorded one; None if that is not determined in steps."""
        return None if self._by_time else self._gap - self._bare_steps

    def ns_until_due(self) -> float | None:
        """Return the least nanoseconds of the program before the next recorded step; None if that is not known."""
        return None

    def take_back(self, turn: Turn) -> None:
        """Take back the turn of a step that was abandoned."""
        if turn.is_kept and self._planned is not None:
            self._planned.return_turn(turn)
            if turn.timed:
                self.repeats[turn.rung] -= 1

    def forget_kinds(self) -> None:
        """Forget what was recorded of each kind: other calls make up the steps from now on."""
        self._plans.clear()
        self._planned = None

    def restart_settling(self) -> None:
        """Note that something was stored, so that the next steps run on cold caches."""
        self._steps_since_storing = self._ns_since_storing = 0

    def _must_wait(self, turn: Turn, plan: Plan) -> bool:
        """Return whether the next step runs bare although a turn was chosen."""
        if self._begins_block(turn, plan) and self._must_rest(plan):
            return True
        is_urgent = self._is_first or self._is_behind(plan)
        return self._bare_steps < self._gap and not (self._bare_steps >= self._gaps[0] and is_urgent)

    def _begins_block(self, turn: Turn, plan: Plan) -> bool:
        """Return whether a turn is the first of a block of rungs; the first ones of a program are in no block."""
        return turn.timed and len(plan.block) == len(self._active_rungs()) and not self._is_first

    def _must_rest(self, plan: Plan) -> bool:
        """Return whether steady steps should run before the next block of rungs."""
        return self._steady_steps < self._stretch

    def _is_settled(self) -> bool:
        if self._bare_steps < self._gaps[0]:
            return False
        return not self._by_time or not self._ended_steps or self._is_first or self._ns_since_storing >= SETTLE_NS

    @property
    def _is_first(self) -> bool:
        """Whether any rung was never measured: even a short program should have results."""
        return min(self.repeats.values()) == 0

    def _is_behind(self, plan: Plan) -> bool:
        """Return whether a kind was recorded less often than another by at least a whole block."""
        return plan.recorded_steps + len(self.rungs) <= max(
            candidate.recorded_steps for candidate in self._plans.values()
        )

    def _may_come(self, plan: Plan) -> bool:
        """Return whether more steps of a kind are expected: not of one that occurred once, long ago."""
        if not plan.step_count:
            return False
        usual_distance = (self._ended_steps if plan.step_count > 1 else plan.last_step) / plan.step_count
        return self._ended_steps - plan.last_step < PATIENCE * usual_distance

    def _choose(self, plan: Plan) -> Turn:
        """Return the next turn of a kind, which is not bare."""
        if self._warmup_done < self.warmup:
            return Turn(self._warmup_rung(self._warmup_done % len(self.rungs)), timed=False, describe=False)
        rungs = self._active_rungs()
        if not plan.is_described:
            return Turn(rungs[-1], timed=False, describe=True)
        if not plan.block:
            plan.block = self._random.sample(rungs, k=len(rungs))
        return Turn(plan.block[-1], timed=True, describe=False)

    def _warmup_rung(self, index: int) -> Level:
        """Return the rung of a warm-up step: the deepest first."""
        return self.rungs[-1 - index]

    def _active_rungs(self) -> tuple[Level, ...]:
        """Return the rungs that currently take turns."""
        return self.rungs

    def steps_for(self, repeats: int) -> int:
        """Return the number of steps until every rung is measured `repeats` times; short steps take more."""
        return self.warmup + self.every * (int(self._describes) + repeats * len(self.rungs)) + repeats * self._stretch


class DescribeOnce(Schedule):
    """A schedule of warm-up, the describing step, then bare steps, for a program that runs only for its counters."""

    _done = False

    def next(self, kind: int | None = None) -> Turn:
        """Return the turn of the next step."""
        if self._done:
            return SETTLE
        turn = super().next(kind)
        self._done = turn.describe
        return turn
