"""Requests of vLLM and SGLang, from their OpenTelemetry spans and the steps that their profiler's traces annotate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from enginetraces import served

import xsp
from xsp import analyses
from xsp.account.requests import figures, reasons
from xsp.account.served import requests, steps
from xsp.account.serving import sentence
from xsp.cli import main
from xsp.errors import TraceError
from xsp.importers.serving import parse
from xsp.ingest.enginespans import AnnotatedStep, RequestSpan, accounts, parts_of_steps, spans_of_requests
from xsp.ingest.sources import import_into
from xsp.schema import Span
from xsp.serving import PARTS

US, MS = 1_000, 1_000_000
DECODE_1, DECODE_2 = "execute_context_0(0)_generation_1(1)", "execute_context_0(0)_generation_2(2)"
STEPS = [
    ("execute_context_1(64)_generation_0(0)", 2000.0, 10.0, 1900.0),
    *[(DECODE_1, 500.0, 10.0, 400.0)] * 2,
    ("execute_context_1(640)_generation_1(1)", 5000.0, 10.0, 4900.0),
    *[(DECODE_2, 600.0, 10.0, 500.0)] * 3,
]
"""Steps of an engine: annotation, time on the host, delay and time of the kernel; microseconds."""

BASE_US = 1_790_000_000_000_000.0


def step_ends_us(names: Sequence[tuple[str, float, float, float]]) -> list[float]:
    """Return when each step ends on the device, in microseconds since the first one began."""
    now, found = 0.0, []
    for _, host, delay, device in names:
        found.append(now + max(host - 10, 20 + delay + device))
        now += host
    return found


def attribute(name: str, value: Any) -> dict[str, Any]:
    kind = {str: "stringValue", float: "doubleValue", int: "intValue"}[type(value)]
    return {"key": name, "value": {kind: str(value) if kind == "intValue" else value}}


def span(number: int, name: str, start_us: float, end_us: float, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": name, "kind": 2,
        "startTimeUnixNano": str(round(BASE_US + start_us) * US),
        "endTimeUnixNano": str(round(BASE_US + end_us) * US),
        "attributes": [attribute(key, value) for key, value in attributes.items()],
    }  # fmt: skip


def vllm_span(number: int, arrival: float, taken: float, first: float, last: float, end: float, **tokens: int) -> Any:
    """Return a span as vLLM's output processor makes it; microseconds since the first step."""
    return span(number, "llm_request", arrival, end, {
        "gen_ai.request.id": f"cmpl-{number}", "gen_ai.response.model": "tiny",
        "gen_ai.latency.time_to_first_token": (first - arrival) / 1e6, "gen_ai.latency.e2e": (end - arrival) / 1e6,
        "gen_ai.latency.time_in_queue": (taken - arrival) / 1e6,
        "gen_ai.latency.time_in_model_prefill": (first - taken) / 1e6,
        "gen_ai.latency.time_in_model_decode": (last - first) / 1e6,
        "gen_ai.latency.time_in_model_inference": (last - taken) / 1e6,
        "gen_ai.usage.prompt_tokens": tokens["prompt"], "gen_ai.usage.completion_tokens": tokens["output"],
    })  # fmt: skip


def sglang_span(number: int, arrival: float, first: float, end: float, **tokens: int) -> Any:
    """Return a root span as SGLang makes it: no time in the queue, and the prefill contains it."""
    return span(number, f"Req {number}", arrival, end, {
        "gen_ai.request.id": f"cmpl-{number}", "gen_ai.response.model": "tiny",
        "gen_ai.latency.time_to_first_token": (first - arrival) / 1e6, "gen_ai.latency.e2e": (end - arrival) / 1e6,
        "gen_ai.latency.time_in_model_prefill": (first - arrival - 1) / 1e6,
        "gen_ai.latency.time_in_model_decode": (end - first) / 1e6,
        "gen_ai.latency.time_in_model_inference": (end - arrival - 1) / 1e6,
        "gen_ai.usage.prompt_tokens": tokens["prompt"], "gen_ai.usage.completion_tokens": tokens["output"],
    })  # fmt: skip


def files(folder: Path, spans: Sequence[Any], names: Sequence[Any] = STEPS, shift_us: float = BASE_US) -> list[str]:
    """Write the trace of a profiler and the spans of requests; return both paths."""
    trace = served(folder / "trace.json", names)
    content = json.loads(trace.read_text())
    for each in content["traceEvents"]:
        each["ts"] += shift_us
    trace.write_text(json.dumps(content))
    path = folder / "spans.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}))
    return [str(trace), str(path)]


