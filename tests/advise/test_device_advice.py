"""Advice on a device: the largest losses of the account, specific remedies, and gains bounded by both sides."""

from __future__ import annotations

import pytest
from asking import device_advice_of
from test_fusing import FORWARD, kernels

from xsp import account
from xsp.account.sentences import limit
from xsp.advise import advisor
from xsp.advise.advice import Advice, Needs
from xsp.advise.device import features_in_use
from xsp.testing import spans, trace_of


def advice_on(text: str) -> list[Advice]:
    return device_advice_of(trace_of(spans(text)))


def sentence_of(text: str) -> str:
    return limit(account.of(trace_of(spans(text))))


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


def test_the_share_of_a_busy_device_is_of_the_step_and_not_of_its_own_window() -> None:
    assert sentence_of(LATE).startswith("The host limits: the device works 405 of 1.00 ms (40 %)") or sentence_of(
        LATE
    ).startswith("The host limits: the device works 405 µs of 1.00 ms (40 %)")


def test_the_work_of_a_device_that_limits_is_named() -> None:
    text = "step s 0-200\n" + "\n".join(
        f"launch cudaLaunchKernel {n * 10}-{n * 10 + 2} correlation_id={n}\n"
        f"kernel sgemm {n * 100}-{n * 100 + 100} correlation_id={n}"
        for n in range(1, 9)
    )
    assert sentence_of(text).startswith("The device limits: the device works 800 of 900 µs (89 %), most on gemm")


def test_a_device_that_does_next_to_nothing_has_no_power_of_ten_in_its_share() -> None:
    assert "the device works 20.0 µs of 2.00 s (under 0.01 %)" in sentence_of(
        "step s 0-2000000\nlaunch cudaLaunchKernel 10-15 correlation_id=1\nkernel sgemm 20-40 correlation_id=1"
    )


QUEUED = """
    step s                  0-1000
    module train            1-40 type=annotation
    launch cudaLaunchKernel 10-15 correlation_id=1
    kernel sgemm            20-120 correlation_id=1
    launch cudaLaunchKernel 16-20 correlation_id=2
    kernel sgemm            800-900 correlation_id=2
    sync cudaStreamSynchronize 22-960
"""


def test_a_device_that_runs_nothing_while_launched_work_waits_is_not_said_to_limit_by_its_work() -> None:
    sentence = sentence_of(QUEUED)
    assert sentence.startswith("Launched work waits, 680 µs of 1.00 ms (68 %), while the device runs nothing")
    assert sentence.endswith(
        "it works 200 µs of 1.00 ms (20 %), most on gemm, 200 µs (20 %); by module most in train, 200 µs."
    )


def test_a_module_with_little_of_the_device_s_work_is_not_where_most_of_it_is() -> None:
    assert "most in" not in sentence_of(
        QUEUED.replace("train            1-40", "train            1-15").replace("20-120", "20-40")
    )


def test_waiting_for_data_limits_where_it_takes_most() -> None:
    text = """
        data enumerate(DataLoader) 0-610
        step s                  610-1000
        launch cudaLaunchKernel 612-615 correlation_id=3
        kernel third            620-720 correlation_id=3
    """
    assert sentence_of(text).startswith("The loop waits for data, 610 of 1.00 ms (61 %)") or sentence_of(
        text
    ).startswith("The loop waits for data, 610 µs of 1.00 ms (61 %)")
    (piece,) = [piece for piece in advice_on(text) if piece.question == "device-idle"]
    assert "because the host waits for data" in piece.what
    assert piece.gain.value == pytest.approx(0.61)


