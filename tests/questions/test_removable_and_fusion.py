"""What rewriting gains, from times that are given: nothing is timed here."""

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
from xsp.questions.fusion import chains, fusion, updates  # noqa: E402
from xsp.questions.removable import removable  # noqa: E402
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


def prices(graph: Any, *, added_us: float | None = None, known: bool = True) -> Prices:
    """Return prices in which each call takes 10 us, and each that is added so much."""
    found = rewrite.of(graph)
    each = Figure(10 * US, 0.1 * US, "same") if known else None
    before = tuple(each if node.computes else None for node in graph.nodes)
    nothing = (None,) * len(graph.nodes)
    places = {place for change in found.changes for place in found.added(change)}
    after = {} if added_us is None else {place: Figure(added_us * US, 0.1 * US, "new") for place in places}
    total = 10 * US * len(graph.computing)
    return Prices(found, before, nothing, after, total)


def asked(made: Prices, question: Any) -> list[Advice]:
    """Return the answers of a question."""
    return list(
        question(
            AdviceContext(
                None, "model", {}, {"prices": lambda asked: made, "graph": lambda asked: made.rewritten.original}
            )
        )
    )


def graph(flaw: str) -> Any:
    return graph_of(Model(flaw).eval(), torch.zeros(4, 8, 16))


@pytest.mark.parametrize(
    ("flaw", "said", "gone_us"),
    [("dead", "never read", 30), ("equal", "again", 30), ("copy", "copy", 30)],
)
def test_what_goes_gains_what_it_takes_and_equal_layers_are_one_piece(flaw: str, said: str, gone_us: float) -> None:
    (found,) = asked(prices(graph(flaw)), removable)
    assert said in found.what
    assert "3 times" in found.what
    assert found.gain.value == pytest.approx(gone_us / 1000)
    assert not found.at_most
    assert found.changes_numbers is None
    assert {each.module for each in found.where} <= {
        f"blocks.{n}{part}" for n in range(3) for part in ("", ".norm", ".layer#2")
    }
    assert found.of_step_percent == pytest.approx(100 * gone_us / (10 * len(graph(flaw).computing)))


def test_a_cast_that_changes_numbers_says_so_and_counts_what_stands_in_its_place() -> None:
    (found,) = asked(prices(graph("cast"), added_us=4), removable)
    assert found.gain.value == pytest.approx(0.09 - 0.012)  # of each layer three calls go and one comes
    assert "float32 instead of float64" in str(found.changes_numbers)


def test_a_loop_gains_its_calls_less_the_one_on_the_batch() -> None:
    (found,) = asked(prices(graph("loop"), added_us=12), removable)
    assert "for each of 4 samples" in found.what
    assert found.gain.value == pytest.approx(3 * (0.05 - 0.012))
    assert found.gain.low < found.gain.value - 0.03 * 0.15
    assert not found.at_most


def test_what_is_not_timed_is_promised_at_most_and_unknown_times_promise_nothing() -> None:
    (found,) = asked(prices(graph("loop")), removable)
    assert found.at_most
    assert found.gain.value == pytest.approx(
        3 * (0.05 - 0.01)
    )  # one call on the batch takes as long as one of its samples
    assert any("--fill" in each for each in found.why)
    assert not asked(prices(graph("loop"), known=False), removable)
    assert not asked(prices(graph("dead"), known=False), removable)


def test_a_model_without_flaws_is_left_alone() -> None:
    made = prices(graph("none"))
    assert not made.rewritten.changes
    assert not asked(made, removable) + asked(made, fusion)


def test_norms_that_fold_are_advised_with_the_trial_that_folds_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    ).eval()
    (found,) = asked(prices(graph_of(model, torch.zeros(1, 3, 8, 8)), added_us=10.5), fusion)
    assert found.trial == "fold_batch_norm"
    assert found.gain.value == pytest.approx(0.04 - 0.021)
    slower = prices(graph_of(model, torch.zeros(1, 3, 8, 8)), added_us=21)
    assert all(each.gain.holds_zero for each in asked(slower, fusion))


def test_chains_of_elementwise_calls_gain_the_traffic_between_them_at_most() -> None:
    found = chains(graph("chain"), set())
    ((ops, groups),) = found.items()
    assert len(groups) == 3
    assert ops[-1] in ("mul", "add")
    (piece,) = [each for each in asked(prices(graph("chain")), fusion) if "elementwise" in each.what]
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


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_that_loops_over_parameters_is_found(together: bool) -> None:
    from graphruns import record

    step = _step(together)
    step()
    found, _, _ = record(step, grad=True)
    assert bool(updates(found)) is not together
    advised = [each for each in asked(prices(found), fusion) if "optimizer" in each.what]
    assert len(advised) == (0 if together else 1)
    if not together:
        assert "fused=True" in advised[0].do
        assert advised[0].at_most
        assert 0 < advised[0].gain.value < math.inf


def test_of_an_order_of_calls_alone_norms_and_attention_are_found_by_their_shapes() -> None:
    import dataclasses

    from xsp.graph.node import KnownBy
    from xsp.questions.callorder import by_hand, foldable

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))

        def forward(self, x: Any) -> Any:
            x = self.layers(x)
            scores = (x @ x.transpose(-2, -1)) / 2
            return (scores.softmax(-1) @ x).softmax(-1)

    known = graph_of(Both().eval(), torch.zeros(1, 3, 8, 8))
    nodes = tuple(dataclasses.replace(each, origins=(), reads=(), returns=(), writes=()) for each in known.nodes)
    found = dataclasses.replace(known, nodes=nodes, edges=(), known_by=KnownBy.ORDER)
    assert [[found.nodes[each].call.op for each in those] for those in foldable(found)] == [["aten::batch_norm"]]
    assert [[found.nodes[each].call.op for each in those] for those in by_hand(found)] == [
        ["aten::div", "aten::softmax"]
    ]
