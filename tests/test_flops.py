"""Operations from shapes: against sums by hand, and against PyTorch's own counter on real operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from xsp.correlate import correlate
from xsp.flops import flops
from xsp.span import Kind, Level, Span


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 4]], 2 * 2 * 3 * 4),
        ("aten::addmm", [[4], [2, 3], [3, 4]], 2 * 2 * 3 * 4),
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], 5 * 2 * 2 * 3 * 4),
        ("aten::linear", [[7, 2, 3], [4, 3], [4]], 7 * 2 * 2 * 3 * 4),
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
    counted = described(run)
    assert sum(row.flops or 0 for row in counted) == counter.get_total_flops() > 0
    assert {(row.kind, row.flops_source) for row in counted} == {(Kind.OP, "shapes")}


def test_the_backward_pass_of_a_grouped_convolution_by_hand_since_torch_forgets_its_groups() -> None:
    forward = 2 * (7 * 7) * (16 * 2 * 3 * 3)
    assert sum(row.flops or 0 for row in described(work("conv2d, groups, backward"))) == 3 * forward
