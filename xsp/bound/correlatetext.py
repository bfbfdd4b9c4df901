"""Correlations of measures with latency as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from xsp.bound.coefficients import Figure
from xsp.bound.correlate import MEASURES, PATH, WORK, Correlation, Difference, Group, Regression, Slope
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

WIDTH = 80
MOST_HOLES = 10
_CLOSER = {PATH: "the longest path follows latency more closely", WORK: "FLOPs follow latency more closely"}


def page(found: Sequence[Group], notes: Sequence[str] = (), holes: Sequence[str] = ()) -> str:
    """Return a table for each group, the number of groups that each measure wins, and the models left out."""
    lines = [line for group in found for line in (*_group(group), "")]
    lines += [line for text in (*_won(found), *notes) for line in _wrapped(text)]
    if holes:
        lines += ["", f"{len(holes)} left out:", *(line for hole in holes[:MOST_HOLES] for line in _wrapped(hole))]
        left = len(holes) - MOST_HOLES
        lines += [f"and {left} more"] if left > 0 else []
    return "\n".join(lines)


def sections(found: Sequence[Group], notes: Sequence[str] = (), holes: Sequence[str] = ()) -> list[Section]:
    """Return the same as sections of a page: for each group its coefficients, and latency over each measure."""
    made = []
    for group in found:
        rows = tuple(
            (
                MEASURES[each.measure],
                each.models,
                shown(each.pearson),
                shown(each.spearman),
                shown(each.r2),
                each.reason,
            )
            for each in group.correlations
        )
        columns = ("measure", "models", "r of logarithms", "rank ρ", "R²", "reason if none")
        texts = [Text(" ".join(_decided(each) + "." for each in group.differences))] if group.differences else []
        texts.append(Text(group.reason if group.regression is None else _regression(group.regression)))
        charts = tuple(_scatter(group, each) for each in group.correlations if each.pearson is not None)
        slopes = tuple(
            (
                each.family,
                MEASURES[each.measure],
                each.models,
                each.least_ns / 1e6,
                each.most_ns / 1e6,
                shown(each.exponent),
            )
            for each in group.slopes
        )
        families = ("family", "varies", "models", "least_ms", "most_ms", "exponent of latency")
        made.append(
            Section(
                f"{group.title}: {_models(len(group.points))}",
                (
                    *(each for each in texts if each.text),
                    *([Table(columns, rows, "Measures against latency")] if rows else []),
                    *charts,
                    *([Table(families, slopes, "Families that vary only one measure")] if slopes else []),
                ),
            )
        )
    rest = [*_won(found), *notes, *(f"Left out: {hole}" for hole in holes)]
    return [*made, Section("Summary", tuple(map(Text, rest)))] if rest else made


def _scatter(group: Group, each: Correlation) -> Chart:
    name = MEASURES[each.measure]
    points = [point for point in group.points if point[2].get(each.measure)]
    return Chart(
        "points",
        f"{name}: r {shown(each.pearson)}, ρ {shown(each.spearman)}",
        "ms",
        tuple(point[2][each.measure] for point in points),
        (Series("latency", tuple(point[1] / 1e6 for point in points)),),
        over=name,
        log=("at", "values"),
        labels=tuple(point[0] for point in points),
    )


def shown(figure: Figure | None) -> str:
    """Return a coefficient with its interval; a dash for None."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.2f} [–, –]"
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"


def _models(count: int) -> str:
    return f"{count:,} model{'s' * (count != 1)}"


def _group(group: Group) -> Iterator[str]:
    yield plain(f"{group.title}: {_models(len(group.points))}")
    if group.slopes:
        yield "families that vary only one measure: latency ~ measure^exponent"
        yield f"{'family':11} {'varies':13} {'n':>2} {'by':>7} {'latency, ms':>18} {'exponent':>20}"
        yield from map(_slope, group.slopes)
    if not group.points and group.slopes:
        return
    if not group.correlations:
        yield f"no figures: {group.reason}"
        return
    yield f"{'measure':15} {'n':>4} {'r of logarithms':>20} {'rank ρ':>20} {'R²':>17}"
    for each in group.correlations:
        yield from _row(each)
    for difference in group.differences:
        yield from _wrapped(_decided(difference))
    if group.regression is None:
        yield group.reason
    else:
        yield from _wrapped(_regression(group.regression))


def _slope(each: Slope) -> str:
    latency = f"{each.least_ns / 1e6:.3g} → {each.most_ns / 1e6:.3g}"
    name = MEASURES[each.measure]
    return f"{each.family:11} {name:13} {each.models:2} {each.factor:6.1f}× {latency:>18} {shown(each.exponent):>20}"


def _row(each: Correlation) -> Iterator[str]:
    name = MEASURES[each.measure]
    if each.pearson is None:
        yield from _wrapped(f"{name:15} {each.models:4} {each.reason}")
        return
    r, rho, r2 = shown(each.pearson), shown(each.spearman), shown(each.r2)
    yield f"{name:15} {each.models:4} {r:>20} {rho:>20} {r2:>17}"


def _decided(each: Difference) -> str:
    name = {"pearson": "r", "spearman": "ρ"}[each.coefficient]
    told = _CLOSER[each.winner] if each.winner else "not decided, the interval contains 0"
    return f"{name} of the longest path minus {name} of FLOPs {shown(each.figure)}: {told}"


def _regression(found: Regression) -> str:
    powers = ", ".join(f"{MEASURES[name]}^{each.value:.2f}" for name, each in found.exponents.items())
    error = found.mean_error_percent
    ends = "" if error.low is None or error.high is None else f" [{error.low:.0f}, {error.high:.0f}]"
    dropped = "; ".join(f"without {MEASURES[name]}: {reason}" for name, reason in found.dropped.items())
    return (
        f"latency ~ {powers}: R² {found.r2:.2f}; leave-one-out error {error.value:.0f}{ends} % on average, "
        f"{found.median_error_percent:.0f} % at the median" + (f"; {dropped}" if dropped else "")
    )


def _won(found: Sequence[Group]) -> Iterator[str]:
    """Yield, for each coefficient, the number of groups that each measure wins."""
    for name, coefficient in (("r of logarithms", "pearson"), ("rank ρ", "spearman")):
        won = Counter(each.winner for group in found for each in group.differences if each.coefficient == coefficient)
        if won.total() > 1:
            yield (
                f"By {name}, of {won.total()} groups: longest path {won[PATH]}, FLOPs {won[WORK]}, "
                f"not decided {won[None]}."
            )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(plain(text), WIDTH, subsequent_indent="  ")
