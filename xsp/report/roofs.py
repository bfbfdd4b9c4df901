"""The roof over a trace's device as a roofline draws it: the slope of its memory, and a line for each peak."""

from __future__ import annotations

from typing import Any

from xsp.device import ceilings
from xsp.errors import AnalysisError
from xsp.schema import Level
from xsp.store.trace import Trace

SHOWN = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
"""Precisions whose peaks are drawn, as far as they are known; of several with one peak, one line."""


def roofs(trace: Trace) -> dict[str, Any]:
    """Return bandwidth and peaks under `roofs`, in bytes and GFLOP a second; where they are not known, why not."""
    try:
        found = ceilings.of_run(trace.run, trace.has(Level.KERNEL))
    except AnalysisError as error:
        return {"roofs": None, "roofless": str(error)}
    lines: dict[float, list[str]] = {}
    for precision in SHOWN:
        peak = found.peak(precision)
        if peak is not None:
            lines.setdefault(peak, []).append(precision)
    peaks = [{"name": ", ".join(names), "gflop_per_s": peak / 1e9} for peak, names in lines.items()]
    return {"roofs": {"device": found.name, "bytes_per_s": found.bytes_per_s, "peaks": peaks, "source": found.source}}
