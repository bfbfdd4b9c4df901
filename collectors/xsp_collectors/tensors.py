"""Shapes, types and bytes of the tensors in a call. No reference to a tensor is kept."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

_NESTING = 4
"""Depth to which lists and dictionaries are searched for tensors (a key-value cache is 3 deep)."""


class CallTensors(NamedTuple):
    """The tensor inputs of a call."""

    shapes: str | None
    dtype: str | None
    batch: int | None


NO_INPUTS = CallTensors(None, None, None)


Sketch = list[tuple[torch.Size, torch.dtype]]
"""Shape and element type of each tensor in a call's arguments."""


def sketch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sketch:
    """Return the sketch of a call's arguments for `describe`. Hot: most calls take the first branch."""
    try:
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            shape = args[0].shape
            return [(shape, args[0].dtype)] if not shape or type(shape[0]) is int else []
    except RuntimeError:  # a nested tensor has no shape
        return []
    return sketch_of((args, kwargs))


def sketch_of(value: Any) -> Sketch:
    """Return shape and type of each tensor in a value; an empty list if any shape is missing or cannot be read."""
    try:
        pairs = [(tensor.shape, tensor.dtype) for tensor in _tensors(value, _NESTING)]
        return pairs if all(_has_sizes(shape) for shape, _ in pairs) else []
    except Exception:  # a tensor class of the program, or a nested one, may raise, which must not reach the program
        return []


def _has_sizes(shape: torch.Size) -> bool:
    """Return whether the sizes are numbers; those of ragged tensors are symbols, and `torch.jit.trace` traces them."""
    return all(type(size) is int for size in shape)


class Numbers:
    """Numbers of tensors: the same object has the same number until it is written to.

    No reference to a tensor is kept. Writes to inference-mode tensors are not noticed, because these have no versions.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._next_number = itertools.count()

    def of(self, value: Any) -> tuple[int, ...]:
        """Return the number of each tensor in a value; empty if any is of another class, with unknown behaviour."""
        tensors = list(_tensors(value, _NESTING))
        if not all(type(tensor) in (Tensor, Parameter) for tensor in tensors):
            return ()
        try:
            return tuple(map(self._number, tensors))
        except Exception:  # as in `sketch_of`; for instance inside a functorch transform
            return ()

    def _number(self, tensor: Tensor) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        entry = self._entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor and entry[1] == version:
            return entry[2]
        number = next(self._next_number)
        self._entries[id(tensor)] = (weakref.ref(tensor), version, number)
        return number

    def clear(self) -> None:
        """Forget all tensors, so that those of the next step get new numbers."""
        self._entries.clear()


def are_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all arguments are tensors or None, so that their `Numbers` tell whether two calls are the same."""
    return all(value is None or isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def first_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Return the shape of the first tensor with a dimension in a call's arguments; None if there is none.

    If the first argument is a list of samples, the shape of their padded batch: it says how much there is to compute,
    while the first sample may be of any length. Also None if a shape is missing or cannot be read, as in `sketch_of`.
    """
    try:
        if args and type(args[0]) is Tensor and (shape := args[0].shape):
            return shape if type(shape[0]) is int else None
        if args and isinstance(args[0], (list, tuple)) and (padded := _padded_shape(args[0])) is not None:
            return padded
        sizes = next((tensor.shape for tensor in _tensors((args, kwargs), _NESTING) if tensor.ndim), None)
        return sizes if sizes is not None and _has_sizes(sizes) else None
    except Exception:  # as in `sketch_of`
        return None


LEAST_SAMPLES = 3
"""Least tensors in a list to be samples; a pair may be of other things, such as the nodes on both sides of edges."""


def _padded_shape(samples: Sequence[Any]) -> torch.Size | None:
    """Return the shape of a batch that samples of different lengths would be padded to; None if they are no samples."""
    if len(samples) < LEAST_SAMPLES or not all(isinstance(each, Tensor) for each in samples):
        return None
    shapes = [each.shape for each in samples]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0] or len({shape[0] for shape in shapes}) == 1:
        return None
    return torch.Size((len(shapes), *map(max, zip(*shapes, strict=True)))) if all(map(_has_sizes, shapes)) else None


def describe(tensors: Sketch) -> CallTensors:
    """Return shapes (as JSON), element type and first dimension of a call's tensors.

    The type is that of the first tensor, the batch the first dimension of the first tensor that has one.
    """
    if not tensors:
        return NO_INPUTS
    shapes = [list(shape) for shape, _ in tensors]
    batch = next((shape[0] for shape in shapes if shape), None)
    return CallTensors(str(shapes), str(tensors[0][1]).removeprefix("torch."), batch)


def tensor_bytes(tensors: Sketch) -> int | None:
    """Return the total bytes of the tensors' elements; None without tensors."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in tensors) if tensors else None


def _tensors(value: Any, nesting: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif nesting and isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element, nesting - 1)
    elif nesting and isinstance(value, dict):
        for element in value.values():
            yield from _tensors(element, nesting - 1)
