"""The generic model of step time, after the idea of Kavarakuntla (arXiv 2305.11665), whose full text is not public.

    t = (Σ a_i · (I_i / r_i) ^ p_i) · (Π (E_j / r_j) ^ q_j) + C

I are intrinsic factors, what is computed; E are extrinsic factors, how much is computed and on what; r is the median of
a factor, so that each a is seconds at the reference. An intrinsic category has a coefficient for each of its values. An
extrinsic category has a multiplier for each of its values, which is 1 for the most frequent value. All a and C are at
least 0. Without intrinsic factors the sum is one coefficient.

The fit minimizes squared relative error, with a penalty on the exponents (L1, L2 or none, by cross-validation). For
given exponents the best a and C are a problem of non-negative least squares, so that only exponents are searched:
by differential evolution, then by the Gauss–Newton method with variable projection (Kaufman's form).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp.errors import UsageError
from xsp.predict.configurations import Configurations, Factor, Floats

BOUND = 3.0
"""Maximum magnitude of exponents, and of the logarithms of the multipliers of categories."""

MOST_SEARCHED = 2_000
"""Maximum number of rows of a search; of a larger table this many rows are drawn."""

MOST_SHAPES = 24
"""Maximum number of exponents and multipliers of a search."""


class Penalty(NamedTuple):
    """A penalty on exponents, added to the mean squared relative error."""

    kind: str  # none, l1, l2
    strength: float = 0.0


PENALTIES = (Penalty("none"), *(Penalty(kind, each) for kind in ("l2", "l1") for each in (1e-5, 1e-4, 1e-3, 1e-2)))


@dataclass(frozen=True)
class Form:
    """Intrinsic and extrinsic factors, and texts on the factors that could not be used."""

    intrinsic: tuple[Factor, ...]
    extrinsic: tuple[Factor, ...]
    dropped: tuple[str, ...] = ()

    @property
    def shapes(self) -> tuple[str, ...]:
        """Names of the parameters that are searched for: exponents and multipliers."""
        return (
            *(f"exponent of {each.name}" for each in self.intrinsic if each.numeric),
            *(f"exponent of {each.name}" for each in self.extrinsic if each.numeric),
            *(f"{each.name}={level}" for each in self.extrinsic for level in each.levels[1:]),
        )

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the parameters that are solved for; the last one is C if the form has a constant."""
        named = (
            *(each.name for each in self.intrinsic if each.numeric),
            *(f"{each.name}={level}" for each in self.intrinsic for level in each.levels),
        )
        constant = ("constant",) if self.has_constant else ()
        return (*(f"a of {each}" for each in named), *constant) if named else ("a", *constant)

    @property
    def has_constant(self) -> bool:
        """Whether C can be distinguished from the coefficients of the sum."""
        return bool(self.extrinsic) or not any(each.levels for each in self.intrinsic)

    @property
    def numbers(self) -> int:
        """Number of parameters."""
        return len(self.shapes) + len(self.coefficients)


def form(table: Configurations, intrinsic: Sequence[str], extrinsic: Sequence[str]) -> Form:
    """Return the form over some factors, without factors whose effect the table does not determine.

    Raises:
        UsageError: a factor is both intrinsic and extrinsic, no factor is left, or there are too many parameters.
    """
    both = set(intrinsic) & set(extrinsic)
    if both:
        raise UsageError(f"{min(both)} is named as intrinsic and as extrinsic: name it once")
    dropped: list[str] = []
    kept: dict[str, list[Factor]] = {"intrinsic": [], "extrinsic": []}
    logs: list[Floats] = [np.ones(len(table))]
    for kind, names in (("intrinsic", intrinsic), ("extrinsic", extrinsic)):
        for name in names:
            factor = table.factor(name)
            if len(set(table.values[name].tolist())) < 2:
                dropped.append(f"{name} has only one value, so its effect cannot be determined: it is left out")
                continue
            if kind == "extrinsic":
                factor = _of_rows(factor, table.values[name])
                found = [*logs, *_columns_of(factor, table.values[name])]
                if np.linalg.matrix_rank(np.column_stack(found), tol=1e-9 * len(table)) < len(found):
                    dropped.append(f"{name} follows from the factors before it in all rows, so it is left out")
                    continue
                logs = found
            kept[kind].append(factor)
    made = Form(tuple(kept["intrinsic"]), tuple(kept["extrinsic"]), tuple(dropped))
    if not made.intrinsic and not made.extrinsic:
        raise UsageError("; ".join(dropped) or "name factors: --intrinsic, --extrinsic")
    if len(made.shapes) > MOST_SHAPES:
        raise UsageError(f"{len(made.shapes)} exponents and multipliers, more than {MOST_SHAPES}: name fewer factors")
    return made


