"""The work of the storing process on each step: correlate it, write its segment, and deliver it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import plugins, rundir, table
from xsp.correlate.evidence import correlate_columns, resolve
from xsp.run import Budget, Run
from xsp.samples import sampler
from xsp.samples.sampler import Sampler
from xsp.schema import COLUMNS, Rule, Span
from xsp.store import before, iterations, loop, merge


class StepWriter:
    """A run directory that is being written."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._con = table.connect_storing()
        self._live: Any = None
        self._sampler: Sampler | None = None
        self._lost_rows = 0

    def sample(self, process: int, rank: int, devices: Sequence[str]) -> None:
        """Start the thread that samples devices, process and machine.

        Args:
            process: id of the measured process.
            rank: rank of the measured process.
            devices: see `xsp.samples.sampler`.
        """
        self._sampler = Sampler(self._run, sampler.sources_for(process, devices), rank)
        self._sampler.start()

    def deliver_to(self, target: str, policy: str) -> None:
        """Deliver each step from now on, once it is on the disk.

        Raises:
            UsageError, PluginError: see `xsp.otlp.live.Live.check`.
        """
        self._live = plugins.sender()(self._run, target, policy)

    def add(self, step: int, columns: Sequence[Sequence[Any]]) -> None:
        """Correlate the spans of one step and write them as its segment; the program may continue after the return.

        Args:
            step: number of the step.
            columns: the values of each of `COLUMNS`.
        """
        try:
            self._write(step, columns)
        except (UnicodeError, duckdb.InvalidInputException):  # such as a name that is not valid Unicode
            self._write(step, [list(map(table.text, values)) for values in columns])
        if self._live is not None:
            self._live.stored(step)

    def _write(self, step: int, columns: Sequence[Sequence[Any]]) -> None:
        own, earlier = before.split(columns)
        table.write_columns(correlate_columns(own), rundir.segment(self._run, step), self._con)
        if earlier[0]:
            path = rundir.before(self._run, step)
            path.parent.mkdir(exist_ok=True)
            table.write_columns(correlate_columns(earlier), path, self._con)

    def add_requests(self, columns: Sequence[Sequence[Any]]) -> None:
        """Write a portion of requests and engine steps, as the values of each of `COLUMNS`."""
        portions = rundir.numbered_tables(self._run / rundir.SERVING)
        path = self._run / rundir.SERVING / f"{len(portions):06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        try:
            table.write_columns(columns, path, self._con)
        except (UnicodeError, duckdb.InvalidInputException):
            table.write_columns([list(map(table.text, values)) for values in columns], path, self._con)

    def add_to_loop(self, rows: bytes, offset_ns: int) -> None:
        """Append rows of the loop; see `xsp.record.loop`. Rows that cannot be written are counted."""
        try:
            loop.append(self._run, rows, offset_ns)
        except OSError:
            self._lost_rows += len(rows) // loop.ROW_BYTES

    def finish(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the steps and write the final `run.json`.

        Args:
            content: content of `run.json`, a `Run` or a mapping for one.

        Returns:
            The number of segments, the number of spans of the merged trace, and the result of the delivery.
        """
        start_ns = time.monotonic_ns()
        run, idle_ns = Run.of(content), 0.0
        loop.create_table(self._con, [self._run])
        loop.write(self._con, self._run)
        segments = rundir.segments(self._run)
        summary: dict[str, Any] = {"segments": len(segments)}
        if segments:
            self._con.execute(
                f"CREATE OR REPLACE VIEW spans AS SELECT * FROM {table.parquet(segments, same_columns=True)}"
            )
            table.hold(self._con, ("spans",), table.MOST_HELD)
            merge.merge(self._con, run)
            idle_ns = iterations.idle_hooks_ns(self._con, run)
            table.write_parquet(self._con, "merged", self._run / rundir.MERGED_FILE)
            summary["spans"] = self._con.execute("SELECT count(*) FROM merged").fetchall()[0][0]
        if self._sampler is not None:
            run |= {"samples": self._end_sampling()}
        if self._lost_rows:
            text = f"{self._lost_rows} rows of the loop were not stored: the times of the steps are incomplete"
            run = run.with_notes("xsp", [text])
        if run.budget is not None and "program_percent" not in run.budget:  # else this is a repeated merge
            run |= {"budget": _with_end(run.budget, time.monotonic_ns() - start_ns, round(idle_ns))}
        rundir.write_run(self._run, run)
        if self._live is not None:
            summary["delivery"] = self._live.finish()
        return summary

    def close(self) -> None:
        """Stop sampling, which still runs if the program was killed before `finish`, and stop the delivery."""
        self._end_sampling()
        if self._live is not None:
            self._live.close()

    def _end_sampling(self) -> dict[str, Any] | None:
        sampler, self._sampler = self._sampler, None
        return sampler.finish() if sampler is not None else None


def _with_end(budget: Budget, merging_ns: int, idle_ns: int) -> Budget:
    """Return the budget with the time of merging and of idle collectors, and with the percentage by which profiling
    slowed the program."""
    budget |= {"idle_ns": idle_ns}
    bare_ns = budget.wall_ns - budget.added_ns
    budget |= {"end_ns": budget.end_ns + merging_ns}
    return budget | {"program_percent": round(100 * budget.added_ns / bare_ns, 2) if bare_ns > 0 else None}


def resolve_run(run: Path, serialised: Path) -> int:
    """Resolve the ambiguous parents of a run with its serialised re-run, and merge the run again.

    Returns:
        Number of spans that got a parent.

    Raises:
        TraceError: one of the two runs cannot be read.
    """
    con = table.connect_storing()
    names = ", ".join(column.name for column in COLUMNS)

    def read(segment: Path) -> list[Span]:
        rows = con.execute(f"SELECT {names} FROM {table.parquet(segment)}").fetchall()
        return [Span._make(row) for row in rows]

    serial = [span for segment in rundir.segments(serialised) for span in read(segment)]
    resolved = 0
    for segment in rundir.segments(run):
        ambiguous = read(segment)
        after = resolve(ambiguous, serial)
        new_parents = sum(span.parent_rule == Rule.SERIALISED for span in after)
        if new_parents:
            resolved += new_parents
            table.write_columns(list(zip(*after, strict=True)), segment, con)
    if resolved:
        StepWriter(run).finish(rundir.read_run(run))
    return resolved
