"""What a step's time goes to, as the analyses have it: phases, why devices were idle, launches; one figure a run.

These are what a comparison concludes from. Steps are not told apart in them, so of one run a side they are not tested.
What a run does not have took no time in it.
"""

from __future__ import annotations

from xsp.analyses.contract import Analysis
from xsp.analyses.idle import IDLE_CAUSES
from xsp.analyses.launches import LAUNCHES
from xsp.analyses.phases import ITERATION, PHASES
from xsp.comparison.series import Series
from xsp.errors import AnalysisError
from xsp.schema import Level
from xsp.store.trace import Trace

NS_PER_MS = 1e6


def phases(trace: Trace) -> list[Series]:
    """Return the phases of an iteration: forward, backward, optimizer, data, the rest; empty where nothing tells."""
    try:
        rows = PHASES(trace).project("phase, ms, calls").fetchall()
    except AnalysisError:
        return []
    return [
        Series(phase, phase, None, [ms * NS_PER_MS], calls) for phase, ms, calls in rows
        if phase != ITERATION and ms is not None
    ]  # fmt: skip


def idle(trace: Trace) -> list[Series]:
    """Return the idle time of a device in a step, by cause: of several devices the mean. Empty without a device."""
    return _of_devices(trace, IDLE_CAUSES, "cause, sum(idle_ms), sum(gaps)", "cause")


def launches(trace: Trace) -> list[Series]:
    """Return what launches cost the host in a step, with their number; of several devices the mean."""
    return _of_devices(trace, LAUNCHES, "'launches', sum(launch_ms), sum(launches)", "")


def _of_devices(trace: Trace, analysis: Analysis, sums: str, group: str) -> list[Series]:
    if not trace.has(Level.KERNEL) or len(trace.run.get("kinds") or ()) > 1:  # they are over steps of all kinds
        return []
    rows = analysis(trace).aggregate(sums, group).order("1").fetchall()
    ((windows,),) = trace.con.execute(  # a step of a device; where nothing tells steps, all that it did is one
        "SELECT count(*) FROM (SELECT DISTINCT rank, device, step FROM device_work "
        "WHERE step IS NOT NULL OR (SELECT count(step) FROM device_work) = 0)"
    ).fetchall()
    if not windows:
        return []
    return [
        Series(name, name, None, [time * NS_PER_MS / windows], count / windows) for name, time, count in rows
        if time is not None and count
    ]  # fmt: skip
