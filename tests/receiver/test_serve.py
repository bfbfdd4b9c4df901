"""The receiver: what is acknowledged is on the disk, nothing counts twice, and bad input harms nobody."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import exit_code
from depth import deep

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

import grpc
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from realparts import PROTOBUF, ServeProcess, poll
from roundtrip import (
    Snapshot,
    export_run,
    representative_tables,
    request,
    rows,
    select_representative,
    spans_of,
    tables,
    without,
)

import xsp
from xsp import cli, rundir
from xsp.health import health
from xsp.otlp.transport import as_json
from xsp.receiver.journal import RunWriter

JSON = {"Content-Type": "application/json"}
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def body(**fields: Any) -> bytes:
    return request(**fields).SerializeToString()


def many(count: int, sender: int = 0) -> bytes:
    """Return a request of many spans, each a trace of its own."""
    message = request(span_id=b"\x01" * 8, trace_id=(sender << 64 | 1).to_bytes(16, "big"))
    spans = spans_of(message)
    for number in range(2, count + 1):
        spans.add().CopyFrom(spans[0])
        spans[-1].trace_id = (sender << 64 | number).to_bytes(16, "big")
    return message.SerializeToString()


# --- what is sent arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["http", deep("grpc")])
def test_a_run_arrives_as_it_was(receiver: ServeProcess, run: Path, small_whole: Snapshot, door: str) -> None:
    export_run(run, getattr(receiver, door))
    (place,) = receiver.runs()
    printed = receiver.end()
    back = xsp.load(place)
    assert rows(back) == small_whole.rows
    assert representative_tables(back) == select_representative(small_whole.tables)
    assert f"{place}: {len(rundir.segments(run))} steps, {len(small_whole.rows)} spans" in printed
    assert back.run["finished"] is True
    assert not (place / "arrived").exists()


@pytest.mark.slow
def test_a_run_that_is_complete_is_put_in_order_while_others_arrive(receiver: ServeProcess, run: Path) -> None:
    export_run(run, receiver.http, "--compression", "gzip")
    (place,) = receiver.runs()
    poll(lambda: rundir.read_run(place)["finished"])
    assert len(rundir.segments(place)) == len(rundir.segments(run))


@pytest.mark.slow
def test_a_run_that_is_sent_twice_counts_once(receiver: ServeProcess, run: Path, small_whole: Snapshot) -> None:
    export_run(run, receiver.http)
    poll(lambda: rundir.read_run(receiver.runs()[0])["finished"])
    export_run(run, receiver.grpc)
    (place,) = receiver.runs()
    receiver.end()
    back = xsp.load(place)
    assert rows(back) == small_whole.rows
    assert without(representative_tables(back), "health") == without(
        select_representative(small_whole.tables), "health"
    )
    assert back.run["received"]["doubled"] == len(small_whole.rows)


@pytest.mark.slow
def test_opentelemetrys_own_exporters_are_served(receiver: ServeProcess) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OverHttp(f"{receiver.http}/v1/traces")))
    provider.add_span_processor(BatchSpanProcessor(OverGrpc(receiver.grpc, insecure=True)))
    tracer = provider.get_tracer("shop")
    for _ in range(700):
        with tracer.start_as_current_span("request", attributes={"http.route": "/"}), tracer.start_span("query"):
            pass
    provider.shutdown()
    receiver.end()
    back = xsp.load(receiver.out / "services")
    counted = back.sql("SELECT name, kind, count(*) FROM spans GROUP BY ALL ORDER BY ALL").fetchall()
    assert counted == [("query", "user", 700), ("request", "step", 700)]
    assert back.run["received"]["doubled"] == 1400
    assert xsp.analyses.A1(back).fetchall()


SENDER = """
import sys, xsp, torch
from torch import nn
from xsp import cli
model, inputs = nn.Linear(8, 8), torch.randn(4, 8)
with xsp.profile("job", out=sys.argv[1], levels="M/L") as prof:
    for _ in range(prof.schedule.steps_for(repeats=3)):
        with prof.step():
            model(inputs)
