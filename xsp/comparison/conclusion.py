"""What a comparison says of the step, in sentences: what changed, what could have been seen, and what to type next."""

from __future__ import annotations

from xsp.comparison.evidence import FASTER, FASTER_HERE, NO_EVIDENCE, SLOWER, SLOWER_HERE, STARTS
from xsp.comparison.rows import Comparison

MORE_RUNS = (
    "xsp compare --turns 10 'python before.py' 'python after.py' runs both in turns until it is known; "
    "xsp compare A1 A2 A3 --with B1 B2 B3 takes several runs a side"
)


def conclusion(found: Comparison) -> list[str]:
    """Return the sentences, the most important one first."""
    step = found.step
    if step.low_percent is None or step.high_percent is None or step.change_percent is None:
        return [f"The step: {step.verdict}.", *([f"To know more: {MORE_RUNS}."] if _is_a_pair(found) else [])]
    change = f"{step.change_percent:+.1f} % ({step.low_percent:+.1f} to {step.high_percent:+.1f}; {_of(found)})"
    said = [f"The step: {_WORDS.get(step.verdict, step.verdict)}, {change}."]
    if _is_a_pair(found):
        said += _of_a_pair(found)
    elif step.detectable_percent is not None:
        said.append(
            f"The smallest change of the step that would have been seen, four times out of five: "
            f"{step.detectable_percent:.1f} %."
        )
    return said


_WORDS = {
    SLOWER: "B is slower than A",
    FASTER: "B is faster than A",
    SLOWER_HERE: "B was slower than A in these two runs",
    FASTER_HERE: "B was faster than A in these two runs",
    NO_EVIDENCE: "no evidence of change",
}


def _of_a_pair(found: Comparison) -> list[str]:
    seen = found.step.detectable_percent
    return [
        "One run a side cannot tell what differs between two starts of the same program from what differs between "
        f"two programs: two starts may be {100 * STARTS:.0f} % apart"
        + (f", so nothing below {seen:.0f} % can be told for certain." if seen is not None else "."),
        f"To know more: {MORE_RUNS}.",
    ]


def _is_a_pair(found: Comparison) -> bool:
    return found.repeats.unit == "step"


def _of(found: Comparison) -> str:
    """Say what the figures are of."""
    step = found.step
    if _is_a_pair(found):
        return f"{step.a_steps} steps of A, {step.b_steps} of B"
    spread = [f"{each:.1f} %" for each in (step.a_between_percent, step.b_between_percent) if each is not None]
    runs = f"{found.a_runs} runs of A, {found.b_runs} of B"
    return f"{runs}, which differ among themselves by {' and '.join(spread)}" if spread else runs
