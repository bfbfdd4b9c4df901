"""Streams of a device: the lengths of their queues, and sequences of kernels that repeat."""

from __future__ import annotations

from xsp.analyses.contract import Table, analysis
from xsp.analyses.devicework import COPY, prepare
from xsp.schema import Kind, Level
from xsp.store.trace import Trace

LENGTHS = range(2, 9)
"""Kernels in a sequence."""

MOST = 200
"""Number of sequences of each length that are compared with the longer ones."""

_STREAMS = f"""
    SELECT work.*, placed.stream FROM device_work work JOIN (
        SELECT rank, trace_id, span_id, stream FROM spans WHERE level = {int(Level.KERNEL)}
    ) placed USING (rank, trace_id, span_id)
"""


def _prepare(trace: Trace) -> None:
    prepare(trace)
    trace.create_temp_table("stream_work", _STREAMS)


@analysis("queues", "Queue length of each stream", Level.KERNEL, everywhere=True)
def stream_queues(trace: Trace) -> Table:
    """Queue length of each stream over time: kernels and copies that were launched and had not begun.

    Quantiles are over time, from the first launch on the stream to the last start: `p50` is the length that was not
    exceeded in half of that time. `empty_percent` is the share of the time in which the queue was empty: then the
    stream waits for the next launch of the host, unless it is running work. Work without a launch in the trace, and
    work that begins before its launch, is left out; `without_launch` counts both.
    """
    _prepare(trace)
    return trace.sql(
        f"""
        WITH launches AS (
            SELECT rank, on_process, correlation_id, min(start_ns) AS launch_ns FROM runtime_calls
            WHERE kind <> '{Kind.SYNC}' AND correlation_id IS NOT NULL AND timed IS NOT false GROUP BY ALL
        ), work AS (
            SELECT s.rank, device, stream, recording, start_ns, launch_ns, launch_ns <= start_ns AS sound
            FROM stream_work s LEFT JOIN launches USING (rank, on_process, correlation_id)
        ), edges AS (
            SELECT rank, device, stream, recording, launch_ns AS time_ns, 1 AS change FROM work WHERE sound
            UNION ALL SELECT rank, device, stream, recording, start_ns, -1 FROM work WHERE sound
        ), moments AS (
            SELECT rank, device, stream, sum(change) OVER line AS waiting, (lead(time_ns) OVER next_one) - time_ns AS ns
            FROM edges
            WINDOW line AS (PARTITION BY rank, device, stream, recording ORDER BY time_ns, change
                            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW),
                   next_one AS (PARTITION BY rank, device, stream, recording ORDER BY time_ns, change)
        ), lasting AS (
            SELECT rank, device, stream, greatest(waiting, 0) AS waiting, sum(ns) AS ns FROM moments
            WHERE ns > 0 GROUP BY rank, device, stream, greatest(waiting, 0)
        ), summed AS (
            SELECT *, sum(ns) OVER (PARTITION BY rank, device, stream ORDER BY waiting
                                    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS so_far_ns,
                   sum(ns) OVER (PARTITION BY rank, device, stream) AS whole_ns FROM lasting
        ), lengths AS (
            SELECT rank, device, stream, sum(waiting * ns) / max(whole_ns) AS mean_waiting,
                   min(CASE WHEN so_far_ns >= 0.5 * whole_ns THEN waiting END)::BIGINT AS p50,
                   min(CASE WHEN so_far_ns >= 0.9 * whole_ns THEN waiting END)::BIGINT AS p90,
                   min(CASE WHEN so_far_ns >= 0.99 * whole_ns THEN waiting END)::BIGINT AS p99,
                   max(waiting)::BIGINT AS most,
                   100.0 * sum(CASE WHEN waiting = 0 THEN ns ELSE 0 END) / max(whole_ns) AS empty_percent
            FROM summed GROUP BY rank, device, stream
        ), counted AS (
            SELECT rank, device, stream, count(*) AS kernels_and_copies,
                   count(*) FILTER (WHERE sound IS NOT true) AS without_launch
            FROM work GROUP BY rank, device, stream
        )
        SELECT counted.rank, counted.device, counted.stream, kernels_and_copies, mean_waiting, p50, p90, p99, most,
               empty_percent, without_launch
        FROM counted LEFT JOIN lengths ON lengths.rank = counted.rank
            AND lengths.device IS NOT DISTINCT FROM counted.device
            AND lengths.stream IS NOT DISTINCT FROM counted.stream
        ORDER BY counted.rank, counted.device, kernels_and_copies DESC, counted.stream
        """
    )


_LINE = "PARTITION BY rank, device, stream, recording ORDER BY place"


def _windows(length: int) -> str:
    """Return the SQL of all runs of `length` successive kernels."""
    ids = ", ".join(["id", *(f"lead(id, {ahead}) OVER line" for ahead in range(1, length))])
    return f"""
        SELECT {length} AS length, rank, device, stream, recording, place, concat_ws(' ', {ids}) AS key,
               sum(dur_ns) OVER ({_LINE} ROWS BETWEEN CURRENT ROW AND {length - 1} FOLLOWING) AS ns,
               (lead(end_ns, {length - 1}) OVER line) - start_ns AS whole_ns
        FROM ordered WINDOW line AS ({_LINE})
    """


