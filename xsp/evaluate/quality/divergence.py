"""Distances between two outputs: of distributions, of samples, and of paired numbers.

`kl`, `js`, `hellinger` and `bhattacharyya` take weights of the same outcomes and normalise them; logarithms are
natural. For several rows they return the mean over the rows. `ks` compares samples, all others paired numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xsp.errors import AnalysisError
from xsp.stats import pearson_of, spearman_of

Floats = NDArray[np.float64]


def softmax(scores: ArrayLike) -> Floats:
    """Return the softmax of scores over the last axis."""
    values = np.asarray(scores, np.float64)
    exponentials = np.exp(values - values.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def kl(p: ArrayLike, q: ArrayLike) -> float:
    """Return the Kullback-Leibler divergence, Σ p·ln(p / q); infinite if q is 0 where p is not."""
    return _over_rows(_kl, *_distributions(p, q))


def js(p: ArrayLike, q: ArrayLike) -> float:
    """Return the Jensen-Shannon divergence, from 0 to ln 2; its square root is the distance that SciPy returns."""
    return _over_rows(lambda a, b: (_kl(a, (a + b) / 2) + _kl(b, (a + b) / 2)) / 2, *_distributions(p, q))


def hellinger(p: ArrayLike, q: ArrayLike) -> float:
    """Return the Hellinger distance, √(½·Σ (√p − √q)²), from 0 to 1."""
    return _over_rows(lambda a, b: math.sqrt(((np.sqrt(a) - np.sqrt(b)) ** 2).sum() / 2), *_distributions(p, q))


def bhattacharyya(p: ArrayLike, q: ArrayLike) -> float:
    """Return the Bhattacharyya distance, −ln Σ √(p·q); infinite if p and q do not overlap."""

    def of_row(a: Floats, b: Floats) -> float:
        overlap = float(np.sqrt(a * b).sum())
        return -math.log(min(1.0, overlap)) if overlap > 0 else math.inf

    return _over_rows(of_row, *_distributions(p, q))


def ks(a: ArrayLike, b: ArrayLike) -> float:
    """Return the Kolmogorov-Smirnov statistic: the maximum difference of the cumulative shares of two samples.

    The samples may have different sizes.
    """
    sorted_a, sorted_b = (np.sort(_numbers(sample, name).ravel()) for sample, name in ((a, "first"), (b, "second")))
    pooled = np.concatenate([sorted_a, sorted_b])
    cdf_a = np.searchsorted(sorted_a, pooled, "right") / len(sorted_a)
    return float(np.abs(cdf_a - np.searchsorted(sorted_b, pooled, "right") / len(sorted_b)).max())


def cosine(a: ArrayLike, b: ArrayLike) -> float:
    """Return 1 − cos of the angle between both, over all numbers.

    Raises:
        AnalysisError: one of them is all zero, so there is no angle.
    """
    values_a, values_b = (values.ravel() for values in _pairs(a, b))
    norms = float(np.linalg.norm(values_a)), float(np.linalg.norm(values_b))
    if 0.0 in norms:
        raise AnalysisError(f"the {'first' if norms[0] == 0 else 'second'} outputs are all 0: the angle is undefined")
    return float(1 - (values_a / norms[0]) @ (values_b / norms[1]))


def covariance(a: ArrayLike, b: ArrayLike) -> float:
    """Return the covariance over all pairs of numbers, with the denominator n − 1.

    Raises:
        AnalysisError: there are fewer than two pairs.
    """
    values_a, values_b = (values.ravel() for values in _pairs(a, b, least=2))
    return float(((values_a - values_a.mean()) * (values_b - values_b.mean())).sum() / (len(values_a) - 1))


def correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Return Pearson's correlation; it raises the same errors as `rank`."""
    return _coefficient(pearson_of, a, b)


def rank(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank.

    Raises:
        AnalysisError: there are fewer than two pairs, or one side is constant.
    """
    return _coefficient(spearman_of, a, b)


DISTRIBUTION_MEASURES: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "kl": kl,
    "js": js,
    "hellinger": hellinger,
    "bhattacharyya": bhattacharyya,
}
NUMBER_MEASURES: Mapping[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "ks": ks,
    "cosine": cosine,
    "covariance": covariance,
    "correlation": correlation,
    "rank": rank,
}


def all_of(before: ArrayLike, after: ArrayLike, scores: bool = False) -> dict[str, float | str]:
    """Return each measure of two outputs by name, or, as text, the reason why it is undefined.

    Args:
        before: outputs of the first evaluation.
        after: outputs of the second evaluation.
        scores: whether they are scores, to which `softmax` is applied for measures of distributions; otherwise outputs
            that are not distributions have no such measures.
    """
    measures: dict[str, float | str] = {}
    for name, measure in {**DISTRIBUTION_MEASURES, **NUMBER_MEASURES}.items():
        try:
            a, b = before, after
            if scores and name in DISTRIBUTION_MEASURES:
                a, b = (softmax(values) for values in _pairs(before, after))
            measures[name] = measure(a, b)
        except AnalysisError as error:
            measures[name] = str(error)
    return measures


def _kl(p: Floats, q: Floats) -> float:
    is_positive = p > 0
    if (q[is_positive] == 0).any():
        return math.inf
    return max(0.0, float((p[is_positive] * np.log(p[is_positive] / q[is_positive])).sum()))


def _over_rows(measure: Callable[[Floats, Floats], float], p: Floats, q: Floats) -> float:
    return float(np.mean([measure(a, b) for a, b in zip(p, q, strict=True)]))


def _coefficient(measure: Callable[[Any, Any], float], a: ArrayLike, b: ArrayLike) -> float:
    values_a, values_b = (values.ravel() for values in _pairs(a, b, least=2))
    coefficient = measure(values_a, values_b)
    if math.isnan(coefficient):
        raise AnalysisError("all outputs of one side are equal, so the correlation is undefined")
    return coefficient


def _numbers(values: ArrayLike, name: str) -> Floats:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise AnalysisError(f"the {name} outputs are not a table of numbers: {error}") from None
    if not array.size:
        raise AnalysisError(f"the {name} outputs are empty")
    if invalid := int(np.count_nonzero(~np.isfinite(array))):
        raise AnalysisError(f"{invalid} of {array.size} of the {name} outputs are not finite numbers")
    return array


def _pairs(a: ArrayLike, b: ArrayLike, least: int = 1) -> tuple[Floats, Floats]:
    values_a, values_b = _numbers(a, "first"), _numbers(b, "second")
    if values_a.shape != values_b.shape:
        raise AnalysisError(f"the outputs have different shapes: {values_a.shape} and {values_b.shape}")
    if values_a.size < least:
        raise AnalysisError(f"{values_a.size} outputs per side are too few: {least} are needed")
    return values_a, values_b


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[Floats, Floats]:
    """Return both as rows that sum to 1."""
    normalised = []
    for values, name in zip(_pairs(p, q), ("first", "second"), strict=True):
        rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
        if (rows < 0).any():
            raise AnalysisError(f"{int((rows < 0).sum())} of the {name} outputs are below 0: scores need softmax first")
        sums = rows.sum(axis=1, keepdims=True)
        if (sums == 0).any():
            raise AnalysisError(
                f"{int((sums == 0).sum())} rows of the {name} outputs are all 0, and not a distribution"
            )
        normalised.append(rows / sums)
    return normalised[0], normalised[1]
