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
class Judged:
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
    rest = [name.name for name in table.factors if name.name not in (*intrinsic, *extrinsic) and name.name != each]
    return Split(tuple(intrinsic), (*extrinsic, *rest), each)


def judge(
    table: Configurations, split: Split, seed: int = 0, resamples: int = RESAMPLES, beyond: bool = True
) -> Judged:
    """Fit the model and the baselines, test them on held-out groups, and return the fits for predictions.

    Raises:
        UsageError: there are too few configurations or groups, or SciPy is missing.
    """
    groups = len(np.unique(table.groups))
    if groups < LEAST_GROUPS:
        raise UsageError(f"{groups} group{'s' * (groups != 1)} of configurations: at least {LEAST_GROUPS} are needed")
    held = generic.folds(table.groups, FOLDS, seed)
    kinds = np.zeros(len(table)) if split.each is None else table.values[split.each]
    for inside, out in held:
        alone = {*kinds[out].tolist()} - {*kinds[inside].tolist()}
        if alone and split.each is not None:
            raise UsageError(
                f"--each {split.each}: all rows of {min(alone)} are held out at once, so no model is left to be tested "
                "on them: hold out other rows together (--group, --seed), or omit --each"
            )
    fits = {
        value: generic.with_bootstrap(generic.fit(part, made, seed), part, resamples, seed)
        for value, part, made in parts(table, split)
    }
    outside = np.concatenate([each for _, each in held])
    found: dict[str, list[Floats]] = {}
    for inside, out in held:
        for name, trained in trained_on(table.take(inside), split, seed).items():
            found.setdefault(name, []).append(trained(table.take(out).values))
    predicted = {name: np.concatenate(those) for name, those in found.items()}
    errors = _errors(predicted, table.seconds[outside])
    residuals = np.log(table.seconds[outside] / np.maximum(predicted[errors[0].model], 1e-300))
    last = tuple(_beyond(table, split, seed)) if beyond else ()
    factors = [table.factor(each) for each in (*split.intrinsic, *split.extrinsic)]
    missing = baselines.missing(table, factors)
    return Judged(table, split, seed, fits, errors, residuals, groups, last, missing)


def parts(table: Configurations, split: Split) -> list[tuple[str | None, Configurations, Form]]:
    """Return the tables with separate models, each with its value of the category and its form."""
    if split.each is None:
        return [(None, table, generic.form(table, split.intrinsic, split.extrinsic))]
    found: list[tuple[str | None, Configurations, Form]] = []
    for value in table.factor(split.each).levels:
        part = table.take(np.flatnonzero(table.values[split.each] == value))
        try:
            made = generic.form(part, split.intrinsic, split.extrinsic)
            generic.needed(part, made)
        except UsageError as error:
            raise UsageError(f"{split.each}={value}: {error}") from error
        found.append((value, part, made))
    return found


def trained_on(table: Configurations, split: Split, seed: int) -> dict[str, Trained]:
    """Return all models, trained on some rows; without the generic model if it needs more rows."""
    made: dict[str, Trained] = {}
    try:
        fits = {value: generic.fit(part, form, seed) for value, part, form in parts(table, split)}
        made[GENERIC] = by_each(split.each, {value: fit.predict for value, fit in fits.items()})
    except UsageError as error:
        if "SciPy" in str(error):
            raise
    for name in baselines.BASELINES:
        with contextlib.suppress(baselines.Unfit):
            made[name] = baseline(name, table, split)
    return made


def baseline(name: str, table: Configurations, split: Split) -> Trained:
    """Return a trained baseline, separate for each value of the category that has separate models."""
    factors = [table.factor(each) for each in (*split.intrinsic, *split.extrinsic)]
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
        found = np.full(len(values[name]), np.nan)
        for value, model in models.items():
            places = np.flatnonzero(values[name] == value)
            if len(places):
                found[places] = model({each: column[places] for each, column in values.items()})
        return found

    return predict


def _errors(predicted: Mapping[str, Floats], seconds: Floats) -> tuple[Error, ...]:
    """Return the errors of the models with a finite prediction for all rows, the smallest mean first."""
    found = []
    for name, those in predicted.items():
        if len(those) == len(seconds) and np.isfinite(those).all():
            apart = np.abs(those / seconds - 1)
            found.append(Error(name, float(apart.mean()), float(np.median(apart)), float(np.percentile(apart, 90))))
    return tuple(sorted(found, key=lambda each: each.mean))


def _beyond(table: Configurations, split: Split, seed: int) -> list[Beyond]:
    """Return the errors in the largest values of each number, a seventh of the rows, after training on the others."""
    found = []
    for name in (*split.intrinsic, *split.extrinsic):
        factor = table.factor(name)
        values = table.values[name]
        if not factor.numeric or len(np.unique(values)) < 4:
            continue
        largest = float(np.quantile(values, 6 / 7, method="higher"))
        out, inside = np.flatnonzero(values >= largest), np.flatnonzero(values < largest)
        if len(out) * 2 > len(table) or len(out) < 3:
            continue
        rest = table.take(inside)
        predicted = {model: run(table.take(out).values) for model, run in trained_on(rest, split, seed).items()}
        errors = _errors(predicted, table.seconds[out])
        if errors:
            found.append(Beyond(name, largest, len(out), errors))
    return found


# --- predictions -------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A predicted configuration; durations are seconds."""

    configuration: Mapping[str, float | str]
    seconds: float
    low: float
    high: float
    outside: tuple[str, ...]
    """Texts on how it lies outside the recorded configurations."""


