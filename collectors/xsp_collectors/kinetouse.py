"""Who is using Kineto, torch's profiler, of which there is one in a process: xsp's own collector, or the program."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import Any

LOG_LEVEL = "KINETO_LOG_LEVEL"
"""It logs two lines to stderr each time it is switched, unless this says otherwise."""

ours = False
"""Whether xsp's collector has it on."""


_lets_children_end = False


def let_children_end() -> None:
    """See to it that children forked from now on can end: once Kineto was used, their exit hangs in its destructors.

    Those wait for a thread that stayed with the parent. The C library's `on_exit` ends such a child with its own status
    when Python has finished, before they run.
    """
    global _lets_children_end
    if not _lets_children_end and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_end_without_destructors)
        _lets_children_end = True


def _end_without_destructors() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):  # of glibc
        atexit.register(library.fflush, None)
        library.on_exit(library._exit, None)


def enabled() -> bool:
    """Return whether Kineto is recording on this thread, whoever asked it to."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch._C._autograd._profiler_enabled())


def used_by_program() -> bool:
    """Return whether the program itself has it on."""
    return enabled() and not ours


def use_once() -> bool:
    """Let Kineto set itself up, which it does at its first use, and return whether there is one.

    It wants its first use in the thread that loaded it.
    """
    if "torch" not in sys.modules or enabled():
        return False
    with host_only():
        pass
    return True


@contextlib.contextmanager
def host_only() -> Iterator[None]:
    """Have Kineto record the host, quietly; without torch do nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    let_children_end()
    level = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "99")
    try:
        with torch.autograd.profiler.profile(use_kineto=True):
            yield
    finally:
        if level is None:
            os.environ.pop(LOG_LEVEL, None)
