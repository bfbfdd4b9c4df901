"""Floating-point operations from shapes: one dictionary, one convention.

Convention: a multiply-add is two operations; matrix products, convolutions and attention are counted,
element-wise work, reductions and normalisation are not (as in fvcore and torch.utils.flop_counter). Dense
work is counted even if masks make parts of it superfluous, except for causal attention: if a call states that it is
causal, only the pairs of query and key count that the mask leaves, about half of them (fvcore and torch's counter count
all). A mask that is a tensor leaves an unknown number of pairs, so all count. Operations on 8-bit and 4-bit numbers
count like those on any other type. A product of complex numbers counts as the four real products that it takes; a
convolution of complex images as three, since PyTorch computes it by three real convolutions. Fourier transforms count
none.
"""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from xsp.cost.inputs import (
    CONVOLUTIONS,
    INT64_LIMIT,
    PACKED,
    Shape,
    broadcast,
    convolution_output,
    is_true,
    per_dimension,
    shapes_of,
)

Formula = Callable[[Sequence[Shape], Sequence[Any]], int]


def flops(
    name: str,
    shapes: Sequence[Shape],
    scalars: Sequence[Any],
    dtypes: Sequence[str] = (),
    result: Shape | None = None,
) -> int | None:
    """Return the number of floating-point operations of an operator.

    Args:
        name: ATen's name, `aten::addmm`.
        shapes: shapes of its inputs in ATen's order, empty for inputs that are not tensors.
        scalars: the inputs that are not tensors, at the same positions, as Kineto writes them (`"[1, 1]"`).
        dtypes: types of its inputs as Kineto writes them, if known; 4-bit types pack two numbers into an element.
        result: shape of the returned tensor, if it is known from other operators; it replaces the options of a
            convolution that the trace does not contain.

    Returns:
        The number; None for an operator without a formula, or with other inputs than the formula expects.
    """
    short_name = _NUMBER_OF_CALL.sub("", name.removeprefix("aten::"))
    formula = FORMULAS.get(short_name)
    if formula is None:
        return None
    inputs = shapes_of(shapes)
    count = _evaluate(formula, inputs, scalars)
    if count is None and result is not None and short_name in BY_RESULT:
        count = _evaluate(lambda *_: BY_RESULT[short_name](inputs, shapes_of([result])[0]), inputs, scalars)
    if count is not None and short_name in _PACKABLE and dtypes and dtypes[0] in PACKED:
        count *= 2
    return None if count is None else count * real_products(name, dtypes)


def real_products(name: str, dtypes: Sequence[str]) -> int:
    """Return the number of real products for each product of an operator on inputs of these types."""
    if not any("complex" in dtype for dtype in dtypes if isinstance(dtype, str)):
        return 1
    return 3 if _COMPLEX_CONVOLUTION.match(name) else 4


_NUMBER_OF_CALL = re.compile(r"(?<=^sage_fwd)_\d+$")
"""Number that Inductor adds to the name of a kernel of the user, by which its profiler calls the operator."""

_COMPLEX_CONVOLUTION = re.compile(r"aten::conv(_transpose)?[123]d$")
"""Operators that call three real convolutions if their image is complex."""


def _evaluate(formula: Formula, shapes: Sequence[Shape], scalars: Sequence[Any]) -> int | None:
    try:
        count = formula(shapes, scalars)
        return count if type(count) is int and 0 <= count < INT64_LIMIT // 2 else None
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError):
        return None


def _mm(shapes: Sequence[Shape], scalars: Sequence[Any], offset: int = 0) -> int:
    (n, k), (_, m) = shapes[offset], shapes[offset + 1]
    return 2 * n * k * m


def _bmm(shapes: Sequence[Shape], scalars: Sequence[Any], offset: int = 0) -> int:
    (b, n, k), (_, _, m) = shapes[offset], shapes[offset + 1]
    return 2 * b * n * k * m


