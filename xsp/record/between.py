"""Lines of the program, traced after each recorded step: between it and the next step, and in that step.

The work of a loop between steps (checkpoints, statistics, `gc.collect()`, reading a loss) belongs to no step, and no
collector records it; of Python code inside a step, collectors record no line. So the frames that are on the stack when
a recorded step ends are traced line by line (`sys.settrace`); time in a callee counts for the calling line. Of
functions of the program itself, neither of packages nor of the standard library, the line that takes most of it is
noted beside. The step after a recorded one counts as disturbed anyway, so figures of the loop are without the cost of
tracing as soon as there are enough other steps; gaps far longer than others are also sought after unrecorded steps, see
`xsp.record.slowgaps`, whose next step then counts as disturbed. Its lines count for the phase that runs (forward,
backward, optimizer), or for none of them. Steps below 3 ms are not traced: that would multiply their time.

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
import time
from types import CodeType, FrameType
from typing import Any, NamedTuple

from xsp import clock, processes
from xsp.collector import Signal
from xsp.record import phases
from xsp.record.slowgaps import SlowGaps
from xsp.run import LOOP_LINES, MIN_LOOP_SHARE

MOST_GAPS = 64
"""Most gaps between steps that are traced in a run."""

MOST_STEPS = 12
"""Most steps that are traced in a run."""

MOST_CALLS = 50_000
"""Most calls of Python functions in a traced gap or step; each costs some 0.2 µs."""

MOST_INNER = 5_000
"""Most events of lines inside functions that are called in a traced gap, or a phase of a step; each costs about 1 µs.
"""

MOST_IN_CALL = 400
"""Most of these events in one call of a function: one that loops longer would leave none for the others."""

MOST_FRAMES = 48
"""Innermost frames of a stack that are traced."""

MOST_LINES = 60
"""Number of lines that are listed: those with the most time."""

MOST_INNER_LINES = 5
"""Most lines that are listed inside the functions that a line calls."""

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


def _is_of_package(path: str) -> bool:
    """Return whether a file is one of a package or of Python itself."""
    return path.startswith(_LIBRARY) or _PACKAGES.match(path) is not None


def _is_of_program(frame: FrameType) -> bool:
    """Return whether a frame runs code of the program: of no package, not of Python itself, nor of xsp."""
    path = frame.f_code.co_filename
    is_file = not path.startswith("<") or path.startswith("<ipython-input")
    return is_file and not _is_of_package(path) and not _is_own(frame)


BETWEEN, OUTSIDE, SLOW = "between", "outside", "slow gaps"
"""Names of the time between steps, of the time of a step in none of its phases, and of gaps far longer than others."""


class Awake(NamedTuple):
    """The times of a thread up to a moment, in nanoseconds: when it neither runs nor could run, it sleeps."""

    now_ns: int
    cpu_ns: int
    """Time in which it ran."""

    queued_ns: int
    """Time in which it could have run, and had no processor."""

    def asleep_ns(self, since: Awake) -> int:
        """Return how long the thread slept since an earlier moment."""
        ready_ns = self.cpu_ns - since.cpu_ns + self.queued_ns - since.queued_ns
        return max(0, self.now_ns - since.now_ns - ready_ns)


def awake() -> Awake | None:
    """Return the times of this thread; None if the system does not say how long it waited for a processor."""
    try:
        queued_ns = int(processes.system_text(f"/proc/self/task/{threading.get_native_id()}/schedstat").split()[1])
    except (ValueError, IndexError):
        return None
    return Awake(clock.monotonic_ns(), time.thread_time_ns(), queued_ns)


class _Times:
    """Times of lines, in gaps between steps or in one phase of steps."""

    def __init__(self) -> None:
        self.count = self.unknown_ns = self.inner_events = 0
        self.asleep_ns: int | None = None
        """Time in which the thread slept; None if the system does not tell."""

        self.lines: dict[_Line, list[int]] = {}
        """For each line its nanoseconds, the number of gaps or steps in which it ran, and how often it began to."""

        self.inner: dict[_Line, dict[_Line, int]] = {}
        """For each line the nanoseconds of lines inside the program's functions that it calls."""

        self.loops: set[_Line] = set()
        """Those at which a call had gone through `MOST_IN_CALL` lines."""

    @property
    def ns(self) -> int:
        """The time of all lines, known or not."""
        return self.unknown_ns + sum(ns for ns, *_ in self.lines.values())

    def add_line(self, line: _Line | None, ns: int) -> None:
        """Add time of a line; None if it is unknown."""
        if line is None:
            self.unknown_ns += ns
        else:
            self.lines.setdefault(line, [0, 1, 0])[0] += ns

    def count_pass(self, line: _Line) -> None:
        """Count that a line begins."""
        self.lines.setdefault(line, [0, 1, 0])[2] += 1

    def add(self, other: _Times) -> None:
        """Add the times of another gap or step."""
        self.count += 1
        if other.asleep_ns is not None:
            self.asleep_ns = (self.asleep_ns or 0) + other.asleep_ns
        self.unknown_ns += other.unknown_ns
        for line, (ns, _, passes) in other.lines.items():
            total = self.lines.setdefault(line, [0, 0, 0])
            total[0] += ns
            total[1] += 1
            total[2] += passes
        for line, times in other.inner.items():
            own = self.inner.setdefault(line, {})
            for inner, ns in times.items():
                own[inner] = own.get(inner, 0) + ns
        self.loops |= other.loops

    def content(self) -> dict[str, Any]:
        """Return its content for `run.json`, see `xsp.run.Between`."""
        ordered = sorted(self.lines.items(), key=lambda entry: -entry[1][0])
        return {
            "gaps": self.count,
            "ns": sum(ns for _, (ns, *_) in ordered),
            "lines": [
                {
                    **_named(code, line),
                    "function": getattr(code, "co_qualname", code.co_name),
                    "ns": ns,
                    "gaps": gaps,
                    "passes": passes,
                    **({"package": True} if _is_of_package(code.co_filename) else {}),
                    **self._within((code, line)),
                }
                for (code, line), (ns, gaps, passes) in ordered[:MOST_LINES]
            ],
            "rest_ns": sum(ns for _, (ns, *_) in ordered[MOST_LINES:]),
            "unknown_ns": self.unknown_ns,
            **({} if self.asleep_ns is None else {"asleep_ns": self.asleep_ns}),
        }

    def _within(self, line: _Line) -> dict[str, Any]:
        """Return the lines inside the program's functions with most of a line, and the one that takes half of it.

        A loop alternates between its lines: the lines near one with much time count with it, if no single line has
        half.
        Only the first `MOST_INNER` events of a gap are known, and `MOST_IN_CALL` of a call: a long loop is known by its
        first passes, for which the rest of the call counts.
        """
        times = self.inner.get(line, {})
        whole_ns = sum(times.values())
        ordered = sorted(times, key=lambda each: -times[each])
        loops = [ordered[:1], *(sorted(_near(times, each, whole_ns), key=lambda each: each[1]) for each in ordered[:3])]
        sums = [sum(times[each] for each in loop) for loop in loops]
        place = 0 if 2 * sums[0] >= whole_ns else max(range(len(loops)), key=lambda place: sums[place])
        inner = [
            {**_inner_line([each], times[each], whole_ns), **({"is_loop": True} if each in self.loops else {})}
            for each in ordered[:MOST_INNER_LINES]
        ]
        found = {"inner": inner} if inner else {}
        if not loops[place] or 2 * sums[place] < whole_ns:
            return found
        return {"within": _inner_line(loops[place], sums[place], whole_ns), **found}


