"""Spans of a table → OTLP requests, read back with OpenTelemetry's own classes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb
import pytest
from fuzzing import examples
from hypothesis import given as every
from hypothesis import strategies as st

from xsp import semconv, table
from xsp.errors import TraceError
from xsp.schema import COLUMNS, Column, Level, Span

pytest.importorskip("opentelemetry.proto", reason="the extra `otel` is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from xsp.otlp import encode, ordered
from xsp.otlp.encode import EncodedRequest, requests
from xsp.run import Run

LINKS = Column("links", "VARCHAR", "")
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "0000000000000000000000000000000f"


def spans_in(con: duckdb.DuckDBPyConnection, spans: list[Span], links: list[str | None] | None = None) -> str:
    columns = (*COLUMNS, LINKS) if links else COLUMNS
    table.create(con, "given", columns)
    rows = [(*span, link) for span, link in zip(spans, links, strict=True)] if links else spans
    table.insert(con, "given", rows, columns)
    return "given"


def resource_of(level: int, rank: int, process: int | None) -> Mapping[str, str | int]:
    return semconv.resource(Run.of({"id": "run"}), level, rank, process)


def sent(spans: list[Span], links: list[str | None] | None = None, **limits: int) -> list[EncodedRequest]:
    con = table.connect()
    return list(requests(con, spans_in(con, spans, links), resource_of, **limits))


def read(found: list[EncodedRequest]) -> Iterator[tuple[dict[str, Any], trace_pb2.Span]]:
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


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [("ok", 0, "", None), ("error:ValueError", 2, "error:ValueError", "ValueError"), ("unclosed", 2, "unclosed", None)],
)
def test_a_status_that_is_not_ok_is_an_error_with_a_message(
    status: str, code: int, message: str, kind: str | None
) -> None:
    [(_, span)] = read(sent([Span(TRACE, number(0), status=status)]))
    assert (span.status.code, span.status.message, attributes(span).get("error.type")) == (code, message, kind)


@pytest.mark.parametrize("name", ["", "ü → 名前 🙂", "x" * 100_000, "a\0b", "'; --"])
def test_names_arrive_as_they_are(name: str) -> None:
    [(_, span)] = read(sent([Span(TRACE, number(0), name=name, type=name, key=name)]))
    assert (span.name, attributes(span)["xsp.type"], attributes(span)["xsp.key"]) == (name, name, name)


NUMBERS = [0, 1, -1, 2**28 - 1, 2**28, 2**56 - 1, 2**56, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("count", range(1, len(NUMBERS) + 1))
def test_integers_arrive_as_they_are_whatever_others_stand_in_their_column(count: int) -> None:
    given = [Span(TRACE, number(place), flops=flops) for place, flops in enumerate([None, *NUMBERS[:count]])]
    found = [attributes(span).get("xsp.flops") for _, span in read(sent(given))]
    assert found == [None, *NUMBERS[:count]]


VALUES = {
    "none": None, "yes": True, "no": False, "one": 1, "low": -(2**63), "high": 2**63 - 1, "real": 0.1, "huge": 1e300,
    "text": "ü", "empty": "", "list": [1, [2.5, None], {"deep": []}], "object": {"a": {"b": [False]}}, "nothing": {},
}  # fmt: skip


def test_attributes_keep_their_json_types() -> None:
    [(_, span)] = read(sent([Span(TRACE, number(0), attributes=json.dumps(VALUES))]))
    found = {key.removeprefix("xsp.attributes."): value for key, value in attributes(span).items()}
    assert {key: found[key] for key in VALUES} == VALUES
    assert {key: type(found[key]) for key in VALUES} == {key: type(value) for key, value in VALUES.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 18446744073709551616}', {"xsp.attributes.a": "18446744073709551616"}),  # no int64: its digits
        ('{"a": "\\ud800"}', {"xsp.attributes.a": "?"}),  # a lone surrogate has no UTF-8
        ('{"xsp.kind": "mine"}', {"xsp.kind": "user", "xsp.attributes.xsp.kind": "mine"}),  # no key twice
        ("{}", {}),
    ],
)
def test_attributes_that_otlp_cannot_hold_as_they_are(text: str, expected: dict[str, Any]) -> None:
    [(_, span)] = read(sent([Span(TRACE, number(0), attributes=text)]))
    assert attributes(span).items() >= expected.items()


def test_lists_too_deep_for_a_decoder_go_as_text() -> None:
    [(_, span)] = read(sent([Span(TRACE, number(0), attributes='{"a": ' + "[" * 200 + "]" * 200 + "}")]))
    inner = attributes(span)["xsp.attributes.a"]
    while isinstance(inner, list):
        [inner] = inner
    assert inner == "[" * 184 + "]" * 184


def test_links_arrive_and_a_span_without_has_none() -> None:
    given = [Span(TRACE, number(place)) for place in range(3)]
    found = [span.links for _, span in read(sent(given, [None, json.dumps([[OTHER, number(7)]] * 2), "[]"]))]
    assert [[(link.trace_id.hex(), link.span_id.hex()) for link in links] for links in found] == [
        [], [(OTHER, number(7))] * 2, [],
    ]  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------


def test_no_spans_are_no_request() -> None:
    assert sent([]) == []


def many(count: int, **more: Any) -> list[Span]:
    return [
        Span(TRACE, number(place), number(place // 2) if place else None, level=30 + 10 * (place > 50), start_ns=place,
             name=f"op {place}", **more)
        for place in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("max_bytes", "max_spans"), [(3_500_000, 64), (4000, 8192), (1, 8192), (1500, 3)])
def test_requests_keep_their_limits_and_lose_nothing(max_bytes: int, max_spans: int) -> None:
    found = sent(many(200), max_bytes=max_bytes, max_spans=max_spans)
    assert all(len(each.body) <= max_bytes or each.spans == 1 for each in found)
    assert all(each.spans <= max_spans for each in found)
    assert [each.spans for each in found] == [len(list(read([each]))) for each in found]
    assert Counter(span.span_id.hex() for _, span in read(found)) == Counter(span.span_id for span in many(200))


def test_parents_leave_before_their_children() -> None:
    seen = set()
    for _, span in read(sent(many(500)[::-1], max_spans=7)):
        assert span.parent_span_id in {b"", *seen}
        seen.add(span.span_id)


def test_the_same_spans_are_the_same_bytes_whatever_their_order() -> None:
    given = [span._replace(start_ns=span.start_ns // 10) for span in many(500)]
    assert sent(given) == sent(given[::-1])


@pytest.mark.slow
def test_thousands_of_processes_have_a_resource_each() -> None:
    given = [Span(TRACE, number(place), process=place % 3000, rank=place % 2) for place in range(9000)]
    found = {span.span_id.hex(): resource["process.pid"] for resource, span in read(sent(given, max_bytes=100_000))}
    assert found == {span.span_id: span.process for span in given}


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 10_000, encode.TEMPLATE_BYTES])
def test_texts_that_all_differ_go_through_whatever_memory_there_is_for_them(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "TEMPLATE_BYTES", room)
    monkeypatch.setattr(ordered, "TEXT_BYTES", room)
    given = [
        Span(TRACE, number(place), name="n" * place, key=f"key {place}", status=f"error:{place}")
        for place in range(300)
    ]
    found = {span.name: (attributes(span)["xsp.key"], attributes(span)["error.type"]) for _, span in read(sent(given))}
    assert found == {span.name: (f"key {place}", str(place)) for place, span in enumerate(given)}


def test_templates_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "_HASH", "hash({}) % 16")
    given = [Span(f"{place % 4 + 1:032x}", number(place), name=f"op {place % 5}") for place in range(100)]
    found = {span.span_id.hex(): (span.trace_id.hex(), span.name) for _, span in read(sent(given))}
    assert found == {span.span_id: (span.trace_id, span.name) for span in given}


@pytest.mark.parametrize(("many_spans", "window"), [(0, 64), (10**6, 1 << 16)])
def test_few_templates_are_told_apart_by_few_columns(
    many_spans: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "MIN_SPANS", many_spans)
    monkeypatch.setattr(ordered, "WINDOW", window)
    given = [
        Span(TRACE, number(place), name="same", type=f"{place % 3}", dtype=f"{place % 2}", device=place % 2 or None)
        for place in range(200)
    ]
    found = {span.span_id.hex(): attributes(span) for _, span in read(sent(given))}
    assert [found[span.span_id].get("xsp.type") for span in given] == [span.type for span in given]
    assert [found[span.span_id].get("xsp.dtype") for span in given] == [span.dtype for span in given]
    assert [found[span.span_id].get("cuda.device") for span in given] == [span.device for span in given]


# --- what cannot go out -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trace_id": "xyz"}, "trace_id = 'xyz'"),
        ({"trace_id": None}, "trace_id is missing"),
        ({"span_id": "00f067aa0ba902bg"}, "span_id = '00f067aa0ba902bg'"),
        ({"span_id": "00f067aa_0ba902b"}, "span_id = "),
        ({"span_id": "0" * 16}, "span_id = "),
        ({"parent_id": "12"}, "parent_id = '12'"),
        ({"start_ns": -1}, "start_ns = -1"),
        ({"start_ns": None}, "start_ns is missing"),
        ({"start_ns": 5, "dur_ns": -6}, "start_ns + dur_ns = -1"),
        ({"level": None}, "level is missing"),
    ],
)
def test_a_span_without_a_place_in_a_trace_is_refused_with_its_name_and_value(wrong: dict[str, Any], said: str) -> None:
    bad = Span(TRACE, number(1), name="bad")._replace(**wrong)
    with pytest.raises(TraceError) as refused:
        sent([Span(TRACE, number(0)), bad, bad])
    assert "2 spans" in str(refused.value)
    assert "'bad'" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', '"a"', "1", '{"a":' + "[" * 100_000])
def test_attributes_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="not a JSON object"):
        sent([Span(TRACE, number(0), attributes=text)])


@pytest.mark.parametrize("text", ["{", "[1]", '[["a", "b"]]', f'[["{TRACE}", "{"0" * 16}"]]', f'[["{TRACE}"]]'])
def test_links_that_are_no_ids_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="links"):
        sent([Span(TRACE, number(0))], [text])


def test_the_engine_is_left_as_it_was_found() -> None:
    con = table.connect()
    source = spans_in(con, many(10))
    for taken in (1, 99):
        list(itertools.islice(requests(con, source, resource_of, max_spans=1), taken))
    with pytest.raises(TraceError):
        list(requests(con, spans_in(con, [Span("no id", "no id")]), resource_of))
    assert [row[0] for row in con.execute("SHOW TABLES").fetchall()] == ["given"]


# --- any table --------------------------------------------------------------------------------------------

ATTRIBUTES = st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text()))


def values_of(column: Column) -> st.SearchStrategy[Any]:
    sizes = {"SMALLINT": 15, "INTEGER": 31, "BIGINT": 63}
    ranges = {"start_ns": (0, 2**62), "dur_ns": (0, 2**62), "level": (0, 100)}
    if column.name in ("trace_id", "span_id", "parent_id"):
        digits = 8 if column.name == "trace_id" else 4
        ids = st.integers(1, 2 ** (8 * digits) - 1).map(lambda value: f"{value:0{4 * digits}x}")
        return st.none() | ids if column.name == "parent_id" else ids
    if column.name == "attributes":
        return st.none() | ATTRIBUTES.map(json.dumps)
    if column.type in sizes:
        low, high = ranges.get(column.name, (-(2 ** sizes[column.type]), 2 ** sizes[column.type] - 1))
        values = st.integers(low, high)
        return values if column.name in (*ranges, "rank") else st.none() | st.sampled_from([0, 7]) | values
    if column.type == "DOUBLE":
        return st.none() | st.floats(0, 1)
    texts = st.booleans() if column.type == "BOOLEAN" else st.sampled_from(["", "a", "0123456789abcdef"]) | st.text()
    return texts if column.name in ("status", "kind", "name") else st.none() | texts


ROWS = st.tuples(*map(values_of, COLUMNS)).map(Span._make)


def expected(span: Span) -> dict[str, Any]:
    """Return the attributes that a span has, straight from the definition of its columns."""
    found = {
        column.attribute: getattr(span, column.name)
        for column in COLUMNS
        if column.attribute not in (None, "xsp.attributes", *semconv.RESOURCE_COLUMNS)
    }
    found |= {"xsp.level": semconv.level_name(span.level)} | semconv.flat(span.attributes)
    if span.status.startswith("error:") and span.status != "error:":
        found["error.type"] = span.status.removeprefix("error:")
    return {key: value for key, value in found.items() if value is not None or key in semconv.flat(span.attributes)}


@pytest.mark.slow
@every(st.lists(ROWS, min_size=1, max_size=12), st.integers(500, 5000), st.integers(1, 12))
@examples(30)
def test_every_table_arrives_span_by_span(given: list[Span], max_bytes: int, max_spans: int) -> None:
    def seen(span: trace_pb2.Span) -> tuple[Any, ...]:
        return (
            span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex() or None, span.name,
            span.start_time_unix_nano, span.end_time_unix_nano, sorted(map(repr, attributes(span).items())),
        )  # fmt: skip

    found = [seen(span) for _, span in read(sent(given, max_bytes=max_bytes, max_spans=max_spans))]
    assert sorted(map(repr, found)) == sorted(
        repr((span.trace_id, span.span_id, span.parent_id, span.name, span.start_ns, span.end_ns,
              sorted(map(repr, expected(span).items()))))
        for span in given
    )  # fmt: skip
