"""Baselines that the generic model must beat: means, neighbours, linear models, a forest, Ernest, a simulated step.

Each baseline is trained on a table and returns a function of configurations. Baselines use the same factors as the
generic model. A baseline without its columns in the table, or without its library, raises `BaselineError` and is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xsp.errors import UsageError
from xsp.plugins import importing
from xsp.predict.configurations import Configurations, Factor, Floats

Values = Mapping[str, NDArray[Any]]
Predictor = Callable[[Values], Floats]
Trainer = Callable[[Configurations, Sequence[Factor]], Predictor]

MOST_DISTANCES = 4_000_000
"""Maximum number of distances in memory."""

STRENGTHS = tuple(10.0**power for power in range(-6, 4))
"""Penalty strengths of `ridge` for features of unit variance; generalized cross-validation selects one."""

TREES = 50
LEAST_LEAF_ROWS = 2
"""Number of trees of the forest, and minimum number of configurations in a leaf."""

MACHINES = ("ranks", "world_size", "gpus", "devices", "machines", "nodes", "processes", "workers")
SIZES = ("batch", "batch_size", "samples", "size", "data")
"""Column names for Ernest's features, of which the first present one is used: number of workers, amount of work."""

SIMULATED_PREFIX = "dag"
"""Name prefix of the column with the time that `xsp predict RUN` predicts for the same configuration."""

LEAST_KIND_ROWS = 4
"""Minimum number of configurations of a kind for a separate fit of Ernest's features."""


class BaselineError(UsageError):
    """A baseline cannot be trained on a table; the message has the reason."""


