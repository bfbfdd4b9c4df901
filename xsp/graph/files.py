"""A graph on disk: one JSON file that appears atomically.

Equal calls are stored once, because a model repeats most of its layers; nodes refer to them by number. The file has the
version of its format, and a newer version is refused.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from xsp import atomic
from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.node import (
    Call,
    Edge,
    EdgeKind,
    Graph,
    KnownBy,
    Node,
    NodeKind,
    Phase,
    Problem,
    Role,
    Source,
    Submodule,
    Value,
)

VERSION = 1
SAVE_HINT = "save it again: xsp graph SPEC --save FILE"
MARK = "xsp_graph"
"""First key of the file; its value is the version."""


def save(graph: Graph, path: Path | str) -> None:
    """Write a graph to a file.

    Raises:
        GraphError: the file cannot be written; no partial file is left.
    """
    text = json.dumps(to_plain(graph), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    try:
        with atomic.replacing(Path(path)) as temporary:
            temporary.write_text(text, encoding="ascii")
    except OSError as error:
        raise GraphError(f"{path}: the graph cannot be written ({error.strerror or error})") from error


def load(path: Path | str) -> Graph:
    """Read a graph that `save` wrote, also if it was compressed with gzip afterwards.

    Raises:
        GraphError: there is no such file, or it is damaged, of a newer version, or not a graph.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise GraphError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        document = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:
        raise GraphError(f"{path}: the graph is damaged ({error}); {SAVE_HINT}") from error
    version = document.get(MARK) if isinstance(document, dict) else None
    if type(version) is not int:
        raise GraphError(f"{path}: not a graph that xsp saved; write one: xsp graph SPEC --save FILE")
    if version > VERSION:
        raise GraphError(f"{path}: the graph was written by a newer xsp (version {version}; this one reads {VERSION})")
    try:
        return from_plain(document)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(f"{path}: the graph is damaged ({error}); {SAVE_HINT}") from error


def to_plain(graph: Graph) -> dict[str, Any]:
    """Return a graph as plain values for JSON."""
    numbers: dict[tuple[str, str], int] = {}
    calls: list[Any] = []
    nodes = []
    for node in graph.nodes:
        outputs = json.dumps([keys.plain(tensor) for tensor in node.call.outputs])
        number = numbers.setdefault((node.key, outputs), len(calls))
        if number == len(calls):
            calls.append({**keys.call_to_plain(node.call), "key": node.key})
        attributes = [node.kind.value, node.module, node.phase.value]
        nodes.append([number, *attributes, list(node.reads), list(node.returns), list(node.writes)])
        if node.stated_work is not None:
            nodes[-1].append(list(node.stated_work))
    return {
        MARK: VERSION,
        "name": graph.name,
        "source": graph.source.value,
        "known_by": graph.known_by.value,
        "counts": graph.counts,
        "parameters": graph.parameters,
        "settings": dict(graph.settings),
        "problems": [[problem.where, problem.reason] for problem in graph.problems],
        "calls": calls,
        "values": [[value.storage, value.version, value.role.value, value.bytes] for value in graph.values],
        "nodes": nodes,
        "edges": [[edge.before, edge.after, edge.kind.value] for edge in graph.edges],
        **_origin_fields(graph),
    }


def from_plain(document: dict[str, Any]) -> Graph:
    """Return the graph from the output of `to_plain`.

    Raises:
        LookupError, ValueError, TypeError: `document` is not such output, or was changed.
    """
    calls = [(keys.call_from_plain(entry), str(entry["key"])) for entry in document["calls"]]
    for call, key in calls:
        if keys.key(call) != key:
            raise ValueError(f"the key of a call of {call.op} does not match its arguments")
    values = tuple(
        Value(int(storage), int(version), Role(role), _count(size))
        for storage, version, role, size in document["values"]
    )
    nodes = tuple(_read_node(calls, *fields) for fields in document["nodes"])
    if "origins" in document:
        origins = [tuple(None if pair is None else _pair(pair) for pair in row) for row in document["origins"]]
        nodes = tuple(replace(node, origins=row) for node, row in zip(nodes, origins, strict=True))
    if "offsets" in document:
        offsets = {int(place): tuple(map(_count, row)) for place, *row in document["offsets"]}
        nodes = tuple(
            replace(node, offsets=offsets.get(place, (0,) * (len(node.call.inputs) + len(node.call.outputs))))
            for place, node in enumerate(nodes)
        )
    edges = tuple(Edge(before, after, EdgeKind(why)) for before, after, why in document["edges"])
    outputs = tuple(map(_pair, document.get("outputs", ())))
    outliving = tuple(map(int, document["kept"])) if "kept" in document else None
    _check(nodes, edges, values)
    for maker, output in outputs:
        if maker >= len(nodes) or (maker >= 0 and not 0 <= output < len(nodes[maker].call.outputs)):
            raise ValueError(f"the step returns output {output} of node {maker}, which does not exist")
    for number in outliving or ():
        if not 0 <= number < len(values):
            raise ValueError(f"value {number} is to outlive the step, and does not exist")
    return Graph(
        name=str(document["name"]),
        source=Source(document["source"]),
        nodes=nodes,
        edges=edges,
        values=values,
        known_by=KnownBy(document["known_by"]),
        counts=str(document["counts"]),
        parameters=_count(document["parameters"]),
        settings=dict(document["settings"]),
        problems=tuple(Problem(str(where), str(reason)) for where, reason in document["problems"]),
        outputs=outputs,
        outliving=outliving,
        modules=tuple(
            Submodule(str(path), str(kind), _count(parameters) or 0, tuple(map(keys.from_plain, tensors)))
            for path, kind, parameters, tensors in document.get("modules", ())
        ),
        released=tuple(map(_pair, document["released"])) if "released" in document else None,
    )


