"""Power, clocks, memory and utilisation while the steps ran, and times of reduced clocks.

A reading is the value at one moment; values between two readings are unknown. In tables with durations, a reading
counts for the time until the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

from xsp.analyses.contract import Table, analysis
from xsp.samples.nvml import ABSENT, MASK, REASONS_SQL
from xsp.schema import Kind
from xsp.store.trace import Trace

MAX_POINTS = 300
"""Number of points of a quantity over the run; if there are more readings, they are averaged."""

MAX_STEPS_NAMED = 10

_SCALED = "CASE unit WHEN 'bytes' THEN value / 1048576 ELSE value END"
_UNIT = "CASE unit WHEN 'bytes' THEN 'MiB' ELSE unit END"

_STEPS = f"""
    steps AS (
        SELECT rank, step, timed, start_ns, start_ns + dur_ns AS end_ns FROM spans WHERE kind = '{Kind.STEP}'
    )
"""

_FIGURES = f"""
    {_STEPS},
    figures AS (
        SELECT samples.rank, samples.device, samples.name, {_UNIT} AS unit, {_SCALED} AS value, time_ns,
               CASE WHEN time_ns <= end_ns THEN steps.step END AS step,
               coalesce(time_ns <= end_ns AND timed, false) AS in_timed_step
        FROM (FROM samples WHERE name <> '{MASK}') samples
        ASOF LEFT JOIN steps ON steps.rank = samples.rank AND steps.start_ns <= samples.time_ns
    )
"""
"""Every reading with the step in which it was taken; bit masks are left out, since they have no mean."""


def _reason_without_samples(trace: Trace) -> str | None:
    """Return why a trace has no samples, or None if it has some."""
    if trace.con.execute("SELECT 1 FROM samples LIMIT 1").fetchall():
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in _absent(trace).items())
    return f"nothing was sampled while {trace.name!r} ran; " + (reasons or "record with xsp, and without --no-samples")


def _reason_without_masks(trace: Trace) -> str | None:
    """Return why the times of reduced clocks are unknown, or None if they are known."""
    if trace.con.execute(f"SELECT 1 FROM samples WHERE name = '{MASK}' LIMIT 1").fetchall():
        return None
    reason = _absent(trace).get("nvml") or ABSENT
    return f"reasons for lower clocks were not sampled ({reason})"


def _absent(trace: Trace) -> Mapping[str, str]:
    """Return the unavailable samplers, with the reasons."""
    return trace.run.samples.absent if trace.run.samples is not None else {}


@analysis("samples", "Power, clocks, memory and use", unless=_reason_without_samples)
def samples_summary(trace: Trace) -> Table:
    """Readings of each device, the process and the machine: minimum, mean, 95th percentile and maximum.

    `in_steps_mean` is the mean of the readings during timed steps, null if there are none. A null device is the host.
    `gpu.energy` counts from the first reading, so its `max` is the energy of the whole recording.
    """
    return trace.sql(
        f"""
        WITH {_FIGURES}
        SELECT rank, device, name, unit, count(*) AS samples, min(value) AS min, avg(value) AS mean,
               quantile_cont(value, 0.95) AS p95, max(value) AS max,
               avg(value) FILTER (in_timed_step) AS in_steps_mean
        FROM figures GROUP BY rank, device, name, unit ORDER BY rank, device NULLS LAST, name
        """
    )


@analysis("samples-timeline", "Power, clocks, memory and use over the run", unless=_reason_without_samples)
def samples_timeline(trace: Trace) -> Table:
    """Readings over time, at most 300 points per quantity: the mean and the maximum of the readings of each point.

    `at_s` is the time from the first reading; `step` is a step in which one of the point's readings was taken.
    """
    return trace.sql(
        f"""
        WITH {_FIGURES}, ends AS (SELECT min(time_ns) AS first_ns, max(time_ns) - min(time_ns) + 1 AS ns FROM figures)
        SELECT rank, device, name, unit, avg(time_ns - first_ns) / 1e9 AS at_s, avg(value) AS value,
               max(value) AS highest, count(*) AS samples, max(step) AS step
        FROM figures, ends
        GROUP BY rank, device, name, unit, floor({MAX_POINTS} * ((time_ns - first_ns) / ns))
        ORDER BY rank, device NULLS LAST, name, at_s
        """
    )


@analysis("throttling", "Why clocks were not at their highest", unless=_reason_without_masks)
def throttling_reasons(trace: Trace) -> Table:
    """For how long each device reported a reason for lower clocks, whether it throttled, and in which timed steps.

    `percent_of_sampled_time` is a percentage of the time that was sampled; several reasons can apply at once. An idle
    device and clocks set by a user are not throttling. `first_steps` names up to 10 of the `timed_steps` that ran in
    that time.
    """
    return trace.sql(
        f"""
        WITH {REASONS_SQL}, {_STEPS},
        affected AS (
            SELECT r.rank, r.device, reason, count(DISTINCT step) AS timed_steps,
                   list_sort(list(DISTINCT step))[:{MAX_STEPS_NAMED}] AS first_steps
            FROM reasons r JOIN steps ON steps.rank = r.rank AND steps.start_ns < r.to_ns AND steps.end_ns > r.from_ns
            WHERE timed GROUP BY ALL
        ),
        sampled AS (SELECT rank, device, sum(to_ns - from_ns) AS ns FROM readings GROUP BY ALL)
        SELECT r.rank, r.device, reason, throttles AS held_down, sum(to_ns - from_ns) / 1e6 AS time_ms,
               100.0 * sum(to_ns - from_ns) / any_value(sampled.ns) AS percent_of_sampled_time, count(*) AS samples,
               coalesce(any_value(timed_steps), 0) AS timed_steps,
               array_to_string(any_value(first_steps), ', ') AS first_steps
        FROM reasons r JOIN sampled USING (rank, device) LEFT JOIN affected USING (rank, device, reason)
        GROUP BY r.rank, r.device, reason, throttles ORDER BY r.rank, r.device, throttles DESC, time_ms DESC, reason
        """
    )
