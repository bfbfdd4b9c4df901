"""`traced.engine`: requests that an engine serves in steps, in their own traces, with links to the steps."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk")

import torch
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from realparts import Jaeger, fetch_json, poll
from services import Service, X, model
from torch import nn

import xsp
from xsp import serving
from xsp.account import served
from xsp.account.requests import token_gaps
from xsp.instrumentation.instrument import _find_collectors
from xsp.schema import Level
from xsp.serving import PARTS, Engine

HALF = 1 << 63


def by_kind(service: Service, kind: str) -> list[ReadableSpan]:
    return [span for span in service.spans if (span.attributes or {}).get("xsp.kind") == kind]


def under(service: Service, parent: ReadableSpan) -> list[ReadableSpan]:
    children = [s for s in service.spans if s.parent is not None and s.parent.span_id == parent.context.span_id]
    return sorted(children, key=lambda span: span.start_time or 0)


def links(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def serve(traced: Any, net: nn.Module, *steps: list[tuple[Any, ...]]) -> None:
    for requests in steps:
        with traced.engine(requests=requests):
            net(X)


def test_a_request_has_its_steps_in_its_own_trace(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        for name in ("a", "b"):
            with service.request():
                traced.arrive(name, prompt_tokens=6)
        serve(
            traced, net,
            [("a", "prefill", 4)], [("a", "prefill", 2), ("b", "prefill", 6)], [("a", "decode", 1), ("b", "decode", 1)],
            [("b", "decode", 1)], [("a", "decode", 1)],
        )  # fmt: skip
        traced.finish("a")
        traced.finish("b", "cancelled")
        assert traced.flush()
        assert traced.notes == []
    requests = {span.attributes["xsp.serving.request"]: span for span in by_kind(service, "request")}
    steps = sorted(by_kind(service, "step"), key=lambda span: span.start_time or 0)
    assert [step.name for step in steps] == ["prefill", "prefill", "decode", "decode", "decode"]
    assert len({step.context.trace_id for step in steps}) == 5
    assert {step.resource.attributes["service.name"] for step in steps} == {"shop.model"}
    calls = [span for span in service.spans if span.name == "Sequential" and span.attributes["xsp.kind"] == "forward"]
    assert {call.parent.span_id for call in calls if call.parent} == {step.context.span_id for step in steps}
    a, b = requests["a"], requests["b"]
    for request in (a, b):
        caller = next(span for span in service.spans if span.context.span_id == request.parent.span_id)
        assert caller.name == "GET /"
        assert caller.context.trace_id == request.context.trace_id
        assert request.end_time - request.start_time == sum(request.attributes[f"xsp.serving.{n}_ns"] for n in PARTS)
        assert request.attributes["gen_ai.operation.name"] == "text_completion"
        assert request.attributes["gen_ai.usage.input_tokens"] == 6
        assert request.resource.attributes["service.name"] == "shop"
    assert [child.name for child in under(service, a)] == [
        "queue", "prefill", "prefill", "decode", "preempted", "decode"
    ]  # fmt: skip
    assert (a.attributes["gen_ai.usage.output_tokens"], b.attributes["gen_ai.usage.output_tokens"]) == (3, 3)
    assert (a.attributes["xsp.status"], b.attributes["xsp.status"]) == ("ok", "cancelled")
    assert [child.name for child in under(service, b)] == ["queue", "prefill", "decode", "preempted"]
    decoding = under(service, b)[2]
    assert links(decoding) == {step.context.span_id for step in steps[2:4]}
    assert links(steps[1]) == links(steps[2]) == {a.context.span_id, b.context.span_id}
    assert json.loads(steps[1].attributes["xsp.serving.parts"]) == [
        ["a", "prefill", 2, None],
        ["b", "prefill", 6, None],
    ]


def test_only_chosen_requests_and_their_steps_are_recorded(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=0.5, provider=service.provider) as traced:
        for name, trace_id in (("in", 1), ("out", HALF)):
            with service.request(trace_id):
                traced.arrive(name)
        serve(
            traced, net, [("out", "prefill", 6)], [("in", "prefill", 9), ("out", "decode", 1)], [("out", "decode", 1)]
        )
        serve(traced, net, [("in", "decode", 1), ("out", "decode", 1)])
        traced.finish("in")
        traced.finish("out")
        assert traced.flush()
        assert traced.counts[:3] == (4, 2, 2)
    [request] = by_kind(service, "request")
    assert request.attributes["xsp.serving.request"] == "in"
    assert request.attributes["xsp.serving.preempted_ns"] > 0
    assert request.attributes["xsp.serving.others_decode_ns"] > 0
    assert [step.name for step in by_kind(service, "step")] == ["mixed", "decode"]


def test_a_request_without_a_trace_gets_one(service: Service) -> None:
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        serve(traced, net, [(7, "prefill", 4)])
        traced.finish(7, "error:MemoryError")
        assert traced.flush()
        assert [note for note in traced.notes if "arrival was not stated" in note]
    [request] = by_kind(service, "request")
    assert request.parent is None
    assert request.status.description == "error:MemoryError"
    assert request.attributes["error.type"] == "MemoryError"


def test_a_request_that_never_ends_is_named_when_the_handle_closes(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with caplog.at_level("WARNING", "xsp"), xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        traced.arrive("lost")
        serve(traced, net, [("lost", "prefill", 4)], [])
    assert sum("1 request never ended ('lost')" in record.message for record in caplog.records) == 1
    assert sum("served no request" in record.message for record in caplog.records) == 1
    [request] = by_kind(service, "request")
    assert request.attributes["xsp.status"] == "unclosed"


def test_each_handle_has_the_engines_of_its_models(service: Service) -> None:
    other, one, two = Service(), model(), model()
    around = nn.Sequential(two)
    with (
        xsp.instrument(one, sample=1.0, provider=service.provider) as first,
        xsp.instrument(two, sample=1.0, provider=other.provider) as second,
    ):
        for traced, net in ((first, one), (second, two)):
            traced.arrive("same id")
            serve(traced, net, [("same id", "prefill", 3)])
            traced.finish("same id")
        named, unknown = Engine("wrapped", around), Engine("unknown")
        for engine in (named, unknown):
            engine.arrive("x")
            with engine.step([("x", "prefill", 1)]):
                pass
            engine.finish("x")
        assert first.flush()
        assert second.flush()
    assert len(by_kind(service, "request")) == 1
    engines = {span.attributes["xsp.serving.engine"] for span in by_kind(other, "request")}
    assert engines == {"Sequential", "wrapped"}
    other.provider.shutdown()
    assert serving._sinks == []


def test_results_and_the_programs_context_stay_as_they_are(service: Service) -> None:
    from opentelemetry import trace

    net = model()
    expected = net(X)
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced, service.request():
        before = trace.get_current_span()

        def fail() -> None:
            with traced.engine([("a", "prefill", 1)]):
                assert torch.equal(net(X), expected)
                raise KeyError("mine")

        with pytest.raises(KeyError):
            fail()
        assert trace.get_current_span() is before
        dropped = traced.engine([("a", "decode", 1)])
        dropped.begin()
        assert trace.get_current_span() is not before
        dropped.drop()
        assert trace.get_current_span() is before
        traced.finish("a")
    assert [step.status.description for step in by_kind(service, "step")] == ["error:KeyError"]
    with traced.engine([("a", "prefill", 1)]):  # the handle is closed
        assert torch.equal(net(X), expected)
    assert not [thread for thread in threading.enumerate() if thread.name == "xsp serves"]


@pytest.mark.slow
def test_an_unsampled_step_costs_little(service: Service) -> None:
    net = model()
    requests = [(number, "decode", 1) for number in range(16)]
    with xsp.instrument(net, sample=0.0, provider=service.provider) as traced:
        for number in range(16):
            traced.arrive(number)
        times = []
        for _ in range(20):
            began = time.process_time_ns()
            for _ in range(200):
                with traced.engine(requests):
                    pass
            traced._requests.drain()
            times.append((time.process_time_ns() - began) / 200)
        assert min(times) < 50_000  # 1 % of a step of 5 ms, with what the thread does afterwards
        for number in range(16):
            traced.finish(number)


@pytest.mark.slow
def test_what_a_receiver_gets_answers_as_a_run_does(service: Service, tmp_path: Path) -> None:
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    net = model()
    with xsp.instrument(net, sample=1.0, provider=service.provider) as traced:
        for number in range(12):
            with service.request():
                traced.arrive(number, prompt_tokens=4)
            serve(traced, net, [(number, "prefill", 4)], [(number, "decode", 1)])
            traced.finish(number)
        traced.arrive("without a caller")
        serve(traced, net, [("without a caller", "prefill", 2)])
        traced.finish("without a caller")
        assert traced.flush()
    (tmp_path / "spans.pb").write_bytes(encoder.encode_spans(service.spans).SerializeToString())
    trace = xsp.load(tmp_path / "spans.pb")
    found = served.requests(trace)
    assert len(found) == 13
    for each in found:
        assert sum(each.parts.values()) == each.latency_ns
    assert len(served.steps(trace)) == 25
    assert len(token_gaps(trace)) == 12
    assert len(xsp.analyses.requests(trace).fetchall()) == 13


@pytest.mark.jaeger
def test_a_request_leads_to_the_steps_that_served_it_in_jaeger(jaeger: Jaeger) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "shop"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{jaeger.otlp_http}/v1/traces")))
    net, caller = model(), 0xBEEF << 64 | 1
    context = trace.set_span_in_context(
        trace.NonRecordingSpan(trace.SpanContext(caller, 1, is_remote=True, trace_flags=trace.TraceFlags(1)))
    )
    with xsp.instrument(net, sample=1.0, provider=provider) as traced:
        with provider.get_tracer("app").start_as_current_span("GET /", context=context):
            traced.arrive("a", prompt_tokens=6)
        serve(traced, net, [("a", "prefill", 6)], [("a", "decode", 1), ("b", "prefill", 3)])
        traced.finish("a")
        traced.finish("b")
        assert traced.flush()
    provider.shutdown()

    def fetched(trace_id: str, spans: int) -> dict[str, Any]:
        def whole() -> dict[str, Any] | None:
            answer = fetch_json(f"{jaeger.query}/api/traces/{trace_id}")
            found: dict[str, Any] | None = answer and answer["data"][0]
            return found if found and len(found["spans"]) >= spans else None

        answer = poll(whole)
        assert answer is not None
        return answer

    def names(found: dict[str, Any]) -> list[str]:
        return [span["operationName"] for span in found["spans"]]

    own = fetched(f"{caller:032x}", 5)
    assert sorted(names(own)) == ["GET /", "decode", "prefill", "queue", "text_completion Sequential"]
    [decode] = [span for span in own["spans"] if span["operationName"] == "decode"]
    [link] = [each for each in decode["references"] if each["traceID"] != own["traceID"]]
    step = fetched(link["traceID"], 3)
    root = next(span for span in step["spans"] if span["spanID"] == link["spanID"])
    assert root["operationName"] == "mixed"
    assert {"Sequential", "Linear"} & set(names(step)), "the model's calls are below the step"


def test_generate_in_a_service_makes_no_requests_beside_those_of_the_service() -> None:
    names = {each.name for each in _find_collectors(None, Level.MODEL).collectors}
    assert "batching" in names
    assert "generation" not in names
