"""A table of the modules of a graph: output, parameters, FLOPs and bytes of each, with the modules in it.

In a training step the figures of a module include its part of the backward pass and of the optimizer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xsp.graph import work
from xsp.graph.node import Graph, Node, Role, Submodule, Tensor

_OCCURRENCE = re.compile(r"#\d+$")


@dataclass(frozen=True)
class ModuleRow:
    """A module with everything in it."""

    module: Submodule
    depth: int
    """Number of names in its path; 0 for the model itself."""

    calls: int
    """Number of its calls of operators."""

    flops: work.Total
    bytes: work.Total

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            "module": self.module.path,
            "class": self.module.kind or None,
            "parameters": self.module.parameters,
            "output_shapes": [None if one.shape is None else list(one.shape) for one in self.module.outputs],
            "calls": self.calls,
            "flops": self.flops.known,
            "flops_unknown": self.flops.unknown,
            "bytes": self.bytes.known,
            "bytes_unknown": self.bytes.unknown,
        }


def rows(graph: Graph) -> list[ModuleRow]:
    """Return a row for each module, in the order of their definition; none if the source does not report modules."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for path in _prefixes(_OCCURRENCE.sub("", node.module)):
            nodes[path].append(node)
    found = []
    for module in graph.modules or _derived(graph):
        inside = [node for node in nodes[module.path] if node.computes]
        found.append(
            ModuleRow(
                module,
                len(module.path.split(".")) if module.path else 0,
                len(nodes[module.path]),
                work.total(map(work.flops_of, inside)),
                work.total(map(work.bytes_of, inside)),
            )
        )
    return found


def _prefixes(path: str) -> Iterator[str]:
    """Yield a module's path and those of all modules around it, the model (an empty path) included."""
    yield ""
    for place, letter in enumerate(path):
        if letter == ".":
            yield path[:place]
    if path:
        yield path


def _derived(graph: Graph) -> list[Submodule]:
    """Return the modules that the nodes name, with the parameters that their calls read and their last results."""
    parameters: dict[str, dict[Any, int]] = defaultdict(dict)
    outputs: dict[str, tuple[Tensor, ...]] = {}
    for node in graph.nodes:
        for path in _prefixes(_OCCURRENCE.sub("", node.module)):
            outputs[path] = node.call.outputs[:1]
            for number, tensor in zip(node.reads, node.call.inputs, strict=False):
                value = graph.values[number]
                if value.role is Role.WEIGHT and tensor.elements is not None:
                    parameters[path].setdefault(value.storage, tensor.elements)
    if not any(path for path in outputs):
        return []
    return [Submodule(path, "", sum(parameters[path].values()), tensors) for path, tensors in outputs.items()]
