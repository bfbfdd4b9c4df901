"""Statistics of measurements: intervals, trimmed means, percentiles, Student's t, rank tests, correlations.

Functions take values in any unit, and return that unit. NumPy is imported where it is needed, because the measured
process imports this module.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

Number = TypeVar("Number", bound=float)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

TRIM = 0.2
"""Share that the trimmed mean drops at each end (MLModelScope, footnote 1; XSP)."""

CONFIDENCE = 0.95
UPPER = (1 + CONFIDENCE) / 2
"""Probability below the upper end of a two-sided interval."""

NORMAL = statistics.NormalDist().inv_cdf(UPPER)
"""Standard deviations from the mean of a normal distribution to either end of its 95 % interval: 1.95996."""

RESAMPLES = 400
MIN_NORMAL_VALUES = 100


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % confidence interval.

    All three have the unit of the values that they were computed from: nanoseconds for `dur_ns`, milliseconds per step
    for the gain of a piece of advice, none for a ratio.
    """

    low: float
    value: float
    high: float

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high

    @property
    def half(self) -> float:
        """Half of the distance between both ends."""
        return (self.high - self.low) / 2

    @property
    def may_be_zero(self) -> bool:
        """Whether the lower end is zero or negative."""
        return self.low <= 0

    def scale(self, factor: float) -> Interval:
        """Return the interval multiplied by `factor`; a negative factor swaps the ends."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(low, self.value * factor, high)

    def limit(self, maximum: float) -> Interval:
        """Return the interval with its value and both ends limited to `maximum`."""
        return Interval(min(self.low, maximum), min(self.value, maximum), min(self.high, maximum))

    def at(self, value: float) -> Interval:
        """Return the interval of another value, with ends that include it."""
        return Interval(min(self.low, value), value, max(self.high, value))


# --- means and percentiles --------------------------------------------------------------------------------------------


def kept_indices(n: int, trim: float = TRIM, median_of_three: bool = True) -> range:
    """Return which order statistics of `n` sorted values the trimmed mean keeps.

    The definition drops ⌊trim·n⌋ values at each end. XSP's edge cases: the mean of one or two values, the
    median of three. XSP's reference code silently drops the largest of four values; here all four count, as
    the definition says.

    Args:
        n: number of values.
        trim: share that is dropped at each end.
        median_of_three: whether three values have XSP's edge case; else the definition applies to them too.
    """
    if n == 3 and median_of_three:
        return range(1, 2)
    drop = math.floor(trim * n)
    return range(drop, n - drop)


def trimmed_mean(values: Sequence[float], trim: float = TRIM, median_of_three: bool = True) -> float:
    """Return the mean of what remains of `values` when ⌊trim·n⌋ are dropped at each end; see `kept_indices`.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the trimmed mean of no values is undefined")
    ordered = sorted(values)
    inner = kept_indices(len(ordered), trim, median_of_three)
    return math.fsum(ordered[i] for i in inner) / len(inner)


def known_sum(values: Iterable[Number | None]) -> Number | None:
    """Return the sum of values; None if one of them is unknown."""
    known = list(values)
    if None in known:
        return None
    total: Any = math.fsum if any(isinstance(value, float) for value in known) else sum
    return cast("Number", total(known))


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


def nearest_rank(count: int, share: float) -> int:
    """Return the index, from 0, of the percentile that is one of `count` ordered values."""
    # 0.07 * 100 exceeds 7 only by rounding, and must not become 8
    return min(count - 1, max(0, math.ceil(round(share * count, 9)) - 1))


def percentile_interval(
    values: Array, share: float, confidence: float = CONFIDENCE
) -> tuple[float | None, float, float | None]:
    """Return the lower end, the value and the upper end of a percentile that is one of the values.

    An end is None if too few values lie beyond the percentile to bound it.

    Args:
        values: in the order of measurement; at least one.
        share: 0.99 for the 99th.
        confidence: confidence level of the interval.
    """
    import numpy as np

    ordered, n = np.sort(values), len(values)
    value = ordered[nearest_rank(n, share)]
    half_width = rank_half_width(values <= value, share, confidence)
    low, high = math.floor(share * n - half_width) - 1, math.ceil(share * n + half_width)
    return ordered[low].item() if low >= 0 else None, value.item(), ordered[high].item() if high < n else None


def share_interval(share: float, count: int) -> Interval:
    """Return a share of independent samples with Wilson's score interval (Wilson 1927)."""
    square = NORMAL * NORMAL
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return Interval(max(0.0, centre - half), share, min(1.0, centre + half))


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


