"""The parts of a graph: calls of operators, their data flow, and what could not be observed.

A graph is the list of calls that one step makes, in the order of execution. The word "layer" has four meanings
elsewhere (a node of ONNX, an operator of ATen, a module, a span of a trace); here a node is one call, and
`Graph.counts` names the kind of call.
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
"""Bytes of an element, by torch's names of types."""


class NodeKind(str, enum.Enum):
    """What a node does with its inputs, derived from what happens to their storages, not from a list of names."""

    COMPUTE = "compute"
    """It makes or changes values."""

    VIEW = "view"
    """All its outputs are in storages of its inputs, and nothing is written."""

    CREATE = "create"
    """It allocates memory without filling it."""

    RANDOM = "random"
    """It draws random numbers: it computes, and its order is fixed by the state of the generator."""

    COMMUNICATION = "communication"
    """It exchanges values with other ranks."""

    SYNC = "sync"
    """It reads tensors and returns none: the host waits for a value."""

    OPAQUE = "opaque"
    """An operator outside the framework: only its shapes are known."""


class Phase(str, enum.Enum):
    """Part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(str, enum.Enum):
    """The role of a value in the step."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    STATE = "state"
    CONSTANT = "constant"


class EdgeKind(str, enum.Enum):
    """The reason for an edge."""

    DATA = "data"
    """The later node reads a result of the earlier one."""

    REUSE = "reuse"
    """The later node overwrites a storage that the earlier one read or made; renaming would remove the edge."""

    ORDER = "order"
    """Both nodes change a state outside the tensors, or only the order is known."""


class Source(str, enum.Enum):
    """The origin of a graph."""

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
    """Type, shape and strides of a tensor argument, without its values, device and address."""

    dtype: str | None
    """Torch's name of the type, such as `float32`; None if unknown."""

    shape: tuple[int, ...] | None
    """Lengths of the dimensions; None if unknown."""

    stride: tuple[int, ...] | None = None
    """Strides in elements; None if the tensor is contiguous, or if unknown."""

    @property
    def elements(self) -> int | None:
        """Number of elements; None if the shape is unknown."""
        return None if self.shape is None else prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """Bytes of the distinct elements (an expanded dimension counts once); None if shape or type is unknown."""
        size = SIZES.get(self.dtype or "")
        if self.shape is None or size is None:
            return None
        if self.stride is None:
            return prod(self.shape) * size
        distinct = (size for size, step in zip(self.shape, self.stride, strict=True) if step or not size)
        return prod(distinct) * size


