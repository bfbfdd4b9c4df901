"""The generic model of step time, after the idea of Kavarakuntla (arXiv 2305.11665), whose full text is not public.

    t = (Σ a_i · (I_i / r_i) ^ p_i) · (Π (E_j / r_j) ^ q_j) + C

I are intrinsic factors, what is computed; E are extrinsic factors, how much is computed and on what; r is the median of
a factor, so that each a is seconds at the reference. An intrinsic category has a coefficient for each of its values. An
extrinsic category has a multiplier for each of its values, which is 1 for the most frequent value. All a and C are at
least 0. Without intrinsic factors the sum is one coefficient.

The fit minimizes squared relative error, with a penalty on the exponents (L1, L2 or none, by cross-validation), and
with weights that limit the influence of outliers (`robust`). For given exponents the best a and C are a problem of
non-negative least squares, so that only exponents and multipliers are searched: by differential evolution, then by the
Gauss–Newton method with variable projection (Kaufman's form), in turn with new weights. Exponents have a bound; the
multipliers of categories have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xsp.errors import LibraryError, UsageError
from xsp.plugins import importing
from xsp.predict import robust
from xsp.predict.configurations import Configurations, Factor, Floats

SEARCH_RANGE = 3.0
"""Range of the first search: of exponents around 0, of the logarithms of multipliers around a log-linear model's."""

BOUND = 6.0
"""Maximum magnitude of exponents. An exponent at the bound is not identified."""

REWEIGHTINGS = 6
"""Number of fits with weights from the previous one."""

MOST_SEARCH_ROWS = 2_000
"""Maximum number of rows of a search; of a larger table this many rows are drawn."""

MOST_SHAPES = 24
"""Maximum number of exponents and multipliers of a search."""


class Penalty(NamedTuple):
    """A penalty on exponents, added to the mean squared relative error."""

    kind: str  # none, l1, l2
    strength: float = 0.0


PENALTIES = (
    Penalty("none"),
    *(Penalty(kind, strength) for kind in ("l2", "l1") for strength in (1e-5, 1e-4, 1e-3, 1e-2)),
)


