"""Device work of all steps and ranks, the calls that launched it, and what a device did at each moment.

The window of a device is the time from the start of its first kernel or copy to the end of its last. If some steps
were not recorded, or without device work (the steps of a leveled run take turns), or only to describe the model, the
window consists of several recordings, and the time between them does not count.
Within a window each moment is either idle or busy; time in which work overlaps counts once.
"""

from __future__ import annotations

from typing import NamedTuple

from xsp.device.kernelnames import COMMUNICATION, MATRIX
from xsp.schema import Kind, Level
from xsp.store.trace import Trace
from xsp.store.views import kernel_names, library_calls

COMPUTATION = "computation"
COPY = "copy"

LEVEL_NAMES = " ".join(f"WHEN {int(level)} THEN '{level.name.lower()}'" for level in Level)
"""The names of levels, as SQL to put between CASE and END."""


def _device_work(spans: str) -> str:
    return f"""
    WITH recordings AS (
        SELECT rank, step, count(*) FILTER (WHERE rung < {int(Level.KERNEL)} OR timed = false OR follows IS false)
                           OVER (PARTITION BY rank ORDER BY start_ns) AS recording
        FROM (
            SELECT *, step = lag(step) OVER (PARTITION BY rank ORDER BY start_ns) + 1 AS follows
            FROM (
                SELECT rank, step, min(start_ns) AS start_ns, any_value(rung) AS rung, any_value(timed) AS timed
                FROM {spans} WHERE kind = '{Kind.STEP}' AND step IS NOT NULL GROUP BY rank, step
            )
        )
    ),
    processes AS (
        SELECT rank, any_value(process) AS process FROM {spans} WHERE level = {int(Level.RUNTIME)}
        GROUP BY rank HAVING min(process) = max(process)
    ),
    callers AS (  -- of several processes, the one that made the call of this number
        SELECT rank, correlation_id, any_value(process) AS process FROM {spans}
        WHERE level = {int(Level.RUNTIME)} AND kind <> '{Kind.SYNC}' AND correlation_id IS NOT NULL
          AND rank NOT IN (SELECT rank FROM processes) GROUP BY ALL HAVING min(process) = max(process)
    )
    SELECT s.rank, s.device, s.stream, s.step, s.trace_id, s.span_id, s.parent_id,
           coalesce(library_call.op_id, s.parent_id) AS op_id, s.layer_id, s.name, s.kind, s.start_ns,
           s.dur_ns, s.start_ns + s.dur_ns AS end_ns, s.correlation_id,
           coalesce(s.process, processes.process, callers.process, -1) AS on_process,
           coalesce(recordings.recording, 0) AS recording,
           names.class, names.tensor_cores, names.collective,
           CASE WHEN s.kind = '{Kind.COPY}' THEN '{COPY}' WHEN names.class = '{COMMUNICATION}'
                THEN '{COMMUNICATION}' ELSE '{COMPUTATION}' END AS purpose
    FROM {spans} s LEFT JOIN recordings ON recordings.rank = s.rank AND recordings.step = s.step
    LEFT JOIN processes ON processes.rank = s.rank
    LEFT JOIN callers ON callers.rank = s.rank AND callers.correlation_id = s.correlation_id
    LEFT JOIN kernel_names names ON names.name = s.name AND s.kind = '{Kind.KERNEL}'
    LEFT JOIN library_calls_of_{spans} library_call
        ON library_call.rank = s.rank AND library_call.trace_id = s.trace_id AND library_call.span_id = s.parent_id
    WHERE s.level = {int(Level.KERNEL)} AND s.kind IN ('{Kind.KERNEL}', '{Kind.COPY}') AND s.timed IS NOT false
"""


SKEW_NS = 2_000
"""Accuracy of times: clocks of host and device agree to this, and some traces have whole microseconds."""

STAGED_NS = 10_000
"""Nanoseconds; a call that overlaps its copy for this long does the copying itself, piecewise from pageable memory."""


