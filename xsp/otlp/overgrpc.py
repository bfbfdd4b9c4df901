"""Requests of spans over gRPC."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from xsp.errors import DeliveryError, UsageError
from xsp.otlp import answers
from xsp.otlp.answers import AGENT, Answer, Busy, Nobody, Refused, TooLarge
from xsp.otlp.endpoint import Endpoint

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_RETRYABLE = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
    }
)
_NO_RECEIVER = frozenset(
    {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
)


_SPEAKS_OTHERWISE = ("Failed parsing HTTP/2", "Tls handshake failed")
_OTHER_PORT = (
    "what listens there speaks no gRPC, or has TLS where you have none, or the other way round; "
    "for OTLP over HTTP write http://HOST:PORT"
)


class GrpcSender:
    """OTLP over gRPC; requests travel as the bytes that they are."""

    def __init__(self, to: Endpoint) -> None:
        self._to = to
        compression = grpc.Compression.Gzip if to.gzip else grpc.Compression.NoCompression
        options = [("grpc.primary_user_agent", AGENT), ("grpc.enable_retries", 0)]
        if to.insecure:
            self._channel = grpc.insecure_channel(to.url, options=options, compression=compression)
        else:
            self._channel = grpc.secure_channel(to.url, _credentials(to), options=options, compression=compression)
        self._call = self._channel.unary_unary(_EXPORT)

    def send(self, body: bytes, timeout_s: float) -> Answer:
        """Send a request once; see `xsp.otlp.answers.Sender`."""
        try:
            content = self._call(body, timeout=timeout_s, metadata=self._to.headers)
        except grpc.RpcError as error:
            raise self._judged(cast("grpc.Call", error)) from error
        except ValueError as error:  # a header that gRPC does not take
            raise Refused(f"{self._to.name}: {self._to.without_secrets(str(error))}", always=True) from error
        try:
            return answers.answer(ExportTraceServiceResponse.FromString(content), self._to)
        except DecodeError as error:
            raise Refused(f"{self._to.name}: answers, but not as a receiver of OTLP does", always=True) from error

    def _judged(self, call: grpc.Call) -> DeliveryError:
        code, said = call.code(), self._to.without_secrets(call.details() or "")
        text = f"{self._to.name}: {code.name} ({said})"
        if code is grpc.StatusCode.UNAVAILABLE and any(each in said for each in _SPEAKS_OTHERWISE):
            return Refused(f"{text}: {_OTHER_PORT}", always=True)
        if code is grpc.StatusCode.UNAVAILABLE and "connection refused" in said.lower() and self._to.is_this_machine:
            # of several addresses gRPC tells the last one's error
            return Nobody(f"{text}: {_OTHER_PORT}" if _listens(self._to.url) else self._to.nobody_listens())
        if code in _RETRYABLE:
            return Busy(text)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            if "larger than max" in said:
                return TooLarge(text)
            after = _retry_info(call)
            return Refused(text) if after is None else Busy(text, after)
        return Refused(text, always=code in _NO_RECEIVER)

    def close(self, complete: bool) -> None:
        """Let go of the connection."""
        self._channel.close()


def _credentials(to: Endpoint) -> grpc.ChannelCredentials:
    files = [Path(name).read_bytes() if name else None for name in (to.ca_file, to.key_file, to.cert_file)]
    if (files[1] is None) != (files[2] is None):
        raise UsageError("a client's certificate and its key go together: --cert and --key")
    return grpc.ssl_channel_credentials(*files)


def _listens(target: str) -> bool:
    """Return whether something takes connections at an address of this machine."""
    parts = urlsplit(target if "://" in target else f"//{target}")
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1):
            return True
    except (OSError, ValueError):
        return False


def _retry_info(call: grpc.Call) -> float | None:
    """Return the seconds of a `RetryInfo` in the answer's details; None where there is none."""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in answers.status(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
