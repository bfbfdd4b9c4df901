"""What XLA's profiler records: `.xplane.pb`, and the trace events that are exported beside it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from fuzzing import MUTATIONS, examples, is_read, mutated
from hypothesis import given
from wire import Plane, message, xspace

import xsp
from xsp import advise
from xsp.errors import TraceError
from xsp.importers import xplane
from xsp.importers.contract import find_importer
from xsp.importers.otlp_proto import OtlpProto
from xsp.importers.protobuf import MAX_TEXT, WireError, double, fields, signed, text

START_NS = 1_700_000_000_000_000_000
TRACES = Path(__file__).parents[2] / ".." / "shared" / "reports" / "traces"
REAL = TRACES / "jax_te_mi355.xplane.pb"

DETAILS = "regs:32 static_shared:0 dynamic_shared:16 grid:4,1,1 block:256,1,1 occ_pct:50"


def op(name: str, correlation: int) -> dict[str, Any]:
    return {"correlation_id": correlation, "hlo_op": f"→{name}", "hlo_module": "→jit_step",
            "name": f"→jit(step)/layer/{name}", "tf_op": "→XlaModule:"}  # fmt: skip


def of_a_gpu(steps: int = 3) -> bytes:
    """Two operators a step, launched on a line of calls that numbers threads in its own way."""
    python, calls, stream, modules = [], [], [], []
    for step in range(steps):
        at, number = 10_000 * step, 10 * step
        python += [
            {"name": "train", "at": at, "dur": 9_000, "stats": {"step_num": step}},
            {"name": "PjitFunction(step)", "at": at + 10, "dur": 2_000},
            {
                "name": "GpuExecutable::ExecuteThunks",
                "at": at + 100,
                "dur": 1_500,
                "stats": {"module_name": "jit_step"},
            },
            {"name": "dot.1", "at": at + 200, "dur": 400},
            {"name": "fusion", "at": at + 700, "dur": 300},
        ]
        calls += [
            {"name": "cuLaunchKernel", "at": at + 250, "dur": 100, "stats": op("dot.1", number + 1)},
            {"name": "cuLaunchKernel", "at": at + 400, "dur": 100, "stats": op("dot.1", number + 2)},
            {"name": "cuLaunchKernel", "at": at + 750, "dur": 100, "stats": op("fusion", number + 3)},
            {"name": "cuStreamSynchronize", "at": at + 2_000, "dur": 6_000, "stats": {"correlation_id": number + 4}},
        ]
        stream += [
            {"name": "gemm", "at": at + 1_000, "dur": 3_000,
             "stats": {**op("dot.1", number + 1), "kernel_details": f"→{DETAILS}"}},
            {"name": "splitK", "at": at + 4_000, "dur": 500, "stats": op("dot.1", number + 2)},
            {"name": "fusion", "at": at + 4_600, "dur": 1_000, "stats": op("fusion", number + 3)},
        ]  # fmt: skip
        modules.append({"name": "jit_step(7)", "at": at + 1_000, "dur": 4_600})
    return xspace(
        Plane("/host:metadata", proto=b"x"),
        Plane("/device:GPU:0", device_vendor="NVIDIA", core_count=132, memory_size=80 << 30)
        .line(14, "Stream #14(Compute)", stream)
        .line(99, "XLA Modules", modules),
        Plane("/host:CPU").line(501, "python", python).line(7, "Host Threads/7", calls),
        Plane("Task Environment", profile_start_time=START_NS),
    )


def as_trace_events(data: bytes) -> dict[str, Any]:
    """Return what is exported beside the file: the same events, in microseconds, with their statistics as texts."""
    events: list[dict[str, Any]] = []
    for index, (number, low, high) in enumerate(fields(data, 0, len(data))):
        if number != 1:
            continue
        plane = xplane._Plane(data, low, high)
        process = xplane.HOST_PROCESS if plane.name.startswith("/host:CPU") else index
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": plane.name}})
        for line in plane.lines:
            parts = list(fields(data, *line))
            tid = next(low for number, low, _ in parts if number == 1)
            name = next(text(data, low, high) for number, low, high in parts if number == 2)
            events.append({"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}})
            for _, start, end in (part for part in parts if part[0] == 4):
                values = {number: low for number, low, _ in fields(data, start, end) if number < 4}
                stats = dict(plane.stat(*place) for number, *place in fields(data, start, end) if number == 4)
                events.append(
                    {"ph": "X", "pid": process, "tid": tid, "ts": values.get(2, 0) / 1e6, "dur": values.get(3, 0) / 1e6,
                     "name": plane.metadata[values[1]].name, "args": {key: str(value) for key, value in stats.items()}}
                )  # fmt: skip
    return {"displayTimeUnit": "ns", "traceEvents": [*events, {}]}


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(of_a_gpu())
    return path


SPANS = """
    SELECT s.level, s.kind, s.type, s.name, s.device, s.stream, s.step, p.name, s.parent_rule, s.dur_ns FROM spans s
    LEFT JOIN spans p ON p.trace_id = s.trace_id AND p.span_id = s.parent_id WHERE s.step = 1 ORDER BY s.start_ns
