"""Steps captured with the operators of a GPU, without one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from depth import deep  # noqa: E402
from test_captured import Attends  # noqa: E402
from torch import nn  # noqa: E402

import xsp  # noqa: E402
from xsp import cli  # noqa: E402
from xsp.errors import UsageError  # noqa: E402
from xsp.graph.ondevice import DeviceOperators  # noqa: E402


def operators(module: nn.Module, *args: torch.Tensor, **options: object) -> list[str]:
    graph = xsp.graph.of(module, *args, **options)
    return [node.call.op.removeprefix("aten::") for node in graph.computing]


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))


def test_training_has_the_operators_of_the_device_and_says_which() -> None:
    net, image = convolutional(), torch.ones(2, 3, 8, 8)
    on_processor, on_device = (operators(net, image, train=True, device=device) for device in (None, "cuda"))
    assert {"native_batch_norm", "native_batch_norm_backward", "add_"} <= {*on_processor}
    assert {"cudnn_batch_norm", "cudnn_batch_norm_backward", "native_dropout", "_foreach_add_"} <= {*on_device}
    assert not {"native_batch_norm", "native_batch_norm_backward", "bernoulli_"} & {*on_device}
    settings = xsp.graph.of(net, image, train=True, device="cuda:3").settings
    assert (settings["device"], settings["substitutions"]) == (
        "cuda",
        [
            "aten::_foreach_* for operators on each parameter", "aten::cudnn_batch_norm for aten::native_batch_norm",
            "aten::native_dropout for aten::bernoulli_",
        ],
    )  # fmt: skip
    assert "device" not in xsp.graph.of(net, image, train=True).settings


def test_a_prediction_has_the_same_operators_on_both() -> None:
    net, image = convolutional(), torch.ones(2, 3, 8, 8)
    assert operators(net, image) == operators(net, image, device="cuda")
    assert xsp.graph.of(net, image, device="cuda").settings["substitutions"] == []


@pytest.mark.parametrize(
    ("options", "dtype", "name"),
    [
        ({}, torch.float32, "efficient"), ({"mask": torch.bool}, torch.float32, "efficient"),
        ({"dropout_p": 0.1, "is_causal": True}, torch.float32, "efficient"), ({}, torch.bfloat16, "flash"),
        ({"mask": torch.bfloat16}, torch.bfloat16, "efficient"),
    ],
)  # fmt: skip
def test_attention_takes_the_back_end_of_the_device(options: dict, dtype: torch.dtype, name: str) -> None:
    found = operators(Attends(**options).to(dtype), torch.randn(2, 6, 32, dtype=dtype), train=True, device="cuda")
    both = [f"_scaled_dot_product_{name}_attention", f"_scaled_dot_product_{name}_attention_backward"]
    assert [each for each in found if "attention" in each] == both


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


def test_functions_that_torch_itself_calls_are_replaced_too() -> None:
    found = operators(Heads(), torch.randn(6, 2, 32), train=True, device="cuda")
    assert "_scaled_dot_product_efficient_attention" in found
    assert not {"_softmax", "_safe_softmax"} & {*found}


def test_torch_has_its_own_functions_afterwards_also_after_an_error() -> None:
    names = ("batch_norm", "dropout", "scaled_dot_product_attention")
    before = [getattr(nn.functional, name) for name in names]
    with pytest.raises(ValueError, match="more than 1 value per channel"), DeviceOperators("cuda"):
        nn.functional.batch_norm(torch.ones(1, 3), None, None, torch.ones(3), torch.ones(3), training=True)
    assert [getattr(nn.functional, name) for name in names] == before


def test_a_device_without_a_table_has_the_operators_of_the_processor_and_other_names_are_refused() -> None:
    net, image = convolutional(), torch.ones(2, 3, 8, 8)
    assert "native_batch_norm" in operators(net, image, train=True, device="hip")
    with pytest.raises(UsageError, match=r"--device H200: give one of cpu, cuda, hip"):
        xsp.graph.of(net, image, device="H200")
    with pytest.raises(UsageError, match=r"--device cuda:x: write cuda, or its number, too: cuda:0"):
        xsp.graph.of(net, image, device="cuda:x")
    with pytest.raises(UsageError, match=r"omit --device, or --by export"):
        xsp.graph.of(net, image, device="cuda", by="export")


def test_a_saved_graph_has_its_operators_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xsp.graph.of(convolutional(), torch.ones(2, 3, 8, 8)).save(tmp_path / "graph.json")
    assert cli.main(["graph", str(tmp_path / "graph.json"), "--device", "cuda"]) != 0
    assert "has a fixed step, which --device cannot change" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "batch"), [("torchvision:resnet18", 64), deep("transformers:gpt2", 4)]
)  # fmt: skip
def test_the_operators_of_a_training_step_are_those_of_the_device_in_order(
    model: str, batch: int, shared: Path
) -> None:
    path = shared / "gpu" / "traces" / f"{model.replace(':', '-')}-b{batch}-train.json.gz"
    if not path.exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    pytest.importorskip(model.partition(":")[0])
    with gzip.open(path) as file:
        spans = [span for span in json.load(file)["traceEvents"] if span.get("cat") == "cpu_op"]
    spans.sort(key=lambda span: (float(span["ts"]), -float(span["dur"])))
    graph = xsp.graph.of(model, batch=batch, train=True, device="cuda")
    # gradients are added in place, unless something else holds them, as what captures the step does
    seen = iter([span["name"].replace("aten::add_", "aten::add") for span in spans])
    planned = [node.call.op.replace("aten::add_", "aten::add") for node in graph.computing]
    missing = [op for op in planned if op not in seen]  # `in` consumes what precedes it, so this compares the order
    assert missing == []


def test_a_gpu_of_amd_keeps_the_batch_norm_that_a_trace_of_one_has(shared: Path) -> None:
    path = shared / "traces" / "kineto_amd" / "tracelens_mi300x_resnet_ddp_rank0of8.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} does not lie in ../shared")
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"}
    norms = {name for name in names if str(name).startswith(("aten::native_batch_norm", "aten::miopen_batch_norm"))}
    assert norms == {"aten::native_batch_norm", "aten::native_batch_norm_backward"}
    captured = operators(convolutional(), torch.ones(2, 3, 8, 8), train=True, device="hip")
    assert {f"aten::{op}" for op in captured if "batch_norm" in op} == norms


def test_a_graph_without_a_device_says_whose_operators_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import standin

    (tmp_path / "nets.py").write_text(
        "import torch\n\ndef net(batch):\n    return torch.nn.Linear(4, 4), torch.ones(batch, 4)\n"
    )
    command = ["graph", f"{tmp_path / 'nets.py'}:net"]
    note = "the operators are those of the processor, not of Stand-in 1: --device standin"
    standin.install(tmp_path / "site", monkeypatch)
    for words, count, is_said in ([], 2, True), (["--device", "standin"], 2, False), ([], 0, False):
        monkeypatch.setenv(standin.VARIABLE, json.dumps({"count": count}))
        assert cli.main([*command, *words]) == 0
        assert (note in capsys.readouterr().err) is is_said
