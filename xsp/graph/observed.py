"""Graphs of execution traces (PyTorch's observer, Chakra's JSON): outermost operators, edges by storages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from xsp.errors import GraphError, TraceError
from xsp.graph import keys
from xsp.graph.descriptions import TYPES, TYPES_BY_NUMBER
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Phase, Role, Source, Tensor, tensor_with_strides
from xsp.graph.regions import Region, is_exact, of_tensor, union
from xsp.graph.values import Flow
from xsp.graph.work import write_of
from xsp.importers.jsonstream import elements
from xsp.version import __version__

MOST_TEXT = 256
"""Most characters of an argument that are kept."""

DECIMALS = 6
"""Decimals of a number in an execution trace."""


class _TensorRecord(NamedTuple):
    """A tensor as described in the file."""

    number: int
    """Number of the tensor, which may be reused after the tensor is freed."""

    storage: int
    bytes: int
    tensor: Tensor
    region: Region = None
    """What it covers of its storage; None if the file does not report strides."""


def load(path: Path) -> Graph:
    """Read an execution trace.

    Raises:
        GraphError: the file is damaged, or has no operators.
    """
    reader = _Reader()
    try:
        nodes = [node for node in elements(str(path), "nodes") if isinstance(node, dict)]
        for node in sorted((node for node in nodes if type(node.get("id")) is int), key=lambda node: node["id"]):
            reader.read_node(node)
    except TraceError as error:
        raise GraphError(str(error)) from error
    if not reader.nodes:
        raise GraphError(f"{path}: the execution trace has no operators")
    return Graph(
        name=path.name,
        source=Source.OBSERVED,
        nodes=tuple(reader.nodes),
        edges=reader.flow.edges(),
        values=reader.flow.final_values(),
        known_by=KnownBy.STORAGE,
        counts="outermost operators of the trace",
        settings={"xsp": __version__},
    )


def as_recorded_in_trace(call: Call) -> Call:
    """Return a captured call as an execution trace would report it: numbers have six decimals, and a number that
    becomes a tensor (`x * 0.5`) has only its type."""
    return replace(
        call,
        arguments=tuple(
            (name, _rounded(keys.as_tensor(value) if keys.becomes_tensor(call.op, call.overload, name) else value))
            for name, value in call.arguments
        ),
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return round(value, DECIMALS) if isinstance(value, float) else value


class _Reader:
    """Reads the nodes of a file in the order of their numbers, which is that of their starts; the file sorts by end."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.nodes: list[Node] = []
        self._scopes: dict[int, tuple[bool, str, Phase]] = {}
        self._producers: dict[tuple[int, int], tuple[int, Tensor]] = {}
        """Tensor and its storage → the node that last returned it, which may have made a view."""

    def read_node(self, record: dict[str, Any]) -> None:
        """Add a node of the file, unless it is within an operator, or only wraps others."""
        name, identity = str(record.get("name", "")), record.get("id")
        attributes = record.get("attrs")
        values = {
            str(attribute.get("name")): attribute.get("value")
            for attribute in (attributes if isinstance(attributes, list) else ())
            if isinstance(attribute, dict)
        }
        parent = record.get("ctrl_deps", record.get("parent"))
        is_covered, module, phase = self._scopes.get(
            parent if isinstance(parent, int) else -1, (False, "", Phase.FORWARD)
        )
        if name.startswith("nn.Module: "):
            module = name.removeprefix("nn.Module: ")
        if "autograd::engine" in name or name.endswith(("Backward", "Backward0", "Backward1")):
            phase = Phase.BACKWARD
        elif name.startswith("Optimizer.step"):
            phase = Phase.OPTIMIZER
        is_operator = "::" in name and not name.startswith(("autograd::", "torch::autograd::", "profiler::", "["))
        if isinstance(identity, int):
            self._scopes[identity] = (is_covered or is_operator, module, phase)
        if is_operator and not is_covered:
            self._add(name, module, phase, record, str(record.get("op_schema") or values.get("op_schema") or ""))

    def _add(self, name: str, module: str, phase: Phase, node: dict[str, Any], schema: str) -> None:
        number = len(self.nodes)
        declared = _declarations(schema)
        arguments: list[tuple[str, Any]] = []
        reads: list[int] = []
        accesses: list[tuple[_TensorRecord, Hashable, int | None, bool]] = []
        for place, part in enumerate(_part(node, "input")):
            argument = declared[place] if place < len(declared) else Declaration(f"input{place}")
            value, records = _argument(*part)
            arguments.append((argument.name, argument.plain(value)))
            for record in records:
                through, previous = self._producers.get((record.number, record.storage), (None, None))
                storage: Hashable = record.storage
                if record.tensor != previous and argument.may_be_number(name, _overload(schema), record.tensor):
                    storage, through = (number, place), None  # its memory may have belonged to another tensor
                self.flow.add_outside(storage, Role.CONSTANT, record.bytes)
                accesses.append((record, storage, through, argument.is_written))
        write = write_of(name, _overload(schema), dict(arguments))
        covered: dict[Hashable, list[Region]] = defaultdict(list)
        for part in _part(node, "output"):
            for record in _argument(*part)[1]:
                covered[record.storage].append(record.region)
        is_view = bool(covered) and all(map(self.flow.has_value, covered)) and not any(entry[3] for entry in accesses)
        for record, storage, through, is_written in accesses:
            if is_written and not write.reads and record.region is not None:
                reads.append(self.flow.current(storage))
            else:
                region = union(covered[storage]) if is_view and storage in covered else record.region
                reads.append(self.flow.read(number, storage, through, region))
        writes = [
            self.flow.write(
                number,
                storage,
                Role.ACTIVATION,
                record.bytes,
                record.region,
                through=through,
                replaces=write.replaces and is_exact(record.region, record.bytes, 1),
            )
            for record, storage, through, is_written in accesses
            if is_written
        ]
        outputs: list[Tensor] = []
        returns: list[int] = []
        read_storages = {self.flow.values[index].storage for index in reads}
        for part in _part(node, "output"):
            for record in _argument(*part)[1]:
                is_known = self.flow.has_value(record.storage)
                if is_known and self.flow.values[self.flow.current(record.storage)].storage in read_storages:
                    returns.append(self.flow.current(record.storage))
                else:
                    returns.append(self.flow.write(number, record.storage, Role.ACTIVATION, record.bytes))
                    writes.append(returns[-1])
                self._producers[record.number, record.storage] = number, record.tensor
                outputs.append(record.tensor)
        rule = keys.UNIFORM if name in keys.VALUE_DEPENDENT else ""
        call = Call(name, tuple(arguments), tuple(outputs), _overload(schema), rule)
        kind = _kind(name, writes, outputs)
        self.nodes.append(Node(call, keys.key(call), kind, module, phase, tuple(reads), tuple(returns), tuple(writes)))


