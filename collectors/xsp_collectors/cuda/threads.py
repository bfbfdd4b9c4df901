"""Which thread a record means: as the other collectors number threads, by the operating system."""

from __future__ import annotations

import threading
from pathlib import Path

_LOWER_HALF = 0xFFFFFFFF


class ThreadNumbers:
    """From the numbers that records carry to those of `threading.get_native_id`."""

    def __init__(self) -> None:
        self.are_native = True
        """Whether records were asked to carry the operating system's numbers."""

        self.unknown = 0
        """Numbers whose thread could not be told."""

        self._known: dict[int, int | None] = {}

    def __call__(self, number: int | None) -> int | None:
        """Return the thread's number, or None for a record that names none, or one that is not known."""
        if number is None:
            return None
        if number not in self._known:
            self._known[number] = self._find(number)
        return self._known[number]

    def _find(self, number: int) -> int | None:
        """Tell a thread by its number, else by the lower half of pthread_self, which Python knows of its own."""
        if self.are_native and Path(f"/proc/self/task/{number}").exists():
            return number
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident & _LOWER_HALF == number & _LOWER_HALF:
                return thread.native_id
        if self.are_native:
            return number  # it has ended
        self.unknown += 1
        return None
