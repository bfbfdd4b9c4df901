"""Launches, queues, and layers whose launches cost more than their work."""

from __future__ import annotations

import pytest
from asking import ask

from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

STEP = """
    step s                      0-2000
    module net.a                0-300 type=Linear
      op aten::mm               5-30
      launch cudaLaunchKernel   10-20 correlation_id=1
      launch cudaLaunchKernel   20-25 correlation_id=2
    op aten::add                310-330
    launch cudaLaunchKernel     320-325 correlation_id=3
    kernel gemm                 100-200 correlation_id=1
    kernel gemm                 210-300 correlation_id=2 stream=8
    kernel add                  330-332 correlation_id=3
"""

GRAPH = """
    launch cudaGraphLaunch      450-459 correlation_id=4
    kernel fused                460-500 correlation_id=4
    kernel fused                500-502 correlation_id=4
"""

FLAWED = """
    kernel late                 1200-1300
    kernel early                1300-1301 correlation_id=9
    launch cudaLaunchKernel     1302-1303 correlation_id=9
"""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(spans(STEP + GRAPH + FLAWED))


def test_what_launches_cost_and_how_long_work_waits_after_them(trace: Trace) -> None:
    columns = "kernels_and_copies, launches, round(launch_ms, 6), delay_min_us, delay_median_us, delay_max_us, short"
    assert ask("launches", trace, columns) == [(5, 4, 0.029, 10.0, 50.0, 190.0, 2)]


def test_how_many_are_waiting_over_time() -> None:
    # 10-20: one waits, 20-100: two, 100-210: one, 320-330: one, else none
    assert ask("launches", trace_of(spans(STEP)), "round(mean_waiting * 320), most_waiting") == [(290, 2)]


def test_work_without_a_launch_or_before_it_is_counted_and_left_out(trace: Trace) -> None:
    assert ask("launches", trace, "without_launch, before_launch") == [(1, 1)]


def test_where_no_work_has_a_launch_nothing_is_said_of_it() -> None:
    trace = trace_of(spans("step s 0-10\nkernel a 1-2"))
    assert ask("launches", trace, "launches, launch_ms, delay_median_us, most_waiting, without_launch") == [
        (None, None, None, None, 1)
    ]
    assert ask("launch-bound", trace, "name") == []


def test_layers_and_operators_whose_launches_take_longer_than_their_work(trace: Trace) -> None:
    columns = "level, name, kernels_and_copies, launches, round(launch_ms, 3), round(device_ms, 3), launch_bound, short"
    assert ask("launch-bound", trace, columns) == [
        ("op", "aten::add", 1, 1, 0.005, 0.002, True, 1),
        ("model", "s", 3, 2, 0.01, 0.043, False, 1),
        ("layer", "net.a", 2, 2, 0.015, 0.19, False, 0),
    ]


def test_copies_that_block_are_waits_and_make_no_layer_launch_bound() -> None:
    trace = trace_of(
        spans("""
        step s                        0-9000
        module net.a                  0-8000 type=Embedding
          op aten::copy_              5-7000
          launch cudaMemcpyAsync      10-5020 correlation_id=1
          launch cudaLaunchKernel     5030-5035 correlation_id=2
          launch cudaMemcpyAsync      5100-5105 correlation_id=3
        copy MemcpyDtoH               5000-5010 correlation_id=1
        kernel add                    5040-5050 correlation_id=2
        copy MemcpyHtoD               5110-5120 correlation_id=3
        """)
    )
    columns = "name, kernels_and_copies, launches, round(launch_ms, 3), round(device_ms, 3), launch_bound, wait_ms"
    assert ask("launch-bound", trace, columns) == [("net.a", 3, 2, 0.01, 0.02, False, 5.01)]
    assert ask("launches", trace, "launches, round(launch_ms, 3), blocking, wait_ms") == [(3, 0.01, 1, 5.01)]


def test_a_copy_whose_work_is_not_in_the_trace_blocks_unless_its_name_says_otherwise() -> None:
    calls = "launch cudaMemcpy 20-500 correlation_id=9\nlaunch cudaMemcpyAsync 600-900 correlation_id=8"
    trace = trace_of(spans("step s 0-1000\nkernel a 1-2\n" + calls))
    ask("launches", trace, "launches")
    assert trace.con.execute("SELECT name, waits FROM runtime_calls ORDER BY start_ns").fetchall() == [
        ("cudaMemcpy", True),
        ("cudaMemcpyAsync", False),
    ]
