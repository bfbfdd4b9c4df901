"""The step time that xsp reconstructs against the step time without xsp.

One `xsp.profile(levels="M/L/G")` block runs its whole schedule. Before each round of its steps (which measures
every level once) a stretch of bare steps runs in the same process: the model is called outside `prof.step()`,
where nothing records (`layer_overhead.py` shows, as `off`, that this is as fast as no block at all). The first
bare step of each stretch is dropped: it follows the storing of a step, on cold caches. So both sides see the
same drift, round by round. The script waits for a quiet machine before each round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parts import turns, workloads
from parts.quiet import Patience
from parts.turns import Condition, Figure

import xsp
from xsp import summary
from xsp.models import Workload

GOAL = 0.02
BARE = 2
"""Bare steps of a stretch that count."""

COLUMNS = (
    "model", "steps: M / all / bare", "bare ms", "xsp's true ms", "true / bare", "error %", "≤ 2 %", "covers bare",
    "error to trimmed bare %", "drift %", "disturbed %",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Times of one model, in nanoseconds."""

    bare: list[int]
    """`BARE` steps of each round."""

    model_rung: list[int]
    """The step of each round in which only the model level was on."""

    steps: int
    true: Figure
    disturbed: float
    """Share of the bare steps in which other processes took part of the machine."""

    @property
    def ratio(self) -> Figure:
        """Return true over bare; the interval resamples the rounds, so what drifts between them cancels."""
        stretches = [self.bare[place : place + BARE] for place in range(0, len(self.bare), BARE)]
        rounds = list(zip(stretches, self.model_rung, strict=False))
        return turns.bootstrap(rounds, _ratio_of_rounds)._replace(value=self.true.value / self.median)

    @property
    def median(self) -> float:
        """Return the median bare step."""
        return turns.median(self.bare)

    @property
    def trimmed(self) -> float:
        """Return the trimmed mean of the bare steps, the statistic that xsp's true time is."""
        return summary.trimmed_mean(self.bare)

    @property
    def drift(self) -> float:
        """Return how far the medians of the first and the last third of the bare steps are apart, as a share."""
        third = max(1, len(self.bare) // 3)
        return turns.median(self.bare[-third:]) / turns.median(self.bare[:third]) - 1

    @property
    def covers(self) -> bool:
        """Return whether xsp's interval holds the bare median."""
        return self.true.lo <= self.median <= self.true.hi


def _ratio_of_rounds(rounds: Sequence[tuple[list[int], int]]) -> float:
    bare = [value for stretch, _ in rounds for value in stretch]
    return summary.trimmed_mean([value for _, value in rounds]) / turns.median(bare)


def measure(workload: Workload, repeats: int, options: argparse.Namespace) -> Found:
    """Run stretches of bare and of profiled steps in turns, and let xsp say what the true step is."""
    bare: list[tuple[int, bool]] = []
    patience = Patience(options.patience)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("true_time", levels="M/L/G", out=out, seed=options.seed) as prof:
            _profiled_steps(prof, workload, prof.schedule.steps_for(0))
            for _ in range(repeats):
                patience.wait()
                bare += _bare_stretch(workload)
                _profiled_steps(prof, workload, prof.schedule.steps_for(1) - prof.schedule.steps_for(0))
        return _found(xsp.load(out), bare, prof.schedule.steps_for(repeats))


def _profiled_steps(prof: xsp.profile, workload: Workload, times: int) -> None:
    for _ in range(times):
        with prof.step():
            workload.step()


def _bare_stretch(workload: Workload) -> list[tuple[int, bool]]:
    workload.step()
    return [Condition("bare", workload.step).measure() for _ in range(BARE)]


def _found(trace: xsp.Trace, bare: list[tuple[int, bool]], total: int) -> Found:
    row = trace.sql("SELECT true_ns, true_lo_ns, true_hi_ns FROM merged WHERE kind = 'step'").fetchall()[0]
    outermost = trace.rungs[0].level
    timed = trace.sql(
        f"SELECT dur_ns FROM spans WHERE kind = 'step' AND timed AND rung = {outermost} ORDER BY step"
    ).fetchall()
    times, disturbed = zip(*bare, strict=True)
    return Found(list(times), [value for (value,) in timed], total, Figure(*row), sum(disturbed) / len(disturbed))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(workloads.add_options(turns.parser(__doc__)), arguments)
    report = turns.Report("true_time", "xsp's true step time against the bare step, in turns [95 %]", COLUMNS)
    found: list[Found] = []
    for workload in workloads.each(options):
        repeats = workloads.rounds_of(workload, options)
        one = measure(workload, repeats, options)
        found.append(one)
        report.add(_row(workload.name, one), bare=one.bare, model_rung=one.model_rung, true=one.true, ratio=one.ratio)
    report.notes += _summary(found)
    report.finish(options)


def _row(name: str, one: Found) -> list[str]:
    ratio = one.ratio
    error = ratio.value - 1
    return [
        name,
        f"{len(one.model_rung)} / {one.steps} / {len(one.bare)}",
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
    errors = [abs(one.true.value / one.median - 1) for one in found]
    near = sum(error <= GOAL for error in errors)
    alike = [abs(one.true.value / one.trimmed - 1) for one in found]
    covered = sum(one.covers for one in found)
    agree = sum(one.ratio.lo <= 1 <= one.ratio.hi for one in found)
    return [
        f"Median |error| {100 * turns.median(errors):.2f} %, largest {100 * max(errors):.2f} %; "
        f"within 2 % on {near} of {len(found)} models.",
        "Against the trimmed mean of the bare steps, the statistic that xsp's true time is: median |error| "
        f"{100 * turns.median(alike):.2f} %, largest {100 * max(alike):.2f} %.",
        f"xsp's interval covers the bare median on {covered} of {len(found)}; the interval of the ratio, in which "
        f"the bare median's own uncertainty counts too, holds 1 on {agree} of {len(found)}.",
    ]


if __name__ == "__main__":
    main()