def _of_rows(factor: Factor, values: NDArray[Any]) -> Factor:
    """Return a category with only the values that some rows have; any other value then counts as the most frequent."""
    if factor.numeric:
        return factor
    counted = Counter(values.tolist())
    return replace(factor, levels=tuple(sorted(counted, key=lambda each: (-counted[each], each))))


def _columns_of(factor: Factor, values: NDArray[Any]) -> list[Floats]:
    """Return the columns of a factor: logarithms relative to the reference, or indicators of a category's values."""
    if factor.numeric:
        return [np.log(values.astype(float) / factor.reference)]
    return [(values == level).astype(float) for level in factor.levels[1:]]


class Design(NamedTuple):
    """Configurations as the columns of a form."""

    powers: Floats
    """Logarithms of the intrinsic numbers, by row and factor."""

    levels: Floats
    """Indicators of the values of intrinsic categories; a column of ones without intrinsic factors."""

    scales: Floats
    """Logarithms of extrinsic numbers, and indicators of the values of extrinsic categories."""

    constant: bool

    def take(self, places: NDArray[Any]) -> Design:
        """Return some of the rows."""
        return Design(self.powers[places], self.levels[places], self.scales[places], self.constant)

    def columns(self, shapes: Floats) -> Floats:
        """Return the columns that the coefficients multiply, for given exponents."""
        count = self.powers.shape[1]
        within = np.exp(np.clip(self.powers * shapes[:count], -200, 200))
        scale = np.exp(np.clip(self.scales @ shapes[count:], -200, 200))
        found = np.column_stack([within, self.levels]) * scale[:, None]
        return np.column_stack([found, np.ones(len(scale))]) if self.constant else found


def design(made: Form, values: Mapping[str, NDArray[Any]]) -> Design:
    """Return configurations as the columns of a form."""
    count = len(next(iter(values.values())))

    def stacked(columns: Sequence[Floats]) -> Floats:
        return np.column_stack(columns) if columns else np.empty((count, 0))

    numbers = [each for each in made.extrinsic if each.numeric]
    texts = [each for each in made.extrinsic if not each.numeric]
    levels = [(values[each.name] == level).astype(float) for each in made.intrinsic for level in each.levels]
    return Design(
        stacked([c for each in made.intrinsic if each.numeric for c in _columns_of(each, values[each.name])]),
        stacked(levels if made.intrinsic else [np.ones(count)]),
        stacked([column for each in (*numbers, *texts) for column in _columns_of(each, values[each.name])]),
        made.has_constant,
    )


@dataclass(frozen=True)
class Fit:
    """A form with its parameters."""

    form: Form
    shapes: Floats
    coefficients: Floats
    penalty: Penalty
    bootstrap: tuple[tuple[Floats, Floats], ...] = ()
    """Parameters of the fits to resampled groups."""

    def predict(self, values: Mapping[str, NDArray[Any]]) -> Floats:
        """Return the predicted seconds of each configuration."""
        return self._at(design(self.form, values), self.shapes, self.coefficients)

    def spread(self, values: Mapping[str, NDArray[Any]]) -> Floats:
        """Return predicted seconds by resampled fit and configuration."""
        those = design(self.form, values)
        return np.array([self._at(those, *each) for each in self.bootstrap]).reshape(len(self.bootstrap), -1)

    def _at(self, those: Design, shapes: Floats, coefficients: Floats) -> Floats:
        found: Floats = those.columns(shapes) @ coefficients
        return found


def fit(table: Configurations, made: Form, seed: int = 0, penalties: Sequence[Penalty] = PENALTIES) -> Fit:
    """Return the form with the parameters that fit a table best.

    Args:
        table: rows with more distinct configurations than the form has parameters.
        made: the form.
        seed: seed of the search.
        penalties: penalties from which cross-validation chooses; the search itself runs without a penalty.

    Raises:
        UsageError: there are too few configurations, or SciPy is missing.
    """
    needed(table, made)
    table = drawn(table, seed)
    those = design(made, table.values)
    start = _searched(those, table.seconds, seed)
    chosen = _chosen(those, table, start, penalties, seed)
    shapes, coefficients = _refined(those, table.seconds, start, chosen)
    return Fit(made, shapes, coefficients, chosen)


