"""torch.profiler's details of an operator's inputs in a step that describes: overload, types, strides, other arguments.

These are attributes of the span. With the shapes they describe the whole call, except for strings (`equation`,
`rounding_mode`) and the values of tensors, which torch.profiler does not report. Nor does it report outputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xsp.schema import DTYPES, OVERLOAD, SCALARS, STRIDES

MOST_LETTERS = 256
"""Longest text of an argument that is neither a number nor a list of numbers."""

_LIST = "TensorList"


class TensorLists:
    """The types of the tensors in lists. Events do not have them, but their tree does, which is read when needed."""

    def __init__(self, tree: Callable[[], list[Any]]) -> None:
        self._tree = tree
        self._inputs_by_operator: dict[tuple[str, int], list[Any]] | None = None

    def dtypes(self, event: Any, index: int) -> list[str] | None:
        """Return the types of the tensors in the list that is an operator's input `index`; None if they are unknown."""
        if self._inputs_by_operator is None:
            self._inputs_by_operator = dict(_list_inputs(self._tree()))
        inputs = self._inputs_by_operator.get((event.name(), event.start_ns()), [])
        tensors = inputs[index] if index < len(inputs) else None
        if not isinstance(tensors, list):
            return None
        dtypes = [_TYPE_NAMES.get(tensor.dtype, "") if hasattr(tensor, "dtype") else "" for tensor in tensors]
        return dtypes if all(dtypes) else None


def shapes(event: Any) -> list[Any]:
    """Return the shapes of the inputs, including those in lists, which an older torch does not report."""
    structured = getattr(event, "structured_input_shapes", None)
    flat = event.shapes()
    nested = structured() if structured is not None else []
    return list(nested) if len(nested) == len(flat) else list(flat)


def attributes(known_attributes: str | None, event: Any, shapes: list[Any], lists: TensorLists) -> str:
    """Return the attributes of an operator's span as JSON: the known ones, and the details of its inputs."""
    dtypes = [
        (lists.dtypes(event, index) or _LIST) if word == _LIST else word for index, word in enumerate(event.dtypes())
    ]
    overload = getattr(event, "overload_name", None)
    strides = _strides(shapes, getattr(event, "structured_input_strides", list)())
    scalars = [_json_value(argument) for argument in event.concrete_inputs()]
    merged: dict[str, Any] = json.loads(known_attributes) if known_attributes else {}
    if overload is not None:
        merged[OVERLOAD] = overload()
    merged[DTYPES] = dtypes
    if any(stride is not None for stride in strides):
        merged[STRIDES] = strides
    if any(scalar is not None for scalar in scalars):
        merged[SCALARS] = scalars
    return json.dumps(merged, separators=(",", ":"))


def _strides(shapes: list[Any], strides: list[Any]) -> list[Any]:
    """Return strides; None for a contiguous tensor (or a list of them), and for other inputs."""
    if len(strides) != len(shapes):
        return []
    result: list[Any] = []
    for shape, stride in zip(shapes, strides, strict=True):
        if stride and isinstance(stride[0], list):
            nested = _strides(list(shape), list(stride))
            result.append(nested if any(inner is not None for inner in nested) else None)
        else:
            result.append(None if _is_contiguous(shape, stride) else list(stride))
    return result


def _is_contiguous(shape: list[int], stride: list[int]) -> bool:
    """Return whether torch considers a tensor contiguous; a dimension of one element may have any stride."""
    if len(shape) != len(stride) or 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _json_value(value: Any) -> Any:
    """Return an argument in a form that JSON supports; numbers that are not finite become text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_json_value(element) for element in value]
    return str(value)[:MOST_LETTERS]


def _list_inputs(tree: list[Any]) -> Iterator[tuple[tuple[str, int], list[Any]]]:
    """Yield name and start, and the inputs, of operators that take lists."""
    pending = list(tree)
    while pending:
        event = pending.pop()
        pending += event.children
        inputs = getattr(event.extra_fields, "inputs", None)
        if inputs and any(isinstance(argument, list) for argument in inputs):
            yield (event.name, event.start_time_ns), inputs


_TYPE_NAMES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int", torch.int32: "int", torch.int16: "short", torch.int8: "signed char",
    torch.uint8: "unsigned char", torch.bool: "bool", torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}  # fmt: skip
"""Kineto's names of torch's types."""
