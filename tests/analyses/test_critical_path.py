"""The critical path of steps that can be walked with a finger: input, question, answer."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from xsp import account
from xsp.analyses.critical import critical_path, critical_path_summary
from xsp.errors import AnalysisError
from xsp.ingest.load import load
from xsp.schema import Span
from xsp.testing import spans, trace_of


def path(rows: list[Span], columns: str = "start_ms * 1000, dur_ms * 1000, what, name, after") -> list[tuple[Any, ...]]:
    result = critical_path(trace_of(rows)).select(columns).fetchall()
    return [tuple(round(cell) if isinstance(cell, float) else cell for cell in row) for row in result]


def test_on_the_host_alone_it_is_what_ran_innermost() -> None:
    step = """
        step predict      0-100
        module conv       10-60
        op aten::conv2d   20-50
        op aten::empty    25-30
    """
    assert path(spans(step)) == [
        (0, 10, "host", "predict", "program order"),
        (10, 10, "host", "conv", "program order"),
        (20, 5, "op", "aten::conv2d", "program order"),
        (25, 5, "op", "aten::empty", "program order"),
        (30, 20, "op", "aten::conv2d", "program order"),
        (50, 10, "host", "conv", "program order"),
        (60, 40, "host", "predict", "program order"),
    ]


BOUND_BY_THE_DEVICE = """
    step predict              0-100
    op aten::mm               5-20
    launch cudaLaunchKernel   10-15 correlation_id=1
    kernel gemm               20-50 correlation_id=1
    op aten::relu             20-30
    launch cudaLaunchKernel   22-26 correlation_id=2
    kernel relu               52-80 correlation_id=2
    sync cudaDeviceSynchronize 30-85
