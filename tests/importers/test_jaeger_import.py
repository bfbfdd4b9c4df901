"""A real Jaeger gives a run back as it was; a server that is none, or gives nonsense, gets one clear error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from realparts import Jaeger, fetch_json, poll
from roundtrip import Snapshot, export_run, record, rows, tables

import xsp
from xsp import cli
from xsp.errors import TraceError

TRACE = "0af7651916cd43dd8448eb211c80319c"


def steps_of(run: Path) -> list[str]:
    return [trace for (trace,) in xsp.load(run).sql("SELECT DISTINCT trace_id FROM spans ORDER BY ALL").fetchall()]


def in_jaeger(run: Path, jaeger: Jaeger) -> list[str]:
    """Send a run to Jaeger, and return the traces of its steps when all can be had."""
    export_run(run, jaeger.otlp_http)
    traces = steps_of(run)
    described = xsp.load(run).run["otel"]["trace_id"]
    poll(lambda: all(fetch_json(f"{jaeger.query}/api/v3/traces/{trace}") for trace in [*traces, described]))
    return traces


@pytest.mark.jaeger
def test_all_steps_by_url_give_the_same_tables(
    run: Path, small_whole: Snapshot, tmp_path: Path, jaeger: Jaeger
) -> None:
    urls = [f"{jaeger.query}/trace/{trace}" for trace in in_jaeger(run, jaeger)]
    assert cli.main(["import", *urls, "-o", str(tmp_path / "back")]) == 0
    back = xsp.load(tmp_path / "back")
    assert rows(back) == small_whole.rows
    assert tables(back) == small_whole.tables
    assert back.run["id"] == xsp.load(run).run["id"]


@pytest.mark.jaeger
def test_a_trace_by_url_and_by_its_id(run: Path, small_whole: Snapshot, jaeger: Jaeger) -> None:
    trace, *_ = in_jaeger(run, jaeger)
    expected = [row for row in small_whole.rows if row[0] == trace]
    for back in (
        xsp.load(jaeger.query, trace_id=trace),
        xsp.load(f"{jaeger.query}/api/v3/traces/{trace}"),
        xsp.load(f"{jaeger.query}/trace/{trace.lstrip('0')}?uiEmbed=v0"),
    ):
        assert rows(back) == expected
        assert back.run["name"] == "small"
        assert [source["source"] for source in back.run["imported"]["sources"]] in ([trace], [trace.lstrip("0")])


@pytest.mark.jaeger
def test_an_overview_brings_its_details(run: Path, tmp_path: Path, jaeger: Jaeger) -> None:
    again = record(tmp_path / "again", repeats=1)
    export_run(again, jaeger.otlp_http, "--fold", "12")
    deepest = (
        xsp.load(again).sql("SELECT trace_id FROM spans GROUP BY 1 ORDER BY count(*) DESC LIMIT 1").fetchall()[0][0]
    )
    poll(lambda: fetch_json(f"{jaeger.query}/api/v3/traces/{deepest}"))
    expected = [row for row in rows(xsp.load(again)) if row[0] == deepest]
    assert len(expected) > 12
    assert poll(lambda: rows(xsp.load(jaeger.query, trace_id=deepest)) == expected)


@pytest.mark.jaeger
def test_the_pages_download_keeps_durations_whole(
    run: Path, small_whole: Snapshot, tmp_path: Path, jaeger: Jaeger
) -> None:
    traces = in_jaeger(run, jaeger)
    files = []
    for trace in traces:
        files.append(tmp_path / f"{trace}.json")
        files[-1].write_text(json.dumps(fetch_json(f"{jaeger.query}/api/traces/{trace}?prettyPrint=true"), indent=2))
    assert cli.main(["import", *map(str, files), "-o", str(tmp_path / "back")]) == 0
    back, before = xsp.load(tmp_path / "back"), xsp.load(run)
    ask = "SELECT trace_id, span_id, dur_ns, key, kind, step, input_shapes FROM spans ORDER BY ALL"
    assert back.sql(ask).fetchall() == before.sql(ask).fetchall()
    ask = "SELECT span_id, start_ns // 1000 FROM spans ORDER BY ALL"
    assert back.sql(ask).fetchall() == before.sql(ask).fetchall()
    assert "whole microseconds" in " ".join(note["text"] for note in back.run["notes"])


@pytest.mark.jaeger
def test_the_api_answer_as_a_file(run: Path, small_whole: Snapshot, tmp_path: Path, jaeger: Jaeger) -> None:
    trace, *_ = in_jaeger(run, jaeger)
    file = tmp_path / "answer"
    file.write_text(json.dumps(fetch_json(f"{jaeger.query}/api/v3/traces/{trace}")))
    assert rows(xsp.load(file)) == [row for row in small_whole.rows if row[0] == trace]


@pytest.mark.jaeger
def test_a_trace_that_is_not_there(jaeger: Jaeger) -> None:
    with pytest.raises(TraceError, match=rf"/api/v3/traces/{TRACE}: Jaeger has no such trace"):
        xsp.load(jaeger.query, trace_id=TRACE)


# --- without Jaeger -------------------------------------------------------------------------------------


def downloaded(**changes: Any) -> dict[str, Any]:
    span = {
        "traceID": TRACE,
        "spanID": "b7ad6b7169203331",
        "operationName": "GET /",
        "references": [],
        "startTime": 1_000,
        "duration": 250,
        "processID": "p1",
        "tags": [
            {"key": "http.route", "type": "string", "value": "/"},
            {"key": "error", "type": "bool", "value": True},
        ],
    }
    process = {"serviceName": "shop", "tags": [{"key": "process.pid", "type": "int64", "value": 7}]}
    return {"data": [{"traceID": TRACE, "spans": [{**span, **changes}], "processes": {"p1": process}}]}


def test_a_download_of_another_program(tmp_path: Path) -> None:
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(downloaded()))
    trace = xsp.load(file)
    found = trace.sql("SELECT name, start_ns, dur_ns, process, status, attributes FROM spans").fetchall()
    assert found == [("GET /", 1_000_000, 250_000, 7, "error:unknown", '{"http.route": "/", "service.name": "shop"}')]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"startTime": "soon"}, "its times are missing or not valid"),
        ({"duration": -5}, "it ends before it starts"),
        ({"spanID": None}, "its span id is not valid"),
        ({"tags": [5]}, "one of its tags has no key"),
    ],
)
def test_a_bad_span_of_a_download_is_counted(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    document = downloaded()
    document["data"] += downloaded(spanID="cd" * 8, **changes)["data"] if "spanID" not in changes else []
    document["data"] += downloaded(**changes)["data"]
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(document))
    assert reason in xsp.load(file).run["imported"]["sources"][0]["skipped"]


def linked() -> dict[str, Any]:
    """Return an answer with a span of xsp's that links to another trace."""
    span = {"traceId": TRACE, "spanId": "b7ad6b7169203331", "startTimeUnixNano": 5, "endTimeUnixNano": 9}
    own = [{"key": "xsp.kind", "value": {"stringValue": "step"}}, {"key": "xsp.level", "value": {"intValue": 20}}]
    links = [{"traceId": each, "spanId": "cd" * 8} for each in ("ab" * 16, "../../../secret", "?x=1")]
    span |= {"links": links, "attributes": own}
    return {"result": {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}}