"""


def test_operators_launches_and_device_work_find_each_other(gpu: Path) -> None:
    trace = xsp.load(gpu)
    assert trace.run.framework == "jax"
    assert trace.sql(SPANS).fetchall() == [
        (20, "step", None, "train", None, None, 1, None, None, 9000),
        (10, "user", None, "PjitFunction(step)", None, None, 1, "train", "containment", 2000),
        (30, "user", "compiled", "jit_step", None, None, 1, "PjitFunction(step)", "containment", 1500),
        (40, "op", None, "dot.1", None, None, 1, "jit_step", "containment", 400),
        (60, "launch", None, "cuLaunchKernel", None, None, 1, "dot.1", "containment", 100),
        (60, "launch", None, "cuLaunchKernel", None, None, 1, "dot.1", "containment", 100),
        (40, "op", None, "fusion", None, None, 1, "jit_step", "containment", 300),
        (60, "launch", None, "cuLaunchKernel", None, None, 1, "fusion", "containment", 100),
        (70, "kernel", None, "gemm", 0, 14, 1, "dot.1", "correlation", 3000),
        (60, "sync", None, "cuStreamSynchronize", None, None, 1, None, None, 6000),
        (70, "kernel", None, "splitK", 0, 14, 1, "dot.1", "correlation", 500),
        (70, "kernel", None, "fusion", 0, 14, 1, "fusion", "correlation", 1000),
    ]
    ((attributes, start),) = trace.sql(
        "SELECT attributes, start_ns FROM spans WHERE name = 'gemm' AND step = 0"
    ).fetchall()
    assert json.loads(attributes) == {
        "grid": [4, 1, 1], "block": [256, 1, 1], "registers": 32, "shared_bytes": 16, "hlo_op": "dot.1",
        "hlo_module": "jit_step", "sources": ["jit(step)/layer/dot.1"],
    }  # fmt: skip
    assert start == START_NS + 1_000
    assert trace.run.machine.device_properties[0].sms == 132
    assert "3 spans were left out: projections of host spans" in " ".join(note.text for note in trace.run.notes)


def test_the_trace_events_beside_the_file_give_the_same_figures(gpu: Path, tmp_path: Path) -> None:
    beside = tmp_path / "host.trace.json.gz"
    beside.write_bytes(gzip.compress(json.dumps(as_trace_events(of_a_gpu())).encode()))
    one, other = xsp.load(gpu), xsp.load(beside)
    assert other.run.framework == "jax"
    assert one.sql(SPANS).fetchall() == other.sql(SPANS).fetchall()
    assert xsp.analyses.ANALYSES["ops"](one).fetchall() == xsp.analyses.ANALYSES["ops"](other).fetchall()


def test_without_blocks_of_operators_the_launches_of_one_are_its_operator(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = [{"name": "cuLaunchKernel", "at": at, "dur": 10, "stats": op(name, at)}
             for at, name in ((100, "a"), (120, "a"), (140, "b"), (160, "a"))]  # fmt: skip
    work = [{"name": "k", "at": call["at"] + 5, "dur": 10, "stats": call["stats"]} for call in calls]
    path = tmp_path / "a.pb"
    path.write_bytes(
        xspace(Plane("/device:GPU:0").line(1, "Stream #1", work), Plane("/host:CPU").line(2, "calls", calls))
    )
    rows = xsp.load(path).sql("SELECT name, start_ns, dur_ns FROM spans WHERE kind = 'op' ORDER BY start_ns").fetchall()
    assert rows == [("a", 100, 30), ("b", 140, 10), ("a", 160, 10)]


def test_a_processor_has_operators_and_steps_and_no_device(tmp_path: Path) -> None:
    pool = [{"name": "ThunkExecutor::Execute", "at": 15, "dur": 40},
            {"name": "dot.3", "at": 20, "dur": 30, "stats": {"hlo_op": "dot.3", "hlo_module": "jit_f"}},
            {"name": "end: dot.3", "at": 50, "dur": 1}]  # fmt: skip
    host = Plane("/host:CPU").line(1, "python", [{"name": "train", "at": 0, "dur": 100, "stats": {"step_num": 4}}])
    path = tmp_path / "cpu.pb"
    path.write_bytes(xspace(host.line(2, "tf_XLAEigen/2", pool)))
    trace = xsp.load(path)
    assert trace.sql("SELECT kind, name, step FROM spans WHERE level > 10 ORDER BY level").fetchall() == [
        ("step", "train", 0), ("user", "jit_f", 0), ("op", "dot.3", 0),
    ]  # fmt: skip
    assert trace.run.machine.devices == ()


def test_a_tpu_has_its_own_steps_and_loops_are_not_counted_twice(tmp_path: Path) -> None:
    flops = {"flops": 1_000, "bytes_accessed": 64, "tf_op": "jit(f)/dot_general:"}
    device = (
        Plane("/device:TPU:1", device_type_string="TPU v4")
        .line(1, "Steps", [{"name": "0", "at": 0, "dur": 100}, {"name": "1", "at": 100, "dur": 100}])
        .line(2, "XLA Modules", [{"name": "jit_f(3)", "at": 0, "dur": 90}])
        .line(3, "XLA Ops", [
            {"name": "while.1", "at": 10, "dur": 80}, {"name": "fusion.2", "at": 10, "dur": 30, "shared": flops},
            {"name": "copy.4", "at": 50, "dur": 40},
        ])
    )  # fmt: skip
    path = tmp_path / "tpu.pb"
    host = Plane("/host:CPU").line(1, "python", [{"name": "train", "at": 0, "dur": 5, "stats": {"step_num": 0}}])
    path.write_bytes(xspace(device, host))
    trace = xsp.load(path)
    rows = trace.sql("SELECT name, device, step, flops, flops_source FROM spans WHERE level = 70 ORDER BY start_ns")
    assert rows.fetchall() == [("fusion.2", 1, 0, 1000, "shapes"), ("copy.4", 1, 0, None, None)]
    assert trace.sql("SELECT name FROM spans WHERE kind = 'step' ORDER BY 1").fetchall() == [("step 0",), ("step 1",)]
    ((attributes,),) = trace.sql("SELECT attributes FROM spans WHERE name = 'fusion.2'").fetchall()
    assert json.loads(attributes) == {"accessed_bytes": 64, "hlo_module": "jit_f", "sources": ["jit(f)/dot_general"]}
    assert trace.run.machine.devices == ("unknown", "TPU v4")
    assert "1 spans were left out: loops and branches" in " ".join(note.text for note in trace.run.notes)


def test_what_the_profiler_does_to_start_is_left_out(tmp_path: Path) -> None:
    python = [{"name": "$profiler.py:101 start_trace", "at": 0, "dur": 9_000_000}, {"name": "gc", "at": 50, "dur": 1},
              {"name": "PjitFunction(f)", "at": 9_000_100, "dur": 100}]  # fmt: skip
    path = tmp_path / "a.pb"
    path.write_bytes(xspace(Plane("/host:CPU").line(1, "python", python)))
    trace = xsp.load(path)
    assert trace.sql("SELECT name, dur_ns FROM spans ORDER BY level").fetchall() == [
        ("PjitFunction(f)", 100), ("window", 100),
    ]  # fmt: skip
    assert "2 spans were left out: the profiler's own work" in " ".join(note.text for note in trace.run.notes)


def test_advice_is_in_words_of_jax(gpu: Path) -> None:
    trace = xsp.load(gpu)
    report = advise.of(trace, max_needs=advise.Needs.TRACE)
    said = " ".join([*(f"{piece.what} {piece.do} {piece.why}" for piece in report.advice), *report.unanswered.values()])
    assert report.advice
    assert "torch" not in said
    for analysis in xsp.analyses.ANALYSES.values():
        assert "torch" not in (analysis.refusal(trace) or "")


def test_the_folder_that_a_program_gave_to_the_profiler_is_its_latest_recording(tmp_path: Path) -> None:
    for time, steps in (("2026_01_01_10_00_00", 2), ("2026_01_01_11_00_00", 3)):
        folder = tmp_path / "log" / "plugins" / "profile" / time
        folder.mkdir(parents=True)
        (folder / "host.xplane.pb").write_bytes(of_a_gpu(steps))
        (folder / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps(as_trace_events(of_a_gpu())).encode()))
    for folder in (tmp_path / "log", tmp_path / "log" / "plugins" / "profile" / "2026_01_01_11_00_00"):
        trace = xsp.load(folder)
        assert trace.sql("SELECT count(*) FROM spans WHERE kind = 'step'").fetchall() == [(3,)]
        assert [source["importer"] for source in trace.run["imported"]["sources"]] == ["xplane"]


def test_the_hosts_of_a_recording_are_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "plugins" / "profile" / "2026_01_01_10_00_00"
    folder.mkdir(parents=True)
    for name in ("host-b", "host-a"):
        (folder / f"{name}.xplane.pb").write_bytes(of_a_gpu(2) if name == "host-a" else of_a_gpu(3))
    trace = xsp.load(tmp_path / "log")
    assert trace.sql("SELECT rank, count(*) FROM spans WHERE kind = 'step' GROUP BY 1 ORDER BY 1").fetchall() == [
        (0, 2), (1, 3),
    ]  # fmt: skip


def test_a_real_file_has_what_a_plain_reading_counts() -> None:
    if not REAL.exists():
        pytest.skip("no such file lies in ../shared/reports/traces")
    events = json.loads(gzip.decompress((TRACES / "jax_te_mi355.trace.json.gz").read_bytes()))["traceEvents"]
    work = [event for event in events if event.get("pid") == 1 and event.get("tid") == 2 and event["ph"] == "X"]
    expected = [(len(work), round(sum(event["dur"] for event in work) * 1000))]
    query = "SELECT count(*), sum(dur_ns)::BIGINT FROM spans WHERE level = 70"
    for name in ("jax_te_mi355.xplane.pb", "jax_te_mi355.trace.json.gz"):
        trace = xsp.load(TRACES / name)
        assert trace.sql(query).fetchall() == expected == [(150, 12_133_585)]
        by_op = trace.sql(
            "SELECT count(*), count(DISTINCT p.name) FROM spans s JOIN spans p ON p.span_id = s.parent_id "
            "AND p.kind = 'op' AND p.name = s.attributes ->> '$.hlo_op' WHERE s.level = 70"
        )
        assert by_op.fetchall() == [(150, 20)]
        if name.endswith(".pb"):  # six products of one size in each of five steps
            flops = trace.sql("SELECT count(*), min(flops), max(flops) FROM spans WHERE flops IS NOT NULL").fetchall()
            assert flops == [(30, 103_079_215_104, 103_079_215_104)]


# --- damage -----------------------------------------------------------------------------------------------


def test_no_other_importer_claims_it(gpu: Path) -> None:
    assert find_importer(str(gpu)).name == "xplane"
    assert not OtlpProto().recognises(gpu.read_bytes(), str(gpu))
    assert not xplane.is_xspace(message((1, message((1, b"\x0a\x03abc")))))  # OTLP: a resource
    assert not xplane.is_xspace(message((1, message((8, 5), (11, b"x")))))  # a packet of Perfetto


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_one_error(gpu: Path, share: float) -> None:
    gpu.write_bytes(gpu.read_bytes()[: int(len(gpu.read_bytes()) * share)])
    with pytest.raises(TraceError, match=r"host\.xplane\.pb, byte \d+: .*XSpace.*copy it again"):
        xsp.load(gpu)


def test_an_xspace_without_events_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.xplane.pb"
    path.write_bytes(xspace(Plane("/host:CPU")))
    with pytest.raises(TraceError, match=r"empty\.xplane\.pb: an XSpace without events.*stop_trace"):
        xsp.load(path)


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x07", b"\x00\x01", b"\x08" + b"\xff" * 11])
def test_lengths_that_lie_are_errors(data: bytes) -> None:
    with pytest.raises(WireError, match="byte"):
        list(fields(data, 0, len(data)))


def test_numbers_and_texts_of_the_wire_format() -> None:
    data = message((1, -5), (2, "é" * 3000), (3, 2.5))
    (_, number, _), (_, low, high), (_, fixed, _) = fields(data, 0, len(data))
    assert signed(number) == -5
    assert len(text(data, low, high)) == MAX_TEXT // 2
    assert double(fixed) == 2.5
    with pytest.raises(WireError, match="no text"):
        text(data, number, -1)


@pytest.mark.slow
@examples(40)
@given(mutations=MUTATIONS)
def test_no_bytes_lead_to_another_error(tmp_path: Path, mutations: list[tuple[float, str, bytes]]) -> None:
    path = tmp_path / "fuzzed.xplane.pb"
    path.write_bytes(mutated(of_a_gpu(2), mutations))
    is_read(path, xplane.XPlane())
