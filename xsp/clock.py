"""One clock for all spans: nanoseconds since the epoch.

Durations are measured with `time.perf_counter_ns`, which neither an administrator nor an NTP step changes. To convert
them to the epoch, both clocks are read together at the beginning of each step; of several readings the one with
the narrowest bracket is used, and half that bracket is its error. If the system clock is set during a recorded
run, the run keeps the epoch of its beginning, see `SteadyClock`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from xsp.schema import Span

monotonic_ns = time.perf_counter_ns


MIN_JUMP_NS = 1_000_000_000
"""Nanoseconds: a larger move of the epoch clock against the monotonic one between two readings means it was set."""

MAX_DRIFT = 1e-3
"""Largest drift and slew of a clock, as a share of the time between two readings: twice the limit of NTP."""


class Anchor(NamedTuple):
    """The offset from monotonic time to time on the epoch, and its error."""

    offset_ns: int
    error_ns: int
    set_ns: int = 0
    """Nanoseconds by which the epoch clock was set since the run began; the offset does not contain them."""


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


class SteadyClock:
    """An epoch clock that ignores changes of the system clock during a run, by hand or by NTP.

    So the steps of a run stay in order, and the distance between two steps is the time that passed.
    """

    def __init__(self) -> None:
        """Read both clocks."""
        self.set_ns = 0
        self._offset_ns, self._reading_ns = anchor().offset_ns, monotonic_ns()

    def anchor(self) -> Anchor:
        """Return the offset as the module's `anchor` does, without the amounts by which the clock was set."""
        reading, now_ns = anchor(), monotonic_ns()
        jump_ns = reading.offset_ns - self._offset_ns
        if abs(jump_ns) > MIN_JUMP_NS + MAX_DRIFT * (now_ns - self._reading_ns):
            self.set_ns += jump_ns
        self._offset_ns, self._reading_ns = reading.offset_ns, now_ns
        return Anchor(reading.offset_ns - self.set_ns, reading.error_ns, self.set_ns)

    def now_ns(self) -> int:
        """Return the time since the epoch, in nanoseconds."""
        return monotonic_ns() + self.anchor().offset_ns


def on_epoch(span: Span, anchor: Anchor) -> Span:
    """Return a span with its monotonic times converted to times on the epoch."""
    return span._replace(start_ns=span.start_ns + anchor.offset_ns)


def covered_ns(intervals: Iterable[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """Return how long of a time is covered by intervals, which may overlap."""
    total_ns = 0
    for first_ns, last_ns in sorted(intervals):
        first_ns, last_ns = max(first_ns, start_ns), min(last_ns, end_ns)
        if last_ns > first_ns:
            total_ns += last_ns - first_ns
            start_ns = last_ns
    return total_ns
