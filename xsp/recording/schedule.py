"""Which levels are on in which step: leveled experimentation, interleaved.

A **rung** is a set of levels that are on together, named by the deepest of them. After warm-up and one step
that describes (shapes, memory; its time does not count), the steps take turns at the rungs in a balanced
random order: each block of steps holds every rung once, shuffled, so that drift of the machine hits all
rungs alike. Before each recorded step one runs bare: storing the spans of the step before has emptied the
caches, and a step on cold caches is 1 to 5 % slower than the program's own. Sampled profiling is more of the
same: of `every` steps all but the last run bare.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from xsp.errors import LevelError, UsageError
from xsp.span import Level

LETTERS: dict[str, tuple[Level, ...]] = {
    "M": (Level.MODEL,),
    "L": (Level.LAYER, Level.OP),
    "G": (Level.KERNEL,),
}
"""XSP's letters and the rungs that each adds; KERNEL brings LIBRARY and RUNTIME along."""

RUNG_NAMES = {Level.MODEL: "M", Level.LAYER: "M/L", Level.OP: "M/L/op", Level.KERNEL: "M/L/G"}


def rung_name(rung: int) -> str:
    """Return how a rung is shown, as `parse_levels` reads it: `M`, `M/L`, `M/L/op`, `M/L/op/library`, `M/L/G`.

    A level of a third party is shown by its number.
    """
    try:
        level = Level(rung)
    except ValueError:
        return str(rung)
    name = level.name.lower()
    return RUNG_NAMES.get(level, name if level < Level.MODEL else f"{RUNG_NAMES[Level.OP]}/{name}")


def parse_levels(text: str) -> tuple[Level, ...]:
    """Read levels as a user writes them and return the rungs, outermost first.

    Args:
        text: XSP's letters (`M/L/G`) or names of levels (`model/layer/op`), separated by `/`, or a rung as it is
            shown, `M/L/op`.

    Returns:
        The deepest level of each rung. The first is always `Level.MODEL`.

    Raises:
        LevelError: an unknown level, one named twice, a wrong order, or no MODEL at the front.
    """
    rungs: list[Level] = []
    before = ""
    for part in map(str.strip, text.split("/")):
        added = _levels_of(part, text)
        before, above = part.upper(), before
        if above == "L" and added == (Level.OP,):
            continue  # L has brought it
        if rungs and added[0] <= rungs[-1]:
            raise LevelError(f"levels {text!r}: {part!r} does not come below what stands before it; {_HOWTO}")
        rungs.extend(added)
    if rungs[0] is not Level.MODEL:
        raise LevelError(f"levels {text!r}: they begin with the model level; {_HOWTO}")
    return tuple(rungs)


_HOWTO = "write M, M/L or M/L/G, or names in this order: " + "/".join(
    level.name.lower() for level in Level if level is not Level.APPLICATION
)


def _levels_of(part: str, text: str) -> tuple[Level, ...]:
    if part.upper() in LETTERS:
        return LETTERS[part.upper()]
    if part.upper() in Level.__members__ and part.upper() != "APPLICATION":
        return (Level[part.upper()],)
    raise LevelError(f"levels {text!r}: there is no level {part!r}; {_HOWTO}")


class Turn(NamedTuple):
    """What one step is for."""

    rung: Level
    timed: bool
    describe: bool

    @property
    def kept(self) -> bool:
        """False in steps of which nothing is kept: warm-up, and those that settle the caches."""
        return self.timed or self.describe

    @property
    def bare(self) -> bool:
        """True in steps in which no collector is on."""
        return self.rung is Level.APPLICATION


SETTLE = Turn(Level.APPLICATION, timed=False, describe=False)
"""A step with all collectors off."""


class Schedule:
    """An endless sequence of turns: warm-up, one description, then balanced random blocks of rungs."""

    def __init__(
        self,
        rungs: Sequence[Level],
        warmup: int | None = None,
        seed: int = 0,
        only: Level | None = None,
        settle: bool = True,
        every: int | None = None,
    ) -> None:
        """Make a schedule.

        Args:
            rungs: from `parse_levels`.
            warmup: steps of which nothing is kept; each rung once unless told otherwise.
            seed: of the random order.
            only: measure at this rung alone; the deepest one also describes.
            settle: run a bare step before each recorded one.
            every: record one step in so many; takes the place of `settle`.

        Raises:
            UsageError: a negative warm-up, or less than one step in one.
        """
        if every is not None and every < 1:
            raise UsageError(f"every={every}: one step in so many is recorded; write 1 or more")
        if warmup is not None and warmup < 0:
            raise UsageError(f"warmup={warmup}: the number of warm-up steps cannot be negative; write 0 or more")
        if only is not None and only not in rungs:
            raise UsageError(f"{only.name} is none of the rungs {', '.join(map(rung_name, rungs))}; name one of them")
        self._describes = rungs[-1] >= Level.LAYER and only in (None, rungs[-1])
        self.rungs = tuple(rungs) if only is None else (only,)
        self.warmup = len(self.rungs) if warmup is None else warmup
        self.seed = seed
        self._random = random.Random(seed)
        self.every = every if every is not None else 1 + settle
        self.settle = self.every > 1
        self._warmed = 0
        self._bare = 0
        self._described = not self._describes
        self._block: list[Level] = []
        self._upcoming: Turn | None = None

    def next(self) -> Turn:
        """Return the turn of the next step."""
        if self._upcoming is None:
            self._upcoming = self._choose()
        if self._waits(self._upcoming):
            self._bare += 1
            return SETTLE
        turn, self._upcoming, self._bare = self._upcoming, None, 0
        return turn

    def _waits(self, turn: Turn) -> bool:
        """Return whether the next step runs bare, before the one that a turn was chosen for."""
        return turn.kept and self._bare + 1 < self.every

    def _choose(self) -> Turn:
        """Return the next turn that is not bare."""
        if self._warmed < self.warmup:
            self._warmed += 1
            return Turn(self._warming((self._warmed - 1) % len(self.rungs)), timed=False, describe=False)
        rungs = self._in_use()
        if not self._described:
            self._described = True
            return Turn(rungs[-1], timed=False, describe=True)
        if not self._block:
            self._block = self._random.sample(rungs, k=len(rungs))
        return Turn(self._block.pop(), timed=True, describe=False)

    def _warming(self, place: int) -> Level:
        """Return the rung of a warm-up step: the deepest first."""
        return self.rungs[-1 - place]

    def _in_use(self) -> tuple[Level, ...]:
        """Return the rungs that take turns."""
        return self.rungs

    def steps_for(self, repeats: int) -> int:
        """Return how many steps it takes until every rung was measured `repeats` times."""
        return self.warmup + self.every * (int(self._describes) + repeats * len(self.rungs))


class DescribeOnce(Schedule):
    """Warm-up and the step that describes, then bare steps: of a program that runs for its counters alone."""

    _done = False

    def next(self) -> Turn:
        """Return the turn of the next step."""
        if self._done:
            return SETTLE
        turn = super().next()
        self._done = turn.describe
        return turn
