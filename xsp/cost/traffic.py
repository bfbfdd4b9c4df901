"""Memory traffic from shapes: one dictionary, one convention; the counterpart of `xsp.cost.flops`.

Convention: **compulsory traffic**. Each input is read once and each output is written once, whatever the caches do
and however often a kernel accesses it; a tensor that an operator changes in place is read and written, and of one that
it changes at indices only the selected elements are. This is a lower bound of the traffic, so the arithmetic intensity
computed from it is an upper bound. Omitted because they are small: the statistics that normalisations and attention
keep for the backward pass, and the indices of pooling windows.

Only operators that move the bytes themselves have a formula; operators that call others to do the work
(`aten::linear`, `aten::contiguous`, `aten::embedding`) have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from xsp.cost.inputs import (
    CONVOLUTIONS,
    INT64_LIMIT,
    NUMBERS,
    SIZES,
    Inputs,
    broadcast,
    convolution_output,
    is_true,
    per_dimension,
    shapes_of,
)


class Traffic(NamedTuple):
    """Bytes that an operator must read and write."""

    read_bytes: int
    write_bytes: int


Formula = Callable[[Inputs], Traffic]


def traffic(
    name: str, shapes: Sequence[Any], dtypes: Sequence[str], scalars: Sequence[Any], result: Any = None
) -> Traffic | None:
    """Return the bytes that an operator must read and write.

    Args:
        name: ATen's name, `aten::addmm`.
        shapes: shapes of its inputs in ATen's order, empty for inputs that are not tensors.
        dtypes: types of its inputs as Kineto writes them: `float`, `c10::BFloat16`, `long int`; `Scalar` or empty
            for inputs that are not tensors.
        scalars: the inputs that are not tensors, at the same positions, as Kineto writes them (`"[1, 1]"`).
        result: shape of the returned tensor, if it is known from other operators (see `xsp.cost.flops.flops`).

    Returns:
        The bytes; None for an operator without a formula, or with other inputs than the formula expects. This includes
        operators on lists of tensors (`aten::cat`, `aten::_foreach_add_`), whose types Kineto does not write.
    """
    short_name = name.removeprefix("aten::")
    formula = FORMULAS.get(short_name)
    if formula is None:
        return None
    inputs = Inputs(shapes_of(shapes), dtypes, scalars)
    estimate = _evaluate(formula, inputs)
    if estimate is None and result is not None and short_name in BY_RESULT:
        estimate = _evaluate(lambda arguments: _write_result(arguments, shapes_of([result])[0]), inputs)
    return estimate


def _evaluate(formula: Formula, inputs: Inputs) -> Traffic | None:
    try:
        result = formula(inputs)
        is_valid = all(type(count) is int and 0 <= count < INT64_LIMIT for count in result) and sum(result) > 0
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError):
        return None
    return result if is_valid else None


# --- formulas -----------------------------------------------------------------------------------------


def _elementwise(arity: int, size: int | None = None) -> Formula:
    """Return the formula of an operator on `arity` tensors, which writes their common shape.

    The result has the widest type of the tensors with dimensions, unless `size` gives the bytes of an element. A tensor
    beyond `arity` is the output argument of the operator.
    """

    def formula(inputs: Inputs) -> Traffic:
        positions = [position for position in range(len(inputs.shapes)) if inputs.has_tensor(position)][:arity]
        shape = broadcast(*(inputs.shapes[position] for position in positions))
        dimensioned = [position for position in positions if inputs.shapes[position]] or positions
        element_bytes = size or max(inputs.element_bytes(position) for position in dimensioned)
        return Traffic(sum(inputs.bytes(position) for position in positions), prod(shape) * element_bytes)

    return formula


def _writes_like(*positions: int) -> Formula:
    """Return the formula of an operator that reads all tensors and writes the bytes of the tensors at `positions`."""
    return lambda inputs: Traffic(inputs.total_bytes(), sum(inputs.bytes(position) for position in positions))


def _reads(*positions: int, writes: Sequence[int]) -> Formula:
    """Return the formula of an operator that reads tensors at `positions` and writes the bytes of those at `writes`."""
    return lambda inputs: Traffic(
        sum(inputs.bytes(position) for position in positions), sum(inputs.bytes(position) for position in writes)
    )


def _dropout(inputs: Inputs) -> Traffic:
    """Write the values, and a mask of one byte per value."""
    return Traffic(inputs.bytes(0), inputs.bytes(0) + prod(inputs.shapes[0]))


def _softmax(inputs: Inputs) -> Traffic:
    """Write single precision if half is to become float."""
    size = SIZES["float"] if is_true(inputs.scalars[2]) else inputs.element_bytes(0)
    return Traffic(inputs.bytes(0), prod(inputs.shapes[0]) * size)


def _reduction(dims: int, size: int | None = None, results: int = 1) -> Formula:
    """Return the formula of a reduction.

    Args:
        dims: position of the input with the dimensions to reduce; without it, all are reduced.
        size: bytes of an element of the result; default: as in the input.
        results: number of results (a maximum is returned with its index).
    """

    def formula(inputs: Inputs) -> Traffic:
        shape = inputs.shapes[0]
        count = 1
        if len(inputs.shapes) > dims + 1:  # else the operator has no dimensions argument
            reduced = _dimensions(inputs, dims, len(shape))
            count = prod(length for index, length in enumerate(shape) if index not in reduced)
        element_bytes = inputs.element_bytes(0) if size is None else size
        return Traffic(inputs.bytes(0), count * (element_bytes + (results - 1) * SIZES["long"]))

    return formula


def _dimensions(inputs: Inputs, position: int, rank: int) -> set[int]:
    """Return the dimensions that an input names; all dimensions if it names none."""
    if inputs.has_tensor(position):
        raise ValueError("another tensor")
    option = inputs.option(position) if inputs.scalars[position] != "" or inputs.dtypes[position] else []
    dimensions = option if isinstance(option, list) else [option]
    return {int(dimension) % rank for dimension in dimensions} if dimensions and rank else set(range(rank))


def _matrix_product(offset: int = 0) -> Formula:
    """Return the formula of a product of the inputs at `offset` and after it; an input before them is added."""

    def formula(inputs: Inputs) -> Traffic:
        left, right = inputs.shapes[offset], inputs.shapes[offset + 1]
        if left[-1] != right[-2]:
            raise ValueError("not the factors of a product")
        return Traffic(inputs.total_bytes(), prod(left[:-1]) * right[-1] * inputs.element_bytes(offset))

    return formula


def _scaled_product(inputs: Inputs) -> Traffic:
    """Write the requested type, which Kineto states by its number."""
    (rows, _), (_, columns) = inputs.shapes[:2]
    requested = [NUMBERS[int(value)] for value in inputs.scalars[6:7] if str(value).isdigit()]
    return Traffic(
        inputs.total_bytes(), rows * columns * (SIZES[requested[0]] if requested else inputs.element_bytes(0))
    )


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Formula:
    """Return the formula of a convolution with its options at these positions."""

    def formula(inputs: Inputs) -> Traffic:
        image, weight = inputs.shapes[:2]
        if transposed is not None and is_true(inputs.scalars[transposed]):
            raise ValueError("the size of a transposed convolution depends on more than is known here")
        output = convolution_output(
            image, weight, *(inputs.scalars[position] for position in (stride, padding, dilation))
        )
        return Traffic(inputs.total_bytes(), image[0] * weight[0] * prod(output) * inputs.element_bytes(0))

    return formula


def _write_result(inputs: Inputs, result: Sequence[int]) -> Traffic:
    """Read all tensors, write a tensor of the shape `result` and of the type of the first tensor."""
    tensors = [position for position in range(len(inputs.shapes)) if inputs.has_tensor(position)]
    return Traffic(inputs.total_bytes(), prod(result) * inputs.element_bytes(tensors[0]))


def _convolution_backward(inputs: Inputs) -> Traffic:
    """Read the gradient and the tensors that each requested gradient needs; write the requested gradients."""
    requested = inputs.option(10) if len(inputs.scalars) > 10 and inputs.scalars[10] else [True, True, False]
    to_image, to_weight = bool(requested[0]), bool(requested[1])
    read_bytes = inputs.bytes(0) + to_image * inputs.bytes(2) + to_weight * inputs.bytes(1)
    return Traffic(read_bytes, to_image * inputs.bytes(1) + to_weight * inputs.bytes(2))


def _attention(inputs: Inputs) -> Traffic:
    """Read query, key and value, write a row per query; the heads may be before or after the lengths in the shapes."""
    query, _, value = inputs.shapes[:3]
    if len(query) != 4 or len(value) != 4:
        raise ValueError("sequences of different lengths in one")
    return Traffic(inputs.total_bytes(), prod(query[:3]) * value[3] * inputs.element_bytes(0))


def _index_select(inputs: Inputs) -> Traffic:
    """Read and write the slices that the indices select along one dimension."""
    shape, axis = inputs.shapes[0], int(inputs.option(1))
    moved_bytes = inputs.bytes(0) // shape[axis] * prod(inputs.shapes[2])
    return Traffic(moved_bytes + inputs.bytes(2), moved_bytes)


def _gather(inputs: Inputs) -> Traffic:
    """Read and write an element for each index."""
    moved_bytes = prod(inputs.shapes[2]) * inputs.element_bytes(0)
    return Traffic(moved_bytes + inputs.bytes(2), moved_bytes)


def _index_add(inputs: Inputs) -> Traffic:
    """Read the source and the indices; read and write the elements that the indices select."""
    moved_bytes = prod(inputs.shapes[3]) * inputs.element_bytes(0)
    return Traffic(inputs.bytes(2) + inputs.bytes(3) + moved_bytes, moved_bytes)


def _scatter(inputs: Inputs) -> Traffic:
    """Read the indices, and a value for each of them or one for all; write the elements that they select."""
    count = prod(inputs.shapes[2])
    values = min(count * inputs.element_bytes(3), inputs.bytes(3)) if inputs.has_tensor(3) else 0
    return Traffic(inputs.bytes(2) + values, count * inputs.element_bytes(0))


def _scatter_add(inputs: Inputs) -> Traffic:
    """As `_scatter`, but the elements are read too."""
    read_bytes, written_bytes = _scatter(inputs)
    return Traffic(read_bytes + written_bytes, written_bytes)


def _index_copy(inputs: Inputs) -> Traffic:
    """Read the source and the indices; write the slices that they select."""
    return Traffic(inputs.bytes(2) + inputs.bytes(3), prod(inputs.shapes[3]) * inputs.element_bytes(0))


def _index_fill(inputs: Inputs) -> Traffic:
    shape, axis = inputs.shapes[0], int(inputs.option(1))
    return Traffic(inputs.bytes(2), inputs.bytes(0) // shape[axis] * prod(inputs.shapes[2]))


def _index_put(inputs: Inputs) -> Traffic:
    """Read the values and write as many elements; if they are added, read these too.

    The indices are not counted: Kineto does not write their types.
    """
    count = prod(inputs.shapes[2])
    if count == 1:
        raise ValueError("one value for a number of elements that only the indices tell")
    moved_bytes, is_added = count * inputs.element_bytes(0), len(inputs.scalars) > 3 and is_true(inputs.scalars[3])
    return Traffic(inputs.bytes(2) + is_added * moved_bytes, moved_bytes)


def _put(inputs: Inputs) -> Traffic:
    """Read a value for each index, and the elements if the values are added to them; write these."""
    moved_bytes = prod(inputs.shapes[1]) * inputs.element_bytes(0)
    is_added = len(inputs.scalars) > 3 and is_true(inputs.scalars[3])
    return Traffic(inputs.bytes(1) + inputs.bytes(2) + is_added * moved_bytes, moved_bytes)


def _embedding_backward(inputs: Inputs) -> Traffic:
    rows = int(inputs.option(2))
    return Traffic(inputs.bytes(0) + inputs.bytes(1), rows * inputs.shapes[0][-1] * inputs.element_bytes(0))


def _pooling(ceil: int, dilation: int | None = None) -> Formula:
    """Return the formula of a pooling, which reads the input and writes one element per window.

    Inputs: image, kernel size, stride, padding, and at these positions the dilation and whether sizes are rounded up.
    """

    def formula(inputs: Inputs) -> Traffic:
        image = inputs.shapes[0]
        kernel = inputs.option(1)
        rank = len(kernel) if isinstance(kernel, list) else 2
        sizes = per_dimension(inputs.scalars[1], rank)
        steps = per_dimension(inputs.scalars[2], rank) if inputs.option(2) else sizes
        pads = per_dimension(inputs.scalars[3], rank)
        dilations = per_dimension(inputs.scalars[dilation], rank) if dilation is not None else [1] * rank
        round_up = len(inputs.scalars) > ceil and is_true(inputs.scalars[ceil])
        counts = [
            _windows(*options, round_up) for options in zip(image[-rank:], sizes, steps, pads, dilations, strict=True)
        ]
        return Traffic(inputs.bytes(0), prod(image[:-rank]) * prod(counts) * inputs.element_bytes(0))

    return formula


def _windows(length: int, size: int, step: int, pad: int, dilation: int, round_up: bool) -> int:
    """Return the number of windows along a dimension; the last one must begin inside the image or its left padding."""
    count = (length + 2 * pad - dilation * (size - 1) - 1 + (step - 1) * round_up) // step + 1
    return count - (round_up and (count - 1) * step >= length + pad)


def _resize(inputs: Inputs) -> Traffic:
    """Read the input, write the requested spatial size."""
    sizes = per_dimension(inputs.scalars[1], 2)
    return Traffic(inputs.bytes(0), prod(inputs.shapes[0][: -len(sizes)]) * prod(sizes) * inputs.element_bytes(0))


def _pairwise_loss(inputs: Inputs) -> Traffic:
    """Read two tensors, write a single number unless the losses are not reduced."""
    is_unreduced = int(inputs.option(2)) == 0
    return Traffic(inputs.total_bytes(), inputs.bytes(0) if is_unreduced else inputs.element_bytes(0))


def _nll_loss(inputs: Inputs) -> Traffic:
    """Read the targets and the likelihood of each one, write a single number."""
    moved_bytes = prod(inputs.shapes[1]) * inputs.element_bytes(0)
    return Traffic(moved_bytes + inputs.bytes(1), inputs.element_bytes(0))


def _sort(inputs: Inputs) -> Traffic:
    return Traffic(inputs.bytes(0), inputs.bytes(0) + prod(inputs.shapes[0]) * SIZES["long"])


# --- tables -------------------------------------------------------------------------------------------

_UNARY = (
    "abs acos asin atan bitwise_not ceil celu clamp clamp_max clamp_min cos cosh cumprod cumsum elu erf exp expm1 flip "
    "floor frac gelu hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logit mish nan_to_num neg "
    "reciprocal relu roll round rsqrt rsub sigmoid sign silu sin sinh softplus sqrt square tan tanh threshold tril "
    "triu trunc"
).split()
_BINARY = (
    "add atan2 bitwise_and bitwise_or bitwise_xor div floor_divide fmod logaddexp masked_fill maximum minimum mul pow "
    "prelu _prelu_kernel remainder sub xlogy"
).split()
_TERNARY = "addcdiv addcmul lerp where".split()
_COMPARISON = "eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne signbit".split()
_BACKWARD = (
    "elu gelu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logit mish native_dropout sigmoid silu softplus "
    "tanh threshold"
).split()
_FILL = "bernoulli_ exponential_ fill_ log_normal_ normal_ random_ uniform_ zero_".split()

OVERWRITTEN = frozenset(["copy_", *_FILL])
"""Operators that write their first tensor without reading it."""

PARTIAL_WRITES: dict[str, Formula] = {
    **dict.fromkeys(("index_put_", "_index_put_impl_"), _index_put),
    **dict.fromkeys(("index_add_", "index_reduce_"), _index_add),
    "index_copy_": _index_copy,
    "index_fill_": _index_fill,
    "put_": _put,
    "scatter_": _scatter,
    **dict.fromkeys(("scatter_add_", "scatter_reduce_"), _scatter_add),
}
"""Operators that change only the elements of their first tensor that indices select, with their formulas."""

_GRADIENTS = [
    f"{library}_convolution_backward_{tensor}"
    for library in ("cudnn", "miopen", "mkldnn")
    for tensor in ("input", "weight", "weights")
]

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_UNARY, _elementwise(1)),
    **dict.fromkeys(_BINARY, _elementwise(2)),
    **dict.fromkeys(_TERNARY, _elementwise(3)),
    **dict.fromkeys(_COMPARISON, _elementwise(2, size=1)),
    **{f"{name}_": _writes_like(0) for name in (*_UNARY, *_BINARY, *_TERNARY, *_COMPARISON)},
    **{f"{name}_backward": _writes_like(0) for name in _BACKWARD},
    **dict.fromkeys(_FILL, _reads(writes=[0])),
    "copy_": _reads(1, writes=[0]),
    "native_dropout": _dropout,
    "_fused_dropout": _dropout,
    # reductions
    **dict.fromkeys(("sum", "nansum", "prod", "amax", "amin", "logsumexp"), _reduction(1)),
    **dict.fromkeys(("mean", "var", "std", "var_mean"), _reduction(1)),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _reduction(2)),
    **dict.fromkeys(("max", "min"), _reduction(1, results=2)),
    **dict.fromkeys(("argmax", "argmin"), _reduction(1, size=8)),
    **dict.fromkeys(("any", "all"), _reduction(1, size=1)),
    "sort": _sort,
    # softmax and losses
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _reads(0, 1, writes=[0])),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "l1_loss"), _pairwise_loss),
    **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward"), _writes_like(1)),
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _reads(0, 2, writes=[1]),
    # normalisation
    **dict.fromkeys(
        ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"), _writes_like(0)
    ),
    **dict.fromkeys(("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_elemt"), _writes_like(0)),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), _writes_like(0)),
    "_batch_norm_with_update": _writes_like(0),
    "native_layer_norm_backward": _writes_like(1, 5, 6),
    "native_group_norm_backward": _writes_like(1, 4, 4),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), _writes_like(1, 2, 2)),
    **dict.fromkeys(("cudnn_batch_norm_backward", "miopen_batch_norm_backward"), _writes_like(0, 2, 2)),
    # matrix products
    **dict.fromkeys(("mm", "bmm"), _matrix_product()),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation"), _matrix_product(offset=1)),
    **dict.fromkeys(
        ("mkldnn_linear", "_mkl_linear", "mkldnn::_linear_pointwise"),
        lambda inputs: Traffic(
            inputs.total_bytes(), prod(inputs.shapes[0][:-1]) * inputs.shapes[1][0] * inputs.element_bytes(0)
        ),
    ),
    "_int_mm": lambda inputs: Traffic(inputs.total_bytes(), inputs.shapes[0][0] * inputs.shapes[1][1] * SIZES["int"]),
    "_scaled_mm": _scaled_product,
    # convolutions
    **{name: _convolution(*positions) for name, positions in CONVOLUTIONS.items()},
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(_GRADIENTS, lambda inputs: _write_result(inputs, inputs.option(0))),
    # attention
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attention),
    **dict.fromkeys(("_scaled_dot_product_flash_attention_for_cpu", "_cudnn_attention_forward"), _attention),
    "_scaled_dot_product_cudnn_attention": _attention,
    **dict.fromkeys(("_flash_attention_backward", "_efficient_attention_backward"), _writes_like(1, 2, 3)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _writes_like(1, 2, 3),
    "_scaled_dot_product_cudnn_attention_backward": _writes_like(1, 2, 3),
    "flash_attn::_flash_attn_forward": _attention,
    # look-ups
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "gather": _gather,
    **PARTIAL_WRITES,
    # pooling and resizing
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _pooling(5, dilation=4)),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _pooling(4)),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d"), _resize),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"), _resize),
    "max_pool2d_with_indices_backward": _reads(0, 7, writes=[1]),
    **dict.fromkeys(("avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), _reads(0, writes=[1])),
}
"""Operator → formula over its inputs."""

BY_RESULT = frozenset(
    ["cudnn_convolution", "miopen_convolution", "miopen_depthwise_convolution", "mkldnn_convolution", *_GRADIENTS]
)
"""Operators for which the shape of the result replaces options that the trace does not contain."""
