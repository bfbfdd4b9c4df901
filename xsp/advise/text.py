"""Advice as text that fits a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from xsp.advise.advice import Advice, Place, Step
from xsp.advise.advisor import AdviceReport
from xsp.advise.experiment import TRIED, TrialResult
from xsp.advise.records import History
from xsp.device.kernelnames import is_cpp, readable
from xsp.scrub import plain
from xsp.stats import Interval
from xsp.texts import counted, ms_text

WIDTH = 79
MOST_PIECES = 10
"""Default number of pieces that are shown."""

MOST_PLACES = 3


def page(report: AdviceReport, limit: int | None = None, history: str | None = None, unanswered: bool = False) -> str:
    """Return the advice, best first, and what was left out.

    Args:
        report: the advice.
        limit: maximum number of pieces that are shown.
        history: a line on how good advice has been on this machine.
        unanswered: whether to end with the questions that could not be answered; they are listed without advice too.
    """
    pieces = report.advice[: limit or MOST_PIECES]
    lines = _wrap(plain(report.name) + _step_text(report), "")
    lines += [line for text in (report.note, *report.ideal) if text for line in _wrap(text, "")]
    if all(piece.option for piece in report.advice):
        lines += ["", *_wrap(_no_advice(report), "")]
    for number, piece in enumerate(pieces, 1):
        if piece.option and (number == 1 or not pieces[number - 2].option):
            lines += ["", "faster with less accurate results, if they are good enough:"]
        lines += ["", *_piece(number, piece, piece.of or a_step(report.step))]
    lines += _combined_gain(report)
    remaining = len(report.advice) - len(pieces)
    notes = [f"{remaining} more: --limit {len(report.advice)}"] if remaining else []
    notes += [f"left out, because they {omission}: {count}" for omission, count in report.left_out.items()]
    lines += ["", *notes] if notes else []
    if report.unanswered and (unanswered or not report.answered):
        lines += ["", "could not be answered:"]
        for reason, names in _by_reason(report).items():
            lines += _wrap(f"{', '.join(names)}: {plain(reason)}", "  ")
    lines += ["", *_wrap(history, "")] if history else []
    return "\n".join(lines)


def milliseconds(gain: Interval) -> str:
    """Return a gain with its interval where there is one."""
    text = ms_text(gain.value)
    if gain.high - gain.low > 0.005 * gain.value:
        text += f" [{ms_text(gain.low)} … {ms_text(gain.high)}]"
    return text


def _step_text(report: AdviceReport) -> str:
    if report.step is None:
        return ""
    if report.step.unit == "window":
        return f": {ms_text(report.step.ms.value)} from the first work of a device to the end of its last"
    count = f", {counted(report.step.steps, 'step')}" if report.step.steps else ""
    return f": {a_step(report.step)} of {milliseconds(report.step.ms)}{count}"


def a_step(step: Step | None) -> str:
    """Return what gains are shares of (a step, an iteration, the time), with its article."""
    return {"iteration": "an iteration", "window": "the time"}.get(step.unit if step else "", "a step")


def _piece(number: int, piece: Advice, unit: str) -> list[str]:
    prefix = "at most " if piece.at_most else ""
    heading = f"{number}. {prefix}{milliseconds(piece.gain)}, {piece.of_step_percent:.0f} % of {unit}"
    if not piece.gain_known:
        heading = f"{number}. gain not known before it is tried"
    question_text = f"({', '.join(filter(None, (piece.number, piece.question)))})"
    fits = len(heading) + 2 + len(question_text) <= WIDTH
    lines = [f"{heading}  {question_text}"] if fits else [heading, f"   {question_text}"]
    lines += _wrap(plain(piece.what), "   ")
    places = [text for text in map(_place, piece.where) if text]
    for text in places[:MOST_PLACES]:
        lines += _wrap(f"where: {text}", "   ")
    if len(places) > MOST_PLACES:
        lines.append(f"   where: and {len(places) - MOST_PLACES} more places")
    for text in piece.why:
        lines += _wrap(f"why:   {plain(text)}", "   ")
    lines += _wrap(f"do:    {plain(piece.do)}", "   ")
    if piece.changes_numbers is not None:
        lines += _wrap(f"note:  it changes results: {plain(piece.changes_numbers)}", "   ")
    return lines


def _place(place: Place) -> str:
    op = place.op and (readable(place.op) if is_cpp(place.op) else place.op)  # a kernel without an operator
    parts = [plain(part) for part in (place.module, op) if part]
    line = ", ".join(parts)
    if place.calls is not None and place.calls > 1:
        line += f", {place.calls:,} calls" if line else f"{place.calls:,} calls"
    if place.spans:
        more = ", …" if (place.calls or len(place.spans)) > 1 else ""
        line += f" (span {place.spans[0]}{more})"
    return line.strip()


def _wrap(text: str, indent: str) -> list[str]:
    """Return the lines of a wrapped text, continuation lines aligned with the text after its label."""
    label = len(text.partition(":")[0]) + 1 if text.startswith(("where:", "why:", "do:", "note:")) else 0
    hang = indent + " " * (7 if label else 0)
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=hang, break_on_hyphens=False)


def _combined_gain(report: AdviceReport) -> list[str]:
    """Return the lines on the order in which pieces are worth doing, and what each adds to the previous ones."""
    combined = report.combined_gain
    if combined is None:
        return []
    numbers = {id(piece): number for number, piece in enumerate(report.advice, 1)}
    order = ", then ".join(f"{numbers[id(part.piece)]} (+{ms_text(part.added_ms)})" for part in combined.parts)
    text = f"together: {ms_text(combined.ms)}, in this order: {order}; calls that several change count once"
    if combined.unknown_count:
        text += f"; {combined.unknown_count} more are not included, because the calls that they change are unknown"
    return ["", *_wrap(text, "")]


def _no_advice(report: AdviceReport) -> str:
    count = len(report.answered)
    if not count:
        return "No advice: no question could be answered."
    text = f"Nothing to advise: {counted(count, 'question')} found nothing worth changing."
    reason, names = max(_by_reason(report).items(), key=lambda item: len(item[1]), default=("", []))
    if len(names) >= count / 2:
        text += f" {len(names)} more could not be answered: {reason}."
    return text


def _by_reason(report: AdviceReport) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in report.unanswered.items():
        names.setdefault(reason, []).append(name)
    return names


# --- trials: the promised gain beside the measured one ----------------------------------------------------------------
# Trials as text: the promised gain beside the measured one, and how good advice has been on this machine.

MOST_ROWS = 20


def trial_head() -> str:
    """Return the heading of the table of trials."""
    return "trials, without and with each change in turns:\n" + _row("trial", "predicted", "gained [95 %]", "turns")


def trial_lines(result: TrialResult) -> str:
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


def history_text(trial_history: History) -> str:
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
