"""Storage of counters in a run: the kernels of all alike steps get the figures of the rows joined to them.

As for a resolved run, the step files on the disk are rewritten, each atomically, and merged again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import rundir, table
from xsp.counters import joining, ncu, reading
from xsp.counters.joining import JoinResult, TimedKernel
from xsp.device import metrics
from xsp.device.metrics import KernelFigures
from xsp.errors import TraceError, UsageError
from xsp.ingest import load
from xsp.run import Run
from xsp.schema import COLUMNS, Column, Grade, Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import NS
from xsp.store.write import StepWriter

SOURCE = "counters"
"""Source of notes on counters in `run.json`, and key of the reason if there are no counters."""

_COUNTER_COLUMNS = (
    Column("key", "VARCHAR", "of the kernel"),
    Column("grid", "VARCHAR", "as it stands in the kernel's attributes"),
    Column("block", "VARCHAR", "likewise"),
    *(column for name in KernelFigures._fields for column in COLUMNS if column.name == name),
)
_SHAPES = "json_extract(attributes, '$.grid')::VARCHAR AS grid, json_extract(attributes, '$.block')::VARCHAR AS block"


def attach(run: Path, reports: Sequence[Path]) -> dict[str, Any]:
    """Join reports of Nsight Compute to a run, and write their figures into it.

    Args:
        run: the directory of one run, with steps of its own.
        reports: CSV files, see `xsp.counters.reading`. Later reports override earlier ones for a kernel.

    Returns:
        A summary of the join, as in `run.json` under `counters`.

    Raises:
        UsageError: the directory holds several runs.
        TraceError: the run or a report cannot be read, the run has no kernels, or no row fits.
        OutputError: the run cannot be written.
    """
    content = rundir.read_job(run)
    if content.parts:
        names = ", ".join(str(run / part) for part in content.parts)
        raise UsageError(f"{run}: holds several runs; name the one of the report ({names})")
    if not rundir.segments(run):
        raise UsageError(f"{run}: the run holds no step that counters could join: let the program run more steps")
    trace = load.load(run)
    kernels = kernels_of(trace)
    if not kernels:
        hint = f"record it with --levels M/L/G on {ncu.MACHINE}"
        raise TraceError(f"{run}: the run holds no kernels that could have counters; {hint}")
    by_kernel: dict[str, KernelFigures] = {}
    joins = [_join_report(report, kernels, by_kernel) for report in reports]
    if not by_kernel:
        raise TraceError(_mismatch_message(reports[-1], joins[-1], len(kernels)))
    _write(trace.con, run, by_kernel)
    # The summary of the join: kernels with counters, and their share of device time.
    ns = sum(kernel.ns for kernel in kernels)
    counted_ns = sum(kernel.ns for kernel in kernels if kernel.key in by_kernel)
    summary: dict[str, Any] = {
        "tool": "ncu",
        "kernels": len(kernels),
        "with_counters": len(by_kernel),
        "with_flops": sum(figures.flops is not None for figures in by_kernel.values()),
        "device_time_percent": round(100 * counted_ns / ns, 2) if ns else None,
        "rows": sum(join.row_count for join in joins),
        "rows_joined": sum(len(join.rows) for join in joins),
        "by_layer": all(join.has_layers for join in joins),
    }
    sentence = (
        f"{summary['with_counters']} of {summary['kernels']} kernels "
        f"({summary['device_time_percent']} % of device time) have counters of Nsight Compute, "
        f"{summary['with_flops']} of them operations; "
        f"{summary['rows'] - summary['rows_joined']} of its {summary['rows']} rows match no kernel"
    )
    _finish(run, content, summary, [sentence, *_missing_metrics(joins, by_kernel)])
    return summary


def note_absence(run: Path, reason: str) -> None:
    """Write the reason why a run has no counters into it."""
    content = rundir.read_run(run)
    rundir.write_run(run, content | {"absent": {**content.absent, SOURCE: reason}})


def kernels_of(trace: Trace) -> list[TimedKernel]:
    """Return the kernels of the merged step."""
    layers = layers_of(trace)
    rows = trace.con.execute(
        f"""
        SELECT key, name, correlation_id, start_ns, {NS}, {_SHAPES}, layer_id,
               phase = 'forward' AND grade = '{Grade.EXACT}' AND NOT coalesce(json_exists(attributes, '$.graph'), false)
        FROM merged WHERE level = {int(Level.KERNEL)} AND kind = '{Kind.KERNEL}' AND key IS NOT NULL
        """
    ).fetchall()
    return [
        TimedKernel(
            key=key,
            name=name,
            order=(correlation or 0, start),
            ns=ns,
            grid=_size(grid),
            block=_size(block),
            layer=layers.get(layer) if in_layer else None,
        )
        for key, name, correlation, start, ns, grid, block, layer, in_layer in rows
    ]


def layers_of(trace: Trace) -> dict[str, str]:
    """Return the NVTX range with which a counter run marks each layer of the merged step, by the layer's id."""
    rows = trace.con.execute(
        "SELECT span_id, row_number() OVER (PARTITION BY name ORDER BY layer_index) - 1, name FROM merged "
        f"WHERE level = {int(Level.LAYER)}"
    ).fetchall()
    return {span_id: joining.layer_range(ordinal, name) for span_id, ordinal, name in rows}


