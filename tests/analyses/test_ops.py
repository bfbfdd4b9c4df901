"""Operators by self time, held against torch.profiler's own sums; and kernels of a CPU, which leave nothing out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from depth import first

import xsp
from xsp import analyses
from xsp.cli import main
from xsp.health import health
from xsp.schema import Level
from xsp.store.trace import Trace
from xsp.store.views import NS
from xsp.testing import spans, trace_of

torch = pytest.importorskip("torch")

Step = Callable[[], object]


class Attention(torch.nn.Module):  # type: ignore[misc]
    """A block of a GPT's: attention by itself, and two products."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.all = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, values: Any) -> Any:
        parts = self.all(self.norm(values)).view(*values.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        result = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return values + self.out(result.transpose(1, 2).reshape(values.shape))


def of_attention() -> Step:
    model = torch.nn.Sequential(Attention(), Attention())
    optimizer = torch.optim.AdamW(model.parameters())
    values = torch.randn(2, 16, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()

    return step


def of_recomputed_layers() -> Step:
    from torch.utils.checkpoint import checkpoint

    inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    values = torch.randn(4, 16, requires_grad=True)
    return lambda: checkpoint(inner, values, use_reentrant=True).sum().backward()


def of_a_recurrent_net() -> Step:
    model = torch.nn.LSTM(8, 16, num_layers=2)
    values = torch.randn(5, 3, 8)
    return lambda: model(values)[0].sum().backward()


def of_convolutions() -> Step:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    values = torch.randn(2, 3, 16, 16)
    return lambda: model(values).mean().backward()


def of_half_precision() -> Step:
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(32, 8))
    values = torch.randn(2, 16, 32)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(values).float().mean()
        loss.backward()

    return step


@pytest.fixture
def one_thread() -> Iterator[None]:
    """No workers of OpenMP's: which of them a profiler sees, and what each allocates, differs from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


STEPS = [of_attention, of_recomputed_layers, of_a_recurrent_net, of_convolutions, of_half_precision]


@pytest.mark.parametrize("make", first(2, STEPS))
def test_operators_are_those_of_key_averages(make: Callable[[], Step], tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = make()
    step()
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = xsp.load(tmp_path / "trace.json")

    theirs: dict[tuple[str, str], list[float]] = {}
    for entry in profile.key_averages(group_by_input_shape=True):
        if not entry.is_user_annotation:
            result = theirs.setdefault((entry.key, json.dumps(entry.input_shapes or [])), [0, 0.0, 0.0])
            result[0] += entry.count
            result[1] += entry.self_cpu_time_total / 1e3
            result[2] += entry.cpu_time_total / 1e3
    ours: dict[tuple[str, str], list[float]] = {}
    for name, shapes, calls, own, total in (
        analyses.operators(trace).select("name, shapes, calls, host_self_ms, host_ms").fetchall()
    ):
        known = [shape if all(type(size) is int for size in shape) else [] for shape in json.loads(shapes or "[]")]
        result = ours.setdefault((name, json.dumps(known)), [0, 0.0, 0.0])  # theirs leave lists of tensors out
        for place, value in enumerate((calls, own, total)):
            result[place] += value
    assert {key: row[0] for key, row in ours.items()} == {key: row[0] for key, row in theirs.items()}
    for key, row in ours.items():
        assert row[1:] == pytest.approx(theirs[key][1:], abs=0.002 * row[0]), key


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", STEPS)
def test_operators_and_kernels_of_a_recorded_step_add_up_to_the_outermost_operators(
    make: Callable[[], Step], tmp_path: Path
) -> None:
    step = make()
    with xsp.profile("add up", out=tmp_path / "run", samples=False) as profile:
        for _ in range(10):
            with profile.step():
                step()
    trace = xsp.load(tmp_path / "run")
    assert_nothing_is_left_out(trace)
    with torch.profiler.profile() as theirs:
        step()
    called: Counter[str] = Counter()
    for name, calls in analyses.operators(trace).select("name, calls").fetchall():
        called[name] += calls
    assert called == {entry.key: entry.count for entry in theirs.key_averages() if not entry.is_user_annotation}


def assert_nothing_is_left_out(trace: Trace) -> None:
    """Hold that the own times of each thread's operators are disjoint, and add up, whatever the noise."""
    own = analyses.operators(trace).aggregate("sum(host_self_ms)").fetchall()[0][0]
    ((whole, excess),) = trace.sql(
        f"""
        WITH inside AS (
            SELECT outer_id AS span_id, sum({NS}) AS ns FROM own_times JOIN merged USING (span_id) GROUP BY outer_id
        )
        SELECT (SELECT sum({NS}) FROM own_times JOIN merged USING (span_id) WHERE outer_id IS NULL),
               coalesce(sum(greatest(inside.ns - {NS}, 0)), 0) FROM merged JOIN inside USING (span_id)
        """
    ).fetchall()
    assert own == pytest.approx((whole + excess) / 1e6)
    tables = [(analyses.A8, "latency_us / 1e3"), (analyses.A10, "latency_ms"), (analyses.A15, "kernel_ms")]
    if trace.has(Level.LAYER):
        tables.append((analyses.A11, "latency_ms"))
    sums = [entry(trace).aggregate(f"sum({column})").fetchall()[0][0] for entry, column in tables]
    assert sums == [pytest.approx(sums[0])] * len(sums)
    assert sums[0] >= 0.999 * own, "nothing of the operators' time is left out"


# One training step, in µs: attention's backward has primitives inside it, and takes most of its time itself.
BACKWARD = """
    step train                                  0-1000
    forward Net                                 10-200
    op aten::linear                             20-120
    op aten::t                                  22-30
    op aten::transpose                          24-28
    op aten::addmm                              40-110 flops=6000 dram_read_bytes=100 dram_write_bytes=20
    op aten::copy_                              45-55 dram_read_bytes=4 dram_write_bytes=4
    backward backward                           300-900
    op autograd::engine::evaluate_function      300-800 phase=backward
    op aten::attention_backward                 310-790 phase=backward flops=9000
    primitive matmul                            400-450 type=matmul attributes={"library":"oneDNN"}
    primitive matmul                            420-470 type=matmul attributes={"library":"oneDNN"}
"""


def test_an_operator_with_primitives_inside_it_is_a_kernel_with_the_rest_of_its_time() -> None:
    trace = trace_of(spans(BACKWARD), {"name": "hand"})
    rows = analyses.A8(trace).select("name, library, round(latency_us), flops").fetchall()
    assert rows == [
        ("(dispatch and bookkeeping)", "framework", 30, None),  # linear's 22 µs, and 8 µs of views
        ("aten::addmm", "unknown", 60, 6000),
        ("aten::copy_", "unknown", 10, None),
        ("(dispatch and bookkeeping)", "framework", 20, None),
        ("aten::attention_backward", "unknown", 410, None),  # two primitives at once cover 70 µs of it
        ("matmul", "oneDNN", 50, None),
        ("matmul", "oneDNN", 50, None),
    ]
    assert analyses.A15(trace).select("operators_ms, kernel_ms, flops, dram_read_bytes").fetchall() == [
        (pytest.approx(0.6), pytest.approx(0.63), 15_000, 104)
    ]
    notes = [result.text for result in health(trace) if result.subject == "kernels"]
    assert notes == ["kernels add up to 105 % of the operators' time: primitives ran in parallel"]


def test_operators_inside_a_module_that_an_operator_calls_are_inside_the_operator() -> None:
    trace = trace_of(
        spans("""
        step s                 0-1000
        module net             0-900 type=Net depth=0
        op CheckpointFunction  100-500
        module net.inner       150-450 type=Linear depth=1
        op aten::mm            200-400
    """)
    )
    rows = analyses.operators(trace).select("name, host_self_ms, host_ms, percent_of_host_time").fetchall()
    assert rows == [("CheckpointFunction", 0.2, 0.4, 50.0), ("aten::mm", 0.2, 0.2, 50.0)]


def test_with_a_device_an_operator_has_the_time_of_what_it_launched() -> None:
    trace = trace_of(
        spans("""
        step s                   0-1000
        op aten::linear          100-200
        op aten::mm              110-190
        launch cudaLaunchKernel  120-130 correlation_id=1
        kernel gemm              400-700 correlation_id=1
    """)
    )
    rows = analyses.operators(trace).select("name, calls, host_self_ms, device_ms").fetchall()
    assert rows == [("aten::mm", 1, 0.08, 0.3), ("aten::linear", 1, 0.02, None)]
    assert trace.sql("SELECT count(*) FROM merged").fetchall() == [(5,)]
    assert analyses.A15(trace).select("operators_ms, covered_percent").fetchall() == [(None, None)]


LAUNCHED = """
    step s                   0-1000
    op aten::mm              10-90 dtype=c10::Half input_shapes=[[8,8],[8,8]] flops=8000000 dram_read_bytes=300000 dram_write_bytes=100000
    launch cudaLaunchKernel  20-30 correlation_id=1
    op aten::mm              100-190 dtype=c10::Half input_shapes=[[8,8],[8,8]] flops=8000000 dram_read_bytes=300000 dram_write_bytes=100000
    launch cudaLaunchKernel  120-130 correlation_id=2
    launch cudaMemsetAsync   140-150 correlation_id=3
    op aten::relu            200-290 dtype=float input_shapes=[[8,8]] dram_read_bytes=45000 dram_write_bytes=45000
    launch cudaLaunchKernel  220-230 correlation_id=4
    op aten::item            300-310 dtype=GenericList
    kernel gemm              200-300 correlation_id=1
    kernel gemm              300-350 correlation_id=2
    copy Memset              350-360 correlation_id=3
    kernel relu              400-401 correlation_id=4
    kernel graph             500-639 correlation_id=9
"""  # noqa: E501


def test_ops_are_by_device_time_with_rates_and_their_share_of_the_roof() -> None:
    trace = trace_of(spans(LAUNCHED), {"machine": {"devices": ["Tesla V100-SXM2-16GB"]}})
    result = analyses.operators(trace)
    rows = result.select("name, dtype, calls, device_ms, percent_of_device_time, kernels, copies").fetchall()
    assert rows == [
        ("aten::mm", "fp16", 2, pytest.approx(0.16), pytest.approx(16 / 0.3), 2, 1),
        ("(no operator)", None, None, 0.139, pytest.approx(13.9 / 0.3), 1, 0),
        ("aten::relu", "fp32", 1, 0.001, pytest.approx(0.1 / 0.3), 1, 0),
        ("aten::item", None, 1, None, None, None, None),
    ]
    (product, graph, relu, _) = result.select(
        "tflop_per_s, least_tflop_per_s, most_tflop_per_s, tb_per_s, least_tb_per_s, most_tb_per_s, flop_per_byte, "
        "roof_percent"
    ).fetchall()
    assert product[:3] == pytest.approx((16e6 / 150e3 / 1e3, 0.08, 0.16)), "the memset is in no rate"
    assert product[3:7] == pytest.approx((8e5 / 150e3 / 1e3, 0.004, 0.008, 20.0))
    assert product[7] == pytest.approx(100 * 16e6 / 150e3 / (20 * 900)), "the roof at 20 FLOP a byte is its memory's"
    assert graph == (None,) * 8
    assert relu[3] == pytest.approx(0.09)
    assert relu[7] == pytest.approx(100 * 90 / 900), "where only bytes are known, the bandwidth is the roof"


def test_what_a_library_launches_outside_of_operators_stands_under_its_call() -> None:
    trace = trace_of(
        spans("""
        step s                   0-1000
        op c10d::allreduce_      10-90
        call nccl:all_reduce     20-80 thread=1
        launch cudaLaunchKernel  30-40 correlation_id=1
        call nccl:broadcast      100-180 thread=1
        launch cudaLaunchKernel  130-140 correlation_id=2
        kernel ncclAllReduce     200-300 correlation_id=1
        kernel ncclBroadcast     300-350 correlation_id=2
    """)
    )
    rows = analyses.operators(trace).select("name, calls, device_ms, host_ms").fetchall()
    assert rows == [("c10d::allreduce_", 1, 0.1, 0.08), ("nccl:broadcast", 1, 0.05, None)]


@pytest.mark.slow
def test_a_narrow_terminal_tells_operators_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`key_averages()` shows shapes; of a training step phases belong to it, since both passes have the same names."""
    step = of_attention()
    with xsp.profile("gpt", out=tmp_path / "gpt", samples=False) as profile:
        for _ in range(10):
            with profile.step():
                step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert main(["analyze", str(tmp_path / "gpt"), "ops", "--where", "name = 'aten::mm'"]) == 0
    printed = capsys.readouterr().out
    heading, left = printed.split("\n ──")[0], printed.split("columns that do not fit")[-1]
    assert all(word in heading for word in ("name", "phase", "calls", "self", "shapes"))
    assert not any(word in left for word in ("phase", "calls", "self", "shapes"))
    rows = [line for line in printed.splitlines() if line.startswith(" aten::mm ")]
    assert rows, printed
    assert all("backward" in row and "[[" in row for row in rows), printed
    assert max(map(len, printed.splitlines())) <= 80
