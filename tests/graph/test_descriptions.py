"""Graphs of runs: what a step that describes tells gives the keys, operations and bytes of a captured step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import deep

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp import testing  # noqa: E402
from xsp.bound import timed  # noqa: E402
from xsp.graph import Graph, NodeKind, descriptions, keys  # noqa: E402
from xsp.graph.node import Tensor  # noqa: E402

nn = torch.nn
F = nn.functional


class Words(nn.Module):
    """Embedding, attention without its fused operator, and a number that stands for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.norm, self.act = (
            nn.Embedding(50, 16),
            nn.Linear(16, 48),
            nn.LayerNorm(16),
            nn.GELU("tanh"),
        )

    def forward(self, tokens: Any) -> Any:
        x = self.norm(self.table(tokens))
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * 0.25).masked_fill(q[..., :1] > 0, float("-inf")).softmax(-1)
        return self.act(torch.cat([weights @ v, x], -1))


class Recurrent(nn.Module):
    """A recurrent operator, and a reshaped copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0].transpose(0, 1).reshape(-1, 12))


CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=8),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4), nn.Dropout(0.5),
)  # fmt: skip
MODELS = {
    "perceptron": (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(-1)), torch.randn(5, 8)),
    "convolutions": (CONVOLUTIONS, torch.randn(2, 3, 17, 17)),
    "strides": (nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(8, 3).t()),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(4, 2, 2), nn.Upsample(scale_factor=2), nn.PReLU()),
        torch.randn(1, 4, 5, 5),
    ),
    "words": (Words(), torch.randint(0, 50, (2, 7))),
    "recurrent": (Recurrent(), torch.randn(2, 5, 8)),
    "half precision": (nn.Sequential(nn.Linear(8, 16), nn.SiLU()).bfloat16(), torch.randn(3, 8).bfloat16()),
}


DIFFERING = {
    "words": {"aten::mul", "aten::matmul"},
    "recurrent": {"aten::lstm"},
}
"""Whose blocks a run does not tell: a number that became a tensor, inputs in one storage, lists of weights."""


def differing_blocks(captured: Graph, seen: Graph) -> set[str]:
    """Return the operators whose timings of the one graph would not be found for the other."""
    blocks = [
        Counter((each.block.op, each.key) for each in timed.specs_of(graph, 1) if each is not None)
        for graph in (captured, seen)
    ]
    return {op for op, _ in (blocks[0] - blocks[1]) | (blocks[1] - blocks[0])}


def recorded(folder: Path, step: Any) -> Graph:
    """Return the graph of a run of a step."""
    with xsp.profile(out=str(folder), levels="M/L/G", warmup=1, settle=0, samples=False) as profile:
        for _ in range(10):
            with profile.step():
                step()
    return xsp.graph.of(xsp.load(folder))


def of_key(graph: Graph, *, work: bool = False) -> Counter[str]:
    return Counter(keys.work_key(each.call) if work else each.key for each in graph.nodes)


def figures(graph: Graph) -> list[Any]:
    found = graph.measures()
    return [found[name] for name in ("nodes", "computing", "unique_work", "flops", "opaque", "random")]


@pytest.mark.slow
@pytest.mark.parametrize("name", [each if each in ("convolutions", "words") else deep(each) for each in MODELS])
def test_a_run_has_the_calls_of_the_captured_step(name: str, tmp_path: Path) -> None:
    model, given = MODELS[name]
    model.eval()

    def step() -> None:
        with torch.inference_mode():
            model(given)

    seen, captured = recorded(tmp_path / "run", step), xsp.graph.of(model, given)
    assert of_key(seen, work=True) == of_key(captured, work=True)
    assert figures(seen) == figures(captured)
    assert [(each.call.op, each.kind, each.call.outputs) for each in seen.nodes] == [
        (each.call.op, each.kind, each.call.outputs) for each in captured.nodes
    ]
    assert [each.module for each in seen.nodes] == [each.module for each in captured.nodes]
    other = of_key(captured) - of_key(seen)
    named = [each.call.op for each in captured.nodes if each.key in other]
    assert named == (["aten::mul"] if name == "words" else [])  # by 0.25, of which a trace tells the type
    more = 8 if name == "words" else 0  # the number is a tensor there
    assert seen.measures()["bytes"] == captured.measures()["bytes"] + more
    assert differing_blocks(captured, seen) == DIFFERING.get(name, set())


@pytest.mark.slow
def test_a_recorded_training_step_has_the_calls_below_composite_operators(tmp_path: Path) -> None:
    model, given = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    seen = recorded(tmp_path / "run", step)
    captured = xsp.graph.of(model, given, train=True)
    left, more = (
        of_key(captured, work=True) - of_key(seen, work=True),
        of_key(seen, work=True) - of_key(captured, work=True),
    )
    differing = {each.call.op for each in (*captured.nodes, *seen.nodes) if keys.work_key(each.call) in left | more}
    # the dispatcher sees results being detached to be kept for backward, which the profiler does not
    assert differing <= {"aten::detach"}
    assert {"aten::addmm", "aten::mm", "aten::add_"} <= {each.call.op for each in seen.nodes}
    assert "aten::linear" not in {each.call.op for each in seen.nodes}
    assert seen.measures()["flops"] == captured.measures()["flops"]


def attributes(**said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


def node(op: str, shapes: str, **said: Any) -> tuple[Any, Graph]:
    step = f"step s 0-100\n  forward Net 5-60\n    op {op} 20-40 input_shapes={shapes} attributes={attributes(**said)}"
    graph = xsp.graph.of(testing.trace_of(testing.spans(step)))
    return graph.nodes[0], graph


def test_a_text_that_is_not_told_keeps_the_key_apart_and_is_named() -> None:
    gelu, graph = node("aten::gelu", "[[2,3],[]]", overload="", input_dtypes=["float", ""])
    assert dict(gelu.call.arguments)["approximate"] == descriptions.UNKNOWN
    assert gelu.call.outputs == (Tensor("float32", (2, 3)),)
    assert graph.problems[-1].reason == "a trace does not tell approximate, so the keys of 1 calls are their own"


@pytest.mark.parametrize(
    ("op", "shapes", "said"),
    [
        ("aten::einsum", "[[],[[2,3],[3,4]],[]]", {"overload": "", "input_dtypes": ["", ["float", "float"], ""]}),
        ("aten::nothing", "[[2]]", {"overload": "", "input_dtypes": ["float"]}),
        ("mine::op", "[[2]]", {"overload": "", "input_dtypes": ["float"]}),
        ("aten::add", "[[2],[3],[]]", {"overload": "Tensor", "input_dtypes": ["float", "float", "Scalar"]}),
        ("aten::item", "[[]]", {"overload": "", "input_dtypes": ["float"]}),
        ("aten::relu", "[[2],[2],[2]]", {"overload": "", "input_dtypes": ["float"] * 3}),
    ],
)
def test_a_call_that_cannot_be_run_is_known_by_its_inputs_and_named(op: str, shapes: str, said: Any) -> None:
    found, graph = node(op, shapes, **said)
    assert found.call.op == op
    assert found.call.outputs == ()
    assert any(each.where == op and "by their inputs alone" in each.reason for each in graph.problems)
    assert graph.measures()["bytes"] is None


@pytest.mark.parametrize(
    "said",
    [
        {"overload": 7, "input_dtypes": ["float"]},
        {"overload": "", "input_dtypes": "float"},
        {"overload": "", "input_dtypes": ["float", "float"]},
        {"overload": "", "input_dtypes": [{}]},
        {"overload": "", "input_dtypes": ["float"], "input_strides": [[1, 2, 3]]},
        {"overload": "", "input_dtypes": ["float"], "input_scalars": [1, 2]},
        {"overload": "", "input_dtypes": [["float"]]},
    ],
)
def test_damaged_attributes_leave_what_the_shapes_tell(said: Any) -> None:
    found, _ = node("aten::relu", "[[2,3]]", **said)
    assert [each.shape for each in found.call.inputs] == [(2, 3)]
    assert found.kind is NodeKind.COMPUTE


def test_a_number_that_stands_for_a_tensor_is_the_same_work_whatever_it_is() -> None:
    x = torch.zeros(2, 3)
    half, third = (xsp.graph.of(Scaled(by), x).nodes[0] for by in (0.5, 0.3))
    assert half.key != third.key
    assert keys.work_key(half.call) == keys.work_key(third.call)
    assert keys.work_key(half.call) != keys.work_key(xsp.graph.of(Scaled(2), x).nodes[0].call)


class Scaled(nn.Module):
    """Multiplies by a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Any) -> Any:
        return x * self.by
