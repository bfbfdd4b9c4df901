"""The worker process that times, as seen by its parent, which sends it sittings and identifies specs that crash it.

A spec that crashes the process, or takes too long or too much memory, is marked, and the other specs of its sitting are
sent to another process.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from xsp import processes
from xsp.bench.spec import SLOWED, Spec, Status, Timing, slowdown_text, untimed
from xsp.bench.worker import BESIDE, CELL, LEAST_KNOWN_BYTES, LOST
from xsp.device.contract import Device, Fault
from xsp.device.processor import Processor
from xsp.errors import BenchError, DeviceError
from xsp.version import __version__

_CODE = processes.call_code("xsp.bench.worker", "work")

START_S = 60.0
"""Seconds to wait for a process to import torch."""

BESIDE_S = 60.0
"""Seconds for one piece of the work beside the specs, the first of which load libraries."""

GRACE_S = 3.0
"""Seconds after the end of a sitting for the running spec to end."""

POLL_S = 0.5
MOST_FAULTS_IN_VAIN = 2
"""Processes in a row whose device was lost before anything was timed, after which no other one is started."""

DISTURBED = 1.05

ProgressCallback = Callable[[Spec, int], None]
"""Callback with a timed spec, and the number of timed specs in the sitting."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits of one spec."""

    seconds: float = 20.0
    """Seconds for one batch, or for preparation."""

    memory_bytes: int | None = None
    """Bytes of its tensors and other allocations; default: half of the free memory."""


