"""JSON of traces whose texts are not escaped, and its mended copies."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp.cli import main
from xsp.errors import TraceError
from xsp.importers.repair import mend

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