_SHORT = r"""regexp_replace(regexp_replace(regexp_replace(
    name, '^void |\(anonymous namespace\)::|cutlass\w*::Kernel2?<', '', 'g'), '[<(].*$', ''), '^.*::', '')"""
"""A kernel's name without namespaces and template arguments; for CUTLASS, whose kernels share a name, the argument."""


@analysis("kernel-sequences", "Repeated sequences of kernels", Level.KERNEL, everywhere=True)
def kernel_sequences(trace: Trace) -> Table:
    """Sequences of two to eight kernels that occur more than once on a stream: their number, time, and gaps.

    Kernels are taken in the order in which they begin on their stream, without copies; occurrences that overlap are
    counted once. `gap_us` is the mean time in a sequence in which none of its kernels runs: a graph or a fusion saves
    at most that, and a fusion also saves the memory traffic between the kernels. A sequence that only occurs inside a
    longer one of the list is left out, as is one that is another sequence of the same length shifted by one.
    `percent_of_device_time` is a percentage of the time of all kernels; sequences share kernels, so it does not add up
    to 100. Names are cut at their template arguments.
    """
    _prepare(trace)
    places = range(1, max(LENGTHS) + 1)
    names = ", ".join(f"kind_{place}.short" for place in places)
    joins = " ".join(
        f"LEFT JOIN kinds kind_{place} ON kind_{place}.id::VARCHAR = split_part(key, ' ', {place})" for place in places
    )
    windows = " UNION ALL ".join(f"SELECT * FROM ({_windows(length)}) WHERE whole_ns IS NOT NULL" for length in LENGTHS)
    return trace.sql(
        f"""
        WITH kinds AS MATERIALIZED (
            SELECT name, row_number() OVER (ORDER BY name) AS id, coalesce(nullif({_SHORT}, ''), name) AS short
            FROM (SELECT DISTINCT name FROM stream_work WHERE purpose <> '{COPY}')
        ), ordered AS (
            SELECT rank, device, stream, recording, start_ns, end_ns, dur_ns, id, short, row_number() OVER (
                       PARTITION BY rank, device, stream, recording ORDER BY start_ns, span_id) AS place
            FROM stream_work JOIN kinds USING (name) WHERE purpose <> '{COPY}'
        ), windows AS ({windows}
        ), islands AS (
            SELECT *, sum(apart) OVER (PARTITION BY key, rank, device, stream, recording ORDER BY place
                                       ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS island
            FROM (
                SELECT *, CASE WHEN place - lag(place) OVER (PARTITION BY key, rank, device, stream, recording
                                                             ORDER BY place) < length THEN 0 ELSE 1 END AS apart
                FROM windows
            )
        ), places AS (
            SELECT *, place - min(place) OVER held AS offset_, count(*) OVER held AS many,
                   max(place) OVER held - min(place) OVER held AS width
            FROM islands WINDOW held AS (PARTITION BY key, rank, device, stream, recording, island)
        ), alone AS (  -- of overlapping occurrences at a distance of p, every ceil(length / p)-th
            SELECT * FROM places
            WHERE many = 1 OR offset_ % (ceil(length * (many - 1.0) / width) * width / (many - 1.0))::BIGINT = 0
        ), counted AS (
            SELECT length, key, count(*) AS times, sum(ns) AS ns, avg(greatest(whole_ns - ns, 0)) AS gap_ns
            FROM alone GROUP BY length, key HAVING count(*) > 1
        ), ranked AS (
            SELECT *, regexp_replace(key, ' [0-9]+$', '') AS head, regexp_replace(key, '^[0-9]+ ', '') AS tail
            FROM (
                SELECT *, row_number() OVER (PARTITION BY length ORDER BY ns DESC, key) AS standing FROM counted
            ) WHERE standing <= {MOST}
        ), whole AS (
            SELECT * FROM ranked inner_ WHERE NOT EXISTS (
                SELECT 1 FROM ranked outer_ WHERE outer_.times >= inner_.times AND (
                    outer_.length > inner_.length
                    AND contains(concat(' ', outer_.key, ' '), concat(' ', inner_.key, ' '))
                    OR outer_.length = inner_.length AND (outer_.head = inner_.tail OR outer_.tail = inner_.head)
                    AND (outer_.ns > inner_.ns OR outer_.ns = inner_.ns AND outer_.key < inner_.key))
            )
        )
        SELECT times, length AS kernels, ns / 1e6 AS device_ms,
               100.0 * ns / nullif((SELECT sum(dur_ns) FROM ordered), 0) AS percent_of_device_time,
               ns / 1e3 / times AS mean_us, gap_ns / 1e3 AS gap_us, concat_ws(' → ', {names}) AS sequence
        FROM whole {joins} ORDER BY device_ms DESC, kernels DESC, sequence
        """
    )
