"""Fits, their predictions and the configurations to record next, as text for a terminal and as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xsp.predict import identifiability
from xsp.predict.configurations import Configurations, Factor
from xsp.predict.crossvalidation import GENERIC, Error, Evaluation, Extrapolation, PredictedPoint
from xsp.predict.generic import Fit
from xsp.predict.identifiability import Parameter
from xsp.predict.nextrun import Proposal
from xsp.scrub import plain
from xsp.terminal import column_lines, labelled_lines, wrapped
from xsp.texts import seconds_text, share_text

FACTORS_PER_TABLE = 3
"""Number of factors side by side, so that a line fits a terminal."""

MOST_OUTLIERS = 8
"""Number of outliers that are listed in text."""

FORM = "t = (Σ a·(I/r)^p) · (Π (E/r)^q) + C; squared relative errors are minimised, with less weight for outliers"


def page(evaluation: Evaluation) -> str:
    """Return the fits, the errors of all models on held-out configurations, and what the data do not determine."""
    table = evaluation.table
    kinds = f"{len(table):,} rows, {evaluation.groups:,} groups of configurations"
    lines = wrapped(f"{kinds}; errors are those of held-out groups, {len(table):,} rows in total")
    lines += [
        "",
        *column_lines(("model", "mean error", "median", "90 % below"), map(_error_cells, evaluation.errors), left=1),
    ]
    if evaluation.extrapolations:
        lines += ["", "beyond: mean error for the largest values (rows), learned from smaller ones"]
        lines += _extrapolation_tables(evaluation.extrapolations)
    lines += ["", *wrapped(verdict(evaluation))]
    lines += labelled_lines(
        "largest errors",
        [
            f"{_text({entry.factor: entry.value})}: {share_text(entry.mean, 1)} on {entry.rows:,} rows"
            for entry in evaluation.kind_errors
        ],
    )
    lines += labelled_lines("outliers, left out", _outlier_texts(evaluation))
    for value, fit in evaluation.fits.items():
        prefix = "" if value is None else f"{evaluation.split.category}={value}: "
        penalty = (
            "no penalty" if fit.penalty.kind == "none" else f"{fit.penalty.kind.upper()} of {fit.penalty.strength:g}"
        )
        lines += ["", *wrapped(f"{prefix}{_formula(fit)}; {penalty}, by cross-validation")]
        rows = map(_parameter_cells, identifiability.parameters(fit, len(_fit_rows(evaluation, value))))
        lines += column_lines(("parameter", "value", "from", "to"), rows, left=1)
        lines += labelled_lines("not determined", _undetermined_texts(evaluation, value, fit))
    lines += [
        "",
        *labelled_lines("note", (*evaluation.drop_reasons, *_missing_texts(evaluation), *table.notes, f"form: {FORM}")),
    ]
    return "\n".join(lines)


def _missing_texts(evaluation: Evaluation) -> list[str]:
    return [f"no baseline {name}: {reason}" for name, reason in evaluation.missing_baselines.items()]


def _outlier_texts(evaluation: Evaluation) -> list[str]:
    """Return texts on the outliers, the number of all of them first."""
    outliers = evaluation.outliers
    if not outliers:
        return []
    rows = len(outliers) + len(evaluation.table)
    return [
        f"{len(outliers):,} of {rows:,} rows, whose times differ from what two models of the other rows predict",
        *(f"row {entry.row} ({_text(entry.configuration)}): {seconds_text(entry.seconds)}, expected "
          f"{seconds_text(entry.expected)}" for entry in outliers[:MOST_OUTLIERS]),
        *([f"{len(outliers) - MOST_OUTLIERS:,} more, in --format json"] if len(outliers) > MOST_OUTLIERS else []),
    ]  # fmt: skip


def verdict(evaluation: Evaluation) -> str:
    """Return a text on which model is offered, and why."""
    generic = next((error for error in evaluation.errors if error.model == GENERIC), None)
    if generic is None:
        return (
            f"The generic model is not offered: too few rows are left for it without those held out. "
            f"xsp predict at uses the {evaluation.offered_model} model."
        )
    best = next(error for error in evaluation.errors if error.model != GENERIC)
    if evaluation.offered_model == GENERIC:
        return (
            "The generic model is offered: its mean error on held-out configurations is "
            f"{share_text(generic.mean, 1)}, that of the best baseline ({best.model}) {share_text(best.mean, 1)}."
        )
    if evaluation.errors[0].model == GENERIC:
        return (
            f"The generic model is not offered: {evaluation.bound_reasons[0]}. xsp predict at uses "
            f"{evaluation.offered_model}, with {share_text(best.mean, 1)} on held-out configurations."
        )
    return (
        f"The generic model is not offered: on held-out configurations {best.model} is better, "
        f"{share_text(best.mean, 1)} against {share_text(generic.mean, 1)}. xsp predict at uses {best.model}."
    )


def _offered_error(evaluation: Evaluation) -> Error:
    return next(error for error in evaluation.errors if error.model == evaluation.offered_model)


def _error_cells(error: Error) -> list[str]:
    return [error.model, share_text(error.mean, 1), share_text(error.median, 1), share_text(error.worst, 1)]


def _extrapolation_tables(results: Sequence[Extrapolation]) -> list[str]:
    """Return tables with a row for each model and a column for each factor, as many side by side as fit."""
    names = [GENERIC, *sorted({error.model for result in results for error in result.errors} - {GENERIC})]
    errors_by_model = [{error.model: share_text(error.mean, 1) for error in result.errors} for result in results]
    headings = [f"{plain(result.factor)[:16]} ≥ {result.value:.4g} ({result.rows})" for result in results]
    lines: list[str] = []
    for begin in range(0, len(results), FACTORS_PER_TABLE):
        selection = slice(begin, begin + FACTORS_PER_TABLE)
        rows = ([name, *(errors.get(name, "–") for errors in errors_by_model[selection])] for name in names)
        lines += column_lines(("model", *headings[selection]), rows, left=1)
    return lines


def _fit_rows(evaluation: Evaluation, value: str | None) -> Configurations:
    """Return the rows of a fit."""
    if value is None or evaluation.split.category is None:
        return evaluation.table
    return evaluation.table.take((evaluation.table.values[evaluation.split.category] == value).nonzero()[0])


def _formula(fit: Fit) -> str:
    form = fit.form

    def factor_text(factor: Factor, power: str) -> str:
        name = plain(factor.name)
        return f"({name}/{factor.reference:g})^{power}" if factor.is_numeric else f"{power}({name})"

    terms = (
        " + ".join(
            f"a·{factor_text(factor, 'p')}" if factor.is_numeric else factor_text(factor, "a")
            for factor in form.intrinsic
        )
        or "a"
    )
    product = "".join(f" · {factor_text(factor, 'q' if factor.is_numeric else 'm')}" for factor in form.extrinsic)
    text = f"({terms})" if len(form.intrinsic) > 1 else terms
    return f"t = {text}{product}{' + C' if form.has_constant else ''}"


def _parameter_cells(parameter: Parameter) -> list[str]:
    values = (parameter.value, parameter.low, parameter.high)
    if parameter.why_not is not None and parameter.low is None:
        return [plain(parameter.name), "not identified", "–", "–"]
    if parameter.name.startswith("exponent"):
        texts = [("–" if value is None else f"{value:+.3f}") for value in values]
    elif parameter.name in ("a", "constant") or parameter.name.startswith("a of "):
        texts = [seconds_text(value) for value in values]
    else:
        texts = ["–" if value is None else f"× {math.exp(min(value, 300.0)):.3g}" for value in values]
    return [plain(parameter.name), *texts]


def _undetermined_texts(evaluation: Evaluation, value: str | None, fit: Fit) -> list[str]:
    """Return texts on parameters and combinations of parameters that the data do not determine."""
    table = _fit_rows(evaluation, value)
    texts = [
        f"{plain(parameter.name)}: {parameter.why_not}"
        for parameter in identifiability.parameters(fit, len(table))
        if parameter.why_not is not None
    ]
    pairs = identifiability.ties(fit)
    texts += [
        f"{plain(name)} and {plain(other_name)} trade off: only their combination is determined "
        f"(correlation {correlation:+.2f})"
        for name, other_name, correlation in sorted(pairs, key=lambda pair: -abs(pair[2]))[:6]
    ]
    if len(pairs) > 6:
        texts.append(f"{len(pairs) - 6} more pairs trade off")
    condition = identifiability.condition(fit, table)
    if condition > 1e3:
        description = (
            "some combination of parameters is not determined"
            if math.isinf(condition)
            else f"condition {condition:.3g}"
        )
        texts.append(f"{description}: parameters are less certain than predictions")
    return texts


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return a fit as plain values; durations are in seconds, errors are shares."""
    return {
        "xsp_predict_fit": 1,
        "rows": len(evaluation.table),
        "groups": evaluation.groups,
        "offered": evaluation.offered_model,
        "verdict": verdict(evaluation),
        "heldout": [error._asdict() for error in evaluation.errors],
        "outliers": [{**entry._asdict(), "configuration": dict(entry.configuration)} for entry in evaluation.outliers],
        "largest_errors": [entry._asdict() for entry in evaluation.kind_errors],
        "beyond": [
            {**result._asdict(), "errors": [error._asdict() for error in result.errors]}
            for result in evaluation.extrapolations
        ],
        "fits": [
            {
                "of": value,
                "form": _formula(fit),
                "penalty": fit.penalty._asdict(),
                "parameters": [
                    parameter._asdict()
                    for parameter in identifiability.parameters(fit, len(_fit_rows(evaluation, value)))
                ],
                "references": {
                    factor.name: factor.reference for factor in evaluation.table.factors if factor.is_numeric
                },
                "not_told": _undetermined_texts(evaluation, value, fit),
            }
            for value, fit in evaluation.fits.items()
        ],
        "notes": [*map(plain, (*evaluation.drop_reasons, *_missing_texts(evaluation), *evaluation.table.notes))],
    }


