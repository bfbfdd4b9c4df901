"""When to stop: runs that take turns are looked at after each turn, and all looks together raise few false alarms.

Looking often finds by chance what is not there. So each look tests at a level below 5 %, the same for all looks, as
Pocock (1977) does: the level at which, of programs that do not differ, one in twenty is called changed in any of the
looks. The levels were simulated for Yuen's test of normal figures (120,000 courses each);
`tests/comparison/test_compare_rates.py` simulates some of them again. They belong to a maximum that is stated before
the first turn.
"""

from __future__ import annotations

from typing import NamedTuple

from xsp.comparison.evidence import FASTER, NEGLIGIBLE, SLOWER, Repeats, in_turns
from xsp.errors import UsageError

FIRST = 3
"""Turns before the first look."""

LEVELS = {
    3: 0.05, 4: 0.041, 5: 0.028, 6: 0.022, 7: 0.019, 8: 0.0165, 10: 0.0132, 12: 0.0113, 15: 0.0095, 20: 0.0078,
    25: 0.007, 30: 0.0062, 40: 0.0052, 50: 0.0047, 75: 0.0041, 100: 0.0037,
}  # fmt: skip
"""By the greatest number of turns."""

MOST = max(LEVELS)


def repeats(most: int) -> Repeats:
    """Return how runs are judged that take turns, at most so many.

    Raises:
        UsageError: fewer than three, or more than a hundred.
    """
    if not FIRST <= most <= MOST:
        raise UsageError(f"{most} turns: at least {FIRST} are needed to tell anything, and at most {MOST} are taken")
    return in_turns(most, next(level for turns, level in LEVELS.items() if turns >= most))


class Known(NamedTuple):
    """What a look at the step found: whether more turns are needed, and where it stands."""

    enough: bool
    change: float
    """Share of A, as all three."""
    low: float
    high: float


def look(how: Repeats, a: list[float], b: list[float], threshold: float | None = None) -> Known:
    """Look at the figures of the steps after a turn.

    Args:
        how: from `repeats`.
        a: a figure a run, two or more.
        b: likewise.
        threshold: the share at which it matters that B is slower, where that is the question.

    Without a threshold it is enough to know that B is slower or faster, or that the change is negligible; with one,
    on which side of it the change lies. The intervals hold at all looks at once, so either end may be read.
    """
    found = how.evidence(a, b)
    assert found.low is not None
    assert found.high is not None
    low, high = found.low / found.a, found.high / found.a
    if threshold is None:
        verdict = how.verdict(found, how.adjusted([found.p])[0], min(len(a), len(b)))
        enough = verdict in (SLOWER, FASTER) or -NEGLIGIBLE < low <= high < NEGLIGIBLE
    else:
        enough = high < threshold or low >= max(threshold, NEGLIGIBLE)
    return Known(enough, found.change / found.a, low, high)
