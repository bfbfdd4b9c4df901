"""Spans of a table → OTLP requests, read back with OpenTelemetry's own classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import duckdb
import pytest

from xsp import semconv, table
from xsp.span import COLUMNS, Column, Level, Span

pytest.importorskip("opentelemetry.proto", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from xsp.exporters.encode import Request, requests

LINKS = Column("links", "VARCHAR", "")
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "0000000000000000000000000000000f"


def spans_in(con: duckdb.DuckDBPyConnection, spans: list[Span], links: list[str | None] | None = None) -> str:
    columns = (*COLUMNS, LINKS) if links else COLUMNS
    table.create(con, "given", columns)
    rows = [(*span, link) for span, link in zip(spans, links, strict=True)] if links else spans
    table.insert(con, "given", rows, columns)
    return "given"


def resource_of(level: int, rank: int, process: int | None) -> Mapping[str, str | int]:
    return semconv.resource({"id": "run"}, level, rank, process)


def sent(spans: list[Span], links: list[str | None] | None = None, **limits: int) -> list[Request]:
    con = table.connect()
    return list(requests(con, spans_in(con, spans, links), resource_of, **limits))


def read(found: list[Request]) -> Iterator[tuple[dict[str, Any], trace_pb2.Span]]:
    """Yield each span with the attributes of its resource."""
    for request in found:
        message = ExportTraceServiceRequest.FromString(request.body)
        for part in message.resource_spans:
            resource = {each.key: plain(each.value) for each in part.resource.attributes}
            for scope in part.scope_spans:
                assert scope.scope.name == "xsp"
                yield from ((resource, span) for span in scope.spans)


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    if kind == "kvlist_value":
        return {each.key: plain(each.value) for each in value.kvlist_value.values}
    return getattr(value, kind) if kind else None


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    keys = [each.key for each in span.attributes]
    assert len(keys) == len(set(keys)), "each key once"
    return {each.key: plain(each.value) for each in span.attributes}


def number(place: int) -> str:
    return f"{place + 1:016x}"


# --- one span ---------------------------------------------------------------------------------------------


def test_a_span_has_its_columns_as_fields_and_attributes() -> None:
    given = Span(
        trace_id=TRACE, span_id="00f067aa0ba902b7", parent_id="0000000000000001", parent_rule="containment",
        level=Level.LAYER, kind="module", name="features.0", type="Conv2d", start_ns=1_800_000_000_000_000_001,
        dur_ns=999, process=42, thread=43, rank=1, timed=True, input_shapes="[[1, 3]]", flops=1 << 40,
        attributes='{"opaque": "torch.compile", "gen_ai.request.model": "x"}',
    )  # fmt: skip
    [(resource, span)] = read(sent([given]))
    assert (span.trace_id.hex(), span.span_id.hex()) == (TRACE, "00f067aa0ba902b7")
    assert (span.parent_span_id.hex(), span.name) == ("0000000000000001", "features.0")
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (given.start_ns, given.start_ns + 999)
    assert (span.kind, span.flags, span.status.code) == (trace_pb2.Span.SPAN_KIND_INTERNAL, 1, 0)
    assert attributes(span) == {
        "xsp.parent_rule": "containment", "xsp.level": "layer", "xsp.kind": "module", "xsp.type": "Conv2d",
        "xsp.duration_ns": 999, "thread.id": 43, "xsp.timed": True, "xsp.status": "ok", "xsp.input_shapes": "[[1, 3]]",
        "xsp.flops": 1 << 40, "xsp.attributes.opaque": "torch.compile", "gen_ai.request.model": "x",
    }  # fmt: skip
    assert (resource["service.name"], resource["xsp.rank"], resource["process.pid"]) == ("xsp.layer", 1, 42)
