"""Device work through CUPTI's activity records (cupti-python), on the host's clock.

The hot part copies records, in a callback from CUPTI (see `recordbuffers`). Everything else happens between steps:
records are flushed after the step's end was read, then named and turned into spans outside all timed regions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xsp.collector import DeviceCollector, Kernels
from xsp.schema import Level, Span
from xsp_collectors import kinetouse
from xsp_collectors.cuda import calls, claim, cuptitrial, devicespans, graphs, libcupti, recordbuffers
from xsp_collectors.cuda.activities import (
    COLLECTOR,
    Activity,
    ApiCall,
    Batch,
    Copy,
    Integers,
    Kernel,
    Marker,
    Memset,
    Overhead,
    Records,
    Table,
    Wait,
)
from xsp_collectors.cuda.devices import wait as _wait_for_devices
from xsp_collectors.cuda.libraries import Injection, LibraryRanges
from xsp_collectors.cuda.recording import DEVICE_KINDS, LIBRARY_KINDS, HostClock, Recording
from xsp_collectors.cuda.recordobjects import RecordObjects

_NEVER_NS = (1 << 63) - 1


class CuptiActivities(DeviceCollector):
    """Calls of GPU libraries (LIBRARY) and of the runtime (RUNTIME), kernels and copies (KERNEL)."""

    name = COLLECTOR
    levels = (Level.LIBRARY, Level.RUNTIME, Level.KERNEL)
    epoch = True
    device_work = Kernels.CUPTI
    innermost = True

    def __init__(self) -> None:
        self._parts = libcupti.parts()
        self._cupti: Any = None
        self._claim: claim.Claim | None = None
        self._recording: Recording | None = None
        self._records: Records = RecordObjects()
        self._ranges = LibraryRanges()
        self._captures = graphs.Captures()
        self._threads = ThreadNumbers()
        self._names = CallNames()
        self._injection = Injection(self._parts.library)
        self._clock = HostClock(self._parts.library)
        self._outcome: cuptitrial.TrialOutcome | None = None
        self._process = os.getpid()
        self._is_open = False
        self._is_on = False
        self._is_refused = False
        self._begun_ns = 0
        self._stopped_ns = 0
        self._window = range(_NEVER_NS)
        self._starting_thread = 0
        self._stopping_thread = 0
        self._counts: Counter[str] = Counter()
        self._notes: set[str] = set()

    # --- requirements ---------------------------------------------------------------------------------

    def available(self) -> str | None:
        """Return what is missing or prevents recording: the binding, a driver, a tool that needs CUPTI exclusively."""
        reason = libcupti.incompatibility(self._parts)
        if reason is not None:
            return reason
        tool = claim.running_tool()
        if tool is not None:
            return f"CUPTI is held by {tool}, which runs this program: {claim.REMEDY}"
        setting = claim.conflicting_setting()
        if setting is not None:
            return setting
        try:
            self._cupti = importlib.import_module("cupti.cupti")
        except Exception as error:  # a binding of another CUDA may raise anything
            return f"cupti-python cannot be imported: {type(error).__name__}: {error}"
        return None

    def environment(self) -> Mapping[str, str]:
        """Return the variables that make libraries name their calls, to be set before their first use."""
        return self._injection.variables() if self.available() is None else {}

    def trial(self) -> str | None:
        """Record one kernel if CUDA is in use already; else the trial follows in the first step that uses it."""
        return self._run_trial() if _cuda_is_in_use() else None

    def details(self) -> Mapping[str, object]:
        """Return versions, the error of CUPTI's clock, the form of records, and the source of library calls."""
        parts = self._parts
        return {
            "driver_cuda": libcupti.format_version(parts.driver) if parts.driver is not None else None,
            "libcupti": libcupti.format_version(parts.library_version) if parts.library is not None else None,
            "cupti_python": libcupti.format_version(parts.binding) if parts.binding is not None else None,
            "clock_error_ns": self._outcome.clock_error_ns if self._outcome is not None else None,
            "records": self._records.form,
            "library_calls": self._injection.state(),
        }

    # --- a block --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take CUPTI, and make the libraries name their calls if they were not used yet."""
        self._process, self._is_open, self._is_refused = os.getpid(), True, False
        self._injection.install(is_too_late=_cuda_is_in_use())
        if (text := libcupti.mismatch(self._parts)) is not None:
            self._notes.add(text)
        if self._outcome is not None or _cuda_is_in_use():
            self._take_cupti()

    def close(self) -> None:
        """Release CUPTI and restore the environment; do nothing in a forked child."""
        if os.getpid() != self._process:
            return
        self._is_open = False
        self._injection.remove()
        self._notes.update(self._injection.notes(self._counts["library calls"], self._counts["kernels"]))
        if self._ranges.open_count:
            self._counts["NVTX ranges that had not ended with the block"] += self._ranges.open_count
        self._ranges = LibraryRanges()
        self._records.take()
        if self._claim is not None:
            subscription, self._claim = self._claim, None
            if self._recording is not None:
                self._recording.restore_thread_ids()
                self._recording = None
            subscription.release()

    def start(self, rung: Level, describe: bool) -> None:
        """Record the levels of the rung: calls of libraries, and device work from the runtime's level on."""
        if self._is_refused:
            return
        if self._recording is None:
            self._counts["steps that began before CUDA was in use"] += 1
            return
        if kinetouse.is_used_by_program():
            self._counts["steps in which the program itself was using torch.profiler"] += 1
            return
        self._recording.begin(LIBRARY_KINDS if rung < Level.RUNTIME else (*DEVICE_KINDS, *LIBRARY_KINDS))
        self._threads.has_native_ids = self._recording.has_native_threads
        if rung >= Level.RUNTIME:
            _launch_empty_kernel()
        self._starting_thread, self._begun_ns = threading.get_native_id(), time.time_ns()
        self._window = range(self._begun_ns - cuptitrial.CLOCK_BOUND_NS, _NEVER_NS)
        self._is_on = True

    def stop(self) -> None:
        """Wait for all devices in use, whose work may outlast the step, and make CUPTI deliver its records."""
        if not self._is_on or self._recording is None or os.getpid() != self._process:
            return
        self._is_on = False
        self._stopping_thread, self._stopped_ns = threading.get_native_id(), time.time_ns()
        try:
            _wait_for_devices()
        except Exception:  # the program's own error, which it gets at its next call
            self._counts["steps after which the device had failed, and device work may be missing"] += 1
        self._recording.end()
        self._window = range(self._window.start, time.time_ns() + cuptitrial.CLOCK_BOUND_NS)

    # --- recorded spans -------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """Return the recorded spans; once CUDA is in use, try CUPTI for the following steps."""
        placement = self._placement()
        self._counts[graphs.UNSEEN_CAPTURES] += placement.unknown_count
        self._count_losses()
        if self._recording is None and self._is_open and not self._is_refused and _cuda_is_in_use():
            self._take_cupti()
        return placement.spans

    def notes(self) -> Iterator[str]:
        """Yield sentences on what could not be recorded, with counts."""
        for loss, count in self._counts.items():
            if loss not in ("kernels", "library calls") and count:
                yield f"{count} {loss}"
                self._counts[loss] = 0
        yield from sorted(self._notes)
        self._notes.clear()

    def _placement(self) -> graphs.ReplayPlacement:
        """Return the spans of the records that were delivered, without those of xsp's own calls around the step."""
        batch = self._records.take()
        own_ids = self._own_calls(batch[ApiCall])
        waits = batch[Wait].without_calls(own_ids)
        host_spans = calls.calls(
            batch[ApiCall].without_calls(own_ids),
            waits.where(waits["start"] < self._stopped_ns).rows(batch.texts),
            self._names.lookup,
            self._threads,
        )
        overheads = batch[Overhead]
        overhead_rows = overheads.where(overheads["end"] > self._begun_ns).rows(batch.texts)
        ranges = self._ranges.close(batch[Marker].rows(batch.texts), self._threads)
        self._counts["library calls"] += sum(span.level == Level.LIBRARY for span in ranges)
        spans = [*host_spans, *(calls.overhead(row, self._threads) for row in overhead_rows), *ranges]
        placement = graphs.place(self._device_spans(batch, own_ids), self._captures)
        return placement._replace(spans=spans + placement.spans)

    def _device_spans(self, batch: Batch, own_ids: Integers) -> list[Span]:
        first_ns, end_ns = self._window.start, self._window.stop
        tables: list[Table] = []
        for row_type in (Kernel, Copy, Memset):
            work = batch[row_type].without_calls(own_ids)
            finished = work.where(devicespans.is_finished(work))
            inside = finished.where((first_ns <= finished["start"]) & (finished["end"] < end_ns))
            tables.append(inside)
            self._counts["kernels or copies that had not ended when the step's records were flushed"] += len(
                work
            ) - len(finished)
            self._counts["kernels or copies at times that are not the step's, which were left out"] += len(
                finished
            ) - len(inside)
            self._counts["kernels"] += len(inside)
        return devicespans.spans(tables, batch.texts)

    def _own_calls(self, api_calls: Table) -> Integers:
        """Return the ids of xsp's calls: before the step on the starting thread, or after it on the stopping one."""
        is_own = np.zeros(len(api_calls), np.bool_)
        for outside, thread in (
            (api_calls["start"] < self._begun_ns, self._starting_thread),
            (api_calls["start"] >= self._stopped_ns, self._stopping_thread),
        ):
            for number in set(api_calls["thread_id"][outside].tolist()):
                if self._threads(number) == thread:
                    is_own |= outside & (api_calls["thread_id"] == number)
        return api_calls["correlation_id"][is_own]

    def _count_losses(self) -> None:
        counts, records = self._counts, self._records
        counts["records that could not be read"] += records.unreadable
        counts["records of another client of CUPTI"] += records.unrequested
        counts["nodes of CUDA graphs whose layer is unknown"] += self._captures.unreadable
        self._captures.unreadable = 0
        records.unreadable = records.unrequested = 0
        counts["ends of NVTX ranges that began before the step"] += self._ranges.unmatched_ends
        counts["NVTX markers without a time from CUPTI"] += self._ranges.untimed_markers
        self._ranges.unmatched_ends = self._ranges.untimed_markers = 0
        counts["threads that could not be identified: their calls are on no thread"] += self._threads.unknown_count
        self._threads.unknown_count = 0
        if self._recording is not None:
            dropped_count = self._recording.dropped_count()
            counts["records that CUPTI dropped because no buffer was free"] += dropped_count or 0
            if dropped_count is None:
                self._notes.add("CUPTI did not report for every step how many records it dropped")
            if self._recording.refused_kinds:
                self._notes.add(f"CUPTI does not record {', '.join(self._recording.refused_kinds)} here")

    # --- CUPTI ----------------------------------------------------------------------------------------

    def _run_trial(self) -> str | None:
        """Try CUPTI with its own buffers if their content is known, otherwise or else with the binding's objects."""
        if self._cupti is None and (reason := self.available()) is not None:
            return reason
        buffers = recordbuffers.of_library(self._parts.library)
        for records in (*((buffers,) if buffers is not None else ()), RecordObjects()):
            self._records = records
            self._outcome = cuptitrial.run(self._cupti, self._clock, records)
            records.unreadable = records.unrequested = 0
            if self._outcome.reason is None:
                break
        assert self._outcome is not None
        return self._outcome.reason

    def _take_cupti(self) -> None:
        """Take CUPTI after its trial, or give up the role of device source."""
        reason = self._run_trial() if self._outcome is None else self._outcome.reason
        if reason is None:
            subscription = claim.Claim(self._cupti, self._captures.on_callback)
            reason = subscription.take()
            if reason is None:
                self._captures.listen(self._cupti, subscription.subscriber)
                self._claim, self._recording = subscription, Recording(self._cupti, self._records, self._clock)
                self._names = CallNames(self._cupti)
                return
        self.gave_up, self._is_refused = reason, True


