"""Results as tables of text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from xsp.comparison.conclusion import conclusion
from xsp.evaluate import labelled
from xsp.evaluate.quality.judging import Judgement
from xsp.evaluate.results import GENERATION_FIGURES, RUN, Result
from xsp.evaluate.standings import Comparison, Standing
from xsp.terminal import WIDTH, column_lines
from xsp.texts import short_number

KINDS = {"ttft": "first token", "itl": "between tokens", "tpot": "per token"}
"""The times of generated tokens, and their names in tables."""

LIMITS = {"ttft_ms": "first token", "tpot_ms": "per token", "latency_ms": "request"}
"""The limits of goodput, and their names in sentences."""


def results_table(results: Sequence[Result]) -> str:
    """Return a row for each result and batch size."""
    has_accuracy = any(result.accuracy for result in results)
    header = ("result", "name", "load", "batch", "p50 ms", "p99 ms", "inputs/s", *(["top-1 %"] if has_accuracy else []))
    rows = [
        (
            result.name, str(result.content["name"]), str(result.content["kind"]), str(part["batch"]),
            figure(part["p50_ms"]), figure(part["p99_ms"]) + mark(result, part), figure(part["inputs_per_s"]),
            *([labelled.percent_text(result.accuracy)] if has_accuracy else []),
        )
        for result in results
        for part in result.parts
    ]  # fmt: skip
    notes = [f"{result.name}: {labelled.sentence(result.accuracy)}" for result in results if result.accuracy]
    notes += [f"{result.name}: {rate_text(part)}" for result in results for part in result.parts if "rate_low" in part]
    if any("*" in row[5] for row in rows):
        notes.append("* the load was not as requested: stopped early, or its generator was late by over 1 %")
    if any("~" in row[5] for row in rows):
        notes.append("~ times reported by a simulator")
    return "\n".join([*column_lines(header, rows, 3), *_generation_lines(results), *notes])


def _generation_lines(results: Sequence[Result]) -> list[str]:
    """Return a table of the times of generated tokens, and their rates; none if no result generated text."""
    generated = [
        (result, part["generation"], result.manifest.get("scenario") or {}) for result in results
        for part in result.parts
        if part.get("generation")
    ]  # fmt: skip
    if not generated:
        return []

    def interval(found: Mapping[str, Any], name: str, key: str) -> str:
        ends = found[f"{name}_intervals_ms"].get(key, (None, None))
        return f"{figure(ends[0])} to {figure(ends[1])}"

    rows = [
        (
            result.name, kind, figure(found.get(f"{name}_p50_ms")), interval(found, name, "p50"),
            figure(found.get(f"{name}_p99_ms")), interval(found, name, "p99"),
        )
        for result, found, _ in generated for name, kind in KINDS.items()
    ]  # fmt: skip
    header = ("result", "generated text", "p50 ms", "95 % interval", "p99 ms", "95 % interval")
    lines = ["", *column_lines(header, rows, 2)]
    for result, found, scenario in generated:
        text = f"{result.name}: {figure(found['output_tokens_per_s'])} generated tokens/s"
        if found.get("goodput_share_interval") is not None:
            low, high = found["goodput_share_interval"]
            limits = {**(scenario.get("generation") or {}), "latency_ms": scenario.get("latency_ms")}
            kept = ", ".join(
                f"{words} {figure(limits[name])} ms" for name, words in LIMITS.items() if limits.get(name) is not None
            )
            share = f"{100 * (found.get('goodput_share') or 0):.1f} % ({100 * low:.1f} to {100 * high:.1f})"
            text += f"; goodput {figure(found.get('goodput_per_s'))} requests/s, {share} within {kept}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return lines


def mark(result: Result, part: Any) -> str:
    """Return the marks of a latency."""
    return ("*" if part["late"] or part["stopped"] else "") + ("~" if result.content.get("simulated") else "")


def rate_text(part: Mapping[str, Any]) -> str:
    """Return the result of a search for the highest rate as a sentence."""
    low, high = part["rate_low"], part["rate_high"]
    if low is None:
        return "no rate met the limit"
    between = f"{low:.4g} met it, {high:.4g} did not" if high is not None else f"{low:.4g} and all below met it"
    likely = "" if part["rate_estimate"] is None else f"; most likely {part['rate_estimate']:.4g}"
    return f"highest rate per second within the limit: {between}{likely} ({len(part['probes'])} rates tried)"


def figure(value: float | None) -> str:
    """Return a number with at least three digits; a dash for None."""
    return "-" if value is None else short_number(value)


# --- comparisons ------------------------------------------------------------------------------------------------------

FIGURES = ("p50_ms", "p90_ms", "p99_ms", "trimmed_mean_ms", "inputs_per_s")

MOST_DIFFERING = 20


def comparison_text(comparison: Comparison) -> str:
    """Return figures, outputs, and differences."""
    lines = [f"{comparison.before.name} and {comparison.after.name}: {judgement_text(comparison.judgement)}", ""]
    rows = []
    parts_after = {part["batch"]: part for part in comparison.after.parts}
    for part in comparison.before.parts:
        figures_after = _figures(parts_after.get(part["batch"], {}))
        for name, before in _figures(part).items():
            if name not in figures_after:
                continue
            after = figures_after[name]
            change = f"{100 * (after / before - 1):+.1f} %" if before and after else "-"
            rows.append((name.replace("_", " "), str(part["batch"]), figure(before), figure(after), change))
    before, after = comparison.before.accuracy, comparison.after.accuracy
    if before and after:
        rows += [
            (f"top-{k} %", "-", labelled.percent_text(before, k), labelled.percent_text(after, k), "-")
            for k in labelled.TOP_KS
        ]
    if rows:
        lines += [*column_lines(("figure", "batch", "before", "after", "change"), rows, 1), ""]
    else:
        lines += ["the results have no batch size in common", ""]
    lines += textwrap.wrap(f"outputs: {outputs_text(comparison)}", WIDTH, subsequent_indent="    ")
    for name, measures in comparison.divergences.items() if not comparison.has_equal_outputs else ():
        text = ", ".join(
            f"{measure} {value if isinstance(value, str) else figure(value)}" for measure, value in measures.items()
        )
        lines += textwrap.wrap(f"  {name}: {text}", WIDTH, subsequent_indent="    ")
    for name, (before, after) in list(comparison.differences.items())[:MOST_DIFFERING]:
        text = f"differs: {name}: {'-' if before is None else before} → {'-' if after is None else after}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    if len(comparison.differences) > MOST_DIFFERING:
        lines.append(f"and {len(comparison.differences) - MOST_DIFFERING} more differ")
    return "\n".join([*lines, *_layer_lines(comparison)])


def outputs_text(comparison: Comparison) -> str:
    """Return whether outputs are equal, or why that cannot be determined."""
    if comparison.constant_outputs:
        equal = "equal" if comparison.has_equal_outputs else "not equal"
        return f"{equal}, and constant, so they cannot be compared: {comparison.constant_outputs}"
    return "equal bit for bit" if comparison.has_equal_outputs else "not equal"


MOST_LAYERS = 8


def _layer_lines(comparison: Comparison) -> list[str]:
    """Return the conclusion of the comparison of both traces, and the layers whose time changed most."""
    if comparison.by_layer is None:
        return []
    if isinstance(comparison.by_layer, str):
        return textwrap.wrap(f"by layer: {comparison.by_layer}", WIDTH, subsequent_indent="    ")
    lines = ["", *textwrap.wrap(f"by layer: {' '.join(conclusion(comparison.by_layer)[:2])}", WIDTH)]
    layers = sorted(comparison.by_layer.section("layer"), key=lambda row: -abs(row.change_ms or 0.0))
    rows = [
        (
            layer.name, figure(layer.a_ms), figure(layer.b_ms),
            "-" if layer.change_percent is None else f"{layer.change_percent:+.1f} %", layer.verdict or "-",
        )
        for layer in layers[:MOST_LAYERS]
    ]  # fmt: skip
    if rows:
        lines += ["", *column_lines(("layer", "before ms", "after ms", "change", "verdict"), rows, 1)]
    if len(layers) > MOST_LAYERS:
        lines.append(f"and {len(layers) - MOST_LAYERS:,} more layers, which changed by less")
    runs = [result.path / RUN for result in (comparison.before, comparison.after)]
    return [*lines, f"all of it: {shlex.join(['xsp', 'compare', *map(str, runs)])}"]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "before": comparison.before.name,
        "after": comparison.after.name,
        **judgement_json(comparison.judgement),
        "equal_outputs": comparison.has_equal_outputs,
        "constant_outputs": comparison.constant_outputs,
        "outputs": outputs_text(comparison),
        "divergences": {name: dict(measures) for name, measures in comparison.divergences.items()},
        "accuracy": [comparison.before.accuracy, comparison.after.accuracy],
        "differing": {name: list(pair) for name, pair in comparison.differences.items()},
        "figures": [
            {"batch": part["batch"], "before": _figures(part), "after": _figures(part_after)}
            for part in comparison.before.parts
            for part_after in comparison.after.parts
            if part_after["batch"] == part["batch"]
        ],
        "by_layer": _layers_json(comparison),
    }


def _layers_json(comparison: Comparison) -> dict[str, Any] | None:
    if comparison.by_layer is None:
        return None
    if isinstance(comparison.by_layer, str):
        return {"error": comparison.by_layer}
    selected = [row for row in comparison.by_layer.rows if row.section in ("step", "layer")]
    return {"conclusion": conclusion(comparison.by_layer), "rows": [asdict(row) for row in selected]}


def _figures(part: Mapping[str, Any]) -> dict[str, Any]:
    known = {**part, **(part.get("generation") or {})}
    return {name: known[name] for name in (*FIGURES, "rate_low", "rate_high", *GENERATION_FIGURES) if name in known}


def judgement_text(judgement: Judgement) -> str:
    """Return a verdict with the reasons for it."""
    lines = [judgement.verdict.value]
    for reason in judgement.decisive_reasons:
        lines += textwrap.wrap(
            f"  {reason.subject}: {reason.text}", WIDTH, subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as plain data."""
    reasons = [
        {"subject": reason.subject, "verdict": reason.verdict.value, "text": reason.text}
        for reason in judgement.reasons
    ]
    return {"verdict": judgement.verdict.value, "reasons": reasons}


