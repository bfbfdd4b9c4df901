"""Each analysis on a step that can be summed by hand: input, question, answer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from xsp import analyses
from xsp.analyses import ANALYSES, Analysis, optimal_batch
from xsp.errors import AnalysisError
from xsp.schema import Level, Span
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

# One training step on a CPU, in µs. `net` adds by itself after its two children.
STEP = """
    step train                     0-1000 batch_size=4
    forward Net                    100-900
    module net                     100-900 type=Net depth=0 param_bytes=2097152
      module net.conv              150-450 type=Conv2d depth=1 param_bytes=2097152 input_shapes=[[4,3]]
        op aten::conv2d            160-440
        op aten::mkldnn_convolution 180-430 flops=8000000
        primitive reorder          185-195 type=reorder attributes={"library":"oneDNN"}
        primitive conv             200-400 type=convolution attributes={"library":"oneDNN"}
        alloc alloc                300-300 alloc_bytes=2097152
      module net.relu              500-700 type=ReLU depth=1
        op aten::relu              520-680 sequence_nr=5
        op aten::view              690-695
      alloc alloc                  740-740 alloc_bytes=1048576
      op aten::add                 750-850 flops=1000
    backward backward              910-990
    op autograd::ReluBackward0     915-965 phase=backward sequence_nr=5 forward_thread=1
    op aten::threshold_backward    920-960
