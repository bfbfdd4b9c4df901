"""Traces of PyTorch's profiler: a real one of this machine, and what each generation of the format says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import xsp
from xsp.cli import main
from xsp.errors import TraceError
from xsp.ingest import sources
from xsp.store.trace import Trace

NEW = {
    "op": "cpu_op", "kernel": "kernel", "runtime": "cuda_runtime", "copy": "gpu_memcpy", "id": "External id",
}  # fmt: skip
OLD = {"op": "Operator", "kernel": "Kernel", "runtime": "Runtime", "copy": "Memcpy", "id": "external id"}


def box(category: str, name: str, start: float, duration: Any, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


def work(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return box(category, name, start, duration, 7, **{"device": 0, "stream": 7, **args}) | {"pid": 0}


def file(path: Path, *events: dict[str, Any], **keys: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **keys, "traceEvents": events}))
    return path


def load(tmp_path: Path, *events: dict[str, Any], **keys: Any) -> Trace:
    return xsp.load(file(tmp_path / "t.json", *events, **keys))


def told(trace: Trace, query: str) -> list[tuple[Any, ...]]:
    return trace.sql(query).fetchall()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this torch records of two training steps, with shapes, stacks and memory."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path_factory.mktemp("kineto") / "cpu.json.gz"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_stack=True, profile_memory=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:  # fmt: skip
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return path


def test_a_trace_of_this_torch_has_steps_layers_and_backward_operators_of_layers(recorded: Path) -> None:
    trace = xsp.load(recorded)
    assert told(trace, "SELECT step, kind FROM spans WHERE kind = 'step' ORDER BY step") == [(0, "step"), (1, "step")]
    layers = told(trace, "SELECT DISTINCT type FROM merged WHERE level = 30 ORDER BY type")
    assert [row for row in layers if row[0] != "LinearLayer"] == [("Linear",), ("ReLU",), ("Sequential",)]
    flops = told(trace, "SELECT sum(flops) FROM merged WHERE phase IS NULL AND name = 'aten::addmm'")
    assert flops == [(2 * 2 * 8 * 16 + 2 * 2 * 16 * 4,)]
    followed = told(trace, "SELECT count(*) > 0 FROM merged WHERE parent_rule = 'sequence' AND layer_id IS NOT NULL")
    assert followed == [(True,)]
    assert told(trace, "SELECT count(*) > 0 FROM merged WHERE level = 30 AND alloc_bytes > 0") == [(True,)]


def test_importing_twice_gives_the_same_and_opens_again(recorded: Path, tmp_path: Path) -> None:
    query = "SELECT span_id, parent_id, key, start_ns, layer_id FROM spans ORDER BY ALL"
    sources.import_atomically(tmp_path / "run", [str(recorded)])
    first, again = told(xsp.load(recorded), query), told(xsp.load(tmp_path / "run"), query)
    assert first == again != []


@pytest.mark.parametrize("names", [NEW, OLD], ids=["today", "2021"])
def test_a_kernel_finds_its_operator_in_every_generation(tmp_path: Path, names: dict[str, str]) -> None:
    trace = load(
        tmp_path,
        box(names["op"], "ProfilerStep#3", 0, 100),
        box(names["op"], "aten::mm", 10, 40, "1"),
        box(names["runtime"], "cudaLaunchKernel", 20, 5, correlation=9),
        work(names["kernel"], "gemm", 60, 20, correlation=9, grid=[2, 1, 1]),
        work(names["copy"], "Memcpy HtoD (Pageable -> Device)", 85, 5, correlation=10, bytes=64),
    )
    query = """SELECT s.name, up.name, s.parent_rule FROM spans s LEFT JOIN spans up ON up.span_id = s.parent_id
               WHERE s.level = 70 ORDER BY s.start_ns"""
    assert told(trace, query) == [("gemm", "aten::mm", "correlation"), ("Memcpy HtoD (Pageable -> Device)", None, None)]
    assert json.loads(told(trace, "SELECT attributes FROM spans WHERE kind = 'copy'")[0][0]) == {
        "bytes": 64,
        "copy": "HtoD",
    }


def flow(phase: str, number: int, pid: int, tid: int, at: float) -> dict[str, Any]:
    return {"ph": phase, "cat": "ac2g", "name": "ac2g", "id": number, "pid": pid, "tid": tid, "ts": at}


@pytest.mark.parametrize("links", ["flow events", "external ids", "both"])
def test_without_correlation_ids_kernels_find_their_launches_by_other_links(tmp_path: Path, links: str) -> None:
    has_flows, has_ids = links != "external ids", links != "flow events"
    external = [{"External id": number} if has_ids else {} for number in (24, 25)]
    events = [
        box("cpu_op", "aten::mm", 10, 20, **{"External id": 513}),
        box("cuda_runtime", "hipModuleLaunchKernel", 12, 2, **external[0]),
        box("cpu_op", "aten::add", 40, 20, **{"External id": 24 if has_flows else 514}),  # a number of another sort
        box("cuda_runtime", "hipLaunchKernel", 45, 2, **external[1]),
        {**work("kernel", "gemm", 60, 20, **external[0])},
        {**work("kernel", "add", 85, 5, **external[1])},
        work("kernel", "unknown", 95, 5),
    ]
    if has_flows:
        for number, launched, began in ((24, 12, 60), (25, 45, 85)):
            events += [flow("s", number, 1, 1, launched), flow("f", number, 0, 7, began)]
    trace = load(tmp_path, *events)
    query = """SELECT s.name, up.name, s.parent_rule FROM spans s LEFT JOIN spans up ON up.span_id = s.parent_id
               WHERE s.level = 70 ORDER BY s.start_ns"""
    found = [("gemm", "aten::mm", "correlation"), ("add", "aten::add", "correlation"), ("unknown", None, None)]
    assert told(trace, query) == found
    by = "external ids" if not has_flows else "flow events"
    assert any(f"2 of 3 kernels and copies without a correlation id were matched by {by}" in str(note)
               for note in trace.run["notes"]), trace.run["notes"]  # fmt: skip


def test_an_external_id_of_several_launches_names_no_launch(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        box("cpu_op", "aten::mm", 10, 20, **{"External id": 7}),
        box("cuda_runtime", "cudaLaunchKernel", 12, 2, **{"External id": 7}),
        box("cuda_runtime", "cudaLaunchKernel", 16, 2, **{"External id": 7}),
        work("kernel", "gemm", 60, 20, **{"External id": 7}),
    )
    query = "SELECT up.name, s.parent_rule FROM spans s JOIN spans up ON up.span_id = s.parent_id WHERE s.level = 70"
    assert told(trace, query) == [("aten::mm", "external")]


def test_tasks_of_ascend_are_work_of_the_operators_from_which_flows_lead_to_them(tmp_path: Path) -> None:
    def task(name: str, kind: str, start: float, duration: float) -> dict[str, Any]:
        args = {"Task Type": kind, "Stream Id": 3, "Task Id": 1, "connection_id": 8}
        return {"ph": "X", "name": name, "pid": 800, "tid": 3, "ts": f"{start:.3f}", "dur": duration, "args": args}

    def npu(phase: str, number: int, pid: int, tid: int, at: float) -> dict[str, Any]:
        return flow(phase, number, pid, tid, at) | {"cat": "async_npu", "name": "torch_to_npu"}

    trace = load(
        tmp_path,
        box("cpu_op", "aclnnMm", 10, 20),
        {"ph": "X", "name": "AscendCL@aclrtSynchronizeStream", "pid": 102, "tid": 1, "ts": 40, "dur": 9, "args": {}},
        task("aclnnMm_MatMul", "AI_CORE", 32, 5), task("wait", "EVENT_WAIT", 37, 1), task("copy", "SDMA", 38, 1),
        npu("s", 7, 1, 1, 10), npu("f", 7, 800, 3, 32),
    )  # fmt: skip
    query = """SELECT s.name, s.kind, s.stream, up.name, s.parent_rule FROM spans s
               LEFT JOIN spans up ON up.span_id = s.parent_id WHERE s.level >= 60 ORDER BY s.start_ns"""
    assert told(trace, query) == [
        ("aclnnMm_MatMul", "kernel", 3, "aclnnMm", "external"), ("copy", "copy", 3, None, None),
        ("AscendCL@aclrtSynchronizeStream", "sync", None, "window", "containment"),
    ]  # fmt: skip
    assert "1 of 2 kernels and copies without a launch were matched" in " ".join(map(str, trace.run["notes"]))


def test_operators_without_a_category_are_those_of_the_event_list(tmp_path: Path) -> None:
    from torch.autograd.profiler import profile

    with profile() as profiler:
        torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    path = tmp_path / "events.json"
    assert profiler.function_events is not None
    profiler.function_events.export_chrome_trace(str(path))
    names = {event["name"] for event in json.loads(path.read_text(encoding="utf-8")) if event["ph"] == "X"}
    trace = xsp.load(path)
    assert {"aten::linear", "aten::addmm"} <= {name for (name,) in told(trace, "SELECT name FROM spans")} <= {
        *names, "window",
    }  # fmt: skip
    [(count,)] = told(trace, "SELECT count(*) FROM spans WHERE name = 'aten::addmm' AND parent_rule = 'containment'")
    assert count == 1


def test_requests_of_mtia_for_its_dma_are_copies_and_its_events_are_no_work(tmp_path: Path) -> None:
    def event(name: str, start: float, **args: Any) -> dict[str, Any]:
        return box("mtia_ccp_events", name, start, 5, 3774, **{"stream": 108, **args}) | {"pid": 17}

    trace = load(
        tmp_path,
        box("cpu_op", "aten::a", 0, 100),
        event("event_wait", 10), event("event_record", 20), event("pe_exe", 30),
        event("dma_request", 40, direction="DEVICE_TO_HOST", size=1024),
    )  # fmt: skip
    assert told(trace, "SELECT name, kind FROM spans WHERE level = 70 ORDER BY start_ns") == [
        ("pe_exe", "kernel"), ("dma_request", "copy"),
    ]  # fmt: skip
    [(attributes,)] = told(trace, "SELECT attributes FROM spans WHERE kind = 'copy'")
    assert json.loads(attributes) == {"bytes": 1024, "copy": "DtoH"}


ASCEND = Path(__file__).resolve().parents[3] / "shared/reports/traces/ascend_trace_view.json.gz"


@pytest.mark.skipif(not ASCEND.exists(), reason="no such trace lies in ../shared/reports/traces")
def test_device_rows_of_a_real_trace_of_ascend_are_those_of_a_plain_reading() -> None:
    tasks = [event for event in json.loads(gzip.decompress(ASCEND.read_bytes())) if event.get("pid") == 800
             and event["ph"] == "X"]  # fmt: skip
    rows = told(xsp.load(ASCEND), "SELECT count(*), sum(dur_ns), count(parent_id) FROM spans WHERE device IS NOT NULL")
    [(count, dur_ns, linked)] = rows
    assert (count, dur_ns) == (276, pytest.approx(1000 * sum(task["dur"] for task in tasks), rel=1e-4))
    assert linked >= 272


GEMM = Path(__file__).resolve().parents[3] / "shared/reports/traces/tracelens_gemm_01_external_id_only.json.gz"


@pytest.mark.skipif(not GEMM.exists(), reason="no such trace lies in ../shared/reports/traces")
@pytest.mark.parametrize("has_flows", [True, False])
def test_all_kernels_of_a_real_trace_without_correlation_ids_find_their_operators(
    tmp_path: Path, has_flows: bool
) -> None:
    events = json.loads(gzip.decompress(GEMM.read_bytes()))["traceEvents"]
    trace = load(tmp_path, *(event for event in events if has_flows or event.get("cat") != "ac2g"))
    query = """SELECT up.name, count(*) FROM spans s JOIN spans up ON up.span_id = s.parent_id
               WHERE s.level = 70 GROUP BY ALL"""
    assert told(trace, query) == [("aten::mm", 20)]


def test_nanoseconds_survive(tmp_path: Path) -> None:
    absolute = json.dumps({"schemaVersion": 1, "traceEvents": [box("cpu_op", "aten::a", 17, 2.003)]})
    (tmp_path / "absolute.json").write_text(absolute.replace('"ts": 17', '"ts": 1704067200123456.789'))
    query = "SELECT start_ns, dur_ns FROM spans WHERE level = 40"
    assert told(xsp.load(tmp_path / "absolute.json"), query) == [(1704067200123456789, 2003)]
    based = load(tmp_path, box("cpu_op", "aten::a", 3603029046213.755, 22.534), baseTimeNanoseconds=1775078550000000000)
    assert told(based, query) == [(1775078550000000000 + 3603029046213755, 22534)]


def test_without_modules_the_users_blocks_are_the_layers(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        box("user_annotation", "encoder", 0, 100),
        box("cpu_op", "aten::mm", 10, 40),
        box("cuda_runtime", "cudaGraphLaunch", 20, 5, correlation=9),
        work("kernel", "a", 60, 20, correlation=9),
    )
    query = "SELECT s.grade, layer.name FROM spans s JOIN spans layer ON layer.span_id = s.layer_id WHERE s.level = 70"
    assert told(trace, query) == [("inferred", "encoder")]
    assert any("1 named blocks count as layers" in note["text"] for note in trace.run["notes"])
    assert told(trace, "SELECT name, level FROM spans WHERE kind = 'step'") == [("window", 20)]


def test_a_backward_operator_belongs_to_the_layer_of_its_forward_operator(tmp_path: Path) -> None:
    trace = load(
        tmp_path,
        box("python_function", "nn.Module: Linear_0", 0, 50),
        box("cpu_op", "aten::linear", 10, 20, **{"Sequence number": 5, "Fwd thread id": 0}),
        box("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 70, 20, 2,
            **{"Sequence number": 5, "Fwd thread id": 1}),
        box("cpu_op", "AddmmBackward0", 72, 10, 2, **{"Sequence number": 5, "Fwd thread id": 1}),
    )  # fmt: skip
    query = """SELECT s.parent_rule, up.name, s.phase FROM spans s JOIN spans up ON up.span_id = s.parent_id
               WHERE s.name LIKE '%Addmm%' ORDER BY s.start_ns"""
    frame = "autograd::engine::evaluate_function: AddmmBackward0"
    assert told(trace, query) == [("sequence", "Linear_0", "backward"), ("containment", frame, "backward")]


def test_an_operator_without_a_name_and_types_that_are_no_list_are_no_error(tmp_path: Path) -> None:
    nameless = box("cpu_op", "", 0, 5, **{"Input Dims": [[2, 2]], "Input type": ["float"]})
    del nameless["name"]
    talk = box("cpu_op", "nccl:all_reduce", 10, 5, **{"Input Dims": "[[2", "Input type": '["float" x'})
    trace = load(tmp_path, nameless, talk)
    assert told(trace, "SELECT name, dtype FROM spans WHERE kind <> 'step' ORDER BY start_ns") == [
        (None, "float"), ("nccl:all_reduce", None),
    ]  # fmt: skip


def test_types_and_shapes_of_inputs_are_found_in_every_spelling(tmp_path: Path) -> None:
    told_types = [
        ["float", "int"],
        ["", "Scalar", "double"],
        ["TensorList", "c10::Half"],
        [],
        [["float"], "int"],
        "[long]",
    ]
    operators = [
        box("cpu_op", f"aten::op{place}", 10 * place, 5, **{name: types, "Input Dims": [[place]]})
        for place, types in enumerate(told_types)
        for name in [("Input type", "Input types")[place % 2]]
    ]
    trace = load(tmp_path, *operators)
    found = told(trace, "SELECT dtype, input_shapes FROM spans WHERE kind = 'op' ORDER BY start_ns")
    first = ["float", "double", "c10::Half", None, '["float"]', "long"]
    assert [row[1] for row in found] == [f"[[{place}]]" for place in range(len(first))]
    assert [row[0] for row in found] == first


def test_what_is_not_kept_is_counted(tmp_path: Path) -> None:
    kernel = work("kernel", "k", 5, 1, correlation=3)
    trace = load(
        tmp_path, box("cpu_op", "aten::a", 0, 5), box("cpu_op", "aten::b", -3, 5), box("cpu_op", "aten::c", 1, None),
        box("python_function", "run.py(3): main", 0, 9), box("unheard_of", "x", 0, 1), kernel, kernel,
    )  # fmt: skip
    assert trace.run["imported"]["sources"][0]["skipped"] == {
        "frames of Python that are no module": 1,
        "category 'unheard_of'": 1,
        "without a time, or with a negative one (the first is event 1)": 2,
        "device work that was recorded twice": 1,
    }


def test_names_stay_behind_unless_they_are_asked_for(tmp_path: Path) -> None:
    source = file(tmp_path / "t.json", box("cpu_op", "aten::a", 0, 5), traceName="/home/ann/t.json", host_name="box7")
    sources.import_atomically(tmp_path / "without", [str(source)])
    sources.import_atomically(tmp_path / "with", [str(source)], keep_names=True)
    assert "ann" not in (tmp_path / "without" / "run.json").read_text()
    assert xsp.load(tmp_path / "with").run["names"] == {"traceName": "/home/ann/t.json", "host_name": "box7"}


@pytest.mark.slow
def test_files_of_ranks_become_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        file(
            tmp_path / f"r{rank}.json",
            box("cpu_op", "aten::a", rank, 5),
            distributedInfo={"rank": rank, "world_size": 4},
        )
    files = sorted(tmp_path.iterdir())
    for trace in (xsp.load(tmp_path), xsp.load(files)):
        assert told(trace, "SELECT rank, start_ns FROM spans WHERE level = 40 ORDER BY rank") == [(0, 0), (1, 1000)]
        assert [rank["rank"] for rank in trace.run["ranks"]] == [0, 1]
    for typed in ([str(tmp_path)], list(map(str, files))):
        capsys.readouterr()
        assert main(["analyze", *typed]) == 0
        assert "2 ranks" in capsys.readouterr().out
        assert main(["analyze", *typed, "ops", "--format", "csv"]) == 0
        assert "aten::a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"[]", "holds no operator, call or kernel"),
        (b'{"schemaVersion": 1, "traceEvents": []}', "holds no operator, call or kernel"),
        (b'{"schemaVersion": 1, "traceEvents": [{"ph": "X" "ts": 1}]}', "Malformed JSON"),
        (b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ts": 17', "is truncated"),
        (b'{"schemaVersion": 1, "deviceProperties": []}', "holds no array `traceEvents`"),
        (gzip.compress(b'{"schemaVersion": 1, "traceEvents": []}' * 999)[:60], "compressed file is truncated"),
    ],
)
def test_what_is_broken_is_one_error_with_the_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"broken\.json") as caught:
        sources.import_atomically(tmp_path / "run", [str(path)])
    assert says in str(caught.value) or "no importer recognises it" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_all_reduce_of_symmetric_memory_has_bytes(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[4, 1024], [], []], "Input type": ["c10::BFloat16", "", ""], "External id": 1}
    trace = load(
        tmp_path,
        box("cpu_op", "symm_mem::one_shot_all_reduce", 0, 50, **shapes),
        box("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
        work("kernel", "one_shot_all_reduce_kernel<c10::BFloat16, 16>", 40, 20, correlation=1),
    )
    rows = xsp.analyses.ANALYSES["communication"](trace).select("collective, bytes").fetchall()
    assert rows == [("all_reduce", 4 * 1024 * 2)]


def test_a_kernel_without_a_known_name_that_only_products_launch_is_a_product(tmp_path: Path) -> None:
    def launched(number: int, operator: str, kernel: str) -> list[dict[str, Any]]:
        return [
            box("cpu_op", operator, 100 * number, 50),
            box("cuda_runtime", "cudaLaunchKernel", 100 * number + 10, 5, correlation=number),
            work("kernel", kernel, 100 * number + 40, 20, correlation=number),
        ]

    trace = load(
        tmp_path, *launched(1, "aten::mm", "fc_kernel"), *launched(2, "aten::mm", "both_kernel"),
        *launched(3, "aten::topk", "both_kernel"), *launched(4, "aten::topk", "topk_kernel"),
        *launched(5, "sage_fwd_1", "sage_fwd"),
    )  # fmt: skip
    rows = xsp.analyses.ANALYSES["kernel-classes"](trace).select("class, kernels").fetchall()
    assert dict(rows) == {"gemm": 1, "other": 3, "attention": 1}


def test_a_rate_above_the_roof_says_why_or_is_doubtful(tmp_path: Path) -> None:
    shapes = [[4096, 4096], [4096, 4096]]  # 137 GFLOP
    product = {"Input Dims": shapes, "Input type": ["c10::BFloat16"] * 2}
    small = {"Input Dims": [[1024, 1024]] * 2 + [[]], "Input type": ["float", "float", "Scalar"]}
    events = []
    for number, (operator, arguments, kernel, duration) in enumerate(
        [
            ("aten::mm", product, "gemm_bf16", 20.0),
            ("aten::addmm", {**product, "Input Dims": [[4096], *shapes]}, "gemm_sparse_bf16", 20.0),
            ("aten::add", small, "vectorized_elementwise_kernel", 0.5),
            ("aten::bmm", {**product, "Input Dims": [[1, *shapes[0]]] * 2}, "gemm_slow_bf16", 2000.0),
        ],
        1,
    ):
        events += [
            box("cpu_op", operator, 3000 * number, 50, **arguments),
            box("cuda_runtime", "cudaLaunchKernel", 3000 * number + 10, 5, correlation=number),
            work("kernel", kernel, 3000 * number + 40, duration, correlation=number),
        ]
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "computeMajor": 9, "computeMinor": 0}
    trace = load(tmp_path, *events, deviceProperties=[device])
    rows = dict(xsp.analyses.operators(trace).select("name, above_roof").fetchall())
    assert rows["aten::mm"] == "doubtful: more than the device can do"
    assert rows["aten::addmm"] == "sparsity: fewer products than are counted"
    assert rows["aten::add"] == "from caches: memory was read less than the shapes say"
    assert rows["aten::bmm"] is None


def test_operators_whose_shapes_do_not_tell_how_much_they_multiply_are_named(tmp_path: Path) -> None:
    from xsp.health import health

    known = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    unknown = {"Input Dims": [[64, 64], [64, 8], [], []], "Input type": ["float", "float", "", ""]}
    events = []
    for number, (name, arguments) in enumerate([("aten::mm", known), ("vllm::moe_forward", unknown)], 1):
        events += [
            box("cpu_op", name, 100 * number, 50, **arguments),
            box("cuda_runtime", "cudaLaunchKernel", 100 * number + 10, 5, correlation=number),
            work("kernel", f"gemm_{number}", 100 * number + 40, 20, correlation=number),
        ]
    [text] = [each.text for each in health(load(tmp_path, *events)) if each.subject == "operations"]
    assert "vllm::moe_forward (50 %) of device time" in text
