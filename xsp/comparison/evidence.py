"""Whether two sets of repeated times differ: by how much, how surely, and what would have been found.

The difference of two trimmed means is tested as Yuen (1974) does: Welch's test, with the winsorised variance that
belongs to a trimmed mean. Its interval is the percentile bootstrap of `xsp.summary`. Where many rows are asked at
once, p-values are adjusted as Benjamini and Hochberg (1995) do, so that of the rows that are called changed one in
twenty is expected not to be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from xsp import summary

ALPHA = 0.05
POWER = 0.8
ENOUGH = 3
"""Repeats that each side needs."""

NEGLIGIBLE = 0.01
"""A change of less than this share is not called one: two processes that do the same differ by that much."""

SLOWER, FASTER, NO_EVIDENCE = "slower", "faster", "no evidence of change"
NO_REPEATS, FEW_REPEATS = "cannot tell (no repeats)", "cannot tell (too few repeats)"

RULE = (
    f"slower, faster: the 95 % interval of the difference of trimmed means excludes 0, Yuen's test has "
    f"p ≤ {ALPHA} after the adjustment of Benjamini and Hochberg within its table, and the change is "
    f"{NEGLIGIBLE:.0%} or more. detectable: the change that such repeats would find four times out of five. "
    "Repeats are steps of one process; what differs between two starts of the same program is not in the intervals."
)

_STRIPS = 200
_FAR = 12
"""Standard deviations beyond which nothing of the tail is left to sum."""


class Evidence(NamedTuple):
    """What two sets of times say, in their unit."""

    a: float
    b: float
    low: float | None
    high: float | None
    p: float | None
    detectable: float | None
    """The smallest difference that the test would find with `POWER`."""

    @property
    def change(self) -> float:
        """How much more the second takes."""
        return self.b - self.a


def evidence(a: Sequence[float], b: Sequence[float]) -> Evidence:
    """Compare two sets of times.

    Args:
        a: of the first run, at least one.
        b: of the second one, at least one.
    """
    means = summary.trimmed_mean(a), summary.trimmed_mean(b)
    if min(len(a), len(b)) < ENOUGH:
        return Evidence(*means, None, None, None, None)
    ends = summary.difference(a, b)
    error, freedom = _error(a, b)
    change = _trimmed(b) - _trimmed(a)
    p = p_value(change / error, freedom) if error else float(change == 0)
    detectable = error * (_quantile(1 - ALPHA / 2, freedom) + _quantile(POWER, freedom))
    return Evidence(*means, ends.lo if ends else None, ends.hi if ends else None, p, detectable)


def verdict(found: Evidence, adjusted: float | None, repeats: int) -> str:
    """Return the verdict by `RULE`.

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
    return SLOWER if found.change > 0 else FASTER


def adjusted(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for being many, as Benjamini and Hochberg do; None stays None."""
    known = sorted(((p, place) for place, p in enumerate(p_values) if p is not None), reverse=True)
    found: list[float | None] = [None] * len(p_values)
    least = 1.0
    for rank, (p, place) in enumerate(known):
        least = min(least, p * len(known) / (len(known) - rank))
        found[place] = least
    return found


def p_value(t: float, freedom: float) -> float:
    """Return how often Student's t is that far from 0 or farther, to either side.

    With t = √ν·tan u the tail is an integral of cos(u)^(ν - 1), which Simpson's rule sums.
    """
    begin = math.atan(abs(t) / math.sqrt(freedom))
    width = min(math.pi / 2 - begin, _FAR / math.sqrt(freedom)) / _STRIPS
    heights = [max(0.0, math.cos(begin + k * width)) ** (freedom - 1) for k in range(_STRIPS + 1)]
    area = heights[0] + heights[-1] + 4 * math.fsum(heights[1:-1:2]) + 2 * math.fsum(heights[2:-1:2])
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return float(min(1.0, 2 * scale * area * width / 3))


def _quantile(share: float, freedom: float) -> float:
    return _rounded_quantile(share, round(min(freedom, 1e4), 1))


@lru_cache(maxsize=4096)
def _rounded_quantile(share: float, freedom: float) -> float:
    """Return Student's quantile for a share above one half, by halving."""
    low, high = 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) / 2 > 1 - share else (low, middle)
    return low


def _trimmed(values: Sequence[float]) -> float:
    """Return the trimmed mean that the standard error belongs to: by the definition also of three values, of which
    `summary.trimmed_mean` takes the median."""
    drop = math.floor(summary.TRIM * len(values))
    return statistics.fmean(sorted(values)[drop : len(values) - drop])


def _error(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return Yuen's standard error of the difference of two trimmed means, and its degrees of freedom."""
    squares, shares = [], []
    for values in (a, b):
        ordered, drop = sorted(values), math.floor(summary.TRIM * len(values))
        low, high, inner = ordered[drop], ordered[-1 - drop], len(ordered) - 2 * drop
        winsorised = statistics.variance([min(max(value, low), high) for value in ordered])
        squares.append((len(ordered) - 1) * winsorised / (inner * (inner - 1)))
        shares.append(inner - 1)
    total = sum(squares)
    below = sum(square * square / share for square, share in zip(squares, shares, strict=True))
    return math.sqrt(total), total * total / below if below else float(sum(shares))
