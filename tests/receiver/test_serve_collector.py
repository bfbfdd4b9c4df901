"""The receiver behind a real Collector that puts several ranks into one request."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from realparts import Collector, ServeProcess, poll
from receivers import about, write_run
from roundtrip import export_run

import xsp
from xsp.otlp.transport import as_json

RANKS = 3
JOB = "ab" * 16


def write_ranks(folder: Path) -> list[Path]:
    """Write the runs of the ranks of one job, which share its trace."""
    runs = []
    for rank in range(RANKS):
        own = {**about(rank + 1)["otel"], "trace_id": JOB}
        size = {"rank": rank, "local_rank": rank, "world_size": RANKS}
        runs.append(
            write_run(folder / f"rank-{rank}", steps=3, spans=20, number=rank + 1, in_trace=True, otel=own, **size)
        )
    return runs


def batching(to: ServeProcess, door: str) -> dict[str, Any]:
    """Return the configuration of a Collector that collects spans for a second, and sends them on together."""
    own = {
        "http": {"otlp_http": {"endpoint": to.http, "retry_on_failure": {"initial_interval": "200ms"}}},
        "grpc": {
            "otlp_grpc": {
                "endpoint": to.grpc.removeprefix("grpc://"),
                "tls": {"insecure": True},
                "retry_on_failure": {"initial_interval": "200ms"},
            }
        },
    }[door]
    traces = {"receivers": ["otlp"], "processors": ["batch"], "exporters": list(own)}
    service = {
        "extensions": ["health_check"],
        "telemetry": {"metrics": {"level": "none"}},
        "pipelines": {"traces": traces},
    }
    return {"processors": {"batch": {"timeout": "1s", "send_batch_size": 10_000}}, "exporters": own, "service": service}


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """What is to be ended with the test."""
    parts: list[Any] = []
    yield parts
    for part in reversed(parts):
        if isinstance(part, ServeProcess):
            part.process.kill()
            part.process.communicate()
        else:
            part.kill()


def found(place: Path) -> dict[int, int]:
    """Return the spans of each rank."""
    counted = "SELECT rank, count(*) FROM spans GROUP BY rank"
    return dict(xsp.load(place).sql(counted).fetchall())


@pytest.mark.jaeger
@pytest.mark.parametrize("door", ["http", "grpc"])
def test_ranks_that_a_collector_put_into_one_request_all_arrive(started: list[Any], tmp_path: Path, door: str) -> None:
    receiver = ServeProcess(tmp_path / "received")
    started.append(receiver)  # before the Collector, without which the test skips
    collector = Collector(tmp_path, batching(receiver, door))
    started.append(collector)
    collector.start()
    for run in write_ranks(tmp_path):
        export_run(run, collector.otlp_http)
    collector.stop()
    receiver.end()
    (place,) = receiver.runs()
    assert found(place) == dict.fromkeys(range(RANKS), 60)
    assert [each["rank"] for each in xsp.load(place).run["ranks"]] == [0, 1, 2]


@pytest.mark.jaeger
def test_a_receiver_that_is_killed_behind_a_collector_has_all_ranks_in_the_end(
    started: list[Any], tmp_path: Path
) -> None:
    receiver = ServeProcess(tmp_path / "received")
    started.append(receiver)  # before the Collector, without which the test skips
    port = receiver.http.rpartition(":")[2]
    collector = Collector(tmp_path, batching(receiver, "http"))
    started.append(collector)
    collector.start()
    ranks = write_ranks(tmp_path)
    export_run(ranks[0], collector.otlp_http)
    export_run(ranks[1], collector.otlp_http)
    poll(lambda: any((tmp_path / "received").glob("*/arrived/*.parquet")))
    receiver.end(signal.SIGKILL)
    export_run(ranks[2], collector.otlp_http)
    time.sleep(1.5)  # the Collector's batch goes to nobody, and is tried again
    second = ServeProcess(tmp_path / "received", "--http", f"127.0.0.1:{port}")
    started.append(second)
    (place,) = second.runs()
    poll(lambda: found(place) == dict.fromkeys(range(RANKS), 60))
    collector.stop()
    second.end()
    assert found(place) == dict.fromkeys(range(RANKS), 60)


def of_two(merge: Callable[..., Any]) -> bytes:
    """Return one request with the resources of two ranks."""
    both = ExportTraceServiceRequest()
    for rank in (0, 1):
        both.MergeFrom(merge(rank))
    return both.SerializeToString()


def of_rank(rank: int) -> ExportTraceServiceRequest:
    """Return a request with a span of one rank of a job."""
    message = ExportTraceServiceRequest()
    resource = message.resource_spans.add()
    said: dict[str, Any] = {"xsp.run.id": f"{rank + 1:016x}", "xsp.run.name": "job", "xsp.rank": rank}
    for name, value in {**said, "xsp.world_size": 2}.items():
        pair = resource.resource.attributes.add(key=name)
        if isinstance(value, str):
            pair.value.string_value = value
        else:
            pair.value.int_value = value
    span = resource.scope_spans.add().spans.add(
        trace_id=bytes.fromhex(JOB), span_id=(rank + 1).to_bytes(8, "big"), name="step", start_time_unix_nano=10**18
    )
    span.end_time_unix_nano = 10**18 + 1000
    span.attributes.add(key="xsp.kind").value.string_value = "step"
    span.attributes.add(key="xsp.level").value.string_value = "model"
    span.attributes.add(key="xsp.step").value.int_value = 0
    return message


def test_one_request_with_two_ranks_of_a_job_is_stored_whole(started: list[Any], tmp_path: Path) -> None:
    receiver = ServeProcess(tmp_path / "received")
    started.append(receiver)
    answer = receiver.post(of_two(of_rank))
    assert (answer.status_code, answer.text) == (200, "")
    receiver.end()
    (place,) = receiver.runs()
    assert found(place) == {0: 1, 1: 1}


@pytest.mark.slow
def test_a_description_of_a_run_that_holds_no_text_does_not_keep_its_job_from_going_on(
    started: list[Any], tmp_path: Path
) -> None:
    receiver = ServeProcess(tmp_path / "received")
    started.append(receiver)
    for rank in (0, 1):
        request = json.loads(as_json(of_rank(rank).SerializeToString()))
        (span,) = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
        said = {"id": f"{rank + 1:016x}", "name": "\ud800", "command": ["\ud800"], "rank": rank, "world_size": 2}
        described = json.dumps(said)
        attributes = [{"key": "xsp.kind", "value": {"stringValue": "run"}}]
        attributes.append({"key": "xsp.run", "value": {"stringValue": described}})
        own = {**span, "spanId": "ee" * 8, "name": "run \ud800", "attributes": attributes}
        request["resourceSpans"][0]["scopeSpans"][0]["spans"].append(own)
        for _ in range(2):
            body = json.dumps(request).encode()
            assert receiver.post(body, {"Content-Type": "application/json"}).status_code == 200
    receiver.end()
    (place,) = receiver.runs()
    assert found(place) == {0: 1, 1: 1}
