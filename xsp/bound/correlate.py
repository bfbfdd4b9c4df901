"""How the latency of models follows their measures: correlations with intervals, by device, batch and threads.

For each measure: Pearson's r of the logarithms, Spearman's ρ, and R² of the line through the logarithms, which is r².
The intervals are 95 % percentile bootstraps that resample models. Whether the longest path or the FLOPs say more is
decided by the interval of the difference of their coefficients, over the same resamples of the same models, and by
nothing else.

A coefficient is no cause: in most collections a model with a longer path also has more FLOPs. `xsp.models` has families
of small models (`micro:`) of which each varies one measure alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xsp.bound.latencies import Latency
from xsp.summary import CONFIDENCE

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
"""Measures of `xsp.graph.measures` that are correlated, and what a page calls them; the first four are SPOC's."""

REGRESSED = ("input_elements", "parameters", "flops", "longest_path", "bytes")
PATH, WORK = "longest_path", "flops"
"""The two of which one wins."""

LEAST = 4
"""Models; of fewer there is no figure."""

RESAMPLES = 1000
MOST_UNDEFINED = 0.05
"""Share of resamples without a coefficient, as all their models are equal, from which on there is no interval."""


@dataclass(frozen=True)
class Figure:
    """A figure with both ends of its 95 % interval."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Correlation:
    """One measure against latency."""

    measure: str
    models: int
    """That have the measure, and not as 0."""

    pearson: Figure | None
    spearman: Figure | None
    r2: Figure | None
    reason: str = ""
    """Why there are no coefficients."""


@dataclass(frozen=True)
class Difference:
    """The coefficient of the longest path less that of FLOPs, over the models that have both."""

    coefficient: str
    models: int
    figure: Figure

    @property
    def winner(self) -> str | None:
        """The measure whose coefficient is higher, as the whole interval says so; None if it does not."""
        if self.figure.low is None or self.figure.high is None or self.figure.low <= 0 <= self.figure.high:
            return None
        return PATH if self.figure.low > 0 else WORK


@dataclass(frozen=True)
class Regression:
    """Log latency on the logarithms of several measures, by least squares."""

    models: int
    exponents: Mapping[str, Figure]
    """Measure → the power with which latency grows in it, the others held."""

    dropped: Mapping[str, str]
    """Measure → why it takes no part."""

    r2: float
    mean_error_percent: Figure
    """Mean of |predicted / measured − 1| of models that are left out one by one."""

    median_error_percent: float


@dataclass(frozen=True)
class Group:
    """The models of one device, batch and number of threads."""

    device: str
    batch: int | None
    threads: int | None
    points: tuple[tuple[str, float, Mapping[str, Any]], ...]
    """Model, nanoseconds and measures of each."""

    correlations: tuple[Correlation, ...]
    differences: tuple[Difference, ...]
    regression: Regression | None
    reason: str = ""
    """Why there are no figures, or no regression."""

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
        latencies: of models by the same names; of several of one model and group the median counts. Those of models
            that have no measures are left out.
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
    """Return what to know of the measures, and a line for each latency whose model has none."""
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
            f"Measures are those of batch {batch}. Input and FLOPs grow with the batch by one factor in all models, "
            f"which changes no coefficient; bytes and activations at batch {', '.join(map(str, others))} are others."
        )
    return notes, holes


def _group(
    device: str, batch: int, threads: int, ns: Mapping[str, float], known: Mapping[str, Mapping[str, Any]]
) -> Group:
    points = tuple((name, ns[name], {each: known[name].get(each) for each in MEASURES}) for name in sorted(ns))
    at = device, batch or None, threads or None, points
    if len(points) < LEAST:
        return Group(*at, (), (), None, f"{len(points)} models; at least {LEAST} are needed")
    if len(set(ns.values())) == 1:
        return Group(*at, (), (), None, "all latencies are equal")
    correlations = tuple(_correlation(measure, points) for measure in MEASURES)
    regression = regress(points)
    if isinstance(regression, str):
        return Group(*at, correlations, _differences(points), None, regression)
    return Group(*at, correlations, _differences(points), regression)


# --- one measure ----------------------------------------------------------------------------------------------

Points = Sequence[tuple[str, float, Mapping[str, Any]]]


def _having(points: Points, *measures: str) -> Points:
    """Return the points that have all of some measures, and above 0, so that they have logarithms."""
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
        return Correlation(measure, len(kept), None, None, None, f"{len(kept)} models have it, and not as 0")
    x, y = _logs(kept, measure), _logs(kept)
    if x.min() == x.max():
        return Correlation(measure, len(kept), None, None, None, "it is the same in all models")
    if y.min() == y.max():
        return Correlation(measure, len(kept), None, None, None, "all latencies are equal")
    draws = _draws(len(kept))
    pearson = _pearson(x[draws], y[draws])
    of_logs = _figure(pearson_of(x, y), pearson)
    of_ranks = _figure(spearman_of(x, y), _spearman(x, y, draws))
    return Correlation(measure, len(kept), of_logs, of_ranks, _figure(of_logs.value**2, pearson**2))


def _differences(points: Points) -> tuple[Difference, ...]:
    """Return how much higher the coefficients of the longest path are, from the same resamples for both."""
    kept = _having(points, PATH, WORK)
    if len(kept) < LEAST:
        return ()
    path, work, y = _logs(kept, PATH), _logs(kept, WORK), _logs(kept)
    if path.min() == path.max() or work.min() == work.max() or y.min() == y.max():
        return ()
    draws = _draws(len(kept))
    return (
        Difference(
            "pearson",
            len(kept),
            _figure(
                pearson_of(path, y) - pearson_of(work, y),
                _pearson(path[draws], y[draws]) - _pearson(work[draws], y[draws]),
            ),
        ),
        Difference(
            "spearman",
            len(kept),
            _figure(spearman_of(path, y) - spearman_of(work, y), _spearman(path, y, draws) - _spearman(work, y, draws)),
        ),
    )


def pearson_of(x: Array, y: Array) -> float:
    """Return Pearson's correlation of two rows of numbers; NaN if one of them is constant."""
    return float(_pearson(x[None, :], y[None, :])[0])


