"""Iterations that differ: a few that take far longer than the others, and iterations that grow."""

from __future__ import annotations

from collections.abc import Iterator

from xsp import account
from xsp.account import entries as names
from xsp.account.entries import SlowIterations
from xsp.account.sentences import ordinal
from xsp.advise.advice import Advice, AdviceContext, Place
from xsp.advise.registry import question
from xsp.stats import Interval
from xsp.texts import ms_text

LEAST_PERCENT = 4.0
"""Least percentage of the mean iteration that slow iterations add."""


@question("uneven", "Do some iterations take far longer than the others?", number="Q4")
def uneven(context: AdviceContext) -> Iterator[Advice]:
    """What steps take longer in slow iterations than in the others, on the mean of all; at most that can be saved.

    Slow waits for data, and slow work between steps, are stated by the questions `data` and `between`.
    """
    main = account.of(context.required_trace).job
    if main is None or main.course is None or not main.time.ms:
        return
    for slow in main.course.slow:
        ms = slow.cost.ms or 0.0
        if 100 * ms < LEAST_PERCENT * main.time.ms or slow.part in (names.DATA, names.BETWEEN):
            continue
        where = f"{slow.part}{f', in {slow.cost.place}' if slow.cost.place else ''}"
        # other programs of the machine delay steps, too; they have no period, and no place in the program
        is_programs = slow.period is not None or slow.cost.place is not None
        yield Advice(
            "uneven",
            f"{_times(slow)}, in {where}",
            (Place(slow.cost.place or slow.part, None, (), slow.count),),
            Interval(ms / 2, ms, ms) if is_programs else Interval(ms / 10, ms / 2, ms),
            True,
            100 * ms / main.time.ms,
            (f"iterations {', '.join(map(str, slow.steps[:5]))}{' …' * (len(slow.steps) > 5)}",),
            ("" if is_programs else "run it again on an otherwise idle machine; if they stay, ")
            + f"see what differs in {where}: longer inputs (sort them by length), a cache that fills, "
            "code compiled anew",
        )


def exception(context: AdviceContext, part: str) -> str:
    """Return the clause that slow iterations are most of a part of an iteration, with their period; empty if not."""
    main = account.of(context.required_trace).job
    slow = next((each for each in main.course.slow if each.part == part), None) if main and main.course else None
    entry = main.host[part] if main is not None else None
    if slow is None or entry is None or (slow.cost.ms or 0.0) < (entry.ms or 0.0) / 2:
        return ""
    return f": {_times(slow)}{f' ({slow.cost.place})' if slow.cost.place else ''}"


def _times(slow: SlowIterations) -> str:
    which = f"{slow.count:,} of {slow.of:,} iterations take"
    if slow.period:
        which = f"each {ordinal(slow.period)} iteration takes"
    return f"{which} {ms_text(slow.slow_ms)} instead of {ms_text(slow.usual_ms)}"
