"""The calls of a graph by phase and module, as a tree: for pages that open by a click."""

from __future__ import annotations

from dataclasses import dataclass, field

from xsp.graph.node import Graph


@dataclass
class Module:
    """A module with its own calls, and the modules in it."""

    nodes: list[int] = field(default_factory=list)
    """Places of its calls in the graph."""

    inside: dict[str, Module] = field(default_factory=dict)
    """By their names in it."""


def tree(graph: Graph, most_levels: int | None = None) -> Module:
    """Return the whole step: in it the phases, in these the modules.

    Args:
        graph: any.
        most_levels: below which the calls of modules further in stand in the module around them.
    """
    root = Module()
    for number, node in enumerate(graph.nodes):
        at = root
        for part in [node.phase.value, *filter(None, node.module.split("."))][:most_levels]:
            at = at.inside.setdefault(part, Module())
        at.nodes.append(number)
    return root
