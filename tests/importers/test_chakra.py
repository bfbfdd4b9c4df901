"""Execution traces of PyTorch beside the traces that they were recorded with."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import duckdb
import pytest

from xsp import table
from xsp.errors import TraceError
from xsp.importers.chakra import Chakra
from xsp.importers.contract import Losses
from xsp.importers.kineto import Kineto

PAIR = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "et_pair"


@pytest.fixture
def con() -> duckdb.DuckDBPyConnection:
    return table.connect()


def op(name: str, at: int, identity: int, tid: int = 1, **args: Any) -> dict[str, Any]:
    known = {"External id": identity, **args}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": at, "dur": 5, "args": known}


def old(identity: int, name: str, **more: Any) -> dict[str, Any]:
    """Return a node of schema 1.0.1."""
    return {"id": identity + 100, "name": name, "rf_id": identity, "parent": 1, "fw_parent": 0, "seq_id": -1, **more}


def new(identity: int, name: str, **more: Any) -> dict[str, Any]:
    """Return a node of schema 1.1.1."""
    attributes = {"rf_id": identity, "fw_parent": 0, "seq_id": -1, **more.pop("attrs", {})}
    listed = [{"name": key, "type": "uint64", "value": value} for key, value in attributes.items()]
    return {"id": identity + 100, "name": name, "ctrl_deps": 1, "attrs": listed, **more}


def enrich(
    con: duckdb.DuckDBPyConnection, folder: Path, events: list[Any], nodes: list[Any], schema: str = "1.0.1"
) -> Losses:
    trace, execution = folder / "kineto.json", folder / "et.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    execution.write_text(json.dumps({"schema": schema, "pid": 1, "nodes": nodes}), encoding="utf-8")
    losses = Kineto().fill(con, str(trace)).losses
    assert Chakra().recognises(execution.read_bytes(), str(execution))
    Chakra().enrich(con, str(execution), losses)
    return losses


SHAPES = {
    "input_shapes": [[2, 3], [], [[4], [5]]],
    "input_types": ["Tensor(float)", "Int", "GenericList[Tensor(long),Tensor(long)]"],
    "inputs": [[6, 7, 0, 6, 4, "cuda:0"], 9, []],
    "outputs": [[8]],
    "output_shapes": [[2, 3]],
    "output_types": ["Tensor(float)"],
}
PARTS = {
    "inputs": {"values": SHAPES["inputs"], "shapes": SHAPES["input_shapes"], "types": SHAPES["input_types"]},
    "outputs": {"values": [], "shapes": SHAPES["output_shapes"], "types": SHAPES["output_types"]},
}


@pytest.mark.parametrize(
    ("node", "schema"),
    [(old(7, "aten::cat", **SHAPES), "1.0.1"), (new(7, "aten::cat", **PARTS), "1.1.1-chakra.0.0.4")],
    ids=["1.0.1", "1.1.1"],
)
def test_shapes_types_and_scalars_are_added(
    con: duckdb.DuckDBPyConnection, tmp_path: Path, node: dict[str, Any], schema: str
) -> None:
    enrich(con, tmp_path, [op("aten::cat", 10, 7)], [node], schema)
    rows = con.execute("SELECT input_shapes, dtypes, scalars, dtype, attributes FROM raw_spans").fetchall()
    assert rows == [
        (
            "[[2, 3], [], [[4], [5]]]",
            '["float", "Scalar", "TensorList"]',
            '["", "9", ""]',
            "float",
            '{"output_shapes":[[2,3]]}',
        )
    ]


def test_what_kineto_says_stays(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    event = op("aten::cat", 10, 7, **{"Input Dims": [[9]], "Input type": ["double"]})
    enrich(con, tmp_path, [event], [old(7, "aten::cat", **SHAPES)])
    assert con.execute("SELECT input_shapes, dtypes FROM raw_spans").fetchall() == [("[[9]]", '["double"]')]


def test_a_backward_operator_finds_the_thread_of_the_forward_one_that_is_named(
    con: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    events = [op("aten::mm", 10, 7, tid=3), op("MmBackward0", 30, 8, tid=4)]
    nodes = [old(7, "aten::mm", seq_id=5), old(8, "MmBackward0", fw_parent=107, seq_id=5)]
    enrich(con, tmp_path, events, nodes)
    rows = con.execute("SELECT name, phase, sequence_nr, forward_thread FROM raw_spans ORDER BY number").fetchall()
    assert rows == [("aten::mm", None, 5, None), ("MmBackward0", "backward", 5, 3)]


def test_what_does_not_match_is_counted(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    nodes = [old(7, "aten::mm"), old(8, "aten::add"), old(9, "aten::mul"), old(0, "aten::sub")]
    losses = enrich(con, tmp_path, [op("aten::mm", 10, 7), op("aten::other", 20, 8)], nodes)
    assert any("1 of its 4 operators" in note for note in losses.notes)
    assert losses.skipped["operators of the execution trace that are not in the trace"] == 2
    assert losses.skipped["operators of the execution trace without rf_id"] == 1


def test_without_ids_nothing_is_matched_and_that_is_said(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    losses = enrich(con, tmp_path, [op("aten::mm", 10, 7)], [{"id": 3, "name": "aten::mm", "rf_id": None}])
    assert any("have no rf_id" in note for note in losses.notes)


def test_a_file_of_another_trace_is_refused(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="recorded with another trace"):
        enrich(con, tmp_path, [op("aten::mm", 10, 7)], [old(7, "aten::add")])


NAMES = ["aten::mm", "aten::add", "aten::relu", "aten::copy_"]


def test_numbers_that_are_equal_by_chance_match_nothing(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    """Of 400 operators with equal numbers a quarter have equal names, by chance."""
    draw = random.Random(0)
    events = [op(draw.choice(NAMES), 10 * at, at) for at in range(1, 401)]
    nodes = [old(at, draw.choice(NAMES)) for at in range(1, 401)]
    with pytest.raises(TraceError, match="nor by name and order; it was recorded with another trace"):
        enrich(con, tmp_path, events, nodes)


def test_equal_names_out_of_order_match_nothing(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    places = list(range(1, 101))
    random.Random(0).shuffle(places)
    events = [op("aten::mm", 10 * place, at) for at, place in enumerate(places, 1)]
    with pytest.raises(TraceError, match="recorded with another trace"):
        enrich(con, tmp_path, [*events, op("aten::add", 2000, 200)], [old(at, "aten::mm") for at in range(1, 103)])


def test_other_numbers_match_by_name_and_order(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    draw = random.Random(0)
    names = [draw.choice(NAMES) for _ in range(400)]
    events = [op(name, 10 * at, 7 * at % 401, tid=1 + at // 300) for at, name in enumerate(names, 1)]
    nodes = [old(5 * at, name, tid=11, **SHAPES) for at, name in enumerate(names, 1) if 40 < at < 290]
    losses = enrich(con, tmp_path, events, nodes)
    assert any("249 of its 249 operators and named blocks were found in the trace, by name and order" in note
               for note in losses.notes)  # fmt: skip
    rows = con.execute("SELECT start_ns FROM raw_spans WHERE input_shapes IS NOT NULL ORDER BY 1").fetchall()
    assert [start_ns // 10_000 for (start_ns,) in rows] == list(range(41, 290))


def test_names_that_fit_in_two_places_match_nothing(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    events = [op(name, 10 * at, 1000 + at) for at, name in enumerate(NAMES * 2)]
    with pytest.raises(TraceError, match="recorded with another trace"):
        enrich(con, tmp_path, events, [old(at, name) for at, name in enumerate(NAMES, 1)])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"schema": "1.0.1", "nodes": [{"rf_id": 1},', "is truncated"),
        (b'{"schema": "1.0.1", "nodes": [{"rf_id": oops}]}', "character 40: invalid JSON"),
        (b'{"rf_id": 1, "nodes": 5}', "without an array 'nodes'"),
        (b'{"nodes": [' + b"[" * 200_000, "nested too deeply|is truncated|invalid JSON"),
        (gzip.compress(b'{"nodes": [' + b'{"rf_id": 1}, ' * 9000)[:-20], "compressed file is truncated"),
        (b'{"nodes": ["' + b"a" * (1 << 25) + b'"]}', "more than 16 MiB"),
        (b'{"nodes": ["\xff"]}', "not UTF-8"),
    ],
    ids=["cut", "invalid", "no array", "nested", "cut gzip", "huge", "no text"],
)
def test_broken_files_say_where(con: duckdb.DuckDBPyConnection, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "et.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        Chakra().enrich(con, str(path), Losses())


def test_the_real_pair_matches_as_a_plain_reading_does(con: duckdb.DuckDBPyConnection) -> None:
    if not PAIR.is_dir():
        pytest.skip("../shared/traces is not there")
    trace, execution = (PAIR / f"hta_simple_add_{name}.json.gz" for name in ("kineto", "et"))
    losses = Kineto().fill(con, str(trace)).losses
    Chakra().enrich(con, str(execution), losses)
    nodes = {node["rf_id"]: node for node in json.loads(gzip.decompress(execution.read_bytes()))["nodes"]}
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    shaped = {event["args"]["External id"] for event in events if event.get("cat") == "cpu_op"
              and nodes[event["args"]["External id"]]["input_shapes"]}  # fmt: skip
    rows = con.execute("SELECT operator, input_shapes FROM raw_spans WHERE level = 40 AND input_shapes IS NOT NULL")
    found = dict(rows.fetchall())
    assert found.keys() == shaped
    assert json.loads(found[36]) == [[256, 256], [256, 256], []]


def test_record_function_ids_come_before_external_ids(con: duckdb.DuckDBPyConnection, tmp_path: Path) -> None:
    events = [op("aten::mm", 10, 500, **{"Record function id": 7}), op("aten::mm", 20, 7, **{"Record function id": 8})]
    enrich(con, tmp_path, events, [old(7, "aten::mm", seq_id=1), old(8, "aten::mm", seq_id=2)])
    assert con.execute("SELECT operator, sequence_nr FROM raw_spans ORDER BY number").fetchall() == [(500, 1), (7, 2)]