# --- intervals --------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> Interval | None:
    """Return the trimmed mean with its 95 % percentile-bootstrap interval.

    The resampling depends only on the number of values, so equal inputs give equal intervals. From
    `MIN_NORMAL_VALUES` values on the interval is the normal approximation with the winsorised variance (Tukey and
    McLaughlin 1963), with which the bootstrap agrees there.

    Returns:
        None for fewer than three values, which are too few for an interval.
    """
    return intervals([values])[0]


def intervals(samples: Sequence[Sequence[float]]) -> list[Interval | None]:
    """Return the `interval` of each sample; those of many samples of one size take a tenth of the time."""
    found: list[Interval | None] = [None] * len(samples)
    positions_by_size: dict[int, list[int]] = {}
    for position, values in enumerate(samples):
        if len(values) >= MIN_NORMAL_VALUES:
            found[position] = _normal_interval(sorted(values))
        elif len(values) >= 3:
            positions_by_size.setdefault(len(values), []).append(position)
    for positions in positions_by_size.values():
        for first in range(0, len(positions), _SAMPLES_AT_ONCE):
            part = positions[first : first + _SAMPLES_AT_ONCE]
            for position, ends in zip(part, _bootstrap_ends([samples[position] for position in part]), strict=True):
                low, high = ends
                found[position] = Interval(low, trimmed_mean(samples[position]), high)
    return found


_SAMPLES_AT_ONCE = 256
"""Number of samples that are resampled together, in less than a megabyte."""


def _normal_interval(ordered: Sequence[float]) -> Interval:
    """Return the interval of the trimmed mean by the normal approximation."""
    n, inner = len(ordered), kept_indices(len(ordered))
    error = math.sqrt(_winsorised_variance(ordered, inner)) / ((1 - 2 * TRIM) * math.sqrt(n))
    middle, width = trimmed_mean(ordered), NORMAL * error
    return Interval(middle - width, middle, middle + width)


def _bootstrap_ends(samples: Sequence[Sequence[float]]) -> Iterable[tuple[float, float]]:
    """Return both ends of the percentile-bootstrap interval of the trimmed mean of samples of one size."""
    import numpy as np

    ordered = np.sort(np.array(samples, dtype=float), axis=1)
    weights = _resampling(ordered.shape[1])
    draws = weights[0] * ordered[:, :1]
    for position in range(1, len(weights)):  # in the order of a sum in Python, which is bit-identical
        draws += weights[position] * ordered[:, position : position + 1]
    ranks = [share * (RESAMPLES - 1) for share in (1 - UPPER, UPPER)]
    lower = [math.floor(rank) for rank in ranks]
    draws.partition([*lower, *(rank + 1 for rank in lower)], axis=1)
    ends = (
        (draws[:, low] + (rank - low) * (draws[:, low + 1] - draws[:, low])).tolist()
        for rank, low in zip(ranks, lower, strict=True)
    )
    return zip(*ends, strict=True)


def median_ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the ratio of two medians with its 95 % percentile-bootstrap interval, for equal inputs the same.

    Args:
        values: at least one value, as are `others`; positive.
        others: the values by whose median that of `values` is divided.
    """
    draw = random.Random(len(values) * 1009 + len(others))
    ratios = [
        statistics.median(draw.choices(values, k=len(values))) / statistics.median(draw.choices(others, k=len(others)))
        for _ in range(RESAMPLES)
    ]
    return Interval(
        percentile(ratios, 1 - UPPER), percentile(values, 0.5) / percentile(others, 0.5), percentile(ratios, UPPER)
    )


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
    """Return the trimmed mean of a series, in the order in which it was measured, with its 95 % interval.

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
    squared_mean_width = max(
        student(UPPER, batches - 1) ** 2 * variance / batches for batches, variance in variances.items()
    )
    coarsest = min(batch_counts)
    independent_variance = coarsest * (independent.half / NORMAL) ** 2
    squared_level_width = NORMAL**2 * max(0.0, variances[coarsest] - independent_variance)
    middle, width = independent.value, math.sqrt(squared_mean_width + squared_level_width)
    return _clipped(
        values, Interval(min(independent.low, middle - width), middle, max(independent.high, middle + width))
    )


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
    return Interval(max(bounds.low, min(values)), bounds.value, min(bounds.high, max(values)))


def mean_interval(values: Sequence[float], weights: Sequence[int] | None = None) -> Interval | None:
    """Return the plain mean of a series, in the order in which it was measured, with its 95 % interval.

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
        return Interval(min(values), middle, max(values))
    spread = math.fsum((weight * (mean - middle)) ** 2 for mean, weight in parts)
    width = student(UPPER, max(1.0, count - 1)) * math.sqrt(spread * count / (count - 1)) / total
    return _clipped(values, Interval(middle - width, middle, middle + width))


def stratified_interval(strata: Sequence[tuple[float, Sequence[float]]]) -> Interval | None:
    """Return the mean over strata, of which a few members each were measured, with its 95 % interval.

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
    width = student(UPPER, max(1.0, count - len(measured))) * math.sqrt(variance)
    return Interval(middle - width, middle, middle + width)