def _origin_fields(graph: Graph) -> dict[str, Any]:
    """Return the origins, outputs and kept values, as far as the source reports them."""
    fields: dict[str, Any] = {}
    if any(node.origins for node in graph.nodes):
        fields["origins"] = [
            [None if origin is None else list(origin) for origin in node.origins] for node in graph.nodes
        ]
    if any(node.offsets for node in graph.nodes):
        fields["offsets"] = [
            [place, *node.offsets] for place, node in enumerate(graph.nodes) if set(node.offsets) - {0}
        ]
    if graph.modules:
        fields["modules"] = [
            [module.path, module.kind, module.parameters, [keys.plain(tensor) for tensor in module.outputs]]
            for module in graph.modules
        ]
    if graph.released is not None:
        fields["released"] = [list(pair) for pair in graph.released]
    if graph.outputs:
        fields["outputs"] = [list(origin) for origin in graph.outputs]
    if graph.outliving is not None:
        fields["kept"] = list(graph.outliving)
    return fields


def _pair(pair: Any) -> tuple[int, int]:
    node, number = pair
    return int(node), int(number)


def _count(number: Any) -> int | None:
    """Return a number of elements, bytes or operations; None if it is unknown.

    Raises:
        ValueError: it is something else.
    """
    if number is not None and (type(number) is not int or number < 0):
        raise ValueError(f"{number!r} is not a whole number of 0 or more")
    return None if number is None else int(number)


def _check(nodes: tuple[Node, ...], edges: tuple[Edge, ...], values: tuple[Value, ...]) -> None:
    for edge in edges:
        integral = type(edge.before) is type(edge.after) is int
        if not integral or not 0 <= edge.before < edge.after < len(nodes):
            raise ValueError(f"an edge from {edge.before} to {edge.after} among {len(nodes)} nodes")
    for place, node in enumerate(nodes):
        if node.origins and not len(node.origins) == len(node.reads) == len(node.call.inputs):
            raise ValueError(f"a call of {node.call.op} has a different number of origins than of tensors")
        for maker, output in filter(None, node.origins):
            if maker >= place or (maker >= 0 and not 0 <= output < len(nodes[maker].call.outputs)):
                raise ValueError(f"a call of {node.call.op} reads a missing output of node {maker}")
        if node.offsets and len(node.offsets) != len(node.call.inputs) + len(node.call.outputs):
            raise ValueError(f"a call of {node.call.op} has a different number of offsets than of tensors")
        if len(node.reads) not in (0, len(node.call.inputs)) or len(node.returns) not in (0, len(node.call.outputs)):
            raise ValueError(f"a call of {node.call.op} has a different number of values than of tensors")
        for number in (*node.reads, *node.returns, *node.writes):
            if not 0 <= number < len(values):
                raise ValueError(f"there is no value {number}")


def _read_node(
    calls: list[tuple[Call, str]],
    number: int,
    kind: str,
    module: str,
    phase: str,
    reads: list[int],
    returns: list[int],
    writes: list[int],
    stated: tuple[int | None, int | None] | None = None,
) -> Node:
    call, key = calls[number]
    counts = None if stated is None else (_count(stated[0]), _count(stated[1]))
    numbers = tuple(map(int, reads)), tuple(map(int, returns)), tuple(map(int, writes))
    return Node(call, key, NodeKind(kind), str(module or ""), Phase(phase), *numbers, stated_work=counts)
