"""Whether two sets of repeated times differ: by how much, how surely, and what would have been found.

The difference of two trimmed means is tested as Yuen (1974) does: Welch's test, with the winsorised variance that
belongs to a trimmed mean. What is repeated decides what can be told. Steps of one process tell of that process alone;
what differs between two starts of the same program is told by runs. Both are few, and on a loaded machine several of
them may be far from the others, so they are tested by their ranks too, and the test that tells more counts. Runs that
took turns are tested in pairs too: what slows a machine for minutes slows both runs of a turn. Where many rows are
asked at once, p-values are adjusted as Benjamini and Hochberg (1995) do, so that of the rows that are called changed
one in twenty is expected not to be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xsp import summary
from xsp.comparison.significance import p_value, quantile, ranked
from xsp.errors import UsageError

ALPHA = 0.05
POWER = 0.8

NEGLIGIBLE = 0.01
"""A change of less than this share is not called one."""

RANKS = 0.8
"""The part of the level at which steps, and runs, are tested by their ranks; the rest is that of Yuen's test. Ranks
need the most of it: of 4 a side, no p is below 0.029. Yuen's p can be as small as a table of many rows needs."""

STARTS = 0.25
"""By how much two starts of the same program may differ: the one is that share slower. Identical programs, started one
after the other on a shared machine, were seen to differ by 13 %; this is twice as much."""

SLOWER, FASTER, NO_EVIDENCE = "slower", "faster", "no evidence of change"
SLOWER_HERE, FASTER_HERE = "slower here", "faster here"
"""Between these two runs; whether the program is cannot be told."""

BY_YUEN, BY_RANKS, BY_PAIRS = "Yuen's test", "ranks", "pairs"
"""The test that the interval and p are of."""

NO_REPEATS, FEW_REPEATS = "cannot tell (no repeats)", "cannot tell (too few repeats)"

_ADJUSTED = f"p ≤ {ALPHA} after the adjustment of Benjamini and Hochberg within its table"
_SIZE = f"and the change is {100 * NEGLIGIBLE:.0f} % or more"
_SIGNS_OF_TURNS = (
    "the interval of the difference excludes 0, Yuen's test of all runs or of the differences within turns has "
    f"{_ADJUSTED}, {_SIZE}"
)
_SIGNS_OF_BOTH = (
    "the interval of the difference excludes 0, the rank test of Mann and Whitney (exact for few) or Yuen's "
    f"test has {_ADJUSTED} and for being two tests, {_SIZE}"
)
_DETECTABLE = "detectable: the change that such repeats would find four times out of five."


class Evidence(NamedTuple):
    """What two sets of times say, in their unit."""

    a: float
    b: float
    low: float | None
    high: float | None
    p: float | None
    detectable: float | None
    """The smallest difference that would be called one with `POWER`."""
    test: str | None = None
    """What `low`, `high` and `p` are of: `BY_YUEN`, `BY_RANKS` or `BY_PAIRS`."""

    @property
    def change(self) -> float:
        """How much more the second takes."""
        return self.b - self.a


@dataclass(frozen=True)
class Repeats:
    """What is repeated on each side, and so how a change is judged."""

    unit: str
    """step: of one run a side; run: several a side; turn: runs that took turns, looked at after each."""

    enough: int
    """Repeats that each side needs."""

    rule: str
    starts: float = 0.0
    """By how much two starts may differ without a change of the program, where the repeats do not tell."""

    level: float = ALPHA
    """Of one look, so that all together raise at most `ALPHA` false alarms."""

    def figure(self, values: Sequence[float]) -> float:
        """Return the one figure of a side."""
        return summary.trimmed_mean(values) if self.unit == "step" else _trimmed(values)

    def evidence(self, a: Sequence[float], b: Sequence[float]) -> Evidence:
        """Compare two sets of times.

        Args:
            a: of the first side, at least one.
            b: of the second one, at least one.
        """
        if self.unit == "step":
            return _of_steps(a, b)
        return _of_runs(a, b) if self.unit == "run" else _of_turns(a, b, self.level)

    def verdict(self, found: Evidence, adjusted: float | None, repeats: int) -> str:
        """Return the verdict by the rule.

        Args:
            found: of the row.
            adjusted: its p-value after the adjustment.
            repeats: of the side that has fewer.
        """
        if adjusted is None or found.low is None or found.high is None:
            return NO_REPEATS if repeats <= 1 else FEW_REPEATS
        certain = adjusted <= ALPHA and not found.low <= 0 <= found.high
        if not certain or abs(found.change) < NEGLIGIBLE * found.a:
            return NO_EVIDENCE
        if found.change > 0:
            return SLOWER if found.low >= self.starts * found.a else SLOWER_HERE
        return FASTER if found.high <= -found.a * self.starts / (1 + self.starts) else FASTER_HERE

    def adjusted(self, p_values: Sequence[float | None]) -> list[float | None]:
        """Return p-values adjusted for several looks, and for being many as Benjamini and Hochberg do; None stays."""
        raised = [None if p is None else min(1.0, p * ALPHA / self.level) for p in p_values]
        known = sorted(((p, place) for place, p in enumerate(raised) if p is not None), reverse=True)
        least = 1.0
        for rank, (p, place) in enumerate(known):
            least = min(least, p * len(known) / (len(known) - rank))
            raised[place] = least
        return raised


