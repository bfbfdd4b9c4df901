"""Results as tables of text, 80 columns wide."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from xsp.comparison.conclusion import conclusion
from xsp.evaluate import labelled
from xsp.evaluate.quality.judging import Judgement
from xsp.evaluate.results import RUN, Result
from xsp.evaluate.standings import Comparison, Row

WIDTH = 80


def results_table(found: Sequence[Result]) -> str:
    """Return a row for each result and batch size."""
    with_accuracy = any(result.accuracy for result in found)
    head = ("result", "name", "load", "batch", "p50 ms", "p99 ms", "inputs/s", *(["top-1 %"] if with_accuracy else []))
    rows = [
        (
            result.name, str(result.content["name"]), str(result.content["kind"]), str(part["batch"]),
            figure(part["p50_ms"]), figure(part["p99_ms"]) + mark(result, part), figure(part["inputs_per_s"]),
            *([labelled.percent_text(result.accuracy)] if with_accuracy else []),
        )
        for result in found
        for part in result.parts
    ]  # fmt: skip
    notes = [f"{result.name}: {labelled.sentence(result.accuracy)}" for result in found if result.accuracy]
    notes += [f"{result.name}: {rate(part)}" for result in found for part in result.parts if "rate_low" in part]
    if any("*" in row[5] for row in rows):
        notes.append("* the load was not as requested: stopped early, or its generator was late by over 1 %")
    if any("~" in row[5] for row in rows):
        notes.append("~ times reported by a simulator")
    return "\n".join([table(head, rows, 3), *notes])


def mark(found: Result, part: Any) -> str:
    """Return the marks of a latency."""
    return ("*" if part["late"] or part["stopped"] else "") + ("~" if found.content.get("simulated") else "")


def rate(part: Mapping[str, Any]) -> str:
    """Return the result of a search for the highest rate as a sentence."""
    low, high = part["rate_low"], part["rate_high"]
    if low is None:
        return "no rate met the limit"
    between = f"{low:.4g} met it, {high:.4g} did not" if high is not None else f"{low:.4g} and all below met it"
    likely = "" if part["rate_estimate"] is None else f"; most likely {part['rate_estimate']:.4g}"
    return f"highest rate per second within the limit: {between}{likely} ({len(part['probes'])} rates tried)"


def figure(value: float | None) -> str:
    """Return a number with at least three digits; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Return a table: the first `words` columns left-aligned, others right-aligned; the second is cut to fit."""
    widths = [max(len(str(row[column])) for row in [head, *rows]) for column in range(len(head))]
    excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if excess > 0 and len(widths) > 1:
        widths[1] = max(8, widths[1] - excess)
    lines = []
    for row in [head, *rows]:
        cells = [
            _cut(str(cell), widths[column]).ljust(widths[column]) if column < words else str(cell).rjust(widths[column])
            for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# --- comparisons ------------------------------------------------------------------------------------------------------

FIGURES = ("p50_ms", "p90_ms", "p99_ms", "trimmed_mean_ms", "inputs_per_s")

MOST_DIFFERING = 20


def comparison(found: Comparison) -> str:
    """Return figures, outputs, and differences."""
    lines = [f"{found.before.name} and {found.after.name}: {judgement(found.judgement)}", ""]
    rows = []
    after = {part["batch"]: part for part in found.after.parts}
    for part in found.before.parts:
        other = after.get(part["batch"])
        for name in (*FIGURES, "rate_low", "rate_high"):
            if other is None or name not in part or name not in other:
                continue
            first, second = part[name], other[name]
            change = f"{100 * (second / first - 1):+.1f} %" if first and second else "-"
            rows.append((name.replace("_", " "), str(part["batch"]), figure(first), figure(second), change))
    if found.before.accuracy and found.after.accuracy:
        first, second = found.before.accuracy, found.after.accuracy
        rows += [
            (f"top-{k} %", "-", labelled.percent_text(first, k), labelled.percent_text(second, k), "-")
            for k in labelled.KS
        ]
    if rows:
        lines += [table(("figure", "batch", "before", "after", "change"), rows, 1), ""]
    else:
        lines += ["the results have no batch size in common", ""]
    lines += textwrap.wrap(f"outputs: {outputs(found)}", WIDTH, subsequent_indent="    ")
    for name, measures in found.divergences.items() if not found.equal_outputs else ():
        text = ", ".join(
            f"{measure} {value if isinstance(value, str) else figure(value)}" for measure, value in measures.items()
        )
        lines += textwrap.wrap(f"  {name}: {text}", WIDTH, subsequent_indent="    ")
    for name, (first, second) in list(found.differing.items())[:MOST_DIFFERING]:
        text = f"differs: {name}: {'-' if first is None else first} → {'-' if second is None else second}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    if len(found.differing) > MOST_DIFFERING:
        lines.append(f"and {len(found.differing) - MOST_DIFFERING} more differ")
    return "\n".join([*lines, *_by_layer(found)])


def outputs(found: Comparison) -> str:
    """Return whether outputs are equal, or why that cannot be determined."""
    if found.constant_outputs:
        equal = "equal" if found.equal_outputs else "not equal"
        return f"{equal}, and constant, so they cannot be compared: {found.constant_outputs}"
    return "equal bit for bit" if found.equal_outputs else "not equal"


MOST_LAYERS = 8


def _by_layer(found: Comparison) -> list[str]:
    """Return the conclusion of the comparison of both traces, and the layers whose time changed most."""
    if found.by_layer is None:
        return []
    if isinstance(found.by_layer, str):
        return textwrap.wrap(f"by layer: {found.by_layer}", WIDTH, subsequent_indent="    ")
    lines = ["", *textwrap.wrap(f"by layer: {' '.join(conclusion(found.by_layer)[:2])}", WIDTH)]
    layers = sorted(found.by_layer.section("layer"), key=lambda row: -abs(row.change_ms or 0.0))
    rows = [
        (
            layer.name, figure(layer.a_ms), figure(layer.b_ms),
            "-" if layer.change_percent is None else f"{layer.change_percent:+.1f} %", layer.verdict or "-",
        )
        for layer in layers[:MOST_LAYERS]
    ]  # fmt: skip
    if rows:
        lines += ["", _of_layers(rows)]
    if len(layers) > MOST_LAYERS:
        lines.append(f"and {len(layers) - MOST_LAYERS:,} more layers, which changed by less")
    runs = [result.path / RUN for result in (found.before, found.after)]
    return [*lines, f"all of it: {shlex.join(['xsp', 'compare', *map(str, runs)])}"]


def _of_layers(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of layers: long names lose their beginning, because their end distinguishes them."""
    rows = [(row[0] if len(row[0]) <= 24 else "…" + row[0][-23:], *row[1:]) for row in rows]
    return table(("layer", "before ms", "after ms", "change", "verdict"), rows, 1)


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data."""
    return {
        "before": found.before.name,
        "after": found.after.name,
        **judgement_json(found.judgement),
        "equal_outputs": found.equal_outputs,
        "constant_outputs": found.constant_outputs,
        "outputs": outputs(found),
        "divergences": {name: dict(measures) for name, measures in found.divergences.items()},
        "accuracy": [found.before.accuracy, found.after.accuracy],
        "differing": {name: list(pair) for name, pair in found.differing.items()},
        "figures": [
            {"batch": part["batch"], "before": _figures(part), "after": _figures(other)}
            for part in found.before.parts
            for other in found.after.parts
            if other["batch"] == part["batch"]
        ],
        "by_layer": _by_layer_json(found),
    }


def _by_layer_json(found: Comparison) -> dict[str, Any] | None:
    if found.by_layer is None:
        return None
    if isinstance(found.by_layer, str):
        return {"error": found.by_layer}
    selected = [row for row in found.by_layer.rows if row.section in ("step", "layer")]
    return {"conclusion": conclusion(found.by_layer), "rows": [asdict(row) for row in selected]}


def _figures(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in (*FIGURES, "rate_low", "rate_high") if name in part}


def judgement(found: Judgement) -> str:
    """Return a verdict with the reasons for it."""
    lines = [found.verdict.value]
    for reason in found.why:
        lines += textwrap.wrap(
            f"  {reason.subject}: {reason.text}", WIDTH, subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def judgement_json(found: Judgement) -> dict[str, Any]:
    """Return a judgement as plain data."""
    reasons = [
        {"subject": reason.subject, "verdict": reason.verdict.value, "text": reason.text} for reason in found.reasons
    ]
    return {"verdict": found.verdict.value, "reasons": reasons}


# --- the leaderboard --------------------------------------------------------------------------------------------------


ORDERED = {
    "inputs_per_s": "inputs/s", "p50_ms": "p50 ms", "p90_ms": "p90 ms", "p99_ms": "p99 ms", "rate": "requests/s",
    "top1": "top-1 %",
}  # fmt: skip
"""Headings, with the unit, of the figures by which a leaderboard can be ordered."""


def ordered_by(row: Row, by: str) -> str:
    """Return the figure of a row by which a leaderboard is ordered, as a cell of the column `ORDERED[by]`."""
    if by == "rate":
        return rate_interval(row.part)
    return labelled.percent_text(row.newest.accuracy) if by == "top1" else figure(row.part[by])


def rate_interval(part: Mapping[str, Any]) -> str:
    """Return the interval of the highest rate in short form."""
    return " to ".join("?" if part[name] is None else figure(part[name]) for name in ("rate_low", "rate_high"))


def standing(rows: Sequence[Row], most: int, by: str = "inputs_per_s") -> str:
    """Return the first rows of a leaderboard; if no other column has the figure that orders it, the last one has."""
    head = ("", "model", "load", "software", "machine", "batch", "p50 ms", "p99 ms", "inputs/s")
    cells = [
        (
            str(position), str(row.newest.manifest["model"]["name"]), str(row.newest.content["kind"]), row.software,
            row.machine, str(row.part["batch"]), figure(row.part["p50_ms"]),
            figure(row.part["p99_ms"]) + mark(row.newest, row.part), figure(row.part["inputs_per_s"]),
        )
        for position, row in enumerate(rows[:most], 1)
    ]  # fmt: skip
    if ORDERED[by] not in head:
        head = (*head[:-1], ORDERED[by])
        cells = [(*line[:-1], ordered_by(row, by)) for line, row in zip(cells, rows, strict=False)]
    lines = [table(head, cells, 5)]
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more rows: --rows {len(rows)}")
    return "\n".join(lines)


def standing_json(row: Row) -> dict[str, Any]:
    """Return a row of a leaderboard as plain data."""
    return {
        "model": row.newest.manifest["model"]["name"], "identity": row.newest.identity, "result": row.newest.name,
        "results": row.count, "software": row.software, "machine": row.machine, "kind": row.newest.content["kind"],
        "batch": row.part["batch"], **_figures(row.part), "accuracy": row.newest.accuracy,
    }  # fmt: skip
