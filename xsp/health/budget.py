"""Findings on whether a run kept its budget."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.health.finding import Finding, Severity
from xsp.levels import recording
from xsp.run import Budget
from xsp.store.trace import Trace


def findings(trace: Trace) -> Iterator[Finding]:
    """Yield whether each run of a trace kept its budget; nothing for runs without one."""
    for run in trace.run.rank_runs:
        budget = run.budget
        if run.finished and budget is not None and budget.asked_percent is not None:
            yield _compliance(budget, budget.asked_percent)
            for rung, steps in budget.left_out.items():
                reason = f"it allows one in {steps} steps" if steps else "shallower levels already exceed the budget"
                yield Finding(Severity.NOTE, recording(rung), f"was left out because of the budget: {reason}")


def _compliance(budget: Budget, asked_percent: float) -> Finding:
    spent, low, high = budget.overhead_percent, budget.low_percent, budget.high_percent
    if spent is None or low is None or high is None:
        return Finding(Severity.NOTE, "budget", "too few steps ran to measure the overhead of profiling")
    if budget.given_ns:
        text = (
            f"recording added {spent:.2f} % to the loop's own time [{low:.2f}, {high:.2f}]: the budget of "
            f"{asked_percent:g} %, and {budget.given_ns / 1e9:.2g} s for the first steps, from the second that "
            f"profiling may take beyond it; --budget {asked_percent:g}% omits them"
        )
        return Finding(Severity.NOTE, "budget", text)
    text = f"profiling added {spent:.2f} % to the loop's own time [{low:.2f}, {high:.2f}], "
    text += f"the budget is {asked_percent:g} %"
    if spent <= asked_percent:
        return Finding(Severity.GOOD, "budget", text)
    text += (
        ": the first steps of each level set cost more than the budget allowed so far; run more steps or fewer levels"
    )
    return Finding(Severity.WARNING if low > asked_percent else Severity.NOTE, "budget", text)
