"""What is said of a device's time: shares as shares, like causes together, advice that is specific and not done yet."""

from __future__ import annotations

import pytest
from test_fusing import FORWARD, kernels

from xsp.advise.device import features_in_use, pieces
from xsp.advise.verdict import Verdict, verdict
from xsp.analyses.answers import Answers
from xsp.testing import spans, trace_of


def said(text: str) -> Verdict:
    found = verdict(Answers(trace_of(spans(text))))
    assert found is not None
    return found


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


def test_causes_of_like_size_are_both_said_with_their_shares() -> None:
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
    assert said(text).verdict == (
        "The device is busy 17 % of the time. Host-bound 45 % (launches come too late) and data loading 37 % "
        "(the step waits for data)."
    )


@pytest.mark.slow
def test_a_cause_alone_is_said_alone_and_never_called_most() -> None:
    assert said(LATE).verdict.startswith("The device is busy 56 % of the time. Host-bound 39 % (")
    assert " and " not in said(LATE).verdict


def test_what_a_busy_device_does_is_said_in_shares() -> None:
    busy = said("step s 0-400\nkernel sgemm 0-100\nkernel reduce_kernel 100-170\nkernel dropout 170-200")
    assert busy.verdict == "The device is busy 100 % of the time. Of its work 50 % is gemm and 35 % is reduction."


def test_two_devices_are_two() -> None:
    both = said("step s 0-400\nkernel sgemm 0-100\nkernel sgemm 0-100 device=1")
    assert both.verdict == "The 2 devices are busy 100 % of the time. Of their work 100 % is gemm."


def test_the_one_gap_and_the_call_that_held_the_host_are_named() -> None:
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
    found = said(text)
    assert "Kernel wait 86 %" in found.verdict
    assert "one gap of 0.82 ms at 50 µs, the host in hipMemcpyWithStream of 256 bytes (0.825 ms)" in found.why[0]
    assert all("CUDA graphs" not in each for each in found.next)
    assert found.next[0].endswith("(at most 86 % of the time)")


def test_what_the_trace_does_already_is_not_advised() -> None:
    late = "step s 0-900\n" + "\n".join(
        f"launch cudaLaunchKernel {at - 8}-{at - 5} correlation_id={at}\nkernel k {at}-{at + 40} correlation_id={at}"
        for at in range(100, 600, 100)
    )
    (plain,) = said(late).next
    assert "(CUDA graphs, torch.compile, a larger batch)" in plain
    graphs = said(late + "\nlaunch cudaGraphLaunch 602-604 correlation_id=8\nkernel triton_poi_fused_add 605-607")
    assert "(a larger batch)" in graphs.next[0]
    assert "graphs are replayed and code is compiled already" in graphs.next[0]
    trace = trace_of(spans("step s 0-10\ndata enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__ 1-5"))
    assert features_in_use(trace) == (False, False, True)


def test_a_call_that_makes_launches_late_is_what_the_advice_is_about() -> None:
    malloc = LATE + "call cudaMalloc 325-585 level=60 thread=1"
    (piece,) = said(malloc).next
    assert "cudaMalloc (0.26 ms)" in piece
    assert "caching allocator" in piece


def test_eager_attention_is_called_so_and_its_gain_is_bounded() -> None:
    found = said(kernels(*FORWARD))
    assert "57 % is eager attention" in found.verdict
    assert found.why[-1].startswith("device work, of GPU time: eager attention 57 %, gemm 29 %, elementwise 14 %")
    (attention,) = [each for each in found.next if each.startswith("eager attention")]
    assert attention.startswith("eager attention, 57 % of GPU time, 20 µs of it softmax and the operators between")
    assert attention.endswith("(at most 29 % of the time)")


def test_elementwise_kernels_get_a_word_with_the_operators_that_take_most() -> None:
    text = kernels(("vectorized_elementwise_kernel", "aten::mul"), ("vectorized_elementwise_kernel", "aten::add"))
    (fuse,) = [each for each in said(text).next if each.startswith("elementwise")]
    assert "100 % of GPU time (aten::add 50 %, aten::mul 50 %): fuse them; torch.compile (at most 100 % of the" in fuse


@pytest.mark.slow
def test_changes_of_layout_of_convolutions_are_advised_channels_last_and_not_to_be_fused() -> None:
    for name, op in (
        ("batched_transpose_16x32_half", "aten::miopen_convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "aten::cudnn_convolution"),
    ):
        text = kernels((name.replace(" ", "_"), op), ("SubTensorOpWithScalar1d", op), ("igemm_fwd_gtcx3_nhwc", op))
        (layout,) = [each for each in said(text).next if "changes of layout" in each]
        assert "channels_last" in layout
        assert not any("torch.compile" in each and "fuse" in each for each in said(text).next)


def test_of_an_idle_device_kernels_are_not_what_to_look_at() -> None:
    trace = trace_of(spans(LATE))
    whole = {"busy_percent": 10.0, "window_ms": 1.0}
    assert pieces(Answers(trace), whole, []) == []


@pytest.mark.slow
def test_matrix_products_are_advised_tensor_cores_only_where_names_say_that_they_use_none() -> None:
    slow, fast, untold = (
        [each for each in said(f"step s 0-400\nkernel {name} 0-100").next if "tensor cores" in each]
        for name in ("volta_sgemm_128x64_nn", "ampere_fp16_s16816gemm_fp16_128x64", "Cijk_Ailk_Bjlk_XYZ")
    )
    assert (len(slow), fast, untold) == (1, [], [])
    assert slow[0].endswith("(at most 100 % of the time)")


def test_copies_that_computation_cannot_hide_are_not_advised_to_be_hidden() -> None:
    text = "step s 0-400\nkernel sgemm 0-{} \ncopy Memcpy-HtoD-Pinned 300-400"
    long, short = (next(each for each in said(text.format(end)).next if "Memcpy" in each) for end in (300, 50))
    assert "a separate stream hides it" in long
    assert "computation is too short to hide it" in short
