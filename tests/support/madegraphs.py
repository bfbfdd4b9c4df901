"""Small graphs from a list of calls, without torch."""

from __future__ import annotations

from xsp.graph import keys
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Phase, Role, Source, Tensor
from xsp.graph.values import Flow

IMAGE = Tensor("float32", (1, 8, 4, 4))


def add(*inputs: Tensor, op: str = "aten::add", **scalars: object) -> Call:
    arguments = [*((f"input{place}", tensor) for place, tensor in enumerate(inputs)), *scalars.items()]
    return Call(op, tuple(arguments), (IMAGE,))


def graph_of(*steps: tuple[str, list[str], str | None], known_by: KnownBy = KnownBy.STORAGE) -> Graph:
    """Return a graph of calls: operator, names of the storages that it reads, and of the one that it writes.

    A name that ends in `!` is written in place; an operator that writes nothing is a view of what it reads first.
    """
    flow, nodes = Flow(), []
    for number, (op, reads, output) in enumerate(steps):
        names = [read_name.rstrip("!") for read_name in reads]
        for name in names:
            flow.add_outside(name, Role.INPUT, 512)
        numbers = tuple(flow.read(number, name) for name in names)
        writes = [
            flow.write(number, read_name[:-1], Role.ACTIVATION, 512) for read_name in reads if read_name.endswith("!")
        ]
        if output is not None:
            writes.append(flow.write(number, output, Role.ACTIVATION, 512))
        call = add(*[IMAGE] * len(reads), op=op)
        kind = NodeKind.COMPUTE if writes else NodeKind.VIEW
        nodes.append(
            Node(call, keys.key(call), kind, "", Phase.FORWARD, numbers, tuple(writes or numbers)[-1:], tuple(writes))
        )
    return Graph("made", Source.CAPTURED, tuple(nodes), flow.edges(), flow.final_values(), known_by, "calls", 7)
