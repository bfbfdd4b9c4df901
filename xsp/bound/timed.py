"""Rungs from timings: each node as it runs, at its best, and as part of a block; reasons for missing timings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xsp import plugins
from xsp.bench.plan import ONNX_RUNTIME, default_threads, effective_state, has_onnx_runtime, overheads, runtime_of
from xsp.bench.spec import AS_RUN, OTHER_PRECISION, RUNTIMES, CacheState, Spec, Status, Timing, slowed
from xsp.bench.timings import Timings
from xsp.bound.construct import Conditions, construct, module_calls
from xsp.bound.totals import Figure, Total
from xsp.graph.blocks import block, windows
from xsp.graph.node import Graph
from xsp.stats import known_sum

NOT_TIMED = "not timed"
"""Reason of a call that was never timed."""

MAX_DRIFT = 1.05
"""Maximum canary ratio (drift of fixed work) of an undisturbed sitting."""


@dataclass(frozen=True)
class TimingFigures:
    """Figures from timings for the nodes of a graph."""

    specs: tuple[Spec | None, ...]
    """Spec of each node as it runs; None if it does not compute."""

    as_run: tuple[Figure | None, ...]
    best: tuple[Figure | None, ...]
    reasons: tuple[str, ...]
    """Reason of each node without an as-run figure; else empty."""

    borrowed: int
    """Number of used timings from another environment."""

    drift: float | None
    """The largest canary ratio of the used timings; None if unknown."""

    disturbed_timings: int
    """Number of used timings from sittings with a canary ratio above `MAX_DRIFT`."""

    used_timings: int
    """Number of used timings of all variants."""

    slowed: tuple[str, ...]
    """What the device said that slowed it while they were taken."""

    at_the_floor: int
    """Number of nodes with the timing of an empty call."""

    cold_ns: float | None
    """Sum of all nodes on an accelerator whose caches hold other data; None if it is not known of each."""


def open_timings(timings: Timings | Path | str | None, like: str | None) -> Timings:
    """Return an open database of timings from itself or its folder; `like` as in `Timings.open`."""
    return timings if isinstance(timings, Timings) else Timings.open(timings, like=like)


def can_time_here(graph: Graph) -> bool:
    """Return whether the runtime for a graph's calls is available."""
    runtime = runtime_of(graph)
    return runtime in plugins.names(RUNTIMES) and (runtime != ONNX_RUNTIME or has_onnx_runtime())


def of(graph: Graph, timings: Timings, threads: int, cores: int) -> TimingFigures:
    """Return the figures of each node from timings.

    Args:
        graph: any graph.
        timings: timings of a machine.
        threads: threads of the step.
        cores: cores of the machine: `best` uses timings with at most this number of threads.
    """
    runtime = runtime_of(graph)
    specs, state = specs_in(graph, timings, threads)
    timings_by_work = _by_work(timings, {spec.block.work_key for spec in specs if spec is not None})
    as_run: list[Figure | None] = []
    best: list[Figure | None] = []
    reasons: list[str] = []
    used_timings: dict[str, Timing] = {}
    floor_count = 0
    cold_ns: list[float | None] = []
    for spec in specs:
        timing = None if spec is None else timings.get(spec.key)
        if spec is None or timing is None or not timing.is_timed:
            as_run.append(None)
            reasons.append("" if spec is None else NOT_TIMED if timing is None else _reason(timing))
        else:
            as_run.append(_figure(timing))
            reasons.append("")
            used_timings[timing.key] = timing
            cold_ns.append(timing.cold_ns)
            floor_count += timing.status is Status.QUICK
        candidates = [] if spec is None else timings_by_work.get(spec.block.work_key, [])
        comparable = [
            timing
            for timing in candidates
            if (timing.state, timing.runtime) == (state, runtime) and timing.threads <= cores
        ]
        best.append(_fastest(comparable))
        used_timings.update((timing.key, timing) for timing in comparable)
    drifts = [timing.canary_ratio for timing in used_timings.values() if timing.canary_ratio is not None]
    return TimingFigures(
        tuple(specs),
        tuple(as_run),
        tuple(best),
        tuple(reasons),
        sum(timing.environment != timings.environment.hash for timing in used_timings.values()),
        max(drifts, default=None),
        sum(drift > MAX_DRIFT for drift in drifts),
        len(used_timings),
        tuple(slowed(used_timings.values())),
        floor_count,
        None if any(reasons) or not cold_ns else known_sum(cold_ns),
    )