def test_features_in_use_are_not_advised() -> None:
    late_step = "step s 0-900\n" + "\n".join(
        f"launch cudaLaunchKernel {time - 8}-{time - 5} correlation_id={time}\n"
        f"kernel k {time}-{time + 40} correlation_id={time}"
        for time in range(100, 600, 100)
    )
    (piece,) = advice_on(late_step)
    assert "(CUDA graphs, torch.compile, a larger batch)" in piece.do
    graphs = advice_on(
        late_step + "\nlaunch cudaGraphLaunch 602-604 correlation_id=8\nkernel triton_poi_fused_add 612-615 "
        "correlation_id=8"
    )
    assert "(a larger batch)" in graphs[0].do
    assert "graphs are replayed and code is compiled already" in graphs[0].do
    trace = trace_of(spans("step s 0-10\ndata enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__ 1-5"))
    assert features_in_use(trace) == (False, False, True)


def test_advice_names_the_call_that_delays_launches() -> None:
    pieces = advice_on(LATE + "call cudaMalloc 325-585 level=60 thread=1")
    piece = next(piece for piece in pieces if "cudaMalloc" in piece.what)
    assert "caching allocator" in piece.do


def test_what_the_host_does_before_the_first_launch_is_named() -> None:
    text = """
        step s                  0-1000
        module preprocess       5-700 type=Preprocess
        launch cudaLaunchKernel 710-715 correlation_id=1
        kernel sgemm            720-990 correlation_id=1
    """
    assert sentence_of(text).endswith("is idle the first 720 µs of a step, the host in preprocess.")
    piece = next(piece for piece in advice_on(text) if piece.question == "device-idle")
    assert "the host in preprocess" in piece.what
    assert piece.gain.value <= 0.73


def test_a_module_that_launches_late_is_no_preparation_of_the_step() -> None:
    text = """
        step s                  0-1000
        module attention        5-990 type=Attention
        launch cudaLaunchKernel 700-705 correlation_id=1
        kernel sgemm            710-760 correlation_id=1
        launch cudaLaunchKernel 900-905 correlation_id=2
        kernel sgemm            910-960 correlation_id=2
    """
    (piece,) = [piece for piece in advice_on(text) if piece.question == "device-idle"]
    assert "because the host issues its work too late" in piece.what
    assert piece.gain.value == pytest.approx(0.85, abs=0.05)


def launched(text: str) -> str:
    """Return a step in which each kernel of `text` (name start end) is launched early, so that the device limits."""
    lines = [line.split() for line in text.strip().splitlines()]
    return "step s 0-10\n" + "\n".join(
        f"launch cudaLaunchKernel {n / 10}-{n / 10 + 0.05} correlation_id={n + 1}\n"
        f"kernel {name} {start}-{end} correlation_id={n + 1}"
        for n, (name, start, end) in enumerate(lines)
    )


def test_eager_attention_is_named_and_its_gain_is_bounded() -> None:
    trace = trace_of(spans(kernels(*FORWARD).replace("0-9000", "0-100")))
    (attention,) = [piece for piece in device_advice_of(trace) if piece.question == "device-attention"]
    assert attention.what.startswith("eager attention, 57 % of GPU time, 20.0 µs of an iteration softmax and")
    assert attention.gain.value <= 0.020 + 1e-9


def test_a_chain_of_elementwise_kernels_saves_all_but_one_pass_over_its_tensors() -> None:
    text = "\n".join(f"vectorized_elementwise_kernel {20 + n * 10} {30 + n * 10}" for n in range(5))
    (piece,) = [piece for piece in advice_on(launched(text)) if piece.question == "device-fusion"]
    assert piece.gain.value == pytest.approx(0.04)
    assert "they would still take 10.0 µs" in piece.what


def test_a_norm_of_training_a_fused_optimizer_and_a_lone_kernel_are_no_chain_to_fuse() -> None:
    for names in (
        ("batch_norm_collect_statistics_kernel", "batch_norm_transform_input_kernel"),
        ("multi_tensor_apply_kernel", "multi_tensor_apply_kernel"),
        ("vectorized_elementwise_kernel", "sgemm"),
    ):
        text = "\n".join(f"{name} {20 + n * 50} {70 + n * 50}" for n, name in enumerate(names))
        assert not [piece for piece in advice_on(launched(text)) if piece.question == "device-fusion"], names


