"""OTLP files come back as what they were made of, to the nanosecond; what is bad in them is counted or refused."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from depth import deep

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from realparts import Collector, poll
from roundtrip import (
    Snapshot,
    export_run,
    record,
    representative_tables,
    request,
    rows,
    select_representative,
    spans_of,
    tables,
    without,
)

import xsp
from xsp import cli, rundir
from xsp.errors import OutputError, TraceError
from xsp.health import health
from xsp.ingest import jobs, sources
from xsp.otlp.transport import as_json


@pytest.fixture(scope="module")
def lines(run: Path) -> Path:
    return Path(export_run(run, run.parent / "run.jsonl"))


def write(path: Path, *messages: Any) -> Path:
    path.write_text("".join(as_json(message.SerializeToString()) + "\n" for message in messages))
    return path


# --- what was sent comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [deep("back.jsonl"), deep("back.pb")])
def test_a_file_gives_the_same_spans_and_the_same_tables(
    run: Path, small_whole: Snapshot, tmp_path: Path, name: str
) -> None:
    back = xsp.load(export_run(run, tmp_path / name))
    assert rows(back) == small_whole.rows
    assert tables(back) == small_whole.tables
    own = {name: value for name, value in back.run.items() if name not in ("imported", "notes")}
    assert own == {name: value for name, value in xsp.load(run).run.items() if name in own}
    assert back.run["imported"]["doubled"] == 0


@pytest.mark.parametrize("name", ["back.jsonl", pytest.param("back.pb", marks=pytest.mark.slow)])
def test_a_folded_trace_is_put_together_again(run: Path, small_whole: Snapshot, tmp_path: Path, name: str) -> None:
    back = xsp.load(export_run(run, tmp_path / name, "--fold", "12"))
    assert rows(back) == small_whole.rows
    assert representative_tables(back) == select_representative(small_whole.tables)


@pytest.mark.jaeger
@pytest.mark.parametrize("form", ["json", "proto"])
def test_a_real_collectors_file_gives_the_same_tables(
    run: Path, small_whole: Snapshot, tmp_path: Path, otel_collector: Callable[..., Collector], form: str
) -> None:
    path = tmp_path / "traces"
    collector = otel_collector(path, form)
    export_run(run, collector.otlp_http)
    collector.stop()
    poll(lambda: path.is_file() and path.stat().st_size)
    back = xsp.load(path)
    assert rows(back) == small_whole.rows
    assert tables(back) == small_whole.tables


@pytest.mark.slow
def test_order_packing_and_repetition_do_not_matter(lines: Path, tmp_path: Path) -> None:
    text = lines.read_text().splitlines()
    shuffled = tmp_path / "shuffled"
    shuffled.write_bytes(gzip.compress("\n".join([*reversed(text), "", *text]).encode()))
    back = xsp.load(shuffled)
    in_order = xsp.load(lines)
    assert rows(back) == rows(in_order)
    assert without(representative_tables(back), "health") == without(representative_tables(in_order), "health")
    assert back.run["imported"]["doubled"] == len(rows(back))


@pytest.mark.slow
def test_one_document_over_several_lines(lines: Path, tmp_path: Path) -> None:
    spans = [item for line in lines.read_text().splitlines() for item in json.loads(line)["resourceSpans"]]
    document = tmp_path / "document.json"
    document.write_text(json.dumps({"resourceSpans": spans}, indent=1))
    assert rows(xsp.load(document)) == rows(xsp.load(lines))


@pytest.mark.slow
def test_a_document_may_begin_with_empty_lines(lines: Path, tmp_path: Path) -> None:
    spans = [item for line in lines.read_text().splitlines() for item in json.loads(line)["resourceSpans"]]
    document = tmp_path / "document.json"
    document.write_text("\n \n" + json.dumps({"resourceSpans": spans}, indent=1))
    assert rows(xsp.load(document)) == rows(xsp.load(lines))


@pytest.mark.parametrize("value", [0.5, 1])
def test_a_share_is_a_number_with_or_without_a_point(tmp_path: Path, value: float) -> None:
    message = request()
    attributes = spans_of(message)[0].attributes
    for name, each in {"xsp.kind": "step", "xsp.level": 20, "xsp.occupancy": value}.items():
        form = {str: "string_value", int: "int_value", float: "double_value"}[type(each)]
        setattr(attributes.add(key=name).value, form, each)
    trace = xsp.load(write(tmp_path / "t.jsonl", message))
    assert trace.sql("SELECT max(occupancy) FROM spans").fetchall() == [(float(value),)]
    assert not trace.run["imported"]["sources"][0]["skipped"]


@pytest.mark.slow
def test_a_folder_of_several_files_is_read_together(lines: Path, tmp_path: Path) -> None:
    text = lines.read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(text[::2]))
    (tmp_path / "b.jsonl").write_text("".join(text[1::2]))
    back = xsp.load(tmp_path)
    assert rows(back) == rows(xsp.load(lines))
    assert [each["source"] for each in back.run["imported"]["sources"]] == ["a.jsonl", "b.jsonl"]


def test_directories_of_jobs_with_one_name_are_numbered() -> None:
    assert jobs.unique_names(["a", "b", "a", "a-2", "a"]) == ["a", "b", "a-2", "a-2-2", "a-3"]


def test_numbers_may_be_strings_or_numbers_and_enums_names(tmp_path: Path) -> None:
    span = {"traceId": "AB" * 16, "spanId": "cd" * 8, "name": "s", "startTimeUnixNano": 5, "endTimeUnixNano": "9"}
    span["status"] = {"code": "STATUS_CODE_ERROR"}
    span["attributes"] = [
        {"key": "a", "value": {"intValue": 1}},
        {"key": "b", "value": {"intValue": "2"}},
        {"key": "c", "value": {"arrayValue": {"values": [{"doubleValue": "NaN"}, {"boolValue": True}]}}},
        {"key": "d", "value": {"kvlistValue": {"values": [{"key": "e", "value": {}}]}}},
    ]
    path = tmp_path / "t"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    ((*_, status, attributes),) = (
        xsp.load(path).sql("SELECT start_ns, dur_ns, status, attributes FROM spans").fetchall()
    )
    assert status == "error:unknown"
    assert json.loads(attributes) == {"a": 1, "b": 2, "c": ["nan", True], "d": {"e": None}}


# --- spans of others ----------------------------------------------------------------------------------------


def test_another_program_alone_is_a_step_a_trace(tmp_path: Path) -> None:
    first, second = request(), request(trace_id=b"\x03" * 16, end_time_unix_nano=5_000_000)
    spans_of(first).add(
        trace_id=b"\x01" * 16,
        span_id=b"\x04" * 8,
        parent_span_id=b"\x02" * 8,
        name="SELECT",
        start_time_unix_nano=1_500_000,
        end_time_unix_nano=2_000_000,
    )
    trace = xsp.load(write(tmp_path / "shop.jsonl", first, second))
    found = trace.sql("SELECT kind, level, step, name, collector, parent_rule FROM spans ORDER BY ALL").fetchall()
    assert found == [
        ("step", 20, 0, "GET /", "handmade", None),
        ("step", 20, 1, "GET /", "handmade", None),
        ("user", 10, 0, "SELECT", "handmade", "explicit"),
    ]
    assert xsp.analyses.A1(trace).fetchall()[0][1] == pytest.approx(3.0)
    assert "no step of xsp's" in " ".join(finding.text for finding in health(trace))
    assert "layer level" in str(xsp.analyses.A2.refusal(trace))


@pytest.mark.slow
def test_another_programs_span_lies_beside_the_step_in_its_trace(
    run: Path, small_whole: Snapshot, lines: Path, tmp_path: Path
) -> None:
    (step,) = xsp.load(run).sql("SELECT min(trace_id) FROM spans WHERE kind = 'step'").fetchall()[0]
    other = write(tmp_path / "shop.jsonl", request(trace_id=bytes.fromhex(step)), request(trace_id=b"\x09" * 16))
    assert cli.main(["import", str(lines), str(other), "-o", str(tmp_path / "back")]) == 0
    back = xsp.load(tmp_path / "back")
    assert representative_tables(back) == select_representative(small_whole.tables)
    assert back.sql("SELECT kind, step FROM spans WHERE name = 'GET /'").fetchall() == [("user", None)] * 2


# --- import ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_writes_a_run_directory(run: Path, small_whole: Snapshot, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "back"
    assert cli.main(["import", str(lines), "-o", str(out)]) == 0
    assert {file.name for file in rundir.segments(out)} == {file.name for file in rundir.segments(run)}
    assert rows(xsp.load(out)) == small_whole.rows
    assert representative_tables(xsp.load(out)) == select_representative(small_whole.tables)
    assert cli.main(["import", str(lines), "-o", str(out)]) == 2
    assert cli.main(["import", str(lines), "-o", str(out), "--overwrite"]) == 0


@pytest.mark.slow
def test_several_runs_in_one_file_become_directories(run: Path, small_whole: Snapshot, tmp_path: Path) -> None:
    both = tmp_path / "both.jsonl"
    other = record(tmp_path / "other", repeats=1)
    parts = [export_run(each, tmp_path / f"{name}.jsonl") for name, each in (("a", run), ("b", other))]
    both.write_text("".join(Path(part).read_text() for part in parts))
    with pytest.raises(TraceError, match="holds 2 runs"):
        xsp.load(both)
    assert cli.main(["import", str(both), "-o", str(tmp_path / "back")]) == 0
    found = [tables(xsp.load(place)) for place in xsp.runs.parts(tmp_path / "back")]
    assert found == [small_whole.tables, tables(xsp.load(other))]


def test_nothing_is_left_of_an_import_that_failed(lines: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(lines.read_bytes()[:-300])
    assert cli.main(["import", str(cut), "-o", str(tmp_path / "back")]) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.jsonl"]


# --- what is bad ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": b""}, "its trace id is not valid"),
        deep({"trace_id": b"\0" * 16}, "its trace id is not valid"),
        ({"span_id": b"\1" * 7}, "its span id is not valid"),
        ({"parent_span_id": b"\1"}, "its parent id is not valid"),
        ({"end_time_unix_nano": 5}, "it ends before it starts"),
        ({"start_time_unix_nano": 0}, "its times are missing or not valid"),
        deep({"end_time_unix_nano": 2**63}, "its times are missing or not valid"),
        deep({"start_time_unix_nano": 2**62, "end_time_unix_nano": 2**62 + 5}, "its times are missing or not valid"),
    ],
)
@pytest.mark.parametrize("form", [deep("json"), "proto"])
def test_a_bad_span_is_counted(tmp_path: Path, fields: dict[str, Any], reason: str, form: str) -> None:
    message, path = request(span_id=b"\x07" * 8), tmp_path / "bad"
    spans_of(message).append(spans_of(request(**fields))[0])
    body = message.SerializeToString()
    path.write_bytes(body if form == "proto" else as_json(body).encode())
    trace = xsp.load(path)
    (source,) = trace.run["imported"]["sources"]
    assert (source["spans"], source["skipped"]) == (1, {reason: 1})
    assert f"bad: 1 spans were left out: {reason}" in [note["text"] for note in trace.run["notes"]]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("xsp.step", "two", "xsp.step is not of the type INTEGER"),
        ("xsp.step", 2**40, "xsp.step is not of the type INTEGER"),
        ("xsp.step", -1, "xsp.step is below 0"),
        ("xsp.level", "attic", "its level is not a level of xsp"),
        ("xsp.timed", 1, "xsp.timed is not of the type BOOLEAN"),
    ],
)
def test_a_value_of_the_wrong_type_is_counted(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    message = request(span_id=b"\x07" * 8)
    bad = spans_of(message).add()
    bad.CopyFrom(spans_of(request())[0])
    for name, each in {"xsp.kind": "step", "xsp.level": 20, key: value}.items():
        content = bad.attributes.add(key=name).value
        setattr(content, "string_value" if isinstance(each, str) else "int_value", each)
    trace = xsp.load(write(tmp_path / "bad.jsonl", message))
    assert trace.run["imported"]["sources"][0]["skipped"] == {reason: 1}


def test_what_a_file_says_of_its_run_is_not_trusted(tmp_path: Path) -> None:
    message = request()
    claimed = {"id": "ab" * 8, "name": "x", "parts": ["../../etc"], "notes": "none", "costs": {"a": 1}, "finished": 7}
    for name, value in {"xsp.kind": "run", "xsp.run": json.dumps(claimed)}.items():
        spans_of(message)[0].attributes.add(key=name).value.string_value = value
    trace = xsp.load(write(tmp_path / "claims.jsonl", message, request()))
    assert trace.name == "x"
    assert "parts" not in trace.run
    changed = trace.run["imported"]["sources"][0]["changed"]
    assert sorted(changed) == [
        f"field {name} of a run left out: it does not have xsp's type" for name in ("costs", "finished", "notes")
    ]
    assert health(trace)


@pytest.mark.parametrize("most", [1, 40, -1])
def test_a_protobuf_file_that_is_cut_says_where(run: Path, tmp_path: Path, most: int) -> None:
    whole = Path(export_run(run, tmp_path / "run.pb")).read_bytes()
    (first,) = struct.unpack_from(">I", whole)
    cut = tmp_path / "cut.pb"
    cut.write_bytes(whole[: 4 + first + most] if most > 0 else whole[:most])
    with pytest.raises(TraceError, match=r"cut\.pb, message \d+ at byte \d+: "):
        xsp.load(cut)
    cut.write_bytes(request().SerializeToString()[:-3])
    with pytest.raises(TraceError, match="begins as OTLP's protobuf does, but is damaged or cut off"):
        xsp.load(cut)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"resourceSpans": 5}', "resourceSpans is not a list"),
        ('{"resourceSpans": [5]}', "an item of resourceSpans is not a JSON object"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": 1}]}]}', "spans is not a list"),
        ('{"resourceSpans": []}\n{"resourceSpans": [{"sco', r"line 2: not JSON, or cut off"),
        ('{"resourceSpans": []}\n[]', "line 2: the document is not a JSON object"),
        ('{"resourceSpans": []}', "no span in it"),
        ('{"resourceMetrics": []}', "messages of metrics, logs or profiles"),
        ('{"resourceSpans": ' + "[" * 5000, "not JSON|cannot be read"),
    ],
)
def test_a_broken_structure_is_an_error_with_its_place(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=expected) as caught:
        xsp.load(path)
    assert str(caught.value).startswith(str(path))


def test_what_is_compressed_badly_says_so(tmp_path: Path, lines: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(lines.read_bytes())[:-200])
    with pytest.raises(TraceError, match="the compressed file is truncated"):
        xsp.load(cut)
    zstd = tmp_path / "t.zst"
    zstd.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(TraceError, match="compressed with zstd"):
        xsp.load(zstd)


def test_a_line_that_is_too_long_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.importers import otlp_json

    monkeypatch.setattr(otlp_json, "MAX_MESSAGE_BYTES", 1000)
    path = tmp_path / "long.jsonl"
    path.write_text('{"resourceSpans": []}\n{"resourceSpans": "' + "x" * 2000 + '"}')
    with pytest.raises(TraceError, match="line 2: longer than"):
        xsp.load(path)


@pytest.mark.slow
def test_details_that_are_missing_are_counted(run: Path, small_whole: Snapshot, tmp_path: Path) -> None:
    sent_file = Path(export_run(run, tmp_path / "run.jsonl", "--fold", "12"))
    overview = tmp_path / "overview.jsonl"
    documents = [json.loads(line) for line in sent_file.read_text().splitlines()]
    for document in documents:
        for resource in document["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                scope["spans"] = [
                    span
                    for span in scope["spans"]
                    if "xsp.trace_id" not in {attribute["key"] for attribute in span["attributes"]}
                ]
    overview.write_text("".join(json.dumps(document) + "\n" for document in documents))
    back = xsp.load(overview)
    missing = len(small_whole.rows) - len(rows(back))
    assert missing > 0
    assert f"{missing} spans are in detail traces" in " ".join(note["text"] for note in back.run["notes"])


@pytest.mark.parametrize(("module", "name"), [(jobs.table, "insert"), (sources, "deduplicate")])
def test_a_temporary_folder_without_room_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def full(*_: object) -> None:
        raise duckdb.IOException("IO Error: No space left on device")

    path = write(tmp_path / "a.jsonl", request())
    monkeypatch.setattr(module, name, full)
    with pytest.raises(OutputError, match=r"needs more room than .*No space left on device"):
        xsp.load(path)


@pytest.mark.parametrize(
    ("mark", "form"), [(b"PK\x03\x04", "zip"), (b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")]
)
def test_a_file_that_is_compressed_in_another_way_says_how(tmp_path: Path, mark: bytes, form: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(mark + bytes(20))
    with pytest.raises(TraceError, match=rf"trace\.json: compressed with {form}, which is not read; decompress it"):
        xsp.load(path)


@pytest.mark.parametrize("form", ["json", "proto"])
def test_a_parent_of_zeros_is_that_of_a_root(tmp_path: Path, form: str) -> None:
    path, body = tmp_path / "t", request(parent_span_id=bytes(8)).SerializeToString()
    path.write_bytes(body if form == "proto" else as_json(body).encode())
    assert xsp.load(path).sql("SELECT kind, parent_id FROM spans").fetchall() == [("step", None)]


@pytest.mark.parametrize("form", ["json", "proto"])
def test_a_type_of_error_that_is_a_number_is_read_and_events_are_counted(tmp_path: Path, form: str) -> None:
    message = request()
    span = spans_of(message)[0]
    span.status.code = 2
    span.attributes.add(key="error.type").value.int_value = 500
    span.events.add(name="exception")
    path, body = tmp_path / "t", message.SerializeToString()
    path.write_bytes(body if form == "proto" else as_json(body).encode())
    trace = xsp.load(path)
    assert trace.sql("SELECT status FROM spans").fetchall() == [("error:500",)]
    assert trace.run["imported"]["sources"][0]["changed"] == {"events of spans left out": 1}


def test_groups_of_spans_are_read_under_their_former_name_too(tmp_path: Path) -> None:
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "name": "s", "startTimeUnixNano": 5, "endTimeUnixNano": 9}
    group = {"instrumentationLibrary": {"name": "old"}, "spans": [span]}
    path = tmp_path / "t"
    path.write_text(json.dumps({"resourceSpans": [{"instrumentationLibrarySpans": [group]}]}))
    assert xsp.load(path).sql("SELECT name, collector FROM spans").fetchall() == [("s", "old")]