class Answers(BaseHTTPRequestHandler):
    """Answers by the path before `/api`."""

    def do_GET(self) -> None:
        found = {
            "/linked": (200, json.dumps(linked() if TRACE in self.path else {"hello": 1}).encode()),
            "/page": (200, b"<!doctype html><html>"),
            "/cut": (200, b'{"result": {"resourceSpans": ['),
            "/other": (200, b'{"hello": 1}'),
            "/wrong": (200, b'{"error": {"httpCode": 500, "message": "no\\u001b[31m storage"}}'),
            "/busy": (503, b""),
            "/secret": (200 if self.headers.get("Authorization") == "Basic bWU6cHctMTIz" else 401, b"{}"),
            "/elsewhere": (302, b""),
        }
        code, body = found[self.path.partition("/api")[0]]
        self.send_response(code)
        self.send_header("Location", "http://example.invalid/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("page", "answers with a page, not with a trace"),
        ("cut", "not JSON, or cut off"),
        ("other", "it has neither result nor data"),
        ("wrong", r"Jaeger answers with an error: no \[31m storage"),
        ("busy", "answers with 503"),
        ("secret", "it has neither result nor data"),
        ("elsewhere", "answers with 302"),
    ],
)
def test_an_answer_that_is_no_trace(server: str, path: str, expected: str) -> None:
    with pytest.raises(TraceError, match=expected) as caught:
        xsp.load(f"http://me:pw-123@{server}/{path}/trace/{TRACE}")
    assert str(caught.value).startswith(f"http://{server}/{path}/api/v3/traces/{TRACE}")
    assert "pw-123" not in repr(caught.value)


