"""Summaries of repeated measurements: trimmed mean, percentiles, confidence intervals.

All functions take values in any order and any unit, and return that unit.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRIM = 0.2
"""Share that the trimmed mean drops at each end (MLModelScope, footnote 1; XSP)."""

CONFIDENCE = 0.95
RESAMPLES = 400
MIN_NORMAL_VALUES = 100


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    lo: float
    hi: float


def kept_indices(n: int, trim: float = TRIM) -> range:
    """Return which order statistics of `n` sorted values the trimmed mean keeps.

    The definition drops ⌊trim·n⌋ values at each end. XSP's edge cases: the mean of one or two values, the
    median of three. XSP's reference code silently drops the largest of four values; here all four count, as
    the definition says.
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
    inner = kept_indices(len(ordered), trim)
    return math.fsum(ordered[i] for i in inner) / len(inner)


def percentile(values: Sequence[float], share: float, weights: Sequence[int] | None = None) -> float:
    """Return the percentile by linear interpolation between order statistics.

    Args:
        values: at least one value.
        share: 0.5 for the median, 0.9 for the 90th percentile.
        weights: number of times that each value counts; default: once each.
    """
    if not values:
        raise ValueError("the percentile of no values is undefined")
    if weights is not None and min(weights) < max(weights):
        return _weighted_percentile(values, share, weights)
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower])


def _weighted_percentile(values: Sequence[float], share: float, weights: Sequence[int]) -> float:
    """Return the percentile of values of which each is repeated as often as its weight says."""
    ordered = sorted(zip(values, weights, strict=True))
    cumulative = list(itertools.accumulate(weight for _, weight in ordered))
    position = share * (cumulative[-1] - 1)
    lower = math.floor(position)
    low, high = (ordered[bisect_right(cumulative, rank)][0] for rank in (lower, min(lower + 1, cumulative[-1] - 1)))
    return low + (position - lower) * (high - low)


