"""Child processes that xsp starts and waits for, also after a signal, and the message when xsp is interrupted."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from xsp import rundir
from xsp.record.output import display_path
from xsp.record.terminal import say


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command to its end, pass on the signals that are meant for it, and return its exit code.

    If a signal ends it, the code is that of a shell, 128 and the signal's number.

    Raises:
        KeyboardInterrupt: xsp was interrupted; it is raised after the command has ended.
    """
    process = subprocess.Popen(command, env=environment)
    with _forwarding(signal.SIGTERM, process):
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            if not _is_from_terminal():  # the terminal signals all processes of its group
                process.send_signal(signal.SIGINT)
            while process.returncode is None:
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
            raise


def _is_from_terminal() -> bool:
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _forwarding(number: signal.Signals, process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(_number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    previous = signal.signal(number, forward)
    try:
        yield
    finally:
        signal.signal(number, previous)


@contextlib.contextmanager
def report_run_on_interrupt(run: Path | None = None, *, shows_traceback: bool = False) -> Iterator[list[Path]]:
    """Print the run's directory if an interrupt ends this process. Python's exit status is unchanged.

    Args:
        run: the directory; a path that is added to the yielded list replaces it.
        shows_traceback: whether Python prints the interrupt's traceback first, because it is the user program's.
    """
    directories = [run] if run is not None else []
    try:
        yield directories
    except KeyboardInterrupt:
        previous = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if shows_traceback or not issubclass(kind, KeyboardInterrupt):
                previous(kind, error, trace)
            say(_interrupt_message(directories[-1]))

        if directories:
            sys.excepthook = show
        raise


def _interrupt_message(run: Path) -> str:
    try:
        has_steps = any(run.glob(f"**/{rundir.STEPS}/[0-9]*.parquet"))
    except OSError:
        has_steps = False
    if not has_steps:
        return f"interrupted before the first step was stored: there is nothing in {display_path(run)} to show"
    return f"interrupted; what was recorded is in {display_path(run)}: `xsp report {shlex.quote(display_path(run))}`"
