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
class ModelTimes:
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
        lower = math.hypot(1 - self.true.lo / self.true.value, bare.hi / bare.value - 1)
        upper = math.hypot(self.true.hi / self.true.value - 1, 1 - bare.lo / bare.value)
        return Figure(value, value * (1 - lower), value * (1 + upper))

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
    def covers_bare(self) -> bool:
        """Return whether xsp's interval contains the bare median."""
        return self.true.lo <= self.median <= self.true.hi


def measure(workload: Workload, repeats: int, options: argparse.Namespace) -> ModelTimes:
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
        return _model_times(xsp.load(out), bare, steps)


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
    deadline = perf_counter() + WARM_S
    while perf_counter() < deadline:
        workload.step()
    return [Condition("bare", workload.step).measure() for _ in range(BARE)]


def _model_times(trace: xsp.Trace, bare: list[tuple[int, bool]], total: int) -> ModelTimes:
    row = trace.sql("SELECT true_ns, true_lo_ns, true_hi_ns FROM merged WHERE kind = 'step'").fetchall()[0]
    times, disturbed = zip(*bare, strict=True)
    return ModelTimes(list(times), total, Figure(*row), sum(disturbed) / len(disturbed))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(heap.add_options(workloads.add_options(turns.parser(__doc__))), arguments)
    if options.keep_heap:
        heap.keep()
    report = turns.Report("true_time", "xsp's true step time compared with the bare step, in turns [95 %]", COLUMNS)
    models: list[ModelTimes] = []
    with report.until_interrupted():
        for workload in workloads.build_workloads(options):
            repeats = workloads.rounds_of(workload, options)
            times = measure(workload, repeats, options)
            models.append(times)
            report.add(_row(workload.name, times), bare=times.bare, true=times.true, ratio=times.ratio)
    report.notes += _summary(models)
    report.finish(options)


def _row(name: str, times: ModelTimes) -> list[str]:
    ratio = times.ratio
    error = ratio.value - 1
    return [
        name,
        f"{times.steps} / {len(times.bare)}",
        f"{times.median / 1e6:.2f}",
        times.true.text(2, 1e-6),
        ratio.text(4),
        f"{100 * error:+.2f}",
        "met" if abs(error) <= GOAL else "missed",
        "yes" if times.covers_bare else "no",
        f"{100 * (times.true.value / times.trimmed - 1):+.2f}",
        f"{100 * times.drift:+.1f}",
        f"{100 * times.disturbed:.0f}",
    ]


def _summary(models: Sequence[ModelTimes]) -> list[str]:
    if not models:
        return ["No model was measured."]
    errors = [abs(times.true.value / times.median - 1) for times in models]
    within_goal = sum(error <= GOAL for error in errors)
    trimmed_errors = [abs(times.true.value / times.trimmed - 1) for times in models]
    covered = sum(times.covers_bare for times in models)
    ratio_covered = sum(times.ratio.lo <= 1 <= times.ratio.hi for times in models)
    return [
        f"Median |error| {100 * turns.median(errors):.2f} %, largest {100 * max(errors):.2f} %; "
        f"within 2 % on {within_goal} of {len(models)} models.",
        "Compared with the trimmed mean of the bare steps, the statistic of xsp's true time: median |error| "
        f"{100 * turns.median(trimmed_errors):.2f} %, largest {100 * max(trimmed_errors):.2f} %.",
        f"xsp's interval covers the bare median on {covered} of {len(models)}; the interval of the ratio, which "
        f"includes the uncertainty of the bare median, contains 1 on {ratio_covered} of {len(models)}.",
    ]


if __name__ == "__main__":
    main()
