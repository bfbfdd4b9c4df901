"""One request of spans to one endpoint: over HTTP, over gRPC, or into a file.

A sender sends once and says what came of it: what the receiver rejected, or one of three errors, for OTLP says
of each answer whether the same request may be sent again. Trying again is `xsp.exporters.courier`'s.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import struct
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLong
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import grpc
import requests
import urllib3
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from xsp.errors import DeliveryError, OutputError, UsageError
from xsp.exporters import endpoint as place
from xsp.exporters.endpoint import Endpoint
from xsp.version import __version__

MAX_BYTES = 3_500_000
"""Of a request: a gRPC receiver takes 4 MiB unless told otherwise."""

_AGENT = f"xsp/{__version__}"
_MOST_OF_AN_ANSWER = 65536
_GRACE_S = 0.5
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_LENGTH = struct.Struct(">I")


class Answer(NamedTuple):
    """What a receiver said that took a request."""

    rejected: int = 0
    """Spans of it that it did not take; they are not to be sent again."""

    message: str = ""


class Busy(DeliveryError):
    """It did not work this time; the same request may be sent again."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s
        """Seconds to wait, where the receiver said so."""


class TooLarge(DeliveryError):
    """The receiver takes smaller requests."""


class Refused(DeliveryError):
    """The same request will not be taken."""

    def __init__(self, message: str, always: bool = False) -> None:
        super().__init__(message)
        self.always = always
        """Whether no other request would be taken either: a wrong path, missing credentials."""


class Sender(Protocol):
    """Sends requests to one endpoint."""

    def send(self, body: bytes, timeout_s: float) -> Answer:
        """Send an encoded request once, and return what the receiver said.

        Raises:
            Busy, TooLarge, Refused: it did not take it.
            OutputError: the file cannot be written.
        """

    def close(self, complete: bool) -> None:
        """Let go of the connection; `complete` says that a file is to appear."""


def sender(to: Endpoint) -> Sender:
    """Return the sender for an endpoint. It connects when it sends.

    Raises:
        UsageError: certificates that cannot be used.
        OutputError: the file cannot be written.
    """
    if to.is_file:
        return _FileSender(to)
    return _GrpcSender(to) if to.protocol is place.Protocol.GRPC else _HttpSender(to)


# --- HTTP ---------------------------------------------------------------------------------------------

_RETRYABLE = frozenset({408, 429, 502, 503, 504})
_NO_RECEIVER = frozenset({401, 403, 404, 405, 407, 410, 415, 501})


