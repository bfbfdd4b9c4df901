"""Graphs of execution traces (PyTorch's observer, Chakra's JSON): outermost operators, edges by storages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xsp.errors import GraphError, TraceError
from xsp.graph import keys
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Phase, Role, Source, Tensor
from xsp.graph.told import TYPES
from xsp.graph.values import Flow
from xsp.importers.jsonstream import elements
from xsp.version import __version__

MOST_TEXT = 256
"""Letters of an argument that is kept."""


class _Held(NamedTuple):
    """A tensor as the file has it."""

    storage: int
    bytes: int
    tensor: Tensor


def load(path: Path) -> Graph:
    """Read an execution trace.

    Raises:
        GraphError: it is damaged, or has no operators.
    """
    reader = _Reader()
    try:
        found = [each for each in elements(str(path), "nodes") if isinstance(each, dict)]
        for each in sorted((each for each in found if type(each.get("id")) is int), key=lambda each: each["id"]):
            reader.take(each)
    except TraceError as error:
        raise GraphError(str(error)) from error
    if not reader.nodes:
        raise GraphError(f"{path}: the execution trace has no operators")
    return Graph(
        name=path.name,
        source=Source.OBSERVED,
        nodes=tuple(reader.nodes),
        edges=reader.flow.edges(),
        values=reader.flow.finished(),
        known_by=KnownBy.STORAGE,
        counts="outermost operators of the trace",
        settings={"xsp": __version__},
    )


class _Reader:
    """Takes the nodes of a file in the order of their numbers, given as they begin; they stand there as they end."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.nodes: list[Node] = []
        self._covered: dict[int, tuple[bool, str, Phase]] = {}
        self._through: dict[int, int] = {}

    def take(self, found: dict[str, Any]) -> None:
        """Add a node of the file, unless it lies in an operator, or only wraps others."""
        name, identity = str(found.get("name", "")), found.get("id")
        stated = {
            str(each.get("name")): each.get("value") for each in found.get("attrs") or () if isinstance(each, dict)
        }
        above = found.get("ctrl_deps", found.get("parent"))
        covered, module, phase = self._covered.get(above if isinstance(above, int) else -1, (False, "", Phase.FORWARD))
        if name.startswith("nn.Module: "):
            module = name.removeprefix("nn.Module: ")
        if "autograd::engine" in name or name.endswith(("Backward", "Backward0", "Backward1")):
            phase = Phase.BACKWARD
        elif name.startswith("Optimizer.step"):
            phase = Phase.OPTIMIZER
        is_operator = "::" in name and not name.startswith(("autograd::", "profiler::", "["))
        if isinstance(identity, int):
            self._covered[identity] = (covered or is_operator, module, phase)
        if is_operator and not covered:
            self._add(name, module, phase, found, str(found.get("op_schema") or stated.get("op_schema") or ""))

    def _add(self, name: str, module: str, phase: Phase, found: dict[str, Any], schema: str) -> None:
        number = len(self.nodes)
        declared = _declared(schema)
        arguments: list[tuple[str, Any]] = []
        reads: list[int] = []
        written: dict[int, int] = {}
        for place, (value, shape, kind) in enumerate(_part(found, "input")):
            argument, changes = declared[place] if place < len(declared) else (f"input{place}", False)
            described, held = _argument(value, shape, kind)
            arguments.append((argument, described))
            for each in held:
                self.flow.outside(each.storage, Role.CONSTANT, each.bytes)
                reads.append(self.flow.read(number, each.storage, self._through.get(each.storage)))
                if changes:
                    written[each.storage] = each.bytes
        writes = [self.flow.write(number, storage, Role.ACTIVATION, size) for storage, size in written.items()]
        outputs: list[Tensor] = []
        returns: list[int] = []
        read = {self.flow.values[each].storage for each in reads}
        for value, shape, kind in _part(found, "output"):
            for each in _argument(value, shape, kind)[1]:
                known = self.flow.known(each.storage)
                if known and self.flow.values[self.flow.current(each.storage)].storage in read:
                    returns.append(self.flow.current(each.storage))
                    if not writes:
                        self._through[each.storage] = number
                else:
                    returns.append(self.flow.write(number, each.storage, Role.ACTIVATION, each.bytes))
                    writes.append(returns[-1])
                    self._through.pop(each.storage, None)
                outputs.append(each.tensor)
        rule = keys.UNIFORM if name in keys.VALUE_DEPENDENT else ""
        call = Call(name, tuple(arguments), tuple(outputs), _overload(schema), rule)
        kind_of = _kind(name, writes, outputs)
        self.nodes.append(
            Node(call, keys.key(call), kind_of, module, phase, tuple(reads), tuple(returns), tuple(writes))
        )


