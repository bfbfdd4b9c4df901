"""Endpoints that refuse, hang, answer too slowly or with garbage: what is said, and what of the run is left."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto")
pytest.importorskip("grpc")

import grpc
from depth import deep
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from realparts import free_ports
from receivers import ACCEPTED, Answer, Receiver, spans_in, write_run

from xsp import plugins, rundir
from xsp.cli import main
from xsp.errors import DeliveryError, PluginError, UsageError
from xsp.otlp import delivery, endpoint
from xsp.otlp.export import Export, export
from xsp.otlp.send import Counts

PROTOBUF = {"Content-Type": "application/x-protobuf"}
NESTED_JSON = b"[" * 60_000
"""Nested deeper than Python parses."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps; with its own span, five spans."""
    return write_run(tmp_path / "run", steps=2, spans=2)


ENOUGH_S = 60.0
"""More than what ends by itself takes on any machine."""

BRIEF_S = 0.3
"""Where nothing but patience ends it."""


def send(run: Path, url: str, patience_s: float = ENOUGH_S, **options: Any) -> Counts:
    to = endpoint.endpoint(url, endpoint.ExportOptions(**options), {})
    return export(Export(run, patience_s=patience_s), to, lambda what, done, total: None)


def refused(run: Path, url: str, **options: Any) -> str:
    """Return why nothing was delivered; all of the run must still be there to be sent."""
    with pytest.raises(DeliveryError) as caught:
        send(run, url, **options)
    assert rundir.read_run(run)["delivery"][0]["left"] == 3
    assert len(rundir.segments(run)) == 2
    return str(caught.value)


