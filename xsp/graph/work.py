"""Work and traffic of a call: FLOPs and bytes, from shapes.

FLOPs follow the convention of `xsp.cost.flops`: a multiply-add is two operations; matrix products, convolutions and
attention are counted, other operators have none. Formulas for composite operators, which a trace never shows as the
innermost, and for nodes of ONNX are here; a composite operator counts what the operators count that it calls. A call
that may multiply matrices and has no formula is unknown, not 0: sums have the number of such calls beside the known
part (`Total`).

Bytes are compulsory traffic as in `xsp.cost.traffic`: each input is read once, each output is written once, and of a
tensor that is changed at indices only the selected elements count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from xsp.cost import contraction, traffic
from xsp.cost import flops as trace_formulas
from xsp.cost.inputs import broadcast
from xsp.graph.node import OBJECT, SIZES, Call, Node, NodeKind, Tensor

LOOK_UPS = frozenset(
    [
        *(f"aten::{name}" for name in "embedding index index_select gather take select_index masked_select".split()),
        *(f"onnx::{name}" for name in ("Gather", "GatherElements", "GatherND", "Slice")),
    ]
)
"""Operators that read as many bytes of their first tensor as they write."""

OVERWRITE = frozenset(
    f"aten::{name}" for name in (*traffic.OVERWRITTEN, "geometric_", "cauchy_", "_foreach_zero_", "_foreach_copy_")
)
"""Operators that write their first tensor without reading it."""

PARTIAL_WRITES = frozenset(f"aten::{name}" for name in traffic.PARTIAL_WRITES)
"""Operators that change only the elements of their first tensor that indices select."""

KEEPS_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        "index_put_ _index_put_impl_ index_copy_ index_fill_ put_ scatter_ masked_fill_ masked_scatter_ fill_diagonal_"
    ).split()
)
"""Operators that write elements of their first tensor without reading it, and leave the others as they are."""

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
    "complex32": "c10::complex<c10::Half>", "complex64": "c10::complex<float>", "complex128": "c10::complex<double>",
}  # fmt: skip

CONVOLUTIONS = frozenset(f"aten::conv{dimensions}d" for dimensions in (1, 2, 3))

MAY_MULTIPLY = re.compile(rf"{trace_formulas.PRODUCTS}|:(inner|cov|corrcoef|_transformer_encoder_layer_fwd)$")
"""Operators that multiply matrices, also those that a trace never shows as the innermost."""

WITHOUT_PRODUCTS = re.compile(
    r"pack|_plan_cache|flatten_weight|_reorder_|::_?convert_|::lu_unpack$|::slice_inverse$|::matrix_H$|"
    r"::_cdist_backward$|::_thnn_\w*_cell|::_compute_linear_combination$|"
    r"^torchvision::(nms|qnms|_?(ps_)?q?roi_(align|pool)\w*|box_iou_rotated)$"
)
"""Operators without products whose names are like those of products, or that are not ATen's: gates of recurrent cells
after their products, conversions of weights, regions of images."""


class Write(NamedTuple):
    """How an operator changes the tensors that it writes."""

    reads: bool
    """Whether it reads their content."""

    replaces: bool
    """Whether it writes all of their elements."""


def write_of(op: str, overload: str, arguments: Mapping[str, Any]) -> Write:
    """Return how an operator changes the tensors that it writes."""
    if op in OVERWRITE or "out" in overload.split("_"):
        return Write(reads=False, replaces=True)
    if op in KEEPS_ELEMENTS and not arguments.get("accumulate") and arguments.get("reduce") is None:
        return Write(reads=False, replaces=False)
    return Write(reads=True, replaces=True)


class Total(NamedTuple):
    """A sum over calls, with the number of calls whose figure is unknown."""

    known: int | None
    """Sum of the known figures; None if there are figures, and none of them is known."""

    unknown: int
    """Number of calls whose figure is not in the sum."""


def total(figures: Iterable[int | None]) -> Total:
    """Return the sum of the known figures, and the number of the others."""
    given = list(figures)
    unknown = sum(figure is None for figure in given)
    return Total(None if unknown and unknown == len(given) else sum(filter(None, given)), unknown)


def bytes_of(node: Node) -> int | None:
    """Return the bytes that a node reads and writes; 0 for a view or an allocation, None if a size is unknown."""
    if not node.computes:
        return 0
    if node.stated_work is not None:
        return node.stated_work[1]
    call = node.call
    held = _tensors_in_objects(call)
    if call.op in WITH_SUBGRAPHS or held is None:
        return None
    if call.op in SIZE_QUERIES:
        return sum(tensor.bytes or 0 for tensor in call.outputs)
    if call.op in PARTIAL_WRITES:
        return _partial_write_bytes(call)
    read_bytes = [tensor.bytes for tensor in (*call.inputs, *held)]
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


def _tensors_in_objects(call: Call) -> list[Tensor] | None:
    """Return the tensors that the objects among the arguments hold, such as packed weights; None if one tells none."""
    tensors: list[Tensor] = []
    for description in _objects(call):
        found = [
            Tensor(dtype, tuple(map(int, sizes.split("x"))) if sizes != "number" else ())
            for dtype, sizes in re.findall(r"([a-z]+\w*) (number|\d+(?:x\d+)*)(?=,|$)", description)
        ]
        if not found:
            return None
        tensors += found
    return tensors


def _objects(call: Call) -> Iterator[str]:
    for _, value in call.arguments:
        for element in value if isinstance(value, tuple) else (value,):
            if isinstance(element, str) and element.startswith(OBJECT):
                yield element


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
    # whether a product has a sparse tensor, whose number of elements is not recorded
    sparse = any(":" in (tensor.dtype or "") for tensor in call.inputs)
    if sparse and (call.op in COMPOSITE or MAY_MULTIPLY.search(call.op) is not None):
        return None
    if call.op.startswith("onnx::") and node.kind is NodeKind.OPAQUE:
        return None
    formula = COMPOSITE.get(call.op) or ONNX.get(call.op) or (_quantised if _QUANTISED.match(call.op) else None)
    if formula is not None:
        try:
            dtypes = [KINETO.get(tensor.dtype or "", "") for tensor in call.inputs]
            return formula(call) * trace_formulas.real_products(call.op, dtypes)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None
    if call.op.startswith(("onnx::", "ai.onnx.ml::")):
        return None if call.op in UNKNOWN_IN_ONNX else 0
    result = _trace_flops(call)
    if result is not None:
        return result
    return None if may_multiply(call.op, is_opaque=node.kind is NodeKind.OPAQUE) else 0


def may_multiply(op: str, *, is_opaque: bool = False) -> bool:
    """Return whether an operator may do products; of one outside of the framework (`is_opaque`) nobody knows."""
    return bool((is_opaque or MAY_MULTIPLY.search(op)) and not WITHOUT_PRODUCTS.search(op))


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
    """Return the operations of query times key, and weights times value; of a call that is causal, half of them."""
    causal = trace_formulas.Causal.FROM_START if dict(call.arguments).get("is_causal") else None
    query, key, value = (_shape(tensor) for tensor in call.inputs[:3])
    return trace_formulas.attention(query, key, value, causal)


def _einsum(call: Call) -> int:
    arguments = dict(call.arguments)
    shapes = [_shape(tensor) for tensor in call.inputs]
    return contraction.einsum(arguments["equation"], shapes, arguments.get("path"))


def _tensordot(call: Call) -> int:
    arguments = dict(call.arguments)
    left, right = (_shape(tensor) for tensor in call.inputs[:2])
    return contraction.tensordot(left, right, arguments["dims_self"], arguments["dims_other"])


def _covariance(call: Call) -> int:
    """Return the operations of the product of (variables, observations) with its transpose."""
    *variables, observations = _shape(call.inputs[0]) or (1,)
    return 2 * prod(variables) ** 2 * observations


def _vector_products(call: Call) -> int:
    """Return the operations of sums of products: of two vectors; others are multiplied element by element."""
    left, right = (_shape(tensor) for tensor in call.inputs[:2])
    return 2 * left[0] if len(left) == len(right) == 1 else 0


def _matrix_norm(call: Call) -> int:
    """Return 0; raise an error if the norm is one of singular values, whose operations are unknown."""
    if dict(call.arguments).get("ord", "fro") in ("nuc", 2, -2):
        raise ValueError("singular values")
    return 0


def _trilinear(call: Call) -> int:
    arguments = dict(call.arguments)
    expanded = [arguments[name] for name in ("expand1", "expand2", "expand3")]
    return contraction.trilinear([_shape(tensor) for tensor in call.inputs[:3]], expanded, arguments["sumdim"])


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
    "aten::_trilinear": _trilinear,
    "aten::tensordot": _tensordot,
    **dict.fromkeys(
        ("aten::linalg_multi_dot", "aten::chain_matmul"),
        lambda call: contraction.chain([_shape(tensor) for tensor in call.inputs]),
    ),
    **dict.fromkeys(
        ("aten::matrix_power", "aten::linalg_matrix_power"),
        lambda call: contraction.power(_shape(call.inputs[0]), dict(call.arguments)["n"]),
    ),
    **dict.fromkeys(("aten::cov", "aten::corrcoef"), _covariance),
    "aten::linalg_vecdot": _vector_products,
    "aten::linalg_matrix_norm": _matrix_norm,
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
    call = Call(call.op, (("", inputs),), call.outputs)
    data, weights = call.inputs[0], [_shape(tensor) for tensor in call.inputs[1:]]
    steps = prod(_shape(data)[:-1])
    # each weight matrix is used once per sample and sequence position
    return 2 * steps * sum(prod(shape) for shape in weights if len(shape) == 2)


def _cell(call: Call) -> int:
    states = 2 if call.op == "aten::lstm_cell" else 1
    rows = _shape(call.inputs[0])[0]
    weights = [_shape(tensor) for tensor in call.inputs[1 + states :]]
    return 2 * rows * sum(prod(shape) for shape in weights if len(shape) == 2)


# --- quantised layers ---------------------------------------------------------------------------------

_QUANTISED = re.compile(r"(quantized|_quantized)::((conv|linear)(?!.*pack$)|quantized_(lstm|gru|rnn))|aten::quantized_")
"""Quantised layers, whose weights are in objects; the operators that pack these are left out."""


def _quantised(call: Call) -> int:
    """Return the operations of a quantised layer: those of the layer with the weights that its objects hold."""
    data, output = _shape(call.inputs[0]), call.outputs[0]
    held = _tensors_in_objects(call) or list(call.inputs[1:])
    weights = [_shape(tensor) for tensor in held if len(_shape(tensor)) > 1]
    if re.search(r"lstm|gru|rnn", call.op):
        return 2 * prod(data[:-1]) * sum(map(prod, weights))
    (weight,) = weights
    if "linear" in call.op:
        return 2 * prod(data) * weight[0]
    return 2 * prod(data if "transpose" in call.op else _shape(output)) * prod(weight[1:])


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
    return contraction.einsum(str(dict(call.scalars)["equation"]), [_shape(tensor) for tensor in call.inputs])


def _onnx_quantised_convolution(call: Call) -> int:
    """Count a convolution whose inputs have a scale and a zero each: the weight is the fourth."""
    return 2 * prod(_shape(call.outputs[0])) * prod(_shape(call.inputs[3])[1:])


def _onnx_recurrent(call: Call) -> int:
    """Count a recurrence of (sequence, weights of the input, weights of the state), in any order of its dimensions."""
    data, *weights = (_shape(tensor) for tensor in call.inputs[:3])
    return 2 * prod(data[:-1]) * sum(map(prod, weights))


def _onnx_attention(call: Call) -> int:
    """Count query times key, and weights times value, of (batch, heads, tokens, size) or (batch, tokens, width)."""
    arguments = dict(call.arguments)
    query, key, value = (_shape(arguments[f"input{place}"]) for place in range(3))
    if len(query) == 3:
        heads, key_heads = int(arguments["q_num_heads"]), int(arguments["kv_num_heads"])
        query = query[0], heads, query[1], query[2] // heads
        key, value = ((batch, key_heads, tokens, width // key_heads) for batch, tokens, width in (key, value))
    batch, heads, tokens, size = query
    past = arguments.get("input4")
    key_tokens = key[2] + (0 if past is None else _shape(past)[2])
    after_past = trace_formulas.Causal.FROM_START if past is None else trace_formulas.Causal.FROM_END
    pairs = trace_formulas.pairs(tokens, key_tokens, after_past if arguments.get("is_causal") else None)
    return 2 * batch * heads * pairs * (size + value[3])


ONNX: Mapping[str, Formula] = {
    **dict.fromkeys(("onnx::Conv", "onnx::ConvInteger", "onnx::DeformConv"), _onnx_convolution),
    "onnx::QLinearConv": _onnx_quantised_convolution,
    "onnx::ConvTranspose": _onnx_transposed,
    "onnx::Gemm": _onnx_gemm,
    **dict.fromkeys(("onnx::MatMul", "onnx::MatMulInteger", "onnx::QLinearMatMul"), _product),
    **dict.fromkeys(("onnx::LSTM", "onnx::GRU", "onnx::RNN"), _onnx_recurrent),
    "onnx::Einsum": _onnx_einsum,
    "onnx::Attention": _onnx_attention,
}

UNKNOWN_IN_ONNX = frozenset(
    [
        *(f"onnx::{name}" for name in "MultiHeadAttention Det If Loop Scan".split()),
        *(f"ai.onnx.ml::{name}" for name in "LinearClassifier LinearRegressor SVMClassifier SVMRegressor".split()),
    ]
)
"""Operators that multiply, or hold graphs that do, and have no formula here."""
