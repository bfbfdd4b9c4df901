"""What an NVIDIA H200 recorded (`recorded/`, made by `record.py`): records of CUPTI, traces of Kineto, whole runs.

Nothing here is made up. `steps/resnet50` is a run of ResNet-50 at batch size 256 of which ten steps were kept;
`steps/counted` has the counters of Nsight Compute.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import xsp
from xsp import analyses
from xsp.counters import reading
from xsp.errors import AnalysisError
from xsp.schema import Kind, Level, Span
from xsp.store.iterations import iterations
from xsp_collectors.cuda.activities import Activity
from xsp_collectors.cuda.cupti import CuptiActivities

RECORDED = Path(__file__).with_name("recorded")
STEPS = ("conv", "transformer", "graph", "compiled")


def record(kind: int, fields: list[str], values: list[Any]) -> Any:
    """Return a record with the fields of CUPTI's."""
    found = dict(zip(fields, values, strict=True))
    if "object_id_pt_thread_id" in found:
        found["object_id"] = SimpleNamespace(pt=SimpleNamespace(thread_id=found.pop("object_id_pt_thread_id")))
    return SimpleNamespace(kind=kind, **found)


def test_nothing_names_the_machine_of_the_recordings() -> None:
    for path in RECORDED.rglob("*.json"):
        assert not re.search(r"/(root|home|opt|work|tmp)/", path.read_text(encoding="utf-8")), path


def replayed(step: str) -> tuple[list[Span], list[str]]:
    """Give a step's records to a collector, as CUPTI does; return its spans and notes."""
    content = json.loads((RECORDED / "records" / f"{step}.json").read_text(encoding="utf-8"))
    collector = CuptiActivities()
    collector._threads.has_native_ids = True
    rows = [record(kind, content["fields"][name], values) for kind, name, *values in content["rows"]]
    # the step began after the collector's own launch, and ended before the collector's own wait
    [first] = [row.correlation_id for row in rows if "spin_kernel" in (getattr(row, "name", None) or "")]
    [own] = [row for row in rows if row.kind == Activity.RUNTIME and row.correlation_id == first]
    collector._begun_ns, collector._starting_thread = own.end + 1, own.thread_id
    collector._stopped_ns = max(row.end for row in rows if row.kind != Activity.MARKER) + 1
    collector._records.complete(rows)
    return list(collector.spans()), list(collector.notes())


def work(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.level == Level.KERNEL]


def names(trace: Any, kind: str = Kind.KERNEL) -> Counter[str]:
    return Counter(name for (name,) in trace.sql(f"SELECT name FROM merged WHERE kind = '{kind}'").fetchall())


def one_step(trace: Any) -> Counter[str]:
    rows = trace.sql(f"SELECT name FROM spans WHERE kind = '{Kind.KERNEL}'").fetchall()
    return Counter(name for (name,) in rows)


# --- records of CUPTI -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_each_record_is_read_and_each_kernel_has_its_launch(step: str) -> None:
    spans, notes = replayed(step)
    calls = {span.correlation_id for span in spans if span.level == Level.RUNTIME}
    assert work(spans)
    assert {span.correlation_id for span in work(spans)} <= calls
    assert not [note for note in notes if "could not" in note or "without" in note or "not ended" in note]


@pytest.mark.parametrize("step", STEPS)
def test_the_kernels_of_cuptis_records_are_those_of_kinetos_trace(step: str) -> None:
    kernels = Counter(span.name for span in work(replayed(step)[0]) if span.kind == Kind.KERNEL)
    assert kernels == one_step(xsp.load(RECORDED / "kineto" / f"{step}.json.gz"))


def test_libraries_named_their_calls_on_the_threads_of_the_system() -> None:
    spans, _ = replayed("conv")
    calls = [span for span in spans if span.level == Level.LIBRARY]
    assert {json.loads(span.attributes or "{}")["library"] for span in calls} == {"cuDNN", "cuBLAS"}
    assert "cudnnBackendExecute" in {span.name for span in calls}
    assert {span.thread for span in calls} <= {span.thread for span in spans if span.level == Level.RUNTIME}
    assert all(span.dur_ns > 0 for span in calls)


# --- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["conv", "transformer", "graph"])
def test_a_run_has_the_same_kernels_from_both_sources(step: str) -> None:
    ours, theirs = (xsp.load(RECORDED / "steps" / f"{step}-{source}") for source in ("cupti", "kineto"))
    assert names(ours) == names(theirs)
    assert sum(names(ours, Kind.COPY).values()) == sum(names(theirs, Kind.COPY).values())
    mine, its = (
        trace.sql(f"SELECT sum(dur_ns) FROM merged WHERE level = {int(Level.KERNEL)}").fetchall()[0][0]
        for trace in (ours, theirs)
    )
    assert mine == pytest.approx(its, rel=0.05)


def test_only_the_loss_and_the_optimizer_are_in_no_layer() -> None:
    trace = xsp.load(RECORDED / "steps" / "transformer-cupti")
    rows = trace.sql(
        "SELECT DISTINCT op.name FROM merged work JOIN merged op ON op.span_id = work.parent_id "
        "WHERE work.device IS NOT NULL AND work.grade <> 'exact'"
    ).fetchall()
    loss = {"aten::pow", "aten::mean", "aten::fill_", "aten::mul", "aten::div", "aten::copy_"}
    assert {name for (name,) in rows} == {*loss, "aten::_foreach_add_"}


