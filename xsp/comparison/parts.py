"""Parts of a step's time from the analyses: phases, causes of idle time, launches; one figure per run.

The conclusion of a comparison is drawn from these parts. They have no figures of single steps, so they are not tested
if there is one run per side. A part that a run lacks took no time in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from xsp.analyses.contract import Analysis
from xsp.analyses.idle import idle_causes
from xsp.analyses.launches import launch_costs
from xsp.analyses.memory import memory_steps
from xsp.analyses.phases import ITERATION
from xsp.analyses.phases import phases as phases_analysis
from xsp.comparison.series import RowTimes
from xsp.errors import AnalysisError
from xsp.schema import Level
from xsp.store.trace import Trace
from xsp.store.views import LAYERS

NS_PER_MS = 1e6


def phases(trace: Trace) -> list[RowTimes]:
    """Return the phases of an iteration: forward, backward, optimizer, data, the rest; empty if they are unknown."""
    try:
        rows = phases_analysis(trace).project("phase, ms, calls").fetchall()
    except AnalysisError:
        return []
    return [
        RowTimes(phase, phase, None, [ms * NS_PER_MS], calls) for phase, ms, calls in rows
        if phase != ITERATION and ms is not None
    ]  # fmt: skip


def idle(trace: Trace) -> list[RowTimes]:
    """Return the idle time of a device in a step, by cause; the mean over several devices. Empty without a device."""
    return _device_series(trace, idle_causes, "cause, sum(idle_ms), sum(gaps)", "cause")


def launches(trace: Trace) -> list[RowTimes]:
    """Return the host time of launches in a step, with their number; the mean over several devices."""
    return _device_series(trace, launch_costs, "'launches', sum(launch_ms), sum(launches)", "")


def _device_series(trace: Trace, analysis: Analysis, sums: str, group: str) -> list[RowTimes]:
    if not trace.has(Level.KERNEL) or len(trace.run.kinds) > 1:  # these analyses cover steps of all kinds
        return []
    rows = analysis(trace).aggregate(sums, group).order("1").fetchall()
    ((windows,),) = trace.con.execute(  # a window is a step of a device, or its whole work in a trace without steps
        "SELECT count(*) FROM (SELECT DISTINCT rank, device, step FROM device_work "
        "WHERE step IS NOT NULL OR (SELECT count(step) FROM device_work) = 0)"
    ).fetchall()
    if not windows:
        return []
    return [
        RowTimes(name, name, None, [time * NS_PER_MS / windows], count / windows) for name, time, count in rows
        if time is not None and count
    ]  # fmt: skip


# --- memory ------------------------------------------------------------------------------------------------------
# Memory of two runs: peaks per device, and allocations of each layer. They hardly vary, so no test is made.


MemoryFigures = dict[tuple[str, str | None], float]


def memory(a: Sequence[Trace], b: Sequence[Trace]) -> Iterator[tuple[str, str | None, float | None, float | None]]:
    """Yield name, type and the median MiB over the runs of either side; None if a side does not have it.

    The peaks of the devices over all steps come first, then the allocations of all layers together and of each layer.
    """
    for measure in (_peaks, _layers):
        mib_a, mib_b = _median([measure(run) for run in a]), _median([measure(run) for run in b])
        if mib_a and mib_b:
            pairs = _retyped_layers(mib_a, mib_b)
            for name, kind in dict.fromkeys([*mib_a, *mib_b]):
                if (name, kind) in pairs.values():
                    continue
                retyped = pairs.get((name, kind))
                value_b = mib_b.get(retyped or (name, kind))
                yield name, f"{kind} → {retyped[1]}" if retyped else kind, mib_a.get((name, kind)), value_b


def _retyped_layers(mib_a: MemoryFigures, mib_b: MemoryFigures) -> dict[tuple[str, str | None], tuple[str, str | None]]:
    """Return the layers of A → those of B with the same name and another type."""
    only_a, only_b = [key for key in mib_a if key not in mib_b], [key for key in mib_b if key not in mib_a]
    names = {name: (name, kind) for name, kind in only_b if sum(new_name == name for new_name, _ in only_b) == 1}
    return {
        key: names[key[0]]
        for key in only_a
        if key[0] in names and sum(gone_name == key[0] for gone_name, _ in only_a) == 1
    }


def _median(runs: Sequence[MemoryFigures]) -> MemoryFigures:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def _peaks(trace: Trace) -> MemoryFigures:
    try:
        rows = memory_steps(trace).aggregate("device, max(peak_mib)").order("device NULLS FIRST").fetchall()
    except AnalysisError:
        return {}
    return {(f"peak of {'the host' if device is None else f'device {device}'}", None): peak for device, peak in rows}


def _layers(trace: Trace) -> MemoryFigures:
    rows = trace.con.execute(
        f"WITH {LAYERS} SELECT name, any_value(type), sum(self_alloc_bytes) / 1048576 FROM layers "
        "WHERE self_alloc_bytes IS NOT NULL GROUP BY name ORDER BY min(layer_index)"
    ).fetchall()
    if not rows:
        return {}
    total = sum(mib for _, _, mib in rows)
    return {("allocated by all layers", None): total, **{(name, kind): mib for name, kind, mib in rows}}