STEPS = Repeats(
    "step",
    enough=3,
    starts=STARTS,
    rule=f"slower here, faster here: {_SIGNS_OF_BOTH}. That is about these two runs: repeats are the steps of one "
    "process, and what differs between two starts of the same program is not in the intervals. slower, faster: the "
    f"whole interval is beyond what two starts may differ by, {100 * STARTS:.0f} %. {_DETECTABLE}",
)
RUNS = Repeats(
    "run",
    enough=2,
    rule=f"slower, faster: {_SIGNS_OF_BOTH}. Repeats are runs: each gives one figure, the trimmed mean of its steps, "
    f"and the 95 % intervals are of what differs between runs. {_DETECTABLE}",
)


def in_turns(most: int, level: float) -> Repeats:
    """Return how runs are judged that took turns, at most so many, and were looked at after each of them.

    Args:
        most: turns.
        level: of one look, see `xsp.comparison.evidence`.
    """
    rule = (
        f"slower, faster: {_SIGNS_OF_TURNS}. Repeats are runs, which took turns and were looked at after each turn. "
        f"p and the intervals allow for two tests at as many looks as {most} turns have: in all at most "
        f"{100 * ALPHA:.0f} % false alarms. {_DETECTABLE}"
    )
    return Repeats("turn", enough=2, rule=rule, level=level)


def _of_steps(a: Sequence[float], b: Sequence[float]) -> Evidence:
    """Compare the steps of two runs by both tests."""
    means = summary.trimmed_mean(a), summary.trimmed_mean(b)
    if min(len(a), len(b)) < STEPS.enough:
        return Evidence(*means, None, None, None, None)
    found = _by_both(a, b, *means)
    return found._replace(detectable=(found.detectable or 0.0) + STARTS * means[0])


def _by_both(a: Sequence[float], b: Sequence[float], mean_a: float, mean_b: float) -> Evidence:
    """Compare two sets by Yuen's test and by ranks; the smaller p counts, raised for being one of two.

    Yuen's test is the sharper one where values are alike, and finds nothing where a few among few are far away; ranks
    find it, and cannot be sharper than the number of values allows. Each has its part of the level, see `RANKS`, so the
    interval of either is wider by as much. Of so few that ranks cannot tell, and of many, Yuen's test is alone.
    """
    of_ranks = ranked(a, b, ALPHA * RANKS) if min(len(a), len(b)) < summary.MANY else None
    share = 1 - RANKS if of_ranks is not None else 1.0
    error, freedom = _error(a, b)
    shift, half = _trimmed(b) - _trimmed(a), error * quantile(1 - ALPHA * share / 2, freedom)
    low, high, p, test = shift - half, shift + half, min(1.0, _p(shift, error, freedom) / share), BY_YUEN
    detectable = _detectable(error, freedom, ALPHA * share)
    if of_ranks is not None:
        detectable = min(detectable, _WIDTH_TO_DETECTABLE * (of_ranks.high - of_ranks.low))
        if of_ranks.p / RANKS < p:
            low, high, p, test = of_ranks.low, of_ranks.high, of_ranks.p / RANKS, BY_RANKS
    change = mean_b - mean_a  # where values are skewed it may lie beside the shift of ranks
    return Evidence(mean_a, mean_b, min(low, change), max(high, change), p, detectable, test)


_NORMAL = statistics.NormalDist()
_WIDTH_TO_DETECTABLE = 0.5 * (1 + _NORMAL.inv_cdf(POWER) / _NORMAL.inv_cdf(1 - ALPHA * RANKS / 2))
"""What can be detected, of the width of the interval of a shift."""


def _of_runs(a: Sequence[float], b: Sequence[float]) -> Evidence:
    """Compare one figure a run by both tests; an interval is a test's own, because a bootstrap of a few is too narrow.

    A single run is held against several others as one that varies as they do, by Yuen's test.
    """
    if 1 in (len(a), len(b)):
        return _by_yuen(a, b, ALPHA)
    means = _trimmed(a), _trimmed(b)
    found = _by_both(a, b, *means)
    return found._replace(detectable=max(found.detectable or 0.0, NEGLIGIBLE * means[0]))