@contextmanager
def listening(behave: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """Listen on a port and behave as told to each connection; without that, never accept one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        behave(connection)  # type: ignore[misc]
                    except OSError:
                        pass

        if behave is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def says(content: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(content)

    return behave


def drips(connection: socket.socket) -> None:
    """Answer a byte at a time: each comes in time, all of them never do."""
    connection.recv(1 << 20)
    for letter in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000:
        connection.sendall(bytes([letter]))
        time.sleep(0.05)


def hangs(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


# --- nobody, or no receiver -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_nobody_listens(run: Path, scheme: str) -> None:
    port = free_ports(1)[0]
    said = refused(run, f"{scheme}://127.0.0.1:{port}", patience_s=BRIEF_S)
    assert f"127.0.0.1:{port}" in said
    assert "refused" in said
    assert "tried for 0.3 s" in said


@pytest.mark.parametrize("address", ["http://localhost:{}", deep("http://[::1]:{}"), "grpc://127.0.0.1:{}"])
def test_where_nothing_listens_on_this_machine_it_gives_up_soon_and_says_what_to_type(
    run: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--to", address.format(free_ports(1)[0]), "-q"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "start a receiver, such as `xsp serve`, or give its address with --to URL; tried for 1 s" in said


def test_a_receiver_that_is_only_starting_is_waited_for_where_that_is_asked_for(run: Path) -> None:
    port = free_ports(1)[0]
    started: list[Receiver] = []

    def start() -> None:
        time.sleep(0.5)
        started.append(Receiver(port=port))

    thread = threading.Thread(target=start)
    thread.start()
    counts = send(run, f"http://127.0.0.1:{port}")
    thread.join()
    started[0].__exit__(None, None, None)
    assert counts.left == 0


@pytest.mark.parametrize("scheme", ["http", deep("grpc")])
def test_there_is_no_such_host(run: Path, scheme: str) -> None:
    assert "nowhere.invalid" in refused(run, f"{scheme}://nowhere.invalid:4318", patience_s=BRIEF_S)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("behave", [deep(None), hangs, deep(drips)], ids=["never accepts", "never answers", "drips"])
def test_it_hangs(run: Path, scheme: str, behave: Callable[[socket.socket], None] | None) -> None:
    with listening(behave) as place:
        begin = time.monotonic()
        said = refused(run, f"{scheme}://{place}", timeout_s=0.4, patience_s=1.0)
        assert time.monotonic() - begin < 300  # of which 1 s is patience; what hangs would never end
    assert place in said


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize(
    "content",
    [b"", deep(b"\0" * 1000), deep(b"SSH-2.0-OpenSSH_9.2\r\n"), b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"],
    ids=["closes", "zeros", "SSH", "cut off"],
)
def test_it_answers_with_garbage(run: Path, scheme: str, content: bytes) -> None:
    with listening(says(content)) as place:
        assert place in refused(run, f"{scheme}://{place}", patience_s=BRIEF_S)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"Content-Type": "text/html"}, b"<html>Log in</html>"),
        (200, PROTOBUF, b"<html>Log in</html>"),
        (200, {"Content-Type": "application/json"}, b"[1"),
        (200, {"Content-Type": "application/json"}, b"[1]"),
        (200, {"Content-Type": "application/json"}, b'{"partialSuccess": {"rejectedSpans": [1]}}'),
        (200, {"Content-Type": "application/json"}, b'{"partialSuccess": {"rejectedSpans": 1e999}}'),
        (200, {"Content-Type": "application/json"}, NESTED_JSON),
        (200, {"Content-Encoding": "gzip", **PROTOBUF}, b"no gzip"),
    ],
    ids=[
        "a page",
        "a page as protobuf",
        "half JSON",
        "other JSON",
        "a list for a number",
        "infinity",
        "nested JSON",
        "no gzip",
    ],
)
def test_it_takes_everything_but_is_no_receiver(run: Path, answer: Answer) -> None:
    with Receiver(answer) as receiver:
        refused(run, receiver.url)
        assert len(receiver.paths) == 1


def test_null_in_an_answer_counts_as_nothing_that_was_rejected(run: Path) -> None:
    content = b'{"partialSuccess": {"rejectedSpans": null, "errorMessage": null}}'
    with Receiver((200, {"Content-Type": "application/json"}, content)) as receiver:
        counts = send(run, receiver.url)
    assert (counts.rejected, counts.left, counts.messages) == (0, 0, [])


@pytest.mark.parametrize("code", [401, 403, 404, 405])
def test_the_path_or_the_credentials_are_wrong(run: Path, code: int) -> None:
    with Receiver((code, {"Content-Type": "text/plain"}, b"not \x1b[31m\nhere")) as receiver:
        said = refused(run, receiver.url)
        assert len(receiver.paths) == 1
    assert str(code) in said
    assert "(not [31m here)" in said


def test_an_error_whose_json_is_nested_too_deep_is_shown_as_text(run: Path) -> None:
    with Receiver((401, {"Content-Type": "application/json"}, NESTED_JSON)) as receiver:
        assert "([[[" in refused(run, receiver.url)


def test_it_is_elsewhere(run: Path) -> None:
    with Receiver((302, {"Location": "http://elsewhere"}, b"")) as receiver:
        assert "it redirects; give the URL that it redirects to" in refused(run, receiver.url)


def test_plain_http_and_tls_do_not_match(run: Path) -> None:
    with Receiver() as receiver:
        assert "TLS failed" in refused(run, receiver.url.replace("http", "https"))
        assert "127.0.0.1" in refused(run, receiver.url.replace("http", "grpcs"), timeout_s=1.0)


@pytest.mark.slow
def test_a_certificate_that_nobody_vouches_for(run: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl makes the certificate, and is not there")
    with Receiver() as receiver:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        receiver.speak_tls(context)
        url = receiver.url.replace("http", "https")
        assert "TLS failed" in refused(run, url)
        assert send(run, url, ca_file=str(certificate)).left == 0


# --- receivers that do not take it now --------------------------------------------------------------------


@pytest.mark.parametrize("code", [429, deep(502), 503, deep(504)])
def test_what_may_be_sent_again_is_sent_again(run: Path, code: int) -> None:
    with Receiver((code, {}, b""), (code, {"Retry-After": "0"}, b""), ACCEPTED) as receiver:
        counts = send(run, receiver.url)
    assert (counts.left, counts.rejected, counts.retries) == (0, 0, 2)
    assert set(receiver.ids.values()) == {1}


@pytest.mark.slow
def test_the_receiver_says_when(run: Path) -> None:
    with Receiver((503, {"Retry-After": "1"}, b""), ACCEPTED) as receiver:
        begin = time.monotonic()
        assert send(run, receiver.url).left == 0
        assert time.monotonic() - begin > 1


def test_a_pause_beyond_our_patience_is_not_waited_for(run: Path) -> None:
    with Receiver((503, {"Retry-After": "3600"}, b"")) as receiver:
        assert "503" in refused(run, receiver.url, patience_s=1)


@pytest.mark.parametrize("code", [400, 422, 500])
def test_what_may_not_be_sent_again_is_counted_and_the_rest_is_sent(
    run: Path, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    body = Status(code=3, message="name is empty").SerializeToString()
    with Receiver((code, PROTOBUF, body), ACCEPTED) as receiver:
        assert main(["export", str(run), "--to", receiver.url, "-q"]) == 1
        said = capsys.readouterr().err
        assert "(name is empty)" in said
        assert "2 spans were rejected" in said
        assert "1 traces were not delivered" in said
        assert main(["export", str(run), "--resume", "-q"]) == 0
    assert len(receiver.ids) == 5


def test_a_receiver_that_takes_a_part_is_not_asked_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=1, error_message="too old")
    body = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    with Receiver((200, PROTOBUF, body), ACCEPTED) as receiver:
        assert main(["export", str(run), "--to", receiver.url, "-q"]) == 1
        assert "too old" in capsys.readouterr().err
        assert main(["export", str(run), "--resume", "-q"]) == 0
        assert len(receiver.paths) == 3
    told = rundir.read_run(run)["delivery"][0]
    assert (told["spans"], told["rejected"], told["left"]) == (4, 1, 0)


def test_requests_that_are_too_large_are_sent_in_halves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, spans=200)
    with Receiver() as receiver:

        def limited(handler: Any) -> None:
            large = int(handler.headers["Content-Length"]) > 5000
            if not large:
                receiver.bodies.append(receiver.last_body)
            handler.send_response(413 if large else 200)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        receiver.answers = [limited]
        counts = send(run, receiver.url)
    assert (counts.spans, counts.rejected, counts.left) == (201, 0, 0)
    assert set(receiver.ids.values()) == {1}
    assert len(receiver.ids) == 201


def test_a_single_span_that_is_too_large_is_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Receiver((413, {}, b"")) as receiver:
        assert "413" in refused(run, receiver.url)


# --- gRPC -------------------------------------------------------------------------------------------------


@contextmanager
def answering(*behaviours: Callable[[Any], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Serve the method over gRPC with raw bytes, one behaviour after the other; the last one again and again."""
    left, taken = list(behaviours), []

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        answer = (left.pop(0) if len(left) > 1 else left[0])(context)
        taken.append(body)
        return answer

    method = grpc.unary_unary_rpc_method_handler(export)
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.max_receive_message_length", 100_000)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}", taken
    server.stop(None)


def takes(context: Any) -> bytes:
    return b""


def aborts(code: grpc.StatusCode, retry_s: float | None = None) -> Callable[[Any], bytes]:
    def behave(context: Any) -> bytes:
        if retry_s is not None:
            info = AnyMessage()
            info.Pack(RetryInfo(retry_delay=Duration(nanos=int(retry_s * 1e9))))
            details = Status(code=code.value[0], details=[info]).SerializeToString()
            context.set_trailing_metadata([("grpc-status-details-bin", details)])
        context.abort(code, "not so")

    return behave


@pytest.mark.parametrize("name", ["UNAVAILABLE", *map(deep, ("ABORTED", "DATA_LOSS", "OUT_OF_RANGE")), "CANCELLED"])
def test_grpc_what_may_be_sent_again_is_sent_again(run: Path, name: str) -> None:
    with answering(aborts(grpc.StatusCode[name]), takes) as (url, taken):
        counts = send(run, url)
    assert (counts.left, counts.rejected, counts.retries) == (0, 0, 1)
    assert len(spans_in(taken)) == 5


def test_grpc_an_exhausted_receiver_is_asked_again_only_if_it_says_when(run: Path) -> None:
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    with answering(aborts(exhausted, retry_s=0.01), takes) as (url, _):
        assert send(run, url).left == 0
    with answering(aborts(exhausted), takes) as (url, _):
        counts = send(run, url)
    assert (counts.left, counts.rejected, counts.retries) == (1, 2, 0)


@pytest.mark.parametrize("name", ["UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED"])
def test_grpc_the_service_or_the_credentials_are_wrong(run: Path, name: str) -> None:
    with answering(aborts(grpc.StatusCode[name])) as (url, _):
        assert f"{name} (not so)" in refused(run, url)


def test_grpc_an_answer_that_is_no_answer(run: Path) -> None:
    with answering(lambda context: b"\xff\xff") as (url, _):
        assert "but not like an OTLP receiver" in refused(run, url)


@pytest.mark.slow
def test_grpc_requests_that_are_too_large_are_sent_in_halves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, spans=2000)
    with answering(takes) as (url, taken):
        counts = send(run, url)
    assert (counts.spans, counts.rejected, counts.left) == (2001, 0, 0)
    assert max(map(len, taken)) <= 100_000
    assert len({span.span_id for span in spans_in(taken)}) == 2001


