"""Graphs of a trace: its outermost operators, with what their spans say. Only their order is known.

A trace has shapes of inputs, often no options and no outputs; the operations and bytes of a node are those that its
spans were given when the trace was read. Nothing tells which operator reads what another one made, so there is no
longest path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xsp.errors import GraphError
from xsp.graph import keys, work
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Phase, Problem, Source, Tensor
from xsp.graph.values import Flow
from xsp.schema import Kind, Level
from xsp.version import __version__

if TYPE_CHECKING:
    from xsp.store.trace import Trace

_SPANS = f"""
    SELECT op.span_id, op.parent_id, op.name, op.phase, op.input_shapes, op.dtype, op.flops,
        op.dram_read_bytes + op.dram_write_bytes, op.process, op.thread, op.layer_id, layer.name
    FROM merged op LEFT JOIN merged layer ON layer.span_id = op.layer_id AND layer.level = {int(Level.LAYER)}
    WHERE op.level = {int(Level.OP)} AND op.kind = '{Kind.OP}'
    ORDER BY op.start_ns, op.dur_ns DESC, op.span_id
"""


@dataclass
class _Operator:
    """An operator that becomes a node, and what is known of the spans in it."""

    span: tuple[Any, ...]
    inside: int = 0
    flops: list[int | None] = field(default_factory=list)
    bytes: list[int | None] = field(default_factory=list)


def of(trace: Trace) -> Graph:
    """Return the graph of the merged step of a trace.

    Raises:
        GraphError: it has no operators.
    """
    found = _outermost(trace.con.execute(_SPANS).fetchall())
    if not found:
        raise GraphError(f"{trace.name}: the trace has no operators; record with --levels M/L/G, or with shapes")
    flow = Flow()
    nodes = []
    modules: dict[str, list[str]] = {}
    for number, operator in enumerate(found):
        *_, process, thread, layer, name = operator.span
        flow.follow(number, f"{process} {thread}")
        nodes.append(_node(operator, module_path(modules, name, layer)))
    problems = [Problem("edges", "a trace tells the order of calls, and not what they read and write")]
    bare = sum(not each.call.inputs for each in nodes)
    if bare:
        problems.append(Problem("shapes", f"not in the trace for {bare} of {len(nodes)} operators"))
    return Graph(
        name=trace.name,
        source=Source.SPANS,
        nodes=tuple(nodes),
        edges=flow.edges(),
        values=(),
        known_by=KnownBy.ORDER,
        counts="outermost operators of the trace",
        settings={"xsp": __version__},
        problems=tuple(problems),
    )


def is_call(name: str) -> bool:
    """Return whether a span that lies in no call is one: the nodes of autograd only wrap calls."""
    return "::" in name and not name.startswith(("autograd::", "profiler::"))


def _outermost(spans: list[tuple[Any, ...]]) -> list[_Operator]:
    """Return the operators that lie in no other one; what only wraps them (the nodes of autograd) is none."""
    holder: dict[str, _Operator | None] = {}
    found = []
    for span in spans:
        identity, parent, name, _, _, _, flops, moved = span[:8]
        around = holder.get(parent)
        if around is None and is_call(name):
            around = _Operator(span)
            found.append(around)
        elif around is not None:
            around.inside += 1
        holder[identity] = around
        if around is not None:
            around.flops.append(flops)
            around.bytes.append(moved)
    return found


def _node(operator: _Operator, module: str) -> Node:
    _, _, name, phase, shapes, dtype, *_ = operator.span
    call = Call(name, tuple(_arguments(shapes, dtype)))
    known = [each for each in operator.flops if each is not None]
    flops = sum(known) if known else None if work.MAY_MULTIPLY.search(name) else 0
    moved = [each for each in operator.bytes if each is not None]
    kind = NodeKind.OPAQUE if not name.startswith("aten::") else NodeKind.COMPUTE
    return Node(
        call,
        keys.key(call),
        kind,
        module,
        Phase(phase) if phase in Phase._value2member_map_ else Phase.FORWARD,
        stated=(flops, sum(moved) if moved else None),
    )


def _arguments(shapes: str | None, dtype: str | None) -> list[tuple[str, Any]]:
    """Return the tensors that the shapes tell of; the type that a span has is that of the first one."""
    found: list[tuple[str, Any]] = []
    first = True
    for place, shape in enumerate(json.loads(shapes) if shapes else []):
        value = _tensors(shape, TYPES.get(dtype or "") if first else None)
        if value is not None:
            found.append((f"input{place}", value))
            first = False
    return found


def _tensors(shape: Any, dtype: str | None) -> Any:
    if not isinstance(shape, list) or not shape:
        return None
    if all(type(size) is int for size in shape):
        return Tensor(dtype, tuple(shape))
    return tuple(_tensors(each, dtype) for each in shape)


def module_path(known: dict[str, list[str]], name: str | None, layer: str | None) -> str:
    """Return the path of a module, with the number of the call from the second one on."""
    if name is None or layer is None:
        return ""
    calls = known.setdefault(name, [])
    if layer not in calls:
        calls.append(layer)
    turn = calls.index(layer) + 1
    return f"{name}#{turn}" if turn > 1 else name


TYPES = {
    **{theirs: ours for ours, theirs in work.KINETO.items()},
    "long": "int64", "short int": "int16", "signed char": "int8", "char": "int8",
}  # fmt: skip
"""Names of types as Kineto and execution traces have them, and as torch has them."""
