"""Operations from shapes: against sums by hand, and against PyTorch's own counter on real operators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp.correlate.evidence import correlate
from xsp.cost.flops import PRODUCTS, Causal, flops, pairs
from xsp.schema import Kind, Level, Span
from xsp.testing import spans, trace_of


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 4]], 2 * 2 * 3 * 4),
        ("aten::addmm", [[4], [2, 3], [3, 4]], 2 * 2 * 3 * 4),
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], 5 * 2 * 2 * 3 * 4),
        ("aten::linear", [[7, 2, 3], [4, 3], [4]], 7 * 2 * 2 * 3 * 4),
        ("aten::linear", [[7, 2, 3], [3]], 7 * 2 * 2 * 3),  # one output: the result has a dimension less
        ("aten::linear", [[7, 2, 3], []], None),
        ("aten::mm", [[2, 3]], None),  # not the inputs that it has
        ("aten::mm", [[], []], None),
        ("aten::relu", [[2, 3]], None),  # element by element: not counted
        ("my::mm2", [[2, 3], [3, 4]], None),
    ],
)
def test_a_multiply_add_is_two_operations(name: str, shapes: list[list[int]], expected: int | None) -> None:
    assert flops(name, shapes, [""] * 5) == expected


def test_a_convolution_by_hand() -> None:
    # 1 image of 3 channels, 8×8; 4 filters of 3×3, stride 2, padding 1: 4×4 places of 4·3·9 multiply-adds
    scalars = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    assert flops("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3], []], scalars) == 2 * 16 * 4 * 27
    assert flops("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3], []], ["", "", "", "dynamic"]) is None


IMAGE, GRADIENT, WEIGHT = [2, 8, 9, 9], [2, 16, 7, 7], [16, 8, 3, 3]
ONCE = 2 * (2 * 16 * 7 * 7) * (8 * 3 * 3)


@pytest.mark.parametrize(
    ("name", "shapes", "scalars", "times"),
    [
        ("convolution_backward", [GRADIENT, IMAGE, WEIGHT], {7: "False", 10: "[True, True, False]"}, 2),
        ("cudnn_convolution_backward", [IMAGE, GRADIENT, WEIGHT], {10: "[True, True]"}, 2),
        ("cudnn_convolution_backward", [IMAGE, GRADIENT, WEIGHT], {10: "[False, True]"}, 1),
        ("cudnn_convolution_backward", [IMAGE, GRADIENT, WEIGHT], {}, None),  # which are asked for is not told
        ("miopen_convolution_backward", [IMAGE, GRADIENT, WEIGHT], {9: "[True, True, True]"}, 2),
        ("mkldnn_convolution_backward", [IMAGE, GRADIENT, WEIGHT], {7: "[True, True, True]"}, 2),
        ("_slow_conv2d_backward", [GRADIENT, IMAGE, WEIGHT], {6: "[True, True, False]"}, 2),
        ("cudnn_convolution_backward_input", [[], GRADIENT, WEIGHT], {0: "[2, 8, 9, 9]"}, 1),
        ("mkldnn_convolution_backward_input", [[], GRADIENT, WEIGHT], {}, 1),
        ("miopen_convolution_backward_weight", [[], GRADIENT, IMAGE], {0: "[16, 8, 3, 3]"}, 1),
        ("mkldnn_convolution_backward_weights", [[], GRADIENT, IMAGE], {0: "[16, 8, 3, 3]"}, 1),
    ],
)
def test_the_backward_pass_of_a_convolution_is_a_forward_pass_for_each_gradient_in_the_names_of_all_years(
    name: str, shapes: list[list[int]], scalars: dict[int, str], times: int | None
) -> None:
    given = [scalars.get(place, "") for place in range(12)]
    assert flops(f"aten::{name}", shapes, given) == (None if times is None else times * ONCE)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "expected"),
    [
        ("aten::_scaled_mm", [[16, 64], [64, 32]], ["c10::Float8_e4m3fn"], 2 * 16 * 64 * 32),
        ("aten::_scaled_mm", [[16, 32], [32, 32]], ["c10::Float4_e2m1fn_x2"], 2 * 16 * 64 * 32),  # two in an element
        ("aten::_int_mm", [[16, 64], [64, 32]], ["signed char"], 2 * 16 * 64 * 32),
        ("aten::_grouped_mm", [[48, 64], [4, 64, 32], [4]], ["c10::BFloat16"], 2 * 48 * 64 * 32),  # rows of four
        ("aten::_scaled_grouped_mm", [[48, 64], [64, 96], [4]], ["c10::Float8_e4m3fn"], 2 * 48 * 64 * 96),
        ("aten::_weight_int8pack_mm", [[16, 64], [32, 64], [32]], ["c10::BFloat16"], 2 * 16 * 64 * 32),
        ("aten::_weight_int4pack_mm", [[16, 64], [4, 2, 32, 4]], ["c10::BFloat16"], 2 * 16 * 64 * 32),
        ("fbgemm::f8f8bf16_rowwise", [[16, 64], [32, 64], [16], [32]], ["c10::Float8_e4m3fn"], 2 * 16 * 64 * 32),
        ("_C::cutlass_scaled_mm", [[16, 32], [16, 64], [64, 32]], ["c10::BFloat16"], 2 * 16 * 64 * 32),
        ("_C::cutlass_scaled_fp4_mm", [[16, 32], [16, 32], [32, 32]], ["c10::BFloat16"], 2 * 16 * 64 * 32),
        # 10 tokens of 64, 2 of 8 experts each, gate and up of 96 each, down from 96
        (
            "vllm::inplace_fused_experts",
            [[10, 64], [8, 192, 64], [8, 64, 96], [10, 2], [10, 2]],
            ["c10::BFloat16"],
            2 * 10 * 2 * 64 * (192 + 96),
        ),
        (  # weights packed by two
            "sglang::outplace_fused_experts",
            [[10, 64], [8, 192, 32], [8, 64, 48], [10, 2], [10, 2]],
            ["c10::BFloat16"],
            2 * 10 * 2 * 64 * (192 + 96),
        ),
        ("vllm::inplace_fused_experts", [[10, 64], [8, 192, 64], [7, 64, 96], [10, 2]], ["c10::BFloat16"], None),
    ],
)
def test_scaled_grouped_packed_and_experts_products_by_hand(
    name: str, shapes: list[list[int]], dtypes: list[str], expected: int | None
) -> None:
    assert flops(name, shapes, [""] * 12, dtypes) == expected


@pytest.mark.parametrize(
    ("product", "names"),
    [
        (True, "mm addmm_ _int_mm conv2d cudnn_convolution linear matmul _efficient_attention_forward mv addmv_ einsum "
               "lstm linalg_solve _cslt_sparse_mm bilinear"),
        (False, "_fft_c2c kron "
                "add_ relu_ leaky_relu lgamma upsample_bilinear2d upsample_linear1d sqrt _weight_norm_interface cat "
                "index_put_ native_layer_norm _foreach_mul_ linalg_vector_norm embedding topk prelu"),
    ],
)  # fmt: skip
def test_which_of_atens_operators_may_multiply_matrices(product: bool, names: str) -> None:
    assert {name for name in names.split() if bool(re.search(PRODUCTS, f"aten::{name}")) is not product} == set()


def test_the_shape_of_a_result_stands_in_for_options_that_a_source_does_not_state() -> None:
    shapes = [IMAGE, WEIGHT]
    assert flops("aten::cudnn_convolution", shapes, []) is None
    assert flops("aten::cudnn_convolution", shapes, [], (), GRADIENT) == ONCE
    assert flops("aten::convolution", shapes, [], (), [2, 8, 11, 11]) is None  # of a transposed one
    assert flops("aten::cudnn_convolution_backward_weight", [[], GRADIENT, IMAGE], [], (), WEIGHT) == ONCE


def test_convolutions_of_2021_have_operations_by_their_sequence_numbers_and_by_the_operator_around(
    tmp_path: Path,
) -> None:
    def op(name: str, thread: int, start: int, dur: int, dims: list[Any], **more: Any) -> dict[str, Any]:
        output = {"Input Dims": dims, "Input type": ["float" if entry else "GenericList" for entry in dims], **more}
        return {"ph": "X", "cat": "Operator", "name": name, "pid": 1, "tid": thread, "ts": start, "dur": dur,
                "args": output}  # fmt: skip

    node = {"Sequence number": 7, "Fwd thread id": 1}
    rest: list[Any] = [[]] * 8
    made = [
        op("aten::cudnn_convolution", 1, 0, 90, [IMAGE, WEIGHT, *rest], **{"Sequence number": 7, "Fwd thread id": 0}),
        op("CudnnConvolutionBackward", 2, 100, 100, [GRADIENT], **node),
        op("aten::cudnn_convolution_backward", 2, 105, 90, [IMAGE, GRADIENT, WEIGHT, *rest]),
        op("aten::cudnn_convolution_backward_input", 2, 110, 30, [[], GRADIENT, WEIGHT, *rest]),
        op("aten::cudnn_convolution_backward_weight", 2, 150, 30, [[], GRADIENT, IMAGE, *rest]),
        op("aten::cudnn_convolution", 1, 300, 90, [IMAGE, WEIGHT, *rest]),  # without a gradient nothing tells
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": made}))
    rows = (
        xsp.load(str(path)).sql("SELECT name, flops FROM merged WHERE name LIKE 'aten%' ORDER BY start_ns").fetchall()
    )
    assert rows == [
        ("aten::cudnn_convolution", ONCE),
        ("aten::cudnn_convolution_backward", None),
        ("aten::cudnn_convolution_backward_input", ONCE),
        ("aten::cudnn_convolution_backward_weight", ONCE),
        ("aten::cudnn_convolution", None),
    ]


# --- against torch.utils.flop_counter ---------------------------------------------------------------------


def work(name: str) -> Callable[[], object]:
    torch: Any = pytest.importorskip("torch")
    nn, F = torch.nn, torch.nn.functional
    torch.manual_seed(0)

    def image(*shape: int) -> Any:
        return torch.randn(*shape, requires_grad=True)

    def backward(module: Any, value: Any) -> Callable[[], object]:
        return lambda: module(value).sum().backward()

    query = image(2, 4, 10, 8)
    return {
        "linear": lambda: nn.Linear(6, 5)(image(3, 6)),
        "linear of three dimensions, no bias": lambda: nn.Linear(6, 5, bias=False)(image(2, 3, 6)),
        "bmm": lambda: torch.bmm(image(3, 4, 5), image(3, 5, 6)),
        "matmul, broadcast": lambda: torch.matmul(image(2, 3, 4, 5), image(5, 6)),
        "einsum": lambda: torch.einsum("bij,bjk->bik", image(3, 4, 5), image(3, 5, 6)),
        "conv1d": lambda: nn.Conv1d(4, 6, 3)(image(2, 4, 20)),
        "conv2d": lambda: nn.Conv2d(3, 8, 3)(image(2, 3, 12, 12)),
        "conv2d, stride, padding": lambda: nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 2))(image(2, 3, 12, 13)),
        "conv2d, dilation": lambda: nn.Conv2d(4, 8, 3, dilation=2)(image(1, 4, 12, 12)),
        "conv2d, groups": lambda: nn.Conv2d(8, 16, 3, groups=4)(image(1, 8, 9, 9)),
        "conv2d, depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8, padding="same")(image(1, 8, 9, 9)),
        "conv3d": lambda: nn.Conv3d(2, 4, 3, padding=1)(image(1, 2, 6, 6, 6)),
        "transposed conv": lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)(image(2, 6, 7, 7)),
        "transposed conv, groups": lambda: nn.ConvTranspose2d(6, 4, 3, groups=2)(image(2, 6, 7, 7)),
        "attention": lambda: F.scaled_dot_product_attention(query, query, query),
        "attention over another sequence": lambda: F.scaled_dot_product_attention(
            query, image(2, 4, 7, 8), image(2, 4, 7, 8)
        ),
        "attention, backward": lambda: F.scaled_dot_product_attention(query, query, query).sum().backward(),
        "causal attention": lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True),
        "causal attention, backward": lambda: (
            F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        ),
        "linear, backward": backward(nn.Linear(6, 5), image(3, 6)),
        "conv2d, backward": backward(nn.Conv2d(3, 8, 3, stride=2), image(2, 3, 12, 12)),
        "conv2d, backward of the weight alone": backward(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 12, 12)),
        "conv2d, groups, backward": backward(nn.Conv2d(8, 16, 3, groups=4), image(1, 8, 9, 9)),
        "transposed conv, backward": backward(nn.ConvTranspose2d(6, 4, 3, stride=2), image(2, 6, 7, 7)),
    }[name]


def described(run: Callable[[], object]) -> list[Span]:
    """Return the spans of a describing step that count operations."""
    from xsp_collectors.torchops import TorchOps

    collector = TorchOps()
    collector.open()
    collector.start(Level.OP, describe=True)
    run()
    collector.stop()
    seen = list(collector.spans())
    collector.close()
    return [row for row in correlate(seen) if row.flops is not None]


@pytest.mark.parametrize(
    "name",
    [
        "linear", "linear of three dimensions, no bias", "bmm", "matmul, broadcast", "einsum", "conv1d", "conv2d",
        "conv2d, stride, padding", "conv2d, dilation", "conv2d, groups", "conv2d, depthwise", "conv3d",
        "transposed conv", "transposed conv, groups", "attention", "attention over another sequence",
        "attention, backward", "linear, backward", "conv2d, backward", "conv2d, backward of the weight alone",
        "transposed conv, backward",
    ],
)  # fmt: skip
def test_what_a_described_step_counts_is_what_torch_counts(name: str) -> None:
    run = work(name)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    theirs = counter.get_total_flops()
    if not theirs and name.startswith("attention"):
        pytest.skip("this torch's counter does not know attention on a CPU, as before 2.15")
    counted = described(run)
    assert sum(row.flops or 0 for row in counted) == theirs > 0
    assert {(row.kind, row.flops_source) for row in counted} == {(Kind.OP, "shapes")}


@pytest.mark.parametrize("name", ["causal attention", "causal attention, backward"])
def test_causal_attention_counts_the_pairs_that_the_mask_leaves_where_torch_counts_all(name: str) -> None:
    """Of n queries and keys n (n + 1) / 2 pairs of n² are left (ADR 150)."""
    run = work(name)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    theirs = counter.get_total_flops()
    if not theirs:
        pytest.skip("this torch's counter does not know attention on a CPU, as before 2.15")
    length = 10  # of the queries and keys in `work`
    assert sum(row.flops or 0 for row in described(run)) * 2 * length == theirs * (length + 1)


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([None, *Causal]))
def test_the_pairs_that_a_mask_leaves_are_those_of_the_triangle(queries: int, keys: int, mask: Causal | None) -> None:
    after = {None: keys, Causal.FROM_START: 0, Causal.FROM_END: keys - queries}[mask]
    assert pairs(queries, keys, mask) == sum(key <= query + after for query in range(queries) for key in range(keys))


CAUSAL = {
    "aten::_scaled_dot_product_flash_attention": 4, "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6, "aten::_flash_attention_forward": 8,
    "aten::_efficient_attention_forward": 9, "flash_attn::_flash_attn_forward": 5, "aiter::mha_fwd": 5,
    "aiter::fmha_v3_fwd": 5,
}  # fmt: skip
"""Operators, with the position of the input that states that they are causal."""


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(("stated", "pairs_left"), [("False", 64), ("0", 64), ("", 64), ("True", 36), ("1", 36)])
def test_a_trace_that_states_a_causal_mask_counts_half(name: str, stated: str, pairs_left: int) -> None:
    scalars = [""] * 12
    scalars[CAUSAL[name]] = stated
    by_length = "_forward" in name or "::mha" in name or "::fmha" in name or "_attn_" in name
    shape = [2, 8, 3, 16] if by_length else [2, 3, 8, 16]
    assert flops(name, [shape] * 3, scalars) == 2 * 2 * 3 * pairs_left * (16 + 16)


def test_the_inputs_that_state_a_causal_mask_are_where_torch_has_them() -> None:
    torch = pytest.importorskip("torch")
    from xsp.cost import flops as module

    text = Path(module.__file__).read_text(encoding="utf-8")
    for name, position in re.findall(r'"(_\w*attention\w*)": _attention(?:_backward)?\((\d+)', text):
        schema = getattr(torch.ops.aten, name).default._schema
        assert schema.arguments[int(position)].name in ("is_causal", "custom_mask_type"), name


@pytest.mark.parametrize("shape", [[1, 24, 768, 128], [1, 768, 24, 128]])
def test_attention_on_8_bit_numbers_is_counted_by_the_scales_of_its_heads(shape: list[int]) -> None:
    shapes = [shape] * 3 + [[], [1, 24, 3], [1, 24, 6], [1, 24, 128]]
    assert flops("sage_fwd_1", shapes, [""] * 7) == 4 * 24 * 768 * 768 * 128
    assert flops("sage_fwd", [shape] * 3, [""] * 3) is None


@pytest.mark.parametrize("name", ["vllm::moe_forward", "vllm::unified_attention_with_output"])
def test_operators_whose_shapes_do_not_determine_their_work_are_unknown(name: str) -> None:
    assert flops(name, [[32, 64, 64], [32, 8, 64], [32, 8, 64], [32, 64, 64]], [""] * 4) is None


def test_the_backward_pass_of_a_grouped_convolution_by_hand_since_torch_forgets_its_groups() -> None:
    forward = 2 * (7 * 7) * (16 * 2 * 3 * 3)
    assert sum(row.flops or 0 for row in described(work("conv2d, groups, backward"))) == 3 * forward


def test_complex_products_of_a_described_step_are_the_real_ones_that_they_take() -> None:
    torch = pytest.importorskip("torch")
    left, right = (torch.ones(shape, dtype=torch.complex64) for shape in ((4, 5), (5, 6)))
    assert sum(row.flops or 0 for row in described(lambda: left @ right)) == 4 * 2 * 4 * 5 * 6
    image, weight = (torch.ones(shape, dtype=torch.complex64) for shape in ((1, 3, 8, 8), (4, 3, 3, 3)))
    found = described(lambda: torch.nn.functional.conv2d(image, weight))
    assert sum(row.flops or 0 for row in found) == 3 * 2 * 4 * 36 * 27


# --- model FLOPs utilisation ------------------------------------------------------------------------------

TWO_TYPES = """
    step s                   0-1000 step=1
    module layers.0.mlp      0-150 type=MLP
    op aten::mm              10-90 dtype=c10::BFloat16 flops=98940000
    launch cudaLaunchKernel  20-30 correlation_id=1
    module layers.1.mlp      160-290 type=MLP
    op aten::mm              165-190 dtype=c10::Float8_e4m3fn flops=197890000
    launch cudaLaunchKernel  170-180 correlation_id=2
    module head              300-400 type=Head
    op {op}                  310-390
    launch cudaLaunchKernel  320-330 correlation_id=3
    kernel a                 200-300 correlation_id=1
    kernel b                 300-500 correlation_id=2
    kernel c                 500-600 correlation_id=3
