"""Runs on their way to receivers: what is sent, what is still to be sent, what a kill leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("grpc")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from realparts import Collector, Jaeger, fetch_json, poll
from receivers import ACCEPTED, EPOCH_NS, Receiver, about, spans_in, write_run

import xsp
from xsp import rundir, table
from xsp.cli import main
from xsp.errors import UsageError
from xsp.health import health
from xsp.health.finding import Severity
from xsp.otlp import delivery, live
from xsp.otlp.endpoint import ExportOptions, endpoint
from xsp.otlp.export import Export, endpoint_to_resume, export
from xsp.otlp.send import Counts
from xsp.serving import Engine


def silent(what: str, done: int, total: int) -> None:
    pass


def send(run: Path, to: str, options: ExportOptions | None = None, **what: object) -> Counts:
    return export(Export(run, **what), endpoint(to, options, {}), silent)


# --- where to ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "variables", "url"),
    [
        ("http://h:1", {}, "http://h:1/v1/traces"),
        ("http://h:1/", {}, "http://h:1/v1/traces"),
        ("http://h:1/otlp/", {}, "http://h:1/otlp/v1/traces"),
        ("http://h:1/v1/traces", {}, "http://h:1/v1/traces"),
        ("env", {}, "http://localhost:4318/v1/traces"),
        ("env", {"PROTOCOL": "grpc"}, "localhost:4317"),
        ("env", {"ENDPOINT": "http://h:1"}, "http://h:1/v1/traces"),
        ("env", {"ENDPOINT": "http://h:1/v1/traces"}, "http://h:1/v1/traces/v1/traces"),
        ("env", {"ENDPOINT": "http://h:1", "TRACES_ENDPOINT": "http://t:2/in"}, "http://t:2/in"),
        ("env", {"TRACES_ENDPOINT": "http://t:2"}, "http://t:2/"),
        ("http://o:3", {"TRACES_ENDPOINT": "http://t:2/in"}, "http://o:3/v1/traces"),
        ("http://h:1", {"TRACES_PROTOCOL": "grpc", "PROTOCOL": "http/protobuf"}, "h:1"),
        ("grpc://h:1", {"PROTOCOL": "http/protobuf"}, "h:1"),
    ],
)
def test_the_endpoint_is_what_the_specification_says(target: str, variables: dict[str, str], url: str) -> None:
    environment = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    assert endpoint(target, None, environment).url == url


def test_an_option_wins_over_the_variable_of_traces_and_that_over_the_one_of_all_signals(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("")
    environment = {
        "OTEL_EXPORTER_OTLP_HEADERS": "a=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=a%20b, Other = c",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(file),
        "OTEL_SERVICE_NAME": "shop",
    }
    said = endpoint("http://h:1", None, environment)
    assert said.headers == (("key", "a b"), ("other", "c"))
    assert (said.timeout_s, said.gzip, said.ca_file, said.service) == (2.5, True, str(file), "shop")
    options = ExportOptions(headers=("x=y=z",), timeout_s=1, compression="none", service="mine")
    won = endpoint("http://h:1", options, environment)
    assert (won.headers, won.timeout_s, won.gzip, won.service) == ((("x", "y=z"),), 1, False, "mine")


@pytest.mark.parametrize(
    ("target", "insecure"),
    [("grpc://h:1", True), ("grpcs://h:1", False), ("http://h:1", True), ("https://h:1", False), ("h:1", False)],
)
def test_for_grpc_the_scheme_says_whether_there_is_tls(target: str, insecure: bool) -> None:
    assert endpoint(target, ExportOptions(protocol="grpc"), {}).insecure is insecure
    said = {"OTEL_EXPORTER_OTLP_INSECURE": "true"}
    assert endpoint(target, ExportOptions(protocol="grpc"), said).insecure is (insecure or "://" not in target)


def test_an_endpoint_is_named_without_its_secrets() -> None:
    to = endpoint("https://ada:pass%21@h:1/in?token=abcd", ExportOptions(headers=("api-key=S3CRET",)), {})
    assert to.name == "https://h:1/in/v1/traces"
    assert to.without_secrets("no S3CRET,\n abcd? token=abcd \x1b[2J pass!") == "no ***, abcd? *** [2J pass!"


@pytest.mark.parametrize("target", ["", "localhost:4318", "htp://h:1", "http://", "http://h:x", "grpc://", "run.csv"])
def test_what_is_no_endpoint_is_refused_with_examples(target: str) -> None:
    with pytest.raises(UsageError, match=r"http://localhost:4318|grpc://localhost:4317"):
        endpoint(target, None, {})


# --- what is sent -----------------------------------------------------------------------------------------


def test_a_run_is_a_span_of_its_own_and_each_step_a_trace_that_links_to_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, spans=5)
    with Receiver() as receiver:
        counts = send(run, receiver.url)
    *steps, last = receiver.spans
    assert (counts.steps, counts.spans, counts.rejected, counts.left) == (2, 11, 0, 0)
    assert [span.name for span in steps] == ["step", *["layer"] * 4] * 2
    links = [[(link.trace_id.hex(), link.span_id.hex()) for link in span.links] for span in steps[:2]]
    assert links == [[(f"{1:032x}", f"{1:016x}")], []]
    told = {attribute.key: attribute.value.string_value for attribute in last.attributes}
    assert (last.name, last.span_id.hex(), last.end_time_unix_nano - last.start_time_unix_nano) == (
        "run run", f"{1:016x}", 10**9,
    )  # fmt: skip
    assert json.loads(told["xsp.run"]) == {k: v for k, v in rundir.read_run(run).items() if k != "delivery"}


def test_sending_again_sends_the_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, spans=5)
    with Receiver() as receiver:
        send(run, receiver.url)
        send(run, receiver.url)
    half = len(receiver.bodies) // 2
    assert receiver.bodies[:half] == receiver.bodies[half:]


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, spans=3)
    with Receiver() as receiver:
        assert send(run, receiver.url, steps=(1, 2)).steps == 2
        assert send(run, receiver.url, timed=True).steps == 2
        with pytest.raises(UsageError, match="step 7 was not stored; there are 0, 1, 2, 3"):
            send(run, receiver.url, steps=(7,))


def test_steps_can_be_chosen_where_an_import_stored_several_in_a_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, spans=3, otel=None, imported={"sources": [], "doubled": 0})
    with table.connect() as con:
        con.execute(f"CREATE TABLE whole AS FROM {table.parquet(rundir.segments(run))}")
        table.write_parquet(con, "whole", rundir.segment(run, 0))
    for step in (1, 2, 3):
        rundir.segment(run, step).unlink()
    with Receiver() as receiver:
        counts = send(run, receiver.url, steps=(1, 3))
        assert (counts.steps, counts.spans, counts.left) == (2, 6, 0)
        assert {span.trace_id[-1] for span in receiver.spans} == {2, 4}
        counts = send(run, receiver.url, timed=True)
        assert (counts.steps, counts.spans, counts.left) == (2, 6, 0)
        assert send(run, receiver.url, resume=True).spans == 12, "a part of a file is not listed as delivered"
        with pytest.raises(UsageError, match="step 7 was not stored; there are 0, 1, 2, 3"):
            send(run, receiver.url, steps=(7,))


@pytest.mark.slow
def test_a_directory_of_runs_is_sent_run_by_run(tmp_path: Path) -> None:
    job = tmp_path / "job"
    rundir.create(job)
    for rank in range(2):
        write_run(job / rundir.rank_name(rank), steps=2, spans=3, number=10 + rank, rank=rank, world_size=2)
    rundir.write_run(job, {**about(9), "kind": "ranks", "name": "job", "finished": True})
    with Receiver() as other:
        assert send(job, other.url, steps=(1,)).steps == 2
    with Receiver() as receiver:
        counts = send(job, receiver.url)
    assert (counts.steps, counts.spans) == (4, 4 * 3 + 2 + 1)
    assert max(receiver.ids.values()) == 1


def test_a_large_trace_is_sent_as_an_overview_and_details(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, spans=500)
    with Receiver() as receiver:
        send(run, receiver.url, trace_spans=100)
    traces = Counter(span.trace_id.hex() for span in receiver.spans)
    assert max(traces.values()) <= 100
    assert {f"{1:04x}{0:04x}{n:08x}" for n in range(500)} <= set(receiver.ids)


@pytest.mark.slow
def test_steps_in_the_trace_of_their_caller_are_folded_when_its_budget_is_used_up(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, spans=60, in_trace=True)
    with Receiver() as receiver:
        send(run, receiver.url, trace_spans=200)
    traces = Counter(span.trace_id.hex() for span in receiver.spans)
    assert traces[f"{1:032x}"] <= 200 + 20 * delivery.MIN_STEP_SPANS
    assert max(traces.values()) < 400
    assert {f"{1:04x}{step:04x}{n:08x}" for step in range(20) for n in range(60)} <= set(receiver.ids)
    with Receiver() as again:
        send(run, again.url, trace_spans=200, steps=(7, 19))
    assert set(again.ids) < set(receiver.ids)


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_requests_say_what_they_are(tmp_path: Path, protocol: str, compression: str) -> None:
    run = write_run(tmp_path / "run", steps=1, spans=3)
    options = ExportOptions(protocol=protocol, compression=compression, headers=("Api-Key=S3CRET",))
    with Receiver() as receiver:
        assert send(run, receiver.url.replace("//", "//ada:pass@"), options).spans == 4
    headers = receiver.headers[0]
    kind = "application/json" if protocol == "http/json" else "application/x-protobuf"
    assert (headers["content-type"], headers["api-key"]) == (kind, "S3CRET")
    assert headers["authorization"] == "Basic YWRhOnBhc3M="
    assert headers.get("content-encoding", "none") == compression
    if protocol == "http/json":
        spans = [s for body in receiver.bodies for s in json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"]]
        assert spans[0]["spanId"] == f"{1:04x}{0:04x}{0:08x}"


class Taker(trace_service_pb2_grpc.TraceServiceServicer):
    """A receiver over gRPC, the official one for Python."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.metadata: dict[str, str] = {}

    def Export(self, request: Any, context: Any) -> Any:
        self.bodies.append(request.SerializeToString())
        self.metadata = dict(context.invocation_metadata())
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def taker() -> Iterator[tuple[Taker, str]]:
    server, servicer = grpc.server(futures.ThreadPoolExecutor(2)), Taker()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"grpc://127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_grpc_takes_the_same_requests(tmp_path: Path, taker: tuple[Taker, str], compression: str) -> None:
    run, (servicer, url) = write_run(tmp_path / "run", steps=2, spans=5), taker
    assert send(run, url, ExportOptions(headers=("Api-Key=S3CRET",), compression=compression)).spans == 11
    assert servicer.metadata["api-key"] == "S3CRET"
    with Receiver() as receiver:
        send(run, receiver.url)
    assert [span.span_id for span in spans_in(servicer.bodies)] == [span.span_id for span in receiver.spans]


