"""Matching of graph nodes to trace calls: by phase, module, operator and occurrence, then by sequence alignment.

Each pair has its rule. Nodes and calls without a counterpart are counted: planned and not seen, seen and not planned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from xsp.bound.recordedcalls import RecordedCall
from xsp.comparison.align import align, common_subsequence
from xsp.comparison.series import Series
from xsp.graph.node import Graph


class By(str, enum.Enum):
    """The evidence of a pair, best first."""

    PLACE = "place"
    """Equal phase, module and operator, and the same occurrence among these calls."""

    NAME = "name"
    """Equal phase and operator, in the longest common subsequence of the remaining calls."""

    TYPE = "type"
    """Equal operators but for their marks, in the longest common subsequence of the calls that then remain."""


@dataclass(frozen=True)
class Join:
    """The pairs of nodes of a graph and calls of a trace."""

    seen: tuple[RecordedCall, ...]
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
        counts = Counter(rule.value for rule in self.by if rule is not None)
        return {rule.value: counts[rule.value] for rule in By}

    def other_shapes(self, graph: Graph) -> tuple[int, int]:
        """Return the number of pairs whose first inputs differ in shape, and of pairs where both shapes are known."""
        both = [
            (node.call.inputs[0].shape, self.seen[index].shape)
            for node, index in zip(graph.nodes, self.of_node, strict=True)
            if node.computes and index is not None and node.call.inputs
        ]
        comparable = [(ours, theirs) for ours, theirs in both if ours and theirs]
        return sum(ours != theirs for ours, theirs in comparable), len(comparable)

    def share(self, graph: Graph) -> float:
        """Return the share of computing nodes with a counterpart."""
        computing = len(graph.computing)
        return (computing - len(self.planned_not_seen)) / computing if computing else 0.0


def of(graph: Graph, seen: Sequence[RecordedCall]) -> Join:
    """Pair the nodes of a graph with the calls of a trace."""
    pairs = _by_place(graph, seen)
    rules = dict.fromkeys(pairs, By.PLACE)
    paired = set(pairs.values())
    for rule, tokens in ((By.NAME, _by_order), (By.TYPE, _by_neighbour)):
        unpaired_nodes = [index for index in range(len(graph.nodes)) if index not in pairs]
        unpaired_calls = [index for index in range(len(seen)) if index not in paired]
        for node, call in tokens(graph, seen, unpaired_nodes, unpaired_calls):
            pairs[node] = call
            rules[node] = rule
            paired.add(call)
    nodes = range(len(graph.nodes))
    return Join(
        tuple(seen),
        tuple(pairs.get(node) for node in nodes),
        tuple(rules.get(node) for node in nodes),
        tuple(node for node in nodes if graph.nodes[node].computes and node not in pairs),
        tuple(index for index, call in enumerate(seen) if call.works and index not in paired),
    )


def _by_place(graph: Graph, seen: Sequence[RecordedCall]) -> dict[int, int]:
    turns: Counter[tuple[str, str, str]] = Counter()
    places: dict[tuple[tuple[str, str, str], int], int] = {}
    for index, call in enumerate(seen):
        token = (call.phase or "forward", call.module, call.op)
        places[token, turns[token]] = index
        turns[token] += 1
    turns.clear()
    found = {}
    for number, node in enumerate(graph.nodes):
        token = (node.phase.value, node.module, node.call.op)
        match = places.get((token, turns[token]))
        turns[token] += 1
        if match is not None:
            found[number] = match
    return found


def _by_order(graph: Graph, seen: Sequence[RecordedCall], nodes: list[int], calls: list[int]) -> list[tuple[int, int]]:
    ours = [(graph.nodes[node].phase.value, graph.nodes[node].call.op) for node in nodes]
    theirs = [(seen[call].phase or "forward", seen[call].op) for call in calls]
    return [(nodes[node_index], calls[call_index]) for node_index, call_index in common_subsequence(ours, theirs)]


def _by_neighbour(
    graph: Graph, seen: Sequence[RecordedCall], nodes: list[int], calls: list[int]
) -> list[tuple[int, int]]:
    """Pair operators of a phase whose names differ only by namespace, in-place mark or private prefix."""
    ours = [
        Series(None, f"planned {node}", _stem(graph.nodes[node].phase.value, graph.nodes[node].call.op), [0.0], None)
        for node in nodes
    ]
    theirs = [
        Series(None, f"seen {call}", _stem(seen[call].phase or "forward", seen[call].op), [seen[call].ns], None)
        for call in calls
    ]
    indices = {id(row): index for row, index in zip([*ours, *theirs], [*nodes, *calls], strict=True)}
    return [
        (indices[id(pair.a)], indices[id(pair.b)])
        for pair in align(ours, theirs)
        if pair.a is not None and pair.b is not None
    ]


def _stem(phase: str, op: str) -> str:
    return f"{phase} {op.rpartition('::')[2].strip('_')}"
