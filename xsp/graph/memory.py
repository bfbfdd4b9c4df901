"""Memory of a step by part: what exists at the moment when most does, from the lifetimes of the storages.

Counted are the tensors of the step: parameters, buffers, gradients of parameters, states of the optimizer, inputs, and
everything that the step makes. Workspaces inside kernels, and what an allocator holds back, are not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from xsp.graph.node import Graph, KnownBy, Phase, Role

PARTS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations")
"""Parts of the memory, in the order in which they are shown; constants count as inputs."""

_LASTING = {
    Role.WEIGHT: "parameters", Role.BUFFER: "buffers", Role.STATE: "optimizer", Role.INPUT: "inputs",
    Role.CONSTANT: "inputs",
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """The bytes that exist at the peak of a step."""

    parts: dict[str, int]
    """Part → bytes, for all `PARTS`. Gradients are those of parameters, others count as activations."""

    phase: Phase
    """Phase of the call at the peak."""

    node: int
    """Place of the call at the peak."""

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """Return the memory as plain values."""
        parts = {f"{part}_bytes": size for part, size in self.parts.items()}
        return {"peak_bytes": self.bytes, "peak_phase": self.phase.value, "peak_node": self.node, **parts}


def of(graph: Graph) -> Memory | None:
    """Return the memory of a step at its peak; None if the size of a storage is unknown.

    A storage lives from its first write to its release, if the source observed it, else to its last reader. What
    exists before the step, exists during the whole step.
    """
    if graph.known_by is KnownBy.ORDER or not graph.nodes:
        return None
    first_values = {value.storage: value for value in reversed(graph.values)}
    if any(value.bytes is None for value in first_values.values()):
        return None
    begins, ends = _lifetimes(graph)
    outliving = {graph.values[number].storage for number in graph.outliving or ()}
    lasting: Counter[str] = Counter()
    changes: list[Counter[str]] = [Counter() for _ in range(len(graph.nodes) + 1)]
    for storage, value in first_values.items():
        size = value.bytes or 0
        if storage not in begins:
            lasting[_LASTING.get(value.role, "activations")] += size
            continue
        is_gradient = value.role is Role.GRADIENT and storage in outliving
        part = "gradients" if is_gradient else "activations"
        changes[begins[storage]][part] += size
        changes[ends[storage] + 1][part] -= size
    current: Counter[str] = Counter()
    best, best_node = dict(current), 0
    for place in range(len(graph.nodes)):
        current.update(changes[place])
        if sum(current.values()) > sum(best.values()):
            best, best_node = dict(current), place
    parts = {part: lasting[part] + best.get(part, 0) for part in PARTS}
    return Memory(parts, graph.nodes[best_node].phase, best_node)


def _lifetimes(graph: Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Return the places of the first and the last node during which each storage exists that the step makes."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    last = len(graph.nodes) - 1
    seen: set[int] = set()
    for place, node in enumerate(graph.nodes):
        for number in node.reads:
            storage = graph.values[number].storage
            if storage not in begins:
                seen.add(storage)  # it existed before the step
            ends[storage] = place
        for number in node.writes:
            storage = graph.values[number].storage
            if storage not in seen:
                begins.setdefault(storage, place)
            ends.setdefault(storage, last if graph.released is None else place)
    if graph.released is not None:
        released = dict(graph.released)
        ends = {storage: released.get(storage, last) for storage in begins}
    else:
        kept = {graph.values[number].storage for number in graph.outliving or ()}
        ends = {storage: last if storage in kept else ends[storage] for storage in begins}
    return begins, ends