def _runtime_calls(spans: str, device_work: str) -> str:
    return f"""
    WITH calls AS (
        SELECT rank, coalesce(process, -1) AS on_process, coalesce(thread, -1) AS on_thread, correlation_id, kind, name,
               start_ns, dur_ns, start_ns + dur_ns AS end_ns, timed
        FROM {spans} WHERE level = {int(Level.RUNTIME)} AND kind <> '{Kind.OVERHEAD}'
    ),
    copies AS (
        SELECT rank, on_process, correlation_id, min(start_ns) AS copying_ns, max(end_ns) AS copied_ns
        FROM {device_work} WHERE kind = '{Kind.COPY}' AND correlation_id IS NOT NULL GROUP BY ALL
    )
    SELECT calls.*,
           CASE WHEN kind = '{Kind.SYNC}' THEN NOT contains(name, 'WaitEvent')
                WHEN contains(name, 'Graph') OR contains(name, 'Memset') THEN false
                WHEN copied_ns IS NOT NULL THEN end_ns + {SKEW_NS} >= copied_ns OR end_ns >= copying_ns + {STAGED_NS}
                ELSE contains(name, 'Memcpy') AND NOT contains(name, 'Async') END AS waits
    FROM calls LEFT JOIN copies USING (rank, on_process, correlation_id)
"""


def _launches(device_work: str, runtime_calls: str) -> str:
    return f"""
    SELECT rank, on_process, correlation_id, min(start_ns) AS begin_ns, arg_min(on_thread, start_ns) AS on_thread,
           arg_min(end_ns, start_ns) AS returned_ns, arg_min(waits, start_ns) AS blocks,
           min(start_ns) FILTER (WHERE timed IS NOT false) AS launch_ns,
           max(dur_ns) FILTER (WHERE timed IS NOT false) AS launch_dur_ns,
           bool_or(waits) FILTER (WHERE timed IS NOT false) AS waits
    FROM {runtime_calls}
    SEMI JOIN (SELECT DISTINCT correlation_id FROM {device_work}) work USING (correlation_id)
    WHERE kind <> '{Kind.SYNC}' GROUP BY rank, on_process, correlation_id
"""


class Tables(NamedTuple):
    """Names of the tables that `prepare` and `launches` make."""

    spans: str
    device_work: str
    runtime_calls: str
    launches: str


def tables_of(spans: str = "spans") -> Tables:
    """Return the names of the tables that are made from a table of spans."""
    suffix = "" if spans == "spans" else f"_of_{spans}"
    return Tables(spans, f"device_work{suffix}", f"runtime_calls{suffix}", f"launches{suffix}")


def launches(trace: Trace, spans: str = "spans") -> None:
    """Make the table `launches`, once: the calls that launched device work, with those that have one number together.

    `begin_ns`, `on_thread`, `returned_ns` and `blocks` are of the first of them; `launch_ns`, `launch_dur_ns` and
    `waits` are of those in timed steps, and null if there are none. `spans` as for `prepare`.
    """
    prepare(trace, spans)
    names = tables_of(spans)
    trace.create_temp_table(names.launches, _launches(names.device_work, names.runtime_calls))


def prepare(trace: Trace, spans: str = "spans") -> None:
    """Make the tables `device_work` and `runtime_calls`, once, and `kernel_names`.

    `device_work` has each kernel and copy with its end, its recording, the process that launched it, the properties
    that its name shows, and its purpose: computation, communication, copy. `class` is null for copies; `op_id` is the
    span that launched it: the operator, also where a library's call is between. Kineto does not record the process of
    device work; if all calls of a rank are of one process, it is that process.
    `runtime_calls` has each runtime call; `waits` marks calls that return when device work has ended: synchronising
    calls, and copies whose call overlaps the copy or lasts until its end (if the copy is not in the trace, calls whose
    name does not contain Async). A call that makes a stream wait does not block the host.

    Args:
        trace: the trace.
        spans: the table with the spans; of another one than `spans`, the tables have other names, see `tables_of`.
    """
    library_calls(trace, spans)
    kernel_names(trace)
    names = tables_of(spans)
    trace.create_temp_table(names.device_work, _device_work(spans))
    trace.create_temp_table(names.runtime_calls, _runtime_calls(spans, names.device_work))


