"""Steps of traces that name none: what repeats in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import xsp
from xsp import account
from xsp.store.trace import Trace


class Loop:
    """A small model with what trains it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.other = torch.optim.Adam([nn.Parameter(torch.ones(2))])
        self.x = torch.randn(4, 8)

    def backward(self) -> None:
        self.model(self.x).sum().backward()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def accumulate(self) -> None:
        self.backward()
        self.backward()
        self.optimizer.step()

    def train_with_two(self) -> None:
        self.train()
        self.other.step()

    def validate_and_train(self) -> None:
        with torch.no_grad():
            self.model(self.x).argmax(-1)
        self.train()

    def train_in_backward(self) -> None:
        for parameter in self.model.parameters():
            if not parameter._post_accumulate_grad_hooks:
                own = torch.optim.SGD([parameter], lr=0.01)
                parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
        self.backward()

    def train_with_closure(self) -> None:
        self.optimizer.step(lambda: self.model(self.x).sum().backward())

    def train_in_turns(self) -> None:
        self.other.zero_grad()
        (self.other.param_groups[0]["params"][0] * self.model(self.x).detach().mean()).sum().backward()
        self.other.step()
        self.train()

    def infer(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def answer(self) -> None:
        with record_function("tokenize"):
            torch.arange(64).sum()
        with record_function("answer"):
            self.infer()


def recorded(tmp_path: Path, work: Callable[[Loop], None], times: int) -> Trace:
    loop = Loop()
    work(loop)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof:
        for _ in range(times):
            work(loop)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    return xsp.load(tmp_path / "trace.json")


def steps_of(trace: Trace) -> list[tuple[str, int, int]]:
    rows = "SELECT name, start_ns, start_ns + dur_ns FROM spans WHERE kind = 'step' ORDER BY start_ns"
    return trace.sql(rows).fetchall()


@pytest.mark.parametrize(
    ("work", "ended_by"),
    [
        (Loop.train, "an optimizer's step"),
        (Loop.accumulate, "an optimizer's step"),
        (Loop.train_with_two, "an optimizer's step"),
        (Loop.validate_and_train, "an optimizer's step"),
        (Loop.train_in_turns, "an optimizer's step"),
        (Loop.train_with_closure, "an optimizer's step"),
        (Loop.backward, "a backward pass"),
        (Loop.train_in_backward, "a backward pass"),
        (Loop.answer, "the call before the next tokenize"),
    ],
)
def test_a_loop_that_marks_no_steps_has_its_iterations(
    tmp_path: Path, work: Callable[[Loop], None], ended_by: str
) -> None:
    trace = recorded(tmp_path, work, 6)
    steps = steps_of(trace)
    assert [name for name, _, _ in steps] == ["iteration"] * 6
    assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(steps)), "none is left out"
    assert any(f"its 6 steps end with {ended_by}" in note.text for note in trace.run.notes)
    # each iteration has the same operators
    numbers = trace.sql("SELECT count(*) FROM spans WHERE name = 'aten::addmm' GROUP BY step").fetchall()
    assert len(numbers) == 6
    assert len(set(numbers)) == 1


@pytest.mark.parametrize(("work", "times"), [(Loop.infer, 6), (Loop.train, 1), (Loop.answer, 2)])
def test_layers_that_repeat_and_single_iterations_are_no_steps(
    tmp_path: Path, work: Callable[[Loop], None], times: int
) -> None:
    trace = recorded(tmp_path, work, times)
    assert [name for name, _, _ in steps_of(trace)] == ["window"]
    assert any("names no steps, and counts as one step" in note.text for note in trace.run.notes)


TRAINED = "Optimizer.step#"
FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
TRACES = sorted(FOLDER.rglob("*.json.gz"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stat().st_size > 500_000 else [])
        for path in TRACES
    ],
)
def test_iterations_of_training_are_those_that_the_profiler_marks(path: Path, tmp_path: Path) -> None:
    with gzip.open(path) as file:
        document = json.load(file)
    events = document.get("traceEvents", [])
    marked = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    if len(marked) < 3 or not any(str(event.get("name")).startswith(TRAINED) for event in events):
        pytest.skip("does not mark several steps of training")
    document["traceEvents"] = [event for event in events if event.get("name") not in marked]
    (tmp_path / "unmarked.json").write_text(json.dumps(document))
    expected, found = (account.of(xsp.load(each)).job for each in (path, tmp_path / "unmarked.json"))
    assert found.count == expected.count == len(marked)
    assert found.time.ms == pytest.approx(expected.time.ms, rel=0.01)
    for name in ("forward", "backward"):
        assert found.host.ms(name) == pytest.approx(expected.host.ms(name), rel=0.05, abs=0.05 * expected.time.ms)
