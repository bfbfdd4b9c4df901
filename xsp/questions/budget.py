"""The timings that the questions need in addition to those of a bound, and how a budget is spent on them.

The first round times each call as it runs. The next rounds time the calls that take nearly all of the time: with other
numbers of threads; in other variants, together with conversions of layouts; and in other precision. Each round has a
share of the remaining budget, and leaves what it does not need to the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from xsp import bench
from xsp.advise import AdviceContext, provides
from xsp.bench import steps
from xsp.bench.environment import Environment
from xsp.bench.plan import Progress, expected_seconds, missing, overheads, runtime_of
from xsp.bench.spec import AS_RUN, Spec
from xsp.bench.timings import Timings
from xsp.bound import planned, recordedcalls, timed
from xsp.device.contract import Device
from xsp.graph.node import Graph
from xsp.processes import cores
from xsp.questions import layouts
from xsp.questions.timedcalls import threads_of

HEAVY_SHARE = 0.98
"""Share of the expected time covered by heavy calls; other calls are only timed as they run."""

SHARES = (0.5, 0.4, 0.7, 1.0)
"""Share of the remaining budget for each round."""

FEW_CORES = 4
"""Number of cores up to which every number of threads is timed; with more cores, only powers of two and all cores."""

Pairs = list[tuple[Spec, int]]


@provides("timings")
def timings(context: AdviceContext) -> Timings:
    """Return the timings of the requested folder, after taking missing timings if there is a budget.

    Raises:
        BenchError: the timings are not available.
    """
    settings, target = context.settings, context.part("target")
    stored: Timings | None = target.stored
    if stored is None:
        stored = Timings.open(settings.get("timings"), like=settings.get("like"))
    seconds = settings.get("fill")
    is_taken_here = target.device is not None or not recordedcalls.is_foreign(context.trace)
    if seconds and timed.can_time_here(context.graph) and is_taken_here:
        show: Progress = settings.get("progress") or (lambda name, done, total: None)
        step = None if context.trace is not None else planned.model_of(context.source, settings)
        fill(context.graph, stored, threads_of(context), float(seconds), show, target.device, step)
    return stored


def fill(
    graph: Graph,
    stored: Timings,
    threads: int,
    seconds: float,
    progress: Progress = lambda name, done, total: None,
    device: Device | None = None,
    step: tuple[str, dict[str, Any]] | None = None,
) -> None:
    """Take missing timings that the questions need, for at most `seconds`.

    Args:
        graph: the graph of a step.
        stored: gets the timings.
        threads: threads of the step.
        seconds: the budget.
        progress: called while timings are taken.
        device: the accelerator of the timings; default: the processor.
        step: name and settings of the model, whose whole step is timed on an accelerator.
    """
    deadline = monotonic() + seconds
    available_cores = cores() if device is None else 1
    for pairs, share in zip(rounds(graph, threads, available_cores, stored.environment, step), SHARES, strict=True):
        remaining = (deadline - monotonic()) * share
        if remaining > 0 and missing(pairs, stored):
            bench.fill(pairs, stored, remaining, progress, device=device)


def rounds(
    graph: Graph,
    threads: int,
    cores: int,
    environment: Environment | None = None,
    step: tuple[str, dict[str, Any]] | None = None,
) -> tuple[Pairs, ...]:
    """Return the rounds of timings, the most needed first: as run; by threads; other variants; other precision.

    On an accelerator, the whole step of a model is among the first.
    """
    from xsp.bench.variants import PRECISIONS, VARIANTS

    runtime = runtime_of(graph)
    as_run = bench.specs(graph, threads=threads, runtime=runtime, environment=environment)
    heavy = {spec.block.work_key for spec, _ in heaviest(as_run)}

    def heavy_pairs(count: int, variants: Sequence[str] = (AS_RUN,)) -> Pairs:
        pairs = bench.specs(graph, threads=count, variants=variants, runtime=runtime, environment=environment)
        # without timings in both layouts, even a small call would force conversions around it
        return [pair for pair in pairs if pair[0].block.work_key in heavy or pair[0].variant in layouts.VARIANTS]

    if runtime != "torch":
        return as_run, [], [], []
    by_threads = [pair for count in thread_counts(cores) if count != threads for pair in heavy_pairs(count)]
    reference = min(threads, cores)
    conversions = [(spec, 1) for spec in layouts.conversions(graph, reference, environment)]
    on_device = environment is not None and environment.device is not None
    whole = (steps.specs(graph, *step) if step is not None else []) if on_device else overheads(threads)
    return (
        [*as_run, *((spec, 1) for spec in whole)],
        by_threads,
        [*heavy_pairs(reference, tuple(VARIANTS)), *conversions],
        heavy_pairs(reference, tuple(PRECISIONS)),
    )


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads to try."""
    if cores <= FEW_CORES:
        return list(range(1, cores + 1))
    return sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power <= cores), cores})


def heaviest(pairs: Pairs) -> Pairs:
    """Return the specs that take nearly all of the expected time, largest first."""
    ordered = sorted(pairs, key=lambda pair: -expected_seconds(*pair))
    target, total = HEAVY_SHARE * sum(expected_seconds(*pair) for pair in ordered), 0.0
    selected = []
    for pair in ordered:
        if total >= target:
            break
        total += expected_seconds(*pair)
        selected.append(pair)
    return selected
