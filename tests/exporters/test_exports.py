"""Exports for other viewers: what was recorded is in the file, nests, and comes back."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from depth import deep

import xsp
from xsp.cli import main
from xsp.errors import OutputError, UsageError
from xsp.exporters import chrome, folded, speedscope, tables, tracks
from xsp.exporters.contract import Choice, Weight, atomic_file
from xsp.store import selftimes
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
STEP = """
    step train 1000-1100 step=0
      forward Net 1002.001-1050 batch_size=8
        module fc1 1003-1030 type=Linear depth=0
          op aten::linear 1004-1020.5 sequence_nr=7
            launch cudaLaunchKernel 1010-1012 correlation_id=3
            kernel gemm 1015-1090 correlation_id=3
        module a;b 1030-1040 type=ReLU
          op aten::relu 1031-1033
"""


@pytest.fixture
def trace() -> Trace:
    return trace_of(spans(STEP), {"name": "net"})


def exported(trace: Trace, tmp_path: Path, steps: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    chrome.write(trace, tmp_path / "out.json", Choice(steps))
    events: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    return events


def of(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(event for event in events if event["name"] == name and event["ph"] == "X")


# --- Chrome and Perfetto ----------------------------------------------------------------------------------


def test_every_span_is_an_event_of_kinetos_kind(trace: Trace, tmp_path: Path) -> None:
    events = exported(trace, tmp_path)
    assert {event["name"]: event["cat"] for event in events if event["ph"] == "X"} == {
        "ProfilerStep#0": "user_annotation", "Net": "user_annotation", "nn.Module: fc1": "python_function",
        "nn.Module: a;b": "python_function", "aten::linear": "cpu_op", "aten::relu": "cpu_op",
        "cudaLaunchKernel": "cuda_runtime", "gemm": "kernel",
    }  # fmt: skip


def test_no_nanosecond_is_lost(trace: Trace, tmp_path: Path) -> None:
    chrome.write(trace, tmp_path / "out.json", Choice())
    text = (tmp_path / "out.json").read_text()
    assert '"baseTimeNanoseconds":0,' in text
    assert '"ts":1002.001,"dur":47.999,' in text


def test_a_time_of_today_is_written_after_a_base(tmp_path: Path) -> None:
    day = 1_795_276_783_000_000_000
    late = trace_of(span._replace(start_ns=span.start_ns + day) for span in spans(STEP))
    [forward] = [event for event in exported(late, tmp_path) if event["name"] == "Net"]
    assert forward["ts"] == 1002.001
    assert f'"baseTimeNanoseconds":{day},' in (tmp_path / "out.json").read_text()


def test_device_work_says_its_layer_and_hangs_on_its_launch(trace: Trace, tmp_path: Path) -> None:
    events = exported(trace, tmp_path)
    kernel, launch, op = of(events, "gemm"), of(events, "cudaLaunchKernel"), of(events, "aten::linear")
    assert {name: kernel["args"][name] for name in ("layer", "level", "device", "stream", "correlation", "grade")} == {
        "layer": "fc1", "level": "KERNEL", "device": 0, "stream": 7, "correlation": 3, "grade": "exact",
    }  # fmt: skip
    assert kernel["args"]["External id"] == launch["args"]["External id"] == op["args"]["External id"]
    start, end = [event for event in events if event["ph"] in "sf"]
    assert (start["id"], start["pid"], start["tid"], start["ts"]) == (end["id"], launch["pid"], launch["tid"], 1010)
    assert (end["pid"], end["tid"], end["ts"], end["bp"]) == (kernel["pid"], kernel["tid"], 1015, "e")


def test_tracks_are_named_and_ordered(trace: Trace, tmp_path: Path) -> None:
    named = [event for event in exported(trace, tmp_path) if event["ph"] == "M"]
    assert [(e["name"], *e["args"].values()) for e in named] == [
        ("process_name", "process 1"), ("process_labels", "CPU"), ("process_sort_index", 1),
        ("thread_name", "thread 1"), ("thread_sort_index", 0),
        ("process_name", "device 0"), ("process_labels", "GPU 0"), ("process_sort_index", 2),
        ("thread_name", "stream 7"), ("thread_sort_index", 1),
    ]  # fmt: skip


def test_ranks_with_the_same_numbers_stand_apart(tmp_path: Path) -> None:
    two = trace_of([*spans(STEP), *spans(STEP, rank=1)])
    events = exported(two, tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == [
        "rank 0, device 0", "rank 0, process 1", "rank 1, device 0", "rank 1, process 1",
    ]  # fmt: skip
    assert len([event for event in events if event["ph"] == "f"]) == 2


def test_steps_are_chosen(tmp_path: Path) -> None:
    two = trace_of([*spans("step s 0-10", step=0), *spans("step s 20-30", step=1)])
    assert [event["ts"] for event in exported(two, tmp_path, (1,)) if event["ph"] == "X"] == [20]
    with pytest.raises(UsageError, match="there is no step 2; there are 0, 1"):
        exported(two, tmp_path, (2,))


def test_memory_is_a_counter(tmp_path: Path) -> None:
    held = '{"device_type":1,"total_allocated_bytes":512,"total_reserved_bytes":1024}'
    [step, alloc] = spans("step s 0-10\nop alloc 5-5")
    with_memory = trace_of([step])
    row = alloc._replace(kind="alloc", alloc_bytes=512, attributes=held, step=0, trace_id="0" * 32, span_id="a" * 16)
    from xsp import table

    table.insert(with_memory.con, "spans", [row])
    [counter] = [event for event in exported(with_memory, tmp_path) if event["ph"] == "C"]
    assert (counter["name"], counter["ts"]) == ("memory of devices", 5)
    assert counter["args"] == {"allocated bytes": 512, "reserved bytes": 1024}


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = '</script>"\\\u2028'
    rows = [span._replace(name=name) for span in spans("step s 0-10\nop x 1-2")]
    hostile = trace_of([*rows, *spans("op y 2-3 attributes={broken input_shapes=[1,")])
    assert of(exported(hostile, tmp_path), name)


# --- nesting ----------------------------------------------------------------------------------------------


def laminar(trace: Trace) -> bool:
    """Return whether no two spans of a track cross."""
    rows = trace.sql("SELECT track, begin_ns, begin_ns + width_ns FROM track_spans").fetchall()
    return not any(a[0] == b[0] and a[1] < b[1] < a[2] < b[2] for a in rows for b in rows)


@pytest.mark.parametrize(
    ("text", "cut", "beside"),
    [
        ("step s 0-10\nop a 1-5\nop b 2-4", 0, 0),
        ("step s 0-10\nop a 1-5\nop b 2-5.001", 1, 0),  # the inner one ends too late
        ("step s 0-10\nop a 1-5\nmodule m 1.3-6", 1, 0),  # another clock lets the inner one begin too early
        ("step s 0-100\nkernel a 10-50\nkernel b 20-60\nkernel c 30-70", 0, 2),
        ("step s 0-100\nkernel a 10-50 stream=7\nkernel b 20-60 stream=8", 0, 0),
        ("step s 0-300\nop a 0-100\nop b 50-150\nmodule m 51-200", 1, 2),  # m goes around b, on the additional track
    ],
)
def test_spans_of_a_track_nest(text: str, cut: int, beside: int) -> None:
    found = trace_of(spans(text))
    placed = tracks.lay_out_tracks(found.con, "spans")
    assert (placed.cut, placed.overlapping) == (cut, beside)
    assert laminar(found)


def test_a_primitive_without_a_thread_stands_on_that_of_its_operator() -> None:
    found = trace_of(spans("step s 0-100\nop aten::conv 10-50\nprimitive conv 20-40"))
    assert [track.name for track in tracks.lay_out_tracks(found.con, "spans").tracks] == ["thread 1"]


# --- speedscope -------------------------------------------------------------------------------------------


def test_profiles_open_and_close_in_order(trace: Trace, tmp_path: Path) -> None:
    speedscope.write(trace, tmp_path / "out.json", Choice())
    found = json.loads((tmp_path / "out.json").read_text())
    frames = [frame["name"] for frame in found["shared"]["frames"]]
    host, device = found["profiles"]
    assert [(each["type"], frames[each["frame"]], each["at"]) for each in device["events"]] == [
        ("O", "gemm", 15_000), ("C", "gemm", 90_000),
    ]  # fmt: skip
    around: list[int] = []
    for each in host["events"]:
        around.append(each["frame"]) if each["type"] == "O" else None
        assert around[-1] == each["frame"]
        around.pop() if each["type"] == "C" else None
    assert (around, host["endValue"], host["unit"], host["name"]) == ([], 100_000, "nanoseconds", "process 1, thread 1")


# --- folded stacks ----------------------------------------------------------------------------------------


def test_stacks_add_up_to_the_step(trace: Trace, tmp_path: Path) -> None:
    folded.write(trace, tmp_path / "out", Choice(steps=(0,)))
    assert (tmp_path / "out").read_text().splitlines() == [
        "train 52001",
        "train;Net 10999",
        "train;Net;fc1 (Linear) 10500",
        "train;Net;a:b (ReLU) 8000",
        "train;Net;fc1 (Linear);aten::linear 14500",
        "train;Net;a:b (ReLU);aten::relu 2000",
        "train;Net;fc1 (Linear);aten::linear;cudaLaunchKernel 2000",
    ]


def test_stacks_are_written_also_after_self_times_were_computed(tmp_path: Path) -> None:
    window = trace_of(spans("step window 0-100\nop aten::mm 10-30"))
    selftimes.create_table(window)
    folded.write(window, tmp_path / "out", Choice(steps=(0,)))
    selftimes.create_table(window)
    assert len((tmp_path / "out").read_text().splitlines()) == 2


def test_a_span_on_no_thread_has_no_time_of_its_own(tmp_path: Path) -> None:
    window = trace_of(spans("step window 0-100 thread=None\nop aten::mm 10-30"))
    written = folded.write(window, tmp_path / "out", Choice(steps=(0,)))
    assert [line.split()[-1] for line in (tmp_path / "out").read_text().splitlines()] == ["20000"]
    assert written.sentences() == ["1 spans are on no thread, and so have no self time"]


def test_time_of_the_device_stands_under_the_operator(trace: Trace, tmp_path: Path) -> None:
    folded.write(trace, tmp_path / "out", Choice(weight=Weight.DEVICE))
    assert (tmp_path / "out").read_text() == "train;Net;fc1 (Linear);aten::linear;gemm 75000\n"
    with pytest.raises(UsageError, match="no device time"):
        folded.write(trace_of(spans("step s 0-1")), tmp_path / "out", Choice(weight=Weight.DEVICE))


# --- tables -----------------------------------------------------------------------------------------------


def test_a_table_of_spans_can_be_loaded_again(trace: Trace, tmp_path: Path) -> None:
    tables.parquet(trace, tmp_path / "out.parquet", Choice())
    again = xsp.load(tmp_path / "out.parquet")
    assert again.spans.fetchall() == trace.spans.fetchall()


def test_a_compressed_csv_is_compressed(trace: Trace, tmp_path: Path) -> None:
    assert tables.csv(trace, tmp_path / "out.csv.gz", Choice(rows="merged")).spans == 8
    lines = gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode().splitlines()
    assert (lines[0].split(",")[:2], len(lines)) == (["trace_id", "span_id"], 9)


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def stored(trace: Trace, tmp_path: Path) -> Path:
    tables.parquet(trace, tmp_path / "net.parquet", Choice())
    return tmp_path / "net.parquet"


@pytest.mark.parametrize("form", ["chrome", "speedscope", "folded", "csv", "parquet"])
def test_each_format_is_a_plugin(form: str, stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = stored.with_name(f"out.{form}")
    assert main(["export", str(stored), "--format", form, "-o", str(out)]) == 0
    assert out.stat().st_size > 100
    assert capsys.readouterr().out == f"8 spans in {out}\n"
    assert [path.name for path in stored.parent.iterdir() if path.name.startswith(".")] == []


def test_an_analysis_is_written_as_a_table(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = stored.with_name("layers.csv")
    assert main(["export", str(stored), "--format", "csv", "--table", "a2", "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"2 rows in {out}\n"
    assert out.read_text().startswith("layer_index,name,type")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "chrome"], "name the file to write with -o"),
        (["--format", "nonsense", "-o", "x"], "--format nonsense: there is no such format; there are chrome"),
        (["--format", "otlp", "-o", "x"], "omit --format"),
        (["--format", "flame", "-o", "x"], "--format flame: write --format folded, from which speedscope.app"),
        (["--format", "chrome", "-o", "x", "--resume"], "--resume: only for sending"),
        (["--format", "csv", "-o", "x", "--table", "A99"], "--table 'A99'"),
        (["-o", "x"], "--out: only with --format"),
    ],
)
def test_what_makes_no_sense_is_said(
    options: list[str], message: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(stored), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_leaves_nothing(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        chrome.write(trace, tmp_path / "no" / "out.json", Choice())
    (tmp_path / "out.json").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        chrome.write(trace, tmp_path / "out.json", Choice())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


# --- back again -------------------------------------------------------------------------------------------

COUNTED = """
    SELECT kind, name, start_ns, dur_ns, device, stream, grade FROM spans
    WHERE kind IN ('kernel', 'copy', 'op', 'launch', 'module') ORDER BY ALL
