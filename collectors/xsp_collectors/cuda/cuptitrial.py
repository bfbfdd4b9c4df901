"""A trial with one kernel, recorded as in a step: whether CUPTI works, and the error of its clock."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xsp_collectors import kinetouse
from xsp_collectors.cuda.activities import ApiCall, Batch, Kernel, Records
from xsp_collectors.cuda.claim import Claim
from xsp_collectors.cuda.devicespans import is_finished
from xsp_collectors.cuda.recording import DEVICE_KINDS, HostClock, Recording

CLOCK_BOUND_NS = 100_000
"""Largest accepted error of CUPTI's clock: beyond it, kernels would be put into wrong operators."""


class TrialOutcome(NamedTuple):
    """The outcome of a trial."""

    reason: str | None
    """Why device work cannot be recorded; None if it can."""

    clock_error_ns: int | None = None


def run(cupti: Any, clock: HostClock, records: Records, work: Callable[[], object] | None = None) -> TrialOutcome:
    """Take CUPTI, record one kernel beside Kineto as a step does, and release CUPTI.

    Args:
        cupti: the binding.
        clock: the clock for the records' times.
        records: the destination of the records, which is left empty.
        work: launches at least one kernel and waits for it; default: a small kernel of torch.
    """
    if kinetouse.is_enabled():
        return TrialOutcome("torch.profiler is recording in this process: run without it, or use --kernels kineto")
    claim = Claim(cupti)
    reason = claim.take()
    if reason is not None:
        return TrialOutcome(reason)
    try:
        return _record(cupti, clock, records, work or _small_kernel)
    except Exception as error:
        return TrialOutcome(f"CUPTI does not record here: {type(error).__name__}: {error}")
    finally:
        claim.release()


def clock_error_ns(cupti: Any, readings: int = 9) -> int:
    """Return the largest possible difference of CUPTI's clock from the host's, in nanoseconds.

    CUPTI's clock is read between two readings of the host's. The narrowest of several such brackets is used: the error
    is half its width, plus the distance by which the reading is outside.
    """
    best: tuple[int, int] | None = None
    for _ in range(readings):
        before = time.clock_gettime_ns(time.CLOCK_REALTIME)
        device = int(cupti.get_timestamp())
        after = time.clock_gettime_ns(time.CLOCK_REALTIME)
        distance = max(before - device, device - after, 0)
        bracket = (after - before, (after - before + 1) // 2 + distance)
        best = bracket if best is None else min(best, bracket)
    assert best is not None
    return best[1]


def _record(cupti: Any, clock: HostClock, records: Records, work: Callable[[], object]) -> TrialOutcome:
    """Record work that launches a kernel, with Kineto on, and check the records."""
    recording = Recording(cupti, records, clock)
    with kinetouse.host_only():
        recording.begin(DEVICE_KINDS)
        try:
            error_ns = clock_error_ns(cupti)
            before = time.time_ns()
            work()
        finally:
            after = time.time_ns()
            recording.end()
            recording.restore_thread_ids()
    batch = records.take()
    if error_ns > CLOCK_BOUND_NS:
        reason = f"CUPTI's clock is {error_ns / 1000:.0f} µs off the host's, more than {CLOCK_BOUND_NS // 1000} µs"
        return TrialOutcome(f"{reason}: take device work from torch.profiler with --kernels kineto", error_ns)
    return TrialOutcome(_fault(batch, before, after), error_ns)


def _fault(batch: Batch, before: int, after: int) -> str | None:
    """Return the fault in the records of a kernel that ran between two times, or None."""
    kernels = batch[Kernel]
    finished = kernels.where(is_finished(kernels))
    if not len(finished):
        return f"CUPTI did not record a trial kernel ({len(batch)} records, {len(kernels)} of kernels)"
    if not np.isin(finished["correlation_id"], batch[ApiCall]["correlation_id"]).any():
        return "CUPTI recorded a kernel, but not the call that launched it"
    start, end = finished["start"], finished["end"]
    if not ((before - CLOCK_BOUND_NS <= start) & (end <= after + CLOCK_BOUND_NS)).any():
        return "CUPTI recorded a kernel at a time at which it did not run"
    return None


def _small_kernel() -> None:
    torch: Any = sys.modules["torch"]
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.synchronize()