def _launch_empty_kernel() -> None:
    """Launch a kernel that does nothing, so that the step does not wait for CUPTI's first buffer and launch.

    On an H200 they take 4 ms the first time and 1 ms in each further recorded step.
    """
    torch: Any = sys.modules["torch"]
    with contextlib.suppress(Exception):  # the program's own error, which it gets at its next call
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(1)


def _cuda_is_in_use() -> bool:
    """Return whether this process has a CUDA context and can run a kernel now; the check creates no context."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


# --- names of calls ---------------------------------------------------------------------------------------------------
# Names of the runtime's and the driver's calls, by CUPTI's numbers.

_ENUMS = {
    Activity.RUNTIME: ("Runtime_api_trace_cbid", "runtime_api_trace_cbid"),
    Activity.DRIVER: ("Driver_api_trace_cbid", "driver_api_trace_cbid"),
}
_DOMAINS = {Activity.RUNTIME: "RUNTIME_API", Activity.DRIVER: "DRIVER_API"}


class CallNames:
    """A cache of names, which looks up each number in the binding once."""

    def __init__(self, cupti: Any = None) -> None:
        self._cupti = cupti
        self._names: dict[tuple[Activity, int], str] = {}

    def lookup(self, interface: Activity, number: int) -> str:
        """Return the name of a call, or its number if the binding does not know it.

        Args:
            interface: RUNTIME or DRIVER.
            number: CUPTI's "callback id".
        """
        key = (interface, number)
        if key not in self._names:
            self._names[key] = (
                self._name_from_enum(*key) or self._name_from_library(*key) or f"{interface.name} call {number}"
            )
        return self._names[key]

    def _name_from_enum(self, interface: Activity, number: int) -> str | None:
        for enum_name in _ENUMS[interface]:
            numbers = getattr(self._cupti, enum_name, None)
            if numbers is not None:
                try:
                    return str(numbers(number).name)
                except ValueError:  # the number is of a newer library
                    continue
        return None

    def _name_from_library(self, interface: Activity, number: int) -> str | None:
        try:
            domain = getattr(self._cupti.CallbackDomain, _DOMAINS[interface])
            return str(self._cupti.get_callback_name(int(domain), number))
        except Exception:  # the binding, or the library, does not know it
            return None


# --- threads ----------------------------------------------------------------------------------------------------------
# The threads of records, by the operating system's ids, which the other collectors use.

_LOWER_HALF = 0xFFFFFFFF


class ThreadNumbers:
    """A mapping of thread numbers in records to ids of `threading.get_native_id`."""

    def __init__(self) -> None:
        self.has_native_ids = True
        """Whether records were requested to have the operating system's ids."""

        self.unknown_count = 0
        """Number of thread numbers that could not be resolved."""

        self._ids: dict[int, int | None] = {}

    def __call__(self, number: int | None) -> int | None:
        """Return the thread's id; None for a record without a thread, or with an unknown one."""
        if number is None:
            return None
        if number not in self._ids:
            self._ids[number] = self._find(number)
        return self._ids[number]

    def _find(self, number: int) -> int | None:
        """Find a thread by its id, else by the lower half of pthread_self, which Python knows for its own threads."""
        if self.has_native_ids and Path(f"/proc/self/task/{number}").exists():
            return number
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident & _LOWER_HALF == number & _LOWER_HALF:
                return thread.native_id
        if self.has_native_ids:
            return number  # the thread has ended
        self.unknown_count += 1
        return None
