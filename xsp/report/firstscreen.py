"""The first screen of a run or a trace: what limits, where the time goes, what to change, what is doubtful.

At most `MOST_LINES` lines, the same at the end of a run, in `xsp analyze` without names, after an import and in `xsp
advise`. All figures are entries of the account.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from xsp import account
from xsp.account import Account, Iterations, Side
from xsp.account.sentences import Line, limit, lines, ms_text, percent_text
from xsp.advise import advisor, device
from xsp.advise.advice import Advice, Needs
from xsp.analyses.answers import Answers
from xsp.analyses.fusing import EAGER
from xsp.errors import XspError
from xsp.health import grade, health
from xsp.health.finding import Finding, Severity
from xsp.report.words import devices_text, number
from xsp.run import Budget
from xsp.scrub import plain
from xsp.store.trace import Trace

MOST_LINES = 25
MOST_PIECES = 3
MOST_DOUBTS = 3
LEAST_ROWS = 5
"""Rows of the account that are shown even where the screen is full."""

LEAST_PERCENT = 4.0
"""Least percentage of an iteration that a piece of advice must gain to be on the first screen."""

MAX_SPANS = 200_000
"""Maximum number of spans for which advice is looked for: the questions read all of them, 0.1 s for 20,000."""

MAX_WIDTH, MIN_WIDTH = 100, 60


@dataclass(frozen=True)
class FirstScreen:
    """The parts of the screen as text, without line breaks."""

    name: str
    heading: str
    """Name, device, time of an iteration, work per second."""

    sentence: str
    host: tuple[Line, ...]
    device: tuple[Line, ...]
    device_name: str
    advice: tuple[Advice, ...]
    doubts: tuple[str, ...]
    grade: str
    next: str
    """What to type next."""

    cost: Budget | None = None
    """What profiling cost the program, if it was profiled by xsp."""


def first_screen(trace: Trace, source: str | None = None, pieces: Sequence[Advice] | None = None) -> FirstScreen:
    """Return the first screen of a trace.

    Args:
        trace: the trace.
        source: how the user named it, for the commands that come next.
        pieces: advice that was computed already, best first.
    """
    accounted = account.of(trace)
    main = accounted.job
    side = main.device if main is not None else None
    findings = health(trace)
    shown_source = shlex.quote(source or (str(trace.path) if trace.path is not None else trace.name))
    return FirstScreen(
        trace.name,
        _heading(trace, accounted),
        limit(accounted, _attention_ms(trace, accounted)),
        tuple(lines(main, main.host)) if main is not None else (),
        tuple(lines(main, side)) if main is not None and side is not None else (),
        _device_name(accounted, main, side),
        tuple(_worth(_advice(trace) if pieces is None else pieces)),
        tuple(_doubts(findings)),
        grade(findings).letter,
        _next(shown_source),
        trace.run.budget,
    )


MAX_SOURCE = 36
"""Most characters of a path that is repeated in the commands to type next."""


def _next(source: str) -> str:
    """Return what to type next."""
    if len(source) > MAX_SOURCE:
        return "with the same path: xsp advise (all advice), xsp report (a page), xsp analyze … ops phases (tables)"
    return f"xsp advise {source} (all advice), xsp report … (a page), xsp analyze … ops phases (tables)"


def _heading(trace: Trace, accounted: Account) -> str:
    """Return name, device, kind of step, time of an iteration with its interval, and work per second."""
    main = accounted.job
    parts = [trace.name, *filter(None, [devices_text(trace)])]
    if len(accounted.ranks) > 1:
        parts.append(f"{len(accounted.ranks)} ranks")
    text = ", ".join(parts)
    if main is None:
        return text
    kinds = [each for each in accounted.iterations if each.rank == main.rank]
    if main.name and len(kinds) > 1:
        text += f", {main.name} ({100 * main.share:.0f} % of the loop)"
    if main.time.ms is None:
        return f"{text}: the time of an iteration is unknown"
    if main.unit == "window":
        return f"{text}: {ms_text(main.time.ms)} recorded, without steps"
    time = main.time
    assert time.ms is not None
    text += f": {ms_text(time.ms)} an iteration"
    if time.low_ms is not None and time.high_ms is not None:
        text += f" [{ms_text(time.low_ms)} … {ms_text(time.high_ms)}]"
    text += f", {main.count:,} iteration{'s' * (main.count != 1)}"
    if main.samples_per_s:
        text += f", {number(main.samples_per_s)} samples/s"
    return text


def _attention_ms(trace: Trace, accounted: Account) -> float:
    """Return the device time of attention that is written out, in milliseconds per iteration of a device."""
    if accounted.main is None or accounted.main.device is None:
        return 0.0
    rows = Answers(trace)["attention"].dicts()
    ms = sum(row["device_ms"] for row in rows if row["form"] == EAGER)
    return float(ms) / device.iterations_in_all(accounted)


def _device_name(accounted: Account, main: Iterations | None, side: Side | None) -> str:
    if main is None or side is None:
        return ""
    several = len(main.devices) > 1 or len(accounted.ranks) > 1
    rank = f" of rank {main.rank}" if len(accounted.ranks) > 1 else ""
    return f"{side.name}{rank}{', the busiest' if len(main.devices) > 1 else ''}" if several else "device"


def _advice(trace: Trace) -> Sequence[Advice]:
    ((spans,),) = trace.con.execute("SELECT count(*) FROM spans").fetchall()
    if spans > MAX_SPANS:
        return ()
    try:
        return advisor.of(trace, max_needs=Needs.TRACE).advice
    except XspError:
        return ()


def _worth(pieces: Sequence[Advice]) -> list[Advice]:
    """Return the pieces that belong on the first screen."""
    known = [piece for piece in pieces if piece.gain_known and not piece.option]
    return [piece for piece in known if piece.of_step_percent >= LEAST_PERCENT][:MOST_PIECES]


def _doubts(findings: Sequence[Finding]) -> list[str]:
    """Return the findings that lower the grade, the worst first."""
    doubtful = [each for each in findings if each.severity is Severity.WARNING and each.best_grade != "A"]
    doubtful.sort(key=lambda each: each.best_grade, reverse=True)
    texts = [f"{each.subject}: {each.text}" for each in doubtful[:MOST_DOUBTS]]
    if len(doubtful) > MOST_DOUBTS:
        texts[-1] = f"and {len(doubtful) - MOST_DOUBTS + 1} more: xsp analyze … health"
    return texts


# --- text ---------------------------------------------------------------------------------------------------------


def _cost(budget: Budget | None, screen_ns: int) -> str:
    """Return how much longer the whole program took, with the time of the screen itself; empty if unknown."""
    if budget is None or budget.program_percent is None or not budget.wall_ns:
        return ""
    own_ns = budget.spent_ns + budget.start_ns + budget.end_ns
    added_ns = max(0.0, budget.program_percent / 100 * max(0.0, budget.wall_ns - own_ns)) + screen_ns
    bare_ns = max(1.0, budget.wall_ns - own_ns)
    return f"; xsp added {added_ns / 1e9:.2g} s ({100 * added_ns / bare_ns:.0f} %)"


def text(
    screen: FirstScreen, width: int, commands: bool = True, stored: str | None = None, screen_ns: int = 0
) -> str:  # fmt: skip
    """Return the screen as text of at most `MOST_LINES` lines.

    Args:
        screen: the screen.
        width: width of the terminal.
        commands: whether to end with what to type next.
        stored: where the run was stored, if it was just recorded.
        screen_ns: time that the screen took, if the program that was profiled waits for it.
    """
    width = max(MIN_WIDTH, min(MAX_WIDTH, width))
    top = [*_wrapped(screen.heading, width, 2), "", *_wrapped(screen.sentence, width, 3)]
    doubts = [
        _short(f"grade {screen.grade} (A to F: how reliable these figures are){_cost(screen.cost, screen_ns)}", width)
    ]
    doubts += [_short(f"doubtful, {doubt}", width) for doubt in screen.doubts]
    place = f"stored in {stored}; " if stored is not None else ""
    ends = _wrapped(f"{place}next: {screen.next}", width, 2 + bool(stored)) if commands else []
    for piece_lines, doubt_lines in ((3, 1 + MOST_DOUBTS), (3, 2), (2, 2), (2, 1)):
        advice = [
            line for place, piece in enumerate(screen.advice, 1) for line in _piece(place, piece, width, piece_lines)
        ]
        bottom = [*doubts[:doubt_lines], *ends]
        left = MOST_LINES - len(top) - len(advice) - len(bottom) - 2
        if left >= min(1 + LEAST_ROWS, 1 + max(len(screen.host), len(screen.device))):
            break
    table = _table(screen, width, left)
    result = [*top, "", *table, *([""] if left > len(table) else []), *advice, *bottom]
    return "\n".join(plain(line) for line in result)


def _table(screen: FirstScreen, width: int, rows: int) -> list[str]:
    """Return both sides of the account beside each other."""
    host, device = (_fitting(side, rows - 1) for side in (screen.host, screen.device))
    if not host:
        return []
    if not device:
        return ["where the time of an iteration goes", *(_cell(line, min(width, 60)) for line in host)]
    half = (width - 3) // 2
    result = [f"{'host':{half}}   {screen.device_name}"]
    for place in range(max(len(host), len(device))):
        one = _cell(host[place], half) if place < len(host) else " " * half
        other = _cell(device[place], half) if place < len(device) else ""
        result.append(f"{one}   {other}".rstrip())
    return result


def _fitting(side: Sequence[Line], rows: int) -> list[Line]:
    """Return as many lines as fit, the last one with the sum of the others."""
    if len(side) <= max(2, rows):
        return list(side)
    shown = list(side[: max(1, rows - 1)])
    rest = side[len(shown) :]
    return [*shown, Line(names_of_rest(rest), sum(line.ms for line in rest), sum(line.percent for line in rest))]


def names_of_rest(rest: Sequence[Line]) -> str:
    """Return the name of a line that sums up others."""
    return "other" if len(rest) != 1 else rest[0].name


def _cell(line: Line, width: int) -> str:
    figures = f"{ms_text(line.ms):>9} {line.percent:4.0f} %"
    name = _short(line.name, width - len(figures) - 3)
    return f"  {name:{width - len(figures) - 3}} {figures}"


def gain_text(piece: Advice) -> str:
    """Return how much a piece of advice saves: `save at most 3.1 ms (12 %)`."""
    bound = "at most" if piece.at_most else "about"
    return f"save {bound} {ms_text(piece.gain.value)} ({percent_text(piece.of_step_percent)})"


def _piece(place: int, piece: Advice, width: int, most: int) -> list[str]:
    """Return a piece in at most `most` lines, the last one with what to do."""
    what = _wrapped(f"{place}. {gain_text(piece)}: {piece.what}", width, most - 1, "   ")
    return [
        *what,
        *(f"   {line}" for line in _wrapped(f"do: {piece.do.replace('`', '')}", width - 3, most - len(what))),
    ]


def _wrapped(content: str, width: int, most: int, indent: str = "") -> list[str]:
    """Return a text in at most so many lines; the last one ends with an ellipsis if there is more."""
    return textwrap.wrap(
        content, width, max_lines=most, placeholder=" …", subsequent_indent=indent, break_on_hyphens=False
    )


def _short(content: str, width: int) -> str:
    return content if len(content) <= width else f"{content[: max(1, width - 1)]}…"
