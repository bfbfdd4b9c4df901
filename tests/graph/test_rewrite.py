"""Rewriting keeps the function: the original graph and the rewritten one are run on the same tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from depth import deep
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from graphruns import assert_same_outputs, record  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from xsp.errors import GraphError  # noqa: E402
from xsp.graph import files, rewrite, work  # noqa: E402
from xsp.graph.rewrite import RewrittenGraph  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def rewritten(model: Any, *args: Any, **kwargs: Any) -> RewrittenGraph:
    """Return what becomes of a step, checked to compute the same and to do no more work."""
    if isinstance(model, nn.Module):
        model.eval()
    graph, outside, _ = record(model, *args, **kwargs)
    found = rewrite.of(graph)
    assert_same_outputs(found, outside, 1e-4)
    assert len(found.graph.computing) <= len(graph.computing)
    assert sum(filter(None, map(work.flops_of, found.graph.nodes))) <= sum(
        filter(None, map(work.flops_of, graph.nodes))
    )
    removed = [each for change in found.changes for each in change.removed]
    assert len(removed) == len(set(removed))
    return found


def ops(found: RewrittenGraph, rule: str) -> list[str]:
    """Return the operators that a rule took out."""
    return [
        found.original.nodes[each].call.op.removeprefix("aten::")
        for change in found.changes
        if change.rule == rule
        for each in found.removed_calls(change)
    ]


X = torch.randn(4, 6)


# --- dead and equal ---------------------------------------------------------------------------------------


def test_what_nobody_reads_goes_with_what_it_alone_needs() -> None:
    def step(x: Any) -> Any:
        y = x.relu()
        y.exp().sum()
        return y + 1

    assert ops(rewritten(step, X), "dead") == ["exp", "sum"]


def test_results_that_are_kept_returned_or_written_elsewhere_are_not_dead() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))
            self.last: Any = None

        def forward(self, x: Any) -> Any:
            self.seen.add_(x.mean(0))
            self.last = x.exp()
            return x.relu(), {"more": (x + 1)[:, 0]}

    assert not rewritten(Keeps(), X).changes


def test_random_numbers_that_nobody_reads_stay_as_those_after_them_depend_on_them() -> None:
    def step(x: Any) -> Any:
        torch.rand(3)
        a = F.dropout(x, 0.5, training=True)
        b = F.dropout(x, 0.5, training=True)
        return a + b

    graph, _, _ = record(step, X)
    assert not rewrite.of(graph).changes


def test_the_same_computed_twice_goes_through_views_too() -> None:
    layer = nn.Linear(6, 6)
    found = rewritten(lambda x: layer(x).t().exp() + layer(x).t().exp(), X)
    assert ops(found, "equal") == ["linear", "exp"]
    assert [each for change in found.changes for each in change.kept] == [0, 2]


def test_parts_of_one_tensor_are_not_equal_though_they_look_it() -> None:
    def step(x: Any) -> Any:
        a, b, c = x.chunk(3, dim=1)
        return a.exp() + b.exp() * c.exp()

    assert not rewritten(step, X).changes


def test_what_was_changed_between_is_not_equal() -> None:
    def step(x: Any) -> Any:
        y = x + 1
        a = y.exp()
        y.mul_(2)
        return a + y.exp()

    def changed_after(x: Any) -> Any:
        a, b = x.exp(), x.exp()
        b.add_(1)
        return a * b

    assert not rewritten(step, X).changes
    assert not rewritten(changed_after, X).changes


def test_both_of_two_equal_results_that_are_returned_stay() -> None:
    assert not rewritten(lambda x: (x.exp(), x.exp()), X).changes


# --- copies and casts ---------------------------------------------------------------------------------------


def test_a_copy_that_nobody_writes_to_goes() -> None:
    found = rewritten(lambda x: (F.pad(x.relu(), (0, 0)).clone() * torch.cat([x])).sum(), X)
    assert sorted(ops(found, "copy")) == ["cat", "clone", "pad"]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.clone().mul_(2) + x,
        lambda x: x.clone(),
        lambda x: (lambda y: (y.clone(), y.mul_(2)))(x.exp()),
        lambda x: x.t().contiguous().view(-1) + 1,
    ],
    ids=["copy is written", "copy is returned", "source is written", "other strides"],
)
def test_a_copy_that_is_needed_stays(step: Callable[[Any], Any]) -> None:
    assert not rewritten(step, X).changes


def test_a_tensor_that_is_returned_and_that_no_call_reads_is_no_obstacle() -> None:
    class Passes(nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            return x.clone().relu(), mask

    assert ops(rewritten(Passes(), X, torch.ones(4)), "copy") == ["clone"]


def test_of_two_copies_with_transpositions_between_the_first_goes() -> None:
    assert len(ops(rewritten(lambda x: x.t().contiguous().t().contiguous() + 1, X), "copy")) == 2
    found = rewritten(lambda x: x.t().contiguous().clone().view(-1) + 1, X)
    assert ops(found, "copy") == ["clone"]


def test_a_cast_there_and_back_goes_and_says_when_numbers_change() -> None:
    found = rewritten(lambda x: x.relu().double().float() + 1, X)
    assert ops(found, "cast") == ["to", "to"]
    assert found.changes[0].changes_numbers is None
    graph, _, _ = record(lambda x: x.relu().half().float() + 1, X)
    assert "float16" in str(rewrite.of(graph).changes[0].changes_numbers)


def test_what_is_computed_in_float64_between_casts_is_marked_as_changing_numbers() -> None:
    norm = nn.LayerNorm(6)
    found = rewritten(lambda x: F.layer_norm(x.double() * 2, (6,), norm.weight.double()).softmax(-1).float() + 1, X)
    (change,) = found.changes
    assert change.rule == "cast"
    assert "float32 instead of float64" in str(change.changes_numbers)
    assert {tensor.dtype for node in found.graph.nodes for tensor in node.call.outputs} == {"float32"}


def test_float64_that_is_returned_or_made_from_integers_only_stays() -> None:
    assert not rewritten(lambda x: (lambda y: (y, y.sum().float()))(x.double() * 2), X).changes
    assert not rewritten(lambda x: x.double().mul(2).float(), torch.arange(6)).changes


# --- norms ------------------------------------------------------------------------------------------------


def _norm(kind: Any, width: int, **options: Any) -> Any:
    norm = kind(width, **options)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def test_batch_norms_in_evaluation_fold_into_what_is_before_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        _norm(nn.BatchNorm2d, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=2),
        _norm(nn.BatchNorm2d, 8, affine=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
        _norm(nn.BatchNorm1d, 5),
    )
    found = rewritten(model, torch.randn(2, 3, 9, 9))
    assert [each.rule for each in found.changes] == ["norm"] * 3
    assert found.changes[0].modules == ("0", "1")


def test_a_norm_in_training_one_that_is_not_alone_and_one_before_the_convolution_stay() -> None:
    convolution, norm = nn.Conv2d(3, 8, 3), _norm(nn.BatchNorm2d, 8)

    def shared(x: Any) -> Any:
        y = convolution(x)
        return norm.eval()(y) + y

    image = torch.randn(2, 3, 9, 9)
    assert not rewritten(shared, image).changes
    assert not rewritten(nn.Sequential(_norm(nn.BatchNorm2d, 3), nn.Conv2d(3, 4, 3)), image).changes
    assert not rewritten(nn.Sequential(nn.ConvTranspose2d(3, 8, 3), norm), image).changes
    graph, _, _ = record(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train(), image)
    assert not rewrite.of(graph).changes


# --- attention ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention as people write it, four heads of eight."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.qkv, self.style = nn.Linear(32, 96), style

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (each.view(batch, length, 4, 8) for each in self.qkv(x).split(32, dim=2))
        made = getattr(self, self.style)(q, k, v, torch.ones(length, length, dtype=torch.bool).tril())
        return made.reshape(batch, length, 32) + x

    def fills(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(8))
        scores = scores.masked_fill(mask == 0, float("-inf"))
        return (F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v).transpose(1, 2).contiguous()

    def sums(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
        return torch.einsum("bhts,bshd->bthd", scores.softmax(dim=3), v)

    def batched(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (each.transpose(1, 2).reshape(-1, each.shape[1], 8) for each in (q, k, v))
        scores = torch.bmm(q * 8**-0.5, k.transpose(1, 2))
        length = scores.shape[-1]
        scores = (scores.view(-1, 4, length, length) + torch.zeros(length, length)).view(scores.shape)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights, v).view(-1, 4, length, 8).transpose(1, 2)

    def biased(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (each.transpose(1, 2).reshape(-1, each.shape[1], 8) for each in (q, k, v))
        bias = torch.arange(float(q.shape[0] * k.shape[1])).view(-1, 1, k.shape[1]).sin()
        weights = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1, alpha=8**-0.5).softmax(-1)
        return torch.bmm(weights, v).view(-1, 4, v.shape[1], 8).transpose(1, 2)

    def in_place(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (each.permute(0, 2, 1, 3) for each in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3))
        scores /= math.sqrt(8)
        scores.masked_fill_(~mask, -1e9)
        return torch.matmul(torch.softmax(scores, dim=-1), v).permute(0, 2, 1, 3)

    def chosen(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = torch.matmul(q, k.mT) / torch.full([], 8**0.5)
        scores = torch.where(mask, scores, torch.full([], torch.finfo(scores.dtype).min))
        return torch.matmul(scores.softmax(-1), v).transpose(1, 2)


@pytest.mark.parametrize("style", ["fills", "sums", "batched", "biased", "in_place", "chosen"])
def test_attention_by_hand_is_found_however_it_is_written(style: str) -> None:
    found = rewritten(Attention(style), torch.randn(2, 6, 32))
    assert [each.rule for each in found.changes if each.rule != "dead"] == ["attention"]
    assert "softmax" in ops(found, "attention")
    new = [node.call.op for node in found.graph.nodes if "attention" in node.call.op]
    assert new == ["aten::scaled_dot_product_attention"]


class Near(nn.Module):
    """What looks like attention, and is another function."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1)
        if self.style == "mask before scale":
            return ((scores + q[..., :1]) * 0.5).softmax(-1) @ v
        if self.style == "rounded":
            return scores.softmax(-1).round(decimals=1) @ v
        if self.style == "columns":
            return scores.softmax(-2) @ v
        if self.style == "low is not low":
            return scores.masked_fill(scores > 0, -1.0).softmax(-1) @ v
        weights = scores.softmax(-1)
        if self.style == "dropped":
            return F.dropout(weights, 0.5, training=True) @ v
        return weights @ v, weights


