"""Processes: those that xsp starts beside the program, and the children that the program forks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
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