def _inner_line(loop: list[_Line], ns: int, whole_ns: int) -> dict[str, Any]:
    """Return a line inside a function, or the lines of a loop in it, for `run.json`, see `xsp.run.InnerLine`."""
    names = dict.fromkeys(name for each in loop for name in _named(*each)["calls"].split(", ") if name)
    last = {"last": loop[-1][1]} if len(loop) > 1 else {}
    return {**_named(*loop[0]), "calls": ", ".join([*names][:MOST_NAMES]), "ns": ns, "of_ns": whole_ns, **last}


def _near(times: dict[_Line, int], line: _Line, whole_ns: int) -> list[_Line]:
    """Return a line, and those of its function that are near it and have much of the time."""
    chosen = [line]
    for each in sorted(times, key=lambda each: -times[each]):
        is_near = each[0] is line[0] and any(0 < abs(each[1] - other[1]) <= LOOP_LINES for other in chosen)
        if each not in chosen and is_near and times[each] >= MIN_LOOP_SHARE * whole_ns:
            chosen.append(each)
    return chosen


class Between:
    """The time that each line of the program takes between its steps, and in the phases of steps."""

    def __init__(self) -> None:
        self.slow = SlowGaps()
        self._totals: dict[tuple[int, str], _Times] = {}
        """Times by kind of step and phase; between steps, of kind 0."""

        self._gaps = self._steps = 0
        self._parts: dict[str, _Times] = {}
        """Times of the current gap or step, by phase."""

        self._times = _Times()
        """Those that the current time counts for."""

        self._phases: list[tuple[str, int]] = []
        """Phases that run, outermost first, each with the number of functions that were traced when it began."""

        self._is_in_step = self._is_followed = self.is_sought = self._is_held = False
        self._frames: list[FrameType] = []
        self.thread: int | None = None
        """The thread whose lines are traced now; None if none is."""

        self._line: _Line | None = None
        self._since_ns = self._excluded_ns = self._waited_ns = self._calls = 0
        self._awake: Awake | None = None
        self._inner: _Line | None = None
        self._inner_frames: list[FrameType] = []
        self._inner_counts: dict[FrameType, int] = {}
        """Events of lines in each of them."""

        self._inner_since_ns = 0
        self._are_of_program: dict[CodeType, bool] = {}

    def begin(self, is_sought: bool = False) -> None:
        """Trace the frames that are on the stack from now on, until the next step, except frames of xsp.

        Args:
            is_sought: whether the gap is one after an unrecorded step that may be slow.
        """
        self.is_sought = False
        if self.thread is None and (is_sought or self._gaps < MOST_GAPS):
            self._begin(BETWEEN)
            self.is_sought = is_sought and self.thread is not None

    def end(self) -> None:
        """Stop tracing, and add up the times of this gap; sought ones are no sample of all, so only slow ones count."""
        self.end_step()  # of a program that ends in it
        self._is_followed = self.thread == threading.get_ident() and not self.is_sought
        if self.thread is None:
            self.is_sought = False
            return
        now = awake() if self.thread == threading.get_ident() else None
        self._end()
        gap = self._parts.get(BETWEEN, _Times())
        if now is not None and self._awake is not None:
            gap.asleep_ns = min(gap.ns, max(0, now.asleep_ns(self._awake) - self._waited_ns))
        if 0 < self.slow.least_ns <= gap.ns:
            self.slow.traced += 1
            self._totals.setdefault((0, SLOW), _Times()).add(gap)
        if self.is_sought:
            self._parts = {}
        else:
            self._gaps += 1
            self._add_up(0)

    def begin_step(self) -> None:
        """Trace the step that begins, if the gap before it was traced."""
        if self._is_followed and self.thread is None and self._steps < MOST_STEPS:
            self._begin(OUTSIDE)
            self._is_in_step = self.thread is not None

    def end_step(self) -> None:
        """Stop tracing a step that ends; `count_step` adds its times up."""
        if self._is_in_step:
            is_own = self.thread == threading.get_ident()
            self._end()
            if not is_own:
                self._parts = {}

    def drop_step(self) -> None:
        """Stop tracing a step that counts for no kind, and forget its times."""
        self.end_step()
        if self.thread is None:  # else a gap is traced
            self._parts = {}

    def count_step(self, kind: int) -> None:
        """Add up the times of the traced step that ended, if it was one.

        Args:
            kind: the number of its kind.
        """
        if self._parts:
            self._steps += 1
            self._add_up(kind)

    def on_signal(self, signal: Signal) -> None:
        """Count the time that follows for the phase that begins, or for the one around the phase that ends."""
        if not self._is_in_step or self.thread != threading.get_ident():
            return
        begins, ends = phases.BEGINS.get(signal), phases.ENDS.get(signal)
        if begins is None and not any(phase == ends for phase, _ in self._phases):
            return
        now_ns = clock.monotonic_ns()
        self._add_time(now_ns)
        self._add_inner_time(now_ns)
        if begins is not None:
            self._phases.append((begins, len(self._inner_frames)))
        else:
            while self._phases.pop()[0] != ends:
                pass
            self._go_on_in_caller()  # of a long loop in the phase, some passes were traced
            if ends == phases.BACKWARD and any(phase == phases.OPTIMIZER for phase, _ in self._phases):
                # the closure of an optimizer ran, which is no part of its step
                self._parts.setdefault(OUTSIDE, _Times()).add(self._parts.pop(phases.OPTIMIZER, _Times()))
        phase = phases.counted([phase for phase, _ in self._phases]) if self._phases else OUTSIDE
        self._times = self._parts.setdefault(phase, _Times())
        self._since_ns = self._inner_since_ns = clock.monotonic_ns()

    def hold(self) -> bool:
        """Count no time for lines until `go_on`, while xsp works; return whether this thread is traced."""
        if self.thread is None or self.thread != threading.get_ident():
            return False
        now_ns = clock.monotonic_ns()
        self._add_time(now_ns)
        self._add_inner_time(now_ns)
        self._is_held = True
        return True

    def go_on(self, was_traced: bool) -> None:
        """Count time again, if this thread is traced.

        Args:
            was_traced: what `hold` returned.
        """
        if was_traced:
            self._is_held = False
        if self.thread is not None and self.thread == threading.get_ident():
            self._since_ns = self._inner_since_ns = clock.monotonic_ns()

    def forget(self) -> None:
        """Stop tracing in a forked child, which inherits the trace function in the middle of a gap."""
        self._is_held = False
        if self.thread is not None:
            self._stop_tracing()
        self._parts = {}

    def exclude(self, ns: int) -> None:
        """Subtract the current line's wait for data, which is counted separately."""
        if self.thread == threading.get_ident():
            self._excluded_ns += ns
            self._waited_ns += ns
            self._inner_since_ns += ns

    def _begin(self, phase: str) -> None:
        """Trace the frames that are on the stack from now on, except frames of xsp."""
        if sys.gettrace() is not None:
            return
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and len(self._frames) < MOST_FRAMES:
            if not _is_own(caller):
                self._frames.append(caller)
            caller = caller.f_back
        if not self._frames or any(frame.f_trace is not None for frame in self._frames):
            self._frames.clear()
            return
        innermost = self._frames[0]
        self._line, self.thread = (innermost.f_code, innermost.f_lineno), threading.get_ident()
        self._times = _Times()
        self._parts, self._calls, self._excluded_ns, self._waited_ns = {phase: self._times}, 0, 0, 0
        self._awake = awake() if phase == BETWEEN else None
        for frame in self._frames:
            frame.f_trace = self._on_event
        self._since_ns = clock.monotonic_ns()
        sys.settrace(self._on_call)

    def _end(self) -> None:
        """Add the time since the last event, and stop tracing."""
        self._add_time(clock.monotonic_ns())
        self._stop_tracing()

    def _add_up(self, kind: int) -> None:
        """Add the times of the gap or step that ended to those of its kind."""
        parts, self._parts = self._parts, {}
        for phase, times in parts.items():
            self._totals.setdefault((kind, phase), _Times()).add(times)

    def _stop_tracing(self) -> None:
        if self.thread == threading.get_ident() and sys.gettrace() == self._on_call:
            sys.settrace(None)
        for frame in self._frames:
            if frame.f_trace == self._on_event:
                frame.f_trace = None
        self._leave_functions(0)
        self.thread = self._line = None
        self._is_in_step = False
        self._phases.clear()
        self._frames.clear()

    def _leave_functions(self, least: int) -> None:
        """Trace the functions that were called no further, except the first `least`."""
        for frame in self._inner_frames[least:]:
            self._leave(frame)
        del self._inner_frames[least:]
        self._inner = None

    def _leave(self, frame: FrameType) -> None:
        """Trace a function that was called no further."""
        self._inner_counts.pop(frame, None)
        if frame.f_trace == self._on_inner:
            frame.f_trace = None
            frame.f_trace_lines = True

    def _go_on_in_caller(self) -> None:
        """Count time for the innermost function that is traced."""
        caller = self._inner_frames[-1] if self._inner_frames else None
        self._inner = None if caller is None else (caller.f_code, caller.f_lineno)

    def _add_time(self, now_ns: int) -> None:
        """Add the time since the last event to the line that ran."""
        if not self._is_held:
            self._times.add_line(self._line, max(0, now_ns - self._since_ns - self._excluded_ns))
        self._since_ns, self._excluded_ns = now_ns, 0

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count a call, trace into functions of the program; stop tracing after `MOST_CALLS` calls. Hot."""
        self._calls += 1
        if self.thread != threading.get_ident():  # the gap ended on another thread
            sys.settrace(None)
        elif self._calls > MOST_CALLS:  # the rest of the gap counts for unknown lines
            sys.settrace(None)
            self._add_time(clock.monotonic_ns())
            self._leave_functions(0)
            self._line = None
        elif self._line is not None and self._times.inner_events < MOST_INNER:
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
        if self._inner is not None and self._line is not None and not self._is_held:
            times = self._times.inner.setdefault(self._line, {})
            times[self._inner] = times.get(self._inner, 0) + max(0, now_ns - self._inner_since_ns)

    def _on_inner(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Handle a trace event inside a function that a traced line calls. Hot."""
        if self.thread != threading.get_ident() or self._line is None:
            frame.f_trace = None
            return None
        if event == "exception":
            return self._on_inner
        self._add_inner_time(clock.monotonic_ns())
        self._times.inner_events += 1
        if event == "return":  # or a generator yields
            with contextlib.suppress(ValueError):
                self._inner_frames.remove(frame)
            self._leave(frame)
            self._go_on_in_caller()
        elif self._times.inner_events >= MOST_INNER:
            self._leave_functions(self._phases[-1][1] if self._phases else 0)
        else:
            self._inner = frame.f_code, frame.f_lineno
            self._inner_counts[frame] = count = self._inner_counts.get(frame, 0) + 1
            if count >= MOST_IN_CALL:  # the rest of the call counts for the loop that it is in
                frame.f_trace_lines = False
                self._times.loops.add(self._inner)
        self._inner_since_ns = clock.monotonic_ns()
        return frame.f_trace

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Handle a trace event: a traced frame reaches another line, or returns. Hot."""
        if self.thread != threading.get_ident():
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
            self._times.count_pass(self._line)
        self._since_ns = clock.monotonic_ns()
        return None if event == "return" else self._on_event

    def content(self) -> dict[str, Any] | None:
        """Return the content of the time between steps for `run.json`, see `xsp.run.Between`; None without any."""
        times = self._totals.get((0, BETWEEN))
        return None if times is None else times.content()

    def content_of_steps(self) -> list[dict[str, Any]]:
        """Return the content of the phases of steps for `run.json`, see `xsp.run.PhaseLines`."""
        return [
            {"kind": kind, "phase": phase, **times.content()}
            for (kind, phase), times in self._totals.items()
            if phase != BETWEEN
        ]


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
