"""Small requests that would fill a receiver's memory, or hold all others up."""

from __future__ import annotations

import gzip
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from realparts import PROTOBUF, ServeProcess
from test_serve import EXPORT, JSON, body
from test_serve_collector import of_rank

import xsp
from xsp.importers import otlp_proto
from xsp.otlp.template import block
from xsp.receiver import journal, limits

EMPTY = 20_000_000
SPANS = block(1, block(2, b"\x12\x00" * EMPTY))
VALUES = block(1, block(2, block(2, block(9, block(2, block(5, b"\x0a\x00" * EMPTY))))))
OBJECTS = b'{"resourceSpans":[' + b"{}," * EMPTY + b"{}]}"
LISTS = b'{"resourceSpans":' + b"[" * 2 * EMPTY
MOST_MB = 600


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A receiver of several tests, which ask nothing of what was received before."""
    started = ServeProcess(tmp_path_factory.mktemp("lasting") / "received")
    yield started
    started.process.kill()
    started.process.communicate()


def peak_mb(receiver: ServeProcess) -> float:
    status = Path(f"/proc/{receiver.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "headers"),
    [(SPANS, PROTOBUF), (VALUES, PROTOBUF), (OBJECTS, JSON), (LISTS, JSON)],
    ids=["spans", "values", "objects", "lists"],
)
def test_a_small_request_of_many_empty_things_is_refused_before_they_are_made(
    lasting: ServeProcess, content: bytes, headers: dict[str, str]
) -> None:
    answer = lasting.post(gzip.compress(content, 1), {**headers, "Content-Encoding": "gzip"})
    assert answer.status_code == 413
    assert peak_mb(lasting) < MOST_MB
    assert lasting.post(body()).status_code == 200


@pytest.mark.slow
def test_over_grpc_as_well(receiver: ServeProcess) -> None:
    with grpc.insecure_channel(receiver.grpc.removeprefix("grpc://")) as channel:
        export = channel.unary_unary(EXPORT)
        with pytest.raises(grpc.RpcError) as refused:
            export(SPANS, timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_mb(receiver) < MOST_MB
    receiver.end(stopped=True)  # or this raises: the system gives the signal to whatever thread it likes


def test_a_request_of_many_runs_is_refused_and_leaves_nothing(receiver: ServeProcess) -> None:
    request = ExportTraceServiceRequest()
    for rank in range(200):
        request.MergeFrom(of_rank(rank))
    assert receiver.post(request.SerializeToString()).status_code == 400
    assert receiver.runs() == []


def test_what_a_request_holds_is_counted_as_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ExportTraceServiceRequest()
    for rank in range(20):
        request.MergeFrom(of_rank(rank))
    content = request.SerializeToString()
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 0)
    # of each: resource spans, resource, 4 attributes with values; scope spans, span, 3 attributes with values
    held = 20 * (2 + 8 + 2 + 6)
    monkeypatch.setattr(limits, "MAX_OBJECTS", held)
    limits.check_protobuf(content)
    monkeypatch.setattr(limits, "MAX_OBJECTS", held - 1)
    with pytest.raises(limits.BodyTooLarge):
        limits.check_protobuf(content)


@pytest.mark.parametrize("place", [1, 7, 20, 60])
def test_what_is_cut_off_is_left_to_what_decodes_it(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(limits, "MIN_CHECKED_BYTES", 0)
    limits.check_protobuf(of_rank(0).SerializeToString()[:-place])


@pytest.mark.parametrize("door", ["resource", "span"])
def test_attributes_that_are_nested_too_deeply_are_said(lasting: ServeProcess, door: str) -> None:
    request = of_rank(0)
    resource = request.resource_spans[0]
    holder = resource.resource if door == "resource" else resource.scope_spans[0].spans[0]
    value = holder.attributes.add(key="deep").value
    for _ in range(40):
        value = value.array_value.values.add()
    value.string_value = "bottom"
    answer = lasting.post(request.SerializeToString())
    assert answer.status_code == (400 if door == "resource" else 200)
    assert b"nested too deeply" in answer.content
    assert lasting.post(body()).status_code == 200


def test_a_directory_that_was_removed_is_made_again(receiver: ServeProcess) -> None:
    for number in (1, 2):
        assert receiver.post(body(span_id=number.to_bytes(8, "big"))).status_code == 200
        if number == 1:
            shutil.rmtree(receiver.out / "services")
    receiver.end(signal.SIGTERM)
    assert xsp.load(receiver.out / "services").sql("SELECT count(*) FROM spans").fetchall() == [(1,)]


@pytest.mark.slow
def test_many_small_requests_become_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FILES_PER_MERGE", 10)
    open_one = journal.RunWriter(tmp_path, print)
    for number in range(1, 96):
        message = ExportTraceServiceRequest.FromString(body(span_id=number.to_bytes(8, "big")))
        assert open_one.store(otlp_proto.parts_of(message, "the request")).spans == 1
        open_one.tidy()
    assert len(list((tmp_path / "services" / "arrived").glob("*"))) < 12
    open_one.close()
    trace = xsp.load(tmp_path / "services")
    assert trace.sql("SELECT count(*), count(DISTINCT span_id) FROM spans").fetchall() == [(95, 95)]
    assert trace.run["received"]["doubled"] == 0
