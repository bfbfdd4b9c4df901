"""Any input leads to spans or to one clear error: mutations of small valid files of every importer."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from fuzzing import MUTATIONS, examples, is_read, mutated, places
from hypothesis import given
from hypothesis import strategies as st
from small_traces import CHROME, EXECUTION, KINETO, STEP, nsys

import xsp
from xsp import table
from xsp.analyses import ANALYSES
from xsp.correlate import parents
from xsp.correlate.arrays import Spans
from xsp.errors import AnalysisError, PluginError, TraceError
from xsp.importers.chakra import Chakra
from xsp.importers.kineto import Kineto
from xsp.schema import MAX_NESTING

JSON = {"kineto": KINETO, "chrome": CHROME}


def is_analysed(path: Path) -> None:
    """Load a file and ask it everything: all analyses answer or refuse; or an error of xsp's."""
    with contextlib.suppress(TraceError, PluginError):
        trace = xsp.load(path)
        for each in ANALYSES.values():
            with contextlib.suppress(AnalysisError):
                each(trace).fetchall()


# --- documents --------------------------------------------------------------------------------------------

ODD = st.sampled_from(
    [None, True, -1, 0, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 1e308, -1e308, 0.5, float("nan"), float("inf"), "", "0",
     "x" * 5000, "\ud800", "\0", "a'b\"c", "2024-01-01", [], {}, [[]], {"a": [1]}, [None, 3, "x"], [[2**62, 2**62]] * 2,
     "aten::mm", "ProfilerStep#2", "X", "B", "E", "b", "e"]
)  # fmt: skip


def change(data: st.DataObject, document: Any) -> Any:
    """Change some values of a document: replace, remove, double."""
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        *above, key = data.draw(st.sampled_from(list(places(changed))))
        inside = changed
        for step in above:
            inside = inside[step]
        how = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "double"]))
        if how == "replace":
            inside[key] = copy.deepcopy(data.draw(ODD))  # it may be changed in the next round
        elif how == "remove":
            del inside[key]
        elif isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        if not any(places(changed)):
            break
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
@examples(8)
@given(data=st.data())
def test_no_value_leads_to_another_error(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / "fuzzed.json"
    path.write_text(json.dumps(change(data, JSON[name])), encoding="utf-8")
    is_read(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
@examples(1)
@given(data=st.data())
def test_no_value_stops_an_analysis(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / "fuzzed.json"
    path.write_text(json.dumps(change(data, JSON[name])), encoding="utf-8")
    is_analysed(path)


@pytest.mark.slow
@examples(6)
@given(data=st.data())
def test_no_value_of_an_execution_trace_leads_to_another_error(tmp_path: Path, data: st.DataObject) -> None:
    trace, execution = tmp_path / "kineto.json", tmp_path / "et.json"
    trace.write_text(json.dumps(KINETO), encoding="utf-8")
    execution.write_text(json.dumps(change(data, EXECUTION)), encoding="utf-8")
    con = table.connect()
    con.execute("SET threads = 1")
    losses = Kineto().fill(con, str(trace)).losses
    with contextlib.suppress(TraceError):
        Chakra().enrich(con, str(execution), losses)


LARGE = 2**63 - 1


@pytest.mark.parametrize(
    ("top", "start", "duration"),
    [({"rank": LARGE}, 8.9e15, 8.9e15), ({"baseTimeNanoseconds": LARGE}, 2e15, 2e15),
     ({"baseTimeNanoseconds": -LARGE}, 4e15, 1), ({"rank": -1}, -9e15, 1)],
)  # fmt: skip
def test_numbers_beyond_the_table_are_counted(tmp_path: Path, top: Any, start: float, duration: float) -> None:
    far = {"ph": "X", "ts": start, "dur": duration, "pid": LARGE, "tid": LARGE, "name": "far"}
    args = {"device": LARGE, "stream": LARGE, "correlation": LARGE, "Input Dims": [[2**62] * 9000] * 2}
    far = [{**far, "cat": each, "args": args} for each in ("cpu_op", "cuda_runtime", "kernel", "ac2g", "fwdbwd")]
    content = {**top, **KINETO, "distributedInfo": top, "traceEvents": [*KINETO["traceEvents"], *far]}
    path = tmp_path / "far.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    trace = xsp.load(path)
    ((earliest, latest),) = trace.sql("SELECT min(start_ns), max(start_ns + dur_ns) FROM spans").fetchall()
    assert 0 <= earliest <= latest < 2**63
    assert trace.run.get("rank", 0) == 0


def test_a_device_of_any_number_costs_no_memory(tmp_path: Path) -> None:
    owner = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "/device:GPU:2000000000"}}
    events = [owner, {"ph": "X", "name": "k", "pid": 7, "tid": 1, "ts": 1, "dur": 1}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert xsp.load(path).sql("SELECT device, process FROM spans WHERE name = 'k'").fetchall() == [(None, 7)]


def test_as_many_kinds_of_losses_as_there_are_events_are_told_in_few(tmp_path: Path) -> None:
    odd = [{"ph": "X", "cat": f"{'c' * 500}{i}", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1} for i in range(9)]
    odd += [{**odd[0], "cat": f"c{i}"} for i in range(5000)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**KINETO, "traceEvents": [*KINETO["traceEvents"], *odd]}), encoding="utf-8")
    skipped = xsp.load(path).run["imported"]["sources"][0]["skipped"]
    assert len(skipped) < 200
    assert max(map(len, skipped)) < 100
    assert sum(skipped.values()) >= 5009


