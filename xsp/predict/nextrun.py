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

from xsp.predict import judged as judging
from xsp.predict.configurations import Factor, Floats
from xsp.predict.judged import Judged

MOST_CANDIDATES = 4_000
STEPS = 100
START = 5.0


class Next(NamedTuple):
    """A configuration to be recorded; durations are seconds."""

    configuration: Mapping[str, float | str]
    predicted: float
    doubt: float
    """Standard deviation of the resampled fits there, as a share, before anything is recorded."""

    cost: float
    left: float
    """The share of doubt that is expected to be left once this configuration and those before it are recorded."""


def choose(
    judged: Judged,
    count: int = 5,
    point: Mapping[str, float | str] | None = None,
    steps: int = STEPS,
    start: float = START,
) -> list[Next]:
    """Return configurations to record, the best first.

    Args:
        judged: the recorded table with its fitted models.
        count: number of configurations.
        point: the configuration whose prediction matters; default: all candidates equally.
        steps: number of steps of one recording.
        start: seconds that each recording costs besides its steps.

    Raises:
        UsageError: the point lacks a factor, or has an unknown factor or value.
    """
    wanted = None if point is None else judging.asked_values(judged, [point])
    asked = candidates(judged)
    if not asked:
        return []
    values = judging.asked_values(judged, asked)
    seconds = judging.offered(judged)(values)
    apart = _apart(judging.spread(judged, values))
    target = apart if wanted is None else _apart(judging.spread(judged, wanted))
    noise = float(np.var(judged.residuals)) or 1e-12
    cost = start + steps * seconds
    doubt = apart.std(axis=1)
    whole = float((target**2).sum()) or 1.0
    found: list[Next] = []
    taken = np.zeros(len(asked), dtype=bool)
    for _ in range(min(count, len(asked))):
        size = apart.shape[1]
        shared = ((apart @ target.T / size) ** 2).sum(axis=1)
        worth = np.where(taken, -1.0, shared / ((apart**2).mean(axis=1) + noise) / cost)
        best = int(worth.argmax())
        taken[best] = True
        row = apart[best].copy()
        apart, target = _told(apart, row, noise), _told(target, row, noise)
        left = float(np.sqrt((target**2).sum() / whole))
        found.append(Next(asked[best], float(seconds[best]), float(doubt[best]), float(cost[best]), left))
    return found


def _apart(spread: Floats) -> Floats:
    """Return the deviation of logarithms from their mean, by configuration (rows) and resampled fit (columns)."""
    logs = np.log(np.maximum(spread, 1e-300)).T
    found: Floats = logs - logs.mean(axis=1, keepdims=True)
    return found


def _told(apart: Floats, row: Floats, noise: float) -> Floats:
    """Return deviations with the covariance after a noisy measurement of one row, by a square-root update."""
    square = float(row @ row)
    if not square:
        return apart
    size = len(row)
    keeps = 1 - square / (square + size * noise)
    found: Floats = apart - np.outer(apart @ row, row) * ((1 - np.sqrt(keeps)) / square)
    return found


def candidates(judged: Judged) -> list[dict[str, float | str]]:
    """Return combinations of recorded values that were not recorded, at most `MOST_CANDIDATES` random ones."""
    factors = judged.table.factors
    choices = [_choices(judged, each) for each in factors]
    recorded = set(zip(*(judged.table.values[each.name].tolist() for each in factors), strict=True))
    chance = np.random.default_rng(judged.seed)
    if prod(map(len, choices)) <= 4 * MOST_CANDIDATES:
        combined: Sequence[tuple[float | str, ...]] = list(product(*choices))
    else:
        combined = list(
            dict.fromkeys(
                tuple(each[chance.integers(len(each))] for each in choices) for _ in range(2 * MOST_CANDIDATES)
            )
        )
    new = [each for each in combined if each not in recorded]
    if len(new) > MOST_CANDIDATES:
        new = [new[each] for each in np.sort(chance.choice(len(new), MOST_CANDIDATES, replace=False))]
    return [{factor.name: value for factor, value in zip(factors, each, strict=True)} for each in new]


def _choices(judged: Judged, factor: Factor) -> list[float | str]:
    """Return the candidate values of a factor; at most eight over the range of a number."""
    if not factor.numeric:
        return list(factor.levels)
    found = np.unique(judged.table.values[factor.name])
    if len(found) > 8:
        found = np.unique(np.quantile(found, np.linspace(0, 1, 8), method="nearest"))
    return [float(each) for each in found]