def permute(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor with its dimensions in another order."""
    shape, stride = tensor.shape or (), strides(tensor)
    return tensor_with_strides(tensor.dtype, [shape[dim] for dim in order], [stride[dim] for dim in order])


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, also of a contiguous one."""
    return contiguous_strides(tensor.shape or ()) if tensor.stride is None else tensor.stride


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.insert(0, step)
        step *= max(1, length)
    return tuple(steps)


def tensor_with_strides(dtype: str | None, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor by its strides, which become None if it is contiguous; dimensions of length 1 are ignored."""
    expected = contiguous_strides(shape)
    is_contiguous = 0 in shape or all(
        a == b for a, b, length in zip(stride, expected, shape, strict=True) if length > 1
    )
    return Tensor(dtype, tuple(shape), None if is_contiguous else tuple(stride))


Origin: TypeAlias = tuple[int, int]
"""Name of a tensor: the place of the node that made it and the number of the output, or `OUTSIDE` and a number."""

OBJECT = "object "
"""Prefix of an argument that is an object of the framework, not a tensor or a plain value."""

OUTSIDE = -1
"""Number in place of a node's: the tensor existed before the step; these are numbered in the order of appearance."""

Argument: TypeAlias = Any
"""A tensor, None, a tuple of these, or a plain value: bool, int, float, str, or a tuple of plain values."""


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, independent of its place in a model: enough to run and time it again."""

    op: str
    """Name with its vocabulary: `aten::conv2d`, `onnx::Conv`."""

    arguments: tuple[tuple[str, Argument], ...]
    """Name and value of all arguments, including defaults, in the order of the operator's schema."""

    outputs: tuple[Tensor, ...] = ()
    overload: str = ""
    values: str = ""
    """Rule by which values are made if the operator's time depends on them; empty if it does not."""

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order."""
        return tuple(_tensors(value for _, value in self.arguments))

    @cached_property
    def scalars(self) -> tuple[tuple[str, Any], ...]:
        """Name and value of the arguments without tensors."""
        return tuple((name, value) for name, value in self.arguments if not any(True for _ in _tensors([value])))


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
    """Bytes of the whole storage; None if unknown."""


@dataclass(frozen=True)
class Node:
    """One operator call of a step."""

    call: Call
    key: str
    """Key, equal for equal calls, see `xsp.graph.keys`."""

    kind: NodeKind
    module: str = ""
    """Path of the innermost module, `layer3.1.conv2`; with `#2` for its second call in the step."""

    phase: Phase = Phase.FORWARD
    reads: tuple[int, ...] = ()
    """Number of the value behind each tensor of `call.inputs`."""

    returns: tuple[int, ...] = ()
    """Number of the value behind each of `call.outputs`; the value of an input if the output shares its storage."""

    writes: tuple[int, ...] = ()
    """Numbers of the values that the node made."""

    stated_work: tuple[int | None, int | None] | None = None
    """FLOPs and bytes as stated by the source, if it does not report enough of the call to compute them."""

    origins: tuple[Origin | None, ...] = ()
    """Tensor of each of `call.inputs`, if the source reports it: values name storages, which several tensors may share.
    None for a tensor that no observed node made; empty if the source does not report tensors."""

    offsets: tuple[int | None, ...] = ()
    """Offset in its storage, in elements, of each of `call.inputs` and then of `call.outputs`; None if unknown. Empty
    if the source does not report offsets."""

    @property
    def computes(self) -> bool:
        """Whether the node does work, that is, is neither view nor allocation."""
        return self.kind not in (NodeKind.VIEW, NodeKind.CREATE)


@dataclass(frozen=True, order=True)
class Edge:
    """A dependency between two nodes, given by their positions in the order of execution."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True)
class Problem:
    """Something that could not be observed, or an attempt that failed before another one worked."""

    where: str
    """Rung of the ladder, or node."""

    reason: str


@dataclass(frozen=True)
class Submodule:
    """A module of a model, or the model itself."""

    path: str
    """Path, `layer3.1.conv2`; empty for the model itself."""

    kind: str
    """Name of its class; empty if unknown."""

    parameters: int
    """Elements of its parameters, with those of the modules in it; parameters that share memory count once."""

    outputs: tuple[Tensor, ...] = ()
    """Tensors that its first call returned; empty if it was not called."""


@dataclass(frozen=True)
class Graph:
    """The operator calls of a step in the order of execution, with their data flow."""

    name: str
    source: Source
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    """Edges in order; at most one between two nodes, with the strongest reason."""

    values: tuple[Value, ...]
    known_by: KnownBy
    counts: str
    """What the nodes are: "operators of ATen", "nodes of ONNX"."""

    parameters: int | None = None
    """Elements of all parameters; parameters that share memory count once. None if unknown."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Batch, mode, versions of libraries: plain values."""

    problems: tuple[Problem, ...] = ()
    outputs: tuple[Origin, ...] = ()
    """Tensors that the step returned, if the source reports them."""

    outliving: tuple[int, ...] | None = None
    """Numbers of the values in storages that outlive the step: returned, or held by modules. None if unknown."""

    modules: tuple[Submodule, ...] = ()
    """The modules of the model, in the order of their definition, if the source reports them."""

    released: tuple[tuple[int, int], ...] | None = None
    """Each storage that ceased to exist in the step, with the last node during which it existed. None if unknown."""

    @property
    def computing(self) -> tuple[Node, ...]:
        """Nodes that do work."""
        return tuple(node for node in self.nodes if node.computes)

    def edges_of(self, *kinds: EdgeKind) -> list[Edge]:
        """Return the edges with one of these reasons."""
        return [edge for edge in self.edges if edge.kind in kinds]

    def measures(self) -> dict[str, Any]:
        """Return SPOC's measures and the wider family, see `xsp.graph.measures`."""
        from xsp.graph.measures import measures

        return measures(self)

    def save(self, path: Any) -> None:
        """Write the graph to a file, see `xsp.graph.files.save`."""
        from xsp.graph.files import save

        save(self, path)
