"""The sum of a rung over the nodes of a graph: sequential and parallel, with its interval and its coverage.

A node without a figure is a hole and does not count as zero: coverage is the share of known nodes and of their expected
time. Below a coverage of `MIN_COVERAGE` there is no total, or on request only a lower limit.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xsp.graph import paths, schedule
from xsp.graph.node import EdgeKind, Graph, KnownBy

MIN_COVERAGE = 0.95
"""Minimum share of the expected time for a total."""

Key = str | int


@dataclass(frozen=True)
class Figure:
    """The time of one node on a rung, in nanoseconds."""

    ns: float
    half_ns: float = 0.0
    """Half of the 95 % interval."""

    key: Key = ""
    """Key of the timing: nodes with the same key have the same figure and share its error."""

    threads: Mapping[int, float] = field(default_factory=dict)
    """Times by number of threads, if there are several; empty: the node uses all cores."""


@dataclass(frozen=True)
class Coverage:
    """The share of a graph whose time is known."""

    nodes: int
    """Number of computing nodes with a figure."""

    of_nodes: int
    time: float | None
    """Share of the expected time, 0 to 1; None if the expected time of a hole is unknown."""

    @property
    def share(self) -> float:
        """The share to compare with `MIN_COVERAGE`: of the time if known, else of the nodes; 1 for an empty graph."""
        return self.time if self.time is not None else self.nodes / self.of_nodes if self.of_nodes else 1.0

    @property
    def is_complete(self) -> bool:
        """Whether there are no holes."""
        return self.nodes == self.of_nodes


@dataclass(frozen=True)
class Total:
    """The time of the whole graph on a rung, in nanoseconds; None if coverage is too low or data flow is unknown."""

    coverage: Coverage
    sequential: float | None
    """Time of all nodes, one after the other."""

    half_ns: float | None
    """Half of the 95 % interval of `sequential`; timings of one key share their error."""

    parallel: float | None = None
    """The longest path over data: the time with unlimited resources."""

    parallel_half_ns: float | None = None
    machine: float | None = None
    """Lower limit of the parallel time on the cores of this machine: no schedule is shorter."""

    schedule: float | None = None
    """Time of a feasible parallel schedule."""

    path: tuple[int, ...] = ()
    """Nodes on the longest path, by their number in the graph."""

    @property
    def is_lower_limit(self) -> bool:
        """Whether there are holes, so that the total is a lower limit."""
        return not self.coverage.is_complete

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
    is_computing: Sequence[bool],
    expected: Sequence[float | None],
    cores: int,
    partial: bool = False,
    unattributed_ns: float = 0.0,
) -> Total:
    """Return the total of a rung.

    Args:
        graph: graph of the nodes.
        figures: figure of each node.
        is_computing: whether each node computes; other nodes take no time.
        expected: expected time of each node, for coverage.
        cores: number of cores of the machine.
        partial: return a total of the known nodes also for a coverage below `MIN_COVERAGE`.
        unattributed_ns: time of work in the step that belongs to no node, for coverage.
    """
    computing_figures = [figure if computes else None for figure, computes in zip(figures, is_computing, strict=True)]
    covered = coverage(computing_figures, is_computing, expected, unattributed_ns)
    if not (partial or covered.share >= MIN_COVERAGE) or not covered.nodes:
        return Total(covered, None, None)
    known_figures = [figure for figure in computing_figures if figure is not None]
    sequential = math.fsum(figure.ns for figure in known_figures)
    if graph.known_by is KnownBy.ORDER:
        return Total(covered, sequential, half(known_figures))
    times: list[schedule.Times] = [
        {1: 0.0}
        if figure is None
        else {count: ns for count, ns in figure.threads.items() if count <= cores} or {cores: figure.ns}
        for figure in computing_figures
    ]
    planned = schedule.totals(paths.predecessors_of(graph), paths.predecessors_of(graph, *EdgeKind), times, cores)
    path = tuple(node for node in planned.path if computing_figures[node] is not None)
    return Total(
        covered,
        sequential,
        half(known_figures),
        min(planned.parallel, sequential),
        half(computing_figures[node] for node in path),
        min(planned.machine, sequential),
        min(planned.schedule, sequential),
        path,
    )


def half(figures: Iterable[Figure | None]) -> float:
    """Return half of the 95 % interval of a sum; errors of one key add up, those of different keys are independent."""
    error_by_key: dict[Key, float] = defaultdict(float)
    for index, figure in enumerate(figures):
        if figure is not None:
            error_by_key[figure.key or -index - 1] += figure.half_ns
    return math.sqrt(math.fsum(error * error for error in error_by_key.values()))


def coverage(
    figures: Sequence[Figure | None],
    is_computing: Sequence[bool],
    expected: Sequence[float | None],
    unattributed_ns: float = 0.0,
) -> Coverage:
    """Return the coverage of the computing nodes by figures, in nodes and in expected time."""
    nodes = sum(is_computing)
    known_ns = math.fsum(
        figure.ns if expected_ns is None else expected_ns
        for figure, expected_ns, computes in zip(figures, expected, is_computing, strict=True)
        if figure is not None and computes
    )
    holes = [
        expected_ns
        for figure, computes, expected_ns in zip(figures, is_computing, expected, strict=True)
        if computes and figure is None
    ]
    time: float | None = None
    if all(ns is not None for ns in holes):
        missing_ns = math.fsum(ns for ns in holes if ns is not None) + unattributed_ns
        time = known_ns / (known_ns + missing_ns) if known_ns + missing_ns else None
    return Coverage(nodes - len(holes), nodes, time)


def expectations(graph: Graph, figures: Sequence[Figure | None], floor: Sequence[Figure | None]) -> list[float | None]:
    """Return the expected time of each node, for coverage only.

    It is the figure of the node; else its ceiling times the median ratio of figure to ceiling of the same operator, or
    of all nodes; else the median of the figures of the same operator; else None.

    Args:
        graph: graph of the nodes.
        figures: figures of a rung by node.
        floor: ceilings by node.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for node, figure, ceiling in zip(graph.nodes, figures, floor, strict=True):
        if figure is not None:
            times[node.call.op].append(figure.ns)
            if ceiling is not None and ceiling.ns > 0:
                ratios[node.call.op].append(figure.ns / ceiling.ns)
    overall = statistics.median([ratio for op_ratios in ratios.values() for ratio in op_ratios] or [1.0])
    expected: list[float | None] = []
    for node, figure, ceiling in zip(graph.nodes, figures, floor, strict=True):
        op = node.call.op
        if figure is not None:
            expected.append(figure.ns)
        elif ceiling is not None:
            expected.append(ceiling.ns * (statistics.median(ratios[op]) if ratios[op] else overall))
        else:
            expected.append(statistics.median(times[op]) if times[op] else None)
    return expected