def of_engine(form: str) -> list[Any]:
    """Return the spans of two requests: the long prompt of the second one is read while the first one decodes."""
    ends = step_ends_us(STEPS)
    if form == "vllm":
        return [
            vllm_span(1, -500, 0, ends[0] + 50, ends[6] + 50, ends[6] + 200, prompt=64, output=7),
            vllm_span(2, 1000, 3000, ends[3] + 50, ends[6] + 50, ends[6] + 300, prompt=640, output=4),
        ]
    return [
        sglang_span(1, -500, ends[0] + 50, ends[6] + 200, prompt=64, output=7),
        sglang_span(2, 1000, ends[3] + 50, ends[6] + 300, prompt=640, output=4),
    ]


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_spans_and_a_trace_together_say_what_each_latency_went_to(tmp_path: Path, form: str) -> None:
    trace = xsp.load(files(tmp_path, of_engine(form)))
    first, second = requests(trace)
    ends = step_ends_us(STEPS)
    for each in (first, second):
        assert sum(each.parts.values()) == each.latency_ns
        assert (each.engine, each.status, each.has_arrival) == ("tiny", "ok", True)
    assert (first.request, first.prompt_tokens, first.output_tokens, first.steps) == ("cmpl-1", 64, 7, 7)
    assert (second.request, second.prompt_tokens, second.output_tokens, second.steps) == ("cmpl-2", 640, 4, 4)
    assert first.latency_ns == round((ends[6] + 700) * US)
    assert first.parts["queue"] == 500 * US
    assert second.parts["queue"] == 2000 * US
    assert second.ttft_ns == round((ends[3] - 1000) * US), "a token counts when its step ends"
    assert first.neighbour == "cmpl-2"
    work = 4990 * US
    assert first.parts["others_prefill"] == pytest.approx(work * 640 / 641, abs=30 * US)
    assert second.parts["own_prefill"] == pytest.approx(work * 640 / 641, abs=30 * US)
    assert second.parts["others_decode"] == pytest.approx((3 * 600) / 2 * US + work / 641, abs=40 * US)
    assert [(step.kind, step.requests) for step in steps(trace)] == [
        ("prefill", 1), ("decode", 1), ("decode", 1), ("mixed", 2), *[("decode", 2)] * 3
    ]  # fmt: skip
    assert reasons(trace)
    assert "Requests: 2 ended" in sentence(trace)
    assert {each.name for each in figures(trace)} >= {"time to first token p50", "time between tokens p99"}
    assert trace.con.execute("SELECT count(*) FROM spans WHERE kind = 'kernel'").fetchone() == (len(STEPS),)
    assert "inferred from time and tokens" in str(trace.run.notes)


