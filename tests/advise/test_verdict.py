"""The verdict on a device's time: shares, causes of similar size, and specific advice."""

from __future__ import annotations

import pytest
from test_fusing import FORWARD, kernels

from xsp.advise.device import features_in_use, pieces
from xsp.advise.verdict import Verdict, verdict
from xsp.analyses.answers import Answers
from xsp.testing import spans, trace_of


def verdict_of(text: str) -> Verdict:
    result = verdict(Answers(trace_of(spans(text))))
    assert result is not None
    return result


LATE = """
    step s                  0-1000
    launch cudaLaunchKernel 10-15 correlation_id=1
    kernel first            20-320 correlation_id=1
    launch cudaLaunchKernel 590-595 correlation_id=2
    kernel second           600-700 correlation_id=2
    sync cudaStreamSynchronize 610-720
    launch cudaLaunchKernel 728-733 correlation_id=3
    kernel third            735-740 correlation_id=3
"""


def test_causes_of_similar_size_are_both_named_with_their_shares() -> None:
    text = """
        step s                  0-2000
        launch cudaLaunchKernel 10-15 correlation_id=1
        kernel first            20-100 correlation_id=1
        launch cudaLaunchKernel 590-595 correlation_id=2
        kernel second           600-610 correlation_id=2
        data enumerate(DataLoader) 620-1010
        launch cudaLaunchKernel 1012-1015 correlation_id=3
        kernel third            1020-1120 correlation_id=3
    """
    assert verdict_of(text).verdict == (
        "The device is busy 17 % of the time. Host-bound 45 % (launches come too late) and data loading 37 % "
        "(the step waits for data)."
    )


@pytest.mark.slow
def test_a_single_cause_is_named_alone() -> None:
    assert verdict_of(LATE).verdict.startswith("The device is busy 56 % of the time. Host-bound 39 % (")
    assert " and " not in verdict_of(LATE).verdict


def test_the_work_of_a_busy_device_is_given_in_shares() -> None:
    result = verdict_of("step s 0-400\nkernel sgemm 0-100\nkernel reduce_kernel 100-170\nkernel dropout 170-200")
    assert result.verdict == "The device is busy 100 % of the time. Of its work 50 % is gemm and 35 % is reduction."


def test_two_devices_are_counted() -> None:
    result = verdict_of("step s 0-400\nkernel sgemm 0-100\nkernel sgemm 0-100 device=1")
    assert result.verdict == "The 2 devices are busy 100 % of the time. Of their work 100 % is gemm."


def test_a_dominant_gap_and_the_call_of_the_host_are_named() -> None:
    text = """
        step s                      0-1000
        launch hipLaunchKernel      10-15 correlation_id=1
        kernel first                20-30 correlation_id=1
        launch hipLaunchKernel      60-65 correlation_id=2
        launch hipMemcpyWithStream  80-905 correlation_id=3
        launch hipGraphLaunch       920-950 correlation_id=4
        kernel second               890-899 correlation_id=2
        copy MemcpyDtoH             900-902 correlation_id=3 attributes={"bytes":256}
        kernel replayed             960-980 correlation_id=4
    """
    result = verdict_of(text)
    assert "Kernel wait 86 %" in result.verdict
    assert "one gap of 0.82 ms at 50 µs, the host in hipMemcpyWithStream of 256 bytes (0.825 ms)" in result.why[0]
    assert all("CUDA graphs" not in sentence for sentence in result.next_steps)
    assert result.next_steps[0].endswith("(at most 86 % of the time)")


