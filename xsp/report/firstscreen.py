"""The first screen of a run or a trace: what limits, where the time goes, what to change, what is doubtful.

At most `MOST_LINES` lines, the same at the end of a run, in `xsp analyze` without names, after an import and in `xsp
advise`. All figures are entries of the account.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xsp import account
from xsp.account import Account, Iterations, Side
from xsp.account.kinds import sentence as kinds_sentence
from xsp.account.sentences import SHORT, Line, limit, lines, percent_text, remarks
from xsp.account.serving import sentence as requests_sentence
from xsp.advise import advisor, device
from xsp.advise.advice import Advice, AdviceContext, Needs
from xsp.analyses.answers import Answers
from xsp.analyses.fusing import EAGER
from xsp.errors import XspError
from xsp.health import grade, health
from xsp.health.finding import Finding, Severity
from xsp.report.words import devices_text
from xsp.run import Budget
from xsp.scrub import plain
from xsp.store.trace import Trace
from xsp.texts import counted, ms_text, number, shortened

MOST_LINES = 25
MOST_PIECES = 3
MOST_DOUBTS = 3
MIN_AT_ONCE = 1.1
"""Least mean number of iterations at the same time, for the heading to state it."""

MOST_REMARKS = 2
FIRST_SHARE = 1 / 3
"""Least share of the time that a remark must be about to come before the sentence on what limits."""

LEAST_ROWS = 4
"""Rows of the account that are shown even where the screen is full."""

LEAST_PERCENT = 4.0
"""Least percentage of an iteration that a piece of advice must gain to be on the first screen."""

MAX_SPANS = 200_000
"""Maximum number of spans for which advice is looked for: the questions read all of them, 0.1 s for 20,000."""

MAX_WIDTH, MIN_WIDTH = 100, 60


@dataclass(frozen=True)
class FirstScreen:
    """The parts of the screen as text, without line breaks."""

    heading: str
    """Name, device, time of an iteration, work per second."""

    sentence: str
    """What limits, with its share of an iteration, and the place that takes most of it."""

    remarks: tuple[str, ...]
    """Sentences on what differs between iterations, most time first."""

    host: tuple[Line, ...]
    device: tuple[Line, ...]
    device_name: str
    advice: tuple[Advice, ...]
    doubts: tuple[str, ...]
    grade: str
    next: str
    """What to type next."""

    remarks_first: bool = False
    """Whether a remark is about more of the time than what limits."""

    title: str = "where the time of an iteration goes"
    """Title of the lines, if there is only one side."""

    cost: Budget | None = None
    """What profiling cost the program, if it was profiled by xsp."""

    name: str = ""
    """Name of the trace, with which the heading begins."""

    kinds: str = ""
    """A sentence on each kind of step, if there are several, or on the requests of an engine; else empty."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The sentences in the order in which they matter."""
        found = (*self.remarks, self.sentence) if self.remarks_first else (self.sentence, *self.remarks)
        return (*found, self.kinds) if self.kinds else found


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
        _heading(trace, accounted),
        _limit(trace, accounted),
        tuple(remark.text for remark in remarks(accounted)[:MOST_REMARKS]),
        *(_sides(trace, accounted) if accounted.steps_found else _program(accounted)),
        _device_name(accounted, main, side),
        tuple(_worth(_advice(trace) if pieces is None else pieces)) if accounted.steps_found else (),
        tuple(_doubts(findings)),
        grade(findings).letter,
        _next(shown_source),
        any(remark.share >= FIRST_SHARE for remark in remarks(accounted)[:1]),
        f"where the time of {_subject(accounted)} goes",
        trace.run.budget,
        trace.name,
        _on_kinds(trace, accounted),
    )


def _on_kinds(trace: Trace, accounted: Account) -> str:
    """Return the sentence on kinds of steps, or on requests; of a run, which knows what each waits for, on requests."""
    on_kinds = kinds_sentence(trace, accounted) if accounted.steps_found else ""
    if trace.run.imported is not None and on_kinds:
        return on_kinds
    return requests_sentence(trace) or on_kinds


def _limit(trace: Trace, accounted: Account) -> str:
    """Return what limits, or that no step was recorded."""
    if accounted.job is None and trace.run.empty is not None:
        return "Requests and steps of an engine are known, and no step of a model that it calls."
    return limit(accounted, _attention_ms(trace, accounted))


