"""What a call's tensors look like from outside: shapes, type, bytes. Holds on to no tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

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


class Numbers:
    """Numbers tensors: one that is the same object and was not written to meanwhile has the same number.

    It holds on to no tensor. What is written to a tensor of inference mode is not seen: those count no versions.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._next = itertools.count()

    def of(self, value: Any) -> tuple[int, ...]:
        """Return the number of each tensor in a value; nothing where one is of another class, which may do anything."""
        found = list(_tensors(value, _NESTING))
        if not all(type(tensor) in (Tensor, Parameter) for tensor in found):
            return ()
        try:
            return tuple(map(self._number, found))
        except Exception:  # as in `sketch_of`: inside a transform of functorch, say
            return ()

    def _number(self, tensor: Tensor) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        number = next(self._next)
        self._known[id(tensor)] = (weakref.ref(tensor), version, number)
        return number

    def clear(self) -> None:
        """Forget all, so that numbers of the next step are not taken for these."""
        self._known.clear()


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
