"""Chrome's JSON format of programs other than PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from xsp import table
from xsp.errors import TraceError
from xsp.importers.chrome import Chrome
from xsp.importers.contract import SourceInfo


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return table.connect()


def read(con: duckdb.DuckDBPyConnection, folder: Path, content: Any) -> SourceInfo:
    path = folder / "a.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    assert Chrome().recognises(path.read_bytes(), str(path))
    return Chrome().fill(con, str(path))


def event(phase: str, at: float, name: str = "a", **more: Any) -> dict[str, Any]:
    return {"ph": phase, "ts": at, "name": name, "pid": 1, "tid": 2, **more}


def spans(con: duckdb.DuckDBPyConnection) -> list[Any]:
    return con.execute("SELECT name, start_ns, dur_ns, status FROM raw_spans ORDER BY start_ns, dur_ns DESC").fetchall()


def test_complete_events_are_spans_of_the_application(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path, {"traceEvents": [event("X", 1.5, dur=2.25)], "displayTimeUnit": "ms"})
    assert con.execute("SELECT name, level, kind, process, thread, start_ns, dur_ns FROM raw_spans").fetchall() == [
        ("a", 10, "user", 1, 2, 1500, 2250)
    ]


def test_begins_find_their_ends_on_their_thread(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    other = {"tid": 3}
    read(
        con,
        tmp_path,
        [
            event("B", 1),
            event("B", 2, "b"),
            event("B", 3, "c", **other),
            event("E", 4),
            event("E", 5, **other),
            event("E", 9),
        ],
    )
    assert spans(con) == [("a", 1000, 8000, "ok"), ("b", 2000, 2000, "ok"), ("c", 3000, 2000, "ok")]


def test_what_does_not_match_is_counted(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    info = read(
        con,
        tmp_path,
        [event("E", 1), event("B", 2), event("E", 3), event("E", 4), event("B", 5, "open"), event("X", 6, "x", dur=4)],
    )
    assert spans(con) == [("a", 2000, 1000, "ok"), ("open", 5000, 5000, "unclosed"), ("x", 6000, 4000, "ok")]
    assert info.losses.skipped == {"ends without a begin": 2}
    assert info.losses.changed == {"spans without an end, taken to last until the last event": 1}


def test_asynchronous_spans_lie_on_no_thread(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    info = read(
        con,
        tmp_path,
        [event("b", 1, id="7"), event("e", 5, id="7", tid=9), event("b", 2, id="8"), event("n", 3, id="8")],
    )
    assert con.execute("SELECT name, thread, dur_ns FROM raw_spans").fetchall() == [("a", None, 4000)]
    assert sum(info.losses.skipped.values()) == 2


def test_an_end_without_its_begin_moves_no_other_asynchronous_span(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    rows = (("e", 1), ("b", 2), ("e", 5), ("b", 8), ("e", 9))
    info = read(con, tmp_path, [event(phase, at, id="7") for phase, at in rows])
    assert spans(con) == [("a", 2000, 3000, "ok"), ("a", 8000, 1000, "ok")]
    assert info.losses.skipped == {"asynchronous spans without an end, a begin or an id": 1}


def test_asynchronous_spans_of_one_id_nest(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path, [event(phase, at, id="7") for phase, at in (("b", 1), ("b", 2), ("e", 3), ("e", 9))])
    assert spans(con) == [("a", 1000, 8000, "ok"), ("a", 2000, 1000, "ok")]


def test_counters_instants_and_times_that_are_none_are_counted(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [
        event("C", 1),
        event("i", 1),
        event("X", -1, dur=1),
        event("X", 1, dur=-1),
        event("X", 1),
        event("X", 1e300, dur=1),
        event("?", 1),
    ]
    info = read(con, tmp_path, rows)
    assert spans(con) == []
    assert sum(info.losses.skipped.values()) == 7
    assert "without a time, or with a negative one (the first is event 2)" in info.losses.skipped


def test_an_array_that_is_not_closed_is_read(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    info = read(con, tmp_path, "[" + json.dumps(event("X", 1, dur=1)) + ",\n")
    assert len(spans(con)) == 1
    assert any("not closed" in note for note in info.losses.notes)


JAX = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:1"}},
    {"ph": "M", "pid": 1, "tid": 5, "name": "thread_name", "args": {"name": "Stream #14(Compute)"}},
    {"ph": "M", "pid": 1, "tid": 6, "name": "thread_name", "args": {"name": "XLA Ops"}},
    {
        "ph": "X",
        "pid": 1,
        "tid": 5,
        "ts": 10.125,
        "dur": 1.5,
        "name": "fusion",
        "args": {
            "correlation_id": "12",
            "tf_op": "jit(f)/dot",
            "kernel_details": "regs:32 static_shared:0 dynamic_shared:16 grid:4,1,1 block:256,1,1 occ_pct:50",
        },
    },
    {
        "ph": "X",
        "pid": 1,
        "tid": 5,
        "ts": 20,
        "dur": 1,
        "name": "MemcpyH2D",
        "args": {"correlation_id": 13, "memcpy_details": "kind_src:pageable kind_dst:device size:64 dest:0 async:1"},
    },
    {"ph": "X", "pid": 1, "tid": 6, "ts": 10, "dur": 2, "name": "fusion"},
    {"ph": "X", "pid": 7, "tid": 9, "ts": 1, "dur": 50, "name": "train", "args": {"step_num": "3"}},
    {"ph": "X", "pid": 7, "tid": 9, "ts": 5, "dur": 1, "name": "cuLaunchKernel", "args": {"correlation_id": "12"}},
]


def test_devices_launches_and_steps_of_jax_are_told(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    info = read(con, tmp_path, {"traceEvents": JAX})
    rows = con.execute(
        "SELECT kind, name, device, stream, thread, correlation_id FROM raw_spans ORDER BY number"
    ).fetchall()
    assert rows == [
        ("step", "train", None, None, 9, None),
        ("launch", "cuLaunchKernel", None, None, 9, 12),
        ("kernel", "fusion", 1, 14, None, 12),
        ("copy", "MemcpyH2D", 1, 14, None, 13),
    ]
    assert info.losses.skipped == {"projections of host spans onto the device": 1}


def test_launch_shapes_and_sizes_of_jax_are_read(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path, {"traceEvents": JAX})
    rows = con.execute(
        "SELECT attributes, occupancy FROM raw_spans WHERE device IS NOT NULL ORDER BY number"
    ).fetchall()
    assert [json.loads(row[0]) for row in rows] == [
        {"grid": [4, 1, 1], "block": [256, 1, 1], "registers": 32, "shared_bytes": 16, "sources": ["jit(f)/dot"]},
        {"bytes": 64, "copy": "HtoD"},
    ]
    assert [row[1] for row in rows] == [0.5, None]


def test_arguments_and_directories_stay_behind(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    rows = [event("X", 1, "main (/data/ann/secret/run.py:12)", dur=1, args={"token": "hunter2"})]
    info = read(con, tmp_path, {"traceEvents": rows, "viztracer_metadata": {"user": "ann"}})
    everything = str(con.execute("SELECT * FROM raw_spans").fetchall()) + str(info)
    assert [name for name, *_ in spans(con)] == ["main (run.py:12)"]
    assert "ann" not in everything
    assert "hunter2" not in everything


def test_names_in_place_of_numbers_tell_threads_apart(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    read(con, tmp_path, [event("X", 1, dur=1, pid="main", tid="one"), event("X", 1, dur=1, pid="main", tid="two")])
    assert con.execute("SELECT count(DISTINCT process), count(DISTINCT thread) FROM raw_spans").fetchall() == [(1, 2)]


def test_a_trace_of_pytorch_that_begins_unlike_one_is_read_as_one(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    rows = [event("X", 1, "cudaLaunchKernel", dur=1, cat="cuda_runtime", args={"correlation": 3})]
    assert read(con, tmp_path, {"traceEvents": rows}).losses.importer == "kineto"
    assert con.execute("SELECT kind, correlation_id FROM raw_spans").fetchall() == [("launch", 3)]


@pytest.mark.parametrize(
    "head", [b'{"schemaVersion": 1, "traceEvents": [', b'{"resourceSpans": []}', b'{"a": 1}', b"SQLite format 3\0", b""]
)
def test_what_others_read_is_left_to_them(head: bytes) -> None:
    assert not Chrome().recognises(head, "a.json")


@pytest.mark.parametrize(
    "content", ['{"traceEvents": [{"ph": "X", oops}]}', '{"traceEvents": [{"ph": "X"', '{"traceEvents": 7}']
)
def test_broken_json_names_the_file(con: duckdb.DuckDBPyConnection, tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match=r"a\.json"):
        read(con, tmp_path, content)
