"""Page faults: memory that the allocator returns to the system in each step, and requests again page by page.

The system fills each page with zeros when it is first touched. glibc returns memory as soon as enough of it is free at
the end of the heap, so a step with large tensors may fault in all of its memory again: up to half of the step time was
seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xsp.account import pagefaults
from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext, CoveredElsewhere
from xsp.advise.backward import unused_recordings
from xsp.advise.registry import question
from xsp.analyses.loop import scope_names
from xsp.errors import AnalysisError
from xsp.schema import Level
from xsp.stats import Interval

LEAST_FAULTS = 200
"""Minimum number of page faults in an iteration for them not to be accidental."""

LEAST_PERCENT = 2.0
"""Minimum percentage of the step for page faults to be worth a line."""

DOUBT_PERCENT = 20.0
"""Percentage of the step above which timings of single calls say little about the step."""

FREEING_US = 0.2
"""Microseconds to return a page to the system; also measured on a virtual machine."""


@dataclass(frozen=True)
class Usage:
    """Page faults and system time of the program in an iteration."""

    faults: float
    system_ms: float


def usage_of(context: AdviceContext) -> Usage | None:
    """Return page faults and system time of an iteration; None where the run did not count them."""
    trace = context.required_trace
    for row in context.answers["loop"].dicts():
        if row["kind"] == trace.kind and row["scope"] in scope_names(trace.rank) and row["page_faults"] is not None:
            return Usage(row["page_faults"], row["system_ms"])
    return None


def _gain(context: AdviceContext, usage: Usage) -> Interval:
    """Return the milliseconds of a step that page faults take."""
    cost = pagefaults.cost(usage.faults, usage.system_ms, pagefaults.threads(context.required_trace.run.machine))
    return cost.limit(calls.step_ms(context))


@dataclass(frozen=True)
class Cost:
    """What page faults take of a step."""

    gain: Interval
    text: str


def worth_a_line(context: AdviceContext) -> Cost | None:
    """Return what page faults take of a step; None if they are few, take little of it, or were not counted."""
    usage = usage_of(context)
    if usage is None or usage.faults < LEAST_FAULTS:
        return None
    gain, step_ms = _gain(context, usage), calls.step_ms(context)
    if 100 * gain.value < LEAST_PERCENT * step_ms:
        return None
    return Cost(
        gain,
        f"the system takes {usage.system_ms:.3g} ms for the program's threads in an iteration of {step_ms:.3g} ms",
    )


def doubt(context: AdviceContext) -> str | None:
    """Return the reason why timings of single calls do not hold for the step if page faults take much of it, else None.

    A call that runs alone requests and returns memory in another pattern than in the step. A layout for which timings
    promised 74 % was seen to gain 5 %; without page faults it gained 35 % where 39 % were promised.
    """
    if context.trace is None or context.trace.has(Level.KERNEL):
        return None
    usage = usage_of(context)
    if usage is None or 100 * _gain(context, usage).value < DOUBT_PERCENT * calls.step_ms(context):
        return None
    return (
        "page faults take much of the step, and occur in another pattern when single calls are timed: keep memory "
        "first (page-faults), then record and time again"
    )


@question("page-faults", "Is memory returned to the system and requested again in each step?", number="Q4")
def page_faults(context: AdviceContext) -> Iterator[Advice]:
    """Page faults of an iteration, and the system time for them, from the steps that profiling disturbed least."""
    trace = context.required_trace
    if trace.has(Level.KERNEL):
        raise CoveredElsewhere("the trace has device work: see `device-idle` for time on the host")
    if trace.run.imported is not None:
        raise CoveredElsewhere("other profilers do not count page faults")
    usage = usage_of(context)
    if usage is None:
        raise AnalysisError(
            "the run did not count page faults: an older xsp made it, or fewer than two steps were unrecorded"
        )
    cost = worth_a_line(context)
    if cost is None:
        return
    threads, on_linux = pagefaults.threads(trace.run.machine), (trace.run.machine.system or "").startswith("Linux")
    do = (
        "MALLOC_TOP_PAD_=1073741824 MALLOC_MMAP_MAX_=0 python …: glibc then keeps up to 1 GiB of free memory; or "
        "LD_PRELOAD of jemalloc or tcmalloc"
        if on_linux
        else "keep tensors and write into them (out=), or use an allocator that keeps free memory"
    )
    is_for_gradients = bool(unused_recordings(context))
    yield Advice(
        "page-faults",
        f"memory is returned to the system and requested again: {usage.faults:,.0f} page faults in a step",
        (),
        cost.gain,
        is_for_gradients,
        100 * cost.gain.value / calls.step_ms(context),
        (
            cost.text,
            f"{threads} thread{'s' * (threads > 1)} may have waited for it in turn or at the same time",
            "pages of files that are read are included: these remain",
        ),
        f"first torch.inference_mode(), which keeps no results for gradients; if faults remain, {do}"
        if is_for_gradients
        else do,
        trial="malloc=keep" if on_linux else None,
    )
