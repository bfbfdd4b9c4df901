"""Fits, their predictions and the configurations to record next, as text for a terminal and as plain values."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from xsp.advise.text import duration
from xsp.predict import identifiability
from xsp.predict.configurations import Configurations, Factor
from xsp.predict.crossvalidation import GENERIC, Beyond, Error, Evaluation, Point
from xsp.predict.generic import Fit
from xsp.predict.identifiability import Parameter
from xsp.predict.nextrun import Next
from xsp.predict.text import columns, listed, wrapped
from xsp.scrub import plain

ACROSS = 3
"""Number of factors side by side, so that a line fits a terminal."""

FORM = "t = (Σ a·(I/r)^p) · (Π (E/r)^q) + C; squared relative errors are minimised"


def page(found: Evaluation) -> str:
    """Return the fits, the errors of all models on held-out configurations, and what the data do not determine."""
    table = found.table
    kinds = f"{len(table):,} rows, {found.groups:,} groups of configurations"
    lines = wrapped(f"{kinds}; errors are those of held-out groups, {len(table):,} rows in total", "  ")
    lines += ["", *columns(("model", "mean error", "median", "90 % below"), map(_error, found.errors), left=1)]
    if found.beyond:
        lines += ["", "beyond: mean error for the largest values (rows), learned from smaller ones"]
        lines += _beyond(found.beyond)
    lines += ["", *wrapped(verdict(found), "  ")]
    for value, fit in found.fits.items():
        lines += ["", *wrapped(_head(found, value, fit), "  ")]
        rows = map(_parameter, identifiability.parameters(fit, len(_fit_rows(found, value))))
        lines += columns(("parameter", "value", "from", "to"), rows, left=1)
        lines += listed("not determined", _undetermined(found, value, fit))
    lines += ["", *listed("note", (*found.dropped, *_without(found), *table.notes, f"form: {FORM}"))]
    return "\n".join(lines)


def _without(found: Evaluation) -> list[str]:
    return [f"no baseline {name}: {reason}" for name, reason in found.missing.items()]


def verdict(found: Evaluation) -> str:
    """Return a text on which model is offered, and why."""
    generic = next((error for error in found.errors if error.model == GENERIC), None)
    if generic is None:
        return (
            f"The generic model is not offered: too few rows are left for it without those held out. "
            f"xsp predict at uses the {found.offered} model."
        )
    best = next(error for error in found.errors if error.model != GENERIC)
    if found.offered == GENERIC:
        return (
            f"The generic model is offered: its mean error on held-out configurations is {_percent(generic.mean)}, "
            f"that of the best baseline ({best.model}) {_percent(best.mean)}."
        )
    return (
        f"The generic model is not offered: on held-out configurations {best.model} is better, {_percent(best.mean)} "
        f"against {_percent(generic.mean)}. xsp predict at uses {best.model}."
    )


def _error(error: Error) -> list[str]:
    return [error.model, _percent(error.mean), _percent(error.median), _percent(error.worst)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 10 else f"{100 * share:,.0f} %"


def _beyond(results: Sequence[Beyond]) -> list[str]:
    """Return tables with a row for each model and a column for each factor, as many side by side as fit."""
    names = [GENERIC, *sorted({error.model for result in results for error in result.errors} - {GENERIC})]
    errors_by_model = [{error.model: _percent(error.mean) for error in result.errors} for result in results]
    heads = [f"{plain(result.factor)[:16]} ≥ {result.value:.4g} ({result.rows})" for result in results]
    lines: list[str] = []
    for since in range(0, len(results), ACROSS):
        part = slice(since, since + ACROSS)
        rows = ([name, *(errors.get(name, "–") for errors in errors_by_model[part])] for name in names)
        lines += columns(("model", *heads[part]), rows, left=1)
    return lines


def _fit_rows(found: Evaluation, value: str | None) -> Configurations:
    """Return the rows on which a fit was made."""
    if value is None or found.split.each is None:
        return found.table
    return found.table.take((found.table.values[found.split.each] == value).nonzero()[0])


def _head(found: Evaluation, value: str | None, fit: Fit) -> str:
    prefix = "" if value is None else f"{found.split.each}={value}: "
    penalty = "no penalty" if fit.penalty.kind == "none" else f"{fit.penalty.kind.upper()} of {fit.penalty.strength:g}"
    return f"{prefix}{_formula(fit)}; {penalty}, by cross-validation"


def _formula(fit: Fit) -> str:
    form = fit.form

    def one(factor: Factor, power: str) -> str:
        name = plain(factor.name)
        return f"({name}/{factor.reference:g})^{power}" if factor.numeric else f"{power}({name})"

    terms = (
        " + ".join(f"a·{one(factor, 'p')}" if factor.numeric else one(factor, "a") for factor in form.intrinsic) or "a"
    )
    product = "".join(f" · {one(factor, 'q') if factor.numeric else one(factor, 'm')}" for factor in form.extrinsic)
    text = f"({terms})" if len(form.intrinsic) > 1 else terms
    return f"t = {text}{product}{' + C' if form.has_constant else ''}"


def _parameter(parameter: Parameter) -> list[str]:
    if parameter.name.startswith("exponent"):
        texts = [_exponent(value) for value in (parameter.value, parameter.low, parameter.high)]
    elif _is_seconds(parameter.name):
        texts = [
            "–" if value is None else duration(1e3 * value)
            for value in (parameter.value, parameter.low, parameter.high)
        ]
    else:
        texts = [
            "–" if value is None else f"× {_times(value):.3g}"
            for value in (parameter.value, parameter.low, parameter.high)
        ]
    return [plain(parameter.name), *texts]


def _is_seconds(name: str) -> bool:
    return name in ("a", "constant") or name.startswith("a of ")


def _times(value: float) -> float:
    return math.exp(min(value, 300.0))


def _exponent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _undetermined(found: Evaluation, value: str | None, fit: Fit) -> list[str]:
    """Return texts on parameters and combinations of parameters that the data do not determine."""
    table = _fit_rows(found, value)
    texts = [
        f"{plain(parameter.name)}: {parameter.why_not}"
        for parameter in identifiability.parameters(fit, len(table))
        if parameter.why_not is not None
    ]
    tied = identifiability.ties(fit)
    texts += [
        f"{plain(first)} and {plain(second)} trade off: only their combination is determined "
        f"(correlation {correlation:+.2f})"
        for first, second, correlation in sorted(tied, key=lambda pair: -abs(pair[2]))[:6]
    ]
    if len(tied) > 6:
        texts.append(f"{len(tied) - 6} more pairs trade off")
    size = identifiability.condition(fit, table)
    if size > 1e3:
        text = "some combination of parameters is not determined" if math.isinf(size) else f"condition {size:.3g}"
        texts.append(f"{text}: parameters are less certain than predictions")
    return texts


def as_json(found: Evaluation) -> dict[str, Any]:
    """Return a fit as plain values; durations are in seconds, errors are shares."""
    return {
        "xsp_predict_fit": 1,
        "rows": len(found.table),
        "groups": found.groups,
        "offered": found.offered,
        "verdict": verdict(found),
        "heldout": [error._asdict() for error in found.errors],
        "beyond": [
            {**result._asdict(), "errors": [error._asdict() for error in result.errors]} for result in found.beyond
        ],
        "fits": [
            {
                "of": value,
                "form": _formula(fit),
                "penalty": fit.penalty._asdict(),
                "parameters": [
                    parameter._asdict() for parameter in identifiability.parameters(fit, len(_fit_rows(found, value)))
                ],
                "references": {factor.name: factor.reference for factor in found.table.factors if factor.numeric},
                "not_told": _undetermined(found, value, fit),
            }
            for value, fit in found.fits.items()
        ],
        "notes": [*map(plain, (*found.dropped, *_without(found), *found.table.notes))],
    }


# --- predictions -------------------------------------------------------------------------------------------------


def points(found: Evaluation, those: Sequence[Point]) -> str:
    """Return predicted configurations with their intervals."""
    rows = [
        [*(duration(1e3 * value) for value in (point.seconds, point.low, point.high)), "!" * bool(point.outside),
         _text(point.configuration)] for point in those
    ]  # fmt: skip
    lines = _rows(("step", "from", "to", "", "configuration"), rows)
    summary = f"model: {found.offered}, mean error {_percent(found.errors[0].mean)} on held-out configurations"
    lines += ["", *wrapped(summary, "  ")]
    if found.offered != GENERIC:
        lines += wrapped(verdict(found), "  ")
    warnings = dict.fromkeys(text for point in those for text in point.outside)
    lines += listed("extrapolated (!)", list(warnings)[:8])
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


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines whose last column is text, which wraps within its column."""
    tables = columns((*head[:-1], ""), [(*row[:-1], "") for row in rows])
    width = max(map(len, tables)) + 2
    lines = [f"{tables[0]:{width}}{head[-1]}"]
    for line, row in zip(tables[1:], rows, strict=True):
        lines += [part.rstrip() for part in _hung(f"{line:{width}}", row[-1])]
    return lines


