"""Processes: those that xsp starts beside the program, and the children that the program forks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_known: set[Callable[[], None]] = set()


def in_children(call: Callable[[], None]) -> None:
    """Have a function called in each child that is forked from now on. Said again, it changes nothing.

    Python has no way to take such a function back: it must look for itself whether there is anything to do.
    """
    if call not in _known and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
        _known.add(call)


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends, however that ends; where the system can (Linux).

    Args:
        parent: number of the process that started this one; if it has ended meanwhile, this one ends at once.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, str]:
    """Return a copy of the environment, for a process that is started while other threads of the program run.

    Without one, the kernel reads the C library's own array while it starts the process. A thread that sets a variable
    may move that array meanwhile, and the start fails with "Bad address".
    """
    names = list(os.environ)  # at once; a thread may take a variable away before its value is read
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def start_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the program's interpreter with code of xsp's, in a session of its own, and return the process.

    A debugger of the program does not follow: debugpy puts itself into each Python that a program starts, where it
    waits for an editor, and the program would wait with it.

    Args:
        code: what to run; `sys.argv[1]` is the folder that the package `xsp` lies in.
        arguments: what follows in `sys.argv`.
        options: for `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    options.setdefault("env", environment())
    debugger = sys.modules.get("_pydev_bundle.pydev_monkey")
    unfollowed: Callable[[], contextlib.AbstractContextManager[object]]
    unfollowed = getattr(debugger, "skip_subprocess_arg_patch", contextlib.nullcontext)
    with unfollowed():
        return subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1]), *arguments],
            stdout=subprocess.DEVNULL,
            cwd="/",  # the program's own directory may hold a file called duckdb.py
            start_new_session=True,  # an interrupt in the terminal is for the program
            **options,
        )


def calling(module: str, function: str) -> str:
    """Return code for `start_python` that calls a function of xsp's with the arguments, which are whole numbers."""
    return (
        f"import sys; sys.path.insert(0, sys.argv[1]); "
        f"from {module} import {function}; {function}(*map(int, sys.argv[2:]))"
    )


def ending(code: int) -> str:
    """Return how a process ended, by its return code as `subprocess` counts it: `exit code 3`, or the signal's name."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


class Asked:
    """A Python process that is asked in lines of JSON, and answers in lines over a pipe of its own."""

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        """Start it.

        Args:
            code: as for `start_python`; it reads stdin, and writes to the descriptor whose number is its last argument.
            arguments: what comes before that number.
            options: for `subprocess.Popen`.

        Raises:
            OSError: it cannot be started.
        """
        self._answers, theirs = os.pipe()
        self._read = b""
        try:
            self._process = start_python(
                code,
                *arguments,
                str(theirs),
                stdin=subprocess.PIPE,
                pass_fds=(theirs, *options.pop("pass_fds", ())),
                **{"stderr": subprocess.DEVNULL, **options},
            )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ask(self, question: Any) -> None:
        """Send one line; a process that has ended does not read it, and `answer` tells."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, until: float) -> bytes:
        """Return the next line; nothing if the process ended, or the time is over.

        Args:
            until: as `time.monotonic` counts.
        """
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self._answers, 1 << 16) if ready else b""
            if not read:
                return b""
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        return line

    def has_ended(self) -> bool:
        """Return whether it ended by itself."""
        return self._process.poll() is not None

    def end(self, patience_s: float = 0.0) -> int:
        """End it, and return the exit code that it ended with before, or that of being killed; also when said again.

        Args:
            patience_s: how long one that has stopped to answer may take to end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        code = self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        return code
