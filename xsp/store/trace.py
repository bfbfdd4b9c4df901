"""A trace: the span table of a workload after correlation, and the run that it came from."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb

from xsp import summary, table
from xsp.run import Run
from xsp.schema import LOOP_COLUMNS, SAMPLE_COLUMNS, Level


@dataclass(frozen=True)
class Rung:
    """What the timed steps of one rung say about the step as a whole."""

    level: int
    steps: int
    step_ns: float
    added_ns: float | None
    """Against the next rung outwards; None for the outermost."""
    added: summary.Interval | None
    spans: int
    """Spans per step that this rung adds on the host; device work costs the step nothing."""

    alone_ns: float | None = None
    """What one of them costs by the calibration, which runs a small workload by itself; None where there is none."""

    @property
    def per_span_ns(self) -> float:
        """What one span of this rung adds by the steps alone; 0 where nothing was measured to be added."""
        return max(0.0, self.added_ns) / self.spans if self.added_ns and self.spans else 0.0

    @property
    def cost_ns(self) -> float:
        """What one span of this rung adds to its step; 0 where nothing was measured to be added.

        Where there is a calibration, it is the mean of what the steps say and of what that says, each weighted by its
        precision: a difference of a few steps on a busy machine says many times what a span can cost.
        """
        found = self._weighted()
        return found[0] if found is not None else self.per_span_ns

    @property
    def cost(self) -> summary.Interval:
        """The interval of `cost_ns`."""
        found = self._weighted()
        if found is not None:
            mean, deviation = found
            return summary.Interval(max(0.0, mean - _Z * deviation), mean + _Z * deviation)
        if self.added is None or not self.spans:
            return summary.Interval(self.cost_ns, self.cost_ns)
        return summary.Interval(max(0.0, self.added.lo) / self.spans, max(0.0, self.added.hi) / self.spans)

    def _weighted(self) -> tuple[float, float] | None:
        """Return the mean of both sources and its standard deviation; None where one of them says nothing.

        The standard deviation of the calibration is taken to be as large as itself: in a program, a span may cost a
        multiple of what it costs in a small loop.
        """
        if not self.alone_ns or self.added_ns is None or not self.spans:
            return None
        by_steps = 0.0
        if self.added is not None:
            deviation = (self.added.hi - self.added.lo) / (2 * _Z) / self.spans
            if not deviation:
                return None
            by_steps = deviation**-2
        alone = self.alone_ns**-2
        mean = (by_steps * self.added_ns / self.spans + alone * self.alone_ns) / (by_steps + alone)
        return max(0.0, mean), (by_steps + alone) ** -0.5


_Z = 1.96
"""Standard deviations from the mean to either end of an interval of 95 %."""


class Trace:
    """Spans in tables that SQL can be asked of, and `run`, what `run.json` says (see `xsp.run.Run`).

    Two views stand in the engine: `spans`, every span of every recorded step, and `merged`, one step with true times
    (see `xsp.store.merge`). Both have the columns of `xsp.schema.COLUMNS`; `merged` has those of
    `xsp.schema.MERGED_COLUMNS` as well. A third, `loop`, has a row for each step that the program ran, recorded or not,
    with the columns of `xsp.schema.LOOP_COLUMNS`; it is empty where nothing told. A fourth, `samples`, has what was
    read meanwhile of devices and machine, with the columns of `xsp.schema.SAMPLE_COLUMNS`; it is empty where nothing
    was.
    """

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        run: Mapping[str, Any],
        rungs: Sequence[Rung] = (),
        path: Path | None = None,
    ) -> None:
        """Take over an engine that holds `spans`, `merged` and `alike`; `xsp.store.merge.true_trace` makes one.

        Args:
            con: with those tables or views.
            run: what is known of the run; may be empty.
            rungs: that have timed steps, outermost first.
            path: where the trace was loaded from.
        """
        self.con = con
        self._made: set[str] = set()
        self.run = Run.of(run)
        self.rungs = list(rungs)
        self.path = path
        for name, columns in (("samples", SAMPLE_COLUMNS), ("loop", LOOP_COLUMNS)):
            if not table.holds(con, name):
                table.create(con, name, columns)

    def __repr__(self) -> str:
        """Return what a notebook shows: the name, how many spans of how many steps, and the directory or file."""
        spans, steps = self.con.execute("SELECT count(*), count(DISTINCT step) FROM spans").fetchall()[0]
        where = f" in {self.path}" if self.path else ""
        return f"<Trace {self.name!r}: {spans:,} spans of {steps:,} step{'s' * (steps != 1)}{where}>"

    @property
    def spans(self) -> duckdb.DuckDBPyRelation:
        """Every span of every recorded step, as a relation: `.df()`, `.pl()`, `.show()`, `.filter()`."""
        return self.con.sql("SELECT * FROM spans")

    @property
    def merged(self) -> duckdb.DuckDBPyRelation:
        """The spans of one step with true times, as a relation."""
        return self.con.sql("SELECT * FROM merged")

    @property
    def samples(self) -> duckdb.DuckDBPyRelation:
        """What was read of devices, process and machine while the steps ran, as a relation, in the order of time."""
        return self.con.sql("SELECT * FROM samples ORDER BY time_ns, rank, device, name")

    @property
    def loop(self) -> duckdb.DuckDBPyRelation:
        """Every step that the program ran, recorded or not, as a relation, in the order of time."""
        return self.con.sql("SELECT * FROM loop ORDER BY start_ns, rank")

    @property
    def kind(self) -> int | None:
        """The kind of step that `merged` and the figures are of, a number of `loop`; None where nothing tells kinds."""
        found = self.con.execute("SELECT any_value(step_kind) FROM alike").fetchall()
        return int(found[0][0]) if found[0][0] is not None else None

    @property
    def rank(self) -> int:
        """The rank that `merged` and the figures are of: the lowest that is there."""
        found = self.con.execute("SELECT any_value(rank) FROM alike").fetchall()
        return int(found[0][0] or 0)

    def at(self, level: Level) -> duckdb.DuckDBPyRelation:
        """Return the merged spans of one level, by start."""
        return self.con.sql(f"SELECT * FROM merged WHERE level = {int(level)} ORDER BY start_ns")

    def children(self, span_id: str) -> duckdb.DuckDBPyRelation:
        """Return the merged spans whose parent has this id, by start."""
        return self.con.sql(f"SELECT * FROM merged WHERE parent_id = {table.literal(span_id)} ORDER BY start_ns")

    def sql(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Ask any SQL of `spans`, `merged` and `samples`."""
        return self.con.sql(query, params=params)

    def hold(self, most: int) -> None:
        """Copy the spans of a run directory into memory, so that not every query reads its files.

        Args:
            most: spans; a run with more is left on the disk.
        """
        if self.path is None or not self.path.is_dir():
            return
        with contextlib.suppress(duckdb.Error):  # a damaged file is the error of the query that needs it
            ((count,),) = self.con.execute("SELECT count(*) FROM spans").fetchall()
            views = self.con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
            for name in {"spans", "merged"} & {name for (name,) in views} if count <= most else ():
                self.con.execute(f"CREATE OR REPLACE TABLE held_{name} AS FROM {name}")
                self.con.execute(f"DROP VIEW {name}")
                self.con.execute(f"ALTER TABLE held_{name} RENAME TO {name}")

    def once(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Make a temporary table, unless this trace has made it: what several analyses start from."""
        if not self.has_made(name):
            self.con.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}", params)
            self._made.add(name)

    def has_made(self, name: str) -> bool:
        """Return whether `once` has made a table."""
        return name in self._made

    def has(self, level: Level) -> bool:
        """Return whether the merged step holds spans of a level."""
        return int(level) in self._levels

    @cached_property
    def _levels(self) -> set[int]:
        return {level for (level,) in self.con.execute("SELECT DISTINCT level FROM merged").fetchall()}

    @property
    def name(self) -> str:
        """What the run was called, else the file's name."""
        return self.run.name or (self.path.name if self.path else "trace")
