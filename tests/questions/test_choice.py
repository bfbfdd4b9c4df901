"""Advice on layouts, oneDNN and back ends of attention, from synthetic timings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from madetimings import timed_graph_of

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from xsp import graph as graphs  # noqa: E402
from xsp.bench.spec import AS_RUN, Spec  # noqa: E402
from xsp.bound.recordedcalls import RecordedCall  # noqa: E402
from xsp.errors import AnalysisError  # noqa: E402
from xsp.graph import Graph  # noqa: E402
from xsp.graph.node import KnownBy  # noqa: E402
from xsp.questions import choice, layouts, mincut, precision  # noqa: E402
from xsp.questions.timedcalls import TimedGraph, difference  # noqa: E402

IMAGE = (2, 3, 16, 16)


def net(*, last: bool = False) -> Graph:
    """Return convolution, norm, relu, convolution, pooling, linear."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()
    image = torch.randn(IMAGE)
    if last:
        model, image = model.to(memory_format=torch.channels_last), image.to(memory_format=torch.channels_last)
    return graphs.of(model, image)


def as_a_run(graph: Graph) -> Graph:
    """Return the graph with only the order of calls known."""
    from dataclasses import replace

    nodes = tuple(replace(node, reads=(), returns=(), writes=()) for node in graph.nodes)
    return replace(graph, nodes=nodes, edges=(), values=(), known_by=KnownBy.ORDER)


def costs(**by_op: dict[str, float]) -> Callable[[Spec], float | None]:
    """Return a function from specs to nanoseconds, by operator and variant; `other` is the default."""

    def lookup(spec: Spec) -> float | None:
        known_ns = by_op.get(spec.block.op.partition("::")[2])
        if known_ns is None:
            return 1_000.0 if spec.variant == AS_RUN else None
        return known_ns.get(spec.variant, known_ns.get("other"))

    return lookup


CONVERTED = {AS_RUN: 2_000.0}
EQUAL = {AS_RUN: 500.0, "channels-last": 500.0}
LAST_WINS = {AS_RUN: 100_000.0, "channels-last": 40_000.0, "contiguous": 100_000.0}


def only(timed_graph: TimedGraph, **fields: object) -> list[object]:
    return [piece for piece in choice.pieces(timed_graph) if all(getattr(piece, k) == v for k, v in fields.items())]


# --- layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known_by", ["flow", "order"])
def test_channels_last_is_advised_where_the_calls_gain_more_than_conversions_cost(
    known_by: str, tmp_path: Path
) -> None:
    graph = net() if known_by == "flow" else as_a_run(net())
    ns = costs(conv2d=LAST_WINS, contiguous=CONVERTED, batch_norm=EQUAL, adaptive_avg_pool2d=EQUAL)
    (piece,) = choice.pieces(timed_graph_of(graph, tmp_path, ns))
    assert (piece.trial, piece.changes_numbers, piece.at_most) == ("channels_last", None, False)
    assert "memory_format=torch.channels_last" in piece.do
    assert piece.gain.value == pytest.approx((2 * 60_000 - 2_000) / 1e6)  # the image is converted once
    assert [place.op for place in piece.where][:2] == ["aten::conv2d"] * 2


@pytest.mark.parametrize("known_by", ["flow", "order"])
def test_nothing_is_advised_where_conversions_cost_more_than_the_calls_gain(known_by: str, tmp_path: Path) -> None:
    graph = net() if known_by == "flow" else as_a_run(net())
    ns = costs(conv2d=LAST_WINS, contiguous={AS_RUN: 200_000.0})
    assert list(choice.pieces(timed_graph_of(graph, tmp_path, ns))) == []


def test_a_conversion_that_was_not_timed_is_not_promised_to_be_free(tmp_path: Path) -> None:
    timed_graph = timed_graph_of(net(), tmp_path, costs(conv2d=LAST_WINS, contiguous={}))
    assert layouts.uniform(timed_graph, layouts.CHANNELS_LAST) is None
    assert list(choice.pieces(timed_graph)) == []


