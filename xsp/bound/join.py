"""Matching of graph nodes to trace calls: by phase, module, operator and occurrence, then by sequence alignment.

Each pair has its rule. Nodes and calls without a counterpart are listed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from xsp.bound.recordedcalls import RecordedCall
from xsp.comparison.align import align, common_subsequence
from xsp.comparison.series import RowTimes
from xsp.graph.node import Graph


class MatchRule(str, enum.Enum):
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

    calls: tuple[RecordedCall, ...]
    call_of_node: tuple[int | None, ...]
    """Index in `seen` of the counterpart of each node."""

    match_rules: tuple[MatchRule | None, ...]
    """Rule of the pair of each node."""

    unmatched_nodes: tuple[int, ...]
    """Indices of computing nodes without a counterpart."""

    unmatched_calls: tuple[int, ...]
    """Indices of computing calls without a counterpart."""

    @property
    def rules(self) -> dict[str, int]:
        """Number of pairs by rule."""
        counts = Counter(rule.value for rule in self.match_rules if rule is not None)
        return {rule.value: counts[rule.value] for rule in MatchRule}

    def shape_differences(self, graph: Graph) -> tuple[int, int]:
        """Return the number of pairs whose first inputs differ in shape, and of pairs where both shapes are known."""
        pairs = [
            (node.call.inputs[0].shape, self.calls[index].shape)
            for node, index in zip(graph.nodes, self.call_of_node, strict=True)
            if node.computes and index is not None and node.call.inputs
        ]
        comparable = [(node_shape, call_shape) for node_shape, call_shape in pairs if node_shape and call_shape]
        return sum(node_shape != call_shape for node_shape, call_shape in comparable), len(comparable)

    def share(self, graph: Graph) -> float:
        """Return the share of computing nodes with a counterpart."""
        computing = len(graph.computing)
        return (computing - len(self.unmatched_nodes)) / computing if computing else 0.0


def of(graph: Graph, calls: Sequence[RecordedCall]) -> Join:
    """Pair the nodes of a graph with the calls of a trace."""
    pairs = _by_place(graph, calls)
    rules = dict.fromkeys(pairs, MatchRule.PLACE)
    paired = set(pairs.values())
    for rule, tokens in ((MatchRule.NAME, _by_order), (MatchRule.TYPE, _by_neighbour)):
        unpaired_nodes = [index for index in range(len(graph.nodes)) if index not in pairs]
        unpaired_calls = [index for index in range(len(calls)) if index not in paired]
        for node, call in tokens(graph, calls, unpaired_nodes, unpaired_calls):
            pairs[node] = call
            rules[node] = rule
            paired.add(call)
    nodes = range(len(graph.nodes))
    return Join(
        tuple(calls),
        tuple(pairs.get(node) for node in nodes),
        tuple(rules.get(node) for node in nodes),
        tuple(node for node in nodes if graph.nodes[node].computes and node not in pairs),
        tuple(index for index, call in enumerate(calls) if call.computes and index not in paired),
    )


def _by_place(graph: Graph, calls: Sequence[RecordedCall]) -> dict[int, int]:
    occurrences: Counter[tuple[str, str, str]] = Counter()
    places: dict[tuple[tuple[str, str, str], int], int] = {}
    for index, call in enumerate(calls):
        token = (call.phase or "forward", call.module, call.op)
        places[token, occurrences[token]] = index
        occurrences[token] += 1
    occurrences.clear()
    pairs = {}
    for number, node in enumerate(graph.nodes):
        token = (node.phase.value, node.module, node.call.op)
        match = places.get((token, occurrences[token]))
        occurrences[token] += 1
        if match is not None:
            pairs[number] = match
    return pairs


def _by_order(
    graph: Graph, recorded_calls: Sequence[RecordedCall], nodes: list[int], calls: list[int]
) -> list[tuple[int, int]]:
    node_tokens = [(graph.nodes[node].phase.value, graph.nodes[node].call.op) for node in nodes]
    call_tokens = [(recorded_calls[call].phase or "forward", recorded_calls[call].op) for call in calls]
    return [(nodes[node], calls[call]) for node, call in common_subsequence(node_tokens, call_tokens)]


def _by_neighbour(
    graph: Graph, recorded_calls: Sequence[RecordedCall], nodes: list[int], calls: list[int]
) -> list[tuple[int, int]]:
    """Pair operators of a phase whose names differ only by namespace, in-place mark or private prefix."""
    node_series = [
        RowTimes(None, f"planned {node}", _stem(graph.nodes[node].phase.value, graph.nodes[node].call.op), [0.0], None)
        for node in nodes
    ]
    call_series = [
        RowTimes(
            None,
            f"seen {call}",
            _stem(recorded_calls[call].phase or "forward", recorded_calls[call].op),
            [recorded_calls[call].ns],
            None,
        )
        for call in calls
    ]
    indices = {id(row): index for row, index in zip([*node_series, *call_series], [*nodes, *calls], strict=True)}
    return [
        (indices[id(pair.a)], indices[id(pair.b)])
        for pair in align(node_series, call_series)
        if pair.a is not None and pair.b is not None
    ]


def _stem(phase: str, op: str) -> str:
    return f"{phase} {op.rpartition('::')[2].strip('_')}"
