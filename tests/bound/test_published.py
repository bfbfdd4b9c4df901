"""The published bounds of Benanza, from its figures of layers and the graphs of the same models."""

from __future__ import annotations

import csv
import functools
from collections import Counter
from pathlib import Path

import pytest
from depth import deep

onnx = pytest.importorskip("onnx")

import xsp  # noqa: E402
from xsp.bound.totals import Figure, total  # noqa: E402
from xsp.graph import Graph  # noqa: E402

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
GPU = "Tesla_V100-SXM2-16GB"
NAMES = {
    "densenet121": "DenseNet-121", "inception_v1": "Inception-v1", "inception_v2": "Inception-v2",
    "zfnet512": "Zfnet512",
}  # fmt: skip
PREFIXES = {
    "Conv": "conv", "BatchNormalization": "batchnormalization", "Mul": "mul", "Add": "add", "Relu": "relu",
    "MaxPool": "maxpool", "AveragePool": "averagepool", "Gemm": "gemm", "Softmax": "softmax", "Dropout": "dropout",
}  # fmt: skip
"""Types that were benchmarked; the others (Concat, LRN, Reshape, Unsqueeze) are in no published total."""


def rows(path: Path, **wanted: str) -> list[dict[str, str]]:
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    with path.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[name] == value for name, value in wanted.items())]


@functools.cache
def graph_of(path: Path) -> Graph:
    """Return the graph of a file, of which several batches are asked."""
    return xsp.graph.of(path)


def published(shared: Path, model: str, batch: int) -> tuple[Graph, list[Figure | None], list[bool], dict[str, str]]:
    """Return a graph, the figures of its nodes, which nodes were benchmarked, and the row of totals."""
    path = LIGHT / f"light_{model}.onnx"
    if not path.is_file():
        pytest.skip("this onnx does not bring its light models")
    figures = {
        row["layer"]: Figure(float(row["us"]) * 1e3)
        for row in rows(shared / "golden" / "benanza_layers_v100.csv", onnx_light_model=path.stem, batch=str(batch))
    }
    (row,) = rows(shared / "golden" / "benanza_totals.csv", gpu=GPU, batch=str(batch), model=NAMES[model])
    graph = graph_of(path)
    turns: Counter[str] = Counter()
    names = []
    for node in graph.nodes:
        prefix = PREFIXES.get(node.call.op.removeprefix("onnx::"))
        turns[prefix or ""] += 1
        names.append(prefix and f"{prefix}_{turns[prefix]}")
    return graph, [figures.get(name or "") for name in names], [name is not None for name in names], row


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("model", [deep("densenet121"), "inception_v2", "zfnet512"])
def test_complete_models_have_the_published_bounds(shared: Path, model: str, batch: int) -> None:
    graph, figures, counted, row = published(shared, model, batch)
    found = total(graph, figures, counted, [None] * len(figures), cores=1)
    assert found.coverage.is_complete
    assert found.coverage.nodes == int(row["benchmarkable"])
    assert found.sequential == pytest.approx(float(row["sequential_ms"]) * 1e6, rel=0.001)
    assert found.parallel == pytest.approx(float(row["parallel_ms"]) * 1e6, rel=0.007)
    assert found.parallel <= found.sequential  # which the published figures are not


@pytest.mark.parametrize("batch", [1, 32])
def test_a_model_with_holes_has_no_total_and_names_them(shared: Path, batch: int) -> None:
    graph, figures, counted, _ = published(shared, "inception_v1", batch)
    found = total(graph, figures, counted, [None] * len(figures), cores=1)
    holes = [
        node.call.op for node, figure, counts in zip(graph.nodes, figures, counted, strict=True)
        if counts and figure is None
    ]  # fmt: skip
    assert found.coverage.of_nodes - found.coverage.nodes == len(holes) > 0
    assert sorted(holes) == ["onnx::AveragePool", "onnx::Conv"]
    assert found.is_lower_limit
