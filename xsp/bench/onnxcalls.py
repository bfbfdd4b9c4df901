"""The runtime `onnxruntime`: a block of ONNX nodes as a separate model. Imports NumPy: import it where it is needed.

Weights are part of the model, so that the library rearranges them when it loads the model, as it does for a whole file.
A timing covers one run of a session, with inputs and outputs bound beforehand. Values are synthetic; small integers
that a node takes as sizes (`Reshape`, `Slice`) are chosen to give the shapes in the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import CacheState, Spec, missing_input_reason
from xsp.errors import first_line
from xsp.graph.blocks import Block, Wires
from xsp.graph.node import Call, Tensor
from xsp.plugins import importing
from xsp.texts import size_text

if TYPE_CHECKING:
    from xsp.bench.torchcalls import Prepared

MOST_SESSIONS = 16
"""Most copies of a model, each with its own weights, that take turns in state `chain`."""

IR_VERSION = 10
POOL = 1 << 20
"""Number of random values that are drawn; larger tensors repeat them."""

_VOCABULARY = "onnx"
_INPUT = re.compile(r"(input|outer)\d+")
"""Names of a node's arguments that are tensors; all other arguments are attributes."""


class OnnxRuntime:
    """The runtime that prepares blocks whose nodes ONNX Runtime supports."""

    name = "onnxruntime"

    def prepare(self, spec: Spec, rotated_bytes: int, limit_bytes: int) -> Prepared:
        """Return a block with its inputs; see `xsp.bench.torchcalls.Torch.prepare`.

        Raises:
            NotTimeable: the block cannot be run on its own, or the library is missing.
            MemoryError: the tensors exceed the limit.
        """
        from xsp.bench.torchcalls import Prepared, flush_buffer

        model = _Model(spec.block)
        weight_bytes = sum(_bytes(tensor) for tensor in model.weights.values())
        # weights count twice, because the library copies them
        input_bytes = sum(_bytes(tensor) for tensor in model.inputs.values()) + 2 * weight_bytes
        output_bytes = sum(tensor.bytes or 0 for tensor in model.node_outputs.values())
        if input_bytes + output_bytes > limit_bytes:
            raise MemoryError(
                f"its tensors take {size_text(input_bytes + output_bytes)} of {size_text(limit_bytes)} allowed"
            )
        copies, notes = 1, list(model.notes)
        if spec.state is CacheState.CHAIN and weight_bytes:
            full_rotation = min(
                rotated_bytes // weight_bytes + 1, (limit_bytes - input_bytes - output_bytes) // (2 * weight_bytes) + 1
            )
            copies = max(1, min(MOST_SESSIONS, full_rotation))
            if copies < full_rotation:
                notes.append(f"weights rotate through only {copies * weight_bytes / 2**20:.3g} MiB")
        values = _Values()
        runs = [_Run(model, values, spec.threads) for _ in range(copies)]
        return Prepared(
            lambda run: run(), [(run,) for run in runs], notes="; ".join(notes), flush=flush_buffer(spec, rotated_bytes)
        )