class _HttpSender:
    """OTLP over HTTP, one connection that is kept."""

    def __init__(self, to: Endpoint) -> None:
        self._to = to
        self._json = to.protocol is place.Protocol.HTTP_JSON
        parts = urlsplit(to.url)
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._session = self._connected()

    def _connected(self) -> requests.Session:
        session, to, parts = requests.Session(), self._to, urlsplit(self._to.url)
        session.auth = lambda request: request  # or else what stands in ~/.netrc replaces the header
        if parts.username is not None and "authorization" not in dict(to.headers):
            session.auth = (unquote(parts.username), unquote(parts.password or ""))
        if to.cert_file:
            session.cert = (to.cert_file, to.key_file) if to.key_file else to.cert_file
        kind = "application/json" if self._json else "application/x-protobuf"
        session.headers.update({"User-Agent": _AGENT, "Content-Type": kind, **dict(to.headers)})
        if to.gzip:
            session.headers["Content-Encoding"] = "gzip"
        return session

    def send(self, body: bytes, timeout_s: float) -> Answer:
        if self._json:
            body = as_json(body).encode()
        if self._to.gzip:
            body = gzip.compress(body, compresslevel=1)  # the next levels take twice as long for a tenth less
        return self._judge(*self._within(body, timeout_s))

    def _within(self, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        """Post in bounded time: libraries bound each wait, but neither their sum nor the look-up of a name."""
        posted: Future[tuple[requests.Response, bytes]] = Future()
        session = self._session

        def post() -> None:
            try:
                posted.set_result(self._post(session, body, timeout_s))
            except BaseException as error:
                posted.set_exception(error)

        threading.Thread(target=post, daemon=True).start()
        try:
            return posted.result(timeout_s + _GRACE_S)
        except TooLong:
            self._session = self._connected()  # the thread has the other one, until the receiver lets go
            raise Busy(f"{self._to.name}: no whole answer within {timeout_s:.3g} s") from None

    def _post(self, session: requests.Session, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        try:
            verify = self._to.ca_file or True  # given with the request: a session's gives way to the environment
            with session.post(
                self._url, data=body, timeout=timeout_s, verify=verify, allow_redirects=False, stream=True
            ) as response:
                return response, response.raw.read(_MOST_OF_AN_ANSWER, decode_content=True)
        except requests.exceptions.SSLError as error:
            raise Refused(f"{self._to.name}: TLS failed ({self._shown(_innermost(error))})", always=True) from error
        except requests.exceptions.ConnectionError as error:
            raise Busy(f"{self._to.name}: no connection ({self._shown(_innermost(error))})") from error
        except requests.exceptions.Timeout as error:
            raise Busy(f"{self._to.name}: no answer within {timeout_s:.3g} s") from error
        except (requests.exceptions.RequestException, OSError, ValueError) as error:
            raise Refused(f"{self._to.name}: {self._shown(_innermost(error))}", always=True) from error
        except urllib3.exceptions.DecodeError as error:
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does", always=True) from error
        except urllib3.exceptions.HTTPError as error:
            raise Busy(f"{self._to.name}: the answer broke off ({type(error).__name__})") from error

    def _judge(self, response: requests.Response, content: bytes) -> Answer:
        code, kind = response.status_code, response.headers.get("Content-Type", "")
        if 200 <= code < 300:
            return self._taken(content, kind)
        text = f"{self._to.name}: {code} {response.reason or ''}".rstrip() + self._said(content, kind)
        if code == 413:
            raise TooLarge(text)
        if code in _RETRYABLE:
            raise Busy(text, _seconds(response.headers.get("Retry-After", "")))
        if 300 <= code < 400:
            raise Refused(f"{text}: it is elsewhere; give the URL that it is at", always=True)
        raise Refused(text, always=code in _NO_RECEIVER)

    def _taken(self, content: bytes, kind: str) -> Answer:
        try:
            if "json" in kind:
                partial = json.loads(content or b"{}").get("partialSuccess") or {}
                return Answer(int(partial.get("rejectedSpans", 0)), self._shown(partial.get("errorMessage", "")))
            if content and "protobuf" not in kind:
                raise ValueError("no OTLP")
            return _answer(ExportTraceServiceResponse.FromString(content), self._to)
        except (DecodeError, ValueError, AttributeError) as error:
            said = self._said(content, "text/plain")
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does{said}", always=True) from error

    def _said(self, content: bytes, kind: str) -> str:
        """Return the message in an answer: of a protobuf `Status`, of its JSON, or the text."""
        text = content.decode("utf-8", "replace")
        if "protobuf" in kind:
            text = _status(content).message
        elif "json" in kind:
            try:
                text = str(json.loads(content).get("message", text))
            except (ValueError, AttributeError):
                pass
        return f" ({self._shown(text)})" if text.strip() else ""

    def _shown(self, text: object) -> str:
        return self._to.without_secrets(str(text))

    def close(self, complete: bool) -> None:
        self._session.close()


def _innermost(error: BaseException) -> object:
    """Return the operating system's own words for what went wrong: the outer ones repeat the URL."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        reason = getattr(inner, "reason", None)
        first = inner.args[0] if inner.args else None
        inner = next((each for each in (reason, first, inner.__cause__, inner.__context__)
                      if isinstance(each, BaseException) and id(each) not in seen), None)  # fmt: skip
    return type(error).__name__


def _seconds(text: str) -> float | None:
    """Return the seconds of a `Retry-After`; a date is left to our own patience."""
    return float(text) if text.strip().isdigit() else None


def _status(content: bytes) -> Status:
    """Return the details of an error; empty where they are no protobuf."""
    try:
        return Status.FromString(content)
    except DecodeError:
        return Status()


def _answer(response: ExportTraceServiceResponse, to: Endpoint) -> Answer:
    partial = response.partial_success
    return Answer(partial.rejected_spans, to.without_secrets(partial.error_message))


# --- gRPC ---------------------------------------------------------------------------------------------

_GRPC_RETRYABLE = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
    }
)
_GRPC_NO_RECEIVER = frozenset(
    {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
)


class _GrpcSender:
    """OTLP over gRPC; requests travel as the bytes that they are."""

    def __init__(self, to: Endpoint) -> None:
        self._to = to
        compression = grpc.Compression.Gzip if to.gzip else grpc.Compression.NoCompression
        options = [("grpc.primary_user_agent", _AGENT), ("grpc.enable_retries", 0)]
        if to.insecure:
            self._channel = grpc.insecure_channel(to.url, options=options, compression=compression)
        else:
            self._channel = grpc.secure_channel(to.url, _credentials(to), options=options, compression=compression)
        self._call = self._channel.unary_unary(_EXPORT)

    def send(self, body: bytes, timeout_s: float) -> Answer:
        try:
            content = self._call(body, timeout=timeout_s, metadata=self._to.headers)
        except grpc.RpcError as error:
            raise self._judged(cast("grpc.Call", error)) from error
        except ValueError as error:  # a header that gRPC does not take
            raise Refused(f"{self._to.name}: {self._to.without_secrets(str(error))}", always=True) from error
        try:
            return _answer(ExportTraceServiceResponse.FromString(content), self._to)
        except DecodeError as error:
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does", always=True) from error

    def _judged(self, call: grpc.Call) -> DeliveryError:
        code, said = call.code(), self._to.without_secrets(call.details() or "")
        text = f"{self._to.name}: {code.name} ({said})"
        if code in _GRPC_RETRYABLE:
            return Busy(text)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            if "larger than max" in said:
                return TooLarge(text)
            after = _retry_info(call)
            return Refused(text) if after is None else Busy(text, after)
        return Refused(text, always=code in _GRPC_NO_RECEIVER)

    def close(self, complete: bool) -> None:
        self._channel.close()


def _credentials(to: Endpoint) -> grpc.ChannelCredentials:
    files = [Path(name).read_bytes() if name else None for name in (to.ca_file, to.key_file, to.cert_file)]
    if (files[1] is None) != (files[2] is None):
        raise UsageError("a client's certificate and its key go together: --cert and --key")
    return grpc.ssl_channel_credentials(*files)


def _retry_info(call: grpc.Call) -> float | None:
    """Return the seconds of a `RetryInfo` in the answer's details; None where there is none."""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in _status(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None


# --- files --------------------------------------------------------------------------------------------


class _FileSender:
    """A file as the Collector's file exporter writes it: a request a line, or length and message."""

    def __init__(self, to: Endpoint) -> None:
        self._path, self._lines = Path(to.url), to.protocol is place.Protocol.JSON_LINES
        self._beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            self._file: IO[bytes] = open(self._beside, "wb")  # noqa: SIM115 — closed by close()
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error

    def send(self, body: bytes, timeout_s: float) -> Answer:
        try:
            if self._lines:
                self._file.write(as_json(body).encode() + b"\n")
            else:
                self._file.write(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error
        return Answer()

    def close(self, complete: bool) -> None:
        try:
            self._file.close()
            if complete:
                os.replace(self._beside, self._path)
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error
        finally:
            self._beside.unlink(missing_ok=True)


# --- Jaeger's page ------------------------------------------------------------------------------------

JAEGER_PORT = 16686


def jaeger_page(to: Endpoint, trace_id: str) -> str | None:
    """Return where a Jaeger on this machine shows a trace that it was sent; None where none does."""
    host = urlsplit(to.url if "://" in to.url else f"//{to.url}").hostname
    if to.is_file or host not in ("localhost", "127.0.0.1", "::1"):
        return None
    page = f"http://localhost:{JAEGER_PORT}"
    try:
        for _ in range(5):  # it stores what it accepts a moment later
            with requests.get(f"{page}/api/v3/traces/{trace_id}", timeout=1, stream=True) as response:
                if response.status_code == 200:
                    return f"{page}/trace/{trace_id}"
            time.sleep(0.2)
    except requests.exceptions.RequestException:
        pass
    return None


# --- bodies -------------------------------------------------------------------------------------------


def as_json(body: bytes) -> str:
    """Return an encoded request as OTLP's JSON, on one line: ids in hexadecimal digits, enums as numbers."""
    message: dict[str, Any] = MessageToDict(
        ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True, preserving_proto_field_name=False
    )
    for resource in message.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for holder in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in holder:
                            holder[name] = base64.b64decode(holder[name]).hex()
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def halves(body: bytes) -> list[tuple[bytes, int]]:
    """Return an encoded request as two smaller ones with the spans of each; one span cannot be halved.

    Returns:
        The halves; a single one if the request holds a single span.
    """
    whole = ExportTraceServiceRequest.FromString(body)
    places = [
        (r, s, span)
        for r, resource in enumerate(whole.resource_spans)
        for s, scope in enumerate(resource.scope_spans)
        for span in range(len(scope.spans))
    ]
    middle = len(places) // 2
    return [(_only(whole, part), len(part)) for part in (places[:middle], places[middle:]) if part]


def _only(whole: ExportTraceServiceRequest, kept: list[tuple[int, int, int]]) -> bytes:
    """Return a request with some of the spans of another one; kept are consecutive."""
    part = ExportTraceServiceRequest()
    last = None
    for r, s, span in kept:
        if last is None or last[0] != r:
            resource = part.resource_spans.add()
            resource.resource.CopyFrom(whole.resource_spans[r].resource)
            resource.schema_url = whole.resource_spans[r].schema_url
        if last is None or last != (r, s):
            scope = resource.scope_spans.add()
            scope.scope.CopyFrom(whole.resource_spans[r].scope_spans[s].scope)
        scope.spans.append(whole.resource_spans[r].scope_spans[s].spans[span])
        last = (r, s)
    return bytes(part.SerializeToString())
