"""Calls of modules as layers, whose backward pass is in the order in which it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xsp.predict.training import Layer


class Call(NamedTuple):
    """A call of a module in a recorded step."""

    name: str
    forward: float
    """Seconds that it takes itself."""

    stretches: Sequence[tuple[float, float]]
    """Of the backward pass, those that no other call interrupts, in order: the place of each in time, and seconds."""


def in_order(calls: Sequence[Call]) -> list[Layer]:
    """Return layers whose backward pass is in the order in which it was recorded.

    A call that others interrupt there (what a module does around those within it) is several layers; the one that ends
    last has its forward pass, and comes first.

    Args:
        calls: in the order of execution, of one batch.
    """
    placed: list[tuple[float, int, Layer]] = []
    place = min((at for call in calls for at, _ in call.stretches), default=0.0)
    for number in range(len(calls) - 1, -1, -1):
        call = calls[number]
        *before, last = call.stretches or [(place, 0.0)]  # without backward work it goes with the call behind it
        place = last[0]
        placed.append((-place, number, Layer(call.name, call.forward, last[1])))
        placed += [(-at, number, Layer(call.name, 0.0, took)) for at, took in before]
    return [layer for _, _, layer in sorted(placed, key=lambda each: each[:2])]
