"""Hardware counters by kernel and by operator, from CUPTI's range profiler and from Nsight Compute."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from xsp.analyses.contract import Table, analysis, values
from xsp.analyses.ops import NO_OPERATOR
from xsp.importers.kineto_counters import NAMELESS
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import library_calls

UNNAMED = "(unnamed)"
"""Name of a kernel for which the profiler had none."""

_PLAIN_NAMES = {
    "flops": "FLOPs",
    "flops_without_tensor_cores": "non-tensor FLOPs",
    "sm__inst_executed_pipe_tensor.sum": "tensor instr.",
    "dram_read_bytes": "DRAM bytes read",
    "dram__bytes_read.sum": "DRAM bytes read",
    "dram__bytes_op_read.sum": "DRAM bytes read",
    "dram_write_bytes": "DRAM bytes written",
    "dram__bytes_write.sum": "DRAM bytes written",
    "dram__bytes_op_write.sum": "DRAM bytes written",
    "occupancy": "occupancy",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy, %",
}
"""Plain names of metrics, in the order in which they are shown; metrics without a plain name follow."""

_INSTRUCTIONS = re.compile(r"smsp__sass_thread_inst_executed_op_([dfh])(add|mul|fma)_pred_on\.sum")
_PRECISIONS = {"h": "fp16", "f": "fp32", "d": "fp64"}

_ADDITIVE = ("flops", "flops_without_tensor_cores", "dram_read_bytes", "dram_write_bytes")


class _Count(NamedTuple):
    """A counter's values over kernels of one name and one operator."""

    kernel: str | None
    operator: str | None
    call: str | None
    """Span id of the operator's call."""

    metric: str
    kernels: int
    total: float
    minimum: float
    maximum: float


def _reason_without_counters(trace: Trace) -> str | None:
    """Return why a trace has no counters, or None if it has some."""
    if next(_counts(trace), None) is not None:
        return None
    return (
        f"{trace.name!r} holds no hardware counters: record with `xsp run --counters`, join a report with "
        "`xsp counters`, or give torch.profiler profiler_metrics (docs/understand/rooflines.md)"
    )


@analysis("counters", "Hardware counters by kernel", unless=_reason_without_counters)
def counters_by_kernel(trace: Trace) -> Table:
    """Hardware counters of the kernels of each name: one row per kernel and metric.

    `kernels` is the number of kernels that were counted: in all steps and ranks of a trace of CUPTI's range profiler,
    in one step of a run under Nsight Compute. `total` is the sum over them, and `percent_of_total` its share of the sum
    over all kernels; both are null for a metric that cannot be summed (a share of a peak, a rate, a ratio). `metric` is
    a plain name if xsp has one, else the name of the counter, which is in `counter`. `FLOPs` requires counters of the
    tensor cores; `non-tensor FLOPs` are those of the other units alone. Metrics that are zero everywhere come last.
    """
    return _table(trace, "counters", lambda count: count.kernel or UNNAMED)


@analysis("op-counters", "Hardware counters by operator", unless=_reason_without_counters)
def counters_by_operator(trace: Trace) -> Table:
    """Hardware counters of the kernels that each operator launched: one row per operator and metric.

    The operator is the innermost one around the launch; kernels that no operator launched, or that were not joined to
    their launch, are in the row `(no operator)`. `calls` is the number of calls of the operator that launched counted
    kernels.
    """
    return _table(trace, "op_counters", lambda count: count.operator or NO_OPERATOR, by_call=True)


def _table(trace: Trace, name: str, key: Callable[[_Count], str], by_call: bool = False) -> Table:
    """Return the table of counts grouped by `key` and by metric."""
    groups: dict[tuple[str, str], list[_Count]] = defaultdict(list)
    totals: dict[str, float] = defaultdict(float)
    highest: dict[str, float] = defaultdict(float)
    for count in _counts(trace):
        groups[key(count), count.metric].append(count)
        totals[count.metric] += count.total
        highest[count.metric] = max(highest[count.metric], abs(count.maximum), abs(count.minimum))
    plain_metrics = list(_PLAIN_NAMES)

    def place(group: tuple[str, str]) -> tuple[object, ...]:
        metric = group[1]
        order = plain_metrics.index(metric) if metric in plain_metrics else len(plain_metrics)
        return highest[metric] == 0, order, metric, -sum(count.total for count in groups[group]), group[0]

    rows = [
        _row(title, metric, groups[title, metric], totals[metric], by_call)
        for title, metric in sorted(groups, key=place)
    ]
    columns = {
        "name": "VARCHAR",
        "metric": "VARCHAR",
        **({"calls": "BIGINT"} if by_call else {}),
        "kernels": "BIGINT",
        "total": "DOUBLE",
        "percent_of_total": "DOUBLE",
        "mean": "DOUBLE",
        "least": "DOUBLE",
        "most": "DOUBLE",
        "counter": "VARCHAR",
    }
    return values(trace, name, columns, rows)