"""


def test_a_kernel_waits_for_its_launch_and_for_its_stream_and_the_host_for_the_device() -> None:
    assert path(spans(BOUND_BY_THE_DEVICE)) == [
        (0, 5, "host", "predict", "program order"),
        (5, 5, "op", "aten::mm", "program order"),
        (10, 5, "launch", "cudaLaunchKernel", "program order"),
        (15, 5, "launch", "cudaLaunchKernel", "launch"),
        (20, 30, "kernel", "gemm", "launch"),
        (50, 2, "idle", "idle", "stream order"),
        (52, 28, "kernel", "relu", "stream order"),
        (80, 5, "sync", "cudaDeviceSynchronize", "device work"),
        (85, 15, "host", "predict", "program order"),
    ]


def test_shares_add_up_to_the_step() -> None:
    rows = critical_path_summary(trace_of(spans(BOUND_BY_THE_DEVICE))).fetchall()
    assert rows[0][:3] == ("what", "kernel", 2)
    for by in ("what", "layer", "name"):
        assert sum(row[3] for row in rows if row[0] == by) == pytest.approx(0.1)
        assert sum(row[4] for row in rows if row[0] == by) == pytest.approx(100)


def test_work_of_another_stream_is_waited_for_where_nothing_else_explains_the_wait() -> None:
    step = """
        step train                0-100
        launch ncclAllReduce      5-10 correlation_id=1
        kernel ncclDevKernel_AllReduce_Sum 10-70 correlation_id=1 stream=20
        launch cudaLaunchKernel   10-15 correlation_id=2
        kernel adam               72-90 correlation_id=2
        sync cudaDeviceSynchronize 20-90
    """
    assert path(spans(step), "what, name, stream, after")[2:6] == [
        ("communication", "ncclDevKernel_AllReduce_Sum", 20, "launch"),
        ("idle", "idle", 7, "another stream"),
        ("kernel", "adam", 7, "another stream"),
        ("host", "train", None, "program order"),
    ]


def test_a_copy_whose_call_returns_after_it_holds_the_host() -> None:
    step = """
        step train                 0-50
        launch cudaMemcpyAsync     10-40 correlation_id=1
        copy Memcpy_DtoH           15-38 correlation_id=1 process=None
    """
    assert path(spans(step), "what, after")[1:5] == [
        ("launch", "program order"),
        ("copy", "launch"),
        ("launch", "device work"),
        ("host", "program order"),
    ]


def test_backward_runs_on_a_thread_of_its_own_between_two_pieces_of_the_forward_thread() -> None:
    step = """
        step train            0-100
        op aten::mm           10-20
        backward backward     30-80
        op MmBackward0        35-50 thread=2 phase=backward forward_thread=1
        op AccumulateGrad     55-75 thread=2 phase=backward forward_thread=1
        op aten::add_         85-95
    """
    assert path(spans(step), "start_ms * 1000, what, name, thread, after") == [
        (0, "host", "train", 1, "program order"),
        (10, "op", "aten::mm", 1, "program order"),
        (20, "host", "train", 1, "program order"),
        (30, "host", "backward", 1, "program order"),
        (35, "op", "MmBackward0", 2, "program order"),
        (50, "host", "between operators", None, "program order"),
        (55, "op", "AccumulateGrad", 2, "program order"),
        (75, "host", "backward", 1, "backward thread"),
        (80, "host", "train", 1, "program order"),
        (85, "op", "aten::add_", 1, "program order"),
        (95, "host", "train", 1, "program order"),
    ]


def test_what_the_device_does_after_the_step_is_marked() -> None:
    step = """
        step predict              0-30
        launch cudaLaunchKernel   10-15 correlation_id=1
        kernel gemm               20-50 correlation_id=1
    """
    assert path(spans(step), "start_ms * 1000, dur_ms * 1000, what, after_step")[-2:] == [
        (20, 10, "kernel", False),
        (30, 20, "kernel", True),
    ]


def test_kernels_without_a_launch_say_so() -> None:
    step = """
        step predict   0-60
        kernel a       10-30
        kernel b       35-50
        sync cudaDeviceSynchronize 40-55
    """
    assert path(spans(step), "what, name, after")[:4] == [
        ("idle", "idle", "launch not in the trace"),
        ("kernel", "a", "launch not in the trace"),
        ("idle", "idle", "stream order"),
        ("kernel", "b", "stream order"),
    ]


def test_a_trace_of_nothing_refuses() -> None:
    with pytest.raises(AnalysisError, match="holds none"):
        critical_path(trace_of([]))


def test_a_step_without_a_duration_has_a_path_without_segments() -> None:
    assert path(spans("step predict 5-5")) == []


def disorder(seed: int) -> list[Span]:
    """Return a step of spans that need not nest, nor be in any order that makes sense."""
    draw = random.Random(seed)
    rows = ["step train 100-1100"]
    for number in range(60):
        kind = draw.choice(["op", "launch", "kernel", "copy", "sync", "module", "backward"])
        start = draw.uniform(0, 1200)
        place = f"thread={draw.randint(1, 3)}" if kind not in ("kernel", "copy") else f"stream={draw.randint(1, 3)}"
        phase = " phase=backward" if kind == "op" and draw.random() < 0.3 else ""
        end = start + draw.expovariate(1 / 40)
        rows.append(f"{kind} n{number} {start}-{end} {place} correlation_id={draw.randint(1, 20)}{phase}")
    return spans("\n".join(rows))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_spans_segments_follow_each_other_and_add_up_to_the_step(seed: int) -> None:
    columns = "round(start_ms * 1e6)::BIGINT, round(dur_ms * 1e6)::BIGINT, after_step"
    rows = critical_path(trace_of(disorder(seed))).select(columns).fetchall()
    assert rows[0][0] == 0
    assert all(start + took == after for (start, took, _), (after, _, _) in pairwise(rows))
    assert all(took > 0 for _, took, _ in rows)
    assert sum(took for _, took, beyond in rows if not beyond) == 1_000_000


@pytest.mark.slow
def test_spans_of_equal_times_give_the_same_path_in_every_load(shared: Path) -> None:
    source = shared / "traces" / "multi_rank" / "hta_sampled_rank-1.json.gz"  # its times are whole microseconds
    assert len({repr(critical_path(load(source)).fetchall()) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("source", "host_ms", "device_ms"),
    [
        ("gpu/traces/timm-vit_base_patch16_224-b16.json.gz", 7.15, 18.09),
        ("traces/kineto_amd/tracelens_mi300x_torch_compile_triton.json.gz", 0.87, 12.80),
        ("reports/traces/tracelens_gemm_01_external_id_only.json.gz", 0.13, 10.92),
        pytest.param(
            "traces/kineto_amd/tracelens_mi300x_resnet_ddp_rank0of8.json.gz", 15.83, 51.23, marks=pytest.mark.slow
        ),
    ],
)
def test_the_path_of_an_asynchronous_step_is_on_its_device(
    source: str, host_ms: float, device_ms: float, shared: Path
) -> None:
    """The ends of host calls and device work were taken from the file by hand; the host only waits in between."""
    if not (shared / source).exists():
        pytest.skip(f"{source} does not lie in ../shared")
    trace = load(shared / source)
    main = account.of(trace).main
    assert main is not None
    assert main.limit is not None
    assert main.limit.side == "device"
    rows = critical_path(trace).select("start_ms, dur_ms, device").fetchall()
    assert max(start + took for start, took, _ in rows) >= device_ms - 0.01
    assert sum(took for _, took, device in rows if device is not None) > 0.9 * sum(took for _, took, _ in rows)
    later = [(took, device) for start, took, device in rows if start > host_ms + 0.01 and start + took < device_ms]
    assert later
    assert all(device is not None for _, device in later)
