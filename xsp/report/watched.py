"""What `xsp watch` shows: a few lines of text on a run that goes on."""

from __future__ import annotations

from rich.text import Text

from xsp.record.progress import overhead
from xsp.report.watch import Figures
from xsp.scrub import plain


def watched(figures: Figures) -> Text:
    """Return the lines."""
    lines = [_progress(figures)]
    if figures.budget:
        lines.append(f"{overhead(figures.budget)}{_taken(figures)}")
    for rung, steps in figures.budget.get("left_out", {}).items():
        lines.append(f"  {rung} is left out: too dear{f', one step in {steps:,}' if steps else ''}")
    if figures.steps_ms:
        lines.append("the last steps, ms:")
    lines += [f"  {rung:<8} {ms:10.3f}   of {count}" for rung, (count, ms) in figures.steps_ms.items()]
    if figures.layers:
        lines.append("slowest layers, ms a step:")
    lines += [f"  {ms:10.3f} {share:5.1f} %  {plain(name)}" for name, ms, share in figures.layers]
    return Text("\n".join(lines) + "\n")


def _progress(figures: Figures) -> str:
    state = "finished" if figures.finished else "running"
    seen = f"step {figures.seen:,}, " if figures.seen is not None else ""
    return f"{plain(figures.name)}: {state}, {seen}{figures.stored:,} steps stored"


def _taken(figures: Figures) -> str:
    taken = figures.budget.get("taken", {})
    return " (" + ", ".join(f"{number:,} {name}" for name, number in taken.items()) + ")" if taken else ""
