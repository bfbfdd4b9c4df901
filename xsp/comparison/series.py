"""The comparable times of a run over its repeats: a time per step, or, for several runs, a figure per run.

The times are those of the timed steps at the rung at which each level is the deepest recorded one (see
`xsp.store.merge`), so that they exclude the cost of deeper levels. A run without timed steps has one time per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xsp import stats
from xsp.schema import Kind, Level
from xsp.store.devicework import prepare
from xsp.store.figures import own_rung
from xsp.store.trace import Trace
from xsp.store.views import LAYERS, NS, library_calls


class RowTimes(NamedTuple):
    """One row of a run: its identity, and its time in each repeat."""

    key: str | None
    name: str
    type: str | None
    values: list[float]
    """Nanoseconds of each step or, for several runs, the figure of each run."""
    calls: float | None = None
    """Median number of calls per step."""
    steps: int | None = None
    """For several runs, the number of steps in their figures."""
    covered: int | None = None
    """Number of steps that the values cover, if a value may be the mean of several; None: one step each."""

    @property
    def repeats(self) -> int:
        """Number of steps of one run behind its values."""
        return len(self.values) if self.covered is None else self.covered


def figure(series: RowTimes) -> float:
    """Return the figure of a run for a row, in nanoseconds: the trimmed mean of its steps."""
    return stats.trimmed_mean(series.values)


MIN_STEPS = 3
"""Minimum number of bare steps for a figure of the step."""


class Bare(NamedTuple):
    """Bare steps of a run."""

    steps: RowTimes
    iterations: RowTimes
    """Iterations of the program's loop: each step with the time since the step before it."""


class RunSteps(NamedTuple):
    """The steps of a run: bare steps, and steps that were recorded at the rung of the model."""

    steady: Bare | None
    """Steady steps, see `loop` in the trace; None if there are too few, as in traces of other profilers."""
    after_bare: Bare | None
    """Steps that followed a bare one, steady or not: a short run has more of them. A few percent slower."""
    recorded: RowTimes | None


def steps(trace: Trace) -> RunSteps:
    """Return the steps of a run that are of the same kind as its figures."""
    rows = _calls(trace, f"kind = '{Kind.STEP}'")
    recorded = rows[0]._replace(key="step") if rows else None
    kind_condition = "true" if (kind := getattr(trace, "kind", None)) is None else f"kind = {int(kind)}"
    if not trace.con.execute("SELECT 1 FROM duckdb_columns() WHERE table_name = 'loop' LIMIT 1").fetchall():
        return RunSteps(None, None, recorded)
    bare_rows = trace.con.execute(
        f"""
        SELECT dur_ns, before_ns + dur_ns, steps, nearness = 0 FROM bare_steps
        WHERE nearness <= 1 AND dur_ns IS NOT NULL AND {kind_condition} AND rank = {trace.rank}
        ORDER BY start_ns
        """
    ).fetchall()
    name = recorded.name if recorded is not None else "step"
    return RunSteps(_bare(name, [row for row in bare_rows if row[3]]), _bare(name, bare_rows), recorded)


def _bare(name: str, rows: Sequence[tuple[float, float | None, int, bool]]) -> Bare | None:
    """Return bare steps as rows of a comparison; None if there are too few.

    Rows of the loop that represent several steps weigh as much as these, see `stats.of_equal_weight`.
    """
    step_times = [(dur_ns, steps) for dur_ns, _, steps, _ in rows]
    iteration_times = [(ns, steps) for _, ns, steps, _ in rows if ns is not None]
    if min(len(step_times), len(iteration_times)) < MIN_STEPS:
        return None
    return Bare(_weighted_series("step", name, step_times), _weighted_series("iteration", "iteration", iteration_times))


def _weighted_series(key: str, name: str, rows: Sequence[tuple[float, int]]) -> RowTimes:
    steps = [count for _, count in rows]
    values = stats.of_equal_weight([ns for ns, _ in rows], steps)
    return RowTimes(key, name, None, values, 1, covered=sum(steps))


