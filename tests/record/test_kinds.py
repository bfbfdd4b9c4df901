"""Kinds of steps, by the outline of what each step did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp.record.autostep import AutoStep
from xsp.record.kinds import MOST_KINDS, MOST_WORDS, OTHER, Batch, Kinds
from xsp.schema import Kind


class Net: ...


class Critic: ...


BEGIN, END = (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)


def call(module: int = 1, *shape: int, type: type = Net, trains: bool = True) -> tuple[Any, ...]:
    return (Kind.FORWARD, module, type, trains, shape)


def stepped(optimizer: int = 9) -> list[tuple[Any, ...]]:
    return [(Kind.OPTIMIZER, 0), (Kind.OPTIMIZER, optimizer, dict)]


def named(*outlines: list[tuple[Any, ...]]) -> list[str]:
    kinds = Kinds()
    return [kinds.count_step(outline).kind.name for outline in outlines]


def test_sizes_count_by_powers_of_two() -> None:
    lengths = [100, 120, 64, 127, 1, 40, 1]
    assert [Kinds().count_step([call(1, 8, 100)]).kind.number] == [0]
    kinds = Kinds()
    assert [kinds.count_step([call(1, 8, length)]).kind.number for length in lengths] == [0, 0, 0, 0, 1, 2, 1]


def test_steps_that_all_differ_do_not_fill_the_memory() -> None:
    kinds = Kinds()
    for length in range(90):
        kinds.count_step([call(1, 1, length, trains=False) for length in range(length, length + 900)])
    assert sum(map(len, kinds._by_outline)) <= MOST_WORDS
    for number in range(3 * MOST_KINDS):
        kinds.count_step([call(number, 4)])
    assert len(kinds._by_form) <= MOST_KINDS
    assert kinds.all[-1].name == OTHER


@pytest.mark.parametrize("count", [1, 5, 17, 18, 400])
def test_equal_steps_are_counted_together_as_one_by_one(count: int) -> None:
    usual, rare, (one_by_one, together) = (call(1, 4),), (call(2, 4),), (Kinds(), Kinds())
    for kinds in (one_by_one, together):
        for words in [usual, rare] * 9:
            kinds.count_step(words)
    for _ in range(count):
        one_by_one.count_step(usual)
    together.count_equal_steps(usual, count)
    for words in [rare, usual, rare]:
        assert one_by_one.expected_kind() == together.expected_kind()
        for kinds in (one_by_one, together):
            kinds.count_step(words)
    assert [kind.step_count for kind in together.all] == [kind.step_count for kind in one_by_one.all]


def test_two_modules_of_one_class_are_two_kinds_and_named_so() -> None:
    assert named([call(1, 4)], [call(2, 4)]) == ["Net 4", "Net(2) 4"]


def test_training_and_inference_of_one_module_are_two_kinds() -> None:
    found = named([call(1, 4), BEGIN, END, *stepped()], [call(1, 4, trains=False)])
    assert found == ["training Net 4", "Net 4"]


def test_equal_calls_in_a_row_count_by_powers_of_two() -> None:
    decode = call(1, 1, 1, trains=False)
    prefill = call(1, 1, 40, trains=False)
    kinds = Kinds()
    assert [kinds.count_step([prefill, *[decode] * n]).kind.number for n in (50, 60, 20)] == [0, 0, 1]


def test_what_checkpointing_computes_again_is_no_call() -> None:
    plain = [call(1, 8), BEGIN, END, *stepped()]
    again = [call(1, 8), BEGIN, call(2, 8), call(3, 8), END, *stepped()]
    assert len(set(named(plain, again))) == 1


def test_the_next_kind_is_told_by_the_first_call_else_by_the_kind_before() -> None:
    kinds = Kinds()
    assert kinds.expected_kind() is None
    a, b = [call(1, 4)], [call(2, 4)]
    for outline in (a, b, a, b):
        kinds.count_step(outline)
    assert kinds.expected_kind() == 0, "after b came a"
    assert kinds.expected_kind(b[0]) == 1
    assert kinds.expected_kind(call(3, 4)) is None


def test_a_rare_step_that_begins_with_the_same_call_does_not_change_what_is_expected() -> None:
    kinds = Kinds()
    common, rare = [call(1, 4), BEGIN, END, *stepped()], [*[call(1, 4)] * 21, BEGIN, END, *stepped()]
    for outline in (*[common] * 3, rare, common):
        kinds.count_step(outline)
    assert kinds.expected_kind(common[0]) == 0
    assert kinds.expected_kind() == 0


def test_kinds_that_alternate_are_expected_in_turn() -> None:
    kinds = Kinds()
    discriminator, generator = [call(1, 4), *stepped()], [call(1, 4), call(2, 4), *stepped()]
    found = []
    for outline in [discriminator, generator] * 6:
        found.append(kinds.expected_kind(outline[0]))
        kinds.count_step(outline)
    assert found[2:] == [0, 1] * 5


def test_a_program_that_does_something_else_in_each_step_has_one_more_kind_for_all_that() -> None:
    kinds = Kinds()
    for size in range(3 * MOST_KINDS):
        kinds.count_step([call(size, 4)])
    assert len(kinds.all) == MOST_KINDS + 1
    assert (kinds.all[-1].name, kinds.all[-1].step_count) == (OTHER, 2 * MOST_KINDS)


@pytest.mark.parametrize(
    ("outline", "batch"),
    [
        ([call(1, 32, 3)], Batch(32, "input")),
        ([call(1, 8, 3), BEGIN, END] * 4 + stepped(), Batch(32, "guess")),  # gradient accumulation
        ([call(1, 16, 3), call(1, 16, 3), BEGIN, END, *stepped()], Batch(16, "guess")),  # siamese
        ([call(1, 16, 3), call(2, 64, 3, type=Critic), BEGIN, END, *stepped()], Batch(64, "guess")),
        ([stepped()[0], *[call(1, 64, 3), BEGIN, END] * 4, stepped()[1]], Batch(64, "guess")),  # a closure, four times
        ([call(1, 4)], Batch(4, "guess")),  # one sample of four numbers, or four ids
        ([(Kind.FORWARD, 1, Net, True, None)], Batch(None, None)),
        ([], Batch(None, None)),
    ],
)
def test_samples_are_those_of_the_whole_step(outline: list[tuple[Any, ...]], batch: Batch) -> None:
    assert Kinds().count_step(outline).batch == batch


def test_kinds_of_one_name_are_told_apart_by_their_optimizer() -> None:
    class Adam: ...

    own = [call(1, 4), BEGIN, END, (Kind.OPTIMIZER, 7, Adam)]
    other = [call(1, 4), BEGIN, END, (Kind.OPTIMIZER, 8, Adam)]
    third = [call(1, 4), BEGIN, END, (Kind.OPTIMIZER, 6, Adam)]
    assert named(own, other, third) == ["training Net 4", "training Net 4, Adam", "training Net 4, Adam #2"]


@pytest.mark.slow
def test_a_loss_made_anew_in_each_step_is_no_other_kind_and_layers_of_two_models_are_not_added_up(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn
    policy, value = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=1e-3)
    kept = []
    with xsp.profile("two", out=tmp_path / "run", levels="M/L", every=2, samples=False, listener=AutoStep):
        for _ in range(30):
            loss = nn.MSELoss()
            kept.append(loss)  # so that no two of them have the same id
            optimizer.zero_grad()
            loss(policy(torch.ones(2, 4)), value(torch.ones(2, 4))).backward()
            optimizer.step()
    trace = xsp.load(tmp_path / "run")
    assert [kind.steps for kind in trace.run.kinds] == [30]
    names = dict(xsp.analyses.layers(trace).select("name, calls").fetchall())
    assert names == dict.fromkeys(("Sequential", "0", "Sequential(2)", "Sequential(2).0", "MSELoss"), 1)


@pytest.mark.parametrize("pattern", [[1, 1, 2], [1, 1, 1, 1, 1, 1, 2], [1, 2, 3], [1, 1, 2, 2]])
def test_the_next_kind_is_that_of_the_repeated_pattern(pattern: list[int]) -> None:
    kinds, missed = Kinds(), 0
    for round_ in range(20):
        for module in pattern:
            expected = kinds.expected_kind()
            actual = kinds.count_step([call(module, 4)]).kind.number
            missed += round_ >= 4 and expected != actual
    assert missed == 0


def test_a_rare_kind_changes_no_expectation_for_long() -> None:
    kinds = Kinds()
    for number in range(200):
        kinds.count_step([call(2 if number in (60, 61, 130) else 1, 4)])
    assert kinds.expected_kind() == 0
