"""Communication: collectives, their time, the share that computation hides, their bandwidth, and which rank is late."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.schema import Level
from xsp.store.collectives import COLLECTIVES, SYNCHRONOUS, reason_without_collectives
from xsp.store.devicework import COMPUTATION, prepare
from xsp.store.skew import RANKS, aligned_sql
from xsp.store.trace import Trace

_BUS = """
    CASE WHEN collective = 'all_reduce' THEN 2.0 * (group_size - 1) / nullif(group_size, 0)
         WHEN collective IN ('all_gather', 'reduce_scatter', 'all_to_all', 'gather', 'scatter')
              THEN (group_size - 1.0) / nullif(group_size, 0)
         WHEN collective IN ('broadcast', 'reduce', 'send_recv', 'send', 'recv') THEN 1.0 END
"""
"""Factor from algorithm bandwidth to bus bandwidth, after nccl-tests, doc/PERFORMANCE.md."""

_HIDDEN = f"""
    {COLLECTIVES},
    computing AS (
        SELECT rank, device, recording, start_ns, max(end_ns) AS end_ns
        FROM device_work WHERE purpose = '{COMPUTATION}' GROUP BY ALL
    ),
    running AS (
        SELECT rank, device, recording, start_ns, end_ns, max(end_ns) OVER (
                   PARTITION BY rank, device, recording ORDER BY start_ns
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
        FROM computing
    ),
    computed AS (
        SELECT rank, device, recording, start_ns, greatest(end_ns, until_ns) AS until_ns,
               sum(greatest(0, end_ns - greatest(start_ns, until_ns))) OVER (
                   PARTITION BY rank, device, recording ORDER BY start_ns ROWS UNBOUNDED PRECEDING) AS done_ns
        FROM running
    ),
    moments AS (
        SELECT rank, device, recording, span_id, unnest([start_ns, end_ns]) AS time_ns
        FROM collectives WHERE device IS NOT NULL
    ),
    hidden AS (
        SELECT moments.rank, moments.span_id,
               max(coalesce(done_ns - greatest(0, until_ns - time_ns), 0))
               - min(coalesce(done_ns - greatest(0, until_ns - time_ns), 0)) AS hidden_ns
        FROM moments ASOF LEFT JOIN computed
        ON computed.rank = moments.rank AND computed.device = moments.device AND computed.recording = moments.recording
           AND computed.start_ns <= moments.time_ns
        GROUP BY ALL
    )
"""
"""Time that a device computed while a collective ran: its computation time up to the end of the collective, minus that
up to its start. `done_ns` counts kernels that have begun in full; the part of them after that moment is subtracted."""

_TRANSFERRED = f"""
    ordered AS (
        SELECT rank, device, span_id, start_ns, end_ns, group_size, id, collective, communicator, full_name,
               count(*) OVER (PARTITION BY rank, device, id) AS id_count,
               row_number() OVER (PARTITION BY rank, device, collective, communicator, full_name ORDER BY start_ns)
                   AS position
        FROM collectives WHERE collective IN {SYNCHRONOUS}
    ),
    keyed AS (
        SELECT rank, span_id, start_ns, end_ns, group_size, id,
               CASE WHEN id IS NULL AND device IS NOT NULL
                    THEN concat_ws(' ', rank, communicator, collective, split_part(full_name, '(', 1), position)
                    WHEN id_count = 1 THEN id END AS key
        FROM ordered
    ),
    complete AS (
        SELECT key, min(end_ns - start_ns) AS transfer_ns FROM keyed WHERE key IS NOT NULL GROUP BY key
        HAVING count(*) > 1 AND count(*) = coalesce(max(group_size), count(*))
            AND (max(id) IS NOT NULL OR max(start_ns) < min(end_ns))
    ),
    transferred AS (SELECT rank, span_id, transfer_ns FROM keyed JOIN complete USING (key))
"""
"""The transfer time of collectives whose members are all in the trace. They end together, so the member that arrives
last has the shortest duration, and the excess of another member's duration is waiting. Members are matched by the id of
the collective; members on devices of one rank, which share a clock, also by their order if they overlap."""


_NULL_REASON = """CASE
    WHEN bytes IS NULL AND group_size IS NULL THEN 'no size, group' WHEN bytes IS NULL THEN 'no size'
    WHEN group_size IS NULL THEN 'no group' END"""
"""Why a bandwidth is null: profilers without annotations of collectives (Nsight Systems) record neither."""


@analysis(
    "communication", "Collectives by kind and size", Level.MODEL, unless=reason_without_collectives, everywhere=True
)
def collectives_by_kind(trace: Trace) -> Table:
    """Collectives of all ranks by kind, communicator and size: their number, time, and the time that is hidden.

    A collective is hidden while its device also computes; null if it ran on the host. Its time begins when its own rank
    arrives, so it includes waiting for other ranks; the shortest one includes the least. If all members of a
    collective are in the trace, `waited_ms` is the time from the arrival of each member to that of the last, and
    `transfer_us` is the mean time from then to the end: the time of the transfer itself. Bandwidths are in 10^9 bytes
    per second, from the mean time, the transfer time and the shortest time, as nccl-tests defines them: algorithm
    bandwidth is bytes over time, bus bandwidth is what the links carried. They are null if size or group is unknown;
    `why_null` names what the trace lacks.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH {_HIDDEN}, {_TRANSFERRED},
        sized AS (
            SELECT collectives.*, hidden.hidden_ns, end_ns - start_ns AS ns, transfer_ns
            FROM collectives LEFT JOIN hidden USING (rank, span_id) LEFT JOIN transferred USING (rank, span_id)
        ),
        totals AS (
            SELECT collective, communicator, group_size, bytes, count(*) AS calls, count(DISTINCT rank) AS ranks,
                   sum(ns) AS ns, avg(ns) AS mean_ns, min(ns) AS min_ns, max(ns) AS max_ns, sum(hidden_ns) AS hidden_ns,
                   sum(ns - transfer_ns) AS waited_ns, avg(transfer_ns) AS transfer_ns, {_BUS} AS bus
            FROM sized GROUP BY ALL
        )
        SELECT collective, communicator, group_size, bytes, calls, ranks, ns / 1e6 AS total_ms,
               (ns - hidden_ns) / 1e6 AS exposed_ms, hidden_ns / 1e6 AS hidden_ms, {_NULL_REASON} AS why_null,
               waited_ns / 1e6 AS waited_ms, transfer_ns / 1e3 AS transfer_us,
               mean_ns / 1e3 AS mean_us, min_ns / 1e3 AS shortest_us, max_ns / 1e3 AS longest_us,
               bytes / nullif(mean_ns, 0) AS algorithm_gb_per_s, bus * bytes / nullif(mean_ns, 0) AS bus_gb_per_s,
               bus * bytes / nullif(transfer_ns, 0) AS transfer_bus_gb_per_s,
               bus * bytes / nullif(min_ns, 0) AS best_bus_gb_per_s
        FROM totals ORDER BY total_ms DESC, collective, communicator, bytes
        """
    )


# --- ranks compared ----------------------------------------------------------------------------------------------
# Which rank arrives late at which collective, and which ranks wait for it, see `xsp.store.skew`.


def _reason_without_ranks(trace: Trace) -> str | None:
    """Return why ranks cannot be compared, or None if they can."""
    reason = reason_without_collectives(trace)
    if reason is None and len(trace.con.execute(RANKS).fetchall()) < 2:
        return f"compares ranks, and {trace.name!r} holds one; load the directory that holds all of them"
    return reason


@analysis(
    "collective-skew", "Who came late to which collective", Level.MODEL, unless=_reason_without_ranks, everywhere=True
)
def collective_skew(trace: Trace) -> Table:
    """Each collective of several ranks: which rank arrived first, which last, and how long the others waited.

    `arrivals_us` is the arrival of each rank relative to the first one; `skew_us` is that of the last. `transfer_us` is
    the shortest time that any rank spent in the collective, which is that of the last to arrive: the time of the
    transfer itself. `certain` is true if the skew is larger than the uncertainty of the clocks. Longest skew first.
    """
    return trace.sql(
        f"""
        WITH {aligned_sql(trace, collective_skew.id)}
        SELECT key AS id, collective, communicator, bytes, step, ranks, first_rank, last_rank, skew_ns / 1e3 AS skew_us,
               uncertainty_ns / 1e3 AS clock_uncertainty_us, skew_ns > uncertainty_ns AS certain,
               transfer_ns / 1e3 AS transfer_us, waited_ns / 1e3 AS waited_us, arrivals_us
        FROM shared ORDER BY skew_ns DESC, id
        """
    )


@analysis("stragglers", "Who waits for whom", Level.MODEL, unless=_reason_without_ranks, everywhere=True)
def collective_waiting(trace: Trace) -> Table:
    """Each rank: how often it was last at a collective, how long the others then waited, and how long it waited itself.

    `clock_offset_us` was subtracted from the times of the rank, to place them on the clock of the lowest rank.
    `last_for_certain` counts skews that are larger than the uncertainty of the clocks. Collectives that were not found
    on another rank are counted as `unmatched`. Sorted by the waiting that a rank causes, most first.
    """
    return trace.sql(
        f"""
        WITH {aligned_sql(trace, collective_waiting.id)},
        by_rank AS (
            SELECT arrived.rank, count(*) AS collectives,
                   count(*) FILTER (WHERE rank = last_rank) AS came_last,
                   count(*) FILTER (WHERE rank = last_rank AND skew_ns > shared.uncertainty_ns) AS last_for_certain,
                   coalesce(sum(waited_ns) FILTER (WHERE rank = last_rank), 0) AS others_waited_ns,
                   sum(last_ns - arrival_ns) AS own_wait_ns, avg(arrival_ns - first_ns) AS late_ns
            FROM arrived JOIN shared USING (key) GROUP BY arrived.rank
        ),
        totals AS (SELECT rank, count(*) AS total FROM collectives GROUP BY rank)
        SELECT rank, coalesce(by_rank.collectives, 0) AS collectives,
               total - coalesce(by_rank.collectives, 0) AS unmatched,
               came_last, last_for_certain, others_waited_ns / 1e6 AS others_waited_ms, own_wait_ns / 1e6 AS waited_ms,
               late_ns / 1e3 AS mean_late_us, offset_ns / 1e3 AS clock_offset_us,
               clocks.uncertainty_ns / 1e3 AS clock_uncertainty_us
        FROM totals LEFT JOIN by_rank USING (rank) LEFT JOIN clocks USING (rank)
        ORDER BY others_waited_ms DESC NULLS LAST, rank
        """
    )
