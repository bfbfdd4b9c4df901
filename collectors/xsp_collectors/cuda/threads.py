"""The threads of records, by the operating system's ids, which the other collectors use."""

from __future__ import annotations

import threading
from pathlib import Path

_LOWER_HALF = 0xFFFFFFFF


class ThreadNumbers:
    """A mapping of thread numbers in records to ids of `threading.get_native_id`."""

    def __init__(self) -> None:
        self.has_native_ids = True
        """Whether records were requested to have the operating system's ids."""

        self.unknown_count = 0
        """Number of thread numbers that could not be resolved."""

        self._ids: dict[int, int | None] = {}

    def __call__(self, number: int | None) -> int | None:
        """Return the thread's id; None for a record without a thread, or with an unknown one."""
        if number is None:
            return None
        if number not in self._ids:
            self._ids[number] = self._find(number)
        return self._ids[number]

    def _find(self, number: int) -> int | None:
        """Find a thread by its id, else by the lower half of pthread_self, which Python knows for its own threads."""
        if self.has_native_ids and Path(f"/proc/self/task/{number}").exists():
            return number
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident & _LOWER_HALF == number & _LOWER_HALF:
                return thread.native_id
        if self.has_native_ids:
            return number  # the thread has ended
        self.unknown_count += 1
        return None