def best_common_steps(runs: Sequence[RunSteps]) -> tuple[list[list[RowTimes]], list[list[RowTimes]]]:
    """Return the step and the loop's iteration of each run, from the best kind of steps that all runs have.

    These are steady steps, else bare steps that followed a bare one, else recorded steps, which have no iterations.
    """
    for tier in ([run.steady for run in runs], [run.after_bare for run in runs]):
        bare = [bare_steps for bare_steps in tier if bare_steps is not None]
        if len(bare) == len(runs):
            return [[bare_steps.steps] for bare_steps in bare], [[bare_steps.iterations] for bare_steps in bare]
    return [[run.recorded] if run.recorded is not None else [] for run in runs], [[] for _ in runs]


def phases(trace: Trace) -> list[RowTimes]:
    """Return the calls of the model level inside a step: forward, backward, optimizer, waiting for data."""
    return _calls(trace, f"level = {int(Level.MODEL)} AND kind <> '{Kind.STEP}'")


def layers(trace: Trace) -> list[RowTimes]:
    """Return the layers in execution order, with their time on the host without the layers inside them."""
    if _rung(trace, Level.LAYER) is None:
        return _query_series(
            trace,
            f"WITH {LAYERS} SELECT key, name, type, [self_ns::DOUBLE], 1 FROM layers "
            f"WHERE {NS} IS NOT NULL ORDER BY layer_index",
        )
    query = f"""
        WITH layer_calls AS (SELECT * FROM timed WHERE level = {int(Level.LAYER)}), inner_calls AS (
            SELECT outer_call.layer_id AS span_id, layer_calls.trace_id, layer_calls.step, sum(layer_calls.dur_ns) AS ns
            FROM layer_calls JOIN timed outer_call ON outer_call.span_id = layer_calls.parent_id
                 AND outer_call.trace_id = layer_calls.trace_id
                 AND outer_call.step IS NOT DISTINCT FROM layer_calls.step
            WHERE outer_call.layer_id IS NOT NULL GROUP BY ALL
        )
        SELECT key, trace_id, step, sum(greatest(dur_ns - coalesce(ns, 0), 0)) AS ns
        FROM layer_calls LEFT JOIN inner_calls USING (trace_id, step, span_id) GROUP BY ALL
    """
    return _layer_series(trace, query)


def layers_on_device(trace: Trace) -> list[RowTimes]:
    """Return the layers with the time of their device work, backward included; empty without a device."""
    if _rung(trace, Level.KERNEL) is None or not trace.has(Level.KERNEL):
        return []
    query = f"""
        SELECT layer.key, layer.trace_id, layer.step, sum(work.dur_ns) AS ns
        FROM timed work JOIN timed layer ON layer.span_id = work.layer_id AND layer.trace_id = work.trace_id
             AND layer.step IS NOT DISTINCT FROM work.step
        WHERE work.level = {int(Level.KERNEL)} GROUP BY ALL
    """
    return _layer_series(trace, query)


def kernels(trace: Trace) -> list[RowTimes]:
    """Return the kernels and copies of the devices by name, with the sum of their times in a step."""
    level = int(Level.KERNEL)
    return _series_by_name(
        trace, Level.KERNEL, f"SELECT name, type, trace_id, step, dur_ns AS ns FROM timed WHERE level = {level}"
    )


def kernel_classes(trace: Trace) -> list[RowTimes]:
    """Return the device work by class of kernel, derived from names, and copies; the mean over several devices."""
    if not trace.has(Level.KERNEL):
        return []
    prepare(trace)
    return _series_by_name(
        trace,
        Level.KERNEL,
        f"""
        WITH classes AS (SELECT name, any_value(class) AS class FROM device_work WHERE class IS NOT NULL GROUP BY name)
        SELECT coalesce(class, 'memory copy') AS name, NULL AS type, trace_id, step,
               dur_ns / (SELECT count(DISTINCT coalesce(device, -1)) FROM timed WHERE level = {int(Level.KERNEL)}) AS ns
        FROM timed LEFT JOIN classes ON classes.name = timed.name AND timed.kind = '{Kind.KERNEL}'
        WHERE level = {int(Level.KERNEL)} AND kind IN ('{Kind.KERNEL}', '{Kind.COPY}')
        """,
    )


