"""Steps of a program that names none: where they begin and end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from depth import deep, first

pytest.importorskip("torch")

import torch

import xsp
from xsp.record.autostep import MOST_APART, AutoStep
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
        """Return a loss, after a forward pass that is longer than what a busy machine does between two steps."""
        time.sleep(0.02)
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


@pytest.mark.parametrize("of", [deep("plain"), "with_criterion"])
def test_a_step_holds_its_forward_pass(tmp_path: Path, of: str) -> None:
    trace = recorded(tmp_path / "run", [getattr(Program(), of)] * 40)
    ((shortest_ns, most_between_ns),) = trace.sql(
        "SELECT min(dur_ns), max(before_ns - dur_ns) FROM loop WHERE step > 1 AND status = 'ok'"
    ).fetchall()
    assert shortest_ns >= 20_000_000
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
    kinds = kinds_of(trace)
    assert kinds["training Linear 8×4"] >= 148 if moves else kinds["Linear 8×4"] == 150
    assert not any("without calling a module" in note["text"] for note in trace.run["notes"])


@pytest.mark.parametrize("validates", [False, True], ids=["training alone", "with validations"])
@pytest.mark.parametrize("by_closure", [False, True], ids=["Adam", "LBFGS"])
def test_an_image_that_is_optimised_through_layers_of_a_fixed_model_has_training_steps(
    tmp_path: Path, by_closure: bool, validates: bool
) -> None:
    """Each call of a layer was a step, or a pass through them, and the backward pass lay between steps."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    image = torch.zeros(8, 4, requires_grad=True)
    optimizer = torch.optim.LBFGS([image], max_iter=3) if by_closure else torch.optim.Adam([image])

    def forward() -> Any:
        x = image
        for layer in layers:
            x = layer(x)
        return (x - 1).pow(2).sum()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        return loss

    def step() -> None:
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    def validate() -> None:
        with torch.no_grad():
            forward()

    steps = ([step] * 10 + [validate] * validates) * 4
    kinds = kinds_of(recorded(tmp_path / "run", steps))
    assert sum(count for name, count in kinds.items() if name.startswith("training")) >= 38, kinds


class Transform(torch.nn.Module):
    """A module without parameters that takes a millisecond, as a transform of images does."""

    def forward(self, x: Any) -> Any:
        time.sleep(0.001)
        return x * 2


MULTIPLY = {
    "a module": Transform,
    "modules in one": lambda: torch.nn.Sequential(Transform(), torch.nn.Identity()),
    "spectrogram": lambda: _with_buffer(Transform()),
}


def _with_buffer(module: torch.nn.Module) -> torch.nn.Module:
    module.register_buffer("window", torch.ones(4))
    return module


@pytest.mark.parametrize("no_grad_around", [deep("the model"), "all"])
@pytest.mark.parametrize("of", first(1, MULTIPLY))
def test_transforms_and_losses_between_calls_of_a_model_are_no_steps(
    tmp_path: Path, of: str, no_grad_around: str
) -> None:
    net, transform, criterion = torch.nn.Linear(4, 4).eval(), MULTIPLY[of](), torch.nn.MSELoss()

    def predict() -> None:
        x = transform(transform(torch.ones(2, 4)))
        with torch.no_grad():
            outputs = net(x)
        criterion(outputs, x)

    def without_gradients() -> None:
        with torch.no_grad():
            predict()

    trace = recorded(tmp_path / "run", [predict if no_grad_around == "the model" else without_gradients] * 200)
    kinds = kinds_of(trace)
    assert kinds["Linear 2×4"] == 200, kinds
    assert sum(kinds.values()) <= 202, "only those before the first call of the model"
    ((shortest_ns,),) = trace.sql(
        "SELECT min(before_ns) FROM loop WHERE step > 2 AND kind = "
        "(SELECT kind FROM loop GROUP BY kind ORDER BY sum(steps) DESC LIMIT 1)"
    ).fetchall()
    assert shortest_ns >= 2_000_000, "the transforms' time lies between steps"
    outside = trace.sql("SELECT count(*) FROM spans WHERE step IS NULL AND kind IN ('module', 'forward')").fetchall()
    assert outside == [(0,)]