@pytest.mark.parametrize("style", ["mask before scale", "rounded", "columns", "low is not low", "dropped", "returned"])
def test_what_is_not_quite_attention_stays(style: str) -> None:
    graph, _, _ = record(Near(style), *(torch.randn(2, 4, 6, 8) for _ in range(3)))
    assert not rewrite.of(graph).changes


# --- many calls that could be one -----------------------------------------------------------------------------

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: torch.cat([NET(x[i : i + 1]) for i in range(len(x))]),
        lambda x: torch.stack([NET(each.unsqueeze(0)).squeeze(0) for each in x]),
        lambda x: torch.cat([NET(each) for each in x.split(2)]) + 1,
        lambda x: torch.stack([NET(each[None])[0] for each in x.unbind()]).relu(),
    ],
    ids=["slices", "unsqueezed", "split", "selected"],
)
def test_a_loop_over_samples_is_one_call_on_the_batch(loop: Callable[[Any], Any]) -> None:
    found = rewritten(loop, torch.randn(4, 3, 8, 8))
    (change,) = found.changes
    assert change.rule == "loop"
    assert sum(node.call.op == "aten::conv2d" for node in found.graph.nodes) == 1


def test_a_loop_over_samples_may_hold_attention_that_splits_its_projections() -> None:
    attention = Attention("sums").eval()

    def step(x: Any) -> Any:
        return torch.cat([attention(x[i : i + 1]) for i in range(len(x))])

    def fused(x: Any) -> Any:
        made = []
        for each in x:
            q, k, v = (part.view(6, 4, 8).transpose(0, 1) for part in attention.qkv(each).chunk(3, dim=-1))
            made.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(6, 32))
        return torch.stack(made)

    graph, _, _ = record(step, torch.randn(4, 6, 32))
    assert "loop" not in {each.rule for each in rewrite.of(graph).changes}  # an equation may do anything
    found = rewritten(fused, torch.randn(4, 6, 32))
    assert [each.rule for each in found.changes] == ["loop"]


