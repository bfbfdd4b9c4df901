"""Ask all questions, keep the advice that is worth showing, and put the best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xsp import account, frameworks
from xsp.advise import calls, faults, registry
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere, Needs, Step
from xsp.errors import DeviceError, UsageError, XspError, nearest

if TYPE_CHECKING:
    from xsp.store.trace import Trace

BOUND_WEIGHT = 0.5
"""Weight of an upper bound relative to an expected gain when pieces are ordered."""

LEAST_PERCENT = 1.0
"""Minimum percentage of the step that a piece may gain to be worth a line, judged by the upper end of its interval."""


@dataclass(frozen=True)
class AdviceReport:
    """The advice, best first, and the questions that could not be answered."""

    name: str
    step: Step | None
    advice: tuple[Advice, ...]
    answered: tuple[str, ...]
    """Names of the questions that were answered, with or without advice."""

    unanswered: Mapping[str, str]
    """Name of a question → why it could not be answered."""

    left_out: Mapping[str, int]
    """Reason for leaving pieces out (their interval, their size, a change of results) → number of pieces."""

    ideal: tuple[str, ...] = ()
    """Lines that state how far the step is from the fastest installed implementations (Q1); empty where unknown."""

    note: str = ""
    """On which device calls were timed, and how to choose another, where that is not plain; else empty."""

    combined_gain: CombinedGain | None = None
    """Combined gain of the pieces without options, and their order; None if fewer than two pieces report which calls
    they change."""


def of(
    subject: Trace | AdviceContext | str,
    *,
    only: Sequence[str] = (),
    max_needs: Needs = Needs.BOUND,
    same_numbers: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> AdviceReport:
    """Return the advice about a trace, a run, a trace file or a model, the largest gain first.

    Args:
        subject: a trace, the path of a run or of a trace file, or the name of a model.
        only: names of questions; default: all.
        max_needs: ask only questions that need no more than this; `Needs.TRACE`: questions that a trace alone answers.
        same_numbers: leave out advice that changes results.
        settings: see `AdviceContext.settings`.

    Raises:
        UsageError: there is no such question.
        TraceError: there is no such run, or it cannot be read.
        DeviceError: the device on which the calls of a model were to be timed cannot be used.
    """
    context = subject if isinstance(subject, AdviceContext) else context_of(subject, settings, max_needs)
    advice: list[Advice] = []
    answered, unanswered = [], {}
    if only:
        check_names(only)
    for question in [question for name, question in registry.questions(max_needs).items() if not only or name in only]:
        try:
            pieces = [replace(piece, number=question.number) for piece in question(context)]
            if question.shapes and not pieces and (missing := calls.missing_shapes(context)) is not None:
                unanswered[question.name] = missing
                continue
            advice += _with_doubt(pieces, faults.doubt(context)) if question.needs is Needs.BOUND and pieces else pieces
            answered.append(question.name)
        except CoveredElsewhere:
            continue
        except XspError as error:
            if isinstance(error, DeviceError) and context.trace is None:
                raise  # nothing else answers for a model whose calls were to be timed there
            unanswered[question.name] = str(error)
    framework = context.trace.run.framework if context.trace is not None else None
    advice, foreign = _in_words_of(framework, advice)
    selected, left_out = _select_pieces(_one_per_trial(_bounded(context, advice)), same_numbers)
    if foreign and framework is not None:
        left_out[f"need PyTorch, and the program uses {frameworks.TITLES.get(framework, framework)}"] = foreign
    name = context.trace.name if context.trace is not None else context.source or "model"
    specific = {piece.side for piece in selected if not piece.general and piece.gain_known and not piece.option}
    step_ms = context.step.ms.value if context.step is not None else None
    ordered = tuple(sorted(selected, key=lambda piece: _sort_key(piece, specific, step_ms)))
    return AdviceReport(
        name,
        context.step,
        ordered,
        tuple(answered),
        unanswered,
        left_out,
        _ideal(context) if max_needs >= Needs.BOUND and not only else (),
        _note(context) if context.trace is None else "",
        combined_gain([piece for piece in ordered if not piece.option]),
    )


def _in_words_of(framework: str | None, pieces: Sequence[Advice]) -> tuple[list[Advice], int]:
    """Return the pieces in words of the program's framework, and the number of those that only PyTorch's users can
    follow."""
    translated = []
    for piece in pieces:
        texts = [frameworks.in_words_of(framework, text) for text in (piece.do, *piece.why)]
        if None not in texts:
            do, *why = [text for text in texts if text is not None]
            translated.append(replace(piece, do=do, why=tuple(why)))
    return translated, len(pieces) - len(translated)


def _with_doubt(pieces: Sequence[Advice], doubt: str | None) -> list[Advice]:
    """Return pieces based on timings, with `gain_known` False if `doubt` says that timings do not hold for the step."""
    return [piece if doubt is None else replace(piece, gain_known=False, why=(*piece.why, doubt)) for piece in pieces]


def _bounded(context: AdviceContext, pieces: Sequence[Advice]) -> list[Advice]:
    """Return pieces that promise no more than their entry of the account, nor than the other side leaves."""
    main = account.of(context.trace).job if context.trace is not None else None
    step = context.step
    if main is None or step is None or not main.time.ms:
        return list(pieces)
    bounded = []
    for piece in pieces:
        if piece.of is not None:
            bounded.append(piece)
            continue
        most_ms = main.bound_ms(piece.side, piece.gain.value)
        side = main.host if piece.side == "host" else main.device
        entry = side[piece.entry] if side is not None and piece.entry is not None else None
        if entry is not None and entry.ms is not None:
            most_ms = min(most_ms, entry.ms)
        gain = piece.gain.limit(most_ms) if most_ms < piece.gain.value else piece.gain
        percent = min(piece.of_step_percent, 100 * gain.value / step.ms.value)  # a question may have limited its gain
        bounded.append(replace(piece, gain=gain, of_step_percent=percent))
    return bounded


def _ideal(context: AdviceContext) -> tuple[str, ...]:
    try:
        return tuple(context.part("ideal"))
    except XspError:
        return ()  # the questions that need a bound report why there is none


def _note(context: AdviceContext) -> str:
    try:
        return str(context.part("note"))
    except XspError:
        return ""  # the questions that need timings report why there are none


def context_of(
    subject: Any, settings: Mapping[str, Any] | None = None, max_needs: Needs = Needs.BOUND
) -> AdviceContext:
    """Return the subject: a loaded trace, or a run, a trace file or a model given by path or name.

    Args:
        subject: as in `of`.
        settings: see `AdviceContext.settings`.
        max_needs: what the questions that will be asked need at most; providers are loaded if it is more than a trace.

    Raises:
        TraceError: there is no such run, or it cannot be read.
        XspError: there is no such model, or no such device.
    """
    registry.questions(Needs.BOUND if isinstance(subject, str) else max_needs)  # a model needs the graph's provider
    options = settings or {}
    if not isinstance(subject, str):
        return _checked(AdviceContext(subject, None, options, registry.PROVIDERS))
    from xsp.ingest.load import load

    try:
        trace = load(subject)
    except XspError as error:
        context = AdviceContext(None, subject, options, registry.PROVIDERS)
        if "graph" not in registry.PROVIDERS or (
            _exists(subject) and not subject.endswith((".onnx", ".pt2", ".json", ".json.gz", ".py"))
        ):
            raise
        _checked(context)
        try:
            context.part("graph")
        except XspError as graph_error:
            if subject.endswith(".json.gz"):  # a trace, more often than a graph
                raise
            raise graph_error from error
        return context
    return _checked(AdviceContext(trace, subject, options, registry.PROVIDERS))


def _checked(context: AdviceContext) -> AdviceContext:
    """Return a context whose --device, if there is one, can be used.

    Raises:
        XspError: there is no such device, or the trace ran on another one.
    """
    if context.settings.get("device") is not None and "target" in context.providers:
        context.part("target")
    return context


def _exists(source: str) -> bool:
    from pathlib import Path

    return Path(source).expanduser().exists()


def check_names(only: Sequence[str]) -> None:
    """Refuse names of questions that do not exist.

    Raises:
        UsageError: there is no such question.
    """
    questions = registry.questions()
    for name in only:
        if name not in questions:
            hint = nearest(name, questions) or f"; there are {', '.join(questions)}"
            raise UsageError(f"there is no question {name!r}{hint}")


def _one_per_trial(pieces: Sequence[Advice]) -> list[Advice]:
    """Return the pieces with each trial advised only once: by an expectation, else by the smaller bound.

    A bound is not shown beside an expectation of another value of the same setting (`threads=1` and `threads=2`).
    """
    best: dict[str, Advice] = {}
    for piece in pieces:
        if piece.trial is not None:
            current = best.get(piece.trial, piece)
            best[piece.trial] = min(
                current,
                piece,
                key=lambda candidate: (candidate.at_most, candidate.gain.value if candidate.at_most else 0),
            )
    expected = {_setting(piece) for piece in pieces if not piece.at_most}
    return [
        piece
        for piece in pieces
        if piece.trial is None or (best[piece.trial] is piece and not (piece.at_most and _setting(piece) in expected))
    ]


def _select_pieces(pieces: Sequence[Advice], same_numbers: bool) -> tuple[list[Advice], dict[str, int]]:
    selected, left_out = [], {"may gain nothing": 0, f"gain less than {LEAST_PERCENT:g} %": 0, "change results": 0}
    reasons = list(left_out)
    for piece in pieces:
        if piece.gain.may_be_zero:
            left_out[reasons[0]] += 1
        elif piece.of_step_percent * piece.gain.high < LEAST_PERCENT * piece.gain.value:
            left_out[reasons[1]] += 1
        elif same_numbers and piece.changes_numbers is not None:
            left_out[reasons[2]] += 1
        else:
            selected.append(piece)
    return selected, {name: count for name, count in left_out.items() if count}


def _setting(piece: Advice) -> str | None:
    """Return the name of the setting that a piece changes, without the value."""
    return None if piece.trial is None else piece.trial.partition("=")[0]


def _sort_key(
    piece: Advice, specific: AbstractSet[str], step_ms: float | None
) -> tuple[bool, bool, bool, float, str, str]:
    """Return the sort key of a piece: options last, before them pieces without a known gain, before these the general
    remedy for a side with specific ones; then by gain, where a bound counts less than an expectation. What shortens
    requests counts by its share of them, as that of a step."""
    gain_ms = piece.gain.value if piece.of is None or step_ms is None else step_ms * piece.of_step_percent / 100
    worth = gain_ms * (BOUND_WEIGHT if piece.at_most else 1.0)
    is_later = piece.general and piece.side in specific
    return piece.option, not piece.gain_known, is_later, -worth, piece.question, piece.what


# --- what several pieces gain together --------------------------------------------------------------------------------
# The combined gain of several pieces of advice: a call that several of them change is not counted twice.
#
# The time of a call with two changes was not measured. The call is assumed to gain as much as the better of the
# changes gains alone, and to lose what any of them costs it, so that the sum is too small rather than too large.

LEAST_SHARE = 0.05
"""Minimum share of its own gain that a piece has to add to the pieces before it to be part of the plan."""


@dataclass(frozen=True)
class AddedGain:
    """A piece at its place in the plan."""

    piece: Advice
    added_ms: float
    """Gain in milliseconds beyond that of the pieces before it."""


@dataclass(frozen=True)
class CombinedGain:
    """Pieces in the order in which they are worth doing, and their combined gain."""

    parts: tuple[AddedGain, ...]
    unknown_count: int
    """Number of pieces that are left out because they do not report which calls they change."""

    @property
    def ms(self) -> float:
        """Combined gain of all pieces, in milliseconds per step."""
        return math.fsum(part.added_ms for part in self.parts)


def combined_gain(advice: Sequence[Advice]) -> CombinedGain | None:
    """Return the order in which pieces are worth doing; None if fewer than two report which calls they change."""
    candidates = [piece for piece in advice if piece.by_call]
    selected: list[Advice] = []
    parts: list[AddedGain] = []
    remaining = list(candidates)
    total = 0.0
    while remaining:
        best = max(remaining, key=lambda piece: _gain([*selected, piece]))
        gain = _gain([*selected, best]) - total
        remaining.remove(best)
        if gain > LEAST_SHARE * best.gain.value:
            selected.append(best)
            total += gain
            parts.append(AddedGain(best, gain))
    return CombinedGain(tuple(parts), len(advice) - len(candidates)) if len(candidates) > 1 and parts else None


def _gain(pieces: Sequence[Advice]) -> float:
    """Return the combined gain of pieces, in milliseconds per step."""
    calls = {call for piece in pieces for call in piece.by_call}
    total = -math.fsum(piece.once_ms for piece in pieces)
    for call in calls:
        gains = [piece.by_call.get(call, 0.0) for piece in pieces]
        total += max(0.0, *gains) + math.fsum(min(0.0, gain) for gain in gains)
    return total
