"""A graph as one HTML page without network and script: measures, modules that fold, the longest path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from xsp import atomic
from xsp.errors import GraphError
from xsp.graph import work
from xsp.graph.measures import as_json, critical
from xsp.graph.node import Graph, Node
from xsp.graph.text import amount, shapes
from xsp.scrub import plain

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .3em 0 1em } td, th { padding: .1em .8em .1em 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } summary { cursor: pointer }
details { margin-left: 1.2em } details > table { margin-left: 1.2em } .view { color: #888 }
tr.critical td:first-child { border-left: 4px solid #c33; padding-left: .4em } small { color: #666 }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } small, .view { color: #999 } }
"""


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


def write(graph: Graph, path: Path | str) -> None:
    """Write the page.

    Raises:
        GraphError: it cannot be written; nothing is left of the attempt.
    """
    text = "\n".join(_lines(graph))
    try:
        with atomic.written(Path(path)) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphError(f"{path}: the page cannot be written ({error.strerror or error})") from error


def _lines(graph: Graph) -> Iterator[str]:
    found = as_json(graph)
    title = _text(graph.name)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    yield f"<h1>{title}</h1><p>{_text(graph.counts)}; edges known by {found['edges_known_by']}"
    yield f"<p><small>{_text(', '.join(f'{name} {value}' for name, value in graph.settings.items()))}</small>"
    yield "<h2>Measures</h2><table>"
    for name, value in found.items():
        if isinstance(value, (int, float)) or value is None:
            shown = "unknown" if value is None else f"{value:,}"
            yield f'<tr><td>{_text(name.replace("_", " "))}<td class="n">{shown}'
    yield "</table>"
    if graph.problems:
        yield "<h2>What could not be seen</h2><ul>"
        yield from (f"<li>{_text(each.where)}: {_text(each.reason)}" for each in graph.problems)
        yield "</ul>"
    path = set(critical(graph))
    yield "<h2>Modules</h2><p>Calls on the longest path have a red mark. Click a module to open it."
    yield from _module(graph, "the step", tree(graph), path)


def _module(graph: Graph, name: str, module: Module, path: set[int]) -> Iterator[str]:
    """Yield a module: closed but for the step itself. It is walked without recursion: paths may be long."""
    pending: list[tuple[str, Module] | str] = [(name, module)]
    while pending:
        at = pending.pop()
        if isinstance(at, str):
            yield at
            continue
        label, here = at
        nodes = [graph.nodes[number] for number in _all(here)]
        flops, moved = _sum(work.flops_of(each) for each in nodes), _sum(work.bytes_of(each) for each in nodes)
        told = f"{len(nodes):,} calls, {amount(flops)} FLOPs, {amount(moved, 'B')}"
        yield f"<details{' open' if here is module else ''}><summary>{_text(label)} <small>{told}</small></summary>"
        if here.nodes:
            yield '<table><tr><th class="n">#<th>operator<th>inputs<th class="n">FLOPs<th class="n">bytes'
            yield from (_row(number, graph.nodes[number], number in path) for number in here.nodes)
            yield "</table>"
        pending.append("</details>")
        pending += list(here.inside.items())[::-1]


def _all(module: Module) -> Iterator[int]:
    pending = [module]
    while pending:
        at = pending.pop()
        yield from at.nodes
        pending += at.inside.values()


def _row(number: int, node: Node, on_path: bool) -> str:
    marks = " ".join(filter(None, ("critical" * on_path, "view" * (not node.computes))))
    figures = f'<td class="n">{amount(work.flops_of(node))}<td class="n">{amount(work.bytes_of(node), "B")}'
    return f'<tr class="{marks}"><td class="n">{number}<td>{_text(node.call.op)}<td>{_text(shapes(node))}{figures}'


def _sum(figures: Any) -> int | None:
    found = list(figures)
    return None if None in found else sum(found)


def _text(text: str) -> str:
    return escape(plain(text))
