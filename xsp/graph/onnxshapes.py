"""Shapes of an ONNX model: numbers for named dimensions, and the shapes that follow from them.

The library `onnx` infers shapes, but not through many operators whose values determine shapes (`Equal`, `Where`,
`ConstantOfShape`). The results of such operators on small known values are computed by its reference implementation,
and the inference continues from there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsp.errors import GraphError, first_line
from xsp.graph.node import Problem

LARGEST = (1 << 63) - 1
"""The largest size that a file can state."""

SMALL = 4096
"""Most elements of a constant whose values may determine a shape; larger ones are not passed to the inference."""


def _inputs(model: Any) -> list[Any]:
    """Return the inputs that are tensors and not constants."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in constants and info.type.HasField("tensor_type")]


def check_sizes(path: Path, model: Any, sizes: Mapping[str, int], batch: int | None = None) -> Mapping[str, int]:
    """Check that each name is that of an input's dimension, and that its size fits the batch; return the sizes."""
    names = [dim.dim_param for info in _inputs(model) for dim in info.type.tensor_type.shape.dim if dim.dim_param]
    for name, number in sizes.items():
        if name not in names:
            allowed = ", ".join(dict.fromkeys(names)) or "none"
            raise GraphError(f"{path}: no dimension of an input is named {name!r}; its names are: {allowed}")
        if not 0 <= number <= LARGEST:
            raise GraphError(f"{path}: dimension {name} cannot be {number}: give a number from 0 to {LARGEST}")
    if batch is not None and batch > LARGEST:
        raise GraphError(f"{path}: the batch cannot be {batch}: give a number up to {LARGEST}")
    batch_names = {dim.dim_param for info in _inputs(model) for dim in info.type.tensor_type.shape.dim[:1]}
    for name in batch_names & set(sizes):
        if batch is not None and sizes[name] != batch:
            raise GraphError(f"{path}: --batch {batch} and --size {name}={sizes[name]} set one dimension: omit one")
    return sizes


def set_sizes(model: Any, batch: int | None, sizes: Mapping[str, int], problems: list[Problem]) -> int | None:
    """Set the dimensions of the inputs to numbers, and return the batch; None if the inputs have different ones."""
    batches: set[int] = set()
    for info in _inputs(model):
        dimensions = info.type.tensor_type.shape.dim
        for place, dim in enumerate(dimensions):
            symbolic = not dim.HasField("dim_value") or dim.dim_value < 0  # some exporters write unknown ones as such
            if symbolic and dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif place == 0 and (symbolic or batch is not None):
                dim.dim_value = batch or 1
            elif symbolic:
                name = dim.dim_param or "?"
                dim.ClearField("value")
                hint = f": set it with --size {name}=N" if name != "?" else ""
                problems.append(
                    Problem(f"input {info.name}", f"dimension {place} is {name}, which has no number{hint}")
                )
        if dimensions:
            batches.add(dimensions[0].dim_value)
    if batch is not None or sizes:
        del model.graph.value_info[:]
        for output in model.graph.output:
            if output.type.HasField("tensor_type"):
                output.type.tensor_type.ClearField("shape")
    return batches.pop() if len(batches) == 1 else None


def with_inferred_shapes(onnx: Any, model: Any, problems: list[Problem]) -> Any:
    """Return the model with calls of its functions inlined, and with all shapes that can be inferred."""
    for tensor in model.graph.initializer:
        if _elements(tensor.dims) > SMALL:  # the library cannot handle a model above 2 GB
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    for sparse in model.graph.sparse_initializer:  # the library infers no shape from sparse weights: as if dense
        values = sparse.values
        model.graph.initializer.append(onnx.TensorProto(name=values.name, data_type=values.data_type, dims=sparse.dims))
    del model.graph.sparse_initializer[:]
    try:
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
        try:
            return _infer_from_values(
                onnx, onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=True, data_prop=True)
            )
        except onnx.shape_inference.InferenceError as error:
            problems.append(Problem("shape inference", first_line(error)[:200]))
        return _infer_from_values(onnx, _infer(onnx, model))
    except Exception as error:  # protobuf's errors have no common class across its versions
        problems.append(Problem("shape inference", first_line(error)[:200]))
        return model


def _elements(dims: Any) -> int:
    count = 1
    for size in dims:
        count *= size
    return count


def _infer(onnx: Any, model: Any) -> Any:
    return onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)


# --- values that decide shapes --------------------------------------------------------------------------------

MOST_ROUNDS = 16
"""Most rounds of computing values and inferring shapes from them: a shape may need a value that needs a shape."""

MOST_NODES = 20_000
"""Most nodes for which unknown shapes are inferred further: each round visits all nodes."""

