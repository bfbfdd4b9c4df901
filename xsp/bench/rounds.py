"""One sitting: several blocks are timed in rounds, one batch of calls each, so that a slow minute affects all of them.

Imports torch: import it where it is needed. A batch begins with an untimed call, because the previous batch was of
another block. Fixed work, the canaries, is timed at the start, in between and at the end; its drift is stored with
every timing of the sitting. How calls are timed is the device's answer (`xsp.device.contract.Device.timed`).
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from xsp import stats
from xsp.bench import torchcalls, variants
from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import Spec, Status, Timing, untimed
from xsp.bench.torchcalls import Prepared
from xsp.bench.worker import place_beside
from xsp.device.contract import Device, DeviceLost, Elapsed, Fault
from xsp.device.processor import Processor
from xsp.errors import DeviceError, PluginError
from xsp.version import __version__

BATCH_NS = 1_000_000
"""Least duration of a batch, unless it consists of one call."""

WARM_UP_NS = 100_000_000
MIN_BATCHES = 5
"""Least number of batches."""

PRECISE = 0.01
"""Half the confidence interval over the figure, at or below which the figure counts as known."""

UNSTABLE = 0.05
"""The same ratio, above which a figure counts as unstable when its time is over."""

ENOUGH_NS = 250_000_000
ENOUGH_FOR_LONG_NS = 2_000_000_000
LONG_NS = 50_000_000
CANARIES_EVERY_NS = 2_000_000_000
COLD_CALLS = 5
"""Calls after cold caches of a block on an accelerator, beside those in the state of its spec."""

Report = Callable[[int, Timing], None]
"""Callback with the index of a spec and its timing, as soon as it is known; again with what is measured beside it."""


Mark = Callable[[int], None]
"""Callback with the index of a spec, or the place of work beside the specs, before it runs: a crash or a hang can be
attributed to it."""


@dataclass
class _Seat:
    """A spec that is being timed."""

    index: int
    spec: Spec
    prepared: Prepared
    device: Device = field(default_factory=Processor)
    calls: int = 1
    batches: list[float] = field(default_factory=list)
    """Nanoseconds per call of each batch."""

    issues: list[float] = field(default_factory=list)
    """Nanoseconds per call until the host had issued the calls of each batch."""

    waits: bool = False
    """Whether the device waited for the host in a batch."""

    spent_ns: int = 0
    error_max: float | None = None

    def batch(self) -> None:
        """Run and time one batch."""
        prepared = self.prepared
        start = time.perf_counter_ns()
        with torch.inference_mode(), prepared.context():
            if prepared.flush is None and prepared.timed is None:
                for arguments in prepared.arguments(1):
                    prepared.function(*arguments)
            elapsed = _run(prepared, self.calls, self.device)
        self.batches.append(elapsed.ns / self.calls)
        self.issues.append(elapsed.issue_ns / self.calls)
        self.waits |= elapsed.waits
        self.spent_ns += time.perf_counter_ns() - start

    def is_precise(self) -> bool:
        """Return whether more batches would not improve the figure, or are not worth their time."""
        if len(self.batches) < MIN_BATCHES:
            return False
        if self.spent_ns >= (ENOUGH_FOR_LONG_NS if self.batches[-1] * self.calls > LONG_NS else ENOUGH_NS):
            return True
        return self.relative_half() <= PRECISE

    def relative_half(self) -> float:
        """Return half the confidence interval over the figure."""
        interval = stats.interval(self.batches)
        return math.inf if interval is None or not interval.value else interval.half / interval.value

    @property
    def most_calls(self) -> int | None:
        """Most calls per batch; None for no limit."""
        limits = [limit for limit in (self.prepared.most, self.device.most_calls) if limit is not None]
        return min(limits, default=None)


def sit(
    specs: Sequence[Spec],
    report: Report,
    mark: Mark,
    *,
    seconds: float,
    rotated_bytes: int,
    limit_bytes: int,
    seed: int = 0,
    device: Device | None = None,
) -> float:
    """Time specs in rounds, report each as soon as it is known, and return how much fixed work drifted.

    Specs with too few batches when the time is over are not reported; at least one spec gets enough batches, however
    short the time.

    Args:
        specs: specs that all have the number of threads of this process.
        report: see `Report`.
        mark: see `Mark`.
        seconds: time budget.
        rotated_bytes: see `Torch.prepare`.
        limit_bytes: most bytes that the tensors of one spec may take.
        seed: seed of the order within a round.
        device: where the specs run; default: the processor.

    Raises:
        DeviceLost: a block made its device unusable for this process; its timing is reported.
    """
    device = device or Processor()
    deadline = time.perf_counter_ns() + round(seconds * 1e9)
    canaries = Canaries(device, mark)
    mark(place_beside("an empty call"))
    floor = _empty_call_ns(device)
    seats: list[_Seat] = []
    for index, spec in enumerate(specs):
        if seats and time.perf_counter_ns() > deadline:
            break
        mark(index)
        outcome = _prepare(index, spec, rotated_bytes, limit_bytes, device, report)
        if isinstance(outcome, Timing):
            report(index, outcome)
        else:
            seats.append(outcome)
    canaries.run()
    rng, last_canaries, reported = random.Random(seed), time.perf_counter_ns(), 0
    gc.collect()
    gc.disable()
    try:
        while seats and time.perf_counter_ns() < deadline:
            rng.shuffle(seats)
            for seat in tuple(seats):
                mark(seat.index)
                if not _batch(seat, report):
                    seats.remove(seat)
                elif seat.is_precise():
                    seats.remove(seat)
                    reported += 1
                    _finish(seat, _timing(seat, floor, canaries.ratio), report, mark)
                if time.perf_counter_ns() >= deadline:
                    break
            if time.perf_counter_ns() - last_canaries > CANARIES_EVERY_NS:
                canaries.run()
                last_canaries = time.perf_counter_ns()
        for seat in seats:  # the time is over
            while not reported and len(seat.batches) < MIN_BATCHES:
                mark(seat.index)
                if not _batch(seat, report):
                    break
            if len(seat.batches) >= MIN_BATCHES:
                reported += 1
                _finish(seat, _timing(seat, floor, canaries.ratio), report, mark)
        canaries.run()
    finally:
        gc.enable()
    return canaries.ratio


def _prepare(
    index: int, spec: Spec, rotated_bytes: int, limit_bytes: int, device: Device, report: Report
) -> _Seat | Timing:
    """Return a spec warmed up and ready to be timed, or a timing with the reason why it cannot be.

    Raises:
        DeviceLost: see `sit`; the timing is reported.
    """
    try:
        error = None
        if spec.block.calls:
            prepared, error = variants.prepare(spec, rotated_bytes, limit_bytes, device)
        else:
            prepared = torchcalls.overhead(spec.variant, device)
        seat = _Seat(index, spec, prepared, device, error_max=error)
        _warm_up(seat)
    except (NotTimeable, PluginError) as problem:
        return untimed(spec, Status.FAILED, str(problem))
    except DeviceError as problem:  # another time it may be possible
        return untimed(spec, Status.MISSING, str(problem))
    except variants.ResultMismatch as problem:
        return replace(untimed(spec, Status.DIFFERENT, str(problem)), error_max=problem.error)
    except MemoryError as problem:
        return untimed(spec, Status.TOO_LARGE, str(problem))
    except Exception as problem:
        return _failed(index, spec, device, problem, report)
    return seat


def _failed(index: int, spec: Spec, device: Device, problem: Exception, report: Report) -> Timing:
    """Return the timing of a spec that raised; if the device is lost for this process, report it and say so."""
    message = str(problem).strip().split("\n")[0][:200]
    fault = Fault.LOST if isinstance(problem, DeviceLost) else device.fault(problem)
    if fault is Fault.OUT_OF_MEMORY:
        return untimed(spec, Status.TOO_LARGE, message)
    kind = type(problem.__cause__ or problem if isinstance(problem, DeviceLost) else problem).__name__
    timing = untimed(spec, Status.FAILED, f"{kind}: {message}")
    if fault is Fault.LOST:
        report(index, timing)
        raise DeviceLost(message) from problem
    return timing


def _batch(seat: _Seat, report: Report) -> bool:
    """Time one more batch, and return whether that was possible; if not, report why."""
    try:
        seat.batch()
    except MemoryError as problem:
        report(seat.index, untimed(seat.spec, Status.TOO_LARGE, str(problem)))
        return False
    except Exception as problem:
        if seat.device.is_host and not isinstance(problem, DeviceLost):  # the parent finds out what ends this process
            raise
        report(seat.index, _failed(seat.index, seat.spec, seat.device, problem, report))
        return False
    return True


def _warm_up(seat: _Seat) -> None:
    """Run until two batches agree within a tenth, or for `WARM_UP_NS`, and set the number of calls per batch."""
    prepared, most = seat.prepared, seat.most_calls
    start, previous = time.perf_counter_ns(), 0.0
    with torch.inference_mode(), prepared.context():
        while True:
            elapsed_ns = _run(prepared, seat.calls, seat.device).ns
            per_call = elapsed_ns / seat.calls
            steady = previous and abs(per_call - previous) <= 0.1 * previous
            full = elapsed_ns >= BATCH_NS / 2 or (not seat.device.is_host and seat.calls == most)
            if (steady and full) or time.perf_counter_ns() - start > WARM_UP_NS:
                break
            previous = per_call
            calls = math.ceil(BATCH_NS / max(per_call, 1.0))
            seat.calls = max(1, min(calls, seat.calls * 10, most or calls))
    calls = math.ceil(BATCH_NS / max(per_call, 1.0))
    seat.calls = max(1, min(calls, most or calls))


def _run(prepared: Prepared, calls: int, device: Device) -> Elapsed:
    """Return the time of `calls` calls on a device."""
    if prepared.timed is not None:
        elapsed = prepared.timed(calls)
        return elapsed if isinstance(elapsed, Elapsed) else Elapsed(elapsed, elapsed)
    return device.timed(prepared.function, prepared.arguments(calls), prepared.before)


def _empty_call_ns(device: Device) -> float:
    """Return the nanoseconds per call of an operator that does nothing."""
    empty, calls = torchcalls.overhead("overhead/op_call", device), min(200, device.most_calls or 200)
    with torch.inference_mode():
        return min(_run(empty, calls, device).ns / calls for _ in range(5))


def _timing(seat: _Seat, floor: float, ratio: float) -> Timing:
    interval = stats.interval(seat.batches)
    assert interval is not None
    mean = interval.value
    status, reasons = Status.OK, [seat.prepared.notes] if seat.prepared.notes else []
    if seat.relative_half() > UNSTABLE:
        status = Status.UNSTABLE
        reasons.append(f"half of its interval is {100 * seat.relative_half():.0f} % of its mean")
    if seat.spec.block.calls and mean <= floor:
        status = Status.QUICK
        reasons.append(f"not longer than an empty call, {floor / 1000:.1f} µs")
    if seat.waits:
        reasons.append("the device waits for the host in each call")
    is_host = seat.device.is_host
    return replace(
        untimed(seat.spec, status, "; ".join(reasons)),
        samples=len(seat.batches),
        trimmed_ns=mean,
        low_ns=interval.low,
        high_ns=interval.high,
        least_ns=min(seat.batches),
        device_ns=None if is_host else mean,
        host_ns=mean if is_host else statistics.median(seat.issues),
        error_max=seat.error_max,
        canary_ratio=ratio,
        taken_ns=time.time_ns(),
        xsp=__version__,
    )


def _finish(seat: _Seat, timing: Timing, report: Report, mark: Mark) -> None:
    """Report a timing; on an accelerator report it again with what is measured beside it, which may fail or hang.

    Raises:
        DeviceLost: the device became unusable meanwhile; the timing is reported.
    """
    report(seat.index, timing)
    if seat.device.is_host:
        return
    mark(seat.index)
    facts: dict[str, Any] = {}

    def report_without(index: int, failed: Timing) -> None:
        reason = "; ".join(filter(None, [timing.reason, f"only its time is known ({failed.reason})"]))
        report(index, replace(timing, **facts, reason=reason))

    try:
        _beside(seat, facts)
    except Exception as problem:
        report_without(seat.index, _failed(seat.index, seat.spec, seat.device, problem, report_without))
    else:
        report(seat.index, replace(timing, **facts))


def _beside(seat: _Seat, facts: dict[str, Any]) -> None:
    """Add what is measured on an accelerator beside times: energy of a step; cold caches and kernels of a block."""
    prepared, device = seat.prepared, seat.device
    if prepared.timed is not None:
        if prepared.joules is not None:
            with torch.inference_mode():
                facts["joules"] = prepared.joules()
        return
    with torch.inference_mode(), prepared.context():
        buffer = device.eviction_buffer(device.rotated_bytes()) if prepared.flush is None else prepared.flush
        cold = device.timed(prepared.function, prepared.arguments(COLD_CALLS), lambda: buffer.add_(1))
        facts["cold_ns"] = cold.ns / COLD_CALLS

        def call() -> object:
            (arguments,) = prepared.arguments(1)
            return prepared.function(*arguments)

        facts["workspace_bytes"] = device.workspace_bytes(call)
        facts["kernels"] = device.kernels(call)


class Canaries:
    """Fixed work whose time should not change: a matrix product, a copy, a convolution."""

    def __init__(self, device: Device, mark: Mark) -> None:
        self._device, self._mark = device, mark
        place = self._device.torch_name
        matrix, image = torch.ones(256, 256, device=place), torch.ones(1, 32, 56, 56, device=place)
        kernel, source = torch.ones(32, 32, 3, 3, device=place), torch.ones(1 << 20, device=place)
        target = torch.empty_like(source)
        self._work: dict[str, Callable[[], object]] = {
            "a matrix product": lambda: torch.mm(matrix, matrix),
            "a copy": lambda: target.copy_(source),
            "a convolution": lambda: torch.conv2d(image, kernel, padding=1),
        }
        self._rounds: list[list[float]] = []
        self.run()

    def run(self) -> None:
        """Time each canary once more."""
        with torch.inference_mode():
            self._rounds.append([self._once(name, work) for name, work in self._work.items()])
        self._mark(place_beside("other work"))

    @property
    def ratio(self) -> float:
        """Slowest over fastest round of the canary that drifted most."""
        drifts: list[float] = [max(times) / min(times) for times in zip(*self._rounds, strict=True)]
        return max(drifts)

    def _once(self, name: str, work: Callable[[], object]) -> float:
        self._mark(place_beside(name))
        work()
        return float(statistics.median(self._device.timed(work, [()]).ns for _ in range(9)))
