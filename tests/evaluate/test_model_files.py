"""Models that are files: programs of torch.export, and ONNX files by ONNX Runtime."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

torch = pytest.importorskip("torch")

from depth import deep  # noqa: E402
from evaluations import FACTS, show_nothing  # noqa: E402

from xsp.errors import ManifestError  # noqa: E402
from xsp.evaluate import conformance, predictors, reading, results, running, transports  # noqa: E402
from xsp.evaluate.agents import Options  # noqa: E402
from xsp.evaluate.manifest import Manifest  # noqa: E402

FILES = ("model.pt2", "model.onnx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in both forms, with a batch of any size, and its outputs to eight inputs."""
    made = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(32, 10),
    ).eval()  # fmt: skip
    given = torch.randn(2, 3, 16, 16)
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(model, (given,), dynamic_shapes=({0: batch},)), made / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (given,), made / "model.onnx", dynamo=False, input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "batch"}},
        )  # fmt: skip
    torch.save(model, made / "model.pt")
    return made


@pytest.fixture(params=FILES)
def source(request: pytest.FixtureRequest) -> str:
    if request.param.endswith(".onnx"):
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'xsp[onnxruntime]'")
    return str(request.param)


def asked(source: str, **of: Any) -> Manifest:
    model = {"name": "m", "source": source, **of.pop("model", {})}
    return reading.of_plain({
        "model": model, "dataset": {"samples": 4}, "scenario": {"requests": 3}, "software": {"threads": 1}, **of,
    }).manifest  # fmt: skip


def test_it_holds_the_contract(source: str, folder: Path) -> None:
    manifest = asked(source)
    conformance.check(predictors.of(manifest, trusted=False), manifest, folder)


@pytest.mark.slow
@pytest.mark.parametrize("source", [deep("model.pt2"), "model.onnx"], indirect=True)
def test_every_transport_gives_what_the_model_gives(source: str, folder: Path, tmp_path: Path) -> None:
    manifest = asked(source)
    options = Options(store=tmp_path)
    found = [
        results.read(agent.submit(manifest, folder, options, show_nothing)) for agent in transports.local_agents("all")
    ]
    assert [each.content["transport"] for each in found] == ["in-process", "own process"]
    assert len({each.content["outputs"]["digest"] for each in found}) == 1
    predictor = predictors.of(manifest, trusted=False)
    handle = predictor.open(manifest, folder, "")
    served = running._prepare(manifest, folder, options, predictor, handle, {}, 0)
    given = np.concatenate([served.batch(number, 1)[name] for number in range(4) for name in handle.takes])
    with torch.inference_mode():
        wanted = torch.load(folder / "model.pt", weights_only=False)(torch.from_numpy(given)).numpy()
    (made,) = found[0].outputs().values()
    np.testing.assert_allclose(made.reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


def test_batches_of_any_size_that_the_file_takes(source: str, folder: Path, tmp_path: Path) -> None:
    manifest = asked(source, scenario={"kind": "batched", "batches": [1, 3], "requests": 3})
    found = results.read(running.evaluate(manifest, folder, Options(tmp_path), FACTS, show_nothing))
    assert [part["batch"] for part in found.parts] == [1, 3]


@pytest.mark.parametrize("source", [deep("model.pt2"), "model.onnx"], indirect=True)
def test_a_batch_that_a_file_does_not_take_is_one_error(source: str, folder: Path, tmp_path: Path) -> None:
    model, given = torch.load(folder / "model.pt", weights_only=False), torch.randn(1, 3, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source.endswith(".onnx"):
            torch.onnx.export(model, (given,), tmp_path / source, dynamo=False)
        else:
            torch.export.save(torch.export.export(model, (given,)), tmp_path / source)
    manifest = asked(source, scenario={"kind": "batched", "batches": [1, 3], "requests": 3})
    with pytest.raises(ManifestError, match=r"model: raises \w+ on \[3, 3, 16, 16\]"):
        running.evaluate(manifest, tmp_path, Options(tmp_path / "store"), FACTS, show_nothing)


def test_a_file_that_is_damaged_gone_or_another_one_is_one_error(source: str, folder: Path, tmp_path: Path) -> None:
    def why(manifest: Manifest) -> str:
        with pytest.raises(ManifestError) as raised:
            running.evaluate(manifest, tmp_path, Options(tmp_path / "store"), FACTS, show_nothing)
        return str(raised.value)

    assert "there is no file" in why(asked(source))
    whole = (folder / source).read_bytes()
    (tmp_path / source).write_bytes(whole)
    other = "sha256:" + "0" * 64
    assert "has the checksum" in why(asked(source, model={"files": [{"path": source, "checksum": other}]}))
    for content in (b"", whole[: len(whole) // 2], b"\0" * 4096):
        (tmp_path / source).write_bytes(content)
        said = why(asked(source))
        assert said.startswith("model.source: "), said
        assert source in said
        assert "\n" not in said
    assert not list((tmp_path / "store").glob("*"))


def test_labels_and_lists_of_mappings_of_an_onnx_file_are_kept_as_text_and_numbers(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper = onnx.helper

    nodes = [
        helper.make_node("LabelEncoder", ["n"], ["label"], domain="ai.onnx.ml", keys_int64s=[0, 1],
                         values_strings=["cat", "cow"]),
        helper.make_node("ZipMap", ["x"], ["shares"], domain="ai.onnx.ml", classlabels_strings=["cat", "cow"]),
        helper.make_node("ArgMax", ["x"], ["n"], axis=1, keepdims=0),
    ]  # fmt: skip
    mapping = helper.make_map_type_proto(onnx.TensorProto.STRING, helper.make_tensor_type_proto(1, []))
    graph = helper.make_graph(
        [nodes[2], nodes[0], nodes[1]], "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("label", onnx.TensorProto.STRING, ["n"]),
         helper.make_value_info("shares", helper.make_sequence_type_proto(mapping))],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("ai.onnx.ml", 2)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    found = [
        results.read(running.evaluate(asked("model.onnx"), tmp_path, Options(tmp_path / "store"), FACTS, show_nothing))
        for _ in range(2)
    ]
    labels, shares = found[0].outputs().values()
    assert set(labels.ravel().tolist()) <= {"cat", "cow"}
    assert (labels.shape, shares.shape, shares.dtype.kind) == ((4, 1), (4, 1, 2), "f")
    assert found[0].content["outputs"]["digest"] == found[1].content["outputs"]["digest"]


def test_an_input_that_no_sample_is_made_of_is_one_error(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.STRING
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", kind, ["n", 2])], [helper.make_tensor_value_info("y", kind, ["n", 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ManifestError, match=r"its input x is tensor\(string\), which samples cannot have"):
        running.evaluate(asked("model.onnx"), tmp_path, Options(tmp_path / "store"), FACTS, show_nothing)
