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
    made = np.array([np.concatenate(each) for each in found.bootstrap])
    wider = np.sqrt(rows / max(1, rows - found.form.numbers))
    low, high = (values + (np.percentile(made, each, axis=0) - values) * wider for each in (2.5, 97.5))
    rows_of = []
    for place, name in enumerate(names):
        is_shape = place < len(found.shapes)
        least = float(low[place]) if is_shape else max(0.0, float(low[place]))
        why = _why_not(found, place, float(values[place]), least, float(high[place])) if is_shape else None
        rows_of.append(Parameter(name, float(values[place]), least, float(high[place]), why))
    return rows_of


def _why_not(found: Fit, place: int, value: float, low: float, high: float) -> str | None:
    """Return why the data do not determine an exponent or multiplier; None if they do."""
    if place < sum(1 for each in found.form.intrinsic if each.numeric) and found.coefficients[place] == 0:
        return "its term is 0, so any exponent fits"
    if abs(value) > generic.BOUND - 1e-3:
        return f"it is at the bound of the search, {value:+.3g}"
    return f"any from {low:.2g} to {high:.2g} fits" if high - low > WIDE else None


def ties(found: Fit) -> list[tuple[str, str, float]]:
    """Return pairs of parameters of which only a combination is determined, with their correlation."""
    if len(found.bootstrap) < 20:
        return []
    made = np.array([np.concatenate(each) for each in found.bootstrap])
    names = (*found.form.shapes, *found.form.coefficients)
    moving = np.flatnonzero(made.std(axis=0) > 1e-9 * (np.abs(made.mean(axis=0)) + 1e-300))
    if len(moving) < 2:
        return []
    related = np.corrcoef(made[:, moving], rowvar=False)
    return [
        (names[moving[one]], names[moving[other]], float(related[one, other]))
        for one, other in combinations(range(len(moving)), 2)
        if abs(related[one, other]) > TIED
    ]


def condition(found: Fit, table: Configurations) -> float:
    """Return the condition number of the fit: how many times better the data determine the best combination of
    parameters than the worst, relative to the coefficients other than 0; infinite if one is not determined at all.
    """
    table = generic.drawn(table, 0)
    those = generic.design(found.form, table.values)
    terms = those.columns(found.shapes) / table.seconds[:, None] * found.coefficients
    inside = those.powers.shape[1]
    scaled = terms[:, : terms.shape[1] - those.constant].sum(axis=1)
    slopes = np.column_stack([terms[:, :inside] * those.powers, scaled[:, None] * those.scales, terms])
    norms = np.sqrt((slopes * slopes).sum(axis=0))
    counted = norms > 0  # a coefficient that the fit sets to 0 has no relative unit
    if not counted.any():
        return float("inf")
    sizes = np.linalg.svd(slopes[:, counted] / norms[counted], compute_uv=False)
    return float(sizes[0] / sizes[-1]) if sizes[-1] > 1e-12 * sizes[0] else float("inf")
