"""Which thread a record means: as the other collectors number threads, by the operating system."""

from __future__ import annotations

import threading


class ThreadNumbers:
    """From the numbers that records carry to those of `threading.get_native_id`."""

    def __init__(self) -> None:
        self.are_native = True
        """Whether records carry the operating system's numbers already."""

        self.unknown = 0
        """Records whose thread could not be told."""

    def __call__(self, number: int | None) -> int | None:
        """Return the thread's number, or None for a record that names none, or one that is not known."""
        if number is None or self.are_native:
            return number
        # else the lower half of pthread_self, which Python knows of those threads that ran Python
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident & 0xFFFFFFFF == number & 0xFFFFFFFF:
                return thread.native_id
        self.unknown += 1
        return None
