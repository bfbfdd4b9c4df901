"""Repeatability of timings: some specs are timed again and compared with the stored timings."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from xsp.bench.plan import LEAST_S, OVERHEADS, Progress
from xsp.bench.spec import Spec, Status, Timing, spec_of
from xsp.bench.timings import Timings
from xsp.bench.transfers import COLLECTIVES, TRANSFERS
from xsp.bench.turns import Limits, Turns
from xsp.errors import BenchError
from xsp.summary import percentile

HOW_MANY = 20
LIMITS = Limits(seconds=60.0)
"""Limits of one spec; generous, because ranks take a while to start."""


@dataclass(frozen=True)
class Check:
    """The result of repeated timings."""

    pairs: list[tuple[Timing, Timing]]
    """The stored and the new timing of each spec."""

    lost: list[Timing]
    """Stored timings whose specs could not be timed again, or not within the budget."""

    @property
    def differences(self) -> list[float]:
        """Relative difference of each pair: by how much the new timing exceeds the stored one."""
        return [(now.trimmed_ns or 0) / kept.trimmed_ns - 1 for kept, now in self.pairs if kept.trimmed_ns]

    @property
    def median(self) -> float | None:
        """Median of the absolute differences."""
        return statistics.median(map(abs, self.differences)) if self.differences else None

    @property
    def ninetieth(self) -> float | None:
        """90th percentile of the absolute differences."""
        return percentile([abs(each) for each in self.differences], 0.9) if self.differences else None


def check(
    timings: Timings,
    seconds: float,
    progress: Progress = lambda what, done, total: None,
    how_many: int = HOW_MANY,
    seed: int = 0,
    runtime: str | None = None,
    keep: Callable[[Spec], bool] = lambda spec: True,
) -> Check:
    """Time some specs again without storing the new timings.

    Args:
        timings: timings of this machine.
        seconds: time budget.
        progress: see `xsp.bench.plan`.
        how_many: number of specs, drawn among those whose timing is `ok` or `unstable`.
        seed: seed of the draw.
        runtime: runtime of the specs; default: any except transfers and collectives.
        keep: whether a spec of that runtime may be drawn.

    Raises:
        BenchError: there are no timings of this environment.
    """
    known = [
        each
        for each in timings
        if each.status in (Status.OK, Status.UNSTABLE)
        and each.trimmed_ns
        and each.variant not in OVERHEADS
        and (each.runtime == runtime if runtime else each.runtime not in (TRANSFERS, COLLECTIVES))
        and keep(spec_of(each))
    ]
    if not known:
        raise BenchError(
            f"{timings.folder}: there are no timings of this machine to check; take some: xsp bench "
            f"{runtime or 'SOURCE'}"
        )
    drawn = random.Random(seed).sample(sorted(known, key=lambda each: each.key), k=min(how_many, len(known)))
    drawn.sort(key=lambda each: each.threads)
    until = time.monotonic() + seconds
    fresh: dict[str, Timing] = {}
    progress("starting", 0, len(drawn))
    for place, threads in enumerate(dict.fromkeys(each.threads for each in drawn)):
        specs = [spec_of(each) for each in drawn if each.threads == threads]

        def told(spec: Spec, done: int, before: int = len(fresh)) -> None:
            progress(spec.block.op[:40], before + done, len(drawn))

        with Turns(threads, LIMITS) as turns:
            turns.start()
            if not place:
                until = max(until, time.monotonic() + LEAST_S)
            fresh |= {each.key: each for each in turns.sit(specs, until, told)}
    progress("timed", len(fresh), len(drawn))
    pairs = [(each, fresh[each.key]) for each in drawn if each.key in fresh and fresh[each.key].is_timed]
    taken = {kept.key for kept, _ in pairs}
    return Check(pairs, [each for each in drawn if each.key not in taken])
