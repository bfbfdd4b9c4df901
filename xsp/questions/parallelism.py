"""Q2: are the cores, or the device, used well? The number of threads, and branches that run one after the other.

A number of threads applies to all calls of a process, so its gain is that of all calls together, including small calls
that become slower. For branches, the gain is that of a feasible schedule, not that of unlimited cores: each call has
one thread, as many calls run at once as there are cores, and `CROSSING_NS` is added wherever a call waits for a call on
another core. The schedule must beat the best number of threads for one call after the other.

A device runs the calls of one stream one after the other. Branches in several streams gain at most what the longest
path and the calls that fill the device leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xsp.advise import Advice, AdviceContext, Needs, question
from xsp.advise.advice import CoveredElsewhere
from xsp.bound.ladder import Rung
from xsp.bound.totals import Figure
from xsp.errors import AnalysisError
from xsp.graph import paths, schedule
from xsp.graph.node import EdgeKind, KnownBy, NodeKind, Phase
from xsp.questions.budget import thread_counts
from xsp.questions.timedcalls import ALLOWANCE, TimedGraph, VariantDifference, difference, milliseconds
from xsp.texts import ns_text

LEAST_COVERAGE = 0.5
"""Minimum share of the calls' time, as the step runs, that must also be timed with the other number of threads."""

CROSSING_NS = 50_000.0
"""Approximate nanoseconds for a Python thread to hand work to another thread and to be woken by it."""

FULL_SHARE = 0.25
"""Least time by the peak rates, as a share of its time, from which a call is taken to fill the device."""

LEAST_SHARE = 0.05
"""Minimum gain of branches as a share of the step: they are more work to write than a setting."""


@dataclass(frozen=True)
class Threads:
    """The gain of another number of threads."""

    count: int
    gain: VariantDifference
    nodes: tuple[int, ...]
    gains: dict[int, float]
    ns_by_count: dict[int, float]
    """Number of threads → total nanoseconds of the same calls."""

    missing_count: int


@question("thread-count", "Is the number of threads optimal?", number="Q2", needs=Needs.BOUND)
def thread_count(context: AdviceContext) -> Iterator[Advice]:
    """All calls with each number of threads up to the number of cores, compared with the step's number of threads."""
    timed_graph: TimedGraph = context.part("timed-graph")
    if timed_graph.on_device:
        raise CoveredElsewhere("a device has no number of threads")
    yield from thread_advice(timed_graph)


@question("parallelism", "Do independent branches run at the same time?", number="Q2", needs=Needs.BOUND)
def parallelism(context: AdviceContext) -> Iterator[Advice]:
    """A schedule of the graph with one call per core, against one call after the other, and whether calls overlap; on
    a device, the longest path against one stream."""
    timed_graph: TimedGraph = context.part("timed-graph")
    if timed_graph.graph.known_by is KnownBy.ORDER:
        raise AnalysisError(
            "a run has the order of its calls and not their data flow, so independent calls are unknown; "
            "ask about the model: xsp advise path/to/file.py:function"
        )
    if timed_graph.on_device:
        yield from stream_advice(timed_graph, context.bound.figures.get(Rung.CEILING.value))
    else:
        yield from branch_advice(timed_graph)


# --- threads ------------------------------------------------------------------------------------------------