COMPUTED = frozenset(
    "Abs Add And Cast Ceil Concat ConstantOfShape Div Equal Expand Floor Gather Greater GreaterOrEqual Identity Less "
    "LessOrEqual Max Min Mod Mul Neg Not Or Pow Range ReduceMax ReduceMin ReduceProd ReduceSum Reshape ScatterND Slice "
    "Sqrt Squeeze Sub Transpose Unsqueeze Where".split()
)
"""Operators that exporters put between `Shape` and the consumers of a shape."""

SIZED_BY_VALUE = {"ConstantOfShape": 0, "Expand": 1}
"""Operator → input that determines the number of elements of the result."""


def _infer_from_values(onnx: Any, model: Any) -> Any:
    """Return the model with the additional shapes that follow from values which the library does not compute."""
    if len(model.graph.node) > MOST_NODES:
        return model
    values = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if _elements(tensor.dims) <= SMALL and not tensor.external_data and _is_filled(tensor)
    }
    opsets = list(model.opset_import)
    for _ in range(MOST_ROUNDS):
        shapes = _shapes(model)
        if all(name in shapes for node in model.graph.node for name in node.output if name):
            break
        count = len(values)
        for node in model.graph.node:
            if node.domain in ("", "ai.onnx") and any(name not in values for name in node.output if name):
                with contextlib.suppress(Exception):  # for a faulty node: its shape stays unknown
                    _compute(node, values, shapes, opsets)
        if len(values) == count:
            break
        simpler = type(model)()
        simpler.CopyFrom(model)
        del simpler.graph.node[:]
        simpler.graph.node.extend(
            node for node in model.graph.node if not node.output or not all(n in values or not n for n in node.output)
        )
        del simpler.graph.value_info[:]
        simpler.graph.value_info.extend(info for info in model.graph.value_info if info.name in shapes)
        existing = {tensor.name for tensor in model.graph.initializer}
        simpler.graph.initializer.extend(
            onnx.numpy_helper.from_array(value, name) for name, value in values.items() if name not in existing
        )
        _take_shapes(onnx, model, _infer(onnx, simpler), values)
    return model


def _is_filled(tensor: Any) -> bool:
    return bool(tensor.raw_data or not _elements(tensor.dims)) or any(
        len(getattr(tensor, field))
        for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    )


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the fully known shapes, by the names of their tensors."""
    shapes = {}
    for info in (*model.graph.value_info, *model.graph.output, *model.graph.input):
        kind = info.type.tensor_type
        if info.type.HasField("tensor_type") and kind.HasField("shape"):
            dims = kind.shape.dim
            if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
                shapes[info.name] = tuple(dim.dim_value for dim in dims)
    return shapes


def _compute(node: Any, values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], opsets: list[Any]) -> None:
    """Add the results of a node to the values, if they are small and all inputs are known."""
    import numpy
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Shape" and node.input[0] in shapes:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        shape = shapes[node.input[0]][slice(bounds.get("start", 0), bounds.get("end"))]
        values[node.output[0]] = numpy.array(shape, numpy.int64)
        return
    if node.op_type == "Constant":
        tensor = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
        if tensor is not None and _elements(tensor.dims) > SMALL:
            return
    elif node.op_type not in COMPUTED or any(name and name not in values for name in node.input):
        return
    if node.op_type in SIZED_BY_VALUE and math.prod(map(int, values[node.input[SIZED_BY_VALUE[node.op_type]]])) > SMALL:
        return
    if node.op_type == "Range":
        start, limit, step = (float(values[name]) for name in node.input)
        if abs(limit - start) > SMALL * abs(step):
            return
    results = ReferenceEvaluator(node, opsets={opset.domain: opset.version for opset in opsets}).run(
        None, {name: values[name] for name in node.input if name}
    )
    arrays = [numpy.asarray(result) for result in results]
    if all(array.size <= SMALL for array in arrays):
        values.update(zip(node.output, arrays, strict=True))


def _take_shapes(onnx: Any, model: Any, source: Any, values: Mapping[str, Any]) -> None:
    """Add inferred types and shapes to a model."""
    produced = {name for node in model.graph.node for name in node.output}
    outputs = {output.name for output in model.graph.output}
    replacements = {
        info.name: info for info in (*source.graph.value_info, *source.graph.output) if info.name in produced
    }
    for name, value in values.items():
        if name in produced:
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            replacements[name] = onnx.helper.make_tensor_value_info(name, kind, value.shape)
    unchanged = [info for info in model.graph.value_info if info.name not in replacements]
    del model.graph.value_info[:]
    model.graph.value_info.extend([*unchanged, *(info for name, info in replacements.items() if name not in outputs)])
    for output in model.graph.output:
        if output.name in replacements:
            output.CopyFrom(replacements[output.name])