def _subject(accounted: Account) -> str:
    """Return what the two sides are of."""
    if not accounted.steps_found:
        return "the loop"
    return accounted.job.subject if accounted.job is not None else "an iteration"


def _sides(trace: Trace, accounted: Account) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return the lines of the host and of the busiest device; none without a timeline."""
    main = accounted.job
    if main is None or trace.run.timeline is False:
        return (), ()
    return tuple(lines(main, main.host)), tuple(lines(main, main.device)) if main.device is not None else ()


def _program(accounted: Account) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return the lines of a program whose steps are unknown: what its calls take of the loop."""
    wall_ms = accounted.wall_ms or 0.0
    entries = sorted(accounted.program, key=lambda entry: -abs(entry.ms or 0.0))
    return tuple(
        Line(entry.name, entry.ms or 0.0, 100 * (entry.ms or 0.0) / wall_ms) for entry in entries if wall_ms
    ), ()


MAX_SOURCE = 36
"""Most characters of a path that is repeated in the commands to type next."""


MAX_NAME = 40
"""Most columns of the name of a run or of a kind of step in the heading, which has room for the time after both."""


def _next(source: str) -> str:
    """Return what to type next."""
    if len(source) > MAX_SOURCE:
        return "with the same path: xsp advise (all advice), xsp report (a page), xsp analyze … ops phases (tables)"
    return f"xsp advise {source} (all advice), xsp report … (a page), xsp analyze … ops phases (tables)"


def _heading(trace: Trace, accounted: Account) -> str:
    """Return name, device, kind of step, time of an iteration with its interval, and work per second."""
    main = accounted.job
    parts = [shortened(trace.name, MAX_NAME), *filter(None, [devices_text(trace)])]
    if len(accounted.ranks) > 1:
        parts.append(f"{len(accounted.ranks)} ranks")
    text = ", ".join(parts)
    if main is None:
        return text
    if not accounted.steps_found:
        return f"{text}: steps unknown"
    kinds = [each for each in accounted.iterations if each.rank == main.rank and not each.is_beginning]
    if main.name and len(kinds) > 1:
        text += f", {shortened(main.name, MAX_NAME)} ({100 * main.share:.0f} % of the loop)"
    if main.time.ms is None:
        return f"{text}: the time of an iteration is unknown"
    if trace.run.timeline is False:
        return f"{text}: {ms_text(main.time.ms)} of work on devices in all, without a timeline"
    if main.unit == "window":
        return f"{text}: {ms_text(main.time.ms)} recorded, without steps"
    time = main.time
    assert time.ms is not None
    text += f": {ms_text(time.ms)} an iteration"
    if time.low_ms is not None and time.high_ms is not None:
        text += f" [{ms_text(time.low_ms)} … {ms_text(time.high_ms)}]"
    text += f", {counted(main.count, 'iteration')}"
    if main.at_once >= MIN_AT_ONCE:
        text += f", {main.at_once:.1f} at once on several threads"
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
        return advisor.of(AdviceContext(trace, known_only=True), max_needs=Needs.TRACE).advice
    except XspError:
        return ()


def _worth(pieces: Sequence[Advice]) -> list[Advice]:
    """Return the pieces that belong on the first screen; its sentence on requests has what shortens these."""
    known = [piece for piece in pieces if piece.gain_known and not piece.option and piece.of is None]
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


def _cost(budget: Budget | None) -> str:
    """Return how much longer the whole program took; empty if unknown."""
    if budget is None or budget.program_percent is None or not budget.wall_ns:
        return ""
    return f"; xsp added {budget.added_ns / 1e9:.2g} s ({budget.program_percent:.0f} %)"


def text(screen: FirstScreen, width: int, commands: bool = True, stored: str | None = None) -> str:
    """Return the screen as text of at most `MOST_LINES` lines.

    Args:
        screen: the screen.
        width: width of the terminal.
        commands: whether to end with what to type next.
        stored: where the run was stored, if it was just recorded.
    """
    width = max(MIN_WIDTH, min(MAX_WIDTH, width))
    top = [*phrased(screen.heading, width, 2), ""]
    top += [line for sentence in screen.sentences for line in phrased(sentence, width, 4)]
    graded = f"grade {screen.grade} (A to F: how reliable these figures are){_cost(screen.cost)}"
    place = f"stored in {stored}; " if stored is not None else ""
    ends = _wrapped(f"{place}next: {screen.next}", width, 2 + bool(stored)) if commands else []
    table_rows = 1 + max(len(screen.host), len(screen.device))
    for pieces, what_lines, do_lines, doubt_count, doubt_lines in _LAYOUTS:
        advice = [
            line
            for number_, piece in enumerate(screen.advice[:pieces], 1)
            for line in _piece(number_, piece, width, what_lines, do_lines)
        ]
        doubts = [
            line
            for doubt in (graded, *(f"doubtful, {doubt}" for doubt in screen.doubts[:doubt_count]))
            for line in phrased(doubt, width, doubt_lines)
        ]
        left = MOST_LINES - len(top) - len(advice) - len(doubts) - len(ends) - 2
        if left >= min(1 + LEAST_ROWS, table_rows):
            break
    table = _table(screen, width, left)
    result = [*top, "", *table, *([""] if left > len(table) else []), *advice, *doubts, *ends]
    return "\n".join(plain(line) for line in result)


