"""Why devices were idle: each gap between device work is split at the launch of the work that ended it.

A gap begins when work on a device ends, and ends when the next kernel or copy begins. The launch of that kernel or copy
on the host shows why it did not begin earlier. Before the launch has reached the device, the device waits for the host:

    data loading   for most of that time the launching process waited for the data loader
    sync           the launching thread waited for the device, in a call that synchronises or in a copy that blocks:
                   for most of that time; or when the device became idle, and without this wait the launch would have
                   been in time
    host-bound     the host did something else

After the launch, the device does not wait for the host:

    kernel wait    the work had been launched: it waited for another stream, for a dependency, or in the queue
    sync           it is a copy whose call blocks, and the call was still preparing it
    unknown        the trace has no launch of this work, or one that begins after it

A launch that begins `LAUNCH_NS` or more before the gap was in time, so all of the gap is after the launch. The causes
are those of Holistic Trace Analysis (host wait, kernel wait), with the host wait divided further. The rule here uses
the launch; the rule there is a threshold on the length of the gap.

The call responsible for a part is the one that the launching thread was in for at least half of it.
"""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.schema import Kind, Level
from xsp.store.devicework import launches
from xsp.store.trace import Trace

LAUNCH_NS = 10_000
"""Nanoseconds in which a launch reaches an idle device: some 3 to 10 µs on today's machines. If work begins within this
time after its launch has returned, the whole gap is before the launch: so short a remainder is not split off."""

MIN_CAUSE_SHARE = 0.5
"""The share of a part of a gap that a wait for data or a call must take to be its cause. An interval that takes half of
another one covers its middle, so one look-up at the middle finds it."""

MAX_SPAN_RATIO = 4
"""Length of a host span, in multiples of the gap, above which it only surrounds the gap and does not explain it."""

MAX_GAPS = 100
"""Number of parts of gaps that are listed individually."""

_DATA_WAITS = f"""
    data AS (
        SELECT rank, coalesce(process, -1) AS on_process, name, start_ns, start_ns + dur_ns AS end_ns
        FROM spans WHERE kind = '{Kind.DATA}'
    ),
    part_data_waits AS (
        SELECT part_waits.*, data.name AS data_name, data.start_ns AS data_from, data.end_ns AS data_to,
               least(data.end_ns, launch_ns) - greatest(data.start_ns, idle_from) AS data_ns
        FROM part_waits ASOF LEFT JOIN data
        ON data.rank = part_waits.rank AND data.on_process = part_waits.on_process
           AND data.start_ns <= part_waits.launch_ns
    )
"""
_NO_DATA_WAITS = """
    part_data_waits AS (
        SELECT *, NULL::VARCHAR AS data_name, NULL::BIGINT AS data_from, NULL::BIGINT AS data_to,
               NULL::BIGINT AS data_ns FROM part_waits
    )
"""
"""The last wait for data before a launch, as SQL after `part_waits`; the latter without waits, which saves a join."""

