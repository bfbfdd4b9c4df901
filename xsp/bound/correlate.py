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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xsp.bound.coefficients import (
    Figure,
    each_pearson,
    each_spearman,
    exponent,
    figure,
    pearson_of,
    resamples,
    spearman_of,
)
from xsp.bound.latencies import Latency
from xsp.micromodels import VARIES

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

LEAST = 4
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
class Difference:
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
    """The exponent with which latency grows in the measure; None for fewer than `LEAST` models."""


@dataclass(frozen=True)
class Group:
    """The models of one device, batch and number of threads."""

    device: str
    batch: int | None
    threads: int | None
    points: tuple[tuple[str, float, Mapping[str, Any]], ...]
    """Name, latency in nanoseconds and measures of each model."""

    correlations: tuple[Correlation, ...]
    differences: tuple[Difference, ...]
    regression: Regression | None
    reason: str = ""
    """Why there are no figures, or no regression."""

    slopes: tuple[Slope, ...] = ()

    @property
    def title(self) -> str:
        """Device, batch and threads, as far as they are known."""
        parts = [self.device, f"batch {self.batch}" if self.batch else ""]
        parts += [f"{self.threads} thread{'s' * (self.threads > 1)}"] if self.threads else []
        return ", ".join(filter(None, parts)) or "all"


def groups(rows: Iterable[Mapping[str, Any]], latencies: Iterable[Latency]) -> list[Group]:
    """Correlate measures with latencies, for each device, batch and number of threads.

    Args:
        rows: measures of models, each with its name under `spec`: rows of a corpus, see `xsp.graph.corpus`.
        latencies: latencies of models with the same names; of several latencies of a model in a group the median is
            used. Latencies of models without measures are left out.
    """
    known = {row["spec"]: row for row in rows if "error" not in row}
    found: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for each in latencies:
        if each.model in known:
            group = found.setdefault((each.device, each.batch or 0, each.threads or 0), {})
            group.setdefault(each.model, []).append(each.ns)
    return [_group(*at, {name: _median(ns) for name, ns in found[at].items()}, known) for at in sorted(found)]


def left_out(
    rows: Iterable[Mapping[str, Any]], latencies: Iterable[Latency], batch: int | None
) -> tuple[list[str], list[str]]:
    """Return notes on the measures, and a line for each model with a latency but without measures."""
    errors = {row["spec"]: row.get("error") for row in rows}
    measured = list(latencies)
    models = dict.fromkeys(each.model for each in measured)
    holes = [f"{name}: no model of the corpus has this name" for name in models if name not in errors]
    holes += [f"{name}: {errors[name]}" for name in models if errors.get(name)]
    without = sum(not error and name not in models for name, error in errors.items())
    notes = [f"{without} models of the corpus have no latency in the file."] if without else []
    others = sorted({each.batch for each in measured if each.batch and batch and each.batch != batch})
    if others:
        notes.append(
            f"Measures are those of batch {batch}. Input and FLOPs grow with the batch by the same factor in all "
            "models, which does not change coefficients; bytes and activations at batch "
            f"{', '.join(map(str, others))} are different."
        )
    return notes, holes


def _group(
    device: str, batch: int, threads: int, ns: Mapping[str, float], known: Mapping[str, Mapping[str, Any]]
) -> Group:
    every = [(name, ns[name], {each: known[name].get(each) for each in MEASURES}) for name in sorted(ns)]
    points = tuple(each for each in every if not each[0].startswith(MICRO))
    slopes = _slopes([each for each in every if each[0].startswith(MICRO)])
    return replace(_of_points(device, batch or None, threads or None, points), slopes=slopes)


def _of_points(device: str, batch: int | None, threads: int | None, points: Points) -> Group:
    at = device, batch, threads, tuple(points)
    if len(points) < LEAST:
        return Group(*at, (), (), None, f"at least {LEAST} models are needed")
    if len({ns for _, ns, _ in points}) == 1:
        return Group(*at, (), (), None, "all latencies are equal")
    correlations = tuple(_correlation(measure, points) for measure in MEASURES)
    regression = regress(points)
    if isinstance(regression, str):
        return Group(*at, correlations, _differences(points), None, regression)
    return Group(*at, correlations, _differences(points), regression)