def test_samples_without_a_dimension_of_their_own_get_one() -> None:
    layer = nn.Linear(6, 6)
    found = rewritten(
        lambda x: torch.stack([F.softmax(layer(each).transpose(0, 1), 0).mean(1) for each in x]), torch.randn(4, 2, 6)
    )
    assert [each.rule for each in found.changes] == ["loop"]


def test_a_loop_that_is_none_over_samples_stays() -> None:
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def steps(x: Any) -> Any:
        state, states = x[0], []
        for each in x:
            state = layers[0](state + each)
            states.append(state)
        return torch.stack(states)

    def reordered(x: Any) -> Any:
        return torch.stack([layers[0](x[i]).relu() for i in (1, 0, 2, 3)])

    def read_inside(x: Any) -> Any:
        kept = [layers[0](each) for each in x]
        return torch.stack([each.relu() for each in kept]) * kept[0]

    for step in (steps, reordered, read_inside, lambda x: torch.stack([layers[i](x[i]) for i in range(4)])):
        assert not rewritten(step, torch.randn(4, 2, 6)).changes


def test_linear_layers_on_one_input_are_one() -> None:
    q, k, v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def step(x: Any) -> Any:
        return F.scaled_dot_product_attention(*(each(x).view(2, 6, 4, 8).transpose(1, 2) for each in (q, k, v)))

    found = rewritten(step, torch.randn(2, 6, 32))
    assert [each.rule for each in found.changes] == ["joined"]
    assert sum(node.call.op == "aten::linear" for node in found.graph.nodes) == 1


