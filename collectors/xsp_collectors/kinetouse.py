"""Who is using Kineto, torch's profiler, of which there is one in a process: xsp's own collector, or the program."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

LOG_LEVEL = "KINETO_LOG_LEVEL"
"""It logs two lines to stderr each time it is switched, unless this says otherwise."""

COMPLAINT = b"ERROR: External init callback must run in same thread as registerClient"
"""Begins the line that it prints, whatever its log level, where its first use is not in the thread that loaded it."""

ours = False
"""Whether xsp's collector has it on."""


_lets_children_end = False

_first_use = threading.RLock()
_was_used = False
"""Whether it was used already, by xsp; the complaint comes at the first use of all."""


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
def without_complaint() -> Iterator[None]:
    """Keep its complaint about the thread out of the program's stderr, where it may be used for the first time.

    Threads other than the main one divert C's `stderr`, which glibc documents as assignable; what else is printed
    there meanwhile is passed on. Python's `sys.stderr` does not go through it.
    """
    global _was_used
    with _first_use:
        diverted = None if _was_used or threading.current_thread() is threading.main_thread() else _Diverted.stderr()
        try:
            yield
        finally:
            _was_used = True
            if diverted is not None:
                diverted.end()


class _Diverted:
    """C's `stderr`, diverted into a file in memory, which stays open: another thread may be about to print there."""

    def __init__(self, library: Any, stream: ctypes.c_void_p) -> None:
        library.fdopen.restype = ctypes.c_void_p
        self._memory = os.memfd_create("xsp-stderr")
        self._library, self._stream = library, stream
        self._real, self._file = ctypes.c_void_p(stream.value), ctypes.c_void_p(library.fdopen(self._memory, b"a"))
        stream.value = self._file.value

    @classmethod
    def stderr(cls) -> _Diverted | None:
        """Divert it; None where that is not possible."""
        library = ctypes.CDLL(None)
        try:
            return cls(library, ctypes.c_void_p.in_dll(library, "stderr"))
        except (ValueError, AttributeError, OSError):  # not glibc, not Linux, no descriptor left
            return None

    def end(self) -> None:
        """Put it back, and pass on what is not the complaint."""
        self._stream.value = self._real.value
        self._library.fflush(self._file)
        printed = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
        kept = b"".join(line for line in printed.splitlines(keepends=True) if not line.startswith(COMPLAINT))
        self._library.fwrite(kept, ctypes.c_size_t(1), ctypes.c_size_t(len(kept)), self._real)
        self._library.fflush(self._real)


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
        with without_complaint(), torch.autograd.profiler.profile(use_kineto=True):
            yield
    finally:
        if level is None:
            os.environ.pop(LOG_LEVEL, None)
