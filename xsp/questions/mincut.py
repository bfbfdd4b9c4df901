"""The choice of one of two labels for each node with the least total cost: exact, as a minimum cut.

A node has a cost for each label. A value that a node makes is converted if a reader has the other label, once for all
of its readers. With two labels and non-negative costs of disagreement, this is a minimum cut (Picard and Ratliff 1975):
nodes with label 0 are on the source's side. For each value and direction, an auxiliary vertex between its maker and its
readers ensures that several readers pay once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

Cost = int | None
"""A cost; None if impossible: for a label that a node cannot have, or a conversion with an unknown cost."""


@dataclass(frozen=True)
class SharedValue:
    """A value, and the costs of its conversion."""

    maker: int
    readers: tuple[int, ...]
    to_one: Cost
    """Cost of the conversion from label 0 to label 1."""

    to_zero: Cost


def price(costs: Sequence[tuple[Cost, Cost]], values: Sequence[SharedValue], labels: Sequence[int]) -> float:
    """Return the total cost of labels; infinite if they are impossible."""
    parts: list[Cost] = [pair[label] for pair, label in zip(costs, labels, strict=True)]
    for value in values:
        if any(labels[reader] != labels[value.maker] for reader in value.readers):
            parts.append(value.to_zero if labels[value.maker] else value.to_one)
    return math.inf if None in parts else float(sum(part for part in parts if part is not None))


def two_labels(costs: Sequence[tuple[Cost, Cost]], values: Sequence[SharedValue]) -> list[int]:
    """Return the labels with the least cost; among several optima, the one with the most zeros.

    Args:
        costs: non-negative costs of each node with label 0 and with label 1.
        values: values that nodes make and other nodes read.

    Raises:
        ValueError: no labels are possible.
    """
    finite = [cost for pair in costs for cost in pair if cost is not None]
    finite += [cost for value in values for cost in (value.to_one, value.to_zero) if cost is not None]
    forbidden_cost = sum(finite) + 1
    net = _Net(len(costs) + 2 * len(values) + 2)
    source, sink = len(costs) + 2 * len(values), len(costs) + 2 * len(values) + 1
    for node, (zero, one) in enumerate(costs):
        net.add_edge(source, node, forbidden_cost if one is None else one)
        net.add_edge(node, sink, forbidden_cost if zero is None else zero)
    for number, value in enumerate(values):
        to_one, to_zero = len(costs) + 2 * number, len(costs) + 2 * number + 1
        net.add_edge(value.maker, to_one, forbidden_cost if value.to_one is None else value.to_one)
        net.add_edge(to_zero, value.maker, forbidden_cost if value.to_zero is None else value.to_zero)
        for reader in value.readers:
            net.add_edge(to_one, reader, forbidden_cost)
            net.add_edge(reader, to_zero, forbidden_cost)
    if net.flow(source, sink) >= forbidden_cost:
        raise ValueError("no labels are possible: a node allows neither label, or two must be equal and differ")
    is_near_sink = net.can_reach(sink)
    return [int(is_near_sink[node]) for node in range(len(costs))]


class _Net:
    """A network, and its maximum flow by Dinic's algorithm (1970): O(vertices² · edges), far less on such networks."""

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]
        self._to: list[int] = []
        self._residual: list[int] = []

    def add_edge(self, start: int, end: int, capacity: int) -> None:
        """Add an edge, and its reverse edge with capacity 0."""
        for vertex, to, amount in ((start, end, capacity), (end, start, 0)):
            self._edges[vertex].append(len(self._to))
            self._to.append(to)
            self._residual.append(amount)

    def flow(self, source: int, sink: int) -> int:
        """Return the maximum flow; the residual capacities remain in the network."""
        total = 0
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return total
            next_edges = [0] * len(self._edges)
            while amount := self._push(source, sink, level, next_edges):
                total += amount

    def can_reach(self, sink: int) -> list[bool]:
        """Return which vertices can still reach the sink: the smallest sink side of all minimum cuts."""
        reachable = [False] * len(self._edges)
        reachable[sink], pending = True, [sink]
        while pending:
            vertex = pending.pop()
            for edge in self._edges[vertex]:
                previous = self._to[edge]
                if self._residual[edge ^ 1] and not reachable[previous]:
                    reachable[previous] = True
                    pending.append(previous)
        return reachable

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self._edges)
        level[source], pending = 0, deque([source])
        while pending:
            vertex = pending.popleft()
            for edge in self._edges[vertex]:
                if self._residual[edge] and level[self._to[edge]] < 0:
                    level[self._to[edge]] = level[vertex] + 1
                    pending.append(self._to[edge])
        return level

    def _push(self, source: int, sink: int, level: list[int], next_edges: list[int]) -> int:
        """Push flow along one path of edges to the next level, and return the amount; 0 if no path is left."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self._edges[vertex]
            while next_edges[vertex] < len(edges):
                edge = edges[next_edges[vertex]]
                if self._residual[edge] and level[self._to[edge]] == level[vertex] + 1:
                    break
                next_edges[vertex] += 1
            else:
                if not path:
                    return 0
                level[vertex] = -1
                vertex = self._to[path.pop() ^ 1]
                continue
            path.append(edge)
            vertex = self._to[edge]
        amount = min(self._residual[edge] for edge in path)
        for edge in path:
            self._residual[edge] -= amount
            self._residual[edge ^ 1] += amount
        return amount
