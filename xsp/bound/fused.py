"""The ceiling of a step whose calls are fused, as compilers fuse them: no intermediate result moves without need.

A call that multiplies reads its operands from memory and is a kernel of its own. Every other call (elementwise,
reductions, normalisations, copies) can be computed where its inputs are made, or where its results are used. So of all
bytes only those count that have to be in memory whatever is fused:

- what a product reads, or the smaller values from which it can be computed on the way in (a dequantised operand);
- what leads from one product to another: its result, or the smaller values that are computed of it first (pooled ones);
- what existed before the step, for each kernel that reads it, and what outlives the step.

A kernel takes the longer of its operations at the peak rate and of these bytes; a call without products belongs to the
kernel of its latest operand. Each call has at most the bytes that it moves alone, so that the sum is at most the sum of
the ceilings of single calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from xsp.bound import ceiling as roof
from xsp.bound.totals import Figure
from xsp.device.ceilings import Ceiling
from xsp.graph import work
from xsp.graph.node import Graph, KnownBy, Node, NodeKind, Role

NO_DATA_FLOW = "a trace has the order of calls, and no data flow"

_APART = (NodeKind.COMMUNICATION, NodeKind.OPAQUE)
"""Kinds of calls that nothing is fused with."""

_LASTING = (Role.WEIGHT, Role.BUFFER, Role.STATE)


def least_ns(
    graph: Graph, alone: Sequence[Figure | None], ceiling: Ceiling, precisions: Sequence[str | None] | None = None
) -> float | str:
    """Return the minimum nanoseconds of all calls with a ceiling, if they are fused; a reason if it is unknown.

    Args:
        graph: any graph.
        alone: ceiling of each call by itself (`xsp.bound.ceiling.figures`).
        ceiling: ceilings of the device.
        precisions: as for `alone`.
    """
    if graph.known_by is KnownBy.ORDER:
        return NO_DATA_FLOW
    flow = _Flow(graph)
    compute_ns: dict[int, float] = {}
    memory_ns: dict[int, float] = defaultdict(float)
    for place, node in enumerate(graph.nodes):
        if not node.computes or alone[place] is None:
            continue
        moved = min(flow.moved_bytes(place), work.bytes_of(node) or 0)
        kernel = flow.kernels[place]
        if moved:
            memory_ns[kernel] += moved / ceiling.bandwidth(moved) * 1e9
        seconds = roof.compute_seconds(node, ceiling, precisions[place] if precisions is not None else None)
        compute_ns[kernel] = compute_ns.get(kernel, 0.0) + (0.0 if isinstance(seconds, str) else seconds * 1e9)
    return sum(max(ns, memory_ns[kernel]) for kernel, ns in compute_ns.items())


def is_apart(node: Node) -> bool:
    """Return whether a call is a kernel of its own: it multiplies, it communicates, or nobody knows what it does."""
    return node.kind in _APART or node.call.op.startswith(roof.COMMUNICATION) or work.flops_of(node) != 0


class _Flow:
    """Which bytes of the values of a graph have to be in memory, and the kernel of each call."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.apart = [node.computes and is_apart(node) for node in graph.nodes]
        self.makers = {
            number: place
            for place, node in enumerate(graph.nodes)
            if node.kind is not NodeKind.VIEW
            for number in node.writes
        }
        last_versions: dict[int, int] = {}
        for number, value in enumerate(graph.values):
            if value.version >= graph.values[last_versions.get(value.storage, number)].version:
                last_versions[value.storage] = number
        existing = {value.storage for number, value in enumerate(graph.values) if number not in self.makers}
        read = {number for node in graph.nodes if node.computes for number in node.reads}
        outliving = set(graph.outliving) if graph.outliving is not None else self.makers.keys() - read
        self.outliving = outliving | {
            number for storage, number in last_versions.items()
            if storage in existing and number in self.makers and graph.values[number].role in _LASTING
        }  # fmt: skip
        # the least bytes from which a value can be had: its own, or those of what it is computed from
        self.needed: dict[int, int] = {}
        self.kernels: list[int] = []
        for place, node in enumerate(graph.nodes):
            sources = [self.bytes_read(place, index) for index in range(len(node.reads))]
            for number in node.writes:
                if self.apart[place]:
                    self.needed[number] = self._size(number)
                else:
                    self.needed[number] = min(self._size(number), max(sources, default=0))
            made = [self.kernels[self.makers[number]] for number in node.reads if number in self.makers]
            self.kernels.append(max((kernel for kernel in made if self.apart[kernel]), default=place))
            if self.apart[place]:
                self.kernels[place] = place
        self.carried = self._carried()
        self.seen: set[tuple[int, int]] = set()

    def moved_bytes(self, place: int) -> int:
        """Return the bytes that a call has to move; what another call of its kernel has read is not read again."""
        node, kernel = self.graph.nodes[place], self.kernels[place]
        total = 0
        reads_existing = self.apart[kernel] or not any(self.carried.get(number) for number in node.writes)
        for index, number in enumerate(node.reads):
            is_read = self.apart[place] or (number not in self.makers and reads_existing)
            if is_read and (kernel, number) not in self.seen:
                self.seen.add((kernel, number))
                total += self.bytes_read(place, index)
        for number in node.writes:
            if number in self.outliving:
                total += self._size(number)
            elif self.apart[place]:
                total += self.carried.get(number, 0)
        return total

    def bytes_read(self, place: int, index: int) -> int:
        """Return the least bytes that a call reads for one of its tensors."""
        node = self.graph.nodes[place]
        number = node.reads[index]
        size = self.needed.get(number, self._size(number))
        tensor = node.call.inputs[index].bytes if index < len(node.call.inputs) else None
        return size if tensor is None else min(size, tensor)

    def _carried(self) -> dict[int, int]:
        """Return by value the bytes of it, or of what is computed of it first, that a later product reads."""
        carried: dict[int, int] = defaultdict(int)
        for place in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[place]
            onward = max((carried[number] for number in node.writes), default=0)
            for index, number in enumerate(node.reads):
                if number in self.makers and node.computes:
                    size = self.bytes_read(place, index)
                    carried[number] = max(carried[number], size if self.apart[place] else min(size, onward))
        return carried

    def _size(self, number: int) -> int:
        return self.graph.values[number].bytes or 0
