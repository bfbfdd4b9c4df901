"""Advice that is tried: the run's program without and with what is advised, in turns, and what it gained.

A trial is applied from outside the program's code (`xsp.trials`), in the process that runs it under xsp. Turns, their
order, when to stop and the interval are those of `xsp compare --turns` (`xsp.comparison.turns`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsp.advise import rerun
from xsp.advise.advice import Advice, Interval
from xsp.comparison import comparable, compare, turns
from xsp.comparison.commands import Program
from xsp.comparison.revisions import Place
from xsp.errors import AnalysisError, ProgramError, UsageError, XspError
from xsp.trials import outputs
from xsp.trials.trial import Trial, named

Progress = Callable[[str, int, int], None]

TURNS = 6
"""Of each trial at most, unless told otherwise."""

TRIED, NOT_APPLICABLE, FAILED = "tried", "not applicable", "failed"


@dataclass(frozen=True)
class Tried:
    """A piece of advice that was tried: what was promised, and what it gave."""

    advice: Advice
    outcome: str
    """`tried`, `not applicable` or `failed`."""

    reason: str = ""
    """Why it was not tried."""

    before_ms: float | None = None
    after_ms: float | None = None
    real: Interval | None = None
    """What it gained, in milliseconds of a step of the program as it was run here."""

    turns: int = 0
    applied: tuple[str, ...] = ()
    """What was changed."""

    error: float | None = None
    """The largest difference of the first results, of the largest value in them."""

    results: str = ""
    """What became of results, in words."""

    @property
    def trial(self) -> str:
        """The name of the trial."""
        return self.advice.trial or ""

    @property
    def real_percent(self) -> float | None:
        """The gain in percent of the step without the trial."""
        return 100 * self.real.value / self.before_ms if self.real and self.before_ms else None

    @property
    def off_percent(self) -> float | None:
        """By how much the gain missed the promise, in percent of the promise; both as shares of the step.

        None where the promise was an upper bound only.
        """
        if self.real_percent is None or self.advice.at_most or not self.advice.of_step_percent:
            return None
        return 100 * abs(self.real_percent / self.advice.of_step_percent - 1)

    @property
    def came_true(self) -> bool | None:
        """Whether the step became faster, as promised; None where it was not tried."""
        return None if self.real is None else self.real.value > 0


@dataclass
class Plan:
    """What is tried, of which program, and where the runs go."""

    program: Program
    out: Path
    """A folder: of each trial the runs of both sides."""

    trains: bool = False
    turns: int = TURNS
    seed: int = 0
    tried: list[Tried] = field(default_factory=list)
    """Gets each trial when it is finished."""


def chosen(advice: Sequence[Advice], most: int) -> list[Advice]:
    """Return the best pieces that can be tried, at most so many; of several with the same trial the first.

    Raises:
        UsageError: fewer than one is asked for.
    """
    if most < 1:
        raise UsageError(f"--try {most}: write how many pieces of advice are to be tried, --try 3")
    found: dict[str, Advice] = {}
    for piece in advice:
        if piece.trial:
            found.setdefault(piece.trial, piece)
    return list(found.values())[:most]


def each(plan: Plan, advice: Sequence[Advice], progress: Progress) -> Iterator[Tried]:
    """Try pieces of advice one after the other, and yield each when it is finished.

    An interrupt ends what runs and passes through; what was yielded before is in `plan.tried`.

    Raises:
        ProgramError: the program fails without a trial, too.
        XspError: runs cannot be written, or hold no step.
    """
    for number, piece in enumerate(advice, 1):

        def shown(what: str, done: int, total: int, piece: Advice = piece, number: int = number) -> None:
            progress(f"{piece.trial} ({number} of {len(advice)}), {what}", done, total)

        found = _tried(plan, piece, shown)
        plan.tried.append(found)
        yield found


class _NothingChanged(XspError):
    """After the first turn it is known that the trial changes nothing."""


def _tried(plan: Plan, piece: Advice, progress: Progress) -> Tried:
    assert piece.trial
    try:
        trials = named(piece.trial)
    except UsageError as error:
        return Tried(piece, NOT_APPLICABLE, str(error))
    if plan.trains and any(trial.inference_only for trial in trials):
        return Tried(piece, NOT_APPLICABLE, "the program trains, and this is for inference")
    taken = turns.Turns(plan.out / re.sub(r"[^\w.=+-]", "-", piece.trial), plan.turns)
    before, after = (rerun.under(plan.program, name) for name in ("", piece.trial))

    def looking(what: str, done: int, total: int) -> None:
        if done == 2 and taken.a:
            _look(trials, *(_report(side[0]) for side in (taken.a, taken.b)))
        progress(what.replace(": A", ": without").replace(": B", ": with"), done, total)

    place = Place(Path.cwd())
    try:
        sides = [turns.Side("a", before, place), turns.Side("b", after, place)]
        turns.take(sides, taken, "M", looking, seed=plan.seed, overwrite=True)
    except _NothingChanged as nothing:
        return Tried(piece, NOT_APPLICABLE, str(nothing), turns=len(taken.a))
    except (ProgramError, AnalysisError) as error:
        if repr(after.typed) not in str(error):
            raise  # it is the program's own
        return Tried(piece, FAILED, _last_line(str(error)), turns=len(taken.a))
    return _measured(piece, taken, trials)


def _look(trials: Sequence[Trial], without: dict[str, Any], under: dict[str, Any]) -> None:
    """Raise where the first turn tells that nothing was changed."""
    was_so = [trial.was_so(without.get("facts") or {}) for trial in trials]
    if all(was_so):
        raise _NothingChanged("; ".join(filter(None, was_so)))
    if under.get("applied"):
        return
    if not under:
        raise _NothingChanged("it is not known what it changed: the process of the program ended before it said so")
    if not under.get("modules") and not under.get("reasons"):
        raise _NothingChanged("no module of torch was called")
    raise _NothingChanged("; ".join((under.get("reasons") or ["nothing was changed"])[:2]))


def _measured(piece: Advice, taken: turns.Turns, trials: Sequence[Trial]) -> Tried:
    step = compare(*comparable.load(taken.a, taken.b), turns=taken.most).step
    reports = [_report(path) for path in (taken.a[0], taken.b[0])]
    if step.a_ms is None or step.change_ms is None or step.low_ms is None or step.high_ms is None:
        return Tried(piece, FAILED, f"its gain cannot be told: {step.verdict}", turns=len(taken.a))
    error, said = _results(taken, trials)
    return Tried(
        piece,
        TRIED,
        before_ms=step.a_ms,
        after_ms=step.b_ms,
        real=Interval(-step.high_ms, -step.change_ms, -step.low_ms),
        turns=len(taken.a),
        applied=tuple(map(str, reports[1].get("applied") or ())),
        error=error,
        results=said,
    )


def _results(taken: turns.Turns, trials: Sequence[Trial]) -> tuple[float | None, str]:
    """Return how far the first results with the trial are from those without, and what to say of it."""
    try:
        error, same, why = outputs.error(rerun.report(taken.a[0]), rerun.report(taken.b[0]))
        if error is None:
            return None, f"results not compared: {why}"
        again_error, repeats, _ = outputs.error(rerun.report(taken.a[0]), rerun.report(taken.a[1]))
    except (OSError, ValueError, LookupError, TypeError) as wrong:
        return None, f"results not compared: {type(wrong).__name__}"
    if not repeats and again_error is not None:
        return None, f"results not compared: two starts without it differ by {100 * again_error:.1g} %"
    if error == 0:
        return error, "the same results"
    if same:
        return error, f"the same results within rounding ({error:.0e})"
    expected = "" if any(trial.changes_numbers for trial in trials) else ", which this should not do"
    return error, f"results differ by {100 * error:.2g} % of the largest value{expected}"


def _report(run: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(rerun.report(run).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _last_line(text: str) -> str:
    """Return how a program failed in one line: the last one that it printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].partition(";")[0]
    ended = re.search(r"ended with (.*)|left (.*)", first)
    return f"the program {ended[0] if ended else 'failed'}: {lines[-1][:200]}" if len(lines) > 1 else lines[0][:200]
