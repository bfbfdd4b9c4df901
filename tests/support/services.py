"""A service's OpenTelemetry and a small model, for the tests of `xsp.instrument`."""

from __future__ import annotations

from typing import Any

import torch
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

X = torch.ones(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


class Service:
    """A service's OpenTelemetry: a provider, and the exported spans."""

    def __init__(self, batch: bool = False, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(resource=Resource({"service.name": "shop"}), **options)
        make = BatchSpanProcessor if batch else SimpleSpanProcessor
        self.provider.add_span_processor(make(self.exporter))
        self.tracer = self.provider.get_tracer("app")

    def request(self, trace_id: int | None = None) -> Any:
        """Return the span of a request, in a new trace or in that of a caller."""
        if trace_id is None:
            return self.tracer.start_as_current_span("GET /")
        caller = trace.SpanContext(trace_id, 1, is_remote=True, trace_flags=trace.TraceFlags(1))
        context = trace.set_span_in_context(trace.NonRecordingSpan(caller))
        return self.tracer.start_as_current_span("GET /", context=context)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def levels(self) -> dict[str, int]:
        """Return the numbers of spans by service; each level is a service."""
        services = [str(span.resource.attributes["service.name"]) for span in self.spans]
        return {name: services.count(name) for name in sorted(set(services))}

    def tree_text(self) -> str:
        """Return the spans without operators as text, each indented below its parent."""
        lines: list[str] = []

        def draw(parent: int | None, depth: int) -> None:
            for span in sorted(self.spans, key=lambda span: span.start_time or 0):
                parent_id = span.parent.span_id if span.parent is not None else None
                if parent_id == parent and not span.name.startswith("aten::"):
                    lines.append("  " * depth + f"{span.resource.attributes['service.name']} {span.name}")
                    draw(span.context.span_id, depth + 1)

        draw(None, 0)
        return "\n".join(lines)