def _kind(name: str, writes: list[int], outputs: list[Tensor]) -> NodeKind:
    if not writes:
        return NodeKind.VIEW if outputs else NodeKind.SYNC
    if not name.startswith("aten::"):
        return NodeKind.OPAQUE
    return NodeKind.CREATE if name.startswith(("aten::empty", "aten::new_empty")) else NodeKind.COMPUTE


def _part(node: dict[str, Any], side: str) -> Iterator[tuple[Any, Any, str, Any]]:
    """Yield value, shape, type and strides of each input or output, for any schema version of the file."""
    section = node.get(f"{side}s")
    if isinstance(section, dict):
        lists = [section.get(name) for name in ("values", "shapes", "types", "strides")]
    else:
        lists = [section, *(node.get(f"{side}_{name}") for name in ("shapes", "types", "strides"))]
    values, shapes, kinds, strides = (column if isinstance(column, list) else [] for column in lists)
    if len(strides) != len(values):  # files of older versions have none
        strides = [None] * len(values)
    for value, shape, kind, stride in zip(values, shapes, kinds, strides, strict=False):
        yield value, shape, str(kind), stride


def _argument(value: Any, shape: Any, kind: str, stride: Any) -> tuple[Any, list[_TensorRecord]]:
    """Return an argument as plain values, and the tensors in it."""
    if kind.startswith("Tensor"):
        record = _tensor_record(value, shape, kind, stride)
        return (None, []) if record is None else (record.tensor, [record])
    if kind.startswith("GenericList[") and isinstance(value, list) and "Tensor" in kind:
        kinds = kind.removeprefix("GenericList[").rstrip("]").split(",")
        shapes = shape if isinstance(shape, list) else []
        strides = stride if isinstance(stride, list) and len(stride) == len(value) else [None] * len(value)
        records = [_tensor_record(*fields) for fields in zip(value, shapes, kinds, strides, strict=False)]
        return tuple(None if entry is None else entry.tensor for entry in records), [
            entry for entry in records if entry
        ]
    if value is None or value in ("<None>", "None") or kind in ("Device", "Generator", "None"):
        return None, []
    if isinstance(value, (bool, int, float)):
        return value, []
    if isinstance(value, list) and all(isinstance(element, (bool, int, float)) for element in value):
        return tuple(value), []
    return str(value)[:MOST_TEXT], []


