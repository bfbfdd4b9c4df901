"""Comparison of the generic model with baselines on held-out configurations, and the choice of the offered model.

Whole groups are held out, never single rows. The generic model is offered only if its error is the smallest; otherwise
the best baseline is. Errors beyond the data, in the largest values of each number, are reported separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp import stats
from xsp.errors import LibraryError, UsageError
from xsp.predict import baselines, generic, identifiability, robust
from xsp.predict.baselines import Predictor, Values
from xsp.predict.configurations import Configurations, Factor, Floats
from xsp.predict.generic import Fit, Form
from xsp.predict.robust import Outlier
from xsp.texts import counted

GENERIC = "generic"
FOLDS = 5
LEAST_GROUPS = 3
RESAMPLES = 200
LEAST_KIND_ROWS = 5
KIND_FACTOR = 1.25
MOST_KINDS = 4
"""Of the values of factors, as many are named as have this number of rows and this multiple of the mean error."""

FOREST_RESAMPLES = 40
"""Number of resampled forests: a forest takes longer than any other model, and already averages resampled trees."""


class Split(NamedTuple):
    """Factors by role."""

    intrinsic: tuple[str, ...]
    extrinsic: tuple[str, ...]
    category: str | None = None
    """A category with a separate model for each value."""


class Error(NamedTuple):
    """Errors of predictions for held-out configurations, as shares of the measured time."""

    model: str
    mean: float
    median: float
    worst: float
    """The 90th percentile."""


class KindError(NamedTuple):
    """Mean error of the offered model on the held-out rows with one value of a factor."""

    factor: str
    value: float | str
    rows: int
    mean: float


class Extrapolation(NamedTuple):
    """Errors where the largest values of a factor are held out."""

    factor: str
    value: float
    """The smallest held-out value."""

    rows: int
    errors: tuple[Error, ...]


@dataclass(frozen=True)
class Evaluation:
    """A table with its fitted models; `fits` has one per value of the category, or one for None."""

    table: Configurations
    split: Split
    seed: int
    fits: Mapping[str | None, Fit]
    errors: tuple[Error, ...]
    """Errors of all models, the smallest mean first."""

    residuals: Floats
    """Logarithms of measured over predicted time, of the offered model on held-out configurations."""

    groups: int
    extrapolations: tuple[Extrapolation, ...] = ()
    missing_baselines: Mapping[str, str] = field(default_factory=dict)
    """Baselines that cannot be trained on the table, with the reason for each."""

    outliers: tuple[Outlier, ...] = ()
    """Rows that are not in the table, because models of the other rows do not explain them."""

    kind_errors: tuple[KindError, ...] = ()
    """Values of factors whose held-out rows have the largest errors of the offered model."""

    @property
    def bound_reasons(self) -> tuple[str, ...]:
        """Texts on exponents of the generic model at the bound of the search."""
        return tuple(reason for fit in self.fits.values() for reason in identifiability.bound_reasons(fit))

    @property
    def offered_model(self) -> str:
        """Return the model with the smallest mean error on held-out configurations.

        The generic model is passed over if one of its exponents is at the bound of the search.
        """
        return offered(self.errors, bool(self.bound_reasons))

    @property
    def drop_reasons(self) -> tuple[str, ...]:
        """Texts of all fits on factors that could not be used."""
        return tuple(
            dict.fromkeys(
                text if value is None else f"{self.split.category}={value}: {text}"
                for value, fit in self.fits.items()
                for text in fit.form.drop_reasons
            )
        )


def split_of(table: Configurations, intrinsic: Sequence[str], extrinsic: Sequence[str], category: str | None) -> Split:
    """Return the role of each factor: intrinsic, extrinsic, or separate models; factors that are not named multiply.

    Raises:
        UsageError: `category` is not a category, or is also named as a factor.
    """
    if category is not None:
        if table.factor(category).is_numeric:
            raise UsageError(f"--each {category}: is a number; name a category, or add --category {category}")
        if category in (*intrinsic, *extrinsic):
            raise UsageError(f"--each {category}: has a model for each value, so it cannot be a factor too")
    other_factors = [
        factor.name
        for factor in table.factors
        if factor.name not in (*intrinsic, *extrinsic) and factor.name != category
    ]
    return Split(tuple(intrinsic), (*extrinsic, *other_factors), category)


def judge(
    table: Configurations, split: Split, seed: int = 0, resamples: int = RESAMPLES, with_extrapolations: bool = True
) -> Evaluation:
    """Fit the model and the baselines, test them on held-out groups, and return the fits for predictions.

    Raises:
        UsageError: there are too few configurations or groups, or SciPy is missing.
    """
    groups = len(np.unique(table.groups))
    if groups < LEAST_GROUPS:
        raise UsageError(f"{counted(groups, 'group')} of configurations: at least {LEAST_GROUPS} are needed")
    table, outliers = _without_outliers(table, split, seed)
    groups = len(np.unique(table.groups))
    folds = generic.folds(table.groups, FOLDS, seed)
    kinds = np.zeros(len(table)) if split.category is None else table.values[split.category]
    for training_rows, heldout_rows in folds:
        untrained_kinds = {*kinds[heldout_rows].tolist()} - {*kinds[training_rows].tolist()}
        if untrained_kinds and split.category is not None:
            raise UsageError(
                f"--each {split.category}: all rows of {min(untrained_kinds)} are held out at once, so no model is "
                "left to be tested on them: hold out other rows together (--group, --seed), or omit --each"
            )
    fits = {
        value: generic.with_bootstrap(generic.fit(part, form, seed), part, resamples, seed)
        for value, part, form in separate_tables(table, split)
    }
    test_rows = np.concatenate([rows for _, rows in folds])
    predictions: dict[str, list[Floats]] = {}
    for training_rows, heldout_rows in folds:
        for name, predictor in train_models(table.take(training_rows), split, seed).items():
            predictions.setdefault(name, []).append(predictor(table.take(heldout_rows).values))
    joined_predictions = {name: np.concatenate(arrays) for name, arrays in predictions.items()}
    errors = _errors(joined_predictions, table.seconds[test_rows])
    is_at_bound = any(identifiability.bound_reasons(fit) for fit in fits.values())
    offered_predictions = joined_predictions[offered(errors, is_at_bound)]
    residuals = np.log(table.seconds[test_rows] / np.maximum(offered_predictions, 1e-300))
    kind_errors = _kind_errors(table.take(test_rows), np.abs(offered_predictions / table.seconds[test_rows] - 1))
    extrapolations = tuple(_extrapolations(table, split, seed)) if with_extrapolations else ()
    factors = [table.factor(name) for name in (*split.intrinsic, *split.extrinsic)]
    missing = baselines.missing_baselines(table, factors)
    return Evaluation(
        table, split, seed, fits, errors, residuals, groups, extrapolations, missing, outliers, kind_errors
    )


def offered(errors: Sequence[Error], is_at_bound: bool) -> str:
    """Return the name of the model that is offered.

    Args:
        errors: errors of the models, the smallest first.
        is_at_bound: whether an exponent of the generic model is not identified.
    """
    return next((error.model for error in errors if error.model != GENERIC or not is_at_bound), errors[0].model)


def _without_outliers(table: Configurations, split: Split, seed: int) -> tuple[Configurations, tuple[Outlier, ...]]:
    """Return the table without outliers, and the outliers: rows that two models do not explain that lack them."""
    first, second = np.full(len(table), np.nan), np.full(len(table), np.nan)
    factors = [table.factor(name) for name in (*split.intrinsic, *split.extrinsic)]
    for training_rows, heldout_rows in generic.folds(table.groups, FOLDS, seed):
        part, heldout = table.take(training_rows), table.take(heldout_rows)
        try:
            fits = {
                value: generic.fit(each, form, seed, generic.PENALTIES[:1]).predict
                for value, each, form in separate_tables(part, split)
            }
        except UsageError:
            return table, ()  # too few rows; `judge` says so if that matters
        first[heldout_rows] = by_category(split.category, fits)(heldout.values)
        second[heldout_rows] = robust.robust_ridge(part, factors)(heldout.values)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return table, ()
    is_outlier = robust.outliers(table, first, second)
    kept = table.take(np.flatnonzero(~is_outlier))
    if len(np.unique(kept.groups)) < LEAST_GROUPS:
        return table, ()
    return kept, robust.described(table, np.flatnonzero(is_outlier), first)


def _kind_errors(table: Configurations, deviations: Floats) -> tuple[KindError, ...]:
    """Return the values of factors with the largest mean errors, as far as they are above the mean of all rows."""
    found = [
        KindError(factor.name, value, int(rows.sum()), float(deviations[rows].mean()))
        for factor in table.factors
        for value in sorted(set(table.values[factor.name].tolist()))
        if LEAST_KIND_ROWS <= (rows := table.values[factor.name] == value).sum() < len(table)
    ]
    large = [entry for entry in found if entry.mean > KIND_FACTOR * deviations.mean()]
    return tuple(sorted(large, key=lambda entry: -entry.mean)[:MOST_KINDS])


def separate_tables(table: Configurations, split: Split) -> list[tuple[str | None, Configurations, Form]]:
    """Return the tables with separate models, each with its value of the category and its form."""
    if split.category is None:
        return [(None, table, generic.form(table, split.intrinsic, split.extrinsic))]
    result: list[tuple[str | None, Configurations, Form]] = []
    for value in table.factor(split.category).levels:
        part = table.take(np.flatnonzero(table.values[split.category] == value))
        try:
            form = generic.form(part, split.intrinsic, split.extrinsic)
            generic.check_rows(part, form)
        except UsageError as error:
            raise UsageError(f"{split.category}={value}: {error}") from error
        result.append((value, part, form))
    return result


def train_models(table: Configurations, split: Split, seed: int) -> dict[str, Predictor]:
    """Return all models, trained on some rows; without the generic model if it needs more rows."""
    models: dict[str, Predictor] = {}
    try:
        fits = {value: generic.fit(part, form, seed) for value, part, form in separate_tables(table, split)}
        models[GENERIC] = by_category(split.category, {value: fit.predict for value, fit in fits.items()})
    except LibraryError:
        raise
    except UsageError:
        pass  # the rows are too few for it
    for name in baselines.BASELINES:
        with contextlib.suppress(baselines.BaselineError):
            models[name] = train_baseline(name, table, split)
    return models


def train_baseline(name: str, table: Configurations, split: Split) -> Predictor:
    """Return a trained baseline, separate for each value of the category that has separate models."""
    factors = [table.factor(factor_name) for factor_name in (*split.intrinsic, *split.extrinsic)]
    train = baselines.BASELINES[name]
    if split.category is None:
        return train(table, factors)
    values = table.values[split.category]
    return by_category(
        split.category,
        {value: train(table.take(np.flatnonzero(values == value)), factors) for value in sorted(set(values.tolist()))},
    )


def by_category(name: str | None, models: Mapping[Any, Predictor]) -> Predictor:
    """Return one model that uses the model of each value; it returns NaN for values without a model."""
    if name is None:
        return models[None]

    def predict(values: Values) -> Floats:
        seconds = np.full(len(values[name]), np.nan)
        for value, model in models.items():
            indices = np.flatnonzero(values[name] == value)
            if len(indices):
                seconds[indices] = model({key: column[indices] for key, column in values.items()})
        return seconds

    return predict


def _errors(predictions: Mapping[str, Floats], seconds: Floats) -> tuple[Error, ...]:
    """Return the errors of the models with a finite prediction for all rows, the smallest mean first."""
    errors = []
    for name, values in predictions.items():
        if len(values) == len(seconds) and np.isfinite(values).all():
            deviations = np.abs(values / seconds - 1)
            errors.append(
                Error(
                    name, float(deviations.mean()), float(np.median(deviations)), float(np.percentile(deviations, 90))
                )
            )
    return tuple(sorted(errors, key=lambda error: error.mean))


def _extrapolations(table: Configurations, split: Split, seed: int) -> list[Extrapolation]:
    """Return the errors in the largest values of each number, a seventh of the rows, after training on the others."""
    results = []
    for name in (*split.intrinsic, *split.extrinsic):
        factor = table.factor(name)
        values = table.values[name]
        if not factor.is_numeric or len(np.unique(values)) < 4:
            continue
        threshold = float(np.quantile(values, 6 / 7, method="higher"))
        heldout_rows, training_rows = np.flatnonzero(values >= threshold), np.flatnonzero(values < threshold)
        if len(heldout_rows) * 2 > len(table) or len(heldout_rows) < 3:
            continue
        training_table = table.take(training_rows)
        predictions = {
            model: predictor(table.take(heldout_rows).values)
            for model, predictor in train_models(training_table, split, seed).items()
        }
        errors = _errors(predictions, table.seconds[heldout_rows])
        if errors:
            results.append(Extrapolation(name, threshold, len(heldout_rows), errors))
    return results


# --- predictions -------------------------------------------------------------------------------------------------


class PredictedPoint(NamedTuple):
    """A predicted configuration; durations are seconds."""

    configuration: Mapping[str, float | str]
    seconds: float
    low: float
    high: float
    extrapolation_notes: tuple[str, ...]
    """Texts on how it is outside the recorded configurations."""


def predict(evaluation: Evaluation, requested: Sequence[Mapping[str, float | str]]) -> list[PredictedPoint]:
    """Return the times of the offered model with 95 % intervals, from resampled fits and errors of held-out groups.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    values = point_columns(evaluation, requested)
    seconds = offered_predictor(evaluation)(values)
    logs = np.log(np.maximum(spread(evaluation, values), 1e-300))
    rng = np.random.default_rng(evaluation.seed)
    noise = rng.choice(evaluation.residuals, logs.shape)
    low, high = np.exp(stats.resampled_ends(logs + noise))
    return [
        PredictedPoint(dict(configuration), float(seconds[index]), min(float(low[index]), float(seconds[index])),
              max(float(high[index]), float(seconds[index])), extrapolation_notes(evaluation, configuration))
        for index, configuration in enumerate(requested)
    ]  # fmt: skip


