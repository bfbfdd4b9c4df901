"""The conclusion of a comparison in sentences: what changed, what was detectable, and which command to run next."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.comparison import causes
from xsp.comparison.evidence import (
    FASTER,
    FASTER_HERE,
    NEGLIGIBLE,
    NO_EVIDENCE,
    SLOWER,
    SLOWER_HERE,
    START_SPREAD,
    USUAL_TURNS,
)
from xsp.comparison.rows import Comparison

MORE_RUNS = (
    f"xsp compare --turns {USUAL_TURNS} 'python before.py' 'python after.py' runs both in turns until the result is "
    "clear; xsp compare A1 A2 A3 --with B1 B2 B3 takes several runs per side"
)


def conclusion(comparison: Comparison) -> list[str]:
    """Return the sentences, most important first: the change and its causes, its certainty, the details."""
    step = comparison.step
    sentences = [_change(comparison), _certainty(comparison)]
    if comparison.has_same_work:
        sentences += _other_devices(comparison)
        sentences += [*causes.on_device(comparison), *causes.layers(comparison)]
    if _is_pair(comparison):
        detectable = comparison.step.detectable_percent
        limit = f", so no change below {detectable:.0f} % is certain" if detectable is not None else ""
        sentences += [
            "With one run per side, a difference between the programs cannot be separated from one between two starts "
            f"of the same program: starts may differ by {100 * START_SPREAD:.0f} %{limit}. "
            f"To know more: {MORE_RUNS}."
        ]
    elif step.detectable_percent is not None:
        sentences.append(
            f"The smallest change of the step that would have been found with a probability of 80 %: "
            f"{step.detectable_percent:.1f} %."
        )
    return [sentence for sentence in sentences if sentence]


def _other_devices(comparison: Comparison) -> Iterator[str]:
    for difference in comparison.differences:
        if difference.subject == "devices":
            a, b = (" and ".join(dict.fromkeys(side.split(", "))) for side in (difference.a, difference.b))
            if a != b:
                yield f"A ran on {a}, B on {b}."


def _change(comparison: Comparison) -> str:
    """Return the main sentence: the change of a step, and the phases that account for it."""
    total = causes.iteration_or_step(comparison)
    verdict = next((row.verdict for row in comparison.section("loop")), comparison.step.verdict)
    times = causes.both_ms(total.a_ms, total.b_ms)
    change = f"{causes.more_or_less(total.change_ms)} {causes.figure_unit(comparison)} ({times})"
    if not comparison.has_same_work or comparison.step.a_ms is None or comparison.step.b_ms is None:
        return ""
    is_large = abs(total.change_ms) >= NEGLIGIBLE * total.a_ms
    if verdict in causes.CHANGED or (is_large and verdict != NO_EVIDENCE):
        return _joined(change, causes.sentence(causes.phases(comparison), total.change_ms))
    if verdict != NO_EVIDENCE:
        return f"A step takes about the same ({times})."
    certain = causes.certain_phases(comparison)
    if not certain and is_large:
        return (
            f"Undecided: a step takes {causes.more_or_less(total.change_ms)} ({times}), which may be chance"
            f"{_interval(comparison)}."
        )
    if not certain:
        return f"No evidence of change: a step takes about the same ({times})."
    if certain[0].change_ms * total.change_ms > 0 and is_large:
        return _joined(change, causes.sentence(causes.phases(comparison) or certain, total.change_ms))
    cause = causes.sentence(certain[: causes.MAX_PARTS], certain[0].change_ms)
    return f"No evidence that the step changed ({times}); but {cause}."


def _interval(comparison: Comparison) -> str:
    """Return the interval of the change of an iteration, else of a step, in words; empty if it is unknown."""
    row = next(iter(comparison.section("loop")), comparison.step)
    if row.low_percent is None or row.high_percent is None:
        return ""
    return f": the change is between {row.low_percent:+.1f} and {row.high_percent:+.1f} %"


def _joined(change: str, cause: str) -> str:
    return f"{change}: {cause}." if cause else f"{change}."


def _certainty(comparison: Comparison) -> str:
    step = comparison.step
    if None in (step.low_percent, step.high_percent, step.change_percent) or not comparison.has_same_work:
        return f"The step: {step.verdict}."
    interval = f"{step.low_percent:+.1f} to {step.high_percent:+.1f}"
    change = f"{step.change_percent:+.1f} % ({interval}; {_repeats_text(comparison)})"
    return f"The step: {_WORDS.get(step.verdict, step.verdict)}, {change}."


_WORDS = {
    SLOWER: "B is slower than A",
    FASTER: "B is faster than A",
    SLOWER_HERE: "B was slower than A in these two runs",
    FASTER_HERE: "B was faster than A in these two runs",
    NO_EVIDENCE: "no evidence of change as a whole",
}


def _is_pair(comparison: Comparison) -> bool:
    return comparison.repeats.unit == "step"


def _repeats_text(comparison: Comparison) -> str:
    """Return the repeats behind the figures in words."""
    step = comparison.step
    if _is_pair(comparison):
        method = f", by {step.test}" if step.test else ""
        return f"{step.a_steps} steps of A, {step.b_steps} of B{method}"
    spread = [f"{percent:.1f} %" for percent in (step.a_between_percent, step.b_between_percent) if percent is not None]
    runs = f"{comparison.a_runs} runs of A, {comparison.b_runs} of B"
    return f"{runs}, which differ among themselves by {' and '.join(spread)}" if spread else runs
