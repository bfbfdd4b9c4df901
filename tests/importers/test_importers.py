"""The door of the importers: who reads what, nothing but clear errors from any bytes, and memory that stays."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("hypothesis")

from fuzzing import MUTATIONS, examples, mutated, places, replaced
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import xsp
from xsp import doctor, plugins, table
from xsp.errors import PluginError, TraceError
from xsp.importers import contract
from xsp.schema import Level, Span


def shop() -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(1, 4):
        span = scope.spans.add(trace_id=b"\1" * 16, span_id=bytes([number] * 8), name=f"span {number}")
        span.start_time_unix_nano, span.end_time_unix_nano = 1000 * number, 9000
        for name, value in {"xsp.kind": "op", "xsp.level": "op", "xsp.status": "ok", "xsp.key": "ab"}.items():
            span.attributes.add(key=name).value.string_value = value
        span.attributes.add(key="xsp.step").value.int_value = 0
        span.attributes.add(key="xsp.timed").value.bool_value = True
        span.attributes.add(key="list").value.array_value.values.add().double_value = 1.5
    return message


BINARY = shop().SerializeToString()
LINE = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "xsp.run.id", "value": {"stringValue": "ab"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "01" * 16,
                            "spanId": "02" * 8,
                            "name": "é",
                            "startTimeUnixNano": "5",
                            "endTimeUnixNano": 9,
                            "attributes": [
                                {"key": "xsp.kind", "value": {"stringValue": "step"}},
                                {"key": "xsp.level", "value": {"stringValue": "model"}},
                                {"key": "xsp.step", "value": {"intValue": "0"}},
                                {"key": "deep", "value": {"arrayValue": {"values": [{"doubleValue": 1.5}]}}},
                            ],
                        }
                    ]
                }
            ],
        }
    ]
}
DOWNLOAD = {
    "data": [
        {
            "spans": [
                {
                    "traceID": "1",
                    "spanID": "2",
                    "operationName": "s",
                    "startTime": 5,
                    "duration": 1,
                    "processID": "p1",
                    "references": [{"refType": "CHILD_OF", "traceID": "1", "spanID": "3"}],
                    "tags": [{"key": "a", "type": "int64", "value": 1}],
                }
            ],
            "processes": {"p1": {"serviceName": "s", "tags": []}},
        }
    ]
}
SAMPLES = {
    "lines": (json.dumps(LINE) + "\n").encode() * 3,
    "message": BINARY,
    "messages": (len(BINARY).to_bytes(4, "big") + BINARY) * 2,
    "download": json.dumps(DOWNLOAD).encode(),
    "download of operators": json.dumps(DOWNLOAD).replace('"s"', '"aten::add"').encode(),
    "answer": json.dumps({"result": LINE}).encode(),
}
READERS = {
    "lines": "otlp-json",
    "message": "otlp-proto",
    "messages": "otlp-proto",
    "download": "jaeger",
    "download of operators": "jaeger",
    "answer": "jaeger",
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_is_recognised_by_what_is_in_it(tmp_path: Path, name: str, pack: Any) -> None:
    file = tmp_path / "no-suffix"
    file.write_bytes(pack(SAMPLES[name]))
    assert contract.find_importer(str(file)).name == READERS[name]


def test_exactly_one_importer_recognises_each() -> None:
    importers = [plugins.load(contract.GROUP, name)() for name in plugins.names(contract.GROUP)]
    for name, content in SAMPLES.items():
        assert [each.name for each in importers if each.recognises(content, name)] == [READERS[name]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty; copy it again"),
        (b"hello", "no importer recognises it"),
        (b'{"a": 1}', "no importer recognises it"),
        (b"\x1f\x8b rubbish", "damaged gzip"),
        (bytes(100_000), "no importer recognises it"),
    ],
)
def test_what_nobody_reads_is_said(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=expected) as caught:
        xsp.load(file)
    assert str(file) in str(caught.value)


class Plain:
    """What a third party's importer was before there were kinds: a class with the methods."""

    name = "plain"

    def recognises(self, head: bytes, source: str) -> bool:
        return head == b"plain"


class Rows(Plain):
    def read(self, source: str) -> contract.Imported:
        span = Span(level=Level.MODEL, name="a", kind="step", start_ns=5, dur_ns=7, trace_id=1, span_id=2)
        return contract.Imported(iter([contract.Row(span)]), contract.Losses(self.name, spans=1))


class Tables(Plain):
    def fill(self, con: duckdb.DuckDBPyConnection, source: str) -> contract.SourceInfo:
        table.create(con, "raw_spans", contract.RAW_COLUMNS)
        rows = "SELECT 0 AS number, 10 AS level, 'a' AS name, 'op' AS kind, 5 AS start_ns, 7 AS dur_ns"
        con.execute(f"INSERT INTO raw_spans BY NAME {rows}")
        return contract.SourceInfo({}, contract.Losses(self.name, spans=1))


class Adds(Plain):
    def enrich(self, con: duckdb.DuckDBPyConnection, source: str, losses: contract.Losses) -> None:
        raise AssertionError("of no file alone")


class Both(Rows, Tables):
    pass


class Nameless(Rows):
    name = property()  # type: ignore[assignment]


