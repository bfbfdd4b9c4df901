"""Communication: which collectives, how long, how much of it hidden behind computation, at which bandwidth."""

from __future__ import annotations

from xsp.analyses.collectives import COLLECTIVES, why_none
from xsp.analyses.contract import Table, analysis
from xsp.analyses.devicework import COMPUTATION, prepare
from xsp.span import Level
from xsp.trace import Trace

_BUS = """
    CASE WHEN collective = 'all_reduce' THEN 2.0 * (group_size - 1) / nullif(group_size, 0)
         WHEN collective IN ('all_gather', 'reduce_scatter', 'all_to_all')
              THEN (group_size - 1.0) / nullif(group_size, 0)
         WHEN collective IN ('broadcast', 'reduce', 'send_recv') THEN 1.0 END
"""
"""From the bandwidth of the algorithm to that of the links, after nccl-tests, doc/PERFORMANCE.md."""

_EXPOSED = f"""
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
    ends AS (
        SELECT rank, device, recording, span_id, unnest([start_ns, end_ns]) AS time_ns
        FROM collectives WHERE device IS NOT NULL
    ),
    hidden AS (
        SELECT ends.rank, ends.span_id,
               max(coalesce(done_ns - greatest(0, until_ns - time_ns), 0))
               - min(coalesce(done_ns - greatest(0, until_ns - time_ns), 0)) AS hidden_ns
        FROM ends ASOF LEFT JOIN computed
        ON computed.rank = ends.rank AND computed.device = ends.device AND computed.recording = ends.recording
           AND computed.start_ns <= ends.time_ns
        GROUP BY ALL
    )
"""
"""How long a device computed while a collective ran: the time it had computed up to its end, less that up to its
begin. `done_ns` counts all of the kernels that have begun; what of them lies after a moment is taken off."""


@analysis("communication", "Collectives by kind and size", Level.MODEL, unless=why_none, everywhere=True)
def COMMUNICATION(trace: Trace) -> Table:
    """Collectives of all ranks by kind, communicator and size: how many, their time, how much of it is hidden.

    A collective is hidden while its device computes too; null where it ran on the host. Its time begins when
    its own rank has come, so waiting for others is in it; the shortest one has the least. Bandwidths are
    10^9 bytes a second, from the mean and from the shortest time, after nccl-tests: of the algorithm, bytes
    over time; of the bus, what the links carried for it.
    """
    prepare(trace)
    return trace.sql(
        f"""
        WITH {_EXPOSED},
        sized AS (
            SELECT collectives.*, hidden.hidden_ns, end_ns - start_ns AS ns
            FROM collectives LEFT JOIN hidden USING (rank, span_id)
        ),
        summed AS (
            SELECT collective, communicator, group_size, bytes, count(*) AS calls, count(DISTINCT rank) AS ranks,
                   sum(ns) AS ns, avg(ns) AS mean_ns, min(ns) AS min_ns, max(ns) AS max_ns, sum(hidden_ns) AS hidden_ns,
                   {_BUS} AS bus
            FROM sized GROUP BY ALL
        )
        SELECT collective, communicator, group_size, bytes, calls, ranks, ns / 1e6 AS total_ms,
               (ns - hidden_ns) / 1e6 AS exposed_ms, hidden_ns / 1e6 AS hidden_ms,
               mean_ns / 1e3 AS mean_us, min_ns / 1e3 AS shortest_us, max_ns / 1e3 AS longest_us,
               bytes / nullif(mean_ns, 0) AS algorithm_gb_per_s, bus * bytes / nullif(mean_ns, 0) AS bus_gb_per_s,
               bus * bytes / nullif(min_ns, 0) AS best_bus_gb_per_s
        FROM summed ORDER BY total_ms DESC, collective, communicator, bytes
        """
    )
