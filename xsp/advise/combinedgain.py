"""The combined gain of several pieces of advice: a call that several of them change is not counted twice.

The time of a call with two changes was not measured. The call is assumed to gain as much as the better of the changes
gains alone, and to lose what any of them costs it, so that the sum is too small rather than too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xsp.advise.advice import Advice

LEAST_SHARE = 0.05
"""Minimum share of its own gain that a piece has to add to the pieces before it to be part of the plan."""


@dataclass(frozen=True)
class Part:
    """A piece at its place in the plan."""

    piece: Advice
    added_ms: float
    """Gain in milliseconds beyond that of the pieces before it."""


@dataclass(frozen=True)
class CombinedGain:
    """Pieces in the order in which they are worth doing, and their combined gain."""

    parts: tuple[Part, ...]
    unknown_count: int
    """Number of pieces that are left out because they do not report which calls they change."""

    @property
    def ms(self) -> float:
        """Combined gain of all pieces, in milliseconds per step."""
        return math.fsum(part.added_ms for part in self.parts)


def plan(advice: Sequence[Advice]) -> CombinedGain | None:
    """Return the order in which pieces are worth doing; None if fewer than two report which calls they change."""
    candidates = [piece for piece in advice if piece.by_call]
    selected: list[Advice] = []
    parts: list[Part] = []
    remaining = list(candidates)
    total = 0.0
    while remaining:
        best = max(remaining, key=lambda piece: _gain([*selected, piece]))
        gain = _gain([*selected, best]) - total
        remaining.remove(best)
        if gain > LEAST_SHARE * best.gain.value:
            selected.append(best)
            total += gain
            parts.append(Part(best, gain))
    return CombinedGain(tuple(parts), len(advice) - len(candidates)) if len(candidates) > 1 and parts else None


def _gain(pieces: Sequence[Advice]) -> float:
    """Return the combined gain of pieces, in milliseconds per step."""
    calls = {call for piece in pieces for call in piece.by_call}
    total = -math.fsum(piece.once_ms for piece in pieces)
    for call in calls:
        gains = [piece.by_call.get(call, 0.0) for piece in pieces]
        total += max(0.0, *gains) + math.fsum(min(0.0, gain) for gain in gains)
    return total
