"""deploy/: the files that docker compose mounts, in the real programs; the compose file as far as a reader can tell."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import urllib.request
from typing import Any

import pytest
import yaml
from realparts import DEPLOY, Collector, Jaeger, ServerProgram, fetch_json, poll, program_path

COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]


def from_to(start_ns: int, end_ns: int) -> dict[str, str]:
    epoch = 1_790_000_000_000_000_001
    return {"startTimeUnixNano": str(epoch + start_ns), "endTimeUnixNano": str(epoch + end_ns)}


def send(part: ServerProgram, *names: str) -> str:
    """Send a trace with spans of these names, each below the one before; return its id."""
    trace, ids = secrets.token_hex(16), [""] + [secrets.token_hex(8) for _ in names]
    spans = [
        {
            "traceId": trace, "spanId": ids[place + 1], "parentSpanId": ids[place], "name": name, "kind": 1,
            **from_to(place, 1000),
        }
        for place, name in enumerate(names)
    ]  # fmt: skip
    post(part, [resource_spans({"service.name": "xsp.model"}, spans)])
    return trace


def resource_spans(attributes: dict[str, str], spans: list[dict[str, Any]]) -> dict[str, Any]:
    described = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"resource": {"attributes": described}, "scopeSpans": [{"spans": spans}]}


def post(part: ServerProgram, resources: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(part.otlp_http + "/v1/traces", json.dumps({"resourceSpans": resources}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def names_in(jaeger: Jaeger, trace: str) -> set[str]:
    """Return the names of a trace's spans as Jaeger gives them back; none while it has none."""
    found = fetch_json(f"{jaeger.query}/api/v3/traces/{trace}")
    resources = (found or {"result": {}})["result"].get("resourceSpans", [])
    scopes = [scope for resource in resources for scope in resource["scopeSpans"]]
    return {span["name"] for scope in scopes for span in scope["spans"]}


@pytest.fixture
def stored(tmp_path):
    """A Jaeger as the profile `single` has it, but for addresses and folders."""
    jaeger = Jaeger(tmp_path, memory=False)
    jaeger.start()
    yield jaeger
    jaeger.stop()


def test_every_port_is_of_loopback():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []


def test_no_two_services_of_a_profile_want_the_same_port():
    for profile in ("single", "scale"):
        ports = [port for entry in SERVICES.values() if profile in entry["profiles"] for port in entry.get("ports", [])]
        assert len(set(ports)) == len(ports)


