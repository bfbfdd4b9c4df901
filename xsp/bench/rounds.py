"""One sitting: several blocks are timed in rounds, one batch of calls each, so that a slow minute affects all of them.

Imports torch: import it where it is needed. A batch begins with an untimed call, because the previous batch was of
another block. Fixed work, the canaries, is timed at the start, in between and at the end; its drift is stored with
every timing of the sitting.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from xsp import stats
from xsp.bench import torchcalls, variants
from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import Spec, Status, Timing, untimed
from xsp.bench.torchcalls import Prepared
from xsp.errors import PluginError
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

Report = Callable[[int, Timing], None]
"""Callback with the index of a spec and its timing, as soon as the timing is known."""

Mark = Callable[[int], None]
"""Callback with the index of a spec before it runs, so that a crash can be attributed to it."""


@dataclass
class _Seat:
    """A spec that is being timed."""

    index: int
    spec: Spec
    prepared: Prepared
    calls: int = 1
    batches: list[float] = field(default_factory=list)
    """Nanoseconds per call of each batch."""

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
            elapsed_ns = _run(prepared, self.calls)
        self.batches.append(elapsed_ns / self.calls)
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
        return math.inf if interval is None else interval.half / interval.value


def sit(
    specs: Sequence[Spec],
    report: Report,
    mark: Mark,
    *,
    seconds: float,
    rotated_bytes: int,
    limit_bytes: int,
    seed: int = 0,
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
    """
    deadline = time.perf_counter_ns() + round(seconds * 1e9)
    canaries = Canaries()
    floor = _empty_call_ns()
    seats: list[_Seat] = []
    for index, spec in enumerate(specs):
        if seats and time.perf_counter_ns() > deadline:
            break
        mark(index)
        outcome = _prepare(index, spec, rotated_bytes, limit_bytes)
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
                seat.batch()
                if seat.is_precise():
                    seats.remove(seat)
                    reported += 1
                    report(seat.index, _timing(seat, floor, canaries.ratio))
                if time.perf_counter_ns() >= deadline:
                    break
            if time.perf_counter_ns() - last_canaries > CANARIES_EVERY_NS:
                canaries.run()
                last_canaries = time.perf_counter_ns()
        for seat in seats:  # the time is over
            while not reported and len(seat.batches) < MIN_BATCHES:
                mark(seat.index)
                seat.batch()
            if len(seat.batches) >= MIN_BATCHES:
                reported += 1
                report(seat.index, _timing(seat, floor, canaries.ratio))
        canaries.run()
    finally:
        gc.enable()
    return canaries.ratio


def _prepare(index: int, spec: Spec, rotated_bytes: int, limit_bytes: int) -> _Seat | Timing:
    """Return a spec warmed up and ready to be timed, or a timing with the reason why it cannot be."""
    try:
        error = None
        if spec.block.calls:
            prepared, error = variants.prepare(spec, rotated_bytes, limit_bytes)
        else:
            prepared = torchcalls.overhead(spec.variant)
        seat = _Seat(index, spec, prepared, error_max=error)
        _warm_up(seat)
    except (NotTimeable, PluginError) as problem:
        return untimed(spec, Status.FAILED, str(problem))
    except variants.ResultMismatch as problem:
        return replace(untimed(spec, Status.DIFFERENT, str(problem)), error_max=problem.error)
    except MemoryError as problem:
        return untimed(spec, Status.TOO_LARGE, str(problem))
    except Exception as problem:
        message = str(problem).strip().split("\n")[0][:200]
        if "can't allocate memory" in str(problem) or "not enough memory" in str(problem):
            return untimed(spec, Status.TOO_LARGE, message)
        return untimed(spec, Status.FAILED, f"{type(problem).__name__}: {message}")
    return seat


def _warm_up(seat: _Seat) -> None:
    """Run until two batches agree within a tenth, or for `WARM_UP_NS`, and set the number of calls per batch."""
    prepared = seat.prepared
    start, previous = time.perf_counter_ns(), 0.0
    with torch.inference_mode(), prepared.context():
        while True:
            elapsed_ns = _run(prepared, seat.calls)
            per_call = elapsed_ns / seat.calls
            steady = previous and abs(per_call - previous) <= 0.1 * previous
            if (steady and elapsed_ns >= BATCH_NS / 2) or time.perf_counter_ns() - start > WARM_UP_NS:
                break
            previous = per_call
            calls = math.ceil(BATCH_NS / max(per_call, 1.0))
            seat.calls = max(1, min(calls, seat.calls * 10, prepared.most or calls))
    calls = math.ceil(BATCH_NS / max(per_call, 1.0))
    seat.calls = max(1, min(calls, prepared.most or calls))


def _run(prepared: Prepared, calls: int) -> int:
    """Return the nanoseconds of `calls` calls."""
    if prepared.timed is not None:
        return prepared.timed(calls)
    function, argument_lists = prepared.function, prepared.arguments(calls)
    prepared.chill()
    clock = time.perf_counter_ns
    if calls == 1:
        (arguments,) = argument_lists
        start = clock()
        function(*arguments)
        return clock() - start
    start = clock()
    for arguments in argument_lists:
        function(*arguments)
    return clock() - start


def _empty_call_ns() -> float:
    """Return the nanoseconds per call of an operator that does nothing."""
    empty = torchcalls.overhead("overhead/op_call")
    with torch.inference_mode():
        return min(_run(empty, 200) / 200 for _ in range(5))


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
    return replace(
        untimed(seat.spec, status, "; ".join(reasons)),
        samples=len(seat.batches),
        trimmed_ns=mean,
        low_ns=interval.low,
        high_ns=interval.high,
        least_ns=min(seat.batches),
        host_ns=mean,
        error_max=seat.error_max,
        canary_ratio=ratio,
        taken_ns=time.time_ns(),
        xsp=__version__,
    )


class Canaries:
    """Fixed work whose time should not change: a matrix product, a copy, a convolution."""

    def __init__(self) -> None:
        matrix, image = torch.ones(256, 256), torch.ones(1, 32, 56, 56)
        kernel, source = torch.ones(32, 32, 3, 3), torch.ones(1 << 20)
        target = torch.empty_like(source)
        self._work: list[Callable[[], object]] = [
            lambda: torch.mm(matrix, matrix),
            lambda: target.copy_(source),
            lambda: torch.conv2d(image, kernel, padding=1),
        ]
        self._rounds: list[list[float]] = []
        self.run()

    def run(self) -> None:
        """Time each canary once more."""
        with torch.inference_mode():
            self._rounds.append([self._once(work) for work in self._work])

    @property
    def ratio(self) -> float:
        """Slowest over fastest round of the canary that drifted most."""
        drifts: list[float] = [max(times) / min(times) for times in zip(*self._rounds, strict=True)]
        return max(drifts)

    @staticmethod
    def _once(work: Callable[[], object]) -> float:
        work()
        samples: list[int] = []
        for _ in itertools.repeat(None, 9):
            start = time.perf_counter_ns()
            work()
            samples.append(time.perf_counter_ns() - start)
        return float(statistics.median(samples))
