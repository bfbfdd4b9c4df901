"""Windows of time in which the collectors that record the whole process are on, and the calls in them.

Operators, primitives and device work are recorded for all threads at once, or for none. So concurrent calls share a
window: it opens with the first call, admits more calls for a short time, and closes when the last of them ends. The
rows are then assigned to the calls by thread and time. A call that begins when the window admits no more calls, or
while its rows are being read, gets its layers only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from xsp import clock
from xsp.collector import Collector
from xsp.instrumentation.sampling import SampledCall
from xsp.record.collecting import Collecting
from xsp.schema import Level

OPEN_NS = 250_000_000
"""Nanoseconds in which a window admits calls: an open window slows the whole process, and its rows accumulate."""

MOST_CALLS = 32
OPEN_WAIT_S = 0.05
"""Seconds that a call waits for a window that another call is opening."""

CHANGE_WAIT_S = 60.0
"""Seconds that a change of the collectors waits for running calls."""

BUSY = "operators: the collectors were busy with earlier calls"
_ONE_THREAD = "operators: this version of torch records those of one thread at a time"


class CallWindow:
    """A window, with the calls in it."""

    __slots__ = (
        "active",
        "anchor",
        "calls",
        "end",
        "is_closed",
        "is_read",
        "opened_ns",
        "ready",
        "running_calls",
        "start",
    )
    anchor: clock.Anchor
    end: int

    def __init__(self, call: SampledCall) -> None:
        """Start with one call."""
        self.calls = [call]
        self.running_calls = 1
        self.active: list[Collector] = []
        self.start = 0
        self.opened_ns = clock.monotonic_ns()
        self.is_closed = self.is_read = False
        self.ready = threading.Event()


class Windows:
    """The windows of a process, of which one at most is open."""

    def __init__(
        self, collecting: Collecting, rung: Callable[[], Level], read_window: Callable[[CallWindow], None]
    ) -> None:
        """Set up the state of one process.

        Args:
            collecting: the collectors.
            rung: returns the deepest level to record.
            read_window: reads the rows of an ended window, unless they were read already.
        """
        self._collecting, self._rung, self._read_window = collecting, rung, read_window
        self._current: CallWindow | None = None
        self._last_window: CallWindow | None = None
        self._lock = threading.Lock()
        self._is_blocked = False

    @property
    def is_open(self) -> bool:
        """Whether the collectors that record the whole process are on."""
        return self._current is not None

    def join(self, call: SampledCall) -> str | None:
        """Add a call that is about to begin to a window; return why it cannot join, or None."""
        with self._lock:
            window = self._current
            is_first = window is None
            if self._is_blocked:
                return BUSY
            if window is None:
                window = self._current = CallWindow(call)
            elif reason := self._refusal(window):
                return reason
            else:
                window.calls.append(call)
                window.running_calls += 1
        call.window = window
        if is_first:
            try:
                if self._last_window is not None:
                    self._read_window(self._last_window)  # collectors must be read before they are started again
                window.anchor = clock.anchor()
                window.active = self._collecting.start(self._rung(), describe=False, by_thread=False)
                window.start = window.opened_ns = clock.monotonic_ns()
            finally:
                window.ready.set()
        elif not window.ready.wait(OPEN_WAIT_S) or not window.start:
            with self._lock:
                window.calls.remove(call)
                window.running_calls -= 1
                # the call that opened the window may have left it already
                is_last = not window.running_calls and not window.is_closed
                window.is_closed = window.is_closed or is_last
            call.window = None
            if is_last:
                self._close(window)
                self._read_window(window)
            return BUSY
        call.anchor = window.anchor
        return None

    def leave(self, call: SampledCall) -> CallWindow | None:
        """Remove a call that has ended; return the window if it was its last call."""
        window = call.window
        if window is None:
            return None
        with self._lock:
            window.running_calls -= 1
            if window.running_calls:
                return None
            window.is_closed = True
        self._close(window)
        return window

    def _close(self, window: CallWindow) -> None:
        """Switch off the collectors of a window whose calls have all ended."""
        try:
            self._collecting.settle(self._collecting.collectors)
            self._collecting.stop(window.active)
        finally:
            window.end = clock.monotonic_ns()
            with self._lock:
                self._current, self._last_window = None, window

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Keep windows from opening; waits up to `CHANGE_WAIT_S` for the open one to close."""
        deadline = time.monotonic() + CHANGE_WAIT_S
        with self._lock:
            self._is_blocked = True
        try:
            while self._current is not None and time.monotonic() < deadline:
                time.sleep(0.001)
            yield
        finally:
            with self._lock:
                self._is_blocked = False

    def _refusal(self, window: CallWindow) -> str | None:
        if any(collector.on_one_thread for collector in self._collecting.collectors):
            return _ONE_THREAD
        is_admitting = clock.monotonic_ns() - window.opened_ns < OPEN_NS and len(window.calls) < MOST_CALLS
        return None if is_admitting and not window.is_closed else BUSY
