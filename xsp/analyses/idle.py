"""Why devices were idle: each gap between device work has one cause, read from the launch that ended it.

A gap begins where the last work of a device ends, and ends where the next begins. What ended it is that next
kernel or copy; so its launch on the host tells why it did not come earlier:

    data loading   the launch came late, and for most of that time its process waited for the data loader
    sync           it came late, because its thread had been waiting for the device: a thread that waits
                   cannot launch, and had it not waited for as long, the launch would have been in time
    host-bound     it came late, for whatever else the host did
    kernel wait    it was issued in time: the work waited for another stream, for a dependency, or for its turn
    unknown        the trace holds no launch of this work, or one that begins after it

Late is a launch that begins when the device is idle already, or so shortly before that it cannot be there in
time (`LAUNCH_NS`). The causes are those of Holistic Trace Analysis (host wait, kernel wait), with the host's
wait told apart; the rule here is the launch, where there it is a threshold on the gap.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.devicework import prepare
from xsp.span import Kind, Level
from xsp.trace import Trace

LAUNCH_NS = 10_000
"""How long a launch takes to reach an idle device: some 3 to 10 µs on today's machines. A launch that begins
less than that before the gap is late."""

MOST = 0.5
"""The share of the time between the begin of the gap and the launch that waiting for data has to take."""

LONGEST = 100
"""As many gaps are shown one by one."""

_CAUSES = f"""
    WITH ordered AS (
        SELECT rank, device, on_process, correlation_id, span_id, start_ns,
               max(end_ns) OVER (PARTITION BY rank, device, recording ORDER BY start_ns
                                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS idle_from
        FROM device_work
    ),
    gaps AS MATERIALIZED (SELECT *, start_ns - idle_from AS idle_ns FROM ordered WHERE start_ns > idle_from),
    launches AS (
        SELECT rank, on_process, correlation_id, min(start_ns) AS launch_ns, arg_min(on_thread, start_ns) AS on_thread
        FROM runtime_calls WHERE kind <> '{Kind.SYNC}' AND correlation_id IS NOT NULL GROUP BY ALL
    ),
    launched AS (
        SELECT gaps.*, launch_ns, on_thread, launch_ns - idle_from AS late_ns,
               CASE WHEN launch_ns IS NULL OR launch_ns > start_ns THEN 'unknown'
                    WHEN late_ns < -{LAUNCH_NS} THEN 'kernel wait' END AS cause
        FROM gaps LEFT JOIN launches USING (rank, on_process, correlation_id)
    ),
    waits AS (
        SELECT rank, on_process, on_thread, start_ns, end_ns FROM runtime_calls WHERE kind = '{Kind.SYNC}'
        UNION ALL  -- a copy's call that goes on until the copy is done waited for it
        SELECT rank, on_process, on_thread, calls.start_ns, calls.end_ns
        FROM runtime_calls calls JOIN (
            SELECT rank, on_process, correlation_id, max(end_ns) AS copied_ns
            FROM device_work WHERE kind = '{Kind.COPY}' GROUP BY ALL
        ) copies USING (rank, on_process, correlation_id)
        WHERE calls.kind <> '{Kind.SYNC}' AND calls.end_ns >= copied_ns
    ),
    waited AS (
        SELECT late.*, waits.start_ns AS wait_from, waits.end_ns AS wait_to
        FROM (FROM launched WHERE cause IS NULL) late ASOF LEFT JOIN waits
        ON waits.rank = late.rank AND waits.on_process = late.on_process
           AND waits.on_thread = late.on_thread AND waits.start_ns <= late.idle_from
    ),
    data AS (
        SELECT rank, coalesce(process, -1) AS on_process, start_ns, start_ns + dur_ns AS end_ns
        FROM spans WHERE kind = '{Kind.DATA}'
    ),
    loaded AS (
        SELECT waited.*, CASE WHEN data.start_ns IS NOT NULL
               THEN least(data.end_ns, launch_ns) - greatest(data.start_ns, idle_from) END AS data_ns
        FROM waited ASOF LEFT JOIN data
        ON data.rank = waited.rank AND data.on_process = waited.on_process AND data.start_ns <= waited.launch_ns
    )
    SELECT rank, device, span_id, idle_from, idle_ns, late_ns, cause FROM launched WHERE cause IS NOT NULL
    UNION ALL
    SELECT rank, device, span_id, idle_from, idle_ns, late_ns,
           CASE WHEN late_ns > 0 AND data_ns >= {MOST} * late_ns THEN 'data loading'
                WHEN wait_to >= idle_from AND wait_to - wait_from >= late_ns THEN 'sync'
                ELSE 'host-bound' END
    FROM loaded
"""
"""Every gap: since when, how long, how late the launch came that ended it, and the cause."""


def _prepare(trace: Trace) -> None:
    prepare(trace)
    trace.once("idle_causes", _CAUSES)


@analysis("idle-causes", "Why devices were idle", Level.KERNEL, everywhere=True)
def IDLE_CAUSES(trace: Trace) -> Table:
    """Idle time of each device by cause: host-bound, sync, data loading, kernel wait, unknown.

    The causes of a device add up to its idle time, as `device-activity` has it. The rule stands in
    docs/device-time.md.
    """
    _prepare(trace)
    return trace.sql(
        """
        SELECT rank, device, cause, count(*) AS gaps, sum(idle_ns) / 1e6 AS idle_ms,
               100.0 * sum(idle_ns) / sum(sum(idle_ns)) OVER (PARTITION BY rank, device) AS percent_of_idle,
               median(idle_ns) / 1e3 AS median_us, max(idle_ns) / 1e3 AS longest_us
        FROM idle_causes GROUP BY rank, device, cause ORDER BY rank, device, idle_ms DESC, cause
        """
    )


@analysis("idle-gaps", "The longest idle gaps", Level.KERNEL, everywhere=True)
def IDLE_GAPS(trace: Trace) -> Table:
    """The longest gaps, each with its cause and the kernel or copy that ended it, of which op, layer and step.

    `launched_after_us` is the time from the begin of the gap to the launch of what ended it; it is negative
    where the launch came before the device was idle.
    """
    _prepare(trace)
    return trace.sql(
        f"""
        WITH longest AS MATERIALIZED (FROM idle_causes ORDER BY idle_ns DESC, idle_from LIMIT {LONGEST}),
        next AS MATERIALIZED (
            SELECT longest.*, s.step, s.name, s.trace_id, s.parent_id, s.layer_id
            FROM longest JOIN device_work s ON s.rank = longest.rank AND s.span_id = longest.span_id
                                          AND s.start_ns = longest.idle_from + longest.idle_ns
        ),
        around AS MATERIALIZED (
            SELECT rank, trace_id, span_id, name FROM spans
            WHERE span_id IN (SELECT parent_id FROM next UNION SELECT layer_id FROM next)
        )
        SELECT next.rank, next.device, next.step, (idle_from - first_ns) / 1e6 AS begins_at_ms,
               idle_ns / 1e3 AS idle_us, cause, late_ns / 1e3 AS launched_after_us,
               next.name AS next_work, op.name AS next_op, layer.name AS next_layer
        FROM next CROSS JOIN (SELECT min(start_ns) AS first_ns FROM device_work)
        LEFT JOIN around op
          ON op.rank = next.rank AND op.trace_id = next.trace_id AND op.span_id = next.parent_id
        LEFT JOIN around layer
          ON layer.rank = next.rank AND layer.trace_id = next.trace_id AND layer.span_id = next.layer_id
        ORDER BY idle_ns DESC, idle_from
        """
    )
