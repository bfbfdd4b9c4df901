"""A graph as text that fits a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xsp.graph import paths, work
from xsp.graph.measures import measures
from xsp.graph.node import Graph, KnownBy, Node
from xsp.scrub import plain
from xsp.texts import amount

MOST_OPERATORS = 12


def page(graph: Graph) -> str:
    """Return a page: measures, the operators with the most work, and problems."""
    figures = measures(graph)
    lines = [_title(graph), "", *(_line(*row) for row in _measures(graph, figures)), "", *_operators(graph)]
    if graph.problems:
        lines += ["", *(plain(f"{problem.where}: {problem.reason}") for problem in graph.problems)]
    return "\n".join(lines)


def shapes(node: Node, most: int = 4) -> str:
    """Return the shapes of a node's first inputs, such as `1×3×224×224, 64×3×7×7`."""
    texts = [
        "?" if tensor.shape is None else "×".join(map(str, tensor.shape)) or "number" for tensor in node.call.inputs
    ]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def _title(graph: Graph) -> str:
    settings = graph.settings
    parts = [graph.source.value]
    if settings.get("rung"):
        parts[0] += f" {settings['rung']}"
    if settings.get("batch"):
        parts.append(f"batch {settings['batch']}")
    if phase(graph):
        parts.append(phase(graph))
    elif settings.get("train") is not None:
        parts.append("training step" if settings["train"] else "inference")
    parts += [str(settings["dtype"])] if settings.get("dtype") else []
    return plain(graph.name) + "\n" + plain(", ".join(parts))


def phase(graph: Graph) -> str:
    """Return the phase of a language model that a graph covers, such as `decode 512`; empty if none."""
    parts = [f"{name} {graph.settings[name]}" for name in ("prefill", "decode") if graph.settings.get(name)]
    return ", ".join(parts)


def _line(name: str, value: str, note: str) -> str:
    return f"{name:15} {value:>12}  {note}".rstrip()


def _measures(graph: Graph, figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    computing = figures["computing"]
    share = f"{100 * figures['unique'] / computing:.1f} % of the computing nodes" if computing else ""
    kinds = [f"{figures[name]} {name}" for name in ("views", "creates", "random", "opaque") if figures[name]]
    unknown = figures["flops_unknown"], figures["bytes_unknown"]
    path = f"computing nodes; width {figures['width']}, parallelism {figures['parallelism']}"
    return [
        ("nodes", f"{figures['nodes']:,}", graph.counts),
        ("computing", f"{computing:,}", ", ".join(kinds)),
        ("unique", f"{figures['unique']:,}", share),
        ("edges", _integer(figures["edges"]), f"of data, known by {graph.known_by.value}"),
        ("parameters", _integer(figures["parameters"]), _weights(figures["weight_bytes"])),
        ("input", _integer(figures["input_elements"]), "elements, all samples of the batch"),
        ("FLOPs", amount(figures["flops"]), _partly("a multiply-add is 2", unknown[0], figures["flops_at_least"])),
        ("bytes", amount(figures["bytes"], "B"), _partly("compulsory", unknown[1], figures["bytes_at_least"])),
        ("longest path", _integer(figures["longest_path"]), "" if graph.known_by is KnownBy.ORDER else path),
        ("diameter", _integer(figures["diameter"]), _diameter(graph, figures)),
        ("activations", amount(figures["peak_activation_bytes"], "B"), "most that are alive at once"),
    ]


def _diameter(graph: Graph, figures: dict[str, Any]) -> str:
    if figures["diameter"] is None and graph.known_by is not KnownBy.ORDER:
        return f"not computed beyond {paths.MOST_NODES:,} nodes"
    return "the longest of all shortest paths"


def _weights(size: int | None) -> str:
    return "" if size is None else f"{amount(size, 'B')} of weights"


def _integer(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _partly(convention: str, unknown: int, least: int) -> str:
    return f"unknown for {unknown:,} nodes; the others: {amount(least)}" if unknown else convention


def _operators(graph: Graph) -> list[str]:
    """Return a table of the computing operators, by FLOPs and then by bytes in descending order."""
    groups: dict[str, list[Node]] = {}
    for node in graph.computing:
        groups.setdefault(node.call.op, []).append(node)
    flops = {name: _sum(work.flops_of, nodes) for name, nodes in groups.items()}
    traffic = {name: _sum(work.bytes_of, nodes) for name, nodes in groups.items()}
    order = sorted(groups, key=lambda name: (-(flops[name] or 0), -(traffic[name] or 0), name))
    lines = [f"{'operator':44} {'calls':>6} {'unique':>6} {'FLOPs':>9} {'bytes':>9}"]
    for name in order[:MOST_OPERATORS]:
        nodes = groups[name]
        unique = len({node.key for node in nodes})
        label = plain(name)[:44]
        lines.append(f"{label:44} {len(nodes):6} {unique:6} {amount(flops[name]):>9} {amount(traffic[name], 'B'):>9}")
    remaining = len(order) - MOST_OPERATORS
    return [*lines, *([f"{remaining} more operators"] if remaining > 0 else [])]


def _sum(figure: Callable[[Node], int | None], nodes: Sequence[Node]) -> int | None:
    """Return the sum of a figure over nodes; None if one is unknown."""
    figures = [figure(node) for node in nodes]
    return None if None in figures else sum(filter(None, figures))