def mean(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return the geometric mean of the configurations with equal categories, or of all if there are none."""
    category_names = [factor.name for factor in factors if not factor.is_numeric]
    logs = np.log(table.seconds)
    means = {key: float(logs[rows].mean()) for key, rows in _rows_by_key(table, category_names).items()}
    overall = float(logs.mean())

    def predict(values: Values) -> Floats:
        return np.exp([means.get(key, overall) for key in _keys(values, category_names, _count(values))])

    return predict


def nearest(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return the time of the nearest configuration, by logarithms scaled to their ranges; another category counts 1."""
    recorded_points = _points(table.values, factors)

    def predict(values: Values) -> Floats:
        points = _points(values, factors)
        seconds = []
        for part in np.array_split(points, max(1, len(points) * recorded_points.size // MOST_DISTANCES + 1)):
            distances = ((part[:, None, :] - recorded_points[None, :, :]) ** 2).sum(axis=2)
            seconds.append(table.seconds[distances.argmin(axis=1)])
        return np.concatenate(seconds)

    return predict


def linear(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return a sum of factors that minimizes squared relative error; never below a hundredth of the shortest time."""
    features = _features(table.values, factors, np.asarray)
    weights = _least_squares(features / table.seconds[:, None], np.ones(len(table)))
    floor = float(table.seconds.min()) / 100

    def predict(values: Values) -> Floats:
        seconds: Floats = np.maximum(_features(values, factors, np.asarray) @ weights, floor)
        return seconds

    return predict


def power(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return a product of powers, fitted as a linear model of logarithms."""
    weights = _least_squares(_features(table.values, factors, np.log), np.log(table.seconds))

    def predict(values: Values) -> Floats:
        seconds: Floats = np.exp(np.clip(_features(values, factors, np.log) @ weights, -200, 200))
        return seconds

    return predict


def ridge(table: Configurations, factors: Sequence[Factor], row_weights: Floats | None = None) -> Predictor:
    """Return a regularised model of logarithms, their squares and their products.

    The penalty minimizes generalized cross-validation (Golub, Heath and Wahba 1979), computed from singular values.

    Args:
        table: rows to learn from.
        factors: factors of the model.
        row_weights: weights of the squared errors; None for equal ones.
    """
    roots = np.ones(len(table)) if row_weights is None else np.sqrt(row_weights / row_weights.mean())
    features = _with_products(table.values, factors)
    center = np.average(features, axis=0, weights=roots**2)
    spread = features.std(axis=0)
    is_varying = spread > 1e-9
    if not is_varying.any():  # all rows are equal
        return mean(table, factors)
    standard_features = roots[:, None] * (features[:, is_varying] - center[is_varying]) / spread[is_varying]
    logs = np.log(table.seconds)
    intercept = float(np.average(logs, weights=roots**2))
    target = roots * (logs - intercept)
    left, singular, right = np.linalg.svd(standard_features, full_matrices=False)
    projection, rows = left.T @ target, len(logs)
    least_score, weights = np.inf, np.zeros(standard_features.shape[1])
    for strength in STRENGTHS:
        shrinkage = singular**2 / (singular**2 + strength * rows)
        residual = target - left @ (shrinkage * projection)
        score = (
            float(residual @ residual) / (1 - (shrinkage.sum() + 1) / rows) ** 2
            if shrinkage.sum() + 1 < rows
            else np.inf
        )
        if score < least_score:
            least_score = score
            weights = right.T @ (projection * singular / (singular**2 + strength * rows))

    def predict(values: Values) -> Floats:
        points = _with_products(values, factors)
        seconds: Floats = np.exp(
            np.clip(intercept + (points[:, is_varying] - center[is_varying]) / spread[is_varying] @ weights, -200, 200)
        )
        return seconds

    return predict


def forest(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return a random forest of the logarithms of times; the same table always gives the same forest.

    Raises:
        BaselineError: scikit-learn is missing.
    """
    with importing(BaselineError, "it needs scikit-learn: pip install 'xsp[predict]'"):
        from sklearn.ensemble import RandomForestRegressor
    trees = RandomForestRegressor(TREES, min_samples_leaf=LEAST_LEAF_ROWS, max_features=0.5, random_state=0, n_jobs=1)
    trees.fit(_points(table.values, factors), np.log(table.seconds))

    def predict(values: Values) -> Floats:
        seconds: Floats = np.exp(trees.predict(_points(values, factors)))
        return seconds

    return predict


def ernest(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return Ernest's model: a + b·size/machines + c·log(machines) + d·machines + e·size, with coefficients ≥ 0.

    Venkataraman et al., NSDI 2016. The model describes one program, so each combination of the other factors has its
    own fit; one with few rows uses the fit of its categories, or of all rows. The fifth term is for sizes per machine.

    Raises:
        BaselineError: no column has the number of machines, or SciPy is missing.
    """
    numbers = [factor.name for factor in factors if factor.is_numeric]
    machines = next((name for name in MACHINES if name in numbers), None)
    size = next((name for name in SIZES if name in numbers), None)
    if machines is None:
        raise BaselineError(f"no numeric column has the number of ranks ({', '.join(MACHINES)})")
    with importing(BaselineError, "it needs SciPy: pip install 'xsp[predict]'"):
        from scipy.optimize import nnls
    other_names = [factor.name for factor in factors if factor.name not in (machines, size)]
    category_names = [factor.name for factor in factors if not factor.is_numeric]

    def columns(values: Values) -> Floats:
        count = values[machines].astype(float)
        work = np.ones_like(count) if size is None else values[size].astype(float)
        return np.column_stack([np.ones_like(count), work / count, np.log(count), count, work])

    def fit_rows(rows: NDArray[Any]) -> Floats:
        relative_columns = columns(table.values)[rows] / table.seconds[rows, None]
        norms = np.maximum(np.linalg.norm(relative_columns, axis=0), 1e-300)
        try:
            return np.asarray(nnls(relative_columns / norms, np.ones(len(rows)))[0] / norms, dtype=np.float64)
        except RuntimeError:  # the solver reached its iteration limit
            return np.array([float(np.exp(np.log(table.seconds[rows]).mean())), 0.0, 0.0, 0.0, 0.0])

    def fits_by_key(names: Sequence[str]) -> dict[tuple[str, ...], Floats]:
        groups = _rows_by_key(table, names)
        return {key: fit_rows(np.array(rows)) for key, rows in groups.items() if len(rows) >= LEAST_KIND_ROWS}

    programs, kinds, overall = fits_by_key(other_names), fits_by_key(category_names), fit_rows(np.arange(len(table)))
    floor = float(table.seconds.min()) / 100

    def predict(values: Values) -> Floats:
        count = _count(values)
        keys = zip(_keys(values, other_names, count), _keys(values, category_names, count), strict=True)
        weights = np.array([programs.get(program, kinds.get(kind, overall)) for program, kind in keys])
        seconds: Floats = np.maximum((columns(values) * weights).sum(axis=1), floor)
        return seconds

    return predict


def scaled_simulation(table: Configurations, factors: Sequence[Factor]) -> Predictor:
    """Return the simulated step times one factor, the median of measured over simulated time.

    Raises:
        BaselineError: the table has no column of simulated times.
    """
    column = next(
        (
            candidate.name
            for candidate in factors
            if candidate.is_numeric and candidate.name.lower().startswith(SIMULATED_PREFIX)
        ),
        None,
    )
    if column is None:
        raise BaselineError(
            f"no numeric column {SIMULATED_PREFIX}… has the prediction of `xsp predict RUN` for each configuration"
        )
    factor = float(np.exp(np.median(np.log(table.seconds / table.values[column].astype(float)))))

    def predict(values: Values) -> Floats:
        seconds: Floats = factor * values[column].astype(float)
        return seconds

    return predict


BASELINES: Mapping[str, Trainer] = {
    "mean": mean, "nearest": nearest, "linear": linear, "power law": power, "ridge": ridge, "forest": forest,
    "ernest": ernest, "dag": scaled_simulation,
}  # fmt: skip


def missing_baselines(table: Configurations, factors: Sequence[Factor]) -> dict[str, str]:
    """Return the baselines that cannot be trained on a table, with the reason for each."""
    reasons = {}
    for name in ("ridge", "forest", "ernest", "dag"):
        try:
            BASELINES[name](table, factors)
        except BaselineError as reason:
            reasons[name] = str(reason)
    return reasons


def _count(values: Values) -> int:
    return len(next(iter(values.values())))


def _keys(values: Values, names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, values[name]) for name in names), strict=True)) if names else [()] * count


def _rows_by_key(table: Configurations, names: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """Return the indices of the rows with equal values of some factors, by these values."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, key in enumerate(_keys(table.values, names, len(table))):
        rows.setdefault(key, []).append(index)
    return rows


def _points(values: Values, factors: Sequence[Factor]) -> Floats:
    """Return configurations as points: the logarithm of each number scaled to 0…1, each category value 0 or 1/√2."""
    columns = []
    for factor in factors:
        values_of_factor = values[factor.name]
        if factor.is_numeric:
            log_range = np.log(factor.high / factor.low) or 1.0
            columns.append(np.log(values_of_factor.astype(float) / factor.low) / log_range)
        else:
            columns += [(values_of_factor == level) * np.sqrt(0.5) for level in factor.levels]
    return np.column_stack(columns)


def _features(values: Values, factors: Sequence[Factor], transform: Callable[[Any], Any]) -> Floats:
    columns = [np.ones(_count(values))]
    for factor in factors:
        column = values[factor.name]
        if factor.is_numeric:
            columns.append(transform(column.astype(float) / factor.reference))
        else:
            columns += [(column == level).astype(float) for level in factor.levels[1:]]
    return np.column_stack(columns)


def _with_products(values: Values, factors: Sequence[Factor]) -> Floats:
    """Return the logarithms of numbers, the categories, and the squares and products of the logarithms."""
    numbers = _features(values, [factor for factor in factors if factor.is_numeric], np.log)[:, 1:]
    first, second = np.triu_indices(numbers.shape[1])
    return np.column_stack([_features(values, factors, np.log)[:, 1:], numbers[:, first] * numbers[:, second]])


def _least_squares(features: Floats, target: Floats) -> Floats:
    weights: Floats = np.asarray(np.linalg.lstsq(features, target, rcond=1e-10)[0], dtype=np.float64)
    return weights
