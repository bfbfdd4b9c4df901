"""Significance of a difference: Student's t, and the rank test of Mann and Whitney, without a dependency on SciPy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_STRIPS = 200
_TAIL_DEVIATIONS = 12
"""Standard deviations beyond which the tail is negligible."""


def p_value(t: float, freedom: float) -> float:
    """Return the two-sided p-value of Student's t.

    With t = √ν·tan u the tail is an integral of cos(u)^(ν - 1), computed by Simpson's rule.
    """
    begin = math.atan(abs(t) / math.sqrt(freedom))
    width = min(math.pi / 2 - begin, _TAIL_DEVIATIONS / math.sqrt(freedom)) / _STRIPS
    heights = [max(0.0, math.cos(begin + k * width)) ** (freedom - 1) for k in range(_STRIPS + 1)]
    area = heights[0] + heights[-1] + 4 * math.fsum(heights[1:-1:2]) + 2 * math.fsum(heights[2:-1:2])
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return float(min(1.0, 2 * scale * area * width / 3))


def quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's t for a share above one half."""
    return _quantile(share, round(min(freedom, 1e4), 1))


@lru_cache(maxsize=4096)
def _quantile(share: float, freedom: float) -> float:
    low, high = 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) / 2 > 1 - share else (low, middle)
    return low


# --- ranks ------------------------------------------------------------------------------------------------

MAX_EXACT_PAIRS = 1_000
"""Maximum number of pairs of values for which the distribution of U is exact; above it, the normal one is used."""

MAX_SIDE_VALUES = 1_000
"""Maximum number of values per side in the differences of pairs; more values are replaced by their quantiles."""


class RankTest(NamedTuple):
    """The result of the rank test: p, and the interval of the shift from the first side to the second."""

    p: float
    low: float
    high: float


def rank_test(a: Sequence[float], b: Sequence[float], level: float) -> RankTest | None:
    """Compare two sets of values by their order alone (Mann and Whitney 1947), so an outlier counts like other values.

    p is exact for few values: the share of all assignments of the values to both sides that separate them at least as
    far. Ties count half, which makes it conservative. The interval of the shift is that of the differences of all
    pairs (Hodges and Lehmann 1963), and excludes 0 if p is at most the level.

    Args:
        a: values of the first side, at least one.
        b: values of the second side, at least one.
        level: significance level of the interval, 0.05 for 95 % coverage of the shift.

    Returns:
        None if so few values cannot reach the level, however far apart they are.
    """
    pairs = len(a) * len(b)
    omitted = _omitted(len(a), len(b), level)
    if omitted == 0:
        return None
    sorted_a, sorted_b = np.sort(np.asarray(a, float)), np.sort(np.asarray(b, float))
    lower, equal = np.searchsorted(sorted_b, sorted_a, "left").sum(), np.searchsorted(sorted_b, sorted_a, "right").sum()
    u = (int(lower) + int(equal)) / 2  # number of pairs in which A's value is the larger one
    p = min(1.0, 2 * _tail(len(a), len(b), math.ceil(min(u, pairs - u))))
    sorted_a, sorted_b = _thinned(sorted_a), _thinned(sorted_b)
    shifts = np.sort(np.subtract.outer(sorted_b, sorted_a), axis=None)
    index = round((omitted - 1) * len(shifts) / pairs)
    return RankTest(p, float(shifts[index]), float(shifts[-1 - index]))


def _thinned(ordered: np.ndarray) -> np.ndarray:
    quantiles: np.ndarray = np.quantile(ordered, (np.arange(MAX_SIDE_VALUES) + 0.5) / MAX_SIDE_VALUES)
    return quantiles if len(ordered) > MAX_SIDE_VALUES else ordered


@lru_cache(maxsize=4096)
def _omitted(n: int, m: int, level: float) -> int:
    """Return how many of the smallest values of U, at either end, the level allows to leave out."""
    low, high = 0, n * m // 2 + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if 2 * _tail(n, m, middle - 1) <= level else (low, middle - 1)
    return low


def _tail(n: int, m: int, u: int) -> float:
    """Return the probability that U is at most `u` if both sides have the same distribution."""
    if n * m > MAX_EXACT_PAIRS:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return statistics.NormalDist().cdf((u + 0.5 - n * m / 2) / deviation)
    ways = _ways(min(n, m), max(n, m))
    return ways[min(u, len(ways) - 1)] / ways[-1]


@lru_cache(maxsize=1024)
def _ways(n: int, m: int) -> tuple[int, ...]:
    """Return, for each u, the number of ways in which U <= u: cumulative sums of Gaussian binomial coefficients."""
    ways = [1] + [0] * (n * m)
    for k in range(1, n + 1):
        for u in range(n * m, m + k - 1, -1):
            ways[u] -= ways[u - m - k]
        for u in range(k, n * m + 1):
            ways[u] += ways[u - k]
    return tuple(accumulate(ways))
