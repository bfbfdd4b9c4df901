"""A trace: the span table of a workload after correlation, and the run that it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb

from xsp import stats, table
from xsp.run import Run
from xsp.schema import COLUMNS, LOOP_COLUMNS, SAMPLE_COLUMNS, Level
from xsp.serving import COLLECTOR
from xsp.store import iterations
from xsp.texts import counted

T = TypeVar("T")


@dataclass(frozen=True)
class Rung:
    """Figures of the whole step, from the timed steps of one rung."""

    level: int
    steps: int
    step_ns: float
    added_ns: float | None
    """Nanoseconds that the rung adds to the step of the next outer rung; None for the outermost rung."""
    added_interval: stats.Interval | None
    spans: int
    """Spans per step that this rung adds on the host; device work costs the step nothing."""

    calibrated_ns: float | None = None
    """Nanoseconds per span according to the calibration, which runs a small workload alone; None without one."""

    @property
    def per_span_ns(self) -> float:
        """Nanoseconds that one span of this rung adds according to the steps alone; 0 if they show no added time."""
        return max(0.0, self.added_ns) / self.spans if self.added_ns and self.spans else 0.0

    @cached_property
    def cost_ns(self) -> float:
        """Nanoseconds that one span of this rung adds to its step; 0 if no added time was measured.

        With a calibration, it is the mean of the estimates from steps and calibration, each weighted by its precision:
        on a busy machine, the difference of a few steps may be many times the possible cost of a span.
        """
        weighted = self._weighted()
        return weighted[0] if weighted is not None else self.per_span_ns

    @cached_property
    def cost_interval(self) -> stats.Interval:
        """The 95 % interval of `cost_ns`."""
        weighted = self._weighted()
        if weighted is not None:
            mean, deviation = weighted
            half = stats.NORMAL * deviation
            return stats.Interval(max(0.0, mean - half), mean, mean + half)
        if self.added_interval is None or not self.spans:
            return stats.Interval(self.cost_ns, self.cost_ns, self.cost_ns)
        low, high = (max(0.0, end) / self.spans for end in self.added_interval.ends)
        return stats.Interval(low, self.cost_ns, high)

    def _weighted(self) -> tuple[float, float] | None:
        """Return the weighted mean of steps and calibration and its standard deviation; None if either is missing.

        The standard deviation of the calibration is assumed to equal its value: in a program, a span may cost a
        multiple of its cost in a small loop.
        """
        if not self.calibrated_ns or self.added_ns is None or not self.spans:
            return None
        steps_weight = 0.0
        if self.added_interval is not None:
            deviation = self.added_interval.half / stats.NORMAL / self.spans
            if not deviation:
                return None
            steps_weight = deviation**-2
        calibration_weight = self.calibrated_ns**-2
        mean = (steps_weight * self.added_ns / self.spans + calibration_weight * self.calibrated_ns) / (
            steps_weight + calibration_weight
        )
        return max(0.0, mean), (steps_weight + calibration_weight) ** -0.5


class Limits(NamedTuple):
    """Limits on a request's times in milliseconds, for goodput; None for no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    latency_ms: float | None = None
    itl_ms: float | None = None