"""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(spans(STEP), {"name": "hand"})


def ask(analysis: Analysis, trace: Trace, columns: str) -> list[tuple[Any, ...]]:
    rows = analysis(trace).select(columns).fetchall()
    return [tuple(round(cell, 4) if isinstance(cell, float) else cell for cell in row) for row in rows]


def test_A2_the_layers_in_execution_order(trace: Trace) -> None:
    assert ask(analyses.A2, trace, "layer_index, name, type, depth, leaf, shape, latency_ms, self_ms, backward_ms") == [
        (0, "net", "Net", 0, False, None, 0.8, 0.3, None),
        (1, "net.conv", "Conv2d", 1, True, "[[4,3]]", 0.3, 0.3, None),
        (2, "net.relu", "ReLU", 1, True, None, 0.2, 0.2, 0.05),
    ]
    assert ask(analyses.A2, trace, "alloc_mib, param_mib, activation_mib, latency_low_ms, latency_high_ms") == [
        (1.0, 2.0, None, None, None),
        (2.0, 2.0, None, None, None),
        (0.0, None, None, None, None),
    ]


def test_the_calls_of_a_module_are_one_row_of_layers_with_their_sums() -> None:
    trace = trace_of(spans("""
        step accumulated    0-1000
        module net          0-200 type=Net depth=0
        module net.a        10-110 type=Linear depth=1 param_bytes=1048576
        alloc alloc         20-20 alloc_bytes=1048576
        module net          300-500 type=Net depth=0
        module net.a        310-410 type=Linear depth=1 param_bytes=1048576
        alloc alloc         320-320 alloc_bytes=1048576
    """))  # fmt: skip
    columns = "name, calls, host_self_ms, percent_of_host_time, host_ms, alloc_mib, param_mib"
    assert ask(analyses.layers, trace, columns) == [
        ("net", 2, 0.2, 50.0, 0.4, 0.0, None), ("net.a", 2, 0.2, 50.0, 0.2, 2.0, 1.0),
    ]  # fmt: skip
    assert len(analyses.A2(trace).fetchall()) == 4, "A2 has a row for each call, in the order of execution"


def test_A3_and_A4_latency_and_memory_of_each_layer_by_itself(trace: Trace) -> None:
    assert ask(analyses.A3, trace, "*") == [
        (0, "net", "Net", 0.3), (1, "net.conv", "Conv2d", 0.3), (2, "net.relu", "ReLU", 0.2),
    ]  # fmt: skip
    assert ask(analyses.A4, trace, "*") == [
        (0, "net", "Net", 1.0), (1, "net.conv", "Conv2d", 2.0), (2, "net.relu", "ReLU", 0.0),
    ]  # fmt: skip


def test_A5_A6_A7_by_type_add_up_to_all(trace: Trace) -> None:
    assert ask(analyses.A5, trace, "*") == [("Conv2d", 1, 50.0), ("ReLU", 1, 50.0)]
    assert ask(analyses.A6, trace, "*") == [
        ("Conv2d", 1, 0.3, 37.5), ("Net", 1, 0.3, 37.5), ("ReLU", 1, 0.2, 25.0),
    ]  # fmt: skip
    assert ask(analyses.A7, trace, "*") == [
        ("Conv2d", 1, 2.0, 66.6667), ("Net", 1, 1.0, 33.3333), ("ReLU", 1, 0.0, 0.0),
    ]  # fmt: skip


DISPATCH = "(dispatch and bookkeeping)"


def test_A8_without_a_device_kernels_are_what_operators_took_by_themselves(trace: Trace) -> None:
    assert ask(analyses.A8, trace, "name, layer_index, phase, library, latency_us, flops, gflop_per_s") == [
        (DISPATCH, 1, None, "framework", 70.0, None, None),  # 30 of conv2d, 40 of the operator around the primitives
        ("reorder", 1, None, "oneDNN", 10.0, None, None),
        ("conv", 1, None, "oneDNN", 200.0, 8_000_000, 40.0),  # those of its operator, which ran no other
        ("aten::relu", 2, None, "unknown", 160.0, None, None),
        (DISPATCH, 2, None, "framework", 5.0, None, None),  # the view
        ("aten::add", 0, None, "unknown", 100.0, 1000, 0.01),
        (DISPATCH, 2, "backward", "framework", 10.0, None, None),  # the autograd engine's frame
        ("aten::threshold_backward", 2, "backward", "unknown", 40.0, None, None),
    ]


def test_A8_operations_of_an_operator_that_ran_two_primitives_are_not_guessed_apart() -> None:
    trace = trace_of(spans("""
        step s         0-100
        op aten::lstm  10-90 flops=500
        primitive rnn  20-40 type=rnn
        primitive mm   50-80 type=matmul
    """))  # fmt: skip
    assert ask(analyses.A8, trace, "name, flops") == [(DISPATCH, None), ("rnn", None), ("mm", None)]


def test_A10_kernels_of_one_name_and_their_share_of_the_model(trace: Trace) -> None:
    assert ask(analyses.A10, trace, "name, library, calls, latency_ms, percent_of_wall, flops") == [
        ("conv", "oneDNN", 1, 0.2, 20.0, 8_000_000),
        ("aten::relu", "unknown", 1, 0.16, 16.0, None),
        ("aten::add", "unknown", 1, 0.1, 10.0, 1000),
        (DISPATCH, "framework", 4, 0.085, 8.5, None),
        ("aten::threshold_backward", "unknown", 1, 0.04, 4.0, None),
        ("reorder", "oneDNN", 1, 0.01, 1.0, None),
    ]


def test_A11_A12_A13_kernels_by_layer(trace: Trace) -> None:
    assert ask(analyses.A11, trace, "layer_index, layer_name, calls, latency_ms, percent_of_wall") == [
        (0, "net", 1, 0.1, 10.0), (1, "net.conv", 2, 0.28, 28.0), (2, "net.relu", 2, 0.215, 21.5),
    ]  # fmt: skip
    assert ask(analyses.A12, trace, "layer_index, flops, dram_read_bytes") == [
        (0, 1000, None), (1, 8_000_000, None), (2, None, None),
    ]  # fmt: skip
    assert ask(analyses.A13, trace, "layer_index, latency_ms, kernel_ms, other_ms, kernel_percent_of_wall") == [
        (0, 0.3, 0.1, 0.2, 33.3333), (1, 0.3, 0.21, 0.09, 70.0), (2, 0.2, 0.16, 0.04, 80.0),
    ]  # fmt: skip


def test_A8_and_A11_with_a_device_its_kernels_belong_to_the_layers_that_launched_them() -> None:
    trace = trace_of(spans("""
        step s                   0-1000
        module net.a             100-200 type=Linear
        op aten::mm              110-190
        launch cudaLaunchKernel  120-130 correlation_id=1
        module net.b             200-300 type=ReLU
        op aten::relu            210-290
        launch cudaLaunchKernel  220-230 correlation_id=2
        kernel gemm              400-700 correlation_id=1
        kernel relu              700-800 correlation_id=2
        copy Memcpy              800-900 correlation_id=3
    """))  # fmt: skip
    assert ask(analyses.A8, trace, "name, layer_name, library, latency_us") == [
        ("gemm", "net.a", "device", 300.0), ("relu", "net.b", "device", 100.0),
    ]  # fmt: skip
    assert ask(analyses.A11, trace, "layer_name, calls, percent_of_wall") == [("net.a", 1, 30.0), ("net.b", 1, 10.0)]


TWO_DEVICES = """
    step s                   0-1000
    op aten::mm              100-150
    launch cudaLaunchKernel  110-120 correlation_id=1
    launch cudaLaunchKernel  130-140 correlation_id=2
    op aten::add             200-250
    launch cudaLaunchKernel  210-220 correlation_id=3
    kernel gemm              150-950 correlation_id=1 device=0
    kernel gemm              150-850 correlation_id=2 device=1
    kernel gemm              300-900 correlation_id=4 device=1 stream=9
    kernel relu              900-1000 correlation_id=3 device=1
