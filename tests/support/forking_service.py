"""A service that is instrumented before its workers are forked; test_service.py runs it."""

from __future__ import annotations

import os
import sys

import torch
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

import xsp

exporter = InMemorySpanExporter()
provider = TracerProvider(resource=Resource({"service.name": "shop"}))
provider.add_span_processor(SimpleSpanProcessor(exporter))
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
traced = xsp.instrument(model, sample=1.0, provider=provider)


def serve(role: str) -> None:
    with provider.get_tracer("app").start_as_current_span("GET /"):
        model(torch.ones(4, 8))
    assert traced.flush(), traced.counts
    assert traced.counts[:3] == (1, 1, 1), traced.counts
    assert traced.counts.lost == {}, traced.counts
    services = [f"{span.resource.attributes['service.name']},{span.name}" for span in exporter.get_finished_spans()]
    assert any(name.startswith("shop.op,") for name in services)
    print(role, *[name for name in services if name.endswith(",0")], flush=True)


for _ in range(2):
    child = os.fork()
    if child == 0:
        serve("child")
        traced.close()
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("the child failed")
serve("parent")
traced.close()