@pytest.mark.parametrize("no_grad_around", ["the model", deep("all")])
def test_transforms_of_a_validation_begin_no_training_step(tmp_path: Path, no_grad_around: str) -> None:
    net, transform, criterion = torch.nn.Linear(4, 4), Transform(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train() -> None:
        x = transform(torch.ones(2, 4))
        criterion(net.train()(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def validate() -> None:
        with torch.set_grad_enabled(no_grad_around == "the model"):
            x = transform(torch.ones(3, 4))
            with torch.no_grad():
                outputs = net.eval()(x)
            criterion(outputs, x)

    trace = recorded(tmp_path / "run", ([train] * 40 + [validate] * 40) * 3)
    kinds = kinds_of(trace)
    assert kinds["Linear 3×4"] == 120
    assert sum(steps for name, steps in kinds.items() if name.startswith("training")) == 120, kinds
    ((shortest_ns,),) = trace.sql(
        "SELECT min(dur_ns) FROM loop JOIN (SELECT unnest(?) AS kind) USING (kind) WHERE step > 1",
        [[kind["kind"] for kind in trace.run["kinds"] if kind["training"]]],
    ).fetchall()
    assert shortest_ns >= 1_000_000, "a transform is the beginning of a training step"


def test_a_teacher_that_sees_transformed_images_is_part_of_the_training_step(tmp_path: Path) -> None:
    net, teacher, transform = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2).eval(), Transform()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        x = transform(torch.ones(2, 4))
        with torch.no_grad():
            teacher(x)
        net(x).sum().backward()
        optimizer.step()

    kinds = kinds_of(recorded(tmp_path / "run", [step] * 40))
    assert max(kinds.values()) >= 38, kinds
    assert max(kinds, key=lambda name: kinds[name]).startswith("training"), kinds


class Packed(torch.nn.Module):
    """A module without parameters that saves weights of its own form, as quantized ones and engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 2.0]

    def forward(self, x: Any) -> Any:
        return x * self.weights[0]

    def get_extra_state(self) -> Any:
        return self.weights

    def set_extra_state(self, state: Any) -> None:
        self.weights = state


def test_a_model_whose_weights_are_packed_is_one(tmp_path: Path) -> None:
    net, packed, x = torch.nn.Linear(4, 4).eval(), Packed().eval(), torch.ones(2, 4)
    with torch.no_grad():
        trace = recorded(tmp_path / "run", [lambda: net(x)] * 40 + [lambda: packed(x)] * 60)
    assert kinds_of(trace) == {"Linear 2×4": 40, "Packed 2×4": 60}


def test_what_a_thread_only_calls_from_some_point_on_are_steps_again(tmp_path: Path) -> None:
    net, function, x = torch.nn.Linear(4, 4).eval(), torch.nn.Softmax(dim=1), torch.ones(2, 4)
    with torch.no_grad():
        trace = recorded(tmp_path / "run", [lambda: net(x)] * 10 + [lambda: function(x)] * (MOST_APART + 50))
    assert kinds_of(trace)["Softmax 2×4"] == 50


def test_transforms_in_another_thread_are_no_steps(tmp_path: Path) -> None:
    net, transform, x = torch.nn.Linear(4, 4).eval(), Transform(), torch.ones(2, 4)

    def prefetch() -> None:
        for _ in range(100):
            transform(x)

    with torch.no_grad(), xsp.profile("run", out=tmp_path / "run", levels="M", samples=False, listener=AutoStep):
        net(x)
        thread = threading.Thread(target=prefetch)
        thread.start()
        for _ in range(60):
            net(x)
            time.sleep(0.002)
        thread.join()
    assert kinds_of(xsp.load(tmp_path / "run")) == {"Linear 2×4": 61}


def test_an_error_in_a_call_between_steps_leaves_the_next_ones_as_they_are(tmp_path: Path) -> None:
    net, x = torch.nn.Linear(4, 4).eval(), torch.ones(2, 4)

    class Breaks(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyError("a broken image")

    def predict() -> None:
        with torch.no_grad():
            net(x)
        with pytest.raises(KeyError):
            Breaks()(x)

    assert kinds_of(recorded(tmp_path / "run", [predict] * 100)) == {"Linear 2×4": 100}


def test_a_model_that_hides_in_a_module_without_parameters_has_steps(tmp_path: Path) -> None:
    net, hidden, x = torch.nn.Linear(4, 4).eval(), torch.nn.Linear(4, 2).eval(), torch.ones(2, 4)

    class Hides(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = [hidden]

        def forward(self, x: Any) -> Any:
            return self.members[0](x)

    hides = Hides()
    with torch.no_grad():
        trace = recorded(tmp_path / "run", [lambda: net(x)] * 40 + [lambda: hides(x)] * 60)
    assert sorted(kinds_of(trace).values()) == [40, 60]
