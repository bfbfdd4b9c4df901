"""A graph as a document: its measures, modules, and operators or calls; the longest path is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xsp import sections
from xsp.graph import memory, moduletable, paths, work
from xsp.graph.measures import critical, measures
from xsp.graph.node import Graph, KnownBy, Node, Phase, Tensor
from xsp.scrub import plain
from xsp.sections import Branch, Cell, Part, Section, Table, Text, Tree
from xsp.texts import amount, at_least, counted

NAME = "graph"

MOST_NODES = 20_000
"""Most nodes of a graph whose calls the section shows; for a larger graph it has only the measures."""

MOST_MODULES = 2_000
"""Most modules in the table of modules."""

MOST_OPERATORS = 12


@dataclass
class ModuleNode:
    """A module with its own calls, and the modules in it."""

    nodes: list[int] = field(default_factory=list)
    """Places of the module's own calls in the graph."""

    children: dict[str, ModuleNode] = field(default_factory=dict)
    """Name → inner module."""


def tree(graph: Graph, most_levels: int | None = None) -> ModuleNode:
    """Return the whole step as a tree: the phases, and in these the modules.

    Args:
        graph: any graph.
        most_levels: number of levels below which calls are listed in the surrounding module.
    """
    root = ModuleNode()
    for number, node in enumerate(graph.nodes):
        module = root
        for part in [node.phase.value, *filter(None, node.module.split("."))][:most_levels]:
            module = module.children.setdefault(part, ModuleNode())
        module.nodes.append(number)
    return root


def write(graph: Graph, run: Path) -> Path:
    """Write the section of a graph into a run directory, and return its path.

    Raises:
        OutputError: there is no run, or the section cannot be written.
    """
    return sections.write(run, NAME, section(graph))


def section(graph: Graph, levels: int | None = None) -> Section:
    """Return a graph as a document: measures, memory, modules, problems, and the operators or the calls.

    Args:
        graph: any graph.
        levels: number of levels of modules for a short form, which has the operators with the most work; by default
            all modules, and the calls.
    """
    figures, settings = measures(graph), graph.settings
    summary = f"{_conditions(graph)}; {graph.counts}, edges known by {graph.known_by.value}"
    parts: list[Part] = [Text(summary if levels is not None else f"{graph.name}: {summary}")]
    parts.append(Table(("measure", "value", "note"), tuple(_measures(graph, figures)), "Measures"))
    found = memory.of(graph)
    if found is not None:
        step = "" if found.phase is Phase.FORWARD and not settings.get("train") else f", in {found.phase.value}"
        rows = (("all", found.bytes), *((part, size) for part, size in found.parts.items() if size))
        parts.append(Table(("part", "memory_bytes"), rows, f"Memory at the peak{step}"))
    parts += [_operators(graph)] if levels is not None else []
    modules = moduletable.rows(graph)
    shown = [row for row in modules if levels is None or row.depth <= levels][:MOST_MODULES]
    if len(modules) > 1 and levels != 0:
        columns = ("module", "class", "output", "parameters", "FLOPs", "bytes")
        parts.append(Table(columns, tuple(map(_module_cells, shown)), "Modules"))
        if levels is not None and len(shown) < len(modules):
            parts.append(Text(f"{len(modules) - len(shown)} more modules in these; --depth N shows N levels"))
    if graph.problems:
        parts.append(Table(("where", "what could not be captured"), tuple((p.where, p.reason) for p in graph.problems)))
    if levels is not None:
        return Section(graph.name, tuple(parts))
    if len(graph.nodes) <= MOST_NODES:
        parts.append(_tree(graph))
    else:
        parts.append(Text(f"Its {len(graph.nodes):,} calls are not listed; the limit is {MOST_NODES:,}."))
    return Section("Graph", tuple(parts))


def _conditions(graph: Graph) -> str:
    """Return what was captured: `capture eager, batch 8, training step, float32`."""
    settings = graph.settings
    parts = [f"{graph.source.value} {settings.get('rung') or ''}".rstrip()]
    parts += [f"batch {settings['batch']}"] if settings.get("batch") else []
    if phase(graph):
        parts.append(phase(graph))
    elif settings.get("train") is not None:
        parts.append("training step" if settings["train"] else "inference")
    return ", ".join([*parts, *([str(settings["dtype"])] if settings.get("dtype") else [])])


