"""A graph in the language of Graphviz: `dot -Tsvg graph.dot > graph.svg` draws it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from xsp import atomic
from xsp.errors import GraphError
from xsp.graph.measures import critical
from xsp.graph.node import EdgeKind, Graph
from xsp.graph.section import shapes
from xsp.scrub import plain


def write(graph: Graph, path: Path | str) -> None:
    """Write the calls with their data flow; calls on the longest path are red, views and allocations grey.

    If only the order is known, the edges are dotted.

    Raises:
        GraphError: the file cannot be written; no partial file is left.
    """
    text = "\n".join(_lines(graph)) + "\n"
    try:
        with atomic.replacing(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise GraphError(f"{path}: the drawing cannot be written ({error.strerror or error})") from error


def _lines(graph: Graph) -> Iterator[str]:
    path = set(critical(graph))
    yield f"digraph {_text(graph.name)} {{"
    yield '  node [shape=box, fontname="sans-serif", fontsize=10];'
    for number, node in enumerate(graph.nodes):
        label = "\n".join(filter(None, (node.call.op, shapes(node), node.module)))
        color = ", color=red, penwidth=2" if number in path else "" if node.computes else ", color=grey, fontcolor=grey"
        yield f"  n{number} [label={_text(label)}{color}];"
    for edge in graph.edges_of(EdgeKind.DATA, EdgeKind.ORDER):
        style = ""
        if edge.kind is EdgeKind.ORDER:
            style = " [style=dotted]"
        elif edge.before in path and edge.after in path:
            style = " [color=red]"
        yield f"  n{edge.before} -> n{edge.after}{style};"
    yield "}"


def _text(text: str) -> str:
    """Return a text in quotes, with its special characters escaped."""
    lines = [plain(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