class _Model:
    """A block as nodes with named tensors: the model's inputs, weights, fixed values and outputs."""

    def __init__(self, block: Block) -> None:
        self.inputs: dict[str, Tensor] = {}
        """Name → input of the model (activation)."""

        self.weights: dict[str, Tensor] = {}
        self.size_values: dict[str, np.ndarray] = {}
        """Name → small input whose values follow from the shapes."""

        self.limits: dict[str, int] = {}
        """Name of an input of positions → exclusive upper bound of its integers."""

        self.node_outputs: dict[str, Tensor] = {}
        """Name → output of a node."""

        self.read_names: set[str] = set()
        self.nodes: list[tuple[Call, list[str], list[str]]] = []
        self.notes: list[str] = []
        self._names: dict[tuple[int, Tensor], str] = {}
        self._lasting = set(block.weights)
        reason = missing_input_reason(block)
        if reason:
            raise NotTimeable(reason)
        for call, wires in zip(block.calls, block.wiring, strict=True):
            self._add(call, wires)
        if not self.inputs:
            raise NotTimeable("all its inputs are constants, so ONNX Runtime computes it when it loads the file")

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Outputs that no node of the block reads."""
        return {name: tensor for name, tensor in self.node_outputs.items() if name not in self.read_names}

    def _add(self, call: Call, wires: Wires) -> None:
        for tensor in (*call.inputs, *call.outputs):
            _type(tensor)
        inputs, reads = [], iter(wires.reads)
        tensors = [value for name, value in call.arguments if _is_input(name)]
        for index, value in enumerate(tensors):
            inputs.append("" if value is None else self._input(call, index, value, next(reads)))
        outputs = []
        for number, tensor in zip(wires.returns, call.outputs, strict=True):
            name = f"output{len(self.node_outputs)}"
            self.node_outputs[name] = tensor
            self._names[number, tensor] = name
            outputs.append(name)
        self.nodes.append((call, inputs, outputs))

    def _input(self, call: Call, index: int, tensor: Tensor, number: int) -> str:
        existing = self._names.get((number, tensor))
        if existing is not None:
            self.read_names.add(existing)
            return existing
        name = f"input{len(self._names)}"
        self._names[number, tensor] = name
        size_values = _sizes(call, index, tensor)
        if size_values is not None:
            self.size_values[name] = size_values.astype(_type(tensor)).reshape(tensor.shape or ())
            return name
        high = _positions(call, index)
        if high is not None:
            self.limits[name] = high
        elif not (tensor.dtype or "").startswith(("float", "bool")):
            self.notes.append(f"inputs of {call.op} are ones: no rule for their values is known")
        (self.weights if number in self._lasting else self.inputs)[name] = tensor
        return name


@dataclass
class _Values:
    """A generator of arrays; arrays requested in the same order are equal in each process."""

    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        self._normal = self.generator.standard_normal(POOL, dtype=np.float32)

    def of(self, tensor: Tensor, high: int | None, positive: bool = False) -> np.ndarray:
        """Return an array: floats are normal, or above 0.5; booleans true; integers below `high`, by default ones."""
        shape, kind = tensor.shape or (), _type(tensor)
        if kind == np.bool_:
            return np.ones(shape, kind)
        if high is not None:
            return self.generator.integers(0, max(1, high), shape).astype(kind)
        if kind.kind != "f":
            return np.ones(shape, kind)
        array = np.resize(self._normal, prod(shape)).reshape(shape)
        return (np.abs(array) + 0.5 if positive else array).astype(kind)


class _Run:
    """A session of the model, with its inputs and outputs bound."""

    def __init__(self, model: _Model, values: _Values, threads: int) -> None:
        with importing(NotTimeable, "{error}: pip install 'xsp[onnx,onnxruntime]'"):
            import onnx
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # sessions that take turns wait for each other: spinning threads would occupy the core of the next session
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            serialized = _serialized(onnx, model, values)
            self._session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
            self._binding = self._session.io_binding()
            positive = _positive(model)
            for name, tensor in model.inputs.items():
                array = values.of(tensor, model.limits.get(name), name in positive)
                self._binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
            for name in model.outputs:
                self._binding.bind_output(name, "cpu")
            self()
            shapes = [tuple(output.shape()) for output in self._binding.get_outputs()]
        except NotTimeable:
            raise
        except Exception as error:  # ONNX Runtime's errors have no other common base class
            message = first_line(error).replace("[ONNXRuntimeError] : ", "")[:160]
            raise NotTimeable(f"ONNX Runtime does not run it ({message})") from error
        if shapes != [tensor.shape for tensor in model.outputs.values()]:
            raise NotTimeable("its outputs have different shapes with generated input values")

    def __call__(self) -> None:
        """Run the session once."""
        self._session.run_with_iobinding(self._binding)


def _serialized(onnx: Any, model: _Model, values: _Values) -> bytes:
    """Return the model in ONNX's serialized form."""
    helper, positive = onnx.helper, _positive(model)
    versions: dict[str, int] = {}
    nodes = []
    for call, inputs, outputs in model.nodes:
        vocabulary, _, op = call.op.partition("::")
        domain = "" if vocabulary == _VOCABULARY else vocabulary
        version = int(call.overload) if call.overload.isdecimal() else 1
        versions[domain] = max(version, versions.get(domain, 1))
        unread = [
            f"{outputs[0]}_{index}" for index in range(len(outputs), _min_output_count(onnx, call, op, domain, version))
        ]
        node = helper.make_node(op, inputs, [*outputs, *unread], domain=domain)
        node.attribute.extend(_attributes(onnx, call, op, domain, version))
        nodes.append(node)
    arrays = {
        **{name: values.of(tensor, model.limits.get(name), name in positive) for name, tensor in model.weights.items()},
        **model.size_values,
    }

    def value_infos(tensors: Mapping[str, Tensor]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(_type(tensor)), tensor.shape)
            for name, tensor in tensors.items()
        ]

    graph = helper.make_graph(
        nodes, "block", value_infos(model.inputs), value_infos(model.outputs),
        initializer=[onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid(domain, version) for domain, version in (versions or {"": 1}).items()]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    serialized: bytes = proto.SerializeToString()
    return serialized


def _min_output_count(onnx: Any, call: Call, op: str, domain: str, version: int) -> int:
    """Return the least number of outputs that a node has: the graph omits outputs that no node reads."""
    arguments = dict(call.arguments)
    counts = [1]
    if op == "Split":
        parts, lengths = arguments.get("split"), arguments.get("input1")
        counts += [arguments.get("num_outputs") or 1, len(parts) if isinstance(parts, tuple) else 1]
        counts += [prod(lengths.shape or ())] if isinstance(lengths, Tensor) else []
    if onnx.defs.has(op, domain):
        counts.append(onnx.defs.get_schema(op, version, domain).min_output)
    return max(counts)


def _attributes(onnx: Any, call: Call, op: str, domain: str, version: int) -> list[Any]:
    """Return the attributes of a node.

    Raises:
        NotTimeable: an attribute is a graph or a tensor, of which the graph holds only the shape.
    """
    try:
        declared = onnx.defs.get_schema(op, version, domain).attributes
    except onnx.defs.SchemaError:
        declared = {}
    opaque = ("TENSOR", "GRAPH", "SPARSE", "TYPE")
    attributes = []
    for name, value in call.arguments:
        if _is_input(name):
            continue
        kind = declared[name].type if name in declared else None
        text = str(value)
        if (kind is not None and kind.name.startswith(opaque)) or text.startswith(("tensor ", "graph of ")):
            raise NotTimeable(f"the attribute {name} of {call.op} is only in its file")
        plain = list(value) if isinstance(value, tuple) else value
        attributes.append(onnx.helper.make_attribute(name, plain, attr_type=None if kind is None else kind.value))
    return attributes


# --- values -----------------------------------------------------------------------------------------------


def _is_input(name: str) -> bool:
    return _INPUT.fullmatch(name) is not None


def _type(tensor: Tensor) -> np.dtype[Any]:
    try:
        return np.dtype(tensor.dtype)
    except TypeError:
        raise NotTimeable(f"no inputs can be generated of type {tensor.dtype}") from None


def _bytes(tensor: Tensor) -> int:
    return prod(tensor.shape or ()) * _type(tensor).itemsize


def _positive(model: _Model) -> set[str]:
    """Return the inputs whose values are above 0.5: variances, divisors, and operands of roots and logarithms."""
    names = set()
    for call, inputs, _ in model.nodes:
        op = call.op.partition("::")[2]
        if op == "BatchNormalization":
            names.update(inputs[4:5])
        elif op in ("Sqrt", "Log", "Pow", "Reciprocal"):
            names.update(inputs[:1])
        elif op == "Div":
            names.update(inputs[1:2])
    return names


def _axis(call: Call, default: int = 0) -> int:
    axis = dict(call.arguments).get("axis")
    return axis if isinstance(axis, int) else default


def _positions(call: Call, index: int) -> int | None:
    """Return the exclusive upper bound of an input's integers; None if they are not positions."""
    op = call.op.partition("::")[2]
    shape = call.inputs[0].shape or ()
    if op in ("Gather", "GatherElements", "ScatterElements", "Scatter") and index == 1 and shape:
        return shape[_axis(call)]
    if op in ("GatherND", "ScatterND") and index == 1 and shape:
        depth = (call.inputs[1].shape or (1,))[-1]
        return min(shape[:depth], default=1)
    return None


Solve = Callable[[Call, tuple[int, ...], tuple[int, ...], Tensor], Any]


def _sizes(call: Call, index: int, tensor: Tensor) -> np.ndarray | None:
    """Return the values of a small input that determines the output shape, by both shapes; None for any other input."""
    solve = _SIZES.get((call.op.partition("::")[2], index))
    if solve is None or not call.outputs:
        return None
    values = solve(call, call.inputs[0].shape or (), call.outputs[0].shape or (), tensor)
    sizes = np.asarray(values)
    if sizes.size != prod(tensor.shape or ()):
        raise NotTimeable(f"the sizes that {call.op} takes as values cannot be derived from its shapes")
    return sizes


def _reduced_axes(call: Call, before: tuple[int, ...], after: tuple[int, ...], tensor: Tensor) -> list[int]:
    """Return the dimensions that a reduction drops or sets to 1; if ambiguous, it drops the last ones."""
    if dict(call.arguments).get("keepdims", 1):
        changed = [axis for axis, (old_size, size) in enumerate(zip(before, after, strict=True)) if old_size != size]
        ones = [axis for axis, size in enumerate(after) if size == 1 and axis not in changed]
        return sorted([*changed, *ones[: max(0, prod(tensor.shape or ()) - len(changed))]])
    dropped, position = [], 0
    for axis, size in enumerate(before):
        if position < len(after) and size == after[position]:
            position += 1
        else:
            dropped.append(axis)
    return dropped


def _parts(call: Call, before: tuple[int, ...], after: tuple[int, ...], tensor: Tensor) -> list[int]:
    """Return the lengths of parts; parts that no node reads share the remaining length."""
    lengths = [(output.shape or ())[_axis(call)] for output in call.outputs]
    unread = prod(tensor.shape or ()) - len(lengths)
    remaining = before[_axis(call)] - sum(lengths)
    return lengths + [remaining // unread + (index < remaining % unread) for index in range(unread)]


def _sliced_axes(call: Call, before: tuple[int, ...], after: tuple[int, ...], tensor: Tensor) -> list[int]:
    """Return the dimensions that are cut: those that become shorter, then others, until there is one for each end."""
    count = prod(tensor.shape or ())
    if not any(name == "input3" and value is not None for name, value in call.arguments):
        return list(range(count))
    changed = [axis for axis, (old_size, size) in enumerate(zip(before, after, strict=True)) if old_size != size]
    return [*changed, *(axis for axis in range(len(before)) if axis not in changed)][: max(count, len(changed))]


def _paddings(call: Call, before: tuple[int, ...], after: tuple[int, ...], tensor: Tensor) -> list[int]:
    return [*[0] * len(before), *(size - old_size for old_size, size in zip(before, after, strict=True))]


_REDUCES = tuple(f"Reduce{name}" for name in "Sum Mean Max Min Prod L1 L2 LogSum LogSumExp SumSquare".split())

_SIZES: Mapping[tuple[str, int], Solve] = {
    ("Reshape", 1): lambda call, before, after, tensor: after,
    ("Expand", 1): lambda call, before, after, tensor: after[len(after) - prod(tensor.shape or ()) :],
    ("Tile", 1): lambda call, before, after, tensor: [b // a if a else 1 for a, b in zip(before, after, strict=True)],
    ("Split", 1): _parts,
    ("TopK", 1): lambda call, before, after, tensor: [after[_axis(call, -1)]],
    ("Resize", 2): lambda call, before, after, tensor: [b / a for a, b in zip(before, after, strict=True)],
    ("Upsample", 1): lambda call, before, after, tensor: [b / a for a, b in zip(before, after, strict=True)],
    ("Resize", 3): lambda call, before, after, tensor: after,
    ("Pad", 1): _paddings,
    ("Slice", 1): lambda call, before, after, tensor: [0] * prod(tensor.shape or ()),
    ("Slice", 2): lambda call, before, after, tensor: [
        after[axis] for axis in _sliced_axes(call, before, after, tensor)
    ],
    ("Slice", 3): _sliced_axes,
    ("Slice", 4): lambda call, before, after, tensor: [1] * prod(tensor.shape or ()),
    ("ConstantOfShape", 0): lambda call, before, after, tensor: after,
    ("OneHot", 1): lambda call, before, after, tensor: after[_axis(call, -1)],
    ("Range", 0): lambda call, before, after, tensor: 0,
    ("Range", 1): lambda call, before, after, tensor: after[0],
    ("Range", 2): lambda call, before, after, tensor: 1,
    ("Pow", 1): lambda call, before, after, tensor: np.full(tensor.shape or (), 2),  # the exponent in norms
    **{(name, 1): _reduced_axes for name in _REDUCES},
}
"""Operator and number of the input → function that returns the values that give the output its shape."""
