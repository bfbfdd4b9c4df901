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

from xsp.errors import GraphError
from xsp.graph.node import Problem

LARGEST = (1 << 63) - 1
"""The largest size that a file can state."""

SMALL = 4096
"""Most elements of a constant whose values may determine a shape; larger ones are not passed to the inference."""


def _inputs(model: Any) -> list[Any]:
    """Return the inputs that are tensors and not constants."""
    constants = {each.name for each in model.graph.initializer}
    return [each for each in model.graph.input if each.name not in constants and each.type.HasField("tensor_type")]


def known(path: Path, model: Any, sizes: Mapping[str, int], batch: int | None = None) -> Mapping[str, int]:
    """Return the sizes after a check that each name is that of a dimension of an input, and fits the batch."""
    names = [each.dim_param for given in _inputs(model) for each in given.type.tensor_type.shape.dim if each.dim_param]
    for name, number in sizes.items():
        if name not in names:
            there = ", ".join(dict.fromkeys(names)) or "none"
            raise GraphError(f"{path}: no dimension of an input is named {name!r}; its names are: {there}")
        if not 0 <= number <= LARGEST:
            raise GraphError(f"{path}: dimension {name} cannot be {number}: give a number from 0 to {LARGEST}")
    if batch is not None and batch > LARGEST:
        raise GraphError(f"{path}: the batch cannot be {batch}: give a number up to {LARGEST}")
    first = {dim.dim_param for given in _inputs(model) for dim in given.type.tensor_type.shape.dim[:1]}
    for name in first & set(sizes):
        if batch is not None and sizes[name] != batch:
            raise GraphError(f"{path}: --batch {batch} and --size {name}={sizes[name]} set one dimension: omit one")
    return sizes


def set_sizes(model: Any, batch: int | None, sizes: Mapping[str, int], problems: list[Problem]) -> int | None:
    """Set the dimensions of the inputs to numbers, and return the batch; None if the inputs have different ones."""
    found: set[int] = set()
    for given in _inputs(model):
        dimensions = given.type.tensor_type.shape.dim
        for place, each in enumerate(dimensions):
            named = not each.HasField("dim_value") or each.dim_value < 0  # some exporters write unknown ones as such
            if named and each.dim_param in sizes:
                each.dim_value = sizes[each.dim_param]
            elif place == 0 and (named or batch is not None):
                each.dim_value = batch or 1
            elif named:
                name = each.dim_param or "?"
                each.ClearField("value")
                how = f": set it with --size {name}=N" if name != "?" else ""
                problems.append(
                    Problem(f"input {given.name}", f"dimension {place} is {name}, which has no number{how}")
                )
        if dimensions:
            found.add(dimensions[0].dim_value)
    if batch is not None or sizes:
        del model.graph.value_info[:]
        for made in model.graph.output:
            if made.type.HasField("tensor_type"):
                made.type.tensor_type.ClearField("shape")
    return found.pop() if len(found) == 1 else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]


def inferred(onnx: Any, model: Any, problems: list[Problem]) -> Any:
    """Return the model with calls of its functions inlined, and with all shapes that can be inferred."""
    for each in model.graph.initializer:
        if _elements(each.dims) > SMALL:  # the library cannot handle a model above 2 GB
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                each.ClearField(field)
    try:
        if len(model.functions):
            model = onnx.inliner.inline_local_functions(model)
        try:
            return _further(
                onnx, onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=True, data_prop=True)
            )
        except onnx.shape_inference.InferenceError as error:
            problems.append(Problem("shape inference", first_line(error)))
        return _further(onnx, _infer(onnx, model))
    except Exception as error:  # protobuf's errors have no common class across its versions
        problems.append(Problem("shape inference", first_line(error)))
        return model


def _elements(dims: Any) -> int:
    count = 1
    for each in dims:
        count *= each
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


def _further(onnx: Any, model: Any) -> Any:
    """Return the model with the additional shapes that follow from values which the library does not compute."""
    if len(model.graph.node) > MOST_NODES:
        return model
    values = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in model.graph.initializer
        if _elements(each.dims) <= SMALL and not each.external_data and _is_filled(each)
    }
    opsets = list(model.opset_import)
    for _ in range(MOST_ROUNDS):
        shapes = _shapes(model)
        if all(name in shapes for node in model.graph.node for name in node.output if name):
            break
        before = len(values)
        for node in model.graph.node:
            if node.domain in ("", "ai.onnx") and any(name not in values for name in node.output if name):
                with contextlib.suppress(Exception):  # for a faulty node: its shape stays unknown
                    _compute(onnx, node, values, shapes, opsets)
        if len(values) == before:
            break
        simpler = type(model)()
        simpler.CopyFrom(model)
        del simpler.graph.node[:]
        simpler.graph.node.extend(
            each for each in model.graph.node if not each.output or not all(n in values or not n for n in each.output)
        )
        del simpler.graph.value_info[:]
        simpler.graph.value_info.extend(each for each in model.graph.value_info if each.name in shapes)
        there = {each.name for each in model.graph.initializer}
        simpler.graph.initializer.extend(
            onnx.numpy_helper.from_array(value, name) for name, value in values.items() if name not in there
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
    found = {}
    for each in (*model.graph.value_info, *model.graph.output, *model.graph.input):
        kind = each.type.tensor_type
        if each.type.HasField("tensor_type") and kind.HasField("shape"):
            dims = kind.shape.dim
            if all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims):
                found[each.name] = tuple(dim.dim_value for dim in dims)
    return found


def _compute(
    onnx: Any, node: Any, values: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], opsets: list[Any]
) -> None:
    """Add the results of a node to the values, if they are small and all inputs are known."""
    import numpy
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Shape" and node.input[0] in shapes:
        ends = {each.name: each.i for each in node.attribute}
        shape = shapes[node.input[0]][slice(ends.get("start", 0), ends.get("end"))]
        values[node.output[0]] = numpy.array(shape, numpy.int64)
        return
    if node.op_type == "Constant":
        given = next((each.t for each in node.attribute if each.name == "value"), None)
        if given is not None and _elements(given.dims) > SMALL:
            return
    elif node.op_type not in COMPUTED or any(name and name not in values for name in node.input):
        return
    if node.op_type in SIZED_BY_VALUE and math.prod(map(int, values[node.input[SIZED_BY_VALUE[node.op_type]]])) > SMALL:
        return
    if node.op_type == "Range":
        first, limit, step = (float(values[name]) for name in node.input)
        if abs(limit - first) > SMALL * abs(step):
            return
    made = ReferenceEvaluator(node, opsets={each.domain: each.version for each in opsets}).run(
        None, {name: values[name] for name in node.input if name}
    )
    arrays = [numpy.asarray(each) for each in made]
    if all(each.size <= SMALL for each in arrays):
        values.update(zip(node.output, arrays, strict=True))


def _take_shapes(onnx: Any, model: Any, found: Any, values: Mapping[str, Any]) -> None:
    """Add inferred types and shapes to a model."""
    made = {name for node in model.graph.node for name in node.output}
    outputs = {each.name for each in model.graph.output}
    better = {each.name: each for each in (*found.graph.value_info, *found.graph.output) if each.name in made}
    for name, value in values.items():
        if name in made:
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            better[name] = onnx.helper.make_tensor_value_info(name, kind, value.shape)
    kept = [each for each in model.graph.value_info if each.name not in better]
    del model.graph.value_info[:]
    model.graph.value_info.extend([*kept, *(each for name, each in better.items() if name not in outputs)])
    for each in model.graph.output:
        if each.name in better:
            each.CopyFrom(better[each.name])