@pytest.mark.slow
def test_grpc_receivers_with_a_limit_of_four_mebibytes_take_a_large_step(
    tmp_path: Path, taker: tuple[Taker, str]
) -> None:
    run, (servicer, url) = write_run(tmp_path / "run", steps=1, spans=40_000), taker
    counts = send(run, url, trace_spans=0)
    assert (counts.spans, counts.rejected, counts.left) == (40_001, 0, 0)
    assert len(spans_in(servicer.bodies)) == 40_001


# --- files ------------------------------------------------------------------------------------------------


def test_what_a_file_lacks_is_said_without_a_command_that_files_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=2, spans=3)
    rundir.segment(run, 1).write_bytes(b"damaged")
    assert main(["export", str(run), "--to", str(tmp_path / "out.jsonl"), "-q"]) == 1
    said = capsys.readouterr().err
    assert "xsp: 1 traces were not delivered to out.jsonl\n" in said
    assert "--resume" not in said


def test_a_file_of_json_lines_and_one_of_messages_hold_the_same_spans(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, spans=5)
    assert send(run, f"{tmp_path}/out.jsonl").spans == send(run, f"{tmp_path}/out.pb").spans == 16
    content, bodies = (tmp_path / "out.pb").read_bytes(), []
    while content:
        length = int.from_bytes(content[:4], "big")
        bodies.append(content[4 : 4 + length])
        content = content[4 + length :]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ids = [s["spanId"] for line in lines for r in line["resourceSpans"] for o in r["scopeSpans"] for s in o["spans"]]
    assert ids == [span.span_id.hex() for span in spans_in(bodies)]
    assert not (run / "delivery.json").exists()


