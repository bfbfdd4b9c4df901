"""Which timings the questions want beyond what a bound does, and how a budget is spent on them.

First each call as it runs; then, of those calls that make up nearly all of the time, with other numbers of threads, in
other ways, what it costs to convert layouts, and in other precision. Each round has a share of what is left, and what
it does not need goes to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from xsp import bench
from xsp.advise import Asked, provides
from xsp.bench.plan import missing, overheads, runtime_of, worth
from xsp.bench.spec import AS_RUN, OTHER_NUMBERS, Spec
from xsp.bench.timings import Timings
from xsp.bound import seen, timed
from xsp.graph.node import Graph
from xsp.processes import cores
from xsp.questions import layouts
from xsp.questions.timedcalls import threads_of

MOST_OF_TIME = 0.98
"""Share of the expected time: calls beyond it are timed as they run alone."""

SHARES = (0.5, 0.4, 0.7, 1.0)
"""Of what is left of the budget, for each round."""

FEW_CORES = 4
"""Up to so many each number of threads is timed; beyond it powers of two."""

Pairs = list[tuple[Spec, int]]
Progress = Callable[[str, int, int], None]


@provides("timings")
def timings(asked: Asked) -> Timings:
    """Return the timings of the folder that is asked for; those that are missing are taken first if there is a budget.

    Raises:
        BenchError: they cannot be had.
    """
    given = asked.settings
    known = Timings.open(given.get("timings"), like=given.get("like"))
    seconds = given.get("fill")
    if seconds and timed.timed_here(asked.graph) and not seen.is_elsewhere(asked.trace):
        fill(asked.graph, known, threads_of(asked), float(seconds), given.get("progress"))
    return known


def fill(graph: Graph, known: Timings, threads: int, seconds: float, progress: Progress | None = None) -> None:
    """Time what the questions want and has no timing yet, for so many seconds."""
    ends = monotonic() + seconds
    for wanted, share in zip(rounds(graph, threads, cores()), SHARES, strict=True):
        left = (ends - monotonic()) * share
        if left > 0 and missing(wanted, known):
            bench.fill(wanted, known, left, *(() if progress is None else (progress,)))


def rounds(graph: Graph, threads: int, cores: int) -> tuple[Pairs, ...]:
    """Return what is timed, the most needed first: as it runs; by threads; in other ways; in other precision."""
    from xsp.bench.variants import VARIANTS

    runtime = runtime_of(graph)
    as_run = bench.specs(graph, threads=threads, runtime=runtime)
    heavy = {spec.block.work_key for spec, _ in most(as_run)}

    def of(count: int, variants: Sequence[str] = (AS_RUN,)) -> Pairs:
        found = bench.specs(graph, threads=count, variants=variants, runtime=runtime)
        # a call without a layout of its own would have values converted around it, however small it is
        return [pair for pair in found if pair[0].block.work_key in heavy or pair[0].variant in layouts.VARIANTS]

    if runtime != "torch":
        return as_run, [], [], []
    others = [pair for count in thread_counts(cores) if count != threads for pair in of(count)]
    reference = min(threads, cores)
    conversions = [(spec, 1) for spec in layouts.conversions(graph, reference)]
    return (
        [*as_run, *((spec, 1) for spec in overheads(threads))],
        others,
        [*of(reference, tuple(VARIANTS)), *conversions],
        of(reference, tuple(OTHER_NUMBERS)),
    )


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads that are tried."""
    if cores <= FEW_CORES:
        return list(range(1, cores + 1))
    return sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power <= cores), cores})


def most(pairs: Pairs) -> Pairs:
    """Return those specs that make up nearly all of the expected time, largest first."""
    ordered = sorted(pairs, key=lambda pair: -worth(*pair))
    enough, taken = MOST_OF_TIME * sum(worth(*pair) for pair in ordered), 0.0
    found = []
    for pair in ordered:
        if taken >= enough:
            break
        taken += worth(*pair)
        found.append(pair)
    return found
