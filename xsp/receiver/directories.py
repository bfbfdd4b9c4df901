"""A run directory that is being received: its description, its waiting files, and what an earlier receiver left."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import duckdb

from xsp import rundir, table
from xsp.errors import TraceError
from xsp.importers.contract import Losses
from xsp.ingest import jobs
from xsp.ingest.write import NO_STEPS, SOURCE, has_derived_steps
from xsp.run import Run
from xsp.schema import COLUMNS, Span

QUIET_S = 2.0
"""Seconds without a span after which a run that reported its end is put in order."""

SMALL_FILE = 4 << 20
"""Bytes below which a file is merged with others."""

_NAMES = ", ".join(column.name for column in COLUMNS)

_RECEIVER_FIELDS = ("format", "received", "ranks")
"""Fields of `run.json` that a receiver writes, and that do not come from the run."""


class Arrival(NamedTuple):
    """What a request brings to one directory."""

    spans: list[Span]
    losses: Losses


@dataclass(eq=False)
class RunDirectory:
    """A run directory that is being received."""

    path: Path
    runs: dict[str, Run] = field(default_factory=dict)
    """Descriptions of its runs, by id; empty for other programs' spans."""

    skipped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    files: int = 0
    files_when_merged: int = 0
    is_waiting: bool = False
    is_left: bool = False
    """Whether waiting files are those of an earlier receiver, which ended before they were in order."""

    last_arrival_s: float = 0.0
    duplicates: int = 0
    """Duplicates among the spans that were put in order."""

    steps_are_derived: bool = False
    """Whether the steps that are in order were made of traces; then they are made again, with those that arrive."""

    staging: int = 0
    """Number of requests that are writing temporary files into the directory."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while files are renamed into place, and while `run.json` is written."""

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have reported that they are finished."""
        ranks = [run for run in self.runs.values() if not run.is_job]
        size = max((run.world_size or 1 for run in ranks), default=1)
        return len(ranks) >= size and all(run.end_ns is not None and run.finished for run in ranks)

    def content(self) -> Run:
        """Return the content of `run.json` while spans arrive."""
        run = jobs.merge_runs(list(self.runs.values())).run if self.runs else Run.of({"name": self.path.name})
        received = {
            "requests": self.requests,
            "skipped": dict(self.skipped),
            "changed": dict(self.changed),
            "doubled": self.duplicates,
            "runs": list(self.runs.values()),
        }
        notes = [NO_STEPS] if self.steps_are_derived else []
        return (run | {"finished": False, "received": received}).with_notes(SOURCE, notes)

    def publish(self, arrivals: Sequence[Arrival], path: Path | None) -> None:
        """Rename the staged file of what arrived into place, after the description of the directory.

        Raises:
            OSError: the disk cannot be written.
            OutputError: `run.json` cannot be written.
        """
        with self.lock:
            self.requests += len(arrivals)
            for arrival in arrivals:
                self.skipped.update(arrival.losses.skipped)
                self.changed.update(arrival.losses.changed)
            self.path.mkdir(exist_ok=True)
            rundir.write_run(self.path, self.content())
            if path is not None:
                os.replace(path, path.with_name(f"{self.files:09d}.parquet"))
                self.files += 1
                self.is_waiting, self.last_arrival_s = True, time.monotonic()

    def is_due(self) -> bool:
        """Return whether its waiting files should be put in order now."""
        is_quiet = time.monotonic() - self.last_arrival_s > QUIET_S
        return self.is_waiting and (self.is_left or (self.is_complete and is_quiet))

    @classmethod
    def left_at(cls, path: Path) -> RunDirectory | None:
        """Return a directory that an earlier receiver wrote; None if it is none, or was empty and is removed."""
        try:
            content = rundir.read_run(path)
        except TraceError:
            _remove_if_empty(path)
            return None  # it is not a run directory
        received = content.received
        if received is None:
            return None
        runs = received.runs or content.ranks or ((content,) if content.id is not None else ())
        names = [int(file.stem) for file in rundir.numbered_tables(path / rundir.INBOX)]
        for file in (path / rundir.INBOX).glob(".*"):
            file.unlink(missing_ok=True)
        return cls(
            path,
            {str(run.id): run.without(*_RECEIVER_FIELDS) for run in runs},
            Counter(received.skipped),
            Counter(received.changed),
            received.requests,
            max(names, default=-1) + 1,
            is_waiting=bool(names),
            is_left=bool(names),
            duplicates=received.doubled,
            steps_are_derived=has_derived_steps(content),
        )

    def merge_small_files(self) -> None:
        """Merge the small waiting files: spans of other programs, which never end, add a file per commit.

        If the process is killed in between, some spans are stored twice; they count once. If the disk cannot be
        written, the files stay unchanged.
        """
        small = [file for file in (self.path / rundir.INBOX).glob("[0-9]*.parquet") if _size(file) < SMALL_FILE]
        merged = self.path / rundir.INBOX / ".whole.staged"
        with contextlib.suppress(duckdb.Error, OSError), table.connect(1) as con:
            con.execute(f"CREATE TEMP VIEW staged AS SELECT {_NAMES} FROM {table.parquet(small)}")
            table.write_parquet(con, "staged", merged)
            with self.lock:
                os.replace(merged, merged.with_name(f"{self.files:09d}.parquet"))
                self.files += 1
            for file in small:
                file.unlink(missing_ok=True)
        self.files_when_merged = self.files

    def summary(self, run: Run) -> str:
        """Return the numbers of steps, spans and ranks in it, as text."""
        counts = "count(DISTINCT (trace_id, step, rank)) FILTER (step IS NOT NULL), count(*)"
        steps = spans = 0
        if segments := rundir.segments(self.path):  # a program may have recorded no step: then only its loop arrived
            with table.connect() as con:
                ((steps, spans),) = con.execute(f"SELECT {counts} FROM {table.parquet(segments)}").fetchall()
        ranks = f", {len(run.ranks)} ranks" if run.ranks else ""
        return f"{steps} steps, {spans} spans{ranks}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return SMALL_FILE


def _remove_if_empty(directory: Path) -> None:
    """Remove a run directory without spans: its receiver was killed just after it had created the directory."""
    folders = [directory / rundir.INBOX, directory / rundir.STEPS]
    leftovers = [*directory.glob(f".{rundir.RUN_FILE}.*.part"), *folders[0].glob(".*.staged*")]
    with contextlib.suppress(OSError):  # it is not empty, or not a directory
        if set(directory.iterdir()) <= {*folders, *leftovers}:
            for leftover in leftovers:
                leftover.unlink()
            for folder in filter(Path.is_dir, folders):
                folder.rmdir()
            directory.rmdir()
