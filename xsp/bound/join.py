"""Matching of graph nodes to trace calls: by phase, module, operator and turn, then by the alignment of comparisons.

Each pair has its rule. Nodes and calls without a counterpart are counted: planned and not seen, seen and not planned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from xsp.bound.seen import Seen
from xsp.comparison.align import align, common
from xsp.comparison.series import Series
from xsp.graph.node import Graph


class By(str, enum.Enum):
    """The evidence of a pair, best first."""

    PLACE = "place"
    """Equal phase, module and operator, and the same turn among these calls."""

    NAME = "name"
    """Equal phase and operator, in the longest common subsequence of the remaining calls."""

    TYPE = "type"
    """Equal operators but for their marks, in the longest common subsequence of the calls that then remain."""


@dataclass(frozen=True)
class Join:
    """The pairs of nodes of a graph and calls of a trace."""

    seen: tuple[Seen, ...]
    of_node: tuple[int | None, ...]
    """Index in `seen` of the counterpart of each node."""

    by: tuple[By | None, ...]
    """Rule of the pair of each node."""

    planned_not_seen: tuple[int, ...]
    """Indices of computing nodes without a counterpart."""

    seen_not_planned: tuple[int, ...]
    """Indices of computing calls without a counterpart."""

    @property
    def rules(self) -> dict[str, int]:
        """Number of pairs by rule."""
        found = Counter(each.value for each in self.by if each is not None)
        return {each.value: found[each.value] for each in By}

    def other_shapes(self, graph: Graph) -> tuple[int, int]:
        """Return the number of pairs whose first inputs differ in shape, and of pairs where both shapes are known."""
        both = [
            (node.call.inputs[0].shape, self.seen[place].shape)
            for node, place in zip(graph.nodes, self.of_node, strict=True)
            if node.computes and place is not None and node.call.inputs
        ]
        known = [(ours, theirs) for ours, theirs in both if ours and theirs]
        return sum(ours != theirs for ours, theirs in known), len(known)

    def share(self, graph: Graph) -> float:
        """Return the share of computing nodes with a counterpart."""
        computing = len(graph.computing)
        return (computing - len(self.planned_not_seen)) / computing if computing else 0.0


def of(graph: Graph, seen: Sequence[Seen]) -> Join:
    """Pair the nodes of a graph with the calls of a trace."""
    found = _by_place(graph, seen)
    rules = dict.fromkeys(found, By.PLACE)
    taken = set(found.values())
    for rule, tokens in ((By.NAME, _by_order), (By.TYPE, _by_neighbour)):
        left = [place for place in range(len(graph.nodes)) if place not in found]
        others = [place for place in range(len(seen)) if place not in taken]
        for here, there in tokens(graph, seen, left, others):
            found[here] = there
            rules[here] = rule
            taken.add(there)
    nodes = range(len(graph.nodes))
    return Join(
        tuple(seen),
        tuple(found.get(each) for each in nodes),
        tuple(rules.get(each) for each in nodes),
        tuple(each for each in nodes if graph.nodes[each].computes and each not in found),
        tuple(place for place, each in enumerate(seen) if each.works and place not in taken),
    )


def _by_place(graph: Graph, seen: Sequence[Seen]) -> dict[int, int]:
    turns: Counter[tuple[str, str, str]] = Counter()
    places: dict[tuple[tuple[str, str, str], int], int] = {}
    for place, each in enumerate(seen):
        token = (each.phase or "forward", each.module, each.op)
        places[token, turns[token]] = place
        turns[token] += 1
    turns.clear()
    found = {}
    for number, node in enumerate(graph.nodes):
        token = (node.phase.value, node.module, node.call.op)
        place_ = places.get((token, turns[token]))
        turns[token] += 1
        if place_ is not None:
            found[number] = place_
    return found


def _by_order(graph: Graph, seen: Sequence[Seen], left: list[int], others: list[int]) -> list[tuple[int, int]]:
    ours = [(graph.nodes[each].phase.value, graph.nodes[each].call.op) for each in left]
    theirs = [(seen[each].phase or "forward", seen[each].op) for each in others]
    return [(left[here], others[there]) for here, there in common(ours, theirs)]


def _by_neighbour(graph: Graph, seen: Sequence[Seen], left: list[int], others: list[int]) -> list[tuple[int, int]]:
    """Pair operators of a phase whose names differ only by namespace, in-place mark or private prefix."""
    ours = [
        Series(None, f"planned {each}", _stem(graph.nodes[each].phase.value, graph.nodes[each].call.op), [0.0], None)
        for each in left
    ]
    theirs = [
        Series(None, f"seen {each}", _stem(seen[each].phase or "forward", seen[each].op), [seen[each].ns], None)
        for each in others
    ]
    places = {id(row): each for row, each in zip([*ours, *theirs], [*left, *others], strict=True)}
    return [
        (places[id(pair.a)], places[id(pair.b)])
        for pair in align(ours, theirs)
        if pair.a is not None and pair.b is not None
    ]


def _stem(phase: str, op: str) -> str:
    return f"{phase} {op.rpartition('::')[2].strip('_')}"
