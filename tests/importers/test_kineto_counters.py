"""Counters of Kineto's range profiler: whose they are, and that they are no times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginetraces import box

import xsp
from xsp.analyses import counters_by_kernel, counters_by_operator, operators
from xsp.errors import AnalysisError
from xsp.health.checks import health
from xsp.store.trace import Trace

ADD, FMA = (f"smsp__sass_thread_inst_executed_op_f{kind}_pred_on.sum" for kind in ("add", "fma"))


def counted(name: str, start: float, device: int = 0, **metrics: Any) -> dict[str, Any]:
    return box("cuda_profiler_range", name, start, 50, **metrics) | {"pid": device, "tid": 0}


TWO_OPERATORS = (
    box("cpu_op", "aten::mm", 0, 40),
    box("cuda_runtime", "cudaLaunchKernel", 10, 20, correlation=1),
    box("cuda_driver", "cuLaunchKernel", 12, 10, correlation=2),  # made by the call around it
    box("cpu_op", "aten::add", 50, 40),
    box("cuda_runtime", "cudaLaunchKernelExC", 60, 20, correlation=3),
)


def load(tmp_path: Path, *events: dict[str, Any], **keys: Any) -> Trace:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, **keys, "traceEvents": events}))
    return xsp.load(path)


def rows(table: Any, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in table.project(", ".join(columns)).fetchall()]


def test_the_kth_range_is_of_the_kth_launch_and_so_of_its_operator(tmp_path: Path) -> None:
    trace = load(
        tmp_path, *TWO_OPERATORS, counted("gemm", 0, **{FMA: 8, "lts__t.sum": 3}), counted("add", 50, **{ADD: "2"})
    )
    assert rows(counters_by_operator(trace), "name", "metric", "calls", "kernels", "total") == [
        ("aten::mm", "lts__t.sum", 1, 1, 3), ("aten::add", "fp32 add instr.", 1, 1, 2),
        ("aten::mm", "fp32 fma instr.", 1, 1, 8),
    ]  # fmt: skip
    kernels = rows(counters_by_kernel(trace), "name", "counter", "percent_of_total")
    assert kernels == [("gemm", "lts__t.sum", 100), ("add", ADD, 100), ("gemm", FMA, 100)]


def test_ranges_are_no_kernels_since_their_times_are_made_up(tmp_path: Path) -> None:
    trace = load(tmp_path, *TWO_OPERATORS, counted("gemm", 0, **{FMA: 8}), counted("add", 50, **{FMA: 2}))
    assert trace.sql("SELECT count(*) FROM spans WHERE level = 70").fetchall() == [(0,)]
    assert rows(operators(trace).limit(1), "device_ms", "percent_of_device_time") == [(None, None)]
    said = " ".join(finding.text for finding in health(trace))
    assert "replayed for counters, not timed" in said
    assert "no device work was recorded" not in said
    assert "2 ranges of the range profiler were joined to as many launches" in said


def test_where_ranges_and_launches_differ_in_number_no_operator_is_guessed(tmp_path: Path) -> None:
    trace = load(tmp_path, *TWO_OPERATORS, counted("gemm", 0, **{FMA: 8}))
    assert rows(counters_by_operator(trace), "name", "calls", "total") == [("(no operator)", None, 8)]
    assert rows(counters_by_kernel(trace), "name", "kernels", "total") == [("gemm", 1, 8)]
    assert any("beside 2 launches" in note["text"] for note in trace.run["notes"])


def test_ranges_of_two_gpus_are_not_joined_to_launches_that_do_not_tell_their_gpu(tmp_path: Path) -> None:
    trace = load(tmp_path, *TWO_OPERATORS, counted("gemm", 0, 0, **{FMA: 8}), counted("gemm", 0, 1, **{FMA: 2}))
    assert rows(counters_by_operator(trace), "name", "kernels", "total") == [("(no operator)", 2, 10)]
    assert [(each["device"], each["sum"]) for each in trace.run["counters"]["apart"]] == [(0, 8), (1, 2)]


def test_a_trace_of_ranges_alone_has_its_counters_and_no_other_figure(tmp_path: Path) -> None:
    trace = load(tmp_path, counted("__missing__", 0, **{"dram__bytes_read.sum": 64.0}), counted("gemm", 50, **{FMA: 2}))
    found = rows(counters_by_kernel(trace), "name", "metric", "total")
    assert found == [("(unnamed)", "DRAM bytes read", 64), ("gemm", "fp32 fma instr.", 2)]


def test_beside_kernels_ranges_are_theirs_by_name_and_order(tmp_path: Path) -> None:
    trace = load(
        tmp_path, *TWO_OPERATORS,
        {**box("kernel", "gemm", 20, 5, device=0, stream=7, correlation=1), "pid": 0},
        {**box("kernel", "gemm", 70, 5, device=0, stream=7, correlation=3), "pid": 0},
        counted("gemm", 0, **{"dram__bytes_read.sum": 64}), counted("gemm", 50, **{"dram__bytes_read.sum": 32}),
        counted("other", 100, **{"dram__bytes_read.sum": 1}),
    )  # fmt: skip
    query = "SELECT dram_read_bytes, bytes_source FROM spans WHERE level = 70 ORDER BY start_ns"
    assert trace.sql(query).fetchall() == [(64, "counter"), (32, "counter")]
    assert sorted(rows(counters_by_operator(trace), "name", "total")) == [
        ("(no operator)", 1), ("aten::add", 32), ("aten::mm", 64),
    ]  # fmt: skip


def test_operations_are_whole_only_where_the_tensor_cores_are_counted(tmp_path: Path) -> None:
    names = [
        f"smsp__sass_thread_inst_executed_op_{kind}{one}_pred_on.sum" for kind in "dfh" for one in ("add", "mul", "fma")
    ]
    every = dict.fromkeys(names, 0) | {FMA: 8}
    volta = {"name": "V100", "computeMajor": 7, "computeMinor": 0}
    events = (
        *TWO_OPERATORS,
        counted("a", 0, **every),
        counted("b", 50, **every, **{"sm__inst_executed_pipe_tensor.sum": 2}),
    )
    trace = load(tmp_path, *events, deviceProperties=[volta])
    made = [row for row in rows(counters_by_kernel(trace), "name", "metric", "total") if "FLOPs" in row[1]]
    assert made == [("b", "FLOPs", 2 * 8 + 2 * 512), ("a", "non-tensor FLOPs", 16), ("b", "non-tensor FLOPs", 16)]


def test_a_share_of_a_peak_has_no_total(tmp_path: Path) -> None:
    share = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
    trace = load(tmp_path, *TWO_OPERATORS, counted("a", 0, **{share: 20.0}), counted("a", 50, **{share: 40.0}))
    assert rows(counters_by_kernel(trace), "kernels", "total", "mean", "least", "most") == [(2, None, 30, 20, 40)]


@pytest.mark.parametrize("value", [True, None, [1], {"a": 1}, "x", "nan", float("inf")])
def test_an_argument_that_is_no_number_is_no_metric(tmp_path: Path, value: Any) -> None:
    trace = load(tmp_path, *TWO_OPERATORS, counted("a", 0, odd=value, **{FMA: 1}), counted("a", 50, **{FMA: 1}))
    assert {metric for (metric,) in rows(counters_by_kernel(trace), "counter")} == {FMA}


def test_a_trace_without_counters_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="xsp run --counters"):
        counters_by_kernel(load(tmp_path, *TWO_OPERATORS))
