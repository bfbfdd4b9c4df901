"""Which configurations to record next: those that reduce the uncertainty of predictions most for their cost.

Resampled fits disagree about configurations; where they disagree in a correlated way, one measurement settles several.
The first choice maximizes the expected reduction of the variance of predicted logarithms (of all candidates, or of one
requested point) divided by the cost of the measurement. The next choice assumes that the previous ones were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from xsp.predict import crossvalidation as judging
from xsp.predict.configurations import Factor, Floats
from xsp.predict.crossvalidation import Evaluation

MOST_CANDIDATES = 4_000
STEPS = 100
START = 5.0


class Proposal(NamedTuple):
    """A configuration to be recorded; durations are seconds."""

    configuration: Mapping[str, float | str]
    predicted: float
    uncertainty: float
    """Relative standard deviation of the resampled fits for it, before anything is recorded."""

    cost: float
    remaining_uncertainty: float
    """The expected remaining share of uncertainty once this configuration and those before it are recorded."""


def choose(
    evaluation: Evaluation,
    count: int = 5,
    point: Mapping[str, float | str] | None = None,
    steps: int = STEPS,
    start: float = START,
) -> list[Proposal]:
    """Return configurations to record, the best first.

    Args:
        evaluation: the recorded table with its fitted models.
        count: number of configurations.
        point: the configuration whose prediction matters; default: all candidates equally.
        steps: number of steps of one recording.
        start: seconds that each recording costs besides its steps.

    Raises:
        UsageError: the point lacks a factor, or has an unknown factor or value.
    """
    point_values = None if point is None else judging.point_columns(evaluation, [point])
    configurations = candidates(evaluation)
    if not configurations:
        return []
    values = judging.point_columns(evaluation, configurations)
    seconds = judging.offered_predictor(evaluation)(values)
    deviations = _center(judging.spread(evaluation, values))
    target_deviations = deviations if point_values is None else _center(judging.spread(evaluation, point_values))
    noise = float(np.var(evaluation.residuals)) or 1e-12
    cost = start + steps * seconds
    uncertainty = deviations.std(axis=1)
    total_variance = float((target_deviations**2).sum()) or 1.0
    result: list[Proposal] = []
    is_chosen = np.zeros(len(configurations), dtype=bool)
    for _ in range(min(count, len(configurations))):
        resamples = deviations.shape[1]
        squared_covariance = ((deviations @ target_deviations.T / resamples) ** 2).sum(axis=1)
        gain = np.where(is_chosen, -1.0, squared_covariance / ((deviations**2).mean(axis=1) + noise) / cost)
        best = int(gain.argmax())
        is_chosen[best] = True
        row = deviations[best].copy()
        deviations, target_deviations = _update(deviations, row, noise), _update(target_deviations, row, noise)
        remaining = float(np.sqrt((target_deviations**2).sum() / total_variance))
        result.append(
            Proposal(configurations[best], float(seconds[best]), float(uncertainty[best]), float(cost[best]), remaining)
        )
    return result


def _center(spread: Floats) -> Floats:
    """Return the deviation of logarithms from their mean, by configuration (rows) and resampled fit (columns)."""
    logs = np.log(np.maximum(spread, 1e-300)).T
    deviations: Floats = logs - logs.mean(axis=1, keepdims=True)
    return deviations


def _update(deviations: Floats, row: Floats, noise: float) -> Floats:
    """Return deviations with the covariance after a noisy measurement of one row, by a square-root update."""
    square = float(row @ row)
    if not square:
        return deviations
    size = len(row)
    remaining_share = 1 - square / (square + size * noise)
    updated_deviations: Floats = deviations - np.outer(deviations @ row, row) * (
        (1 - np.sqrt(remaining_share)) / square
    )
    return updated_deviations


def candidates(evaluation: Evaluation) -> list[dict[str, float | str]]:
    """Return combinations of recorded values that were not recorded, at most `MOST_CANDIDATES` random ones."""
    factors = evaluation.table.factors
    choices = [_candidate_values(evaluation, factor) for factor in factors]
    recorded_combinations = set(
        zip(*(evaluation.table.values[factor.name].tolist() for factor in factors), strict=True)
    )
    rng = np.random.default_rng(evaluation.seed)
    if prod(map(len, choices)) <= 4 * MOST_CANDIDATES:
        combinations: Sequence[tuple[float | str, ...]] = list(product(*choices))
    else:
        combinations = list(
            dict.fromkeys(
                tuple(values[rng.integers(len(values))] for values in choices) for _ in range(2 * MOST_CANDIDATES)
            )
        )
    new_combinations = [combination for combination in combinations if combination not in recorded_combinations]
    if len(new_combinations) > MOST_CANDIDATES:
        new_combinations = [
            new_combinations[index]
            for index in np.sort(rng.choice(len(new_combinations), MOST_CANDIDATES, replace=False))
        ]
    return [
        {factor.name: value for factor, value in zip(factors, combination, strict=True)}
        for combination in new_combinations
    ]


def _candidate_values(evaluation: Evaluation, factor: Factor) -> list[float | str]:
    """Return the candidate values of a factor; at most eight over the range of a number."""
    if not factor.is_numeric:
        return list(factor.levels)
    values = np.unique(evaluation.table.values[factor.name])
    if len(values) > 8:
        values = np.unique(np.quantile(values, np.linspace(0, 1, 8), method="nearest"))
    return [float(value) for value in values]