def needed(table: Configurations, made: Form) -> None:
    """Check that a table has more distinct configurations than the form has parameters.

    Raises:
        UsageError: it has too few; the message has the number of missing ones.
    """
    columns = [table.values[each.name].tolist() for each in (*made.intrinsic, *made.extrinsic)]
    different = len(set(zip(*columns, strict=True)))
    if different <= made.numbers:
        raise UsageError(
            f"{different} different configurations cannot determine {made.numbers} parameters: record "
            f"{made.numbers + 1 - different} more, or name fewer factors"
        )


def drawn(table: Configurations, seed: int) -> Configurations:
    """Return a table, or `MOST_SEARCHED` random rows of a larger one."""
    if len(table) <= MOST_SEARCHED:
        return table
    places = np.random.default_rng(seed).choice(len(table), MOST_SEARCHED, replace=False)
    return table.take(np.sort(places))


def with_bootstrap(found: Fit, table: Configurations, count: int, seed: int) -> Fit:
    """Return a fit with `count` bootstrap fits to tables of resampled groups, each refined from the fit."""
    table = drawn(table, seed)
    those = design(found.form, table.values)
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        places = resampled(table.groups, chance)
        made.append(_refined(those.take(places), table.seconds[places], found.shapes, found.penalty))
    return replace(found, bootstrap=tuple(made))


def resampled(groups: NDArray[np.int64], chance: np.random.Generator) -> NDArray[np.int64]:
    """Return the indices of the rows of as many groups as there are, drawn with replacement."""
    order = np.argsort(groups, kind="stable")
    names, starts = np.unique(groups[order], return_index=True)
    parts = np.split(order, starts[1:])
    return np.concatenate([parts[each] for each in chance.integers(0, len(names), len(names))])


# --- search ------------------------------------------------------------------------------------------------------


