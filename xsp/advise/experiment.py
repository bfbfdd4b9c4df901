"""Trials of advice: the run's program without and with the advised change, in alternating turns, and the measured gain.

A trial is applied from outside the program's code (`xsp.trials`), in the process that runs it under xsp. The turns,
their order, the stopping rule and the interval are those of `xsp compare --turns` (`xsp.comparison.turns`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsp import inside
from xsp.advise import rerun
from xsp.advise.advice import Advice
from xsp.comparison import comparable, compare, turns
from xsp.comparison.commands import ComparedProgram
from xsp.comparison.revisions import WorkTree
from xsp.errors import AnalysisError, ProgramError, UsageError, XspError
from xsp.stats import Interval
from xsp.trials import outputs
from xsp.trials.trial import Trial, parse

Progress = Callable[[str, int, int], None]

TURNS = 6
"""Default maximum number of turns per trial."""

TRIED, NOT_APPLICABLE, FAILED = "tried", "not applicable", "failed"


@dataclass(frozen=True)
class TrialResult:
    """A piece of advice that was tried: the promised gain, and the outcome."""

    advice: Advice
    outcome: str
    """`tried`, `not applicable` or `failed`."""

    reason: str = ""
    """Why it was not tried."""

    before_ms: float | None = None
    after_ms: float | None = None
    real_gain: Interval | None = None
    """Measured gain in milliseconds per step of the program as run here."""

    turns: int = 0
    applied: tuple[str, ...] = ()
    """Changes that the trial applied."""

    error: float | None = None
    """Largest difference between the first results of both sides, relative to the largest value in them."""

    results: str = ""
    """Effect on results, in words."""

    @property
    def trial(self) -> str:
        """The name of the trial."""
        return self.advice.trial or ""

    @property
    def real_percent(self) -> float | None:
        """The gain in percent of the step without the trial."""
        return 100 * self.real_gain.value / self.before_ms if self.real_gain and self.before_ms else None

    @property
    def off_percent(self) -> float | None:
        """The error of the promise in percent of the promise, with both gains as shares of the step.

        None where the promise was only an upper bound.
        """
        if self.real_percent is None or self.advice.at_most or not self.advice.of_step_percent:
            return None
        return 100 * abs(self.real_percent / self.advice.of_step_percent - 1)

    @property
    def came_true(self) -> bool | None:
        """Whether the step became faster, as promised; None where the advice was not tried."""
        return None if self.real_gain is None else self.real_gain.value > 0


@dataclass
class TrialPlan:
    """A program to try advice on, the folder for its runs, and the finished trials."""

    program: ComparedProgram
    out: Path
    """Folder for the runs of both sides of each trial."""

    is_training: bool = False
    turns: int = TURNS
    seed: int = 0
    results: list[TrialResult] = field(default_factory=list)
    """Finished trials; each is appended when it ends."""


def select(advice: Sequence[Advice], limit: int) -> list[Advice]:
    """Return the first `limit` pieces that can be tried; of several pieces with the same trial only the first.

    Raises:
        UsageError: `limit` is less than one.
    """
    if limit < 1:
        raise UsageError(f"--try {limit}: give the number of pieces of advice to try, --try 3")
    by_trial: dict[str, Advice] = {}
    for piece in advice:
        if piece.trial:
            by_trial.setdefault(piece.trial, piece)
    return list(by_trial.values())[:limit]


def run_trials(plan: TrialPlan, advice: Sequence[Advice], progress: Progress) -> Iterator[TrialResult]:
    """Try pieces of advice one after the other, and yield each result when it is finished.

    An interrupt ends the current run and propagates; the results yielded so far are in `plan.results`.

    Raises:
        ProgramError: the program also fails without a trial.
        XspError: runs cannot be written, or contain no step.
    """
    for number, piece in enumerate(advice, 1):

        def show_progress(activity: str, done: int, total: int, piece: Advice = piece, number: int = number) -> None:
            progress(f"{piece.trial} ({number} of {len(advice)}), {activity}", done, total)

        result = _try(plan, piece, show_progress)
        plan.results.append(result)
        yield result


class _NoEffect(XspError):
    """The first turn shows that the trial changes nothing."""


def _try(plan: TrialPlan, piece: Advice, progress: Progress) -> TrialResult:
    assert piece.trial
    try:
        trials = parse(piece.trial)
    except UsageError as error:
        return TrialResult(piece, NOT_APPLICABLE, str(error))
    if plan.is_training and any(trial.inference_only for trial in trials):
        return TrialResult(piece, NOT_APPLICABLE, "the program trains, and this is only for inference")
    runs = turns.ComparedTurns(plan.out / re.sub(r"[^\w.=+-]", "-", piece.trial), plan.turns)
    baseline, changed = (rerun.with_trial(plan.program, name) for name in ("", piece.trial))

    def check_and_show(activity: str, done: int, total: int) -> None:
        if done == 2 and runs.a:
            _check_applied(trials, *(_report(side[0]) for side in (runs.a, runs.b)))
        progress(activity.replace(": A", ": without").replace(": B", ": with"), done, total)

    work_tree = WorkTree(Path.cwd())
    try:
        sides = [turns.ComparedSide("a", baseline, work_tree), turns.ComparedSide("b", changed, work_tree)]
        turns.run_turns(sides, runs, "M", check_and_show, seed=plan.seed, overwrite=True)
    except _NoEffect as unchanged:
        return TrialResult(piece, NOT_APPLICABLE, str(unchanged), turns=len(runs.a))
    except (ProgramError, AnalysisError) as error:
        if repr(changed.text) not in str(error):
            raise  # the program itself failed, not the trial
        return TrialResult(piece, FAILED, _last_line(str(error)), turns=len(runs.a))
    return _measure(piece, runs, trials)


def _check_applied(trials: Sequence[Trial], baseline: dict[str, Any], report: dict[str, Any]) -> None:
    """Raise `_NoEffect` if the reports of the first turn show that the trial changed nothing."""
    reasons = [trial.already_applied(baseline.get("facts") or {}) for trial in trials]
    if all(reasons):
        raise _NoEffect("; ".join(filter(None, reasons)))
    if report.get("applied"):
        return
    if not report:
        raise _NoEffect("it is not known what it changed: the program's process ended before it reported")
    if not report.get("modules") and not report.get("reasons"):
        raise _NoEffect("no torch module was called")
    raise _NoEffect("; ".join((report.get("reasons") or ["nothing was changed"])[:2]))


def _measure(piece: Advice, runs: turns.ComparedTurns, trials: Sequence[Trial]) -> TrialResult:
    step = compare(*comparable.load(runs.a, runs.b), turns=runs.max_turns).step
    reports = [_report(path) for path in (runs.a[0], runs.b[0])]
    if step.a_ms is None or step.change_ms is None or step.low_ms is None or step.high_ms is None:
        return TrialResult(piece, FAILED, f"its gain cannot be determined: {step.verdict}", turns=len(runs.a))
    error, summary = _results(runs, trials)
    return TrialResult(
        piece,
        TRIED,
        before_ms=step.a_ms,
        after_ms=step.b_ms,
        real_gain=Interval(-step.high_ms, -step.change_ms, -step.low_ms),
        turns=len(runs.a),
        applied=tuple(map(str, reports[1].get("applied") or ())),
        error=error,
        results=summary,
    )


def _results(runs: turns.ComparedTurns, trials: Sequence[Trial]) -> tuple[float | None, str]:
    """Return the error of the first results with the trial relative to those without, and a sentence on it."""
    try:
        error, is_same, reason = outputs.error(rerun.report(runs.a[0]), rerun.report(runs.b[0]))
        if error is None:
            return None, f"results not compared: {reason}"
        repeat_error, is_repeatable, _ = outputs.error(rerun.report(runs.a[0]), rerun.report(runs.a[1]))
    except (OSError, ValueError, LookupError, TypeError) as failure:
        return None, f"results not compared: {type(failure).__name__}"
    if not is_repeatable and repeat_error is not None:
        return None, f"results not compared: two runs without it differ by {100 * repeat_error:.1g} %"
    if error == 0:
        return error, "the same results"
    if is_same:
        return error, f"the same results within rounding ({error:.0e})"
    expected = "" if any(trial.changes_numbers for trial in trials) else ", which is unexpected"
    return error, f"results differ by {100 * error:.2g} % of the largest value{expected}"


def _report(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        file = rerun.report(run)
        report = inside.read_json(file.parent, file, outputs.MOST_BYTES)
        return report if isinstance(report, dict) else {}
    return {}


def _last_line(text: str) -> str:
    """Return one line on how a program failed, with the last line that it printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first_line = lines[0].partition(";")[0]
    reason = re.search(r"ended with (.*)|left (.*)", first_line)
    return f"the program {reason[0] if reason else 'failed'}: {lines[-1][:200]}" if len(lines) > 1 else lines[0][:200]
