"""How well data determine a fit's parameters: intervals, meaningless exponents, pairs that trade off, the condition."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from xsp.predict import generic
from xsp.predict.configurations import Configurations
from xsp.predict.generic import Fit

TIED = 0.95
"""Minimum correlation of two parameters over the resampled fits for only their combination to be determined."""

WIDE = 1.0
"""Maximum width of the interval of an exponent that the data determine."""


class Parameter(NamedTuple):
    """A parameter with its 95 % interval, which is None without resampled fits."""

    name: str
    value: float
    low: float | None
    high: float | None
    why_not: str | None
    """Why the data do not determine the parameter; None if they do."""


def parameters(found: Fit, rows: int) -> list[Parameter]:
    """Return exponents, logarithms of multipliers and coefficients, with the reason if data do not determine a shape.

    Percentiles of resampled fits are too narrow, because each fit has k parameters: they are widened by √(n/(n−k)).
    """
    values = np.concatenate([found.shapes, found.coefficients])
    names = (*found.form.shapes, *found.form.coefficients)
    if not found.bootstrap:
        return [Parameter(name, float(value), None, None, None) for name, value in zip(names, values, strict=True)]
    samples = np.array([np.concatenate(sample) for sample in found.bootstrap])
    widening = np.sqrt(rows / max(1, rows - found.form.parameter_count))
    low, high = (
        values + (np.percentile(samples, percentile, axis=0) - values) * widening for percentile in (2.5, 97.5)
    )
    result = []
    for place, name in enumerate(names):
        is_shape = place < len(found.shapes)
        lower = float(low[place]) if is_shape else max(0.0, float(low[place]))
        reason = _why_not(found, place, float(values[place]), lower, float(high[place])) if is_shape else None
        result.append(Parameter(name, float(values[place]), lower, float(high[place]), reason))
    return result


def _why_not(found: Fit, place: int, value: float, low: float, high: float) -> str | None:
    """Return why the data do not determine an exponent or multiplier; None if they do."""
    if place < sum(1 for factor in found.form.intrinsic if factor.numeric) and found.coefficients[place] == 0:
        return "its term is 0, so any exponent fits"
    if abs(value) > generic.BOUND - 1e-3:
        return f"it is at the bound of the search, {value:+.3g}"
    return f"any from {low:.2g} to {high:.2g} fits" if high - low > WIDE else None


def ties(found: Fit) -> list[tuple[str, str, float]]:
    """Return pairs of parameters of which only a combination is determined, with their correlation."""
    if len(found.bootstrap) < 20:
        return []
    samples = np.array([np.concatenate(sample) for sample in found.bootstrap])
    names = (*found.form.shapes, *found.form.coefficients)
    moving = np.flatnonzero(samples.std(axis=0) > 1e-9 * (np.abs(samples.mean(axis=0)) + 1e-300))
    if len(moving) < 2:
        return []
    correlations = np.corrcoef(samples[:, moving], rowvar=False)
    return [
        (names[moving[first]], names[moving[second]], float(correlations[first, second]))
        for first, second in combinations(range(len(moving)), 2)
        if abs(correlations[first, second]) > TIED
    ]


def condition(found: Fit, table: Configurations) -> float:
    """Return the condition number of the fit: how many times better the data determine the best combination of
    parameters than the worst, relative to the coefficients other than 0; infinite if one is not determined at all.
    """
    table = generic.sample_rows(table, 0)
    inputs = generic.design(found.form, table.values)
    terms = inputs.columns(found.shapes) / table.seconds[:, None] * found.coefficients
    power_count = inputs.powers.shape[1]
    scaled = terms[:, : terms.shape[1] - inputs.constant].sum(axis=1)
    slopes = np.column_stack([terms[:, :power_count] * inputs.powers, scaled[:, None] * inputs.scales, terms])
    norms = np.sqrt((slopes * slopes).sum(axis=0))
    nonzero = norms > 0  # a coefficient that the fit sets to 0 has no relative unit
    if not nonzero.any():
        return float("inf")
    sizes = np.linalg.svd(slopes[:, nonzero] / norms[nonzero], compute_uv=False)
    return float(sizes[0] / sizes[-1]) if sizes[-1] > 1e-12 * sizes[0] else float("inf")