def operators_on_device(trace: Trace) -> list[RowTimes]:
    """Return the operators that launched device work, by name, with the time of that work; empty without a device."""
    if not trace.has(Level.KERNEL):
        return []
    return _series_by_name(
        trace,
        Level.KERNEL,
        f"""
        SELECT op.name, NULL AS type, work.trace_id, work.step, work.dur_ns AS ns
        FROM timed work LEFT JOIN {library_calls(trace, "spans")} library_call
             ON library_call.rank = work.rank AND library_call.trace_id = work.trace_id
                AND library_call.span_id = work.parent_id
        JOIN timed op ON op.span_id = coalesce(library_call.op_id, work.parent_id) AND op.trace_id = work.trace_id
             AND op.step IS NOT DISTINCT FROM work.step
        WHERE work.level = {int(Level.KERNEL)} AND op.kind = '{Kind.OP}'
        """,
    )


def operators(trace: Trace) -> list[RowTimes]:
    """Return the operators by name, with the sum of their host self times in a step."""
    return _series_by_name(
        trace,
        Level.OP,
        f"""
        WITH op_calls AS (SELECT * FROM timed WHERE kind = '{Kind.OP}'), inner_calls AS (
            SELECT parent_id AS span_id, trace_id, step, sum(dur_ns) AS ns FROM op_calls
            WHERE parent_rule = 'containment' GROUP BY ALL
        )
        SELECT name, NULL AS type, trace_id, step, greatest(dur_ns - coalesce(ns, 0), 0) AS ns
        FROM op_calls LEFT JOIN inner_calls USING (trace_id, step, span_id)
        """,
    )


def _rung(trace: Trace, level: Level) -> int | None:
    rung = own_rung(level, trace.rungs)
    if rung is None:
        return None
    trace.con.execute(
        "CREATE OR REPLACE TEMP VIEW timed AS "
        f"SELECT * FROM alike_spans WHERE timed AND status = 'ok' AND rung = {rung.level}"
    )
    return rung.level


def _query_series(trace: Trace, query: str) -> list[RowTimes]:
    return [RowTimes(*row) for row in trace.con.execute(query).fetchall()]


def _calls(trace: Trace, condition: str) -> list[RowTimes]:
    """Return spans of the model level, in the order of the merged step."""
    if _rung(trace, Level.MODEL) is None:
        return _query_series(
            trace,
            f"SELECT key, concat_ws(' ', kind, name), type, [{NS}::DOUBLE], 1 FROM merged "
            f"WHERE {condition} ORDER BY start_ns",
        )
    return _query_series(
        trace,
        f"""
        WITH times AS (
            SELECT key, list(ns ORDER BY step) AS ns FROM (
                SELECT key, step, sum(dur_ns)::DOUBLE AS ns FROM timed WHERE {condition} GROUP BY key, trace_id, step
            ) GROUP BY key
        )
        SELECT key, concat_ws(' ', kind, name), type, ns, 1 FROM merged JOIN times USING (key)
        WHERE {condition} ORDER BY start_ns
        """,
    )


def _layer_series(trace: Trace, query: str) -> list[RowTimes]:
    """Return a series for each layer of the merged step.

    Args:
        trace: the trace to query.
        query: SQL of key, trace_id, step and ns.
    """
    return _query_series(
        trace,
        f"""
        WITH times AS (SELECT key, list(ns::DOUBLE ORDER BY step) AS ns FROM ({query}) GROUP BY key)
        SELECT key, name, type, ns, 1 FROM merged JOIN times USING (key)
        WHERE level = {int(Level.LAYER)} ORDER BY layer_index
        """,
    )


def _series_by_name(trace: Trace, level: Level, query: str) -> list[RowTimes]:
    """Return a series for each name, longest first; a step without the name counts as 0."""
    if _rung(trace, level) is None or not trace.has(level):
        return []
    return _query_series(
        trace,
        f"""
        WITH step_sums AS (
            SELECT name, any_value(type) AS type, trace_id, step, sum(ns)::DOUBLE AS ns, count(*) AS calls
            FROM ({query}) GROUP BY name, trace_id, step
        ), repeats AS (SELECT count(*) AS n FROM (SELECT DISTINCT trace_id, step FROM timed))
        SELECT NULL, name, any_value(type),
               list_resize(list(ns ORDER BY step), any_value(n)::INTEGER, 0.0),
               list_median(list_resize(list(calls), any_value(n)::INTEGER, 0))
        FROM step_sums CROSS JOIN repeats GROUP BY name ORDER BY sum(ns) DESC, name
        """,
    )