def _kind(name: str, writes: list[int], outputs: list[Tensor]) -> NodeKind:
    if not writes:
        return NodeKind.VIEW if outputs else NodeKind.SYNC
    if not name.startswith("aten::"):
        return NodeKind.OPAQUE
    return NodeKind.CREATE if name.startswith(("aten::empty", "aten::new_empty")) else NodeKind.COMPUTE


def _part(found: dict[str, Any], which: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield value, shape and type of each input or output, of whatever schema the file is."""
    whole = found.get(f"{which}s")
    if isinstance(whole, dict):
        lists = [whole.get(name) for name in ("values", "shapes", "types")]
    else:
        lists = [whole, found.get(f"{which}_shapes"), found.get(f"{which}_types")]
    values, shapes, kinds = (each if isinstance(each, list) else [] for each in lists)
    yield from ((value, shape, str(kind)) for value, shape, kind in zip(values, shapes, kinds, strict=False))


def _argument(value: Any, shape: Any, kind: str) -> tuple[Any, list[_Held]]:
    """Return an argument in plain values, and the tensors in it."""
    if kind.startswith("Tensor"):
        held = _held(value, shape, kind)
        return (None, []) if held is None else (held.tensor, [held])
    if kind.startswith("GenericList[") and isinstance(value, list) and "Tensor" in kind:
        kinds = kind.removeprefix("GenericList[").rstrip("]").split(",")
        shapes = shape if isinstance(shape, list) else []
        found = [_held(*each) for each in zip(value, shapes, kinds, strict=False)]
        return tuple(None if each is None else each.tensor for each in found), [each for each in found if each]
    if value is None or value in ("<None>", "None") or kind in ("Device", "Generator", "None"):
        return None, []
    if isinstance(value, (bool, int, float)):
        return value, []
    if isinstance(value, list) and all(isinstance(each, (bool, int, float)) for each in value):
        return tuple(value), []
    return str(value)[:MOST_TEXT], []


def _held(value: Any, shape: Any, kind: str) -> _Held | None:
    """Return a tensor: the file has its number, storage, offset, elements, bytes of an element, and device."""
    if not isinstance(value, list) or len(value) < 5 or not all(isinstance(each, int) for each in value[:5]):
        return None
    _, storage, _, elements_, size = value[:5]
    sizes = tuple(shape) if isinstance(shape, list) and all(isinstance(each, int) for each in shape) else None
    dtype = TYPES.get(kind.partition("(")[2].rstrip(")"))
    return _Held(storage, elements_ * size, Tensor(dtype, sizes))


def _declared(schema: str) -> list[tuple[str, bool]]:
    """Return name and whether it is written of each argument of a schema, `aten::add_.Tensor(Tensor(a!) self, …)`."""
    inside = schema.partition("(")[2].rpartition(") ->")[0]
    parts = re.split(r",\s*(?![^()\[\]]*[)\]])", inside) if inside else []
    named = [part for part in parts if part.strip() != "*"]
    return [(part.split("=")[0].split()[-1], "!)" in part) for part in named if part.split("=")[0].split()]


def _overload(schema: str) -> str:
    return schema.partition("(")[0].partition("::")[2].partition(".")[2]
