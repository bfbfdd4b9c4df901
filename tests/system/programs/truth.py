"""What a program says of its own loop: laps by plain `perf_counter`, one line of JSON at the end."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Truth:
    """Laps of a loop by kind, each from the end of the lap before, and what was waited for data in it."""

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self.calls = 0
        """Calls of outermost modules."""

        self._laps: dict[str, list[tuple[float, int, float]]] = {}
        self._waited = 0.0
        self._began = self._last = time.perf_counter()

    def start(self) -> None:
        """Begin the lap here: what was before, setting up or an evaluation, belongs to none."""
        self._last, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def lap(self, kind: str = "training", samples: int = 0) -> None:
        """End a lap of a kind, in which that many samples were worked on."""
        now = time.perf_counter()
        self._laps.setdefault(kind, []).append((now - self._last, samples, self._waited))
        self.start()

    def say(self, **more: object) -> None:
        """Print it all; times are medians over the laps after the first tenth."""
        kinds = {kind: _figures(laps) for kind, laps in self._laps.items()}
        said = {"optimizer_steps": self.optimizer_steps, "calls": self.calls, "kinds": kinds}
        print(json.dumps({**said, "seconds": round(time.perf_counter() - self._began, 3), **more}), flush=True)


def _figures(laps: list[tuple[float, int, float]]) -> dict[str, float]:
    steady = laps[len(laps) // 10 :]
    return {
        "laps": len(laps),
        "lap_ms": round(1e3 * statistics.median(wall for wall, _, _ in steady), 4),
        "data_ms": round(1e3 * statistics.median(waited for _, _, waited in steady), 4),
        "samples": sum(samples for _, samples, _ in laps),
        "samples_per_s": round(sum(samples for _, samples, _ in steady) / sum(wall for wall, _, _ in steady), 2),
    }
