"""Longest and shortest paths through the data flow of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xsp.graph.node import Graph, Node, Why

if TYPE_CHECKING:
    import numpy as np

MOST_NODES = 20_000
"""Most nodes for the diameter, which considers all pairs of nodes."""

_CHUNK = 512


def before(graph: Graph, *why: Why) -> list[list[int]]:
    """Return the predecessors of each node, over edges with one of these reasons (default: data)."""
    found: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges_of(*(why or (Why.DATA,))):
        found[edge.after].append(edge.before)
    return found


def longest(earlier: Sequence[Sequence[int]], weight: Sequence[float]) -> tuple[float, list[int]]:
    """Return the weight of the heaviest path, and the path; (0, []) if there is no node.

    Args:
        earlier: predecessors of each node, all of them with smaller numbers.
        weight: weight of each node, not negative.
    """
    best: list[float] = []
    came: list[int | None] = []
    for number, those in enumerate(earlier):
        through = max(those, key=best.__getitem__, default=None)
        best.append(weight[number] + (0 if through is None else best[through]))
        came.append(through)
    if not best:
        return 0, []
    at: int | None = max(range(len(best)), key=best.__getitem__)
    length, path = best[at or 0], []
    while at is not None:
        path.append(at)
        at = came[at]
    return length, path[::-1]


def levels(earlier: Sequence[Sequence[int]], weight: Sequence[int]) -> list[int]:
    """Return for each node the weight of the heaviest path that ends with it, the node included."""
    best: list[int] = []
    for number, those in enumerate(earlier):
        best.append(weight[number] + max((best[each] for each in those), default=0))
    return best


def contracted(graph: Graph, kept: Callable[[Node], bool]) -> list[list[int]]:
    """Return for each kept node, in new numbers, the kept nodes from which data reach it only through other nodes."""
    earlier = before(graph)
    new: dict[int, int] = {}
    reach: list[tuple[int, ...]] = []
    found: list[list[int]] = []
    for number, node in enumerate(graph.nodes):
        sources = tuple(dict.fromkeys(each for those in earlier[number] for each in reach[those]))
        if kept(node):
            new[number] = len(found)
            found.append([new[each] for each in sources])
            reach.append((number,))
        else:
            reach.append(sources)
    return found


def diameter(earlier: Sequence[Sequence[int]]) -> int | None:
    """Return the number of nodes on the longest of all shortest directed paths; None beyond `MOST_NODES` nodes.

    In a graph with skip connections it is far smaller than the longest path.
    """
    import numpy as np

    count = len(earlier)
    if count > MOST_NODES:
        return None
    most = 0
    for first in range(0, count, _CHUNK):
        most = max(most, _farthest(np.arange(first, min(first + _CHUNK, count)), earlier))
    return most


def _farthest(sources: np.ndarray, earlier: Sequence[Sequence[int]]) -> int:
    """Return the number of nodes on the longest of the shortest paths that begin at the given nodes."""
    import numpy as np

    never = np.iinfo(np.int16).max - 1  # above `MOST_NODES`, and one more still fits
    first, count = int(sources[0]), len(earlier)
    distance = np.full((count - first, len(sources)), never, dtype=np.int16)
    for number in range(first, count):
        row = distance[number - first]
        for each in earlier[number]:
            if each >= first:
                np.minimum(row, distance[each - first] + 1, out=row)
        if number - first < len(sources):
            row[number - first] = 1
    return int(distance[distance < never].max())
