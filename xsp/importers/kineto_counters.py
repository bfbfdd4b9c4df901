"""Join the counters that Kineto's range profiler measured for kernels to their launches.

With `profiler_metrics` in its experimental configuration, PyTorch's profiler has CUPTI replay each kernel
(`profiler_measure_per_kernel`), or the whole window, until all metrics are counted, and writes an event
`cuda_profiler_range` for each, with the metrics among its arguments. Such an event has a kernel's name and position in
the order of a device's launches, but **no time**: the profiler divides the window into pieces of equal length
(`CuptiRangeProfilerSession::addRangeEvents`). So it is not imported as a kernel: the counts become attributes of the
launch, `counters` (metric → value) and `counted` (kernel and device).

Ranges without a matching launch are summed up by kernel and metric, under `counters` in `run.json`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import duckdb

from xsp import table
from xsp.device import metrics
from xsp.importers.contract import Losses
from xsp.schema import COLUMNS, Column, Kind, Level

TOOL = "cupti range profiler"
"""Value of `tool` under `counters` in `run.json`."""

FLOPS, ORDINARY = "flops", "flops_without_tensor_cores"
"""Metrics that are derived from others, see `xsp.device.metrics`."""

NAMELESS = "__missing__"
"""The profiler's name for an unknown kernel."""

_MAX_NAME, _MAX_METRICS, _MAX_SUMS = 256, 256, 2000
"""Limits for arbitrary files; a profiler writes a few dozen metrics of some hundred kernels."""


class _Range(NamedTuple):
    number: int
    name: str | None
    device: int
    values: Mapping[str, float]


def attach(con: duckdb.DuckDBPyConnection, devices: Sequence[Mapping[str, Any]], losses: Losses) -> dict[str, Any]:
    """Add the counters of the table `ranges` to the rows of `raw_spans`.

    Args:
        con: an engine into which `xsp.importers.kineto_rows.Rows` took all events.
        devices: properties of the devices, as in `run.json`.
        losses: receives notes on the joined ranges, and on the effect of the replays on times.

    Returns:
        The entry `counters` for `run.json`; an empty dictionary if no range was recorded.
    """
    ranges = _ranges(con, devices)
    if not ranges:
        return {}
    kernels = con.execute(
        f"SELECT device, name, number FROM raw_spans WHERE kind = '{Kind.KERNEL}' "
        "ORDER BY correlation_id, start_ns, number"
    ).fetchall()
    if kernels:
        joined = _by_name(kernels, ranges)
        summary = f"{len(joined)} of {len(ranges)} ranges of the range profiler were joined to kernels by their names"
        losses.note(summary)
    else:
        joined = _by_order(con, ranges, losses)
        losses.note("the range profiler replayed kernels to count: their times are not in the trace, and the host "
                    "waited for the replays")  # fmt: skip
    _write(con, [entry for entry in ranges if entry.number in joined], joined, devices)
    ((spans,),) = con.execute("SELECT count(*) FROM raw_spans").fetchall()
    if not spans:
        _add_window_span(con)
    sums = _sums(entry for entry in ranges if entry.number not in joined)
    return {
        "counters": {
            "tool": TOOL,
            "ranges": len(ranges),
            "ranges_joined": len(joined),
            "kernels_timed": bool(kernels),
            "apart": sums[:_MAX_SUMS],
            "apart_left_out": max(0, len(sums) - _MAX_SUMS),
        }
    }


def _ranges(con: duckdb.DuckDBPyConnection, devices: Sequence[Mapping[str, Any]]) -> list[_Range]:
    """Return the ranges, in the order of each device's launches."""
    rows = con.execute("SELECT number, name, device, args FROM ranges ORDER BY device, start_ns, number").fetchall()
    return [
        _Range(
            number, None if name == NAMELESS else name, device, _with_flops(_values(args), _capability(devices, device))
        )
        for number, name, device, args in rows
    ]


def _values(args: str | None) -> dict[str, float]:
    """Return the metrics of an event: its numeric arguments."""
    try:
        arguments = json.loads(args or "{}")
    except (ValueError, RecursionError):
        arguments = {}
    values: dict[str, float] = {}
    for name, value in list(arguments.items())[:_MAX_METRICS] if isinstance(arguments, dict) else ():
        number = _number(value)
        if number is not None and len(name) <= _MAX_NAME:
            values[name] = number
    return values