HOST_SPANS_SQL = f"""
    named_work AS (
        SELECT host_span.level, host_span.name, host_span.type, work.*
        FROM work LEFT JOIN (
            SELECT rank, trace_id, span_id, level, name, type FROM spans WHERE level < {int(Level.KERNEL)}
        ) host_span USING (rank, trace_id, span_id)
    )
"""
"""SQL that follows a table `work` of device work by rank, trace_id and span_id, and adds the host span's columns."""

_PURPOSE_CONDITIONS = {
    "busy": "true",
    "computation": f"purpose = '{COMPUTATION}'",
    "communication": f"purpose = '{COMMUNICATION}'",
    "copy": f"purpose = '{COPY}'",
    "kernels": f"purpose <> '{COPY}'",
}
"""Sets of purposes for which the time is computed in which at least one such kernel or copy runs."""


def shares(*keys: str) -> str:
    """Return the SQL of `shares`: for each window, how long work of each purpose ran on any stream, in nanoseconds.

    Busy is computation, exposed communication (no computation runs) and exposed copies (nothing else runs) together.
    In order of start, work adds to a union the part that lies after the latest end before it. All windows are laid
    one after another on one axis, which is swept once: the engine is slow at many small sweeps.

    Args:
        keys: columns of `device_work` that distinguish windows, for example the device.
    """
    columns = ", ".join(keys)
    join_condition = " AND ".join(f"windows.{name} IS NOT DISTINCT FROM work.{name}" for name in keys)
    until = ", ".join(
        f"max(CASE WHEN {condition} THEN end_ns END) OVER earlier_work AS {name}_until"
        for name, condition in _PURPOSE_CONDITIONS.items()
    )
    durations = ", ".join(
        f"coalesce(sum(CASE WHEN {condition} THEN "
        f"greatest(0, end_ns - greatest(start_ns, coalesce({name}_until, start_ns))) END), 0)::BIGINT AS {name}_ns"
        for name, condition in _PURPOSE_CONDITIONS.items()
    )
    return f"""
        windows AS (
            SELECT *, (coalesce(sum(window_ns) OVER (ORDER BY {columns} ROWS BETWEEN UNBOUNDED PRECEDING
                                                     AND 1 PRECEDING), 0) - first_ns)::BIGINT AS shift_ns
            FROM (
                SELECT {columns}, min(start_ns) AS first_ns, max(end_ns) - min(start_ns) AS window_ns
                FROM device_work GROUP BY {columns}
            )
        ),
        shifted AS (
            SELECT {", ".join(f"windows.{name}" for name in keys)}, window_ns, purpose,
                   start_ns + shift_ns AS start_ns, end_ns + shift_ns AS end_ns
            FROM device_work work JOIN windows ON {join_condition}
        ),
        unions AS (
            SELECT *, {until} FROM shifted
            WINDOW earlier_work AS (ORDER BY start_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        ),
        shares AS (
            SELECT {columns}, window_ns, busy_ns, computation_ns, communication_ns, copy_ns,
                   kernels_ns - computation_ns AS exposed_communication_ns, busy_ns - kernels_ns AS exposed_copy_ns
            FROM (SELECT {columns}, any_value(window_ns) AS window_ns, {durations} FROM unions GROUP BY {columns})
        )
    """


def _matrix_ns(condition: str) -> str:
    return f"sum(CASE WHEN {condition} THEN dur_ns ELSE 0 END) FILTER (WHERE class IN {MATRIX})"


TENSOR_TIMES = f"""
    {_matrix_ns("true")} / 1e6 AS matrix_ms,
    {_matrix_ns("tensor_cores = 'yes'")} / 1e6 AS with_tensor_cores_ms,
    {_matrix_ns("tensor_cores = 'no'")} / 1e6 AS without_tensor_cores_ms,
    {_matrix_ns("tensor_cores IS NULL")} / 1e6 AS unknown_ms,
    100.0 * {_matrix_ns("tensor_cores = 'yes'")} / nullif({_matrix_ns("tensor_cores IS NOT NULL")}, 0)
        AS tensor_core_percent
"""
"""Device time of matrix products, convolutions and attention, by the use of tensor cores; null without such kernels."""
