"""Whether two sets of repeated times differ: by how much, how certainly, and which change was detectable.

The difference of two trimmed means is tested by the method of Yuen (1974): Welch's test with the winsorised variance
that belongs to a trimmed mean. The conclusion depends on what is repeated: steps of one process describe that process
alone; differences between two starts of the same program show only between runs. Both are few, and on a loaded machine
some of them may be outliers, so they are also tested by ranks, and the test with the smaller p-value counts. Runs that
took turns are also tested in pairs: whatever slows a machine for minutes slows both runs of a turn. If many rows are
tested at once, p-values are adjusted by the method of Benjamini and Hochberg (1995), so that one in twenty of the rows
called changed is expected to be a false alarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xsp import stats
from xsp.errors import UsageError

ALPHA = 0.05
POWER = 0.8

NEGLIGIBLE = 0.01
"""Minimum change, as a share, to be called a change."""

RANK_SHARE = 0.8
"""Share of the significance level used for the rank test of steps and of runs; Yuen's test has the rest. Ranks need
most of it: with 4 values per side, no p is below 0.029. Yuen's p can be as small as a table of many rows requires."""

START_SPREAD = 0.25
"""Share by which one start of a program may be slower than another. Identical programs, started one after the other on
a shared machine, were seen to differ by 13 %; this is twice as much."""

SLOWER, FASTER, NO_EVIDENCE = "slower", "faster", "no evidence of change"
SLOWER_HERE, FASTER_HERE = "slower here", "faster here"
"""Verdicts on these two runs alone; whether the program itself is slower or faster is unknown."""

BY_YUEN, BY_RANKS, BY_PAIRS = "Yuen's test", "ranks", "pairs"
"""The test that yields the interval and p."""

NO_REPEATS, FEW_REPEATS = "cannot tell (no repeats)", "cannot tell (too few repeats)"

_ADJUSTED = f"p ≤ {ALPHA} after the Benjamini-Hochberg adjustment within its table"
_SIZE = f"and the change is {100 * NEGLIGIBLE:.0f} % or more"
_SIGNS_OF_TURNS = (
    "the interval of the difference excludes 0, Yuen's test of all runs or of the differences within turns has "
    f"{_ADJUSTED}, {_SIZE}"
)
_SIGNS_OF_BOTH = (
    "the interval of the difference excludes 0, the Mann-Whitney rank test (exact for few values) or Yuen's test has "
    f"{_ADJUSTED} and for the use of two tests, {_SIZE}"
)
_DETECTABLE = "detectable: the smallest change that such repeats would find with a probability of 80 %."


class Evidence(NamedTuple):
    """The result of the comparison of two sets of times, in their unit."""

    a: float
    b: float
    low: float | None
    high: float | None
    p: float | None
    detectable: float | None
    """The smallest difference that would be detected with probability `POWER`."""
    test: str | None = None
    """The test behind `low`, `high` and `p`: `BY_YUEN`, `BY_RANKS` or `BY_PAIRS`."""

    @property
    def change(self) -> float:
        """The second time minus the first."""
        return self.b - self.a


