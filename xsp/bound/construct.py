"""The time of a model from the timings of its blocks of up to G calls, without running the model (DLBricks).

A model is cut into blocks of G consecutive computing calls; equal blocks of all models are timed once. The time of the
model is the sum of its blocks; time that the framework adds between them (calls of modules) is a separate line. A block
without a timing is a hole and does not count as zero: there is a total if the known blocks are expected to make up
`MIN_COVERAGE` of the time. Otherwise there is only a lower limit, on request.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from xsp import stats
from xsp.bench.environment import Environment
from xsp.bench.plan import default_threads, effective_state
from xsp.bench.spec import AS_RUN, CacheState, Spec, Status, Timing
from xsp.bound.totals import MIN_COVERAGE, Coverage, Figure, coverage, half
from xsp.errors import GraphError
from xsp.graph.blocks import Block, block, windows
from xsp.graph.node import Graph

DRAWS = 201
"""Number of covers that are drawn, with equal probability, for the spread."""


class TimingSource(Protocol):
    """A collection of timings: `xsp.bench.Timings`, or any object that returns a timing by the key of its spec."""

    def get(self, key: str, /) -> Timing | None:
        """Return the timing of a spec; None if there is none."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of timings, which together with the block identify a timing."""

    state: CacheState = CacheState.CHAIN
    threads: int = 0
    """Number of threads; 0 for as many as the process may use."""

    variant: str = AS_RUN
    runtime: str = "torch"
    environment: Environment | None = None
    """That of the timings, if they are of another device than the processor."""

    def spec(self, graph: Graph, piece: Block) -> Spec:
        """Return the spec of a block of a graph."""
        state = effective_state(graph, self.state, self.environment)
        return Spec(piece, self.variant, state, self.threads or default_threads(self.environment), self.runtime)


@dataclass(frozen=True)
class BlockWindow:
    """A block at its position in a model."""

    start: int
    """Index of its first call among the computing calls."""

    stop: int
    """Index after its last call."""

    spec: Spec
    timing: Timing | None

    @property
    def ns(self) -> float | None:
        """Time of the block in nanoseconds; None if it is a hole."""
        return self.timing.trimmed_ns if self.timing is not None and self.timing.is_timed else None


@dataclass(frozen=True)
class Hole:
    """A block without a time."""

    op: str
    count: int
    """Number of occurrences."""

    status: Status
    reason: str


@dataclass(frozen=True)
class Construction:
    """A model's time as the sum of its blocks."""

    granularity: int
    windows: tuple[BlockWindow, ...]
    coverage: Coverage
    """Coverage of blocks, and of their expected time."""

    ns: float | None
    """Sum of the blocks; None if too few are known."""

    half_ns: float | None
    """Half of the 95 % interval of `ns`; blocks with one key share their error."""

    glue_ns: float | None
    """Time that the framework adds, not part of `ns`; None if unknown."""

    @property
    def is_lower_limit(self) -> bool:
        """Whether there are holes, so that `ns` is a lower limit."""
        return not self.coverage.is_complete

    @property
    def unique(self) -> int:
        """Number of distinct blocks."""
        return len({window.spec.key for window in self.windows})

    @property
    def with_glue_ns(self) -> float | None:
        """Time of blocks and framework; None if one is unknown."""
        return None if self.ns is None or self.glue_ns is None else self.ns + self.glue_ns

    @cached_property
    def holes(self) -> tuple[Hole, ...]:
        """The blocks without a time, the most frequent ones first."""
        count = Counter(window.spec.key for window in self.windows if window.ns is None)
        first_windows = {window.spec.key: window for window in reversed(self.windows)}
        return tuple(_hole(first_windows[key], number) for key, number in count.most_common())

    @property
    def once_ns(self) -> float | None:
        """Time of one run of each distinct block; None if one of them is unknown."""
        return stats.known_sum({window.spec.key: window.ns for window in self.windows}.values())


def _hole(window: BlockWindow, count: int) -> Hole:
    timing = window.timing
    status = Status.MISSING if timing is None else timing.status
    return Hole(window.spec.block.op, count, status, "" if timing is None else timing.reason)


# --- the sum of blocks ----------------------------------------------------------------------------------------