def product_interval(*factors: Interval) -> Interval:
    """Return the interval of a product of independent positive quantities.

    The relative distances of the ends from the values add up in quadrature, each side on its own.
    """
    value = math.prod(factor.value for factor in factors)
    relative_low = math.hypot(*(max(0.0, factor.value - factor.low) / factor.value for factor in factors))
    relative_high = math.hypot(*(max(0.0, factor.high - factor.value) / factor.value for factor in factors))
    return Interval(value * max(0.0, 1 - relative_low), value, value * (1 + relative_high))


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


def _winsorised_variance(ordered: Sequence[float], inner: range) -> float:
    """Return the variance of sorted values of which those outside `inner` are replaced by its first and last value."""
    low, high = ordered[inner[0]], ordered[inner[-1]]
    return statistics.variance([min(max(value, low), high) for value in ordered])


def resampled_ends(resampled: Array) -> Array:
    """Return both ends of the 95 % percentile interval of resampled figures: over the first axis, as two rows."""
    import numpy as np

    ends: Array = np.percentile(resampled, [100 * (1 - UPPER), 100 * UPPER], axis=0)
    return ends


def rank_half_width(below: Array, share: float, confidence: float = CONFIDENCE) -> float:
    """Return half the width, in ranks, of the interval of a percentile of a series.

    It is that of independent values, or a wider one from batches. As in `drifting_interval`, the correlation length is
    unknown, so several batch lengths are tried, with Student's quantile, and the widest interval counts.

    Args:
        below: for each value, in the order of measurement, whether it is at most the percentile.
        share: 0.99 for the 99th percentile.
        confidence: confidence level of the interval.
    """
    import numpy as np

    n, upper = len(below), (1 + confidence) / 2
    half_width = statistics.NormalDist().inv_cdf(upper) * math.sqrt(n * share * (1 - share))
    for batches in (BATCHES, *COARSE_BATCHES):
        if n < batches * MIN_BATCH_VALUES:
            continue
        starts = np.arange(batches) * n // batches
        means = np.add.reduceat(below.astype(float), starts) / np.diff([*starts, n])
        half_width = max(half_width, student(upper, batches - 1) * n * float(means.std(ddof=1)) / math.sqrt(batches))
    return half_width


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


# --- Student's t ------------------------------------------------------------------------------------------------------

_STRIPS = 200
_TAIL_DEVIATIONS = 12
"""Standard deviations beyond which the tail is negligible."""

_MAX_STEPS = 50
_PRECISION = 1e-12


def p_value(t: float, freedom: float) -> float:
    """Return the two-sided p-value of Student's t.

    With t = √ν·tan u the tail is an integral of cos(u)^(ν - 1), computed by Simpson's rule.
    """
    begin = math.atan(abs(t) / math.sqrt(freedom))
    width = min(math.pi / 2 - begin, _TAIL_DEVIATIONS / math.sqrt(freedom)) / _STRIPS
    heights = [max(0.0, math.cos(begin + k * width)) ** (freedom - 1) for k in range(_STRIPS + 1)]
    area = heights[0] + heights[-1] + 4 * math.fsum(heights[1:-1:2]) + 2 * math.fsum(heights[2:-1:2])
    return float(min(1.0, 2 * _student_scale(freedom) * area * width / 3))


def _student_scale(freedom: float) -> float:
    return math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)


def student(share: float, freedom: float) -> float:
    """Return the quantile of Student's t for a share above one half; `freedom` counts to one decimal."""
    return _student(share, round(min(freedom, 1e4), 1))