@dataclass(frozen=True)
class Repeats:
    """The kind of repeats on each side, which determines how a change is judged."""

    unit: str
    """step: steps of one run per side; run: several runs per side; turn: runs in turns, tested after each turn."""

    min_count: int
    """Number of repeats that each side needs."""

    rule: str
    start_spread: float = 0.0
    """Share by which two starts of an unchanged program may differ, if the repeats do not contain that."""

    level: float = ALPHA
    """Significance level of one look, such that all looks together raise at most `ALPHA` false alarms."""

    def figure(self, values: Sequence[float]) -> float:
        """Return the figure of a side."""
        return stats.trimmed_mean(values) if self.unit == "step" else _trimmed(values)

    def evidence(self, a: Sequence[float], b: Sequence[float]) -> Evidence:
        """Compare two sets of times.

        Args:
            a: times of the first side, at least one.
            b: times of the second side, at least one.
        """
        if self.unit == "step":
            # compare the steps of two runs by both tests
            means = stats.trimmed_mean(a), stats.trimmed_mean(b)
            if min(len(a), len(b)) < STEPS.min_count:
                return Evidence(*means, None, None, None, None)
            result = _test_both(a, b, *means)
            return result._replace(detectable=(result.detectable or 0.0) + START_SPREAD * means[0])
        return _compare_runs(a, b) if self.unit == "run" else _compare_turns(a, b, self.level)

    def verdict(self, result: Evidence, p: float | None, count: int) -> str:
        """Return the verdict by the rule.

        Args:
            result: evidence of the row.
            p: its p-value after the adjustment.
            count: number of repeats of the side with fewer.
        """
        if p is None or result.low is None or result.high is None:
            return NO_REPEATS if count <= 1 else FEW_REPEATS
        is_certain = p <= ALPHA and not result.low <= 0 <= result.high
        if not is_certain or abs(result.change) < NEGLIGIBLE * result.a:
            return NO_EVIDENCE
        if result.change > 0:
            return SLOWER if result.low >= self.start_spread * result.a else SLOWER_HERE
        return FASTER if result.high <= -result.a * self.start_spread / (1 + self.start_spread) else FASTER_HERE

    def adjusted(self, p_values: Sequence[float | None]) -> list[float | None]:
        """Return p-values adjusted for several looks and, after Benjamini and Hochberg, for many rows; None stays."""
        adjusted = [None if p is None else min(1.0, p * ALPHA / self.level) for p in p_values]
        ordered = sorted(((p, index) for index, p in enumerate(adjusted) if p is not None), reverse=True)
        minimum = 1.0
        for rank, (p, index) in enumerate(ordered):
            minimum = min(minimum, p * len(ordered) / (len(ordered) - rank))
            adjusted[index] = minimum
        return adjusted


STEPS = Repeats(
    "step",
    min_count=3,
    start_spread=START_SPREAD,
    rule=f"slower here, faster here: {_SIGNS_OF_BOTH}. This applies to these two runs only: repeats are the steps "
    "of one process, and the intervals do not include differences between two starts of the same program. slower, "
    f"faster: the whole interval is beyond what two starts may differ by, {100 * START_SPREAD:.0f} %. {_DETECTABLE}",
)
RUNS = Repeats(
    "run",
    min_count=2,
    rule=f"slower, faster: {_SIGNS_OF_BOTH}. Repeats are runs: each gives one figure, the trimmed mean of its steps, "
    f"and the 95 % intervals include the differences between runs. {_DETECTABLE}",
)


def in_turns(max_turns: int, level: float) -> Repeats:
    """Return how runs that took turns, and were tested after each turn, are judged.

    Args:
        max_turns: maximum number of turns.
        level: significance level of one look, see `LOOK_LEVELS`.
    """
    rule = (
        f"slower, faster: {_SIGNS_OF_TURNS}. Repeats are runs, which took turns and were tested after each turn. "
        f"p and the intervals allow for two tests at each look of up to {max_turns} turns: at most "
        f"{100 * ALPHA:.0f} % false alarms overall. {_DETECTABLE}"
    )
    return Repeats("turn", min_count=2, rule=rule, level=level)


def _test_both(a: Sequence[float], b: Sequence[float], mean_a: float, mean_b: float) -> Evidence:
    """Compare two sets by Yuen's test and by ranks; the smaller p counts, raised because two tests were made.

    Yuen's test is the sharper one if values are close together, but finds nothing if a few out of few are outliers. The
    rank test does, but its p is limited by the number of values. Each has its share of the level, see `RANK_SHARE`, so
    both intervals are wider accordingly. With too few values for ranks, and with many, only Yuen's test is made.
    """
    rank_result = stats.rank_test(a, b, ALPHA * RANK_SHARE) if min(len(a), len(b)) < stats.MIN_NORMAL_VALUES else None
    share = 1 - RANK_SHARE if rank_result is not None else 1.0
    error, freedom = stats.yuen_error(a, b)
    shift, margin = _trimmed(b) - _trimmed(a), error * stats.student(1 - ALPHA * share / 2, freedom)
    low, high, p, test = shift - margin, shift + margin, min(1.0, _p(shift, error, freedom) / share), BY_YUEN
    detectable = _detectable(error, freedom, ALPHA * share)
    if rank_result is not None:
        detectable = min(detectable, _WIDTH_TO_DETECTABLE * (rank_result.high - rank_result.low))
        if rank_result.p / RANK_SHARE < p:
            low, high, p, test = rank_result.low, rank_result.high, rank_result.p / RANK_SHARE, BY_RANKS
    change = mean_b - mean_a  # if values are skewed, it may lie outside the interval of the ranks
    return Evidence(mean_a, mean_b, min(low, change), max(high, change), p, detectable, test)


