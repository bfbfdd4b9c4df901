"""CUDA graphs: the kernels of a replay and the layers in whose capture their nodes were made.

The binding's own classes hold what CUPTI tells, where the binding is installed; a fake stands for the calls that
need a driver. Captures and replays of a real device are under the marker `gpu`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.correlate.evidence import correlate  # noqa: E402
from xsp.schema import Span  # noqa: E402
from xsp.testing import spans  # noqa: E402
from xsp_collectors.cuda.graphs import Captures, place  # noqa: E402
from xsp_collectors.layercalls import LayerCall  # noqa: E402

CREATED, CLONED = 13, 20


class Cupti:
    """The parts of the binding that need no driver, and those that do, faked: a node's id is its address."""

    def __init__(self, binding: Any) -> None:
        self.ResourceData, self.GraphData = binding.ResourceData, binding.GraphData
        self.CallbackIdResource, self.CallbackDomain = binding.CallbackIdResource, binding.CallbackDomain
        self.enabled: list[tuple[int, int, int, int]] = []

    def enable_callback(self, *what: int) -> None:
        self.enabled.append(what)

    def get_graph_node_id(self, node: int) -> int:
        return node


@pytest.fixture
def cupti() -> Cupti:
    return Cupti(pytest.importorskip("cupti.cupti"))


def tell(captures: Captures, cupti: Cupti, number: int, node: int, original: int = 0) -> None:
    """Tell of a node as CUPTI does."""
    graph, resource = cupti.GraphData(), cupti.ResourceData()
    graph.node, graph.original_node = node, original
    resource.resource_descriptor = int(graph.ptr)
    captures.on_callback(None, 3, number, resource)


class Making(torch.nn.Module):
    """A module that makes a node of a graph when it is called."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, value: Any) -> Any:
        self.make()
        return value


def test_a_node_is_of_the_modules_that_are_being_called_when_it_is_made_and_so_is_its_copy(cupti):
    captures = Captures()
    assert captures.listen(cupti, subscriber=1)
    nodes = iter((5, 6))
    make = lambda: tell(captures, cupti, CREATED, next(nodes))  # noqa: E731
    torch.nn.Sequential(Making(make), torch.nn.Sequential(Making(make)))(0)
    tell(captures, cupti, CREATED, node=7)
    tell(captures, cupti, CLONED, node=50, original=5)
    tell(captures, cupti, CLONED, node=90, original=9)
    told = {node: [layer.name for layer in captures.path_of(node) or ()] for node in (5, 6, 7, 50)}
    assert told == {5: ["Sequential", "0"], 6: ["Sequential", "1", "1.0"], 7: [], 50: ["Sequential", "0"]}
    assert captures.path_of(90) is None
    assert [what[2:] for what in cupti.enabled] == [(3, CREATED), (3, CLONED)]


def test_a_binding_that_cannot_tell_of_nodes_is_not_listened_to_and_errors_stay_out_of_cupti(cupti):
    assert not Captures().listen(SimpleNamespace(), subscriber=1)
    captures = Captures()
    captures.listen(cupti, subscriber=1)
    captures.on_callback(None, 3, CREATED, "no data at all")
    assert captures.unreadable == 1


# --- replays ----------------------------------------------------------------------------------------------

A, B = LayerCall("1", "Net", "Net"), LayerCall("2", "fc", "Linear")
REPLAY = """
    step train 0-100
    module outer 1-40 depth=0
    launch cudaGraphLaunch 10-20 correlation_id=7
    kernel k5 30-40 correlation_id=7 attributes={"graph":true,"graph_node":5}
    kernel k6 42-50 correlation_id=7 attributes={"graph":true,"graph_node":6}
    kernel k9 52-60 correlation_id=7 attributes={"graph":true,"graph_node":9}
    kernel k0 62-70 correlation_id=8
    launch cudaLaunchKernel 21-22 correlation_id=8
"""


def replayed(**paths: Any) -> list[Span]:
    captures = Captures()
    captures._paths = {int(name[1:]): path for name, path in paths.items()}
    return place(spans(REPLAY), captures).spans


def found(rows: list[Span]) -> dict[str, tuple[str | None, str | None, str | None]]:
    names = {row.span_id: row.name for row in rows}
    return {row.name: (names.get(row.layer_id or ""), row.parent_rule, row.grade) for row in rows if row.level == 70}


def test_a_replayed_kernel_is_of_the_layer_of_its_capture_and_otherwise_of_the_replays_by_weaker_evidence():
    assert found(correlate(replayed(n5=(A, B), n6=(A,)))) == {
        "k5": ("fc", "capture", "exact"),
        "k6": ("Net", "capture", "exact"),
        "k9": ("outer", "graph", "inferred"),
        "k0": ("outer", "correlation", "exact"),
    }


def test_layers_of_a_replay_last_as_long_as_their_kernels_and_hang_under_the_replays_layer():
    rows = correlate(replayed(n5=(A, B), n6=(A,)))
    names = {row.span_id: row.name for row in rows}
    layers = [
        (row.name, names.get(row.parent_id or ""), row.depth, row.start_ns // 1000, row.end_ns // 1000)
        for row in rows
        if row.level == 30
    ]
    assert layers == [("outer", "train", 0, 1, 40), ("Net", "outer", 1, 30, 50), ("fc", "Net", 2, 30, 40)]


def test_replayed_work_whose_capture_was_not_seen_is_counted():
    assert place(spans(REPLAY), Captures()).unknown_count == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_of_a_real_replay_belong_to_the_layers_that_were_captured(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
    value = torch.randn(64, 512, device="cuda")
    with xsp.profile("graph", out=tmp_path / "run", kernels="cupti") as prof, torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            model(value)
        torch.cuda.synchronize()
        with prof.step():
            model(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(value)
        for _ in range(prof.schedule.steps_for(2)):
            with prof.step():
                graph.replay()
    trace = xsp.load(tmp_path / "run")
    seen = trace.sql(
        "SELECT DISTINCT layer.name FROM merged kernel JOIN merged layer ON layer.span_id = kernel.layer_id "
        "WHERE kernel.kind = 'kernel' AND kernel.parent_rule = 'capture'"
    ).fetchall()
    if not seen:
        pytest.skip(f"captures could not be seen here: {[note['text'] for note in trace.run['notes']]}")
    assert {"0", "1", "2"} >= {name for (name,) in seen} >= {"0", "2"}
