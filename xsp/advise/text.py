"""Advice as text that fits a terminal."""

from __future__ import annotations

import textwrap

from xsp.advise.advice import Advice, Place, Step
from xsp.advise.advisor import AdviceReport
from xsp.device.kernelnames import is_cpp, readable
from xsp.scrub import plain
from xsp.stats import Interval
from xsp.texts import ms_text

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
    lines += [line for text in report.ideal for line in _wrap(text, "")]
    if all(piece.option for piece in report.advice):
        lines += ["", *_wrap(_no_advice(report), "")]
    for number, piece in enumerate(pieces, 1):
        if piece.option and (number == 1 or not pieces[number - 2].option):
            lines += ["", "faster with less accurate results, if they are good enough:"]
        lines += ["", *_piece(number, piece, a_step(report.step))]
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
    count = f", {report.step.steps} step{'s' * (report.step.steps > 1)}" if report.step.steps else ""
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
    text = f"Nothing to advise: {count} question{'s' * (count > 1)} found nothing worth changing."
    reason, names = max(_by_reason(report).items(), key=lambda item: len(item[1]), default=("", []))
    if len(names) >= count / 2:
        text += f" {len(names)} more could not be answered: {reason}."
    return text


def _by_reason(report: AdviceReport) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in report.unanswered.items():
        names.setdefault(reason, []).append(name)
    return names