"""


def test_model_flops_utilisation_holds_each_type_against_its_own_peak() -> None:
    """At 989.4 and 1978.9 TFLOP/s these products take 0.1 us each."""
    trace = trace_of(spans(TWO_TYPES.format(op="aten::relu")), {"machine": {"devices": ["NVIDIA H100 80GB HBM3"]}})
    rows = xsp.analyses.model_flops_utilisation(trace).select("of, name, mfu_percent, ms, precision, why_null")
    assert [(of, name, None if mfu is None else round(mfu, 3), *more) for of, name, mfu, *more in rows.fetchall()] == [
        ("step", "s", 0.02, 1.0, "bf16, fp8", None),
        ("phase", "forward", 0.05, 0.4, "bf16, fp8", None),
        ("module", "layers.*.mlp", 0.067, 0.3, "bf16, fp8", None),
        ("module", "head", None, 0.1, None, "no FLOPs"),
    ]


def test_modules_of_model_flops_utilisation_are_those_of_modules() -> None:
    named = TWO_TYPES.replace("layers.0.mlp", "MLP_0").replace("layers.1.mlp", "MLP_1")
    trace = trace_of(spans(named.format(op="aten::relu")), {"machine": {"devices": ["NVIDIA H100 80GB HBM3"]}})
    paths = {path for (path,) in xsp.analyses.modules_by_path(trace).filter("kernels > 0").select("path").fetchall()}
    rows = xsp.analyses.model_flops_utilisation(trace).filter("of = 'module'").select("name").fetchall()
    assert {name for (name,) in rows} == paths


@pytest.mark.parametrize(
    ("op", "device", "why"),
    [
        ("my::product", "NVIDIA H100 80GB HBM3", "FLOPs 75 % known"),
        ("aten::relu", "Q9", "no peak for bf16, fp8"),
        ("aten::relu", "NVIDIA A100-SXM4-80GB", "no peak for bf16, fp8"),  # which has no fp8
    ],
)
def test_what_is_not_known_of_nine_tenths_has_no_utilisation_and_says_why(op: str, device: str, why: str) -> None:
    trace = trace_of(spans(TWO_TYPES.format(op=op)), {"machine": {"devices": [device]}})
    rows = xsp.analyses.model_flops_utilisation(trace).select("mfu_percent, why_null").fetchall()
    assert rows[0] == (None, why)


def test_a_steps_time_lasts_until_the_next_one_begins_and_the_last_ones_until_its_device_is_done() -> None:
    first = """
        step s0                  0-100
        op aten::mm              10-90 dtype=c10::BFloat16 flops=98940000
        launch cudaLaunchKernel  20-30 correlation_id=1
        kernel a                 50-160 correlation_id=1
    """
    second = """
        step s1                  120-200
        op aten::mm              130-190 dtype=c10::BFloat16 flops=98940000
        launch cudaLaunchKernel  140-150 correlation_id=2
        kernel a                 200-360 correlation_id=2
    """
    machine = {"machine": {"devices": ["NVIDIA H100 80GB HBM3"]}}
    trace = trace_of([*spans(first, step=0), *spans(second, step=1)], machine)
    result = xsp.analyses.model_flops_utilisation(trace).filter("of LIKE '%step%'")
    rows = result.select("of, name, ms, round(mfu_percent, 4), tflop").fetchall()
    assert rows == [
        ("all steps", None, 0.36, 0.0556, 0.00019788),
        ("step", "s0", 0.12, 0.0833, 0.00009894),
        ("step", "s1", 0.24, 0.0417, 0.00009894),
    ]