def _number(value: Any) -> float | None:
    """Return a number that may be given as text, as old profilers write it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _with_flops(values: dict[str, float], capability: tuple[int, int] | None) -> dict[str, float]:
    """Add the floating-point operations that follow from instruction counts."""
    derived = {FLOPS: metrics.figures(values, capability).flops, ORDINARY: metrics.non_tensor_flops(values)}
    return {**{name: float(value) for name, value in derived.items() if value is not None}, **values}


def _capability(devices: Sequence[Mapping[str, Any]], device: int) -> tuple[int, int] | None:
    compute = devices[device].get("compute") if 0 <= device < len(devices) else None
    parts = str(compute or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


def _by_name(kernels: Iterable[tuple[int, str, int]], ranges: Iterable[_Range]) -> dict[int, int]:
    """Return the row of `raw_spans` by range, for a trace with kernels: the k-th range is the k-th kernel of that name.

    If the numbers of ranges and kernels of a device and name differ, none of them is joined.
    """
    kernels_by_name: dict[tuple[int, str | None], list[int]] = defaultdict(list)
    ranges_by_name: dict[tuple[int, str | None], list[int]] = defaultdict(list)
    for device, name, number in kernels:
        kernels_by_name[device, name].append(number)
    for entry in ranges:
        ranges_by_name[entry.device, entry.name].append(entry.number)
    return {
        number: kernel
        for group, numbers in ranges_by_name.items()
        if len(numbers) == len(kernels_by_name[group])
        for number, kernel in zip(numbers, kernels_by_name[group], strict=True)
    }


def _by_order(con: duckdb.DuckDBPyConnection, ranges: Sequence[_Range], losses: Losses) -> dict[int, int]:
    """Return the launch in `raw_spans` by range: the k-th range is the k-th launch if counts agree, with one device."""
    launches = [
        number
        for (number,) in con.execute(
            f"""
            WITH launches AS (
                SELECT number, process, thread, start_ns, start_ns + dur_ns AS end_ns FROM raw_spans
                WHERE level = {int(Level.RUNTIME)} AND kind = '{Kind.LAUNCH}'
                  AND regexp_matches(name, '^(cuda|cu).*Launch.*Kernel')
            ), nested AS (  -- a call of the runtime may show the driver's call that it makes
                SELECT number, start_ns, coalesce(end_ns <= max(end_ns) OVER (
                           PARTITION BY process, thread ORDER BY start_ns, end_ns DESC, number
                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), false) AS inside
                FROM launches
            )
            SELECT number FROM nested WHERE NOT inside ORDER BY start_ns, number
            """
        ).fetchall()
    ]
    devices = {entry.device for entry in ranges}
    if len(devices) == 1 and len(launches) == len(ranges):
        losses.note(f"{len(ranges)} ranges of the range profiler were joined to as many launches by their order")
        return {entry.number: launch for entry, launch in zip(ranges, launches, strict=True)}
    reason = f"of {len(devices)} GPUs" if len(devices) > 1 else f"beside {len(launches)} launches"
    losses.note(f"{len(ranges)} ranges of the range profiler, {reason}, are known by kernel, but not by operator")
    return {}


def _write(
    con: duckdb.DuckDBPyConnection,
    joined_ranges: Iterable[_Range],
    rows_by_range: Mapping[int, int],
    devices: Sequence[Mapping[str, Any]],
) -> None:
    """Write the counters into the rows of `raw_spans`: as attributes, and for kernels also into their columns."""
    rows = []
    for entry in joined_ranges:
        attributes = {"counters": entry.values, "counted": {"kernel": entry.name, "device": entry.device}}
        figures = metrics.figures(entry.values, _capability(devices, entry.device))
        rows.append((rows_by_range[entry.number], json.dumps(attributes), *figures))
    columns = (
        Column("number", "BIGINT", "of the row in `raw_spans`"),
        Column("additions", "VARCHAR", "attributes, as JSON"),
        *(column for name in metrics.KernelFigures._fields for column in COLUMNS if column.name == name),
    )
    table.create(con, "counted", columns)
    table.insert(con, "counted", rows, columns)
    con.execute(
        """
        UPDATE raw_spans SET
            attributes = json_merge_patch(coalesce(raw_spans.attributes, '{}'), counted.additions)::VARCHAR
        FROM counted WHERE raw_spans.number = counted.number
        """
    )
    con.execute(
        f"""
        UPDATE raw_spans SET
            flops = coalesce(counted.flops, raw_spans.flops),
            flops_source = CASE WHEN counted.flops IS NULL THEN raw_spans.flops_source ELSE 'counter' END,
            dram_read_bytes = coalesce(counted.dram_read_bytes, raw_spans.dram_read_bytes),
            dram_write_bytes = coalesce(counted.dram_write_bytes, raw_spans.dram_write_bytes),
            bytes_source = CASE WHEN coalesce(counted.dram_read_bytes, counted.dram_write_bytes) IS NULL
                           THEN raw_spans.bytes_source ELSE 'counter' END,
            occupancy = coalesce(counted.occupancy, raw_spans.occupancy),
            occupancy_source = CASE WHEN counted.occupancy IS NULL THEN raw_spans.occupancy_source ELSE 'counter' END
        FROM counted WHERE raw_spans.number = counted.number AND raw_spans.kind = '{Kind.KERNEL}'
        """
    )
    con.execute("DROP TABLE counted")


def _add_window_span(con: duckdb.DuckDBPyConnection) -> None:
    """Add a span for the profiled window to a trace that contains only ranges."""
    con.execute(
        f"""
        INSERT INTO raw_spans BY NAME
        SELECT 0 AS number, min(start_ns) AS start_ns, max(start_ns + dur_ns) - min(start_ns) AS dur_ns,
               'window of the range profiler' AS name, {int(Level.APPLICATION)} AS level, '{Kind.USER}' AS kind,
               'ok' AS status, 'kineto' AS collector
        FROM ranges
        """
    )


def _sums(ranges: Iterable[_Range]) -> list[dict[str, Any]]:
    """Return the counters summed up by kernel name, device and metric."""
    values_by_metric: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for entry in ranges:
        for metric, value in entry.values.items():
            values_by_metric[entry.name or NAMELESS, entry.device, metric].append(value)
    return [
        {"kernel": kernel, "device": device, "metric": metric, "kernels": len(values), "sum": sum(values),
         "least": min(values), "most": max(values)}
        for (kernel, device, metric), values in sorted(values_by_metric.items())
    ]  # fmt: skip