"""


def test_our_importer_reads_our_export(trace: Trace, tmp_path: Path) -> None:
    chrome.write(trace, tmp_path / "out.json.gz", Choice())
    again = xsp.load(tmp_path / "out.json.gz")
    assert again.sql(COUNTED).fetchall() == trace.sql(COUNTED).fetchall()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/traces is not there")
@pytest.mark.parametrize(
    "name",
    [
        "kineto_nvidia/hta_a100_alexnet_critical_path",
        deep("kineto_nvidia/tracelens_h100_qwen1.5-0.5b"),
        deep("kineto_amd/tracelens_mi300x_resnet_ddp_rank0of8"),
    ],
)
def test_a_real_trace_comes_back_as_it_went(name: str, tmp_path: Path) -> None:
    [file] = (SHARED / name).parent.glob(f"{Path(name).name}*.json.gz")
    trace = xsp.load(file)
    chrome.write(trace, tmp_path / "out.json.gz", Choice())
    again = xsp.load(tmp_path / "out.json.gz")
    with_layers = """
        SELECT span.kind, span.name, span.start_ns, span.dur_ns, span.device, span.stream, span.grade, layer.name
        FROM spans span LEFT JOIN spans layer ON layer.span_id = span.layer_id AND layer.trace_id = span.trace_id
        WHERE span.kind IN ('kernel', 'copy', 'launch', 'op', 'module') ORDER BY ALL
    """
    before, after = Counter(trace.sql(with_layers).fetchall()), Counter(again.sql(with_layers).fetchall())
    assert before - after == Counter()
    assert after - before == Counter()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_text_that_is_no_utf8_becomes_a_question_mark(name: str, tmp_path: Path) -> None:
    with atomic_file(tmp_path / name) as file:
        file.write("run \udcff")
    content = (tmp_path / name).read_bytes()
    assert (gzip.decompress(content) if name.endswith(".gz") else content) == b"run ?"
