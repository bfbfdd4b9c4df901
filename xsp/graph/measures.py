"""Measures of a graph without timing: size, parameters, operations, critical path, and the wider family.

| measure | convention |
|---|---|
| `nodes` | all calls, in the vocabulary of the source |
| `views` | calls that neither move nor compute anything: all outputs are in storages of inputs |
| `computing` | calls that are neither views nor bare allocations; all calls for a trace that does not distinguish |
| `unique` | different keys among the computing calls |
| `edges` | pairs of nodes of which the later one reads a result of the earlier one |
| `parameters` | elements of all parameters; tied ones once, buffers not |
| `flops` | a multiply-add is 2; matrix products, convolutions and attention; the sum of the calls whose are known |
| `flops_unknown` | calls whose FLOPs are unknown: with any, `flops` is a lower bound; null if none is known |
| `bytes` | each input of a computing call read once, each output written once; `bytes_unknown` as for FLOPs |
| `longest_path` | most computing nodes on any path over data edges |
| `diameter` | computing nodes on the longest of all shortest paths, views left out; null beyond 20,000 |

SPOC's four are `input_elements`, `parameters`, `flops` and `longest_path`; the literature also uses "diameter" for the
last one, which is a different number wherever a connection skips nodes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from xsp.graph import memory, moduletable, paths, work
from xsp.graph.keys import work_key
from xsp.graph.node import EdgeKind, Graph, KnownBy, NodeKind, Role
from xsp.stats import known_sum


def measures(graph: Graph) -> dict[str, Any]:
    """Return the measures of a graph by name, as plain values; None if a measure is unknown."""
    computing = graph.computing
    earlier = paths.contracted(graph, lambda node: node.computes)
    is_order_only = graph.known_by is KnownBy.ORDER
    path, _ = paths.longest(earlier, [1] * len(earlier))
    path_all, _ = paths.longest(paths.predecessors_of(graph), [1] * len(graph.nodes))
    levels = Counter(paths.levels(earlier, [1] * len(earlier)))
    flops = work.total(map(work.flops_of, computing))
    traffic = work.total(map(work.bytes_of, computing))
    is_complete = not flops.unknown and not traffic.unknown
    # the bytes of all storages of each role; None if one is unknown
    first_values = {value.storage: value for value in reversed(graph.values)}.values()
    by_role = {role: known_sum(value.bytes for value in first_values if value.role is role) for role in Role}
    return {
        "nodes": len(graph.nodes),
        "views": None if is_order_only else sum(node.kind is NodeKind.VIEW for node in graph.nodes),
        "computing": len(computing),
        "unique": len({node.key for node in computing}),
        "edges": None if is_order_only else len(graph.edges_of(EdgeKind.DATA)),
        "parameters": graph.parameters,
        "flops": flops.known,
        "bytes": traffic.known,
        "longest_path": None if is_order_only else int(path),
        "diameter": None if is_order_only else paths.diameter(earlier),
        "input_elements": _input_elements(graph),
        "longest_path_all_nodes": None if is_order_only else int(path_all),
        "width": None if is_order_only else max(levels.values(), default=0),
        "parallelism": None if is_order_only or not path else round(len(computing) / path, 3),
        "unique_work": len({work_key(node.call) for node in computing}),
        "unique_all_nodes": len({node.key for node in graph.nodes}),
        "edges_reuse": len(graph.edges_of(EdgeKind.REUSE)),
        "edges_order": len(graph.edges_of(EdgeKind.ORDER)),
        "flops_unknown": flops.unknown,
        "bytes_unknown": traffic.unknown,
        "intensity": round((flops.known or 0) / traffic.known, 3) if is_complete and traffic.known else None,
        "weight_bytes": None if graph.parameters is None else by_role[Role.WEIGHT],
        "peak_activation_bytes": _peak(graph),
        "creates": None if is_order_only else sum(node.kind is NodeKind.CREATE for node in graph.nodes),
        "random": sum(node.kind is NodeKind.RANDOM for node in graph.nodes),
        "opaque": sum(node.kind is NodeKind.OPAQUE for node in graph.nodes),
    }


def as_json(graph: Graph) -> dict[str, Any]:
    """Return what `xsp graph --format json` prints: measures, memory and modules, origin, settings and problems."""
    step_memory = memory.of(graph)
    return {
        "name": graph.name,
        "source": graph.source.value,
        "counts": graph.counts,
        "edges_known_by": graph.known_by.value,
        **measures(graph),
        "memory": None if step_memory is None else step_memory.as_json(),
        "modules": [row.as_json() for row in moduletable.rows(graph)],
        "settings": dict(graph.settings),
        "problems": [{"where": problem.where, "reason": problem.reason} for problem in graph.problems],
    }


def critical(graph: Graph) -> list[int]:
    """Return the places of the nodes on the longest path, views on it included; empty if only the order is known."""
    if graph.known_by is KnownBy.ORDER:
        return []
    return paths.longest(paths.predecessors_of(graph), [float(node.computes) for node in graph.nodes])[1]


def _input_elements(graph: Graph) -> int | None:
    """Return the elements of all tensors that the step takes, for the whole batch; None if unknown."""
    external = ((number, value) for number, value in enumerate(graph.values) if not value.version)
    input_numbers = {number for number, value in external if value.role is Role.INPUT}
    elements: dict[int, int] = {}
    for node in graph.nodes:
        for number, tensor in zip(node.reads, node.call.inputs, strict=False):
            if number in input_numbers and tensor.elements is not None:
                elements.setdefault(number, tensor.elements)
    return sum(elements.values()) if input_numbers and len(elements) == len(input_numbers) else None


def _peak(graph: Graph) -> int | None:
    """Return the peak bytes of storages made in the step that are alive at once, each until its last reader.

    A storage that is never read is an output, and stays; inputs, weights and other lasting storages are left out.
    """
    if graph.known_by is KnownBy.ORDER:
        return None
    lasting = {value.storage for value in graph.values if value.version == 0 and value.role in _LASTING}
    sizes = {value.storage: value.bytes for value in graph.values if value.storage not in lasting}
    if None in sizes.values():
        return None
    first_write: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for number in node.writes:
            first_write.setdefault(graph.values[number].storage, place)
        for number in node.reads:
            last_read[graph.values[number].storage] = place
    changes = [0] * (len(graph.nodes) + 1)
    for storage, place in first_write.items():
        if storage in sizes:
            changes[place] += sizes[storage] or 0
            changes[last_read.get(storage, len(graph.nodes) - 1) + 1] -= sizes[storage] or 0
    current = peak = 0
    for delta in changes:
        current += delta
        peak = max(peak, current)
    return peak


_LASTING = (Role.WEIGHT, Role.BUFFER, Role.INPUT, Role.STATE, Role.CONSTANT)