def test_grpc_spoken_to_an_http_port_and_the_other_way_round(run: Path) -> None:
    with Receiver() as receiver:
        for scheme in ("grpc", "grpcs"):
            said = refused(run, receiver.url.replace("http", scheme))
            assert "does not speak gRPC, or only one of the two sides uses TLS" in said
    with answering(takes) as (url, _):
        assert "does gRPC listen there? Then write grpc://" in refused(run, url.replace("grpc", "http"))


# --- what the user says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"headers": ("S3CRET",)}, "--header: this is not a header; write name=value"),
        ({"timeout_s": 0.0}, "--timeout: give seconds above 0"),
        ({"timeout_s": float("nan")}, "--timeout: give seconds above 0"),
        ({"compression": "zip"}, "--compression 'zip': choose one of gzip, none"),
        ({"protocol": "thrift"}, "--protocol 'thrift': choose one of grpc"),
        ({"ca_file": "/no/such.pem"}, "--ca-file /no/such.pem: cannot be read"),
        ({"key_file": __file__}, "--key: a client's key needs its certificate: give --cert FILE too"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as caught:
        endpoint.endpoint("http://h:1", endpoint.ExportOptions(**options), {})
    assert word in str(caught.value)
    assert "S3CRET" not in str(caught.value)


def test_a_password_that_would_be_left_out_is_refused() -> None:
    with pytest.raises(UsageError, match="give a header") as caught:
        endpoint.endpoint("grpc://ada:S3CRET@h:1", None, {})
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value"), [("TIMEOUT", "soon"), ("TRACES_COMPRESSION", "zip"), ("PROTOCOL", "udp"), ("HEADERS", "a")]
)
def test_a_variable_that_makes_no_sense_is_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"OTEL_EXPORTER_OTLP_{variable}"):
        endpoint.endpoint("env", None, {f"OTEL_EXPORTER_OTLP_{variable}": value})