def test_a_linked_trace_that_cannot_be_had_is_a_loss(server: str) -> None:
    notes = [note["text"] for note in xsp.load(f"http://{server}/linked/trace/{TRACE}").run["notes"]]
    expected = f"{TRACE}: linked trace {'ab' * 16}: not a Jaeger trace: it has neither result nor data"
    assert [note for note in notes if "linked" in note] == [expected]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"http://127.0.0.1:1/trace/{TRACE}", "no answer .*; is Jaeger running there"),
        (f"http://127.0.0.1:x/trace/{TRACE}", "not a URL"),
        ("http://localhost:16686/search?service=me&token=pw-123", "not the URL of a trace"),
        (f"http://me:pw-123@localhost:16686/trace/{TRACE}...{TRACE}", "not the URL of a trace"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, expected: str) -> None:
    with pytest.raises(TraceError, match=expected) as caught:
        xsp.load(url)
    assert "pw-123" not in str(caught.value)


def test_an_answer_that_is_too_large_is_given_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.importers import jaeger

    monkeypatch.setattr(jaeger, "MAX_MESSAGE_BYTES", 4)
    with pytest.raises(TraceError, match="more than"):
        xsp.load(f"http://{server}/page/trace/{TRACE}")


def test_a_span_that_only_follows_another_one_has_it_as_its_parent(tmp_path: Path) -> None:
    first, second, third = "b7ad6b7169203331", "cd" * 8, "ef" * 8
    follows = {"refType": "FOLLOWS_FROM", "traceID": TRACE, "spanID": first}
    document = downloaded()
    document["data"] += downloaded(spanID=second, references=[follows])["data"]
    child_of = {"refType": "CHILD_OF", "traceID": TRACE, "spanID": second}
    document["data"] += downloaded(spanID=third, references=[follows, child_of])["data"]
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(document))
    found = xsp.load(file).sql("SELECT span_id, parent_id FROM spans").fetchall()
    assert dict(found) == {first: None, second: first, third: second}


def test_tags_of_any_value_are_read_and_logs_are_counted(tmp_path: Path) -> None:
    tags = [
        {"key": "n", "type": "float64", "value": 10**400},
        {"key": "m", "type": "float64", "value": 2},
        {"key": "error", "type": "string", "value": "true"},
    ]
    file = tmp_path / "shop.json"
    file.write_text(json.dumps(downloaded(tags=tags, logs=[{"timestamp": 1, "fields": []}] * 2)))
    trace = xsp.load(file)
    ((status, attributes),) = trace.sql("SELECT status, attributes FROM spans").fetchall()
    assert status == "error:unknown"
    assert json.loads(attributes) == {"n": None, "m": 2.0, "service.name": "shop"}
    assert trace.run["imported"]["sources"][0]["changed"] == {"events of spans left out": 2}