class Turns:
    """A worker process that times sittings of specs with one number of threads on one device."""

    def __init__(self, threads: int, limits: TurnLimits = TurnLimits(), device: Device | None = None) -> None:
        self.threads = threads
        self.limits = limits
        self.device = device or Processor()
        self.memory_bytes = limits.memory_bytes or 0
        """Most bytes of the tensors of a spec; of an accelerator only known once its process has started."""

        self.rotated_bytes = 0
        self._was_ready = False
        self.lost = ""
        """Why the device cannot be used any more; empty if it can."""

        self._fault = self._fault_reason = ""
        """What ended the last process in the fixed work beside the specs, for which none of them is to blame."""

        self._faults_in_vain = 0
        self._has_timed = False

        if self.device.is_host:
            self.memory_bytes = self.memory_bytes or (self.device.free_bytes() or LEAST_KNOWN_BYTES) // 2
            self.rotated_bytes = self.device.rotated_bytes()
        self._process: processes.WorkerProcess | None = None

    def __enter__(self) -> Turns:
        # a mapped file records the running spec: a message per batch would wake this process during the timed work
        try:
            self._file = tempfile.TemporaryFile(buffering=0)
            self._file.write(bytes(CELL.size))  # on a full disk, to write to a hole of a mapped file ends this process
        except OSError as error:
            raise BenchError(
                f"the timing process needs a small temporary file ({error.strerror}): free some space, or set TMPDIR "
                "to another folder"
            ) from error
        self._cell = mmap.mmap(self._file.fileno(), CELL.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()
        self._cell.close()
        self._file.close()

    def start(self) -> float:
        """Start the process unless it runs, and return the seconds until it was ready, that is, had imported torch.

        Raises:
            BenchError: torch is not installed, or the process cannot be started.
        """
        start = time.monotonic()
        if self._process is None:
            self._start_and_wait()
        return time.monotonic() - start

    def sit(
        self,
        specs: Sequence[Spec],
        deadline: float,
        on_progress: ProgressCallback = lambda spec, done: None,
        seed: int = 0,
    ) -> list[Timing]:
        """Return the timings of specs that take turns; specs for which the time was not enough are left out.

        Args:
            specs: specs, all with the number of threads of this object.
            deadline: deadline on the clock of `time.monotonic`.
            on_progress: see `ProgressCallback`.
            seed: seed of the order within a round.

        Raises:
            BenchError: torch is not installed, or the process cannot be started.
            DeviceError: the device cannot be used.
        """
        pending = list(specs)
        timings: list[Timing] = []
        while pending and time.monotonic() < deadline:
            try:
                process = self._process or self._start_and_wait()
            except DeviceError as error:
                if not self._was_ready:
                    raise
                self.lost = str(error)  # it was there: what was timed before counts
                break
            request = {
                "specs": [spec.to_plain() for spec in pending],
                "seconds": max(0.0, deadline - time.monotonic()),
                "rotated_bytes": self.rotated_bytes,
                "seed": seed,
            }
            self._cell[:] = CELL.pack(-1, 0)
            self._requested_at = time.monotonic()
            process.ask(request)
            answers, ratio = self._answers(process, pending, deadline, on_progress, len(timings))
            timings += [_with_drift(timing, ratio, self._note) for timing in answers.values()]
            if ratio is not None:
                break
            self._has_timed |= bool(answers)
            if self._fault and self._is_over(answers):
                break
            crashed = None if self._fault else self._handle_crash(pending, answers)
            if crashed is not None:
                timings.append(_with_drift(crashed, None))
            finished = {timing.key for timing in timings}
            pending = [spec for spec in pending if spec.key not in finished]
        return timings

    def _is_over(self, answers: dict[int, Timing]) -> bool:
        """End a process whose device failed, and return whether the device is given up, and note why.

        Raises:
            DeviceError: it is, before anything was timed.
        """
        self._end()
        self._faults_in_vain = 0 if answers else self._faults_in_vain + 1
        is_full = self._fault == Fault.OUT_OF_MEMORY.value
        if not is_full and self._faults_in_vain < MOST_FAULTS_IN_VAIN:
            return False  # another process may get it anew
        self.lost = f"it has too little memory free ({self._fault_reason})" if is_full else self._fault_reason
        if not self._has_timed:
            remedy = "end what else uses it" if is_full else "`xsp doctor` says whether it answers"
            raise DeviceError(f"{self.device.id} cannot be used: {self.lost}; {remedy}")
        return True

    def _answers(
        self,
        process: processes.WorkerProcess,
        specs: Sequence[Spec],
        deadline: float,
        report: ProgressCallback,
        offset: int,
    ) -> tuple[dict[int, Timing], float | None]:
        """Return the timings by index, and the drift of the canaries; None if the process did not end the sitting."""
        by_index: dict[int, Timing] = {}
        self._note = self._fault = ""
        while True:
            ended = process.has_ended()  # checked before reading, so that its last answers are read first
            line = process.answer(time.monotonic() + POLL_S)
            if line:
                answer = json.loads(line)
                if "canary_ratio" in answer:
                    self._note = answer["note"]
                    return by_index, float(answer["canary_ratio"])
                if "fault" in answer:
                    self._fault, self._fault_reason = answer["fault"], answer["reason"]
                    return by_index, None
                index = answer["place"]
                is_new = index not in by_index  # on an accelerator a timing comes again, with what is beside it
                by_index[index] = _timing(specs[index], answer["timing"])
                if is_new:
                    report(specs[index], offset + len(by_index))
            elif ended or self._is_late(deadline):
                self._find_fault_beside(process)
                return by_index, None

    def _find_fault_beside(self, process: processes.WorkerProcess) -> None:
        """Note work beside the specs that hangs, or ended the process, as a fault for which no spec is to blame."""
        place, since = CELL.unpack(self._cell[:])
        if place >= 0 or since == 0:
            return
        if not process.has_ended():
            if time.monotonic() - since / 1e9 <= BESIDE_S:
                return  # the budget is over
            what = f"did not end within {BESIDE_S:g} s"
        else:
            code = process.end()
            if code == LOST or BESIDE[-1 - place] == "other work":  # not what was called: see `_handle_crash`
                return
            what = f"ended the process that ran it ({processes.exit_description(code)})"
        self._fault, self._fault_reason = Fault.LOST.value, f"{BESIDE[-1 - place]} beside the blocks {what}"
        self._note = self._fault_reason

    def _is_late(self, deadline: float) -> bool:
        index, since = CELL.unpack(self._cell[:])
        now = time.monotonic()
        if since == 0:  # it has not read the request
            return now > max(deadline, self._requested_at + START_S)
        limit = self.limits.seconds if index >= 0 else BESIDE_S
        return now - since / 1e9 > limit or now > deadline + max(GRACE_S, self.limits.seconds)

    def _handle_crash(self, specs: Sequence[Spec], answers: dict[int, Timing]) -> Timing | None:
        """End a process that did not finish its sitting, and return a timing for the spec that it ran, if known."""
        assert self._process is not None
        is_late = not self._process.has_ended()
        index, since = CELL.unpack(self._cell[:])
        code = self._end()
        if since == 0 and is_late:
            raise BenchError(f"the timing process did not begin to time within {START_S:.0f} s")
        if since == 0 or not 0 <= index < len(specs) or index in answers:
            if is_late or answers or code == LOST:  # the others are timed in another process
                return None
            raise BenchError(f"the timing process ended unexpectedly ({processes.exit_description(code)})")
        if is_late and time.monotonic() - since / 1e9 <= self.limits.seconds:
            return None  # the budget is over
        if is_late:
            message = f"one batch of calls takes more than {self.limits.seconds:g} s"
            return untimed(specs[index], Status.TIMED_OUT, message)
        if code == -signal.SIGKILL:
            message = "the process that ran it was killed, as the system does when memory runs out"
            return untimed(specs[index], Status.TOO_LARGE, message)
        return untimed(
            specs[index], Status.FAILED, f"it ended the process that ran it ({processes.exit_description(code)})"
        )

    def _start_and_wait(self) -> processes.WorkerProcess:
        """Return a process that has imported torch and can use the device.

        Raises:
            DeviceError: it cannot.
            BenchError: it does not start.
        """
        process = self._start()
        process.ask({"device": self.device.id})
        deadline = time.monotonic() + START_S
        while not (line := process.answer(time.monotonic() + POLL_S)):
            is_late = time.monotonic() > deadline
            if is_late or process.has_ended():
                code = self._end()
                reason = f"it was not ready within {START_S:.0f} s" if is_late else processes.exit_description(code)
                raise BenchError(f"the timing process did not start ({reason}); `xsp doctor` says what is missing")
        answer = json.loads(line)
        if "obstacle" in answer:
            self._end()
            raise DeviceError(answer["obstacle"])
        self._was_ready = True
        self.memory_bytes, self.rotated_bytes = answer["memory_bytes"], answer["rotated_bytes"]
        return process

    def _start(self) -> processes.WorkerProcess:
        environment = {
            **processes.environment(),
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
        }
        handle = self._file.fileno()
        try:
            self._process = processes.WorkerProcess(
                _CODE, str(os.getpid()), str(self.threads), str(handle), str(self.memory_bytes),
                env=environment, pass_fds=(handle,),
            )  # fmt: skip
        except OSError as error:
            raise BenchError(f"the timing process cannot be started ({error.strerror})") from error
        return self._process

    def _end(self) -> int:
        process, self._process = self._process, None
        return 0 if process is None else process.end()


def _timing(spec: Spec, values: dict[str, Any]) -> Timing:
    fields = {**values, "status": Status(values["status"]), "kernels": tuple(values["kernels"])}
    return replace(untimed(spec), **fields)


def _with_drift(timing: Timing, ratio: float | None, note: str = "") -> Timing:
    """Return a timing with the drift of its whole sitting, and a note on the device during it."""
    ratio = max(filter(None, (ratio, timing.canary_ratio)), default=None)
    if timing.trimmed_ns is None or ratio is None:
        return replace(timing, taken_ns=timing.taken_ns or time.time_ns(), xsp=__version__)
    reasons = [text for text in (timing.reason, note and f"{SLOWED}{note}") if text]
    if ratio >= DISTURBED:
        reasons.append(f"disturbed: fixed work beside it took {slowdown_text(ratio)}")
    return replace(timing, canary_ratio=ratio, reason="; ".join(reasons))
