"""Repeatability of timings: some specs are timed again and compared with the stored timings."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from xsp.bench.plan import MIN_SECONDS, OVERHEADS, Progress
from xsp.bench.spec import Spec, Status, Timing, spec_of
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, TRANSFERS
from xsp.bench.turns import TurnLimits, Turns
from xsp.device.contract import Device
from xsp.errors import BenchError
from xsp.stats import percentile

SAMPLE_SIZE = 20
LIMITS = TurnLimits(seconds=60.0)
"""Limits of one spec; generous, because ranks take a while to start."""


@dataclass(frozen=True)
class Check:
    """The result of repeated timings."""

    pairs: list[tuple[Timing, Timing]]
    """The stored and the new timing of each spec."""

    failures: list[Timing]
    """Stored timings whose specs could not be timed again, or not within the budget."""

    @property
    def differences(self) -> list[float]:
        """Relative difference of each pair: by how much the new timing exceeds the stored one."""
        return [
            (repeated.trimmed_ns or 0) / stored.trimmed_ns - 1 for stored, repeated in self.pairs if stored.trimmed_ns
        ]

    @property
    def median(self) -> float | None:
        """Median of the absolute differences."""
        return statistics.median(map(abs, self.differences)) if self.differences else None

    @property
    def ninetieth(self) -> float | None:
        """90th percentile of the absolute differences."""
        return percentile([abs(difference) for difference in self.differences], 0.9) if self.differences else None


def check(
    timings: Timings,
    seconds: float,
    progress: Progress = lambda name, done, total: None,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
    runtime: str | None = None,
    is_eligible: Callable[[Spec], bool] = lambda spec: True,
    device: Device | None = None,
) -> Check:
    """Time some specs again without storing the new timings.

    Args:
        timings: timings of this machine.
        seconds: time budget.
        progress: see `xsp.bench.plan`.
        sample_size: number of specs, drawn among those whose timing is `ok` or `unstable`.
        seed: seed of the draw.
        runtime: runtime of the specs; default: any except transfers and collectives.
        is_eligible: whether a spec of that runtime may be drawn.
        device: the device that the timings are of; default: the processor.

    Raises:
        BenchError: there are no timings of this environment.
    """
    candidates = [
        timing
        for timing in timings
        if timing.status in (Status.OK, Status.UNSTABLE)
        and timing.trimmed_ns
        and timing.variant not in OVERHEADS
        and (timing.runtime == runtime if runtime else timing.runtime not in (TRANSFERS, COLLECTIVES))
        and is_eligible(spec_of(timing))
    ]
    if not candidates:
        raise BenchError(
            f"{timings.folder}: there are no timings of this machine to check; take some: xsp bench "
            f"{runtime or 'SOURCE'}"
        )
    sample = random.Random(seed).sample(
        sorted(candidates, key=lambda timing: timing.key), k=min(sample_size, len(candidates))
    )
    sample.sort(key=lambda timing: timing.threads)
    deadline = time.monotonic() + seconds
    repeated: dict[str, Timing] = {}
    progress("starting", 0, len(sample))
    for index, threads in enumerate(dict.fromkeys(timing.threads for timing in sample)):
        specs = [spec_of(timing) for timing in sample if timing.threads == threads]

        def on_progress(spec: Spec, done: int, offset: int = len(repeated)) -> None:
            progress(spec.block.op[:40], offset + done, len(sample))

        with Turns(threads, LIMITS, device) as turns:
            turns.start()
            if not index:
                deadline = max(deadline, time.monotonic() + MIN_SECONDS)
            repeated |= {timing.key: timing for timing in turns.sit(specs, deadline, on_progress)}
    progress("timed", len(repeated), len(sample))
    pairs = [
        (timing, repeated[timing.key]) for timing in sample if timing.key in repeated and repeated[timing.key].is_timed
    ]
    paired = {stored.key for stored, _ in pairs}
    return Check(pairs, [timing for timing in sample if timing.key not in paired])
