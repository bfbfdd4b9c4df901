"""The fused ceiling: only bytes that have to be in memory count, and compiled code is not faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphruns import graph_of  # noqa: E402

import xsp  # noqa: E402
from xsp.bound import ceiling as roof  # noqa: E402
from xsp.bound import fused  # noqa: E402
from xsp.device.ceilings import Ceiling  # noqa: E402
from xsp.graph import Graph  # noqa: E402

BYTES_ALONE = Ceiling("a cpu", {"fp32": 1e30, "fp64": 1e30, "int8": 1e30}, {}, 1e9, "measured")
"""A machine on which a byte takes a nanosecond, and operations nothing."""

WITH_PRODUCTS = Ceiling("a cpu", {"fp32": 1e9, "fp64": 1e9}, {}, 1e9, "measured")


def least_ns(graph: Graph, ceiling: Ceiling = BYTES_ALONE) -> tuple[float, float]:
    """Return the fused ceiling, and the sum of the ceilings of single calls."""
    alone, _ = roof.figures(graph, ceiling)
    found = fused.least_ns(graph, alone, ceiling)
    assert isinstance(found, float)
    return found, sum(figure.ns for figure in alone if figure is not None)


class Function(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def test_a_chain_reads_its_input_and_writes_its_result() -> None:
    found, alone = least_ns(graph_of(lambda x: (x.sin() * 2).exp().add(1).relu(), torch.zeros(1000)))
    assert found == 2 * 4000
    assert alone == 5 * 2 * 4000


def test_what_follows_a_product_moves_nothing_but_what_the_next_product_reads() -> None:
    x, first, second = torch.zeros(10, 20), torch.zeros(20, 30), torch.zeros(30, 40)
    found, _ = least_ns(graph_of(lambda: torch.mm(torch.mm(x, first).relu().mul(2), second)))
    assert found == 4 * (10 * 20 + 20 * 30 + 10 * 30 + 10 * 30 + 30 * 40 + 10 * 40)


def test_a_result_that_is_reduced_before_the_next_product_is_carried_reduced() -> None:
    x, kernel, weight = torch.zeros(1, 4, 8, 8), torch.zeros(4, 4, 1, 1), torch.zeros(4, 5)
    conv = torch.nn.functional.conv2d
    found, _ = least_ns(graph_of(lambda: torch.mm(conv(x, kernel).mean((2, 3)), weight)))
    assert found == 4 * (x.numel() + kernel.numel() + 4 + 4 + weight.numel() + 5)


def test_an_operand_is_read_as_it_is_kept() -> None:
    x, packed = torch.zeros(10, 20), torch.zeros(20, 30, dtype=torch.int8)
    found, _ = least_ns(graph_of(lambda: torch.mm(x, packed.float() * 0.1)))
    assert found == 4 * 10 * 20 + 20 * 30 + 4 * 10 * 30


def test_operations_and_bytes_of_a_kernel_overlap() -> None:
    x, weight = torch.zeros(10, 100), torch.zeros(100, 100)
    found, alone = least_ns(graph_of(lambda: torch.mm(x, weight).relu().exp()), WITH_PRODUCTS)
    assert found == 2 * 10 * 100 * 100
    assert alone == found + 2 * 2 * 4000


def model(name: str) -> tuple[Any, Any]:
    """Return a model and its input."""
    torch.manual_seed(0)
    if name == "perceptron":
        parts = [
            part for _ in range(4) for part in (torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.GELU())
        ]
        return torch.nn.Sequential(*parts), torch.randn(512, 256)
    if name == "pointwise":
        return Function(lambda x: ((x.sin() + 1).tanh() * x.exp()).sigmoid().mul(3).sub(x).relu()), torch.randn(1 << 20)
    if name == "convolutions":
        parts = [part for width in (3, 16, 16) for part in (torch.nn.Conv2d(width, 16, 3), torch.nn.BatchNorm2d(16),
                                                            torch.nn.SiLU())]  # fmt: skip
        return torch.nn.Sequential(*parts, torch.nn.AdaptiveAvgPool2d(1)).eval(), torch.randn(8, 3, 64, 64)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 32, 64)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "transformer"])
def test_fused_calls_take_at_most_as_long_as_single_ones(name: str, train: bool) -> None:
    graph = xsp.graph.of(*model(name), train=train)
    for ceiling in (BYTES_ALONE, WITH_PRODUCTS):
        found, alone = least_ns(graph, ceiling)
        assert 0 < found < alone


def test_an_update_reads_and_writes_its_state() -> None:
    linear = torch.nn.Linear(64, 64, bias=False)
    found, alone = least_ns(xsp.graph.of(linear, torch.zeros(1, 64), train=True))
    weight_bytes = 4 * 64 * 64
    assert found >= 3 * weight_bytes  # the weight is read by the product and by the update, and written by it
    assert found < alone


def test_a_graph_of_calls_in_order_has_no_fused_ceiling() -> None:
    from dataclasses import replace

    from xsp.graph.node import KnownBy

    graph = replace(graph_of(lambda x: x.relu(), torch.zeros(10)), known_by=KnownBy.ORDER)
    assert fused.least_ns(graph, roof.figures(graph, BYTES_ALONE)[0], BYTES_ALONE) == fused.NO_DATA_FLOW


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pointwise", "perceptron", "convolutions"])
def test_compiled_code_is_not_faster_than_the_fused_ceiling(name: str) -> None:
    ceiling = roof.of_machine(may_measure=True)
    assert isinstance(ceiling, Ceiling)
    module, inputs = model(name)
    graph = xsp.graph.of(module, inputs)
    compiled = torch.compile(module)
    with torch.inference_mode():
        try:
            compiled(inputs)
        except Exception as error:  # inductor raises several kinds, of modules that are private
            pytest.skip(f"no code is compiled here: {type(error).__name__}")
        times = []
        for _ in range(30):
            begin = time.perf_counter_ns()
            compiled(inputs)
            times.append(time.perf_counter_ns() - begin)
    assert statistics.median(times) >= least_ns(graph, ceiling)[0]