class Trace:
    """Spans in tables for SQL queries, and `run`, the content of `run.json` (see `xsp.run.Run`).

    The engine holds eight tables or views. `spans` has every span of every recorded step, and `merged` one step with
    true times (see `xsp.store.merge`). Both have the columns of `xsp.schema.COLUMNS`; `merged` also has those of
    `xsp.schema.MERGED_COLUMNS`. `loop` has a row for each step that the program ran, recorded or not, with the columns
    of `xsp.schema.LOOP_COLUMNS`; it is empty if the source has no loop. `samples` has the values that were read from
    devices and machine during the run, with the columns of `xsp.schema.SAMPLE_COLUMNS`; it is empty without sampling.
    `before` has the columns of `spans`, and what was recorded in the iterations of recorded steps before these began.
    `serving` has the columns of `spans`, and the requests and all steps of engines, see `xsp.serving`. `bare_steps` and
    `undisturbed` have the rows of `loop` that figures come from, see `xsp.store.iterations.create_tables`.
    """

    limits: Limits | None = None
    """Limits within which figures of requests count requests."""

    def __init__(
        self,
        con: duckdb.DuckDBPyConnection,
        run: Mapping[str, Any],
        rungs: Sequence[Rung] = (),
        path: Path | None = None,
    ) -> None:
        """Take over an engine that holds `spans`, `merged` and `alike`; `xsp.store.merge.true_trace` makes one.

        Args:
            con: holds these tables or views.
            run: content of `run.json`; may be empty.
            rungs: rungs that have timed steps, outermost first.
            path: file or directory that the trace was loaded from.
        """
        self.con = con
        self._temp_tables: set[str] = set()
        self._cached: dict[str, Any] = {}
        self.run = Run.of(run)
        self.rungs = list(rungs)
        self.path = path
        for name, columns in (("samples", SAMPLE_COLUMNS), ("loop", LOOP_COLUMNS), ("before", COLUMNS)):
            if not table.has_table(con, name):
                table.create(con, name, columns)
        if not table.has_table(con, "serving"):  # of a service, whose spans were received
            con.execute(f"CREATE VIEW serving AS SELECT * FROM spans WHERE collector = '{COLLECTOR}'")
        iterations.create_tables(con)

    def __repr__(self) -> str:
        """Return the text that a notebook shows: name, number of spans and steps, and directory or file."""
        spans, steps = self.con.execute("SELECT count(*), count(DISTINCT step) FROM spans").fetchall()[0]
        location = f" in {self.path}" if self.path else ""
        return f"<Trace {self.name!r}: {spans:,} spans of {counted(steps, 'step')}{location}>"

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
        """The values read from devices, process and machine while the steps ran, as a relation, ordered by time."""
        return self.con.sql("SELECT * FROM samples ORDER BY time_ns, rank, device, name")

    @property
    def loop(self) -> duckdb.DuckDBPyRelation:
        """Every step that the program ran, recorded or not, as a relation, ordered by start."""
        return self.con.sql("SELECT * FROM loop ORDER BY start_ns, rank")

    @cached_property
    def has_loop(self) -> bool:
        """Whether any step of the program's loop is known."""
        return not table.is_empty(self.con, "loop")

    @property
    def kind(self) -> int | None:
        """The kind of step, a number in `loop`, that `merged` and the figures describe; None if no kinds are known."""
        return self._described[0]

    @property
    def rank(self) -> int:
        """The rank that `merged` and the figures describe: the lowest recorded rank."""
        return self._described[1]

    @cached_property
    def _described(self) -> tuple[int | None, int]:
        """The kind of step and the rank that the figures describe."""
        [(kind, rank)] = self.con.execute("SELECT any_value(step_kind), any_value(rank) FROM alike").fetchall()
        return int(kind) if kind is not None else None, int(rank or 0)

    def at(self, level: Level) -> duckdb.DuckDBPyRelation:
        """Return the merged spans of one level, by start."""
        return self.con.sql(f"SELECT * FROM merged WHERE level = {int(level)} ORDER BY start_ns")

    def children(self, span_id: str) -> duckdb.DuckDBPyRelation:
        """Return the merged spans whose parent has this id, by start."""
        return self.con.sql(f"SELECT * FROM merged WHERE parent_id = {table.literal(span_id)} ORDER BY start_ns")

    def sql(self, query: str, params: Sequence[Any] | None = None) -> duckdb.DuckDBPyRelation:
        """Return the result of a SQL query on `spans`, `merged`, `loop` and `samples`."""
        return self.con.sql(query, params=params)

    def load_into_memory(self, max_spans: int) -> None:
        """Copy spans that lie in files into memory, so that queries do not read its files each time.

        Args:
            max_spans: maximum number of spans; a run with more stays on the disk.
        """
        table.hold(self.con, ("spans", "merged"), max_spans)

    def create_temp_table(self, name: str, query: str, params: Sequence[Any] | None = None) -> None:
        """Make a temporary table that several analyses start from, unless this trace has already made it."""
        if not self.has_temp_table(name):
            self.con.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}", params)
            self._temp_tables.add(name)

    def has_temp_table(self, name: str) -> bool:
        """Return whether `create_temp_table` has made the table."""
        return name in self._temp_tables

    def cached(self, name: str, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, computed once for this trace."""
        if name not in self._cached:
            self._cached[name] = compute()
        result: T = self._cached[name]
        return result

    def has(self, level: Level) -> bool:
        """Return whether the merged step holds spans of a level."""
        return int(level) in self._levels

    @cached_property
    def _levels(self) -> set[int]:
        return {level for (level,) in self.con.execute("SELECT DISTINCT level FROM merged").fetchall()}

    @property
    def name(self) -> str:
        """The name of the run, else the name of the file."""
        return self.run.name or (self.path.name if self.path else "trace")
