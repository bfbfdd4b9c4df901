"""The use of Kineto, torch's profiler, of which a process has one: by xsp's own collector, or by the program."""

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
"""Variable of Kineto's log level; by default Kineto logs two lines to stderr each time it is switched."""

COMPLAINT = b"ERROR: External init callback must run in same thread as registerClient"
"""Start of the line that Kineto prints at any log level if its first use is not in the thread that loaded it."""

is_xsp_recording = False
"""Whether xsp's collector has switched Kineto on."""


_is_exit_registered = False

_first_use = threading.RLock()
_was_used = False
"""Whether xsp has used Kineto before; the complaint comes only at the very first use."""


def let_children_exit() -> None:
    """Make children that are forked from now on able to exit: after a use of Kineto they hang in its destructors.

    The destructors wait for a thread that stayed with the parent. The C library's `on_exit` ends such a child with its
    own status when Python has finished, before they run.
    """
    global _is_exit_registered
    if not _is_exit_registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_end_without_destructors)
        _is_exit_registered = True


def _end_without_destructors() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):  # only in glibc
        atexit.register(library.fflush, None)
        library.on_exit(library._exit, None)


def is_enabled() -> bool:
    """Return whether Kineto is recording on this thread, for xsp or for the program."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch._C._autograd._profiler_enabled())


def is_used_by_program() -> bool:
    """Return whether the program itself has switched Kineto on."""
    return is_enabled() and not is_xsp_recording


def use_once() -> bool:
    """Use Kineto once, so that it initializes itself; return False if there is no Kineto or it is in use.

    Its first use should be in the thread that loaded it.
    """
    if "torch" not in sys.modules or is_enabled():
        return False
    with host_only():
        pass
    return True


@contextlib.contextmanager
def without_complaint() -> Iterator[None]:
    """Keep Kineto's complaint about the thread out of the program's stderr, around a possible first use.

    Threads other than the main one divert C's `stderr`, which glibc documents as assignable; other output to it in that
    time is passed on. Python's `sys.stderr` does not go through it.
    """
    global _was_used
    with _first_use:
        captured = (
            None if _was_used or threading.current_thread() is threading.main_thread() else _CapturedStderr.stderr()
        )
        try:
            yield
        finally:
            _was_used = True
            if captured is not None:
                captured.end()


class _CapturedStderr:
    """C's `stderr`, diverted into a file in memory, which stays open: another thread may be about to print there."""

    def __init__(self, library: Any, stream: ctypes.c_void_p) -> None:
        library.fdopen.restype = ctypes.c_void_p
        self._memory = os.memfd_create("xsp-stderr")
        self._library, self._stream = library, stream
        self._real, self._file = ctypes.c_void_p(stream.value), ctypes.c_void_p(library.fdopen(self._memory, b"a"))
        stream.value = self._file.value

    @classmethod
    def stderr(cls) -> _CapturedStderr | None:
        """Divert `stderr`; return None if that is not possible."""
        library = ctypes.CDLL(None)
        try:
            return cls(library, ctypes.c_void_p.in_dll(library, "stderr"))
        except (ValueError, AttributeError, OSError):  # not glibc, not Linux, no descriptor left
            return None

    def end(self) -> None:
        """Restore `stderr`, and pass on all output but the complaint."""
        self._stream.value = self._real.value
        self._library.fflush(self._file)
        output = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
        other_output = b"".join(line for line in output.splitlines(keepends=True) if not line.startswith(COMPLAINT))
        self._library.fwrite(other_output, ctypes.c_size_t(1), ctypes.c_size_t(len(other_output)), self._real)
        self._library.fflush(self._real)


@contextlib.contextmanager
def host_only() -> Iterator[None]:
    """Record the host with Kineto, without its log output; do nothing without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    let_children_exit()
    level = os.environ.get(LOG_LEVEL)
    os.environ.setdefault(LOG_LEVEL, "99")
    try:
        with without_complaint(), torch.autograd.profiler.profile(use_kineto=True):
            yield
    finally:
        if level is None:
            os.environ.pop(LOG_LEVEL, None)
