"""Exports of Nsight Systems: what the tables become, in real files and in small ones."""

from __future__ import annotations

import errno
import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest
from small_traces import KERNELS, NVTX, RUNTIME, SESSION_NS, START, STEP, call, kernel, nsys, nvtx, packed

from xsp import load, table
from xsp.analyses import ANALYSES
from xsp.errors import TraceError
from xsp.importers import nsys_tables
from xsp.importers.contract import CPU_SAMPLES, CUDA_BACKTRACES, OS_BACKTRACES, SourceInfo
from xsp.importers.nsys import Nsys
from xsp.ingest.sources import import_atomically

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "nsys_sqlite"
REAL = sorted(SHARED.glob("*.sqlite")) or [pytest.param(None, marks=pytest.mark.skip("../shared/traces is not there"))]


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return table.connect()


def read(con: duckdb.DuckDBPyConnection, path: Path | str, tables: dict[str, Any] | None = None) -> SourceInfo:
    return Nsys().fill(con, nsys(Path(path), tables) if tables is not None else str(path))


def ranges(con: duckdb.DuckDBPyConnection, path: Path, *rows: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Import ranges and return their levels, kinds and names."""
    read(con, path, {NVTX: rows})
    return set(con.execute("SELECT level, kind, name FROM raw_spans").fetchall())


@pytest.mark.parametrize("path", REAL, ids=lambda path: getattr(path, "name", "absent"))
def test_real_files_hold_what_sqlite_counts(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    read(con, path)
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as db:
        for name, where in {
            KERNELS: "kind = 'kernel'",
            "CUPTI_ACTIVITY_KIND_MEMCPY": "kind = 'copy' AND name <> 'Memset'",
            "CUPTI_ACTIVITY_KIND_MEMSET": "name = 'Memset'",
            RUNTIME: "level = 60 AND kind <> 'overhead'",
            NVTX: "level IN (40, 50)",
        }.items():
            plain = db.execute(f"SELECT count(*), coalesce(sum(end - start), 0) FROM {name}").fetchone()
            assert con.execute(f"SELECT count(*), sum(dur_ns) FROM raw_spans WHERE {where}").fetchall() == [plain], name
        (launched,) = db.execute(
            f"SELECT count(*) FROM {KERNELS} k JOIN {RUNTIME} r ON k.correlationId = r.correlationId "
            "AND (k.globalPid >> 24) & 16777215 = (r.globalTid >> 24) & 16777215"
        ).fetchone()
    assert con.execute(
        "SELECT count(*) FROM raw_spans k JOIN raw_spans r USING (process, correlation_id) "
        "WHERE k.kind = 'kernel' AND r.device IS NULL AND r.kind = 'launch'"
    ).fetchall() == [(launched,)]


def test_a_step_is_read_with_times_of_the_epoch(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path / "a.sqlite", STEP)
    rows = con.execute(
        "SELECT kind, name, start_ns - ?, dur_ns FROM raw_spans WHERE level < 50 ORDER BY 3", [SESSION_NS]
    )
    assert rows.fetchall() == [
        ("step", "step 0", 100, 280),
        ("user", "conv1", 101, 89),
        ("op", "aten::mm", 105, 80),
        ("user", "fc", 200, 70),
        ("op", "aten::add", 205, 60),
        ("op", "MmBackward0", 295, 65),
    ]


def test_numbers_are_unique_and_kernels_say_how_they_were_launched(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    info = read(con, tmp_path / "a.sqlite", STEP)
    assert con.execute("SELECT count(*) = count(DISTINCT number) FROM raw_spans").fetchall() == [(True,)]
    attributes, name = con.execute("SELECT attributes, name FROM raw_spans WHERE kind = 'kernel' LIMIT 1").fetchall()[0]
    assert name == "void gemm<float>(float*)"
    assert json.loads(attributes) == {
        "grid": [4, 1, 1], "block": [64, 1, 1], "registers": 32, "shared_bytes": 128, "context": 1,
    }  # fmt: skip
    assert info.run["machine"]["device_properties"][1] == {
        "name": "NVIDIA A100", "sms": 108, "memory_bytes": 40 << 30, "compute": "8.0", "warp_size": None,
    }  # fmt: skip


def test_backward_operators_find_the_thread_of_their_forward_operators(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    read(con, tmp_path / "a.sqlite", STEP)
    rows = con.execute("SELECT name, sequence_nr, forward_thread, phase, input_shapes FROM raw_spans WHERE level = 40")
    assert set(rows.fetchall()) == {
        ("aten::mm", 5, None, None, "[[2, 3], [3, 4]]"),
        ("aten::add", 6, None, None, None),
        ("MmBackward0", 5, 1, "backward", None),
    }


def test_overhead_has_no_correlation_of_its_own(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path / "a.sqlite", STEP)
    rows = con.execute("SELECT name, type, correlation_id, thread, attributes FROM raw_spans WHERE kind = 'overhead'")
    assert rows.fetchall() == [("Buffer flush", "Buffer flush (Profiler)", None, 1, '{"by":"profiler"}')]


def test_processes_have_their_own_devices_and_correlation_ids(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(
        con,
        tmp_path / "a.sqlite",
        {
            "TARGET_INFO_CUDA_DEVICE": [
                {"pid": 100, "cudaId": 0, "gpuId": 1, "numMultiprocessors": 2},
                {"pid": 200, "cudaId": 0, "gpuId": 0, "numMultiprocessors": 2},
            ],
            RUNTIME: [call(10, 20, 1), call(10, 20, 1, pid=200)],
            KERNELS: [kernel(30, 40, 1), kernel(30, 40, 1, pid=200)],
        },
    )
    rows = con.execute(
        "SELECT process, device, attributes->>'blocks_per_sm' FROM raw_spans WHERE level = 70 ORDER BY 1"
    )
    assert rows.fetchall() == [(100, 1, "2.0"), (200, 0, "2.0")]


def test_graphs_are_marked_whether_by_node_or_as_a_whole(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    whole = {"start": 50, "end": 90, "deviceId": 0, "streamId": 7, "correlationId": 2, "globalPid": packed(100)}
    info = read(
        con,
        tmp_path / "a.sqlite",
        {
            RUNTIME: [call(10, 20, 1, name=5)],
            KERNELS: [kernel(30, 40, 1, graphNodeId=77)],
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [whole],
        },
    )
    rows = con.execute("SELECT name, replayed, attributes->>'graph' FROM raw_spans WHERE level = 70 ORDER BY 1")
    assert rows.fetchall() == [("CUDA graph", True, "true"), ("void gemm<float>(float*)", True, "true")]
    assert any("--cuda-graph-trace=node" in note for note in info.losses.notes)


def test_waiting_says_for_what_and_asking_is_no_waiting(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    names = {21: "cudaStreamSynchronize_v3020", 22: "cudaEventQuery_v3020", 23: "cuCtxSynchronize", 24: "cudaMalloc"}
    path = nsys(tmp_path / "a.sqlite", {RUNTIME: [call(i, i + 1, i, name=i) for i in names]})
    with closing(sqlite3.connect(path)) as db:
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", names.items())
        db.commit()
    read(con, path)
    assert con.execute("SELECT name, kind, attributes->>'sync' FROM raw_spans ORDER BY number").fetchall() == [
        ("cudaStreamSynchronize", "sync", "stream"),
        ("cudaEventQuery", "call", None),
        ("cuCtxSynchronize", "sync", "context"),
        ("cudaMalloc", "call", None),
    ]


def test_calls_of_libraries_and_collectives_are_library_calls(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    cudnn = {"start": 1, "end": 2, "globalTid": packed(100, 1), "nameId": 7}
    ranged = [
        nvtx(10, 20, "ncclAllReduce", domainId=3),
        nvtx(30, 40, "aFunction", domainId=4),
        nvtx(0, None, "NCCL", domainId=4, eventType=75),
    ]
    read(con, tmp_path / "a.sqlite", {"CUDNN_EVENTS": [cudnn], NVTX: ranged})
    assert con.execute("SELECT level, kind, name, attributes FROM raw_spans ORDER BY start_ns").fetchall() == [
        (50, "call", "cudnnConvolutionForward", None),
        (50, "call", "ncclAllReduce", '{"xsp.collective.name":"all_reduce"}'),
        (50, "call", "aFunction", None),
    ]


@pytest.mark.parametrize(
    "text", ["ProfilerStep#3", "step 12", "iter_3", "batch 5", "train step: 4", "step=7", "x step=1 rank=0"]
)
def test_a_numbered_range_is_a_step(con: duckdb.DuckDBPyConnection, tmp_path: Path, text: str) -> None:
    assert ranges(con, tmp_path / "a.sqlite", nvtx(1, 9, text)) == {(20, "step", text)}


def test_a_bare_word_is_a_step_only_where_it_repeats(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    assert ranges(con, tmp_path / "a.sqlite", nvtx(1, 9, "train_step")) == {(30, "user", "train_step")}
    twice = ranges(con, tmp_path / "b.sqlite", nvtx(1, 9, "train_step"), nvtx(10, 19, "train_step"))
    assert twice == {(20, "step", "train_step")}


def test_the_outermost_steps_count_and_what_is_around_them_is_the_application(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    rows = [
        nvtx(0, 100, "epoch 1"),
        nvtx(1, 40, "step 1"),
        nvtx(2, 30, "batch 7"),
        nvtx(41, 90, "step 2"),
        nvtx(5, 9, "step 9", tid=2),
    ]
    read(con, tmp_path / "a.sqlite", {NVTX: rows, RUNTIME: [call(3, 4, 1)]})
    assert set(con.execute("SELECT level, kind, name FROM raw_spans WHERE level < 60").fetchall()) == {
        (10, "user", "epoch 1"),
        (20, "step", "step 1"),
        (20, "step", "step 2"),
        (30, "user", "batch 7"),
        (30, "user", "step 9"),
    }


def test_named_blocks_are_layers_unless_modules_are_around_them(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [
        nvtx(0, 90, "step 1"),
        nvtx(1, 50, "forward"),
        nvtx(2, 40, "model.layers.0"),
        nvtx(3, 20, "softmax"),
        nvtx(51, 60, "loss"),
    ]
    assert ranges(con, tmp_path / "a.sqlite", *rows) == {
        (20, "step", "step 1"),
        (20, "forward", "forward"),
        (30, "module", "model.layers.0"),
        (40, "user", "softmax"),
        (30, "user", "loss"),
    }


def test_a_dotted_range_around_steps_is_no_module(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [nvtx(0, 100, "train.epoch"), nvtx(1, 40, "step 1"), nvtx(2, 30, "loss"), nvtx(41, 90, "step 2")]
    free = nvtx(0, 95, "cudf.read", eventType=60)
    assert ranges(con, tmp_path / "a.sqlite", *rows, free) == {
        (10, "user", "train.epoch"),
        (10, "user", "cudf.read"),
        (20, "step", "step 1"),
        (20, "step", "step 2"),
        (30, "user", "loss"),
    }


def test_modules_of_hooks_give_their_names(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [
        nvtx(1, 2, "nn.Module: Conv2d_3"),
        nvtx(3, 4, "{'Module': 'model.norm', 'TrainableParams': 4}"),
        nvtx(5, 6, "[pl][module]torch.nn.Linear: net.fc"),
    ]
    assert {name for _, _, name in ranges(con, tmp_path / "a.sqlite", *rows)} == {"Conv2d_3", "model.norm", "net.fc"}


def test_an_operator_is_told_from_a_block_that_emit_nvtx_numbered(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    rows = [nvtx(1, 9, "my block, op_id = 1"), nvtx(2, 4, "aten::detach, op_id = 2"), nvtx(3, 4, "detach, op_id = 3")]
    assert ranges(con, tmp_path / "a.sqlite", *rows) == {
        (30, "user", "my block"),
        (40, "op", "aten::detach"),
        (40, "op", "detach"),
    }


def test_open_ranges_last_to_the_end_and_are_counted(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    info = read(con, tmp_path / "a.sqlite", {NVTX: [nvtx(5, None, "open"), nvtx(6, 50, "closed")]})
    assert con.execute("SELECT dur_ns, status FROM raw_spans WHERE name = 'open'").fetchall() == [(45, "unclosed")]
    assert sum(info.losses.changed.values()) == 1


def test_what_is_missing_or_unusable_is_counted(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [call(1, 2, 1), call(9, 2, 2), {**call(1, 2, 3), "start": None}, {**call(1, 2, 4), "end": "soon"}]
    info = read(con, tmp_path / "a.sqlite", {RUNTIME: rows, "OSRT_API": [{"start": 1, "end": 2}]})
    assert con.execute("SELECT count(*) FROM raw_spans").fetchall() == [(1,)]
    assert info.losses.skipped == {
        f"{RUNTIME}: no time, or an end before the start": 3,
        "rows of OSRT_API": 1,
    }
    assert any("when the recording began" in note for note in info.losses.notes)


def test_few_columns_are_enough(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(
        con,
        tmp_path / "a.sqlite",
        {
            KERNELS: [{"start": 5, "end": 9, "correlationId": 1}],
            RUNTIME: [{"start": 1, "end": 2, "globalTid": packed(7, 8), "correlationId": 1}],
        },
    )
    rows = con.execute("SELECT name, process, device FROM raw_spans ORDER BY number").fetchall()
    assert rows == [("unnamed call", 7, None), ("unnamed kernel", 7, 0)]


def test_nothing_of_the_machine_but_devices_and_versions_comes_along(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    secret = [
        {"name": "PROCESS_0:ENVIRONMENT_VARIABLE_3", "value": "TOKEN=hunter2"},
        {"name": "EXPORT_USER", "value": "hunter2"},
    ]
    tables = {
        **STEP,
        "META_DATA_CAPTURE": secret,
        "META_DATA_EXPORT": secret,
        "PROCESSES": [{"globalPid": packed(100), "pid": 100, "name": "hunter2"}],
    }
    info = read(con, tmp_path / "a.sqlite", tables)
    assert "hunter2" not in json.dumps([info.run, info.losses.report()])
    assert "hunter2" not in str(con.execute("SELECT * FROM raw_spans").fetchall())


def test_what_the_program_printed_stays_in_the_file(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    path = nsys(tmp_path / "a.sqlite", STEP)
    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO StringIds VALUES (99, ?)", ["printed " * 1000])
        db.commit()
    read(con, path)
    assert "printed" not in str(con.execute("SELECT * FROM raw_spans").fetchall())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.nsys-rep", b"anything", "nsys export --type sqlite a.nsys-rep"),
        ("a b.nsys-rep", b"anything", "nsys export --type sqlite 'a b.nsys-rep'"),
        ("a.sqlite", gzip.compress(b"SQLite format 3\0", mtime=0), "decompress it first"),
        ("a.sqlite", b"SQLite format 3\0" + b"\0" * 500, "not readable as SQLite"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(
    con: duckdb.DuckDBPyConnection, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read(con, tmp_path / name)


def test_a_temporary_folder_without_room_is_one_clear_error(
    con: duckdb.DuckDBPyConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def writerows(self, rows: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    path = nsys(tmp_path / "a.sqlite", {RUNTIME: [call(1, 2, 1)], **START})
    monkeypatch.setattr(nsys_tables.csv, "writer", lambda file: Full())
    with pytest.raises(TraceError, match=r"cannot be written \(No space left on device\); set TMPDIR"):
        read(con, Path(path))


def test_tables_with_a_version_in_their_names_are_read(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path / "a.sqlite", STEP)
    plain = con.execute("SELECT name, kind, start_ns FROM raw_spans ORDER BY ALL").fetchall()
    renamed = {f"{name}_V{3 if name == 'NVTX_EVENTS' else 2}": rows for name, rows in STEP.items()}
    read(con, tmp_path / "b.sqlite", {**renamed, "NVTX_EVENTS_V2": [{"start": 1, "end": 2, "eventType": 59}]})
    assert con.execute("SELECT name, kind, start_ns FROM raw_spans ORDER BY ALL").fetchall() == plain != []


def test_an_sqlite_file_of_another_program_is_refused(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as db:
        db.execute("CREATE TABLE shopping (item TEXT)")
    with pytest.raises(TraceError, match="not from Nsight Systems"):
        read(con, tmp_path / "a.sqlite")


def test_damage_in_the_middle_names_the_table(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    path = Path(nsys(tmp_path / "a.sqlite", {RUNTIME: [call(i, i + 1, i) for i in range(20_000)], **START}))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 8192] = b"\xff" * 8192
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.sqlite, table CUPTI_ACTIVITY_KIND_RUNTIME"):
        read(con, path)


def test_recorded_stacks_are_counted_by_what_they_are_of(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    frames = [{"id": 1, "symbol": 1, "module": 1, "stackDepth": depth} for depth in range(3)]
    info = read(con, tmp_path / "a.sqlite", {**STEP, "CUDA_CALLCHAINS": frames, "SAMPLING_CALLCHAINS": frames[:1]})
    assert (info.losses.skipped[CUDA_BACKTRACES], info.losses.skipped[CPU_SAMPLES]) == (3, 1)
    assert OS_BACKTRACES not in info.losses.skipped


def test_a_view_is_no_table_of_nsys_however_many_rows_it_has(tmp_path: Path) -> None:
    path = tmp_path / "endless.sqlite"
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        made.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, correlationId INTEGER)")
        made.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE each(n) AS "
            "(SELECT 1 UNION ALL SELECT n + 1 FROM each) SELECT n AS start, n + 1 AS end, n AS correlationId FROM each"
        )
        made.commit()
    with pytest.raises(TraceError, match="no span was found"):
        load(path)


METRICS = {
    "TARGET_INFO_GPU_METRICS": [
        {"typeId": 0x4E1_01, "metricId": 3, "metricName": "SMs Active [Throughput %]"},
        {"typeId": 0x4E1_01, "metricId": 4, "metricName": "GPC Clock Frequency [MHz]"},
    ],
    "GPU_METRICS": [
        {"timestamp": 110, "typeId": 0x4E1_01, "metricId": 3, "value": 80},
        {"timestamp": 120, "typeId": 0x4E1_01, "metricId": 3, "value": 60},
        {"timestamp": 120, "typeId": 0x4E1_01, "metricId": 4, "value": 1980},
        {"timestamp": -5, "typeId": 0x4E1_01, "metricId": 4, "value": 1980},
        {"timestamp": 130, "typeId": 0x4E1_01, "metricId": 9, "value": 1},
    ],
}


def test_gpu_metrics_are_samples_beside_the_spans(tmp_path: Path) -> None:
    trace = load(nsys(tmp_path / "a.sqlite", STEP | METRICS))
    samples = trace.samples.fetchall()
    assert samples == [
        (SESSION_NS + 110, 0, 1, "SMs Active", "%", 80.0),
        (SESSION_NS + 120, 0, 1, "GPC Clock Frequency", "MHz", 1980.0),
        (SESSION_NS + 120, 0, 1, "SMs Active", "%", 60.0),
    ]
    assert [row[2:8] for row in ANALYSES["samples"](trace).fetchall()] == [
        ("GPC Clock Frequency", "MHz", 1, 1980.0, 1980.0, 1980.0), ("SMs Active", "%", 2, 60.0, 70.0, 79.0),
    ]  # fmt: skip
    notes = " ".join(note["text"] for note in trace.run["notes"])
    assert "2 spans were left out: values of GPU metrics without a name, a number or a time" in notes
    assert "rows of GPU_METRICS" not in notes
    import_atomically(tmp_path / "run", [str(tmp_path / "a.sqlite")])
    assert load(tmp_path / "run").samples.fetchall() == samples
