"""Parts of a graph as text: shapes, sums of its figures, its phase."""

from __future__ import annotations

from xsp.graph import work
from xsp.graph.node import Graph, Node, Tensor
from xsp.texts import amount, at_least


def total_text(figures: work.Total, unit: str = "") -> str:
    """Return a sum as `amount` does; with `≥` before it if some of its figures are unknown."""
    return at_least(amount(figures.known, unit), figures.unknown > 0)


def shapes(node: Node, most: int = 4) -> str:
    """Return the shapes of a node's first inputs, such as `1×3×224×224, 64×3×7×7`."""
    texts = list(map(sizes, node.call.inputs))
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def sizes(tensor: Tensor) -> str:
    """Return the shape of a tensor, such as `64×3×7×7`."""
    return "?" if tensor.shape is None else "×".join(map(str, tensor.shape)) or "number"


def phase(graph: Graph) -> str:
    """Return the phase of a language model that a graph covers, such as `decode 512`; empty if none."""
    parts = [f"{name} {graph.settings[name]}" for name in ("prefill", "decode") if graph.settings.get(name)]
    return ", ".join(parts)