"""


def test_a_sum_over_devices_is_not_set_beside_the_time_of_a_step() -> None:
    trace = trace_of(spans(TWO_DEVICES))
    assert ask(analyses.A10, trace, "name, device, calls, latency_ms, percent_of_kernel_time, percent_of_wall") == [
        ("gemm", None, 3, 2.1, 95.4545, 77.5),  # 800 µs of one, and 750 of the other, where two run at once
        ("relu", None, 1, 0.1, 4.5455, 5.0),
        ("gemm", 0, 1, 0.8, 100.0, 80.0),
        ("gemm", 1, 2, 1.3, 92.8571, 75.0), ("relu", 1, 1, 0.1, 7.1429, 10.0),
    ]  # fmt: skip
    assert ask(analyses.A15, trace, "latency_ms, kernel_ms, kernel_percent_of_wall") == [(1.0, 1.1, 82.5)]
    columns = "name, device, calls, device_ms, percent_of_device_time, host_self_ms, percent_of_host_time"
    assert ask(analyses.operators, trace, columns) == [
        ("aten::mm", None, 1, 1.5, 68.1818, 0.05, 50.0), ("(no operator)", None, None, 0.6, 27.2727, None, None),
        ("aten::add", None, 1, 0.1, 4.5455, 0.05, 50.0),
        ("aten::mm", 0, 1, 0.8, 100.0, None, None),
        ("aten::mm", 1, 1, 0.7, 50.0, None, None), ("(no operator)", 1, None, 0.6, 42.8571, None, None),
        ("aten::add", 1, 1, 0.1, 7.1429, None, None),
    ]  # fmt: skip


def test_operators_and_kernels_of_one_device_are_there_once() -> None:
    trace = trace_of(spans(TWO_DEVICES.replace("device=1", "device=0")))
    for entry in (analyses.operators, analyses.A10):
        names = [name for name, _ in ask(entry, trace, "name, device")]
        assert len(names) == len(set(names))


STACKED = """
    step s                   0-1000
    module net               0-500 type=Net depth=0
    module net.layers.0      0-200 type=Block depth=1
    module net.layers.0.mm   20-120 type=Linear depth=2
    op aten::mm              30-110
    launch cudaLaunchKernel  40-50 correlation_id=1
    op aten::add             150-190
    launch cudaLaunchKernel  160-170 correlation_id=2
    module net.layers.1      200-400 type=Block depth=1
    module net.layers.1.mm   220-320 type=Linear depth=2
    op aten::mm              230-310
    launch cudaLaunchKernel  240-250 correlation_id=3
    op aten::adam            600-700
    launch cudaLaunchKernel  610-620 correlation_id=4
    kernel gemm              200-500 correlation_id=1
    kernel add               500-550 correlation_id=2
    kernel gemm              550-850 correlation_id=3
    kernel adam              850-1000 correlation_id=4
