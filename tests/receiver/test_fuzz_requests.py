"""Every field of a request may be an adversary's: after each damaged one the receiver still serves everybody else."""

from __future__ import annotations

import json
import random
import signal
import time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

import requests
from fuzzing import SEED, TIMES, places
from google.protobuf.json_format import MessageToDict
from realparts import PROTOBUF, ServeProcess
from test_serve import JSON
from test_serve_collector import JOB, of_rank

import xsp

REQUESTS = 120
"""As many damaged requests are sent, times `XSP_FUZZ_TIMES`."""

PATIENCE_S = 20
ANSWERS = {200, 400, 413, 415, 422, 503}
ODD = [
    None, True, -1, 0, 1 << 80, 1e308, "", "\x1b[2J\u202e", [], [None], {}, {"a": {}}, [[]], "\ud800", "x" * 10_000,
    "../../../etc/passwd", "0" * 32, "f" * 16, {"stringValue": "a"}, {"intValue": "-1"},
    {"arrayValue": {"values": [{}]}},
]  # fmt: skip
HEADERS = {
    "Content-Encoding": ["gzip", "deflate", "x"],
    "Content-Type": ["", "text/plain", "application/json; charset=x"],
}


def damaged_json(content: dict[str, Any], chance: random.Random) -> bytes:
    """Return the request with another value in some places, or without them."""
    content = json.loads(json.dumps(content))
    for _ in range(chance.choice([1, 1, 1, 3])):
        *way, last = chance.choice(list(places(content)))
        at: Any = content
        for key in way:
            at = at[key]
        if chance.random() < 0.1:
            del at[last]
        else:
            at[last] = chance.choice(ODD)
    written = json.dumps(content).encode()
    return written[: chance.randrange(len(written))] if chance.random() < 0.1 else written


def damaged_protobuf(content: bytes, chance: random.Random) -> bytes:
    """Return the request with bytes changed, left out, doubled or cut off."""
    made = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 20])):
        if not made:
            break
        at = chance.randrange(len(made))
        match chance.randrange(4):
            case 0:
                made[at] = chance.randrange(256)
            case 1:
                del made[at]
            case 2:
                made[at:at] = made[at : at + chance.randrange(64)]
            case _:
                del made[at + 1 :]
    return bytes(made)


@pytest.mark.slow
def test_after_any_damaged_request_others_are_served_and_what_they_sent_is_there(receiver: ServeProcess) -> None:
    chance = random.Random(SEED)
    whole = of_rank(0)
    as_json, as_protobuf = MessageToDict(whole), whole.SerializeToString()
    (span,) = as_json["resourceSpans"][0]["scopeSpans"][0]["spans"]
    span |= {"traceId": JOB, "spanId": "0" * 15 + "1"}  # OTLP writes ids in hexadecimal digits
    assert receiver.post(json.dumps(as_json).encode(), JSON).status_code == 200, "it is right before it is damaged"
    for number in range(REQUESTS * TIMES):
        is_json = chance.random() < 0.6
        content = damaged_json(as_json, chance) if is_json else damaged_protobuf(as_protobuf, chance)
        headers = dict(JSON if is_json else PROTOBUF)
        if chance.random() < 0.1:
            name = chance.choice(list(HEADERS))
            headers[name] = chance.choice(HEADERS[name])
        case = f"seed {SEED}, request {number}: {headers} {content[:2000]!r}"
        began = time.monotonic()
        try:
            answer = receiver.post(content, headers)
        except requests.RequestException as error:
            raise AssertionError(case) from error
        assert answer.status_code in ANSWERS, f"{answer.status_code} {answer.content[:200]!r}; {case}"
        assert time.monotonic() - began < PATIENCE_S, case
    for rank in (0, 1):  # a job of its own, after all of them
        message = of_rank(rank)
        resource = message.resource_spans[0]
        resource.resource.attributes[0].value.string_value = f"abababab{rank:08x}"
        resource.resource.attributes[1].value.string_value = "mine"
        resource.scope_spans[0].spans[0].trace_id = bytes.fromhex("cd" * 16)
        answer = receiver.post(message.SerializeToString())
        assert (answer.status_code, answer.content) == (200, b""), f"seed {SEED}"
    began = time.monotonic()
    receiver.end(signal.SIGTERM)
    assert time.monotonic() - began < PATIENCE_S + 10
    (job,) = receiver.out.glob("mine*")
    assert xsp.load(job).sql("SELECT rank, count(*) FROM spans GROUP BY rank ORDER BY rank").fetchall() == [
        (0, 1),
        (1, 1),
    ]
    outside = receiver.out.parent
    assert {each.name for each in outside.iterdir()} == {receiver.out.name}, "nothing is written beside its directory"