sys.exit(cli.main(["export", str(prof.out), "--to", sys.argv[2], "--quiet"]))
"""


@pytest.mark.slow
def test_ranks_that_send_at_once_come_out_as_one_timeline(receiver: ServeProcess, tmp_path: Path) -> None:
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SENDER, str(tmp_path / "job"), receiver.http if rank else receiver.grpc],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "TRACEPARENT": caller},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(3)
    ]
    assert [each.wait(120) for each in ranks] == [0, 0, 0]
    printed = receiver.end()
    (place,) = receiver.runs()
    assert "3 ranks" in printed
    job, lowest = xsp.load(place), xsp.load(tmp_path / "job" / "rank-0000")
    assert [each["rank"] for each in job.run["ranks"]] == [0, 1, 2]
    own = [xsp.load(tmp_path / "job" / f"rank-{rank:04d}") for rank in range(3)]
    assert sorted(rows(job), key=str) == sorted((row for each in own for row in rows(each)), key=str)
    by_rank = ("health", "loop", "between", "account", "phases", "kinds")
    assert without(tables(job), *by_rank) == without(tables(lowest), *by_rank)
    loops = [xsp.analyses.ANALYSES["loop"](each).fetchall()[-1][1:] for each in own]
    assert [row[1:] for row in xsp.analyses.ANALYSES["loop"](job).fetchall() if row[0] != "job of 3 ranks"] == loops
    assert [each.get("between") for each in job.run["ranks"]] == [each.run.get("between") for each in own]


@pytest.mark.slow
def test_many_senders_at_once_lose_nothing(receiver: ServeProcess) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda sender: receiver.post(many(500, sender)), range(1, 33)))
    assert {answer.status_code for answer in answers} == {200}
    assert "16000 spans received, 0 rejected" in receiver.end()
    assert len(xsp.load(receiver.out / "services").spans) == 16000


# --- kills --------------------------------------------------------------------------------------------------


def test_what_a_kill_left_of_a_run_of_which_nothing_was_taken_goes_at_the_next_start(tmp_path: Path) -> None:
    place = rundir.create(tmp_path / "train-1")
    (place / rundir.INBOX).mkdir()
    (place / rundir.INBOX / ".000000000-24.staged").write_bytes(b"PAR1")
    (place / ".run.json.1326.part").write_text("{")
    RunWriter(tmp_path, print).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(receiver: ServeProcess, tmp_path: Path) -> None:
    acknowledged: list[int] = []

    def send(sender: int) -> None:
        with contextlib.suppress(requests.RequestException):
            for number in range(1000):
                if receiver.post(many(20, 1000 * sender + number)).status_code == 200:
                    acknowledged.append(1000 * sender + number)

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(1, 5)]
    for each in senders:
        each.start()
    poll(lambda: len(acknowledged) > 40)
    receiver.end(signal.SIGKILL)
    for each in senders:
        each.join()
    place = receiver.out / "services"
    left = xsp.load(place)
    found = {int(trace[:16], 16) for (trace,) in left.sql("SELECT DISTINCT trace_id FROM spans").fetchall()}
    assert set(acknowledged) <= found
    assert left.sql("SELECT count(*) FROM spans").fetchall() == [(20 * len(found),)]
    assert left.run["finished"] is False
    assert "was interrupted" in " ".join(finding.text for finding in health(left))

    again = ServeProcess(receiver.out)
    assert again.post(many(20, 9999)).status_code == 200
    again.end()
    assert len(xsp.load(place).spans) == 20 * (len(found) + 1)
    assert xsp.load(place).run["finished"] is True
    assert receiver.runs() == [place]


def test_overwriting_takes_away_what_was_not_in_order_yet(receiver: ServeProcess) -> None:
    receiver.post(GOOD)
    receiver.end(signal.SIGKILL)
    place = receiver.out / "services"
    assert list((place / "arrived").iterdir())
    rundir.create(place, overwrite=True)
    assert not (place / "arrived").exists()


@pytest.mark.slow
def test_a_receiver_goes_on_with_a_run_that_was_cut(run: Path, small_whole: Snapshot, tmp_path: Path) -> None:
    first = ServeProcess(tmp_path / "received")
    export_run(run, first.http, "--steps", ",".join(str(int(file.stem)) for file in rundir.segments(run)[:4]))
    first.end(signal.SIGKILL)
    (place,) = first.runs()
    assert xsp.load(place).run["finished"] is False
    second = ServeProcess(tmp_path / "received")
    export_run(run, second.http)
    second.end(signal.SIGINT)
    assert second.runs() == [place]
    back = xsp.load(place)
    assert rows(back) == small_whole.rows
    assert without(representative_tables(back), "health") == without(
        select_representative(small_whole.tables), "health"
    )


# --- bad input ------------------------------------------------------------------------------------------------


GOOD = body()


BAD = [
    (GOOD[:-3], PROTOBUF, "/v1/traces", 400),
    (b"hello", PROTOBUF, "/v1/traces", 400),
    (b'{"resourceSpans": [', JSON, "/v1/traces", 400),
    (b"[" * 100_000, JSON, "/v1/traces", 400),
    (b'{"resourceSpans": 5}', JSON, "/v1/traces", 400),
    (GOOD, {"Content-Type": "text/plain"}, "/v1/traces", 415),
    (GOOD, {**PROTOBUF, "Content-Encoding": "br"}, "/v1/traces", 415),
    (GOOD, {**PROTOBUF, "Content-Encoding": "gzip"}, "/v1/traces", 400),
    (gzip.compress(GOOD)[:-9], {**PROTOBUF, "Content-Encoding": "gzip"}, "/v1/traces", 400),
    (GOOD, PROTOBUF, "/v1/metrics", 404),
    (GOOD, PROTOBUF, "/../../etc/passwd", 404),
]
"""Content, headers, path, and the status that answers it."""


def test_bad_requests_are_refused_store_nothing_and_harm_nobody(receiver: ServeProcess) -> None:
    bomb = (gzip.compress(bytes(200 << 20)), {**PROTOBUF, "Content-Encoding": "gzip"}, "/v1/traces", 413)
    for content, headers, path, status in [*BAD, bomb]:
        assert receiver.post(content, headers, path).status_code == status, (content[:40], headers, path)
        assert receiver.runs() == []
    assert receiver.post(GOOD).status_code == 200


@pytest.mark.slow
def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    receiver = ServeProcess(tmp_path / "received", "--max-body", "1MiB")
    with socket.create_connection(("127.0.0.1", int(receiver.http.rpartition(":")[2]))) as connection:
        head = "POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 99999999999\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    chunks = (bytes(1 << 16) for _ in range(20))
    with contextlib.suppress(requests.ConnectionError):  # it may be told so late that it cannot hear it
        assert requests.post(f"{receiver.http}/v1/traces", data=chunks, headers=PROTOBUF, timeout=30).status_code == 413
    chunked = requests.post(f"{receiver.http}/v1/traces", data=iter([GOOD[:9], GOOD[9:]]), headers=PROTOBUF, timeout=30)
    assert chunked.status_code == 200
    with grpc.insecure_channel(
        receiver.grpc.removeprefix("grpc://"), options=[("grpc.max_send_message_length", -1)]
    ) as to:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError) as caught:
                to.unary_unary(EXPORT)(bytes(3 << 20), timeout=30, compression=compression)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            to.unary_unary(EXPORT)(GOOD[:-3], timeout=30)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert to.unary_unary(EXPORT)(GOOD, timeout=30) == b""
    assert "2 spans received" in receiver.end()


@pytest.mark.slow
def test_who_sends_too_slowly_is_let_go(tmp_path: Path) -> None:
    receiver = ServeProcess(tmp_path / "received", "--timeout", "1")
    place = ("127.0.0.1", int(receiver.http.rpartition(":")[2]))
    head = b"POST /v1/traces HTTP/1.1\r\nContent-Type: application/x-protobuf\r\nContent-Length: 1000\r\n\r\nxx"
    with socket.create_connection(place) as silent, socket.create_connection(place) as slow:
        slow.sendall(head)
        silent.sendall(b"POST /v1")
        slow.settimeout(30)
        silent.settimeout(30)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        assert silent.recv(100) == b""
    assert receiver.post(GOOD).status_code == 200
    receiver.end()


@pytest.mark.slow
def test_a_full_disk_is_said_and_stores_nothing_half(tmp_path: Path) -> None:
    receiver = ServeProcess(tmp_path / "received", most_of_a_file=20_000)
    answer = receiver.post(body(name=os.urandom(100_000).hex()))
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert b"cannot be written" in answer.content
    assert list(receiver.out.rglob("*.parquet")) == []
    assert receiver.post(GOOD).status_code == 200
    assert "1 spans received" in receiver.end()


@pytest.mark.parametrize("form", ["json", "proto"])
def test_what_cannot_be_a_span_is_said_to_the_sender(receiver: ServeProcess, form: str) -> None:
    message = request()
    spans_of(message).append(spans_of(request(trace_id=b"", span_id=b"\x05" * 8))[0])
    spans_of(message).append(spans_of(request(end_time_unix_nano=1, span_id=b"\x06" * 8))[0])
    content = message.SerializeToString()
    if form == "json":
        answer = receiver.post(as_json(content).encode(), JSON).json()["partialSuccess"]
        rejected, text = int(answer["rejectedSpans"]), answer["errorMessage"]
    else:
        partial = ExportTraceServiceResponse.FromString(receiver.post(content).content).partial_success
        rejected, text = partial.rejected_spans, partial.error_message
    assert rejected == 2
    assert text == "2 spans rejected: 1 because its trace id is not valid, 1 because it ends before it starts"
    assert "1 spans received, 2 rejected" in receiver.end()
    received = rundir.read_run(receiver.out / "services")["received"]
    assert received["skipped"] == {"its trace id is not valid": 1, "it ends before it starts": 1}


def test_an_answer_is_in_the_words_of_the_question(receiver: ServeProcess) -> None:
    good = receiver.post(as_json(GOOD).encode(), JSON)
    assert (good.json(), good.headers["Content-Type"]) == ({}, "application/json")
    assert "not JSON" in receiver.post(b"{", JSON).json()["message"]
    assert requests.get(f"{receiver.http}/v1/traces", timeout=30).status_code == 405
    assert requests.get(receiver.http, timeout=30).status_code == 404


@pytest.mark.parametrize(
    "options", [["--http", "4318"], ["--http", "off", "--grpc", "off"], ["--max-body", "lots"], ["--connections", "0"]]
)
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("serve", *options) == 2
    assert "xsp: error:" in capsys.readouterr().err


def test_an_address_that_is_taken(receiver: ServeProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = receiver.http.removeprefix("http://")
    assert cli.main(["serve", "--http", place, "--grpc", "off", "--out", str(tmp_path / "x")]) == 2
    assert f"--http {place}: cannot listen there" in capsys.readouterr().err


@pytest.mark.slow
def test_of_two_receivers_of_one_directory_one_is_refused(
    receiver: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--http", "127.0.0.1:0", "--grpc", "off", "--out", str(receiver.out)]) == 2
    assert f"{receiver.out}: another receiver writes there; choose another" in capsys.readouterr().err
    receiver.end(signal.SIGKILL)
    after = ServeProcess(receiver.out)
    assert after.post(GOOD).status_code == 200
    after.end()


def test_an_open_door_is_warned_of(tmp_path: Path) -> None:
    from xsp.receiver.limits import RequestLimits
    from xsp.receiver.server import Receiver, address

    said: list[str] = []
    server = Receiver(tmp_path / "received", address("0.0.0.0:0"), None, RequestLimits(), said.append)
    server.start()
    server.close()
    assert said[1] == "warning: --http 0.0.0.0:0: everybody who can reach this address can send spans"