_LAYOUTS = (
    (MOST_PIECES, 3, 3, MOST_DOUBTS, 2), (MOST_PIECES, 2, 3, MOST_DOUBTS, 2), (MOST_PIECES, 2, 2, MOST_DOUBTS, 1),
    (MOST_PIECES, 2, 2, 1, 1), (MOST_PIECES, 2, 2, 0, 1), (2, 2, 2, 1, 1), (2, 2, 2, 0, 1), (1, 2, 2, 0, 1),
    (1, 1, 1, 0, 1),
)  # fmt: skip
"""Number of pieces of advice, lines of each for what is wrong and for what to do, number of doubts, and lines of each:
the first that leaves room for the table. A piece that is left out is in `xsp advise`."""


def _table(screen: FirstScreen, width: int, rows: int) -> list[str]:
    """Return both sides of the account beside each other."""
    host, device = (_fitting(side, rows - 1) for side in (screen.host, screen.device))
    if not host:
        return []
    if not device:
        return [screen.title, *(_cell(line, min(width, 60)) for line in host)]
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
    figures = f"{ms_text(line.ms):>8} {line.percent:3.0f} %"
    name = shortened(SHORT.get(line.name, line.name), width - len(figures) - 3)
    return f"  {name:{width - len(figures) - 3}} {figures}"


def gain_text(piece: Advice) -> str:
    """Return how much a piece of advice saves: `save at most 3.1 ms (12 %)`."""
    bound = "at most" if piece.at_most else "about"
    return f"save {bound} {ms_text(piece.gain.value)} ({percent_text(piece.of_step_percent)})"


def _piece(place: int, piece: Advice, width: int, what_lines: int, do_lines: int) -> list[str]:
    """Return a piece: what is wrong, then what to do."""
    what = phrased(f"{place}. {gain_text(piece)}: {piece.what}", width, what_lines, "   ")
    do = phrased(f"do: {piece.do.replace('`', '')}", width - 3, do_lines)
    return [*what, *(f"   {line}" for line in do)]


def _wrapped(content: str, width: int, most: int, indent: str = "") -> list[str]:
    """Return a text in at most so many lines; the last one ends with an ellipsis if there is more."""
    return textwrap.wrap(
        content, width, max_lines=most, placeholder=" …", subsequent_indent=indent, break_on_hyphens=False
    )


def phrased(content: str, width: int, most: int, indent: str = "") -> list[str]:
    """Return a text in at most so many lines, without its last clauses or its remarks in brackets if it is longer.

    Only a text whose first clause is longer than that ends with an ellipsis.
    """

    def lines_of(text: str) -> list[str]:
        return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)

    for candidate in _shorter(content):
        lines = lines_of(candidate)
        if len(lines) <= most:
            return lines
    return _wrapped(candidate, width, most, indent)


_CLAUSE_END = re.compile(r"[;:,] | \(")


def _shorter(content: str) -> Iterator[str]:
    """Yield a text, then ever shorter ones: without its last clause, or the last remark in brackets; at the end the
    first clause."""
    yield content
    ends = []
    depth = 0
    for position, character in enumerate(content):
        if depth == 0 and _CLAUSE_END.match(content, position):
            ends.append(position)
        depth = max(0, depth + (character in "([") - (character in ")]"))
    # the number of a piece, its gain and `do:` say nothing by themselves
    first = max((match.end() for match in [_OPENING.match(content)] if match), default=0)
    for end in reversed([end for end in ends if end >= first]):
        yield content[:end].rstrip()


_OPENING = re.compile(r"(\d+\. save [^:]*: |do: |doubtful, [^:]*: )")