@pytest.mark.parametrize(
    "parents", [[2, 1, 3, 0, 1], list(range(900))], ids=["parents in a circle", "deeper than any program"]
)
def test_any_parents_come_to_an_end(tmp_path: Path, parents: list[int]) -> None:
    made = [
        {"traceId": "1" * 32, "spanId": f"{number:016x}", "parentSpanId": f"{parent:016x}" if parent else "",
         "name": "n", "startTimeUnixNano": 10**18 + number, "endTimeUnixNano": 2 * 10**18 - number}
        for number, parent in enumerate(parents, 1)
    ]  # fmt: skip
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}), encoding="utf-8")
    assert len(xsp.load(path).spans.fetchall()) == len(parents)


# --- bytes ------------------------------------------------------------------------------------------------

PACKED = {
    "kineto": json.dumps(KINETO).encode(),
    "kineto, gzip": gzip.compress(json.dumps(KINETO).encode(), mtime=0),
    "chrome": json.dumps(CHROME["traceEvents"]).encode(),
    "execution": json.dumps(EXECUTION).encode(),
}


@pytest.mark.parametrize("name", PACKED)
@examples(6)
@given(mutations=MUTATIONS)
def test_no_bytes_lead_to_another_error(tmp_path: Path, name: str, mutations: list[tuple[float, str, bytes]]) -> None:
    path = tmp_path / "fuzzed"
    path.write_bytes(mutated(PACKED[name], mutations))
    is_read(path)


# --- SQLite -----------------------------------------------------------------------------------------------

CELL = st.sampled_from([None, -1, 0, 2**63 - 1, -(2**63), 1e308, 0.5, "", "x" * 5000, "step 3", b"\xff\x00", "a'b\"c"])


def change_cells(data: st.DataObject, path: str) -> None:
    """Change some cells of a database, or lose a table or a column."""
    with closing(sqlite3.connect(path)) as db:
        for _ in range(data.draw(st.integers(1, 4))):
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
            name = data.draw(st.sampled_from(tables))
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
            column = data.draw(st.sampled_from(columns))
            how = data.draw(st.sampled_from(["cell", "cell", "cell", "double", "column", "table"]))
            if how == "cell":
                with contextlib.suppress(sqlite3.IntegrityError):  # a key that takes numbers only
                    db.execute(f"UPDATE {name} SET [{column}] = ? WHERE rowid % 2", [data.draw(CELL)])
            elif how == "double" and name != "StringIds":
                db.execute(f"INSERT INTO {name} SELECT * FROM {name}")
            elif how == "column" and len(columns) > 1:
                db.execute(f"ALTER TABLE {name} RENAME COLUMN [{column}] TO [was_{column}]")
            elif how == "table" and len(tables) > 1:
                db.execute(f"DROP TABLE {name}")
        db.commit()


@pytest.mark.slow
@examples(6)
@given(data=st.data())
def test_no_cell_leads_to_another_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "fuzzed.sqlite"
    path.unlink(missing_ok=True)
    change_cells(data, nsys(path, STEP))
    is_read(path)


@pytest.mark.slow
@examples(1)
@given(data=st.data())
def test_no_cell_stops_an_analysis(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "fuzzed.sqlite"
    path.unlink(missing_ok=True)
    change_cells(data, nsys(path, STEP))
    is_analysed(path)


@examples(6)
@given(mutations=MUTATIONS)
def test_no_damage_to_a_database_leads_to_another_error(
    tmp_path: Path, mutations: list[tuple[float, str, bytes]]
) -> None:
    path = tmp_path / "fuzzed.sqlite"
    path.unlink(missing_ok=True)
    nsys(path, STEP)
    path.write_bytes(mutated(path.read_bytes(), mutations))
    is_read(path)


# --- size -------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, xsp
from xsp.errors import TraceError
xsp.load(sys.argv[1]).spans  # what is imported and warmed counts in both
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    xsp.load(sys.argv[2])
except TraceError as error:
    print(error, file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak(small: Path, large: Path) -> tuple[int, str]:
    """Return the memory in MiB that loading a large file takes beyond loading a small one, and what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(small), str(large)], capture_output=True, text=True, check=True
    )
    return int(done.stdout), done.stderr


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(KINETO), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_huge_string_is_refused_in_bounded_memory(tmp_path: Path, small: Path) -> None:
    large = tmp_path / "large.json.gz"
    with gzip.open(large, "wb", compresslevel=1) as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'"}]}')
    taken, said = peak(small, large)
    assert "large.json.gz" in said
    assert taken < 200


@pytest.mark.slow
def test_an_archive_bomb_takes_no_memory(tmp_path: Path, small: Path) -> None:
    large = tmp_path / "large.json.gz"
    with gzip.open(large, "wb", compresslevel=1) as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": [')
        for _ in range(300):
            file.write(b" " * (1 << 20))
        file.write(b"]}")
    taken, said = peak(small, large)
    assert "large.json.gz" in said
    assert taken < 200


def test_absurd_nesting_ends_where_no_program_goes() -> None:
    count = 10_000
    place, zero = np.arange(count), np.zeros(count, np.int64)
    nested = Spans(start=place, end=3 * count - place, level=zero + 10, max_outer_level=zero + 10, thread_index=zero,
                   number=place, nesting=zero, identity=zero, phase=zero, process=zero, figure_bits=zero)  # fmt: skip
    found = parents.find(nested, 0).parent
    assert parents.depths(found).max() == MAX_NESTING
    assert found[:MAX_NESTING].tolist() == list(range(-1, MAX_NESTING - 1))
    assert set(found[MAX_NESTING:].tolist()) == {MAX_NESTING - 1}
