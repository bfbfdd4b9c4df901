"""Files from requests: an acknowledged request is on disk, and files on disk can be loaded.

```
OUT/
  train-1a2b3c4d/          a run, or all ranks of a distributed program
    run.json               description of the run; `"finished": false` until the spans are in order
    arrived/000000000.parquet   spans from one request
    steps/ merged.parquet  as in any run, once the spans are in order
  services/                spans in traces without a run of xsp
```

A request is stored completely or not at all: its files are written under temporary names and flushed, then renamed
together. The spans are put in order, without duplicates, when all ranks have reported that they are finished and
no more spans arrive, or when the receiver ends. If a directory is not in order yet, for example because the receiver
was killed, `xsp.load` puts the spans in order temporarily, and leaves the directory unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import duckdb

from xsp import rundir, table
from xsp.errors import OutputError, TraceError, XspError
from xsp.importers.contract import Losses
from xsp.importers.otlp import Part, Reader
from xsp.ingest import jobs
from xsp.ingest.received import put_in_order
from xsp.ingest.write import NO_STEPS, SOURCE, has_derived_steps
from xsp.run import Run
from xsp.schema import COLUMNS

QUIET_S = 2.0
"""Seconds without a span after which a run that reported its end is put in order."""

FILES_PER_MERGE = 256
"""Number of files after which small waiting files are merged."""

SMALL_FILE = 4 << 20
"""Bytes below which a file is merged with others."""

MAX_RUNS = 64
"""Maximum number of runs in a request, because each of them gets separate files."""

CLOSING_S = 1.0
"""Seconds to wait for each request that is still in progress when the receiver ends."""

MAX_CONCURRENT = 8
"""Requests that are decoded and written at a time; further ones wait, so that memory stays bounded."""

MAX_TRACES = 200_000
"""Maximum number of traces of runs in memory, by which other programs' spans in them find the run."""

_NAMES = ", ".join(column.name for column in COLUMNS)


class Answer(NamedTuple):
    """The result of a request."""

    spans: int
    rejected: int
    message: str
    """Reasons for which spans were rejected; empty if none was."""


@dataclass
class _RunDirectory:
    """A run directory that is being received."""

    path: Path
    runs: dict[str, Run] = field(default_factory=dict)
    """Descriptions of its runs, by id; empty for other programs' spans."""

    skipped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    files: int = 0
    is_waiting: bool = False
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