_NORMAL = statistics.NormalDist()
_WIDTH_TO_DETECTABLE = 0.5 * (1 + _NORMAL.inv_cdf(POWER) / _NORMAL.inv_cdf(1 - ALPHA * RANK_SHARE / 2))
"""Ratio of the detectable change to the width of the interval of a shift."""


def _compare_runs(a: Sequence[float], b: Sequence[float]) -> Evidence:
    """Compare one figure per run by both tests; intervals come from the tests: a bootstrap of few values is too narrow.

    A single run is compared with several by Yuen's test, on the assumption that it varies as they do.
    """
    if 1 in (len(a), len(b)):
        return _test_yuen(a, b, ALPHA)
    means = _trimmed(a), _trimmed(b)
    result = _test_both(a, b, *means)
    return result._replace(detectable=max(result.detectable or 0.0, NEGLIGIBLE * means[0]))


def _compare_turns(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure per run by Yuen's test of all runs and of the differences within turns.

    The smaller p counts; the level is that of both tests together. Pairs are sharper if the machine drifts over the
    turns, all runs if they differ by chance alone. If a turn lacks a run, there are no pairs.
    """
    result = _test_yuen(a, b, level)
    if result.p is None or result.detectable is None or len(a) != len(b):
        return result
    pairs = _test_pairs(a, b, level)
    detectable = min(result.detectable, pairs.detectable or result.detectable)
    return (pairs if (pairs.p or 0.0) < result.p else result)._replace(detectable=detectable)


def _test_yuen(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure per run by Yuen's test alone; None for interval and p with one run per side."""
    if max(len(a), len(b)) < RUNS.min_count:
        return Evidence(_trimmed(a), _trimmed(b), None, None, None, None)
    error, freedom = stats.yuen_error(a, b)
    return _student_evidence(a, b, _trimmed(b) - _trimmed(a), error, freedom, level)


def _test_pairs(a: Sequence[float], b: Sequence[float], level: float) -> Evidence:
    """Compare one figure per run by Yuen's test for one set: the trimmed mean of the differences within turns."""
    differences = [time_b - time_a for time_a, time_b in zip(a, b, strict=True)]
    square, freedom, _ = stats.squared_error(differences)
    result = _student_evidence(a, b, _trimmed(differences), math.sqrt(square), freedom, level)
    assert result.low is not None
    assert result.high is not None
    # the displayed change is that of the two figures, and must lie within its interval
    return result._replace(low=min(result.low, result.change), high=max(result.high, result.change), test=BY_PAIRS)


def _student_evidence(
    a: Sequence[float], b: Sequence[float], shift: float, error: float, freedom: float, level: float
) -> Evidence:
    """Return the evidence of Student's t for a shift, with the figures of both sides."""
    means, margin = (_trimmed(a), _trimmed(b)), error * stats.student(1 - level / 2, freedom)
    detectable = max(_detectable(error, freedom, level), NEGLIGIBLE * means[0])
    return Evidence(*means, shift - margin, shift + margin, _p(shift, error, freedom), detectable, BY_YUEN)


def _p(change: float, error: float, freedom: float) -> float:
    return stats.p_value(change / error, freedom) if error else float(change == 0)


def _detectable(error: float, freedom: float, level: float) -> float:
    return error * (stats.student(1 - level / 2, freedom) + stats.student(POWER, freedom))


def _trimmed(values: Sequence[float]) -> float:
    """Return the trimmed mean that the standard error belongs to, which has no edge case for three values."""
    return stats.trimmed_mean(values, median_of_three=False)


# --- sequential --------------------------------------------------------------------------------------------------
# When to stop: runs in turns are tested after each turn, and all these looks together raise few false alarms.
#
# Repeated looks increase the probability of a false alarm. So each look tests at a level below 5 %, the same for all
# looks, as in Pocock (1977): the level at which one in twenty pairs of equal programs is called changed in any of the
# looks. The levels were simulated for the smaller p of both tests, with normal figures without drift (120,000
# courses each); with drift, the test of all runs raises fewer alarms. `tests/comparison/test_compare_rates.py`
# repeats some of the simulations. The levels belong to a maximum number of turns that is stated before the first
# turn.


MIN_TURNS = 3
"""Turns before the first look."""

LOOK_LEVELS = {
    3: 0.0375, 4: 0.0222, 5: 0.0132, 6: 0.0102, 7: 0.0085, 8: 0.0074, 10: 0.0058, 12: 0.0051, 15: 0.0043, 20: 0.0036,
    25: 0.0032, 30: 0.0029, 40: 0.0025, 50: 0.0023, 75: 0.002, 100: 0.0018,
}  # fmt: skip
"""Maximum number of turns → significance level of one look."""

MAX_TURNS = max(LOOK_LEVELS)

USUAL_TURNS = 20
"""Recommended maximum number of turns. In 1,000 simulated courses each, they find a step that is 5 % slower in all
courses if starts differ by 2 % (15 turns: 99.7 %, 10: 95 %), in 99.9 % if turns also differ by 2.5 % (99, 88 %), in
98 % if a neighbour slows one run in ten by 15 % (96, 88 %), in 94 % if starts differ by 3.2 % and turns do not
(84, 62 %), with at most 4 % false alarms at all looks together. A change is known after 6 to 11 turns with each
maximum; if there is none, 20 turns take a third longer than 15."""


def turn_repeats(max_turns: int) -> Repeats:
    """Return how runs that take turns, at most `max_turns`, are judged.

    Raises:
        UsageError: `max_turns` is below three or above a hundred.
    """
    if not MIN_TURNS <= max_turns <= MAX_TURNS:
        raise UsageError(
            f"{max_turns} turns: at least {MIN_TURNS} are needed for a result, and at most {MAX_TURNS} are allowed"
        )
    return in_turns(max_turns, next(level for turns, level in LOOK_LEVELS.items() if turns >= max_turns))


class TurnResult(NamedTuple):
    """The result of a look at the step: whether the turns suffice, and the change with its interval."""

    is_enough: bool
    change: float
    """Change as a share of A, like `low` and `high`."""
    low: float
    high: float


def compare_turn(repeats: Repeats, a: list[float], b: list[float], threshold: float | None = None) -> TurnResult:
    """Test the figures of the steps after a turn.

    Args:
        repeats: the result of `turn_repeats`.
        a: one figure per run, two or more.
        b: likewise.
        threshold: the share from which a slowdown of B matters, or None.

    Without a threshold the turns suffice if B is known to be slower or faster, or the change to be negligible; with a
    threshold, if the change is known to lie on one side of it. The intervals hold at all looks at once.
    """
    result = repeats.evidence(a, b)
    assert result.low is not None
    assert result.high is not None
    low, high = result.low / result.a, result.high / result.a
    if threshold is None:
        verdict = repeats.verdict(result, repeats.adjusted([result.p])[0], min(len(a), len(b)))
        is_enough = verdict in (SLOWER, FASTER) or -NEGLIGIBLE < low <= high < NEGLIGIBLE
    else:
        is_enough = high < threshold or low >= max(threshold, NEGLIGIBLE)
    return TurnResult(is_enough, result.change / result.a, low, high)
