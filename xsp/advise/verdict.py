"""A summary of a device's trace in three parts: verdict, why, next.

The verdict names what to change first. It follows from the device's time alone: how much of it is idle and for which
cause, how much is communication that nothing hides, and which class of kernel takes how much of the rest. Shares are
reported as shares, and all causes of similar size are named. `xsp.advise.device` contains what to do about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere
from xsp.advise.device import (
    COMMUNICATION,
    COPIES,
    DOMINANT_SHARE,
    IDLE,
    LEAST_PERCENT,
    MOST_PIECES,
    Loss,
    Piece,
    Row,
    duration,
    gap_text,
    idle_time,
    pieces,
)  # fmt: skip
from xsp.advise.registry import question
from xsp.analyses.answers import Answers
from xsp.analyses.fusing import EAGER

LEAST_LOSS_PERCENT = 20.0
"""Minimum percentage of the window for a loss to be the verdict; below it, the verdict names the device's own work."""

SIMILAR_SHARE = 0.5
"""Minimum size relative to the largest loss, or the largest class of work, to be named beside it."""


class Verdict(NamedTuple):
    """A sentence, the reasons and what to do, with the figures that they are based on."""

    verdict: str
    why: list[str]
    next_steps: list[str]
    busy_percent: float
    losses: list[Loss]
    pieces: list[Piece]
    """All pieces of advice; `next_steps` has the first ones as sentences."""


def verdict(answers: Answers) -> Verdict | None:
    """Return the verdict on a trace; None if the trace contains no device work."""
    activity = answers["device-activity"].dicts()
    if not activity or not activity[-1]["window_ms"]:
        return None
    total = activity[-1]  # the sum over all devices
    exposed = [
        _loss(COMMUNICATION, total["exposed_communication_ms"], total),
        _loss(COPIES, total["exposed_copy_ms"], total),
    ]
    losses = sorted([*_idle_losses(answers, total["window_ms"]), *exposed], key=lambda loss: -loss.ms)
    work = _work(answers)
    changes = pieces(answers, total, losses)
    return Verdict(
        _sentence(total, losses, work, len({(row["rank"], row["device"]) for row in activity[:-1]})),
        [*_loss_lines(answers, losses), *_classes(work)],
        [piece.text for piece in changes[:MOST_PIECES]],
        total["busy_percent"],
        losses,
        changes,
    )


def _loss(name: str, ms: float, total: Row) -> Loss:
    return Loss(name, 100 * ms / total["window_ms"], ms)


def _idle_losses(answers: Answers, window_ms: float) -> list[Loss]:
    """Return the idle time by cause, over all devices."""
    sums: dict[str, float] = {}
    for row in answers["idle-causes"].dicts():
        sums[row["cause"]] = sums.get(row["cause"], 0.0) + row["idle_ms"]
    return [Loss(f"{IDLE}{cause}", 100 * ms / window_ms, ms) for cause, ms in sums.items()]


def _work(answers: Answers) -> list[tuple[str, float]]:
    """Return classes of device work with their percent of GPU time, largest first; eager attention is its own class."""
    shares = {row["class"]: row["percent_of_device_time"] for row in answers.classes()}
    for row in answers["attention"].dicts():
        if row["form"] == EAGER:
            shares[row["class"]] -= row["percent_of_device_time"]
            shares[_EAGER_ATTENTION] = shares.get(_EAGER_ATTENTION, 0.0) + row["percent_of_device_time"]
    return sorted(shares.items(), key=lambda item: (-item[1], item[0]))


_EAGER_ATTENTION = "eager attention"


def _sentence(total: Row, losses: Sequence[Loss], work: Sequence[tuple[str, float]], devices: int) -> str:
    """Return a sentence on how busy the device is, and the shares of the largest losses, or of the classes of work."""
    subject = f"The {devices} devices are" if devices > 1 else "The device is"
    busy = f"{subject} busy {total['busy_percent']:.0f} % of the time"
    if losses and losses[0].percent >= LEAST_LOSS_PERCENT:
        largest = [loss for loss in losses if loss.percent >= max(LEAST_PERCENT, SIMILAR_SHARE * losses[0].percent)]
        return f"{busy}. {_join([_loss_text(loss) for loss in largest])}."
    if not work:
        return f"{busy}."
    possessive = "their" if devices > 1 else "its"
    large = [f"{percent:.0f} % is {name}" for name, percent in work[:3] if percent >= SIMILAR_SHARE * work[0][1]]
    return f"{busy}. Of {possessive} work {_join(large)}."


def _loss_text(loss: Loss) -> str:
    name = loss.name.removeprefix(IDLE)
    meaning = _MEANS.get(name)
    return f"{name} {loss.percent:.0f} %" + (f" ({meaning})" if meaning else "")


def _join(parts: Sequence[str]) -> str:
    text = " and ".join(", ".join(parts).rsplit(", ", 1)) if len(parts) > 1 else parts[0]
    return text[:1].upper() + text[1:]


_MEANS = {
    "host-bound": "launches come too late",
    "sync": "the host waits for the device before it launches more",
    "data loading": "the step waits for data",
    "kernel wait": "launched work waits",
    "unknown": "idle, and the trace does not show why",
}


def _loss_lines(answers: Answers, losses: Sequence[Loss]) -> Iterator[str]:
    """Yield a line for each loss of at least `LEAST_PERCENT`, with the gap or call that makes up half of it, if any."""
    for loss in losses:
        if loss.percent < LEAST_PERCENT:
            continue
        text = f"{loss.percent:.0f} % of the time: {loss.name} ({duration(loss.ms)})"
        if loss.name.startswith(IDLE):
            idle = idle_time(answers, loss.name.removeprefix(IDLE))
            if idle.longest is not None:
                text += f": {gap_text(idle.longest)}"
            elif idle.call is not None and idle.call_ms >= DOMINANT_SHARE * idle.ms:
                text += f": {100 * idle.call_ms / idle.ms:.0f} % of it in {idle.call}"
        yield text


def _classes(work: Sequence[tuple[str, float]]) -> list[str]:
    shares = [f"{name} {percent:.0f} %" for name, percent in work[:4]]
    return [f"device work, of GPU time: {', '.join(shares)}"] if shares else []


# --- questions ---------------------------------------------------------------------------------------------------
# The pieces of a verdict as advice: computed once, and divided among the questions.


def _answer(name: str) -> Callable[[AdviceContext], Iterator[Advice]]:
    def answer(context: AdviceContext) -> Iterator[Advice]:
        trace = context.required_trace
        result = context.cached("verdict", lambda: verdict(context.answers))
        if result is None:
            raise CoveredElsewhere(f"{trace.name!r} has no device work")
        step = context.step
        if step is not None:
            yield from (piece.advice(step) for piece in result.pieces if piece.question == name)

    answer.__qualname__ = name
    return answer


for _name, _title, _number in (
    ("device-idle", "Why do devices wait?", "Q4"),
    ("device-communication", "Which communication does not overlap with computation?", "Q2"),
    ("device-copies", "Which copies do not overlap with computation?", "Q4"),
    ("device-attention", "Is attention fused?", "Q5"),
    ("device-layout", "Do convolutions change layouts?", "Q3"),
    ("device-fusion", "Which kernels could be fused?", "Q5"),
    ("device-tensor-cores", "Do matrix products use tensor cores?", "Q6"),
    ("device-roof", "Which kernel is furthest from the device's roofline?", "Q3"),
):
    question(_name, _title, number=_number)(_answer(_name))
