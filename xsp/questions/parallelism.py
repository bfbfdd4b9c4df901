"""Q2: are the cores used well? The number of threads, and independent branches that run one after the other.

A number of threads applies to all calls of a process, so its gain is that of all calls together, including small calls
that become slower. For branches, the gain is that of a feasible schedule, not that of unlimited cores: each call has
one thread, as many calls run at once as there are cores, and `CROSSING_NS` is added wherever a call waits for a call on
another core. The schedule must beat the best number of threads for one call after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xsp.advise import Advice, Asked, Needs, question
from xsp.bench.spec import Timing
from xsp.errors import AnalysisError
from xsp.graph import paths, schedule
from xsp.graph.node import KnownBy, Phase, Why
from xsp.questions.budget import thread_counts
from xsp.questions.timedcalls import ALLOWANCE, FILL, Difference, Ground, difference, milliseconds

KNOWN = 0.5
"""Minimum share of the calls' time, as the step runs, that must also be timed with the other number of threads."""

CROSSING_NS = 50_000.0
"""Approximate nanoseconds for a Python thread to hand work to another thread and to be woken by it."""

LEAST_SHARE = 0.05
"""Minimum gain of branches as a share of the step: they are more work to write than a setting."""


@dataclass(frozen=True)
class Threads:
    """The gain of another number of threads."""

    count: int
    gain: Difference
    nodes: tuple[int, ...]
    gains: dict[int, float]
    ns: dict[int, float]
    """Number of threads → total nanoseconds of the same calls."""

    missing: int


@question("thread-count", "Is the number of threads optimal?", number="Q2", needs=Needs.BOUND)
def thread_count(asked: Asked) -> Iterator[Advice]:
    """All calls with each number of threads up to the number of cores, compared with the step's number of threads."""
    yield from of_threads(asked.part("ground"))


@question("parallelism", "Do independent branches run at the same time?", number="Q2", needs=Needs.BOUND)
def parallelism(asked: Asked) -> Iterator[Advice]:
    """A schedule of the graph with one call per core, against one call after the other, and whether calls overlap."""
    ground: Ground = asked.part("ground")
    if ground.graph.known_by is KnownBy.ORDER:
        raise AnalysisError(
            "a run has the order of its calls and not their data flow, so independent calls are unknown; "
            "ask about the model: xsp advise path/to/file.py:function"
        )
    yield from of_branches(ground)


# --- threads ------------------------------------------------------------------------------------------------


def of_threads(ground: Ground) -> Iterator[Advice]:
    """Yield advice on the number of threads if another number is better."""
    found = best_threads(ground)
    if found is None or not found.gain.sure:
        return
    gain, percent = ground.gain(found.gain, found.nodes)
    why = [
        f"{len(found.nodes)} calls in isolation take in total "
        + ", ".join(f"{ns / 1e6:.3g} ms with {count}" for count, ns in sorted(found.ns.items())),
        f"the process can use {ground.cores} cores",
    ]
    if found.missing:
        why.append(f"{found.missing} calls are not timed with both, and keep their time")
    yield Advice(
        "thread-count",
        _wrong(ground.threads, found.count, ground.cores),
        ground.places(found.gains),
        gain,
        False,
        percent,
        tuple(why),
        f"torch.set_num_threads({found.count}), or OMP_NUM_THREADS={found.count} before the program starts",
        trial=f"threads={found.count}",
        by_call=milliseconds(found.gains),
    )


def best_threads(ground: Ground) -> Threads | None:
    """Return the number of threads with the largest gain, among those with enough timed calls, or None."""
    now = {node: found for node in ground.computing if (found := ground.timing(node, threads=ground.threads))}
    every = math.fsum(each.trimmed_ns or 0.0 for each in now.values())
    counts = []
    for count in thread_counts(ground.cores):
        if count == ground.threads:
            continue
        then = {node: other for node in now if (other := ground.timing(node, threads=count))}
        known = math.fsum(now[node].trimmed_ns or 0.0 for node in then)
        if then and known >= KNOWN * every:
            counts.append(_with(ground, count, now, then))
    return max(counts, key=lambda each: each.gain.ns, default=None)


def _with(ground: Ground, count: int, now: dict[int, Timing], then: dict[int, Timing]) -> Threads:
    before = [now[node] for node in then]
    sums = {
        ground.threads: math.fsum(each.trimmed_ns or 0.0 for each in before),
        count: math.fsum(each.trimmed_ns or 0.0 for each in then.values()),
    }
    gains = {node: (now[node].trimmed_ns or 0.0) - (other.trimmed_ns or 0.0) for node, other in then.items()}
    missing = len(ground.computing) - len(then)
    return Threads(count, difference(before, then.values()), tuple(then), gains, sums, missing)


