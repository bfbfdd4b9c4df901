"""A graph as text that fits a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from xsp.graph import memory, moduletable, paths, work
from xsp.graph.measures import measures
from xsp.graph.node import Graph, KnownBy, Node, Phase, Tensor
from xsp.scrub import plain
from xsp.texts import amount, at_least, cut

MOST_OPERATORS = 12


MODULE_LEVELS = 2
"""Default number of levels of modules in the table of modules."""


def page(graph: Graph, levels: int = MODULE_LEVELS) -> str:
    """Return a page: measures, the operators with the most work, the modules of the outermost levels, and problems."""
    figures = measures(graph)
    lines = [_title(graph), "", *(_line(*row) for row in _measures(graph, figures)), *_memory(graph)]
    lines += ["", *_operators(graph), *_modules(graph, levels)]
    if graph.problems:
        lines += ["", *(plain(f"{problem.where}: {problem.reason}") for problem in graph.problems)]
    return "\n".join(lines)


def total_text(figures: work.Total, unit: str = "") -> str:
    """Return a sum as `amount` does; with `≥` before it if some of its figures are unknown."""
    return at_least(amount(figures.known, unit), figures.unknown > 0)


def shapes(node: Node, most: int = 4) -> str:
    """Return the shapes of a node's first inputs, such as `1×3×224×224, 64×3×7×7`."""
    texts = list(map(sizes, node.call.inputs))
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


NOTE_WIDTH = 80 - 30
"""Characters of a note beside a value, on a page of 80."""


def _line(name: str, value: str, note: str) -> str:
    return f"{name:15} {value:>12}  {note}".rstrip()


def _measures(graph: Graph, figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    computing = figures["computing"]
    share = f"{100 * figures['unique'] / computing:.1f} % of the computing nodes" if computing else ""
    kinds = [f"{figures[name]} {name}" for name in ("views", "creates", "random", "opaque") if figures[name]]
    flops, traffic = (work.Total(figures[name], figures[f"{name}_unknown"]) for name in ("flops", "bytes"))
    path = f"computing nodes; width {figures['width']}, parallelism {figures['parallelism']}"
    return [
        ("nodes", f"{figures['nodes']:,}", graph.counts),
        ("computing", f"{computing:,}", ", ".join(kinds)),
        ("unique", f"{figures['unique']:,}", share),
        ("edges", _integer(figures["edges"]), f"of data, known by {graph.known_by.value}"),
        ("parameters", _integer(figures["parameters"]), _weights(figures["weight_bytes"])),
        ("input", _integer(figures["input_elements"]), "elements, all samples of the batch"),
        ("FLOPs", total_text(flops), _partly("a multiply-add is 2", flops, graph, work.flops_of)),
        ("bytes", total_text(traffic, "B"), _partly("compulsory", traffic, graph, work.bytes_of)),
        ("longest path", _integer(figures["longest_path"]), "" if graph.known_by is KnownBy.ORDER else path),
        ("diameter", _integer(figures["diameter"]), _diameter(graph, figures)),
        ("activations", amount(figures["peak_activation_bytes"], "B"), "most that are alive at once"),
    ]


def _memory(graph: Graph) -> list[str]:
    """Return the memory at the peak, and its parts; nothing if it is unknown."""
    found = memory.of(graph)
    if found is None:
        return []
    step = "" if found.phase is Phase.FORWARD and not graph.settings.get("train") else f" in {found.phase.value}"
    parts = ", ".join(f"{amount(size, 'B')} {part}" for part, size in found.parts.items() if size)
    # a part stays on one line
    rows = [f"at the peak{step}", *textwrap.wrap(parts.replace(" ", "\0").replace(",\0", ", "), NOTE_WIDTH)]
    rows = [row.replace("\0", " ") for row in rows]
    return [_line("memory" if not place else "", amount(found.bytes, "B") if not place else "", row)
            for place, row in enumerate(rows)]  # fmt: skip


def _modules(graph: Graph, levels: int) -> list[str]:
    """Return a table of the modules down to a level; nothing if the source reports none."""
    found = moduletable.rows(graph)
    shown = [row for row in found if row.depth <= levels]
    if len(found) < 2 or not levels:
        return []
    lines = ["", f"{'module':33} {'output':>17} {'parameters':>10} {'FLOPs':>8} {'bytes':>8}"]
    for row in shown:
        name = row.module.path.rpartition(".")[2] or graph.name.rpartition("/")[2]
        label = "  " * row.depth + plain(f"{name} ({row.module.kind})" if row.module.kind else name)
        output = next((sizes(tensor) for tensor in row.module.outputs), "–")
        cells = f"{row.module.parameters:10,} {total_text(row.flops):>8} {total_text(row.bytes, 'B'):>8}"
        lines.append(f"{cut(label, 33):33} {cut(output, 17):>17} {cells}")
    hidden = len(found) - len(shown)
    return [*lines, *([f"{hidden} more modules in these; --depth N shows N levels"] if hidden else [])]


def sizes(tensor: Tensor) -> str:
    """Return the shape of a tensor, such as `64×3×7×7`."""
    return "?" if tensor.shape is None else "×".join(map(str, tensor.shape)) or "number"


def _diameter(graph: Graph, figures: dict[str, Any]) -> str:
    if figures["diameter"] is None and graph.known_by is not KnownBy.ORDER:
        return f"not computed beyond {paths.MOST_NODES:,} nodes"
    return "the longest of all shortest paths"


def _weights(size: int | None) -> str:
    return "" if size is None else f"{amount(size, 'B')} of weights"


def _integer(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _partly(convention: str, figures: work.Total, graph: Graph, figure: Callable[[Node], int | None]) -> str:
    """Return the convention of a sum; if it has unknown parts, their number and the operators that have them."""
    if not figures.unknown:
        return convention
    operators = list(dict.fromkeys(plain(node.call.op)[:40] for node in graph.computing if figure(node) is None))
    names = operators[0] + (f" and {len(operators) - 1} more" if len(operators) > 1 else "")
    return f"{'at least; ' if figures.known is not None else ''}{_calls(figures.unknown)} unknown: {names}"


def _calls(count: int) -> str:
    return f"{count:,} call{'s' if count != 1 else ''}"


def _operators(graph: Graph) -> list[str]:
    """Return a table of the computing operators, by FLOPs and then by bytes in descending order."""
    groups: dict[str, list[Node]] = {}
    for node in graph.computing:
        groups.setdefault(node.call.op, []).append(node)
    flops = {name: work.total(map(work.flops_of, nodes)) for name, nodes in groups.items()}
    traffic = {name: work.total(map(work.bytes_of, nodes)) for name, nodes in groups.items()}
    order = sorted(groups, key=lambda name: (-(flops[name].known or 0), -(traffic[name].known or 0), name))
    lines = [f"{'operator':44} {'calls':>6} {'unique':>6} {'FLOPs':>9} {'bytes':>9}"]
    for name in order[:MOST_OPERATORS]:
        nodes = groups[name]
        unique = len({node.key for node in nodes})
        label = cut(plain(name), 44)
        lines.append(
            f"{label:44} {len(nodes):6} {unique:6} {total_text(flops[name]):>9} {total_text(traffic[name], 'B'):>9}"
        )
    remaining = len(order) - MOST_OPERATORS
    return [*lines, *([f"{remaining} more operators"] if remaining > 0 else [])]
