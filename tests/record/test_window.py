"""The window before a recorded step: what the program does there is recorded, and bare steps stay bare."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import xsp
from xsp.record import window
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
