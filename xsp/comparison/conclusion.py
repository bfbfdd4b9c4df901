"""The conclusion of a comparison in sentences: what changed, what was detectable, and which command to run next."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.comparison import causes
from xsp.comparison.evidence import FASTER, FASTER_HERE, NEGLIGIBLE, NO_EVIDENCE, SLOWER, SLOWER_HERE, STARTS, USUAL
from xsp.comparison.rows import OTHER_WORK, Comparison

MORE_RUNS = (
    f"xsp compare --turns {USUAL} 'python before.py' 'python after.py' runs both in turns until the result is clear; "
    "xsp compare A1 A2 A3 --with B1 B2 B3 takes several runs per side"
)


def conclusion(found: Comparison) -> list[str]:
    """Return the sentences, most important first: the change and its causes, its certainty, the details."""
    step = found.step
    sentences = [_change(found), _how_sure(found)]
    if step.verdict != OTHER_WORK:
        sentences += _other_devices(found)
        sentences += [*causes.on_device(found), *causes.layers(found)]
    if _is_a_pair(found):
        sentences += _of_a_pair(found)
    elif step.detectable_percent is not None:
        sentences.append(
            f"The smallest change of the step that would have been found with a probability of 80 %: "
            f"{step.detectable_percent:.1f} %."
        )
    return [sentence for sentence in sentences if sentence]


def _other_devices(found: Comparison) -> Iterator[str]:
    for difference in found.differences:
        if difference.subject == "devices":
            a, b = (" and ".join(dict.fromkeys(side.split(", "))) for side in (difference.a, difference.b))
            if a != b:
                yield f"A ran on {a}, B on {b}."


def _change(found: Comparison) -> str:
    """Return the main sentence: the change of a step, and the phases that account for it."""
    whole = causes.whole(found)
    verdict = next((row.verdict for row in found.section("loop")), found.step.verdict)
    times = causes.both_ms(whole.a_ms, whole.b_ms)
    change = f"{causes.more_or_less(whole.change_ms)} {causes.of_what(found)} ({times})"
    if verdict == OTHER_WORK or found.step.a_ms is None or found.step.b_ms is None:
        return ""
    changed = abs(whole.change_ms) >= NEGLIGIBLE * whole.a_ms
    if verdict in _CHANGED or (changed and verdict != NO_EVIDENCE):
        return _joined(change, causes.sentence(causes.phases(found), whole.change_ms))
    if verdict != NO_EVIDENCE:
        return f"A step takes about the same ({times})."
    certain = causes.certain_phases(found)
    if not certain:
        return f"No evidence of change: a step takes about the same ({times})."
    if certain[0].change_ms * whole.change_ms > 0 and changed:
        return _joined(change, causes.sentence(causes.phases(found) or certain, whole.change_ms))
    cause = causes.sentence(certain[: causes.MOST], certain[0].change_ms)
    return f"No evidence that the step changed ({times}); but {cause}."


def _joined(change: str, why: str) -> str:
    return f"{change}: {why}." if why else f"{change}."


def _how_sure(found: Comparison) -> str:
    step = found.step
    if None in (step.low_percent, step.high_percent, step.change_percent) or step.verdict == OTHER_WORK:
        return f"The step: {step.verdict}."
    change = f"{step.change_percent:+.1f} % ({step.low_percent:+.1f} to {step.high_percent:+.1f}; {_of(found)})"
    return f"The step: {_WORDS.get(step.verdict, step.verdict)}, {change}."


_CHANGED = (SLOWER, FASTER, SLOWER_HERE, FASTER_HERE)
_WORDS = {
    SLOWER: "B is slower than A",
    FASTER: "B is faster than A",
    SLOWER_HERE: "B was slower than A in these two runs",
    FASTER_HERE: "B was faster than A in these two runs",
    NO_EVIDENCE: "no evidence of change as a whole",
}


def _of_a_pair(found: Comparison) -> list[str]:
    detectable = found.step.detectable_percent
    limit = f", so no change below {detectable:.0f} % is certain" if detectable is not None else ""
    return [
        "With one run per side, a difference between the programs cannot be separated from one between two starts of "
        f"the same program: starts may differ by {100 * STARTS:.0f} %{limit}. "
        f"To know more: {MORE_RUNS}."
    ]


def _is_a_pair(found: Comparison) -> bool:
    return found.repeats.unit == "step"


def _of(found: Comparison) -> str:
    """Return the repeats behind the figures in words."""
    step = found.step
    if _is_a_pair(found):
        method = f", by {step.test}" if step.test else ""
        return f"{step.a_steps} steps of A, {step.b_steps} of B{method}"
    spread = [f"{percent:.1f} %" for percent in (step.a_between_percent, step.b_between_percent) if percent is not None]
    runs = f"{found.a_runs} runs of A, {found.b_runs} of B"
    return f"{runs}, which differ among themselves by {' and '.join(spread)}" if spread else runs