def test_jaeger_alone_is_what_starts_when_no_profile_is_named():
    assert "COMPOSE_PROFILES=single\n" in (DEPLOY / ".env").read_text()
    assert [name for name, entry in SERVICES.items() if "single" in entry["profiles"]] == ["jaeger", "owner"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_bounded_and_asked_for_its_health(name):
    service = SERVICES[name]
    assert re.fullmatch(r"[\w/-]+:\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", service["image"])
    assert service["mem_limit"]
    watched = "otelcol-health" if name == "otelcol" else name
    assert "healthcheck" in SERVICES[watched]


def test_what_is_mounted_is_there():
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert sorted(set(files)) == ["./jaeger-scale.yaml", "./jaeger.yaml", "./otelcol.yaml", "./ui.json"]
    assert all((DEPLOY / file).is_file() for file in files)
    assert set(mounts) - set(files) == set(COMPOSE["volumes"])


def test_services_wait_only_for_services_of_their_profile():
    for service in SERVICES.values():
        for other in service.get("depends_on", []):
            assert set(service["profiles"]) <= set(SERVICES[other]["profiles"])


def test_the_collector_that_is_deployed_is_the_one_that_is_tested():
    tested = re.search(r"^COLLECTOR=v(\S+)", (DEPLOY / "build.sh").read_text(), re.M)[1]
    assert f":{tested}@" in SERVICES["otelcol"]["image"]


@pytest.mark.parametrize("name", ["jaeger.yaml", "jaeger-scale.yaml"])
@pytest.mark.jaeger
def test_jaeger_knows_every_setting(name):
    subprocess.run([program_path("jaeger"), "validate", "--config", DEPLOY / name], check=True, capture_output=True)


@pytest.mark.jaeger
def test_jaeger_keeps_spans_over_a_restart(stored):
    trace = send(stored, "step", "layer1")
    assert poll(lambda: names_in(stored, trace)) == {"step", "layer1"}
    stored.restart()
    assert names_in(stored, trace) == {"step", "layer1"}


@pytest.mark.jaeger
def test_jaeger_takes_requests_beyond_the_default(jaeger):
    trace = send(jaeger, "step", "x" * 21_000_000)
    assert "step" in poll(lambda: names_in(jaeger, trace))


@pytest.mark.jaeger
def test_jaeger_takes_grpc_messages_beyond_the_default(jaeger):
    grpc = pytest.importorskip("grpc")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    trace, request = secrets.token_bytes(16), messages.ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(trace_id=trace, span_id=secrets.token_bytes(8))
    span.name = "x" * 5_000_000
    with grpc.insecure_channel(jaeger.otlp_grpc.removeprefix("http://")) as channel:
        service.TraceServiceStub(channel).Export(request)
    assert poll(lambda: names_in(jaeger, trace.hex())) == {span.name}


@pytest.mark.jaeger
def test_jaeger_does_not_trace_itself(jaeger):
    trace = send(jaeger, "step")
    poll(lambda: names_in(jaeger, trace))
    assert "jaeger" not in fetch_json(jaeger.query + "/api/v3/services")["services"]


@pytest.mark.parametrize(("device", "warned"), [("host-1", False), ("host-2", True)])
@pytest.mark.jaeger
def test_a_kernel_that_runs_after_its_launch_is_no_clock_skew_on_the_same_host(jaeger, device, warned):
    trace, launch = secrets.token_hex(16), secrets.token_hex(8)
    op = {"traceId": trace, "spanId": launch, "name": "aten::mm", "kind": 1, **from_to(1000, 2000)}
    kernel = {"traceId": trace, "spanId": secrets.token_hex(8), "parentSpanId": launch, "name": "gemm", "kind": 1}
    post(
        jaeger,
        [
            resource_spans({"service.name": "xsp.op", "host.id": "host-1"}, [op]),
            resource_spans({"service.name": "xsp.kernel", "host.id": device}, [kernel | from_to(3000, 3500)]),
        ],
    )
    poll(lambda: len(names_in(jaeger, trace)) == 2)
    found = fetch_json(f"{jaeger.query}/api/v3/traces/{trace}")
    assert ("clock skew" in json.dumps(found)) is warned


@pytest.mark.jaeger
def test_what_the_collector_accepted_reaches_jaeger_though_both_are_killed(tmp_path, stored):
    queue = tmp_path / "queue"
    queue.mkdir()
    collector = Collector(
        tmp_path,
        DEPLOY / "otelcol.yaml",
        {
            "exporters": {"otlp_grpc": {"endpoint": stored.otlp_grpc.removeprefix("http://")}},
            "extensions": {"file_storage": {"directory": str(queue)}},
        },
    )
    stored.kill()
    collector.start()
    trace = send(collector, "step", "layer1", "conv2d")
    collector.kill()
    stored.start()
    collector.start()
    assert poll(lambda: names_in(stored, trace)) == {"step", "layer1", "conv2d"}
    collector.stop()


@pytest.mark.jaeger
def test_a_collector_that_is_killed_has_written_what_it_accepted(otel_collector, tmp_path):
    collector = otel_collector(tmp_path / "spans.jsonl")
    send(collector, "step")
    collector.kill()
    collector.start()
    send(collector, "step again")
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    assert ["step" in line for line in lines] == [True, True]
