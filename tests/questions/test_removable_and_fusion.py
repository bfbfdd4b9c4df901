"""The gain of rewriting, from synthetic times."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from xsp.advise import Advice, AdviceContext  # noqa: E402
from xsp.bound.totals import Figure  # noqa: E402
from xsp.graph import rewrite  # noqa: E402
from xsp.graph.sources import of as graph_of  # noqa: E402
from xsp.questions.fusion import (  # noqa: E402
    chains,
    fusion,
    removable,
    updates,
)
from xsp.questions.rewriting import Prices  # noqa: E402

US = 1000.0


class Planted(nn.Module):
    """A layer with one flaw."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw, self.layer, self.norm = flaw, nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.flaw == "dead":
            self.norm(y)
        if self.flaw == "equal":
            y = y * self.layer(x)
        if self.flaw == "copy":
            y = y.clone()
        if self.flaw == "cast":
            y = F.layer_norm(y.double(), (16,)).float()
        if self.flaw == "loop":
            y = torch.stack([self.norm(each) for each in y])
        if self.flaw == "chain":
            y = 0.5 * y * (1 + torch.tanh(0.79 * (y + 0.045 * torch.pow(y, 3))))
        return y + x


class Model(nn.Module):
    """Three such layers."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Planted(flaw) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for each in self.blocks:
            x = each(x)
        return x


def prices(graph: Any, *, added_us: float | None = None, is_timed: bool = True) -> Prices:
    """Return prices in which each call takes 10 us, and each added call `added_us`."""
    result = rewrite.of(graph)
    entry = Figure(10 * US, 0.1 * US, "same") if is_timed else None
    before = tuple(entry if node.computes else None for node in graph.nodes)
    unknown = (None,) * len(graph.nodes)
    places = {place for change in result.changes for place in result.added_calls(change)}
    after = {} if added_us is None else {place: Figure(added_us * US, 0.1 * US, "new") for place in places}
    total = 10 * US * len(graph.computing)
    return Prices(result, before, unknown, after, total)


def answers(priced: Prices, question: Any) -> list[Advice]:
    """Return the answers of a question."""
    return list(
        question(
            AdviceContext(
                None,
                "model",
                {},
                {"prices": lambda context: priced, "graph": lambda context: priced.rewritten.original},
            )
        )
    )


def graph(flaw: str) -> Any:
    return graph_of(Model(flaw).eval(), torch.zeros(4, 8, 16))


@pytest.mark.parametrize(
    ("flaw", "fragment", "saved_us"),
    [("dead", "never read", 30), ("equal", "again", 30), ("copy", "copy", 30)],
)
def test_removed_calls_gain_their_time_and_equal_layers_are_one_piece(
    flaw: str, fragment: str, saved_us: float
) -> None:
    (result,) = answers(prices(graph(flaw)), removable)
    assert fragment in result.what
    assert "3 times" in result.what
    assert result.gain.value == pytest.approx(saved_us / 1000)
    assert not result.at_most
    assert result.changes_numbers is None
    assert {entry.module for entry in result.where} <= {
        f"blocks.{n}{part}" for n in range(3) for part in ("", ".norm", ".layer#2")
    }
    assert result.of_step_percent == pytest.approx(100 * saved_us / (10 * len(graph(flaw).computing)))


def test_a_cast_reports_changed_numbers_and_counts_replacement_calls() -> None:
    (result,) = answers(prices(graph("cast"), added_us=4), removable)
    assert result.gain.value == pytest.approx(0.09 - 0.012)  # per layer three calls are replaced by one
    assert "float32 instead of float64" in str(result.changes_numbers)


def test_a_loop_gains_its_calls_less_the_one_on_the_batch() -> None:
    (result,) = answers(prices(graph("loop"), added_us=12), removable)
    assert "for each of 4 samples" in result.what
    assert result.gain.value == pytest.approx(3 * (0.05 - 0.012))
    assert result.gain.low < result.gain.value - 0.03 * 0.15
    assert not result.at_most


def test_untimed_replacements_give_a_bound_and_unknown_times_no_advice() -> None:
    (result,) = answers(prices(graph("loop")), removable)
    assert result.at_most
    assert result.gain.value == pytest.approx(
        3 * (0.05 - 0.01)
    )  # one call on the batch takes as long as one of its samples
    assert any("--fill" in entry for entry in result.why)
    assert not answers(prices(graph("loop"), is_timed=False), removable)
    assert not answers(prices(graph("dead"), is_timed=False), removable)


def test_a_model_without_flaws_is_left_alone() -> None:
    priced = prices(graph("none"))
    assert not priced.rewritten.changes
    assert not answers(priced, removable) + answers(priced, fusion)


def test_norms_that_fold_are_advised_with_the_trial_that_folds_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    ).eval()
    (result,) = answers(prices(graph_of(model, torch.zeros(1, 3, 8, 8)), added_us=10.5), fusion)
    assert result.trial == "fold_batch_norm"
    assert result.gain.value == pytest.approx(0.04 - 0.021)
    slower = prices(graph_of(model, torch.zeros(1, 3, 8, 8)), added_us=21)
    assert all(entry.gain.may_be_zero for entry in answers(slower, fusion))


def test_chains_of_elementwise_calls_gain_the_traffic_between_them_at_most() -> None:
    result = chains(graph("chain"), set())
    ((ops, groups),) = result.items()
    assert len(groups) == 3
    assert ops[-1] in ("mul", "add")
    (piece,) = [entry for entry in answers(prices(graph("chain")), fusion) if "elementwise" in entry.what]
    assert piece.at_most
    assert piece.trial == "compile"
    assert "gelu" in piece.do
    assert piece.gain.value < 0.01 * len(groups) * len(ops)


def _step(fused: bool) -> Any:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.1, foreach=fused)

    def step() -> Any:
        optimizer.zero_grad()
        loss = layers(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_optimizer_that_loops_over_parameters_is_found(is_fused: bool) -> None:
    from graphruns import record

    step = _step(is_fused)
    step()
    result, _, _ = record(step, grad=True)
    assert bool(updates(result)) is not is_fused
    pieces = [entry for entry in answers(prices(result), fusion) if "optimizer" in entry.what]
    assert len(pieces) == (0 if is_fused else 1)
    if not is_fused:
        assert "fused=True" in pieces[0].do
        assert pieces[0].at_most
        assert 0 < pieces[0].gain.value < math.inf


def test_norms_and_attention_are_found_by_shapes_if_only_the_order_is_known() -> None:
    import dataclasses

    from xsp.graph.node import KnownBy
    from xsp.questions.callorder import foldable_norms, handwritten_attention

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))

        def forward(self, x: Any) -> Any:
            x = self.layers(x)
            scores = (x @ x.transpose(-2, -1)) / 2
            return (scores.softmax(-1) @ x).softmax(-1)

    full = graph_of(Both().eval(), torch.zeros(1, 3, 8, 8))
    nodes = tuple(dataclasses.replace(entry, origins=(), reads=(), returns=(), writes=()) for entry in full.nodes)
    result = dataclasses.replace(full, nodes=nodes, edges=(), known_by=KnownBy.ORDER)
    assert [[result.nodes[entry].call.op for entry in group] for group in foldable_norms(result)] == [
        ["aten::batch_norm"]
    ]
    assert [[result.nodes[entry].call.op for entry in group] for group in handwritten_attention(result)] == [
        ["aten::div", "aten::softmax"]
    ]
