"""Modules and optimizers that replace each other are one to the kinds of steps; those that work together are not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp.collector import Outline
from xsp.record.autostep import AutoStep
from xsp.record.kinds import Batch, Kinds
from xsp.schema import Kind
from xsp.subjects import REPLACEABLE_AFTER, layout_of

torch = pytest.importorskip("torch")
nn = torch.nn


def net(width: int = 4) -> Any:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


def trained(model: Any, optimizer: Any, times: int = 1, *others: Any) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        out = model(torch.ones(2, 4))
        for other in others:
            out = out + other(torch.ones(2, 4))
        out.sum().backward()
        optimizer.step()


def sgd(*models: Any) -> Any:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=1e-3)


def kinds(tmp_path: Path, program: Callable[[], None]) -> list[tuple[str, int]]:
    """Return the names of the kinds of a program's steps, and how many there were of each."""
    with xsp.profile("p", out=tmp_path / "run", levels="M/L", every=3, samples=False, listener=AutoStep):
        program()
    return [(kind.name, kind.steps) for kind in xsp.load(tmp_path / "run").run.kinds]


@pytest.mark.slow
def test_folds_with_a_model_and_an_optimizer_each_are_one_kind(tmp_path: Path) -> None:
    def folds() -> None:
        for _ in range(5):
            model = net()
            schedule = torch.optim.lr_scheduler.StepLR(sgd(model), 10)  # which keeps the optimizer in a cycle
            trained(model, schedule.optimizer, 12)
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))

    assert kinds(tmp_path, folds) == [("training Sequential 2×4", 60), ("Sequential 2×4", 5)]


@pytest.mark.slow
def test_folds_whose_models_are_kept_are_one_kind_and_their_layers_have_the_same_names(tmp_path: Path) -> None:
    kept = []

    def folds() -> None:
        for _ in range(4):
            kept.append(net())
            trained(kept[-1], sgd(kept[-1]), 12)

    assert kinds(tmp_path, folds) == [("training Sequential 2×4", 48)]
    layers = xsp.analyses.layers(xsp.load(tmp_path / "run")).select("name, calls").fetchall()
    assert dict(layers) == {"Sequential": 1, "0": 1, "1": 1, "2": 1}


@pytest.mark.slow
def test_copies_for_each_task_of_meta_learning_are_one_kind(tmp_path: Path) -> None:
    def tasks() -> None:
        model = net()
        outer = sgd(model)
        for _ in range(20):
            learner = copy.deepcopy(model)
            trained(learner, sgd(learner), 3)
            grads = torch.autograd.grad(learner(torch.ones(2, 4)).sum(), list(learner.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            outer.step()

    result = dict(kinds(tmp_path, tasks))
    assert max(result.values()) >= 58
    assert len(result) <= 4, result


def twins(tmp_path: Path, program: Callable[[Any, Any], None]) -> list[tuple[str, int]]:
    one, other = net(), net()
    return kinds(tmp_path, lambda: program(one, other))


@pytest.mark.slow
def test_two_models_of_one_class_that_take_turns_are_two_kinds(tmp_path: Path) -> None:
    def turns(one: Any, other: Any) -> None:
        first, second = sgd(one), sgd(other)
        for _ in range(30):
            trained(one, first)
            with torch.no_grad():
                other(torch.ones(2, 4))
            trained(other, second)

    result = dict(twins(tmp_path, turns))
    assert sum(count for name, count in result.items() if "(2)" in name) >= 28, result


@pytest.mark.slow
def test_towers_are_not_taken_for_one_called_twice(tmp_path: Path) -> None:
    def towers(one: Any, other: Any) -> None:
        trained(one, sgd(one, other), 30, other)

    assert twins(tmp_path, towers) == [("training Sequential 2×4 + Sequential(2) 2×4", 30)]


@pytest.mark.slow
def test_the_average_of_a_models_weights_is_not_the_model(tmp_path: Path) -> None:
    def averaged(one: Any, other: Any) -> None:
        trained(one, sgd(one), 20)
        for model in (one, other.eval()):
            with torch.no_grad():
                model(torch.ones(2, 4))

    names = [name for name, _ in twins(tmp_path, averaged)]
    assert names == ["training Sequential 2×4", "Sequential 2×4", "Sequential(2) 2×4"]


@pytest.mark.slow
def test_a_teacher_that_was_trained_first_is_not_its_student(tmp_path: Path) -> None:
    def distilled(one: Any, other: Any) -> None:
        trained(one, sgd(one), 20)
        optimizer = sgd(other)
        for _ in range(30):
            out = other(torch.ones(2, 4))
            with torch.no_grad():
                soft = one(torch.ones(2, 4))
            (out - soft).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    result = twins(tmp_path, distilled)
    assert [count for _, count in result] == [20, 30], result
    assert "Sequential(2)" in result[1][0]


@pytest.mark.slow
def test_other_widths_strides_or_settings_are_other_models(tmp_path: Path) -> None:
    def searched() -> None:
        for width, stride in ((4, 1), (8, 1), (8, 2)):
            model = nn.Sequential(nn.Conv1d(3, width, 3, stride=stride))
            optimizer = sgd(model)
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.ones(2, 3, 9)).sum().backward()
                optimizer.step()
            del model, optimizer
            gc.collect()

    assert len(kinds(tmp_path, searched)) == 3


def pairs() -> Iterator[Any]:
    yield net
    yield lambda: sgd(net())


@pytest.mark.parametrize("make", list(pairs()), ids=["module", "optimizer"])
def test_a_number_is_free_once_its_holder_is_gone(make: Callable[[], Any]) -> None:
    outline = Outline()
    one, other = make(), make()
    numbers = [outline.register(one), outline.register(other)]
    assert numbers[0] != numbers[1]
    del one
    gc.collect()
    third, fourth = make(), make()
    assert outline.register(third) == numbers[0]
    assert outline.register(fourth) not in numbers
    assert outline.register(nn.MSELoss()) == outline.register(nn.MSELoss())


@pytest.mark.slow
def test_what_is_met_in_training_does_not_take_the_number_of_an_average_nor_wait_for_what_was_replaced() -> None:
    outline = Outline()
    one, average = net(), net()
    numbers = outline.register(one), outline.register(average, trains=False)
    del average
    gc.collect()
    outline.subjects.step = 2 * REPLACEABLE_AFTER
    other, copied = net(), net()
    assert (outline.register(other), outline.register(copied, trains=False)) == numbers
    del other
    gc.collect()
    assert outline.register(net()) == numbers[0], "the first one is still there, and was replaced before"


def test_one_that_is_used_beside_its_successor_gets_its_number_back() -> None:
    outline = Outline()
    one, other = net(), net()
    first = outline.register(one)
    outline.subjects.step = outline.thread = REPLACEABLE_AFTER
    assert outline.register(other) == first
    outline.append(("call", first, type(other)))
    assert id(one) not in outline.numbers
    assert outline.register(one) == first
    assert outline.numbers[id(other)] == outline[0][1] != first


def test_a_module_that_may_do_anything_is_told_by_itself() -> None:
    class Odd(nn.Linear):
        def modules(self) -> Any:
            raise RuntimeError("no")

    outline = Outline()
    one, other = Odd(2, 2), Odd(2, 2)
    assert outline.register(one) != outline.register(other)


# --- where the samples of an input are ----------------------------------------------------------------------


class Words(nn.Module):  # type: ignore[misc,name-defined]
    """A language model as in many tutorials: words × sentences, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(), nn.Embedding(50, 16)
        self.rnn, self.decoder = nn.LSTM(16, 16), nn.Linear(16, 50)


class Bags(nn.Module):
    """Sums of rows of a table for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(100, 8), nn.Linear(8, 1)


class Images(nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Linear(8, 2)


def encoder(batch_first: bool) -> Any:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, batch_first=batch_first), 2, enable_nested_tensor=False
    )


