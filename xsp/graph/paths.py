"""Longest and shortest paths through the data flow of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xsp.graph.node import EdgeKind, Graph, Node

if TYPE_CHECKING:
    import numpy as np

MOST_NODES = 20_000
"""Most nodes for the diameter, which considers all pairs of nodes."""

_CHUNK = 512


def predecessors_of(graph: Graph, *kinds: EdgeKind) -> list[list[int]]:
    """Return the predecessors of each node, over edges with one of these reasons (default: data)."""
    predecessors: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges_of(*(kinds or (EdgeKind.DATA,))):
        predecessors[edge.after].append(edge.before)
    return predecessors


def longest(earlier: Sequence[Sequence[int]], weight: Sequence[float]) -> tuple[float, list[int]]:
    """Return the weight of the heaviest path, and the path; (0, []) if there is no node.

    Args:
        earlier: predecessors of each node, all of them with smaller numbers.
        weight: weight of each node, not negative.
    """
    best: list[float] = []
    came_from: list[int | None] = []
    for number, predecessors in enumerate(earlier):
        previous = max(predecessors, key=best.__getitem__, default=None)
        best.append(weight[number] + (0 if previous is None else best[previous]))
        came_from.append(previous)
    if not best:
        return 0, []
    current: int | None = max(range(len(best)), key=best.__getitem__)
    length, path = best[current or 0], []
    while current is not None:
        path.append(current)
        current = came_from[current]
    return length, path[::-1]


def levels(earlier: Sequence[Sequence[int]], weight: Sequence[int]) -> list[int]:
    """Return for each node the weight of the heaviest path that ends with it, the node included."""
    best: list[int] = []
    for number, predecessors in enumerate(earlier):
        best.append(weight[number] + max((best[predecessor] for predecessor in predecessors), default=0))
    return best


def contracted(graph: Graph, is_kept: Callable[[Node], bool]) -> list[list[int]]:
    """Return for each kept node, in new numbers, the kept nodes from which data reach it only through other nodes."""
    earlier = predecessors_of(graph)
    numbers: dict[int, int] = {}
    reach: list[tuple[int, ...]] = []
    predecessors: list[list[int]] = []
    for number, node in enumerate(graph.nodes):
        sources = tuple(dict.fromkeys(source for predecessor in earlier[number] for source in reach[predecessor]))
        if is_kept(node):
            numbers[number] = len(predecessors)
            predecessors.append([numbers[source] for source in sources])
            reach.append((number,))
        else:
            reach.append(sources)
    return predecessors


def diameter(earlier: Sequence[Sequence[int]]) -> int | None:
    """Return the number of nodes on the longest of all shortest directed paths; None beyond `MOST_NODES` nodes.

    In a graph with skip connections it is far smaller than the longest path.
    """
    import numpy as np

    count = len(earlier)
    if count > MOST_NODES:
        return None
    largest = 0
    for start in range(0, count, _CHUNK):
        largest = max(largest, _farthest(np.arange(start, min(start + _CHUNK, count)), earlier))
    return largest


def _farthest(sources: np.ndarray, earlier: Sequence[Sequence[int]]) -> int:
    """Return the number of nodes on the longest of the shortest paths that begin at the given nodes."""
    import numpy as np

    unreached = np.iinfo(np.int16).max - 1  # above `MOST_NODES`, and one more still fits
    start, count = int(sources[0]), len(earlier)
    distance = np.full((count - start, len(sources)), unreached, dtype=np.int16)
    for number in range(start, count):
        row = distance[number - start]
        for predecessor in earlier[number]:
            if predecessor >= start:
                np.minimum(row, distance[predecessor - start] + 1, out=row)
        if number - start < len(sources):
            row[number - start] = 1
    return int(distance[distance < unreached].max())
