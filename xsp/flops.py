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

from xsp.opinputs import LIMIT, Shape, convolution_output, is_true, per_dimension, shapes_of

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
        found = formula(shapes_of(shapes), scalars)
        return found if type(found) is int and 0 <= found < LIMIT else None
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError):
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


def _attention_by_length(shapes: Sequence[Shape], scalars: Sequence[Any], first: int = 0) -> int:
    """Attention whose inputs are (batch, length, heads, width) each."""
    query, key, value = ((b, h, n, w) for b, n, h, w in shapes[first : first + 3])
    return _attention([query, key, value], scalars)


def _backward(attention: Callable[..., int]) -> Formula:
    """Return five products where attention has two: weights again, and two gradients of each product."""
    return lambda shapes, scalars: 5 * attention(shapes, scalars, first=1) // 2


def _grouped(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """A product for each group: of all the groups' rows, of all their columns, or of a batch."""
    left, right = shapes[:2]
    if len(left) == len(right) == 3:
        return _bmm(shapes, scalars)
    return 2 * prod(left[-2:]) * right[-1]


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """Return the formula for an operator whose options stand at these places."""

    def formula(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
        image, weight = shapes[0], shapes[1]
        if transposed is not None and is_true(scalars[transposed]):
            return _transposed(shapes, scalars)
        out = convolution_output(image, weight, scalars[stride], scalars[padding], scalars[dilation])
        return 2 * image[0] * prod(out) * prod(weight)

    return formula


def _transposed(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Each element of the image goes to all places of the kernel."""
    return 2 * prod(shapes[0]) * prod(shapes[1][1:])


def _of_image(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """The gradient of a convolution's input, from (its size, gradient, weight)."""
    return 2 * prod(shapes[1]) * prod(shapes[2][1:])


def _of_weight(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """The gradient of a convolution's weight, from (its size, gradient, image)."""
    return 2 * prod(shapes[1]) * prod(per_dimension(scalars[0], 4)[1:])


def _undilated(stride: int, padding: int) -> Formula:
    """Return the formula for an operator (input, weight, kernel size, …) that knows no dilation."""
    formula = _convolution(stride, padding, dilation=2)
    return lambda shapes, scalars: formula(shapes, [*scalars[:2], "1", *scalars[3:]])


def _convolution_backward(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Return one forward pass for each gradient that is asked for, of input and of weight."""
    gradient, image, weight = shapes[:3]
    forward = 2 * prod(image if is_true(scalars[7]) else gradient) * prod(weight[1:])
    wanted = json.loads(str(scalars[10]).lower()) if len(scalars) > 10 and scalars[10] else [True, True]
    return forward * sum(bool(each) for each in wanted[:2])


FORMULAS: dict[str, Formula] = {
    "mm": _mm,
    "addmm": lambda shapes, scalars: _mm(shapes, scalars, first=1),
    "_addmm_activation": lambda shapes, scalars: _mm(shapes, scalars, first=1),
    "bmm": _bmm,
    "baddbmm": lambda shapes, scalars: _bmm(shapes, scalars, first=1),
    "_scaled_mm": _mm,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(("linear", "mkldnn_linear", "_mkl_linear", "mkldnn::_linear_pointwise"), _linear),
    "conv1d": _convolution(3, 4, 5),
    "conv2d": _convolution(3, 4, 5),
    "conv3d": _convolution(3, 4, 5),
    "convolution": _convolution(3, 4, 5, transposed=6),
    "_convolution": _convolution(3, 4, 5, transposed=6),
    "mkldnn_convolution": _convolution(4, 3, 5),
    **dict.fromkeys(("miopen_convolution", "miopen_depthwise_convolution"), _convolution(4, 3, 5)),
    "mkldnn::_convolution_pointwise": _convolution(4, 3, 5),
    "cudnn_convolution": _convolution(3, 2, 4),
    **dict.fromkeys(("cudnn_convolution_relu", "cudnn_convolution_add_relu"), _convolution(3, 4, 5)),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d", "slow_conv_dilated2d"), _convolution(4, 5, 6)),
    **dict.fromkeys(("cudnn_convolution_transpose", "miopen_convolution_transpose"), _transposed),
    "thnn_conv2d": _undilated(4, 5),
    "_slow_conv2d_forward": _undilated(4, 5),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("cudnn_convolution_backward_input", "miopen_convolution_backward_input"), _of_image),
    **dict.fromkeys(("cudnn_convolution_backward_weight", "miopen_convolution_backward_weight"), _of_weight),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_cudnn_attention_forward": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _backward(_attention),
    "_scaled_dot_product_flash_attention_backward": _backward(_attention),
    "_scaled_dot_product_efficient_attention_backward": _backward(_attention),
    "_scaled_dot_product_cudnn_attention_backward": _backward(_attention),
    "_flash_attention_forward": _attention_by_length,
    "_efficient_attention_forward": _attention_by_length,
    "_flash_attention_backward": _backward(_attention_by_length),
    "_efficient_attention_backward": _backward(_attention_by_length),
    "flash_attn::_flash_attn_forward": _attention_by_length,
    "flash_attn::_flash_attn_backward": _backward(_attention_by_length),
}
"""Operator → formula over its inputs; only operators that do the work themselves or stand right above it.

Where several nested operators have one, `xsp.correlate` keeps the innermost, so that a sum counts once.
"""
