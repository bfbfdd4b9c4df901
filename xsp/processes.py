"""Processes and threads that xsp starts beside the program, and children that the program forks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threading import Thread

_fork_callbacks: set[Callable[[], None]] = set()


def call_in_children(call: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
    """Register a function to be called in each child that is forked from now on; repeating it changes nothing.

    Python cannot unregister such a function: it must itself check whether there is anything to do.

    Args:
        call: is called in the child.
        before: is called in this process before each fork.
    """
    if call not in _fork_callbacks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call, before=before)
        _fork_callbacks.add(call)


OWN_THREADS: set[int] = set()
"""Threads of xsp that run in this process, by `threading.get_ident`: none of them runs a part of the program."""


def start_thread(work: Callable[[], object], name: str) -> Thread:
    """Start a thread of xsp, which does not keep the program from ending, and return it."""
    from threading import Event, Thread, get_ident  # not loaded by programs that only import xsp

    is_known = Event()

    def run() -> None:
        OWN_THREADS.add(get_ident())
        is_known.set()
        try:
            work()
        finally:
            OWN_THREADS.discard(get_ident())

    call_in_children(OWN_THREADS.clear)
    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    is_known.wait()
    return thread


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends, for whatever reason; only Linux can do this.

    Args:
        parent: id of the process that started this one; if it has ended already, this process exits at once.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def start_ns() -> int:
    """Return when this process started, as a reading of the monotonic clock (`xsp.clock.monotonic_ns`).

    Linux reports it with a resolution of 10 ms. Where the system does not report it, the result is the current time.
    """
    now_ns = time.perf_counter_ns()
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return now_ns - max(0, age_ns)
    return now_ns


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def system_text(path: str | Path) -> str:
    """Return the current content of a file of the system, such as one in /proc; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def free_memory_bytes() -> int | None:
    """Return the bytes of memory that are available without swapping; None if the system does not report them."""
    lines = system_text("/proc/meminfo").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def total_memory_bytes() -> int | None:
    """Return the bytes of memory of the machine; None if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def environment() -> dict[str, str]:
    """Return a copy of the environment, for a process that is started while other threads of the program run.

    Without a copy, the kernel reads the C library's own array while it starts the process. A thread that sets a
    variable may move that array meanwhile, and the start fails with "Bad address".
    """
    names = list(os.environ)  # all names first: a thread may remove a variable before its value is read
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def start_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the program's interpreter with code of xsp in a new session, and return the process.

    A debugger of the program does not follow: debugpy inserts itself into each Python that a program starts and waits
    there for an editor, and the program would wait too.

    Args:
        code: the code to run; `sys.argv[1]` is the folder that contains the package `xsp`.
        arguments: the arguments after it in `sys.argv`.
        options: options of `subprocess.Popen`.

    Raises:
        OSError: the process cannot be started.
    """
    options.setdefault("env", environment())
    debugger = sys.modules.get("_pydev_bundle.pydev_monkey")
    without_debugger: Callable[[], contextlib.AbstractContextManager[object]]
    without_debugger = getattr(debugger, "skip_subprocess_arg_patch", contextlib.nullcontext)
    with without_debugger():
        return subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1]), *arguments],
            stdout=subprocess.DEVNULL,
            cwd="/",  # the program's own directory may hold a file called duckdb.py
            start_new_session=True,  # an interrupt in the terminal is for the program
            **options,
        )


def call_code(module: str, function: str) -> str:
    """Return code for `start_python` that calls a function of xsp with the arguments, which are integers."""
    return (
        f"import sys; sys.path.insert(0, sys.argv[1]); "
        f"from {module} import {function}; {function}(*map(int, sys.argv[2:]))"
    )


def exit_description(code: int) -> str:
    """Return how a process ended, given its return code from `subprocess`: `exit code 3`, or the name of the signal."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised an error, which may interrupt any line of the main thread.

    If it interrupted xsp, it is meant for the program all the same: `TimeoutError` of an alarm, for instance.
    """
    handlers, trace = set(_handlers()), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> Iterator[CodeType]:
    """Yield the code of the signal handlers that are installed now."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if not callable(handler):  # the default action, or a handler in C
            continue
        for function in (handler, type(handler).__call__):
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            if isinstance(code, CodeType):
                yield code


_STDIN = 0


class Questions:
    """The questions that a process gets from the `WorkerProcess` that started it: iterate over them, and answer.

    They come in on stdin, which is empty from then on: code of a user that this process runs may read it.
    """

    def __init__(self, answers: int) -> None:
        """Take over stdin, and the descriptor for answers; both are closed at the end of the context."""
        self._stream = os.fdopen(answers, "wb")
        self._questions = os.fdopen(os.dup(_STDIN), encoding="utf-8")
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, _STDIN)
        os.close(empty)

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self._questions)

    def answer(self, content: Any) -> None:
        """Write one line of JSON at once."""
        self._stream.write(json.dumps(content).encode() + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Close both: the other side learns that there are no further answers."""
        self._stream.close()
        self._questions.close()


class WorkerProcess:
    """A Python process that reads questions as lines of JSON, and writes answers as lines to a separate pipe.

    Its own side is `Questions`.
    """

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        """Start the process.

        Args:
            code: as for `start_python`; it reads stdin, and writes to the descriptor in its last argument.
            arguments: the arguments before the descriptor.
            options: options of `subprocess.Popen`.

        Raises:
            OSError: the process cannot be started.
        """
        self._answers, child_end = os.pipe()
        self._buffer = bytearray()
        self._searched = 0  # bytes of it that hold no end of a line
        try:
            self._process = start_python(
                code,
                *arguments,
                str(child_end),
                stdin=subprocess.PIPE,
                pass_fds=(child_end, *options.pop("pass_fds", ())),
                **{"stderr": subprocess.DEVNULL, **options},
            )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(child_end)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(self, question: Any) -> None:
        """Send one question; if the process has ended, this does nothing, and `answer` returns nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> bytes:
        """Return the next line; empty if the process has ended, or the deadline has passed.

        Args:
            deadline: the deadline, a time of `time.monotonic`.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            if not chunk:
                return b""
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def has_ended(self) -> bool:
        """Return whether the process has ended on its own."""
        return self._process.poll() is not None

    def end(self, patience_s: float = 0.0) -> int:
        """End the process, and return its own exit code, or that of being killed; repeated calls return it again.

        Args:
            patience_s: seconds that a process that no longer answers may take to end on its own.
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
