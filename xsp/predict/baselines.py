"""What a model must beat: the mean, the nearest configuration, a linear model, and a power law.

Each is trained on a table and returns a function of configurations. They see the same factors as the generic model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp.predict.configurations import Configurations, Factor, Floats

Values = Mapping[str, NDArray[Any]]
Trained = Callable[[Values], Floats]
Train = Callable[[Configurations, Sequence[Factor]], Trained]

MOST_COMPARED = 4_000_000
"""Distances that are held at once."""


def mean(table: Configurations, factors: Sequence[Factor]) -> Trained:
    """Return the geometric mean of the configurations whose categories are equal, else of all."""
    texts = [each.name for each in factors if not each.numeric]
    logs = np.log(table.seconds)
    keys = _keys(table.values, texts, len(table))
    means = {key: float(logs[[place for place, each in enumerate(keys) if each == key]].mean()) for key in set(keys)}
    whole = float(logs.mean())

    def predict(values: Values) -> Floats:
        return np.exp([means.get(key, whole) for key in _keys(values, texts, _count(values))])

    return predict


def nearest(table: Configurations, factors: Sequence[Factor]) -> Trained:
    """Return the time of the nearest configuration: by logarithms over their ranges, a category apart counts as one."""
    known = _places(table.values, factors)

    def predict(values: Values) -> Floats:
        asked = _places(values, factors)
        found = []
        for part in np.array_split(asked, max(1, len(asked) * known.size // MOST_COMPARED + 1)):
            apart = ((part[:, None, :] - known[None, :, :]) ** 2).sum(axis=2)
            found.append(table.seconds[apart.argmin(axis=1)])
        return np.concatenate(found)

    return predict


def linear(table: Configurations, factors: Sequence[Factor]) -> Trained:
    """Return a sum of factors, by least squared relative error; at least a hundredth of the least time."""
    features = _features(table.values, factors, np.asarray)
    weights = _least(features / table.seconds[:, None], np.ones(len(table)))
    least = float(table.seconds.min()) / 100

    def predict(values: Values) -> Floats:
        found: Floats = np.maximum(_features(values, factors, np.asarray) @ weights, least)
        return found

    return predict


def power(table: Configurations, factors: Sequence[Factor]) -> Trained:
    """Return a product of powers: linear in logarithms."""
    weights = _least(_features(table.values, factors, np.log), np.log(table.seconds))

    def predict(values: Values) -> Floats:
        found: Floats = np.exp(np.clip(_features(values, factors, np.log) @ weights, -200, 200))
        return found

    return predict


BASELINES: Mapping[str, Train] = {"mean": mean, "nearest": nearest, "linear": linear, "power law": power}


def _count(values: Values) -> int:
    return len(next(iter(values.values())))


def _keys(values: Values, names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, values[each]) for each in names), strict=True)) if names else [()] * count


def _places(values: Values, factors: Sequence[Factor]) -> Floats:
    """Return configurations as points: each number between 0 and 1 by its logarithm, each category at 0 or 1/√2."""
    columns = []
    for each in factors:
        column = values[each.name]
        if each.numeric:
            wide = np.log(each.high / each.low) or 1.0
            columns.append(np.log(column.astype(float) / each.low) / wide)
        else:
            columns += [(column == level) * np.sqrt(0.5) for level in each.levels]
    return np.column_stack(columns)


def _features(values: Values, factors: Sequence[Factor], change: Callable[[Any], Any]) -> Floats:
    columns = [np.ones(_count(values))]
    for each in factors:
        column = values[each.name]
        if each.numeric:
            columns.append(change(column.astype(float) / each.reference))
        else:
            columns += [(column == level).astype(float) for level in each.levels[1:]]
    return np.column_stack(columns)


def _least(features: Floats, wanted: Floats) -> Floats:
    found: Floats = np.asarray(np.linalg.lstsq(features, wanted, rcond=1e-10)[0], dtype=np.float64)
    return found
