"""Results as tables of text, 80 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xsp.evaluate.results import Result

WIDTH = 80


def listed(found: Sequence[Result]) -> str:
    """Return a row for each result and batch size."""
    head = ("result", "name", "load", "batch", "p50 ms", "p99 ms", "inputs/s")
    rows = [
        (
            each.name, str(each.content["name"]), str(each.content["kind"]), str(part["batch"]),
            figure(part["p50_ms"]), figure(part["p99_ms"]) + mark(each, part), figure(part["inputs_per_s"]),
        )
        for each in found
        for part in each.parts
    ]  # fmt: skip
    notes = []
    if any("*" in row[5] for row in rows):
        notes.append("* the load was not put as asked: stopped early, or its generator was late by over 1 %")
    if any("~" in row[5] for row in rows):
        notes.append("~ times that a simulator said")
    return "\n".join([table(head, rows, 3), *notes])


def mark(found: Result, part: Any) -> str:
    """Return the marks of a latency."""
    return ("*" if part["late"] or part["stopped"] else "") + ("~" if found.content.get("simulated") else "")


def figure(value: float | None) -> str:
    """Return a number of three digits or more; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Return columns: the first `words` to the left, numbers to the right; the second one is cut to what is left."""
    widths = [max(len(str(row[place])) for row in [head, *rows]) for place in range(len(head))]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if over > 0 and len(widths) > 1:
        widths[1] = max(8, widths[1] - over)
    lines = []
    for row in [head, *rows]:
        cells = [
            _cut(str(cell), widths[place]).ljust(widths[place]) if place < words else str(cell).rjust(widths[place])
            for place, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
