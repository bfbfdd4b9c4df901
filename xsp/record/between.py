"""Lines of the program that run between its steps, traced after each recorded step until the next step begins.

The work of a loop between steps (checkpoints, statistics, `gc.collect()`, reading a loss) belongs to no step, and no
collector records it. So the frames that are on the stack when a recorded step ends are traced line by line
(`sys.settrace`); time in a callee counts for the calling line. Of functions of the program itself, neither of packages
nor of the standard library, the line that takes most of it is noted beside. The step after a recorded one counts as
disturbed anyway, so no figure of the loop includes the cost of tracing.

Nothing is traced if another tracer is active: a debugger, or coverage.
"""

from __future__ import annotations

import contextlib
import keyword
import linecache
import os
import re
import sys
import sysconfig
import threading
from types import CodeType, FrameType
from typing import Any

from xsp import clock

MOST_GAPS = 64
"""Most gaps between steps that are traced in a run."""

MOST_CALLS = 50_000
"""Most calls of Python functions in a traced gap; each costs some 0.2 µs."""

MOST_INNER = 5_000
"""Most events of lines inside functions that are called in a traced gap; each costs about 1 µs."""

MOST_FRAMES = 48
"""Innermost frames of a stack that are traced."""

MOST_LINES = 60
"""Number of lines that are listed: those with the most time."""

MOST_NAMES = 5
"""Most called functions that are listed for a line."""

_OWN_MODULES = ("xsp.", "xsp_collectors.")
"""Prefixes of the modules whose frames are not the program's."""

_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_LIBRARY = sysconfig.get_path("stdlib")
_CALL_NAME = re.compile(r"([^\W\d][\w.]*|\.\w+)\s*\(")