class RunWriter:
    """A writer of run directories that accepts decoded requests from any number of threads."""

    def __init__(self, out: Path, report: Callable[[str], None]) -> None:
        """Continue with the directories that an earlier receiver left.

        Args:
            out: folder of the run directories.
            report: callback for messages to the user.

        Raises:
            OutputError: it cannot be written to.
        """
        self.out = out.expanduser().absolute()
        self.spans = 0
        self.rejected = 0
        self.finished = 0
        self._report = report
        self._lock = threading.Lock()
        """Guards the state in memory; its holder does not wait for the disk, except to make or remove a directory."""

        self._engines: queue.LifoQueue[duckdb.DuckDBPyConnection | None] = queue.LifoQueue()
        for _ in range(MAX_CONCURRENT):
            self._engines.put(None)
        self._stage_numbers = itertools.count()
        self._jobs: dict[str, _RunDirectory] = {}
        self._by_run: dict[str, _RunDirectory] = {}
        self._by_trace: OrderedDict[str, _RunDirectory] = OrderedDict()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock_file = rundir.lock(self.out)
        except OSError as error:
            raise OutputError(f"{self.out}: cannot be written ({error.strerror})") from error
        if self._lock_file is None:
            raise OutputError(f"{self.out}: another receiver writes there; choose another directory with --out")
        for path in sorted(self.out.iterdir()):
            self._resume(path)

    # --- a request ------------------------------------------------------------------------------------

    def store(self, parts: Iterable[Part]) -> Answer:
        """Store the spans of a request; when this returns, they are on disk.

        Raises:
            TraceError: the request cannot be decoded; nothing of it was stored.
            OutputError: the disk cannot be written; nothing of it was stored, and it may be sent again.
        """
        losses = Losses()
        reader = Reader(losses)
        with self._engine() as con:
            try:
                jobs.append_rows(con, reader.rows(parts))
                self._write_files(con, reader)
            except (duckdb.Error, OSError) as error:
                reason = str(error).splitlines()[0]
                raise OutputError(f"{self.out}: spans cannot be written ({reason})") from error
        rejected = sum(losses.skipped.values())
        with self._lock:
            self.spans += losses.spans
            self.rejected += rejected
        reasons = ", ".join(f"{count} because {reason}" for reason, count in losses.skipped.items())
        return Answer(losses.spans, rejected, f"{rejected} spans rejected: {reasons}" if rejected else "")

    @contextlib.contextmanager
    def _engine(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield an engine for exclusive use; wait if all are in use."""
        con = self._engines.get()
        reusable = None
        try:
            if con is None:
                con = table.connect()
                con.execute("SET threads = 1")
            yield con
            con.execute("DROP TABLE IF EXISTS arrived")
            reusable = con
        finally:
            if reusable is None and con is not None:
                con.close()
            self._engines.put(reusable)

    def _write_files(self, con: duckdb.DuckDBPyConnection, reader: Reader) -> None:
        """Write the spans of each run to a temporary file, then rename all files into place."""
        if len(reader.runs) > MAX_RUNS:
            raise TraceError(f"{len(reader.runs)} runs in one request, more than {MAX_RUNS}; send smaller requests")
        with self._lock:
            run_dirs = [self._directory_of(con, run) for run in reader.runs]
            conditions = [(self._by_run[str(run.id)], f"run = {table.literal(str(run.id))}") for run in reader.runs]
            conditions += self._other_conditions(con)
            for run_dir, _ in conditions:
                run_dir.staging += 1
        staged: list[tuple[_RunDirectory, Path]] = []
        try:
            for run_dir, condition in conditions:
                if path := self._stage(con, run_dir, condition):
                    staged.append((run_dir, path))
            self._publish(con, run_dirs, staged, reader.losses)
        except BaseException:
            for _, path in staged:
                path.unlink(missing_ok=True)
            raise
        finally:
            with self._lock:
                for run_dir, _ in conditions:
                    run_dir.staging -= 1

    def _publish(
        self,
        con: duckdb.DuckDBPyConnection,
        run_dirs: list[_RunDirectory],
        staged: list[tuple[_RunDirectory, Path]],
        losses: Losses,
    ) -> None:
        """Rename the files of a request into place, while no other request changes the same directories."""
        directories = {id(run_dir): run_dir for run_dir in (*run_dirs, *(run_dir for run_dir, _ in staged))}
        # All requests take the locks in the same order, which prevents a deadlock.
        by_path = sorted(directories.values(), key=lambda directory: directory.path)
        with contextlib.ExitStack() as locks:
            for run_dir in by_path:
                locks.enter_context(run_dir.lock)
            for index, run_dir in enumerate(directories.values()):
                run_dir.requests += 1
                if index == 0:  # only a Collector puts several runs into one request
                    run_dir.skipped.update(losses.skipped)
                    run_dir.changed.update(losses.changed)
                run_dir.path.mkdir(exist_ok=True)
                rundir.write_run(run_dir.path, run_dir.content())
            for run_dir, path in staged:
                os.replace(path, path.with_name(f"{run_dir.files:09d}.parquet"))
                run_dir.files += 1
                run_dir.is_waiting, run_dir.last_arrival_s = True, time.monotonic()
                if run_dir.files % FILES_PER_MERGE == 0:
                    self._merge_small_files(con, run_dir)

    def _merge_small_files(self, con: duckdb.DuckDBPyConnection, run_dir: _RunDirectory) -> None:
        """Merge the small waiting files: spans of other programs, which never end, add one file per request.

        If the process is killed in between, some spans are stored twice; they count once. If the disk cannot be
        written, the files stay unchanged.
        """
        small = [file for file in (run_dir.path / rundir.INBOX).glob("[0-9]*.parquet") if _size(file) < SMALL_FILE]
        merged = run_dir.path / rundir.INBOX / f".{run_dir.files:09d}-whole.staged"
        with contextlib.suppress(duckdb.Error, OSError):
            con.execute(f"CREATE OR REPLACE TEMP VIEW staged AS SELECT {_NAMES} FROM {table.parquet(small)}")
            table.write_parquet(con, "staged", merged)
            os.replace(merged, merged.with_name(f"{run_dir.files:09d}.parquet"))
            run_dir.files += 1
            for file in small:
                file.unlink(missing_ok=True)

    def _stage(self, con: duckdb.DuckDBPyConnection, run_dir: _RunDirectory, condition: str) -> Path | None:
        """Write the spans of one run to a temporary file; return its path, None if there are no spans.

        Args:
            con: engine with the received spans.
            run_dir: directory of the run.
            condition: SQL condition for its spans.
        """
        con.execute(f"CREATE OR REPLACE TEMP VIEW staged AS SELECT {_NAMES} FROM arrived WHERE {condition}")
        if not con.execute("SELECT 1 FROM staged LIMIT 1").fetchall():
            return None
        folder = run_dir.path / rundir.INBOX
        if not run_dir.path.is_dir():  # it was removed meanwhile; spans that arrive from now on are kept
            rundir.create(run_dir.path)
        folder.mkdir(exist_ok=True)
        path = folder / f".{next(self._stage_numbers):09d}.staged"
        table.write_parquet(con, "staged", path)
        return path

    # --- which directory ------------------------------------------------------------------------------

    def _directory_of(self, con: duckdb.DuckDBPyConnection, run: Run) -> _RunDirectory:
        """Return the directory of a run, with the latest description of the run."""
        run_id = str(run.id)
        run_dir = self._by_run.get(run_id)
        traces = [
            trace
            for (trace,) in con.execute("SELECT DISTINCT trace_id FROM arrived WHERE run = ?", [run_id]).fetchall()
        ]
        if run_dir is None:
            key = jobs.job_of(run, min(traces, default=""))
            run_dir = self._jobs.get(key) or self._create(run)
            self._jobs[key] = self._by_run[run_id] = run_dir
        previous = run_dir.runs.get(run_id)
        if previous is None or (run.end_ns or 0) >= (previous.end_ns or 0):
            run_dir.runs[run_id] = run
        self._remember(traces, run_dir)
        return run_dir

    def _remember(self, traces: Iterable[str], run_dir: _RunDirectory) -> None:
        for trace in traces:
            self._by_trace[trace] = run_dir
            self._by_trace.move_to_end(trace)
        while len(self._by_trace) > MAX_TRACES:
            self._by_trace.popitem(last=False)

    def _other_conditions(self, con: duckdb.DuckDBPyConnection) -> list[tuple[_RunDirectory, str]]:
        """Return directories and conditions for spans of no run: the run with their trace, else `services`."""
        rows = con.execute("SELECT DISTINCT trace_id FROM arrived WHERE run = '' ORDER BY ALL").fetchall()
        traces: dict[int, tuple[_RunDirectory, list[str]]] = {}
        for (trace,) in rows:
            run_dir = self._by_trace.get(trace) or self._services()
            traces.setdefault(id(run_dir), (run_dir, []))[1].append(table.literal(trace))
        return [(run_dir, f"run = '' AND trace_id IN ({', '.join(names)})") for run_dir, names in traces.values()]

    def _services(self) -> _RunDirectory:
        return self._jobs.get(jobs.SERVICES) or self._jobs.setdefault(jobs.SERVICES, self._create(Run.of({})))

    def _create(self, run: Run) -> _RunDirectory:
        """Create a run directory; an existing directory with its name stays unchanged."""
        name, number = jobs.name_of(run), 1
        while (self.out / name).exists():
            number += 1
            name = f"{jobs.name_of(run)}-{number}"
        return _RunDirectory(rundir.create(self.out / name))

    def _resume(self, path: Path) -> None:
        """Continue with a directory that an earlier receiver wrote."""
        try:
            content = rundir.read_run(path)
        except TraceError:
            _remove_if_empty(path)
            return  # it is not a run directory
        received = content.received
        if received is None:
            return
        runs = received.runs or content.ranks or ((content,) if content.id is not None else ())
        names = [int(file.stem) for file in rundir.numbered_tables(path / rundir.INBOX)]
        for file in (path / rundir.INBOX).glob(".*"):
            file.unlink(missing_ok=True)
        run_dir = _RunDirectory(
            path,
            {str(run.id): run.without(*_RECEIVER_FIELDS) for run in runs},
            Counter(received.skipped),
            Counter(received.changed),
            received.requests,
            max(names, default=-1) + 1,
            bool(names),
            duplicates=received.doubled,
            steps_are_derived=has_derived_steps(content),
        )
        files = [*rundir.segments(path), *(path / rundir.INBOX).glob("*.parquet")]
        traces = self._traces(files)
        for run_id, run in run_dir.runs.items():
            self._by_run[run_id] = self._jobs[jobs.job_of(run, min(traces, default=""))] = run_dir
        if run_dir.runs:
            self._remember(traces, run_dir)
        else:
            self._jobs[jobs.SERVICES] = run_dir

    def _traces(self, files: list[Path]) -> list[str]:
        if not files:
            return []
        try:
            with self._engine() as con:
                rows = con.execute(f"SELECT DISTINCT trace_id FROM {table.parquet(files)}").fetchall()
        except duckdb.Error as error:
            self._report(f"{files[0].parent.parent}: damaged ({str(error).splitlines()[0]})")
            return []
        return [trace for (trace,) in rows]

    # --- in order -------------------------------------------------------------------------------------

    def tidy(self, include_unfinished: bool = False) -> None:
        """Put the spans of complete and quiet runs in order.

        Args:
            include_unfinished: include the other runs, because nothing more will arrive.
        """
        with self._lock:
            now = time.monotonic()
            due = [
                run_dir
                for run_dir in {id(job): job for job in self._jobs.values()}.values()
                if run_dir.is_waiting
                and (include_unfinished or (run_dir.is_complete and now - run_dir.last_arrival_s > QUIET_S))
            ]
        for run_dir in due:
            self._put_in_order(run_dir)

    def close(self) -> None:
        """Put the spans of all runs in order, and stop accepting requests."""
        self.tidy(include_unfinished=True)
        for _ in range(MAX_CONCURRENT):
            with contextlib.suppress(queue.Empty):
                if (con := self._engines.get(timeout=CLOSING_S)) is not None:
                    con.close()
        with self._lock:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def _put_in_order(self, run_dir: _RunDirectory) -> None:
        """Put the spans of a run in order; spans that arrive meanwhile wait for the next time."""
        with self._lock:
            files, run_dir.is_waiting = run_dir.files, False
        try:
            run = put_in_order(run_dir.path, run_dir.path)
        except (XspError, duckdb.Error, OSError) as error:
            run_dir.is_waiting, run_dir.last_arrival_s = True, time.monotonic()
            self._report(f"{str(error).splitlines()[0]}; what arrived is kept in {run_dir.path}, and can be loaded")
            return
        with run_dir.lock:
            run_dir.duplicates = run.received.doubled if run.received is not None else 0
            run_dir.steps_are_derived = has_derived_steps(run)
            if has_more := run_dir.files != files:
                rundir.write_run(run_dir.path, run_dir.content())
        if not has_more:
            with self._lock, contextlib.suppress(OSError):
                self.finished += 1
                if not run_dir.staging:
                    (run_dir.path / rundir.INBOX).rmdir()
        self._report(f"{run_dir.path}: {_summary(run_dir.path, run)}")


_RECEIVER_FIELDS = ("format", "received", "ranks")
"""Fields of `run.json` that a receiver writes, and that do not come from the run."""


def _summary(directory: Path, run: Run) -> str:
    """Return the numbers of steps, spans and ranks in a run directory, as text."""
    counts = "count(DISTINCT (trace_id, step, rank)) FILTER (step IS NOT NULL), count(*)"
    steps = spans = 0
    if segments := rundir.segments(directory):  # a program may have recorded no step: then only its loop arrived
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
