"""Trials as text: the promised gain beside the measured one, and how good advice has been on this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from xsp.advise.experiment import TRIED, TrialResult
from xsp.advise.records import History
from xsp.advise.text import WIDTH
from xsp.scrub import plain
from xsp.stats import Interval
from xsp.texts import ms_text

MOST_ROWS = 20


def head() -> str:
    """Return the heading of the table of trials."""
    return "trials, without and with each change in turns:\n" + _row("trial", "predicted", "gained [95 %]", "turns")


def lines(result: TrialResult) -> str:
    """Return the row of a trial, followed by its effect on results and the applied changes."""
    promised = f"{'≤ ' if result.advice.at_most else ''}{ms_text(result.advice.gain.value)}"
    promised += f" {result.advice.of_step_percent:.0f} %"
    if not result.advice.gain_known:
        promised = "not known"
    if result.outcome != TRIED or result.real_gain is None:
        rows = [_row(plain(result.trial), promised, result.outcome, result.turns or "")]
        return "\n".join([*rows, *_indent(result.reason)])
    gained = f"{_interval(result.real_gain)} {result.real_percent or 0:.0f} %"
    notes = [result.results] if result.results else []
    if result.real_gain.low <= 0 <= result.real_gain.high:
        notes.insert(0, "the gain is not certain: take more turns, --turns 20")
    elif result.real_gain.high < 0:
        notes.insert(0, "it makes the step slower: do not apply it")
    rows = [_row(plain(result.trial), promised, gained, result.turns)]
    return "\n".join([*rows, *_indent("; ".join([*notes, *result.applied[:2]]))])


def history(trial_history: History) -> str:
    """Return how good advice has been on this machine, and a row for each trial."""
    if not trial_history.rows:
        return "no advice was tried on this machine: xsp advise RUN --try 3"
    other_outcomes = [("were not applicable", trial_history.not_applicable), ("failed", trial_history.failed)]
    headline = trial_history.line or "no tried piece of advice could be measured here"
    headline += "".join(f"; {count} {outcome}" for outcome, count in other_outcomes if count)
    rows = textwrap.wrap(headline, WIDTH)
    rows += ["", _row("trial", "predicted", "gained", "error")]
    for row in trial_history.rows[:MOST_ROWS]:
        rows.append(_history_row(row))
    remaining = len(trial_history.rows) - MOST_ROWS
    rows += [f"and {remaining} more"] if remaining > 0 else []
    rows += [f"{trial_history.elsewhere} trials of other machines are not counted"] if trial_history.elsewhere else []
    rows += [f"{trial_history.damaged} files of trials are damaged and left out"] if trial_history.damaged else []
    return "\n".join(rows)


def _history_row(row: dict[str, object]) -> str:
    def percent(name: str) -> str:
        value = row.get(name)
        return f"{value:.0f} %" if isinstance(value, (int, float)) else ""

    promised = f"{'≤ ' if row.get('at_most') else ''}{percent('promised_percent')} of a step"
    gained = percent("real_percent") or str(row.get("outcome"))
    return _row(plain(str(row["trial"]))[:25], promised, plain(gained), percent("off_percent"))


def _interval(gain: Interval) -> str:
    """Return a gain with its interval, all three values in one unit."""
    largest = max(map(abs, (gain.low, gain.value, gain.high)))
    factor, unit = (1e-3, "s") if largest >= 1e3 else (1.0, "ms") if largest >= 1 else (1e3, "µs")
    value, low, high = (f"{number * factor:.3g}" for number in (gain.value, gain.low, gain.high))
    return f"{value} [{low} … {high}] {unit}"


def _row(trial: str, promised: str, gained: str, last_column: object) -> str:
    return f"{trial:<25} {promised:<17} {gained:<29} {last_column!s:>5}".rstrip()


def _indent(text: str) -> Sequence[str]:
    return textwrap.wrap(plain(text), WIDTH, initial_indent="   ", subsequent_indent="   ") if text else ()
