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

from xsp.errors import UsageError
from xsp.predict import baselines, generic
from xsp.predict.baselines import Trained, Values
from xsp.predict.configurations import Configurations, Factor, Floats
from xsp.predict.generic import Fit, Form

GENERIC = "generic"
FOLDS = 5
LEAST_GROUPS = 3
RESAMPLES = 200
FOREST_RESAMPLES = 40
"""Number of resampled forests: a forest takes longer than any other model, and already averages resampled trees."""


class Split(NamedTuple):
    """Factors by role."""

    intrinsic: tuple[str, ...]
    extrinsic: tuple[str, ...]
    each: str | None = None
    """A category whose values each have a separate model."""


class Error(NamedTuple):
    """Errors of predictions for held-out configurations, as shares of the measured time."""

    model: str
    mean: float
    median: float
    worst: float
    """The 90th percentile."""


class Beyond(NamedTuple):
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
    beyond: tuple[Beyond, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Baselines that cannot be trained on the table, with the reason for each."""

    @property
    def offered(self) -> str:
        """Return the model with the smallest mean error on held-out configurations."""
        return self.errors[0].model

    @property
    def dropped(self) -> tuple[str, ...]:
        """Texts of all fits on factors that could not be used."""
        return tuple(
            dict.fromkeys(
                text if value is None else f"{self.split.each}={value}: {text}"
                for value, fit in self.fits.items()
                for text in fit.form.dropped
            )
        )


def split_of(table: Configurations, intrinsic: Sequence[str], extrinsic: Sequence[str], each: str | None) -> Split:
    """Return the role of each factor: intrinsic, extrinsic, or separate models; factors that are not named multiply.

    Raises:
        UsageError: `each` is not a category, or is also named as a factor.
    """
    if each is not None:
        if table.factor(each).numeric:
            raise UsageError(f"--each {each}: is a number; name a category, or add --category {each}")
        if each in (*intrinsic, *extrinsic):
            raise UsageError(f"--each {each}: has a model for each value, so it cannot be a factor too")
    remaining = [
        factor.name for factor in table.factors if factor.name not in (*intrinsic, *extrinsic) and factor.name != each
    ]
    return Split(tuple(intrinsic), (*extrinsic, *remaining), each)


def judge(
    table: Configurations, split: Split, seed: int = 0, resamples: int = RESAMPLES, beyond: bool = True
) -> Evaluation:
    """Fit the model and the baselines, test them on held-out groups, and return the fits for predictions.

    Raises:
        UsageError: there are too few configurations or groups, or SciPy is missing.
    """
    groups = len(np.unique(table.groups))
    if groups < LEAST_GROUPS:
        raise UsageError(f"{groups} group{'s' * (groups != 1)} of configurations: at least {LEAST_GROUPS} are needed")
    folds = generic.folds(table.groups, FOLDS, seed)
    kinds = np.zeros(len(table)) if split.each is None else table.values[split.each]
    for train, test in folds:
        lost = {*kinds[test].tolist()} - {*kinds[train].tolist()}
        if lost and split.each is not None:
            raise UsageError(
                f"--each {split.each}: all rows of {min(lost)} are held out at once, so no model is left to be tested "
                "on them: hold out other rows together (--group, --seed), or omit --each"
            )
    fits = {
        value: generic.with_bootstrap(generic.fit(part, form, seed), part, resamples, seed)
        for value, part, form in parts(table, split)
    }
    test_rows = np.concatenate([rows for _, rows in folds])
    predictions: dict[str, list[Floats]] = {}
    for train, test in folds:
        for name, trained in trained_on(table.take(train), split, seed).items():
            predictions.setdefault(name, []).append(trained(table.take(test).values))
    predicted = {name: np.concatenate(arrays) for name, arrays in predictions.items()}
    errors = _errors(predicted, table.seconds[test_rows])
    residuals = np.log(table.seconds[test_rows] / np.maximum(predicted[errors[0].model], 1e-300))
    beyond_errors = tuple(_beyond(table, split, seed)) if beyond else ()
    factors = [table.factor(name) for name in (*split.intrinsic, *split.extrinsic)]
    missing = baselines.missing(table, factors)
    return Evaluation(table, split, seed, fits, errors, residuals, groups, beyond_errors, missing)


def parts(table: Configurations, split: Split) -> list[tuple[str | None, Configurations, Form]]:
    """Return the tables with separate models, each with its value of the category and its form."""
    if split.each is None:
        return [(None, table, generic.form(table, split.intrinsic, split.extrinsic))]
    result: list[tuple[str | None, Configurations, Form]] = []
    for value in table.factor(split.each).levels:
        part = table.take(np.flatnonzero(table.values[split.each] == value))
        try:
            form = generic.form(part, split.intrinsic, split.extrinsic)
            generic.check_rows(part, form)
        except UsageError as error:
            raise UsageError(f"{split.each}={value}: {error}") from error
        result.append((value, part, form))
    return result


def trained_on(table: Configurations, split: Split, seed: int) -> dict[str, Trained]:
    """Return all models, trained on some rows; without the generic model if it needs more rows."""
    models: dict[str, Trained] = {}
    try:
        fits = {value: generic.fit(part, form, seed) for value, part, form in parts(table, split)}
        models[GENERIC] = by_each(split.each, {value: fit.predict for value, fit in fits.items()})
    except UsageError as error:
        if "SciPy" in str(error):
            raise
    for name in baselines.BASELINES:
        with contextlib.suppress(baselines.Unfit):
            models[name] = baseline(name, table, split)
    return models


def baseline(name: str, table: Configurations, split: Split) -> Trained:
    """Return a trained baseline, separate for each value of the category that has separate models."""
    factors = [table.factor(factor_name) for factor_name in (*split.intrinsic, *split.extrinsic)]
    train = baselines.BASELINES[name]
    if split.each is None:
        return train(table, factors)
    values = table.values[split.each]
    return by_each(
        split.each,
        {value: train(table.take(np.flatnonzero(values == value)), factors) for value in sorted(set(values.tolist()))},
    )


def by_each(name: str | None, models: Mapping[Any, Trained]) -> Trained:
    """Return one model that uses the model of each value; it returns NaN for values without a model."""
    if name is None:
        return models[None]

    def predict(values: Values) -> Floats:
        seconds = np.full(len(values[name]), np.nan)
        for value, model in models.items():
            places = np.flatnonzero(values[name] == value)
            if len(places):
                seconds[places] = model({key: column[places] for key, column in values.items()})
        return seconds

    return predict


def _errors(predicted: Mapping[str, Floats], seconds: Floats) -> tuple[Error, ...]:
    """Return the errors of the models with a finite prediction for all rows, the smallest mean first."""
    errors = []
    for name, values in predicted.items():
        if len(values) == len(seconds) and np.isfinite(values).all():
            deviations = np.abs(values / seconds - 1)
            errors.append(
                Error(
                    name, float(deviations.mean()), float(np.median(deviations)), float(np.percentile(deviations, 90))
                )
            )
    return tuple(sorted(errors, key=lambda error: error.mean))


def _beyond(table: Configurations, split: Split, seed: int) -> list[Beyond]:
    """Return the errors in the largest values of each number, a seventh of the rows, after training on the others."""
    results = []
    for name in (*split.intrinsic, *split.extrinsic):
        factor = table.factor(name)
        values = table.values[name]
        if not factor.numeric or len(np.unique(values)) < 4:
            continue
        largest = float(np.quantile(values, 6 / 7, method="higher"))
        test, train = np.flatnonzero(values >= largest), np.flatnonzero(values < largest)
        if len(test) * 2 > len(table) or len(test) < 3:
            continue
        training_table = table.take(train)
        predicted = {
            model: trained(table.take(test).values)
            for model, trained in trained_on(training_table, split, seed).items()
        }
        errors = _errors(predicted, table.seconds[test])
        if errors:
            results.append(Beyond(name, largest, len(test), errors))
    return results


# --- predictions -------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A predicted configuration; durations are seconds."""

    configuration: Mapping[str, float | str]
    seconds: float
    low: float
    high: float
    outside: tuple[str, ...]
    """Texts on how it lies outside the recorded configurations."""


def predict(judged: Evaluation, asked: Sequence[Mapping[str, float | str]]) -> list[Point]:
    """Return the times of the offered model with 95 % intervals, from resampled fits and errors of held-out groups.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    values = point_columns(judged, asked)
    seconds = offered(judged)(values)
    logs = np.log(np.maximum(spread(judged, values), 1e-300))
    rng = np.random.default_rng(judged.seed)
    noise = rng.choice(judged.residuals, logs.shape)
    low, high = np.exp(np.percentile(logs + noise, [2.5, 97.5], axis=0))
    return [
        Point(dict(configuration), float(seconds[place]), min(float(low[place]), float(seconds[place])),
              max(float(high[place]), float(seconds[place])), outside(judged, configuration))
        for place, configuration in enumerate(asked)
    ]  # fmt: skip


def offered(judged: Evaluation) -> Trained:
    """Return the offered model."""
    if judged.offered == GENERIC:
        return by_each(judged.split.each, {value: fit.predict for value, fit in judged.fits.items()})
    return baseline(judged.offered, judged.table, judged.split)


def spread(judged: Evaluation, values: Values) -> Floats:
    """Return predicted seconds by resampled fit of the offered model (rows) and configuration (columns)."""
    count = min(len(fit.bootstrap) for fit in judged.fits.values())
    if judged.offered == GENERIC:
        models: list[Callable[[Values], Floats]] = [
            by_each(judged.split.each, {value: _nth(fit, number) for value, fit in judged.fits.items()})
            for number in range(count)
        ]
    else:
        rng = np.random.default_rng(judged.seed)
        table = generic.sample_rows(judged.table, judged.seed)
        count = min(count, FOREST_RESAMPLES) if judged.offered == "forest" else count
        models = [
            baseline(judged.offered, table.take(generic.resampled(table.groups, rng)), judged.split)
            for _ in range(count)
        ]
    predictions = np.array([model(values) for model in models])
    finite = np.isfinite(predictions)
    if not finite.all():  # a resampled table lacked a value of the category
        means = np.where(finite, predictions, 0.0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
        predictions = np.where(finite, predictions, np.where(finite.any(axis=0), means, offered(judged)(values)))
    return predictions


def _nth(fit: Fit, number: int) -> Trained:
    shapes, coefficients = fit.bootstrap[number]
    return lambda values: Fit(fit.form, shapes, coefficients, fit.penalty).predict(values)


def point_columns(judged: Evaluation, asked: Sequence[Mapping[str, float | str]]) -> dict[str, NDArray[Any]]:
    """Return configurations as columns.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    factors = judged.table.factors
    for configuration in asked:
        unknown = [name for name in configuration if name not in {factor.name for factor in factors}]
        missing = [factor.name for factor in factors if factor.name not in configuration]
        if unknown or missing:
            reason = f"{unknown[0]} is not in the fit" if unknown else f"no value is given for {', '.join(missing)}"
            raise UsageError(f"{reason}; it has {', '.join(factor.name for factor in factors)}")
        for factor in factors:
            _check(factor, configuration[factor.name])
    return {
        factor.name: np.array(
            [configuration[factor.name] for configuration in asked], dtype=float if factor.numeric else object
        )
        for factor in factors
    }


def _check(factor: Factor, value: float | str) -> None:
    if not factor.numeric:
        if value not in factor.levels:
            raise UsageError(f"{factor.name}={value} was never recorded; there are {', '.join(factor.levels)}")
    elif isinstance(value, str) or not 0 < value < 1e100:
        raise UsageError(f"{factor.name}={value} is not a number above 0")


def outside(judged: Evaluation, asked: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return texts on how a configuration lies outside the recorded ones: outside a range, or all combinations."""
    texts = []
    for factor in judged.table.factors:
        value = asked[factor.name]
        if isinstance(value, str):
            continue
        if not factor.low <= value <= factor.high:
            times = value / factor.high if value > factor.high else factor.low / value
            side, end = ("above", factor.high) if value > factor.high else ("below", factor.low)
            texts.append(f"{factor.name} is {times:.3g} times {side} the recorded values ({end:g})")
    return tuple(texts) if texts else _not_between(judged, asked)


def _not_between(judged: Evaluation, asked: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return a text if a configuration is no mixture, in logarithms, of recorded ones with the same categories."""
    table = judged.table
    texts = [factor.name for factor in table.factors if not factor.numeric]
    matching = np.ones(len(table), dtype=bool)
    for name in texts:
        matching &= table.values[name] == asked[name]
    if not matching.any():
        return (f"{', '.join(f'{name}={asked[name]}' for name in texts)} were never recorded together",)
    numbers = [factor for factor in table.factors if factor.numeric and factor.high > factor.low]
    if not numbers:
        return ()
    _, nnls = generic.solvers()

    def scaled(values: Any, factor: Factor) -> Any:
        return np.log(np.asarray(values, dtype=float) / factor.low) / np.log(factor.high / factor.low)

    recorded = generic.sample_rows(table.take(np.flatnonzero(matching)), judged.seed)
    points = np.array([scaled(recorded.values[factor.name], factor) for factor in numbers] + [np.ones(len(recorded))])
    target = np.array([*(scaled(asked[factor.name], factor) for factor in numbers), 1.0])
    try:
        _, residual = nnls(points, target)
    except RuntimeError:
        return ()
    return () if residual < 1e-6 else ("it is outside the recorded combinations",)
