"""Correlations of the latency of models with their measures, with intervals, by device, batch and threads.

For each measure: Pearson's r of the logarithms, Spearman's ρ, and R² of the line through the logarithms, which is r².
The intervals are 95 % percentile bootstraps that resample models. Whether the longest path or the FLOPs predict latency
better is decided only by the interval of the difference of their coefficients, over the same resamples of the same
models.

A correlation is not a cause: in most collections a model with a longer path also has more FLOPs. The families of small
models (`micro:`, see `xsp.micromodels`) vary one measure alone. They are not part of the coefficients; the growth of
latency in a family is a separate slope.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xsp.bound.latencies import Latency
from xsp.micromodels import VARIED_MEASURES
from xsp.stats import (
    Figure,
    exponent,
    figure,
    pearson_of,
    pearson_rows,
    resamples,
    spearman_of,
    spearman_rows,
)
from xsp.texts import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

MEASURES: Mapping[str, str] = {
    "input_elements": "input",
    "parameters": "parameters",
    "flops": "FLOPs",
    "longest_path": "longest path",
    "diameter": "diameter",
    "computing": "computing nodes",
    "bytes": "bytes",
    "peak_activation_bytes": "activations",
}
"""Correlated measures of `xsp.graph.measures`, with their names on a page; the first four are those of SPOC."""

REGRESSED = ("input_elements", "parameters", "flops", "longest_path", "bytes")
PATH, WORK = "longest_path", "flops"
"""The two measures that are compared."""

MICRO = "micro:"

MIN_MODELS = 4
"""Minimum number of models for a figure."""


@dataclass(frozen=True)
class Correlation:
    """Correlation of one measure with latency."""

    measure: str
    models: int
    """Number of models that have the measure, and not as 0."""

    pearson: Figure | None
    spearman: Figure | None
    r2: Figure | None
    reason: str = ""
    """Why there are no coefficients."""


@dataclass(frozen=True)
class CoefficientDifference:
    """The coefficient of the longest path minus that of FLOPs, over the models that have both."""

    coefficient: str
    models: int
    figure: Figure

    @property
    def winner(self) -> str | None:
        """The measure with the higher coefficient if the interval excludes 0; else None."""
        if self.figure.low is None or self.figure.high is None or self.figure.low <= 0 <= self.figure.high:
            return None
        return PATH if self.figure.low > 0 else WORK


@dataclass(frozen=True)
class Regression:
    """Log latency on the logarithms of several measures, by least squares."""

    models: int
    exponents: Mapping[str, Figure]
    """Measure → exponent with which latency grows in it, the other measures held constant."""

    dropped: Mapping[str, str]
    """Measure → why it is not in the regression."""

    r2: float
    mean_error_percent: Figure
    """Mean of |predicted / measured − 1| in leave-one-out cross-validation over models."""

    median_error_percent: float


@dataclass(frozen=True)
class Slope:
    """Latency in a family of micro-models: the effect of the measure that the family varies."""

    family: str
    measure: str
    models: int
    least_ns: float
    """Latency of the model with the smallest measure."""

    most_ns: float
    factor: float
    """The largest measure of the family over the smallest."""

    exponent: Figure | None
    """The exponent with which latency grows in the measure; None for fewer than `MIN_MODELS` models."""


@dataclass(frozen=True)
class LatencyGroup:
    """The models of one device, batch and number of threads."""

    device: str
    batch: int | None
    threads: int | None
    points: tuple[tuple[str, float, Mapping[str, Any]], ...]
    """Name, latency in nanoseconds and measures of each model."""

    correlations: tuple[Correlation, ...]
    differences: tuple[CoefficientDifference, ...]
    regression: Regression | None
    reason: str = ""
    """Why there are no figures, or no regression."""

    slopes: tuple[Slope, ...] = ()

    @property
    def title(self) -> str:
        """Device, batch and threads, as far as they are known."""
        parts = [self.device, f"batch {self.batch}" if self.batch else ""]
        parts += [counted(self.threads, "thread")] if self.threads else []
        return ", ".join(filter(None, parts)) or "all"


def groups(rows: Iterable[Mapping[str, Any]], latencies: Iterable[Latency]) -> list[LatencyGroup]:
    """Correlate measures with latencies, for each device, batch and number of threads.

    Args:
        rows: measures of models, each with its name under `spec`: rows of a corpus, see `xsp.graph.corpus`.
        latencies: latencies of models with the same names; of several latencies of a model in a group the median is
            used. Latencies of models without measures are left out.
    """
    measures = {row["spec"]: row for row in rows if "error" not in row}
    by_group: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for latency in latencies:
        if latency.model in measures:
            group = by_group.setdefault((latency.device, latency.batch or 0, latency.threads or 0), {})
            group.setdefault(latency.model, []).append(latency.ns)
    return [
        _group(*key, {name: statistics.median(ns) for name, ns in by_group[key].items()}, measures)
        for key in sorted(by_group)
    ]


def omissions(
    rows: Iterable[Mapping[str, Any]], latencies: Iterable[Latency], batch: int | None
) -> tuple[list[str], list[str]]:
    """Return notes on the measures, and a line for each model with a latency but without measures."""
    errors = {row["spec"]: row.get("error") for row in rows}
    latency_list = list(latencies)
    models = dict.fromkeys(latency.model for latency in latency_list)
    holes = [f"{name}: no model of the corpus has this name" for name in models if name not in errors]
    holes += [f"{name}: {errors[name]}" for name in models if errors.get(name)]
    unmatched = sum(not error and name not in models for name, error in errors.items())
    notes = [f"{unmatched} models of the corpus have no latency in the file."] if unmatched else []
    batches = sorted({latency.batch for latency in latency_list if latency.batch and batch and latency.batch != batch})
    if batches:
        notes.append(
            f"Measures are those of batch {batch}. Input and FLOPs grow with the batch by the same factor in all "
            "models, which does not change coefficients; bytes and activations at batch "
            f"{', '.join(map(str, batches))} are different."
        )
    return notes, holes


def _group(
    device: str, batch: int, threads: int, ns: Mapping[str, float], measures: Mapping[str, Mapping[str, Any]]
) -> LatencyGroup:
    entries = [
        (name, ns[name], {measure: _complete(measures[name], measure) for measure in MEASURES}) for name in sorted(ns)
    ]
    points = tuple(point for point in entries if not point[0].startswith(MICRO))
    slopes = _slopes([point for point in entries if point[0].startswith(MICRO)])
    return replace(_group_of_points(device, batch or None, threads or None, points), slopes=slopes)


def _group_of_points(device: str, batch: int | None, threads: int | None, points: Points) -> LatencyGroup:
    key = device, batch, threads, tuple(points)
    if len(points) < MIN_MODELS:
        return LatencyGroup(*key, (), (), None, f"at least {MIN_MODELS} models are needed")
    if len({ns for _, ns, _ in points}) == 1:
        return LatencyGroup(*key, (), (), None, "all latencies are equal")
    correlations = tuple(_correlation(measure, points) for measure in MEASURES)
    regression = regress(points)
    if isinstance(regression, str):
        return LatencyGroup(*key, correlations, _differences(points), None, regression)
    return LatencyGroup(*key, correlations, _differences(points), regression)


# --- one measure ----------------------------------------------------------------------------------------------

Points = Sequence[tuple[str, float, Mapping[str, Any]]]


def _complete(row: Mapping[str, Any], measure: str) -> Any:
    """Return a measure of a model; None if parts of it are unknown, so that it is only a lower bound."""
    return None if row.get(f"{measure}_unknown") else row.get(measure)


def _points_with(points: Points, *measures: str) -> Points:
    """Return the points whose given measures are all above 0, so that they have logarithms."""
    return [point for point in points if all(_usable(point[2].get(measure)) for measure in measures)]


def _usable(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _logs(points: Points, measure: str | None = None) -> Array:
    import numpy as np

    values: Array = np.array([ns if measure is None else measures[measure] for _, ns, measures in points], dtype=float)
    return np.log(values, out=values)


def _correlation(measure: str, points: Points) -> Correlation:
    usable = _points_with(points, measure)
    if len(usable) < MIN_MODELS:
        return Correlation(measure, len(usable), None, None, None, f"{len(usable)} models have it with a value above 0")
    x, y = _logs(usable, measure), _logs(usable)
    if x.min() == x.max():
        return Correlation(measure, len(usable), None, None, None, "it is the same in all models")
    if y.min() == y.max():
        return Correlation(measure, len(usable), None, None, None, "all latencies are equal")
    draws = resamples(len(usable))
    pearson = pearson_rows(x[draws], y[draws])
    log_figure = figure(pearson_of(x, y), pearson)
    rank_figure = figure(spearman_of(x, y), spearman_rows(x, y, draws))
    return Correlation(measure, len(usable), log_figure, rank_figure, figure(log_figure.value**2, pearson**2))


def _differences(points: Points) -> tuple[CoefficientDifference, ...]:
    """Return the coefficients of the longest path minus those of FLOPs, from the same resamples for both."""
    usable = _points_with(points, PATH, WORK)
    if len(usable) < MIN_MODELS:
        return ()
    path, work, y = _logs(usable, PATH), _logs(usable, WORK), _logs(usable)
    if path.min() == path.max() or work.min() == work.max() or y.min() == y.max():
        return ()
    draws = resamples(len(usable))
    return (
        CoefficientDifference(
            "pearson",
            len(usable),
            figure(
                pearson_of(path, y) - pearson_of(work, y),
                pearson_rows(path[draws], y[draws]) - pearson_rows(work[draws], y[draws]),
            ),
        ),
        CoefficientDifference(
            "spearman",
            len(usable),
            figure(
                spearman_of(path, y) - spearman_of(work, y),
                spearman_rows(path, y, draws) - spearman_rows(work, y, draws),
            ),
        ),
    )


def _slopes(points: Points) -> tuple[Slope, ...]:
    """Return the slope of latency in each family of micro-models that has at least two models."""
    slopes = []
    for family, measure in VARIED_MEASURES.items():
        prefix = f"{MICRO}{family}-"
        members = sorted(
            _points_with([point for point in points if point[0].startswith(prefix)], measure),
            key=lambda point: point[2][measure],
        )
        if len(members) < 2 or members[0][2][measure] == members[-1][2][measure]:
            continue
        factor = members[-1][2][measure] / members[0][2][measure]
        power = exponent(_logs(members, measure), _logs(members)) if len(members) >= MIN_MODELS else None
        slopes.append(Slope(family, measure, len(members), members[0][1], members[-1][1], factor, power))
    return tuple(slopes)


# --- several measures -----------------------------------------------------------------------------------------


def regress(points: Points) -> Regression | str:
    """Fit log latency on the logarithms of `REGRESSED`, or return a text with the reason if that is impossible.

    A measure is dropped if fewer than nine of ten models have it, if it is the same in all models, or if it is a
    combination of the measures before it.
    """
    import numpy as np

    dropped = {}
    for measure in REGRESSED:
        count = len(_points_with(points, measure))
        if count < 0.9 * len(points):
            dropped[measure] = f"{count} of {len(points)} models have it with a value above 0"
    usable = _points_with(points, *(measure for measure in REGRESSED if measure not in dropped))
    included: list[str] = []
    columns = [np.ones(len(usable))]
    for measure in REGRESSED:
        if measure in dropped or not len(usable):
            continue
        column = _logs(usable, measure)
        residual = column - np.stack(columns, 1) @ np.linalg.lstsq(np.stack(columns, 1), column, rcond=None)[0]
        if residual.std() < 1e-6:
            dropped[measure] = "the same in all models" if np.ptp(column) < 1e-6 else "a combination of those before it"
        else:
            included.append(measure)
            columns.append(column)
    if not included:
        return "no regression: no measure varies"
    if len({ns for _, ns, _ in usable}) == 1:
        return "no regression: all latencies are equal"
    if len(usable) < len(columns) + 2:
        return (
            f"no regression on {len(included)} measures: {len(usable)} models, at least {len(columns) + 2} are needed"
        )
    x, y = np.stack(columns, 1), _logs(usable)
    exponents, errors, r2 = _fit(x, y)
    resampled = [_fit(x[draw], y[draw])[0] for draw in resamples(len(usable))[:400] if _has_full_rank(x[draw])]
    powers = {
        measure: figure(
            float(exponents[index]), np.array([coefficients[index] for coefficients in resampled] or [np.nan])
        )
        for index, measure in enumerate(included, 1)
    }
    means = errors[resamples(len(usable))].mean(axis=1)
    return Regression(len(usable), powers, dropped, r2, figure(float(errors.mean()), means), float(np.median(errors)))


def _has_full_rank(x: Array) -> bool:
    import numpy as np

    return bool(np.linalg.matrix_rank(x) == x.shape[1])


def _fit(x: Array, y: Array) -> tuple[Array, Array, float]:
    """Return coefficients, leave-one-out errors in percent, and R²."""
    import numpy as np

    inverse = np.linalg.pinv(x)
    coefficients = inverse @ y
    residual = y - x @ coefficients
    leverage = np.clip((x * inverse.T).sum(axis=1), 0, 1 - 1e-9)
    held_out_residual = np.clip(residual / (1 - leverage), -50, 50)
    total = ((y - y.mean()) ** 2).sum()
    return (
        coefficients,
        100 * np.abs(np.expm1(-held_out_residual)),
        float(1 - (residual @ residual) / total) if total else math.nan,
    )


# --- plain values ---------------------------------------------------------------------------------------------


def as_json(correlated_groups: Sequence[LatencyGroup]) -> list[dict[str, Any]]:
    """Return the groups as plain values, with their points."""
    return [_plain(group) for group in correlated_groups]


def _plain(group: LatencyGroup) -> dict[str, Any]:
    return {
        "device": group.device or None,
        "batch": group.batch,
        "threads": group.threads,
        "models": len(group.points),
        "reason": group.reason or None,
        "correlations": [
            {
                "measure": correlation.measure,
                "models": correlation.models,
                "pearson": _optional_figure(correlation.pearson),
                "spearman": _optional_figure(correlation.spearman),
                "r2": _optional_figure(correlation.r2),
                "reason": correlation.reason or None,
            }
            for correlation in group.correlations
        ],
        "longest_path_less_flops": {
            difference.coefficient: {
                **_figure_fields(difference.figure),
                "models": difference.models,
                "winner": difference.winner,
            }
            for difference in group.differences
        },
        "regression": None if group.regression is None else _regression(group.regression),
        "families": [
            {
                "family": slope.family,
                "measure": slope.measure,
                "models": slope.models,
                "factor": round(slope.factor, 3),
                "least_ns": slope.least_ns,
                "most_ns": slope.most_ns,
                "exponent": _optional_figure(slope.exponent),
            }
            for slope in group.slopes
        ],
        "points": [{"model": name, "latency_ns": ns, **measures} for name, ns, measures in group.points],
    }


def _regression(regression: Regression) -> dict[str, Any]:
    return {
        "models": regression.models,
        "r2": round(regression.r2, 4),
        "exponents": {name: _figure_fields(power) for name, power in regression.exponents.items()},
        "left_out_mean_error_percent": _figure_fields(regression.mean_error_percent),
        "left_out_median_error_percent": round(regression.median_error_percent, 2),
        "dropped": dict(regression.dropped),
    }


def _optional_figure(figure: Figure | None) -> dict[str, float | None] | None:
    return None if figure is None else _figure_fields(figure)


def _figure_fields(figure: Figure) -> dict[str, float | None]:
    numbers = {"value": figure.value, "low": figure.low, "high": figure.high}
    return {name: None if number is None else round(number, 4) for name, number in numbers.items()}