def solvers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return SciPy's differential evolution and non-negative least squares.

    Raises:
        UsageError: SciPy is not installed.
    """
    try:
        from scipy.optimize import differential_evolution, nnls
    except ImportError as error:
        raise UsageError("the generic model needs SciPy: pip install 'xsp[predict]'") from error
    return differential_evolution, nnls


def _solved(those: Design, seconds: Floats, shapes: Floats, nnls: Callable[..., Any]) -> tuple[Floats, Floats, float]:
    """Return non-negative coefficients, the columns relative to the times, and the sum of squared relative errors."""
    columns = those.columns(shapes) / seconds[:, None]
    norms = np.sqrt((columns * columns).sum(axis=0))
    norms[(norms == 0) | ~np.isfinite(norms)] = 1.0
    try:
        found, apart = nnls(columns / norms, np.ones(len(seconds)))
    except (RuntimeError, ValueError):  # iteration limit reached, or values that are not finite
        return np.zeros(columns.shape[1]), columns, float(len(seconds))
    return found / norms, columns, float(apart) ** 2


def _searched(those: Design, seconds: Floats, seed: int) -> Floats:
    """Return the exponents that differential evolution finds."""
    evolve, nnls = solvers()
    count = those.powers.shape[1] + those.scales.shape[1]
    if not count:
        return np.empty(0)
    found = evolve(
        lambda shapes: _solved(those, seconds, shapes, nnls)[2] / len(seconds), [(-BOUND, BOUND)] * count,
        rng=np.random.default_rng(seed), popsize=max(4, 30 // count), maxiter=15 + 10 * count, tol=1e-3, polish=False,
    )  # fmt: skip
    return np.asarray(found.x, dtype=float)


def _refined(those: Design, seconds: Floats, start: Floats, penalty: Penalty) -> tuple[Floats, Floats]:
    """Return exponents and coefficients, improved from a start by damped steps until the error stops decreasing."""
    _, nnls = solvers()
    shapes, damping = start.copy(), 1e-3
    coefficients, columns, loss = _solved(those, seconds, shapes, nnls)
    loss += _cost(shapes, penalty, len(seconds))
    for _ in range(60):
        if not len(shapes):
            break
        slopes, errors = _linear(those, seconds, coefficients, columns, shapes, penalty)
        square, slope = slopes.T @ slopes, slopes.T @ errors
        better = False
        for _ in range(8):
            step = np.linalg.lstsq(square + damping * np.diag(np.diag(square) + 1e-12), -slope, rcond=None)[0]
            tried = np.clip(shapes + step, -BOUND, BOUND)
            solved = _solved(those, seconds, tried, nnls)
            now = solved[2] + _cost(tried, penalty, len(seconds))
            if now < loss:
                better, damping = True, max(damping / 5, 1e-9)
                break
            damping = min(damping * 8, 1e9)
        if not better:
            break
        gained, moved = loss - now, float(np.abs(tried - shapes).max())
        shapes, coefficients, columns, loss = tried, solved[0], solved[1], now
        if gained <= 1e-10 * max(loss, 1e-300) or moved < 1e-8:
            break
    return _filled(those, shapes, coefficients)


def _filled(those: Design, shapes: Floats, coefficients: Floats) -> tuple[Floats, Floats]:
    """Return parameters in which a category value without rows has multiplier 1, or the mean of the coefficients."""
    shapes = shapes.copy()
    inside = those.powers.shape[1]
    shapes[inside:][~those.scales.any(axis=0)] = 0.0
    levels = slice(inside, inside + those.levels.shape[1])
    there = those.levels.any(axis=0)
    if not there.all():
        coefficients = coefficients.copy()
        coefficients[levels][~there] = coefficients[levels][there].mean() if there.any() else 0.0
    return shapes, coefficients


def _cost(shapes: Floats, penalty: Penalty, rows: int) -> float:
    if penalty.kind == "none":
        return 0.0
    return rows * penalty.strength * float((np.abs(shapes) if penalty.kind == "l1" else shapes * shapes).sum())


def _linear(
    those: Design, seconds: Floats, coefficients: Floats, columns: Floats, shapes: Floats, penalty: Penalty
) -> tuple[Floats, Floats]:
    """Return the Jacobian and the errors, with the coefficients projected out; the penalty adds rows to both."""
    inside = those.powers.shape[1]
    terms = columns * coefficients
    scaled = terms[:, : terms.shape[1] - those.constant].sum(axis=1)
    slopes = np.column_stack([terms[:, :inside] * those.powers, scaled[:, None] * those.scales])
    errors = terms.sum(axis=1) - 1.0
    active = columns[:, coefficients > 0]
    if active.shape[1]:
        basis = np.linalg.qr(active / np.sqrt((active * active).sum(axis=0)))[0]
        slopes = slopes - basis @ (basis.T @ slopes)
    if penalty.kind == "none":
        return slopes, errors
    weights = np.full(len(shapes), penalty.strength * len(seconds))
    if penalty.kind == "l1":
        weights = weights / (2 * (np.abs(shapes) + 1e-6))
    roots = np.sqrt(weights)
    return np.vstack([slopes, np.diag(roots)]), np.concatenate([errors, roots * shapes])


def _chosen(those: Design, table: Configurations, start: Floats, penalties: Sequence[Penalty], seed: int) -> Penalty:
    """Return the penalty with the smallest error on held-out groups.

    The first penalty is kept unless another one is better by more than the standard error of the difference, since a
    penalty pulls exponents away from the values that fit the data.
    """
    if len(penalties) == 1 or not len(start):
        return penalties[0]
    held = list(folds(table.groups, 4, seed))
    if len(held) < 2:
        return penalties[0]
    losses = []
    for penalty in penalties:
        apart = []
        for inside, outside in held:
            found = _refined(those.take(inside), table.seconds[inside], start, penalty)
            predicted = those.take(outside).columns(found[0]) @ found[1]
            apart.append((predicted / table.seconds[outside] - 1) ** 2)
        losses.append(np.concatenate(apart))
    best = min(range(len(losses)), key=lambda each: float(losses[each].mean()))
    gained = losses[0] - losses[best]
    return penalties[best if gained.mean() > gained.std() / np.sqrt(len(gained)) else 0]


def folds(groups: NDArray[np.int64], count: int, seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return the row indices inside and outside of each fold; groups stay whole, each fold has at least one."""
    names = np.unique(groups)
    order = np.random.default_rng(seed).permutation(names)
    part = {name: place % min(count, len(names)) for place, name in enumerate(order)}
    where = np.array([part[each] for each in groups])
    return [(np.flatnonzero(where != each), np.flatnonzero(where == each)) for each in range(min(count, len(names)))]
