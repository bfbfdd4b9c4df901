"""Who is using Kineto, torch's profiler, of which there is one in a process: xsp's own collector, or the program."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

LOG_LEVEL = "KINETO_LOG_LEVEL"
"""It logs two lines to stderr each time it is switched, unless this says otherwise."""

ours = False
"""Whether xsp's collector has it on."""


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
    level = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "99")
    try:
        with torch.autograd.profiler.profile(use_kineto=True):
            yield
    finally:
        if level is None:
            os.environ.pop(LOG_LEVEL, None)
