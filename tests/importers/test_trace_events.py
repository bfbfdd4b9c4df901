"""The array of trace events is found wherever it stands in a file, and its end for what it is."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp import table
from xsp.cli import main
from xsp.errors import TraceError
from xsp.importers import outside as beside
from xsp.importers import traceevents
from xsp.importers.repair import mend

EVENTS = [{"ph": "X", "ts": i, "dur": 1, "name": "]},{ [", "args": {"a": [1, {"b": [2]}], "c": {}}} for i in range(99)]
AROUND = {"devices": [{"id": i, "sizes": list(range(50))} for i in range(40)], "z": [{"q": [1]}], "s": "a]} b"}
DOCUMENTS: dict[str, Any] = {
    "keys before": {**AROUND, "traceEvents": EVENTS},
    "keys after": {"traceEvents": EVENTS, **AROUND},
    "few keys": {"a": [1], "traceEvents": EVENTS, "b": [2]},
    "alone": EVENTS,
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_all_events_are_found_and_all_keys(tmp_path: Path, name: str, indent: int | None) -> None:
    path, con = tmp_path / "a.json", table.connect()
    path.write_text(json.dumps(DOCUMENTS[name], indent=indent), encoding="utf-8")
    around = traceevents.read(con, str(path), traceevents.Events())
    assert con.execute("SELECT count(*), sum(ts_ns) FROM events").fetchall() == [(99, 99 * 98 // 2 * 1000)]
    wanted = DOCUMENTS[name] if isinstance(DOCUMENTS[name], dict) else {}
    assert around.keys == {key: value for key, value in wanted.items() if key != "traceEvents"}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / "a.json"
    text = json.dumps(DOCUMENTS[name])
    path.write_text(text[: int(len(text) * share)], encoding="utf-8")
    with pytest.raises(TraceError, match=r"a\.json"):
        traceevents.read(table.connect(), str(path), traceevents.Events())


MISLEADING = [{"ph": "X", "ts": i, "dur": 1, "args": {"list": [{"name": "a"}, {"name": "b"}]}} for i in range(99)]


@pytest.mark.parametrize("events", [EVENTS, MISLEADING], ids=["plain", "cuts that look right and are not"])
@pytest.mark.parametrize("name", ["few keys", "keys after", "alone"])
def test_a_file_in_pieces_holds_what_it_holds_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, events: list[Any]
) -> None:
    path, pieces = tmp_path / "a.json", []
    content = DOCUMENTS[name]
    path.write_text(json.dumps({**content, "traceEvents": events} if isinstance(content, dict) else events), "utf-8")
    whole = read(path)
    monkeypatch.setattr(traceevents, "CHUNK", 700)
    monkeypatch.setattr(traceevents, "FIRST_PIECE", 1000)
    monkeypatch.setattr(
        traceevents, "_load", lambda *args, load=traceevents._load: pieces.append(args[2]) or load(*args)
    )
    assert read(path) == whole
    assert len(pieces) > 2


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_an_error_in_one_piece_says_where_it_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    path = tmp_path / "a.json"
    text = json.dumps(DOCUMENTS["few keys"])
    path.write_text(text[: int(len(text) * share)], encoding="utf-8")
    said = message(path)
    monkeypatch.setattr(traceevents, "CHUNK", 700)
    monkeypatch.setattr(traceevents, "FIRST_PIECE", 1000)
    assert message(path) == said


def read(path: Path) -> tuple[list[Any], dict[str, Any]]:
    con = table.connect()
    around = traceevents.read(con, str(path), traceevents.Events())
    return con.execute("SELECT * EXCLUDE (number) FROM events ORDER BY number").fetchall(), around.keys


def message(path: Path) -> str:
    with pytest.raises(TraceError) as found:
        read(path)
    return str(found.value)


@pytest.mark.parametrize("end", [b"}", b",}"], ids=["well formed", "broken"])
def test_arrays_beside_that_would_take_hours_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"traceEvents":[{"ph":"X","ts":1,"dur":1}]' + b',"k":[]' * 40_000 + end)
    monkeypatch.setattr(beside, "MAX_SEARCH_BYTES", 1 << 22)
    with pytest.raises(TraceError, match=r"a\.json: holds too many arrays"):
        traceevents.read(table.connect(), str(path), traceevents.Events())


@pytest.mark.parametrize("before", [b'"a":' + b"1" * 5000, b",".join(b'"%d":0' % i for i in range(500))])
def test_keys_before_the_array_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"{" + before + b',"traceEvents":[]}')
    monkeypatch.setattr(beside, "MAX_KEY_BYTES", 1000)
    with pytest.raises(TraceError, match=r"a\.json, byte"):
        traceevents.read(table.connect(), str(path), traceevents.Events())


@pytest.mark.parametrize(
    ("total", "free", "fits"), [(2**29, 2**28, True), (2**29, 2**25, False), (2**40, 2**29, False)]
)
def test_a_small_disk_is_enough_for_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, fits: bool
) -> None:
    disk = type(shutil.disk_usage(tmp_path))(total, total - free, free)
    monkeypatch.setattr(traceevents.shutil, "disk_usage", lambda folder: disk)
    path, con = tmp_path / "a.json", table.connect()
    path.write_text(json.dumps(EVENTS))
    if fits:
        traceevents.read(con, str(path), traceevents.Events())
        assert con.execute("SELECT count(*) FROM events").fetchall() == [(99,)]
        return
    with pytest.raises(TraceError, match="more than the disk has room for"):
        traceevents.read(con, str(path), traceevents.Events())


# --- JSON of traces whose texts are not escaped, and its mended copies ------------------------------------------------


EVENT = """  {
    "ph": "X", "cat": "%s", "name": "%s", "pid": 1, "tid": 1,
    "ts": %d, "dur": 5,
    "args": {
      "External id": 2, "note": "%s"
    }
  }"""


def document(*events: str) -> str:
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}\n"


NAMES = ['load "C:\\data" now', "ends in \\", 'a "b", c', "plain", "tab\there"]


def test_what_is_not_escaped_is_mended_in_a_copy_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json.gz"
    text = document(*(EVENT % ("cpu_op", name, 10 * at, "n") for at, name in enumerate(NAMES, 1)))
    path.write_bytes(gzip.compress(text.encode()))
    content = path.read_bytes()
    with pytest.raises(TraceError, match="xsp import FILE --repair"):
        xsp.load(path)
    assert main(["import", str(path), "--repair", "-o", str(tmp_path / "run")]) == 0
    assert "4 texts were escaped in a copy" in capsys.readouterr().err
    rows = xsp.load(tmp_path / "run").sql("SELECT name FROM spans WHERE level = 40 ORDER BY start_ns").fetchall()
    assert [name for (name,) in rows] == NAMES
    assert path.read_bytes() == content


@pytest.mark.slow
@given(st.lists(st.text(max_size=12), min_size=1, max_size=4), st.sampled_from([None, 2]))
def test_valid_json_stays_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], indent: int | None
) -> None:
    source = tmp_path_factory.mktemp("repair") / "a.json"
    value = {"traceEvents": [{"ph": "X", "name": text, "args": {text: text, "list": [text]}} for text in texts]}
    source.write_text(json.dumps(value, indent=indent), encoding="utf-8")
    mend(str(source), source.with_name("b.json"))
    assert json.loads(source.with_name("b.json").read_text(encoding="utf-8")) == value


def test_a_file_without_fault_is_imported_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fine.json"
    path.write_text(document(EVENT % ("cpu_op", "aten::mm", 10, "n")), encoding="utf-8")
    assert main(["import", str(path), "--repair", "-o", str(tmp_path / "run")]) == 0
    assert "nothing to mend" in capsys.readouterr().err
    assert main(["import", str(tmp_path), "--repair", "-o", str(tmp_path / "run2")]) == 2
    assert "--repair mends files" in capsys.readouterr().err
