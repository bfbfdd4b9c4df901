"""What a graph consists of: calls of operators, their data flow, and what could not be seen.

A graph is the list of calls that one step makes, in the order of execution. The word "layer" means four things
elsewhere (a node of ONNX, an operator of ATen, a module, a span of a trace); here a node is one call, and
`Graph.counts` says of what.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "qint8", "quint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by the names that torch gives to types."""


class NodeKind(str, enum.Enum):
    """What a node does with its inputs, from what became of their storages and not from a list of names."""

    COMPUTE = "compute"
    """It makes or changes values."""

    VIEW = "view"
    """All its outputs lie in storages of its inputs, and nothing is written."""

    CREATE = "create"
    """It allocates, and fills nothing in."""

    RANDOM = "random"
    """It draws random numbers: it computes, and the state of the generator orders it."""

    COMMUNICATION = "communication"
    """It exchanges values with other ranks."""

    SYNC = "sync"
    """It reads tensors and returns none: the host waits for a value."""

    OPAQUE = "opaque"
    """An operator that is not of the framework: it is known by its shapes alone."""


class Phase(str, enum.Enum):
    """Part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(str, enum.Enum):
    """What a value is to the step."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    STATE = "state"
    CONSTANT = "constant"


class Why(str, enum.Enum):
    """Reason of an edge."""

    DATA = "data"
    """The later node reads what the earlier one made."""

    REUSE = "reuse"
    """The later node overwrites what the earlier one read or made: renaming would remove it."""

    ORDER = "order"
    """Both change a state outside the tensors, or only the order is known."""


class Source(str, enum.Enum):
    """Where a graph comes from."""

    CAPTURED = "captured"
    PROGRAM = "program"
    ONNX = "onnx"
    OBSERVED = "observed"
    SPANS = "spans"


class KnownBy(str, enum.Enum):
    """How the edges of a graph are known, best first."""

    STORAGE = "storage"
    NAMES = "names"
    ORDER = "order"