# --- one measure ----------------------------------------------------------------------------------------------

Points = Sequence[tuple[str, float, Mapping[str, Any]]]


def _having(points: Points, *measures: str) -> Points:
    """Return the points whose given measures are all above 0, so that they have logarithms."""
    return [each for each in points if all(_usable(each[2].get(measure)) for measure in measures)]


def _usable(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _logs(points: Points, measure: str | None = None) -> Array:
    import numpy as np

    found: Array = np.array([ns if measure is None else held[measure] for _, ns, held in points], dtype=float)
    return np.log(found, out=found)


def _correlation(measure: str, points: Points) -> Correlation:
    kept = _having(points, measure)
    if len(kept) < LEAST:
        return Correlation(measure, len(kept), None, None, None, f"{len(kept)} models have it with a value above 0")
    x, y = _logs(kept, measure), _logs(kept)
    if x.min() == x.max():
        return Correlation(measure, len(kept), None, None, None, "it is the same in all models")
    if y.min() == y.max():
        return Correlation(measure, len(kept), None, None, None, "all latencies are equal")
    draws = resamples(len(kept))
    pearson = each_pearson(x[draws], y[draws])
    of_logs = figure(pearson_of(x, y), pearson)
    of_ranks = figure(spearman_of(x, y), each_spearman(x, y, draws))
    return Correlation(measure, len(kept), of_logs, of_ranks, figure(of_logs.value**2, pearson**2))


def _differences(points: Points) -> tuple[Difference, ...]:
    """Return the coefficients of the longest path minus those of FLOPs, from the same resamples for both."""
    kept = _having(points, PATH, WORK)
    if len(kept) < LEAST:
        return ()
    path, work, y = _logs(kept, PATH), _logs(kept, WORK), _logs(kept)
    if path.min() == path.max() or work.min() == work.max() or y.min() == y.max():
        return ()
    draws = resamples(len(kept))
    return (
        Difference(
            "pearson",
            len(kept),
            figure(
                pearson_of(path, y) - pearson_of(work, y),
                each_pearson(path[draws], y[draws]) - each_pearson(work[draws], y[draws]),
            ),
        ),
        Difference(
            "spearman",
            len(kept),
            figure(
                spearman_of(path, y) - spearman_of(work, y),
                each_spearman(path, y, draws) - each_spearman(work, y, draws),
            ),
        ),
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _slopes(points: Points) -> tuple[Slope, ...]:
    """Return the slope of latency in each family of micro-models that has at least two models."""
    found = []
    for family, measure in VARIES.items():
        prefix = f"{MICRO}{family}-"
        kept = sorted(
            _having([each for each in points if each[0].startswith(prefix)], measure), key=lambda each: each[2][measure]
        )
        if len(kept) < 2 or kept[0][2][measure] == kept[-1][2][measure]:
            continue
        factor = kept[-1][2][measure] / kept[0][2][measure]
        power = exponent(_logs(kept, measure), _logs(kept)) if len(kept) >= LEAST else None
        found.append(Slope(family, measure, len(kept), kept[0][1], kept[-1][1], factor, power))
    return tuple(found)


# --- several measures -----------------------------------------------------------------------------------------


def regress(points: Points, measures: Sequence[str] = REGRESSED) -> Regression | str:
    """Fit log latency on the logarithms of measures, or return a text with the reason if that is impossible.

    A measure is dropped if fewer than nine of ten models have it, if it is the same in all models, or if it is a
    combination of the measures before it.
    """
    import numpy as np

    dropped = {}
    for measure in measures:
        have = len(_having(points, measure))
        if have < 0.9 * len(points):
            dropped[measure] = f"{have} of {len(points)} models have it with a value above 0"
    kept = _having(points, *(measure for measure in measures if measure not in dropped))
    taken: list[str] = []
    columns = [np.ones(len(kept))]
    for measure in measures:
        if measure in dropped or not len(kept):
            continue
        column = _logs(kept, measure)
        rest = column - np.stack(columns, 1) @ np.linalg.lstsq(np.stack(columns, 1), column, rcond=None)[0]
        if rest.std() < 1e-6:
            dropped[measure] = "the same in all models" if np.ptp(column) < 1e-6 else "a combination of those before it"
        else:
            taken.append(measure)
            columns.append(column)
    if not taken:
        return "no regression: no measure varies"
    if len({ns for _, ns, _ in kept}) == 1:
        return "no regression: all latencies are equal"
    if len(kept) < len(columns) + 2:
        return f"no regression on {len(taken)} measures: {len(kept)} models, at least {len(columns) + 2} are needed"
    x, y = np.stack(columns, 1), _logs(kept)
    exponents, errors, r2 = _fitted(x, y)
    again = [_fitted(x[draw], y[draw])[0] for draw in resamples(len(kept))[:400] if _full(x[draw])]
    powers = {
        measure: figure(float(exponents[place]), np.array([each[place] for each in again] or [np.nan]))
        for place, measure in enumerate(taken, 1)
    }
    means = errors[resamples(len(kept))].mean(axis=1)
    return Regression(len(kept), powers, dropped, r2, figure(float(errors.mean()), means), float(np.median(errors)))


def _full(x: Array) -> bool:
    import numpy as np

    return bool(np.linalg.matrix_rank(x) == x.shape[1])


def _fitted(x: Array, y: Array) -> tuple[Array, Array, float]:
    """Return coefficients, leave-one-out errors in percent, and R²."""
    import numpy as np

    inverse = np.linalg.pinv(x)
    coefficients = inverse @ y
    rest = y - x @ coefficients
    leverage = np.clip((x * inverse.T).sum(axis=1), 0, 1 - 1e-9)
    out = np.clip(rest / (1 - leverage), -50, 50)
    around = ((y - y.mean()) ** 2).sum()
    return coefficients, 100 * np.abs(np.expm1(-out)), float(1 - (rest @ rest) / around) if around else math.nan


# --- plain values ---------------------------------------------------------------------------------------------


def as_json(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the groups as plain values, with their points."""
    return [_plain(group) for group in found]


def _plain(group: Group) -> dict[str, Any]:
    return {
        "device": group.device or None,
        "batch": group.batch,
        "threads": group.threads,
        "models": len(group.points),
        "reason": group.reason or None,
        "correlations": [
            {
                "measure": each.measure,
                "models": each.models,
                "pearson": _of(each.pearson),
                "spearman": _of(each.spearman),
                "r2": _of(each.r2),
                "reason": each.reason or None,
            }
            for each in group.correlations
        ],
        "longest_path_less_flops": {
            each.coefficient: {**_value(each.figure), "models": each.models, "winner": each.winner}
            for each in group.differences
        },
        "regression": None if group.regression is None else _regression(group.regression),
        "families": [
            {
                "family": each.family,
                "measure": each.measure,
                "models": each.models,
                "factor": round(each.factor, 3),
                "least_ns": each.least_ns,
                "most_ns": each.most_ns,
                "exponent": _of(each.exponent),
            }
            for each in group.slopes
        ],
        "points": [{"model": name, "latency_ns": ns, **measures} for name, ns, measures in group.points],
    }


def _regression(found: Regression) -> dict[str, Any]:
    return {
        "models": found.models,
        "r2": round(found.r2, 4),
        "exponents": {name: _value(each) for name, each in found.exponents.items()},
        "left_out_mean_error_percent": _value(found.mean_error_percent),
        "left_out_median_error_percent": round(found.median_error_percent, 2),
        "dropped": dict(found.dropped),
    }


def _of(figure: Figure | None) -> dict[str, float | None] | None:
    return None if figure is None else _value(figure)


def _value(figure: Figure) -> dict[str, float | None]:
    ends = {"value": figure.value, "low": figure.low, "high": figure.high}
    return {name: None if each is None else round(each, 4) for name, each in ends.items()}
