"""What is impossible or missing in a trace, checked before any figure is believed."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.account.entries import Doubt
from xsp.schema import Kind, Level
from xsp.store.devicework import launches
from xsp.store.trace import Trace

MIN_LOST_SHARE = 0.02
"""Least share of launches without device work for the records of devices to count as incomplete."""

MARGIN_NS = 10_000
"""Nanoseconds by which a kernel must outlast a later one on its stream to be impossible: kernels of one stream may
overlap at their ends by some microseconds (programmatic dependent launch)."""

MIN_IMPOSSIBLE_SHARE = 0.02
"""Least share of device time in impossible kernels for busy times to be unknown."""

SILENCE_SHARE, SILENCE_NS = 0.05, 100_000
"""Least share of the recording, and nanoseconds, in which devices did nothing although launches had not run, for the
records of their work to count as lost instead of not written yet."""

_NO_WORK_NEEDED = "Memset|MemPrefetch|HostFunc|EventRecord|Malloc|Free"
"""Pattern of launch calls that may leave no record of device work."""


def doubts(trace: Trace) -> Iterator[Doubt]:
    """Yield what is impossible or missing; nothing for a trace without any device."""
    if trace.run.timeline is False:
        text = (
            "the profile has sums by place and no moments, so how long an iteration took, what ran side by side and "
            "when devices were idle is not in it; `ops` and `kernel-classes` have its times"
        )
        yield Doubt("timeline", text, "C", frozenset({"busy", "cause"}))
        return
    has_device = trace.con.execute(f"SELECT 1 FROM spans WHERE level >= {int(Level.RUNTIME)} LIMIT 1").fetchall()
    if has_device:
        launches(trace)
        yield from _launches_without_work(trace)
        yield from _no_calls(trace)
        yield from _impossible_kernels(trace)
    ((count,),) = trace.con.execute("SELECT count(*) FROM spans WHERE dur_ns < 0").fetchall()
    if count:
        yield Doubt("times", f"{count} spans end before they begin", "C")


def _launches_without_work(trace: Trace) -> Iterator[Doubt]:
    """Yield a doubt if records of device work were lost; launches at the end of the recording may still wait.

    They do not if the devices were idle long before it ends.
    """
    ((calls, lost, cut, unlinked, work),) = trace.con.execute(
        f"""
        WITH done AS (SELECT DISTINCT rank, on_process, correlation_id FROM device_work
                      WHERE correlation_id IS NOT NULL),
        issued AS (
            SELECT c.*, done.correlation_id IS NOT NULL AS ran FROM runtime_calls c
            LEFT JOIN done USING (rank, on_process, correlation_id)
            WHERE kind = '{Kind.LAUNCH}' AND timed IS NOT false AND c.correlation_id IS NOT NULL
              AND NOT regexp_matches(name, '{_NO_WORK_NEEDED}')
        ),
        -- work whose launch is the last one to have run may be followed by work that was not written any more; but a
        -- device that is idle long before the recording ends would have run it
        ends AS (SELECT rank, max(end_ns) AS done_ns FROM device_work GROUP BY rank),
        recordings AS (
            SELECT rank, max(end_ns) AS stop_ns, max(end_ns) - min(start_ns) AS wall_ns
            FROM runtime_calls WHERE timed IS NOT false GROUP BY rank
        ),
        last AS (
            SELECT rank, CASE WHEN any_value(stop_ns - done_ns) >= greatest(
                                  {SILENCE_NS}, {SILENCE_SHARE} * any_value(wall_ns)) THEN any_value(stop_ns)
                              ELSE max(start_ns) FILTER (ran) END AS last_ns
            FROM issued LEFT JOIN ends USING (rank) LEFT JOIN recordings USING (rank) GROUP BY rank
        )
        SELECT count(*), count(*) FILTER (NOT ran AND start_ns <= coalesce(last_ns, start_ns)),
               count(*) FILTER (NOT ran AND start_ns > last_ns),
               (SELECT count(*) FROM device_work ANTI JOIN launches USING (rank, on_process, correlation_id)),
               (SELECT count(*) FROM device_work)
        FROM issued LEFT JOIN last USING (rank)
        """
    ).fetchall()
    if calls and lost >= 2 and lost > MIN_LOST_SHARE * calls:
        lost += cut  # they are no longer the last ones
        if unlinked >= lost and unlinked > work / 2:
            text = (
                f"{unlinked:,} of {work:,} kernels and copies have no launch and {lost:,} of {calls:,} launches have "
                "no work: the source does not link them, so why the device was idle is unknown"
            )
            yield Doubt("launches", text, "C", frozenset({"cause"}))
        else:
            text = (
                f"{lost:,} of {calls:,} launches have no device work in the trace: records were lost, so how busy the "
                "device was, and what limits, is unknown; record fewer steps at once, or with larger buffers"
            )
            yield Doubt("device", text, "D", frozenset({"busy", "cause"}))
    elif cut > MIN_LOST_SHARE * calls and cut >= 2:
        text = f"the recording ends before the work of its last {cut:,} launches (of {calls:,})"
        yield Doubt("device", text, "B" if cut < calls / 4 else "C", frozenset({"cause"} if cut > calls / 4 else ()))


def _no_calls(trace: Trace) -> Iterator[Doubt]:
    ((work, calls),) = trace.con.execute(
        "SELECT (SELECT count(*) FROM device_work), (SELECT count(*) FROM runtime_calls)"
    ).fetchall()
    if work and not calls:
        text = (
            "the trace holds no call of the runtime: which part of the program launched device work, and why devices "
        )
        yield Doubt("launches", text + "are idle, is unknown", "C", frozenset({"cause"}))


def _impossible_kernels(trace: Trace) -> Iterator[Doubt]:
    """Yield a doubt if a kernel lasts beyond a later kernel of its own stream, outside replayed graphs."""
    rows = trace.con.execute(
        f"""
        WITH alone AS (  -- kernels of a graph that is replayed share the launch, and run beside each other
            SELECT *, count(*) OVER (PARTITION BY rank, on_process, coalesce(correlation_id, start_ns)) AS together
            FROM device_work WHERE kind = '{Kind.KERNEL}'
        ), ordered AS (
            SELECT *, max(end_ns) OVER stream_order AS until_ns, arg_max(span_id, end_ns) OVER stream_order AS longest,
                   arg_max(name, end_ns) OVER stream_order AS longest_name,
                   arg_max(dur_ns, end_ns) OVER stream_order AS longest_ns
            FROM alone WHERE together = 1
            WINDOW stream_order AS (PARTITION BY rank, device, stream ORDER BY start_ns, end_ns
                                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        ), covered AS (
            SELECT longest, any_value(longest_name) AS name, any_value(longest_ns) AS ns, count(*) AS kernels
            FROM ordered WHERE end_ns + {MARGIN_NS} < until_ns AND stream IS NOT NULL GROUP BY rank, longest
        )
        SELECT count(*), sum(kernels), max(ns), arg_max(name, ns), sum(ns),
               (SELECT sum(dur_ns) FROM device_work) FROM covered
        """
    ).fetchall()
    count, kernels, longest_ns, name, ns, whole_ns = rows[0]
    if not count:
        return
    share = float(ns) / max(1.0, float(whole_ns or 0))
    subject = f"{str(name)[:60]} ({longest_ns / 1e6:.4g} ms)"
    others = f"{count} kernels last" if count > 1 else "one kernel lasts"
    text = (
        f"{others} beyond {kernels} later kernel{'s' * (kernels > 1)} of the same stream, which is impossible; the "
        f"longest is {subject}"
    )
    is_large = share > MIN_IMPOSSIBLE_SHARE
    if is_large:
        text += ": its times are wrong, so how busy the device was, and what limits, is unknown"
    yield Doubt("device", text, "D" if is_large else "B", frozenset({"busy", "cause"}) if is_large else frozenset())
