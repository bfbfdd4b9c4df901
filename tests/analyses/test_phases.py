"""The phases of a step are the host's side of the account: each instant once, waiting before the step and in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp import analyses
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop


def phases(trace: Trace) -> dict[str, tuple[Any, ...]]:
    rows = analyses.phases(trace).select("phase, calls, round(ms, 6), round(percent_of_iteration, 4)").fetchall()
    return {row[0]: row[1:] for row in rows}


def test_phases_add_up_to_the_iteration_and_a_wait_before_the_step_is_data() -> None:
    trace = trace_of(
        spans("""
        data DataLoader    0-300
        step train         300-1000
        data DataLoader    310-360
        forward Net        400-600
        backward backward  600-850
        optimizer SGD      860-900
    """)
    )
    assert phases(trace) == {
        "waiting for data": (2, 0.35, 35.0),
        "backward": (1, 0.25, 25.0),
        "forward": (1, 0.2, 20.0),
        "outside the phases": (None, 0.16, 16.0),
        "optimizer": (1, 0.04, 4.0),
        "iteration": (None, 1.0, 100.0),
    }


def test_calls_of_accumulated_gradients_are_summed_and_an_optimizers_closure_is_not_the_optimizers() -> None:
    trace = trace_of(
        spans("""
        step train         0-1000
        forward Net        10-110
        backward backward  110-260
        forward Net        270-370
        backward backward  370-520
        optimizer LBFGS    530-990
        forward Net        540-640
        backward backward  640-800
        forward Net        810-900
    """)
    )
    assert phases(trace) == {
        "forward": (4, 0.39, 39.0),
        "backward": (3, 0.46, 46.0),
        "optimizer": (1, 0.1, 10.0),  # the closure is called first
        "outside the phases": (None, 0.05, 5.0),
        "iteration": (None, 1.0, 100.0),
    }


def test_without_calls_of_the_model_level_modules_and_operators_tell_the_phases() -> None:
    trace = trace_of(
        spans("""
        step ProfilerStep#1                  0-1000
        module net                           100-300 depth=0
        module net.a                         120-280 depth=1
        op aten::mm                          130-270
        op autograd::engine                  400-700 phase=backward thread=2
        op aten::mm                          410-690 phase=backward thread=2
    """)
    )
    assert phases(trace) == {
        "outside the phases": (None, 0.5, 50.0),
        "backward": (None, 0.3, 30.0),
        "forward": (None, 0.2, 20.0),
        "iteration": (None, 1.0, 100.0),
    }


def test_operators_that_make_a_batch_are_waiting_for_data_and_not_forward() -> None:
    trace = trace_of(
        spans("""
        step ProfilerStep#1  0-1000
        data loader          0-400
        op aten::stack       50-350
        op aten::mm          500-700
        op aten::elsewhere   100-200 thread=2
    """)
    )
    rows = dict(analyses.phases(trace).select("phase, round(ms, 3)").fetchall())
    assert (rows["forward"], rows["waiting for data"]) == (0.2, 0.4)


def test_waits_for_the_device_are_a_part_of_their_own_and_each_phase_says_how_much_is_in_it() -> None:
    trace = trace_of(
        spans("""
        step s                     0-1000
        forward Net                100-500 phase=forward
        op aten::mm                110-190
        launch cudaLaunchKernel    120-130 correlation_id=1
        sync cudaDeviceSynchronize 200-450
        kernel gemm                150-440 correlation_id=1
    """)
    )
    rows = analyses.phases(trace).select("phase, round(ms, 3), round(waiting_ms, 3)").fetchall()
    assert rows == [
        ("outside the phases", 0.6, 0.0), ("waiting for the device", 0.25, None), ("forward", 0.15, 0.25),
        ("iteration", 1.0, None),
    ]  # fmt: skip


def loop_of(trace: Trace, rows: list[dict[str, Any]]) -> Trace:
    """Return a trace with a loop whose steps are of the kind that its figures are of."""
    with_loop(trace, rows)
    trace.con.execute("UPDATE alike SET step_kind = 0")
    return trace


def test_with_a_loop_percentages_are_of_its_iteration_and_waits_are_those_of_steps_that_were_not_recorded() -> None:
    trace = trace_of(spans("step s 0-1000\nforward Net 0-300\nbackward b 300-800\noptimizer SGD 800-900"))
    loop_of(trace, [
        {"step": step, "start_ns": 10_000_000 * step, "dur_ns": 1_000_000.0, "before_ns": 4_000_000.0,
         "data_ns": 3_000_000.0} for step in range(20)
    ])  # fmt: skip
    assert phases(trace) == {
        "waiting for data": (None, 3.0, 60.0),
        "between steps": (None, 1.0, 20.0),
        "backward": (1, 0.5, 10.0),
        "forward": (1, 0.3, 6.0),
        "optimizer": (1, 0.1, 2.0),
        "outside the phases": (None, 0.1, 2.0),
        "iteration": (None, 5.0, 100.0),
    }
    result = analyses.phases_over_time(trace).select(
        "part, first_step, last_step, steps, recorded, iteration_ms, data_ms, between_ms, forward_ms"
    )
    table = result.fetchall()
    assert table[0] == (1, 0, 1, 2, 1, 5.0, 3.0, 1.0, 0.3)
    assert table[-1] == (10, 18, 19, 2, 0, 5.0, 3.0, 1.0, None), "no step of this part was recorded"


def test_phases_that_were_timed_without_recording_are_in_each_part_of_a_run() -> None:
    trace = trace_of(spans("step s 0-1000\nforward Net 0-300\nbackward b 300-800\noptimizer SGD 800-900"))
    loop_of(trace, [
        {"step": step, "start_ns": 10_000_000 * step, "dur_ns": 2e6, "forward_ns": 5e5 if step < 10 else 1e6,
         "backward_ns": 6e5, "optimizer_ns": 2e5} for step in range(20)
    ])  # fmt: skip
    columns = "step_ms, forward_ms, backward_ms, optimizer_ms, rest_ms"
    table = analyses.phases_over_time(trace).select(columns).fetchall()
    assert table[1] == pytest.approx((2.0, 0.5, 0.6, 0.2, 0.7))
    assert table[-1] == pytest.approx((2.0, 1.0, 0.6, 0.2, 0.2))


def test_parts_of_a_run_have_about_as_many_steps_each_however_many_a_row_of_the_loop_has() -> None:
    trace = trace_of(spans("step s 0-1000\nforward Net 0-300", step=0))
    rows, step = [], 0
    for steps in [1] * 20 + [20] * 9 + [4] * 25:  # recorded ones, stretches of short ones
        rows.append({"step": step, "steps": steps, "start_ns": 10**6 * step, "dur_ns": 1e6})
        step += steps
    result = analyses.phases_over_time(loop_of(trace, rows)).select("first_step, last_step, steps").fetchall()
    assert sum(steps for *_, steps in result) == step == 300
    assert len(result) == 10
    assert all(20 <= steps <= 40 for *_, steps in result)
    assert [first for first, *_ in result[1:]] == [last + 1 for _, last, _ in result[:-1]]


def test_phases_over_the_run_show_a_drift() -> None:
    rows = []
    for step in range(20):
        slow = 100 if step >= 10 else 0
        at = 10_000 * step
        rows += spans(
            f"step s {at}-{at + 500 + slow}\nforward Net {at}-{at + 200}\nbackward b {at + 200}-{at + 400 + slow}",
            step=step,
            rung=20,
        )
    result = analyses.phases_over_time(trace_of(rows)).select(
        "part, first_step, last_step, recorded, step_ms, forward_ms, backward_ms, optimizer_ms, rest_ms"
    )
    table = result.fetchall()
    assert len(table) == 10
    assert table[0] == (1, 0, 1, 2, 0.5, 0.2, 0.2, None, pytest.approx(0.1))
    assert table[-1] == (10, 18, 19, 2, 0.6, 0.2, pytest.approx(0.3), None, pytest.approx(0.1))


def test_a_closure_that_the_optimizer_calls_is_told_apart_in_a_recorded_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    values = torch.randn(256, 64)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(values).square().mean()
        loss.backward()
        return loss

    with xsp.profile("lbfgs", out=tmp_path / "run", levels="M", samples=False) as profile:
        for _ in range(6):
            with profile.step():
                optimizer.step(closure)
    result = phases(xsp.load(tmp_path / "run"))
    assert result["forward"][0] >= 2
    assert result["optimizer"][0] == 1
    each_step = analyses.phases_over_time(xsp.load(tmp_path / "run"))
    each_step = each_step.filter("recorded = 1")
    rows = each_step.select("step_ms, forward_ms + backward_ms + optimizer_ms + rest_ms").fetchall()
    assert rows
    for step_ms, parts_ms in rows:
        assert parts_ms == pytest.approx(step_ms), "forward and backward are not counted as the optimizer's again"