def test_a_file_that_cannot_be_written_leaves_nothing_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["export", str(run), "--to", f"{tmp_path}/no/out.jsonl", "-q"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (run / "steps/000001.parquet").write_bytes(b"PAR1")
    assert main(["export", str(run), "--to", f"{tmp_path}/out.jsonl", "-q"]) == 1
    assert "000001.parquet: damaged" in capsys.readouterr().err


# --- what is left -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resume_sends_only_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a run", steps=4, spans=3)
    with Receiver(ACCEPTED, ACCEPTED, (503, {}, b"later")) as receiver:
        assert main(["export", str(run), "--to", receiver.url, "--patience", "0.2", "-q"]) == 1
        said = capsys.readouterr().err
        assert "503" in said
        assert "later" in said
        assert f"xsp: 3 traces were not delivered to {receiver.url}/v1/traces; `xsp export '{run}' --resume`" in said
        assert len(receiver.ids) == 6
        receiver.answers = [ACCEPTED]
        assert main(["export", str(run), "--resume", "-q"]) == 0
    assert set(receiver.ids.values()) == {1}
    assert len(receiver.ids) == 4 * 3 + 1
    told = rundir.read_run(run)["delivery"]
    assert [(each["steps"], each["spans"], each["left"], each["messages"]) for each in told] == [(4, 13, 0, [])]


def test_a_run_that_was_broken_off_ends_with_its_last_span_and_is_sent_on_when_it_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, spans=3, finished=False, end_ns=EPOCH_NS)
    with Receiver() as receiver:
        assert send(run, receiver.url).left == 0
        assert receiver.spans[-1].end_time_unix_nano == EPOCH_NS + 1_000_000
        rundir.write_run(run, {**rundir.read_run(run), "finished": True, "end_ns": EPOCH_NS + 5_000_000})
        assert send(run, receiver.url, resume=True).spans == 1
        assert send(run, receiver.url, resume=True).spans == 0


