"""How long a thread sleeps: it waits for input, a file, a lock or another thread, and needs no processor."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from xsp import clock, processes


class Awake(NamedTuple):
    """The times of a thread up to a moment, in nanoseconds."""

    now_ns: int
    cpu_ns: int
    """Time in which it ran."""

    queued_ns: int
    """Time in which it could have run, and had no processor."""

    def asleep_ns(self, since: Awake) -> int:
        """Return how long the thread slept since an earlier moment."""
        ready_ns = self.cpu_ns - since.cpu_ns + self.queued_ns - since.queued_ns
        return max(0, self.now_ns - since.now_ns - ready_ns)


def awake() -> Awake | None:
    """Return the times of this thread; None if the system does not say how long it waited for a processor."""
    try:
        queued_ns = int(processes.system_text(f"/proc/self/task/{threading.get_native_id()}/schedstat").split()[1])
    except (ValueError, IndexError):
        return None
    return Awake(clock.monotonic_ns(), time.thread_time_ns(), queued_ns)
