"""Blocks: one or several consecutive calls of a graph, independent of their place in it. Blocks are what is timed.

A layer is a block of one call. Several calls are wired by local numbers: each storage has a number, in the order of
first appearance. So equal sections of different models are equal blocks, with equal keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xsp.cached import hash_of
from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.node import Call, Graph, Node, NodeKind, Phase, Role, Tensor

LASTING = frozenset([Role.WEIGHT, Role.BUFFER, Role.STATE])
"""Roles of values that outlive a step, so that two uses of them are a whole step apart."""

WEIGHT_BYTES = "weight_bytes"
"""Setting of a graph without values, such as that of a trace: bytes of all parameters, if modules report them."""

UNGROUPED = frozenset([NodeKind.OPAQUE, NodeKind.COMMUNICATION])
"""Kinds that are not rerun in isolation: a window of several calls contains none of them."""

_WEIGHT_SLICES: dict[str, slice] = {
    **dict.fromkeys(
        [
            *(f"aten::conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)),
            "aten::convolution", "aten::_convolution", "aten::linear", "aten::batch_norm", "aten::native_batch_norm",
            "aten::layer_norm", "aten::native_layer_norm", "aten::group_norm", "aten::native_group_norm", "aten::prelu",
        ],
        slice(1, None),
    ),
    "aten::convolution_backward": slice(2, None),
    "aten::addmm": slice(0, None, 2),
    "aten::embedding": slice(0, 1),
}  # fmt: skip
"""Operator → its tensors that are weights if a module calls it, for sources that do not report the role of a tensor:
without it, a call of a trace would be a different block from the same call of a captured step."""


@dataclass(frozen=True)
class Wires:
    """The storages that a call uses, by local numbers."""

    reads: tuple[int, ...]
    """Storage of each tensor of `call.inputs`."""

    returns: tuple[int, ...]
    """Storage of each of `call.outputs`."""

    writes: tuple[int, ...]
    """Storages that the call makes or changes."""


@dataclass(frozen=True)
class Block:
    """Consecutive calls with their wiring."""

    calls: tuple[Call, ...]
    wiring: tuple[Wires, ...]
    weights: tuple[int, ...] = ()
    """Storages from outside that outlive a step: weights, buffers, states of the optimizer."""

    @property
    def op(self) -> str:
        """The operators: `aten::conv2d`, `aten::conv2d+aten::relu`."""
        return "+".join(call.op for call in self.calls)

    @cached_property
    def key(self) -> str:
        """Key, equal for equal blocks: 32 hexadecimal digits from calls, wiring, and which inputs are weights."""
        return self._hash([keys.key(call) for call in self.calls])

    @cached_property
    def work_key(self) -> str:
        """Like `key`, without arguments that cannot change the work, see `xsp.graph.keys.ERASED`."""
        return self._hash([keys.work_key(call) for call in self.calls])

    @cached_property
    def external(self) -> dict[int, Tensor]:
        """Storage from outside → the first tensor that is read from it, in order."""
        internal: set[int] = set()
        tensors: dict[int, Tensor] = {}
        for call, wires in zip(self.calls, self.wiring, strict=True):
            for number, tensor in zip(wires.reads, call.inputs, strict=True):
                if number not in internal:
                    tensors.setdefault(number, tensor)
            internal.update(number for number in (*wires.returns, *wires.writes) if number not in tensors)
        return tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the block reads; weights of unknown size are left out."""
        return sum(self.external[number].bytes or 0 for number in self.weights if number in self.external)

    def to_plain(self) -> dict[str, Any]:
        """Return the block as plain values for JSON."""
        return {
            "calls": [keys.call_to_plain(call) for call in self.calls],
            "wiring": [[list(wires.reads), list(wires.returns), list(wires.writes)] for wires in self.wiring],
            "weights": list(self.weights),
        }

    @classmethod
    def from_plain(cls, document: Any) -> Block:
        """Return the block from the output of `to_plain`.

        Raises:
            LookupError, TypeError, ValueError: `document` is not such output, or was changed.
        """
        calls = tuple(map(keys.call_from_plain, document["calls"]))
        wiring = tuple(Wires(*(tuple(map(int, part)) for part in row)) for row in document["wiring"])
        for call, wires in zip(calls, wiring, strict=True):
            if len(wires.reads) != len(call.inputs) or len(wires.returns) != len(call.outputs):
                raise ValueError(f"a call of {call.op} has a different number of storages than of tensors")
        return cls(calls, wiring, tuple(map(int, document["weights"])))

    def _hash(self, call_keys: list[str]) -> str:
        wiring = [[wires.reads, wires.returns, wires.writes] for wires in self.wiring]
        text = json.dumps([call_keys, wiring, self.weights], separators=(",", ":"))
        return hash_of(text)