def test_a_trace_of_others_has_no_run_of_its_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, spans=3, otel=None)
    with Receiver() as receiver:
        assert (send(run, receiver.url).spans, [len(span.links) for span in receiver.spans]) == (3, [0, 0, 0])


def test_to_resume_one_must_have_been_on_the_way_to_one_endpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="name the target with --to; deliveries were begun to: none"):
        endpoint_to_resume(run)


@pytest.mark.slow
def test_a_kill_in_the_middle_loses_nothing_and_doubles_only_what_is_identical(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60, spans=50)
    with Receiver() as receiver:
        command = [sys.executable, "-m", "xsp.cli", "export", str(run), "--to", receiver.url, "-q"]
        for _ in range(3):
            before = len(receiver.bodies)
            process = subprocess.Popen([*command, "--resume"])
            poll(lambda before=before: len(receiver.bodies) > before + 10)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert subprocess.run([*command, "--resume"]).returncode == 0
    assert len(receiver.ids) == 60 * 50 + 1
    contents = {span.span_id: span for span in receiver.spans}
    assert all(contents[span.span_id] == span for span in receiver.spans)
    assert len(receiver.spans) < 2 * len(contents)


# --- while it is recorded ---------------------------------------------------------------------------------


def record(out: Path, steps: int = 3, **options: Any) -> None:
    """Record a program that does nothing, in a process that must not notice."""
    with xsp.profile("live", levels="M", out=out, warmup=0, settle=False, collectors=[], **options) as prof:
        for _ in range(steps):
            with prof.step():
                pass


@pytest.mark.slow
def test_a_step_is_delivered_before_the_next_one_begins(tmp_path: Path) -> None:
    options: dict[str, Any] = {"levels": "M", "warmup": 0, "settle": False, "collectors": []}
    with Receiver() as receiver, xsp.profile("live", out=tmp_path / "run", otlp=receiver.url, **options) as prof:
        for done in range(3):
            assert len(receiver.ids) == done
            with prof.step():
                pass
    assert [span.name for span in receiver.spans] == ["live", "live", "live", "run live", "steps 0 to 2"]
    run = rundir.read_run(tmp_path / "run")
    assert receiver.spans[3].end_time_unix_nano == run["end_ns"]
    assert [(each["steps"], each["left"]) for each in run["delivery"]] == [(3, 0)]


