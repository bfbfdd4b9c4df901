"""Graphs of a trace: the calls of its operators, as far as their spans describe them. Only their order is known.

In a run of xsp, a step with descriptions records the calls almost completely, so that they have the keys of a captured
step (see `xsp.graph.descriptions`). In other traces only the shapes are known, and the operations and bytes of a node
are those that its spans got when the trace was read. No trace records which operator reads the result of another one,
so there is no longest path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from xsp.errors import GraphError
from xsp.graph import descriptions, keys, work
from xsp.graph.blocks import WEIGHT_BYTES
from xsp.graph.node import Call, Graph, KnownBy, Node, Phase, Problem, Source, Tensor
from xsp.graph.values import Flow
from xsp.schema import DTYPES, PARAMETERS, Kind, Level
from xsp.version import __version__

if TYPE_CHECKING:
    from xsp.store.trace import Trace

_SPANS = f"""
    SELECT op.span_id, op.parent_id, op.name, op.phase, op.input_shapes, op.dtype, op.flops,
        op.dram_read_bytes + op.dram_write_bytes, op.attributes, op.process, op.thread, op.layer_id,
        layer.name, layer.depth = 0 AND layer.name = layer.type, layer.attributes
    FROM merged op LEFT JOIN merged layer ON layer.span_id = op.layer_id AND layer.level = {int(Level.LAYER)}
    WHERE op.level = {int(Level.OP)} AND op.kind = '{Kind.OP}'
    ORDER BY op.start_ns, op.dur_ns DESC, op.span_id
"""

_WEIGHTS = f"""
    SELECT sum(bytes)::BIGINT FROM (
        SELECT max(param_bytes) AS bytes FROM merged
        WHERE level = {int(Level.LAYER)} AND depth = 0 AND param_bytes IS NOT NULL GROUP BY name, type
    )
"""
"""Bytes of the outermost modules' parameters; each module counts once, however often it is called."""

MOST_NAMED = 5
"""Most operators that problems name."""


@dataclass
class _Operator:
    """An operator that becomes a node, with the figures of the spans in it."""

    span: tuple[Any, ...]
    flops: list[int | None] = field(default_factory=list)
    bytes: list[int | None] = field(default_factory=list)


def of(trace: Trace) -> Graph:
    """Return the graph of the merged step of a trace.

    Raises:
        GraphError: the trace has no operators.
    """
    operators, trains = _find_operators(trace)
    if not operators:
        raise GraphError(f"{trace.name}: the trace has no operators; record with --levels M/L/G, or with shapes")
    flow = Flow()
    nodes = []
    calls, described_count = descriptions.Calls(), 0
    # with a single model, calls outside of all its modules are calls of the model itself, as when it is captured
    single_model = len({name for *_, name, outer, _ in (operator.span for operator in operators) if outer}) == 1
    modules: dict[str, list[str]] = {}
    for number, operator in enumerate(operators):
        *_, process, thread, layer, name, outer, _ = operator.span
        flow.add_order(number, f"{process} {thread}")
        description = _describe(operator)
        described_count += description is not None
        nodes.append(
            _node(operator, description, calls, module_path(modules, None if single_model and outer else name, layer))
        )
    return Graph(
        name=trace.name,
        source=Source.SPANS,
        nodes=tuple(nodes),
        edges=flow.edges(),
        values=(),
        known_by=KnownBy.ORDER,
        counts="operators of ATen" if described_count == len(nodes) else "outermost operators of the trace",
        settings=_settings(trace, trains) if described_count else {"xsp": __version__},
        problems=tuple(_problems(nodes, calls, described_count)),
    )


def _settings(trace: Trace, trains: bool) -> dict[str, Any]:
    """Return the settings of a step with descriptions."""
    ((size,),) = trace.con.execute(_WEIGHTS).fetchall()
    weights = {} if size is None else {WEIGHT_BYTES: int(size)}
    return {"train": trains, **weights, "xsp": __version__}


def span_ids(trace: Trace) -> list[str]:
    """Return the IDs of the spans that are nodes of a trace's graph, in the order of the nodes."""
    return [operator.span[0] for operator in _find_operators(trace)[0]]


def _find_operators(trace: Trace) -> tuple[list[_Operator], bool]:
    """Return the operators that become nodes, and whether the step trains."""
    spans = trace.con.execute(_SPANS).fetchall()
    trains = any(phase == Phase.BACKWARD.value for _, _, _, phase, *_ in spans)
    has_dtypes = any(f'"{DTYPES}"' in (span[8] or "") for span in spans)
    return _outermost_operators(spans, through_composites=trains and has_dtypes), trains