def _of_turns(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure a run by Yuen's test of all runs and by that of the differences within turns.

    The smaller p counts; the level is that of both together. Pairs tell more where the machine drifts over the turns,
    all runs where they differ by chance alone. Where a turn lacks a run, there are no pairs.
    """
    found = _by_yuen(a, b, level)
    if found.p is None or found.detectable is None or len(a) != len(b):
        return found
    pairs = _by_pairs(a, b, level)
    detectable = min(found.detectable, pairs.detectable or found.detectable)
    return (pairs if (pairs.p or 0.0) < found.p else found)._replace(detectable=detectable)


def _by_yuen(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure a run by Yuen's test alone; one run a side has no figure of how it varies."""
    if max(len(a), len(b)) < RUNS.enough:
        return Evidence(_trimmed(a), _trimmed(b), None, None, None, None)
    error, freedom = _error(a, b)
    return _tested(a, b, _trimmed(b) - _trimmed(a), error, freedom, level)


def _by_pairs(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure a run by the trimmed mean of the differences within turns, as Yuen's test does for one set."""
    differences = [of_b - of_a for of_a, of_b in zip(a, b, strict=True)]
    square, freedom, _ = _square(differences)
    found = _tested(a, b, _trimmed(differences), math.sqrt(square), freedom, level)
    assert found.low is not None
    assert found.high is not None
    # the change that is shown is that of the two figures, and lies within its interval
    return found._replace(low=min(found.low, found.change), high=max(found.high, found.change), test=BY_PAIRS)


def _tested(
    a: Sequence[float], b: Sequence[float], shift: float, error: float, freedom: float, level: float
) -> Evidence:
    """Return what Student's t says of a shift, with the figures of both sides."""
    means, half = (_trimmed(a), _trimmed(b)), error * quantile(1 - level / 2, freedom)
    detectable = max(_detectable(error, freedom, level), NEGLIGIBLE * means[0])
    return Evidence(*means, shift - half, shift + half, _p(shift, error, freedom), detectable, BY_YUEN)


def _p(change: float, error: float, freedom: float) -> float:
    return p_value(change / error, freedom) if error else float(change == 0)


def _detectable(error: float, freedom: float, level: float) -> float:
    return error * (quantile(1 - level / 2, freedom) + quantile(POWER, freedom))


def _trimmed(values: Sequence[float]) -> float:
    """Return the trimmed mean that the standard error belongs to: by the definition also of three values, of which
    `summary.trimmed_mean` takes the median."""
    drop = math.floor(summary.TRIM * len(values))
    return statistics.fmean(sorted(values)[drop : len(values) - drop])


def _error(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return Yuen's standard error of the difference of two trimmed means, and its degrees of freedom."""
    if 1 in (len(a), len(b)):  # nothing is known of how the one varies: as the others do
        square, share, inner = _square(a if len(a) > 1 else b)
        return math.sqrt(square * (1 + inner)), share
    (of_a, share_a, _), (of_b, share_b, _) = _square(a), _square(b)
    below = of_a * of_a / share_a + of_b * of_b / share_b
    return math.sqrt(of_a + of_b), (of_a + of_b) ** 2 / below if below else float(share_a + share_b)


def _square(values: Sequence[float]) -> tuple[float, int, int]:
    """Return the squared standard error of a trimmed mean, its degrees of freedom, and of how many it is the mean."""
    ordered, drop = sorted(values), math.floor(summary.TRIM * len(values))
    low, high, inner = ordered[drop], ordered[-1 - drop], len(ordered) - 2 * drop
    winsorised = statistics.variance([min(max(value, low), high) for value in ordered])
    return (len(ordered) - 1) * winsorised / (inner * (inner - 1)), inner - 1, inner


# --- sequential --------------------------------------------------------------------------------------------------
# When to stop: runs that take turns are looked at after each turn, and all looks together raise few false alarms.
#
# Looking often finds by chance what is not there. So each look tests at a level below 5 %, the same for all looks, as
# Pocock (1977) does: the level at which, of programs that do not differ, one in twenty is called changed in any of
# the looks. The levels were simulated for the smaller p of both tests, of normal figures that do not drift (120,000
# courses each): where they drift, the test of all runs raises fewer alarms;
# `tests/comparison/test_compare_rates.py` simulates some of them again. They belong to a maximum that is stated
# before the first turn.


FIRST = 3
"""Turns before the first look."""

LEVELS = {
    3: 0.0375, 4: 0.0222, 5: 0.0132, 6: 0.0102, 7: 0.0085, 8: 0.0074, 10: 0.0058, 12: 0.0051, 15: 0.0043, 20: 0.0036,
    25: 0.0032, 30: 0.0029, 40: 0.0025, 50: 0.0023, 75: 0.002, 100: 0.0018,
}  # fmt: skip
"""By the greatest number of turns."""

MOST = max(LEVELS)

USUAL = 20
"""Turns that are recommended. Of 1,000 simulated courses each they find a step that is 5 % slower in all
where starts differ by 2 % (15 turns: 99.7 %, 10: 95 %), in 99.9 % where turns differ by 2.5 % as well (99, 88 %), in
98 % where a neighbour slows one run in ten by 15 % (96, 88 %), in 94 % where starts differ by 3.2 % and turns do not
(84, 62 %); with at most 4 % false alarms at all looks together. A change is known after 6 to 11 turns with each; where
there is none, 20 take a third longer than 15."""


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