@dataclass(frozen=True)
class Tensor:
    """Type, shape and strides of a tensor argument, without its values, device and place in memory."""

    dtype: str | None
    """As torch names it, `float32`; None if unknown."""

    shape: tuple[int, ...] | None
    """None if unknown."""

    stride: tuple[int, ...] | None = None
    """In elements; None if it is contiguous, or not known."""

    @property
    def elements(self) -> int | None:
        """Number of elements; None if the shape is unknown."""
        return None if self.shape is None else prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """Bytes of its distinct elements (an expanded dimension counts once); None if shape or type is unknown."""
        size = SIZES.get(self.dtype or "")
        if self.shape is None or size is None:
            return None
        if self.stride is None:
            return prod(self.shape) * size
        distinct = (size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return prod(distinct) * size


def permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor with its dimensions in another order."""
    shape, stride = tensor.shape or (), strides(tensor)
    return laid(tensor.dtype, [shape[each] for each in order], [stride[each] for each in order])


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, also of a contiguous one."""
    return contiguous(tensor.shape or ()) if tensor.stride is None else tensor.stride


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found: list[int] = []
    step = 1
    for length in reversed(shape):
        found.insert(0, step)
        step *= max(1, length)
    return tuple(found)


def laid(dtype: str | None, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor by its strides, which are None where it is contiguous: those of single elements do not count."""
    usual = contiguous(shape)
    same = 0 in shape or all(a == b for a, b, length in zip(stride, usual, shape, strict=True) if length > 1)
    return Tensor(dtype, tuple(shape), None if same else tuple(stride))


Origin: TypeAlias = tuple[int, int]
"""Names a tensor: the place of the node that made it with the number of the output, or `OUTSIDE` with a number."""

OBJECT = "object "
"""How an argument begins in a graph that is an object of the framework's, not a tensor or a plain value."""

OUTSIDE = -1
"""In place of a node: the tensor was there before the step. Its number is one of those in the order of appearance."""

Argument: TypeAlias = Any
"""A tensor, None, a tuple of those, or a plain value: bool, int, float, str, or a tuple of plain values."""


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, without its place in a model: enough to run and time it again."""

    op: str
    """With its vocabulary: `aten::conv2d`, `onnx::Conv`."""

    arguments: tuple[tuple[str, Argument], ...]
    """Name and value, all of them, defaults filled in, in the order of the operator's schema."""

    outputs: tuple[Tensor, ...] = ()
    overload: str = ""
    values: str = ""
    """Rule by which values are made where the time of the operator depends on them; empty where it does not."""

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in their order."""
        return tuple(_tensors(value for _, value in self.arguments))

    @cached_property
    def scalars(self) -> tuple[tuple[str, Any], ...]:
        """Name and value of the arguments that hold no tensor."""
        return tuple((name, value) for name, value in self.arguments if not any(True for _ in _tensors([value])))

    @property
    def holes(self) -> bool:
        """Whether the shape or the type of a tensor is unknown."""
        return any(each.bytes is None for each in (*self.inputs, *self.outputs))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@dataclass(frozen=True)
class Value:
    """The content of a storage between two writes."""

    storage: int
    """Number of the storage, in the order of first appearance."""

    version: int
    role: Role
    bytes: int | None = None
    """Of the whole storage; None if unknown."""


@dataclass(frozen=True)
class Node:
    """One operator call of a step."""

    call: Call
    key: str
    """Equal for equal calls, see `xsp.graph.keys`."""

    kind: NodeKind
    module: str = ""
    """Path of the innermost module, `layer3.1.conv2`; with `#2` if it is its second call in the step."""

    phase: Phase = Phase.FORWARD
    reads: tuple[int, ...] = ()
    """Number of the value behind each tensor of `call.inputs`."""

    returns: tuple[int, ...] = ()
    """Number of the value behind each of `call.outputs`; that of an input where the output lies in its storage."""

    writes: tuple[int, ...] = ()
    """Numbers of the values that it made."""

    stated: tuple[int | None, int | None] | None = None
    """FLOPs and bytes as the source states them, where it does not tell enough of the call to compute them."""

    origins: tuple[Origin | None, ...] = ()
    """Which tensor each of `call.inputs` is, where the source tells: values name storages, of which several tensors may
    be parts. None for one that no node was seen to make; empty where the source does not tell."""

    @property
    def computes(self) -> bool:
        """Whether it does work: neither view nor allocation."""
        return self.kind not in (NodeKind.VIEW, NodeKind.CREATE)


@dataclass(frozen=True, order=True)
class Edge:
    """A dependency between two nodes, given by their positions in the order of execution."""

    before: int
    after: int
    why: Why


@dataclass(frozen=True)
class Problem:
    """What could not be seen, or which way to the graph failed before another one worked."""

    where: str
    """Step of the ladder, or node."""

    reason: str


@dataclass(frozen=True)
class Graph:
    """The operator calls of a step in the order of execution, with their data flow."""

    name: str
    source: Source
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    """In order; at most one between two nodes, with the strongest reason."""

    values: tuple[Value, ...]
    known_by: KnownBy
    counts: str
    """What a node is: "operators of ATen", "nodes of ONNX"."""

    parameters: int | None = None
    """Elements of all parameters, those counted once that share memory; None if unknown."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Batch, mode, versions of libraries: plain values."""

    problems: tuple[Problem, ...] = ()
    outputs: tuple[Origin, ...] = ()
    """Tensors that the step returned, where the source tells."""

    kept: tuple[int, ...] | None = None
    """Numbers of the values in storages that outlive the step: what it returned, what modules hold. None if unknown."""

    @property
    def computing(self) -> tuple[Node, ...]:
        """Nodes that do work."""
        return tuple(each for each in self.nodes if each.computes)

    def edges_of(self, *why: Why) -> list[Edge]:
        """Return the edges with one of these reasons."""
        return [each for each in self.edges if each.why in why]

    def measures(self) -> dict[str, Any]:
        """Return SPOC's measures and the wider family, see `xsp.graph.measures`."""
        from xsp.graph.measures import measures

        return measures(self)

    def save(self, path: Any) -> None:
        """Write the graph to a file, see `xsp.graph.files.save`."""
        from xsp.graph.files import save

        save(self, path)
