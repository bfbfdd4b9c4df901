"""How close is the step time that xsp reconstructs to the step time without xsp?

One `xsp.profile(levels="M/L/G")` block runs its whole schedule. Before each round of its steps (which measures every
level once; the schedule runs bare steps before each) a stretch of bare steps runs in the same process: the model is
called outside `prof.step()`, where nothing records (the condition `off` of `layer_overhead.py` shows that this is as
fast as no block at all). The first steps of each stretch follow the storing of a step and the wait for a quiet machine,
after which a core needs a quarter of a second to be as fast as before; they do not count. Thus both sides are subject
to the same drift, round by round.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from parts import heap, turns, workloads
from parts.quiet import Patience
from parts.turns import Condition, Figure

import xsp
from xsp import summary
from xsp.models import Workload

GOAL = 0.02
BARE = 4
"""Number of bare steps of a stretch that count."""

WARM_S = 0.4
"""Seconds of warm-up in a stretch: after idling for 0.25 s, steps of 12 ms were 4 % longer at 0.1 s, 1 % at 0.3 s."""

COLUMNS = (
    "model", "steps: xsp's / bare", "bare ms", "xsp's true ms", "true / bare", "error %", "≤ 2 %", "covers bare",
    "error to trimmed bare %", "drift %", "disturbed %",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Times of one model, in nanoseconds."""

    bare: list[int]
    """Times of `BARE` bare steps of each round."""

    steps: int
    """Number of steps in the block, bare and recorded, from which xsp's true time is computed."""

    true: Figure
    disturbed: float
    """Share of the bare steps that other processes disturbed."""

    @property
    def ratio(self) -> Figure:
        """Return the ratio of true to bare time; the interval adds the uncertainties of both in quadrature."""
        stretches = [self.bare[place : place + BARE] for place in range(0, len(self.bare), BARE)]
        bare = turns.bootstrap(stretches, lambda rows: turns.median([value for row in rows for value in row]))
        value = self.true.value / bare.value
        below = math.hypot(1 - self.true.lo / self.true.value, bare.hi / bare.value - 1)
        above = math.hypot(self.true.hi / self.true.value - 1, 1 - bare.lo / bare.value)
        return Figure(value, value * (1 - below), value * (1 + above))

    @property
    def median(self) -> float:
        """Return the median bare step."""
        return turns.median(self.bare)

    @property
    def trimmed(self) -> float:
        """Return the trimmed mean of the bare steps, the same statistic as xsp's true time."""
        return summary.trimmed_mean(self.bare)

    @property
    def drift(self) -> float:
        """Return the relative change of the median from the first to the last third of the bare steps."""
        third = max(1, len(self.bare) // 3)
        return turns.median(self.bare[-third:]) / turns.median(self.bare[:third]) - 1

    @property
    def covers(self) -> bool:
        """Return whether xsp's interval contains the bare median."""
        return self.true.lo <= self.median <= self.true.hi


def measure(workload: Workload, repeats: int, options: argparse.Namespace) -> Found:
    """Run stretches of bare and of profiled steps in turns, and return both times."""
    bare: list[tuple[int, bool]] = []
    patience = Patience(options.patience)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("true_time", levels="M/L/G", out=out, seed=options.seed) as prof:
            steps = 0
            for round_ in range(repeats):
                patience.wait()
                bare += _bare_stretch(workload)
                steps += _profiled_round(prof, workload, round_ + 1)
        return _found(xsp.load(out), bare, steps)


def _profiled_round(prof: xsp.profile, workload: Workload, repeats: int) -> int:
    """Run steps until every level has been measured `repeats` times in total, and return the number of steps."""
    steps = 0
    while min(prof.schedule.repeats.values()) < repeats:
        with prof.step():
            workload.step()
        steps += 1
    return steps


def _bare_stretch(workload: Workload) -> list[tuple[int, bool]]:
    """Run warm-up steps for `WARM_S` seconds, then measure the steps that count."""
    until = perf_counter() + WARM_S
    while perf_counter() < until:
        workload.step()
    return [Condition("bare", workload.step).measure() for _ in range(BARE)]


def _found(trace: xsp.Trace, bare: list[tuple[int, bool]], total: int) -> Found:
    row = trace.sql("SELECT true_ns, true_lo_ns, true_hi_ns FROM merged WHERE kind = 'step'").fetchall()[0]
    times, disturbed = zip(*bare, strict=True)
    return Found(list(times), total, Figure(*row), sum(disturbed) / len(disturbed))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(heap.add_options(workloads.add_options(turns.parser(__doc__))), arguments)
    if options.keep_heap:
        heap.keep()
    report = turns.Report("true_time", "xsp's true step time compared with the bare step, in turns [95 %]", COLUMNS)
    found: list[Found] = []
    with report.until_interrupted():
        for workload in workloads.each(options):
            repeats = workloads.rounds_of(workload, options)
            one = measure(workload, repeats, options)
            found.append(one)
            report.add(_row(workload.name, one), bare=one.bare, true=one.true, ratio=one.ratio)
    report.notes += _summary(found)
    report.finish(options)


def _row(name: str, one: Found) -> list[str]:
    ratio = one.ratio
    error = ratio.value - 1
    return [
        name,
        f"{one.steps} / {len(one.bare)}",
        f"{one.median / 1e6:.2f}",
        one.true.shown(2, 1e-6),
        ratio.shown(4),
        f"{100 * error:+.2f}",
        "met" if abs(error) <= GOAL else "missed",
        "yes" if one.covers else "no",
        f"{100 * (one.true.value / one.trimmed - 1):+.2f}",
        f"{100 * one.drift:+.1f}",
        f"{100 * one.disturbed:.0f}",
    ]


def _summary(found: Sequence[Found]) -> list[str]:
    if not found:
        return ["No model was measured."]
    errors = [abs(one.true.value / one.median - 1) for one in found]
    near = sum(error <= GOAL for error in errors)
    alike = [abs(one.true.value / one.trimmed - 1) for one in found]
    covered = sum(one.covers for one in found)
    agree = sum(one.ratio.lo <= 1 <= one.ratio.hi for one in found)
    return [
        f"Median |error| {100 * turns.median(errors):.2f} %, largest {100 * max(errors):.2f} %; "
        f"within 2 % on {near} of {len(found)} models.",
        "Compared with the trimmed mean of the bare steps, the statistic of xsp's true time: median |error| "
        f"{100 * turns.median(alike):.2f} %, largest {100 * max(alike):.2f} %.",
        f"xsp's interval covers the bare median on {covered} of {len(found)}; the interval of the ratio, which "
        f"includes the uncertainty of the bare median, contains 1 on {agree} of {len(found)}.",
    ]


if __name__ == "__main__":
    main()
