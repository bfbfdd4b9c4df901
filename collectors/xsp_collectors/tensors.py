"""What a call's tensors look like from outside: shapes, type, bytes. Holds on to no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NESTING = 4
"""How deep tensors are looked for in lists and dictionaries (a cache of keys and values is 3 deep)."""


class Inputs(NamedTuple):
    """The tensor inputs of a call."""

    shapes: str | None
    dtype: str | None
    batch: int | None


NO_INPUTS = Inputs(None, None, None)


Sketch = list[tuple[torch.Size, torch.dtype]]
"""Shape and element type of each tensor among a call's arguments."""


def sketch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sketch:
    """Return what `describe` needs of a call's arguments; hot, so most calls take the first way."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return [(args[0].shape, args[0].dtype)]
    return sketch_of((args, kwargs))


def sketch_of(value: Any) -> Sketch:
    """Return shape and type of each tensor in a value; of a subclass that does not tell them, nothing."""
    try:
        return [(tensor.shape, tensor.dtype) for tensor in _tensors(value, _NESTING)]
    except Exception:  # the class of a tensor is the program's own: what it raises here is not to reach the program
        return []


def first_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Return the shape of the first tensor that has a dimension among a call's arguments; None if there is none."""
    if args and type(args[0]) is Tensor and args[0].ndim:
        return args[0].shape
    return next((tensor.shape for tensor in _tensors((args, kwargs), _NESTING) if tensor.ndim), None)


def describe(tensors: Sketch) -> Inputs:
    """Return shapes (as JSON), element type and first dimension of a call's tensors.

    The type is that of the first tensor, the batch the first dimension of the first tensor that has one.
    """
    if not tensors:
        return NO_INPUTS
    shapes = [list(shape) for shape, _ in tensors]
    batch = next((shape[0] for shape in shapes if shape), None)
    return Inputs(str(shapes), str(tensors[0][1]).removeprefix("torch."), batch)


def tensor_bytes(tensors: Sketch) -> int | None:
    """Return the bytes of all elements of some tensors; None if there is none."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in tensors) if tensors else None


def _tensors(value: Any, nesting: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif nesting and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, nesting - 1)
    elif nesting and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, nesting - 1)