def _measures(graph: Graph, figures: dict[str, Any]) -> list[tuple[Cell, ...]]:
    computing = figures["computing"]
    share = f"{100 * figures['unique'] / computing:.1f} % of the computing nodes" if computing else ""
    kinds = [f"{figures[name]} {name}" for name in ("views", "creates", "random", "opaque") if figures[name]]
    flops, traffic = (work.Total(figures[name], figures[f"{name}_unknown"]) for name in ("flops", "bytes"))
    path = f"computing nodes; width {figures['width']}, parallelism {figures['parallelism']}"
    weights = figures["weight_bytes"]
    if figures["diameter"] is None and graph.known_by is not KnownBy.ORDER:
        diameter = f"not computed beyond {paths.MOST_NODES:,} nodes"
    else:
        diameter = "the longest of all shortest paths"
    return [
        ("nodes", figures["nodes"], ""),
        ("computing", computing, ", ".join(kinds)),
        ("unique", figures["unique"], share),
        ("edges", figures["edges"], f"of data, known by {graph.known_by.value}"),
        ("parameters", figures["parameters"], "" if weights is None else f"{amount(weights, 'B')} of weights"),
        ("input", figures["input_elements"], "elements, all samples of the batch"),
        ("FLOPs", total_text(flops), _partly("a multiply-add is 2", flops, graph, work.flops_of)),
        ("bytes", total_text(traffic, "B"), _partly("compulsory", traffic, graph, work.bytes_of)),
        ("longest path", figures["longest_path"], "" if graph.known_by is KnownBy.ORDER else path),
        ("diameter", figures["diameter"], diameter),
        ("activations", amount(figures["peak_activation_bytes"], "B"), "most that are alive at once"),
    ]


def _partly(convention: str, figures: work.Total, graph: Graph, figure: Callable[[Node], int | None]) -> str:
    """Return the convention of a sum; if it has unknown parts, their number and the operators that have them."""
    if not figures.unknown:
        return convention
    operators = list(dict.fromkeys(plain(node.call.op)[:40] for node in graph.computing if figure(node) is None))
    names = operators[0] + (f" and {len(operators) - 1} more" if len(operators) > 1 else "")
    calls = counted(figures.unknown, "call")
    return f"{'at least; ' if figures.known is not None else ''}{calls} unknown: {names}"


def _operators(graph: Graph) -> Table:
    """Return a table of the computing operators, by FLOPs and then by bytes in descending order."""
    groups: dict[str, list[Node]] = {}
    for node in graph.computing:
        groups.setdefault(node.call.op, []).append(node)
    flops = {name: work.total(map(work.flops_of, nodes)) for name, nodes in groups.items()}
    traffic = {name: work.total(map(work.bytes_of, nodes)) for name, nodes in groups.items()}
    order = sorted(groups, key=lambda name: (-(flops[name].known or 0), -(traffic[name].known or 0), name))
    rows = tuple(
        (name, len(groups[name]), len({node.key for node in groups[name]}), total_text(flops[name]),
         total_text(traffic[name], "B"))
        for name in order[:MOST_OPERATORS]
    )  # fmt: skip
    title = f"Operators, {MOST_OPERATORS} of {len(order)}" if len(order) > MOST_OPERATORS else "Operators"
    return Table(("operator", "calls", "unique", "FLOPs", "bytes"), rows, title)


def branch(
    name: str, module: ModuleNode, leaf: Callable[[int], Branch], sums: Callable[[Sequence[int]], tuple[Cell, ...]]
) -> Branch:
    """Return a module as a branch, with its calls and then its inner modules; it is marked if one of these is.

    Args:
        name: name of the module.
        module: a module of `tree`.
        leaf: function from the place of a call in the graph to its branch.
        sums: function from the places of all calls in a module to the cells of its branch.
    """
    calls = tuple(map(leaf, module.nodes))
    inner = tuple(branch(part, child, leaf, sums) for part, child in module.children.items())
    marked = any(child.marked for child in (*calls, *inner))
    return Branch(name, sums(list(_all_nodes(module))), marked, (*calls, *inner))


def _module_cells(row: moduletable.ModuleRow) -> tuple[Cell, ...]:
    output = next((sizes(tensor) for tensor in row.module.outputs), "")
    return (
        row.module.path or "(the model)",
        row.module.kind,
        output,
        row.module.parameters,
        total_text(row.flops),
        total_text(row.bytes, "B"),
    )


def _tree(graph: Graph) -> Tree:
    path = set(critical(graph))
    mark = "" if graph.known_by is KnownBy.ORDER else "calls on the longest path"

    def leaf(number: int) -> Branch:
        node = graph.nodes[number]
        cells = shapes(node), amount(work.flops_of(node)), amount(work.bytes_of(node), "B")
        return Branch(node.call.op, cells, number in path)

    def sums(numbers: Sequence[int]) -> tuple[Cell, ...]:
        nodes = [graph.nodes[number] for number in numbers]
        flops, traffic = work.total(map(work.flops_of, nodes)), work.total(map(work.bytes_of, nodes))
        return f"{len(nodes):,} calls", f"{total_text(flops)} FLOPs", total_text(traffic, "B")

    root = branch("the step", tree(graph, sections.MAX_LEVELS - 3), leaf, sums)
    return Tree(("inputs", "FLOPs", "bytes"), (root,), "Modules and their calls", mark)


def _all_nodes(module: ModuleNode) -> Iterator[int]:
    pending = [module]
    while pending:
        current = pending.pop()
        yield from current.nodes
        pending += current.children.values()


# --- parts as text ----------------------------------------------------------------------------------------------------
# Parts of a graph as text: shapes, sums of its figures, its phase.


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
