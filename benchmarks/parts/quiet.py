"""Whether other processes disturb a step, and waiting until they do not.

Steps that use all cores stall when somebody else wants one of them, by far more than that core's share. What
tells is how often the kernel took a core away from this process while the step ran: others must do that to
run, and a step does not do it to itself. Never the step's time: choosing by what is measured would favour the
faster condition. On systems that do not count, nothing is known, and every step counts as undisturbed.
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
"""Of one core: what others may take of a machine that is quiet."""

_GRAIN = 0.02
"""Seconds by which the kernel's CPU times, which count in ticks, may be wrong."""

_WINDOW = 0.25
_SELDOM = 10
"""Cores taken away per second that are no disturbance: the kernel's own short errands."""


class Watch:
    """How often cores were taken away from this process since the watch was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._taken = _taken_away()

    @property
    def disturbed(self) -> bool:
        """Return whether others took part of the machine."""
        return _taken_away() - self._taken > _SELDOM * (time.perf_counter() - self._begin)


class Patience:
    """Waits for a quiet machine, but not for longer than it has."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Return as soon as others leave the machine alone, or when there is no patience left."""
        while self.left > 0:
            begin = _others()
            time.sleep(_WINDOW)
            if _others() - begin - _GRAIN <= BUSY * _WINDOW:
                return
            self.left -= _WINDOW

    def spend(self, seconds: float) -> None:
        """Pay for a measurement that has to be taken again."""
        self.left -= seconds


def _taken_away() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def _others() -> float:
    """Return the CPU seconds of all processes but this one and its ended children; stolen time counts too."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
