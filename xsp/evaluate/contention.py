"""How long requests may have waited for a core because of other work: how much another load can explain.

Linux reports how long a task was ready to run but had no core (`/proc/pressure/cpu`), and a guest reports how long its
host gave the processor to others (`steal` in `/proc/stat`). A request waits for at most that share of its time, so its
time on an idle machine lies between its latency and the latency less that share. If the kernel does not report the
pressure, the load average per core is used instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRESSURE, STAT = Path("/proc/pressure/cpu"), Path("/proc/stat")

MOST = 20.0
"""Upper limit of the slowdown: beyond it no conclusion is possible anyway."""


class Watch:
    """Reads the machine's counters at the start, and again at the end."""

    def __init__(self, pressure: Path = PRESSURE, stat: Path = STAT) -> None:
        self._places = pressure, stat
        self._first = self._look()

    def changes(self) -> dict[str, float | None]:
        """Return what changed since the start, as input for `slowdown`: shares of time, None if unavailable."""
        before, after = self._first, self._look()
        seconds = after[0] - before[0]
        waited = stolen = None
        if before[1] is not None and after[1] is not None and seconds > 0:
            waited = min(1.0, max(0.0, (after[1] - before[1]) / 1e6 / seconds))
        if before[2] is not None and after[2] is not None and after[2][1] > before[2][1]:
            stolen = min(1.0, max(0.0, (after[2][0] - before[2][0]) / (after[2][1] - before[2][1])))
        return {"waited_for_cores": _rounded(waited), "stolen": _rounded(stolen)}

    def _look(self) -> tuple[float, int | None, tuple[int, int] | None]:
        pressure, stat = (_text(path) for path in self._places)
        waited = next((field[6:] for field in pressure.partition("\n")[0].split() if field.startswith("total=")), "")
        ticks = [int(field) for field in stat.partition("\n")[0].split()[1:] if field.isdecimal()]
        return (
            time.perf_counter(),
            int(waited) if waited.isdecimal() else None,
            (ticks[7], sum(ticks[:8])) if len(ticks) >= 8 else None,
        )


def slowdown(noted: Mapping[str, Any], cores: Any) -> float:
    """Return an upper bound, at least 1, of how many times slower than on an idle machine a result's requests were.

    Args:
        noted: the recorded circumstances of a result: see `Watch.changes`, and `load`, the load average.
        cores: number of cores that were available.
    """
    waited, stolen, load = (_number(noted.get(name)) for name in ("waited_for_cores", "stolen", "load"))
    if waited is None:
        count = _number(cores)
        by_load = load / count if load is not None and count else 1.0
        waited = 1 - 1 / max(1.0, by_load)
    free = (1 - min(waited, 1.0)) * (1 - min(stolen or 0.0, 1.0))
    return min(MOST, 1 / max(free, 1 / MOST))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _text(path: Path) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