def _hung(start: str, text: str) -> list[str]:
    parts = textwrap.wrap(text, max(20, 79 - len(start)), break_on_hyphens=False)
    return [f"{start if not index else ' ' * len(start)}{part}" for index, part in enumerate(parts or [""])]


def points_json(found: Evaluation, those: Sequence[Point]) -> dict[str, Any]:
    """Return predicted configurations as plain values; durations are in seconds."""
    return {
        "xsp_predict_at": 1,
        "model": found.offered,
        "heldout_mean_error": found.errors[0].mean,
        "points": [
            {"configuration": dict(point.configuration), "step_s": point.seconds, "low_s": point.low,
             "high_s": point.high, "extrapolated": list(point.outside)} for point in those
        ],
    }  # fmt: skip


def following(found: Evaluation, those: Sequence[Next], point: Mapping[str, float | str] | None) -> str:
    """Return a table of the configurations to record next."""
    if not those:
        return "Every combination of the recorded values has been recorded: record other values, larger ones first."
    rows = [
        [f"{place}", duration(1e3 * candidate.predicted), f"± {100 * candidate.doubt:.2g} %",
         duration(1e3 * candidate.cost), f"{100 * candidate.remaining_doubt:.0f} %", _text(candidate.configuration)]
        for place, candidate in enumerate(those, 1)
    ]  # fmt: skip
    lines = _rows(("", "step", "uncertainty", "cost", "remaining", "configuration"), rows)
    scope = "all combinations of recorded values" if point is None else "the given configuration"
    text = (
        f"uncertainty: how much the resampled fits of {found.offered} differ; remaining: expected for {scope}, once "
        "this configuration and those before it are recorded; cost: time to record it"
    )
    return "\n".join([*lines, "", *wrapped(text, "  ")])


def following_json(found: Evaluation, those: Sequence[Next]) -> dict[str, Any]:
    """Return the configurations to record next as plain values; durations are in seconds, doubts are shares."""
    return {
        "xsp_predict_next": 1,
        "model": found.offered,
        "next": [
            {"configuration": dict(candidate.configuration), "predicted_s": candidate.predicted,
             "doubt": candidate.doubt, "cost_s": candidate.cost, "doubt_left": candidate.remaining_doubt}
            for candidate in those
        ],
    }  # fmt: skip