_CAUSES = f"""
    WITH ordered AS (
        SELECT rank, device, on_process, correlation_id, span_id, start_ns,
               max(end_ns) OVER (PARTITION BY rank, device, recording ORDER BY start_ns
                                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS idle_from
        FROM device_work
    ),
    launched AS (
        SELECT gaps.*, begin_ns AS launch_ns, on_thread, blocks, begin_ns - idle_from AS late_ns,
               CASE WHEN begin_ns IS NULL OR begin_ns > start_ns THEN NULL
                    WHEN begin_ns < idle_from - {LAUNCH_NS} THEN idle_from
                    ELSE greatest(begin_ns + {LAUNCH_NS}, idle_from,
                                  CASE WHEN blocks THEN idle_from ELSE returned_ns END) END AS reached_ns
        FROM (SELECT * FROM ordered WHERE start_ns > idle_from) gaps
        LEFT JOIN launches USING (rank, on_process, correlation_id)
    ),
    parts AS MATERIALIZED (
        SELECT rank, device, span_id, on_process, on_thread, idle_from, start_ns, late_ns, launch_ns, part,
               begins_ns, ends_ns, ends_ns - begins_ns AS part_ns, begins_ns + (ends_ns - begins_ns) // 2 AS middle_ns
        FROM (
            SELECT *, CASE WHEN reached_ns IS NULL THEN 'unknown' ELSE 'launching' END AS part, idle_from AS begins_ns,
                   CASE WHEN start_ns - reached_ns > {LAUNCH_NS} THEN reached_ns ELSE start_ns END AS ends_ns
            FROM launched WHERE reached_ns IS NULL OR reached_ns > idle_from
            UNION ALL
            SELECT *, CASE WHEN blocks AND reached_ns > idle_from THEN 'sync' ELSE 'kernel wait' END AS part,
                   reached_ns AS begins_ns, start_ns AS ends_ns
            FROM launched WHERE start_ns - reached_ns > {LAUNCH_NS} OR reached_ns = idle_from
        )
    ),
    calls AS (  -- the outermost ones: a call of the driver within one of the runtime is the same call
        SELECT rank, on_process, on_thread, name, waits, start_ns, end_ns FROM (
            SELECT *, max(end_ns) OVER (PARTITION BY rank, on_process, on_thread ORDER BY start_ns, end_ns DESC
                                        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
            FROM runtime_calls
        ) WHERE until_ns IS NULL OR end_ns > until_ns
    ),
    part_calls AS (
        SELECT parts.*, CASE WHEN least(calls.end_ns, ends_ns) - greatest(calls.start_ns, begins_ns)
                                  >= {MIN_CAUSE_SHARE} * part_ns AND (part <> 'kernel wait' OR part_ns > {LAUNCH_NS})
                             THEN calls.start_ns END AS call_from,
               calls.end_ns AS call_to, calls.name AS call_name, calls.waits AS call_waits
        FROM parts ASOF LEFT JOIN calls
        ON calls.rank = parts.rank AND calls.on_process = parts.on_process AND calls.on_thread = parts.on_thread
           AND calls.start_ns <= parts.middle_ns
    ),
    waiting AS (SELECT * FROM calls WHERE waits),
    part_waits AS (
        SELECT part_calls.*, waiting.start_ns AS wait_from, waiting.end_ns AS wait_to, waiting.name AS wait_name
        FROM part_calls ASOF LEFT JOIN waiting
        ON waiting.rank = part_calls.rank AND waiting.on_process = part_calls.on_process
           AND waiting.on_thread = part_calls.on_thread AND waiting.start_ns <= part_calls.idle_from
    ),
    {{part_data_waits}},
    explained AS (
        SELECT *, CASE WHEN part <> 'launching' THEN part
                       WHEN late_ns > 0 AND data_from IS NOT NULL AND data_ns >= {MIN_CAUSE_SHARE} * late_ns
                            THEN 'data loading'
                       WHEN wait_to >= idle_from AND wait_to - wait_from >= late_ns THEN 'sync'
                       WHEN call_from IS NOT NULL AND call_waits THEN 'sync'
                       ELSE 'host-bound' END AS cause
        FROM part_data_waits
    )
    SELECT rank, device, span_id, on_process, on_thread, idle_from, start_ns - idle_from AS gap_ns, late_ns,
           begins_ns, part_ns AS idle_ns, middle_ns, cause,
           CASE WHEN cause = 'data loading' THEN data_name WHEN call_from IS NOT NULL THEN call_name
                WHEN cause = 'sync' THEN wait_name END AS call,
           CASE WHEN cause = 'data loading' THEN data_from WHEN call_from IS NOT NULL THEN call_from
                WHEN cause = 'sync' THEN wait_from END AS call_from,
           CASE WHEN cause = 'data loading' THEN data_to WHEN call_from IS NOT NULL THEN call_to
                WHEN cause = 'sync' THEN wait_to END AS call_to
    FROM explained
"""
"""Every part of a gap: its start, duration, delay of the launch that ended the gap, cause, and call responsible."""


def _prepare(trace: Trace) -> None:
    if trace.has_temp_table("idle_causes"):
        return
    launches(trace)
    query = f"SELECT 1 FROM spans WHERE kind = '{Kind.DATA}' LIMIT 1"
    data_waits = _DATA_WAITS if trace.con.execute(query).fetchall() else _NO_DATA_WAITS
    trace.create_temp_table("idle_causes", _CAUSES.format(part_data_waits=data_waits))


