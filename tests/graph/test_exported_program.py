"""Graphs of programs of torch.export agree with captured ones."""

from __future__ import annotations

import re
import zipfile
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.errors import GraphError, UsageError  # noqa: E402

nn = torch.nn


class Net(nn.Module):
    """A constant that is made on a device, a change in place, a view, an attention, and a cast, which exports check."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        y = self.norm(self.first(x)) + torch.arange(4, device=x.device)
        y.add_(self.shift)
        z = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])
        return {"a": self.last(z).view(-1).float()}


def keys_of(graph) -> Counter:
    return Counter((each.key, each.kind, each.module) for each in graph.nodes)


@pytest.fixture(scope="module")
def program():
    return torch.export.export(Net().eval(), (torch.zeros(2, 4),))


def test_a_program_has_the_calls_and_edges_of_the_captured_step(program, tmp_path) -> None:
    torch.export.save(program, tmp_path / "net.pt2")
    read, captured = xsp.graph.of(tmp_path / "net.pt2"), xsp.graph.of(Net(), torch.zeros(2, 4))
    assert read.source.value == "program"
    assert keys_of(read) == keys_of(captured)
    assert [(each.before, each.after, each.kind) for each in read.edges] == [
        (each.before, each.after, each.kind) for each in captured.edges
    ]
    same = ("flops", "bytes", "parameters", "longest_path", "diameter", "input_elements")
    assert {key: read.measures()[key] for key in same} == {key: captured.measures()[key] for key in same}
    assert xsp.graph.of(program).nodes == read.nodes


def test_a_program_takes_no_other_batch_and_is_no_training_step(program) -> None:
    with pytest.raises(UsageError, match="ExportedProgram has a fixed step, which --batch, --train"):
        xsp.graph.of(program, batch=2, train=True)


def test_what_torch_logged_is_the_reason(program, tmp_path) -> None:
    torch.export.save(program, tmp_path / "net.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as whole, zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        for name in whole.namelist():
            other.writestr(name, whole.read(name).replace(b"aten.linear.", b"aten.linearest."))
    with pytest.raises(GraphError, match=r"torch\.ops\.aten\.linearest"):
        xsp.graph.of(tmp_path / "other.pt2")


@pytest.mark.slow
def test_a_size_that_may_vary_is_that_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    made = torch.export.export(nn.Linear(4, 3), (torch.zeros(6, 4),), dynamic_shapes=({0: batch},))
    assert xsp.graph.of(made).nodes[0].call.outputs[0].shape == (6, 3)


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"", b"PK\x03\x04" + b"x" * 999])
def test_what_is_no_archive_is_one_line(tmp_path, content, capfd) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"not a program of torch\.export, which is a zip archive") as caught:
        xsp.graph.of(path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


def test_a_program_that_breaks_off_or_is_of_another_torch_is_one_line(program, tmp_path) -> None:
    torch.export.save(program, tmp_path / "net.pt2")
    (tmp_path / "half.pt2").write_bytes((content := (tmp_path / "net.pt2").read_bytes())[: len(content) // 2])
    with pytest.raises(GraphError, match="or an incomplete one"):
        xsp.graph.of(tmp_path / "half.pt2")
    with zipfile.ZipFile(tmp_path / "net.pt2") as whole, zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        for name in whole.namelist():
            other.writestr(name, re.sub(rb'"major": *[0-9]+', b'"major": 99', whole.read(name)))
    with pytest.raises(GraphError, match=r"cannot read this program .*99"):
        xsp.graph.of(tmp_path / "other.pt2")
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt2")
    with pytest.raises(GraphError, match=r"a file of torch\.save cannot be read"):
        xsp.graph.of(tmp_path / "weights.pt2")


def test_a_module_and_a_model_are_exported_on_request_and_agree_with_the_captured_step(tmp_path) -> None:
    module = Net().train()
    exported = xsp.graph.of(module, torch.zeros(2, 4), by="export", batch=2)
    assert (exported.source.value, exported.settings["rung"], exported.settings["batch"]) == (
        "program", "exported on meta", 2,
    )  # fmt: skip
    assert keys_of(exported) == keys_of(xsp.graph.of(module, torch.zeros(2, 4)))
    assert module.training
    (tmp_path / "net.py").write_text(
        "from torch import nn, ones\ndef net(n):\n    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), ones(n, 4)\n"
    )
    name = f"{tmp_path}/net.py:net"
    assert keys_of(xsp.graph.of(name, batch=3, by="export")) == keys_of(xsp.graph.of(name, batch=3))


def test_what_cannot_be_exported_is_one_error_and_nothing_is_printed(capfd) -> None:
    class Looks(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(
        GraphError, match=r"Looks cannot be exported \(exported on meta: .*; on the CPU: .*data-dependent"
    ):
        xsp.graph.of(Looks(), torch.zeros(2, 4), by="export")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(GraphError, match="no training steps"):
        xsp.graph.of(Net(), torch.zeros(2, 4), by="export", train=True)
    with pytest.raises(UsageError, match="there are capture, export"):
        xsp.graph.of(Net(), torch.zeros(2, 4), by="dynamo")


def test_weights_that_are_tied_count_once_in_a_program(tmp_path) -> None:
    module = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)).eval()
    module[1].weight = module[0].weight
    program = torch.export.export(module, (torch.zeros(2, 3, dtype=torch.long),))
    torch.export.save(program, tmp_path / "tied.pt2")
    for graph in (xsp.graph.of(program), xsp.graph.of(tmp_path / "tied.pt2")):
        assert (graph.parameters, graph.measures()["weight_bytes"]) == (60, 240)
