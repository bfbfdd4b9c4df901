"""What each device did: over its whole window, by step, and by class of kernel."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.device.kernelnames import MATRIX
from xsp.schema import Kind, Level
from xsp.store.devicework import COPY, HOST_SPANS_SQL, LEVEL_NAMES, TENSOR_TIMES, prepare, shares
from xsp.store.trace import Trace

_TIME_COLUMNS = """
    busy_ns / 1e6 AS busy_ms, computation_ns / 1e6 AS computation_ms,
    communication_ns / 1e6 AS communication_ms, exposed_communication_ns / 1e6 AS exposed_communication_ms,
    (communication_ns - exposed_communication_ns) / 1e6 AS hidden_communication_ms,
    copy_ns / 1e6 AS copy_ms, exposed_copy_ns / 1e6 AS exposed_copy_ms, (window_ns - busy_ns) / 1e6 AS idle_ms
"""

_TIMES = ("window_ns", "busy_ns", "computation_ns", "communication_ns", "copy_ns", "exposed_communication_ns",
          "exposed_copy_ns")  # fmt: skip
"""Columns of `shares` that add up over recordings and devices."""


def _sums(*names: str) -> str:
    return ", ".join(f"sum({name})::BIGINT AS {name}" for name in names)


_COUNTS = f"""
    count(*) FILTER (WHERE purpose <> '{COPY}') AS kernels, count(*) FILTER (WHERE purpose = '{COPY}') AS copies
"""


@analysis("device-activity", "What each device did", Level.KERNEL, everywhere=True)
def device_activity(trace: Trace) -> Table:
    """Busy and idle time of each device from its first work to its last, of all recorded steps together.

    Each figure is the time in which at least one such kernel or copy ran on any stream. Communication is hidden while
    computation runs at the same time, and exposed otherwise; copies are exposed while nothing else runs. Busy time is
    computation plus exposed communication plus exposed copies; busy plus idle time is the window, which leaves out the
    time before the first work and after the last: shares of an iteration are in `account`. With several devices the
    last row, which has no rank and no device, is their sum.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH {shares("rank", "device", "recording")},
        times AS (
            SELECT rank, device, {_sums(*_TIMES)} FROM shares GROUP BY rank, device
        ),
        devices AS (
            SELECT times.*, counts.* EXCLUDE (rank, device)
            FROM times JOIN (SELECT rank, device, {_COUNTS} FROM device_work GROUP BY rank, device) counts
            ON counts.rank = times.rank AND counts.device IS NOT DISTINCT FROM times.device
        ),
        totals AS (
            FROM devices UNION ALL
            SELECT NULL, NULL, {_sums(*_TIMES, "kernels", "copies")} FROM devices HAVING count(*) > 1
        )
        SELECT rank, device, window_ns / 1e6 AS window_ms, {_TIME_COLUMNS}, kernels, copies
        FROM totals ORDER BY rank NULLS LAST, device NULLS LAST
        """
    )


@analysis("steps", "Steps on the device", Level.KERNEL, everywhere=True)
def device_steps(trace: Trace) -> Table:
    """Each step of each rank: its time on the host, and what its device did from its first work to its last.

    Device work belongs to the step that launched it, even if it runs after the end of the step on the host. Work
    outside every step is in a row without a step.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH {shares("rank", "device", "step")},
        counts AS (
            SELECT rank, device, step, {_COUNTS}, min(start_ns) AS first_ns FROM device_work GROUP BY rank, device, step
        ),
        hosts AS (
            SELECT rank, step, any_value(name) AS name, min(start_ns) AS start_ns,
                   max(start_ns + dur_ns) - min(start_ns) AS host_ns
            FROM spans WHERE kind = '{Kind.STEP}' AND step IS NOT NULL GROUP BY rank, step
        )
        SELECT counts.rank, counts.device, counts.step, hosts.name, host_ns / 1e6 AS host_ms,
               (first_ns - hosts.start_ns) / 1e6 AS first_work_after_ms, window_ns / 1e6 AS window_ms, {_TIME_COLUMNS},
               kernels, copies
        FROM counts
        JOIN shares ON shares.rank = counts.rank AND shares.device IS NOT DISTINCT FROM counts.device
                    AND shares.step IS NOT DISTINCT FROM counts.step
        LEFT JOIN hosts ON hosts.rank = counts.rank AND hosts.step = counts.step
        ORDER BY counts.rank, counts.device, counts.step NULLS LAST
        """
    )


@analysis("kernel-classes", "Device time by class of kernel", Level.KERNEL, everywhere=True)
def kernel_classes(trace: Trace) -> Table:
    """Kernels and copies by class, derived from their names: their number, time, and share of the total time.

    The times of kernels that overlap are added up. For matrix products, convolutions and attention, the time is split
    by whether the name shows that tensor cores are used, that they are not, or neither; `tensor_core_percent` is a
    percentage of the first two together. With several devices, the rows of all devices together come first and name no
    device; the rows of each device follow, with shares of its own time.
    """
    prepare(trace)
    figures = f"""
        coalesce(class, 'memory copy') AS class, count(*) AS kernels, sum(dur_ns) / 1e6 AS device_ms,
        avg(dur_ns) / 1e3 AS mean_us, max(dur_ns) / 1e3 AS max_us, {TENSOR_TIMES}
    """
    return trace.sql(
        f"""
        WITH by_device AS (SELECT rank, device, {figures} FROM device_work GROUP BY rank, device, class),
        totals AS (
            SELECT NULL::INTEGER AS rank, NULL::INTEGER AS device, {figures} FROM device_work GROUP BY class
            UNION ALL
            SELECT * FROM by_device WHERE (SELECT count(*) FROM (SELECT DISTINCT rank, device FROM by_device)) > 1
        )
        SELECT rank, device, class, kernels, device_ms,
               100.0 * device_ms / nullif(sum(device_ms) OVER (PARTITION BY rank, device), 0) AS percent_of_device_time,
               mean_us, max_us, matrix_ms, with_tensor_cores_ms, without_tensor_cores_ms, unknown_ms,
               tensor_core_percent
        FROM totals ORDER BY rank NULLS FIRST, device NULLS FIRST, device_ms DESC, class
        """
    )


# --- tensorcores -------------------------------------------------------------------------------------------------
# Tensor cores: which layers use them, as far as the names of their kernels show.


@analysis("tensor-cores", "Tensor cores by layer", Level.KERNEL, everywhere=True)
def tensor_cores(trace: Trace) -> Table:
    """Device time of each layer's matrix products, convolutions and attention, with and without tensor cores.

    Over all steps and ranks; layers of the same name are one row. Work without a layer is listed under its operator.
    `unknown_ms` is the time of kernels whose names show neither; `tensor_core_percent` is a percentage of the other
    time, and null if there is none. Longest first. The patterns of names are in `xsp.device.kernelnames`.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH work AS (
            SELECT rank, trace_id, coalesce(layer_id, op_id) AS span_id, class, tensor_cores, dur_ns
            FROM device_work WHERE class IN {MATRIX}
        ),
        {HOST_SPANS_SQL}
        SELECT CASE named_work.level {LEVEL_NAMES} END AS level, name, type, count(*) AS kernels, {TENSOR_TIMES}
        FROM named_work GROUP BY ALL ORDER BY matrix_ms DESC, name
        """
    )
