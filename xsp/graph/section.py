"""A graph as a section of a page: its measures, and the modules with their calls; the longest path is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xsp import sections
from xsp.graph import memory, moduletable, work
from xsp.graph.measures import critical, measures
from xsp.graph.node import Graph, KnownBy
from xsp.graph.text import shapes, sizes, total_text
from xsp.sections import Branch, Cell, Section, Table, Text, Tree
from xsp.texts import amount

NAME = "graph"

MOST_NODES = 20_000
"""Most nodes of a graph whose calls the section shows; for a larger graph it has only the measures."""

MOST_MODULES = 2_000
"""Most modules in the table of modules."""

SECTION_MEASURES = (
    "nodes", "computing", "unique", "parameters", "flops", "flops_unknown", "bytes", "bytes_unknown", "longest_path",
    "diameter", "width", "parallelism", "intensity", "peak_activation_bytes",
)  # fmt: skip


@dataclass
class Module:
    """A module with its own calls, and the modules in it."""

    nodes: list[int] = field(default_factory=list)
    """Places of the module's own calls in the graph."""

    children: dict[str, Module] = field(default_factory=dict)
    """Name → inner module."""


def tree(graph: Graph, most_levels: int | None = None) -> Module:
    """Return the whole step as a tree: the phases, and in these the modules.

    Args:
        graph: any graph.
        most_levels: number of levels below which calls are listed in the surrounding module.
    """
    root = Module()
    for number, node in enumerate(graph.nodes):
        module = root
        for part in [node.phase.value, *filter(None, node.module.split("."))][:most_levels]:
            module = module.children.setdefault(part, Module())
        module.nodes.append(number)
    return root


def write(graph: Graph, run: Path) -> Path:
    """Write the section of a graph into a run directory, and return its path.

    Raises:
        OutputError: there is no run, or the section cannot be written.
    """
    return sections.write(run, NAME, section(graph))


def section(graph: Graph) -> Section:
    """Return the section of a graph in the report."""
    figures = measures(graph)
    settings = ", ".join(f"{name} {value}" for name, value in graph.settings.items() if value is not None)
    summary = f"{graph.name}: {graph.counts}, edges known by {graph.known_by.value}; {settings}"
    rows = tuple((name.replace("_", " "), figures[name]) for name in SECTION_MEASURES)
    parts: list[sections.Part] = [Text(summary), Table(("measure", "value"), rows, "Measures")]
    found = memory.of(graph)
    if found is not None:
        parts.append(
            Table(("part", "bytes"), tuple(found.parts.items()), f"Memory at the peak, in {found.phase.value}")
        )
    modules = moduletable.rows(graph)[:MOST_MODULES]
    if len(modules) > 1:
        columns = ("module", "class", "output", "parameters", "FLOPs", "bytes")
        parts.append(Table(columns, tuple(map(_module_cells, modules)), "Modules"))
    if graph.problems:
        parts.append(Table(("where", "what could not be captured"), tuple((p.where, p.reason) for p in graph.problems)))
    if len(graph.nodes) <= MOST_NODES:
        parts.append(_tree(graph))
    else:
        parts.append(Text(f"Its {len(graph.nodes):,} calls are not listed; the limit is {MOST_NODES:,}."))
    return Section("Graph", tuple(parts))


def branch(
    name: str, module: Module, leaf: Callable[[int], Branch], sums: Callable[[Sequence[int]], tuple[Cell, ...]]
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


def _module_cells(row: moduletable.Row) -> tuple[Cell, ...]:
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


def _all_nodes(module: Module) -> Iterator[int]:
    pending = [module]
    while pending:
        current = pending.pop()
        yield from current.nodes
        pending += current.children.values()
