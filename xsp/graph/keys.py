"""Equality of calls: the canonical form of a call, and its key.

The key covers the operator with its overload, the type, shape and strides (unless contiguous) of each tensor argument,
and all other arguments. It does not cover values of weights, names, modules, the position in a graph, and devices:
devices belong to the machine on which a call is timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from xsp.cached import hash_of
from xsp.graph.node import Call, Tensor

VALUE_DEPENDENT = frozenset(
    f"aten::{name}"
    for name in (
        "embedding embedding_bag _embedding_bag _embedding_bag_forward_only embedding_dense_backward gather scatter "
        "scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index index_put index_put_ _index_put_impl_ "
        "index_add index_add_ index_select index_copy index_copy_ take take_along_dim masked_select masked_scatter "
        "masked_scatter_ nonzero sort argsort topk unique _unique2 unique_consecutive bincount histc searchsorted "
        "bucketize repeat_interleave multinomial _grouped_mm kthvalue median mode"
    ).split()
)
"""Operators whose time depends on the values of their inputs: on positions or on their order."""

UNIFORM = "uniform"
"""Values drawn uniformly from the allowed ones: the rule if no other was observed."""

ERASED: Mapping[str, frozenset[str]] = {
    # these add a constant or scale by one: the instructions are the same for every value
    **dict.fromkeys(
        ("aten::batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit_no_training"),
        frozenset(["eps", "momentum"]),
    ),
    **dict.fromkeys(("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm"), frozenset(["eps"])),
    **dict.fromkeys(("aten::group_norm", "aten::native_group_norm", "aten::instance_norm"), frozenset(["eps"])),
    **dict.fromkeys(("aten::leaky_relu", "aten::leaky_relu_"), frozenset(["negative_slope"])),
    **dict.fromkeys(("aten::elu", "aten::elu_"), frozenset(["alpha", "scale", "input_scale"])),
    "onnx::BatchNormalization": frozenset(["epsilon", "momentum"]),
    "onnx::LayerNormalization": frozenset(["epsilon"]),
    "onnx::LeakyRelu": frozenset(["alpha"]),
    # whole steps are identified by their work; the rest only says how to run them
    **dict.fromkeys(("step::waited", "step::replayed"), frozenset(["model", "settings"])),
}
"""Operator → arguments that cannot change the work. Drop-out is left out: probabilities of 0 and 1 change the work."""

EXTERNAL_ARGUMENTS = frozenset(["device", "pin_memory", "non_blocking", "generator"])
"""Arguments that belong to the machine or to the program, not to the work."""

FLAGS = {"cudnn_enabled": True, "cudnn_enable": True, "allow_tf32": True, "benchmark": False, "deterministic": False}
"""Arguments that pass settings of the process to a call, and the values that replace them: settings belong to the
environment in which a call is timed."""


def key(call: Call) -> str:
    """Return the key of a call: 32 hexadecimal digits, equal for equal calls."""
    return hash_of(canonical(call))


def work_key(call: Call) -> str:
    """Return the key of the work of a call: without arguments that cannot change it (`ERASED`), and without the values
    of numbers that become tensors (`x * 0.5`), which a trace does not report."""
    erased = ERASED.get(call.op, frozenset())
    arguments = tuple(
        (name, as_tensor(value) if becomes_tensor(call.op, call.overload, name) else value)
        for name, value in call.arguments
        if name not in erased
    )
    return hash_of(canonical(Call(call.op, arguments, call.outputs, call.overload, call.values)))


def becomes_tensor(op: str, overload: str, argument: str) -> bool:
    """Return whether a number passed for an argument becomes a tensor without dimensions: `other` of `x * 0.5`."""
    return argument == "other" and overload in ("", "Tensor", "Tensor_mode") and op.startswith("aten::")


def as_tensor(value: Any) -> Any:
    """Return the tensor without dimensions that a number becomes; return anything else unchanged."""
    dtype = NUMBERS.get(type(value))
    return value if dtype is None else Tensor(dtype, ())


NUMBERS: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
"""Type of the tensor that a number of Python becomes."""


def canonical(call: Call) -> str:
    """Return a call as canonical JSON text: equal calls have equal texts."""
    return json.dumps(
        [call.op, call.overload, [[name, plain(value)] for name, value in call.arguments], call.values],
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )


def call_to_plain(call: Call) -> dict[str, Any]:
    """Return a call as plain values for JSON."""
    return {
        "op": call.op,
        "overload": call.overload,
        "values": call.values,
        "arguments": [[name, plain(value)] for name, value in call.arguments],
        "outputs": [plain(tensor) for tensor in call.outputs],
    }


def call_from_plain(document: Any) -> Call:
    """Return the call from the output of `call_to_plain`.

    Raises:
        LookupError, TypeError, ValueError: `document` is not such output, or was changed.
    """
    arguments = tuple((str(name), from_plain(value)) for name, value in document["arguments"])
    outputs = tuple(from_plain(output) for output in document["outputs"])
    if not all(isinstance(output, Tensor) for output in outputs):
        raise ValueError("an output that is not a tensor")
    return Call(str(document["op"]), arguments, outputs, str(document["overload"]), str(document["values"]))


def plain(value: Any) -> Any:
    """Return an argument as plain values for JSON; different arguments stay different."""
    if isinstance(value, Tensor):
        stride = [] if value.stride is None else [list(value.stride)]
        return {"tensor": [value.dtype, None if value.shape is None else list(value.shape), *stride]}
    if isinstance(value, (tuple, list)):
        return [plain(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    return value if value is None or isinstance(value, (bool, int, float, str)) else {"other": str(value)}


def from_plain(value: Any) -> Any:
    """Return the argument from the output of `plain`.

    Raises:
        ValueError: `value` is not such output.
    """
    if isinstance(value, list):
        return tuple(from_plain(element) for element in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        dtype, shape, *stride = content
        tensor = Tensor(dtype, None if shape is None else tuple(shape), tuple(stride[0]) if stride else None)
        return _validated(tensor)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "float":
        return float(content)
    if kind == "other":
        return str(content)
    raise ValueError(f"there is no argument of kind {kind!r}")


def _validated(tensor: Tensor) -> Tensor:
    """Check a tensor that was read, and return it.

    Raises:
        ValueError: its type is not a name, a size or stride is not a whole number from 0, or their numbers differ.
    """
    sizes, strides = tensor.shape or (), tensor.stride
    valid = all(type(number) is int and number >= 0 for number in (*sizes, *(strides or ())))
    if not (tensor.dtype is None or isinstance(tensor.dtype, str)) or not valid:
        raise ValueError(f"there is no tensor of type {tensor.dtype!r} and shape {tensor.shape}")
    if strides is not None and len(strides) != len(sizes):
        raise ValueError(f"a tensor with {len(sizes)} dimensions has {len(strides)} strides")
    return tensor
