"""Blocks: one or several consecutive calls of a graph, without their place in it. A block is what is timed.

A layer is a block of one call. Several calls are wired by local numbers: each storage has a number, in the order of
first appearance. So equal stretches of different models are equal blocks, with equal keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.node import Call, Graph, Node, NodeKind, Phase, Role, Tensor

LASTING = frozenset([Role.WEIGHT, Role.BUFFER, Role.STATE])
"""Roles of what lives longer than a step, so that a whole step lies between two uses of it."""

WEIGHT_BYTES = "weight_bytes"
"""Among the settings of a graph without values, that of a trace: bytes of all parameters, where modules tell them."""

ALONE = frozenset([NodeKind.OPAQUE, NodeKind.COMMUNICATION])
"""Kinds that are not run again by themselves: a window of several calls holds none of them."""

_WEIGHTS: dict[str, slice] = {
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
"""Operator → which of its tensors are weights where a module calls it, for sources that do not tell what a tensor is:
without it a call of a trace would be another block than that of the same call of a captured step."""


@dataclass(frozen=True)
class Wires:
    """Which storages a call uses, by local numbers."""

    reads: tuple[int, ...]
    """Of each tensor of `call.inputs`."""

    returns: tuple[int, ...]
    """Of each of `call.outputs`."""

    writes: tuple[int, ...]
    """Of what it makes or changes."""


@dataclass(frozen=True)
class Block:
    """Consecutive calls with their wiring."""

    calls: tuple[Call, ...]
    wiring: tuple[Wires, ...]
    weights: tuple[int, ...] = ()
    """Storages from outside that live longer than a step: weights, buffers, states of the optimizer."""

    @property
    def op(self) -> str:
        """The operators: `aten::conv2d`, `aten::conv2d+aten::relu`."""
        return "+".join(each.op for each in self.calls)

    @cached_property
    def key(self) -> str:
        """Equal for equal blocks: 32 hexadecimal digits of calls, wiring, and which inputs are weights."""
        return self._hash([keys.key(each) for each in self.calls])

    @cached_property
    def work_key(self) -> str:
        """As `key`, without arguments that cannot change the work, see `xsp.graph.keys.ERASED`."""
        return self._hash([keys.work_key(each) for each in self.calls])

    @property
    def holes(self) -> bool:
        """Whether the shape or the type of a tensor is unknown."""
        return any(each.holes for each in self.calls)

    @cached_property
    def external(self) -> dict[int, Tensor]:
        """Storage → the first tensor that is read of it, for those that come from outside, in order."""
        made: set[int] = set()
        found: dict[int, Tensor] = {}
        for call, wires in zip(self.calls, self.wiring, strict=True):
            for number, tensor in zip(wires.reads, call.inputs, strict=True):
                if number not in made:
                    found.setdefault(number, tensor)
            made.update(number for number in (*wires.returns, *wires.writes) if number not in found)
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that it reads; those of unknown size are left out."""
        return sum(self.external[each].bytes or 0 for each in self.weights if each in self.external)

    def to_plain(self) -> dict[str, Any]:
        """Return the block as JSON can hold it."""
        return {
            "calls": [keys.call_to_plain(each) for each in self.calls],
            "wiring": [[list(each.reads), list(each.returns), list(each.writes)] for each in self.wiring],
            "weights": list(self.weights),
        }

    @classmethod
    def from_plain(cls, found: Any) -> Block:
        """Return the block that `to_plain` made JSON of.

        Raises:
            LookupError, TypeError, ValueError: it did not, or somebody changed it.
        """
        calls = tuple(map(keys.call_from_plain, found["calls"]))
        wiring = tuple(Wires(*(tuple(map(int, part)) for part in each)) for each in found["wiring"])
        for call, wires in zip(calls, wiring, strict=True):
            if len(wires.reads) != len(call.inputs) or len(wires.returns) != len(call.outputs):
                raise ValueError(f"a call of {call.op} with other storages than it has tensors")
        return cls(calls, wiring, tuple(map(int, found["weights"])))

    def _hash(self, of_calls: list[str]) -> str:
        wiring = [[each.reads, each.returns, each.writes] for each in self.wiring]
        text = json.dumps([of_calls, wiring, self.weights], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def block(graph: Graph, start: int, stop: int) -> Block:
    """Return the nodes from `start` up to `stop` of a graph as a block.

    Raises:
        GraphError: there are no such nodes.
    """
    nodes = graph.nodes[start:stop]
    if not 0 <= start < stop <= len(graph.nodes):
        raise GraphError(f"{graph.name} has no nodes {start} to {stop}: there are {len(graph.nodes)}")
    seen: dict[Any, int] = {}
    first: dict[int, Role] = {}
    made: set[int] = set()
    likely: set[int] = set()

    def local(numbers: tuple[int, ...], made_here: bool) -> tuple[int, ...]:
        found = []
        for each in numbers:
            value = graph.values[each]
            number = seen.setdefault(value.storage, len(seen))
            if made_here and number not in first:
                made.add(number)
            first.setdefault(number, value.role)
            found.append(number)
        return tuple(found)

    def untold(call: Call) -> Wires:
        """Return the wires of a call whose source tells no storages: each tensor is taken to be one of its own."""
        reads = tuple(seen.setdefault(object(), len(seen)) for _ in call.inputs)
        likely.update(reads[_WEIGHTS.get(call.op, slice(0))])
        if call.op.endswith("_") and reads:
            return Wires(reads, reads[:1] * len(call.outputs), reads[:1])
        returns = tuple(seen.setdefault(object(), len(seen)) for _ in call.outputs)
        return Wires(reads, returns, returns)

    wiring = []
    optimizes = False
    for node in nodes:
        optimizes |= node.phase is Phase.OPTIMIZER
        if not (node.reads or node.returns or node.writes):
            wiring.append(untold(node.call))
            continue
        reads, returns = local(node.reads, made_here=False), local(node.returns, made_here=True)
        wiring.append(Wires(reads, returns, local(node.writes, made_here=True)))
    lasting = LASTING | {Role.GRADIENT} if optimizes else LASTING
    weights = sorted(likely | {number for number, role in first.items() if role in lasting and number not in made})
    return Block(tuple(each.call for each in nodes), tuple(wiring), tuple(weights))


def windows(graph: Graph, size: int = 1, stride: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where the blocks of so many computing calls begin and end in a graph, for `block`.

    Views and allocations between computing calls belong to the window, those around it to none. Windows lie in one
    phase. What cannot be run by itself stands alone. A window of several calls goes on where the next call would
    overwrite what one of its own made.

    Args:
        graph: any.
        size: computing calls of a window; the last one of a phase may have fewer.
        stride: computing calls from the beginning of one window to that of the next; its size unless told otherwise.

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
    """Yield the places of computing nodes, cut where the phase changes and around what stands alone."""
    current: list[int] = []
    for place, node in enumerate(graph.nodes):
        if not node.computes:
            continue
        alone = node.kind in ALONE
        if current and (alone or graph.nodes[current[-1]].phase is not node.phase):
            yield current
            current = []
        current.append(place)
        if alone:
            yield current
            current = []
    if current:
        yield current


def _overwrites(graph: Graph, places: list[int], after: Node) -> bool:
    storage = {graph.values[each].storage for each in after.writes} & {
        graph.values[each].storage for each in after.reads
    }
    return any(graph.values[each].storage in storage for place in places for each in graph.nodes[place].writes)
