"""Runs of any size, and a receiver of OTLP over HTTP with scripted answers."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from xsp import rundir, table
from xsp.schema import Kind, Level, Span

Answer = tuple[int, dict[str, str], bytes] | Callable[[BaseHTTPRequestHandler], None]

ACCEPTED: Answer = (200, {"Content-Type": "application/x-protobuf"}, b"")
EPOCH_NS = 1_790_000_000_000_000_000


def write_run(
    run: Path, steps: int = 3, spans: int = 20, number: int = 1, in_trace: bool = False, **content: Any
) -> Path:
    """Write a finished run whose steps have a root and modules under it; ids follow from the number.

    Each step is a trace of its own, or all are in the trace of the run.
    """
    rundir.create(run)
    con = table.connect()
    run_span = content.get("otel", about(number)["otel"])
    for step in range(steps):
        trace = run_span["trace_id"] if in_trace else f"{number:016x}{step + 1:016x}"
        root = f"{number:04x}{step:04x}{0:08x}"
        common = Span(
            trace_id=trace, process=1, thread=1, step=step, rung=int(Level.LAYER), rank=content.get("rank", 0)
        )
        common = common._replace(timed=step % 2 == 0, start_ns=EPOCH_NS)
        parent = run_span["span_id"] if in_trace else None
        top = common._replace(
            span_id=root, parent_id=parent, level=int(Level.MODEL), kind=Kind.STEP.value, name="step", dur_ns=10**6
        )
        module = common._replace(parent_id=root, level=int(Level.LAYER), kind=Kind.MODULE.value, name="layer")
        for name, row in (("segment", top), ("one", module._replace(dur_ns=10))):
            table.create(con, name)
            table.insert(con, name, [row])
        con.execute(
            f"INSERT INTO segment SELECT one.* REPLACE (printf('%s%08x', '{root[:8]}', n) AS span_id, "
            f"{EPOCH_NS} + n * 10 AS start_ns) FROM one, range(1, {spans}) AS _(n)"
        )
        table.write_parquet(con, "segment", rundir.segment(run, step))
    rundir.write_run(run, {**about(number), "name": run.name, "finished": True, **content})
    return run


def about(number: int) -> dict[str, Any]:
    """Return the identity of a run as `run.json` has it."""
    return {
        "id": f"{number:016x}",
        "otel": {"trace_id": f"{number:032x}", "span_id": f"{number:016x}", "parent_id": None},
        "start_ns": EPOCH_NS,
        "end_ns": EPOCH_NS + 10**9,
        "rank": 0,
        "world_size": 1,
        "process": 1,
        "host": "host-1",
    }


class Receiver:
    """A server on loopback that gives its answers in order, and then repeats the last one."""

    def __init__(self, *answers: Answer, port: int = 0) -> None:
        self.answers = list(answers) or [ACCEPTED]
        self.bodies: list[bytes] = []
        """Bodies of the requests that were answered with 200."""

        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.last_body = b""
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver._receive(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """Expect TLS from now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def _receive(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.last_body = body
        self.headers.append({name.lower(): value for name, value in handler.headers.items()})
        self.paths.append(handler.path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer(handler)
            return
        code, headers, content = answer
        if code == 200:
            self.bodies.append(body)
        handler.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    @property
    def spans(self) -> list[OtlpSpan]:
        """The accepted spans, in order."""
        return spans_in(self.bodies)

    @property
    def ids(self) -> Counter[str]:
        """The number of times that each span was accepted."""
        return Counter(span.span_id.hex() for span in self.spans)


def spans_in(bodies: Sequence[bytes]) -> list[OtlpSpan]:
    """Return the spans of encoded requests."""
    messages = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    return [
        span
        for message in messages
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
