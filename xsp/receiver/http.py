"""OTLP over HTTP: `POST /v1/traces`, protobuf or JSON, plain or gzip; the answer to any other request is an error.

Each connection has a thread. The number of threads, the time for a request to arrive and the bytes in memory at a time
are bounded; without a free thread or memory the answer is 503 with `Retry-After`, after which senders retry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus

from google.protobuf.json_format import MessageToJson
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp import hosts
from xsp.connections import State
from xsp.errors import OutputError, TraceError
from xsp.importers import otlp_json, otlp_proto
from xsp.importers.otlp import ScopeSpans
from xsp.receiver.journal import RequestResult, RunWriter
from xsp.receiver.limits import (
    CHUNK,
    BodyTooLarge,
    DamagedBody,
    MemoryBudget,
    MemoryFull,
    RequestLimits,
    Share,
    check_json,
    check_protobuf,
    gunzip,
)
from xsp.receiver.loopback import RETRY_AFTER_S, DeadlineHandler, LimitedHTTPServer

PATH = "/v1/traces"
PROTOBUF, JSON = "application/x-protobuf", "application/json"

_CODES = {400: 3, 403: 7, 404: 5, 413: 3, 415: 3, 503: 14}
"""gRPC status code for an HTTP status; it is in the body of an error."""


class RequestError(Exception):
    """An error that is the answer to a request."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class OtlpHttpServer(LimitedHTTPServer):
    """The HTTP server of a receiver."""

    def __init__(
        self, address: tuple[str, int], writer: RunWriter, budget: MemoryBudget, limits: RequestLimits
    ) -> None:
        """Start to listen.

        Raises:
            OSError: the address cannot be used.
        """
        self.writer, self.budget, self.limits = writer, budget, limits
        self.on_loopback = hosts.is_loopback(address[0])
        super().__init__(address, _Request, limits.clients)


class _Request(DeadlineHandler):
    """A connection to the receiver."""

    server: OtlpHttpServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        try:
            with self.server.budget.share() as share:
                kind, body = self._body(share)
                self.client.enter(State.WORK)
                self._acknowledge(kind, self._store(kind, body))
        except RequestError as refused:
            self._refuse(refused)

    def do_GET(self) -> None:
        is_known_path = self.path.partition("?")[0] == PATH
        self._refuse(
            RequestError(
                HTTPStatus.METHOD_NOT_ALLOWED if is_known_path else HTTPStatus.NOT_FOUND, f"POST spans to {PATH}"
            )
        )

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET

    # --- requests -------------------------------------------------------------------------------------

    def _body(self, share: Share) -> tuple[str, bytes]:
        """Return the content type of a request, and its body, decompressed."""
        if self.server.on_loopback and not hosts.names_loopback(self.headers.get("Host")):
            raise RequestError(
                HTTPStatus.FORBIDDEN, "this receiver serves only this machine; send to the address 127.0.0.1"
            )
        if self.path.partition("?")[0] != PATH:
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is nothing here; POST spans to {PATH}")
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if kind not in (PROTOBUF, JSON):
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {PROTOBUF} or {JSON}")
        if encoding not in ("gzip", "identity", ""):
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send it uncompressed or as gzip")
        limit = self.server.limits.max_body
        try:
            content = bytearray()
            for piece in self._body_pieces():
                if len(content) + len(piece) > limit:
                    raise BodyTooLarge(f"more than {limit} bytes; send smaller requests")
                share.acquire(len(piece))
                content += piece
            return kind, gunzip(bytes(content), limit, share) if encoding == "gzip" else bytes(content)
        except BodyTooLarge as error:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        except DamagedBody as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except MemoryFull as error:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        except TimeoutError as error:
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time") from error

    def _body_pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives, chunked or with a stated length."""
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            while size := self._parse_length(self.rfile.readline(32).partition(b";")[0].strip(), 16):
                yield from self._read_exactly(size)
                self.rfile.readline(3)
            while self.rfile.readline(1024).strip():
                pass
            return
        content_length = self.headers.get("Content-Length")
        if content_length is None:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "state the length of the request")
        size = self._parse_length(content_length.encode("latin-1", "replace"), 10)
        if size > self.server.limits.max_body:
            raise BodyTooLarge(f"more than {self.server.limits.max_body} bytes; send smaller requests")
        yield from self._read_exactly(size)

    def _parse_length(self, text: bytes, base: int) -> int:
        try:
            size = int(text, base) if text.isalnum() else -1  # without the signs and marks that Python allows
        except ValueError:
            size = -1
        if size < 0 or text[1:2] in (b"x", b"X"):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the length is not a number")
        return size

    def _read_exactly(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self.rfile.read1(min(size, CHUNK))
            if not piece:
                raise RequestError(HTTPStatus.BAD_REQUEST, "the request is truncated")
            size -= len(piece)
            yield piece

    def _store(self, kind: str, body: bytes) -> RequestResult:
        try:
            return self.server.writer.store(parts_of(kind, body))
        except BodyTooLarge as error:
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from error
        except TraceError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except OutputError as error:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error

    # --- responses ------------------------------------------------------------------------------------

    def _acknowledge(self, kind: str, answer: RequestResult) -> None:
        response = response_of(answer)
        body = response.SerializeToString() if kind == PROTOBUF else MessageToJson(response, indent=None).encode()
        self._send(HTTPStatus.OK, kind, body)

    def _refuse(self, refused: RequestError) -> None:
        """Send an error in the sender's format, and close the connection, because its body may not have been read."""
        self.close_connection = True
        code, text = _CODES.get(int(refused.status), 2), str(refused)
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind == PROTOBUF:
            self._send(refused.status, PROTOBUF, Status(code=code, message=text).SerializeToString())
        else:
            self._send(refused.status, JSON, json.dumps({"code": code, "message": text}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", str(RETRY_AFTER_S))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def parts_of(kind: str, body: bytes) -> Iterator[ScopeSpans]:
    """Yield the parts of a request, which is decoded at the first iteration.

    Raises:
        BodyTooLarge: the request has more objects or values than the limit.
        TraceError: the request cannot be decoded.
    """
    if kind == PROTOBUF:
        check_protobuf(body)
        yield from otlp_proto.parts_of(otlp_proto.decode(body, "the request"), "the request")
    else:
        check_json(body)
        yield from otlp_json.parts_of(otlp_json.parse_object(body, "the request"), "the request")


def response_of(answer: RequestResult) -> ExportTraceServiceResponse:
    """Return OTLP's response to a request, with the number of rejected spans."""
    response = ExportTraceServiceResponse()
    if answer.rejected:
        response.partial_success.rejected_spans = answer.rejected
        response.partial_success.error_message = answer.message
    return response
