"""A real FastAPI service: its requests hold the spans of its model, in its own trace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("opentelemetry.instrumentation.fastapi")

import fastapi_service
import httpx
from fastapi.testclient import TestClient
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from realparts import Jaeger, fetch_json, free_ports, poll

CALLER = "00-{:032x}-00000000000000aa-01"


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.clear()


def client_of(exporter: InMemorySpanExporter, **options: Any) -> TestClient:
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return TestClient(fastapi_service.application(provider, **options), raise_server_exceptions=False)


def ancestry(span: ReadableSpan, spans: list[ReadableSpan]) -> list[str]:
    """Return the names of a span and of those above it."""
    by_id = {each.context.span_id: each for each in spans}
    names = [span.name]
    while span.parent is not None and span.parent.span_id in by_id:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return names


@pytest.mark.parametrize("way", ["thread", "loop"])
def test_operators_hang_under_the_request_whose_trace_the_caller_began(
    exported: InMemorySpanExporter, way: str
) -> None:
    with client_of(exported, sample=1.0) as client:
        answer = client.get(f"/{way}/3", headers={"traceparent": CALLER.format(0xABC)})
    assert answer.json() == [3, 2]
    spans = list(exported.get_finished_spans())
    assert {span.context.trace_id for span in spans} == {0xABC}
    addmm = min((span for span in spans if span.name == "aten::addmm"), key=lambda span: span.start_time or 0)
    request = f"GET /{way}/{{rows}}"
    assert ancestry(addmm, spans) == ["aten::addmm", "aten::linear", "0", "Sequential", "Sequential", request]


def test_only_requests_that_are_chosen_by_their_trace_id_are_recorded(exported: InMemorySpanExporter) -> None:
    ids = [number << 57 for number in range(1, 101)]
    with client_of(exported, sample=0.01) as client:
        for number in ids:
            client.get("/thread/1", headers={"traceparent": CALLER.format(number)})
        counts = client.app.state.traced.counts
    assert counts[:3] == (100, 1, 1)
    assert {span.context.trace_id for span in exported.get_finished_spans() if span.name == "0"} == {1 << 57}


def test_an_error_of_the_model_is_the_requests_own(exported: InMemorySpanExporter) -> None:
    with client_of(exported, sample=1.0) as client:
        assert client.get("/fail").status_code == 500
    model = next(span for span in exported.get_finished_spans() if span.name == "Sequential")
    assert model.status.description == "error:RuntimeError"


# --- a process of its own ---------------------------------------------------------------------------------


@contextmanager
def served(*out: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the service; yield its URL and a list that holds what it printed when it has ended."""
    port = free_ports(1)[0]
    url, lines = f"http://127.0.0.1:{port}", []
    command = [sys.executable, str(Path(fastapi_service.__file__)), str(port), *out]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        poll(lambda: fetch_json(f"{url}/openapi.json"))
        yield url, lines
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert err == ""
        lines += map(json.loads, out.splitlines())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_real_server_delivers_all_spans_before_it_ends() -> None:
    with served() as (url, lines):
        for number in range(1, 4):
            httpx.get(f"{url}/thread/{number}", headers={"traceparent": CALLER.format(number)})
    for number in range(1, 4):
        trace = [line for line in lines if line["context"]["trace_id"] == f"0x{number:032x}"]
        ids = {line["context"]["span_id"] for line in trace}
        assert [line["name"] for line in trace if line["parent_id"] not in ids] == ["GET /thread/{rows}"]
        assert {line["resource"]["attributes"]["service.name"] for line in trace} >= {"shop", "shop.layer", "shop.op"}


@pytest.mark.slow
def test_the_page_on_services_runs() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "use" / "services.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    request = "from fastapi.testclient import TestClient\nassert TestClient(app).get('/predict/2').json()\n"
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    code = "\n".join([blocks[0], request, *blocks[1:], "print(traced.counts)"])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **nobody},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.startswith("Counts(calls=4, sampled="), "two requests, and two steps of the engine"


def _services(trace: dict[str, Any]) -> Counter[str]:
    return Counter(trace["processes"][span["processID"]]["serviceName"] for span in trace["spans"])


def _whole(answer: Any) -> dict[str, Any] | None:
    """Return the trace once Jaeger has as many spans of each service as are expected: they arrive in several parts."""
    trace: dict[str, Any] | None = answer and answer["data"][0]
    return trace if trace and _services(trace) >= Counter({"shop": 2, "shop.layer": 4, "shop.op": 11}) else None


@pytest.mark.jaeger
@pytest.mark.parametrize(("way", "trace_id"), [((), 0xCAFE << 64 | 1), (("directly",), 0xCAFE << 64 | 2)])
def test_a_request_and_its_model_are_one_trace_in_jaeger(jaeger: Jaeger, way: tuple[str, ...], trace_id: int) -> None:
    with served(jaeger.otlp_http, *way) as (url, _):
        httpx.get(f"{url}/loop/2", headers={"traceparent": CALLER.format(trace_id)})
    trace = poll(lambda: _whole(fetch_json(f"{jaeger.query}/api/traces/{trace_id:032x}")))
    services = _services(trace)
    assert services["shop"] == 2
    assert services["shop.layer"] == 4
    assert services["shop.op"] > 10
    warned = {span["operationName"]: span["warnings"] for span in trace["spans"] if span.get("warnings")}
    assert list(warned) == ["GET /loop/{rows}"], warned  # its parent is the caller, of whom Jaeger never heard
