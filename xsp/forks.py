"""What is done in a forked child, so that a process's threads, pipes and locks stay with the process."""

from __future__ import annotations

import os
from collections.abc import Callable

_known: set[Callable[[], None]] = set()


def in_children(call: Callable[[], None]) -> None:
    """Have a function called in each child that is forked from now on. Said again, it changes nothing.

    Python has no way to take such a function back: it must look for itself whether there is anything to do.
    """
    if call not in _known and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
        _known.add(call)
