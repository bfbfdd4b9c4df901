"""Work and traffic of a call: FLOPs and bytes, from shapes.

FLOPs follow the convention of `xsp.cost.flops`: a multiply-add is two operations; matrix products, convolutions and
attention are counted, other operators have none. Formulas for composite operators, which a trace never shows as the
innermost, and for nodes of ONNX are here. A call that may multiply matrices and has no formula is unknown, not 0.

Bytes are compulsory traffic as in `xsp.cost.traffic`: each input is read once, each output is written once, and of a
tensor that is changed at indices only the selected elements count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from xsp.cost import flops as trace_formulas
from xsp.cost import traffic
from xsp.cost.inputs import broadcast
from xsp.graph.node import OBJECT, SIZES, Call, Node, NodeKind, Tensor

LOOK_UPS = frozenset(
    [
        *(f"aten::{name}" for name in "embedding index index_select gather take select_index masked_select".split()),
        *(f"onnx::{name}" for name in ("Gather", "GatherElements", "GatherND", "Slice")),
    ]
)
"""Operators that read as many bytes of their first tensor as they write."""

OVERWRITE = frozenset(f"aten::{name}" for name in traffic.OVERWRITTEN)
"""Operators that write their first tensor without reading it."""

PARTIAL_WRITES = frozenset(f"aten::{name}" for name in traffic.PARTIAL_WRITES)
"""Operators that change only the elements of their first tensor that indices select."""

BAGS = frozenset(f"aten::{name}" for name in "embedding_bag _embedding_bag _embedding_bag_forward_only".split())
"""Operators that read as many rows of their first tensor as their second one has elements, and return sums of them."""

ROUTED = frozenset(["aten::_grouped_mm"])
"""Operators whose second tensor is a stack of matrices, of which only those are read to which rows are routed."""

ON_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
CHANGED_LISTS = frozenset("self params exp_avgs exp_avg_sqs max_exp_avg_sqs momentum_buffer_list state_sums".split())
"""Names of operators on lists, and of those of their lists that they change if they work in place."""

SIZE_QUERIES = frozenset(["onnx::Shape", "onnx::Size"])
"""Operators that do not read the content of their tensor."""

WITH_SUBGRAPHS = frozenset(f"onnx::{name}" for name in ("If", "Loop", "Scan", "SequenceMap"))
"""Operators with inner graphs, whose work and number of runs are unknown."""

KINETO = {
    "bool": "bool", "uint8": "unsigned char", "int8": "signed char", "int16": "short", "int32": "int",
    "int64": "long int", "float16": "c10::Half", "bfloat16": "c10::BFloat16", "float32": "float", "float64": "double",
    "complex64": "c10::complex<float>", "complex128": "c10::complex<double>",
}  # fmt: skip

CONVOLUTIONS = frozenset(f"aten::conv{dimensions}d" for dimensions in (1, 2, 3))

MAY_MULTIPLY = re.compile(rf"{trace_formulas.PRODUCTS}|:(inner|cov|corrcoef|_transformer_encoder_layer_fwd)$")
"""Operators that multiply matrices, also those that a trace never shows as the innermost."""


def bytes_of(node: Node) -> int | None:
    """Return the bytes that a node reads and writes; 0 for a view or an allocation, None if a size is unknown."""
    if not node.computes:
        return 0
    if node.stated_work is not None:
        return node.stated_work[1]
    call = node.call
    if call.op in WITH_SUBGRAPHS or _has_objects(call):
        return None
    if call.op in SIZE_QUERIES:
        return sum(tensor.bytes or 0 for tensor in call.outputs)
    if call.op in PARTIAL_WRITES:
        return _partial_write_bytes(call)
    read_bytes = [tensor.bytes for tensor in call.inputs]
    written_bytes = [tensor.bytes for tensor in call.outputs]
    if call.op in LOOK_UPS and read_bytes and written_bytes:
        read_bytes[0] = written_bytes[0]
    if call.op in OVERWRITE and read_bytes:
        read_bytes[0] = 0
    if None in read_bytes or None in written_bytes:
        return None
    if call.op in BAGS and len(read_bytes) > 1:
        rows, selected_rows = (call.inputs[0].shape or (0,))[0], call.inputs[1].elements or 0
        read_bytes[0] = min(rows, selected_rows) * ((read_bytes[0] or 0) // max(1, rows))
    if call.op in ROUTED and len(read_bytes) > 1:
        read_bytes[1] = _routed(call, read_bytes[1] or 0)
    return sum(filter(None, read_bytes)) + sum(filter(None, written_bytes)) + _changed_in_lists(call)


def _changed_in_lists(call: Call) -> int:
    """Return the bytes that an in-place operator on lists writes: it returns none of the tensors that it changes."""
    if call.outputs or not call.op.endswith("_") or not call.op.startswith(ON_LISTS):
        return 0
    changed = [value for name, value in call.arguments if name in CHANGED_LISTS and isinstance(value, tuple)]
    return sum(tensor.bytes or 0 for value in changed for tensor in value if isinstance(tensor, Tensor))


def _partial_write_bytes(call: Call) -> int | None:
    """Return the bytes moved by a call that changes elements of its first tensor at indices; None if unknown."""
    arguments = [value for _, value in call.arguments]
    try:
        if isinstance(arguments[1], tuple):
            return _index_put_bytes(*arguments[:3], adds=len(arguments) > 3 and arguments[3] is True)
        totals = traffic.traffic(call.op, *_kineto_arguments(call))
    except (LookupError, ValueError, TypeError, AttributeError):
        return None
    return None if totals is None else sum(totals)


def _index_put_bytes(target: Tensor, indices: tuple[Tensor | None, ...], values: Tensor, *, adds: bool) -> int:
    """Return the bytes of `target[indices] = values`, or `+=`; of a mask as many elements count as there are values."""
    used_indices = [index for index in indices if index is not None]
    if any(index.dtype in ("bool", "uint8") for index in used_indices):
        count = prod(_shape(values))
    else:
        index_shape = broadcast(*(_shape(index) for index in used_indices)) if used_indices else []
        other_sizes = [
            size for place, size in enumerate(_shape(target)) if place >= len(indices) or indices[place] is None
        ]
        count = prod(index_shape) * prod(other_sizes)
    index_bytes = [tensor.bytes for tensor in (*used_indices, values)]
    if None in index_bytes:
        raise ValueError("unknown size")
    return sum(filter(None, index_bytes)) + (1 + adds) * count * SIZES[target.dtype or ""]


def _has_objects(call: Call) -> bool:
    """Return whether an argument is an object that holds tensors, or a list of them: packed weights, for example."""
    return any(
        isinstance(element, str) and element.startswith(OBJECT)
        for _, value in call.arguments
        for element in (value if isinstance(value, tuple) else (value,))
    )


def _is_sparse_product(call: Call) -> bool:
    """Return whether a product has a sparse tensor, whose number of elements is not recorded."""
    sparse = any(":" in (tensor.dtype or "") for tensor in call.inputs)
    return sparse and (call.op in COMPOSITE or MAY_MULTIPLY.search(call.op) is not None)


def _routed(call: Call, stack: int) -> int:
    """Return the expected bytes of the matrices to which rows are routed, if each row chooses uniformly."""
    rows, matrices = call.inputs[0].shape, call.inputs[1].shape
    if not rows or not matrices or len(matrices) < 3 or not matrices[0]:
        return stack
    return round(stack * (1 - (1 - 1 / matrices[0]) ** rows[0]))


def flops_of(node: Node) -> int | None:
    """Return the operations of a node; None if unknown."""
    call = node.call
    if not node.computes:
        return 0
    if node.stated_work is not None:
        return node.stated_work[0]
    if _is_sparse_product(call):
        return None
    if call.op.startswith("onnx::") and node.kind is NodeKind.OPAQUE:
        return None
    formula = COMPOSITE.get(call.op) or ONNX.get(call.op)
    if formula is not None:
        try:
            return formula(call)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None
    if call.op.startswith(("onnx::", "ai.onnx.ml::")):
        return None if call.op in UNKNOWN_IN_ONNX else 0
    result = _trace_flops(call)
    if result is None and node.kind is not NodeKind.OPAQUE and not MAY_MULTIPLY.search(call.op):
        return 0
    return result


def _trace_flops(call: Call) -> int | None:
    """Return the operations by the formulas for traces."""
    shapes, dtypes, scalars = _kineto_arguments(call)
    result = call.outputs[0].shape if call.outputs else None
    return trace_formulas.flops(call.op, shapes, scalars, dtypes, result)


def _kineto_arguments(call: Call) -> tuple[list[Any], list[str], list[Any]]:
    """Return shapes, types and options of a call in Kineto's notation, which the formulas for traces read."""
    shapes: list[Any] = []
    scalars: list[Any] = []
    dtypes: list[str] = []
    for _, value in call.arguments:
        tensor = value if isinstance(value, Tensor) else None
        shapes.append([] if tensor is None or tensor.shape is None else list(tensor.shape))
        dtypes.append("" if tensor is None else KINETO.get(tensor.dtype or "", ""))
        scalars.append("" if tensor is not None or value is None else _as_text(value))
    if call.op in CONVOLUTIONS and len(shapes) > 1 and len(shapes[1]) == len(shapes[0]) + 1:  # an image without batch
        shapes[0] = [1, *shapes[0]]
    return shapes, dtypes, scalars


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_as_text(element) for element in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- composite operators ------------------------------------------------------------------------------


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if tensor.shape is None:
        raise ValueError("unknown shape")
    return tensor.shape