def install(monkeypatch: pytest.MonkeyPatch, made: type) -> None:
    real_names, real_load = plugins.names, plugins.load
    monkeypatch.setattr(plugins, "names", lambda group: ["a-plain", *real_names(group)])
    monkeypatch.setattr(plugins, "load", lambda group, name: made if name == "a-plain" else real_load(group, name))


@pytest.mark.parametrize("made", [Rows, Tables])
def test_an_importer_of_a_third_party_need_not_name_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: type
) -> None:
    install(monkeypatch, made)
    (tmp_path / "x").write_bytes(b"plain")
    trace = xsp.load(tmp_path / "x")
    assert trace.sql("SELECT name, dur_ns FROM spans WHERE name = 'a'").fetchall() == [("a", 7)]


def test_a_file_that_only_adds_to_another_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Adds)
    (tmp_path / "x").write_bytes(b"plain")
    with pytest.raises(TraceError, match="give it together with the one trace"):
        xsp.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Plain, "has none of fill, read, enrich; an importer has one of these"),
        (Both, "has fill and read of fill, read, enrich; an importer has one of these"),
        (Nameless, "has no name"),
        (int, "has no name, recognises"),
    ],
)
def test_an_importer_of_no_kind_or_of_several_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: type, says: str
) -> None:
    install(monkeypatch, made)
    (tmp_path / "x").write_bytes(b"plain")
    with pytest.raises(PluginError) as caught:
        xsp.load(tmp_path / "x")
    line = f"importer 'a-plain' cannot be used: TypeError: {says}"
    assert line in str(caught.value)
    assert [said for said in doctor.broken_plugins() if line in said]
    (tmp_path / "y").write_bytes(SAMPLES["lines"])
    assert contract.find_importer(str(tmp_path / "y")).name == "otlp-json"


def test_our_importers_name_their_kind() -> None:
    for name in set(READERS.values()):
        kinds = {contract.TableImporter, contract.RowImporter, contract.Enricher}
        assert len(kinds & set(type(contract.load_importer(name)).__mro__)) == 1, name


def test_an_importer_that_is_broken_stops_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plugins.load

    def load(group: str, name: str) -> Any:
        if name == "jaeger":
            raise PluginError("jaeger needs something")
        return real(group, name)

    monkeypatch.setattr(plugins, "load", load)
    file = tmp_path / "x"
    file.write_bytes(SAMPLES["lines"])
    assert contract.find_importer(str(file)).name == "otlp-json"
    file.write_bytes(b"hello")
    with pytest.raises(PluginError, match="jaeger needs something"):
        xsp.load(file)


@pytest.mark.slow
def test_the_core_alone_reads_json_and_says_what_protobuf_needs(tmp_path: Path) -> None:
    code = "import sys; sys.modules['opentelemetry.proto'] = None; import xsp; print(len(xsp.load(sys.argv[1]).spans))"
    for name in ("lines", "message"):
        (tmp_path / name).write_bytes(SAMPLES[name])
    lines, message = (
        subprocess.run([sys.executable, "-c", code, tmp_path / name], capture_output=True, text=True, check=False)
        for name in ("lines", "message")
    )
    assert "PluginError: reading OTLP protobuf needs" in message.stderr
    assert "pip install 'xsp[otel]'" in message.stderr
    assert lines.stdout == "1\n"


# --- any bytes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
@examples(12)
@given(mutations=MUTATIONS)
def test_no_bytes_lead_to_another_error(tmp_path: Path, name: str, mutations: list[tuple[float, str, bytes]]) -> None:
    file = tmp_path / "fuzzed"
    file.write_bytes(mutated(SAMPLES[name], mutations))
    with contextlib.suppress(TraceError, PluginError):
        assert len(xsp.load(file).spans) > 0


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@pytest.mark.parametrize("document", [LINE, {"result": LINE}, DOWNLOAD], ids=["otlp", "answer", "download"])
@examples(20)
@given(data=st.data())
def test_no_value_leads_to_another_error(tmp_path: Path, document: dict[str, Any], data: st.DataObject) -> None:
    where = data.draw(st.sampled_from([(), *places(document)]))
    file = tmp_path / "fuzzed.json"
    file.write_text(json.dumps(replaced(document, where, data.draw(ANYTHING))), encoding="utf-8")
    with contextlib.suppress(TraceError, PluginError):
        assert len(xsp.load(file).spans) > 0


# --- memory ---------------------------------------------------------------------------------------------

PEAK = """
import resource, sys, xsp
from pathlib import Path
from xsp.ingest import sources
xsp.load(sys.argv[1]).spans  # what is imported and warmed counts in both
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sources.import_into(Path(sys.argv[3]), [sys.argv[2]])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_memory_follows_the_messages_not_the_file(tmp_path: Path) -> None:
    small, large, out = tmp_path / "small", tmp_path / "large", tmp_path / "out"
    small.write_bytes(SAMPLES["lines"])
    out.mkdir()
    span = {"startTimeUnixNano": 5, "endTimeUnixNano": 9, "name": "x" * 300}
    with gzip.open(large, "wt", compresslevel=1) as file:
        for line in range(150):
            trace = f"{line + 1:032x}"
            spans = [{**span, "traceId": trace, "spanId": f"{number + 1:016x}"} for number in range(500)]
            file.write(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}) + "\n")
    command = [sys.executable, "-c", PEAK, str(small), str(large), str(out)]
    taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(taken) < 400  # MiB; the file's 75,000 spans as Python objects alone would be that
