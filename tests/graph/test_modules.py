"""The table of modules, and the memory of a step by part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp import models, terminal
from xsp.cli import main
from xsp.errors import ModelError, XspError
from xsp.graph import captured, files, memory, moduletable, section
from xsp.graph.node import Graph
from xsp.models import Settings

torch = pytest.importorskip("torch")
nn = torch.nn


class Shared(nn.Module):
    """Two layers with one weight, a list of layers, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)])
        self.idle = nn.Linear(3, 5)

    def forward(self, x: Any) -> Any:
        x = self.second(self.first(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        return x


def of(module: Any, *shape: int, train: bool = False) -> Graph:
    return xsp.graph.of(module, torch.zeros(*shape), train=train, batch=shape[0])


def test_each_module_has_its_parameters_operations_and_output() -> None:
    rows = {row.module.path: row for row in moduletable.rows(of(Shared(), 2, 8))}
    assert list(rows) == ["", "first", "second", "layers", "layers.0", "layers.0.0", "layers.0.1", "layers.1", "idle"]
    parameters = {path: row.module.parameters for path, row in rows.items()}
    assert parameters["first"] == parameters["second"] == 72
    assert parameters[""] == 64 + 8 + 8 + 8 * 16 + 16 + 16 * 4 + 4 + 20
    assert parameters["layers"] == parameters["layers.0"] + parameters["layers.1"]
    assert rows["first"].flops.known == 2 * 2 * (2 * 8 * 8), "it is called twice"
    assert rows[""].flops.known == 2 * 2 * (3 * 64 + 8 * 16 + 16 * 4)
    assert rows["layers.0"].module.outputs[0].shape == (2, 16)
    assert (rows["layers"].module.outputs, rows["idle"].module.outputs) == ((), ())
    assert [rows[path].module.kind for path in ("", "layers", "layers.0.1")] == ["Shared", "ModuleList", "ReLU"]
    assert rows["idle"].calls == 0


def test_rows_add_up_in_training_and_survive_a_file(tmp_path: Path) -> None:
    graph = of(Shared(), 2, 8, train=True)
    rows = {row.module.path: row for row in moduletable.rows(graph)}
    found = graph.measures()
    assert rows[""].flops.known == found["flops"]
    children = [row for path, row in rows.items() if path and "." not in path]
    assert sum(row.flops.known or 0 for row in children) == found["flops"], "each product belongs to a module"
    graph.save(tmp_path / "g.json")
    assert xsp.graph.load(tmp_path / "g.json") == graph
    assert files.from_plain(json.loads(json.dumps(files.to_plain(graph)))) == graph


def test_the_page_shows_as_many_levels_as_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of(Shared(), 2, 8).save(tmp_path / "g.json")
    pages = {}
    for levels in (0, 1, 3):
        assert main(["graph", str(tmp_path / "g.json"), "--depth", str(levels)]) == 0
        pages[levels] = capsys.readouterr().out
    assert "parameters" not in pages[0].rpartition("operator")[2]
    assert re.search(r"first +Linear", pages[1])
    assert "layers.0" not in pages[1]
    assert "4 more modules in these; --depth N shows N levels" in pages[1]
    assert re.search(r"layers.[0-9.]+ +ReLU", pages[3])
    assert max(map(len, pages[3].splitlines())) <= 81
    assert main(["graph", str(tmp_path / "g.json"), "--format", "json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["module"] for row in content["modules"]][:3] == ["", "first", "second"]
    assert content["modules"][1]["output_shapes"] == [[2, 8]]
    assert content["memory"]["parameters_bytes"] == 4 * content["parameters"]


def test_a_source_without_modules_has_no_table_and_one_with_paths_alone_derives_it() -> None:
    import dataclasses

    graph = of(Shared(), 2, 8)
    derived = {row.module.path: row for row in moduletable.rows(dataclasses.replace(graph, modules=()))}
    rows = {row.module.path: row for row in moduletable.rows(graph)}
    assert derived["layers.0"].flops == rows["layers.0"].flops
    assert derived["layers.0"].module.parameters == rows["layers.0"].module.parameters
    assert "idle" not in derived
    plain = dataclasses.replace(
        graph, modules=(), nodes=tuple(dataclasses.replace(node, module="") for node in graph.nodes)
    )
    assert moduletable.rows(plain) == []
    assert "output" not in terminal.page(section.section(plain, 2))


# --- memory -------------------------------------------------------------------------------------------


def test_memory_of_a_training_step_by_hand() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    found = memory.of(of(Chain(), 256, 64, train=True))
    assert found is not None
    weights, one = 4 * 64 * 64 * 4, 256 * 64 * 4
    assert found.parts["parameters"] == found.parts["optimizer"] == weights
    assert found.parts["inputs"] == one
    assert found.parts["gradients"] in range(0, weights + 1, 64 * 64 * 4)
    # each relu is kept for its own and the next layer's gradient; then the loss, and gradients of one layer
    assert 4 * one <= found.parts["activations"] <= 9 * one
    assert found.bytes == sum(found.parts.values())


def test_a_reference_that_a_program_keeps_keeps_memory() -> None:
    class Keeps(nn.Module):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.keeps = keeps

        def forward(self, x: Any) -> Any:
            kept = []
            for _ in range(10):
                x = torch.relu(x)
                kept += [x] if self.keeps else []
            return x

    one = 100 * 100 * 4
    few, many = (memory.of(of(Keeps(keeps), 100, 100)) for keeps in (False, True))
    assert few is not None
    assert many is not None
    assert few.parts["activations"] == 2 * one
    assert many.parts["activations"] == 10 * one


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["torchvision:resnet18", "torchvision:mobilenet_v2", "timm:convnext_atto"])
def test_the_memory_of_a_training_step_is_the_measured_one(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(spec.partition(":")[0])
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import graph_memory

    settings = Settings(batch=4, train=True)
    predicted = memory.of(captured.of_name(spec, settings))
    assert predicted is not None
    measured = graph_memory.measured_bytes(spec, settings)
    assert predicted.bytes == pytest.approx(measured, rel=0.15)


# --- a batch of one -----------------------------------------------------------------------------------


def test_what_cannot_be_trained_at_batch_one_is_told_a_larger_batch(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def pooled(batch):\n"
        "    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(4)\n"
        "    return torch.nn.Sequential(*layers), torch.randn(batch, 3, 8, 8)\n"
        "class Pairs(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) < 2:\n"
        "            raise RuntimeError('no pair')\n"
        "        return super().forward(x)\n"
        "def pairs(batch):\n"
        "    return Pairs(3, 4), torch.randn(batch, 3)\n"
    )
    with pytest.raises(XspError, match="give --batch 2"):
        xsp.graph.of(f"{path}:pooled", train=True)
    with pytest.raises(ModelError, match=r"more than 1 value per channel.*give --batch 2"):
        models.load(f"{path}:pooled", Settings(train=True))
    with pytest.raises(XspError, match=r"no pair.*give --batch 2"):
        xsp.graph.of(f"{path}:pairs", train=True)
    for name in ("pooled", "pairs"):
        assert xsp.graph.of(f"{path}:{name}", train=True, batch=2).measures()["flops"] > 0
