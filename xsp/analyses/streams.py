"""Streams of a device: the lengths of their queues, and sequences of kernels that repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xsp.analyses.contract import Table, analysis, values
from xsp.schema import Level
from xsp.store.devicework import COPY, launches, prepare
from xsp.store.trace import Trace

if TYPE_CHECKING:
    from xsp.analyses.repeats import Lines

LENGTHS = range(2, 9)
"""Kernels in a sequence."""

MAX_SEQUENCES = 200
"""Number of sequences of each length that are compared with the longer ones."""


@analysis("queues", "Queue length of each stream", Level.KERNEL, everywhere=True)
def stream_queues(trace: Trace) -> Table:
    """Queue length of each stream over time: kernels and copies that were launched and had not begun.

    Quantiles are over time, from the first launch on the stream to the last start: `p50` is the length that was not
    exceeded in half of that time. `empty_percent` is the share of the time in which the queue was empty: then the
    stream waits for the next launch of the host, unless it is running work. Work without a launch in the trace, and
    work that begins before its launch, is left out; `without_launch` counts both.
    """
    launches(trace)
    return trace.sql(
        """
        WITH work AS (
            SELECT s.rank, device, stream, recording, start_ns, launch_ns, launch_ns <= start_ns AS valid
            FROM device_work s LEFT JOIN launches USING (rank, on_process, correlation_id)
        ), edges AS (
            SELECT rank, device, stream, recording, launch_ns AS time_ns, 1 AS change FROM work WHERE valid
            UNION ALL SELECT rank, device, stream, recording, start_ns, -1 FROM work WHERE valid
        ), moments AS (
            SELECT rank, device, stream, sum(change) OVER line AS waiting, (lead(time_ns) OVER next_one) - time_ns AS ns
            FROM edges
            WINDOW line AS (PARTITION BY rank, device, stream, recording ORDER BY time_ns, change
                            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW),
                   next_one AS (PARTITION BY rank, device, stream, recording ORDER BY time_ns, change)
        ), durations AS (
            SELECT rank, device, stream, greatest(waiting, 0) AS waiting, sum(ns) AS ns FROM moments
            WHERE ns > 0 GROUP BY rank, device, stream, greatest(waiting, 0)
        ), summed AS (
            SELECT *, sum(ns) OVER (PARTITION BY rank, device, stream ORDER BY waiting
                                    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS so_far_ns,
                   sum(ns) OVER (PARTITION BY rank, device, stream) AS total_ns FROM durations
        ), lengths AS (
            SELECT rank, device, stream, sum(waiting * ns) / max(total_ns) AS mean_waiting,
                   min(CASE WHEN so_far_ns >= 0.5 * total_ns THEN waiting END)::BIGINT AS p50,
                   min(CASE WHEN so_far_ns >= 0.9 * total_ns THEN waiting END)::BIGINT AS p90,
                   min(CASE WHEN so_far_ns >= 0.99 * total_ns THEN waiting END)::BIGINT AS p99,
                   max(waiting)::BIGINT AS most,
                   100.0 * sum(CASE WHEN waiting = 0 THEN ns ELSE 0 END) / max(total_ns) AS empty_percent
            FROM summed GROUP BY rank, device, stream
        ), counted AS (
            SELECT rank, device, stream, count(*) AS kernels_and_copies,
                   count(*) FILTER (WHERE valid IS NOT true) AS without_launch
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


_SHORT = r"""regexp_replace(regexp_replace(regexp_replace(
    name, '^void |\(anonymous namespace\)::|cutlass\w*::Kernel2?<', '', 'g'), '[<(].*$', ''), '^.*::', '')"""
"""A kernel's name without namespaces and template arguments; for CUTLASS, whose kernels share a name, the argument."""


_SEQUENCES = {
    "times": "BIGINT",
    "kernels": "INTEGER",
    **dict.fromkeys(("device_ms", "percent_of_device_time", "mean_us", "gap_us"), "DOUBLE"),
    "sequence": "VARCHAR",
}


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
    from xsp.analyses.repeats import repeated_sequences  # NumPy: other analyses do without it

    prepare(trace)
    kinds = f"""
        SELECT row_number() OVER (ORDER BY name)::BIGINT AS id, name, coalesce(nullif({_SHORT}, ''), name) AS short
        FROM (SELECT DISTINCT name FROM device_work WHERE purpose <> '{COPY}')
    """
    trace.create_temp_table("stream_kinds", kinds)
    short_names = dict(trace.con.execute("SELECT id, short FROM stream_kinds").fetchall())
    rows = []
    lines = _lines(trace)
    total_ns = int(lines.duration.sum())
    for sequence in repeated_sequences(lines, LENGTHS, MAX_SEQUENCES):
        names = " → ".join(short_names[name] for name in sequence.names)
        times, ns = sequence.times, sequence.ns
        share = 100.0 * ns / total_ns if total_ns else None
        rows.append((times, len(sequence.names), ns / 1e6, share, ns / 1e3 / times, sequence.gap_ns / 1e3, names))
    rows.sort(key=lambda row: (-row[2], -row[1], row[6]))
    return values(trace, "kernel_sequences", _SEQUENCES, rows)


def _lines(trace: Trace) -> Lines:
    """Return the kernels of each stream, in the order in which they begin."""
    from xsp.analyses.repeats import Lines, line_numbers

    columns = trace.con.execute(
        f"""
        SELECT rank, device, stream, recording, start_ns, coalesce(dur_ns, 0) AS duration, dur_ns IS NOT NULL AS timed,
               id
        FROM device_work JOIN stream_kinds USING (name) WHERE purpose <> '{COPY}'
        ORDER BY rank, device, stream, recording, start_ns, span_id
        """
    ).fetchnumpy()
    lines = line_numbers(columns[name] for name in ("rank", "device", "stream", "recording"))
    return Lines(lines, columns["id"], columns["start_ns"], columns["duration"], columns["timed"])
