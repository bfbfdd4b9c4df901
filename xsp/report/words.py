"""What the page says instead of letters: how deep a step was recorded."""

from __future__ import annotations

from collections.abc import Iterable

RUNGS = {
    "bare": "nothing", "M": "steps and calls", "M/L": "layers",
    "M/L/op": "operators", "M/L/op/library": "calls of libraries",
    "M/L/G": "kernels",
}  # fmt: skip
"""What a rung (see `xsp.recording.schedule.rung_name`) records beside what the one before it does."""


def deepest(rung: str) -> str:
    """Return what a rung records that those before it do not; the name itself where it is of a third party."""
    return RUNGS.get(rung, rung)


def explained(rungs: Iterable[str]) -> str:
    """Return rungs with what they record: `steps and calls (M), layers too (M/L)`."""
    return ", ".join(f"{deepest(rung)}{' too' if place else ''} ({rung})" for place, rung in enumerate(rungs))
