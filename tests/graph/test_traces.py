"""Graphs of what was recorded: spans of a trace, and PyTorch's execution trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp import testing
from xsp.errors import XspError
from xsp.graph import Graph, NodeKind, keys, observed
from xsp.graph.node import EdgeKind, Phase

STEP = """
    step train 0-100
      forward Net 5-60
        module net 10-50 type=Net
          op aten::linear 20-40 input_shapes=[[4,8],[2,8],[]] dtype=float
            op aten::addmm 25-35 flops=128 dram_read_bytes=90 dram_write_bytes=9
          op aten::relu 41-45 input_shapes=[[4,2]] dtype=float
      backward autograd 61-90
        op AddmmBackward0 62-80 phase=backward
          op aten::mm 65-75 phase=backward
"""


def test_the_outermost_operators_of_a_trace_are_its_nodes() -> None:
    trace = testing.trace_of(testing.spans(STEP))
    graph = xsp.graph.of(trace)
    assert [(each.call.op, each.module, each.phase) for each in graph.nodes] == [
        ("aten::linear", "net", Phase.FORWARD),
        ("aten::relu", "net", Phase.FORWARD),
        ("aten::mm", "", Phase.BACKWARD),
    ]
    assert graph.nodes[0].stated_work == (128, 99)
    assert [each.shape for each in graph.nodes[0].call.inputs] == [(4, 8), (2, 8)]
    assert [(each.before, each.after, each.kind) for each in graph.edges] == [
        (0, 1, EdgeKind.ORDER),
        (1, 2, EdgeKind.ORDER),
    ]


def test_what_a_trace_does_not_tell_is_null(tmp_path: Path) -> None:
    graph = xsp.graph.of(testing.trace_of(testing.spans(STEP)))
    found = graph.measures()
    assert [found[key] for key in ("views", "edges", "parameters", "longest_path", "diameter")] == [None] * 5
    assert (found["flops"], found["flops_unknown"]) == (128, 1)
    graph.save(tmp_path / "g.json")
    assert xsp.graph.load(tmp_path / "g.json") == graph


def test_shapes_of_another_profiler_that_are_no_shapes_are_unknown() -> None:
    for shapes, known in (("text", []), ("7", []), ("[[4,-1]]", [None])):
        rows = [row._replace(input_shapes=shapes) if row.name == "aten::relu" else row for row in testing.spans(STEP)]
        graph = xsp.graph.of(testing.trace_of(rows))
        assert [each.shape for each in graph.nodes[1].call.inputs] == known


def test_a_trace_without_operators_is_refused() -> None:
    with pytest.raises(XspError, match="no operators"):
        xsp.graph.of(testing.trace_of(testing.spans("step train 0-100\n  kernel k 10-20")))


def seen_and_captured(net: Any, x: Any, path: Path) -> tuple[Graph, Graph]:
    """Return the graph of an execution trace of a module's call, which is written to `path`, and the captured one."""
    import torch

    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path))
    observer.start()
    with torch.inference_mode():
        net(x)
    observer.stop()
    observer.unregister_callback()
    return xsp.graph.of(path), xsp.graph.of(net, x)


def test_an_execution_trace_has_the_calls_and_edges_of_the_captured_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

        def forward(self, x):
            y = self.norm(self.conv(x))
            y += y.relu()
            return self.last(y.mean((2, 3)).view(-1, 4))

    net, x = Net().eval(), torch.zeros(2, 3, 8, 8)
    seen, captured = seen_and_captured(net, x, tmp_path / "et.json")
    assert [(each.call.op, each.kind) for each in seen.nodes] == [(each.call.op, each.kind) for each in captured.nodes]
    assert [each.call.outputs for each in seen.nodes] == [each.call.outputs for each in captured.nodes]
    assert {(each.before, each.after) for each in seen.edges_of(EdgeKind.DATA)} == {
        (each.before, each.after) for each in captured.edges_of(EdgeKind.DATA)
    }
    assert seen.nodes[2].kind is NodeKind.COMPUTE


def test_an_execution_trace_tells_layouts_types_and_numbers_as_the_captured_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.qkv = nn.Conv2d(8, 8, 1), nn.Linear(8, 24)

        def forward(self, x):
            y = self.conv(x.contiguous(memory_format=torch.channels_last)) * 0.123456789
            tokens = y.flatten(2).transpose(1, 2).clamp_min(1e-12)
            heads = self.qkv(tokens).reshape(2, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
            made = nn.functional.scaled_dot_product_attention(*heads.unbind(0))
            return made.transpose(1, 2).reshape(2, 16, 8).to(torch.float64)

    net, x = Net().eval(), torch.zeros(2, 8, 4, 4)
    seen, captured = seen_and_captured(net, x, tmp_path / "et.json")
    assert [each.key for each in seen.nodes] == [
        keys.key(observed.as_recorded_in_trace(each.call)) for each in captured.nodes
    ]
    assert seen.edges_of(EdgeKind.DATA) == captured.edges_of(EdgeKind.DATA)
    program = xsp.graph.of(torch.export.export(net, (x,)))
    attention = [
        each.call.outputs
        for graph in (seen, captured, program)
        for each in graph.nodes
        if each.call.op == "aten::scaled_dot_product_attention"
    ]
    assert len(attention) == 3
    assert len(set(attention)) == 1


def test_what_autograd_calls_to_sum_gradients_is_a_node_of_an_execution_trace(tmp_path: Path) -> None:
    wraps = "torch::autograd::AccumulateGrad"
    held = [{"values": [[each, each, 0, 4, 4, "cpu"] for each in those], "shapes": [[4]] * len(those),
             "types": ["Tensor(float)"] * len(those)} for those in ((6, 8), (6,))]  # fmt: skip
    nodes = [
        {"id": 4, "name": f"autograd::engine::evaluate_function: {wraps}", "ctrl_deps": 1},
        {"id": 5, "name": wraps, "ctrl_deps": 4},
        {"id": 6, "name": "aten::add_", "ctrl_deps": 5, "inputs": held[0], "outputs": held[1]},
    ]
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    graph = xsp.graph.of(tmp_path / "et.json")
    assert [(each.call.op, each.phase) for each in graph.nodes] == [("aten::add_", Phase.BACKWARD)]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:300],
        lambda text: text.replace('"nodes": [', '"nodes": [7, {"id": "x"}, '),
        lambda text: text.replace('"attrs": [', '"attrs": 7, "others": ['),
        lambda text: "{}",
    ],
)
def test_a_damaged_execution_trace_is_one_error_or_a_graph(tmp_path: Path, change) -> None:
    tensors = [
        {"values": [[each, each, 0, 4, 4, "cpu"]], "shapes": [[4]], "types": ["Tensor(float)"]} for each in (6, 8)
    ]
    node = {"id": 5, "name": "aten::relu", "ctrl_deps": 1, "inputs": tensors[0], "outputs": tensors[1]}
    node["attrs"] = [{"name": "rf_id", "value": 3}]
    text = json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [node]})
    (tmp_path / "whole.json").write_text(text)
    assert xsp.graph.of(tmp_path / "whole.json").nodes[0].call.op == "aten::relu"
    (tmp_path / "et.json").write_text(change(text))
    try:
        assert len(xsp.graph.of(tmp_path / "et.json").nodes) == 1
    except XspError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
