"""What devices did: sums that can be made by hand, identities, and a plain reading beside them."""

from __future__ import annotations

import random

import pytest
from asking import ask_rounded as ask

from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError
from xsp.schema import Span
from xsp.testing import spans, trace_of

# two streams and a copy, in µs: 100-200 computes, 150-300 communicates, 290-320 copies, 400-500 computes
DEVICE = """
    step s                                            0-1000
    kernel volta_sgemm_128x64_nn                      100-200
    kernel ncclDevKernel_AllReduce_Sum_f32_RING_LL    150-300 stream=20
    copy Memcpy                                       290-320 stream=3
    kernel vectorized_elementwise_kernel              400-500
"""


def test_what_overlaps_counts_once_and_hidden_communication_is_told_from_exposed() -> None:
    trace = trace_of(spans(DEVICE))
    assert ask("device-activity", trace, "window_ms, busy_ms, idle_ms") == [(0.4, 0.32, 0.08)]
    assert ask("device-activity", trace, "computation_ms, communication_ms, copy_ms, kernels, copies") == [
        (0.2, 0.15, 0.03, 3, 1)
    ]
    assert ask("device-activity", trace, "exposed_communication_ms, hidden_communication_ms, exposed_copy_ms") == [
        (0.1, 0.05, 0.02)
    ]


def test_several_devices_and_ranks_stand_in_rows_of_their_own_and_are_summed() -> None:
    trace = trace_of(
        [*spans(DEVICE), *spans("kernel a 0-10 device=1", step=0), *spans("step s 0-50\nkernel b 0-10", rank=1)]
    )
    assert ask("device-activity", trace, "rank, device, window_ms, busy_ms, kernels") == [
        (0, 0, 0.4, 0.32, 3), (0, 1, 0.01, 0.01, 1), (1, 0, 0.01, 0.01, 1), (None, None, 0.42, 0.34, 5),
    ]  # fmt: skip


def test_steps_that_did_not_record_the_device_are_no_idle_time() -> None:
    def step(number: int, rung: int, text: str) -> list[Span]:
        return [
            span._replace(start_ns=span.start_ns + number * 1_000_000)
            for span in spans(text, step=number, rung=rung)
        ]  # fmt: skip

    work = "step s 0-900\nkernel a 100-200\nkernel b 300-400"
    trace = trace_of([*step(0, 70, work), *step(1, 20, "step s 0-900"), *step(2, 70, work)])
    assert ask("device-activity", trace, "window_ms, busy_ms, idle_ms") == [(0.6, 0.4, 0.2)]
    beside = trace_of([*step(0, 70, work), *step(2, 70, work)])  # step 1 ran, and was not recorded at all
    assert ask("device-activity", beside, "window_ms, busy_ms, idle_ms") == [(0.6, 0.4, 0.2)]
    assert ask("steps", trace, "step, host_ms, first_work_after_ms, window_ms, idle_ms") == [
        (0, 0.9, 0.1, 0.3, 0.1), (2, 0.9, 0.1, 0.3, 0.1),
    ]  # fmt: skip


def test_classes_of_kernels_and_tensor_cores() -> None:
    trace = trace_of(spans(DEVICE + "kernel nvjet_tst_64x8 500-800\nkernel triton_tem_fused_mm 800-900"))
    assert ask("kernel-classes", trace, "class, kernels, device_ms, tensor_core_percent, unknown_ms") == [
        ("gemm", 3, 0.5, 75.0, 0.1), ("communication", 1, 0.15, None, None), ("elementwise", 1, 0.1, None, None),
        ("memory copy", 1, 0.03, None, None),
    ]  # fmt: skip


def test_without_device_work_it_refuses() -> None:
    trace = trace_of(spans("step s 0-10\nop aten::mm 1-5"))
    for name in ("device-activity", "steps", "kernel-classes"):
        with pytest.raises(AnalysisError, match="needs device work of a GPU"):
            ANALYSES[name](trace)


@pytest.mark.parametrize("seed", range(5))
def test_a_count_of_each_nanosecond_says_the_same(seed: int) -> None:
    chance = random.Random(seed)
    names = {"gemm": "computing", "ncclKernel_AllReduce": "communicating", "Memcpy": "copying"}
    work = []
    for _ in range(60):
        name, start = chance.choice(list(names)), chance.randrange(0, 400)
        kind = "copy" if name == "Memcpy" else "kernel"
        work.append((kind, name, start, start + chance.randrange(0, 12), chance.randrange(3)))
    text = "\n".join(f"{kind} {name} {start}-{end} stream={stream}" for kind, name, start, end, stream in work)
    runs = [{names[name] for _, name, start, end, _ in work if start <= now < end} for now in range(412)]
    first, last = min(start for _, _, start, _, _ in work), max(end for *_, end, _ in work)
    expected = [
        sum(map(bool, runs)),
        last - first - sum(map(bool, runs)),
        sum("computing" in here for here in runs),
        sum("communicating" in here and "computing" not in here for here in runs),
        sum(here == {"copying"} for here in runs),
    ]
    columns = "busy_ms, idle_ms, computation_ms, exposed_communication_ms, exposed_copy_ms"
    (result,) = ask("device-activity", trace_of(spans(text)), columns)
    assert [round(1000 * entry) for entry in result] == expected


def test_tensor_cores_by_layer_as_far_as_names_tell() -> None:
    trace = trace_of(spans("""
        step s                  0-1000
        module net.fc           0-100 type=Linear
        launch cudaLaunchKernel 10-15 correlation_id=1
        launch cudaLaunchKernel 20-25 correlation_id=2
        launch cudaLaunchKernel 30-35 correlation_id=3
        module net.act          100-200 type=ReLU
        launch cudaLaunchKernel 110-115 correlation_id=4
        op aten::mm             300-400
        launch cudaLaunchKernel 310-315 correlation_id=5
        kernel ampere_bf16_s16816gemm_bf16_128x64_nn  400-430 correlation_id=1
        kernel volta_sgemm_128x64_nn                  430-440 correlation_id=2
        kernel triton_tem_fused_mm                    440-445 correlation_id=3
        kernel vectorized_elementwise_kernel          450-460 correlation_id=4
        kernel Cijk_Alik_Bljk_SB                      460-461 correlation_id=5
    """))  # fmt: skip
    columns = "level, name, kernels, with_tensor_cores_ms, without_tensor_cores_ms, unknown_ms, tensor_core_percent"
    assert ask("tensor-cores", trace, columns) == [
        ("layer", "net.fc", 3, 0.03, 0.01, 0.005, 75.0), ("op", "aten::mm", 1, 0.0, 0.0, 0.001, None),
    ]  # fmt: skip
