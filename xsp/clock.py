"""One clock for all spans: nanoseconds since the epoch.

Durations are taken with `time.perf_counter_ns`, which no administrator and no NTP step moves. To place them
on the epoch the two clocks are read together at the beginning of each step; of several readings the one with
the narrowest bracket counts, and half that bracket is its error.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from xsp.schema import Span

monotonic_ns = time.perf_counter_ns


class Anchor(NamedTuple):
    """What to add to a monotonic time to place it on the epoch, and how wrong that can be."""

    offset_ns: int
    error_ns: int


def anchor(readings: int = 5) -> Anchor:
    """Read both clocks together and return their offset.

    Returns:
        The offset of the narrowest of `readings` brackets; the error is half that bracket, rounded up.
    """
    best: Anchor | None = None
    for _ in range(readings):
        before = time.perf_counter_ns()
        epoch = time.time_ns()
        after = time.perf_counter_ns()
        error = (after - before + 1) // 2
        if best is None or error < best.error_ns:
            best = Anchor(epoch - (before + after) // 2, error)
    assert best is not None
    return best


def on_epoch(span: Span, anchor: Anchor) -> Span:
    """Return a span whose times are monotonic with its times on the epoch."""
    return span._replace(start_ns=span.start_ns + anchor.offset_ns)