@pytest.mark.parametrize(
    ("module", "shape", "batch"),
    [
        (nn.LSTM(32, 8), (50, 8, 32), Batch(8, "input")),
        (nn.GRU(32, 8), (50, 32), Batch(1, "input")),
        (nn.RNN(32, 8, batch_first=True), (8, 50, 32), Batch(8, "input")),
        (nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LSTM(32, 8)), (50, 8, 32), Batch(8, "input")),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (3, 64, 64), Batch(1, "input")),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (16, 3, 64, 64), Batch(16, "input")),
        (nn.Conv1d(4, 4, 3), (4, 100), Batch(1, "input")),
        (nn.MultiheadAttention(32, 4), (20, 6, 32), Batch(6, "input")),
        (encoder(batch_first=False), (20, 6, 32), Batch(6, "input")),
        (encoder(batch_first=True), (6, 20, 32), Batch(6, "input")),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (8, 4), Batch(8, "input")),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 2)), (5, 2, 4), Batch(5, "input")),
        (Words(), (35, 20), Batch(20, "guess")),  # its program may turn what it is given
        (Images(), (16, 3, 64, 64), Batch(16, "input")),
        (nn.Sequential(nn.EmbeddingBag(100, 8), nn.Linear(8, 1)), (64, 20), Batch(64, "input")),
        (Bags(), (64, 20), Batch(64, "input")),
        (Bags(), (2663,), Batch(None, None)),  # indices of all samples, one after the other
        (Images(), (28, 64, 64), Batch(28, "guess")),  # one image, or 28 that get their channel inside
    ],
)
def test_samples_are_counted_where_the_class_of_the_module_has_them(
    module: Any, shape: tuple[int, ...], batch: Batch
) -> None:
    kinds = Kinds({7: layout_of(module)})
    assert kinds.count_step([(Kind.FORWARD, 7, type(module), False, shape)]).batch == batch


def test_beside_a_module_whose_class_tells_the_first_dimension_of_another_does_not_count() -> None:
    kinds = Kinds({7: layout_of(nn.LSTM(32, 64)), 8: layout_of(nn.Linear(64, 10))})
    calls = [(Kind.FORWARD, 7, nn.LSTM, True, (50, 8, 32)), (Kind.FORWARD, 8, nn.Linear, True, (50, 8, 64))]
    assert kinds.count_step(calls).batch == Batch(8, "guess")


def test_a_module_that_cannot_be_looked_into_has_no_layout() -> None:
    class Odd:
        def children(self) -> None:
            raise ValueError("mine")

    assert layout_of(Odd()) is None


@pytest.mark.slow
def test_a_run_of_a_time_first_network_counts_sentences(tmp_path: Path) -> None:
    model, words = nn.LSTM(8, 8), torch.zeros(50, 6, 8)
    with xsp.profile(out=tmp_path / "run", levels="M/L") as profile:
        for _ in range(profile.schedule.steps_for(repeats=3)):
            with profile.step():
                model(words)
    (kind,) = xsp.load(tmp_path / "run").run["kinds"]
    assert (kind["batch_size"], kind["batch_source"]) == (6, "input")
