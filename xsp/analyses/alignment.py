"""Clocks of several ranks brought together, by what ends on all of them at once.

A collective that all ranks take part in (all-reduce, all-gather …) cannot end on one rank before the last one
has come, and ends on all of them within some microseconds. So the difference between two clocks is the median
difference between the ends of the collectives that both ranks saw; half the width of the middle 90 % of these
differences is how uncertain it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Difference(NamedTuple):
    """How far the clock of one rank is ahead of another's, in nanoseconds."""

    reference: int
    rank: int
    ahead_ns: float
    uncertainty_ns: float


class Clock(NamedTuple):
    """What to take from the times of a rank to place them on the clock of the lowest rank, in nanoseconds."""

    offset_ns: float
    uncertainty_ns: float


def align(ranks: Iterable[int], differences: Iterable[Difference]) -> dict[int, Clock]:
    """Return the clock of each rank against the lowest one's, over the most certain differences between them.

    Args:
        ranks: all of them.
        differences: between pairs; a rank that is compared with no other in reach of the lowest one stays out.

    Returns:
        Rank → clock. Uncertainties add up along the way from the lowest rank.
    """
    beside: dict[int, list[Difference]] = {rank: [] for rank in ranks}
    for each in differences:
        beside[each.reference].append(each)
        beside[each.rank].append(Difference(each.rank, each.reference, -each.ahead_ns, each.uncertainty_ns))
    found: dict[int, Clock] = {}
    reached = [(0.0, min(beside), 0.0)] if beside else []
    while reached:
        uncertainty, rank, offset = heapq.heappop(reached)
        if rank in found:
            continue
        found[rank] = Clock(offset, uncertainty)
        for each in beside[rank]:
            if each.rank not in found:
                heapq.heappush(reached, (uncertainty + each.uncertainty_ns, each.rank, offset + each.ahead_ns))
    return found
