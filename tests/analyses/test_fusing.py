"""Attention of eager form, found in the order of kernels, and kernels that only move memory."""

from __future__ import annotations

from typing import Any

import pytest

from xsp.analyses import ANALYSES
from xsp.testing import spans, trace_of

GEMM = "cutlass_80_tensorop_bf16_s16816gemm"
ADD = "vectorized_elementwise_kernel<add>"
SOFTMAX = "cunn_SoftMaxForward"


def kernels(*rows: tuple[str, str | None], each_us: int = 10) -> str:
    """Return a step of kernels without a gap, each with the operator that launched it, long before."""
    lines = ["step s 0-9000"]
    for number, (name, op) in enumerate(rows):
        start = 100 + number * each_us
        if op is not None:
            lines.append(f"op {op} {start - 90}-{start - 82}")
        lines.append(f"launch cudaLaunchKernel {start - 89}-{start - 85} correlation_id={number + 1}")
        lines.append(f"kernel {name} {start}-{start + each_us} correlation_id={number + 1}")
    return "\n".join(lines)


def ask(name: str, text: str, columns: str) -> list[tuple[Any, ...]]:
    return ANALYSES[name](trace_of(spans(text))).select(columns).fetchall()


FORWARD = (
    (GEMM, "aten::addmm"),
    (GEMM, "aten::bmm"),
    (ADD, "aten::add"),
    (SOFTMAX, "aten::_softmax"),
    (GEMM, "aten::bmm"),
    (ADD, "aten::gelu"),
    (GEMM, "aten::addmm"),
)


def test_two_batched_products_around_a_softmax_are_attention_of_eager_form() -> None:
    rows = ask(
        "attention", kernels(*FORWARD), "form, part, class, kernels, device_ms, round(percent_of_device_time, 3)"
    )
    assert sorted(rows) == [
        ("eager", "between", "elementwise", 1, 0.01, 14.286),
        ("eager", "products", "gemm", 2, 0.02, 28.571),
        ("eager", "softmax", "normalisation", 1, 0.01, 14.286),
    ]


def test_what_is_part_of_attention_is_not_fused_apart() -> None:
    assert ask("fusible", kernels(*FORWARD), "class, op, kernels, device_ms") == [
        ("elementwise", "aten::gelu", 1, 0.01)
    ]


def test_the_four_products_around_a_backward_softmax_belong_to_it() -> None:
    backward = (
        (GEMM, "aten::mm"),
        (GEMM, "aten::bmm"),
        (GEMM, "aten::bmm"),
        ("cunn_SoftMaxBackward", "aten::_softmax_backward_data"),
        (GEMM, "aten::bmm"),
        (GEMM, "aten::bmm"),
        (GEMM, "aten::mm"),
    )
    assert sorted(ask("attention", kernels(*backward), "part, kernels")) == [("products", 4), ("softmax", 1)]


@pytest.mark.slow
def test_a_softmax_of_a_loss_of_a_router_or_of_a_graph_is_no_attention() -> None:
    loss = kernels((GEMM, "aten::bmm"), ("cunn_SoftMaxForward<LogSoftMax>", "aten::_log_softmax"), (GEMM, "aten::bmm"))
    by_operator = kernels((GEMM, "aten::bmm"), ("softmax_warp_forward", "aten::_log_softmax"), (GEMM, "aten::bmm"))
    router = kernels((GEMM, "aten::addmm"), (SOFTMAX, "aten::_softmax"), (GEMM, "aten::bmm"))
    norm = kernels(
        (GEMM, "aten::bmm"),
        (SOFTMAX, "aten::_softmax"),
        ("vectorized_layer_norm_kernel", "aten::native_layer_norm"),
        (GEMM, "aten::bmm"),
    )
    graph = kernels((GEMM, None), (SOFTMAX, None), (GEMM, None))
    assert [ask("attention", text, "part") for text in (loss, by_operator, router, norm, graph)] == [[]] * 5


def test_a_product_in_several_kernels_is_one_product() -> None:
    text = kernels((GEMM, "aten::bmm"), (SOFTMAX, "aten::_softmax"), (GEMM, "aten::bmm")).splitlines()
    text.append("launch cudaLaunchKernel 16-17 correlation_id=99")
    text.append("kernel splitKreduce_kernel 109-110 correlation_id=99")
    assert dict(ask("attention", "\n".join(text), "part, kernels")) == {"products": 3, "softmax": 1}


def test_kernels_of_another_stream_do_not_come_between() -> None:
    text = kernels((GEMM, "aten::bmm"), (SOFTMAX, "aten::_softmax"), (GEMM, "aten::bmm"))
    text += "\nkernel ncclDevKernel_AllReduce_Sum 112-150 stream=20\nkernel fmha_cutlassF_f16 200-230 stream=9"
    rows = ask("attention", text, "form, part, kernels")
    assert sorted(rows) == [("eager", "products", 2), ("eager", "softmax", 1), ("fused", "kernels", 1)]


# --- replayed graphs, whose kernels have no operators -----------------------------------------------------


def replayed(*rows: tuple[str, int]) -> str:
    """Return a step in which one launch replays kernels, each with the third dimension of its grid."""
    lines = ["step s 0-9000", "launch cudaGraphLaunch 10-20 correlation_id=1"]
    for number, (name, batch) in enumerate(rows):
        grid = f'{{"graph":true,"grid":[8,2,{batch}]}}'
        lines.append(f"kernel {name} {100 + 10 * number}-{110 + 10 * number} correlation_id=1 attributes={grid}")
    return "\n".join(lines)


def test_in_a_replayed_graph_two_products_of_one_batch_around_a_softmax_are_attention() -> None:
    rows = ((GEMM, 1), (GEMM, 16), (ADD, 1), (SOFTMAX, 1), (ADD, 1), (GEMM, 16), (ADD, 1), (GEMM, 1))
    assert sorted(ask("attention", replayed(*rows), "form, part, kernels, device_ms")) == [
        ("eager", "between", 2, 0.02), ("eager", "products", 2, 0.02), ("eager", "softmax", 1, 0.01),
    ]  # fmt: skip
    assert ask("fusible", replayed(*rows), "class, kernels") == [("elementwise", 1)]


def test_in_a_replayed_graph_the_four_products_around_a_backward_softmax_belong_to_it() -> None:
    rows = ((GEMM, 1), (GEMM, 16), (GEMM, 16), ("cunn_SoftMaxBackward", 1), (GEMM, 16), (GEMM, 16), (GEMM, 1))
    assert sorted(ask("attention", replayed(*rows), "part, kernels")) == [("products", 4), ("softmax", 1)]


def test_in_a_replayed_graph_a_softmax_of_a_router_or_a_classifier_is_no_attention() -> None:
    router = ((GEMM, 4), (SOFTMAX, 1), ("gatherTopK", 1), (GEMM, 4))
    classifier = ((GEMM, 1), (SOFTMAX, 1), (GEMM, 1))
    apart = ((GEMM, 4), (SOFTMAX, 1), (GEMM, 16))
    picked = ((GEMM, 4), (SOFTMAX, 1), ("reduce_kernel<argmax>", 1), (GEMM, 4))
    assert [ask("attention", replayed(*rows), "part") for rows in (router, classifier, apart, picked)] == [[]] * 4