# --- the whole ------------------------------------------------------------------------------------------------


def test_a_graph_tells_after_it_was_read_again_what_it_told_before(tmp_path: Any) -> None:
    graph, _, _ = record(Attention("fills").eval(), torch.randn(2, 6, 32))
    files.save(graph, tmp_path / "graph.json")
    again = files.load(tmp_path / "graph.json")
    assert again == graph
    assert rewrite.of(again).changes == rewrite.of(graph).changes


def test_a_graph_that_does_not_tell_its_tensors_is_refused() -> None:
    from madegraphs import graph_of

    with pytest.raises(GraphError, match="a graph of a model does"):
        rewrite.of(graph_of(("aten::relu", ["x"], "y")))
    with pytest.raises(GraphError, match="no rule 'deaf'"):
        rewrite.of(record(torch.relu, X)[0], ["deaf"])


def test_the_command_shows_what_goes_and_keeps_the_graph_without_it(tmp_path: Any, capsys: Any) -> None:
    from xsp.cli import main

    kept = tmp_path / "less.json"
    assert main(["graph", "torchvision:resnet18", "--rewrite", "--save", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "norm, 20 times" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert len(files.load(kept).nodes) == 49
    assert main(["graph", str(kept), "--rewrite"]) == 0
    assert "no removable calls were found" in capsys.readouterr().out


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda a, b: a.relu(),
    "add": lambda a, b: a + b,
    "product": lambda a, b: a @ b.t(),
    "transpose": lambda a, b: a.t(),
    "copy": lambda a, b: a.clone(),
    "contiguous": lambda a, b: a.t().contiguous().t(),
    "double": lambda a, b: a.double().float(),
    "wide": lambda a, b: a.double().sin().float(),
    "rows": lambda a, b: torch.stack([row.tanh() for row in a]),
    "softmax": lambda a, b: a.softmax(-1),
    "row": lambda a, b: a[1:2].expand(4, 4),
    "change": lambda a, b: a.mul_(0.5) if a.is_contiguous() and a._base is None else a.neg(),
    "change part": lambda a, b: a[0].copy_(b[1]).expand(4, 4).clone() if a.is_contiguous() and a._base is None else a,
    "cat": lambda a, b: torch.cat([a]),
}


@pytest.mark.slow
@pytest.mark.parametrize("examples", [50, deep(400)])
def test_random_programs_compute_the_same_after_rewriting(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 30), st.integers(0, 30)), max_size=14),
        st.sets(st.integers(0, 15), min_size=1, max_size=3),
    )
    def holds(calls: list[tuple[str, int, int]], returned: set[int]) -> None:
        def program(x: Any) -> Any:
            made = [x * 1]
            for name, one, other in calls:
                made.append(CALLS[name](made[one % len(made)], made[other % len(made)]))
            return [made[each % len(made)] for each in sorted(returned)]

        rewritten(program, torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))

    holds()