def thread_advice(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield advice on the number of threads if another number is better."""
    best = best_threads(timed_graph)
    if best is None or not best.gain.is_gain:
        return
    gain, percent = timed_graph.gain(best.gain, best.nodes)
    why = [
        f"{len(best.nodes)} calls in isolation take in total "
        + ", ".join(f"{ns / 1e6:.3g} ms with {count}" for count, ns in sorted(best.ns_by_count.items())),
        f"the process can use {timed_graph.cores} cores",
    ]
    if best.missing_count:
        why.append(f"{best.missing_count} calls are not timed with both, and keep their time")
    yield Advice(
        "thread-count",
        _problem_text(timed_graph.threads, best.count, timed_graph.cores),
        timed_graph.places(best.gains),
        gain,
        False,
        percent,
        tuple(why),
        f"torch.set_num_threads({best.count}), or OMP_NUM_THREADS={best.count} before the program starts",
        trial=f"threads={best.count}",
        by_call=milliseconds(best.gains),
    )


def best_threads(timed_graph: TimedGraph) -> Threads | None:
    """Return the number of threads with the largest gain, among those with enough timed calls, or None."""
    current = {
        node: timing
        for node in timed_graph.computing
        if (timing := timed_graph.timing(node, threads=timed_graph.threads))
    }
    total = math.fsum(timing.trimmed_ns or 0.0 for timing in current.values())
    results = []
    for count in thread_counts(timed_graph.cores):
        if count == timed_graph.threads:
            continue
        candidate = {node: alternative for node in current if (alternative := timed_graph.timing(node, threads=count))}
        known_ns = math.fsum(current[node].trimmed_ns or 0.0 for node in candidate)
        if candidate and known_ns >= LEAST_COVERAGE * total:
            before = [current[node] for node in candidate]
            sums = {
                timed_graph.threads: math.fsum(timing.trimmed_ns or 0.0 for timing in before),
                count: math.fsum(timing.trimmed_ns or 0.0 for timing in candidate.values()),
            }
            gains = {
                node: (current[node].trimmed_ns or 0.0) - (timing.trimmed_ns or 0.0)
                for node, timing in candidate.items()
            }
            missing = len(timed_graph.computing) - len(candidate)
            results.append(
                Threads(count, difference(before, candidate.values()), tuple(candidate), gains, sums, missing)
            )
    return max(results, key=lambda threads: threads.gain.ns, default=None)


def _problem_text(current: int, best: int, cores: int) -> str:
    threads = f"{current} threads" if current != 1 else "one thread"
    if current > cores:
        return f"{threads} share {cores} {'cores' if cores != 1 else 'core'}"
    if current < best:
        return f"{threads}, although {best} of {cores} cores help"
    return f"{threads}, although {best} would do: the calls are too small to be divided"


# --- branches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branches:
    """The gain of a schedule over one call after the other with the best number of threads."""

    gain: VariantDifference
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


def branch_advice(timed_graph: TimedGraph) -> Iterator[Advice]:
    """Yield advice on branches that are worth running at the same time."""
    branches = schedule_branches(timed_graph)
    if branches is None:
        raise AnalysisError(f"too few calls are timed with one thread; {timed_graph.remedy}")
    if not branches.gain.is_gain or branches.gain.ns < LEAST_SHARE * timed_graph.total_ns or timed_graph.has_overlap:
        return
    gain, percent = timed_graph.gain(branches.gain, timed_graph.computing)
    why = [
        f"sequentially {branches.sequential_ns / 1e6:.3g} ms with {branches.threads} threads; in parallel "
        f"{branches.schedule_ns / 1e6:.3g} ms, each call with one thread, "
        f"{branches.width} at once on {timed_graph.cores} cores",
        f"{branches.crossings} times a thread waits for another one, {CROSSING_NS / 1000:.0f} µs each, included",
    ]
    if timed_graph.traced_calls:
        why.append("no two calls overlapped in the trace")
    yield Advice(
        "parallelism",
        f"{branches.width} independent branches run one after the other, and their calls gain little from more threads",
        timed_graph.places({node: _single_ns(timed_graph, node) for node in branches.nodes}),
        gain,
        False,
        percent,
        tuple(why),
        "torch.set_num_threads(1), and torch.jit.fork or a ThreadPoolExecutor that runs the branches at the same time",
    )


def stream_advice(timed_graph: TimedGraph, ceilings: Sequence[Figure | None] | None) -> Iterator[Advice]:
    """Yield advice on branches of a prediction that are worth several streams of a device: an upper bound.

    Args:
        timed_graph: the graph with timings of a device.
        ceilings: least time of each call by the peak rates of the device; None if unknown.

    Raises:
        AnalysisError: too few calls are timed, or the peak rates of the device are unknown.
    """
    graph, nodes = timed_graph.graph, timed_graph.computing
    if any(node.phase is not Phase.FORWARD for node in graph.computing):
        return  # a backward pass orders its calls by itself
    if any(node.kind is NodeKind.SYNC for node in graph.nodes):
        return  # the host waits in the middle, and no capture holds the step
    times = {node: timing.trimmed_ns or 0.0 for node in nodes if (timing := timed_graph.timing(node)) is not None}
    if len(times) < len(nodes) or ceilings is None:
        raise AnalysisError(f"not all calls are timed, or peak rates are unknown; {timed_graph.remedy}")
    used = {node: figure.ns / times[node] if (figure := ceilings[node]) is not None else 1.0 for node in times}
    total_ns = math.fsum(times.values())
    full_ns = math.fsum(ns for node, ns in times.items() if used[node] >= FULL_SHARE)
    weights = [times.get(node, 0.0) for node in range(len(graph.nodes))]
    path_ns, path = paths.longest(paths.predecessors_of(graph, *EdgeKind), weights)
    beside = [node for node in times if node not in set(path) and used[node] < FULL_SHARE]
    gain_ns = total_ns - max(path_ns, full_ns)
    if not beside or gain_ns < LEAST_SHARE * timed_graph.total_ns:
        return
    half_ns = ALLOWANCE * total_ns
    change = VariantDifference(gain_ns, gain_ns - half_ns, gain_ns)
    gain, percent = timed_graph.gain(change, nodes)
    yield Advice(
        "parallelism",
        f"{len(beside)} calls that leave most of the device unused run in one stream, beside a path that needs none "
        "of them",
        timed_graph.places({node: times[node] for node in beside}),
        gain,
        True,
        percent,
        (f"calls one after the other {ns_text(total_ns)}; their longest path {ns_text(path_ns)}",),
        "run the branches in streams of their own (torch.Stream), inside a captured step",
        side=timed_graph.side,
    )


def schedule_branches(timed_graph: TimedGraph) -> Branches | None:
    """Return the gain of a schedule; None with a single core, or if too few calls are timed with one thread."""
    graph, cores = timed_graph.graph, timed_graph.cores
    single = {node: timing for node in timed_graph.computing if (timing := timed_graph.timing(node, threads=1))}
    sums = []
    for count in dict.fromkeys((timed_graph.threads, *thread_counts(cores))):
        timings = {node: timing for node in single if (timing := timed_graph.timing(node, threads=count))}
        if len(timings) == len(single):
            sums.append(
                (math.fsum(timing.trimmed_ns or 0.0 for timing in timings.values()), count, list(timings.values()))
            )
    coverage = len(single) / len(timed_graph.computing) if timed_graph.computing else 0.0
    if not sums or coverage < LEAST_COVERAGE or cores < 2:
        return None
    sequential_ns, threads, sequential_timings = min(sums, key=lambda entry: entry[0])
    times: list[schedule.Times] = [
        {1: single[node].trimmed_ns or 0.0} if node in single else {1: 0.0} for node in range(len(graph.nodes))
    ]
    predecessors = paths.predecessors_of(graph, *EdgeKind)
    slots = schedule.list_schedule(predecessors, times, cores)
    core = {slot.node: slot.core for slot in slots if slot.core is not None}
    before_by_data = paths.contracted(graph, lambda node: node.computes)
    crossings = _crossings(before_by_data, [core.get(node) for node in timed_graph.computing])
    concurrent, width = _concurrent_calls(slots)
    crossings += max(0, width - 1)  # each additional thread is woken once
    schedule_ns = max((slot.end for slot in slots), default=0.0) + crossings * CROSSING_NS
    spread = difference(sequential_timings, ())
    half = math.hypot((spread.high - spread.low) / 2, ALLOWANCE * schedule_ns)
    gain = sequential_ns - schedule_ns
    forward = tuple(node for node in concurrent if graph.nodes[node].phase is Phase.FORWARD)
    return Branches(
        VariantDifference(gain, gain - half, gain + half),
        sequential_ns,
        schedule_ns,
        threads,
        crossings,
        width,
        forward,
        coverage,
    )


def _crossings(predecessors_of: Sequence[Sequence[int]], cores: Sequence[int | None]) -> int:
    """Return the number of calls that wait for a call on another core."""
    return sum(
        any(cores[predecessor] is not None and cores[predecessor] != cores[node] for predecessor in predecessors)
        for node, predecessors in enumerate(predecessors_of)
        if cores[node] is not None
    )


def _concurrent_calls(slots: Sequence[schedule.Slot]) -> tuple[tuple[int, ...], int]:
    """Return the calls that run while another one does, by number, and the maximum that run at the same time."""
    events = sorted(
        (moment, is_start, slot.node)
        for slot in slots
        if slot.core is not None
        for moment, is_start in ((slot.start, True), (slot.end, False))
    )
    running: set[int] = set()
    concurrent: set[int] = set()
    width = 0
    for _, is_start, node in events:
        if is_start:
            running.add(node)
            if len(running) > 1:
                concurrent |= running
            width = max(width, len(running))
        else:
            running.discard(node)
    return tuple(sorted(concurrent)), width


def _single_ns(timed_graph: TimedGraph, node: int) -> float:
    timing = timed_graph.timing(node, threads=1)
    return 0.0 if timing is None else timing.trimmed_ns or 0.0