def offered_predictor(evaluation: Evaluation) -> Predictor:
    """Return the offered model."""
    if evaluation.offered_model == GENERIC:
        return by_category(evaluation.split.category, {value: fit.predict for value, fit in evaluation.fits.items()})
    return train_baseline(evaluation.offered_model, evaluation.table, evaluation.split)


def spread(evaluation: Evaluation, values: Values) -> Floats:
    """Return predicted seconds by resampled fit of the offered model (rows) and configuration (columns)."""
    count = min(len(fit.bootstrap) for fit in evaluation.fits.values())
    if evaluation.offered_model == GENERIC:
        models: list[Callable[[Values], Floats]] = [
            by_category(
                evaluation.split.category,
                {value: _resampled_fit(fit, number) for value, fit in evaluation.fits.items()},
            )
            for number in range(count)
        ]
    else:
        rng = np.random.default_rng(evaluation.seed)
        table = generic.sample_rows(evaluation.table, evaluation.seed)
        count = min(count, FOREST_RESAMPLES) if evaluation.offered_model == "forest" else count
        models = [
            train_baseline(
                evaluation.offered_model, table.take(generic.resample_rows(table.groups, rng)), evaluation.split
            )
            for _ in range(count)
        ]
    predictions = np.array([model(values) for model in models])
    finite = np.isfinite(predictions)
    if not finite.all():  # a resampled table lacked a value of the category
        means = np.where(finite, predictions, 0.0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
        predictions = np.where(
            finite, predictions, np.where(finite.any(axis=0), means, offered_predictor(evaluation)(values))
        )
    return predictions


def _resampled_fit(fit: Fit, number: int) -> Predictor:
    shapes, coefficients = fit.bootstrap[number]
    return lambda values: Fit(fit.form, shapes, coefficients, fit.penalty).predict(values)


def point_columns(evaluation: Evaluation, requested: Sequence[Mapping[str, float | str]]) -> dict[str, NDArray[Any]]:
    """Return configurations as columns.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    factors = evaluation.table.factors
    for configuration in requested:
        unknown = [name for name in configuration if name not in {factor.name for factor in factors}]
        missing = [factor.name for factor in factors if factor.name not in configuration]
        if unknown or missing:
            reason = f"{unknown[0]} is not in the fit" if unknown else f"no value is given for {', '.join(missing)}"
            raise UsageError(f"{reason}; it has {', '.join(factor.name for factor in factors)}")
        for factor in factors:
            value = configuration[factor.name]
            if not factor.is_numeric:
                if value not in factor.levels:
                    raise UsageError(f"{factor.name}={value} was never recorded; there are {', '.join(factor.levels)}")
            elif isinstance(value, str) or not 0 < value < 1e100:
                raise UsageError(f"{factor.name}={value} is not a number above 0")
    return {
        factor.name: np.array(
            [configuration[factor.name] for configuration in requested], dtype=float if factor.is_numeric else object
        )
        for factor in factors
    }


def extrapolation_notes(evaluation: Evaluation, configuration: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return texts on how a configuration is outside the recorded ones: outside a range, or all combinations."""
    texts = []
    for factor in evaluation.table.factors:
        value = configuration[factor.name]
        if isinstance(value, str):
            continue
        if not factor.low <= value <= factor.high:
            times = value / factor.high if value > factor.high else factor.low / value
            side, bound = ("above", factor.high) if value > factor.high else ("below", factor.low)
            texts.append(f"{factor.name} is {times:.3g} times {side} the recorded values ({bound:g})")
    return tuple(texts) if texts else _combination_notes(evaluation, configuration)


def _combination_notes(evaluation: Evaluation, configuration: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return a text unless the configuration is a mixture, in logarithms, of recorded ones with its categories."""
    table = evaluation.table
    category_names = [factor.name for factor in table.factors if not factor.is_numeric]
    is_match = np.ones(len(table), dtype=bool)
    for name in category_names:
        is_match &= table.values[name] == configuration[name]
    if not is_match.any():
        return (
            f"{', '.join(f'{name}={configuration[name]}' for name in category_names)} were never recorded together",
        )
    numbers = [factor for factor in table.factors if factor.is_numeric and factor.high > factor.low]
    if not numbers:
        return ()
    _, nnls = generic.solvers()

    def scale(values: Any, factor: Factor) -> Any:
        return np.log(np.asarray(values, dtype=float) / factor.low) / np.log(factor.high / factor.low)

    matching_table = generic.sample_rows(table.take(np.flatnonzero(is_match)), evaluation.seed)
    points = np.array(
        [scale(matching_table.values[factor.name], factor) for factor in numbers] + [np.ones(len(matching_table))]
    )
    target = np.array([*(scale(configuration[factor.name], factor) for factor in numbers), 1.0])
    try:
        _, residual = nnls(points, target)
    except RuntimeError:
        return ()
    return () if residual < 1e-6 else ("it is outside the recorded combinations",)