@analysis("idle-causes", "Why devices were idle", Level.KERNEL, everywhere=True)
def idle_causes(trace: Trace) -> Table:
    """Idle time of each device by cause: host-bound, sync, data loading, kernel wait, unknown.

    A gap is divided at the launch of the work that ended it: before the launch the host is the cause, after it the work
    waited. The causes of a device add up to its idle time in `device-activity`. `call` is the call that the launching
    thread was in for most of the time of a cause, and `call_ms` is that idle time; both are null if no call covers half
    of any gap. docs/understand/device-time.md explains the rules.
    """
    _prepare(trace)
    return trace.sql(
        """
        WITH calls AS (
            SELECT rank, device, cause, call, sum(idle_ns) AS ns FROM idle_causes WHERE call IS NOT NULL GROUP BY ALL
        ),
        main_calls AS (
            SELECT rank, device, cause, call, ns FROM (
                SELECT *, row_number() OVER (PARTITION BY rank, device, cause ORDER BY ns DESC, call) AS place
                FROM calls
            ) WHERE place = 1
        ),
        causes AS (
            SELECT rank, device, cause, count(*) AS gaps, sum(idle_ns) AS ns, median(idle_ns) / 1e3 AS median_us,
                   max(idle_ns) / 1e3 AS longest_us
            FROM idle_causes GROUP BY rank, device, cause
        )
        SELECT causes.rank, causes.device, causes.cause, causes.ns / 1e6 AS idle_ms,
               100.0 * causes.ns / sum(causes.ns) OVER (PARTITION BY causes.rank, causes.device) AS percent_of_idle,
               call, main_calls.ns / 1e6 AS call_ms, gaps, median_us, longest_us
        FROM causes LEFT JOIN main_calls
        ON main_calls.rank = causes.rank AND main_calls.device IS NOT DISTINCT FROM causes.device
           AND main_calls.cause = causes.cause
        ORDER BY causes.rank, causes.device, idle_ms DESC, causes.cause
        """
    )


