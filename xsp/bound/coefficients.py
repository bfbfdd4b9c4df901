"""Coefficients of two rows of numbers, with intervals from resampled pairs.

The intervals are 95 % percentile bootstraps. The resamples depend only on the number of pairs, so that coefficients of
the same models can be compared resample by resample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xsp.summary import CONFIDENCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

RESAMPLES = 1000
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

    return np.random.default_rng(count).integers(0, count, size=(RESAMPLES, count))


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
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(finite, [tail, 100 - tail])
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