# --- predictions -------------------------------------------------------------------------------------------------


def points_text(evaluation: Evaluation, predictions: Sequence[PredictedPoint]) -> str:
    """Return predicted configurations with their intervals."""
    rows = [
        [*(seconds_text(value) for value in (point.seconds, point.low, point.high)),
         "!" * bool(point.extrapolation_notes), _text(point.configuration)] for point in predictions
    ]  # fmt: skip
    lines = column_lines(("step", "from", "to", "", "configuration"), rows, left=[4])
    error = share_text(_offered_error(evaluation).mean, 1)
    summary = f"model: {evaluation.offered_model}, mean error {error} on held-out configurations"
    lines += ["", *wrapped(summary)]
    if evaluation.offered_model != GENERIC:
        lines += wrapped(verdict(evaluation))
    warnings = dict.fromkeys(text for point in predictions for text in point.extrapolation_notes)
    lines += labelled_lines("extrapolated (!)", list(warnings)[:8])
    if warnings:
        lines += wrapped(
            "note: the interval is for configurations within the recorded ranges; outside it is too narrow", "  "
        )
    return "\n".join(lines)


def _text(configuration: Mapping[str, float | str]) -> str:
    """Return a configuration in the form of the command line: NAME=VALUE …"""
    values = {
        name: plain(value) if isinstance(value, str) else f"{value:.12g}" for name, value in configuration.items()
    }
    return " ".join(f"{plain(name)}={value}" for name, value in values.items())


