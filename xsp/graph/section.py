"""A graph as a section of a run's report: its measures, and the modules with their calls, the longest path marked."""

from __future__ import annotations

from pathlib import Path

from xsp import sections
from xsp.graph import page, work
from xsp.graph.measures import critical, measures
from xsp.graph.node import Graph, KnownBy
from xsp.graph.text import amount, shapes
from xsp.sections import Branch, Section, Table, Text, Tree

NAME = "graph"

MOST_NODES = 20_000
"""Of a graph whose calls the section has; of a larger one it has the measures alone."""

SHOWN = (
    "nodes", "computing", "unique", "parameters", "flops", "bytes", "longest_path", "diameter", "width", "parallelism",
    "intensity", "peak_activation_bytes",
)  # fmt: skip


def write(graph: Graph, run: Path) -> Path:
    """Put the section of a graph into a run directory, and return its path.

    Raises:
        OutputError: there is no run, or it cannot be written.
    """
    return sections.write(run, NAME, section(graph))


def section(graph: Graph) -> Section:
    """Return what the report shows of a graph."""
    found = measures(graph)
    stated = ", ".join(f"{name} {value}" for name, value in graph.settings.items() if value is not None)
    about = f"{graph.name}: {graph.counts}, edges known by {graph.known_by.value}; {stated}"
    rows = tuple((name.replace("_", " "), found[name]) for name in SHOWN)
    parts: list[sections.Part] = [Text(about), Table(("measure", "value"), rows, "Measures")]
    if graph.problems:
        parts.append(Table(("where", "what could not be seen"), tuple((p.where, p.reason) for p in graph.problems)))
    if len(graph.nodes) <= MOST_NODES:
        parts.append(_tree(graph))
    return Section("Graph", tuple(parts))


def _tree(graph: Graph) -> Tree:
    path = set(critical(graph))
    mark = "" if graph.known_by is KnownBy.ORDER else "calls on the longest path"
    columns = ("inputs", "FLOPs", "bytes")
    return Tree(
        columns,
        (_branch(graph, "the step", page.tree(graph, sections.MOST_LEVELS - 3), path),),
        "Modules and their calls",
        mark,
    )


def _branch(graph: Graph, name: str, module: page.Module, path: set[int]) -> Branch:
    """Return a module with its calls, then the modules in it."""
    calls = tuple(
        Branch(
            node.call.op,
            (shapes(node), amount(work.flops_of(node)), amount(work.bytes_of(node), "B")),
            number in path,
        )
        for number, node in ((number, graph.nodes[number]) for number in module.nodes)
    )
    inside = tuple(_branch(graph, part, each, path) for part, each in module.inside.items())
    return Branch(name, (), any(each.marked for each in (*calls, *inside)), (*calls, *inside))
