"""How repeated measurements become one figure: trimmed mean, percentiles, bootstrap interval.

All functions take values in any order and any unit, and return that unit.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRIM = 0.2
"""Share that the trimmed mean drops at each end (MLModelScope, footnote 1; XSP)."""

CONFIDENCE = 0.95
RESAMPLES = 400
MANY = 100


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    lo: float
    hi: float


def kept(n: int, trim: float = TRIM) -> range:
    """Return which order statistics of `n` sorted values the trimmed mean keeps.

    The definition drops ⌊trim·n⌋ values at each end. XSP's edge cases: the mean of one or two values, the
    median of three. Its reference code drops the largest of four in silence; here, as the definition says,
    all four count.
    """
    if n == 3:
        return range(1, 2)
    drop = math.floor(trim * n)
    return range(drop, n - drop)


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """Return the mean of what remains of `values` when ⌊trim·n⌋ are dropped at each end.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the trimmed mean of no values is undefined")
    ordered = sorted(values)
    inner = kept(len(ordered), trim)
    return math.fsum(ordered[i] for i in inner) / len(inner)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile by linear interpolation between order statistics.

    Args:
        values: at least one value.
        share: 0.5 for the median, 0.9 for the 90th percentile.
    """
    if not values:
        raise ValueError("the percentile of no values is undefined")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % percentile-bootstrap interval of the trimmed mean.

    The resampling depends only on the number of values, so equal inputs give equal intervals. From
    `MANY` values on the interval is the normal approximation with the winsorised variance (Tukey and
    McLaughlin 1963), which the bootstrap agrees with there.

    Returns:
        None for fewer than three values, from which no interval can be had.
    """
    if len(values) < 3:
        return None
    ordered = sorted(values)
    if len(ordered) >= MANY:
        return _normal(ordered)
    weighted = _resampling(len(ordered)) * [[value] for value in ordered]
    return _central(weighted.sum(axis=0).tolist())  # row by row, so to the last bit what a sum in Python gives


BATCHES = 20
"""Stretches of a series whose means tell how it drifts; fewer where they would have less than `OF_A_BATCH` values."""

COARSER = (10, 6)
"""Longer stretches, which tell of what changes more slowly; see `drifting_interval`."""

OF_A_BATCH = 3
LEAST_BATCHES = 6


def drifting_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the trimmed mean of a series in the order in which it was measured.

    Neighbours in a series are alike, and what drifts is not in the spread of single values. So the series is cut into
    stretches, and the spread of their trimmed means tells (batch means, with Student's quantile). How long neighbours
    are alike is not known, so it is cut into `BATCHES` and into `COARSER` stretches, and the widest interval of these
    and `interval` counts. Of fewer than `LEAST_BATCHES * OF_A_BATCH` values, `interval` counts alone.

    Returns:
        None for fewer than three values.
    """
    usual, most = interval(values), min(BATCHES, len(values) // OF_A_BATCH)
    if usual is None or most < LEAST_BATCHES:
        return usual
    width = max(_width_by_batches(values, batches) for batches in {most, *(each for each in COARSER if each < most)})
    middle = trimmed_mean(values)
    return Interval(min(usual.lo, middle - width), max(usual.hi, middle + width))


def _width_by_batches(values: Sequence[float], batches: int) -> float:
    """Return half the interval that the means of so many stretches give."""
    cuts = [len(values) * place // batches for place in range(batches + 1)]
    means = [trimmed_mean(values[low:high]) for low, high in itertools.pairwise(cuts)]
    return _student(batches - 1) * statistics.stdev(means) / math.sqrt(batches)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the plain mean of a series in the order in which it was measured.

    What happens rarely and takes long is part of a mean, so nothing is trimmed. Long series are cut into `BATCHES`
    stretches, see `drifting_interval`.

    Returns:
        None for fewer than three values.
    """
    if len(values) < 3:
        return None
    means = list(values)
    if len(values) >= 2 * BATCHES:
        cuts = [len(values) * place // BATCHES for place in range(BATCHES + 1)]
        means = [math.fsum(values[low:high]) / (high - low) for low, high in itertools.pairwise(cuts)]
    middle = math.fsum(values) / len(values)
    width = _student(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    return Interval(middle - width, middle + width)


def _student(freedom: int) -> float:
    """Return Student's quantile for `CONFIDENCE`, by the expansion of Cornish and Fisher."""
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        normal
        + (normal**3 + normal) / (4 * freedom)
        + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    )


def _normal(ordered: Sequence[float]) -> Interval:
    n, inner = len(ordered), kept(len(ordered))
    low, high = ordered[inner[0]], ordered[inner[-1]]
    winsorised = [min(max(value, low), high) for value in ordered]
    error = statistics.stdev(winsorised) / ((1 - 2 * TRIM) * math.sqrt(n))
    middle, width = trimmed_mean(ordered), statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return Interval(middle - width, middle + width)


def _central(draws: list[float]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    return Interval(percentile(draws, tail), percentile(draws, 1 - tail))


@lru_cache(maxsize=256)
def _resampling(n: int) -> NDArray[Any]:
    """Return the weight of each order statistic (row) in the trimmed mean of each bootstrap resample (column).

    A resample's trimmed mean is a weighted sum of the sorted sample, and the weights do not depend on the
    values; so they are drawn once per sample size, and a bootstrap is one product.
    """
    import numpy as np

    draw = random.Random(n)
    inner = kept(n)
    picks = np.sort(np.array([draw.choices(range(n), k=n) for _ in range(RESAMPLES)]), axis=1)[:, inner]
    weights = np.zeros((n, RESAMPLES))
    np.add.at(weights, (picks, np.arange(RESAMPLES)[:, None]), 1 / len(inner))
    return weights