@analysis("idle-gaps", "The longest idle gaps", Level.KERNEL, everywhere=True)
def idle_gaps(trace: Trace) -> Table:
    """The longest gaps, each part with its cause, the call responsible, and the kernel or copy that ended the gap.

    A gap that is split at a launch has two rows: before the launch (the host) and after it. `call` is what the
    launching thread was in for at least half of that time: a call of the runtime, else the innermost operator, module
    or block of about that length. `call_at_ms` is its start, in the time of `begins_at_ms` (from the first device work
    on), `call_us` its duration, `call_bytes` the bytes that it copied, and `call_span_id` its span in `spans`.
    `launched_after_us` is the time from the start of the gap to the launch of the work that ended it; it is negative if
    the launch came before the device was idle.
    """
    _prepare(trace)
    return trace.sql(
        f"""
        WITH longest AS MATERIALIZED (FROM idle_causes ORDER BY idle_ns DESC, begins_ns LIMIT {MAX_GAPS}),
        gap_ends AS MATERIALIZED (
            SELECT longest.*, s.step, s.name, s.trace_id, s.op_id, s.layer_id
            FROM longest JOIN device_work s ON s.rank = longest.rank AND s.span_id = longest.span_id
                                          AND s.start_ns = longest.idle_from + longest.gap_ns
        ),
        enclosing AS MATERIALIZED (
            SELECT rank, trace_id, span_id, name FROM spans
            WHERE span_id IN (SELECT op_id FROM gap_ends UNION SELECT layer_id FROM gap_ends)
        ),
        host_spans AS (
            SELECT longest.rank, longest.device, longest.begins_ns, arg_min(s.name, (s.dur_ns, s.span_id)) AS name,
                   arg_min(s.start_ns, (s.dur_ns, s.span_id)) AS start_ns,
                   arg_min(s.span_id, (s.dur_ns, s.span_id)) AS span_id,
                   min(s.dur_ns) AS dur_ns
            FROM longest JOIN spans s
            ON s.rank = longest.rank AND coalesce(s.process, -1) = longest.on_process
               AND coalesce(s.thread, -1) = longest.on_thread AND s.start_ns <= middle_ns
               AND s.start_ns + s.dur_ns > middle_ns
               AND least(s.start_ns + s.dur_ns, begins_ns + idle_ns) - greatest(s.start_ns, begins_ns)
                   >= {MIN_CAUSE_SHARE} * idle_ns
               AND s.dur_ns <= {MAX_SPAN_RATIO} * idle_ns
            WHERE longest.call IS NULL AND longest.cause = 'host-bound' AND s.level < {int(Level.KERNEL)}
              AND s.kind NOT IN ('{Kind.RUN}', '{Kind.STEP}', '{Kind.OVERHEAD}', '{Kind.ALLOC}')
            GROUP BY ALL
        ),
        call_spans AS (
            SELECT s.rank, s.name, s.start_ns, min(s.span_id) AS span_id
            FROM spans s JOIN (SELECT DISTINCT rank, call, call_from FROM longest) longest_calls
            ON longest_calls.rank = s.rank AND longest_calls.call = s.name AND longest_calls.call_from = s.start_ns
            WHERE s.device IS NULL GROUP BY ALL
        ),
        call_copies AS (
            SELECT calls.rank, calls.on_process, calls.on_thread, calls.start_ns,
                   sum(try_cast(json_extract_string(s.attributes, '$.bytes') AS BIGINT))::BIGINT AS bytes
            FROM runtime_calls calls
            JOIN (SELECT DISTINCT rank, on_process, on_thread, call_from FROM longest) longest_calls
            ON longest_calls.rank = calls.rank AND longest_calls.on_process = calls.on_process
               AND longest_calls.on_thread = calls.on_thread AND longest_calls.call_from = calls.start_ns
            JOIN device_work w ON w.rank = calls.rank AND w.on_process = calls.on_process
               AND w.correlation_id = calls.correlation_id AND w.kind = '{Kind.COPY}'
            JOIN spans s ON s.rank = w.rank AND s.trace_id = w.trace_id AND s.span_id = w.span_id
            GROUP BY ALL
        )
        SELECT gap_ends.rank, gap_ends.device, gap_ends.step, (gap_ends.begins_ns - first_ns) / 1e6 AS begins_at_ms,
               idle_ns / 1e3 AS idle_us, cause, coalesce(call, host_spans.name) AS call,
               (coalesce(call_from, host_spans.start_ns) - first_ns) / 1e6 AS call_at_ms,
               coalesce(call_to - call_from, host_spans.dur_ns) / 1e3 AS call_us, call_copies.bytes AS call_bytes,
               coalesce(call_spans.span_id, host_spans.span_id) AS call_span_id,
               late_ns / 1e3 AS launched_after_us, gap_ends.name AS next_work, op.name AS next_op,
               layer.name AS next_layer
        FROM gap_ends CROSS JOIN (SELECT min(start_ns) AS first_ns FROM device_work)
        LEFT JOIN enclosing op
          ON op.rank = gap_ends.rank AND op.trace_id = gap_ends.trace_id AND op.span_id = gap_ends.op_id
        LEFT JOIN enclosing layer
          ON layer.rank = gap_ends.rank AND layer.trace_id = gap_ends.trace_id AND layer.span_id = gap_ends.layer_id
        LEFT JOIN host_spans
          ON host_spans.rank = gap_ends.rank AND host_spans.device = gap_ends.device
         AND host_spans.begins_ns = gap_ends.begins_ns
        LEFT JOIN call_spans
          ON call_spans.rank = gap_ends.rank AND call_spans.name = gap_ends.call
         AND call_spans.start_ns = gap_ends.call_from
        LEFT JOIN call_copies
          ON call_copies.rank = gap_ends.rank AND call_copies.on_process = gap_ends.on_process
         AND call_copies.on_thread = gap_ends.on_thread AND call_copies.start_ns = gap_ends.call_from
        ORDER BY idle_ns DESC, gap_ends.begins_ns
        """
    )
