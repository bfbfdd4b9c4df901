"""Differences of two graphs: calls that only one has, by key; modules that contain them; measures that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xsp.graph.measures import measures
from xsp.graph.node import Graph, Node
from xsp.graph.section import shapes
from xsp.sections import Part, Section, Table, Text
from xsp.texts import amount, at_least


@dataclass(frozen=True)
class CallCounts:
    """A call that occurs a different number of times in the two graphs."""

    op: str
    key: str
    shapes: str
    first: int
    """Number of occurrences in the first graph."""

    second: int


@dataclass(frozen=True)
class GraphDifference:
    """The calls that two graphs share, and those that only one of them has."""

    names: tuple[str, str]
    shared: int
    """Number of shared calls, each counted as often as in the graph with fewer of them."""

    only: tuple[int, int]
    """Numbers of calls that only the first graph has, and only the second."""

    calls: tuple[CallCounts, ...]
    modules: tuple[tuple[str, int, int], ...]
    """Path, and the numbers of calls in it that only the first has, and only the second, compared by path."""

    measures: tuple[tuple[str, Any, Any], ...]
    """Name and both values of each measure that differs."""

    unknown: Mapping[str, tuple[int, int]]
    """Of the measures that are sums over calls: the numbers of calls whose figure is unknown, and not in the sum."""

    def as_json(self) -> dict[str, Any]:
        """Return the plain values that `xsp graph --compare --format json` prints."""
        return {
            "first": self.names[0],
            "second": self.names[1],
            "shared": self.shared,
            "only_first": self.only[0],
            "only_second": self.only[1],
            "calls": [vars(row) for row in self.calls],
            "modules": [{"module": name, "only_first": a, "only_second": b} for name, a, b in self.modules],
            "measures": [
                {"measure": name, "first": a, "second": b}
                | dict(zip(("first_unknown", "second_unknown"), self.unknown.get(name, ()), strict=False))
                for name, a, b in self.measures
            ],
        }


def of(first: Graph, second: Graph) -> GraphDifference:
    """Return how two graphs differ. Calls are the same if their keys are equal, whatever their modules and order."""
    counts = tuple(Counter(node.key for node in graph.nodes) for graph in (first, second))
    nodes_by_key: dict[str, Node] = {node.key: node for graph in (second, first) for node in graph.nodes}
    rows = [
        CallCounts(
            f"{node.call.op}.{node.call.overload}" if node.call.overload else node.call.op,
            key,
            shapes(node),
            counts[0][key],
            counts[1][key],
        )
        for key, node in nodes_by_key.items()
        if counts[0][key] != counts[1][key]
    ]
    both = measures(first), measures(second)
    rows.sort(key=lambda row: (-abs(row.first - row.second), row.op, row.key))
    return GraphDifference(
        (first.name, second.name),
        (counts[0] & counts[1]).total(),
        ((counts[0] - counts[1]).total(), (counts[1] - counts[0]).total()),
        tuple(rows),
        tuple(_modules(first, second)),
        tuple(_measures(*both)),
        {name: (both[0][f"{name}_unknown"], both[1][f"{name}_unknown"]) for name in ("flops", "bytes")},
    )


def section(difference: GraphDifference) -> Section:
    """Return the difference as a document."""
    (first, second), only = difference.names, difference.only
    counts = f"{difference.shared:,} calls in both, {only[0]:,} only in the first, {only[1]:,} in the second"
    parts: list[Part] = [Text(f"first {first}; second {second}."), Text(counts)]
    if difference.measures:
        rows = tuple(
            (name, *(at_least(_cell(value), unknown > 0 and value is not None)
                     for value, unknown in zip(values, difference.unknown.get(name, (0, 0)), strict=True)))
            for name, *values in difference.measures
        )  # fmt: skip
        parts.append(Table(("measure", "first", "second"), rows))
    if difference.calls:
        calls = tuple((row.op, row.shapes, row.first, row.second) for row in difference.calls)
        parts.append(Table(("call", "inputs", "first", "second"), calls))
    if difference.modules:
        modules = tuple((name or "(outermost)", a, b) for name, a, b in difference.modules)
        parts.append(Table(("module", "only first", "only second"), modules))
    return Section("Difference of two graphs", tuple(parts))


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    return amount(value) if isinstance(value, int) and value >= 10_000_000 else f"{value:,}"


def _modules(first: Graph, second: Graph) -> Iterator[tuple[str, int, int]]:
    """Yield the modules whose calls differ between the graphs, those with the most differences first."""
    counts: list[dict[str, Counter[str]]] = []
    for graph in (first, second):
        counts.append({})
        for node in graph.nodes:
            counts[-1].setdefault(node.module, Counter())[node.key] += 1
    empty: Counter[str] = Counter()
    differing = []
    for module in dict.fromkeys([*counts[0], *counts[1]]):
        first_calls, second_calls = (by_module.get(module, empty) for by_module in counts)
        if first_calls != second_calls:
            differing.append((module, (first_calls - second_calls).total(), (second_calls - first_calls).total()))
    yield from sorted(differing, key=lambda row: -(row[1] + row[2]))


def _measures(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from ((name, value, second[name]) for name, value in first.items() if value != second[name])
