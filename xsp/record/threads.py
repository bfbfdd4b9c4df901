"""Steps on several threads: whether they overlap, and the time between the steps of a thread.

While steps of different threads overlap, each thread has iterations of its own: from the end of its last step to the
end of its next one. The time in between in which other threads run steps is no gap of the program, and is measured
separately. If threads take turns without overlap, as those of a pool that gets one request at a time, they count as
one: the time before a step is that since the end of the last step on any thread.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from xsp.record.loop import UNKNOWN

LATEST = 64
"""Number of steps without an overlap, or on one thread, after which the program counts as having one thread."""

MOST_THREADS = 1024
"""Most threads whose last steps are remembered."""


class Gap(NamedTuple):
    """The time between two steps of a thread, in nanoseconds."""

    before_ns: int
    """Time in which no thread ran a step; `UNKNOWN` before the first step of all."""

    beside_ns: int
    """Time in which other threads ran steps."""


class Threads:
    """The open steps by thread, and how long any step was open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._ends: dict[int, tuple[int, int]] = {}
        """When each thread continued after its last step, and how long any step had been open by then."""

        self._last_end_ns = UNKNOWN
        self._busy_ns = self._busy_since_ns = 0
        self._last_thread: int | None = None
        self._alternating = self._overlapping = 0
        self._waits: dict[int, int] = {}

    @property
    def is_one(self) -> bool:
        """Whether the latest steps all ran on one thread."""
        return not self._alternating

    @property
    def overlap(self) -> bool:
        """Whether any of the latest steps overlapped."""
        return self._overlapping > 0

    def is_open(self, thread: int) -> bool:
        """Return whether a step is open on a thread, given by its native id."""
        return thread in self._open

    def begin(self, thread: int, now_ns: int) -> Gap | None:
        """Note that a step begins, and return the time since the thread's last one; None if steps do not overlap."""
        with self._lock:
            has_others = bool(self._open - {thread})
            is_other = self._last_thread not in (None, thread)
            self._alternating = LATEST if is_other else max(0, self._alternating - 1)
            self._overlapping = LATEST if has_others else max(0, self._overlapping - 1)
            self._last_thread = thread
            gap = self._gap(thread, now_ns, has_others) if self._overlapping else None
            if not self._open:
                self._busy_since_ns = now_ns
            self._open.add(thread)
            return gap

    def _gap(self, thread: int, now_ns: int, has_others: bool) -> Gap:
        if thread in self._ends:
            since_ns, busy_ns = self._ends[thread]
            beside_ns = self._busy_until(now_ns) - busy_ns
            return Gap(max(0, now_ns - since_ns - beside_ns), beside_ns)
        if has_others:
            return Gap(0, 0)
        return Gap(now_ns - self._last_end_ns if self._last_end_ns != UNKNOWN else UNKNOWN, 0)

    def _busy_until(self, now_ns: int) -> int:
        return self._busy_ns + (now_ns - self._busy_since_ns if self._open else 0)

    def end(self, thread: int, now_ns: int) -> None:
        """Note that the thread's step ended, or was abandoned."""
        with self._lock:
            if thread in self._open:
                busy_ns = self._busy_until(now_ns)
                self._open.discard(thread)
                self._busy_ns = busy_ns
                self._busy_since_ns = now_ns

    def go_on(self, thread: int, now_ns: int) -> None:
        """Note that the program continues after the thread's step."""
        with self._lock:
            if len(self._ends) >= MOST_THREADS:
                self._ends.clear()
            self._ends[thread] = now_ns, self._busy_until(now_ns)
            self._last_end_ns = now_ns

    def wait(self, thread: int, ns: int) -> None:
        """Add a wait for data of a thread that has no turn."""
        if thread in self._ends or thread in self._open:
            self._waits[thread] = self._waits.get(thread, 0) + ns

    def take_wait(self, thread: int) -> int:
        """Return the thread's wait for data since the last call, in nanoseconds."""
        return self._waits.pop(thread, 0)
