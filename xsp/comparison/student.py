"""Student's t distribution: how rare a value is, and which value is that rare. The core has no SciPy."""

from __future__ import annotations

import math
from functools import lru_cache

_STRIPS = 200
_FAR = 12
"""Standard deviations beyond which nothing of the tail is left to sum."""


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


def quantile(share: float, freedom: float) -> float:
    """Return the value below which a share above one half lies."""
    return _quantile(share, round(min(freedom, 1e4), 1))


@lru_cache(maxsize=4096)
def _quantile(share: float, freedom: float) -> float:
    low, high = 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) / 2 > 1 - share else (low, middle)
    return low