def _mv(shapes: Sequence[Shape], scalars: Sequence[Any], offset: int = 0) -> int:
    (n, k), (_,) = shapes[offset], shapes[offset + 1]
    return 2 * n * k


def _by_rows(shapes: Sequence[Shape], scalars: Sequence[Any], offset: int = 0) -> int:
    """Count a product with a row-major weight, (columns of the result, k), of one or many experts."""
    left, right = shapes[offset], shapes[offset + 1]
    return 2 * prod(left) * right[-2]


def _experts(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a mixture of experts, from (tokens, input weights, output weights, weight of each chosen expert).

    Tokens are (tokens, width), weights (experts, columns, width) and (experts, width, hidden); with a gate the first
    weight has 2 * hidden columns. Packed weights have fewer elements than the width of the tokens requires.
    """
    (tokens, width), (experts, columns, packed_width), (output_experts, output_width, hidden) = shapes[:3]
    (rows, experts_per_token) = shapes[3]
    if experts != output_experts or rows != tokens or output_width != width or not packed_width or width % packed_width:
        raise ValueError("not the weights of a mixture of experts")
    hidden *= width // packed_width
    if columns not in (hidden, 2 * hidden):
        raise ValueError("the weights do not follow one another")
    return 2 * tokens * experts_per_token * width * (columns + hidden)


def _linear(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a product with a weight (outputs, inputs), or (inputs) for a single output."""
    *outputs, _ = shapes[1]
    return 2 * prod(shapes[0]) * prod(outputs)


class Causal(enum.Enum):
    """Which pairs a causal mask leaves where there are more keys than queries, or fewer."""

    FROM_START = "the first query sees the first key"
    FROM_END = "the last query sees the last key"


def pairs(queries: int, keys: int, causal: Causal | None = None) -> int:
    """Return the pairs of a query and a key that a causal mask leaves; all of them without one."""
    if causal is None:
        return queries * keys
    if causal is Causal.FROM_START:
        seen = min(queries, keys)
        return seen * (seen + 1) // 2 + (queries - seen) * keys
    least = max(0, keys - queries)  # keys that even the first query that sees any sees besides its own
    rows = min(queries, keys)
    return rows * least + rows * (rows + 1) // 2


def _attention(
    causal: int, offset: int = 0, by_length: bool = False, mask: Causal = Causal.FROM_START
) -> Callable[[Sequence[Shape], Sequence[Any]], int]:
    """Return the formula of query times key, then weights times value.

    Args:
        causal: position of the input that states whether attention is causal: a truth value, or xFormers' type of mask
            (0 none, 1 from the first query on, 2 from the last query back).
        offset: position of the query, which key and value follow.
        by_length: whether they are (batch, length, heads, width) instead of (batch, heads, length, width).
        mask: which pairs a truth value leaves.
    """

    def formula(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
        query, key, value = shapes[offset : offset + 3]
        if not len(query) == len(key) == len(value) == 4:
            raise ValueError("not batches of heads")
        if by_length:
            query, key, value = ((b, h, n, w) for b, n, h, w in (query, key, value))
        stated = str(scalars[causal]).lower() if causal < len(scalars) else ""
        masks = {"true": mask, "1": mask, "2": Causal.FROM_END}
        return attention(query, key, value, masks.get(stated))

    return formula


def attention(query: Shape, key: Shape, value: Shape, causal: Causal | None = None) -> int:
    """Return the operations of query times key, and of weights times value, with any number of batch dimensions.

    Batch dimensions of length 1 are broadcast. The heads of keys and values may be shared by several heads of the
    query. With a causal mask only the pairs count that it leaves.
    """

    def batch(*shapes: Shape) -> int:
        rank = max(map(len, shapes))
        padded = [[1] * (rank - len(shape)) + list(shape[:-2]) for shape in shapes]
        return prod(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))

    scores = pairs(query[-2], key[-2], causal)
    return 2 * scores * (batch(query, key) * query[-1] + batch(query, key, value) * value[-1])


def _sage_attention(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count attention on 8-bit numbers; the next inputs, of three dimensions, have a scale for each head and block.

    The scales tell whether heads come before lengths. Whether the mask is causal is part of the kernel, not an input.
    """
    query, key, value = shapes[:3]
    scales = [shape for shape in shapes[3:] if len(shape) == 3]
    batch, heads = scales[0][:2]
    if query[:2] == [batch, heads] and key[0] == value[0] == batch:
        return attention(query, key, value)
    if query[0] == batch and query[2] == heads:
        query, key, value = ((b, h, n, w) for b, n, h, w in (query, key, value))
        return attention(query, key, value)
    raise ValueError("scales that are not those of the query")


def _attention_backward(causal: int, by_length: bool = False, mask: Causal = Causal.FROM_START) -> Formula:
    """Return the formula of the backward pass, five products for two: the weights, and two gradients per product.

    Arguments as for `_attention`; the gradient of the result is the first input.
    """
    forward = _attention(causal, 1, by_length, mask)
    return lambda shapes, scalars: 5 * forward(shapes, scalars) // 2


def _grouped(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a product per group; the groups divide the rows, the columns, or are a batch."""
    left, right = shapes[:2]
    if len(left) == len(right) == 3:
        return _bmm(shapes, scalars)
    return 2 * prod(left[-2:]) * right[-1]


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """Return the formula of a convolution with its options at these positions."""

    def formula(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
        image, weight = shapes[0], shapes[1]
        if transposed is not None and is_true(scalars[transposed]):
            return _transposed(shapes, scalars)
        out = convolution_output(image, weight, scalars[stride], scalars[padding], scalars[dilation])
        return 2 * image[0] * prod(out) * prod(weight)

    return formula


def _transposed(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a transposed convolution: each element of the image is multiplied by the whole kernel."""
    return 2 * prod(shapes[0]) * prod(shapes[1][1:])


def _image_gradient(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count the gradient of a convolution's input, from (its size, gradient, weight)."""
    return 2 * prod(shapes[1]) * prod(shapes[2][1:])


def _weight_gradient(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count the gradient of a convolution's weight, from (its size, gradient, image)."""
    return 2 * prod(shapes[1]) * prod(per_dimension(scalars[0], 4)[1:])


def _undilated(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a convolution of (input, weight, kernel size, bias, stride, padding), which has no dilation option."""
    return _convolution(stride=4, padding=5, dilation=2)(shapes, [*scalars[:2], "1", *scalars[3:]])


def _transposed_weight_gradient(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count the gradient of a transposed convolution's weight, from (its size, gradient, image)."""
    return 2 * prod(shapes[2]) * prod(per_dimension(scalars[0], 4)[1:])


def _requested_gradients(image: int, gradient: int, mask: int, transposed: bool = False) -> Formula:
    """Return the formula of a convolution's backward pass with image and gradient at these positions, weight at 2.

    The cost is one forward pass for each requested gradient, of input and of weight.
    """

    def formula(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
        requested = json.loads(str(scalars[mask]).lower())
        if not isinstance(requested, list) or len(requested) < 2:
            raise ValueError("not the gradients that are asked for")
        product = 2 * prod(shapes[image if transposed else gradient]) * prod(shapes[2][1:])
        return product * sum(bool(flag) for flag in requested[:2])

    return formula


def _convolution_backward(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count one forward pass for each requested gradient, of input and of weight."""
    gradient, image, weight = shapes[:3]
    forward = 2 * prod(image if is_true(scalars[7]) else gradient) * prod(weight[1:])
    requested = json.loads(str(scalars[10]).lower()) if len(scalars) > 10 and scalars[10] else [True, True]
    return forward * sum(bool(flag) for flag in requested[:2])


def _time_convolution(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a convolution of (time, batch, channels) with a kernel (width, channels, filters), padding at 3."""
    (time, batch, _), (width, *_) = shapes[:2]
    return 2 * (time + 2 * int(scalars[3]) - width + 1) * batch * prod(shapes[1])


def _deformable_convolution(shapes: Sequence[Shape], scalars: Sequence[Any], offset: int = 0) -> int:
    """Count a deformable convolution of (image, weight, offsets), whose offsets have the size of the result."""
    image, weight, offsets = shapes[offset : offset + 3]
    return 2 * image[0] * prod(offsets[2:]) * prod(weight)


def _recurrent_layer(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count a recurrent layer of (sequence, weights of the input, weights of the state)."""
    return 2 * prod(shapes[0][:-1]) * (prod(shapes[1]) + prod(shapes[2]))


def _euclidean(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count distances of rows, by a product of the rows with two more columns: their squares, and ones."""
    left, right = shapes[:2]
    return 2 * prod(broadcast(left[:-2], right[:-2])) * left[-2] * right[-2] * (left[-1] + 2)


def _distances(shapes: Sequence[Shape], scalars: Sequence[Any]) -> int:
    """Count distances of rows, which PyTorch computes by a product if they are Euclidean and there are many rows."""
    left, right = shapes[:2]
    exponent = float(scalars[2]) if len(scalars) > 2 and scalars[2] != "" else 2.0
    mode = int(scalars[3]) if len(scalars) > 3 and scalars[3] not in ("", None) else 0
    is_product = exponent == 2 and (mode == 1 or (mode == 0 and max(left[-2], right[-2]) > 25))
    return _euclidean(shapes, scalars) if is_product else 0


def _from_second(formula: Callable[..., int]) -> Formula:
    """Return a formula for operators that add to their first input: those of the product begin at the second."""
    return lambda shapes, scalars: formula(shapes, scalars, offset=1)


def _library_names(names: str, *libraries: str) -> list[str]:
    """Return each name with each of the libraries as a prefix."""
    return [f"{library}_{name}" for name in names.split() for library in libraries]


NOWHERE = sys.maxsize
"""Position of an option that is not at the same position in all versions of an operator."""

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _mm),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation"), _from_second(_mm)),
    "bmm": _bmm,
    **dict.fromkeys(("baddbmm", "baddbmm_", "addbmm", "addbmm_"), _from_second(_bmm)),
    "mv": _mv,
    **dict.fromkeys(("addmv", "addmv_"), _from_second(_mv)),
    **dict.fromkeys(("dot", "vdot"), lambda shapes, scalars: 2 * prod(shapes[0])),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    # 8-bit and 4-bit weights: (columns, k); 4-bit weights are packed in tiles of eight columns
    "_weight_int8pack_mm": _by_rows,
    "_weight_int4pack_mm": lambda shapes, scalars: 2 * prod(shapes[0]) * shapes[1][0] * 8,
    "_weight_int4pack_mm_for_cpu": lambda shapes, scalars: 2 * prod(shapes[0]) * shapes[1][0],
    # FBGEMM's products of 8-bit floats: (rows, k) and (columns, k), the latter per expert in grouped products
    **dict.fromkeys(
        (
            *(f"fbgemm::f8f8bf16{kind}" for kind in ("", "_rowwise", "_tensorwise", "_blockwise", "_cublas")),
            *(f"fbgemm::f8f8bf16_rowwise{kind}" for kind in ("_batched", "_grouped_stacked")),
            *("fbgemm::bf16bf16bf16_grouped_stacked", "fbgemm::i8i8bf16", "fbgemm::f8i4bf16_rowwise"),
        ),
        _by_rows,
    ),
    # vLLM: the result is the first argument
    **dict.fromkeys(("_C::cutlass_scaled_mm", "_C::cutlass_scaled_mm_azp"), _from_second(_mm)),
    "_C::cutlass_scaled_fp4_mm": lambda shapes, scalars: 2 * _by_rows(shapes, scalars, offset=1),
    # mixtures of experts of vLLM, SGLang and AITER
    **dict.fromkeys(
        (
            *(f"{library}::{kind}_fused_experts" for library in ("vllm", "sglang") for kind in ("inplace", "outplace")),
            *("vllm::rocm_aiter_fused_moe", "aiter::fused_moe_", "aiter::fused_moe"),
        ),
        _experts,
    ),
    **dict.fromkeys(("linear", "mkldnn_linear", "_mkl_linear", "mkldnn::_linear_pointwise"), _linear),
    "conv1d": _convolution(3, 4, 5),
    "conv2d": _convolution(3, 4, 5),
    "conv3d": _convolution(3, 4, 5),
    "convolution": _convolution(3, 4, 5, transposed=6),
    "_convolution": _convolution(3, 4, 5, transposed=6),
    **{name: _convolution(*positions) for name, positions in CONVOLUTIONS.items()},
    **dict.fromkeys(("thnn_conv_depthwise2d_forward", "slow_conv_dilated3d"), _convolution(4, 5, 6)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed),
    **dict.fromkeys(
        (*_library_names("convolution_transpose", "cudnn", "miopen"), "slow_conv_transpose2d"), _transposed
    ),
    **dict.fromkeys(("thnn_conv2d", "thnn_conv2d_forward", "_slow_conv2d_forward"), _undilated),
    "slow_conv3d_forward": _undilated,
    "conv_tbc": _time_convolution,
    "conv_tbc_backward": lambda shapes, scalars: 2 * 2 * prod(shapes[0]) * prod(shapes[2][:2]),
    "torchvision::deform_conv2d": _deformable_convolution,
    "torchvision::_deform_conv2d_backward": lambda shapes, scalars: 2 * _deformable_convolution(shapes, scalars, 1),
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": lambda shapes, scalars: 2 * _recurrent_layer(shapes, scalars),
    **dict.fromkeys(("cdist", "_cdist_forward"), _distances),
    "_euclidean_dist": _euclidean,
    # backward: a single operator since 2021, before that one for each library
    "convolution_backward": _convolution_backward,
    "cudnn_convolution_backward": _requested_gradients(0, 1, mask=10),
    **dict.fromkeys(
        _library_names("convolution_backward depthwise_convolution_backward", "miopen"),
        _requested_gradients(0, 1, mask=9),
    ),
    "mkldnn_convolution_backward": _requested_gradients(0, 1, mask=7),
    "thnn_conv2d_backward": _requested_gradients(1, 0, mask=8),
    "_slow_conv2d_backward": _requested_gradients(1, 0, mask=6),
    **dict.fromkeys(
        ("thnn_conv_depthwise2d_backward", "_conv_depthwise2d_backward"), _requested_gradients(1, 0, mask=7)
    ),
    **dict.fromkeys(
        ("slow_conv_dilated2d_backward", "slow_conv_dilated3d_backward"), _requested_gradients(1, 0, mask=7)
    ),
    "cudnn_convolution_transpose_backward": _requested_gradients(0, 1, mask=11, transposed=True),
    "miopen_convolution_transpose_backward": _requested_gradients(0, 1, mask=10, transposed=True),
    **dict.fromkeys(_library_names("convolution_backward_input", "cudnn", "miopen", "mkldnn"), _image_gradient),
    **dict.fromkeys(_library_names("convolution_backward_weight", "cudnn", "miopen"), _weight_gradient),
    "mkldnn_convolution_backward_weights": _weight_gradient,
    "miopen_depthwise_convolution_backward_input": _image_gradient,
    "miopen_depthwise_convolution_backward_weight": _weight_gradient,
    **dict.fromkeys(_library_names("convolution_transpose_backward_input", "cudnn", "miopen"), _convolution(3, 2, 4)),
    **dict.fromkeys(
        _library_names("convolution_transpose_backward_weight", "cudnn", "miopen"), _transposed_weight_gradient
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(4),
    "_scaled_dot_product_flash_attention": _attention(4),
    "_scaled_dot_product_efficient_attention": _attention(6),
    "_scaled_dot_product_cudnn_attention": _attention(6),
    "_cudnn_attention_forward": _attention(10),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(7),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
    "_flash_attention_forward": _attention(8, by_length=True, mask=Causal.FROM_END),
    "_efficient_attention_forward": _attention(9, by_length=True),
    "_flash_attention_backward": _attention_backward(11, by_length=True, mask=Causal.FROM_END),
    "_efficient_attention_backward": _attention_backward(14, by_length=True),
    "flash_attn::_flash_attn_forward": _attention(5, by_length=True, mask=Causal.FROM_END),
    "flash_attn::_flash_attn_backward": _attention_backward(11, by_length=True, mask=Causal.FROM_END),
    # AITER: the query first, or the result before it; the gradient of the result before it in the backward pass
    **dict.fromkeys(("aiter::mha_fwd", "aiter::fmha_v3_fwd"), _attention(5, by_length=True, mask=Causal.FROM_END)),
    "aiter::wrapper_fmha_v3_fwd": _attention(6, 1, by_length=True, mask=Causal.FROM_END),
    **dict.fromkeys(
        ("aiter::mha_bwd", "aiter::fmha_v3_bwd"), _attention_backward(8, by_length=True, mask=Causal.FROM_END)
    ),
    "aiter::wrapper_fmha_v3_bwd": _attention_backward(9, by_length=True, mask=Causal.FROM_END),
    "sage_fwd": _sage_attention,
    # versions of these have their options at other positions: all pairs count
    **dict.fromkeys(("flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"), _attention(NOWHERE, by_length=True)),
    **dict.fromkeys(
        ("flash_attn_3::bwd", "flash_attn_3::_flash_attn_backward"), _attention_backward(NOWHERE, by_length=True)
    ),
}
"""Operator → formula over its inputs; only operators that do the work themselves or call such an operator directly.

If several nested operators have a count, `xsp.correlate` keeps the innermost, so that sums count the work once.
"""


_PACKABLE = frozenset(["_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"])
"""Operators that accept packed types; they sum over the last dimension of their first input."""


def _by_result_shape(shapes: Sequence[Shape], result: Shape) -> int:
    """Count a convolution from the shape of its result, without its options."""
    image, weight = shapes[:2]
    if len(result) != len(image) or result[0] != image[0] or result[1] != weight[0] or image[1] % weight[1]:
        raise ValueError("not the result of this convolution")
    return 2 * prod(result) * prod(weight[1:])


BY_RESULT: dict[str, Callable[[Sequence[Shape], Shape], int]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "thnn_conv2d"), _by_result_shape),
    **dict.fromkeys(
        (*_library_names("convolution", "cudnn", "miopen", "mkldnn"), "_slow_conv2d_forward"), _by_result_shape
    ),
    **dict.fromkeys(
        (*_library_names("convolution_backward_weight", "cudnn", "miopen"), "mkldnn_convolution_backward_weights"),
        lambda shapes, result: 2 * prod(shapes[1]) * prod(result[1:]),
    ),
}
"""Operator → formula over its inputs and the shape of its result, for traces without options."""

PRODUCTS = (
    r"mm([^a-z]|$)|conv|attention|[_:]linear(_|$)|:_?(bi|tri)linear$|matmul|gemm|dot|[_:](add)?mv_?$|einsum|lstm|gru|"
    r"rnn|cdist|[_:](moe|experts?)(_|$)|[_:](multi_head|cholesky|lu|qr|geqrf|ormqr|svd|eigh?|inverse|inv|solve|"
    r"triangular|lstsq|matrix|det|slogdet|pinv|householder)(_|$)"
)
"""RE2 pattern of ATen's operators that may multiply matrices. All other ATen operators do none of the operations that
the convention counts: their number is known to be 0."""