@dataclass(frozen=True)
class Form:
    """Intrinsic and extrinsic factors, and texts on the factors that could not be used."""

    intrinsic: tuple[Factor, ...]
    extrinsic: tuple[Factor, ...]
    drop_reasons: tuple[str, ...] = ()

    @property
    def shapes(self) -> tuple[str, ...]:
        """Names of the parameters that are searched for: exponents and multipliers."""
        return (
            *(f"exponent of {factor.name}" for factor in self.intrinsic if factor.is_numeric),
            *(f"exponent of {factor.name}" for factor in self.extrinsic if factor.is_numeric),
            *(f"{factor.name}={level}" for factor in self.extrinsic for level in factor.levels[1:]),
        )

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the parameters that are solved for; the last one is C if the form has a constant."""
        names = (
            *(factor.name for factor in self.intrinsic if factor.is_numeric),
            *(f"{factor.name}={level}" for factor in self.intrinsic for level in factor.levels),
        )
        constant = ("constant",) if self.has_constant else ()
        return (*(f"a of {name}" for name in names), *constant) if names else ("a", *constant)

    @property
    def has_constant(self) -> bool:
        """Whether C can be distinguished from the coefficients of the sum."""
        return bool(self.extrinsic) or not any(factor.levels for factor in self.intrinsic)

    @property
    def exponent_count(self) -> int:
        """Number of exponents; they are the first of the shapes, and the others are multipliers."""
        return sum(1 for factor in (*self.intrinsic, *self.extrinsic) if factor.is_numeric)

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return len(self.shapes) + len(self.coefficients)


def form(table: Configurations, intrinsic: Sequence[str], extrinsic: Sequence[str]) -> Form:
    """Return the form over some factors, without factors whose effect the table does not determine.

    Raises:
        UsageError: a factor is both intrinsic and extrinsic, no factor is left, or there are too many parameters.
    """
    duplicates = set(intrinsic) & set(extrinsic)
    if duplicates:
        raise UsageError(f"{min(duplicates)} is named as intrinsic and as extrinsic: name it once")
    drop_reasons: list[str] = []
    by_kind: dict[str, list[Factor]] = {"intrinsic": [], "extrinsic": []}
    independent_columns: list[Floats] = [np.ones(len(table))]
    for kind, names in (("intrinsic", intrinsic), ("extrinsic", extrinsic)):
        for name in names:
            factor = table.factor(name)
            if len(set(table.values[name].tolist())) < 2:
                drop_reasons.append(f"{name} has only one value, so its effect cannot be determined: it is left out")
                continue
            if kind == "extrinsic":
                factor = _with_present_levels(factor, table.values[name])
                extended_columns = [*independent_columns, *_factor_columns(factor, table.values[name])]
                if np.linalg.matrix_rank(np.column_stack(extended_columns), tol=1e-9 * len(table)) < len(
                    extended_columns
                ):
                    drop_reasons.append(f"{name} follows from the factors before it in all rows, so it is left out")
                    continue
                independent_columns = extended_columns
            by_kind[kind].append(factor)
    result = Form(tuple(by_kind["intrinsic"]), tuple(by_kind["extrinsic"]), tuple(drop_reasons))
    if not result.intrinsic and not result.extrinsic:
        raise UsageError("; ".join(drop_reasons) or "name factors: --intrinsic, --extrinsic")
    if len(result.shapes) > MOST_SHAPES:
        raise UsageError(f"{len(result.shapes)} exponents and multipliers, more than {MOST_SHAPES}: name fewer factors")
    return result


def _with_present_levels(factor: Factor, values: NDArray[Any]) -> Factor:
    """Return a category with only the values in the rows; any other value then counts as the most frequent one."""
    if factor.is_numeric:
        return factor
    counts = Counter(values.tolist())
    return replace(factor, levels=tuple(sorted(counts, key=lambda level: (-counts[level], level))))


def _factor_columns(factor: Factor, values: NDArray[Any]) -> list[Floats]:
    """Return the columns of a factor: logarithms relative to the reference, or indicators of a category's values."""
    if factor.is_numeric:
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

    has_constant: bool

    def take(self, indices: NDArray[Any]) -> Design:
        """Return some of the rows."""
        return Design(self.powers[indices], self.levels[indices], self.scales[indices], self.has_constant)

    def columns(self, shapes: Floats) -> Floats:
        """Return the columns that the coefficients multiply, for given exponents."""
        count = self.powers.shape[1]
        power_terms = np.exp(np.clip(self.powers * shapes[:count], -200, 200))
        scale = np.exp(np.clip(self.scales @ shapes[count:], -200, 200))
        columns = np.column_stack([power_terms, self.levels]) * scale[:, None]
        return np.column_stack([columns, np.ones(len(scale))]) if self.has_constant else columns

    def slopes(self, terms: Floats) -> Floats:
        """Return the derivatives of the sum of the terms (columns times coefficients) with respect to the shapes."""
        scaled_sum = terms[:, : terms.shape[1] - self.has_constant].sum(axis=1)
        return np.column_stack([terms[:, : self.powers.shape[1]] * self.powers, scaled_sum[:, None] * self.scales])


