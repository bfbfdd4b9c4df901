"""Detects whether other processes disturb a step, and waits until they do not.

Steps that use all cores stall when another process needs one of them, by far more than that core's share. The
indicator is the number of involuntary context switches of this process during the step: other processes cause them
in order to run, and a step does not cause them itself. The step's time is never used: selecting by the measured time
would favour the faster condition. On systems that do not count switches, every step counts as undisturbed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

BUSY = 0.1
"""Maximum share of one core that other processes may use on a quiet machine."""

_GRAIN = 0.02
"""Error in seconds of the kernel's CPU times, which are counted in ticks."""

_WINDOW = 0.25
_SELDOM = 10
"""Involuntary context switches per second that are no disturbance: short work of the kernel itself."""


class Watch:
    """A counter of this process's involuntary context switches since its creation."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._taken = _taken_away()

    @property
    def disturbed(self) -> bool:
        """Whether other processes took cores from this process."""
        return _taken_away() - self._taken > _SELDOM * (time.perf_counter() - self._begin)


class Patience:
    """A budget of seconds for waiting until the machine is quiet."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Return as soon as other processes are idle, or when the budget is spent."""
        while self.left > 0:
            begin = _others()
            time.sleep(_WINDOW)
            if _others() - begin - _GRAIN <= BUSY * _WINDOW:
                return
            self.left -= _WINDOW

    def spend(self, seconds: float) -> None:
        """Subtract the seconds of a measurement that has to be taken again."""
        self.left -= seconds


def _taken_away() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _others() -> float:
    """Return the CPU seconds of all processes except this one and its ended children, stolen time included."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
