"""The charts of the page, as one table: each chart draws columns of an analysis in a section of the page.

A chart computes nothing but sums of rows: its values are in the table of the same analysis. If the analysis refuses the
trace, or its columns are empty, the section gives the reason instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xsp.analyses import ANALYSES, memory
from xsp.analyses.answers import Answers, AnswerTable
from xsp.device import ceilings
from xsp.device.kernelnames import is_cpp, readable_each
from xsp.errors import AnalysisError
from xsp.schema import Level
from xsp.store.trace import Trace

MOST_POINTS = 20_000
"""Maximum number of rows of a chart."""

KERNEL_ANALYSES = ("A10",)
"""Analyses whose bars have names of kernels."""

LABEL_LETTERS = 30
"""Maximum length of a label, as in `charts.js`."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A chart: its analysis, its section, its kind (see `charts.js`), and the role of each column in the drawing."""

    analysis: str
    section: str
    kind: str
    title: str
    unit: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Role in the drawing → column."""

    series: Mapping[str, str] = field(default_factory=dict)
    """For parts of a whole: column → its name in the legend."""

    pivot: tuple[str, str] | None = None
    """For parts in separate rows: the column that names a part, and the column that measures it."""

    names: Sequence[str] = ()
    """Columns that together name a row, each after the column's name: `rank 0, device 1`."""

    where: Mapping[str, Any] = field(default_factory=dict)
    """Column → value of the rows that are drawn, or a set of values; `...` for any value but null."""

    most_rows: int = MOST_POINTS
    """Maximum number of rows; of more rows the first ones are drawn, and the chart says so."""

    least_rows: int = 1
    """Minimum number of rows; a chart with fewer is left out."""

    @property
    def value_columns(self) -> list[str]:
        """The columns of which at least one must hold a value."""
        if self.pivot:
            return [self.pivot[1]]
        return list(self.series) or [self.columns["value"]]


_LAYER = {"at": "layer_index", "name": "name", "group": "type"}
_METRIC = {"at": "layer_index", "name": "layer_name"}
_TYPE = {"name": "type"}
_PATH = {"name": "name", "value": "dur_ms"}
_ACTIVITY = {
    "computation_ms": "computation", "exposed_communication_ms": "exposed communication",
    "exposed_copy_ms": "exposed copies", "idle_ms": "idle",
}  # fmt: skip
_PHASES = {
    "forward_ms": "forward", "backward_ms": "backward", "optimizer_ms": "optimizer", "data_ms": "waiting for data",
    "rest_ms": "outside the phases",
}  # fmt: skip
_TENSOR = {
    "with_tensor_cores_ms": "with tensor cores", "without_tensor_cores_ms": "without",
    "unknown_ms": "not known from the name",
}  # fmt: skip
_MEMORY = {"peak_mib": "at its peak", "end_mib": "at the end", "allocated_mib": "allocated by the layer itself"}
_STEP_MEMORY = {"peak_mib": "at its peak", "end_mib": "at the end", "left_mib": "still allocated by the step"}
_ROOFLINE = {"value": "gflop_per_s", "intensity": "flop_per_byte", "bound": "memory_bound"}
_READINGS = {
    "at": "at_s", "value": "value", "highest": "highest", "step": "step", "name": "name", "device": "device",
    "rank": "rank",
}  # fmt: skip


def _readings_chart(title: str, unit: str, *figures: str) -> Chart:
    """Return a chart of sampled figures over the time of the run."""
    names = {"name": frozenset(figures)}
    return Chart("samples-timeline", "machine", "readings", title, unit, _READINGS, where=names)


