"""Short steps that pass in stretches: what is none of their kind breaks a stretch off and is counted as what it is."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from depth import deep
from torch import nn

import xsp
from xsp.collector import Outline
from xsp.record.autostep import AutoStep
from xsp.record.kinds import Kinds
from xsp.record.quiet import Passed, rows_of

SMALL, WIDE = torch.ones(1, 8), torch.ones(64, 8)


def kinds_of(run: Path) -> Counter[tuple[bool, int | None]]:
    """Return the steps by whether they train and by batch size, as `run.json` and the loop both say."""
    trace = xsp.load(run)
    counted = Counter({(kind["training"], kind["batch_size"]): kind["steps"] for kind in trace.run["kinds"]})
    in_loop = dict(trace.sql("SELECT kind, sum(steps) FROM loop GROUP BY ALL").fetchall())
    assert in_loop == {kind["kind"]: kind["steps"] for kind in trace.run["kinds"]}
    return counted


class Program:
    """A policy with an optimizer."""

    def __init__(self) -> None:
        self.net = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def act(self, x: torch.Tensor = SMALL) -> None:
        """Call the model without gradients."""
        with torch.no_grad():
            self.net(x)

    def train(self) -> None:
        """Take a step of training."""
        self.optimizer.zero_grad()
        self.net(WIDE).sum().backward()
        self.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
@pytest.mark.parametrize("alike", [deep(57), deep(64), 300])
def test_a_few_training_steps_between_many_calls_are_counted_as_such(
    tmp_path: Path, alike: int, listener: type[AutoStep] | None
) -> None:
    program = Program()
    with xsp.profile("rl", out=tmp_path / "run", levels="M", samples=False, listener=listener) as prof:
        for _ in range(6):
            for work in [program.act] * alike + [program.train] * 4:
                if listener is None:
                    with prof.step():
                        work()
                else:
                    work()
    assert kinds_of(tmp_path / "run") == {(False, 1): 6 * alike, (True, 64): 24}


@pytest.mark.slow
@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
def test_a_call_with_another_shape_is_of_another_kind(tmp_path: Path, listener: type[AutoStep] | None) -> None:
    program = Program()
    program.net.eval()
    with xsp.profile("generate", out=tmp_path / "run", levels="M", samples=False, listener=listener) as prof:
        for tokens in (70, 90, 400, 130, 60):
            for x in [WIDE] + [SMALL] * tokens:
                if listener is None:
                    with prof.step():
                        program.act(x)
                else:
                    program.act(x)
    assert kinds_of(tmp_path / "run") == {(False, 1): 750, (False, 64): 5}


@pytest.mark.slow
@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
def test_an_evaluation_between_training_steps_is_none_of_them(tmp_path: Path, listener: type[AutoStep] | None) -> None:
    program = Program()
    with xsp.profile("epochs", out=tmp_path / "run", levels="M", samples=False, listener=listener) as prof:
        for _ in range(5):
            for _ in range(170):
                if listener is None:
                    with prof.step():
                        program.train()
                else:
                    program.train()
            program.net.eval()
            for _ in range(3):
                program.act(torch.ones(16, 8))
            program.net.train()
    trained = {(True, 64): 850}
    assert kinds_of(tmp_path / "run") == (trained if listener is None else {**trained, (False, 16): 15})


@pytest.mark.slow
@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
@pytest.mark.parametrize("pattern", ["aab", deep("ab"), deep("aaaaaab")])
def test_steps_of_several_optimizers_pass_in_stretches_as_what_they_are(
    tmp_path: Path, pattern: str, listener: type[AutoStep] | None
) -> None:
    programs = {name: Program() for name in "ab"}
    programs["b"].net = nn.Linear(8, 2)
    programs["b"].optimizer = torch.optim.SGD(programs["b"].net.parameters(), lr=1e-3)
    with xsp.profile("gan", out=tmp_path / "run", levels="M", samples=False, listener=listener) as prof:
        for name in pattern * 300:
            if listener is None:
                with prof.step():
                    programs[name].train()
            else:
                programs[name].train()
    trace = xsp.load(tmp_path / "run")
    expected = sorted(300 * pattern.count(name) for name in "ab")
    assert sorted(kind["steps"] for kind in trace.run["kinds"]) == expected
    in_stretches = dict(
        trace.sql("SELECT kind, sum(steps) FROM loop WHERE steady AND own_ns = 0 GROUP BY ALL").fetchall()
    )
    assert len(in_stretches) == 2
    assert min(in_stretches.values()) > 20


def passed(kind: int, dur_ns: int, count: int) -> list[Passed]:
    return [Passed(number, 1, kind, 0, dur_ns, 10, 4, 8) for number in range(count)]


def test_consecutive_short_steps_of_a_kind_share_rows_and_long_ones_have_their_own() -> None:
    steps = [*passed(0, 1_000_000, 20), *passed(1, 1_000_000, 4), *passed(0, 5_000_000, 6)]
    rows = list(rows_of(steps))
    assert [(row.kind, row.steps) for row in rows] == [(0, 10), (0, 10), *[(1, 1)] * 4, *[(0, 1)] * 6]
    assert sum(row.steps * row.dur_ns for row in rows) == sum(step.dur_ns for step in steps)
    assert {(row.before_ns, row.data_ns, row.samples) for row in rows} == {(10, 4, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("alike", [deep(57), 300])
def test_short_steps_that_end_with_a_mark_pass_in_stretches_and_are_all_counted(tmp_path: Path, alike: int) -> None:
    program = Program()
    with xsp.profile("marks", out=tmp_path / "run", levels="M", samples=False) as prof:
        for _ in range(4):
            for work in [program.act] * alike + [program.train] * 4:
                work()
                prof.step()
    assert kinds_of(tmp_path / "run") == {(False, 1): 4 * alike - 2, (True, 64): 16}
    stretches = xsp.load(tmp_path / "run").sql("SELECT kind FROM loop WHERE steps > 1").fetchall()
    assert set(stretches) <= {(0,)}, "of steps that train there are too few in a row"


@pytest.mark.slow
def test_an_optimizer_that_steps_now_and_then_is_seen(tmp_path: Path) -> None:
    program, other = Program(), torch.optim.Adam(nn.Linear(2, 2).parameters())
    with xsp.profile("now and then", out=tmp_path / "run", levels="M", samples=False) as prof:
        for number in range(600):
            with prof.step():
                program.train()
                if number % 90 == 89:
                    other.step()
    kinds = {len(kind["calls"]): kind["steps"] for kind in xsp.load(tmp_path / "run").run["kinds"]}
    assert kinds == {3: 594, 4: 6}


@pytest.mark.slow
@pytest.mark.parametrize("trains", [True, deep(False)], ids=["training", "inference"])
@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
def test_a_wait_between_short_steps_is_in_none_of_them_whichever_it_precedes(
    tmp_path: Path, listener: type[AutoStep] | None, trains: bool
) -> None:
    program, taken_ns, waits = Program(), [], [0.0, 0.0, 0.002]  # as of loaders whose workers deliver together
    program.net.train(trains)
    work = program.train if trains else program.act
    with xsp.profile("waits", out=tmp_path / "run", levels="M", samples=False, listener=listener) as prof:
        for number in range(1500):
            time.sleep(waits[number % len(waits)])
            began_ns = time.perf_counter_ns()
            if listener is None:
                with prof.step():
                    work()
            else:
                work()
            taken_ns.append(time.perf_counter_ns() - began_ns)
    stretches = xsp.load(tmp_path / "run").sql("SELECT step, steps, dur_ns, before_ns FROM loop WHERE steps > 1")
    passed = stretches.fetchall()
    assert passed
    for first, count, dur_ns, before_ns in passed:
        assert count * dur_ns <= sum(taken_ns[first : first + count]) + count  # which is rounding
        assert count * before_ns >= count // len(waits) * 2_000_000


@contextmanager
def beside(work: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Have another thread do something again and again meanwhile."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(pause_s):
            work()

    other = threading.Thread(target=repeat)
    other.start()
    try:
        yield
    finally:
        stop.set()
        other.join()


@pytest.mark.slow
def test_what_another_thread_calls_breaks_no_stretch(tmp_path: Path) -> None:
    program, encoder = Program(), nn.Linear(4, 4)
    with (
        xsp.profile("beside", out=tmp_path / "run", levels="M", samples=False) as prof,
        beside(lambda: encoder(torch.ones(2, 4)), 0.0005),
    ):
        for _ in range(3000):
            with prof.step():
                program.act()
    assert kinds_of(tmp_path / "run") == {(False, 1): 3000}
    longest = xsp.load(tmp_path / "run").sql("SELECT max(steps) FROM loop").fetchall()
    assert longest[0][0] > 1, "no step passed in a stretch"


@pytest.mark.slow
def test_a_step_that_ends_a_stretch_has_no_calls_of_another_thread(tmp_path: Path) -> None:
    program, encoder = Program(), nn.Linear(4, 4)
    with (
        xsp.profile("beside", out=tmp_path / "run", levels="M", samples=False) as prof,
        beside(lambda: encoder(torch.ones(2, 4)), 0.0002),
    ):
        for number in range(1500):
            with prof.step():
                if number % 150 == 149:
                    program.act(WIDE)
                    time.sleep(0.002)
                program.act()
    kinds = {len(kind["calls"]): kind["steps"] for kind in xsp.load(tmp_path / "run").run["kinds"]}
    assert kinds == {1: 1490, 2: 10}


@pytest.mark.slow
def test_what_another_thread_trains_is_of_no_step(tmp_path: Path) -> None:
    program, weight = Program(), torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train() -> None:
        weight.sum().backward()
        optimizer.step()

    with (
        xsp.profile("beside", out=tmp_path / "run", levels="M", samples=False) as prof,
        beside(train, 0.0005),
    ):
        for _ in range(2000):
            with prof.step():
                program.act()
    assert kinds_of(tmp_path / "run") == {(False, 1): 2000}


def test_samples_that_the_program_states_are_those_of_a_step_that_ends_a_stretch(tmp_path: Path) -> None:
    program = Program()
    with xsp.profile("stated", out=tmp_path / "run", levels="M", samples=False, batch_size=7) as prof:
        for number in range(300):
            with prof.step():
                program.act(WIDE if number == 299 else SMALL)
    trace = xsp.load(tmp_path / "run")
    assert {(kind["batch_size"], kind["batch_source"]) for kind in trace.run["kinds"]} == {(7, "stated")}
    assert trace.sql("SELECT DISTINCT samples FROM loop").fetchall() == [(7,)]


@pytest.mark.slow
def test_short_steps_pass_in_stretches_without_a_look_at_each_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, count = nn.Linear(8, 8).eval(), torch.randn(1, 8), 20_000  # a busy machine is steady late
    classified, classify = Counter[str](), Kinds.count_step
    monkeypatch.setattr(
        Kinds, "count_step", lambda *args, **options: (classified.update(["steps"]), classify(*args, **options))[1]
    )
    with xsp.profile("short", out=tmp_path / "run", levels="M", samples=False) as prof, torch.no_grad():
        for _ in range(count):
            with prof.step():
                model(x)
    trace = xsp.load(tmp_path / "run")
    assert trace.run["steps"]["seen"] == trace.run["kinds"][0]["steps"] == count
    assert trace.sql("SELECT sum(steps), count(DISTINCT step) = count(*) FROM loop").fetchall() == [(count, True)]
    ((together, steady),) = trace.sql(
        "SELECT sum(steps) FILTER (steps > 1), sum(steps) FROM loop WHERE steady"
    ).fetchall()
    assert together > steady / 2, "the last may be alone"
    assert classified["steps"] < count - together / 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [300, 301, 307])
def test_a_stretch_that_the_block_ends_counts_what_had_passed(tmp_path: Path, steps: int) -> None:
    with xsp.profile("short", out=tmp_path / "run", levels="M", samples=False) as prof:
        for _ in range(steps):
            with prof.step():
                pass
    trace = xsp.load(tmp_path / "run")
    assert trace.sql("SELECT sum(steps) FROM loop").fetchall() == [(steps,)] == [(trace.run["steps"]["seen"],)]


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", ["call", "context", "mark"])
def test_of_longer_steps_each_has_its_row_with_its_own_times(tmp_path: Path, ends_by: str) -> None:
    """Steps of 5 ms after 2 ms, and every seventh of 15 ms: in stretches too, each is seen as it was."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.015 if Slow.number % 7 == 0 else 0.005)
            return x

    net, Slow.number = Slow().eval(), 0
    listener = AutoStep if ends_by == "call" else None
    with xsp.profile("x", out=tmp_path / "run", levels="M", every=40, samples=False, listener=listener) as prof:
        for Slow.number in range(120):
            time.sleep(0.002)
            if ends_by == "context":
                with prof.step():
                    net(SMALL)
            else:
                net(SMALL)
                if ends_by == "mark":
                    prof.step()
    rows = xsp.load(tmp_path / "run").sql("SELECT own_ns, steps, dur_ns / 1e6, before_ns / 1e6 FROM loop").fetchall()
    assert all(steps == 1 for _, steps, _, _ in rows)
    assert sum(own_ns == 0 for own_ns, _, _, _ in rows) > 25, "many steps pass in stretches"
    slow = [dur for _, _, dur, _ in rows if dur >= 14.9]
    assert 15 <= len(slow) <= 30
    if ends_by != "mark":
        assert sum(before >= 1.9 for _, _, _, before in rows if before is not None) >= 0.9 * len(rows)


@pytest.mark.parametrize("listener", [AutoStep, None], ids=["found", "named"])
def test_what_hooks_take_is_measured_where_they_run(
    tmp_path: Path, listener: type[AutoStep] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a calibration, whose caches are warm: a hook that takes longer in the program shows."""
    slower_ns, program = 100_000, Program()

    def hooks_ns(name: str) -> float:
        with xsp.profile(name, out=tmp_path / name, levels="M", samples=False, listener=listener) as prof:
            for _ in range(200):
                if listener is None:
                    with prof.step():
                        program.train()
                else:
                    program.train()
        [kind] = xsp.load(tmp_path / name).run.kinds
        assert kind.hooks_ns is not None
        return kind.hooks_ns

    def append(outline: Outline, word: tuple[object, ...]) -> None:
        began_ns = time.perf_counter_ns()
        while time.perf_counter_ns() < began_ns + slower_ns:
            pass
        deque.append(outline, word)

    assert hooks_ns("usual") > 0
    monkeypatch.setattr(Outline, "append", append)
    assert hooks_ns("slower") > 4 * slower_ns, "each notes five words: forward, backward's two, the optimizer's two"
