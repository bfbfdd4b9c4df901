"""Modules that are called in turn: which calls are one pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from depth import deep

pytest.importorskip("torch")

import torch
from torch import nn

import xsp
from xsp.record.autostep import AutoStep


def steps_of(out: Path, iteration: Callable[[int], Any], times: int = 20) -> Counter[int]:
    """Return how many steps have each number of calls."""
    with xsp.profile("turns", out=out, levels="M", warmup=0, samples=False, listener=AutoStep), torch.no_grad():
        for number in range(times):
            iteration(number)
    trace = xsp.load(out)
    return Counter({kind["name"]: kind["steps"] for kind in trace.run["kinds"]})


X = torch.ones(2, 4)
LAYERS = [nn.Linear(4, 4).eval() for _ in range(4)]


@pytest.mark.parametrize("empty", ["none", deep("between"), deep("at the end"), "at both ends"])
def test_layers_called_by_hand_are_one_step_after_three_passes(tmp_path: Path, empty: str) -> None:
    def iteration(_: int) -> None:
        if empty == "at both ends":
            nn.Flatten()(X)
        for layer in LAYERS:
            layer(X)
            if empty == "between" and layer is not LAYERS[-1]:
                nn.ReLU()(X)
        if empty.startswith("at"):
            nn.Softmax(-1)(X)

    steps = steps_of(tmp_path / "run", iteration)
    assert max(steps.values()) == 17 - (empty == "at both ends"), steps


@pytest.mark.parametrize(
    "order",
    [
        lambda number: [0, 1],
        deep(lambda number: [0]),
        deep(lambda number: [0, 1, 1, 1, 1]),
        deep(lambda number: [0, 1, 0, 2]),
        lambda number: random.Random(number).sample(range(4), 3),
    ],
    ids=["two in turn", "one", "a decoder after its encoder", "one twice", "no order"],
)
def test_other_calls_are_steps_of_their_own(tmp_path: Path, order: Callable[[int], list[int]]) -> None:
    steps = steps_of(tmp_path / "run", lambda number: [LAYERS[index](X) for index in order(number)])
    assert sum(steps.values()) == 20 * len(order(0)), steps


def test_a_pass_that_is_left_is_no_step_and_the_next_one_is(tmp_path: Path) -> None:
    def iteration(number: int) -> None:
        for layer in LAYERS[: 2 if number in (10, 12) else None]:
            layer(X)

    steps = steps_of(tmp_path / "run", iteration)
    assert max(steps.values()) == 15


def test_another_order_ends_the_sequence_and_is_learned(tmp_path: Path) -> None:
    steps = steps_of(
        tmp_path / "run", lambda number: [layer(X) for layer in (LAYERS if number < 10 else LAYERS[::-1])], times=20
    )
    assert steps["Linear 2×4 + Linear(2) 2×4 + Linear(3) 2×4 + 1 more"] == 7
    assert steps["Linear(4) 2×4 + Linear(3) 2×4 + Linear(2) 2×4 + 1 more"] == 6


def test_training_that_begins_with_the_same_modules_is_training(tmp_path: Path) -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    optimizer = torch.optim.SGD([parameter for layer in layers for parameter in layer.parameters()], lr=1e-3)

    def iteration(number: int) -> None:
        with torch.set_grad_enabled(number >= 10):
            y = X
            for layer in layers:
                y = layer.train(number >= 10)(y)
            if number >= 10:
                y.sum().backward()
                optimizer.step()

    steps = steps_of(tmp_path / "run", iteration)
    assert sum(count for name, count in steps.items() if name.startswith("training")) == 10