def of_equal_weight(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Return a series as values of equal weight, so that statistics that weigh all values equally apply to it.

    Values of equal weight stay as they are. Else the series is cut into parts of equal weight, and the result is their
    means: as many as values of equal weight would have to be to determine a mean as well (Kish 1965). A value at the
    end of a part belongs to both parts in proportion.

    Args:
        values: the values, in their order.
        weights: number of measurements that each value is the mean of, at least 1.
    """
    if not values or min(weights) == max(weights):
        return list(values)
    total = sum(weights)
    count = max(1, total**2 // sum(weight**2 for weight in weights))
    sums, start = [0.0] * count, 0
    for value, weight in zip(values, weights, strict=True):
        end = start + weight * count  # so that a part has the length `total`, a whole number
        for part in range(start // total, -(-end // total)):
            sums[part] += value * (min(end, (part + 1) * total) - max(start, part * total))
        start = end
    return [part_sum / total for part_sum in sums]


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % percentile-bootstrap interval of the trimmed mean.

    The resampling depends only on the number of values, so equal inputs give equal intervals. From
    `MIN_NORMAL_VALUES` values on the interval is the normal approximation with the winsorised variance (Tukey and
    McLaughlin 1963), with which the bootstrap agrees there.

    Returns:
        None for fewer than three values, which are too few for an interval.
    """
    if len(values) < 3:
        return None
    ordered = sorted(values)
    if len(ordered) >= MIN_NORMAL_VALUES:
        return _normal_interval(ordered)
    weighted = _resampling(len(ordered)) * [[value] for value in ordered]
    return _percentile_interval(weighted.sum(axis=0).tolist())  # row by row: bit-identical to a sum in Python


def median_ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the 95 % percentile-bootstrap interval of the ratio of two medians, for equal inputs the same.

    Args:
        values: at least one value, as are `others`; positive.
        others: the values by whose median that of `values` is divided.
    """
    draw = random.Random(len(values) * 1009 + len(others))
    ratios = [
        statistics.median(draw.choices(values, k=len(values))) / statistics.median(draw.choices(others, k=len(others)))
        for _ in range(RESAMPLES)
    ]
    return _percentile_interval(ratios)


BATCHES = 20
"""Batches of a series, whose means show its drift; fewer if a batch would have less than `MIN_BATCH_VALUES` values."""

COARSE_BATCHES = (10, 6)
"""Numbers of longer batches, which show slower changes; see `drifting_interval`."""

MIN_BATCH_VALUES = 3
BATCH_TRIM = 0.25
"""Share trimmed at each end of a batch: one value of four, so that one long step does not look like a drift."""

MIN_BATCHES = 6
SHORT_BATCH_VALUES, MIN_SHORT_BATCHES = 2, 4
"""Values per batch and least number of batches for series that are too short for the constants above."""

MIN_RANGE_VALUES = 6
"""From this many values on, the median lies between the least and the greatest one in 97 % of cases (sign test)."""


def drifting_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the trimmed mean of a series in the order in which it was measured.

    Neighbouring values are correlated, so the spread of single values does not contain a drift. So the series is cut
    into batches, and the width of the interval comes from their trimmed means, in two parts:

    - How well the mean of this series is known: batch means, with Student's quantile. The length of the correlation is
      unknown, so the series is cut into `BATCHES` and into `COARSE_BATCHES` batches, and the widest result counts.
    - How far the level wanders: the variance of the means of the longest batches in excess of that of independent
      values (the variance between groups of DerSimonian and Laird 1986). It does not shrink with the length of a series
      with flicker noise, such as that of clocks and machines (Allan 1966), and the program at another time is off
      by as much. So it is not divided by the number of batches.

    The interval is never narrower than `interval`. From `MIN_RANGE_VALUES` values on it is cut to their range.

    Returns:
        None for fewer than three values.
    """
    independent, batch_counts = interval(values), _batch_counts(len(values))
    if independent is None or not batch_counts:
        return independent
    variances = {batches: statistics.variance(_batch_means(values, batches)) for batches in batch_counts}
    squared_mean_width = max(_student(batches - 1) ** 2 * variance / batches for batches, variance in variances.items())
    coarsest, normal = min(batch_counts), statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    independent_variance = coarsest * ((independent.hi - independent.lo) / (2 * normal)) ** 2
    squared_level_width = normal**2 * max(0.0, variances[coarsest] - independent_variance)
    middle, width = trimmed_mean(values), math.sqrt(squared_mean_width + squared_level_width)
    return _clipped(values, Interval(min(independent.lo, middle - width), max(independent.hi, middle + width)))


def _batch_counts(count: int) -> set[int]:
    """Return the numbers of batches into which so many values are cut; empty for too few values."""
    full_batches = min(BATCHES, count // MIN_BATCH_VALUES)
    if full_batches >= MIN_BATCHES:
        return {full_batches, *(batches for batches in COARSE_BATCHES if batches < full_batches)}
    short_batches = min(MIN_BATCHES, count // SHORT_BATCH_VALUES)
    return {short_batches} if short_batches >= MIN_SHORT_BATCHES else set()


def _batch_means(values: Sequence[float], batches: int) -> list[float]:
    bounds = [len(values) * index // batches for index in range(batches + 1)]
    return [trimmed_mean(values[low:high], BATCH_TRIM) for low, high in itertools.pairwise(bounds)]


def _clipped(values: Sequence[float], bounds: Interval) -> Interval:
    """Return an interval cut to the range of the values, if there are enough of them."""
    if len(values) < MIN_RANGE_VALUES:
        return bounds
    return Interval(max(bounds.lo, min(values)), min(bounds.hi, max(values)))


def mean_interval(values: Sequence[float], weights: Sequence[int] | None = None) -> Interval | None:
    """Return the 95 % interval of the plain mean of a series in the order in which it was measured.

    Rare long values are part of a mean, so nothing is trimmed. Long series are cut into `BATCHES` batches of equal
    weight, see `drifting_interval`. Parts of different weight count as fewer parts of the same weight (Kish 1965).

    Args:
        values: the values, in their order.
        weights: number of measurements that each value is the mean of; default: one each.

    Returns:
        None for fewer than three values.
    """
    if len(values) < 3:
        return None
    all_weights = [1] * len(values) if weights is None else weights
    total = sum(all_weights)
    parts = list(zip(values, all_weights, strict=True))
    middle = math.fsum(value * weight for value, weight in parts) / total
    if len(values) >= 2 * BATCHES:
        parts = _batches(parts, total)
    count = total**2 / sum(weight**2 for _, weight in parts)
    if len(parts) < 2:  # a single value has nearly all the weight
        return Interval(min(values), max(values))
    spread = math.fsum((weight * (mean - middle)) ** 2 for mean, weight in parts)
    width = _student(max(1.0, count - 1)) * math.sqrt(spread * count / (count - 1)) / total
    return _clipped(values, Interval(middle - width, middle + width))


def stratified_interval(strata: Sequence[tuple[float, Sequence[float]]]) -> Interval | None:
    """Return the 95 % interval of a mean over strata, of which a few members each were measured.

    A stratum with one value counts with the largest relative deviation of those with more; with 100 % if there are
    none.

    Args:
        strata: the share of each stratum in all members, and its measured values.

    Returns:
        None for fewer than three values.
    """
    measured = [(share, values, math.fsum(values) / len(values)) for share, values in strata if values]
    count, total = sum(len(values) for _, values, _ in measured), sum(share for share, *_ in measured)
    if count < 3 or not total:
        return None
    deviations = [
        math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else None
        for _, values, mean in measured
    ]
    relative = [
        deviation / abs(mean) for deviation, (*_, mean) in zip(deviations, measured, strict=True) if deviation and mean
    ]
    has_more = any(deviation is not None for deviation in deviations)
    usual = max(relative, default=0.0) if has_more else 1.0
    variance, middle = 0.0, 0.0
    for deviation, (share, values, mean) in zip(deviations, measured, strict=True):
        own = usual * abs(mean) if deviation is None else deviation
        variance += (share / total * own) ** 2 / len(values)
        middle += share / total * mean
    width = _student(max(1.0, count - len(measured))) * math.sqrt(variance)
    return Interval(middle - width, middle + width)


def product_interval(*factors: tuple[float, Interval]) -> Interval:
    """Return the interval of a product of independent positive quantities.

    The relative distances of the ends from the values add up in quadrature, each side on its own.

    Args:
        factors: each value with its interval.
    """
    value = math.prod(middle for middle, _ in factors)
    relative_low = math.hypot(*(max(0.0, middle - bounds.lo) / middle for middle, bounds in factors))
    relative_high = math.hypot(*(max(0.0, bounds.hi - middle) / middle for middle, bounds in factors))
    return Interval(value * max(0.0, 1 - relative_low), value * (1 + relative_high))


def _batches(parts: Sequence[tuple[float, int]], total: int) -> list[tuple[float, int]]:
    """Return the means and weights of consecutive batches: `BATCHES`, or fewer if some values are heavier than one."""
    batches: dict[int, list[tuple[float, int]]] = {}
    cumulative = 0
    for value, weight in parts:
        cumulative += weight
        batches.setdefault((cumulative * BATCHES - 1) // total, []).append((value, weight))
    weights = [sum(weight for _, weight in batch) for batch in batches.values()]
    sums = [math.fsum(value * weight for value, weight in batch) for batch in batches.values()]
    return [(sum_ / weight, weight) for sum_, weight in zip(sums, weights, strict=True)]


def _student(freedom: float) -> float:
    """Return Student's quantile for `CONFIDENCE`, by the Cornish-Fisher expansion."""
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        normal
        + (normal**3 + normal) / (4 * freedom)
        + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    )


def _normal_interval(ordered: Sequence[float]) -> Interval:
    n, inner = len(ordered), kept_indices(len(ordered))
    low, high = ordered[inner[0]], ordered[inner[-1]]
    winsorised = [min(max(value, low), high) for value in ordered]
    error = statistics.stdev(winsorised) / ((1 - 2 * TRIM) * math.sqrt(n))
    middle, width = trimmed_mean(ordered), statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return Interval(middle - width, middle + width)


def _percentile_interval(draws: list[float]) -> Interval:
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
    inner = kept_indices(n)
    picks = np.sort(np.array([draw.choices(range(n), k=n) for _ in range(RESAMPLES)]), axis=1)[:, inner]
    weights = np.zeros((n, RESAMPLES))
    np.add.at(weights, (picks, np.arange(RESAMPLES)[:, None]), 1 / len(inner))
    return weights