CHARTS: tuple[Chart, ...] = (
    Chart(
        "phases-over-time", "time", "horizontal", "Phases over the run", "ms", {}, _PHASES, names=("first_step",),
        where={"step_ms": ...}, least_rows=2,  # without a recorded step only waiting is known
    ),
    Chart("between", "time", "shares", "Lines between steps", "ms", {"name": "line", "value": "ms"}, most_rows=20),
    Chart("device-activity", "time", "horizontal", "What each device did", "ms", {}, _ACTIVITY,
        names=("rank", "device"),
    ),
    Chart(
        "idle-causes", "time", "horizontal", "Why devices were idle", "ms",
        pivot=("cause", "idle_ms"), names=("rank", "device"),
    ),
    Chart("steps", "time", "horizontal", "Steps on the device", "ms", {}, _ACTIVITY, names=("rank", "device", "step")),
    Chart(
        "kernel-classes", "time", "shares", "Device time by class of kernel", "ms",
        {"name": "class", "value": "device_ms"}, where={"rank": None},
    ),
    Chart(
        "A10", "time", "shares", "Kernels by name", "ms", {"name": "name", "value": "latency_ms"},
        where={"device": None},
    ),
    Chart(
        "tensor-cores", "time", "horizontal", "Tensor cores by layer", "ms", {"name": "name"}, _TENSOR,
        where={"matrix_ms": ...}, most_rows=16,
    ),
    Chart(
        "launch-bound", "time", "horizontal", "Launches against their work", "ms", {"name": "name"},
        {"launch_ms": "launching it on the host", "device_ms": "the work on the device"}, most_rows=16,
    ),
    Chart(
        "A2", "time", "layers", "Layer latency on the host", "ms",
        {**_LAYER, "value": "self_ms", "whole": "latency_ms", "low": "latency_low_ms", "high": "latency_high_ms"},
    ),
    Chart("A11", "time", "layers", "Kernels by layer", "ms", {**_METRIC, "value": "latency_ms"}),
    Chart(
        "A13", "time", "stack", "Kernel against other latency", "ms", _METRIC,
        {"kernel_ms": "kernels", "other_ms": "other"},
    ),
    Chart(
        "module-classes", "time", "shares", "GPU time by class of module, of its own", "ms",
        {"name": "class", "value": "self_device_ms"},
    ),
    Chart("A6", "time", "shares", "Host time by type of layer", "ms", {**_TYPE, "value": "host_ms"}),
    Chart("stages", "time", "shares", "Latency by third of the layers", "ms", {"name": "stage", "value": "latency_ms"}),
    Chart("A5", "time", "shares", "Layer type distribution", "layers", {**_TYPE, "value": "layers"}),
    Chart(
        "critical-path", "time", "strip", "Critical path", "ms",
        {"start": "start_ms", "value": "dur_ms", "name": "name", "category": "what", "layer": "layer"},
    ),
    Chart(
        "critical-path-summary", "time", "shares", "Critical path by kind of segment", "ms", _PATH,
        where={"grouped_by": "what"},
    ),
    Chart(
        "critical-path-summary", "time", "shares", "Critical path by layer", "ms", _PATH,
        where={"grouped_by": "layer"},
    ),
    Chart("A9", "rooflines", "roofline", "Kernel roofline", "GFLOP/s", {"name": "name", **_ROOFLINE}),
    Chart("A14", "rooflines", "roofline", "Layer roofline", "GFLOP/s", {"name": "layer_name", **_ROOFLINE}),
    Chart("A15", "rooflines", "roofline", "Model roofline", "GFLOP/s", _ROOFLINE, names=("batch_size",)),
    Chart("A12", "rooflines", "layers", "Operations by layer", "FLOP", {**_METRIC, "value": "flops"}),
    Chart("A12", "rooflines", "layers", "DRAM reads by layer", "bytes", {**_METRIC, "value": "dram_read_bytes"}),
    Chart("A12", "rooflines", "layers", "DRAM writes by layer", "bytes", {**_METRIC, "value": "dram_write_bytes"}),
    Chart(
        "memory-timeline", "memory", "lines", "Device memory over the step, by layer", "MiB", _LAYER, _MEMORY,
        where={"layer_index": ..., "device": ...},
    ),
    Chart(
        "memory-timeline", "memory", "lines", "Host memory over the step, by layer", "MiB", _LAYER, _MEMORY,
        where={"layer_index": ..., "device": None, "basis": frozenset((memory.TOTALS, memory.SUMS, memory.NO_FREES))},
    ),
    Chart(
        "memory-steps", "memory", "lines", "Device memory of each step", "MiB", {"at": "step"}, _STEP_MEMORY,
        names=("device", "step"), where={"device": ...},
    ),
    Chart("A4", "memory", "layers", "Layer memory allocation", "MiB", {**_LAYER, "value": "alloc_mib"}),
    Chart("A7", "memory", "shares", "Layer memory allocation by type", "MiB", {**_TYPE, "value": "alloc_mib"}),
    Chart(
        "communication", "ranks", "horizontal", "Collectives, hidden and exposed", "ms", {},
        {"hidden_ms": "hidden behind computation", "exposed_ms": "exposed"},
        names=("collective", "communicator", "bytes"), most_rows=16,
    ),
    Chart(
        "stragglers", "ranks", "shares", "How long others waited for each rank", "ms", {"value": "others_waited_ms"},
        names=("rank",),
    ),
    Chart(
        "collective-skew", "ranks", "shares", "Collectives with the longest skew", "µs", {"value": "skew_us"},
        names=("collective", "id", "last_rank"), most_rows=12,
    ),
    _readings_chart("Power of devices", "W", "gpu.power", "gpu.power.mean", "gpu.power.limit"),
    _readings_chart("Clocks of devices", "MHz", "gpu.clock.sm", "gpu.clock.memory", "gpu.clock.sm.highest"),
    _readings_chart("Memory of devices", "MiB", "gpu.memory.used", "gpu.memory.process", "gpu.memory.total"),
    _readings_chart("Utilisation of devices", "%", "gpu.use"),
    _readings_chart("Temperature of devices", "°C", "gpu.temperature"),
    Chart(
        "throttling", "machine", "shares", "Why clocks were not at their highest", "ms", {"value": "time_ms"},
        names=("rank", "device", "reason"),
    ),
    _readings_chart("Memory of the process", "MiB", "process.memory.rss"),
    _readings_chart("Use of CPU cores", "cores", "process.cpu.use", "host.cpu.use"),
    _readings_chart("Clocks of the processor", "MHz", "host.cpu.clock", "host.cpu.clock.highest"),
)  # fmt: skip
"""All charts, in the order of the page."""


