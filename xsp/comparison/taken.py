"""Memory of two runs: peaks per device, and what each layer allocates. It hardly varies, so no test is made."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from xsp.analyses.memory import MEMORY_STEPS
from xsp.errors import AnalysisError
from xsp.store.trace import Trace
from xsp.store.views import LAYERS

Taken = dict[tuple[str, str | None], float]


def memory(a: Sequence[Trace], b: Sequence[Trace]) -> Iterator[tuple[str, str | None, float | None, float | None]]:
    """Yield name, type and MiB in the runs of both sides, the median; None where a side does not have it.

    First the peak of each device over all steps, then what the layers together and each layer itself allocate.
    """
    for of in (_peaks, _layers):
        one, other = _median([of(run) for run in a]), _median([of(run) for run in b])
        if one and other:
            for name, kind in dict.fromkeys([*one, *other]):
                yield name, kind, one.get((name, kind)), other.get((name, kind))


def _median(runs: Sequence[Taken]) -> Taken:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def _peaks(trace: Trace) -> Taken:
    try:
        rows = MEMORY_STEPS(trace).aggregate("device, max(peak_mib)").order("device NULLS FIRST").fetchall()
    except AnalysisError:
        return {}
    return {(f"peak of {'the host' if device is None else f'device {device}'}", None): peak for device, peak in rows}


def _layers(trace: Trace) -> Taken:
    rows = trace.con.execute(
        f"WITH {LAYERS} SELECT name, any_value(type), sum(self_alloc_bytes) / 1048576 FROM layers "
        "WHERE self_alloc_bytes IS NOT NULL GROUP BY name ORDER BY min(layer_index)"
    ).fetchall()
    if not rows:
        return {}
    total = sum(mib for _, _, mib in rows)
    return {("allocated by all layers", None): total, **{(name, kind): mib for name, kind, mib in rows}}