def construct(
    graph: Graph,
    timings: TimingSource,
    granularity: int = 1,
    *,
    conditions: Conditions | None = None,
    only: Collection[str] | None = None,
    glue_ns: float | None = None,
    partial: bool = False,
) -> Construction:
    """Return the estimated time of a step as the sum of its blocks, in nanoseconds.

    Args:
        graph: graph of the model.
        timings: timings of the blocks.
        granularity: computing calls per block, G; the last block of a phase may have fewer.
        conditions: state of the caches, threads, variant and runtime of the timings.
        only: keys of specs that may be used, see `spec_keys`; default: all.
        glue_ns: time that the framework adds to a step, see `xsp.bound.timed.framework`; None: unknown.
        partial: return the sum as a lower limit if less than `MIN_COVERAGE` of the time is known.

    Raises:
        GraphError: the granularity is below 1, or the graph has no computing calls.
    """
    pieces = _windows(graph, timings, granularity, None, conditions or Conditions(), only)
    if not pieces:
        raise GraphError(f"{graph.name}: it has no computing calls to construct a time from")
    figures = [
        None
        if window.ns is None
        else Figure(window.ns, (window.timing and window.timing.half_ns) or 0.0, window.spec.key)
        for window in pieces
    ]
    covered = coverage(figures, [True] * len(pieces), _expected(pieces))
    is_sufficient = covered.nodes and (partial or covered.share >= MIN_COVERAGE)
    return Construction(
        granularity,
        tuple(pieces),
        covered,
        math.fsum(figure.ns for figure in figures if figure is not None) if is_sufficient else None,
        half(figures) if is_sufficient else None,
        glue_ns,
    )


def module_calls(graph: Graph) -> int:
    """Return the number of calls of modules and containers in a step, as far as operators inside them show."""
    paths: set[str] = set()
    for node in graph.nodes:
        parts = node.module.split(".") if node.module else []
        paths.update(f"{node.phase.value}/{'.'.join(parts[:end])}" for end in range(1, len(parts) + 1))
    return len(paths)


def spec_keys(
    graphs: Iterable[Graph], granularity: int, *, conditions: Conditions | None = None, stride: int | None = None
) -> frozenset[str]:
    """Return the keys of all specs of other models, for the argument `only` of `construct`."""
    conditions = conditions or Conditions()
    return frozenset(
        conditions.spec(graph, block(graph, *bounds)).key
        for graph in graphs
        for bounds in windows(graph, granularity, stride)
    )


def _windows(
    graph: Graph,
    timings: TimingSource,
    size: int,
    stride: int | None,
    conditions: Conditions,
    only: Collection[str] | None,
) -> list[BlockWindow]:
    computing = [index for index, node in enumerate(graph.nodes) if node.computes]
    specs: dict[str, Spec] = {}
    pieces = []
    for start, stop in windows(graph, size, stride):
        spec = conditions.spec(graph, block(graph, start, stop))
        spec = specs.setdefault(spec.key, spec)
        timing = timings.get(spec.key) if only is None or spec.key in only else None
        positions = bisect.bisect_left(computing, start), bisect.bisect_left(computing, stop)
        pieces.append(BlockWindow(*positions, spec, timing))
    return pieces


def _expected(pieces: Sequence[BlockWindow]) -> list[float | None]:
    """Return the expected time of each block, for coverage only; None if unknown.

    It is the timing, else the bytes times the median time per byte of timed blocks of the same operators, or of all.
    """
    rates: dict[str, list[float]] = {}
    sizes = [
        stats.known_sum(tensor.bytes for call in window.spec.block.calls for tensor in (*call.inputs, *call.outputs))
        for window in pieces
    ]
    for window, size in zip(pieces, sizes, strict=True):
        if window.ns is not None and size:
            rates.setdefault(window.spec.block.op, []).append(window.ns / size)
    overall = statistics.median([rate for op_rates in rates.values() for rate in op_rates] or [math.nan])
    expected: list[float | None] = []
    for window, size in zip(pieces, sizes, strict=True):
        rate = statistics.median(rates.get(window.spec.block.op) or [overall])
        estimate = None if size is None or math.isnan(rate) else size * rate
        expected.append(estimate if window.ns is None else window.ns)
    return expected