def _wrong(now: int, then: int, cores: int) -> str:
    threads = f"{now} threads" if now != 1 else "one thread"
    if now > cores:
        return f"{threads} share {cores} {'cores' if cores != 1 else 'core'}"
    if now < then:
        return f"{threads}, although {then} of {cores} cores help"
    return f"{threads}, although {then} would do: the calls are too small to be divided"


# --- branches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branches:
    """The gain of a schedule over one call after the other with the best number of threads."""

    gain: Difference
    sequential_ns: float
    schedule_ns: float
    threads: int
    """The best number of threads for one call after the other."""

    crossings: int
    width: int
    """Maximum number of calls that run at the same time."""

    nodes: tuple[int, ...]
    """Forward calls that run at the same time as another call."""

    coverage: float


def of_branches(ground: Ground) -> Iterator[Advice]:
    """Yield advice on branches that are worth running at the same time."""
    found = scheduled(ground)
    if found is None:
        raise AnalysisError(f"too few calls are timed with one thread; {FILL}")
    if not found.gain.sure or found.gain.ns < LEAST_SHARE * ground.total_ns or ground.overlapping:
        return
    gain, percent = ground.gain(found.gain, ground.computing)
    why = [
        f"sequentially {found.sequential_ns / 1e6:.3g} ms with {found.threads} threads; in parallel "
        f"{found.schedule_ns / 1e6:.3g} ms, each call with one thread, {found.width} at once on {ground.cores} cores",
        f"{found.crossings} times a thread waits for another one, {CROSSING_NS / 1000:.0f} µs each, included",
    ]
    if ground.seen:
        why.append("no two calls overlapped in the trace")
    yield Advice(
        "parallelism",
        f"{found.width} independent branches run one after the other, and their calls gain little from more threads",
        ground.places({node: _one(ground, node) for node in found.nodes}),
        gain,
        False,
        percent,
        tuple(why),
        "torch.set_num_threads(1), and torch.jit.fork or a ThreadPoolExecutor that runs the branches at the same time",
    )


def scheduled(ground: Ground) -> Branches | None:
    """Return the gain of a schedule; None with a single core, or if too few calls are timed with one thread."""
    graph, cores = ground.graph, ground.cores
    one = {node: found for node in ground.computing if (found := ground.timing(node, threads=1))}
    sums = []
    for count in dict.fromkeys((ground.threads, *thread_counts(cores))):
        there = {node: found for node in one if (found := ground.timing(node, threads=count))}
        if len(there) == len(one):
            sums.append((math.fsum(each.trimmed_ns or 0.0 for each in there.values()), count, list(there.values())))
    coverage = len(one) / len(ground.computing) if ground.computing else 0.0
    if not sums or coverage < KNOWN or cores < 2:
        return None
    sequential, threads, before = min(sums, key=lambda each: each[0])
    times: list[schedule.Times] = [
        {1: one[node].trimmed_ns or 0.0} if node in one else {1: 0.0} for node in range(len(graph.nodes))
    ]
    every = paths.before(graph, *Why)
    placed = schedule.list_schedule(every, times, cores)
    core = {each.node: each.core for each in placed if each.core is not None}
    before_by_data = paths.contracted(graph, lambda node: node.computes)
    crossings = _crossings(before_by_data, [core.get(each) for each in ground.computing])
    beside, width = _beside(placed)
    crossings += max(0, width - 1)  # each additional thread is woken once
    end = max((each.end for each in placed), default=0.0) + crossings * CROSSING_NS
    apart = difference(before, ())
    half = math.hypot((apart.high - apart.low) / 2, ALLOWANCE * end)
    gain = sequential - end
    forward = tuple(node for node in beside if graph.nodes[node].phase is Phase.FORWARD)
    return Branches(
        Difference(gain, gain - half, gain + half), sequential, end, threads, crossings, width, forward, coverage
    )


def _crossings(before: Sequence[Sequence[int]], core: Sequence[int | None]) -> int:
    """Return the number of calls that wait for a call on another core."""
    return sum(
        any(core[each] is not None and core[each] != core[node] for each in those)
        for node, those in enumerate(before)
        if core[node] is not None
    )


def _beside(placed: Sequence[schedule.Placed]) -> tuple[tuple[int, ...], int]:
    """Return the calls that run while another one does, by number, and the maximum that run at the same time."""
    ends = sorted(
        (moment, is_start, each.node)
        for each in placed
        if each.core is not None
        for moment, is_start in ((each.start, True), (each.end, False))
    )
    running: set[int] = set()
    found: set[int] = set()
    width = 0
    for _, is_start, node in ends:
        if is_start:
            running.add(node)
            if len(running) > 1:
                found |= running
            width = max(width, len(running))
        else:
            running.discard(node)
    return tuple(sorted(found)), width


def _one(ground: Ground, node: int) -> float:
    found = ground.timing(node, threads=1)
    return 0.0 if found is None else found.trimmed_ns or 0.0
