"""Graphs of ONNX files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy
import pytest
from depth import deep

onnx = pytest.importorskip("onnx")

import xsp  # noqa: E402
from xsp.errors import GraphError, UsageError  # noqa: E402
from xsp.graph import NodeKind  # noqa: E402
from xsp.graph.node import Role  # noqa: E402

helper, FLOAT = onnx.helper, onnx.TensorProto.FLOAT

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
PUBLISHED = [
    deep("bvlc_alexnet", 24, 21), deep("densenet121", 910, 421), deep("inception_v1", 144, 109),
    deep("inception_v2", 509, 154), ("resnet50", 176, 57), deep("shufflenet", 203, 53), ("squeezenet", 66, 38),
    deep("vgg19", 46, 26), ("zfnet512", 22, 19),
]  # fmt: skip


def saved(path: Path, nodes, batch: object = 1, weights=((4, 3, 3, 3),), **options) -> Path:
    """Write a model that takes `x`, an image of 3×8×8, and weights `w0`, …; it returns `y`."""
    initializers = [
        onnx.numpy_helper.from_array(numpy.zeros(shape, numpy.float32), f"w{place}")
        for place, shape in enumerate(weights)
    ]
    given = [helper.make_tensor_value_info("x", FLOAT, [batch, 3, 8, 8])]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, made, initializers)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, **options), path)
    return path


CONV = helper.make_node("Conv", ["x", "w0"], ["c"], "conv", pads=[1, 1, 1, 1])
RELU = helper.make_node("Relu", ["c"], ["y"], "relu")


@pytest.mark.parametrize(("name", "nodes", "unique"), PUBLISHED)
def test_the_models_of_the_library_have_the_published_nodes(name: str, nodes: int, unique: int) -> None:
    path = LIGHT / f"light_{name}.onnx"
    if not path.is_file():
        pytest.skip("this onnx does not bring its light models")
    found = xsp.graph.of(path).measures()
    assert (found["nodes"], found["unique_all_nodes"]) == (nodes, unique)
    assert found["flops"] > 0
    assert found["bytes_unknown"] == 0


def test_a_node_has_its_attributes_with_the_defaults_of_its_version(tmp_path: Path) -> None:
    graph = xsp.graph.of(saved(tmp_path / "m.onnx", [CONV, RELU]))
    conv = graph.nodes[0]
    assert dict(conv.call.scalars) == {"auto_pad": "NOTSET", "group": 1, "pads": (1, 1, 1, 1)}
    assert conv.call.outputs[0].shape == (1, 4, 8, 8)
    assert graph.measures()["flops"] == 2 * 4 * 64 * 27
    assert graph.parameters == 4 * 27
    assert [each.role for each in graph.values] == [Role.INPUT, Role.WEIGHT, Role.ACTIVATION, Role.ACTIVATION]


def test_a_sparse_weight_has_the_shape_of_the_whole_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "s"], ["y"], "product")], weights=())
    model = onnx.load(path)
    values = onnx.numpy_helper.from_array(numpy.ones(3, numpy.float32), "s")
    places = onnx.numpy_helper.from_array(numpy.arange(3, dtype=numpy.int64), "places")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 5]))
    onnx.save(model, path)
    (product,) = xsp.graph.of(path).nodes
    assert product.call.inputs[1].shape == (8, 5)
    assert xsp.graph.of(path).measures()["flops"] == 2 * 3 * 8 * 8 * 5


def test_a_batch_with_a_name_is_one_unless_told_otherwise(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [CONV, RELU], batch="N")
    assert xsp.graph.of(path).settings["batch"] == 1
    assert xsp.graph.of(path, batch=7).nodes[1].call.outputs[0].shape == (7, 4, 8, 8)


def test_a_negative_size_is_an_unknown_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [CONV, RELU], batch=-1)
    assert xsp.graph.of(path).settings["batch"] == 1
    assert xsp.graph.of(path).nodes[1].call.outputs[0].shape == (1, 4, 8, 8)
    relu = helper.make_node("Relu", ["x"], ["y"])
    given, made = (helper.make_tensor_value_info(name, FLOAT, [2, -1]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph([relu], "g", [given], [made])), path)
    graph = xsp.graph.of(path)
    assert graph.measures()["bytes_unknown"] == 1
    assert any("dimension 1" in each.reason for each in graph.problems)


def test_a_batch_that_the_file_fixes_is_said(tmp_path: Path) -> None:
    shape = helper.make_node(
        "Constant", [], ["s"], value=helper.make_tensor("s", onnx.TensorProto.INT64, [2], [1, 192])
    )
    path = saved(tmp_path / "m.onnx", [shape, helper.make_node("Reshape", ["x", "s"], ["y"], "flat")])
    assert xsp.graph.of(path).nodes[0].kind is NodeKind.VIEW
    with pytest.raises(GraphError, match=r"Reshape flat fixes the batch .* omit --batch"):
        xsp.graph.of(path, batch=2)


def test_an_operator_that_nobody_knows_is_a_hole(tmp_path: Path) -> None:
    nodes = [helper.make_node("Secret", ["x"], ["c"], "it", domain="mine"), RELU]
    graph = xsp.graph.of(saved(tmp_path / "m.onnx", nodes))
    assert graph.nodes[0].kind is NodeKind.OPAQUE
    assert graph.nodes[0].call.op == "mine::Secret"
    found = graph.measures()
    assert (found["flops_unknown"], found["bytes"], found["bytes_unknown"]) == (1, None, 2)
    assert found["longest_path"] == 2
    assert [each.where for each in graph.problems] == ["shapes"]


def test_what_a_graph_inside_a_node_reads_is_known_and_what_it_does_is_a_hole(tmp_path: Path) -> None:
    branches = {
        name: helper.make_graph(
            [helper.make_node("Conv", ["c", "w1"], [f"{name}_out"])], name, [],
            [helper.make_tensor_value_info(f"{name}_out", FLOAT, [1, 4, 6, 6])],
        )
        for name in ("then_branch", "else_branch")
    }  # fmt: skip
    decides = helper.make_node("Constant", [], ["if"], value_int=1)
    path = saved(
        tmp_path / "m.onnx",
        [CONV, decides, helper.make_node("If", ["if"], ["y"], "either", **branches)],
        weights=[(4, 3, 3, 3), (4, 4, 3, 3)],
    )
    graph = xsp.graph.of(path)
    found = graph.measures()
    assert (found["edges"], found["longest_path"], found["parameters"]) == (1, 2, 4 * 3 * 9 + 4 * 4 * 9)
    assert (found["flops_unknown"], found["bytes_unknown"]) == (1, 1)
    assert [each.reason for each in graph.problems] == ["not analysed: If either"]


def test_a_dimension_with_a_name_is_a_hole(tmp_path: Path) -> None:
    made = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g",
                             [helper.make_tensor_value_info("x", FLOAT, ["N", "length"])],
                             [helper.make_tensor_value_info("y", FLOAT, ["N", "length"])])  # fmt: skip
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    graph = xsp.graph.of(tmp_path / "m.onnx", batch=2)
    assert "dimension 1 is length" in graph.problems[0].reason
    assert graph.measures()["bytes"] is None


def named(path: Path) -> Path:
    """Write a product of `x`, batch × tokens × 16, with weights."""
    weights = onnx.numpy_helper.from_array(numpy.ones((16, 8), numpy.float32), "w")
    given = [helper.make_tensor_value_info("x", FLOAT, ["n", "tokens", 16])]
    made = [helper.make_tensor_value_info("y", FLOAT, ["n", "tokens", 8])]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", given, made, [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_a_dimension_with_a_name_has_the_number_that_is_given(tmp_path: Path) -> None:
    path = named(tmp_path / "m.onnx")
    hole = xsp.graph.of(path)
    assert hole.measures()["flops"] is None
    assert any("set it with --size tokens=N" in each.reason for each in hole.problems)
    for sizes, batch, rows in (({"tokens": 5}, None, 5), ({"tokens": 5, "n": 3}, None, 15), ({"tokens": 5}, 2, 10)):
        graph = xsp.graph.of(path, sizes=sizes, batch=batch)
        assert graph.measures()["flops"] == 2 * rows * 16 * 8
        assert not graph.problems


def test_shapes_follow_from_values_that_the_library_does_not_compute(tmp_path: Path) -> None:
    """As exporters write `expand(batch, -1, -1)`: the shape goes through `Equal`, `Where` and `ConstantOfShape`."""

    def constant(name: str, *numbers: int):
        return onnx.numpy_helper.from_array(numpy.array(numbers, numpy.int64), name)

    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["all"]),
        node("Gather", ["all", "first"], ["batch"]),
        node("Concat", ["batch", "keep", "keep"], ["asked"], axis=0),
        node("Shape", ["asked"], ["length"]),
        node("ConstantOfShape", ["length"], ["ones"], value=constant("", 1)),
        node("Equal", ["asked", "keep"], ["is_kept"]),
        node("Where", ["is_kept", "ones", "asked"], ["shape"]),
        node("Expand", ["token", "shape"], ["tokens"]),
        node("Concat", ["tokens", "x"], ["y"], axis=1),
    ]
    token = onnx.numpy_helper.from_array(numpy.ones((1, 1, 16), numpy.float32), "token")
    given = [helper.make_tensor_value_info("x", FLOAT, ["n", "tokens", 16])]
    made = [helper.make_tensor_value_info("y", FLOAT, ["n", "more", 16])]
    graph = helper.make_graph(nodes, "g", given, made, [token, constant("first", 0), constant("keep", -1)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    found = xsp.graph.of(tmp_path / "m.onnx", sizes={"n": 3, "tokens": 7})
    assert len(found.nodes) == len(nodes)
    assert found.nodes[-1].call.outputs[0].shape == (3, 8, 16)
    assert found.measures()["bytes_unknown"] == 0
    assert not found.problems
    hole = xsp.graph.of(tmp_path / "m.onnx")
    assert hole.measures()["bytes_unknown"] > 0
    assert any(each.where == "shapes" for each in hole.problems)


def test_a_value_that_would_be_large_is_not_computed(tmp_path: Path) -> None:
    sizes = onnx.numpy_helper.from_array(numpy.array([1 << 40, 1 << 20], numpy.int64), "sizes")
    nodes = [helper.make_node("ConstantOfShape", ["sizes"], ["y"]), helper.make_node("Mystery", ["y"], ["z"])]
    made = [helper.make_tensor_value_info("z", FLOAT, None)]
    onnx.save(
        helper.make_model(
            helper.make_graph(nodes, "g", [], made, [sizes]), opset_imports=[helper.make_opsetid("", 17)]
        ),
        tmp_path / "m.onnx",
    )
    (only,) = xsp.graph.of(tmp_path / "m.onnx").nodes
    assert only.call.inputs[0].shape == (1 << 40, 1 << 20)


def test_a_size_for_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = named(tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="'sequence'; its names are: n, tokens"):
        xsp.graph.of(path, sizes={"sequence": 5})
    with pytest.raises(GraphError, match="cannot be -1"):
        xsp.graph.of(path, sizes={"tokens": -1})
    with pytest.raises(UsageError, match="no named dimensions"):
        xsp.graph.of("torchvision:resnet18", sizes={"tokens": 5})


def test_weights_that_are_missing_are_not_needed(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [CONV, RELU], weights=((400, 3, 3, 3),))
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    graph = xsp.graph.of(path)
    assert graph.nodes[0].call.outputs[0].shape == (1, 400, 8, 8)
    assert "weights.bin" in graph.problems[0].reason


def test_functions_are_in_place_of_their_calls(tmp_path: Path) -> None:
    body = [helper.make_node("Relu", ["a"], ["m"]), helper.make_node("Exp", ["m"], ["b"])]
    twice = helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    nodes = [helper.make_node("Twice", ["x"], ["c"], domain="mine"), RELU]
    graph = xsp.graph.of(saved(tmp_path / "m.onnx", nodes, functions=[twice]))
    assert [each.call.op for each in graph.nodes] == ["onnx::Relu", "onnx::Exp", "onnx::Relu"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an ONNX model"),
        (b"\x08\x09garbage", "damaged|not an ONNX"),
        (b"not a model at all", "damaged|not an ONNX"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=says) as caught:
        xsp.graph.of(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_breaks_off_anywhere_gives_one_error_or_a_graph(tmp_path: Path) -> None:
    whole = saved(tmp_path / "m.onnx", [CONV, RELU]).read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / "cut.onnx").write_bytes(whole[:end])
        with contextlib.suppress(GraphError):
            xsp.graph.of(tmp_path / "cut.onnx").measures()


def test_a_node_that_reads_what_nobody_made_is_damage(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="reads c, which no node makes"):
        xsp.graph.of(saved(tmp_path / "m.onnx", [RELU, CONV]))


@pytest.mark.parametrize(
    ("node", "weight", "says"),
    [
        (helper.make_node("Conv", ["x", "w0"], ["y"], "it"), (4, 3, 11, 11), "larger than its padded input"),
        (helper.make_node("Conv", ["x", "w0"], ["y"], "it"), (4, 3, 9, 9), "larger than its padded input"),
        (helper.make_node("Conv", ["x", "w0"], ["y"], "it"), (4, 5, 3, 3), "is for 5 channels, not 3"),
        (helper.make_node("Conv", ["x", "w0"], ["y"], "it", group=3), (6, 3, 3, 3), "is for 9 channels, not 3"),
        (helper.make_node("Conv", ["x", "w0"], ["y"], "it"), (4, 3, 3), "does not"),
        (helper.make_node("ConvTranspose", ["x", "w0"], ["y"], "it"), (5, 4, 3, 3), "is for 5 channels, not 3"),
        (helper.make_node("MaxPool", ["x"], ["y"], "it", kernel_shape=[11, 11]), (1,), "larger than its padded input"),
        (helper.make_node("MatMul", ["x", "w0"], ["y"], "it"), (7, 4), "Incompatible"),
        (helper.make_node("Add", ["x", "w0"], ["y"], "it"), (1, 3, 5, 8), "Incompatible"),
    ],
)
def test_an_operator_that_its_input_does_not_fit_is_a_hole_with_a_problem(
    tmp_path: Path, node: onnx.NodeProto, weight: tuple[int, ...], says: str
) -> None:
    graph = xsp.graph.of(saved(tmp_path / "m.onnx", [node], weights=(weight,)))
    assert graph.nodes[0].call.outputs[0].shape is None
    assert any(says in each.reason and "it" in f"{each.where} {each.reason}" for each in graph.problems)
    found = graph.measures()
    assert found["flops"] is None or node.op_type == "Add"  # FLOPs are those of products
    assert found["bytes_unknown"] == 1


def test_the_vocabulary_may_have_its_full_name(tmp_path: Path) -> None:
    dropout = helper.make_node("Dropout", ["c"], ["y"], "dropout")
    path = saved(tmp_path / "m.onnx", [CONV, dropout])
    model = onnx.load(path)
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, path)
    assert [each.kind for each in xsp.graph.of(path).nodes] == [NodeKind.COMPUTE, NodeKind.VIEW]


def test_a_file_that_nobody_may_read_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m.onnx", [CONV, RELU])

    def refused(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(GraphError, match=r"m\.onnx: cannot be read \(Permission denied\)"):
        xsp.graph.of(path)


def test_an_opset_that_the_library_does_not_know_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.onnx", [CONV, RELU])
    assert xsp.graph.of(path).problems == ()
    model = onnx.load(path)
    model.opset_import[0].version = 99
    onnx.save(model, path)
    assert [each.where for each in xsp.graph.of(path).problems] == ["opset 99"]


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Conv", [], ["y"], "it"),
        helper.make_node("Conv", ["x"], ["y"], "it"),
        helper.make_node("MaxPool", ["x"], [], "it", kernel_shape=[2, 2]),
    ],
)
def test_a_node_that_lacks_what_it_needs_is_a_hole_with_a_problem(tmp_path: Path, node: onnx.NodeProto) -> None:
    first = helper.make_node("Relu", ["x"], ["c"])
    graph = xsp.graph.of(saved(tmp_path / "m.onnx", [first, node]))
    assert graph.nodes[1].kind is NodeKind.OPAQUE
    assert any("lacks an input or its output" in each.reason for each in graph.problems)


def test_a_view_of_nothing_is_no_view(tmp_path: Path) -> None:
    node = helper.make_node("Reshape", ["", "w0"], ["y"], "it")
    (only,) = xsp.graph.of(saved(tmp_path / "m.onnx", [node])).nodes
    assert only.kind is NodeKind.COMPUTE


def test_attributes_of_a_file_that_does_not_state_their_types_are_told_apart(tmp_path: Path) -> None:
    nodes = [helper.make_node("LeakyRelu", ["x"], [name], alpha=alpha) for name, alpha in (("c", 0.5), ("y", 0.25))]
    for node in nodes:
        node.attribute[0].ClearField("type")
    one, other = xsp.graph.of(saved(tmp_path / "m.onnx", nodes)).nodes
    assert [dict(each.call.arguments)["alpha"] for each in (one, other)] == [0.5, 0.25]
    assert one.key != other.key


def test_a_batch_that_the_file_fixes_is_asked_for_if_no_other_was_given(tmp_path: Path) -> None:
    shape = onnx.numpy_helper.from_array(numpy.array([4, 192], numpy.int64), "s")
    given = [helper.make_tensor_value_info("x", FLOAT, ["n", 3, 8, 8])]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    model = helper.make_graph([helper.make_node("Reshape", ["x", "s"], ["y"], "flat")], "g", given, made, [shape])
    onnx.save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="give that one: --batch N"):
        xsp.graph.of(tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="give that one: --size"):
        xsp.graph.of(tmp_path / "m.onnx", sizes={"n": 3})
    assert xsp.graph.of(tmp_path / "m.onnx", batch=4).nodes[0].kind is NodeKind.VIEW


def test_two_numbers_for_one_dimension_and_numbers_beyond_a_file_are_refused(tmp_path: Path) -> None:
    path = named(tmp_path / "m.onnx")
    with pytest.raises(GraphError, match="--batch 2 and --size n=3 set one dimension"):
        xsp.graph.of(path, batch=2, sizes={"n": 3})
    assert xsp.graph.of(path, batch=3, sizes={"n": 3, "tokens": 5}).settings["batch"] == 3
    with pytest.raises(GraphError, match="dimension tokens cannot be 1000"):
        xsp.graph.of(path, sizes={"tokens": 10**20})
    with pytest.raises(GraphError, match="the batch cannot be 1000"):
        xsp.graph.of(path, batch=10**20)


def test_of_a_tensor_that_is_sliced_only_the_slice_is_read(tmp_path: Path) -> None:
    ends = [onnx.numpy_helper.from_array(numpy.array([each], numpy.int64), name) for each, name in ((0, "a"), (1, "b"))]
    axis = onnx.numpy_helper.from_array(numpy.array([1], numpy.int64), "axis")
    given = [helper.make_tensor_value_info("x", FLOAT, [1, 100, 8])]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    node = helper.make_node("Slice", ["x", "a", "b", "axis"], ["y"])
    graph = helper.make_graph([node], "g", given, made, [*ends, axis])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    assert xsp.graph.of(tmp_path / "m.onnx").measures()["bytes"] == 2 * 8 * 4 + 3 * 8


def test_matrices_of_quantised_layers_are_weights_and_zero_points_are_none(tmp_path: Path) -> None:
    held = {"w": numpy.zeros((16, 8), numpy.int8), "s": numpy.ones(8, numpy.float32), "z": numpy.zeros(8, numpy.int8)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    given = [helper.make_tensor_value_info("x", FLOAT, [2, 16])]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    constants = [onnx.numpy_helper.from_array(each, name) for name, each in held.items()]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    found = xsp.graph.of(tmp_path / "m.onnx")
    assert (found.parameters, found.measures()["weight_bytes"]) == (16 * 8 + 8, 16 * 8 + 8 * 4)


@pytest.mark.parametrize(
    ("shapes", "options", "flops"),
    [
        (([2, 4, 5, 8], [2, 4, 7, 8], [2, 4, 7, 6]), {}, 2 * 2 * 4 * 5 * 7 * (8 + 6)),
        (([2, 4, 5, 8], [2, 2, 7, 8], [2, 2, 7, 8]), {"is_causal": 1}, 2 * 2 * 4 * (1 + 2 + 3 + 4 + 5) * 16),
        (([2, 5, 32], [2, 7, 16], [2, 7, 12]), {"q_num_heads": 4, "kv_num_heads": 2}, 2 * 2 * 4 * 5 * 7 * (8 + 6)),
        (([2, 4, 5, 8], [2, 4, 7, 8], [2, 4, 7, 8], [2, 4, 3, 8], [2, 4, 3, 8]), {}, 2 * 2 * 4 * 5 * 10 * 16),
        (
            ([2, 4, 5, 8], [2, 4, 5, 8], [2, 4, 5, 8], [2, 4, 3, 8], [2, 4, 3, 8]),
            {"is_causal": 1},
            2 * 2 * 4 * (4 + 5 + 6 + 7 + 8) * 16,
        ),
    ],
)
def test_attention_counts_its_two_products_of_the_keys_that_a_causal_mask_leaves(
    tmp_path: Path, shapes: tuple[list[int], ...], options: dict[str, int], flops: int
) -> None:
    if onnx.defs.onnx_opset_version() < 23:
        pytest.skip("this onnx has no Attention")
    names = ["q", "k", "v", "pk", "pv"][: len(shapes)]
    inputs = names if len(names) == 3 else [*names[:3], "", *names[3:]]
    outputs = ["y"] if len(names) == 3 else ["y", "nk", "nv"]
    node = helper.make_node("Attention", inputs, outputs, "attention", **options)
    given = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in zip(names, shapes, strict=True)]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    model = helper.make_model(helper.make_graph([node], "g", given, made), opset_imports=[helper.make_opsetid("", 23)])
    onnx.save(model, tmp_path / "m.onnx")
    measures = xsp.graph.of(tmp_path / "m.onnx").measures()
    assert (measures["flops"], measures["flops_unknown"]) == (flops, 0)
