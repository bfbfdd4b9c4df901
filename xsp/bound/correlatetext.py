"""Correlations of measures with latency as text for a terminal of 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from xsp import terminal
from xsp.bound.correlate import MEASURES, PATH, WORK, CoefficientDifference, Correlation, LatencyGroup, Regression
from xsp.sections import Chart, Section, Series, Table, Text
from xsp.stats import Figure
from xsp.texts import counted

MOST_HOLES = 10
_CLOSER = {PATH: "the longest path follows latency more closely", WORK: "FLOPs follow latency more closely"}


def page(groups: Sequence[LatencyGroup], notes: Sequence[str] = (), holes: Sequence[str] = ()) -> str:
    """Return the sections as text: for each group its coefficients, then wins, notes, and the models left out."""
    remaining = len(holes) - MOST_HOLES
    shown = [*holes[:MOST_HOLES], *([f"{remaining} more"] if remaining > 0 else [])]
    return "\n\n".join(terminal.page(section) for section in sections(groups, notes, shown))


def sections(groups: Sequence[LatencyGroup], notes: Sequence[str] = (), holes: Sequence[str] = ()) -> list[Section]:
    """Return the same as sections of a page: for each group its coefficients, and latency over each measure."""
    result = []
    for group in groups:
        rows = tuple(
            (
                MEASURES[correlation.measure],
                correlation.models,
                coefficient_text(correlation.pearson),
                coefficient_text(correlation.spearman),
                coefficient_text(correlation.r2),
                correlation.reason or None,
            )
            for correlation in group.correlations
        )
        columns = ("measure", "models", "r of logarithms", "rank ρ", "R²", "reason if none")
        texts = (
            [Text(" ".join(_verdict(difference) + "." for difference in group.differences))]
            if group.differences
            else []
        )
        if group.points or not group.slopes:
            texts.append(Text(group.reason if group.regression is None else _regression(group.regression)))
        charts = tuple(
            _scatter(group, correlation) for correlation in group.correlations if correlation.pearson is not None
        )
        slopes = tuple(
            (
                slope.family,
                MEASURES[slope.measure],
                slope.models,
                slope.least_ns / 1e6,
                slope.most_ns / 1e6,
                coefficient_text(slope.exponent),
            )
            for slope in group.slopes
        )
        families = ("family", "varies", "models", "first model_ms", "last model_ms", "exponent of latency")
        if not group.points and group.slopes:
            title = f"{group.title}: families of small models"
        else:
            title = f"{group.title}: {_models(len(group.points))}"
        result.append(
            Section(
                title,
                (
                    *(text for text in texts if text.text),
                    *([Table(columns, rows, "Measures against latency")] if rows else []),
                    *charts,
                    *([Table(families, slopes, "Families that vary only one measure")] if slopes else []),
                ),
            )
        )
    closing = [*_win_counts(groups), *notes, *(f"Left out: {hole}" for hole in holes)]
    return [*result, Section("Summary", tuple(map(Text, closing)))] if closing else result


def _scatter(group: LatencyGroup, correlation: Correlation) -> Chart:
    name = MEASURES[correlation.measure]
    points = [point for point in group.points if point[2].get(correlation.measure)]
    return Chart(
        "points",
        f"{name}: r {coefficient_text(correlation.pearson)}, ρ {coefficient_text(correlation.spearman)}",
        "ms",
        tuple(point[2][correlation.measure] for point in points),
        (Series("latency", tuple(point[1] / 1e6 for point in points)),),
        over=name,
        log=("at", "values"),
        labels=tuple(point[0] for point in points),
    )


def coefficient_text(figure: Figure | None) -> str:
    """Return a coefficient with its interval; a dash for None."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.2f} [–, –]"
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"


def _models(count: int) -> str:
    return counted(count, "model")


def _verdict(difference: CoefficientDifference) -> str:
    name = {"pearson": "r", "spearman": "ρ"}[difference.coefficient]
    verdict = _CLOSER[difference.winner] if difference.winner else "not decided, the interval contains 0"
    return f"{name} of the longest path minus {name} of FLOPs {coefficient_text(difference.figure)}: {verdict}"


def _regression(regression: Regression) -> str:
    powers = ", ".join(f"{MEASURES[name]}^{figure.value:.2f}" for name, figure in regression.exponents.items())
    error = regression.mean_error_percent
    interval = "" if error.low is None or error.high is None else f" [{error.low:.0f}, {error.high:.0f}]"
    dropped = "; ".join(f"without {MEASURES[name]}: {reason}" for name, reason in regression.dropped.items())
    return (
        f"latency ~ {powers}: R² {regression.r2:.2f}; leave-one-out error {error.value:.0f}{interval} % on average, "
        f"{regression.median_error_percent:.0f} % at the median" + (f"; {dropped}" if dropped else "")
    )


def _win_counts(groups: Sequence[LatencyGroup]) -> Iterator[str]:
    """Yield, for each coefficient, the number of groups that each measure wins."""
    for name, coefficient in (("r of logarithms", "pearson"), ("rank ρ", "spearman")):
        wins = Counter(
            difference.winner
            for group in groups
            for difference in group.differences
            if difference.coefficient == coefficient
        )
        if wins.total() > 1:
            yield (
                f"By {name}, of {wins.total()} groups: longest path {wins[PATH]}, FLOPs {wins[WORK]}, "
                f"not decided {wins[None]}."
            )
