"""What the page says instead of letters: how deep a step was recorded."""

from __future__ import annotations

from collections.abc import Iterable

from xsp.recording.schedule import depth


def explained(rungs: Iterable[str]) -> str:
    """Return rungs with what they record: `steps and calls (M), layers too (M/L)`."""
    return ", ".join(f"{depth(rung)}{' too' if place else ''} ({rung})" for place, rung in enumerate(rungs))
