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

QUIET_SHARE = 0.1
"""Maximum share of one core that other processes may use on a quiet machine."""

_TICK_ERROR_S = 0.02
"""Error in seconds of the kernel's CPU times, which are counted in ticks."""

_WINDOW_S = 0.25
_TOLERATED_SWITCHES_PER_S = 10
"""Involuntary context switches per second that are no disturbance: short work of the kernel itself."""


class Watch:
    """A counter of this process's involuntary context switches since its creation."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._switches = _involuntary_switches()

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took cores from this process."""
        return _involuntary_switches() - self._switches > _TOLERATED_SWITCHES_PER_S * (
            time.perf_counter() - self._begin
        )


class Patience:
    """A budget of seconds for waiting until the machine is quiet."""

    def __init__(self, seconds: float) -> None:
        self.seconds_left = seconds

    def wait(self) -> None:
        """Return as soon as other processes are idle, or when the budget is spent."""
        while self.seconds_left > 0:
            begin = other_cpu_s()
            time.sleep(_WINDOW_S)
            if other_cpu_s() - begin - _TICK_ERROR_S <= QUIET_SHARE * _WINDOW_S:
                return
            self.seconds_left -= _WINDOW_S

    def spend(self, seconds: float) -> None:
        """Subtract the seconds of a measurement that has to be taken again."""
        self.seconds_left -= seconds


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def other_cpu_s() -> float:
    """Return the CPU seconds of all processes except this one and its ended children, stolen time included."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
