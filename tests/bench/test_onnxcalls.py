"""Nodes of ONNX, timed by ONNX Runtime: what they compute with is made up so that shapes come out as in the graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'xsp[onnxruntime]'")
pytest.importorskip("torch")

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from xsp import bench, graph
from xsp.bench import plan, variants
from xsp.bench.inputs import NotTimeable
from xsp.bench.spec import CacheState, Spec
from xsp.errors import BenchError
from xsp.graph.node import Graph

F, WHOLE = TensorProto.FLOAT, TensorProto.INT64


def model(
    folder: Path,
    *nodes: onnx.NodeProto,
    given: dict[str, list[int]],
    constants: dict[str, np.ndarray] | None = None,
    made: str = "y",
    kinds: dict[str, int] | None = None,
    opset: int = 17,
) -> Graph:
    """Return the graph of an ONNX file with these nodes."""
    kinds = kinds or {}
    inputs = [helper.make_tensor_value_info(name, kinds.get(name, F), shape) for name, shape in given.items()]
    output = helper.make_tensor_value_info(made, kinds.get(made, F), None)
    held = [numpy_helper.from_array(each, name) for name, each in (constants or {}).items()]
    whole = helper.make_graph(list(nodes), "g", inputs, [output], initializer=held)
    path = folder / "m.onnx"
    onnx.save(helper.make_model(whole, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return graph.of(path)


def spec_of(found: Graph, **others: object) -> Spec:
    """Return the first computing node as a spec of the runtime."""
    ((spec, _), *_) = bench.specs(found, threads=1, runtime=plan.runtime_of(found))
    return dataclasses.replace(spec, **others)  # type: ignore[arg-type]


def run(spec: Spec) -> variants.Prepared:
    """Return a spec that was run once; its outputs have the shapes of the graph, or it is not timed."""
    prepared, error = variants.prepare(spec, 1 << 20, 1 << 30)
    assert error is None
    for given in prepared.arguments(3):
        prepared.function(*given)
    return prepared


def test_a_convolution_is_run_with_weights_that_take_turns(tmp_path: Path) -> None:
    weights = {"w": np.ones((8, 3, 3, 3), np.float32), "b": np.ones(8, np.float32)}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1])
    found = model(tmp_path, node, given={"x": [1, 3, 16, 16]}, constants=weights)
    warm = run(spec_of(found, state=CacheState.WARM))
    chain = run(spec_of(found, state=CacheState.CHAIN))
    assert (len(warm.sets), len(chain.sets)) == (1, 16)
    assert (warm.notes, "weights rotate through" in chain.notes) == ("", True)


SIZED = {
    "Slice": ({"x": [4, 6]}, {"starts": [1], "ends": [3], "axes": [1]}, {}),
    "Pad": ({"x": [4, 6]}, {"pads": [1, 0, 0, 2]}, {}),
    "Tile": ({"x": [4, 6]}, {"repeats": [2, 1]}, {}),
    "Expand": ({"x": [4, 1]}, {"shape": [3, 4, 6]}, {}),
    "TopK": ({"x": [4, 6]}, {"k": [2]}, {}),
    "Split": ({"x": [4, 6]}, {"split": [2, 4]}, {"axis": 1}),
    "ReduceSum": ({"x": [4, 6, 6]}, {"axes": [1]}, {"keepdims": 0}),
    "Gather": ({"x": [4, 6]}, {"at": [3, 0, 5]}, {"axis": 1}),
}


@pytest.mark.parametrize("op", SIZED)
def test_what_a_node_takes_as_sizes_follows_from_its_shapes(op: str, tmp_path: Path) -> None:
    given, constants, attributes = SIZED[op]
    outputs = ["y", "z"] if op in ("TopK", "Split") else ["y"]
    node = helper.make_node(op, [*given, *constants], outputs, **attributes)
    arrays = {name: np.array(each, np.int64) for name, each in constants.items()}
    prepared = run(spec_of(model(tmp_path, node, given=given, constants=arrays)))
    assert prepared.notes == ""


def test_resize_by_scales_and_layer_norm_in_parts_are_run(tmp_path: Path) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="nearest")
    run(spec_of(model(tmp_path, node, given={"x": [1, 2, 4, 4]}, constants={"s": np.array([1, 1, 2, 2], np.float32)})))
    for op, constants in (("Pow", {"two": np.array(2, np.float32)}), ("Sqrt", {}), ("Log", {})):
        node = helper.make_node(op, ["x", *constants], ["y"])
        run(spec_of(model(tmp_path, node, given={"x": [4, 4]}, constants=constants)))


def test_a_block_of_several_nodes_is_one_model(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "s"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Add", ["c", "c"], ["y"]),
    ]
    constants = {"w": np.ones((6, 8), np.float32), "s": np.array([2, 16], np.int64)}
    found = model(tmp_path, *nodes, given={"x": [4, 6]}, constants=constants)
    ((spec, _),) = bench.specs(found, threads=1, granularity=3, runtime="onnxruntime")
    assert spec.block.op == "onnx::MatMul+onnx::Reshape+onnx::Relu+onnx::Add"
    run(spec)


def refused(spec: Spec) -> str:
    with pytest.raises(NotTimeable) as said:
        variants.prepare(spec, 1 << 20, 1 << 30)
    return str(said.value)


def test_what_cannot_be_run_says_why(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchNode", ["x"], ["y"], domain="mine")
    whole = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", F, [2])], [helper.make_tensor_value_info("y", F, [2])]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(whole, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    assert "ONNX Runtime does not run it" in refused(spec_of(graph.of(tmp_path / "m.onnx")))
    node = helper.make_node("Add", ["w", "w"], ["a"])
    rest = helper.make_node("Add", ["x", "a"], ["y"])
    found = model(tmp_path, node, rest, given={"x": [2]}, constants={"w": np.ones(2, np.float32)})
    assert "all its inputs are constants" in refused(spec_of(found))
    node = helper.make_node("NonZero", ["x"], ["y"])
    assert "not known" in refused(spec_of(model(tmp_path, node, given={"x": [4]}, kinds={"y": WHOLE})))


def test_a_node_that_is_too_large_is_not_tried(tmp_path: Path) -> None:
    found = model(tmp_path, helper.make_node("Relu", ["x"], ["y"]), given={"x": [1 << 20]})
    with pytest.raises(MemoryError, match="its tensors take 8 MiB of 1 MiB allowed"):
        variants.prepare(spec_of(found), 1 << 20, 1 << 20)


def test_without_the_library_it_is_one_error_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model(tmp_path, helper.make_node("Relu", ["x"], ["y"]), given={"x": [4]})
    monkeypatch.setattr(plan, "has_onnx_runtime", lambda: False)
    with pytest.raises(BenchError, match="pip install"):
        bench.fill([spec_of(found)], bench.Timings.open(tmp_path / "t"), 60)
    assert not (tmp_path / "t").exists()
