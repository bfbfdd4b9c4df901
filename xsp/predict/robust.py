"""Weights that limit the influence of outliers, and rows that two different models do not explain.

Weights are Tukey's bisquare of the logarithms of measured over predicted time, relative to their scale: a row beyond
5.5 scales has none. The scale is that of the median absolute deviation, so that up to almost half of the rows can be
altered. The first weights come from a log-linear model, fitted by least absolute deviations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp.predict import baselines
from xsp.predict.configurations import Configurations, Factor, Floats

BISQUARE = 5.5
"""Residual in scales beyond which a row has no weight: 98 % efficiency for normal errors."""

NORMAL_SCALE = 1.4826
"""Standard deviation of normal errors relative to their median absolute deviation."""

LEAST_SCALE = 1e-3
"""Smallest scale of logarithms: below 0.1 %, differences are rounding."""

DEVIATION_ROUNDS = 12
BISQUARE_ROUNDS = 8

OUTLIER_SCALES = 6.0
SECOND_OPINION_SCALES = 1.5
"""Distances in scales, for the generic model and for the log-linear one, beyond which both do not explain a row."""

LEAST_OUTLIER = 0.1
"""Smallest logarithm of an outlier: 10 %."""

MOST_OUTLIERS = 1 / 3
"""Share of the rows above which unexplained rows are not outliers: then the models do not describe the table."""

LEAST_VALUE_ROWS = 8
"""Number of rows with an equal value from which a majority of unexplained rows is an effect of that value."""


class Outlier(NamedTuple):
    """A row that is left out, because its time differs from what models of the other rows predict."""

    row: int
    """Its number in the table, from 1."""

    configuration: Mapping[str, float | str]
    seconds: float
    expected: float
    """Predicted seconds."""


def scale(residuals: Floats, parameters: int = 0) -> float:
    """Return the robust standard deviation of residuals of a model with some parameters, at least `LEAST_SCALE`."""
    sizes = np.sort(np.abs(residuals))
    upper = sizes[min(parameters, len(sizes) - 1) :]  # a model with k parameters passes close to k rows
    return max(LEAST_SCALE, NORMAL_SCALE * float(np.median(upper)))


def weights(residuals: Floats, parameters: int = 0) -> Floats:
    """Return the bisquare weights of logarithmic residuals, from 0 to 1."""
    relative = residuals / (BISQUARE * scale(residuals, parameters))
    result: Floats = np.where(np.abs(relative) < 1, (1 - np.minimum(relative**2, 1)) ** 2, 0.0)
    return result


def table_weights(table: Configurations, factors: Sequence[Factor], residuals: Floats, parameters: int = 0) -> Floats:
    """Return the weights of the rows of a table; a category value of which most weight would be lost keeps all of it.

    Args:
        table: the rows.
        factors: factors of the model.
        residuals: logarithms of measured over predicted time.
        parameters: number of the model's parameters.
    """
    result = weights(residuals, parameters)
    for factor in factors:
        for level in factor.levels:
            rows = table.values[factor.name] == level
            if rows.any() and result[rows].mean() < 0.5:
                result[rows] = 1.0
    return result


def first_weights(table: Configurations, factors: Sequence[Factor]) -> Floats:
    """Return weights from a log-linear model with squares and products, which needs no start."""
    logs, row_weights = np.log(table.seconds), np.ones(len(table))
    for number in range(DEVIATION_ROUNDS + BISQUARE_ROUNDS):
        residuals = logs - np.log(baselines.ridge(table, factors, row_weights)(table.values))
        if number < DEVIATION_ROUNDS:
            floor = 0.1 * scale(residuals)
            row_weights = floor / np.maximum(np.abs(residuals), floor)
        else:
            row_weights = table_weights(table, factors, residuals)
    return row_weights


def robust_ridge(table: Configurations, factors: Sequence[Factor]) -> baselines.Predictor:
    """Return the log-linear model with these weights."""
    return baselines.ridge(table, factors, first_weights(table, factors))


def outliers(table: Configurations, predictions: Floats, second_predictions: Floats) -> NDArray[np.bool_]:
    """Return which rows neither of two models explains that were trained without them.

    Rows are not outliers if their repetitions agree with them, or if most rows with the same value of a factor are
    unexplained: then the models lack an effect.

    Args:
        table: the rows.
        predictions: seconds by the generic model.
        second_predictions: seconds by a model of another form.
    """
    logs = np.log(table.seconds)
    first, second = (logs - np.log(np.maximum(values, 1e-300)) for values in (predictions, second_predictions))
    first, second = first - np.median(first), second - np.median(second)
    limits = max(LEAST_OUTLIER, OUTLIER_SCALES * scale(first)), SECOND_OPINION_SCALES * scale(second)
    is_outlier = (np.abs(first) > limits[0]) & (np.abs(second) > limits[1]) & (first * second > 0)
    for group in np.unique(table.groups[is_outlier]):
        rows = np.flatnonzero(table.groups == group)
        if len(rows) > 1 and is_outlier[rows].all() and np.ptp(logs[rows]) < LEAST_OUTLIER:
            is_outlier[rows] = False
    unexplained = is_outlier.copy()
    for column in table.values.values():
        for value in set(column[unexplained].tolist()):
            rows = np.flatnonzero(column == value)
            if len(rows) >= LEAST_VALUE_ROWS and unexplained[rows].mean() > 0.5:
                is_outlier[rows] = False
    return is_outlier if is_outlier.mean() <= MOST_OUTLIERS else np.zeros(len(table), dtype=bool)


def described(table: Configurations, indices: NDArray[Any], predictions: Floats) -> tuple[Outlier, ...]:
    """Return rows as outliers, the largest ratio first."""
    order = sorted(indices.tolist(), key=lambda index: -abs(np.log(table.seconds[index] / predictions[index])))
    return tuple(
        Outlier(
            int(table.row_numbers[index]), {name: column[index] for name, column in table.values.items()},
            float(table.seconds[index]), float(predictions[index]),
        )
        for index in order
    )  # fmt: skip
