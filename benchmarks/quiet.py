"""How much of the machine other processes take, and waiting until they take next to nothing.

Steps that use all cores stall when somebody else wants one of them, by far more than that core's share. What
others do is read from Linux's own counters, never from the steps' times, so leaving rounds out by it favours
no condition. Elsewhere than on Linux nothing is known, and nothing is left out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SHARE = 0.1
"""Of one core: what others may take."""

GRAIN = 0.03
"""Seconds by which the kernel's counters, which count in ticks, may be wrong."""

_WINDOW = 0.25


class Watch:
    """What other processes took of the machine since the watch was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._others = _others()

    @property
    def share(self) -> float:
        """Return what others took, in cores; 0 where that is not known."""
        now = _others()
        if now is None or self._others is None:
            return 0.0
        seconds = max(0.0, now - self._others - GRAIN)
        return seconds / max(time.perf_counter() - self._begin, 1e-9)


class Patience:
    """Waits for a quiet machine, but not for longer than it has."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Return as soon as others leave the machine alone, or when there is no patience left."""
        while self.left > 0:
            watch = Watch()
            time.sleep(_WINDOW)
            if watch.share <= SHARE:
                return
            self.left -= _WINDOW


def _others() -> float | None:
    """Return the CPU seconds of all processes but this one and its ended children; stolen time counts too."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
