"""Floating-point operations from shapes: one dictionary, one convention.

Convention: a multiply-add is two operations; matrix products, convolutions and attention are counted,
element-wise work, reductions and normalisation are not (as in fvcore and torch.utils.flop_counter). Dense
work is counted whether or not masks make parts of it superfluous.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

Shape = Sequence[int]
Formula = Callable[[Sequence[Shape], Sequence[Any]], int]


def flops(name: str, shapes: Sequence[Shape], scalars: Sequence[Any]) -> int | None:
    """Return the operations that an operator does.

    Args:
        name: ATen's name, `aten::addmm`.
        shapes: of its inputs in ATen's order, empty where an input is no tensor.
        scalars: the inputs that are no tensors, in the same places, as Kineto writes them (`"[1, 1]"`).

    Returns:
        None for an operator without a formula, or whose inputs are not those that the formula expects.
    """
    formula = FORMULAS.get(name.removeprefix("aten::"))
    if formula is None:
        return None
    try:
        return formula(shapes, scalars)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):
        return None


def _mm(shapes: Sequence[Shape], scalars: Sequence[Any], first: int = 0) -> int:
    (n, k), (_, m) = shapes[first], shapes[first + 1]
    return 2 * n * k * m


def _bmm(shapes: Sequence[Shape], scalars: Sequence[Any], first: int = 0) -> int:
    (b, n, k), (_, _, m) = shapes[first], shapes[first + 1]
    return 2 * b * n * k * m


def _linear(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    return 2 * prod(shapes[0]) * shapes[1][0]


def _attention(shapes: Sequence[Shape], scalars: Sequence[Any], first: int = 0) -> int:
    """Query times key, then weights times value: (batch, heads, length, width) each."""
    query, key, value = shapes[first : first + 3]
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _attention_backward(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Five products where the forward pass has two: weights again, and two gradients of each product."""
    return 5 * _attention(shapes, scalars, first=1) // 2


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """Return the formula for an operator whose options stand at these places."""

    def formula(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
        image, weight = shapes[0], shapes[1]
        kernel, space = weight[2:], image[2:]
        if len(kernel) != len(space) or not kernel:
            raise ValueError("not a batched image and a kernel")
        if transposed is not None and _is_true(scalars[transposed]):
            return 2 * prod(image) * prod(weight[1:])
        strides = _per_dimension(scalars[stride], len(kernel))
        dilations = _per_dimension(scalars[dilation], len(kernel))
        if scalars[padding] == "same":
            out = space
        else:
            pads = _per_dimension(0 if scalars[padding] == "valid" else scalars[padding], len(kernel))
            out = [
                (size + 2 * pad - dil * (width - 1) - 1) // step + 1
                for size, pad, dil, width, step in zip(space, pads, dilations, kernel, strides, strict=True)
            ]
        return 2 * image[0] * prod(out) * prod(weight)

    return formula


def _undilated(stride: int, padding: int) -> Formula:
    """Return the formula for an operator (input, weight, kernel size, …) that knows no dilation."""
    formula = _convolution(stride, padding, dilation=2)
    return lambda shapes, scalars: formula(shapes, [*scalars[:2], "1", *scalars[3:]])


def _convolution_backward(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Return one forward pass for each gradient that is asked for, of input and of weight."""
    gradient, image, weight = shapes[:3]
    forward = 2 * prod(image if _is_true(scalars[7]) else gradient) * prod(weight[1:])
    wanted = json.loads(str(scalars[10]).lower()) if len(scalars) > 10 and scalars[10] else [True, True]
    return forward * sum(bool(each) for each in wanted[:2])


def _per_dimension(value: Any, dimensions: int) -> list[int]:
    read = json.loads(value) if isinstance(value, str) else value
    values = list(read) if isinstance(read, (list, tuple)) else [read]
    return [int(v) for v in (values * dimensions if len(values) == 1 else values)]


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1")


FORMULAS: dict[str, Formula] = {
    "mm": _mm,
    "addmm": lambda shapes, scalars: _mm(shapes, scalars, first=1),
    "_addmm_activation": lambda shapes, scalars: _mm(shapes, scalars, first=1),
    "bmm": _bmm,
    "baddbmm": lambda shapes, scalars: _bmm(shapes, scalars, first=1),
    "linear": _linear,
    "mkldnn_linear": _linear,
    "_mkl_linear": _linear,
    "conv1d": _convolution(3, 4, 5),
    "conv2d": _convolution(3, 4, 5),
    "conv3d": _convolution(3, 4, 5),
    "convolution": _convolution(3, 4, 5, transposed=6),
    "_convolution": _convolution(3, 4, 5, transposed=6),
    "mkldnn_convolution": _convolution(4, 3, 5),
    "cudnn_convolution": _convolution(3, 2, 4),
    "thnn_conv2d": _undilated(4, 5),
    "_slow_conv2d_forward": _undilated(4, 5),
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
}
"""Operator → formula over its inputs; only operators that do the work themselves or stand right above it.

Where several nested operators have one, `xsp.correlate` keeps the innermost, so that a sum counts once.
"""
