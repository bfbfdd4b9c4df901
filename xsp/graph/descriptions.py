"""Calls from the spans of a step with descriptions: they run once more on tensors without values, as if captured.

A span has the shapes, types and strides of the operator's inputs and the numbers among its arguments, but no outputs,
names or defaults. The operator itself supplies these: it runs under the recorder, with tensors that have no values. So
its key is that of a captured step, and so are its kind, its operations and its bytes.

A trace does not record texts (`equation`, `approximate`), tensors in lists that may have holes (`indices`), and the
values of numbers that become tensors (`x * 0.5`). A text is taken from the description of the surrounding module, if it
has one of the same name. Otherwise the call runs with the default, if there is one, and the argument is recorded as
`UNKNOWN`, so that no other call has the same key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xsp.errors import first_line
from xsp.graph import keys, work
from xsp.graph.node import Call, Node, NodeKind, Tensor
from xsp.schema import DTYPES, OVERLOAD, SCALARS, STRIDES

UNKNOWN = "not recorded"

TYPES = {
    **{kineto: dtype for dtype, kineto in work.KINETO.items()},
    "long": "int64", "short int": "int16", "signed char": "int8", "char": "int8",
}  # fmt: skip
"""Type names of Kineto and execution traces → type names of torch."""

VOCABULARY = "aten::"
"""Only operators of ATen are rerun: other operators are third-party code, and may be missing."""


@dataclass(frozen=True)
class CallDescription:
    """The description of a call in a span: a value for each argument, in the order of the schema."""

    op: str
    overload: str
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    strides: tuple[Any, ...]
    scalars: tuple[Any, ...]
    texts: tuple[tuple[str, str], ...] = ()
    """Names and texts from the description of the surrounding module."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """For each argument the tensor, or the tuple of the tensors in a list; None if there is none."""
        return tuple(map(_tensors, self.shapes, self.dtypes, self.strides))


def describe(op: str, shapes: Any, attributes: Mapping[str, Any], parameters: Any = None) -> CallDescription | None:
    """Return the description of an operator's call in its span; None if the span has none, or a damaged one.

    Args:
        op: name of the operator.
        shapes: shapes of the inputs, as in the column of the trace.
        attributes: attributes of the span.
        parameters: description of the surrounding module.
    """
    dtypes, overload = attributes.get(DTYPES), attributes.get(OVERLOAD)
    if not isinstance(dtypes, list) or not isinstance(shapes, list) or len(dtypes) != len(shapes):
        return None
    if not isinstance(overload, str):
        return None
    strides, scalars = (attributes.get(name) or [None] * len(dtypes) for name in (STRIDES, SCALARS))
    if not all(isinstance(column, list) and len(column) == len(dtypes) for column in (strides, scalars)):
        return None
    try:
        texts = tuple(_TEXT.findall(parameters)) if isinstance(parameters, str) else ()
        description = CallDescription(
            op, overload, _frozen(shapes), _frozen(dtypes), _frozen(strides), _frozen(scalars), texts
        )
        hash(description)
        return description if all(tensor is None or _is_valid(tensor) for tensor in description.tensors) else None
    except (TypeError, ValueError, RecursionError):
        return None


_TEXT = re.compile(r"(\w+)='([^']*)'")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _tensors(shape: Any, dtype: Any, stride: Any) -> Any:
    if isinstance(dtype, tuple):
        strides = stride if isinstance(stride, tuple) else (None,) * len(dtype)
        return tuple(map(_tensors, shape, dtype, strides))
    if dtype not in TYPES:
        return None
    return Tensor(TYPES[dtype], shape, stride if isinstance(stride, tuple) else None)


def _is_valid(value: Any) -> bool:
    """Return whether a tensor, or each tensor in a list, has valid sizes and strides."""
    if not isinstance(value, Tensor):
        return all(isinstance(tensor, Tensor) and _is_valid(tensor) for tensor in value)
    sizes, strides = value.shape, value.stride
    numbers = (*(sizes or ()), *(strides or ()))
    fits = isinstance(sizes, tuple) and (strides is None or len(strides) == len(sizes))
    return fits and all(type(number) is int and 0 <= number < 1 << 40 for number in numbers)


class Calls:
    """Runs the calls that spans describe, each distinct call once."""

    def __init__(self) -> None:
        self._nodes: dict[CallDescription, Node | None] = {}
        self.reasons: dict[str, str] = {}
        """Operator → why a call of it could not be run; one reason per operator."""

        self.unrecorded: dict[str, str] = {}
        """Operator → an argument of it that the trace does not record."""

    def of(self, description: CallDescription) -> Node | None:
        """Return a node with the call and its effects, as captured; None if the call cannot be run."""
        if description not in self._nodes:
            try:
                self._nodes[description] = self._run(description)
            except Exception as error:  # from the operator, torch, or a wrong description
                self.reasons.setdefault(description.op, first_line(error)[:160])
                self._nodes[description] = None
        return self._nodes[description]

    def _run(self, description: CallDescription) -> Node:
        import torch

        from xsp.graph.recorder import Recorder

        operator = _operator(torch, description)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        replaced: dict[str, Any] = {}
        for index, argument in enumerate(operator._schema.arguments):
            value, recorded_value = _value(torch, description, index, argument)
            if recorded_value is not None:
                replaced[argument.name] = recorded_value
                if recorded_value == UNKNOWN:
                    self.unrecorded[description.op] = argument.name
            if argument.kwarg_only:
                keywords[argument.name] = value
            else:
                positional.append(value)
        recorder = Recorder()
        with torch.inference_mode(), recorder:
            operator(*positional, **keywords)
        (node,) = recorder.finish().nodes
        if not replaced:
            return node
        arguments = tuple((name, replaced.get(name, value)) for name, value in node.call.arguments)
        call = replace(node.call, arguments=arguments)
        return replace(node, call=call, key=keys.key(call))


def is_composite(op: str) -> bool | None:
    """Return whether an operator only calls others, so that the dispatcher does not see it when gradients are recorded.

    None if torch is not installed, or has no such operator.
    """
    try:
        import torch

        namespace, _, name = op.partition("::")
        overloads = getattr(getattr(torch.ops, namespace), name).overloads()
        name = op if "default" in overloads else f"{op}.{overloads[0]}"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
    except (ImportError, RuntimeError, AttributeError):
        return None


def _operator(torch: Any, description: CallDescription) -> Any:
    """Return the overload of an operator.

    Raises:
        ValueError: the operator is not of ATen, or has other arguments in this torch.
    """
    if not description.op.startswith(VOCABULARY):
        raise ValueError("not an operator of ATen")
    packet = getattr(torch.ops.aten, description.op.removeprefix(VOCABULARY))
    operator = getattr(packet, description.overload or "default")
    if len(operator._schema.arguments) < len(description.shapes):
        raise ValueError("its arguments are different in this torch")
    return operator


def _value(torch: Any, description: CallDescription, index: int, argument: Any) -> tuple[Any, Any]:
    """Return the value to pass for an argument, and the value to record in the call if that is different.

    Raises:
        ValueError: the value is not recorded, and cannot be omitted.
    """
    optional = str(argument.real_type).startswith("Optional[")
    kind = str(argument.real_type)[len("Optional[") : -1] if optional else str(argument.real_type)
    tensor = description.tensors[index] if index < len(description.shapes) else None
    if isinstance(tensor, tuple):
        return [_without_values(torch, element) for element in tensor], None
    if tensor is not None:
        if keys.becomes_tensor(description.op, description.overload, argument.name) and (
            tensor.shape == () and tensor.dtype in keys.NUMBERS.values()
        ):
            return {"bool": True, "int64": 1, "float64": 1.0, "complex128": 1j}[tensor.dtype], tensor
        return _without_values(torch, tensor), None
    scalar = description.scalars[index] if index < len(description.scalars) else None
    if scalar is not None:
        return _scalar(torch, scalar, kind), None
    if kind == "Device":
        return torch.device("meta"), None
    if kind == "str":
        if argument.name in dict(description.texts):
            return dict(description.texts)[argument.name], None
        if not (argument.has_default_value() or optional):
            raise ValueError(f"the trace does not have its {argument.name}")
        return (argument.default_value if argument.has_default_value() else None), UNKNOWN
    if optional:
        return None, None
    if argument.has_default_value():
        return argument.default_value, None
    raise ValueError(f"the trace does not have its {argument.name}")


def _without_values(torch: Any, tensor: Tensor) -> Any:
    dtype = getattr(torch, tensor.dtype or "")
    if tensor.stride is None:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device="meta")


def _scalar(torch: Any, value: Any, kind: str) -> Any:
    """Return an argument in torch's form: types, layouts and formats are numbers in a trace."""
    if kind == "ScalarType":
        return getattr(torch, TYPES_BY_NUMBER[value])
    if kind == "Layout":
        if value:
            raise ValueError("a layout that is not strided")
        return torch.strided
    if kind == "MemoryFormat":
        return (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)[value]
    if kind == "Device":
        return torch.device("meta")
    if isinstance(value, tuple):
        return [float(element) if isinstance(element, str) else element for element in value]
    return float(value) if isinstance(value, str) else value


TYPES_BY_NUMBER = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64",
    8: "complex32", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16",
}  # fmt: skip
"""ATen's numbers of types → type names."""


def unnamed_call(description: CallDescription) -> Call:
    """Return the call of an operator that cannot be run: the tensors and numbers of its span, without names."""
    arguments: list[tuple[str, Any]] = []
    for index, (tensor, scalar) in enumerate(zip(description.tensors, description.scalars, strict=True)):
        if tensor is not None or scalar is not None:
            arguments.append((f"input{index}", tensor if tensor is not None else scalar))
    return Call(description.op, tuple(arguments), (), description.overload)


def kind_of(op: str) -> NodeKind:
    """Return the kind of an operator that was not run."""
    if not op.startswith(VOCABULARY):
        return NodeKind.OPAQUE
    return NodeKind.SYNC if op in ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero") else NodeKind.COMPUTE
