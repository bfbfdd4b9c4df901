"""Callers that still use jaeger-client: their `uber-trace-id` is enough for xsp's spans to join their traces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.instrumentation.fastapi")
pytest.importorskip("opentelemetry.propagators.jaeger")
pytest.importorskip("jaeger_client", reason="jaeger-client is archived, and may not install on this Python")

import fastapi_service
from fastapi.testclient import TestClient
from jaeger_client import ConstSampler, Tracer
from jaeger_client.reporter import InMemoryReporter
from opentelemetry import propagate
from opentelemetry.propagators.jaeger import JaegerPropagator
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentracing import Format


@pytest.fixture(autouse=True)
def event_loop_of_the_thread() -> Iterator[None]:
    """jaeger-client asks for the thread's event loop, as old Tornado did; `asyncio.run` of another test leaves none."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(autouse=True)
def propagated_as_jaeger_did() -> Iterator[None]:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(JaegerPropagator())
    yield
    propagate.set_global_textmap(before)


def call(calls: int = 1, decision: bool = True, **options: Any) -> tuple[list[Any], list[ReadableSpan]]:
    """Call the service from inside spans of jaeger-client; return those spans, and the service's."""
    reporter, exporter, provider = InMemoryReporter(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    caller = Tracer("caller", reporter, ConstSampler(decision))
    with TestClient(fastapi_service.application(provider, **options)) as client:
        for _ in range(calls):
            with caller.start_span("ask") as span:
                headers: dict[str, str] = {}
                caller.inject(span, Format.HTTP_HEADERS, headers)
                client.get("/thread/2", headers=headers)
    caller.close()
    return reporter.get_spans(), list(exporter.get_finished_spans())


def test_the_models_spans_are_in_the_trace_that_jaeger_client_began() -> None:
    (ask,), spans = call(sample=1.0)
    assert {span.context.trace_id for span in spans} == {ask.trace_id}
    assert {"GET /thread/{rows}", "Sequential", "0", "aten::addmm"} <= {span.name for span in spans}
    request = next(span for span in spans if span.name.startswith("GET"))
    assert request.parent is not None
    assert request.parent.span_id == ask.span_id


def test_its_64_bit_trace_ids_are_padded_with_zeros() -> None:
    (ask,), spans = call(sample=1.0)
    assert ask.trace_id < 1 << 64
    assert {span.to_json().split('"trace_id": "0x')[1][:32] for span in spans} == {f"{ask.trace_id:032x}"}


def test_they_are_chosen_by_the_same_bits_as_longer_ids() -> None:
    asks, spans = call(calls=20, sample=0.5)
    recorded = {span.context.trace_id for span in spans if span.name == "0"}
    assert recorded == {ask.trace_id for ask in asks if ask.trace_id < 1 << 63}


def test_what_the_caller_does_not_sample_is_not_recorded() -> None:
    _, spans = call(decision=False, sample=1.0)
    assert spans == []
