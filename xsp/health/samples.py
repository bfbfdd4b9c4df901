"""Findings from samples: throttled clocks, and other processes on the device or the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xsp.health.finding import Finding, Severity
from xsp.run import Samples
from xsp.samples.nvml import MASK, REASONS_SQL
from xsp.schema import Kind
from xsp.store.trace import Trace

MIN_BUSY_CORES = 0.5
"""Number of cores kept busy by other processes from which times on the host may be longer."""

MIN_MISSED_SHARE = 0.2
"""Minimum share of late readings for a note."""

_OTHERS, _OWN_USE, _ALL_USE = "gpu.processes.others", "process.cpu.use", "host.cpu.use"
"""Names of samples: processes of others on a device, and cores in use by the process and by all on the machine."""

_TIMED = f"""
    timed AS (
        SELECT rank, step, start_ns, start_ns + dur_ns AS end_ns, count(*) OVER (PARTITION BY rank) AS steps
        FROM spans WHERE kind = '{Kind.STEP}' AND timed
    )
"""


def findings(trace: Trace) -> Iterator[Finding]:
    """Yield the findings from samples; nothing for a run without samples."""
    names = {name for (name,) in trace.con.execute("SELECT DISTINCT name FROM samples").fetchall()}
    if MASK in names:
        yield from _throttling(trace)
    if _OTHERS in names:
        yield from _device_processes(trace)
    if {_OWN_USE, _ALL_USE} <= names:
        yield from _host_processes(trace)
    for run in trace.run.rank_runs:
        if run.samples is not None:
            yield from _gaps(run.samples, run.machine.devices)


def _throttling(trace: Trace) -> Iterator[Finding]:
    """Yield the devices whose clocks were throttled during timed steps; heat and lack of power lower the grade."""
    rows = trace.con.execute(
        f"""
        WITH {REASONS_SQL}, {_TIMED}
        SELECT r.rank, r.device, string_agg(DISTINCT reason, ', ' ORDER BY reason), bool_or(is_fault),
               count(DISTINCT step), any_value(steps)
        FROM reasons r JOIN timed ON timed.rank = r.rank AND timed.start_ns < r.to_ns AND timed.end_ns > r.from_ns
        WHERE throttles GROUP BY r.rank, r.device ORDER BY r.rank, r.device
        """
    ).fetchall()
    for rank, device, reasons, is_fault, steps, total in rows:
        device_name = _device_name(trace, rank, device)
        text = f"{device_name}: clocks were throttled ({reasons}) in {steps} of {total} timed steps; see `throttling`"
        yield Finding(Severity.WARNING if is_fault else Severity.NOTE, "throttling", text, "B" if is_fault else "A")


def _device_processes(trace: Trace) -> Iterator[Finding]:
    rows = trace.con.execute(
        f"""
        WITH {_TIMED}, readings AS (
            SELECT rank, device, time_ns AS from_ns, value,
                   lead(time_ns, 1, time_ns + 1) OVER (PARTITION BY rank, device ORDER BY time_ns) AS to_ns
            FROM samples WHERE name = '{_OTHERS}'
        )
        SELECT readings.rank, device, max(value)::BIGINT, count(DISTINCT step), any_value(steps)
        FROM readings
        JOIN timed ON timed.rank = readings.rank AND timed.start_ns < readings.to_ns
                  AND timed.end_ns > readings.from_ns
        WHERE value > 0 GROUP BY readings.rank, device ORDER BY readings.rank, device
        """
    ).fetchall()
    for rank, device, processes, steps, total in rows:
        device_name = _device_name(trace, rank, device)
        text = f"{device_name}: up to {processes} other processes used it in {steps} of {total} timed steps"
        yield Finding(Severity.WARNING, "device", text, "B")


def _device_name(trace: Trace, rank: int, device: int) -> str:
    """Return the name of a device, with its rank if there are several ranks."""
    return f"rank {rank}, device {device}" if len(trace.run.ranks) > 1 else f"device {device}"


def _host_processes(trace: Trace) -> Iterator[Finding]:
    """Yield a finding on other processes on the machine; not for several ranks, which would count as others."""
    if len(trace.run.ranks) > 1:
        return
    ((process_cores, host_cores),) = trace.con.execute(
        f"""
        WITH {_TIMED}, step_samples AS (
            SELECT name, value FROM samples
            ASOF JOIN timed ON timed.rank = samples.rank AND timed.start_ns <= samples.time_ns
            WHERE time_ns <= end_ns
        )
        SELECT avg(value) FILTER (name = '{_OWN_USE}'), avg(value) FILTER (name = '{_ALL_USE}') FROM step_samples
        """
    ).fetchall()
    if process_cores is not None and host_cores is not None and host_cores - process_cores > MIN_BUSY_CORES:
        text = (
            f"other processes used {host_cores - process_cores:.1f} cores during timed steps on average: "
            "other programs, or children of this one"
        )
        yield Finding(Severity.NOTE, "machine", text)


def _gaps(samples: Samples, devices: Sequence[str]) -> Iterator[Finding]:
    """Yield findings on samples that are missing; devices count only on a machine with a device."""
    if devices and "nvml" in samples.absent:
        yield Finding(Severity.NOTE, "samples", f"devices were not sampled: {samples.absent['nvml']}")
    for text in samples.notes:
        yield Finding(Severity.NOTE, "samples", text)
    readings, missed = samples.readings, samples.missed
    if missed > MIN_MISSED_SHARE * (readings + missed):
        yield Finding(Severity.NOTE, "samples", f"{missed} of {readings + missed} readings were late and were left out")