@lru_cache(maxsize=4096)
def _student(share: float, freedom: float) -> float:
    """Return the quantile by Newton's method, which rises to it from the expansion of Cornish and Fisher below it."""
    normal = statistics.NormalDist().inv_cdf(share)
    t = (
        normal
        + (normal**3 + normal) / (4 * freedom)
        + (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    )
    for _ in range(_MAX_STEPS):
        density = _student_scale(freedom) / math.sqrt(freedom) * (1 + t * t / freedom) ** (-(freedom + 1) / 2)
        step = (p_value(t, freedom) / 2 - (1 - share)) / density
        t += step
        if abs(step) <= _PRECISION * t:
            break
    return t


def yuen_error(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the standard error of the difference of two trimmed means (Yuen 1974), and its degrees of freedom.

    The trimmed means are those by the definition, also for three values (`median_of_three=False`).
    """
    if 1 in (len(a), len(b)):  # the variance of a single value is unknown: assume that of the other side
        square, share, inner = squared_error(a if len(a) > 1 else b)
        return math.sqrt(square * (1 + inner)), share
    (var_a, share_a, _), (var_b, share_b, _) = squared_error(a), squared_error(b)
    denominator = var_a * var_a / share_a + var_b * var_b / share_b
    return math.sqrt(var_a + var_b), (var_a + var_b) ** 2 / denominator if denominator else float(share_a + share_b)


def squared_error(values: Sequence[float]) -> tuple[float, int, int]:
    """Return the squared standard error of a trimmed mean, its degrees of freedom, and the number of values in it."""
    ordered, inner = sorted(values), kept_indices(len(values), median_of_three=False)
    winsorised = _winsorised_variance(ordered, inner)
    return (len(ordered) - 1) * winsorised / (len(inner) * (len(inner) - 1)), len(inner) - 1, len(inner)


# --- ranks ------------------------------------------------------------------------------------------------------------

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
    import numpy as np

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


def _thinned(ordered: Array) -> Array:
    import numpy as np

    quantiles: Array = np.quantile(ordered, (np.arange(MAX_SIDE_VALUES) + 0.5) / MAX_SIDE_VALUES)
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
    return tuple(itertools.accumulate(ways))


# --- correlation ------------------------------------------------------------------------------------------------------
# Their 95 % intervals are percentile bootstraps of pairs. The resamples depend only on the number of pairs, so that
# coefficients of the same models can be compared resample by resample.

COEFFICIENT_RESAMPLES = 1000
MOST_UNDEFINED = 0.05
"""Maximum share of resamples without a coefficient, because all their models are equal, for an interval."""


@dataclass(frozen=True)
class Figure:
    """A figure with both ends of its 95 % interval."""

    value: float
    low: float | None
    high: float | None


def pearson_of(x: Array, y: Array) -> float:
    """Return Pearson's correlation of two rows of numbers; NaN if one of them is constant."""
    return float(pearson_rows(x[None, :], y[None, :])[0])


def spearman_of(x: Array, y: Array) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    import numpy as np

    return float(spearman_rows(x, y, np.arange(len(x))[None, :])[0])


def resamples(count: int) -> Array:
    """Return the indices of the models of each resample, one row per resample; equal for equal counts."""
    import numpy as np

    return np.random.default_rng(count).integers(0, count, size=(COEFFICIENT_RESAMPLES, count))


def pearson_rows(x: Array, y: Array) -> Array:
    """Return the correlation of each pair of rows; NaN if a row is constant."""
    import numpy as np

    constant = (np.ptp(x, axis=1) == 0) | (np.ptp(y, axis=1) == 0)
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    size = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    correlation: Array = np.full(len(x), np.nan)
    np.divide((x * y).sum(axis=1), size, out=correlation, where=~constant & (size > 0))
    np.clip(correlation, -1, 1, out=correlation)
    return correlation


def spearman_rows(x: Array, y: Array, draws: Array) -> Array:
    """Return the rank correlation of each resample; NaN if one of its rows is constant."""
    return pearson_rows(_ranks(x, draws), _ranks(y, draws))


def _ranks(values: Array, draws: Array) -> Array:
    """Return the rank of each value within its resample; equal values share the mean of their ranks."""
    import numpy as np

    kinds, codes = np.unique(values, return_inverse=True)
    drawn_codes = codes.reshape(-1)[draws]
    rows = np.arange(len(draws))[:, None]
    counts = np.bincount((drawn_codes + rows * len(kinds)).ravel(), minlength=len(draws) * len(kinds))
    counts = counts.reshape(len(draws), len(kinds))
    mean: Array = np.cumsum(counts, axis=1) - counts + (counts + 1) / 2
    ranks: Array = mean[rows, drawn_codes]
    return ranks


def figure(value: float, resampled: Array) -> Figure:
    """Return a figure with the interval of its resamples; without an interval if too many are undefined."""
    import numpy as np

    finite = resampled[np.isfinite(resampled)]
    if len(finite) < (1 - MOST_UNDEFINED) * len(resampled):
        return Figure(value, None, None)
    low, high = resampled_ends(finite)
    return Figure(value, float(low), float(high))


def exponent(x: Array, y: Array) -> Figure:
    """Return the slope of the line through pairs of logarithms, by least squares."""
    import numpy as np

    draws = resamples(len(x))
    draws = draws[np.ptp(x[draws], axis=1) > 0]
    return figure(float(_slope_of(x[None, :], y[None, :])[0]), _slope_of(x[draws], y[draws]))


def _slope_of(x: Array, y: Array) -> Array:
    centered = x - x.mean(axis=1, keepdims=True)
    slope: Array = (centered * y).sum(axis=1) / (centered * centered).sum(axis=1)
    return slope
