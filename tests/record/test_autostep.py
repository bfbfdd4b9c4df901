"""Steps of a program that names none: where they begin and end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import xsp
from xsp.record.autostep import AutoStep
from xsp.record.order import LONGEST_PREFIX, Order
from xsp.subjects import Subjects


class Program:
    """Weights that no module holds, and what trains them."""

    def __init__(self) -> None:
        self.weight = torch.zeros(4, 4, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-3)
        self.criterion = torch.nn.MSELoss()
        self.net = torch.nn.Linear(4, 4)

    def loss(self) -> Any:
        """Return a loss, after a forward pass of at least two milliseconds."""
        time.sleep(0.002)
        return (torch.ones(2, 4) @ self.weight).sum()

    def plain(self) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def with_criterion(self) -> None:
        """Take a step whose loss is a module without parameters."""
        self.criterion(self.loss(), torch.zeros(())).backward()
        self.optimizer.step()

    def by_hand(self) -> None:
        """Take a step without an optimizer."""
        self.loss().backward()
        with torch.no_grad():
            self.weight -= 1e-3 * self.weight.grad
        self.weight.grad = None

    def evaluate(self) -> None:
        """Call a module that has parameters."""
        with torch.no_grad():
            self.net(torch.ones(3, 4))


def recorded(out: Path, work: list[Callable[[], None]]) -> xsp.Trace:
    with xsp.profile("functional", out=out, levels="M", samples=False, listener=AutoStep):
        for each in work:
            each()
    return xsp.load(out)


def kinds_of(trace: xsp.Trace) -> Counter[str]:
    return Counter({kind["name"]: kind["steps"] for kind in trace.run["kinds"]})


def test_a_program_that_only_predicts_does_not_fill_the_memory() -> None:
    order, net = Order(Subjects()), torch.nn.Linear(2, 2)
    for _ in range(1000):
        order.on_call(net, trains=False)
    assert len(order._calls_before) == LONGEST_PREFIX + 1
    assert not order.begins_prefix(net)
    assert order.contradicts_prefix(net)


def test_calls_that_passed_unseen_are_no_prefix_of_a_training_step() -> None:
    """Of a rollout that passes in stretches, only the call after the last stretch may be seen."""
    net, optimizer = torch.nn.Linear(1, 1), object()
    order = Order(Subjects())
    for _ in range(3):
        order.on_unseen_calls()
        order.on_call(net, trains=False)
        order.on_call(net, trains=True)
        order.on_optimizer_step(optimizer)
    assert not order.begins_prefix(net)


@pytest.mark.parametrize("of", ["plain", "with_criterion"])
def test_a_step_holds_its_forward_pass(tmp_path: Path, of: str) -> None:
    trace = recorded(tmp_path / "run", [getattr(Program(), of)] * 40)
    ((shortest_ns, most_between_ns),) = trace.sql(
        "SELECT min(dur_ns), max(before_ns - dur_ns) FROM loop WHERE step > 1 AND status = 'ok'"
    ).fetchall()
    assert shortest_ns >= 2_000_000
    assert most_between_ns < 0
    assert sum(kinds_of(trace).values()) == 40
    assert any("without calling a module" in note["text"] for note in trace.run["notes"])
    assert not any("never closed" in note["text"] for note in trace.run["notes"])


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_whose_optimizers_step_in_hooks_ends_with_the_backward_pass(tmp_path: Path, micro_batches: int) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ready: Counter[torch.nn.Parameter] = Counter()

    def hook(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        ready[parameter] += 1
        if ready[parameter] % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()

    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        parameter.register_post_accumulate_grad_hook(partial(hook, optimizer=optimizer))

    def step() -> None:
        for _ in range(micro_batches):
            net(torch.ones(2, 4)).sum().backward()

    trace = recorded(tmp_path / "run", [step] * 20)
    [kind] = trace.run["kinds"]
    assert (kind["steps"], kind["training"], kind["batch_size"]) == (20, True, 2 * micro_batches)
    ((hooked, outside),) = trace.sql(
        "SELECT count(*), count(*) FILTER (b.step IS NULL) FROM spans o LEFT JOIN spans b ON b.step = o.step "
        "AND b.kind = 'backward' AND o.start_ns BETWEEN b.start_ns AND b.start_ns + b.dur_ns WHERE o.kind = 'optimizer'"
    ).fetchall()
    assert hooked > 0
    assert not outside


@pytest.mark.slow
def test_without_an_optimizer_a_step_ends_with_the_backward_pass(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run", [Program().by_hand] * 120)
    ((count, shortest_ns),) = trace.sql("SELECT sum(steps), min(dur_ns) FROM loop").fetchall()
    assert count > 40
    assert shortest_ns >= 2_000_000
    assert set(kinds_of(trace)) == {"training"}


@pytest.mark.slow
def test_calls_of_a_module_in_between_are_steps_of_their_own(tmp_path: Path) -> None:
    program = Program()
    trace = recorded(tmp_path / "run", ([program.plain] * 20 + [program.evaluate] * 5) * 3)
    assert kinds_of(trace) == {"SGD alone": 1, "training by SGD": 59, "Linear 3×4": 15}  # the first one was not known


@pytest.mark.slow
def test_a_program_that_goes_on_with_modules_has_steps_that_begin_with_their_calls(tmp_path: Path) -> None:
    program = Program()
    optimizer = torch.optim.SGD(program.net.parameters(), lr=1e-3)

    def train() -> None:
        time.sleep(0.002)
        program.net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    trace = recorded(tmp_path / "run", [program.plain] * 20 + [train] * 20)
    assert kinds_of(trace)["training Linear 2×4"] == 20
    assert trace.sql("SELECT min(before_ns) >= 2000000 FROM loop WHERE step > 21").fetchall() == [(True,)]


@pytest.mark.slow
def test_training_of_modules_is_not_changed_by_a_loss_that_is_one(tmp_path: Path) -> None:
    program, net = Program(), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train() -> None:
        program.criterion(net(torch.ones(2, 4)), torch.ones(2, 4)).backward()
        optimizer.step()
        time.sleep(0.002)

    trace = recorded(tmp_path / "run", [train] * 30)
    assert not any("without calling a module" in note["text"] for note in trace.run["notes"])
    assert trace.sql("SELECT min(before_ns) >= 2000000 FROM loop WHERE step > 0").fetchall() == [(True,)]


@pytest.mark.parametrize("evaluated", [True, False], ids=["evaluated", "teacher"])
def test_an_evaluation_before_each_training_step_is_none_of_it_and_a_teacher_s_call_is(
    tmp_path: Path, evaluated: bool
) -> None:
    net, teacher = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def epoch() -> None:
        net.train()
        if not evaluated:
            with torch.no_grad():
                teacher(torch.ones(2, 4))
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if evaluated:
            net.eval()
            with torch.no_grad():
                net(torch.ones(2, 4))

    kinds = kinds_of(recorded(tmp_path / "run", [epoch] * 40))
    if evaluated:
        assert kinds == {"training Linear 2×4": 40, "Linear 2×4": 40}
    else:
        assert kinds["training Linear 2×4 + Linear(2) 2×4"] >= 38, "the first two are not known yet"


@pytest.mark.parametrize("accumulates", [True, False], ids=["attack", "gradients alone"])
def test_gradients_that_are_asked_for_before_the_backward_pass_are_of_the_same_batch(
    tmp_path: Path, accumulates: bool
) -> None:
    net, batch = torch.nn.Linear(4, 4), torch.ones(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(3):
            moved = batch.clone().requires_grad_()
            torch.autograd.grad(net(moved).sum(), [moved, *net.parameters()])
        if accumulates:
            net(batch).sum().backward()
        optimizer.step()

    [kind] = recorded(tmp_path / "run", [step] * 20).run["kinds"]
    assert (kind["batch_size"], kind["batch_source"]) == (8 if accumulates else 3 * 8, "guess")


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True], ids=["saliency", "an input that is trained"])
def test_gradients_of_a_model_in_evaluation_mode_are_no_training_without_modules(tmp_path: Path, moves: bool) -> None:
    net, image = torch.nn.Linear(4, 4).eval(), torch.zeros(8, 4, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=1e-3)

    def explain() -> None:
        net(image).sum().backward()
        if moves:
            optimizer.step()

    trace = recorded(tmp_path / "run", [explain] * 150)
    assert kinds_of(trace)["Linear 8×4"] == 150
    assert not any("without calling a module" in note["text"] for note in trace.run["notes"])