def specs_in(graph: Graph, timings: Timings, threads: int) -> tuple[list[Spec | None], CacheState]:
    """Return the spec of each node as the timings of a device have it, and the state of the caches.

    That state is that of a step; on an accelerator, if no call was timed so, warm caches.

    Args:
        graph: any graph.
        timings: timings of the processor or of an accelerator.
        threads: threads of a step on the processor.
    """
    state = effective_state(graph, CacheState.CHAIN, timings.environment)
    if timings.environment.device is None:
        return specs_of(graph, threads, state), state
    for tried in (state, CacheState.WARM):
        specs = specs_of(graph, default_threads(timings.environment), tried)
        if any(spec is not None and timings.get(spec.key) is not None for spec in specs):
            return specs, tried
    return specs_of(graph, default_threads(timings.environment), state), state


def specs_of(graph: Graph, threads: int, state: CacheState | None = None) -> list[Spec | None]:
    """Return the spec with which each node is timed; None for nodes that do not compute.

    Args:
        graph: any graph.
        threads: number of threads.
        state: state of the caches; default: that of a step on the processor.
    """
    state, runtime = state or effective_state(graph, CacheState.CHAIN), runtime_of(graph)
    specs: list[Spec | None] = [None] * len(graph.nodes)
    for start, stop in windows(graph, 1):
        specs[start] = Spec(block(graph, start, stop), AS_RUN, state, threads, runtime)
    return specs


def _by_work(timings: Timings, keys: set[str]) -> Mapping[str, list[Timing]]:
    """Return the timings of each key of work, with those borrowed from a similar environment."""
    by_work: dict[str, list[Timing]] = defaultdict(list)
    borrowed = timings.all_of(timings.like) if timings.like is not None else ()
    by_key = {timing.key: timing for timing in (*borrowed, *timings)}  # those of another environment only fill gaps
    for timing in by_key.values():
        if timing.work_key in keys and timing.is_timed and timing.variant not in OTHER_PRECISION:
            by_work[timing.work_key].append(timing)
    return by_work


def _reason(timing: Timing) -> str:
    return f"{timing.status.value}: {timing.reason}" if timing.reason else timing.status.value


def _figure(timing: Timing) -> Figure:
    ns = timing.trimmed_ns if timing.device_ns is None else timing.device_ns
    assert ns is not None
    return Figure(float(round(ns)), timing.half_ns or 0.0, timing.key)


def _fastest(timings: Sequence[Timing]) -> Figure | None:
    """Return the shortest timing of all variants, with the shortest one for each number of threads."""
    if not timings:
        return None
    threads: dict[int, float] = {}
    for timing in timings:
        ns = _figure(timing).ns
        threads[timing.threads] = min(ns, threads.get(timing.threads, ns))
    fastest = min((_figure(timing) for timing in timings), key=lambda figure: (figure.ns, figure.key))
    return Figure(fastest.ns, fastest.half_ns, fastest.key, threads)


def blocks(graph: Graph, timings: Timings, threads: int, size: int, partial: bool) -> tuple[Total, str]:
    """Return the total of blocks of `size` calls, and the reason if there is none; see `xsp.bound.construct`."""
    construction = construct(
        graph,
        timings,
        size,
        conditions=Conditions(threads=threads, runtime=runtime_of(graph), environment=timings.environment),
        partial=partial,
    )
    total = Total(
        construction.coverage, None if construction.ns is None else float(round(construction.ns)), construction.half_ns
    )
    coverage = construction.coverage
    return (
        total,
        "" if construction.ns is not None else f"{coverage.nodes} of {coverage.of_nodes} blocks of {size} are timed",
    )


def framework(graph: Graph, timings: Timings, threads: int) -> tuple[Figure | None, str]:
    """Return the time of the calls of modules and views in a step, and the reason if it is unknown."""
    if runtime_of(graph) != "torch":
        return None, "ONNX Runtime calls no modules"
    if timings.environment.device is not None:
        return None, "the host's part is in the estimate issued"
    overhead_timings = [timings.get(spec.key) for spec in overheads(threads)]
    usable = [timing for timing in overhead_timings if timing is not None and timing.is_timed]
    if len(usable) < len(overhead_timings):
        return None, "the calls of an empty module and an empty operator are not timed"
    module, view = map(_figure, usable)
    modules = 1 + module_calls(graph)
    views = sum(not node.computes for node in graph.nodes)
    half_ns = modules * module.half_ns + views * view.half_ns
    return Figure(float(round(modules * module.ns + views * view.ns)), half_ns, "overhead"), ""