def _size(text: str | None) -> reading.Size | None:
    numbers = json.loads(text) if text is not None else None
    return (numbers[0], numbers[1], numbers[2]) if isinstance(numbers, list) and len(numbers) == 3 else None


def _join_report(report: Path, kernels: Sequence[TimedKernel], by_kernel: dict[str, KernelFigures]) -> JoinResult:
    """Join one report, and add its figures to those of the others."""
    result = joining.join(kernels, reading.read(report))
    for key, row in result.rows.items():
        figures = metrics.figures(row.values, row.capability)
        values: dict[str, Any] = {name: value for name, value in figures._asdict().items() if value is not None}
        if values:
            by_kernel[key] = by_kernel.get(key, KernelFigures())._replace(**values)
    return result


def _mismatch_message(report: Path, join: JoinResult, kernels: int) -> str:
    if join.rows:
        return f"{report}: holds none of the requested metrics, such as {metrics.READ_BYTES[0]}"
    return (
        f"{report}: none of its {join.row_count} kernels matches one of the run's {kernels}: "
        "a report must be of one step of the same program"
    )


def _write(con: duckdb.DuckDBPyConnection, run: Path, by_kernel: Mapping[str, KernelFigures]) -> None:
    """Rewrite the steps; kernels of other steps are the same kernel if key, grid and block are the same."""
    table.create(con, "kernel_figures", [_COUNTER_COLUMNS[0], *_COUNTER_COLUMNS[3:]])
    table.insert(
        con,
        "kernel_figures",
        [(key, *figures) for key, figures in by_kernel.items()],
        [_COUNTER_COLUMNS[0], *_COUNTER_COLUMNS[3:]],
    )
    con.execute(
        f"CREATE OR REPLACE TABLE counted AS SELECT kernel_figures.*, {_SHAPES} "
        "FROM kernel_figures JOIN merged USING (key)"
    )
    figures = ", ".join(f"coalesce(counted.{name}, step.{name}) AS {name}" for name in KernelFigures._fields)
    sources = (
        "CASE WHEN counted.flops IS NULL THEN step.flops_source ELSE 'counter' END AS flops_source, "
        "CASE WHEN coalesce(counted.dram_read_bytes, counted.dram_write_bytes) IS NULL THEN step.bytes_source "
        "ELSE 'counter' END AS bytes_source, "
        "CASE WHEN counted.occupancy IS NULL THEN step.occupancy_source ELSE 'counter' END AS occupancy_source"
    )
    for segment in rundir.segments(run):
        con.execute(
            f"""
            CREATE OR REPLACE TABLE segment AS
            WITH step AS (
                SELECT *, row_number() OVER () AS row_index, {_SHAPES},
                       (trace_id, step, rung, rank) IN (SELECT (trace_id, step, rung, rank) FROM alike) AS is_alike
                FROM {table.parquet(segment)}
            )
            SELECT step.* EXCLUDE (row_index, grid, block, is_alike) REPLACE ({figures}, {sources})
            FROM step LEFT JOIN counted ON is_alike AND step.level = {int(Level.KERNEL)} AND counted.key = step.key
                AND counted.grid IS NOT DISTINCT FROM step.grid AND counted.block IS NOT DISTINCT FROM step.block
            ORDER BY row_index
            """
        )
        table.write_parquet(con, "segment", segment)


def _missing_metrics(joins: Sequence[JoinResult], by_kernel: Mapping[str, KernelFigures]) -> list[str]:
    """Return a sentence if operations are unknown because a report lacks the metrics for them."""
    metric_names = {
        name
        for join in joins
        for key, row in join.rows.items()
        if by_kernel.get(key, KernelFigures()).flops is None
        for name in metrics.missing(row.values)
    }
    names = sorted(metric_names)
    suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"counters do not give the operations of kernels without {names[0]}{suffix}"] if names else []


def _finish(run: Path, content: Run, summary: dict[str, Any], sentences: Sequence[str]) -> None:
    """Merge the steps again, and write `run.json`."""
    notes = [note for note in content.notes if note.source != SOURCE]
    absent = {name: reason for name, reason in content.absent.items() if name != SOURCE}
    content = (content | {"absent": absent, "counters": summary, "notes": notes}).with_notes(SOURCE, sentences)
    StepWriter(run).finish(content)
    if content.checksums:
        rundir.write_run(run, content | {"checksums": rundir.checksums(run)})