def test_kernels_of_compiled_code_have_layers_by_inference() -> None:
    trace = xsp.load(RECORDED / "steps" / "compiled-cupti")
    rows = dict(trace.sql("SELECT grade, count(*) FROM merged WHERE device IS NOT NULL GROUP BY 1").fetchall())
    assert rows["inferred"] + rows["exact"] >= 100
    assert rows["unknown"] == 8


@pytest.mark.parametrize("source", ["cupti", "kineto"])
def test_all_spans_of_a_run_but_the_step_have_a_parent(source: str) -> None:
    trace = xsp.load(RECORDED / "steps" / f"conv-{source}")
    roots = f"SELECT kind FROM merged WHERE parent_id IS NULL AND kind <> '{Kind.OVERHEAD}'"
    assert trace.sql(roots).fetchall() == [(Kind.STEP,)]
    assert not [
        row for row in analyses.health(trace).select("subject, severity").fetchall() if row == ("parents", "warning")
    ]


# --- ResNet-50, whose convolutions call cuBLAS within cuDNN ---------------------------------------------------


@pytest.fixture(scope="module")
def resnet() -> Any:
    return xsp.load(RECORDED / "steps" / "resnet50")


def test_kernels_of_library_calls_in_library_calls_have_the_figures_of_their_operator(resnet: Any) -> None:
    within = resnet.sql(
        "SELECT count(*) FROM merged work JOIN merged call ON call.span_id = work.parent_id "
        "JOIN merged outer_call ON outer_call.span_id = call.parent_id "
        f"WHERE work.kind = '{Kind.KERNEL}' AND call.level = {int(Level.LIBRARY)} AND outer_call.level = call.level"
    ).fetchall()
    assert within == [(28,)]
    rows = analyses.ops(resnet).select("name, tflop_per_s, roof_percent").fetchall()
    assert not {name for name, *_ in rows if "cublas" in name or "cudnnBackend" in name}
    convolutions = [found for name, *found in rows if name == "aten::cudnn_convolution"]
    assert all(0 < rate < 989 and 0 < roof <= 100 for rate, roof in convolutions)
    [(known, flops)] = analyses.A15(resnet).select("flops_known_percent, flops").fetchall()
    assert known == 100
    assert flops == pytest.approx(2 * 4.09e9 * 256, rel=0.01)  # 4.09 billion multiply-adds an image


def test_one_kernel_of_a_convolution_multiplies_and_the_others_convert_its_layout(resnet: Any) -> None:
    rows = analyses.A9(resnet).select("name, layer_name, gflop_per_s").fetchall()
    first = {name.split("(")[0][:20]: rate for name, layer, rate in rows if layer == "conv1"}
    assert [name for name, rate in first.items() if rate] == ["sm80_xmma_fprop_impl"]


def test_a_layer_that_streams_memory_is_close_to_the_roof(resnet: Any) -> None:
    rows = dict(analyses.A14(resnet).select("layer_name, bandwidth_percent").fetchall())
    assert 80 < rows["relu"] <= 100


def test_an_iteration_of_a_loop_that_waits_for_the_device_takes_as_long_as_a_step(resnet: Any) -> None:
    [own] = iterations(resnet)
    [(latency,)] = analyses.A1(resnet).select("latency_ms").fetchall()
    assert own.mean_ns == pytest.approx(latency * 1e6, rel=0.02)


def test_time_between_recorded_steps_is_no_idle_time_of_the_device(resnet: Any) -> None:
    window_ms, busy_ms = analyses.device_activity(resnet).select("window_ms, busy_ms").fetchall()[0]
    assert busy_ms > 0.95 * window_ms


# --- counters and samples -------------------------------------------------------------------------------------


def test_counters_of_nsight_compute_are_read_and_joined() -> None:
    rows = reading.read(RECORDED / "ncu.csv")
    assert len(rows) == 37
    trace = xsp.load(RECORDED / "steps" / "counted")
    counters = trace.run["counters"]
    assert (counters["rows"], counters["rows_joined"]) == (37, 37)
    counted = trace.sql(
        f"SELECT count(*), count(flops) FROM merged WHERE kind = '{Kind.KERNEL}' AND bytes_source = 'counter'"
    ).fetchall()
    assert counted == [(37, 37)]


def test_samples_of_a_device_are_within_its_limits(resnet: Any) -> None:
    rows = resnet.sql("SELECT name, value FROM samples WHERE device = 0 ORDER BY time_ns").fetchall()
    found: dict[str, list[float]] = {}
    for name, value in rows:
        found.setdefault(name, []).append(value)
    assert found["gpu.energy"] == sorted(found["gpu.energy"])
    assert 0 < max(found["gpu.power"]) <= 1.1 * found["gpu.power.limit"][0]  # the limit is of a mean
    assert 0 < found["gpu.memory.used"][0] < found["gpu.memory.total"][0]


def test_the_energy_of_a_step_is_the_devices_power_times_its_iteration(resnet: Any) -> None:
    """A counter that changes every 100 ms, over ten stretches of bare steps of 34 ms."""
    [row] = (
        analyses.energy_of_steps(resnet)
        .select("joules, low_joules, high_joules, watts, update_ms, stretches")
        .fetchall()
    )
    joules, low, high, watts, period, stretches = row
    assert low < joules < high
    assert joules == pytest.approx(watts * iterations(resnet)[0].mean_ns / 1e9, rel=0.01)
    assert 600 < watts < 700  # of at most 700 W, at 99 % of the time busy
    assert (period, stretches) == (pytest.approx(100, abs=1), 10)


def test_energy_of_steps_that_are_too_few_is_refused() -> None:
    with pytest.raises(AnalysisError, match="energy"):
        analyses.energy_of_steps(xsp.load(RECORDED / "steps" / "conv-cupti"))
