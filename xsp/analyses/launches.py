"""Launches: their time on the host, the delay until device work begins, and layers in which the host is the limit."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.schema import Kind, Level
from xsp.store.devicework import HOST_SPANS_SQL, LEVEL_NAMES, launches
from xsp.store.trace import Trace

_COST = "coalesce(sum(launch_dur_ns) FILTER (WHERE position = 1 AND NOT waits), 0)"
_WAITED = "coalesce(sum(launch_dur_ns) FILTER (WHERE position = 1 AND waits), 0)"
"""The time of calls that copy and return when the copy is done: for most of that time they wait, and do not launch."""

_LAUNCHED = """
    SELECT s.rank, s.device, s.recording, s.trace_id, coalesce(s.layer_id, s.op_id) AS span_id, s.kind, s.start_ns,
           s.dur_ns, launch_ns, launch_dur_ns, waits,
           row_number() OVER (PARTITION BY s.rank, on_process, correlation_id ORDER BY s.start_ns) AS position
    FROM device_work s LEFT JOIN launches USING (rank, on_process, correlation_id)
"""
"""Device work with its launch. One launch may start many kernels (a graph): `position` counts them, and the launch's
time counts with the first."""


def _prepare(trace: Trace) -> None:
    launches(trace)
    trace.create_temp_table("launched", _LAUNCHED)


@analysis("launches", "Launches and queues", Level.KERNEL, everywhere=True)
def launch_costs(trace: Trace) -> Table:
    """Launches of each device: their time on the host, the delay until kernels and copies begin, and how many wait.

    `delay` is the time from the start of the launch to the start of the work on the device: the launch latency on an
    idle device, the time in the queue on a busy one. `waiting` is the number of kernels and copies that were
    launched and had not begun: its mean over the time from the first launch to the last start, and its maximum. `short`
    counts kernels that took less time than the call that launched them. `blocking` counts copies whose call lasted
    until the copy was done; that time is `wait_ms`, and not a launch cost. Work without a launch in the trace, and work
    that begins before its launch (the clocks disagree), is counted and left out.
    """
    _prepare(trace)
    return trace.sql(
        f"""
        WITH valid AS (SELECT *, start_ns - launch_ns AS delay_ns FROM launched WHERE launch_ns <= start_ns),
        edges AS (
            SELECT rank, device, recording, launch_ns AS time_ns, 1 AS waiting FROM valid
            UNION ALL SELECT rank, device, recording, start_ns, -1 FROM valid
        ),
        queue AS (
            SELECT rank, device, next_ns - time_ns AS ns, waiting
            FROM (
                SELECT rank, device, time_ns, lead(time_ns) OVER (
                           PARTITION BY rank, device, recording ORDER BY time_ns, waiting) AS next_ns,
                       sum(waiting) OVER (PARTITION BY rank, device, recording ORDER BY time_ns, waiting
                                          ROWS UNBOUNDED PRECEDING) AS waiting
                FROM edges
            )
        ),
        queues AS (
            SELECT rank, device, sum(waiting * ns) / nullif(sum(ns), 0) AS mean_waiting,
                   max(waiting)::BIGINT AS most_waiting
            FROM queue GROUP BY ALL
        ),
        counted AS (
            SELECT rank, device, count(*) AS kernels_and_copies, count(*) FILTER (WHERE position = 1) AS launches,
                   {_COST} / 1e6 AS launch_ms,
                   median(launch_dur_ns) FILTER (WHERE position = 1 AND NOT waits) / 1e3 AS launch_median_us,
                   min(delay_ns) / 1e3 AS delay_min_us, median(delay_ns) / 1e3 AS delay_median_us,
                   quantile_cont(delay_ns, 0.9) / 1e3 AS delay_p90_us, max(delay_ns) / 1e3 AS delay_max_us,
                   count(*) FILTER (WHERE kind = '{Kind.KERNEL}' AND dur_ns < launch_dur_ns) AS short,
                   count(*) FILTER (WHERE position = 1 AND waits) AS blocking, {_WAITED} / 1e6 AS wait_ms
            FROM valid GROUP BY ALL
        ),
        missing AS (
            SELECT rank, device, count(*) FILTER (WHERE launch_ns IS NULL) AS without_launch,
                   count(*) FILTER (WHERE launch_ns > start_ns) AS before_launch
            FROM launched GROUP BY ALL
        )
        SELECT missing.rank, missing.device, counted.* EXCLUDE (rank, device), mean_waiting, most_waiting,
               without_launch, before_launch
        FROM missing
        LEFT JOIN counted ON counted.rank = missing.rank AND counted.device IS NOT DISTINCT FROM missing.device
        LEFT JOIN queues ON queues.rank = missing.rank AND queues.device IS NOT DISTINCT FROM missing.device
        ORDER BY missing.rank, missing.device
        """
    )


@analysis("launch-bound", "Layers whose launches cost more than their work", Level.KERNEL, everywhere=True)
def launch_bound(trace: Trace) -> Table:
    """Each layer, by name, over all steps and ranks: host time of its launches against device time of their work.

    `launch_bound` is true if the calls alone take longer than the work that they launch; then a graph, fusion or a
    larger batch helps, and a faster kernel does not. The time of a call that waits until its copy is done is in
    `wait_ms`; neither it nor its copy counts in `launch_ms` and `device_ms`. Device work without a layer is listed
    under its operator; work with neither is in a row without a name. Sorted by how much longer the calls take, longest
    first.
    """
    _prepare(trace)
    return trace.sql(
        f"""
        WITH work AS (
            SELECT rank, trace_id, span_id, count(*) AS kernels_and_copies,
                   count(*) FILTER (WHERE position = 1 AND NOT waits) AS launches,
                   coalesce(sum(dur_ns) FILTER (WHERE NOT waits), 0) AS device_ns, {_COST} AS launch_ns,
                   {_WAITED} AS wait_ns,
                   count(*) FILTER (WHERE kind = '{Kind.KERNEL}' AND dur_ns < launch_dur_ns) AS short
            FROM launched WHERE launch_ns IS NOT NULL GROUP BY ALL
        ),
        {HOST_SPANS_SQL}
        SELECT CASE named_work.level {LEVEL_NAMES} END AS level, name, type,
               sum(kernels_and_copies)::BIGINT AS kernels_and_copies, sum(launches)::BIGINT AS launches,
               sum(launch_ns) / 1e6 AS launch_ms, sum(device_ns) / 1e6 AS device_ms,
               sum(launch_ns) / nullif(sum(device_ns), 0) AS launch_per_device,
               sum(launch_ns) > sum(device_ns) AS launch_bound, sum(wait_ns) / 1e6 AS wait_ms,
               sum(short)::BIGINT AS short
        FROM named_work GROUP BY ALL
        ORDER BY launch_ms - device_ms DESC NULLS LAST, name
        """
    )
