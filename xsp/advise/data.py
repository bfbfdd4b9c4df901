"""Time of the loop outside its steps: waiting for the data loader, unless a device's idle time covers it, and other
work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp import account, stats
from xsp.account.entries import BETWEEN, DATA
from xsp.advise import calls
from xsp.advise.advice import Advice, AdviceContext, Place
from xsp.advise.registry import question
from xsp.advise.uneven import exception
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level
from xsp.stats import Interval
from xsp.store.iterations import UNDISTURBED


@question("data", "Does the loop wait for data?", number="Q4")
def data(context: AdviceContext) -> Iterator[Advice]:
    """Time per iteration of waiting for the data loader, from the steps that profiling disturbed least.

    All of it can be gained if loading in the background keeps up with the steps.
    """
    trace = context.required_trace
    iterations = _iterations(context)
    if not iterations.steps:
        if trace.has(Level.KERNEL):
            return  # `device-idle` covers the time that devices wait for data
        if trace.run.imported is not None:
            raise AnalysisError("the trace does not have waits between steps: a run of `xsp run` does")
        raise AnalysisError("no step ran without recording, so waiting between steps is unknown; run more steps")
    interval = stats.mean_interval(iterations.data_ns, iterations.steps)
    mean_ns, iteration_ns = iterations.mean(iterations.data_ns), _iteration_ns(context, iterations)
    if interval is None or not mean_ns:
        return
    mean_ns, interval = _as_accounted(context, DATA, mean_ns, interval)
    has_workers = bool(
        trace.con.execute(
            f"SELECT 1 FROM spans WHERE kind = '{Kind.DATA}' AND contains(name, 'MultiProcessing') LIMIT 1"
        ).fetchall()
    )
    spans = [
        (name, span)
        for name, span in trace.con.execute(
            f"SELECT name, span_id FROM merged WHERE kind = '{Kind.DATA}' ORDER BY start_ns"
        ).fetchall()
    ]
    yield Advice(
        "data",
        f"the loop waits for data: {mean_ns / 1e6:.3g} ms of an iteration of {iteration_ns / 1e6:.3g} ms"
        + exception(context, DATA),
        (Place(None, spans[0][0] if spans else None, tuple(span for _, span in spans[:20]), len(spans) or None),),
        interval.scale(1e-6),
        True,
        100 * mean_ns / iteration_ns,
        (
            f"{sum(iterations.steps)} iterations that ran without recording",
            f"{100 * mean_ns / iteration_ns:.0f} % of an iteration",
        ),
        "give the loader more workers, or less work for each sample"
        if has_workers
        else "DataLoader(..., num_workers=2, persistent_workers=True): load in the background",
        None,
        None if has_workers else "num_workers=2",
        entry=DATA,
    )


BETWEEN_PERCENT = 15.0
"""Minimum percentage of an iteration for work between steps to be worth a line; logging and clearing gradients take
less."""


@question("between", "What does the loop do between its steps?", number="Q4")
def between(context: AdviceContext) -> Iterator[Advice]:
    """Time of an iteration that is neither in a step nor waiting for data: checkpoints, statistics, copies."""
    iterations = _iterations(context)
    interval = stats.mean_interval(iterations.between_ns, iterations.steps)
    if interval is None:
        return
    mean_ns, iteration_ns = iterations.mean(iterations.between_ns), _iteration_ns(context, iterations)
    mean_ns, interval = _as_accounted(context, BETWEEN, mean_ns, interval)
    if mean_ns < calls.LEAST_MS * 1e6 or 100 * mean_ns < BETWEEN_PERCENT * iteration_ns:
        return
    text = (
        f"{mean_ns / 1e6:.3g} ms of an iteration of {iteration_ns / 1e6:.3g} ms pass between steps, "
        "not counting waits for data"
    ) + exception(context, BETWEEN)
    do = (
        "do less often, or in another thread: checkpoints, statistics, copies of the state, printing, "
        "what a framework does at the end of each batch"
    )
    if context.required_trace.has(Level.KERNEL):
        do = (
            "see what it is: copies to and from the device wait for the host unless memory is pinned "
            "(pin_memory=True, non_blocking=True), and so do metrics that are read; " + do
        )
    if _has_handwritten_update(context):
        text += "; no torch optimizer was called, so the update is part of it"
        do = (
            "torch.optim with fused=True, or torch._foreach_add_ and the like, update all parameters in one call; else "
            + do
        )
    yield Advice(
        "between",
        text,
        (),
        interval.scale(1e-6),
        True,
        100 * mean_ns / iteration_ns,
        (f"{sum(iterations.steps)} iterations that ran without recording", *_lines(context, mean_ns / 1e6)),
        do,
        entry=BETWEEN,
    )


MIN_LINE_SHARE = 0.5
"""Minimum share of the time between steps that a line of code must explain to be cited."""


def _lines(context: AdviceContext, between_ms: float) -> Iterator[str]:
    """Yield the line of code that takes most of the time between steps, as seen after recorded steps."""
    for row in context.answers["between"].dicts()[:1]:
        if (row["ms"] or 0.0) >= MIN_LINE_SHARE * between_ms:
            place = ", ".join(filter(None, (row["line"], row["calls"])))
            yield f"{row['ms']:.3g} of {between_ms:.3g} ms at {place}, after a recorded step, mean of {row['gaps']}"


def _has_handwritten_update(context: AdviceContext) -> bool:
    """Return whether a step has a backward pass, but no step of a `torch.optim` optimizer."""
    kinds = {kind for (kind,) in context.required_trace.con.execute("SELECT DISTINCT kind FROM merged").fetchall()}
    return Kind.BACKWARD in kinds and Kind.OPTIMIZER not in kinds


class _Iterations(NamedTuple):
    """The least disturbed iterations, in rows that represent one or several steps; means of the steps of each row."""

    steps: Sequence[int]
    data_ns: Sequence[float]
    between_ns: Sequence[float]
    """Time between steps that is not waiting for data."""

    iteration_ns: Sequence[float]

    def mean(self, values: Sequence[float]) -> float:
        """Return the mean of a column over all steps."""
        return sum(steps * ns for steps, ns in zip(self.steps, values, strict=True)) / sum(self.steps)


def _iteration_ns(context: AdviceContext, iterations: _Iterations) -> float:
    """Return the time of an iteration in the account, in nanoseconds."""
    return 1e6 * context.step.ms.value if context.step is not None else iterations.mean(iterations.iteration_ns)


def _as_accounted(context: AdviceContext, name: str, mean_ns: float, interval: Interval) -> tuple[float, Interval]:
    """Return the time of an entry of the host's account in nanoseconds, and an interval in proportion to it.

    The account may rest on more iterations than the undisturbed ones; without the entry, the arguments are returned.
    """
    job = account.of(context.required_trace).job
    entry = job.host[name] if job is not None else None
    if entry is None or not entry.ms or not mean_ns:
        return mean_ns, interval
    factor = 1e6 * entry.ms / mean_ns
    return factor * mean_ns, interval.scale(factor)


def _iterations(context: AdviceContext) -> _Iterations:
    rows = context.required_trace.con.execute(
        f"""
        WITH {UNDISTURBED}
        SELECT steps, coalesce(data_ns, 0)::DOUBLE,
               (coalesce(before_ns, 0) - least(coalesce(data_ns, 0), coalesce(before_ns, 0)))::DOUBLE,
               iteration_ns::DOUBLE FROM undisturbed
        WHERE kind IS NOT DISTINCT FROM (SELECT any_value(step_kind) FROM alike)
          AND rank = (SELECT any_value(rank) FROM alike) AND iteration_ns > 0
        ORDER BY step
        """
    ).fetchall()
    return _Iterations(*zip(*rows, strict=True)) if rows else _Iterations((), (), (), ())
