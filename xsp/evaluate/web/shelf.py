"""Cache of a folder's results: each is read once, and again when its file has changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xsp import inside
from xsp.errors import ManifestError
from xsp.evaluate import results
from xsp.evaluate.results import Result

PERCENTILES = (0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.9, 100.0)


class Shelf:
    """The results in one folder, by name; no name leads out of the folder."""

    def __init__(self, store: Path) -> None:
        """Use a folder, which need not exist yet."""
        self.store = store
        self._cache: dict[str, tuple[tuple[int, int, int], Result | str]] = {}
        self._lock = threading.Lock()

    def all_results(self) -> tuple[list[Result], list[str]]:
        """Return all results, oldest first, and the names of damaged ones; symbolic links are ignored."""
        with self._lock:
            try:
                with os.scandir(self.store) as entries:
                    names = [
                        entry.name
                        for entry in entries
                        if results.NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                    ]
            except OSError:
                names = []
            by_name = {name: loaded for name in names if (loaded := self._read(name)) is not None}
            self._cache = {name: self._cache[name] for name in by_name}
        valid = [result for result in by_name.values() if isinstance(result, Result)]
        damaged = sorted(name for name, problem in by_name.items() if isinstance(problem, str))
        return results.oldest_first(valid), damaged

    def result(self, name: str) -> Result | str | None:
        """Return a result by the name of its directory, the reason why it is damaged, or None if there is none."""
        if not results.NAME.fullmatch(name) or not name.isascii():
            return None
        if not inside.is_folder(self.store, self.store / name):
            return None
        with self._lock:
            return self._read(name)

    def _read(self, name: str) -> Result | str | None:
        """Return a result, the reason why it is damaged, or None if it does not exist."""
        path = self.store / name
        try:
            status = os.lstat(path / results.RESULT)
        except OSError:
            return None
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        cached = self._cache.get(name)
        if cached is None or cached[0] != stamp:
            try:
                cached = stamp, results.read(path, self.store)
            except ManifestError as error:
                cached = stamp, str(error)
            self._cache[name] = cached
        return cached[1]


def summary(result: Result) -> dict[str, Any]:
    """Return the summary of a result for a list."""
    content, model = result.content, result.manifest["model"]
    return {
        "result": result.name, "identity": result.identity, "name": content["name"], "model": model["name"],
        "task": model.get("task", ""), "kind": content["kind"], "started": content["started"],
        "agent": content["agent"]["name"], "trace": result.run is not None, "accuracy": result.accuracy,
        "parts": [
            {column: part.get(column) for column in ("batch", "p50_ms", "p99_ms", "inputs_per_s", "late", "stopped")}
            for part in result.parts
        ],
    }  # fmt: skip


def requests(result: Result, batch: int, offset: int, limit: int) -> Mapping[str, Any]:
    """Return a batch size's request times in milliseconds since the first was due, and percentiles of all latencies.

    Percentiles are nearest ranks.
    """
    times = result.requests(batch)
    window = slice(offset, offset + limit)
    first = int(times.due_ns.min()) if len(times) else 0
    ordered = np.sort(times.latency_ns)
    ranks = [max(1, int(np.ceil(round(percent * len(ordered) / 100, 9)))) - 1 for percent in PERCENTILES]
    return {
        "total": len(times),
        "offset": offset,
        **{f"{name}_ms": ((getattr(times, f"{name}_ns")[window] - first) / 1e6).tolist()
           for name in ("due", "issued", "start", "end")},
        "latency_ms": (times.latency_ns[window] / 1e6).tolist(),
        "percentiles": {"at": list(PERCENTILES), "ms": [int(ordered[rank]) / 1e6 for rank in ranks]},
    }  # fmt: skip
