"""Progress of a run while it is recorded: `progress.json` in the run directory, and a line in the terminal.

Both are made between steps, once a second at most, without a thread that would disturb the measurement. Their cost is
in the account of the cost of profiling.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from xsp import atomic, inside
from xsp.clock import monotonic_ns
from xsp.record.terminal import LiveLine
from xsp.run import Budget

PROGRESS_FILE = "progress.json"
MAX_BYTES = 1 << 20
PAUSE_NS = 1_000_000_000
PAUSE_FACTOR = 1000
"""Minimum pause as a multiple of the last duration: even on a slow disk, showing takes no more than 0.1 %."""


class ProgressDisplay:
    """The display of a run's progress."""

    def __init__(self) -> None:
        self.draws_line = False
        """Whether a line is drawn in the terminal."""

        self._run: Path | None = None
        self._next_ns = 0
        self._line: LiveLine | None = None

    def begin(self, run: Path) -> None:
        """Write progress into this run directory from now on."""
        self._run = run
        if self.draws_line:
            self._line = LiveLine()
            self._line.open()

    def is_due(self, now_ns: int) -> bool:
        """Return whether progress is due to be shown; `now_ns` is of the monotonic clock."""
        return now_ns >= self._next_ns and self._run is not None

    def show(self, progress: dict[str, Any]) -> int:
        """Write and draw progress, and return the nanoseconds that it took. Never raises."""
        began_ns = monotonic_ns()
        if self._run is not None:
            # it is not flushed to the disk, because it is of no use after a crash
            path = self._run / PROGRESS_FILE
            # errors are ignored: on a full disk steps are lost, which is counted; progress is only informative
            with contextlib.suppress(OSError), atomic.replacing(path, flush=False) as temporary:
                temporary.write_text(json.dumps(progress), encoding="utf-8")
        if self._line is not None:
            self._line.draw(line(progress))
        ended_ns = monotonic_ns()
        self._next_ns = ended_ns + max(PAUSE_NS, PAUSE_FACTOR * (ended_ns - began_ns))
        return ended_ns - began_ns

    def end(self) -> None:
        """Remove the line and the file: `run.json` has the final state."""
        if self._line is not None:
            self._line.close()
        if self._run is not None:
            with contextlib.suppress(OSError):
                (self._run / PROGRESS_FILE).unlink(missing_ok=True)
        self._run, self._line = None, None

    def forget(self) -> None:
        """Show nothing from now on, in a forked child: the line and the file are the parent's."""
        self._run, self._line = None, None


def read(run: Path) -> dict[str, Any]:
    """Return the last progress that a run wrote; empty if there is none, for instance before its first stored step."""
    try:
        content = inside.read_json(run, run / PROGRESS_FILE, MAX_BYTES)
    except (OSError, ValueError):
        return {}
    return dict(content) if isinstance(content, dict) else {}


def line(progress: dict[str, Any]) -> str:
    """Return progress on one line of at most 79 characters."""
    budget = Budget.of(progress.get("budget", {}))
    parts = [f"xsp: step {progress.get('seen', 0):,}", f"{progress.get('stored', 0):,} stored"]
    if budget.bare_step_ns is not None:
        parts.append(f"{budget.bare_step_ns / 1e6:.3g} ms a step")
    parts.append(overhead(budget))
    return ", ".join(parts)[:79]


def overhead(budget: Budget) -> str:
    """Return the cost of profiling as text."""
    if budget.overhead_percent is None:
        return "overhead not known yet"
    limit = f" of {budget.asked_percent:g} %" if budget.asked_percent is not None else ""
    return f"overhead {budget.overhead_percent:.2f} %{limit}"
