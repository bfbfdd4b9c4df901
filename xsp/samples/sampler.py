"""The thread of the storing process that reads the sources while a block is open, and writes their readings.

Its cost is bounded: long readings make the interval longer, and so does a long run, whose number of samples would
otherwise be unbounded. Readings are written to the disk in portions, so that a kill loses only the last portion.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xsp import clock, identity, rundir, table
from xsp.samples.host import Host
from xsp.samples.nvml import Nvml
from xsp.samples.source import Source
from xsp.schema import SAMPLE_COLUMNS

PORTION_NS = 5_000_000_000
SLOW_INTERVAL_NS = 1_000_000_000

MAX_READINGS = 20_000
"""Number of readings after which the interval is doubled: a day has some 130,000 readings."""

MAX_BUSY_SHARE = 0.2
"""Share of the time spent on readings above which the interval is doubled."""

PATIENCE_S = 10.0
"""Seconds that the end of a block waits for a reading that hangs in a driver."""


class Sample(NamedTuple):
    """A row; its fields are those of `xsp.schema.SAMPLE_COLUMNS`."""

    time_ns: int
    rank: int
    device: int | None
    name: str
    unit: str
    value: float


class Sampler:
    """A thread that reads sources from `start` to `finish`."""

    def __init__(self, run: Path, sources: Sequence[Source], rank: int = 0, interval_ns: int | None = None) -> None:
        self._run, self._sources, self._rank = run, list(sources), rank
        self._clock = clock.SteadyClock()
        self._requested_ns = interval_ns
        self._nominal_ns = self._interval_ns = self._shortest()
        self._rows: list[Sample] = []
        self._names: dict[str, set[str]] = {}
        self._absent: dict[str, str] = {}
        self._notes: list[str] = []
        self._durations: list[int] = []
        self._first_ns = self._last_ns = self._busy_ns = self._longest_ns = 0
        self._readings = self._missed = self._portions = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="xsp samples", daemon=True)

    def start(self) -> None:
        """Start the thread, without waiting for drivers."""
        self._thread.start()

    def finish(self) -> dict[str, Any]:
        """Stop the thread, which writes the last portion, and return the entry on samples for `run.json`."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._notes.append(f"a reading did not return within {PATIENCE_S:g} s; the last portion is missing")
        interval = (self._last_ns - self._first_ns) / (self._readings - 1) if self._readings > 1 else None
        return {
            "interval_ms": self._nominal_ns / 1e6,
            "kept_ms": round(interval / 1e6, 3) if interval is not None else None,
            "readings": self._readings,
            "missed": self._missed,
            "reading_ms": round(self._busy_ns / self._readings / 1e6, 3) if self._readings else None,
            "longest_reading_ms": round(self._longest_ns / 1e6, 3) if self._readings else None,
            "sources": {source: sorted(names) for source, names in sorted(self._names.items())},
            "absent": self._absent,
            "notes": self._notes,
        }

    # --- the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._open()
            self._repeat()
        except Exception as error:  # steps must be stored even if sampling fails
            self._notes.append(f"sampling ended early: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self._store()
        for source in self._sources:
            self._close(source)

    def _open(self) -> None:
        for source in list(self._sources):
            reason = source.open()
            if reason is not None:
                self._absent[source.name] = reason
                self._sources.remove(source)
        self._nominal_ns = self._interval_ns = self._shortest()

    def _shortest(self) -> int:
        """Return the requested interval, else the shortest one of the sources, in nanoseconds."""
        return self._requested_ns or min((source.interval_ns for source in self._sources), default=Source.interval_ns)

    def _repeat(self) -> None:
        if not self._sources:
            return
        due = last_store = time.monotonic_ns()
        slow_due = due
        while not self._stop.wait(max(0, due - time.monotonic_ns()) / 1e9):
            start = time.monotonic_ns()
            now = self._read_all(start, include_slow=start >= slow_due)
            slow_due = start + SLOW_INTERVAL_NS if start >= slow_due else slow_due
            if now - last_store >= PORTION_NS:
                self._store()
                now = last_store = time.monotonic_ns()
            missed = max(0, (now - due) // self._interval_ns)
            self._missed += missed
            due += (missed + 1) * self._interval_ns
        self._read_all(time.monotonic_ns(), include_slow=True)  # so that even a short run has a reading
        self._store()

    def _read_all(self, start: int, include_slow: bool) -> int:
        """Read every source and return the time after that; the time of a figure is the middle of its source's read."""
        for source in self._sources:
            read_start = clock.monotonic_ns()
            readings = list(source.read(include_slow))
            time_ns = (read_start + clock.monotonic_ns()) // 2 + self._clock.anchor().offset_ns
            self._rows += [
                Sample(time_ns, self._rank, reading.device, reading.name, reading.unit, reading.value)
                for reading in readings
            ]
            self._names.setdefault(source.name, set()).update(reading.name for reading in readings)
            self._first_ns, self._last_ns = self._first_ns or time_ns, time_ns
        now = time.monotonic_ns()
        self._count(now - start)
        return now

    def _count(self, duration_ns: int) -> None:
        """Count a reading, and double the interval if there are too many readings or they take too long."""
        self._readings += 1
        self._busy_ns += duration_ns
        self._longest_ns = max(self._longest_ns, duration_ns)
        self._durations.append(duration_ns)
        is_full = len(self._durations) >= MAX_READINGS
        is_slow = (
            len(self._durations) >= 20
            and sum(self._durations) > MAX_BUSY_SHARE * len(self._durations) * self._interval_ns
        )
        if is_full or is_slow:
            self._interval_ns *= 2
            self._durations.clear()

    def _store(self) -> None:
        """Write the rows as the next portion."""
        if self._rows:
            write(rundir.portion(self._run, self._portions), self._rows)
            self._portions += 1
            self._rows.clear()

    def _close(self, source: Source) -> None:
        try:
            self._notes += [text for text in source.notes() if text not in self._notes]
            source.close()
        except Exception as error:
            self._notes.append(f"{source.name} could not be closed: {type(error).__name__}: {error}")


def write(path: Path, rows: Iterable[Sample]) -> None:
    """Write samples to a file atomically."""
    path.parent.mkdir(exist_ok=True)
    con = table.connect(1)
    table.create(con, "portion", SAMPLE_COLUMNS)
    table.insert(con, "portion", rows, SAMPLE_COLUMNS)
    table.write_parquet(con, "portion", path)
    con.close()


# --- sources -----------------------------------------------------------------------------------------------------
# All sources of samples.


def sources_for(process: int, devices: Sequence[str] = ()) -> list[Source]:
    """Return the sources for one measured process, whose environment the current process has inherited.

    Args:
        process: its process id.
        devices: UUIDs of its devices in CUDA's order if it has initialised CUDA; else the environment determines them.
    """
    local_rank = identity.number_from(os.environ, "LOCAL_RANK", 0)
    local_ranks = identity.number_from(os.environ, "LOCAL_WORLD_SIZE", 1)
    return [Host(process), Nvml(process, devices, local_rank, local_ranks)]
