"""Periodic times between steps that are far longer than the usual one: whether the next one should be traced by lines.

Lines are traced after recorded steps, which are few: a checkpoint after every tenth step falls between two of them, and
the line that writes it would be unknown. So once such gaps take much of the loop and come at a fixed distance, the gap
in which the next one is expected is traced too. Others are not sought: the tracing of many gaps would disturb as many
steps, and what comes once may be the machine's or xsp's doing.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise

SLOW_SHARE = 0.5
"""Least time of a slow gap beyond the usual gap, as a share of the usual iteration."""

MIN_LOOP_SHARE = 0.03
"""Least share of the time of the loop that slow gaps take, for one to be sought."""

FEWEST_SLOW = 3
"""Fewest slow gaps, at equal distances: fewer may be chance."""

MIN_PERIOD = 2
"""Fewest steps from one to the next: consecutive ones are a phase of the program or of the machine."""

ENOUGH = 4
"""Slow gaps that are traced in a run."""

MOST_SOUGHT = 12
"""Most gaps that are traced to find them."""

FEWEST_USUAL, MOST_USUAL = 5, 15
"""Fewest and most latest iterations that say what is usual."""


class SlowGaps:
    """The slow gaps of a loop so far."""

    def __init__(self) -> None:
        self._gaps_ns: deque[int] = deque(maxlen=MOST_USUAL)
        self._iterations_ns: deque[int] = deque(maxlen=MOST_USUAL)
        self._numbers: deque[int] = deque(maxlen=FEWEST_SLOW)
        self._slow_ns = self._loop_ns = self._sought = 0
        self.traced = 0
        """Slow gaps whose lines are known."""

        self.least_ns = 0.0
        """Least time of a slow gap; 0 while that is unknown."""

    def add(self, number: int, gap_ns: int, step_ns: int) -> None:
        """Count the gap before a step.

        Args:
            number: the number of the step.
            gap_ns: nanoseconds of the program between it and the step before, without waits for data.
            step_ns: nanoseconds of the step.
        """
        gap_ns = max(0, gap_ns)
        self._loop_ns += gap_ns + step_ns
        self._gaps_ns.append(gap_ns)
        self._iterations_ns.append(gap_ns + step_ns)
        if len(self._gaps_ns) < FEWEST_USUAL:
            return
        usual_ns = statistics.median(self._gaps_ns)
        self.least_ns = usual_ns + SLOW_SHARE * statistics.median(self._iterations_ns)
        if gap_ns >= self.least_ns:
            self._numbers.append(number)
            self._slow_ns += gap_ns - int(usual_ns)

    def begin_seeking(self, number: int) -> bool:
        """Return whether the gap before a step is to be traced in search of a slow one, and count it if so."""
        is_due = self.steps_until_due(number) == 0
        self._sought += is_due
        return is_due

    def steps_until_due(self, number: int) -> int | None:
        """Return how many steps end before the gap that is to be traced; None if none is.

        Args:
            number: the number of the next step; 0 steps if the gap before it is the one.
        """
        if (
            self.traced >= ENOUGH
            or self._sought >= MOST_SOUGHT
            or len(self._numbers) < FEWEST_SLOW
            or self._slow_ns < MIN_LOOP_SHARE * self._loop_ns
        ):
            return None
        period, *others = {later - earlier for earlier, later in pairwise(self._numbers)}
        if others or period < MIN_PERIOD:
            return None
        return (self._numbers[-1] - number) % period