def test_work_of_a_device_that_does_not_limit_promises_nothing() -> None:
    text = "step s 0-1000\n" + "\n".join(
        f"launch cudaLaunchKernel {n * 100}-{n * 100 + 5} correlation_id={n}\n"
        f"kernel vectorized_elementwise_kernel {n * 100 + 10}-{n * 100 + 80} correlation_id={n}"
        for n in range(1, 9)
    )
    assert not [piece for piece in advice_on(text) if piece.side == "device" and piece.gain_known]


@pytest.mark.slow
def test_layout_changes_of_convolutions_lead_to_channels_last_and_not_to_fusion() -> None:
    for name, op in (
        ("batched_transpose_16x32_half", "aten::miopen_convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "aten::cudnn_convolution"),
    ):
        text = kernels(
            (name.replace(" ", "_"), op), ("SubTensorOpWithScalar1d", op), ("igemm_fwd_gtcx3_nhwc", op), each_us=100
        )
        pieces = advice_on(text.replace("0-9000", "0-100"))
        (layout,) = [piece for piece in pieces if "changes of layout" in piece.what]
        assert "channels_last" in layout.do
        assert not any(piece.question == "device-fusion" for piece in pieces)


@pytest.mark.slow
def test_tensor_cores_are_advised_only_if_kernel_names_show_that_they_are_unused() -> None:
    slow, fast, unknown = (
        [piece for piece in advice_on(launched(f"{name} 20 500")) if piece.question == "device-tensor-cores"]
        for name in ("volta_sgemm_128x64_nn", "ampere_fp16_s16816gemm_fp16_128x64", "Cijk_Ailk_Bjlk_XYZ")
    )
    assert (len(slow), fast, unknown) == (1, [], [])


def test_hiding_copies_is_advised_only_if_computation_is_long_enough() -> None:
    text = "step s 0-400\nkernel sgemm 0-{} \ncopy Memcpy-HtoD-Pinned 300-400"
    long_advice, short_advice = (
        next(piece.do for piece in advice_on(text.format(end)) if "Memcpy" in piece.what) for end in (300, 50)
    )
    assert "a separate stream hides it" in long_advice
    assert "computation is too short to hide it" in short_advice


def test_values_that_are_read_in_a_loop_come_before_fewer_launches() -> None:
    rows, now = ["step s 0-4000", "forward Net 1-10"], 20
    for n in range(1, 25):
        rows += [
            f"op aten::norm {now}-{now + 40} input_shapes=[[64]]",
            f"launch cudaLaunchKernel {now + 20}-{now + 24} correlation_id={n}",
            f"kernel reduce_kernel {now + 30}-{now + 34} correlation_id={n}",
            f"op aten::item {now + 45}-{now + 85}",
            f"sync cudaStreamSynchronize {now + 60}-{now + 80}",
        ]
        now += 150
    pieces = list(advisor.of(trace_of(spans("\n".join(rows))), max_needs=Needs.TRACE).advice)
    assert pieces[0].question == "synchronisations"
    assert any(piece.general for piece in pieces[1:])


def test_an_optimizer_that_launches_for_each_parameter_is_named_first_and_promises_less_than_its_entry() -> None:
    rows, now, n = ["step s 0-5000", "forward Net 10-500", "optimizer Adam 600-4900"], 610, 0
    for _ in range(20):
        for name in ("aten::mul_", "aten::add_", "aten::addcdiv_"):
            n += 1
            rows += [
                f"op {name} {now}-{now + 60}",
                f"launch cudaLaunchKernel {now + 20}-{now + 25} correlation_id={n}",
                f"kernel vectorized_elementwise_kernel {now + 40}-{now + 44} correlation_id={n}",
            ]
            now += 70
    trace = trace_of(spans("\n".join(rows)))
    first = advisor.of(trace, max_needs=Needs.TRACE).advice[0]
    main = account.of(trace).main
    assert first.question == "optimizer"
    assert main is not None
    assert first.gain.high <= main.host.ms("optimizer") + 1e-9
