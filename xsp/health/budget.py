"""Whether a run kept its budget, as findings."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.health.finding import Finding, Severity
from xsp.levels import recording
from xsp.run import Budget
from xsp.store.trace import Trace


def findings(trace: Trace) -> Iterator[Finding]:
    """Yield whether each run of a trace kept its budget; nothing for runs without one."""
    for run in trace.run.each_rank:
        budget = run.budget
        if run.finished and budget is not None and budget.asked_percent is not None:
            yield _kept(budget, budget.asked_percent)
            yield from _left_out(budget)


def _kept(budget: Budget, asked: float) -> Finding:
    spent, low, high = budget.overhead_percent, budget.low_percent, budget.high_percent
    if spent is None or low is None or high is None:
        return Finding(Severity.NOTE, "budget", "too few steps ran to tell what profiling cost")
    if budget.given_ns:
        text = (
            f"recording cost {spent:.2f} % of the loop's time [{low:.2f}, {high:.2f}]: {asked:g} %, and "
            f"{budget.given_ns / 1e9:.2g} s for the first steps of each kind; --budget {asked:g}% gives none away"
        )
        return Finding(Severity.NOTE, "budget", text)
    text = f"profiling cost {spent:.2f} % of the loop's time [{low:.2f}, {high:.2f}], {asked:g} % were asked for"
    if spent <= asked:
        return Finding(Severity.GOOD, "budget", text)
    text += ": the first steps of each depth cost more than the run had earned; run more steps, or fewer levels"
    return Finding(Severity.WARNING if low > asked else Severity.NOTE, "budget", text)


def _left_out(budget: Budget) -> Iterator[Finding]:
    for rung, steps in budget.left_out.items():
        why = f"{steps} bare steps earn one of it" if steps else "less deep ones were too dear"
        yield Finding(Severity.NOTE, recording(rung), f"was left out for the budget: {why}")