def predict(judged: Judged, asked: Sequence[Mapping[str, float | str]]) -> list[Point]:
    """Return the times of the offered model with 95 % intervals, from resampled fits and errors of held-out groups.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    values = asked_values(judged, asked)
    found = offered(judged)(values)
    logs = np.log(np.maximum(spread(judged, values), 1e-300))
    chance = np.random.default_rng(judged.seed)
    apart = chance.choice(judged.residuals, logs.shape)
    low, high = np.exp(np.percentile(logs + apart, [2.5, 97.5], axis=0))
    return [
        Point(dict(each), float(found[place]), min(float(low[place]), float(found[place])),
              max(float(high[place]), float(found[place])), outside(judged, each))
        for place, each in enumerate(asked)
    ]  # fmt: skip


def offered(judged: Judged) -> Trained:
    """Return the offered model."""
    if judged.offered == GENERIC:
        return by_each(judged.split.each, {value: fit.predict for value, fit in judged.fits.items()})
    return baseline(judged.offered, judged.table, judged.split)


def spread(judged: Judged, values: Values) -> Floats:
    """Return predicted seconds by resampled fit of the offered model (rows) and configuration (columns)."""
    count = min(len(fit.bootstrap) for fit in judged.fits.values())
    if judged.offered == GENERIC:
        models: list[Callable[[Values], Floats]] = [
            by_each(judged.split.each, {value: _nth(fit, number) for value, fit in judged.fits.items()})
            for number in range(count)
        ]
    else:
        chance = np.random.default_rng(judged.seed)
        table = generic.drawn(judged.table, judged.seed)
        count = min(count, FOREST_RESAMPLES) if judged.offered == "forest" else count
        models = [
            baseline(judged.offered, table.take(generic.resampled(table.groups, chance)), judged.split)
            for _ in range(count)
        ]
    found = np.array([model(values) for model in models])
    known = np.isfinite(found)
    if not known.all():  # a resampled table lacked a value of the category
        means = np.where(known, found, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        found = np.where(known, found, np.where(known.any(axis=0), means, offered(judged)(values)))
    return found


def _nth(fit: Fit, number: int) -> Trained:
    shapes, coefficients = fit.bootstrap[number]
    return lambda values: Fit(fit.form, shapes, coefficients, fit.penalty).predict(values)


def asked_values(judged: Judged, asked: Sequence[Mapping[str, float | str]]) -> dict[str, NDArray[Any]]:
    """Return configurations as columns.

    Raises:
        UsageError: a factor is missing or unknown, or a category has a value that was not recorded.
    """
    factors = judged.table.factors
    for each in asked:
        unknown = [name for name in each if name not in {factor.name for factor in factors}]
        lacks = [factor.name for factor in factors if factor.name not in each]
        if unknown or lacks:
            which = f"{unknown[0]} is not in the fit" if unknown else f"no value is given for {', '.join(lacks)}"
            raise UsageError(f"{which}; it has {', '.join(factor.name for factor in factors)}")
        for factor in factors:
            _check(factor, each[factor.name])
    return {
        factor.name: np.array([each[factor.name] for each in asked], dtype=float if factor.numeric else object)
        for factor in factors
    }


def _check(factor: Factor, value: float | str) -> None:
    if not factor.numeric:
        if value not in factor.levels:
            raise UsageError(f"{factor.name}={value} was never recorded; there are {', '.join(factor.levels)}")
    elif isinstance(value, str) or not 0 < value < 1e100:
        raise UsageError(f"{factor.name}={value} is not a number above 0")


def outside(judged: Judged, asked: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return texts on how a configuration lies outside the recorded ones: outside a range, or all combinations."""
    found = []
    for factor in judged.table.factors:
        value = asked[factor.name]
        if isinstance(value, str):
            continue
        if not factor.low <= value <= factor.high:
            times = value / factor.high if value > factor.high else factor.low / value
            side, end = ("above", factor.high) if value > factor.high else ("below", factor.low)
            found.append(f"{factor.name} is {times:.3g} times {side} the recorded values ({end:g})")
    return tuple(found) if found else _not_between(judged, asked)


def _not_between(judged: Judged, asked: Mapping[str, float | str]) -> tuple[str, ...]:
    """Return a text if a configuration is no mixture, in logarithms, of recorded ones with the same categories."""
    table = judged.table
    texts = [each.name for each in table.factors if not each.numeric]
    alike = np.ones(len(table), dtype=bool)
    for name in texts:
        alike &= table.values[name] == asked[name]
    if not alike.any():
        return (f"{', '.join(f'{name}={asked[name]}' for name in texts)} were never recorded together",)
    numbers = [each for each in table.factors if each.numeric and each.high > each.low]
    if not numbers:
        return ()
    _, nnls = generic.solvers()

    def scaled(values: Any, factor: Factor) -> Any:
        return np.log(np.asarray(values, dtype=float) / factor.low) / np.log(factor.high / factor.low)

    known = generic.drawn(table.take(np.flatnonzero(alike)), judged.seed)
    points = np.array([scaled(known.values[each.name], each) for each in numbers] + [np.ones(len(known))])
    wanted = np.array([*(scaled(asked[each.name], each) for each in numbers), 1.0])
    try:
        _, apart = nnls(points, wanted)
    except RuntimeError:
        return ()
    return () if apart < 1e-6 else ("it is outside the recorded combinations",)