# --- the leaderboard --------------------------------------------------------------------------------------------------


ORDER_HEADINGS = {
    "inputs_per_s": "inputs/s", "p50_ms": "p50 ms", "p90_ms": "p90 ms", "p99_ms": "p99 ms", "rate": "requests/s",
    "top1": "top-1 %",
}  # fmt: skip
"""Headings, with units, of the figures by which a leaderboard can be ordered."""


def order_cell(row: Standing, by: str) -> str:
    """Return the figure of a row by which a leaderboard is ordered, as a cell of the column `ORDER_HEADINGS[by]`."""
    if by == "rate":
        return rate_interval(row.part)
    return labelled.percent_text(row.newest.accuracy) if by == "top1" else figure(row.part[by])


def rate_interval(part: Mapping[str, Any]) -> str:
    """Return the interval of the highest rate in short form."""
    return " to ".join("?" if part[name] is None else figure(part[name]) for name in ("rate_low", "rate_high"))


def standing(rows: Sequence[Standing], most: int, by: str = "inputs_per_s") -> str:
    """Return the first rows of a leaderboard, whose last column is the ordering figure unless another column has it."""
    header = ("", "model", "load", "software", "machine", "batch", "p50 ms", "p99 ms", "inputs/s")
    cells = [
        (
            str(position), str(row.newest.manifest["model"]["name"]), str(row.newest.content["kind"]), row.software,
            row.machine, str(row.part["batch"]), figure(row.part["p50_ms"]),
            figure(row.part["p99_ms"]) + mark(row.newest, row.part), figure(row.part["inputs_per_s"]),
        )
        for position, row in enumerate(rows[:most], 1)
    ]  # fmt: skip
    if ORDER_HEADINGS[by] not in header:
        header = (*header[:-1], ORDER_HEADINGS[by])
        cells = [(*line[:-1], order_cell(row, by)) for line, row in zip(cells, rows, strict=False)]
    lines = column_lines(header, cells, 5)
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more rows: --rows {len(rows)}")
    return "\n".join(lines)


def standing_json(row: Standing) -> dict[str, Any]:
    """Return a row of a leaderboard as plain data."""
    return {
        "model": row.newest.manifest["model"]["name"], "identity": row.newest.identity, "result": row.newest.name,
        "results": row.count, "software": row.software, "machine": row.machine, "kind": row.newest.content["kind"],
        "batch": row.part["batch"], **_figures(row.part), "accuracy": row.newest.accuracy,
    }  # fmt: skip
