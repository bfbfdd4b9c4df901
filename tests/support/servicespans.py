"""Spans of a program that is no run of xsp."""

from __future__ import annotations

from collections.abc import Iterator

from xsp.importers.otlp import OtlpSpan, ScopeSpans


def of_service(number: int) -> Iterator[ScopeSpans]:
    """Yield a trace of a service with two spans."""
    trace, root, start = f"{number:032x}", f"{number:016x}", 1_000_000 * number
    own = OtlpSpan(trace, root, None, "GET /", start, start + 5_000, {})
    yield ScopeSpans(
        {"service.name": "shop"}, "http", [own, own._replace(span_id="ab" * 8, parent_id=root, name="query")]
    )