def test_contiguous_is_advised_if_channels_last_is_slower(tmp_path: Path) -> None:
    graph = net(last=True)
    ns = costs(conv2d={AS_RUN: 100_000.0, "contiguous": 30_000.0, "channels-last": 100_000.0}, contiguous=CONVERTED)
    (piece,) = choice.pieces(timed_graph_of(graph, tmp_path, ns))
    assert "contiguous is faster" in piece.what
    assert piece.trial is None


def test_calls_that_are_not_timed_in_both_layouts_stay_as_they_ran_and_are_counted(tmp_path: Path) -> None:
    ns = costs(conv2d=LAST_WINS, contiguous=CONVERTED, batch_norm={AS_RUN: 500})
    plan = layouts.uniform(timed_graph_of(net(), tmp_path, ns), layouts.CHANNELS_LAST)
    assert plan is not None
    assert plan.untimed_count >= 1
    assert plan.conversions >= 2  # before and after the norm, which keeps its layout
    assert [net().nodes[number].call.op for number in plan.changed] == ["aten::conv2d"] * 2


class Forked(nn.Module):
    """One convolution that is faster contiguous between others that are faster channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.odd(x) + x)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_layouts_are_the_cheapest_of_all_combinations(seed: int, tmp_path: Path) -> None:
    import random

    random_source = random.Random(seed)
    graph = graphs.of(Forked().eval(), torch.randn(2, 8, 16, 16))
    times: dict[tuple[str, str], float] = {}

    def ns(spec: Spec) -> float | None:
        return times.setdefault((spec.block.key, spec.variant), float(random_source.randrange(1, 100) * 1000))

    timed_graph = timed_graph_of(graph, tmp_path, ns)
    problem = layouts._Problem(graph, 2, timed_graph.state)
    plan = layouts.best(timed_graph)
    convs = [number for number in problem.choices if graph.nodes[number].call.op == "aten::conv2d"]
    assert len(convs) == 3

    def cost(number: int, label: int) -> int | None:
        if number in problem.choices:
            timing = timed_graph.timing(number, AS_RUN if label == 0 else "channels-last")
            assert timing is not None
            return round(timing.trimmed_ns or 0)
        return 0 if number in problem.neutral or problem.layouts[number] == label else None

    pairs = [(cost(number, 0), cost(number, 1)) for number in range(problem.count)]
    values = [
        mincut.SharedValue(
            value.maker, value.readers, *(layouts._price(timed_graph, problem, value.tensor, to, {}) for to in (1, 0))
        )
        for value in problem.values
    ]
    unchanged = mincut.price(pairs, values, [0] * problem.count)
    free_nodes = [number for number, (a, b) in enumerate(pairs) if a is not None and b is not None]
    least = unchanged
    for combination in itertools.product((0, 1), repeat=len(free_nodes)):
        labels = [0] * problem.count
        for number, label in zip(free_nodes, combination, strict=True):
            labels[number] = label
        least = min(least, mincut.price(pairs, values, labels))
    assert (plan.gain.ns if plan is not None else 0) == pytest.approx(unchanged - least)


# --- oneDNN, attention, precision -------------------------------------------------------------------------------


def recorded_calls(graph: Graph, inside: str) -> list[RecordedCall]:
    return [
        RecordedCall(
            node.call.op, node.module, "forward", 500_000.0, span=f"s{number}", inner_operators=frozenset([inside])
        )
        for number, node in enumerate(graph.nodes)
    ]


def large() -> Graph:
    return graphs.of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(4, 3, 64, 64))


def test_a_run_without_onednn_gets_the_lost_time(tmp_path: Path) -> None:
    graph = large()
    ns = costs(conv2d={AS_RUN: 50_000.0, "onednn-off": 400_000.0})
    (piece,) = choice.pieces(
        timed_graph_of(graph, tmp_path, ns, recorded_calls=recorded_calls(graph, "aten::_slow_conv2d_forward"))
    )
    assert piece.what == "oneDNN is switched off: 1 convolutions run without it"
    assert piece.gain.value == pytest.approx(0.35)
    assert piece.trial == "onednn=on"
    assert piece.where[0].spans == ("s0",)


def test_without_timings_the_gain_is_bounded_by_the_calls_in_the_trace(tmp_path: Path) -> None:
    graph = large()
    timed_graph = timed_graph_of(
        graph, tmp_path, costs(conv2d={}), recorded_calls=recorded_calls(graph, "aten::_slow_conv2d_forward")
    )
    (piece,) = choice.pieces(timed_graph)
    assert piece.at_most
    assert (piece.gain.low, piece.gain.value, piece.gain.high) == (0.5, 0.5, 0.5)


def test_a_run_with_onednn_gets_no_advice_on_it(tmp_path: Path) -> None:
    graph = large()
    ns = costs(conv2d={AS_RUN: 50_000.0, "onednn-off": 400_000.0})
    for inside in ("aten::mkldnn_convolution", "aten::something_else"):
        assert (
            list(choice.pieces(timed_graph_of(graph, tmp_path, ns, recorded_calls=recorded_calls(graph, inside)))) == []
        )


def test_a_difference_as_between_sessions_is_not_advised(tmp_path: Path) -> None:
    ns = costs(conv2d={AS_RUN: 100_000.0, "onednn-off": 98_000.0, "channels-last": 98_000.0}, contiguous={AS_RUN: 10.0})
    assert list(choice.pieces(timed_graph_of(net(), tmp_path, ns))) == []


def test_calls_that_a_setting_slows_down_are_subtracted(tmp_path: Path) -> None:
    ns = costs(
        conv2d={AS_RUN: 100_000.0, "onednn-off": 60_000.0}, batch_norm={AS_RUN: 10_000.0, "onednn-off": 50_000.0}
    )
    (piece,) = choice.pieces(timed_graph_of(net(), tmp_path, ns))
    assert piece.gain.value == pytest.approx((2 * 40_000 - 40_000) / 1e6)
    assert piece.trial == "onednn=off"


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_the_faster_back_end_of_attention_is_named(tmp_path: Path) -> None:
    graph = graphs.of(Attention(), torch.randn(1, 2, 32, 16))
    ns = costs(scaled_dot_product_attention={AS_RUN: 90_000.0, "attention-math": 50_000.0, "attention-flash": 90_000.0})
    (piece,) = choice.pieces(timed_graph_of(graph, tmp_path, ns))
    assert (piece.trial, "SDPBackend.MATH" in piece.do) == ("sdpa=math", True)


def test_bfloat16_says_that_it_changes_numbers_and_by_how_much(tmp_path: Path) -> None:
    ns = costs(conv2d={AS_RUN: 100_000.0, "autocast-bfloat16": 20_000.0})
    (piece,) = precision.pieces(timed_graph_of(net(), tmp_path, ns, error=0.0042))
    assert piece.changes_numbers is not None
    assert "0.42 %" in piece.changes_numbers
    assert piece.trial == "autocast=bfloat16"
    slower = costs(conv2d={AS_RUN: 100_000.0, "autocast-bfloat16": 200_000.0})
    assert list(precision.pieces(timed_graph_of(net(), tmp_path / "slower", slower, error=0.0042))) == []


def test_a_difference_includes_the_fastest_batches(tmp_path: Path) -> None:
    from dataclasses import replace

    timed_graph = timed_graph_of(net(), tmp_path, costs())
    original = timed_graph.timing(timed_graph.computing[0])
    assert original is not None
    disturbed = replace(original, key="other", trimmed_ns=5_000.0, low_ns=4_990.0, high_ns=5_010.0, least_ns=999.0)
    assert difference([disturbed], [original]).ns == 4_000
    assert not difference([disturbed], [original]).is_gain
    assert difference([original, disturbed], [disturbed, original]).ns == 0


def test_timings_of_a_busy_machine_are_refused(tmp_path: Path) -> None:
    """A call takes 500 us in the trace; alone it may take somewhat longer, but not many times as long."""
    graph, inside = large(), "aten::mkldnn_convolution"
    quiet = timed_graph_of(
        graph, tmp_path / "quiet", costs(conv2d={AS_RUN: 600_000.0}), recorded_calls=recorded_calls(graph, inside)
    )
    assert quiet.require_undisturbed() is quiet
    busy = timed_graph_of(
        graph, tmp_path / "busy", costs(conv2d={AS_RUN: 8_000_000.0}), recorded_calls=recorded_calls(graph, inside)
    )
    with pytest.raises(AnalysisError, match="times as long as in the trace"):
        busy.require_undisturbed()
