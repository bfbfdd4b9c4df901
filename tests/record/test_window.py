"""The window before a recorded step: what the program does there is recorded, and bare steps stay bare."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from depth import deep

pytest.importorskip("torch")

import torch

import xsp
from xsp import clock
from xsp.record import window
from xsp.record.overhead import Account
from xsp.record.schedule import SETTLE, Turn
from xsp.record.session import profile
from xsp.schema import COLUMNS, Kind, Level, Span
from xsp.store import before

X = torch.ones(64, 64)


def recorded(out: Path, times: int = 30) -> xsp.Trace:
    with xsp.profile("window", out=out, levels="M/L/op", every=3, samples=False) as prof:
        for _ in range(times):
            X.double()
            time.sleep(0.003)
            with prof.step():
                X @ X
    return xsp.load(out)


def test_what_runs_before_a_recorded_step_is_recorded_apart_from_it(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "run")
    rows = trace.sql(
        "SELECT l.before_ns, b.dur_ns FROM loop l JOIN before b USING (step) WHERE b.kind = 'before' AND l.rung > 10"
    ).fetchall()
    assert len(rows) >= 5
    for between_ns, window_ns in rows:
        assert window_ns == pytest.approx(between_ns, rel=0.2, abs=500_000)
        assert window_ns >= 3_000_000
    ((ops, below),) = trace.sql(
        "SELECT count(*), count(*) FILTER (p.kind = 'before' AND o.start_ns >= p.start_ns AND "
        "o.start_ns + o.dur_ns <= p.start_ns + p.dur_ns) FROM before o JOIN before p ON o.parent_id = p.span_id "
        "WHERE o.name = 'aten::to'"
    ).fetchall()
    assert ops == below > 0
    assert trace.sql("SELECT count(*) FROM before WHERE name = 'aten::mm'").fetchall() == [(0,)]
    assert trace.sql("SELECT count(*) FROM spans WHERE name IN ('aten::to', 'before the step')").fetchall() == [(0,)]


@pytest.mark.parametrize("step_ms", [deep(0.2), deep(6)])
def test_windows_are_also_open_after_stretches_of_steps(tmp_path: Path, step_ms: float) -> None:
    """Steps that are alike are timed in stretches; the one after a stretch is recorded."""
    steps = round(2000 / step_ms) if step_ms > 1 else 6000
    with xsp.profile("stretches", out=tmp_path / "run", levels="M/L/op", budget="50%", samples=False) as prof:
        for _ in range(steps):
            X.double()
            with prof.step():
                time.sleep(step_ms / 1e3)
                X @ X
    trace = xsp.load(tmp_path / "run")
    ((recorded, whole, last),) = trace.sql(
        "SELECT count(*), count(b.step), max(b.step) FROM loop l LEFT JOIN (SELECT step FROM before "
        "WHERE kind = 'before') b USING (step) WHERE l.rung > 10"
    ).fetchall()
    assert whole >= recorded - 6, "all but describing ones, and those whose kind was not expected"
    assert last > steps / 3
    ((gap_ns,),) = trace.sql("SELECT median(before_ns) FROM loop WHERE rung = 10").fetchall()
    assert gap_ns < 2_000_000, "planning the next step is no time of the program"


def test_a_budget_pays_for_opening_windows_and_for_what_collectors_add_in_them() -> None:
    costs, turn = Account(), Turn(Level.OP, timed=True, describe=False)
    now = clock.monotonic_ns()
    for _ in range(10):
        costs.add(SETTLE, 10_000_000, 0, now, gap_ns=2_000_000)
    spent_ns = costs.spent_ns
    for gap_ns in (3_000_000, 3_000_000, 150_000_000, 3_000_000, 3_000_000):  # one of them with a rare save
        costs.add(turn, 10_000_000, 500_000, clock.monotonic_ns(), gap_ns=gap_ns, has_window=True)
    assert costs.spent_ns - spent_ns == pytest.approx(5 * 1_500_000, rel=0.3)
    assert costs.cost_ns(Level.OP) == pytest.approx(1_500_000, rel=0.3)


def test_a_window_without_a_step_is_closed_and_the_next_step_is_bare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "LONGEST_S", 0.05)
    with xsp.profile("late", out=tmp_path / "run", levels="M/L/op", warmup=0, every=2, samples=False) as prof:
        for _ in range(20):
            with prof.step():
                X @ X
            if prof._steps.window is not None:
                break
        opened, deadline = prof._steps.window, time.monotonic() + 20
        assert opened is not None
        while prof._steps.window is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert prof._steps.window is None
        for _ in range(10):
            with prof.step():
                X @ X
    assert xsp.load(tmp_path / "run").sql("SELECT count(*) FROM spans WHERE name = 'aten::mm'").fetchall() != [(0,)]


@pytest.mark.parametrize("ends", ["block", "fork"])
def test_no_collector_stays_on_in_a_window_after_the_block_or_in_a_child(tmp_path: Path, ends: str) -> None:
    with xsp.profile("ends", out=tmp_path / "run", levels="M/L/op", warmup=0, every=2, samples=False) as prof:
        for _ in range(20):
            with prof.step():
                X @ X
            if prof._steps.window is not None:
                break
        assert prof._steps.window is not None
        if ends == "fork":
            child = os.fork()
            if not child:
                os._exit(int(torch.autograd._profiler_enabled()))
            assert os.waitpid(child, 0)[1] == 0
            assert prof._steps.window is None
    assert not torch.autograd._profiler_enabled()


def test_an_error_between_steps_leaves_nothing_on(tmp_path: Path) -> None:
    prof = profile("error", out=tmp_path / "run", levels="M/L/op", warmup=0, every=2, samples=False)

    def work() -> None:
        with prof:
            for _ in range(20):
                with prof.step():
                    X @ X
                if prof._steps.window is not None:
                    raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="own"):
        work()
    assert not torch.autograd._profiler_enabled()
    assert prof._steps.window is None


def test_device_work_belongs_to_the_part_in_which_it_was_launched() -> None:
    rows = [
        Span(kind=Kind.BEFORE.value, level=Level.APPLICATION, name="before the step", start_ns=0, dur_ns=90),
        Span(kind=Kind.LAUNCH.value, level=Level.RUNTIME, name="early", start_ns=10, dur_ns=5, correlation_id=1),
        Span(kind=Kind.STEP.value, level=Level.MODEL, name="step", start_ns=100, dur_ns=100),
        Span(kind=Kind.LAUNCH.value, level=Level.RUNTIME, name="late", start_ns=110, dur_ns=5, correlation_id=2),
        Span(
            kind=Kind.COPY.value, level=Level.KERNEL, name="early", start_ns=120, dur_ns=50, correlation_id=1, device=0
        ),
        Span(
            kind=Kind.KERNEL.value, level=Level.KERNEL, name="late", start_ns=170, dur_ns=9, correlation_id=2, device=0
        ),
        Span(kind=Kind.DATA.value, level=Level.MODEL, name="DataLoader", start_ns=20, dur_ns=30),
    ]
    own, earlier = before.split(list(zip(*rows, strict=True)))
    place = [column.name for column in COLUMNS].index("name")
    assert own[place] == ["step", "late", "late", "DataLoader"]
    assert earlier[place] == ["before the step", "early", "early", "DataLoader"]