_Line = tuple[CodeType, int]


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame runs code of xsp or of its collectors, wherever they are installed."""
    return str(frame.f_globals.get("__name__")).startswith(_OWN_MODULES)


def _is_of_program(frame: FrameType) -> bool:
    """Return whether a frame runs code of the program: of no package, not of Python itself, nor of xsp."""
    path = frame.f_code.co_filename
    is_file = not path.startswith("<") or path.startswith("<ipython-input")
    return is_file and not path.startswith(_LIBRARY) and _PACKAGES.match(path) is None and not _is_own(frame)


class Between:
    """The time that each line of the program takes between its steps."""

    def __init__(self) -> None:
        self._line_times: dict[_Line, list[int]] = {}
        """For each line its nanoseconds, and the number of gaps in which it ran."""

        self._gaps = self._unknown_ns = 0
        self._ns: dict[_Line, int] = {}
        """Nanoseconds of each line in the current gap."""

        self._frames: list[FrameType] = []
        self._thread: int | None = None
        self._line: _Line | None = None
        self._since_ns = self._excluded_ns = self._calls = 0
        self._inner_times: dict[_Line, dict[_Line, int]] = {}
        """For each line the nanoseconds of lines inside the program's functions that it calls."""

        self._inner: _Line | None = None
        self._inner_frames: list[FrameType] = []
        self._inner_since_ns = self._inner_events = 0
        self._are_of_program: dict[CodeType, bool] = {}

    def begin(self) -> None:
        """Trace the frames that are on the stack from now on, except frames of xsp."""
        if self._thread is not None or self._gaps >= MOST_GAPS or sys.gettrace() is not None:
            return
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and len(self._frames) < MOST_FRAMES:
            if not _is_own(caller):
                self._frames.append(caller)
            caller = caller.f_back
        if not self._frames or any(frame.f_trace is not None for frame in self._frames):
            self._frames.clear()
            return
        innermost = self._frames[0]
        self._line, self._thread = (innermost.f_code, innermost.f_lineno), threading.get_ident()
        self._ns, self._calls, self._excluded_ns, self._inner_events = {}, 0, 0, 0
        for frame in self._frames:
            frame.f_trace = self._on_event
        self._since_ns = clock.monotonic_ns()
        sys.settrace(self._on_call)

    def end(self) -> None:
        """Stop tracing, and add up the times of this gap."""
        if self._thread is None:
            return
        now_ns = clock.monotonic_ns()
        if self._line is None:
            self._unknown_ns += now_ns - self._since_ns
        self._add_time(now_ns)
        self._stop_tracing()
        self._gaps += 1
        for line, ns in self._ns.items():
            total = self._line_times.setdefault(line, [0, 0])
            total[0] += ns
            total[1] += 1

    def forget(self) -> None:
        """Stop tracing in a forked child, which inherits the trace function in the middle of a gap."""
        if self._thread is not None:
            self._stop_tracing()

    def exclude(self, ns: int) -> None:
        """Subtract the current line's wait for data, which is counted separately."""
        if self._thread == threading.get_ident():
            self._excluded_ns += ns
            self._inner_since_ns += ns

    def _stop_tracing(self) -> None:
        if self._thread == threading.get_ident() and sys.gettrace() == self._on_call:
            sys.settrace(None)
        for frame in self._frames:
            if frame.f_trace == self._on_event:
                frame.f_trace = None
        self._leave_functions()
        self._thread = self._line = None
        self._frames.clear()

    def _leave_functions(self) -> None:
        """Trace the functions that were called no further."""
        for frame in self._inner_frames:
            if frame.f_trace == self._on_inner:
                frame.f_trace = None
        self._inner_frames.clear()
        self._inner = None

    def _add_time(self, now_ns: int) -> None:
        """Add the time since the last event to the line that ran."""
        if self._line is not None:
            ns = max(0, now_ns - self._since_ns - self._excluded_ns)
            self._ns[self._line] = self._ns.get(self._line, 0) + ns
        self._excluded_ns = 0

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count a call, trace into functions of the program; stop tracing after `MOST_CALLS` calls. Hot."""
        self._calls += 1
        if self._thread != threading.get_ident():  # the gap ended on another thread
            sys.settrace(None)
        elif self._calls > MOST_CALLS:  # the rest of the gap counts for unknown lines
            sys.settrace(None)
            now_ns = clock.monotonic_ns()
            self._add_time(now_ns)
            self._leave_functions()
            self._line, self._since_ns = None, now_ns
        elif self._line is not None and self._inner_events < MOST_INNER:
            is_of_program = self._are_of_program.get(frame.f_code)
            if is_of_program is None:
                is_of_program = self._are_of_program[frame.f_code] = _is_of_program(frame)
            if is_of_program:
                self._add_inner_time(clock.monotonic_ns())
                self._inner = frame.f_code, frame.f_lineno
                self._inner_frames.append(frame)
                self._inner_since_ns = clock.monotonic_ns()
                return self._on_inner
        return None

    def _add_inner_time(self, now_ns: int) -> None:
        """Add the time since the last event inside functions to the line that ran there."""
        if self._inner is not None and self._line is not None:
            times = self._inner_times.setdefault(self._line, {})
            times[self._inner] = times.get(self._inner, 0) + max(0, now_ns - self._inner_since_ns)

    def _on_inner(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Handle a trace event inside a function that a traced line calls. Hot."""
        if self._thread != threading.get_ident() or self._line is None:
            frame.f_trace = None
            return None
        if event == "exception":
            return self._on_inner
        self._add_inner_time(clock.monotonic_ns())
        self._inner_events += 1
        if event == "return":  # or a generator yields
            with contextlib.suppress(ValueError):
                self._inner_frames.remove(frame)
            frame.f_trace = None
            caller = self._inner_frames[-1] if self._inner_frames else None
            self._inner = None if caller is None else (caller.f_code, caller.f_lineno)
        elif self._inner_events >= MOST_INNER:
            self._leave_functions()
        else:
            self._inner = frame.f_code, frame.f_lineno
        self._inner_since_ns = clock.monotonic_ns()
        return frame.f_trace

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Handle a trace event: a traced frame reaches another line, or returns. Hot."""
        if self._thread != threading.get_ident():
            sys.settrace(None)
            frame.f_trace = None
            return None
        if event == "exception":
            return self._on_event
        now_ns = clock.monotonic_ns()
        self._add_time(now_ns)
        if event == "return":  # or a generator yields
            with contextlib.suppress(ValueError):
                self._frames.remove(frame)  # a reference would keep its variables alive
            frame.f_trace, caller = None, frame.f_back
            self._line = None if caller is None or _is_own(caller) else (caller.f_code, caller.f_lineno)
        else:
            self._line = frame.f_code, frame.f_lineno
        self._since_ns = clock.monotonic_ns()
        return None if event == "return" else self._on_event

    def content(self) -> dict[str, Any] | None:
        """Return its content for `run.json`, see `xsp.run.Between`; None if nothing was traced."""
        if not self._gaps:
            return None
        ordered = sorted(self._line_times.items(), key=lambda entry: -entry[1][0])
        return {
            "gaps": self._gaps,
            "ns": sum(ns for _, (ns, _) in ordered),
            "lines": [
                {
                    **_named(code, line),
                    "function": getattr(code, "co_qualname", code.co_name),
                    "ns": ns,
                    "gaps": gaps,
                    **self._within((code, line)),
                }
                for (code, line), (ns, gaps) in ordered[:MOST_LINES]
            ],
            "rest_ns": sum(ns for _, (ns, _) in ordered[MOST_LINES:]),
            "unknown_ns": self._unknown_ns,
        }

    def _within(self, line: _Line) -> dict[str, Any]:
        """Return the line inside the program's functions that takes most of a line, if it takes half of what is known.

        Only the first `MOST_INNER` events of a gap are known: a long loop is known by its first passes.
        """
        times = self._inner_times.get(line, {})
        inner = max(times, key=lambda each: times[each], default=None)
        whole_ns = sum(times.values())
        if inner is None or 2 * times[inner] < whole_ns:
            return {}
        return {"within": {**_named(*inner), "ns": times[inner]}}


def _named(code: CodeType, line: int) -> dict[str, Any]:
    """Return the file, the number and the calls of a line."""
    calls = _called_names(linecache.getline(code.co_filename, line))
    return {"file": shown_path(code.co_filename), "line": line, "calls": calls}


def shown_path(path: str) -> str:
    """Return a file's path in its package or below the working directory, else its name: never a user's directory."""
    if _PACKAGES.match(path):
        return _PACKAGES.sub("", path)
    with contextlib.suppress(ValueError, OSError):  # another drive; a deleted working directory
        relative = os.path.relpath(path)
        if not relative.startswith(os.pardir) and not os.path.isabs(relative):
            return relative
    return os.path.basename(path)


def _called_names(text: str) -> str:
    """Return the names that a line of source calls, without its literals, which may be secrets."""
    code = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", text)
    names = [name for name in _CALL_NAME.findall(code) if not keyword.iskeyword(name)]
    return ", ".join(list(dict.fromkeys(names))[:MOST_NAMES])