def block(graph: Graph, start: int, stop: int) -> Block:
    """Return the nodes from `start` up to `stop` of a graph as a block.

    Raises:
        GraphError: there are no such nodes.
    """
    nodes = graph.nodes[start:stop]
    if not 0 <= start < stop <= len(graph.nodes):
        raise GraphError(f"{graph.name} has no nodes {start} to {stop}: there are {len(graph.nodes)}")
    storage_numbers: dict[Any, int] = {}
    roles: dict[int, Role] = {}
    produced: set[int] = set()
    assumed_weights: set[int] = set()

    def local_numbers(numbers: tuple[int, ...], is_output: bool) -> tuple[int, ...]:
        storages = []
        for index in numbers:
            value = graph.values[index]
            number = storage_numbers.setdefault(value.storage, len(storage_numbers))
            if is_output and number not in roles:
                produced.add(number)
            roles.setdefault(number, value.role)
            storages.append(number)
        return tuple(storages)

    def anonymous_wires(call: Call) -> Wires:
        """Return the wires of a call whose source reports no storages: each tensor gets its own storage."""
        reads = tuple(storage_numbers.setdefault(object(), len(storage_numbers)) for _ in call.inputs)
        assumed_weights.update(reads[_WEIGHT_SLICES.get(call.op, slice(0))])
        if call.op.endswith("_") and reads:
            return Wires(reads, reads[:1] * len(call.outputs), reads[:1])
        returns = tuple(storage_numbers.setdefault(object(), len(storage_numbers)) for _ in call.outputs)
        return Wires(reads, returns, returns)

    wiring = []
    has_optimizer = False
    for node in nodes:
        has_optimizer |= node.phase is Phase.OPTIMIZER
        if not (node.reads or node.returns or node.writes):
            wiring.append(anonymous_wires(node.call))
            continue
        reads, returns = local_numbers(node.reads, is_output=False), local_numbers(node.returns, is_output=True)
        wiring.append(Wires(reads, returns, local_numbers(node.writes, is_output=True)))
    lasting = LASTING | {Role.GRADIENT} if has_optimizer else LASTING
    weights = sorted(
        assumed_weights | {number for number, role in roles.items() if role in lasting and number not in produced}
    )
    return Block(tuple(node.call for node in nodes), tuple(wiring), tuple(weights))


def windows(graph: Graph, size: int = 1, stride: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each block of `size` computing calls in a graph, for `block`.

    Views and allocations between the computing calls of a window belong to it, others to no window. A window is within
    one phase. A call that cannot be run in isolation forms its own window. A window of several calls is extended if the
    next call would overwrite the result of one of its calls.

    Args:
        graph: any graph.
        size: computing calls per window; the last window of a phase may have fewer.
        stride: computing calls from the start of one window to the start of the next; default: `size`.

    Raises:
        GraphError: a size or stride below 1.
    """
    step = size if stride is None else stride
    if size < 1 or step < 1:
        raise GraphError(f"blocks of {size} calls, {step} apart: give numbers above 0")
    for stretch in _stretches(graph):
        begin = 0
        while begin < len(stretch):
            end = min(begin + size, len(stretch))
            if size > 1:
                while end < len(stretch) and _overwrites(graph, stretch[begin:end], graph.nodes[stretch[end]]):
                    end += 1
            yield stretch[begin], stretch[end - 1] + 1
            if stride is None:
                begin = end
            elif end == len(stretch):
                break
            else:
                begin += step


def _stretches(graph: Graph) -> Iterator[list[int]]:
    """Yield the places of computing nodes in lists, split at changes of phase and around `UNGROUPED` nodes."""
    current: list[int] = []
    for place, node in enumerate(graph.nodes):
        if not node.computes:
            continue
        is_single = node.kind in UNGROUPED
        if current and (is_single or graph.nodes[current[-1]].phase is not node.phase):
            yield current
            current = []
        current.append(place)
        if is_single:
            yield current
            current = []
    if current:
        yield current


def _overwrites(graph: Graph, indices: list[int], following: Node) -> bool:
    overwritten = {graph.values[number].storage for number in following.writes} & {
        graph.values[number].storage for number in following.reads
    }
    return any(graph.values[number].storage in overwritten for place in indices for number in graph.nodes[place].writes)
