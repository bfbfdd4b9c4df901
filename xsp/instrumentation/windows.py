"""Windows of time in which the collectors that see the whole process are on, and the calls in them.

Operators, primitives and device work are recorded for all threads at once, or for none. So concurrent calls share a
window: it opens with the first call, admits further calls while it is young, and closes with the last. Afterwards the
rows are assigned to the calls by thread and time. A call that begins when the window admits no more calls, or while
its rows are being read, gets its layers only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from xsp import clock
from xsp.collector import Collector
from xsp.instrumentation.sampling import Call
from xsp.record.collecting import Collecting
from xsp.schema import Level

OPEN_NS = 250_000_000
"""Nanoseconds in which a window admits calls: an open window slows the whole process, and its rows accumulate."""

MOST_CALLS = 32
STARTING_S = 0.05
"""Seconds that a call waits for a window that another call is opening."""

CHANGING_S = 60.0
"""Seconds that a change of the collectors waits for running calls."""

BUSY = "operators: the collectors were busy with earlier calls"
_ONE_THREAD = "operators: this version of torch records those of one thread at a time"


class Window:
    """A window, with the calls in it."""

    __slots__ = ("anchor", "calls", "closed", "end", "going_on", "on", "opened", "read", "ready", "start")
    anchor: clock.Anchor
    end: int

    def __init__(self, call: Call) -> None:
        """Start with one call."""
        self.calls = [call]
        self.going_on = 1
        self.on: list[Collector] = []
        self.start = 0
        self.opened = clock.monotonic_ns()
        self.closed = self.read = False
        self.ready = threading.Event()


class Windows:
    """The windows of a process, of which one at most is open."""

    def __init__(self, collecting: Collecting, rung: Callable[[], Level], read: Callable[[Window], None]) -> None:
        """Set up the state of one process.

        Args:
            collecting: the collectors.
            rung: returns the deepest level to record.
            read: reads the rows of an ended window, unless that was done.
        """
        self._collecting, self._rung, self._read = collecting, rung, read
        self._now: Window | None = None
        self._last: Window | None = None
        self._lock = threading.Lock()
        self._held = False

    @property
    def is_open(self) -> bool:
        """Whether collectors that see the whole process are on."""
        return self._now is not None

    def join(self, call: Call) -> str | None:
        """Add a call that is about to begin to a window; return why it cannot join, or None."""
        with self._lock:
            window = self._now
            opens = window is None
            if self._held:
                return BUSY
            if window is None:
                window = self._now = Window(call)
            elif reason := self._takes_nobody(window):
                return reason
            else:
                window.calls.append(call)
                window.going_on += 1
        call.window = window
        if opens:
            self._open(window)
        elif not window.ready.wait(STARTING_S) or not window.start:
            with self._lock:
                window.calls.remove(call)
                window.going_on -= 1
                is_last = not window.going_on and not window.closed  # the call that opened the window has left it
                window.closed = window.closed or is_last
            call.window = None
            if is_last:
                self._close(window)
                self._read(window)
            return BUSY
        call.anchor = window.anchor
        return None

    def leave(self, call: Call) -> Window | None:
        """Remove a call that has ended; return the window if that ended with it."""
        window = call.window
        if window is None:
            return None
        with self._lock:
            window.going_on -= 1
            if window.going_on:
                return None
            window.closed = True
        self._close(window)
        return window

    def _close(self, window: Window) -> None:
        """Switch off the collectors of a window whose calls have all ended."""
        try:
            self._collecting.settle(self._collecting.collectors)
            self._collecting.stop(window.on)
        finally:
            window.end = clock.monotonic_ns()
            with self._lock:
                self._now, self._last = None, window

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        """Keep windows from opening; waits up to `CHANGING_S` for the open one to close."""
        end = time.monotonic() + CHANGING_S
        with self._lock:
            self._held = True
        try:
            while self._now is not None and time.monotonic() < end:
                time.sleep(0.001)
            yield
        finally:
            with self._lock:
                self._held = False

    def _takes_nobody(self, window: Window) -> str | None:
        if any(collector.on_one_thread for collector in self._collecting.collectors):
            return _ONE_THREAD
        admits = clock.monotonic_ns() - window.opened < OPEN_NS and len(window.calls) < MOST_CALLS
        return None if admits and not window.closed else BUSY

    def _open(self, window: Window) -> None:
        try:
            if self._last is not None:
                self._read(self._last)  # collectors must be read before they are started again
            window.anchor = clock.anchor()
            window.on = self._collecting.start(self._rung(), describe=False, by_thread=False)
            window.start = window.opened = clock.monotonic_ns()
        finally:
            window.ready.set()
