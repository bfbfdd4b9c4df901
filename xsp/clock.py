"""One clock for all spans: nanoseconds since the epoch.

Durations are taken with `time.perf_counter_ns`, which no administrator and no NTP step moves. To place them
on the epoch the two clocks are read together at the beginning of each step; of several readings the one with
the narrowest bracket counts, and half that bracket is its error. A run that is recorded keeps the epoch of
its beginning where somebody sets the clock meanwhile, see `Steady`.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from xsp.schema import Span

monotonic_ns = time.perf_counter_ns


SET_NS = 1_000_000_000
"""A clock of the epoch that moves by more between two readings, against the monotonic one, was set; less is drift."""

DRIFT = 1e-3
"""As much may a clock drift, and be slewed, of the time between two readings: twice what NTP allows itself."""


class Anchor(NamedTuple):
    """What to add to a monotonic time to place it on the epoch, and how wrong that can be."""

    offset_ns: int
    error_ns: int
    set_ns: int = 0
    """By how much the clock of the epoch was set since the run began; the offset is as if it had not been."""


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


class Steady:
    """The epoch as a run's beginning knew it: a clock that is set meanwhile, by hand or by NTP, moves no time.

    So the steps of a run stay in their order, and between two of them is the time that passed.
    """

    def __init__(self) -> None:
        """Read both clocks."""
        self.set_ns = 0
        self._offset_ns, self._read_ns = anchor().offset_ns, monotonic_ns()

    def anchor(self) -> Anchor:
        """Return the offset as `anchor` of this module does, without what the clock was set by."""
        found, now_ns = anchor(), monotonic_ns()
        moved_ns = found.offset_ns - self._offset_ns
        if abs(moved_ns) > SET_NS + DRIFT * (now_ns - self._read_ns):
            self.set_ns += moved_ns
        self._offset_ns, self._read_ns = found.offset_ns, now_ns
        return Anchor(found.offset_ns - self.set_ns, found.error_ns, self.set_ns)

    def now_ns(self) -> int:
        """Return the time since the epoch."""
        return monotonic_ns() + self.anchor().offset_ns


def on_epoch(span: Span, anchor: Anchor) -> Span:
    """Return a span whose times are monotonic with its times on the epoch."""
    return span._replace(start_ns=span.start_ns + anchor.offset_ns)
