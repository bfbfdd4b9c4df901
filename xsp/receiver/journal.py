"""Files from requests: an acknowledged request is on disk, and files on disk can be loaded.

```
OUT/
  train-1a2b3c4d/          a run, or all ranks of a distributed program
    run.json               description of the run; `"finished": false` until the spans are in order
    arrived/000000000.parquet   spans of requests that arrived together
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
import functools
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import duckdb

from xsp import rundir, table
from xsp.errors import OutputError, TraceError, XspError
from xsp.importers.contract import Losses
from xsp.importers.otlp import Reader, ScopeSpans
from xsp.ingest import jobs
from xsp.ingest.received import put_in_order
from xsp.ingest.write import has_derived_steps
from xsp.receiver.directories import Arrival, RunDirectory
from xsp.receiver.limits import BodyTooLarge
from xsp.run import Run
from xsp.schema import Span

FILES_PER_MERGE = 256
"""Number of files after which small waiting files are merged."""

MAX_RUNS = 64
"""Maximum number of runs in a request, because each of them gets separate files."""

CLOSING_S = 4.0
"""Seconds for requests that are in progress, and for the order of the spans, when the receiver ends."""

MAX_SPANS = 200_000
"""Maximum number of spans in a request, because its rows are in memory until they are written."""

MAX_CONCURRENT = 8
"""Requests that are decoded and written at a time; further ones wait, so that memory stays bounded."""

MAX_TRACES = 200_000
"""Maximum number of traces of runs in memory, by which other programs' spans in them find the run."""


class RequestResult(NamedTuple):
    """The result of a request."""

    spans: int
    rejected: int
    message: str
    """Reasons for which spans were rejected; empty if none was."""


