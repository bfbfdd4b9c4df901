"""How well data determine a fit's parameters: intervals, meaningless exponents, pairs that trade off, the condition."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from xsp import stats
from xsp.predict import generic
from xsp.predict.configurations import Configurations
from xsp.predict.generic import Fit

TIE_CORRELATION = 0.95
"""Minimum correlation of two parameters over the resampled fits for only their combination to be determined."""

WIDE_INTERVAL = 1.0
"""Maximum width of the interval of an exponent that the data determine."""


class Parameter(NamedTuple):
    """A parameter with its 95 % interval, which is None without resampled fits and for a parameter at a bound."""

    name: str
    value: float
    low: float | None
    high: float | None
    why_not: str | None
    """Why the data do not determine the parameter; None if they do."""


def parameters(fit: Fit, rows: int) -> list[Parameter]:
    """Return exponents, logarithms of multipliers and coefficients, with the reason if data do not determine a shape.

    Percentiles of resampled fits are too narrow, because each fit has k parameters: they are widened by √(n/(n−k)).
    """
    values = np.concatenate([fit.shapes, fit.coefficients])
    names = (*fit.form.shapes, *fit.form.coefficients)
    if not fit.bootstrap:
        return [Parameter(name, float(value), None, None, None) for name, value in zip(names, values, strict=True)]
    samples = np.array([np.concatenate(sample) for sample in fit.bootstrap])
    widening = np.sqrt(rows / max(1, rows - fit.form.parameter_count))
    low, high = values + (stats.resampled_ends(samples) - values) * widening
    result = []
    for index, name in enumerate(names):
        is_shape = index < len(fit.shapes)
        lower = float(low[index]) if is_shape else max(0.0, float(low[index]))
        reason = _why_not(fit, index, float(values[index]), lower, float(high[index])) if is_shape else None
        is_identified = not (is_shape and is_at_bound(fit, index))
        result.append(
            Parameter(name, float(values[index]), lower if is_identified else None,
                      float(high[index]) if is_identified else None, reason)
        )  # fmt: skip
    return result


def is_at_bound(fit: Fit, index: int) -> bool:
    """Return whether a shape is an exponent at the bound of the search; multipliers have none."""
    return index < fit.form.exponent_count and abs(float(fit.shapes[index])) > generic.BOUND - 1e-3


def bound_reasons(fit: Fit) -> list[str]:
    """Return texts on exponents at the bound of the search whose terms are not 0."""
    count = sum(1 for factor in fit.form.intrinsic if factor.is_numeric)
    return [
        f"{name} is at the bound of the search, {fit.shapes[index]:+.3g}, so it is not identified"
        for index, name in enumerate(fit.form.shapes)
        if is_at_bound(fit, index) and not (index < count and fit.coefficients[index] == 0)
    ]


def _why_not(fit: Fit, index: int, value: float, low: float, high: float) -> str | None:
    """Return why the data do not determine an exponent or multiplier; None if they do."""
    if index < sum(1 for factor in fit.form.intrinsic if factor.is_numeric) and fit.coefficients[index] == 0:
        return "its term is 0, so any exponent fits"
    if is_at_bound(fit, index):
        return f"it is at the bound of the search, {value:+.3g}: not identified"
    return f"any from {low:.2g} to {high:.2g} fits" if high - low > WIDE_INTERVAL else None


def ties(fit: Fit) -> list[tuple[str, str, float]]:
    """Return pairs of parameters of which only a combination is determined, with their correlation."""
    if len(fit.bootstrap) < 20:
        return []
    samples = np.array([np.concatenate(sample) for sample in fit.bootstrap])
    names = (*fit.form.shapes, *fit.form.coefficients)
    varying_indices = np.flatnonzero(samples.std(axis=0) > 1e-9 * (np.abs(samples.mean(axis=0)) + 1e-300))
    if len(varying_indices) < 2:
        return []
    correlations = np.corrcoef(samples[:, varying_indices], rowvar=False)
    return [
        (names[varying_indices[first]], names[varying_indices[second]], float(correlations[first, second]))
        for first, second in combinations(range(len(varying_indices)), 2)
        if abs(correlations[first, second]) > TIE_CORRELATION
    ]


def condition(fit: Fit, table: Configurations) -> float:
    """Return the condition number of the fit: how many times better the data determine the best combination of
    parameters than the worst, relative to the coefficients other than 0; infinite if one is not determined.
    """
    table = generic.sample_rows(table, 0)
    inputs = generic.design(fit.form, table.values)
    terms = inputs.columns(fit.shapes) / table.seconds[:, None] * fit.coefficients
    slopes = np.column_stack([inputs.slopes(terms), terms])
    norms = np.sqrt((slopes * slopes).sum(axis=0))
    is_nonzero = norms > 0  # a coefficient that the fit sets to 0 has no relative unit
    if not is_nonzero.any():
        return float("inf")
    singular_values = np.linalg.svd(slopes[:, is_nonzero] / norms[is_nonzero], compute_uv=False)
    return (
        float(singular_values[0] / singular_values[-1])
        if singular_values[-1] > 1e-12 * singular_values[0]
        else float("inf")
    )
