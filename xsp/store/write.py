"""What the storing process does with a step: correlate it, write its segment, and have it delivered."""

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
from xsp.store import loop, merge


class Store:
    """One run directory that is being written."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._con = table.storing()
        self._live: Any = None
        self._sampler: Sampler | None = None
        self._loop_lost = 0

    def sample(self, process: int, rank: int, devices: Sequence[str]) -> None:
        """Begin to read what stands beside the spans, in a thread.

        Args:
            process: the number of the measured process.
            rank: of it.
            devices: see `xsp.samples.sampler`.
        """
        self._sampler = Sampler(self._run, sampler.of(process, devices), rank)
        self._sampler.start()

    def deliver_to(self, target: str, policy: str) -> None:
        """Have each step delivered from now on, once it is on the disk.

        Raises:
            UsageError, PluginError: see `xsp.otlp.live.Live.check`.
        """
        self._live = plugins.sender()(self._run, target, policy)

    def add(self, step: int, columns: Sequence[Sequence[Any]]) -> None:
        """Correlate one step's spans and write them as its segment; return when the program may go on.

        Args:
            step: its number.
            columns: the values of each of `COLUMNS`.
        """
        try:
            self._write(step, columns)
        except (UnicodeError, duckdb.InvalidInputException):  # as of a name that holds what is no text
            self._write(step, [list(map(table.text, values)) for values in columns])
        if self._live is not None:
            self._live.stored(step)

    def _write(self, step: int, columns: Sequence[Sequence[Any]]) -> None:
        table.write_columns(correlate_columns(columns), rundir.segment(self._run, step), self._con)

    def add_to_loop(self, rows: bytes, offset_ns: int) -> None:
        """Append rows of the loop; see `xsp.record.loop`. Those that the disk refuses are counted."""
        try:
            loop.append(self._run, rows, offset_ns)
        except OSError:
            self._loop_lost += len(rows) // loop.ROW_BYTES

    def finish(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the steps and write `run.json` for good.

        Args:
            content: what is known of the run, a `Run` or what makes one.

        Returns:
            How many steps and spans the merged trace stands on, and what became of the delivery.
        """
        began = time.monotonic_ns()
        run = Run.of(content)
        loop.show(self._con, [self._run])
        loop.write(self._con, self._run)
        segments = rundir.segments(self._run)
        summary: dict[str, Any] = {"segments": len(segments)}
        if segments:
            self._con.execute(f"CREATE OR REPLACE VIEW spans AS SELECT * FROM {table.parquet(segments, alike=True)}")
            merge.merge(self._con, run)
            table.write_parquet(self._con, "merged", self._run / rundir.MERGED_FILE)
            summary["spans"] = self._con.execute("SELECT count(*) FROM merged").fetchall()[0][0]
        if self._sampler is not None:
            run |= {"samples": self._end_sampling()}
        if self._loop_lost:
            text = f"{self._loop_lost} rows of the loop were not stored: how long the program's steps took is not whole"
            run = run.noted("xsp", [text])
        if run.budget is not None and "program_percent" not in run.budget:  # else it ran before, and is merged again
            run |= {"budget": _with_end(run.budget, time.monotonic_ns() - began)}
        rundir.write_run(self._run, run)
        if self._live is not None:
            summary["delivery"] = self._live.finish()
        return summary

    def close(self) -> None:
        """End what samples (a program that was killed did not come to `finish`) and what delivers."""
        self._end_sampling()
        if self._live is not None:
            self._live.close()

    def _end_sampling(self) -> dict[str, Any] | None:
        sampler, self._sampler = self._sampler, None
        return sampler.finish() if sampler is not None else None


def _with_end(budget: Budget, merging_ns: int) -> Budget:
    """Return what profiling cost, with what merging took, and by how much it made the whole program longer."""
    own_ns = budget.spent_ns + budget.start_ns + budget.end_ns
    bare_ns = budget.wall_ns - own_ns
    percent = round(100 * (own_ns + merging_ns) / bare_ns, 2) if bare_ns > 0 else None
    return budget | {"end_ns": budget.end_ns + merging_ns, "program_percent": percent}


def resolve_run(run: Path, serialised: Path) -> int:
    """Decide the ambiguous parents of a run by its serialised re-run, and merge it again.

    Returns:
        How many spans found a parent.

    Raises:
        TraceError: one of the two runs cannot be read.
    """
    con = table.storing()
    names = ", ".join(column.name for column in COLUMNS)

    def read(segment: Path) -> list[Span]:
        rows = con.execute(f"SELECT {names} FROM {table.parquet(segment)}").fetchall()
        return [Span._make(row) for row in rows]

    serial = [span for segment in rundir.segments(serialised) for span in read(segment)]
    found = 0
    for segment in rundir.segments(run):
        before = read(segment)
        after = resolve(before, serial)
        gained = sum(span.parent_rule == Rule.SERIALISED for span in after)
        if gained:
            found += gained
            table.write_columns(list(zip(*after, strict=True)), segment, con)
    if found:
        Store(run).finish(rundir.read_run(run))
    return found
