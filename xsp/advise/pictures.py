"""Advice as a section of a run's report: predicted gains as bars, and a table of the pieces."""

from __future__ import annotations

from pathlib import Path

from xsp import sections
from xsp.advise.advice import Place
from xsp.advise.advisor import AdviceReport
from xsp.scrub import plain
from xsp.sections import Chart, Section, Series, Table, Text

SECTION = "advice"
MOST_PIECES = 20
"""Maximum number of pieces in the section."""


def section(report: AdviceReport) -> Section:
    """Return the section: gains with intervals, bounds in another colour, then what, where and what to do.

    A gain that only a trial can measure has no bar and no figure.
    """
    pieces = report.advice[:MOST_PIECES]
    if not pieces:
        summary = f"{len(report.answered)} questions found nothing worth changing."
        return Section("Advice", (Text(summary), *_unanswered(report)))
    labels = tuple(f"{number}. {piece.question}" for number, piece in enumerate(pieces, 1))
    gains = [piece.gain if piece.gain_known else None for piece in pieces]
    expectations = [None if piece.at_most else gain for piece, gain in zip(pieces, gains, strict=True)]
    expected = Series(
        "expected",
        tuple(gain.value if gain else None for gain in expectations),
        tuple(gain.low if gain else None for gain in expectations),
        tuple(gain.high if gain else None for gain in expectations),
    )
    limits = [gain if piece.at_most else None for piece, gain in zip(pieces, gains, strict=True)]
    bounds = Series("at most", tuple(gain.value if gain else None for gain in limits))
    series = tuple(
        candidate for candidate in (expected, bounds) if any(value is not None for value in candidate.values)
    )
    rows = tuple(
        (
            number,
            plain(piece.what),
            plain("; ".join(filter(None, map(_place, piece.where[:3])))),
            gain.value if gain else None,
            gain.low if gain else None,
            gain.high if gain else None,
            piece.at_most,
            piece.of_step_percent if gain else None,
            plain(piece.do),
        )
        for number, (piece, gain) in enumerate(zip(pieces, gains, strict=True), 1)
    )
    columns = ("piece", "what", "where", "gain_ms", "low_ms", "high_ms", "at most", "of_step_percent", "do")
    remaining = len(report.advice) - len(pieces)
    more_text = (Text(f"{remaining} more: xsp advise RUN --limit {len(report.advice)}"),) if remaining else ()
    summary = 'Predicted gain of each change, per step; "at most" is the whole time of the calls concerned.'
    chart = (Chart("bars", "Predicted gains", "ms", labels, series),) if series else ()
    return Section("Advice", (Text(summary), *chart, Table(columns, rows), *more_text))


def _place(place: Place) -> str:
    return ", ".join(part for part in (place.module, place.op) if part)


def _unanswered(report: AdviceReport) -> tuple[Table, ...]:
    rows = tuple((name, plain(reason)) for name, reason in report.unanswered.items())
    return (Table(("question", "why it could not be answered"), rows),) if rows else ()


def save(report: AdviceReport, folder: Path | str) -> Path | None:
    """Save the section in a run directory, where `xsp report` finds it; None if `folder` is not one, or is full."""
    return sections.write_if_run(Path(folder), SECTION, section(report))
