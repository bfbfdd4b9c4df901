"""How long requests may have waited for a core because of other work on the machine.

Linux reports how long a task was ready to run but had no core (`/proc/pressure/cpu`), and a guest reports how long its
host gave the processor to others (`steal` in `/proc/stat`). A request waits for at most that share of its time, so its
time on an idle machine lies between its latency and the latency less that share. If the kernel does not report the
pressure, the load average per core is used instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PRESSURE, STAT = Path("/proc/pressure/cpu"), Path("/proc/stat")

MOST_SLOWDOWN = 20.0
"""Upper limit of the slowdown: beyond it no conclusion is possible anyway."""


class _Sample(NamedTuple):
    """The machine's counters at one time; None if unavailable."""

    time_s: float
    waited_us: int | None
    stolen_ticks: int | None
    all_ticks: int


class Watch:
    """Reads the machine's counters at the start, and again at the end."""

    def __init__(self, pressure: Path = PRESSURE, stat: Path = STAT) -> None:
        self._paths = pressure, stat
        self._start = self._sample()

    def changes(self) -> dict[str, float | None]:
        """Return what changed since the start, as input for `slowdown`: shares of time, None if unavailable."""
        before, after = self._start, self._sample()
        seconds = after.time_s - before.time_s
        waited = stolen = None
        if before.waited_us is not None and after.waited_us is not None and seconds > 0:
            waited = _share((after.waited_us - before.waited_us) / 1e6, seconds)
        if before.stolen_ticks is not None and after.stolen_ticks is not None and after.all_ticks > before.all_ticks:
            stolen = _share(after.stolen_ticks - before.stolen_ticks, after.all_ticks - before.all_ticks)
        return {"waited_for_cores": waited, "stolen": stolen}

    def _sample(self) -> _Sample:
        pressure, stat = (_text(path) for path in self._paths)
        total = next((field[6:] for field in pressure.partition("\n")[0].split() if field.startswith("total=")), "")
        ticks = [int(field) for field in stat.partition("\n")[0].split()[1:] if field.isdecimal()]
        return _Sample(
            time.perf_counter(),
            int(total) if total.isdecimal() else None,
            ticks[7] if len(ticks) >= 8 else None,
            sum(ticks[:8]),
        )


def slowdown(circumstances: Mapping[str, Any], cores: Any) -> float:
    """Return an upper bound, at least 1, of how many times slower than on an idle machine a result's requests were.

    Args:
        circumstances: the recorded circumstances of a result: see `Watch.changes`, and `load`, the load average.
        cores: number of cores that were available.
    """
    wait_share, stolen_share, load = (
        _number(circumstances.get(name)) for name in ("waited_for_cores", "stolen", "load")
    )
    if wait_share is None:
        count = _number(cores)
        by_load = load / count if load is not None and count else 1.0
        wait_share = 1 - 1 / max(1.0, by_load)
    free = (1 - min(wait_share, 1.0)) * (1 - min(stolen_share or 0.0, 1.0))
    return min(MOST_SLOWDOWN, 1 / max(free, 1 / MOST_SLOWDOWN))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _share(part: float, total: float) -> float:
    return round(min(1.0, max(0.0, part / total)), 4)


def _text(path: Path) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return ""