def _product(call: Call) -> int:
    """Return the operations of a product: each result is a sum over the last dimension of the left factor."""
    return 2 * prod(_shape(call.outputs[0])) * (_shape(call.inputs[0]) or (1,))[-1]


def _attention(call: Call) -> int:
    """Return the operations of query times key, and weights times value; masks and shared heads do not matter."""
    query, key, value = (_shape(tensor) for tensor in call.inputs[:3])
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(call: Call) -> int:
    """Return the operations of a recurrence: each weight matrix is used once per sample and sequence position."""
    data, weights = call.inputs[0], [_shape(tensor) for tensor in call.inputs[1:]]
    steps = prod(_shape(data)[:-1])
    return 2 * steps * sum(prod(shape) for shape in weights if len(shape) == 2)


def _einsum_flops(equation: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the operations of an einsum: a multiply-add per combination of indices (`...` included) and factor."""
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    if len(operands) != len(shapes) or len(operands) < 2:
        return 0 if len(operands) == 1 else _raise("the number of shapes differs from that of the equation's operands")
    sizes: dict[str, int] = {}
    for part, shape in zip(operands, shapes, strict=True):
        letters = part.replace("...", "")
        hidden_count = len(shape) - len(letters)
        hidden_names = [f"...{place}" for place in range(hidden_count, 0, -1)]
        prefix, dots, suffix = part.partition("...")
        names = [*prefix, *(hidden_names if dots else ()), *suffix]
        for name, length in zip(names, shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), length)
    return 2 * (len(operands) - 1) * prod(sizes.values())


def _raise(reason: str) -> int:
    raise ValueError(reason)


def _einsum(call: Call) -> int:
    equation = dict(call.arguments)["equation"]
    return _einsum_flops(equation, [_shape(tensor) for tensor in call.inputs])


def _bilinear(call: Call) -> int:
    weight = _shape(call.inputs[2])
    rows = prod(_shape(call.inputs[0])[:-1])
    return 2 * rows * (prod(weight) + weight[0] * weight[2])


def _packed_attention(call: Call) -> int:
    """Return the operations of a multi-head attention: its projections, and its two products."""
    batch, length, width = _shape(call.inputs[0])
    key_length = _shape(call.inputs[1])[1]
    return 2 * batch * (length * 2 + key_length * 2) * width * width + 4 * batch * length * key_length * width


def _encoder_layer(call: Call) -> int:
    """Return the operations of a layer of a transformer in one call: four products with weights, and attention."""
    arguments = dict(call.arguments)
    batch, length, width = _shape(arguments["src"])
    names = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    weights = sum(prod(_shape(arguments[name])) for name in names)
    return 2 * batch * length * weights + 4 * batch * length * length * width


Formula = Callable[[Call], int]

COMPOSITE: Mapping[str, Formula] = {
    **dict.fromkeys(("aten::matmul", "aten::linalg_matmul", "aten::inner"), _product),
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::scaled_dot_product_attention": _attention,
    "aten::_scaled_dot_product_attention_math": _attention,
    "aten::_scaled_dot_product_attention_math_for_mps": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::einsum": _einsum,
    "aten::bilinear": _bilinear,
    "aten::_native_multi_head_attention": _packed_attention,
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), lambda call: _sequence(call)),
    **dict.fromkeys(
        ("aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell"),
        lambda call: _cell(call),
    ),
}


def _sequence(call: Call) -> int:
    """Return the operations of a recurrent operator, whose states are between the data and the weights."""
    states = 2 if call.op == "aten::lstm" else 1
    inputs = (call.inputs[0], *call.inputs[1 + states :])
    return _recurrent(Call(call.op, (("", inputs),), call.outputs))


def _cell(call: Call) -> int:
    states = 2 if call.op == "aten::lstm_cell" else 1
    rows = _shape(call.inputs[0])[0]
    weights = [_shape(tensor) for tensor in call.inputs[1 + states :]]
    return 2 * rows * sum(prod(shape) for shape in weights if len(shape) == 2)


# --- nodes of ONNX --------------------------------------------------------------------------------------


def _onnx_convolution(call: Call) -> int:
    weight = _shape(call.inputs[1])
    return 2 * prod(_shape(call.outputs[0])) * prod(weight[1:])


def _onnx_transposed(call: Call) -> int:
    return 2 * prod(_shape(call.inputs[0])) * prod(_shape(call.inputs[1])[1:])


def _onnx_gemm(call: Call) -> int:
    options = dict(call.scalars)
    rows, columns = _shape(call.inputs[0])
    return 2 * prod(_shape(call.outputs[0])) * (rows if options.get("transA") else columns)


def _onnx_einsum(call: Call) -> int:
    return _einsum_flops(str(dict(call.scalars)["equation"]), [_shape(tensor) for tensor in call.inputs])


ONNX: Mapping[str, Formula] = {
    "onnx::Conv": _onnx_convolution,
    "onnx::ConvTranspose": _onnx_transposed,
    "onnx::Gemm": _onnx_gemm,
    "onnx::MatMul": _product,
    "onnx::Einsum": _onnx_einsum,
}

UNKNOWN_IN_ONNX = frozenset(
    [
        *(
            f"onnx::{name}"
            for name in (
                "LSTM GRU RNN Attention MultiHeadAttention MatMulInteger ConvInteger QLinearConv QLinearMatMul "
                "DeformConv DFT STFT Det If Loop Scan"
            ).split()
        ),
        *(f"ai.onnx.ml::{name}" for name in "LinearClassifier LinearRegressor SVMClassifier SVMRegressor".split()),
    ]
)
"""Operators that multiply, or hold graphs that do, and have no formula here."""