def spearman_of(x: Array, y: Array) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    import numpy as np

    return float(_spearman(x, y, np.arange(len(x))[None, :])[0])


def _draws(count: int) -> Array:
    """Return the places of the models in each resample, a row each; equal for equal counts."""
    import numpy as np

    return np.random.default_rng(count).integers(0, count, size=(RESAMPLES, count))


def _pearson(x: Array, y: Array) -> Array:
    """Return the correlation of each pair of rows; NaN where a row is constant."""
    import numpy as np

    constant = (np.ptp(x, axis=1) == 0) | (np.ptp(y, axis=1) == 0)
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    size = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    found: Array = np.full(len(x), np.nan)
    np.divide((x * y).sum(axis=1), size, out=found, where=~constant & (size > 0))
    np.clip(found, -1, 1, out=found)
    return found


def _spearman(x: Array, y: Array, draws: Array) -> Array:
    return _pearson(_ranks(x, draws), _ranks(y, draws))


def _ranks(values: Array, draws: Array) -> Array:
    """Return the rank of each value within its resample; equal ones share the mean of their ranks."""
    import numpy as np

    kinds, codes = np.unique(values, return_inverse=True)
    drawn = codes.reshape(-1)[draws]
    rows = np.arange(len(draws))[:, None]
    counts = np.bincount((drawn + rows * len(kinds)).ravel(), minlength=len(draws) * len(kinds))
    counts = counts.reshape(len(draws), len(kinds))
    mean: Array = np.cumsum(counts, axis=1) - counts + (counts + 1) / 2
    ranks: Array = mean[rows, drawn]
    return ranks


def _figure(value: float, resampled: Array) -> Figure:
    import numpy as np

    kept = resampled[np.isfinite(resampled)]
    if len(kept) < (1 - MOST_UNDEFINED) * len(resampled):
        return Figure(value, None, None)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(kept, [tail, 100 - tail])
    return Figure(value, float(low), float(high))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


# --- several measures -----------------------------------------------------------------------------------------


def regress(points: Points, measures: Sequence[str] = REGRESSED) -> Regression | str:
    """Fit log latency on the logarithms of measures; a text that says why, if that cannot be done.

    A measure takes no part if models lack it (fewer than nine of ten have it), if it is the same in all of them, or if
    those before it make it up.
    """
    import numpy as np

    dropped = {}
    for measure in measures:
        have = len(_having(points, measure))
        if have < 0.9 * len(points):
            dropped[measure] = f"{have} of {len(points)} models have it, and not as 0"
    kept = _having(points, *(measure for measure in measures if measure not in dropped))
    taken: list[str] = []
    columns = [np.ones(len(kept))]
    for measure in measures:
        if measure in dropped or not len(kept):
            continue
        column = _logs(kept, measure)
        rest = column - np.stack(columns, 1) @ np.linalg.lstsq(np.stack(columns, 1), column, rcond=None)[0]
        if rest.std() < 1e-6:
            dropped[measure] = "the same in all models" if np.ptp(column) < 1e-6 else "made up of those before it"
        else:
            taken.append(measure)
            columns.append(column)
    if not taken:
        return "no regression: no measure varies"
    if len(kept) < len(columns) + 2:
        return f"no regression on {len(taken)} measures: {len(kept)} models, at least {len(columns) + 2} are needed"
    x, y = np.stack(columns, 1), _logs(kept)
    exponents, errors, r2 = _fitted(x, y)
    again = [_fitted(x[draw], y[draw])[0] for draw in _draws(len(kept))[:400] if _full(x[draw])]
    powers = {
        measure: _figure(float(exponents[place]), np.array([each[place] for each in again] or [np.nan]))
        for place, measure in enumerate(taken, 1)
    }
    means = errors[_draws(len(kept))].mean(axis=1)
    return Regression(len(kept), powers, dropped, r2, _figure(float(errors.mean()), means), float(np.median(errors)))


def _full(x: Array) -> bool:
    import numpy as np

    return bool(np.linalg.matrix_rank(x) == x.shape[1])


def _fitted(x: Array, y: Array) -> tuple[Array, Array, float]:
    """Return coefficients, errors in percent of what is left out one by one, and R²."""
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