@pytest.mark.slow
def test_what_sends_does_not_load_in_the_measured_process(tmp_path: Path) -> None:
    with Receiver() as receiver:
        code = f"""
import sys, xsp
with xsp.profile("live", levels="M", out="run", collectors=[], warmup=0, settle=False, otlp={receiver.url!r}) as prof:
    with prof.step():
        pass
print(*(name for name in ("requests", "grpc", "google", "duckdb", "numpy") if name in sys.modules))
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("\n", "")
        assert [span.name for span in receiver.spans] == ["live", "run live", "steps 0 to 0"]


@pytest.mark.slow
def test_what_is_left_at_the_end_is_said_with_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Receiver((404, {}, b"no such page")) as receiver:
        record(tmp_path / "run", otlp=receiver.url)
        said = capsys.readouterr().err
        assert "4 traces were not delivered" in said
        assert "404 Not Found (no such page)" in said
        assert f"`xsp export {tmp_path / 'run'} --resume` sends what is left" in said
        assert "4 traces were not delivered" in str(health(xsp.load(tmp_path / "run")))
        receiver.answers = [ACCEPTED]
        assert main(["export", str(tmp_path / "run"), "--resume", "-q"]) == 0
    assert len(receiver.ids) == 5, "three steps, the run, and its loop"
    assert "delivery" not in [f.subject for f in health(xsp.load(tmp_path / "run")) if f.severity == Severity.WARNING]


@pytest.mark.slow
def test_a_receiver_that_hangs_holds_the_program_once_and_in_bounds(tmp_path: Path) -> None:
    def hang(handler: Any) -> None:
        receiver.released.wait()

    with Receiver(hang) as receiver:
        begin = time.monotonic()
        record(tmp_path / "run", steps=5, otlp=receiver.url)
        held = time.monotonic() - begin
    assert held < live.MAX_WAIT_S + live.FINISH_S + 60  # the rest is for a slow machine to start two processes
    run = rundir.read_run(tmp_path / "run")
    assert run["steps"]["stored"] == 5
    assert run["delivery"][0]["left"] == 6


@pytest.mark.slow
def test_steps_that_are_shed_are_whole_and_counted(tmp_path: Path) -> None:
    first = threading.Event()

    def slow(handler: Any) -> None:
        first.wait(20)
        receiver.answers[0] = ACCEPTED
        handler.send_response(200)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with Receiver(slow) as receiver:
        record(tmp_path / "run", steps=5, otlp=receiver.url, otlp_policy="shed")
        first.set()
        assert rundir.read_run(tmp_path / "run")["delivery"][0]["left"] == 6
        assert main(["export", str(tmp_path / "run"), "--resume", "-q"]) == 0
    assert len(receiver.ids) == 7, "five steps, the run, and its loop"


@pytest.mark.slow
def test_no_secret_of_an_endpoint_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=S3CRET")
    with Receiver(ACCEPTED, (403, {}, b"S3CRET? no!")) as receiver:
        url = receiver.url.replace("//", "//ada:S3CRET@") + "?key=S3CRET"
        command = [sys.executable, "-m", "xsp.cli", "profile", "m.py:build", "--levels", "M", "--repeats", "1", "-q"]
        (tmp_path / "m.py").write_text("import torch\ndef build(n): return torch.nn.ReLU(), torch.zeros(n, 1)")
        done = subprocess.run(
            [*command, "--otlp", url, "--out", "run"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert receiver.headers[0]["api-key"] == "S3CRET"
    assert "***? no!" in done.stderr
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"S3CRET" in path.read_bytes()]
    assert kept == []
    assert not any(b"S3CRET" in body for body in receiver.bodies)
    assert "S3CRET" not in done.stderr + done.stdout


# --- real receivers ---------------------------------------------------------------------------------------


@pytest.mark.jaeger
@pytest.mark.parametrize("protocol", ["otlp_http", "otlp_grpc"])
def test_jaeger_shows_a_trace_for_each_step(tmp_path: Path, jaeger: Jaeger, protocol: str) -> None:
    number = {"otlp_http": 501, "otlp_grpc": 502}[protocol]
    run = write_run(tmp_path / "run", steps=3, spans=50, number=number)
    url = getattr(jaeger, protocol).replace("http", "grpc" if protocol == "otlp_grpc" else "http")
    assert send(run, url).left == 0
    assert send(run, url).left == 0  # a second time: Jaeger keeps one of each
    for step in range(3):
        trace = poll(lambda step=step: fetch_json(f"{jaeger.query}/api/traces/{number:016x}{step + 1:016x}"))["data"][0]
        assert len(trace["spans"]) == 50
        assert not any(span.get("warnings") for span in trace["spans"])
        (link,) = [r for span in trace["spans"] for r in span["references"] if r["refType"] == "FOLLOWS_FROM"]
        assert link["traceID"].zfill(32) == f"{number:032x}"


@pytest.mark.jaeger
def test_no_span_is_lost_when_the_collector_is_killed_and_restarted_in_the_middle(
    tmp_path: Path, otel_collector: Callable[..., Collector]
) -> None:
    run, taken = write_run(tmp_path / "run", steps=40, spans=5000), tmp_path / "taken.json"
    collector = otel_collector(taken)
    command = [sys.executable, "-m", "xsp.cli", "export", str(run), "--to", collector.otlp_http, "-q"]
    process = subprocess.Popen(command)
    for part in (1, 2):
        poll(lambda part=part: taken.exists() and taken.stat().st_size > part * 20_000_000)
        collector.kill()
        collector.start()
    assert process.wait() == 0
    collector.stop()
    sent = {f"{1:04x}{step:04x}{n:08x}" for step in range(40) for n in range(5000)}
    found = {each.decode() for each in re.findall(rb'"spanId":"([0-9a-f]{16})"', taken.read_bytes())}
    assert len(sent - found) == 0


def test_requests_are_sent_in_the_traces_in_which_they_arrived_and_linked_to_their_steps(tmp_path):
    trace_api = pytest.importorskip("opentelemetry.trace")
    own = trace_api.SpanContext(0xABC, 0xDEF, False, trace_api.TraceFlags(trace_api.TraceFlags.SAMPLED))
    engine, run = Engine("mine"), tmp_path / "run"
    with xsp.profile("served", out=run):
        with trace_api.use_span(trace_api.NonRecordingSpan(own)):
            engine.arrive("inside", prompt_tokens=2)
        engine.arrive("alone", prompt_tokens=2)
        with engine.step([("inside", "prefill", 2)]):
            pass
        with engine.step([("inside", "decode", 1), ("alone", "prefill", 2)]):
            pass
        engine.finish("inside")
        engine.finish("alone")
    counts = send(run, str(tmp_path / "all.jsonl"))
    assert counts.spans == 1 + 2 + 2
    spans = {}
    for line in (tmp_path / "all.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    named = {each["key"]: each["value"] for each in span["attributes"]}
                    request = named.get("xsp.serving.request", {}).get("stringValue")
                    spans[request or span["name"]] = span
    inside, alone = spans["inside"], spans["alone"]
    assert inside["traceId"] == f"{0xABC:032x}"
    assert inside["parentSpanId"] == f"{0xDEF:016x}"
    assert not alone.get("parentSpanId")
    steps = [(spans[kind]["traceId"], spans[kind]["spanId"]) for kind in ("prefill", "mixed")]
    assert len({trace_id for trace_id, _ in steps} | {alone["traceId"], inside["traceId"]}) == 4

    def linked(span):
        return [(link["traceId"], link["spanId"]) for link in span["links"]]

    [run_span] = [span for span in spans.values() if span["name"].startswith("xsp") or "served" in span["name"]]
    assert linked(inside) == [(run_span["traceId"], run_span["spanId"]), *steps]
    assert linked(alone)[1:] == steps[1:]
    assert set(linked(spans["mixed"])[1:]) == {(each["traceId"], each["spanId"]) for each in (inside, alone)}
    assert send(run, str(tmp_path / "timed.jsonl"), timed=True).spans == 1