def is_call(name: str) -> bool:
    """Return whether a span outside of all calls is a call: autograd nodes only wrap calls."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::", "profiler::"))


def _problems(nodes: list[Node], calls: descriptions.Calls, described_count: int) -> Iterator[Problem]:
    """Yield the problems of a graph: what the trace does not record."""
    yield Problem("edges", "a trace tells the order of calls, and not what they read and write")
    without_inputs = sum(not node.call.inputs for node in nodes)
    if without_inputs and not described_count:
        yield Problem("shapes", f"not in the trace for {without_inputs} of {len(nodes)} operators")
    if described_count and described_count < len(nodes):
        yield Problem("calls", f"{len(nodes) - described_count} of {len(nodes)} are not in the step that describes")
    for op, reason in list(calls.reasons.items())[:MOST_NAMED]:
        count = sum(node.call.op == op for node in nodes)
        yield Problem(op, f"{count} calls are known by their inputs alone ({reason})")
    if len(calls.reasons) > MOST_NAMED:
        yield Problem("operators", f"{len(calls.reasons) - MOST_NAMED} more are known by their inputs alone")
    for op, argument in list(calls.unrecorded.items())[:MOST_NAMED]:
        count = sum(node.call.op == op for node in nodes)
        yield Problem(op, f"a trace does not tell {argument}, so the keys of {count} calls are their own")


def _outermost_operators(spans: list[tuple[Any, ...]], *, through_composites: bool) -> list[_Operator]:
    """Return the operators that are in no other operator; spans that only wrap them (autograd nodes) are left out."""
    composite = cache(descriptions.is_composite) if through_composites else None
    enclosing: dict[str, _Operator | None] = {}
    operators = []
    for span in spans:
        identity, parent, name, _, _, _, flops, traffic = span[:8]
        operator = enclosing.get(parent)
        if operator is None and is_call(name) and not (composite is not None and composite(name)):
            operator = _Operator(span)
            operators.append(operator)
        enclosing[identity] = operator
        if operator is not None:
            operator.flops.append(flops)
            operator.bytes.append(traffic)
    return operators


def _describe(operator: _Operator) -> descriptions.CallDescription | None:
    """Return the description of an operator's call from its span; None if it has none."""
    _, _, name, _, shapes, _, _, _, attributes, *_, layer_attributes = operator.span
    try:
        values, layer = (json.loads(text) if text else {} for text in (attributes, layer_attributes))
        parameters = layer.get(PARAMETERS) if isinstance(layer, dict) else None
        return (
            descriptions.describe(name, json.loads(shapes), values, parameters)
            if shapes and isinstance(values, dict)
            else None
        )
    except (ValueError, RecursionError):
        return None


def _node(
    operator: _Operator, description: descriptions.CallDescription | None, calls: descriptions.Calls, module: str
) -> Node:
    _, _, name, phase, shapes, dtype, *_ = operator.span
    phase = Phase(phase) if phase in Phase._value2member_map_ else Phase.FORWARD
    node = calls.of(description) if description is not None else None
    if node is not None:
        return replace(node, module=module, phase=phase, reads=(), returns=(), writes=())
    call = (
        descriptions.unnamed_call(description)
        if description is not None
        else Call(name, tuple(_arguments(shapes, dtype)))
    )
    known_flops = [figure for figure in operator.flops if figure is not None]
    flops = sum(known_flops) if known_flops else None if work.may_multiply(name) else 0
    known_bytes = [figure for figure in operator.bytes if figure is not None]
    stated = flops, sum(known_bytes) if known_bytes else None
    return Node(call, keys.key(call), descriptions.kind_of(name), module, phase, stated_work=stated)


def _arguments(shapes: str | None, dtype: str | None) -> list[tuple[str, Any]]:
    """Return the tensors described by the shapes; only the first has a type, which is that of the span."""
    try:
        shape_list = json.loads(shapes or "[]")
    except (ValueError, RecursionError):  # text of another profiler
        shape_list = None
    arguments: list[tuple[str, Any]] = []
    is_first = True
    for place, shape in enumerate(shape_list if isinstance(shape_list, list) else []):
        value = _tensors(shape, descriptions.TYPES.get(dtype or "") if is_first else None)
        if value is not None:
            arguments.append((f"input{place}", value))
            is_first = False
    return arguments


def _tensors(shape: Any, dtype: str | None) -> Any:
    if not isinstance(shape, list) or not shape:
        return None
    if all(type(size) is int for size in shape):
        return Tensor(dtype, tuple(shape) if min(shape) >= 0 else None)
    return tuple(_tensors(element, dtype) for element in shape)


def module_path(calls_by_module: dict[str, list[str]], name: str | None, layer: str | None) -> str:
    """Return the path of a module, with the number of the call from its second call on."""
    if name is None or layer is None:
        return ""
    calls = calls_by_module.setdefault(name, [])
    if layer not in calls:
        calls.append(layer)
    occurrence = calls.index(layer) + 1
    return f"{name}#{occurrence}" if occurrence > 1 else name
