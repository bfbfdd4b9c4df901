"""What several pieces of advice gain together: a call that several of them change is not counted twice.

What a call takes when two changes meet was not measured. It is taken to gain what the better of them gains by itself,
and to lose what any of them makes it lose, so that the sum is rather too small than too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xsp.advise.advice import Advice

LEAST_SHARE = 0.05
"""Of what a piece gains by itself: one that adds less to those before it is no part of the plan."""


@dataclass(frozen=True)
class Part:
    """A piece in its turn."""

    piece: Advice
    adds_ms: float
    """What it gains beyond those before it."""


@dataclass(frozen=True)
class Together:
    """Pieces in the order in which they are worth doing, and what they gain together."""

    parts: tuple[Part, ...]
    unknown: int
    """Pieces that are not in it, as they do not tell which calls they change."""

    @property
    def ms(self) -> float:
        """What all of them gain, in milliseconds of a step."""
        return math.fsum(part.adds_ms for part in self.parts)


def plan(advice: Sequence[Advice]) -> Together | None:
    """Return the order in which pieces are worth doing; None of fewer than two that tell which calls they change."""
    known = [each for each in advice if each.by_call]
    done: list[Advice] = []
    parts: list[Part] = []
    left = list(known)
    reached = 0.0
    while left:
        best = max(left, key=lambda each: _gain([*done, each]))
        adds = _gain([*done, best]) - reached
        left.remove(best)
        if adds > LEAST_SHARE * best.gain.value:
            done.append(best)
            reached += adds
            parts.append(Part(best, adds))
    return Together(tuple(parts), len(advice) - len(known)) if len(known) > 1 and parts else None


def _gain(done: Sequence[Advice]) -> float:
    """Return what pieces gain together, in milliseconds of a step."""
    calls = {call for piece in done for call in piece.by_call}
    total = -math.fsum(piece.once_ms for piece in done)
    for call in calls:
        gains = [piece.by_call.get(call, 0.0) for piece in done]
        total += max(0.0, *gains) + math.fsum(min(0.0, each) for each in gains)
    return total
