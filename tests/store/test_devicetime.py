"""The time of an iteration on a device, held against a pipeline whose pace is known by construction."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xsp
from xsp.store.devicetime import BARE, DevicePace, LoopRow, paces_of
from xsp.store.iterations import iterations
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of, with_loop

MS = 1_000_000
MODEL_RUNG = 20


def mean_ns(pace: DevicePace) -> float:
    return sum(time * steps for time, steps in pace.values) / sum(steps for _, steps in pace.values)


def loop(
    host_ms: dict[int, float],
    device_ms: dict[int, float],
    kinds: list[int],
    fill_ms: float,
    own_ms: float,
    seed: int,
    window_ms: float | None = None,
) -> list[LoopRow]:
    """Return the loop of a program whose host issues steps, which a device then computes in their order.

    The device begins a step `fill_ms` after the host does, and not before it has finished the one before. Before and
    after each recorded step the host waits for it. xsp takes 5 ms after a recorded step, and `own_ms` before others.
    With `window_ms` the host works that long before each step, and collectors are on before recorded ones.
    """
    draw = random.Random(seed)
    rows, clock, idle_at, recorded_last, next_recorded = [], 0.0, 0.0, False, 2
    for step, kind in enumerate(kinds):
        own, before, is_recorded = 5.0 if recorded_last else own_ms, window_ms or 0.1, step == next_recorded
        if is_recorded and window_ms is not None:
            next_recorded = step + draw.randint(2, 12)
            before += max(0.0, idle_at - clock)
        elif is_recorded:  # collectors are switched on when the device is idle
            next_recorded = step + draw.randint(2, 12)
            before += max(0.0, idle_at - clock - before)
        clock += before + own
        start = clock
        idle_at = max(start + fill_ms, idle_at) + device_ms[kind]
        clock += host_ms[kind]
        if is_recorded:
            clock = max(clock, idle_at)
        rung = MODEL_RUNG if is_recorded else BARE
        times = (round(value * MS) for value in (start, clock - start, before, own))
        window_ns = round(window_ms * MS) if is_recorded and window_ms is not None else None
        rows.append(LoopRow(step, 1, kind, rung, *times, window_ns))
        recorded_last = is_recorded
    return rows


@given(
    device_ms=st.floats(2, 100),
    host_share=st.floats(0.05, 0.9),
    fill_share=st.floats(0, 0.3),
    window_share=st.none() | st.floats(0.1, 0.5),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_a_device_that_lags_behind_sets_the_pace(
    device_ms: float, host_share: float, fill_share: float, window_share: float | None, seed: int
) -> None:
    host_ms, window_ms = host_share * device_ms, None
    if window_share is not None:  # part of the host's time is before the step
        window_ms = window_share * host_ms
        host_ms -= window_ms
    rows = loop({0: host_ms}, {0: device_ms}, [0] * 120, fill_share * host_ms, 0.01 * host_ms, seed, window_ms)
    found = paces_of(rows)
    if found:  # else the device never lagged behind for long enough
        assert mean_ns(found[0]) == pytest.approx(device_ms * MS, rel=0.02)
    else:
        assert host_share > 0.5


@given(host_ms=st.floats(2, 50), device_share=st.floats(0.01, 0.9), seed=st.integers(0, 99))
@settings(deadline=None)
def test_where_the_host_sets_the_pace_no_time_comes_from_the_device(
    host_ms: float, device_share: float, seed: int
) -> None:
    """What is left of the last step when its launches end is no lag: it is the draining of the pipeline."""
    rows = loop({0: host_ms}, {0: device_share * host_ms}, [0] * 120, 0.02 * host_ms, 0.01, seed)
    found = paces_of(rows)
    assert not found or mean_ns(found[0]) == pytest.approx(host_ms * MS, rel=0.02)


def test_several_kinds_share_the_time_of_a_burst_as_their_steps_take_alone() -> None:
    rows = loop({0: 2, 1: 1}, {0: 30, 1: 10}, [0, 0, 1] * 60, 0.5, 0.02, seed=1)
    found = paces_of(rows)
    assert mean_ns(found[0]) == pytest.approx(30 * MS, rel=0.03)
    assert mean_ns(found[1]) == pytest.approx(10 * MS, rel=0.06)


STEP = "step s 0-2000\nlaunch cudaLaunchKernel 10-20 correlation_id=1\nkernel k 100-1900 correlation_id=1"


def traced(rows: list[LoopRow]) -> Trace:
    """Return a run with this loop, whose first recorded step has a kernel of 1.8 ms."""
    recorded = next(row.step for row in rows if row.rung != BARE)
    named = [{**row._asdict(), "rank": 0, "steady": row.rung == BARE} for row in rows]
    for row in named:
        del row["window_ns"]
    return with_loop(trace_of(spans(STEP, step=recorded, rung=70)), named)


@pytest.mark.parametrize(("host_ms", "device_ms", "iteration_ms"), [(0.5, 2.0, 2.0), (3.0, 2.0, 3.1)])
def test_the_iteration_of_a_run_is_that_of_the_slower_side(
    host_ms: float, device_ms: float, iteration_ms: float
) -> None:
    trace = traced(loop({0: host_ms}, {0: device_ms}, [0] * 80, 0.05, 0.01, seed=3))
    (row,) = iterations(trace)
    assert row.mean_ns == pytest.approx(iteration_ms * MS, rel=0.02)
    assert trace.sql("SELECT true_ns FROM merged WHERE kind = 'step'").fetchall() == [(None,)], "not the host's part"


def test_no_iteration_is_shorter_than_the_device_is_busy_in_it() -> None:
    """There is no burst here: the host's own steps are all that was timed."""
    rows = [LoopRow(step, 1, 0, BARE, step * MS, 100_000, 0, 0) for step in range(9)]
    (row,) = iterations(traced([*rows, LoopRow(9, 1, 0, 70, 9 * MS, 2 * MS, 0, 0)]))
    assert row.mean_ns == pytest.approx(1.8 * MS)


def test_steps_around_one_that_is_missing_are_no_burst() -> None:
    rows = loop({0: 1}, {0: 10}, [0] * 40, 0.1, 0.01, seed=1)
    whole, damaged = paces_of(rows)[0], paces_of([row for row in rows if row.step % 9])
    assert not damaged or len(damaged[0].values) < len(whole.values)


@pytest.mark.parametrize(
    ("program", "truth_ms", "tolerance"),
    [
        ("f03_fp32_matmul", 30.0, 0.02),
        ("f04_layout", 12.5, 0.02),
        ("f05_attention", 67.0, 0.02),
        ("f08_pointwise", 2.47, 0.02),
        ("u03_nccl", 4.32, 0.10),  # its host ran at two speeds in that process
    ],
)
def test_recorded_runs_state_the_iteration_that_the_program_measured_without_xsp(
    program: str, truth_ms: float, tolerance: float, shared: Path, tmp_path: Path
) -> None:
    archive = shared / "gpu" / "runs" / f"{program}.tar.gz"
    if not archive.is_file():
        pytest.skip(f"{archive} is absent")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (row,) = iterations(xsp.load(tmp_path / program))
    assert row.mean_ns == pytest.approx(truth_ms * MS, rel=tolerance)