class _Request(NamedTuple):
    """The decoded content of a request."""

    runs: list[Run]
    spans: dict[tuple[str, str], list[Span]]
    """Its spans by the id of their run, empty if they state none, and by their trace."""

    losses: Losses

    @classmethod
    def decode(cls, reader: Reader, parts: Iterable[ScopeSpans]) -> _Request:
        """Return the content of a request.

        Raises:
            TraceError: it cannot be decoded, or has more than `MAX_RUNS` runs.
            BodyTooLarge: it has more than `MAX_SPANS` spans.
        """
        spans: dict[tuple[str, str], list[Span]] = {}
        for span, run_id in reader.rows(parts):
            if reader.losses.spans > MAX_SPANS:
                raise BodyTooLarge(f"more than {MAX_SPANS} spans; send smaller requests")
            key = run_id, span.trace_id or ""
            found = spans.get(key)
            if found is None:
                spans[key] = [span]
            else:
                found.append(span)
        if len(reader.runs) > MAX_RUNS:
            raise TraceError(f"{len(reader.runs)} runs in one request, more than {MAX_RUNS}; send smaller requests")
        return cls(reader.runs, spans, reader.losses)


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

        self._turns = threading.BoundedSemaphore(MAX_CONCURRENT)
        self._engines: list[duckdb.DuckDBPyConnection] = []
        self._commits: dict[RunDirectory, GroupCommit[Arrival]] = {}
        self._is_closed = False
        self._ordering = threading.Lock()
        """Held while spans are put in order."""

        self._order_engine: duckdb.DuckDBPyConnection | None = None
        self._must_stop = False
        self._stage_numbers = itertools.count()
        self._jobs: dict[str, RunDirectory] = {}
        self._by_run: dict[str, RunDirectory] = {}
        self._by_trace: OrderedDict[str, RunDirectory] = OrderedDict()
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

    def store(self, parts: Iterable[ScopeSpans]) -> RequestResult:
        """Store the spans of a request; when this returns, they are on disk.

        Raises:
            TraceError: the request cannot be decoded; nothing of it was stored.
            BodyTooLarge: it has more than `MAX_SPANS` spans.
            OutputError: the disk cannot be written, or the receiver ends; nothing of it was stored, and it may be sent
                again.
        """
        losses = Losses()
        reader = Reader(losses)
        with self._turns:
            if self._is_closed:
                raise OutputError("the receiver is ending; send again")
            request = _Request.decode(reader, parts)
            if request.spans or request.runs:
                try:
                    self._write(request)
                except (duckdb.OperationalError, OSError) as error:
                    reason = str(error).splitlines()[0]
                    raise OutputError(f"{self.out}: spans cannot be written ({reason})") from error
                except (duckdb.Error, UnicodeError, OverflowError) as error:
                    reason = str(error).splitlines()[0]
                    raise TraceError(f"values that do not fit the span table ({reason})") from error
        rejected = sum(losses.skipped.values())
        with self._lock:
            self.spans += losses.spans
            self.rejected += rejected
        reasons = ", ".join(f"{count} because {reason}" for reason, count in losses.skipped.items())
        return RequestResult(losses.spans, rejected, f"{rejected} spans rejected: {reasons}" if rejected else "")

    def _write(self, request: _Request) -> None:
        """Write the spans of a request; if they belong to several directories, all are staged before any is renamed."""
        with self._lock:
            by_dir = self._sort_into_directories(request)
            for run_dir in by_dir:
                run_dir.staging += 1
        # The first directory counts the losses; only a Collector puts several runs into one request.
        arrivals = {
            run_dir: Arrival(spans, Losses() if index else request.losses)
            for index, (run_dir, spans) in enumerate(by_dir.items())
        }
        staged: dict[RunDirectory, Path | None] = {}
        try:
            if len(arrivals) == 1:
                ((run_dir, arrival),) = arrivals.items()
                self._commits_of(run_dir).add(arrival)
                return
            for run_dir, arrival in arrivals.items():
                staged[run_dir] = self._stage(run_dir, arrival.spans)
            for run_dir, path in staged.items():
                run_dir.publish([arrivals[run_dir]], path)
        except BaseException:
            for path in filter(None, staged.values()):
                path.unlink(missing_ok=True)
            raise
        finally:
            with self._lock:
                for run_dir in by_dir:
                    run_dir.staging -= 1

    def _commits_of(self, run_dir: RunDirectory) -> GroupCommit[Arrival]:
        with self._lock:
            if run_dir not in self._commits:
                self._commits[run_dir] = GroupCommit(functools.partial(self._commit, run_dir))
            return self._commits[run_dir]

    def _commit(self, run_dir: RunDirectory, arrivals: list[Arrival]) -> None:
        """Write what arrived for a directory to one file; only one thread at a time is here for each directory."""
        path = self._stage(run_dir, [span for arrival in arrivals for span in arrival.spans])
        try:
            run_dir.publish(arrivals, path)
        except BaseException:
            if path is not None:
                path.unlink(missing_ok=True)
            raise

    def _stage(self, run_dir: RunDirectory, spans: list[Span]) -> Path | None:
        """Write spans to a temporary file, flush it, and return its path; None if there are none."""
        if not spans:
            return None
        folder = run_dir.path / rundir.INBOX
        if not run_dir.path.is_dir():  # it was removed meanwhile; spans that arrive from now on are kept
            rundir.create(run_dir.path)
        folder.mkdir(exist_ok=True)
        path = folder / f".{next(self._stage_numbers):09d}.staged"
        with self._engine() as con:
            table.write_columns(list(zip(*spans, strict=True)), path, con)
        return path

    @contextlib.contextmanager
    def _engine(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield an engine for exclusive use; there are at most `MAX_CONCURRENT`."""
        con = self._engines.pop() if self._engines else table.connect_storing()
        try:
            yield con
        except BaseException:
            con.close()
            raise
        self._engines.append(con)

    def _sort_into_directories(self, request: _Request) -> dict[RunDirectory, list[Span]]:
        """Return the spans of a request for each directory; those of no run go to the run with their trace, else to
        `services`. The caller holds the lock.
        """
        by_dir: dict[RunDirectory, list[Span]] = {}
        for run in request.runs:
            traces = [trace for run_id, trace in request.spans if run_id == run.id]
            by_dir.setdefault(self._directory_of(run, traces), [])
        for (run_id, trace), spans in request.spans.items():
            run_dir = self._by_run[run_id] if run_id else self._by_trace.get(trace) or self._services()
            by_dir.setdefault(run_dir, []).extend(spans)
        return by_dir

    # --- which directory ------------------------------------------------------------------------------

    def _directory_of(self, run: Run, traces: list[str]) -> RunDirectory:
        """Return the directory of a run, with the latest description of the run, and its traces in a request."""
        run_id = str(run.id)
        run_dir = self._by_run.get(run_id)
        if run_dir is None:
            key = jobs.job_of(run, min(traces, default=""))
            run_dir = self._jobs.get(key) or self._create(run)
            self._jobs[key] = self._by_run[run_id] = run_dir
        previous = run_dir.runs.get(run_id)
        if previous is None or (run.end_ns or 0) >= (previous.end_ns or 0):
            run_dir.runs[run_id] = run
        self._remember(traces, run_dir)
        return run_dir

    def _remember(self, traces: Iterable[str], run_dir: RunDirectory) -> None:
        for trace in traces:
            self._by_trace[trace] = run_dir
            self._by_trace.move_to_end(trace)
        while len(self._by_trace) > MAX_TRACES:
            self._by_trace.popitem(last=False)

    def _services(self) -> RunDirectory:
        return self._jobs.get(jobs.SERVICES) or self._jobs.setdefault(jobs.SERVICES, self._create(Run.of({})))

    def _create(self, run: Run) -> RunDirectory:
        """Create a run directory; an existing directory with its name stays unchanged."""
        name, number = jobs.name_of(run), 1
        while (self.out / name).exists():
            number += 1
            name = f"{jobs.name_of(run)}-{number}"
        return RunDirectory(rundir.create(self.out / name))

    def _resume(self, path: Path) -> None:
        """Continue with a directory that an earlier receiver wrote."""
        try:
            run_dir = RunDirectory.left_at(path)
            files = [*rundir.segments(path), *rundir.numbered_tables(path / rundir.INBOX)]
        except TraceError as error:  # an entry is not a file: the directory stays as it is
            self._report(str(error))
            return
        if run_dir is None:
            return
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
            with table.connect() as con:
                rows = con.execute(f"SELECT DISTINCT trace_id FROM {table.parquet(files)}").fetchall()
        except duckdb.Error as error:
            self._report(f"{files[0].parent.parent}: damaged ({str(error).splitlines()[0]})")
            return []
        return [trace for (trace,) in rows]

    # --- in order -------------------------------------------------------------------------------------

    def tidy(self, include_unfinished: bool = False) -> None:
        """Put the spans of complete and quiet runs in order, and those that an earlier receiver left.

        Args:
            include_unfinished: include the other runs, because nothing more will arrive.
        """
        with self._ordering:
            with self._lock:
                run_dirs = list({id(job): job for job in self._jobs.values()}.values())
            for run_dir in sorted(run_dirs, key=lambda run_dir: run_dir.files):
                if self._must_stop or (self._is_closed and not include_unfinished):
                    return
                if run_dir.is_due() or (include_unfinished and run_dir.is_waiting):
                    self._put_in_order(run_dir)
                elif run_dir.files - run_dir.files_when_merged >= FILES_PER_MERGE:
                    run_dir.merge_small_files()

    def close(self, seconds: float = CLOSING_S) -> bool:
        """Stop accepting requests, and put the spans of all runs in order as far as the time suffices.

        Spans that are not in order then can be loaded nevertheless; the next receiver puts them in order.

        Args:
            seconds: time for requests in progress and the order.

        Returns:
            Whether no thread is still at work; if one is, the process may end nevertheless.
        """
        deadline_s = time.monotonic() + seconds
        self._is_closed = True
        turns = [self._turns.acquire(timeout=max(0.0, min(1.0, seconds / 8))) for _ in range(MAX_CONCURRENT)]
        for _ in filter(None, turns):  # requests in progress have ended; those that come now are refused
            self._turns.release()
        thread = threading.Thread(target=self.tidy, args=(True,), name="xsp-order", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline_s - time.monotonic()))
        self._must_stop = True
        for _ in range(20):  # a query may begin after it was interrupted
            if not thread.is_alive():
                break
            if (con := self._order_engine) is not None:
                with contextlib.suppress(duckdb.Error):  # it has just been closed
                    con.interrupt()
            thread.join(0.05)
        if waiting := [run_dir.path.name for run_dir in set(self._jobs.values()) if run_dir.is_waiting]:
            self._report(
                f"not in order yet: {', '.join(sorted(waiting))}; the next xsp serve --out {self.out} does it, and "
                "xsp can load it as it is"
            )
        if thread.is_alive():
            return False
        for con in self._engines:
            con.close()
        with self._lock:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None
        return True

    def _put_in_order(self, run_dir: RunDirectory) -> None:
        """Put the spans of a run in order; spans that arrive meanwhile wait for the next time."""
        with self._lock:
            files, run_dir.is_waiting = run_dir.files, False
        try:
            run = put_in_order(run_dir.path, run_dir.path, opened=self._hold_order_engine)
        except (XspError, duckdb.Error, OSError) as error:
            run_dir.is_waiting, run_dir.last_arrival_s = True, time.monotonic()
            if not self._must_stop:
                reason = str(error).splitlines()[0]
                self._report(f"{reason}; what arrived is kept in {run_dir.path}, and can be loaded")
            return
        finally:
            self._order_engine = None
        run_dir.is_left = False
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
        self._report(f"{run_dir.path}: {run_dir.summary(run)}")

    def _hold_order_engine(self, con: duckdb.DuckDBPyConnection) -> None:
        self._order_engine = con


Entry = TypeVar("Entry")


@dataclass(eq=False)
class _Waiting(Generic[Entry]):
    entry: Entry
    is_done: bool = False
    error: BaseException | None = None


class GroupCommit(Generic[Entry]):
    """Calls a function with all entries that wait at the same time; only one thread at a time is in the function.

    The first thread that finds nobody there commits what waits, its own entry included. What arrives meanwhile waits
    for the next turn, so that a flush of the disk serves more requests the more there are, and a single one at once.
    """

    def __init__(self, commit: Callable[[list[Entry]], None]) -> None:
        self._commit = commit
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[Entry]] = []
        self._is_busy = False

    def add(self, entry: Entry) -> None:
        """Return when an entry is committed.

        Raises:
            BaseException: what the function raised for this entry alone.
        """
        own = _Waiting(entry)
        with self._changed:
            self._waiting.append(own)
            while self._is_busy and not own.is_done:
                self._changed.wait()
            if not own.is_done:
                self._is_busy = True
                together, self._waiting = self._waiting, []
        if not own.is_done:
            try:
                self._commit_all(together)
            finally:
                with self._changed:
                    for waiting in together:
                        waiting.is_done = True
                    self._is_busy = False
                    self._changed.notify_all()
        if own.error is not None:
            raise own.error

    def _commit_all(self, together: list[_Waiting[Entry]]) -> None:
        """Commit entries together; after an error one by one, so that it is only that of the entry which causes it."""
        try:
            self._commit([waiting.entry for waiting in together])
        except Exception as error:
            if len(together) == 1:
                together[0].error = error
                return
            for waiting in together:
                self._commit_all([waiting])