def test_a_run_directory_holds_them_and_the_command_line_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["import", *files(tmp_path, of_engine("vllm")), "-o", str(run)]) == 0
    capsys.readouterr()
    assert main(["analyze", str(run), "requests", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["request"] for row in rows] == ["cmpl-1", "cmpl-2"]
    for row in rows:
        assert sum(row[f"{name}_ms"] for name in PARTS) == pytest.approx(row["latency_ms"])
    assert len(analyses.engine_kinds(xsp.load(run)).fetchall()) == 3


def test_a_sample_of_the_requests_leaves_tokens_of_others(tmp_path: Path) -> None:
    trace = xsp.load(files(tmp_path, of_engine("vllm")[:1]))
    [only] = requests(trace)
    assert sum(only.parts.values()) == only.latency_ns
    assert only.parts["others_prefill"] > 4 * MS
    assert only.neighbour == "(others' prompts)"
    assert [step.prefill_tokens for step in steps(trace)] == [64, 0, 0, 640, 0, 0, 0]
    assert [step.decode_tokens for step in steps(trace)] == [0, 1, 1, 1, 2, 2, 2]


def test_a_prompt_in_chunks_is_read_in_as_many_steps_as_its_tokens_need() -> None:
    chunks = [AnnotatedStep(10 * MS * n, 10 * MS * n + 9 * MS, "mixed", 2048, 4) for n in range(4)]
    chunks += [AnnotatedStep(40 * MS + 10 * MS * n, 49 * MS + 10 * MS * n, "decode", 0, 5) for n in range(2)]
    each = RequestSpan(Span(), "long", "tiny", 1 * MS, 10 * MS, 39 * MS + 50 * US, 59 * MS + 50 * US, 60 * MS, 5000, 3)
    parts, kept = parts_of_steps(chunks, [each])
    own = [[tuple(part) for part in step if part.request == "long"] for step in parts]
    assert own == [
        [], [("long", "prefill", 2048, 0)], [("long", "prefill", 2048, 0)], [("long", "prefill", 904, 1)],
        [("long", "decode", 1, None)], [("long", "decode", 1, None)],
    ]  # fmt: skip
    assert kept == [each]
    ran, [account] = accounts(chunks, [each], [])
    assert sum(account.parts) == account.latency_ns == 59 * MS
    assert (account.output_tokens, account.steps, len(ran)) == (3, 5, 6)


def test_requests_outside_of_the_trace_are_counted(tmp_path: Path) -> None:
    late = vllm_span(3, 1e6, 1.1e6, 1.2e6, 1.3e6, 1.4e6, prompt=5, output=2)
    trace = xsp.load(files(tmp_path, [*of_engine("vllm"), late]))
    assert len(requests(trace)) == 2
    assert "1 of 3 requests were left out" in str(trace.run.notes)


@pytest.mark.parametrize(
    ("shift_us", "names", "words"),
    [
        (0.0, STEPS, "the first request came"),
        (BASE_US + 1e9, STEPS, "the last request ended"),
        (BASE_US, [("forward", 500.0, 10.0, 400.0)], "the engine annotated no step"),
    ],
)
def test_spans_that_do_not_belong_to_the_trace_are_refused(
    tmp_path: Path, shift_us: float, names: Sequence[Any], words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        xsp.load(files(tmp_path, of_engine("vllm"), names, shift_us))


def test_spans_without_requests_do_not_go_together_with_a_trace(tmp_path: Path) -> None:
    paths = files(tmp_path, [span(1, "GET /", 0, 10, {"http.route": "/"})])
    with pytest.raises(TraceError, match=r"do not go together .* requests of vLLM or SGLang"):
        xsp.load(paths)


@pytest.mark.slow
def test_damaged_values_of_a_span_leave_it_out_and_it_is_said(tmp_path: Path) -> None:
    good, other = of_engine("vllm")
    for index, value in enumerate([{"doubleValue": -1.0}, {"stringValue": "soon"}, {"doubleValue": 1e300}]):
        other["attributes"][2]["value"] = value
        paths = files(tmp_path, [good, other | {"spanId": f"{index + 7:016x}"}, {"name": "no ids"}])
        trace = xsp.load(paths)
        assert [each.request for each in requests(trace)] == ["cmpl-1"]
        assert "id is not valid" in str(trace.run.notes)


def test_ids_that_come_twice_are_numbered_and_named(tmp_path: Path) -> None:
    good, other = of_engine("vllm")
    other["attributes"][0] = attribute("gen_ai.request.id", "cmpl-1")
    trace = xsp.load(files(tmp_path, [good, other]))
    assert [(each.request, each.steps) for each in requests(trace)] == [("cmpl-1", 7), ("cmpl-1 (2)", 4)]
    assert "had the id 'cmpl-1' at the same time" in str(trace.run.notes)


def test_of_the_ranks_of_a_job_the_first_has_the_requests(tmp_path: Path) -> None:
    paths = files(tmp_path, of_engine("vllm"))
    content = json.loads(Path(paths[0]).read_text())
    second = tmp_path / "rank1.json"
    second.write_text(json.dumps({**content, "distributedInfo": {"rank": 1, "world_size": 2}}))
    (tmp_path / "job").mkdir()
    runs = import_into(tmp_path / "job", [*paths, str(second)])
    found = xsp.load(next(iter(runs)))
    assert [(each.request, each.rank) for each in requests(found)] == [("cmpl-1", 0), ("cmpl-2", 0)]


def test_steps_of_every_annotated_form_serve_requests(tmp_path: Path) -> None:
    """The forms of SGLang, which state tokens in other words."""
    names = [
        ("step[EXTEND bs=1 toks=64]", 2000.0, 10.0, 1900.0), *[("step[DECODE bs=1]", 500.0, 10.0, 400.0)] * 2,
        ("step[EXTEND bs=1 toks=640]", 5000.0, 10.0, 4900.0), *[("step[DECODE bs=2]", 600.0, 10.0, 500.0)] * 3,
    ]  # fmt: skip
    assert all(parse(name) for name, *_ in names)
    first, second = requests(xsp.load(files(tmp_path, of_engine("sglang"), names)))
    assert first.parts["preempted"] == pytest.approx(5000 * US, abs=30 * US), "no step of `cmpl-1` ran beside it"
    assert (first.steps, second.steps) == (6, 4)
    for each in (first, second):
        assert sum(each.parts.values()) == each.latency_ns


def test_only_spans_with_times_of_an_engine_are_requests() -> None:
    from xsp.importers.contract import Row

    plain = Span("1" * 32, "1" * 16, start_ns=5, dur_ns=9, attributes='{"gen_ai.request.model": "m"}')
    assert spans_of_requests([Row(plain, ""), Row(plain._replace(attributes=None), "")]) == []
