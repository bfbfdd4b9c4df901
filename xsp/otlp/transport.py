"""Send a request of spans once, over HTTP in bounded time or over gRPC, and interpret the receiver's answer.

The result is a `ReceiverAnswer` or one of three errors, because OTLP defines for each answer whether to retry the
request.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import typing
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from http.client import BadStatusLine
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

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

from xsp import processes
from xsp.errors import DeliveryError, UsageError
from xsp.otlp.endpoint import OtlpEndpoint, OtlpProtocol
from xsp.version import __version__

AGENT = f"xsp/{__version__}"
"""The user agent."""


class ReceiverAnswer(NamedTuple):
    """The answer of a receiver that accepted a request."""

    rejected: int = 0
    """Number of spans that the receiver rejected; they must not be sent again."""

    message: str = ""


class RetryableError(DeliveryError):
    """The attempt failed; the same request may be sent again."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s
        """Seconds to wait, if the receiver stated them."""


class ConnectionRefused(RetryableError):
    """Nothing listens at an address of this machine: a retry helps only while a receiver is starting."""


class RequestTooLarge(DeliveryError):
    """The receiver accepts only smaller requests."""


class Refused(DeliveryError):
    """The receiver will never accept this request."""

    def __init__(self, message: str, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent
        """Whether the receiver would not accept any other request either: a wrong path, missing credentials."""


class Sender(typing.Protocol):
    """Sends requests to one endpoint."""

    def send(self, body: bytes, timeout_s: float) -> ReceiverAnswer:
        """Send an encoded request once, and return the receiver's answer.

        Raises:
            RetryableError, RequestTooLarge, Refused: the receiver did not accept the request.
            OutputError: the file cannot be written.
        """

    def close(self, complete: bool) -> None:
        """Close the connection or file; the file appears only if `complete`."""


def status(content: bytes) -> Status:
    """Return the details of an error; empty if they are not valid protobuf."""
    try:
        return Status.FromString(content)
    except DecodeError:
        return Status()


def answer(response: ExportTraceServiceResponse, endpoint: OtlpEndpoint) -> ReceiverAnswer:
    """Return the answer of a receiver that accepted the request, without the endpoint's secrets."""
    partial = response.partial_success
    return ReceiverAnswer(partial.rejected_spans, endpoint.without_secrets(partial.error_message))


# --- bodies ------------------------------------------------------------------------------------------------------
# Encoded requests: as OTLP's JSON, and in halves for a receiver that accepts only smaller ones.


def as_json(body: bytes) -> str:
    """Return an encoded request as OTLP's JSON, on one line: ids in hexadecimal digits, enums as numbers."""
    message: dict[str, Any] = MessageToDict(
        ExportTraceServiceRequest.FromString(body), use_integers_for_enums=True, preserving_proto_field_name=False
    )
    for resource in message.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for message_with_ids in (span, *span.get("links", ())):
                    for name in ("traceId", "spanId", "parentSpanId"):
                        if name in message_with_ids:
                            message_with_ids[name] = base64.b64decode(message_with_ids[name]).hex()
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def halves(body: bytes) -> list[tuple[bytes, int]]:
    """Split an encoded request into two smaller ones; a single span cannot be split.

    Returns:
        The halves with their numbers of spans; a single one if the request holds a single span.
    """
    request = ExportTraceServiceRequest.FromString(body)
    positions = [
        (r, s, span)
        for r, resource in enumerate(request.resource_spans)
        for s, scope in enumerate(resource.scope_spans)
        for span in range(len(scope.spans))
    ]
    middle = len(positions) // 2
    return [(_subset(request, part), len(part)) for part in (positions[:middle], positions[middle:]) if part]


def _subset(request: ExportTraceServiceRequest, positions: list[tuple[int, int, int]]) -> bytes:
    """Return a request with some of the spans of another request; those in `positions` are consecutive."""
    part = ExportTraceServiceRequest()
    previous = None
    for r, s, span in positions:
        if previous is None or previous[0] != r:
            resource = part.resource_spans.add()
            resource.resource.CopyFrom(request.resource_spans[r].resource)
            resource.schema_url = request.resource_spans[r].schema_url
        if previous is None or previous != (r, s):
            scope = resource.scope_spans.add()
            scope.scope.CopyFrom(request.resource_spans[r].scope_spans[s].scope)
        scope.spans.append(request.resource_spans[r].scope_spans[s].spans[span])
        previous = (r, s)
    return bytes(part.SerializeToString())


# --- HTTP --------------------------------------------------------------------------------------------------------
# Requests of spans over HTTP, in bounded time.


_MAX_RESPONSE_BYTES = 65536
_GRACE_S = 0.5
_RETRYABLE = frozenset({408, 429, 502, 503, 504})
_NO_RECEIVER = frozenset({401, 403, 404, 405, 407, 410, 415, 501})


class HttpSender:
    """OTLP over HTTP, with one persistent connection."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        self._endpoint = endpoint
        self._json = endpoint.protocol is OtlpProtocol.HTTP_JSON
        parts = urlsplit(endpoint.url)
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._session = self._new_session()

    def _new_session(self) -> requests.Session:
        session, endpoint, parts = requests.Session(), self._endpoint, urlsplit(self._endpoint.url)
        session.auth = lambda request: request  # otherwise credentials from ~/.netrc replace the header
        if parts.username is not None and "authorization" not in dict(endpoint.headers):
            session.auth = (unquote(parts.username), unquote(parts.password or ""))
        if endpoint.cert_file:
            session.cert = (endpoint.cert_file, endpoint.key_file) if endpoint.key_file else endpoint.cert_file
        kind = "application/json" if self._json else "application/x-protobuf"
        session.headers.update({"User-Agent": AGENT, "Content-Type": kind, **dict(endpoint.headers)})
        if endpoint.gzip:
            session.headers["Content-Encoding"] = "gzip"
        return session

    def send(self, body: bytes, timeout_s: float) -> ReceiverAnswer:
        """Send a request once; see `xsp.otlp.transport.Sender`."""
        if self._json:
            body = as_json(body).encode()
        if self._endpoint.gzip:
            body = gzip.compress(body, compresslevel=1)  # higher levels take twice as long and save a tenth
        return self._interpret(*self._post_in_time(body, timeout_s))

    def _post_in_time(self, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        """Post in bounded time: libraries bound each wait, but neither the sum of waits nor the DNS look-up."""
        future: Future[tuple[requests.Response, bytes]] = Future()
        session = self._session

        def post() -> None:
            try:
                future.set_result(self._post(session, body, timeout_s))
            except BaseException as error:
                future.set_exception(error)

        processes.start_thread(post, "xsp posts")
        try:
            return future.result(timeout_s + _GRACE_S)
        except FutureTimeout:
            self._session = self._new_session()  # the thread keeps the old session until the receiver closes it
            raise RetryableError(f"{self._endpoint.name}: no complete answer within {timeout_s:.3g} s") from None

    def _post(self, session: requests.Session, body: bytes, timeout_s: float) -> tuple[requests.Response, bytes]:
        try:
            verify = (
                self._endpoint.ca_file or True
            )  # passed with the request: the environment overrides the session's value
            with session.post(
                self._url, data=body, timeout=timeout_s, verify=verify, allow_redirects=False, stream=True
            ) as response:
                return response, response.raw.read(_MAX_RESPONSE_BYTES, decode_content=True)
        except requests.exceptions.SSLError as error:
            raise Refused(
                f"{self._endpoint.name}: TLS failed ({self._redacted(_innermost(error))})", is_permanent=True
            ) from error
        except requests.exceptions.ConnectionError as error:
            if self._endpoint.is_this_machine and (
                not isinstance(error, requests.exceptions.ProxyError)
                and any(isinstance(inner, ConnectionRefusedError) for inner in _chain(error))
            ):
                raise ConnectionRefused(self._endpoint.connection_refused_message()) from error
            if any(
                isinstance(cause, BadStatusLine) and not isinstance(cause, ConnectionError) for cause in _chain(error)
            ):
                hint = "answers, but not in HTTP: does gRPC listen there? Then write grpc://HOST:PORT"
                raise Refused(f"{self._endpoint.name}: {hint}", is_permanent=True) from error
            raise RetryableError(
                f"{self._endpoint.name}: no connection ({self._redacted(_innermost(error))})"
            ) from error
        except requests.exceptions.Timeout as error:
            raise RetryableError(f"{self._endpoint.name}: no answer within {timeout_s:.3g} s") from error
        except (requests.exceptions.RequestException, OSError, ValueError) as error:
            raise Refused(f"{self._endpoint.name}: {self._redacted(_innermost(error))}", is_permanent=True) from error
        except urllib3.exceptions.DecodeError as error:
            raise Refused(
                f"{self._endpoint.name}: answers, but not like an OTLP receiver", is_permanent=True
            ) from error
        except urllib3.exceptions.HTTPError as error:
            raise RetryableError(f"{self._endpoint.name}: the answer was cut off ({type(error).__name__})") from error

    def _interpret(self, response: requests.Response, content: bytes) -> ReceiverAnswer:
        code, kind = response.status_code, response.headers.get("Content-Type", "")
        if 200 <= code < 300:
            return self._accepted(content, kind)
        text = f"{self._endpoint.name}: {code} {response.reason or ''}".rstrip() + self._message(content, kind)
        if code == 413:
            raise RequestTooLarge(text)
        if code in _RETRYABLE:
            raise RetryableError(text, _seconds(response.headers.get("Retry-After", "")))
        if 300 <= code < 400:
            raise Refused(f"{text}: it redirects; give the URL that it redirects to", is_permanent=True)
        raise Refused(text, is_permanent=code in _NO_RECEIVER)

    def _accepted(self, content: bytes, kind: str) -> ReceiverAnswer:
        """Return what a receiver that accepted a request says about its spans.

        Raises:
            Refused: this is no answer of an OTLP receiver.
        """
        try:
            if "json" in kind:
                partial = json.loads(content or b"{}").get("partialSuccess") or {}
                return ReceiverAnswer(
                    int(partial.get("rejectedSpans") or 0), self._redacted(partial.get("errorMessage") or "")
                )
            if content and "protobuf" not in kind:
                raise ValueError("no OTLP")
            return answer(ExportTraceServiceResponse.FromString(content), self._endpoint)
        except (DecodeError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            detail = self._message(content, "text/plain")
            raise Refused(
                f"{self._endpoint.name}: answers, but not like an OTLP receiver{detail}", is_permanent=True
            ) from error

    def _message(self, content: bytes, kind: str) -> str:
        """Return the message in an answer: from a protobuf `Status`, from JSON, or the text itself."""
        text = content.decode("utf-8", "replace")
        if "html" in kind:
            text = "with a page for a browser: this may not be a receiver"
        elif "protobuf" in kind:
            text = status(content).message
        elif "json" in kind:
            try:
                text = str(json.loads(content).get("message", text))
            except (ValueError, AttributeError, RecursionError):
                pass
        return f" ({self._redacted(text)})" if text.strip() else ""

    def _redacted(self, text: object) -> str:
        return self._endpoint.without_secrets(str(text))

    def close(self, complete: bool) -> None:
        """Close the connection."""
        self._session.close()


def _innermost(error: BaseException) -> object:
    """Return the operating system's message of an error: the messages of outer exceptions repeat the URL."""
    words = (inner.strerror for inner in _chain(error) if isinstance(inner, OSError) and inner.strerror)
    return next(words, type(error).__name__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, outermost first."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        reason = getattr(current, "reason", None)
        argument = current.args[0] if current.args else None
        current = next((cause for cause in (reason, argument, current.__cause__, current.__context__)
                        if isinstance(cause, BaseException) and id(cause) not in visited), None)  # fmt: skip


def _seconds(text: str) -> float | None:
    """Return the seconds of a `Retry-After`; None for a date, which leaves the pause to the caller."""
    return float(text) if text.strip().isdecimal() else None


# --- gRPC --------------------------------------------------------------------------------------------------------
# Requests of spans over gRPC.


_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
    }
)
_UNUSABLE_CODES = frozenset(
    {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
)


_PROTOCOL_MISMATCH = ("Failed parsing HTTP/2", "Tls handshake failed")
_OTHER_PORT = (
    "the server there does not speak gRPC, or only one of the two sides uses TLS; "
    "for OTLP over HTTP write http://HOST:PORT"
)


class GrpcSender:
    """OTLP over gRPC; requests are sent as encoded bytes."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        self._endpoint = endpoint
        compression = grpc.Compression.Gzip if endpoint.gzip else grpc.Compression.NoCompression
        options = [("grpc.primary_user_agent", AGENT), ("grpc.enable_retries", 0)]
        if endpoint.insecure:
            self._channel = grpc.insecure_channel(endpoint.url, options=options, compression=compression)
        else:
            files = [
                Path(name).read_bytes() if name else None
                for name in (endpoint.ca_file, endpoint.key_file, endpoint.cert_file)
            ]
            if (files[1] is None) != (files[2] is None):
                raise UsageError("a client's certificate and its key are needed together: --cert and --key")
            self._channel = grpc.secure_channel(
                endpoint.url, grpc.ssl_channel_credentials(*files), options=options, compression=compression
            )
        self._call = self._channel.unary_unary(_EXPORT)

    def send(self, body: bytes, timeout_s: float) -> ReceiverAnswer:
        """Send a request once; see `xsp.otlp.transport.Sender`."""
        try:
            content = self._call(body, timeout=timeout_s, metadata=self._endpoint.headers)
        except grpc.RpcError as error:
            raise self._error_of(cast("grpc.Call", error)) from error
        except ValueError as error:  # a header that gRPC does not accept
            raise Refused(
                f"{self._endpoint.name}: {self._endpoint.without_secrets(str(error))}", is_permanent=True
            ) from error
        try:
            return answer(ExportTraceServiceResponse.FromString(content), self._endpoint)
        except DecodeError as error:
            raise Refused(
                f"{self._endpoint.name}: answers, but not like an OTLP receiver", is_permanent=True
            ) from error

    def _error_of(self, call: grpc.Call) -> DeliveryError:
        code, details = call.code(), self._endpoint.without_secrets(call.details() or "")
        text = f"{self._endpoint.name}: {code.name} ({details})"
        if code is grpc.StatusCode.UNAVAILABLE and any(phrase in details for phrase in _PROTOCOL_MISMATCH):
            return Refused(f"{text}: {_OTHER_PORT}", is_permanent=True)
        if (
            code is grpc.StatusCode.UNAVAILABLE
            and "connection refused" in details.lower()
            and self._endpoint.is_this_machine
        ):
            # with several addresses gRPC reports the error of the last one
            return ConnectionRefused(
                f"{text}: {_OTHER_PORT}"
                if _listens(self._endpoint.address)
                else self._endpoint.connection_refused_message()
            )
        if code in _RETRYABLE_CODES:
            return RetryableError(text)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            if "larger than max" in details:
                return RequestTooLarge(text)
            delay_s = _retry_info(call)
            return Refused(text) if delay_s is None else RetryableError(text, delay_s)
        return Refused(text, is_permanent=code in _UNUSABLE_CODES)

    def close(self, complete: bool) -> None:
        """Close the connection."""
        self._channel.close()


def _listens(address: SplitResult) -> bool:
    """Return whether something accepts connections at an address of this machine."""
    try:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def _retry_info(call: grpc.Call) -> float | None:
    """Return the seconds of a `RetryInfo` in the answer's details; None if there is none."""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