def test_features_in_use_are_not_advised() -> None:
    late_step = "step s 0-900\n" + "\n".join(
        f"launch cudaLaunchKernel {time - 8}-{time - 5} correlation_id={time}\n"
        f"kernel k {time}-{time + 40} correlation_id={time}"
        for time in range(100, 600, 100)
    )
    (advice,) = verdict_of(late_step).next_steps
    assert "(CUDA graphs, torch.compile, a larger batch)" in advice
    graphs = verdict_of(
        late_step + "\nlaunch cudaGraphLaunch 602-604 correlation_id=8\nkernel triton_poi_fused_add 605-607"
    )
    assert "(a larger batch)" in graphs.next_steps[0]
    assert "graphs are replayed and code is compiled already" in graphs.next_steps[0]
    trace = trace_of(spans("step s 0-10\ndata enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__ 1-5"))
    assert features_in_use(trace) == (False, False, True)


def test_advice_names_the_call_that_delays_launches() -> None:
    malloc = LATE + "call cudaMalloc 325-585 level=60 thread=1"
    (piece,) = verdict_of(malloc).next_steps
    assert "cudaMalloc (0.26 ms)" in piece
    assert "caching allocator" in piece


def test_eager_attention_is_named_and_its_gain_is_bounded() -> None:
    result = verdict_of(kernels(*FORWARD))
    assert "57 % is eager attention" in result.verdict
    assert result.why[-1].startswith("device work, of GPU time: eager attention 57 %, gemm 29 %, elementwise 14 %")
    (attention,) = [sentence for sentence in result.next_steps if sentence.startswith("eager attention")]
    assert attention.startswith("eager attention, 57 % of GPU time, 20 µs of it softmax and the operators between")
    assert attention.endswith("(at most 29 % of the time)")


def test_elementwise_kernels_are_reported_with_the_slowest_operators() -> None:
    text = kernels(("vectorized_elementwise_kernel", "aten::mul"), ("vectorized_elementwise_kernel", "aten::add"))
    (advice,) = [sentence for sentence in verdict_of(text).next_steps if sentence.startswith("elementwise")]
    assert (
        "100 % of GPU time (aten::add 50 %, aten::mul 50 %): fuse them; torch.compile (at most 100 % of the" in advice
    )


@pytest.mark.slow
def test_layout_changes_of_convolutions_lead_to_channels_last_and_not_to_fusion() -> None:
    for name, op in (
        ("batched_transpose_16x32_half", "aten::miopen_convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "aten::cudnn_convolution"),
    ):
        text = kernels((name.replace(" ", "_"), op), ("SubTensorOpWithScalar1d", op), ("igemm_fwd_gtcx3_nhwc", op))
        (layout,) = [sentence for sentence in verdict_of(text).next_steps if "changes of layout" in sentence]
        assert "channels_last" in layout
        assert not any("torch.compile" in sentence and "fuse" in sentence for sentence in verdict_of(text).next_steps)


def test_kernels_of_an_idle_device_get_no_advice() -> None:
    trace = trace_of(spans(LATE))
    total = {"busy_percent": 10.0, "window_ms": 1.0}
    assert pieces(Answers(trace), total, []) == []


@pytest.mark.slow
def test_tensor_cores_are_advised_only_if_kernel_names_show_that_they_are_unused() -> None:
    slow, fast, unknown = (
        [
            sentence
            for sentence in verdict_of(f"step s 0-400\nkernel {name} 0-100").next_steps
            if "tensor cores" in sentence
        ]
        for name in ("volta_sgemm_128x64_nn", "ampere_fp16_s16816gemm_fp16_128x64", "Cijk_Ailk_Bjlk_XYZ")
    )
    assert (len(slow), fast, unknown) == (1, [], [])
    assert slow[0].endswith("(at most 100 % of the time)")


def test_hiding_copies_is_advised_only_if_computation_is_long_enough() -> None:
    text = "step s 0-400\nkernel sgemm 0-{} \ncopy Memcpy-HtoD-Pinned 300-400"
    long_advice, short_advice = (
        next(sentence for sentence in verdict_of(text.format(end)).next_steps if "Memcpy" in sentence)
        for end in (300, 50)
    )
    assert "a separate stream hides it" in long_advice
    assert "computation is too short to hide it" in short_advice