# --- the best cover by overlapping blocks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Cover:
    """A cover of a model's calls by timed blocks of up to G calls, which may begin at any call."""

    granularity: int
    ns: float
    """The smallest sum of adjacent blocks that cover all calls."""

    median_ns: float
    """The median sum of such covers, of which `DRAWS` are drawn with equal probability."""

    blocks: tuple[BlockWindow, ...]
    """Blocks of the cover with the smallest sum, in order."""

    arcs: int
    """Number of timed blocks to choose from."""

    @property
    def spread(self) -> float:
        """How much longer the median cover is than the shortest one, as a share of the shortest one."""
        return self.median_ns / self.ns - 1 if self.ns else 0.0


def cover(
    graph: Graph,
    timings: TimingSource,
    granularity: int,
    *,
    conditions: Conditions | None = None,
    only: Collection[str] | None = None,
) -> Cover:
    """Return the best cover of a model by overlapping blocks.

    Boundaries between calls are the vertices 0 … n, a timed block is an arc from its start to its end, and the shortest
    path from 0 to n is the tightest estimate that the timings allow. It is a minimum of noisy times, so it is too low
    by part of the spread.

    Raises:
        GraphError: no timed blocks cover all calls; the message names the first call that is not covered.
    """
    conditions = conditions or Conditions()
    timed_windows = [
        window
        for size in range(1, granularity + 1)
        for window in _windows(graph, timings, size, 1, conditions, only)
        if window.ns is not None
    ]
    arcs: dict[tuple[int, int], BlockWindow] = {}
    for window in timed_windows:
        arcs.setdefault((window.start, window.stop), window)
    count = sum(node.computes for node in graph.nodes)
    weights = {arc: window.ns or 0.0 for arc, window in arcs.items()}
    path = shortest(count, weights)
    if path is None or not count:
        # The last vertex that a path from 0 reaches, which is the first call that no path covers.
        reached = {0}
        for start, end in sorted(weights):
            if start in reached:
                reached.add(end)
        gap = max(vertex for vertex in reached if vertex <= count)
        calls = [node for node in graph.nodes if node.computes]
        target = f"call {gap} ({calls[gap].call.op})" if gap < count else "any call"
        raise GraphError(f"{graph.name}: timed blocks of up to {granularity} calls do not cover {target}")
    lengths = draws(count, weights)
    shortest_ns = math.fsum(weights[arc] for arc in path)
    return Cover(granularity, shortest_ns, statistics.median(lengths), tuple(arcs[arc] for arc in path), len(arcs))


Arcs = Mapping[tuple[int, int], float]


def shortest(count: int, arcs: Arcs) -> list[tuple[int, int]] | None:
    """Return the arcs of the shortest path from 0 to `count`; None if there is no path.

    Args:
        count: the last vertex; the vertices are 0 … `count`.
        arcs: length of each arc from a smaller to a larger vertex.
    """
    starts = _starts_by_end(arcs)
    best = [0.0] + [math.inf] * count
    previous: list[int] = [0] * (count + 1)
    for end in range(1, count + 1):
        for start in starts.get(end, ()):
            length = best[start] + arcs[start, end]
            if length < best[end]:
                best[end], previous[end] = length, start
    if math.isinf(best[count]):
        return None
    path, end = [], count
    while end:
        path.append((previous[end], end))
        end = previous[end]
    return path[::-1]


def draws(count: int, arcs: Arcs, number: int = DRAWS, seed: int = 0) -> list[float]:
    """Return the lengths of paths from 0 to `count`, drawn with equal probability; empty if there is no path."""
    starts = _starts_by_end(arcs)
    ways = [1] + [0] * count
    for end in range(1, count + 1):
        ways[end] = sum(ways[start] for start in starts.get(end, ()))
    if not ways[count]:
        return []
    rng, lengths = random.Random(seed), []
    for _ in range(number):
        end, length = count, 0.0
        while end:
            index = rng.randrange(ways[end])
            for start in starts[end]:
                index -= ways[start]
                if index < 0:
                    break
            length += arcs[start, end]
            end = start
        lengths.append(length)
    return lengths


def _starts_by_end(arcs: Arcs) -> dict[int, list[int]]:
    starts: dict[int, list[int]] = {}
    for start, end in sorted(arcs):
        starts.setdefault(end, []).append(start)
    return starts
