"""Inputs of an operator according to a trace: shapes, types and options, as Kineto writes them.

`xsp.cost.flops` and `xsp.cost.traffic` compute from them. A trace may contain anything: invalid shapes become None,
and inputs that do not go together raise ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = Sequence[int]
INT64_LIMIT = 1 << 63
"""Exclusive maximum of the table's integers; no operator reaches it."""

MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in PyTorch; the product of a million sizes would take minutes."""

NO_TENSOR = frozenset(
    ["", "Scalar", "ScalarList", "Int", "Bool", "Double", "Device", "Generator", "String", "GenericList"]
)
"""Kineto's types of inputs that are not tensors."""

SIZES: dict[str, int] = {
    **dict.fromkeys(("bool", "signed char", "unsigned char", "char", "c10::qint8", "c10::quint8"), 1),
    **dict.fromkeys((f"c10::Float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")), 1),
    "c10::Float4_e2m1fn_x2": 1,
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short", "short int", "unsigned short", "short unsigned int"), 2),
    **dict.fromkeys(("float", "int", "unsigned int", "c10::qint32"), 4),
    **dict.fromkeys(("double", "long", "long int", "long long", "__int64", "unsigned long", "long unsigned int"), 8),
    "c10::complex<c10::Half>": 4,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
"""Bytes of an element, by Kineto's names of types."""

PACKED = frozenset(["c10::Float4_e2m1fn_x2"])
"""Types whose elements hold two numbers each."""

NUMBERS = {0: "unsigned char", 1: "signed char", 3: "int", 5: "c10::Half", 6: "float", 7: "double", 15: "c10::BFloat16"}
"""Types by ATen's numbers."""


CONVOLUTIONS = {
    **dict.fromkeys(("mkldnn_convolution", "mkldnn::_convolution_pointwise"), (4, 3, 5)),
    **dict.fromkeys(("miopen_convolution", "miopen_depthwise_convolution"), (4, 3, 5)),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d", "slow_conv_dilated2d"), (4, 5, 6)),
    "cudnn_convolution": (3, 2, 4),
    "cudnn_convolution_relu": (3, 4, 5),
    "cudnn_convolution_add_relu": (5, 6, 7),
}
"""Kernels of convolutions, with the positions of stride, padding and dilation among their inputs."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of an operator, in ATen's order."""

    shapes: Sequence[Any]
    dtypes: Sequence[str]
    scalars: Sequence[Any]

    def bytes(self, position: int) -> int:
        """Return the bytes of the tensor at a position; 0 if there is none."""
        return prod(self.shapes[position]) * self.element_bytes(position) if self.has_tensor(position) else 0

    def has_tensor(self, position: int) -> bool:
        """Return whether there is a tensor at a position."""
        return position < len(self.shapes) and position < len(self.dtypes) and self.dtypes[position] not in NO_TENSOR

    def element_bytes(self, position: int) -> int:
        """Return the bytes of an element of the tensor at a position."""
        return SIZES[self.dtypes[position]]

    def total_bytes(self) -> int:
        """Return the total bytes of all tensors."""
        return sum(self.bytes(position) for position in range(len(self.shapes)))

    def option(self, position: int) -> Any:
        """Return a non-tensor input that is a list or a number.

        Raises:
            ValueError: the trace does not contain it.
        """
        value = self.scalars[position]
        return json.loads(value.lower()) if isinstance(value, str) else value


def shapes_of(shapes: Sequence[Any]) -> list[Any]:
    """Return the shapes, with None for every invalid shape, on which all formulas fail."""
    return [shape if _is_shape(shape) else None for shape in shapes]


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, (list, tuple))
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < INT64_LIMIT for size in shape)
    )


def convolution_output(image: Shape, weight: Shape, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Return the spatial sizes of a convolution's output; the options are in Kineto's form.

    Raises:
        ValueError: the shapes are not those of a batched image and a kernel, or the options are unknown.
    """
    kernel, space = weight[2:], image[2:]
    if len(kernel) != len(space) or not kernel:
        raise ValueError("not a batched image and a kernel")
    if padding == "same":
        return list(space)
    strides, dilations = per_dimension(stride, len(kernel)), per_dimension(dilation, len(kernel))
    pads = per_dimension(0 if padding == "valid" else padding, len(kernel))
    return [
        (size + 2 * pad - dil * (width - 1) - 1) // step + 1
        for size, pad, dil, width, step in zip(space, pads, dilations, kernel, strides, strict=True)
    ]


def broadcast(*shapes: Shape) -> list[int]:
    """Return the shape that results from broadcasting.

    Raises:
        ValueError: the shapes cannot be broadcast.
    """
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*([1] * (rank - len(shape)) + list(shape) for shape in shapes), strict=True):
        distinct = {size for size in sizes if size != 1}
        if len(distinct) > 1:
            raise ValueError("shapes that do not go together")
        result.append(distinct.pop() if distinct else 1)
    return result


def per_dimension(value: Any, dimensions: int) -> list[int]:
    """Return an option of a convolution or a pooling for each dimension; Kineto writes one value for all, or a list.

    Raises:
        ValueError: there are more values than a tensor can have dimensions.
    """
    parsed = json.loads(value) if isinstance(value, str) else value
    values = list(parsed) if isinstance(parsed, (list, tuple)) else [parsed]
    if len(values) > MAX_DIMENSIONS:
        raise ValueError("more values than a tensor has dimensions")
    return [int(number) for number in (values * dimensions if len(values) == 1 else values)]


def is_true(value: Any) -> bool:
    """Return whether an input that Kineto writes as text is true."""
    return str(value).lower() in ("true", "1")