def _row(title: str, metric: str, counts: Iterable[_Count], metric_total: float, by_call: bool) -> tuple[object, ...]:
    counts = list(counts)
    kernels, total = sum(count.kernels for count in counts), sum(count.total for count in counts)
    is_additive = metric.endswith(".sum") or metric in _ADDITIVE
    calls = {count.call for count in counts if count.call is not None}
    return (
        title,
        plain_name(metric),
        *((len(calls) or None,) if by_call else ()),
        kernels,
        total if is_additive else None,
        100 * total / metric_total if is_additive and metric_total else None,
        total / kernels,
        min(count.minimum for count in counts),
        max(count.maximum for count in counts),
        metric,
    )


def plain_name(metric: str) -> str:
    """Return the plain name of a metric, else its own name.

    >>> plain_name("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum")
    'fp32 fma instr.'
    """
    if (match := _INSTRUCTIONS.fullmatch(metric)) is not None:
        return f"{_PRECISIONS[match[1]]} {match[2]} instr."
    return _PLAIN_NAMES.get(metric, metric)


def _counts(trace: Trace) -> Iterator[_Count]:
    """Yield the counters of each launch and kernel, counters without a launch, and the figures of Nsight Compute."""
    rows = trace.con.execute(
        f"""
        SELECT CASE WHEN work.level = {int(Level.KERNEL)} THEN work.name END AS kernel, work.attributes,
               op.name AS operator, op.span_id AS call
        FROM spans work LEFT JOIN {library_calls(trace, "spans")} library_call
            ON library_call.rank = work.rank AND library_call.trace_id = work.trace_id
               AND library_call.span_id = work.parent_id
        LEFT JOIN spans op ON op.rank = work.rank AND op.trace_id = work.trace_id AND op.kind = '{Kind.OP}'
            AND op.span_id = coalesce(library_call.op_id, work.parent_id)
        WHERE work.level IN ({int(Level.RUNTIME)}, {int(Level.KERNEL)}) AND work.attributes LIKE '%"counters"%'
        """
    ).fetchall()
    for kernel, text, operator, call in rows:
        attributes = json.loads(text)
        kernel_record = attributes.get("counted") if isinstance(attributes.get("counted"), dict) else {}
        for metric, value in (attributes.get("counters") or {}).items():
            if isinstance(value, (int, float)):
                yield _Count(kernel or kernel_record.get("kernel"), operator, call, metric, 1, value, value, value)
    for figure in trace.run.counters.apart if trace.run.counters is not None else ():
        if figure.kernels:
            kernel = figure.kernel if figure.kernel != NAMELESS else None
            yield _Count(kernel, None, None, figure.metric, figure.kernels, figure.sum, figure.least, figure.most)
    yield from _ncu_counts(trace)


_FIGURES = {"flops": "flops", "dram_read_bytes": "bytes", "dram_write_bytes": "bytes", "occupancy": "occupancy"}
"""Columns of kernels that counters may have filled → prefix of the column `…_source` that shows it."""


def _ncu_counts(trace: Trace) -> Iterator[_Count]:
    sources = " OR ".join(f"work.{source}_source = 'counter'" for source in sorted(set(_FIGURES.values())))
    figures = ", ".join(
        f"CASE WHEN work.{source}_source = 'counter' THEN work.{name} END AS {name}"
        for name, source in _FIGURES.items()
    )
    rows = trace.con.execute(
        f"""
        SELECT work.name, op.name, op.span_id, {figures}
        FROM merged work LEFT JOIN {library_calls(trace)} library_call
            ON library_call.rank = work.rank AND library_call.trace_id = work.trace_id
               AND library_call.span_id = work.parent_id
        LEFT JOIN merged op ON op.span_id = coalesce(library_call.op_id, work.parent_id) AND op.kind = '{Kind.OP}'
        WHERE work.level = {int(Level.KERNEL)} AND ({sources})
          AND (work.attributes IS NULL OR work.attributes NOT LIKE '%"counters"%')
        """
    ).fetchall()
    for kernel, operator, call, *readings in rows:
        for metric, value in zip(_FIGURES, readings, strict=True):
            if value is not None:
                yield _Count(kernel, operator, call, metric, 1, value, value, value)