def design(model_form: Form, values: Mapping[str, NDArray[Any]]) -> Design:
    """Return configurations as the columns of a form."""
    count = len(next(iter(values.values())))

    def stack(columns: Sequence[Floats]) -> Floats:
        return np.column_stack(columns) if columns else np.empty((count, 0))

    numbers = [factor for factor in model_form.extrinsic if factor.is_numeric]
    texts = [factor for factor in model_form.extrinsic if not factor.is_numeric]
    levels = [
        (values[factor.name] == level).astype(float) for factor in model_form.intrinsic for level in factor.levels
    ]
    return Design(
        stack(
            [
                column
                for factor in model_form.intrinsic
                if factor.is_numeric
                for column in _factor_columns(factor, values[factor.name])
            ]
        ),
        stack(levels if model_form.intrinsic else [np.ones(count)]),
        stack([column for factor in (*numbers, *texts) for column in _factor_columns(factor, values[factor.name])]),
        model_form.has_constant,
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
        return self._evaluate(design(self.form, values), self.shapes, self.coefficients)

    def spread(self, values: Mapping[str, NDArray[Any]]) -> Floats:
        """Return predicted seconds by resampled fit and configuration."""
        inputs = design(self.form, values)
        return np.array([self._evaluate(inputs, *parameters) for parameters in self.bootstrap]).reshape(
            len(self.bootstrap), -1
        )

    def _evaluate(self, inputs: Design, shapes: Floats, coefficients: Floats) -> Floats:
        predictions: Floats = inputs.columns(shapes) @ coefficients
        return predictions


def fit(table: Configurations, model_form: Form, seed: int = 0, penalties: Sequence[Penalty] = PENALTIES) -> Fit:
    """Return the form with the parameters that fit a table best.

    Args:
        table: rows with more distinct configurations than the form has parameters.
        model_form: the form.
        seed: seed of the search.
        penalties: penalties from which cross-validation chooses; the search itself runs without a penalty.

    Raises:
        UsageError: there are too few configurations, or SciPy is missing.
    """
    check_rows(table, model_form)
    table = sample_rows(table, seed)
    inputs = design(model_form, table.values)
    factors = (*model_form.intrinsic, *model_form.extrinsic)
    problem = _Problem(inputs, table.seconds, np.sqrt(robust.first_weights(table, factors)), model_form.exponent_count)
    start = _search(problem, seed)
    start, problem = _refine_robustly(problem, start, table, model_form)
    penalty = _choose_penalty(problem, table, start, penalties, seed)
    shapes, coefficients = _refine(problem, start, penalty)
    return Fit(model_form, shapes, coefficients, penalty)


def check_rows(table: Configurations, model_form: Form) -> None:
    """Check that a table has more distinct configurations than the form has parameters.

    Raises:
        UsageError: it has too few; the message has the number of missing ones.
    """
    columns = [table.values[factor.name].tolist() for factor in (*model_form.intrinsic, *model_form.extrinsic)]
    distinct = len(set(zip(*columns, strict=True)))
    if distinct <= model_form.parameter_count:
        raise UsageError(
            f"{distinct} different configurations cannot determine {model_form.parameter_count} parameters: record "
            f"{model_form.parameter_count + 1 - distinct} more, or name fewer factors"
        )


def sample_rows(table: Configurations, seed: int) -> Configurations:
    """Return a table, or `MOST_SEARCH_ROWS` random rows of a larger one."""
    if len(table) <= MOST_SEARCH_ROWS:
        return table
    indices = np.random.default_rng(seed).choice(len(table), MOST_SEARCH_ROWS, replace=False)
    return table.take(np.sort(indices))


def with_bootstrap(base_fit: Fit, table: Configurations, count: int, seed: int) -> Fit:
    """Return a fit with `count` bootstrap fits to tables of resampled groups, each refined from the fit."""
    table = sample_rows(table, seed)
    model_form, inputs = base_fit.form, design(base_fit.form, table.values)
    residuals = _log_residuals(base_fit.predict(table.values), table.seconds)
    problem = _Problem(inputs, table.seconds, np.ones(len(table)), model_form.exponent_count)
    problem = _reweighted(problem, residuals, table, model_form)
    rng = np.random.default_rng(seed)
    refits = []
    for _ in range(count):
        indices = resample_rows(table.groups, rng)
        part = problem.take(indices)
        shapes, coefficients = _refine(part, base_fit.shapes, base_fit.penalty)
        residuals = _log_residuals(part.inputs.columns(shapes) @ coefficients, part.seconds)
        part = _reweighted(part, residuals, table.take(indices), model_form)
        refits.append(_refine(part, shapes, base_fit.penalty))
    return replace(base_fit, bootstrap=tuple(refits))


def resample_rows(groups: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the indices of the rows of as many groups as there are, drawn with replacement."""
    order = np.argsort(groups, kind="stable")
    names, starts = np.unique(groups[order], return_index=True)
    rows_by_group = np.split(order, starts[1:])
    return np.concatenate([rows_by_group[group] for group in rng.integers(0, len(names), len(names))])


# --- search ------------------------------------------------------------------------------------------------------


def solvers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return SciPy's differential evolution and non-negative least squares.

    Raises:
        LibraryError: SciPy is not installed.
    """
    with importing(LibraryError, "the generic model needs SciPy: pip install 'xsp[predict]'"):
        from scipy.optimize import differential_evolution, nnls
    return differential_evolution, nnls


class _Problem(NamedTuple):
    """What a fit minimizes: weighted squared relative errors."""

    inputs: Design
    seconds: Floats
    roots: Floats
    """Square roots of the weights of the rows."""

    exponent_count: int

    def take(self, indices: NDArray[Any]) -> _Problem:
        """Return some of the rows."""
        return _Problem(
            self.inputs.take(indices), self.seconds[indices], self.roots[indices], self.exponent_count
        )  # fmt: skip

    def clip(self, shapes: Floats) -> Floats:
        """Return shapes whose exponents are within the bound."""
        count = self.exponent_count
        return np.concatenate([np.clip(shapes[:count], -BOUND, BOUND), shapes[count:]])


def _solve(problem: _Problem, shapes: Floats, nnls: Callable[..., Any]) -> tuple[Floats, Floats, float]:
    """Return non-negative coefficients, the columns of the weighted relative errors, and the sum of their squares."""
    roots = problem.roots
    columns = problem.inputs.columns(shapes) * (roots / problem.seconds)[:, None]
    norms = np.sqrt((columns * columns).sum(axis=0))
    norms[(norms == 0) | ~np.isfinite(norms)] = 1.0
    try:
        solution, residual = nnls(columns / norms, roots)
    except (RuntimeError, ValueError):  # iteration limit reached, or values that are not finite
        return np.zeros(columns.shape[1]), columns, float((roots * roots).sum())
    return solution / norms, columns, float(residual) ** 2


def _search(problem: _Problem, seed: int) -> Floats:
    """Return the exponents and multipliers that differential evolution finds."""
    evolve, nnls = solvers()
    inputs, rows = problem.inputs, len(problem.seconds)
    count = inputs.powers.shape[1] + inputs.scales.shape[1]
    if not count:
        return np.empty(0)
    centers = np.zeros(count)
    centers[problem.exponent_count :] = _log_linear_multipliers(problem)
    result = evolve(
        lambda shapes: _solve(problem, shapes, nnls)[2] / rows,
        [(center - SEARCH_RANGE, center + SEARCH_RANGE) for center in centers],
        rng=np.random.default_rng(seed), popsize=max(4, 30 // count), maxiter=15 + 10 * count, tol=1e-3, polish=False,
    )  # fmt: skip
    return np.asarray(result.x, dtype=float)


def _log_linear_multipliers(problem: _Problem) -> Floats:
    """Return the logarithms of the multipliers in a product of powers and multipliers, fitted to the logarithms."""
    inputs = problem.inputs
    columns = np.column_stack([np.ones(len(problem.seconds)), inputs.powers, inputs.levels[:, 1:], inputs.scales])
    target = np.log(problem.seconds) * problem.roots
    solution = np.linalg.lstsq(columns * problem.roots[:, None], target, rcond=1e-10)[0]
    count = inputs.powers.shape[1] + inputs.scales.shape[1] - problem.exponent_count
    return np.asarray(solution[len(solution) - count :], dtype=float)


def _log_residuals(predictions: Floats, seconds: Floats) -> Floats:
    """Return the logarithms of measured over predicted time."""
    residuals: Floats = np.log(seconds / np.maximum(predictions, 1e-300))
    return residuals


def _refine_robustly(
    problem: _Problem, start: Floats, table: Configurations, model_form: Form
) -> tuple[Floats, _Problem]:
    """Return the shapes and weights on which fits and weights agree, from the weights of the problem."""
    shapes = start
    for _ in range(REWEIGHTINGS):
        shapes, coefficients = _refine(problem, shapes, Penalty("none"))
        residuals = _log_residuals(problem.inputs.columns(shapes) @ coefficients, problem.seconds)
        previous, problem = problem, _reweighted(problem, residuals, table, model_form)
        if float(np.abs(problem.roots - previous.roots).max()) < 1e-3:
            break
    return shapes, problem


def _reweighted(problem: _Problem, residuals: Floats, table: Configurations, model_form: Form) -> _Problem:
    """Return a problem with the weights that follow from the residuals of a fit."""
    factors = (*model_form.intrinsic, *model_form.extrinsic)
    weights = robust.table_weights(table, factors, residuals, model_form.parameter_count)
    return problem._replace(roots=np.sqrt(weights))


def _refine(problem: _Problem, start: Floats, penalty: Penalty) -> tuple[Floats, Floats]:
    """Return exponents and coefficients, improved from a start by damped steps until the error stops decreasing."""
    _, nnls = solvers()
    rows = len(problem.seconds)
    shapes, damping = problem.clip(start), 1e-3
    coefficients, columns, loss = _solve(problem, shapes, nnls)
    loss += _penalty_cost(shapes, penalty, rows)
    for _ in range(60):
        if not len(shapes):
            break
        slopes, errors = _linearize(problem, coefficients, columns, shapes, penalty)
        normal_matrix, gradient = slopes.T @ slopes, slopes.T @ errors
        is_better = False
        for _ in range(8):
            step = np.linalg.lstsq(
                normal_matrix + damping * np.diag(np.diag(normal_matrix) + 1e-12), -gradient, rcond=None
            )[0]
            trial = problem.clip(shapes + step)
            solution = _solve(problem, trial, nnls)
            trial_loss = solution[2] + _penalty_cost(trial, penalty, rows)
            if trial_loss < loss:
                is_better, damping = True, max(damping / 5, 1e-9)
                break
            damping = min(damping * 8, 1e9)
        if not is_better:
            break
        gain, shift = loss - trial_loss, float(np.abs(trial - shapes).max())
        shapes, coefficients, columns, loss = trial, solution[0], solution[1], trial_loss
        if gain <= 1e-10 * max(loss, 1e-300) or shift < 1e-8:
            break
    return _fill_absent(problem.inputs, shapes, coefficients)


def _fill_absent(inputs: Design, shapes: Floats, coefficients: Floats) -> tuple[Floats, Floats]:
    """Return parameters in which a category value without rows has multiplier 1, or the mean of the coefficients."""
    shapes = shapes.copy()
    power_count = inputs.powers.shape[1]
    shapes[power_count:][~inputs.scales.any(axis=0)] = 0.0
    levels = slice(power_count, power_count + inputs.levels.shape[1])
    is_present = inputs.levels.any(axis=0)
    if not is_present.all():
        coefficients = coefficients.copy()
        coefficients[levels][~is_present] = coefficients[levels][is_present].mean() if is_present.any() else 0.0
    return shapes, coefficients


def _penalty_cost(shapes: Floats, penalty: Penalty, rows: int) -> float:
    if penalty.kind == "none":
        return 0.0
    return rows * penalty.strength * float((np.abs(shapes) if penalty.kind == "l1" else shapes * shapes).sum())


def _linearize(
    problem: _Problem, coefficients: Floats, columns: Floats, shapes: Floats, penalty: Penalty
) -> tuple[Floats, Floats]:
    """Return the Jacobian and the errors, with the coefficients projected out; the penalty adds rows to both."""
    terms = columns * coefficients
    slopes = problem.inputs.slopes(terms)
    errors = terms.sum(axis=1) - problem.roots
    active_columns = columns[:, coefficients > 0]
    if active_columns.shape[1]:
        basis = np.linalg.qr(active_columns / np.sqrt((active_columns * active_columns).sum(axis=0)))[0]
        slopes = slopes - basis @ (basis.T @ slopes)
    if penalty.kind == "none":
        return slopes, errors
    weights = np.full(len(shapes), penalty.strength * len(problem.seconds))
    if penalty.kind == "l1":
        weights = weights / (2 * (np.abs(shapes) + 1e-6))
    roots = np.sqrt(weights)
    return np.vstack([slopes, np.diag(roots)]), np.concatenate([errors, roots * shapes])


def _choose_penalty(
    problem: _Problem, table: Configurations, start: Floats, penalties: Sequence[Penalty], seed: int
) -> Penalty:
    """Return the penalty with the smallest error on held-out groups.

    The first penalty is kept unless another one is better by more than the standard error of the difference, since a
    penalty pulls exponents away from the values that fit the data.
    """
    if len(penalties) == 1 or not len(start):
        return penalties[0]
    splits = list(folds(table.groups, 4, seed))
    if len(splits) < 2:
        return penalties[0]
    losses = []
    for penalty in penalties:
        errors = []
        for training_rows, heldout_rows in splits:
            parameters = _refine(problem.take(training_rows), start, penalty)
            heldout = problem.take(heldout_rows)
            predictions = heldout.inputs.columns(parameters[0]) @ parameters[1]
            errors.append((heldout.roots * (predictions / heldout.seconds - 1)) ** 2)
        losses.append(np.concatenate(errors))
    best = min(range(len(losses)), key=lambda index: float(losses[index].mean()))
    gain = losses[0] - losses[best]
    return penalties[best if gain.mean() > gain.std() / np.sqrt(len(gain)) else 0]


def folds(groups: NDArray[np.int64], count: int, seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return the row indices inside and outside of each fold; groups stay whole, each fold has at least one."""
    group_ids = np.unique(groups)
    order = np.random.default_rng(seed).permutation(group_ids)
    fold_by_group = {name: position % min(count, len(group_ids)) for position, name in enumerate(order)}
    row_folds = np.array([fold_by_group[group] for group in groups])
    return [
        (np.flatnonzero(row_folds != fold), np.flatnonzero(row_folds == fold))
        for fold in range(min(count, len(group_ids)))
    ]