def _tensor_record(value: Any, shape: Any, kind: str, stride: Any) -> _TensorRecord | None:
    """Return a tensor from a list of its number, storage, offset, elements, bytes of an element, and device."""
    if not isinstance(value, list) or len(value) < 5 or not all(isinstance(field, int) for field in value[:5]):
        return None
    number, storage, offset, count, size = value[:5]
    if not size:  # an empty place in a list of tensors
        return None
    sizes, strides = _numbers(shape), _numbers(stride)
    region: Region = None
    dtype = TYPES.get(kind.partition("(")[2].rstrip(")"))
    if sizes is None or strides is None or len(sizes) != len(strides):
        tensor = Tensor(dtype, sizes)
    else:
        tensor = tensor_with_strides(dtype, sizes, strides)
        region = of_tensor(max(0, offset), sizes, strides, size, None)
    return _TensorRecord(number, storage, count * size, tensor, region)


def _numbers(value: Any) -> tuple[int, ...] | None:
    return (
        tuple(value)
        if isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
        else None
    )


class Declaration(NamedTuple):
    """The declaration of an argument in a schema."""

    name: str
    kind: str = ""
    is_written: bool = False
    default: str = ""

    def may_be_number(self, op: str, overload: str, tensor: Tensor) -> bool:
        """Return whether a tensor without dimensions may represent a Python number."""
        is_one = tensor.shape == () and tensor.dtype in keys.NUMBERS.values()
        return is_one and keys.becomes_tensor(op, overload, self.name)

    def plain(self, value: Any) -> Any:
        """Return the file's value of the argument as captured calls have it: names for numbers of types and layouts."""
        if self.name in keys.FLAGS:
            return keys.FLAGS[self.name]
        if self.name in keys.EXTERNAL_ARGUMENTS:
            return None
        if type(value) is not int:
            return value
        if self.kind == "ScalarType":
            return TYPES_BY_NUMBER.get(value, value)
        if self.kind == "Layout" and value < len(LAYOUTS):
            return LAYOUTS[value]
        if self.kind == "MemoryFormat" and value < len(FORMATS) and self.default not in (FORMATS[value], str(value)):
            return FORMATS[value]
        return value


LAYOUTS = ("strided", "sparse_coo")
FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
"""Memory formats by ATen's numbers."""


def _declarations(schema: str) -> list[Declaration]:
    """Return the declaration of each argument in a schema, `aten::add_.Tensor(Tensor(a!) self, …)`."""
    parameters = schema.partition("(")[2].rpartition(") ->")[0]
    parts = re.split(r",\s*(?![^()\[\]]*[)\]])", parameters) if parameters else []
    declarations = []
    for part in parts:
        declaration, _, default = part.partition("=")
        words = declaration.split()
        if words and words != ["*"]:
            declarations.append(Declaration(words[-1], words[0].rstrip("?"), "!)" in declaration, default))
    return declarations


def _overload(schema: str) -> str:
    return schema.partition("(")[0].partition("::")[2].partition(".")[2]