"""


def test_modules_have_the_device_time_of_what_is_inside_them_over_all_instances() -> None:
    trace = trace_of(spans(STACKED))
    columns = "type, modules, calls, device_ms, percent_of_device_time, self_device_ms, kernels, host_ms, host_self_ms"
    assert ask(analyses.modules_by_path, trace, f"path, {columns}") == [
        ("net", "Net", 1, 1, 0.65, 81.25, None, 3, 0.5, 0.1),
        ("net.layers.*", "Block", 2, 2, 0.65, 81.25, 0.05, 3, 0.4, 0.2),
        ("net.layers.*.mm", "Linear", 2, 2, 0.6, 75.0, 0.6, 2, 0.2, 0.2),
        ("(no module)", None, None, None, 0.15, 18.75, 0.15, 1, None, None),
    ]
    rows = ask(analyses.modules_by_class, trace, "class, device_ms, self_percent_of_device_time, percent_of_host_time")
    assert rows == [
        ("Net", 0.65, None, 100.0), ("Block", 0.65, 6.25, 80.0), ("Linear", 0.6, 75.0, 40.0),
        ("(no module)", 0.15, 18.75, None),
    ]  # fmt: skip


def test_modules_that_are_named_by_class_and_instance_have_the_path_of_the_classes_around_them() -> None:
    trace = trace_of(spans("""
        step s                0-1000
        module Net_0          0-900 type=Net depth=0
        module Block_0        0-400 type=Block depth=1
        module Block_2        100-300 type=Block depth=2
        module Linear_0       150-250 type=Linear depth=3
        module Block_1        400-800 type=Block depth=1
    """))  # fmt: skip
    assert ask(analyses.modules_by_path, trace, "path, modules, host_ms, device_ms") == [
        ("Net", 1, 0.9, None), ("Net.Block", 2, 0.8, None), ("Net.Block.Block", 1, 0.2, None),
        ("Net.Block.Block.Linear", 1, 0.1, None),
    ]  # fmt: skip
    assert ask(analyses.modules_by_class, trace, "class, modules, host_ms, host_self_ms")[1] == ("Block", 3, 0.8, 0.7)


def test_of_several_devices_the_classes_of_each_follow_those_of_all() -> None:
    columns = "rank, device, class, kernels, device_ms, percent_of_device_time"
    assert ask(analyses.kernel_classes, trace_of(spans(TWO_DEVICES)), columns) == [
        (None, None, "gemm", 3, 2.1, 95.4545), (None, None, "elementwise", 1, 0.1, 4.5455),
        (0, 0, "gemm", 1, 0.8, 100.0),
        (0, 1, "gemm", 2, 1.3, 92.8571), (0, 1, "elementwise", 1, 0.1, 7.1429),
    ]  # fmt: skip


def test_A13_where_the_host_runs_ahead_a_layer_is_at_work_on_the_host_or_on_the_device() -> None:
    trace = trace_of(spans("""
        step s                   0-1000
        module net               100-400 type=Net depth=0
        module net.a             100-200 type=Linear depth=1
        op aten::mm              110-190
        launch cudaLaunchKernel  120-130 correlation_id=1
        launch cudaLaunchKernel  140-150 correlation_id=2
        module net.b             200-300 type=ReLU depth=1
        op aten::relu            210-290
        launch cudaLaunchKernel  220-230 correlation_id=3
        kernel gemm              150-260 correlation_id=1
        kernel split             240-300 correlation_id=2 stream=8
        kernel relu              300-350 correlation_id=3
    """))  # fmt: skip
    assert ask(analyses.A2, trace, "name, self_ms, kernel_ms") == [
        ("net", 0.1, None), ("net.a", 0.1, 0.17), ("net.b", 0.1, 0.05),
    ]  # fmt: skip
    assert ask(analyses.A13, trace, "layer_name, latency_ms, kernel_ms, other_ms, host_ms") == [
        ("net", 0.1, 0.0, 0.1, 0.1),  # its own 100 µs after its children
        ("net.a", 0.2, 0.15, 0.05, 0.1),  # two kernels at once count once; 50 of its 100 µs run beside them
        ("net.b", 0.15, 0.05, 0.1, 0.1),  # its kernel runs later
    ]


def test_an_operators_figures_belong_to_its_only_kernel_else_to_what_holds_all_of_them() -> None:
    trace = trace_of(
        spans("""
        step s                   0-1000
        module net               0-500 type=Net
        op aten::mm              10-90 dtype=float flops=8000 dram_read_bytes=300 dram_write_bytes=100
        launch cudaLaunchKernel  20-30 correlation_id=1
        op aten::bmm             100-190 dtype=float flops=6000 dram_read_bytes=100 dram_write_bytes=100
        launch cudaLaunchKernel  120-130 correlation_id=2
        launch cudaLaunchKernel  140-150 correlation_id=3
        op aten::relu            200-290 dtype=float
        launch cudaLaunchKernel  220-230 correlation_id=4
        kernel sgemm             200-300 correlation_id=1
        kernel split             300-350 correlation_id=2
        kernel split             350-400 correlation_id=3
        kernel relu              400-404 correlation_id=4
    """),
        {"machine": {"devices": ["Tesla V100-SXM2-16GB"]}},
    )  # fmt: skip
    assert ask(analyses.A8, trace, "name, flops, flop_per_byte, memory_bound") == [
        ("sgemm", 8000, 20.0, False), ("split", None, None, None), ("split", None, None, None),
        ("relu", None, None, None),
    ]  # fmt: skip
    assert ask(analyses.A10, trace, "name, calls, flops, gflop_per_s, flop_per_byte") == [
        ("sgemm", 1, 8000, 0.08, 20.0), ("split", 2, 6000, 0.06, 30.0), ("relu", 1, None, None, None),
    ]  # fmt: skip
    assert ask(analyses.A14, trace, "layer_name, flop_per_byte, roof_gflop_per_s, memory_bound") == [
        ("net", 23.3333, 15700.0, False)
    ]
    assert ask(analyses.A15, trace, "flops, bytes_known_percent, kernel_percent_of_wall") == [(14000, 98.0392, 20.4)]
    assert ask(analyses.A9, trace, "roof_percent, bandwidth_percent")[0] == (0.0005, 0.0004)


def test_work_of_an_unknown_type_is_not_single_precision_and_a_sum_of_half_known_work_has_no_throughput() -> None:
    trace = trace_of(
        spans("""
        step s                   0-1000
        module net               0-500 type=Net
        op aten::mm              10-90 flops=8000
        launch cudaLaunchKernel  20-30 correlation_id=1
        op aten::mm              100-190 dtype=c10::Float8_e4m3fn flops=9000
        launch cudaLaunchKernel  120-130 correlation_id=2
        op aten::index           200-290 dtype=float
        launch cudaLaunchKernel  220-230 correlation_id=3
        op my::product           300-390 dtype=float
        launch cudaLaunchKernel  320-330 correlation_id=4
        kernel told_nothing      200-300 correlation_id=1
        kernel nvjet_e4m3        300-350 correlation_id=2
        kernel index_kernel      350-400 correlation_id=3
        kernel mine              400-500 correlation_id=4
    """),
        {"machine": {"devices": ["NVIDIA H100 80GB HBM3"]}},
    )  # fmt: skip
    assert ask(analyses.A10, trace, "name, gflop_per_s, precision, flops_known_percent") == [
        ("mine", None, "fp32", 0.0), ("told_nothing", 0.08, None, 100.0), ("index_kernel", None, "fp32", 100.0),
        ("nvjet_e4m3", 0.18, "fp8", 100.0),
    ]  # fmt: skip
    assert ask(analyses.A15, trace, "flops, gflop_per_s, precision, flops_known_percent") == [
        (17000, None, "fp8", 66.6667)
    ]


@pytest.mark.parametrize("order", [("c10::Half", "float"), ("float", "c10::Half")])
def test_of_work_of_two_types_that_is_equally_large_the_named_one_depends_on_no_order(order: tuple[str, str]) -> None:
    first, second = order
    trace = trace_of(
        spans(f"""
        step s                   0-1000
        module net               0-500 type=Net
        op aten::mm              10-90 flops=8000 dtype={first}
        launch cudaLaunchKernel  20-30 correlation_id=1
        op aten::mm              100-190 flops=8000 dtype={second}
        launch cudaLaunchKernel  120-130 correlation_id=2
        kernel same              200-300 correlation_id=1
        kernel same              300-400 correlation_id=2
    """)
    )
    assert ask(analyses.A10, trace, "calls, precision") == [(2, "fp32")]


def test_the_stages_say_where_in_the_model_its_time_goes(trace: Trace) -> None:
    assert ask(analyses.stages, trace, "stage, layers, latency_ms, alloc_mib, flops, dominates") == [
        ("begin", 1, 0.3, 1.0, 1000, "latency_ms"),
        ("middle", 1, 0.3, 2.0, 8_000_000, "latency_ms, alloc_mib, flops"),
        ("end", 1, 0.2, 0.0, None, ""),
    ]


# --- several steps: A1 and the ledger ---------------------------------------------------------------------


def leveled() -> Trace:
    """Three steps of 1 ms bare, three that 80 µs more for two layers make 1.08 ms."""
    rows: list[Span] = []
    for step in range(3):
        rows += spans("step s 0-1000 batch_size=8", step=2 * step, rung=20)
        rows += spans(
            "step s 0-1080 batch_size=8\nmodule net 0-900 type=Net\nmodule net.a 100-400 type=Linear",
            step=2 * step + 1,
            rung=30,
        )
    costs = {"modules": {"level": 30, "ns_per_span": 30_000.0}, "training": {"level": 20, "ns_per_span": 9_000.0}}
    return trace_of(rows, {"name": "leveled", "costs": costs})


def test_A1_latency_and_throughput_from_the_outermost_rung() -> None:
    assert ask(analyses.A1, leveled(), "*") == [(8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8000.0, 3, *[None] * 5)]


def test_A1_one_row_for_each_batch_size() -> None:
    rows = [
        row
        for step, (batch, end) in enumerate([(1, 500), (4, 1000), (1, 700)])
        for row in spans(f"step s 0-{end} batch_size={batch}", step=step)
    ]
    assert ask(analyses.A1, trace_of(rows), "batch_size, latency_ms, low_ms, samples_per_s, steps") == [
        (1, 0.6, None, 1666.6667, 2),
        (4, 1.0, None, 4000.0, 1),
    ]


def test_the_ledger_what_a_rung_added_and_what_the_calibration_explains_of_it() -> None:
    assert ask(analyses.ledger, leveled(), "*") == [
        ("steps and calls", "M", 3, 1.0, None, None, None, None, None, None, None, None, None),
        ("layers", "M/L", 3, 1.08, 0.08, 0.08, 0.08, 8.0, 2, 40_000.0, None, 0.06, 0.02),
    ]


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([1080, 940, 1010], "cannot be distinguished from noise"),
        ([900, 910, 905], "cannot be distinguished from noise"),
        ([930], "too few steps for an interval"),
    ],
    ids=["as much above 0 as below", "below 0", "one step"],
)
def test_the_ledger_has_no_cost_of_a_span_where_it_cannot_be_told(ends: list[int], why: str) -> None:
    rows: list[Span] = []
    for number, end in enumerate(ends):
        rows += spans("step s 0-1000", step=2 * number, rung=20)
        rows += spans(f"step s 0-{end}\nmodule net 0-900 type=Net", step=2 * number + 1, rung=30)
    assert ask(analyses.ledger, trace_of(rows), "deepest, spans, ns_per_span, why_null") == [
        ("steps and calls", None, None, None),
        ("layers", 1, None, why),
    ]


@pytest.mark.slow
def test_the_ledger_by_layer_and_by_kind() -> None:
    assert ask(analyses.ledger_by_layer, leveled(), "*") == [
        (0, "net", "Net", 0.9, 0.86, 0.04, 0.04, 0.0),  # one layer inside, at 40 µs
        (1, "net.a", "Linear", 0.3, 0.3, 0.0, 0.0, 0.0),
    ]
    assert ask(analyses.ledger_by_kind, leveled(), "*") == [
        ("step", 20, 1, 1.08, 1.0, 0.08, 0.08, 0.0),
        ("module", 30, 2, 1.2, 1.16, 0.04, 0.04, 0.0),
    ]


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("A2", r"A2 \(Layer information\) needs the layer level, and 'bare' holds no such span \(recorded with M\)"),
        ("A11", r"needs the layer, op level.*record again with --levels M/L/G"),
        ("A8", "needs the op level"),
    ],
)
def test_an_analysis_refuses_what_the_trace_cannot_carry_and_says_how_to_record_it(name: str, reason: str) -> None:
    bare = trace_of(spans("step s 0-10"), {"name": "bare", "levels": "M"})
    with pytest.raises(AnalysisError, match=reason):
        ANALYSES[name](bare)


def test_A1_refuses_where_no_step_was_timed() -> None:
    with pytest.raises(AnalysisError, match="holds no timed step"):
        analyses.A1(trace_of(spans("step s 0-10", timed=False), {"name": "warm"}))


@pytest.mark.parametrize("name", ["A9", "A14"])
def test_rooflines_of_a_processor_refuse_until_it_was_measured(name: str, trace: Trace) -> None:
    with pytest.raises(AnalysisError, match=r"was not measured.*xsp doctor --measure RUN"):
        ANALYSES[name](trace)


def test_every_analysis_says_what_it_is_and_is_reachable_by_its_number() -> None:
    assert [name for name in ANALYSES if name.startswith("A")] == [f"A{number}" for number in range(1, 16)]
    for name, entry in ANALYSES.items():
        assert entry.id == name
        assert entry.title
        assert entry.about
        assert set(entry.needs) <= set(Level)


# --- the optimal batch size -------------------------------------------------------------------------------

# ResNet50 v1.5 on a V100, XSP: A15's latencies, and between them Table VI's gains, +3.6 % and +3.9 %.
LATENCIES = {1: 6.21, 16: 21.90, 32: 40.03, 256: 275.05}
LATENCIES[128] = LATENCIES[256] / 2 * 1.039
LATENCIES[64] = LATENCIES[128] / 2 * 1.036


def test_the_rule_gives_64_where_the_paper_reports_256() -> None:
    best = optimal_batch(list(LATENCIES), list(LATENCIES.values()))
    assert (best.first_plateau, best.max_throughput, best.within_target) == (64, 256, None)


def test_the_published_optimum_is_where_the_published_throughput_is_reached(shared: Path) -> None:
    with open(shared / "golden" / "xsp_table8.csv", encoding="utf-8") as file:
        published = {row["name"]: row for row in csv.DictReader(file)}["MLPerf ResNet50 v1.5"]
    best = optimal_batch(list(LATENCIES), list(LATENCIES.values())).max_throughput
    assert best == int(published["optimal_batch"])
    assert 1000 * best / LATENCIES[best] == pytest.approx(float(published["max_throughput"]), rel=0.001)


def test_a_latency_target_bounds_the_size() -> None:
    sizes, latencies = [1, 2, 4, 8], [1.0, 1.5, 2.5, 6.0]
    assert optimal_batch(sizes, latencies, target_ms=2.5).within_target == 4
    assert optimal_batch(sizes, latencies, target_ms=0.5).within_target is None
    assert optimal_batch(sizes, latencies, target_ms=99).within_target == 4, "8 is slower per sample"


@pytest.mark.parametrize(
    ("sizes", "latencies", "plateau", "fastest"),
    [
        ([8], [3.0], 8, 8),  # one size
        ([4, 1, 2], [3.0, 1.0, 1.6], 4, 4),  # no plateau in sight, any order
        ([1, 2, 4], [1.0, 2.0, 4.0], 1, 1),  # no gain at all: the smallest
        ([1, 2, 4], [1.0, 1.0, 4.0], 2, 2),  # it becomes slower
    ],
)
def test_edges_of_the_rule(sizes: list[int], latencies: list[float], plateau: int, fastest: int) -> None:
    best = optimal_batch(sizes, latencies)
    assert (best.first_plateau, best.max_throughput) == (plateau, fastest)


@pytest.mark.parametrize(("sizes", "latencies"), [([], []), ([1, 2], [1.0])])
def test_sizes_without_latencies_are_refused(sizes: list[int], latencies: list[float]) -> None:
    with pytest.raises(AnalysisError, match="a latency for each"):
        optimal_batch(sizes, latencies)


def test_each_analysis_stands_under_what_the_command_line_calls_it() -> None:
    for entry in ANALYSES.values():
        assert getattr(analyses, entry.id.replace("-", "_")) is entry
        assert getattr(analyses, entry.name) is entry
