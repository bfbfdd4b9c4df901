"""Trials as text: the promised gain beside the measured one, and how good advice has been on this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from xsp.advise.advice import Interval
from xsp.advise.experiment import TRIED, TrialResult
from xsp.advise.records import History
from xsp.advise.text import WIDTH, duration
from xsp.scrub import plain

MOST_ROWS = 20


def head() -> str:
    """Return the heading of the table of trials."""
    return "trials, without and with each change in turns:\n" + _row("trial", "predicted", "gained [95 %]", "turns")


def lines(found: TrialResult) -> str:
    """Return the row of a trial, followed by its effect on results and the applied changes."""
    promised = f"{'≤ ' if found.advice.at_most else ''}{duration(found.advice.gain.value)}"
    promised += f" {found.advice.of_step_percent:.0f} %"
    if not found.advice.gain_known:
        promised = "not known"
    if found.outcome != TRIED or found.real is None:
        rows = [_row(plain(found.trial), promised, found.outcome, found.turns or "")]
        return "\n".join([*rows, *_indented(found.reason)])
    gained = f"{_interval(found.real)} {found.real_percent or 0:.0f} %"
    notes = [found.results] if found.results else []
    if found.real.low <= 0 <= found.real.high:
        notes.insert(0, "the gain is not certain: take more turns, --turns 20")
    elif found.real.high < 0:
        notes.insert(0, "it makes the step slower: do not apply it")
    rows = [_row(plain(found.trial), promised, gained, found.turns)]
    return "\n".join([*rows, *_indented("; ".join([*notes, *found.applied[:2]]))])


def history(found: History) -> str:
    """Return how good advice has been on this machine, and a row for each trial."""
    if not found.rows:
        return "no advice was tried on this machine: xsp advise RUN --try 3"
    others = [("were not applicable", found.not_applicable), ("failed", found.failed)]
    headline = found.line or "no tried piece of advice could be measured here"
    headline += "".join(f"; {count} {what}" for what, count in others if count)
    rows = textwrap.wrap(headline, WIDTH)
    rows += ["", _row("trial", "predicted", "gained", "error")]
    for row in found.rows[:MOST_ROWS]:
        rows.append(_history_row(row))
    remaining = len(found.rows) - MOST_ROWS
    rows += [f"and {remaining} more"] if remaining > 0 else []
    rows += [f"{found.elsewhere} trials of other machines are not counted"] if found.elsewhere else []
    rows += [f"{found.damaged} files of trials are damaged and left out"] if found.damaged else []
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
    most = max(map(abs, (gain.low, gain.value, gain.high)))
    factor, unit = (1e-3, "s") if most >= 1e3 else (1.0, "ms") if most >= 1 else (1e3, "µs")
    value, low, high = (f"{number * factor:.3g}" for number in (gain.value, gain.low, gain.high))
    return f"{value} [{low} … {high}] {unit}"


def _row(trial: str, promised: str, gained: str, last: object) -> str:
    return f"{trial:<25} {promised:<17} {gained:<29} {last!s:>5}".rstrip()


def _indented(text: str) -> Sequence[str]:
    return textwrap.wrap(plain(text), WIDTH, initial_indent="   ", subsequent_indent="   ") if text else ()
