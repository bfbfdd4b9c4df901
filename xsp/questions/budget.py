"""The timings that the questions need in addition to those of a bound, and how a budget is spent on them.

The first round times each call as it runs. The next rounds time the calls that take nearly all of the time: with other
numbers of threads; in other variants, together with conversions of layouts; and in other precision. Each round has a
share of the remaining budget, and leaves what it does not need to the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from xsp import bench
from xsp.advise import AdviceContext, provides
from xsp.bench.plan import expected_seconds, missing, overheads, runtime_of
from xsp.bench.spec import AS_RUN, OTHER_PRECISION, Spec
from xsp.bench.timings import Timings
from xsp.bound import recordedcalls, timed
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
Progress = Callable[[str, int, int], None]


@provides("timings")
def timings(context: AdviceContext) -> Timings:
    """Return the timings of the requested folder, after taking missing timings if there is a budget.

    Raises:
        BenchError: the timings are not available.
    """
    settings = context.settings
    stored = Timings.open(settings.get("timings"), like=settings.get("like"))
    seconds = settings.get("fill")
    if seconds and timed.can_time_here(context.graph) and not recordedcalls.is_foreign(context.trace):
        fill(context.graph, stored, threads_of(context), float(seconds), settings.get("progress"))
    return stored


def fill(graph: Graph, stored: Timings, threads: int, seconds: float, progress: Progress | None = None) -> None:
    """Take missing timings that the questions need, for at most `seconds`."""
    deadline = monotonic() + seconds
    for pairs, share in zip(rounds(graph, threads, cores()), SHARES, strict=True):
        remaining = (deadline - monotonic()) * share
        if remaining > 0 and missing(pairs, stored):
            bench.fill(pairs, stored, remaining, *(() if progress is None else (progress,)))


def rounds(graph: Graph, threads: int, cores: int) -> tuple[Pairs, ...]:
    """Return the rounds of timings, the most needed first: as run; by threads; other variants; other precision."""
    from xsp.bench.variants import VARIANTS

    runtime = runtime_of(graph)
    as_run = bench.specs(graph, threads=threads, runtime=runtime)
    heavy = {spec.block.work_key for spec, _ in heaviest(as_run)}

    def heavy_pairs(count: int, variants: Sequence[str] = (AS_RUN,)) -> Pairs:
        pairs = bench.specs(graph, threads=count, variants=variants, runtime=runtime)
        # without timings in both layouts, even a small call would force conversions around it
        return [pair for pair in pairs if pair[0].block.work_key in heavy or pair[0].variant in layouts.VARIANTS]

    if runtime != "torch":
        return as_run, [], [], []
    by_threads = [pair for count in thread_counts(cores) if count != threads for pair in heavy_pairs(count)]
    reference = min(threads, cores)
    conversions = [(spec, 1) for spec in layouts.conversions(graph, reference)]
    return (
        [*as_run, *((spec, 1) for spec in overheads(threads))],
        by_threads,
        [*heavy_pairs(reference, tuple(VARIANTS)), *conversions],
        heavy_pairs(reference, tuple(OTHER_PRECISION)),
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