def charts(answers: Answers) -> list[dict[str, Any]]:
    """Return the data of all charts in the order of the page; for an empty chart, the reason under `missing`."""
    roof = roofs(answers.trace)
    return [
        {**chart_data(chart, answers[chart.analysis]), **(roof if chart.kind == "roofline" else {})}
        for chart in CHARTS
        if chart.analysis in ANALYSES
    ]


def chart_data(chart: Chart, answer: AnswerTable) -> dict[str, Any]:
    """Return the data that the page draws of an analysis, or the reason why there is nothing to draw."""
    header = {"section": chart.section, "id": chart.analysis, "title": chart.title}
    if answer.reason is not None:
        return {**header, "missing": answer.reason}
    rows = [row for row in answer.dicts() if all(_matches(row[column], value) for column, value in chart.where.items())]
    if len(rows) < chart.least_rows:
        return {**header, "missing": f"{chart.title}: there is none in this trace"}
    if not any(row[column] is not None for column in chart.value_columns for row in rows):
        words = " or ".join(column.replace("_", " ") for column in chart.value_columns)
        return {**header, "missing": f"{chart.title}: {words} was not measured"}
    drawn_rows = rows[: chart.most_rows]
    return {
        **header,
        "kind": chart.kind,
        "unit": chart.unit,
        "left_out": len(rows) - len(drawn_rows),
        **(_pivoted(chart, drawn_rows) if chart.pivot else _columns(chart, drawn_rows)),
    }


def _matches(value: Any, condition: Any) -> bool:
    if isinstance(condition, frozenset):
        return value in condition
    return value is not None if condition is ... else bool(value == condition)


def _columns(chart: Chart, rows: Sequence[Row]) -> dict[str, Any]:
    data = {role: [row[column] for row in rows] for role, column in chart.columns.items()}
    if chart.names:
        data["name"] = [_name(chart.names, row) for row in rows]
    if chart.analysis in KERNEL_ANALYSES:
        names = [str(name) for name in data["name"]]
        labels = zip(names, readable_each(names, LABEL_LETTERS), strict=True)
        data["label"] = [label if is_cpp(name) else None for name, label in labels]
    parts = [{"name": name, "values": [row[column] for row in rows]} for column, name in chart.series.items()]
    return {"data": data, "series": parts}


def _pivoted(chart: Chart, rows: Sequence[Row]) -> dict[str, Any]:
    """Return parts from separate rows as adjacent series."""
    assert chart.pivot is not None
    part, value = chart.pivot
    sums: dict[tuple[str, Any], float] = {}
    for row in rows:
        key = (_name(chart.names, row), row[part])
        sums[key] = sums.get(key, 0.0) + (row[value] or 0.0)
    names = list(dict.fromkeys(name for name, _ in sums))
    parts = list(dict.fromkeys(part_name for _, part_name in sums))
    return {
        "data": {"name": names},
        "series": [
            {"name": str(part_name), "values": [sums.get((name, part_name)) for name in names]} for part_name in parts
        ],
    }


def _name(columns: Sequence[str], row: Row) -> str:
    """Return the name of a row; `all` if all its naming columns are null."""
    parts = [(column.replace("_", " "), row[column]) for column in columns if row[column] is not None]
    return ", ".join(value if isinstance(value, str) else f"{word} {value:,}" for word, value in parts) or "all"


# --- roofs -------------------------------------------------------------------------------------------------------
# The roof of a trace's device in a roofline: the slope of its memory bandwidth, and a line for each peak.


ROOF_PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Precisions whose peaks are drawn, if known; precisions with the same peak share a line."""


def roofs(trace: Trace) -> dict[str, Any]:
    """Return bandwidth and peaks under `roofs`, in bytes and GFLOP per second; if unknown, the reason as `roofless`."""
    try:
        ceiling = ceilings.of_run(trace.run, trace.has(Level.KERNEL))
    except AnalysisError as error:
        return {"roofs": None, "roofless": str(error)}
    lines: dict[float, list[str]] = {}
    for precision in ROOF_PRECISIONS:
        peak = ceiling.peak(precision)
        if peak is not None:
            lines.setdefault(peak, []).append(precision)
    peaks = [{"name": ", ".join(names), "gflop_per_s": peak / 1e9} for peak, names in lines.items()]
    return {
        "roofs": {"device": ceiling.name, "bytes_per_s": ceiling.bytes_per_s, "peaks": peaks, "source": ceiling.source}
    }
