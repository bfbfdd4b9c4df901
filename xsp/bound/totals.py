"""The sum of a rung over the nodes of a graph: sequential and parallel, with its interval and its coverage.

A node without a figure is a hole, and no zero: what is known is counted by nodes and by expected time, and below
`ENOUGH` of it there is no total. Asked for all the same it is "at least" so much.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xsp.graph import paths, schedule
from xsp.graph.node import Graph, KnownBy, Why

ENOUGH = 0.95
"""Share of the expected time below which there is no total."""

Key = str | int


@dataclass(frozen=True)
class Figure:
    """The time of one node on a rung, in nanoseconds."""

    ns: float
    half_ns: float = 0.0
    """Half of the 95 % interval."""

    key: Key = ""
    """Nodes with the same one have the same figure, and share its error."""

    threads: Mapping[int, float] = field(default_factory=dict)
    """Times by threads, where there are several; empty means that it takes all cores."""


@dataclass(frozen=True)
class Coverage:
    """The share of a graph whose time is known."""

    nodes: int
    """Computing nodes that have a figure."""

    of_nodes: int
    time: float | None
    """Share of the expected time, 0 to 1; None if nothing tells what the holes are expected to take."""

    @property
    def share(self) -> float:
        """The share that decides: of the time, else of the nodes; 1 of an empty graph."""
        return self.time if self.time is not None else self.nodes / self.of_nodes if self.of_nodes else 1.0

    @property
    def whole(self) -> bool:
        """Whether there is no hole."""
        return self.nodes == self.of_nodes


@dataclass(frozen=True)
class Total:
    """The time of the whole graph on a rung, in nanoseconds; None if too little or no data flow is known."""

    coverage: Coverage
    sequential: float | None
    """One node after the other."""

    half_ns: float | None
    """Half of the 95 % interval of `sequential`; timings of one key share their error."""

    parallel: float | None = None
    """Longest path over data: without limit of resources."""

    parallel_half_ns: float | None = None
    machine: float | None = None
    """Parallel on this machine: no schedule on its cores is shorter."""

    schedule: float | None = None
    """The end of a schedule that exists."""

    path: tuple[int, ...] = ()
    """Nodes on the longest path, by their number in the graph."""

    @property
    def at_least(self) -> bool:
        """Whether there are holes, so that it is at least so much."""
        return not self.coverage.whole

    @property
    def low(self) -> float | None:
        """The lower end of the interval of `sequential`."""
        return None if self.sequential is None or self.half_ns is None else max(0.0, self.sequential - self.half_ns)

    @property
    def high(self) -> float | None:
        """The upper end of the interval of `sequential`."""
        return None if self.sequential is None or self.half_ns is None else self.sequential + self.half_ns


def total(
    graph: Graph,
    figures: Sequence[Figure | None],
    counted: Sequence[bool],
    expected: Sequence[float | None],
    cores: int,
    partial: bool = False,
    beyond_ns: float = 0.0,
) -> Total:
    """Return the total of a rung.

    Args:
        graph: whose nodes it is of.
        figures: of each node.
        counted: whether each node does work; those that do not take no time.
        expected: what each node is expected to take where it has no figure.
        cores: of the machine.
        partial: give a total, of what is known, below `ENOUGH` too.
        beyond_ns: time of the step's work that belongs to no node, for coverage.
    """
    known = [figure if counts else None for figure, counts in zip(figures, counted, strict=True)]
    covered = coverage(known, counted, expected, beyond_ns)
    if not (partial or covered.share >= ENOUGH) or not covered.nodes:
        return Total(covered, None, None)
    there = [each for each in known if each is not None]
    sequential = math.fsum(each.ns for each in there)
    if graph.known_by is KnownBy.ORDER:
        return Total(covered, sequential, half(there))
    times: list[schedule.Times] = [
        {1: 0.0} if each is None else _up_to(cores, each.threads) or {cores: each.ns} for each in known
    ]
    found = schedule.together(paths.before(graph), paths.before(graph, *Why), times, cores)
    path = tuple(node for node in found.path if known[node] is not None)
    return Total(
        covered,
        sequential,
        half(there),
        min(found.parallel, sequential),
        half(known[node] for node in path),
        min(found.machine, sequential),
        min(found.schedule, sequential),
        path,
    )


def _up_to(cores: int, threads: Mapping[int, float]) -> schedule.Times:
    return {count: each for count, each in threads.items() if count <= cores}


def half(figures: Iterable[Figure | None]) -> float:
    """Return half of the 95 % interval of a sum: those of one key err together, those of different keys do not."""
    of_key: dict[Key, float] = defaultdict(float)
    for place, figure in enumerate(figures):
        if figure is not None:
            of_key[figure.key or -place - 1] += figure.half_ns
    return math.sqrt(math.fsum(each * each for each in of_key.values()))


def coverage(
    figures: Sequence[Figure | None],
    counted: Sequence[bool],
    expected: Sequence[float | None],
    beyond_ns: float = 0.0,
) -> Coverage:
    """Return how much of the nodes that do work has a figure; by time as they are expected to take it."""
    nodes = sum(counted)
    there = math.fsum(
        each.ns if expect is None else expect
        for each, expect, counts in zip(figures, expected, counted, strict=True)
        if each is not None and counts
    )
    holes = [
        expect for figure, counts, expect in zip(figures, counted, expected, strict=True) if counts and figure is None
    ]
    time: float | None = None
    if all(each is not None for each in holes):
        missing = math.fsum(each for each in holes if each is not None) + beyond_ns
        time = there / (there + missing) if there + missing else None
    return Coverage(nodes - len(holes), nodes, time)


def expectations(graph: Graph, figures: Sequence[Figure | None], floor: Sequence[Figure | None]) -> list[float | None]:
    """Return what each node is expected to take, for coverage only.

    Where it has a figure that; else its ceiling times the median ratio of figure to ceiling of the same operator, or
    of all; else the median of the figures of the same operator; else unknown.

    Args:
        graph: whose nodes.
        figures: of a rung.
        floor: of the ceiling.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    taken: dict[str, list[float]] = defaultdict(list)
    for node, figure, least in zip(graph.nodes, figures, floor, strict=True):
        if figure is not None:
            taken[node.call.op].append(figure.ns)
            if least is not None and least.ns > 0:
                ratios[node.call.op].append(figure.ns / least.ns)
    overall = statistics.median([each for those in ratios.values() for each in those] or [1.0])
    found: list[float | None] = []
    for node, figure, least in zip(graph.nodes, figures, floor, strict=True):
        op = node.call.op
        if figure is not None:
            found.append(figure.ns)
        elif least is not None:
            found.append(least.ns * (statistics.median(ratios[op]) if ratios[op] else overall))
        else:
            found.append(statistics.median(taken[op]) if taken[op] else None)
    return found
