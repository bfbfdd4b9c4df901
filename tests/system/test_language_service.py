"""deploy/language_service.py: OpenAI's completions of a language model, with its load, sent to a real Jaeger."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from realparts import DEPLOY, Jaeger, fetch_json, poll

pytest.importorskip("transformers")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

pytestmark = [pytest.mark.slow, pytest.mark.jaeger]
SERVICE = DEPLOY / "language_service.py"


@contextlib.contextmanager
def service(to: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, str(SERVICE), "--port", "0", "--to", to, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()


def ask(address: str, **more: Any) -> http.client.HTTPResponse:
    body = json.dumps({"model": "seeded", "prompt": "Once", "max_tokens": 7, **more}).encode()
    answer: http.client.HTTPResponse = urllib.request.urlopen(f"{address}/v1/completions", body, timeout=60)
    return answer


def test_a_load_leads_to_the_steps_of_its_requests_in_jaeger(jaeger: Jaeger) -> None:
    began_us = time.time() * 1e6
    with service(jaeger.otlp_http, "--load", "12") as (_, process):
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0
    said = json.loads(text)
    assert said["requests"] == 12
    assert 0 < said["first_token_ms"] <= said["latency_ms"]

    def requests() -> list[dict[str, Any]] | None:
        found = fetch_json(f"{jaeger.query}/api/traces?service=shop&operation=POST%20/v1/completions&limit=50") or {}
        whole = [each for each in found.get("data", []) if len(each["spans"]) > 3]
        whole = [each for each in whole if min(span["startTime"] for span in each["spans"]) >= began_us]
        return whole if len(whole) == 12 else None

    traces = poll(requests)
    assert traces is not None
    tokens = 0
    for each in traces:
        spans = {span["operationName"]: span for span in each["spans"]}
        assert {"POST /v1/completions", "text_completion LlamaForCausalLM", "queue", "prefill", "decode"} <= {*spans}
        tags = {tag["key"]: tag["value"] for tag in spans["text_completion LlamaForCausalLM"]["tags"]}
        tokens += tags["gen_ai.usage.output_tokens"]
        assert [link for link in spans["decode"]["references"] if link["traceID"] != each["traceID"]]
    assert tokens == said["tokens"]


def test_the_service_answers_in_openais_form_and_a_client_that_leaves_cancels(jaeger: Jaeger) -> None:
    with service(jaeger.otlp_http) as (address, _):
        whole = json.load(ask(address))
        assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}
        lines = [line for line in ask(address, stream=True).read().splitlines() if line]
        assert lines[-1] == b"data: [DONE]"
        chunks = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * 6 + ["length"]
        left = ask(address, stream=True, max_tokens=4000)
        left.readline()
        left.close()
        time.sleep(1)
        assert json.load(ask(address))["choices"][0]["text"] == whole["choices"][0]["text"]

        def cancelled() -> bool | None:
            found = fetch_json(f"{jaeger.query}/api/traces?service=shop&operation=POST%20/v1/completions") or {}
            tags = [tag for each in found.get("data", []) for span in each["spans"] for tag in span["tags"]]
            return any(tag["key"] == "xsp.status" and tag["value"] == "cancelled" for tag in tags) or None

        assert poll(cancelled)