def points_json(evaluation: Evaluation, predictions: Sequence[PredictedPoint]) -> dict[str, Any]:
    """Return predicted configurations as plain values; durations are in seconds."""
    return {
        "xsp_predict_at": 1,
        "model": evaluation.offered_model,
        "heldout_mean_error": _offered_error(evaluation).mean,
        "points": [
            {"configuration": dict(point.configuration), "step_s": point.seconds, "low_s": point.low,
             "high_s": point.high, "extrapolated": list(point.extrapolation_notes)} for point in predictions
        ],
    }  # fmt: skip


def proposals_text(
    evaluation: Evaluation, proposals: Sequence[Proposal], point: Mapping[str, float | str] | None
) -> str:
    """Return a table of the configurations to record next."""
    if not proposals:
        return "Every combination of the recorded values has been recorded: record other values, larger ones first."
    rows = [
        [f"{number}", seconds_text(candidate.predicted), f"± {100 * candidate.uncertainty:.2g} %",
         seconds_text(candidate.cost), f"{100 * candidate.remaining_uncertainty:.0f} %",
         _text(candidate.configuration)]
        for number, candidate in enumerate(proposals, 1)
    ]  # fmt: skip
    lines = column_lines(("", "step", "uncertainty", "cost", "remaining", "configuration"), rows, left=[5])
    scope = "all combinations of recorded values" if point is None else "the given configuration"
    text = (
        f"uncertainty: how much the resampled fits of {evaluation.offered_model} differ; remaining: expected "
        f"for {scope}, once this configuration and those before it are recorded; cost: time to record it"
    )
    return "\n".join([*lines, "", *wrapped(text)])


def proposals_json(evaluation: Evaluation, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """Return the configurations to record next as plain values; durations are in seconds, doubts are shares."""
    return {
        "xsp_predict_next": 1,
        "model": evaluation.offered_model,
        "next": [
            {"configuration": dict(candidate.configuration), "predicted_s": candidate.predicted,
             "doubt": candidate.uncertainty, "cost_s": candidate.cost, "doubt_left": candidate.remaining_uncertainty}
            for candidate in proposals
        ],
    }  # fmt: skip
