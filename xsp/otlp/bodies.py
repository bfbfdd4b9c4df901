"""Encoded requests: as OTLP's JSON, and in halves for a receiver that takes smaller ones."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def as_json(body: bytes) -> str:
    """Return an encoded request as OTLP's JSON, on one line: ids in hexadecimal digits, enums as numbers."""
    message: dict[str, Any] = MessageToDict(
        ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True, preserving_proto_field_name=False
    )
    for resource in message.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for holder in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in holder:
                            holder[name] = base64.b64decode(holder[name]).hex()
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def halves(body: bytes) -> list[tuple[bytes, int]]:
    """Return an encoded request as two smaller ones with the spans of each; one span cannot be halved.

    Returns:
        The halves; a single one if the request holds a single span.
    """
    whole = ExportTraceServiceRequest.FromString(body)
    places = [
        (r, s, span)
        for r, resource in enumerate(whole.resource_spans)
        for s, scope in enumerate(resource.scope_spans)
        for span in range(len(scope.spans))
    ]
    middle = len(places) // 2
    return [(_only(whole, part), len(part)) for part in (places[:middle], places[middle:]) if part]


def _only(whole: ExportTraceServiceRequest, kept: list[tuple[int, int, int]]) -> bytes:
    """Return a request with some of the spans of another one; kept are consecutive."""
    part = ExportTraceServiceRequest()
    last = None
    for r, s, span in kept:
        if last is None or last[0] != r:
            resource = part.resource_spans.add()
            resource.resource.CopyFrom(whole.resource_spans[r].resource)
            resource.schema_url = whole.resource_spans[r].schema_url
        if last is None or last != (r, s):
            scope = resource.scope_spans.add()
            scope.scope.CopyFrom(whole.resource_spans[r].scope_spans[s].scope)
        scope.spans.append(whole.resource_spans[r].scope_spans[s].spans[span])
        last = (r, s)
    return bytes(part.SerializeToString())
