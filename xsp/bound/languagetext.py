"""Curves of a language model as text for 80 columns, as plain values, and as a section of a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from xsp import terminal
from xsp.bound import targets
from xsp.bound.language import DECODE, Language, LengthCurve, LengthPoint
from xsp.bound.polynomials import Polynomial
from xsp.scrub import plain
from xsp.sections import Cell, Chart, Section, Series, Table, Text
from xsp.terminal import NO_BREAK_SPACE
from xsp.texts import amount, at_least, milliseconds, ns_text

DRAWN_LENGTHS = 24
"""Number of lengths at which a curve is drawn."""

NAMES = {"prefill": "first token", "decode": "each token"}
"""Names of the steps from the view of a user."""


def page(language: Language, source: str, command: str = "") -> str:
    """Return the curves as text, with the next command.

    Args:
        language: the curves of a model.
        source: the model as the user named it.
        command: the lengths and other options as the user typed them, for the next command.
    """
    return terminal.page(section(language), _next(language, source, command))


def _conditions(language: Language) -> str:
    """Return the model and the conditions of its figures."""
    conditions = [language.name, f"batch {language.batch}", str(language.settings.get("dtype") or "type unknown")]
    if language.settings.get("device"):
        conditions.append(f"timings of {language.settings['device']}")
    elif language.settings.get("environment"):
        conditions.append(f"{language.threads} thread{'s' * (language.threads > 1)}")
    if not isinstance(language.ceilings, str):
        conditions.append(f"ceilings of {language.ceilings.name}")
    return ", ".join(conditions)


def _remarks(language: Language) -> Iterator[str]:
    for curve in reversed(language.curves):
        yield from _curve(curve)
    if isinstance(language.prefill, str):
        yield f"first token: no figures, {language.prefill}."
    yield from _bytes(language)
    yield from _batches(language)
    shared = language.decode
    yield (
        f"Of {shared.calls:,} calls of a decoding step {shared.shared_calls:,} are the same at all lengths; "
        f"{shared.distinct_calls:,} distinct calls have to be timed for {len(shared.points)} lengths."
    )
    if language.framework and any(point.coverage.nodes for curve in language.curves for point in curve.points):
        yield f"Figures do not include the framework: {language.framework}."
    if isinstance(language.ceilings, str):
        yield f"No ceilings: {language.ceilings}."
    yield from language.problems


def _curve(curve: LengthCurve) -> Iterator[str]:
    name = NAMES[curve.phase]
    total, steps = curve.total, curve.steps
    if steps is not None:
        yield f"{name}, measured = {formula(steps)}"
    if total is None:
        yield f"{name}: no curve, {curve.reason}."
        return
    yield f"{name} = {formula(total)}"
    part, verb = ("attention and cache", "take") if curve.phase == DECODE else ("attention", "takes")
    crossing = curve.attention_crossing
    if crossing is None:
        yield f"{name}: at no length {part} {verb} longer than the rest."
        return
    longest = curve.points[-1].tokens
    suffix = ", which is beyond what was timed" if crossing.n > longest else ""
    low, high = ("?" if number is None else f"{number:,.0f}" for number in (crossing.low, crossing.high))
    length = f"{crossing.n:,.0f} ({low} … {high})"
    yield f"{name}: {part} {verb} longer than the rest from {length} tokens on{suffix}."
    if curve.omitted_calls:
        yield (
            f"{name}: {curve.omitted_calls} calls are left out of the curve, because they are not timed at every "
            "length."
        )


def formula(curve: Polynomial) -> str:
    """Return a curve as `9.12 ms ± 0.1 ms + 3.4 µs · n`, each coefficient with its interval."""
    parts = []
    for power, value in enumerate(curve.coefficients):
        if value or not power:
            unit = ("", " · n", " · n²")[power]
            parts.append(f"({_fine(value)} ± {_fine(curve.half_of(power))}){unit}".replace(" ", NO_BREAK_SPACE))
    return " + ".join(parts)


def _fine(ns: float) -> str:
    """Return a time; below 10 ns with three significant digits."""
    return f"{ns:.3g} ns" if abs(ns) < 10 else ns_text(ns)


def _bytes(language: Language) -> Iterator[str]:
    point = language.decode.points[-1]
    active = point.active
    text = f"A decoding step reads {amount(round(active.weights(language.batch, language.skew)), 'B')} of weights"
    if active.stacks:
        stack = active.stacks[0]
        text += (
            f" of {amount(active.all_weights, 'B')}: each token chooses {stack.per_token:g} of {stack.experts} "
            f"experts, {_distinct(language, point):.3g} distinct ones are expected"
        )
        text += f" (skew {language.skew:g})" if language.skew else ""
    if language.cache_crossing is not None:
        text += f". The cache has as many bytes from {language.cache_crossing:,.0f} tokens on"
    yield text + "."


def _distinct(language: Language, point: LengthPoint) -> float:
    from xsp.bound.experts import distinct

    stack = point.active.stacks[0]
    return distinct(stack.experts, stack.per_token, language.batch, language.skew)


def _batches(language: Language) -> Iterator[str]:
    batches = language.compute_bound
    if not batches or any(point.ceiling_ns is None for point in language.decode.points):
        return
    text = ", ".join(
        f"{'at no batch size' if batch is None else f'from batch {batch:,} on'} at {tokens:,} tokens"
        for tokens, batch in ((tokens, batches[tokens]) for tokens in (min(batches), max(batches)))
    )
    yield f"By the ceilings decoding is compute-bound {text}."


def _next(language: Language, source: str, command: str) -> str:
    base = f"xsp bound {shlex.quote(source)} {command}".rstrip()
    points = [point for curve in language.curves for point in curve.points]
    is_timed = language.settings.get("environment") is not None
    if not is_timed or any(not point.coverage.is_complete for point in points):
        return targets.filled(base, "60s")
    if any(point.measured is None for point in points) and not language.settings.get("device"):
        return f"{base} --measure 30s"
    return f"{base} --html curves.html"


# --- plain values and the page -----------------------------------------------------------------------------


def as_json(language: Language) -> dict[str, Any]:
    """Return the output of `xsp bound MODEL --decode A:B --format json`; times in nanoseconds, null if unknown."""
    return {
        "name": language.name,
        "batch": language.batch,
        "threads": language.threads,
        "ceilings": None if isinstance(language.ceilings, str) else {
            "name": language.ceilings.name, "source": language.ceilings.source
        },
        "decode": _curve_json(language.decode),
        "prefill": {"reason": language.prefill} if isinstance(language.prefill, str) else _curve_json(language.prefill),
        "compute_bound_batch": {str(tokens): batch for tokens, batch in language.compute_bound.items()},
        "cache_overtakes_tokens": language.cache_crossing,
        "experts": _experts(language),
        "framework": language.framework or None,
        "settings": dict(language.settings),
        "problems": list(language.problems),
    }  # fmt: skip


def _experts(language: Language) -> dict[str, Any] | None:
    point = language.decode.points[-1]
    if not point.active.stacks:
        return None
    stack = point.active.stacks[0]
    return {
        "experts": stack.experts,
        "chosen": stack.per_token,
        "expected_different": _distinct(language, point),
        "skew": language.skew,
    }


def _curve_json(curve: LengthCurve) -> dict[str, Any]:
    crossing = curve.attention_crossing
    return {
        "reason": curve.reason or None,
        "calls": curve.calls,
        "shared": curve.shared_calls,
        "different": curve.distinct_calls,
        "left_out": curve.omitted_calls,
        "coefficients_ns": _coefficients(curve.total),
        "measured_coefficients_ns": _coefficients(curve.steps),
        "attention_ns": _coefficients(curve.attention),
        "rest_ns": _coefficients(curve.non_attention),
        "attention_overtakes": None
        if crossing is None
        else {"tokens": crossing.n, "low": crossing.low, "high": crossing.high},
        "points": [_point(point, curve) for point in curve.points],
    }


def _coefficients(curve: Polynomial | None) -> list[dict[str, float]] | None:
    if curve is None:
        return None
    return [{"value": value, "half": curve.half_of(power)} for power, value in enumerate(curve.coefficients)]


def _point(point: LengthPoint, curve: LengthCurve) -> dict[str, Any]:
    total, step = curve.total, point.measured
    return {
        "tokens": point.tokens,
        "ns": point.ns,
        "half_ns": point.half_ns,
        "at_least": None if point.ns is None else not point.coverage.is_complete,
        "fitted_ns": None if total is None else total.at(point.tokens),
        "ceiling_ns": point.ceiling_ns,
        "flops": point.flops.known,
        "flops_unknown": point.flops.unknown,
        "weight_bytes": point.active.dense + sum(stack.bytes for stack in point.active.stacks),
        "state_bytes": point.active.state,
        "coverage": {
            "calls": point.coverage.nodes, "of_calls": point.coverage.of_nodes, "time_share": point.coverage.time,
        },
        "measured_ns": None if step is None else step.ns,
        "measured_low_ns": None if step is None else step.low,
        "measured_high_ns": None if step is None else step.high,
    }  # fmt: skip


def section(language: Language) -> Section:
    """Return the section of a page: texts on the curves, charts with the measured steps, and tables by length."""
    curves = list(reversed(language.curves))  # the step of reading if there is one, then that of decoding
    columns = ["tokens"]
    for curve in curves:
        name = NAMES[curve.phase].replace(" ", "_")
        columns += [f"{name}_ms", f"{name}_half_ms", f"{name}_ceiling_ms"]
    rows, measured = [], []
    for points in zip(*(curve.points for curve in curves), strict=True):
        cells: list[Cell] = []
        step_cells: list[Cell] = []
        for point in points:
            step, ns = point.measured, point.ns
            is_whole = ns is None or point.coverage.is_complete
            cells += [milliseconds(ns) if is_whole else at_least(ns_text(ns), True), milliseconds(point.half_ns),
                      milliseconds(point.ceiling_ns)]  # fmt: skip
            half_ns = None if step is None or step.low is None or step.high is None else (step.high - step.low) / 2
            step_cells += [None if step is None else milliseconds(step.ns), milliseconds(half_ns),
                           None if step is None or ns is None else 100 * ns / step.ns]  # fmt: skip
        rows.append((points[0].tokens, *cells, points[-1].active.state))
        measured.append((points[0].tokens, *step_cells))
    tables = [Table((*columns, "cache_bytes"), tuple(rows), "By length")]
    if any(point.measured for curve in curves for point in curve.points):
        columns = [column.replace("ceiling_ms", "calls_percent") for column in columns]
        tables.append(Table(tuple(columns), tuple(measured), "Measured steps, and the timed calls in percent of them"))
    texts = [Text(plain(text)) for text in (_conditions(language), *_remarks(language))]
    return Section("Language model", (*texts, *map(_chart, curves), *tables))


def _chart(curve: LengthCurve) -> Chart:
    """Return a chart of a curve at many lengths, with timings, ceilings and measured steps at the timed lengths."""
    points = {point.tokens: point for point in curve.points}
    low, high = min(points), max(points)
    drawn_lengths = {round(low + (high - low) * step / (DRAWN_LENGTHS - 1)) for step in range(DRAWN_LENGTHS)}
    lengths = sorted({*drawn_lengths, *points})
    total, attention = curve.total, curve.attention
    series = [Series("calls, timed", tuple(milliseconds(points[n].ns) if n in points else None for n in lengths))]
    if total is not None and attention is not None:
        series = [
            Series(
                "curve",
                tuple(milliseconds(total.at(n)) for n in lengths),
                tuple(milliseconds(max(0.0, total.at(n) - total.half(n))) for n in lengths),
                tuple(milliseconds(total.at(n) + total.half(n)) for n in lengths),
            ),
            Series("attention part", tuple(milliseconds(attention.at(n)) for n in lengths)),
        ]
    series.append(
        Series("ceiling", tuple(milliseconds(points[n].ceiling_ns) if n in points else None for n in lengths))
    )
    if any(point.measured for point in curve.points):
        steps = [points[n].measured if n in points else None for n in lengths]
        series.append(
            Series(
                "measured",
                tuple(None if step is None else milliseconds(step.ns) for step in steps),
                tuple(None if step is None else milliseconds(step.low) for step in steps),
                tuple(None if step is None else milliseconds(step.high) for step in steps),
            )
        )
    return Chart("lines", NAMES[curve.phase].capitalize(), "ms", tuple(lengths), tuple(series), "tokens")