@pytest.mark.parametrize(("variable", "value"), [("INSECURE", "1"), ("CLIENT_KEY", __file__)])
def test_a_variable_of_a_connection_that_makes_no_sense_is_named(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"OTEL_EXPORTER_OTLP_{variable}"):
        endpoint.endpoint("env", endpoint.ExportOptions(protocol="grpc"), {f"OTEL_EXPORTER_OTLP_{variable}": value})


@pytest.mark.parametrize(
    "entry", [None, deep(3), deep([]), {"steps": [1]}, deep({"steps": {"one": 2}}), deep({"steps": {"1": "x"}})]
)
def test_a_damaged_list_of_deliveries_means_sending_again(run: Path, entry: object) -> None:
    (run / rundir.DELIVERY_FILE).write_text("[" * 200_000)
    assert delivery.read_entries(run) == {}
    (run / rundir.DELIVERY_FILE).write_text('{"endpoints": {"http')
    with Receiver() as receiver:
        to = endpoint.endpoint(receiver.url, None, {})
        if entry is not None:
            (run / rundir.DELIVERY_FILE).write_text(json.dumps({"endpoints": {to.name: entry}}))
        assert export(Export(run, resume=True), to, lambda what, done, total: None).left == 0
    assert len(delivery.read_entries(run)[to.name]["steps"]) == 2


def test_what_is_missing_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_REQUIRED_MODULES", ("requests", "no_such_package"))
    with pytest.raises(PluginError, match=r'no_such_package: pip install "xsp\[otel\]"'):
        endpoint.endpoint("http://h:1", None, {})


def test_a_profile_says_what_is_wrong_before_it_begins(tmp_path: Path) -> None:
    check = plugins.sender().check
    with pytest.raises(UsageError, match="not an endpoint"):
        check("nonsense", "wait")
    with pytest.raises(UsageError, match="choose wait or shed"):
        check("http://h:1", "hope")
    with pytest.raises(UsageError, match="a file cannot follow a run"):
        check("out.jsonl", "wait")
