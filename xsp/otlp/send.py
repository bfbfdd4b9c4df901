"""Deliver requests to an endpoint: retry where that makes sense, split requests that are too large, and count.

OTLP defines for each answer whether the same request may be sent again. The pause between two attempts grows, and is
randomised, so that many senders do not retry at the same moment.
"""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import requests

from xsp import atomic
from xsp.errors import DeliveryError, OutputError
from xsp.otlp import encode, transport
from xsp.otlp.encode import EncodedRequest
from xsp.otlp.endpoint import OtlpEndpoint, OtlpProtocol
from xsp.otlp.transport import (
    ConnectionRefused,
    GrpcSender,
    HttpSender,
    ReceiverAnswer,
    Refused,
    RequestTooLarge,
    RetryableError,
    Sender,
    as_json,
)

PATIENCE_S = 60.0
"""Default number of seconds to retry a request."""

STARTING_S = 1.0
"""The same if nothing listens at an address of this machine."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_MIN_TIMEOUT_S = 1.0
"""Minimum timeout in seconds of the last attempt: a shorter one, in which no receiver can answer, is no evidence."""


@dataclass
class Counts:
    """The outcome of a delivery."""

    steps: int = 0
    spans: int = 0
    requests: int = 0
    bytes: int = 0
    rejected: int = 0
    """Spans that the receiver rejected."""

    retries: int = 0
    seconds: float = 0.0
    left: int = 0
    """Steps, and spans of runs themselves, that are still to be delivered."""

    messages: list[str] = field(default_factory=list)
    """Reasons why spans were rejected or are undelivered, each once."""

    trace_id: str | None = None
    """Trace id of the first step that was delivered."""

    def add_message(self, message: str) -> None:
        """Add a reason, once."""
        if message and message not in self.messages:
            self.messages.append(message)


class Exporter:
    """Delivers requests to one endpoint, and retries for a limited time."""

    def __init__(
        self,
        endpoint: OtlpEndpoint,
        patience_s: float,
        stop: threading.Event | None = None,
        starting_s: float | None = None,
    ) -> None:
        """Make the sender; nothing is sent yet.

        Args:
            endpoint: the receiver or file.
            patience_s: seconds to retry a request.
            stop: ends the pauses between attempts, and the retries with them.
            starting_s: seconds to retry if nothing listens at an address of this machine; default: `patience_s`.
        """
        self.endpoint = endpoint
        self.counts = Counts()
        self.max_bytes = encode.MAX_BYTES
        self._patience_s = patience_s
        self._starting_s = patience_s if starting_s is None else starting_s
        self._stop = stop or threading.Event()
        self._sender = sender(endpoint)

    def close(self, complete: bool = True) -> None:
        """Close the sender; a file appears only if `complete`."""
        self._sender.close(complete)

    def deliver(self, request: EncodedRequest) -> bool:
        """Deliver one request, split into smaller ones if necessary, and count the outcome.

        Returns:
            Whether the receiver accepted it, possibly except for spans that it rejected.

        Raises:
            DeliveryError: all retries failed, or the receiver will not accept any request.
        """
        try:
            answer = self._send(request.body)
        except RequestTooLarge as error:
            halves = transport.halves(request.body)
            if len(halves) < 2:
                self._reject(ReceiverAnswer(request.spans, str(error)))
                return False
            self.max_bytes = min(self.max_bytes, max(len(request.body) // 2, 4096))
            accepted = [self.deliver(EncodedRequest(*half)) for half in halves]
            return all(accepted)
        except Refused as error:
            if error.is_permanent:
                raise
            self._reject(ReceiverAnswer(request.spans, str(error)))
            return False
        answer = answer._replace(rejected=min(max(answer.rejected, 0), request.spans))
        self._reject(answer)
        self.counts.requests += 1
        self.counts.bytes += len(request.body)
        self.counts.spans += request.spans - answer.rejected
        return True

    def _reject(self, answer: ReceiverAnswer) -> None:
        self.counts.rejected += answer.rejected
        self.counts.add_message(answer.message)

    def _send(self, body: bytes) -> ReceiverAnswer:
        begin = time.monotonic()
        end = begin + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._sender.send(
                    body, min(self.endpoint.timeout_s, max(end - time.monotonic(), _MIN_TIMEOUT_S))
                )
            except RetryableError as error:
                wait = max(error.after_s or 0.0, pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                patience = self._starting_s if isinstance(error, ConnectionRefused) else self._patience_s
                if time.monotonic() + wait >= begin + patience or self._stop.wait(wait):
                    raise DeliveryError(f"{error}; tried for {patience:.3g} s") from error
                self.counts.retries += 1


# --- request -----------------------------------------------------------------------------------------------------
# One request of spans to one endpoint: over HTTP, over gRPC, or into a file.
#
# A sender sends a request once, and returns the number of rejected spans or raises one of three errors, because OTLP
# defines for each answer whether the same request may be sent again. `Exporter` does the retries.


_LENGTH = struct.Struct(">I")


def sender(endpoint: OtlpEndpoint) -> Sender:
    """Return the sender for an endpoint. It connects when it sends.

    Raises:
        UsageError: the certificates cannot be used.
        OutputError: the file cannot be written.
    """
    if endpoint.is_file:
        return _FileSender(endpoint)
    return GrpcSender(endpoint) if endpoint.protocol is OtlpProtocol.GRPC else HttpSender(endpoint)


# --- files --------------------------------------------------------------------------------------------


class _FileSender:
    """A file in the format of the Collector's file exporter: a request per line, or length and message."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        self._path, self._is_json_lines = Path(endpoint.url), endpoint.protocol is OtlpProtocol.JSON_LINES
        self._temporary = atomic.temporary_path(self._path)
        with self._output_errors():
            self._file: IO[bytes] = open(self._temporary, "wb")  # noqa: SIM115 — closed by close()

    def send(self, body: bytes, timeout_s: float) -> ReceiverAnswer:
        with self._output_errors():
            self._file.write(as_json(body).encode() + b"\n" if self._is_json_lines else _LENGTH.pack(len(body)) + body)
        return ReceiverAnswer()

    def close(self, complete: bool) -> None:
        try:
            with self._output_errors():
                self._file.close()
                if complete:
                    atomic.move_into_place(self._temporary, self._path, flush=False)
        finally:
            self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _output_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error


# --- Jaeger's page ------------------------------------------------------------------------------------

JAEGER_PORT = 16686


def jaeger_page(endpoint: OtlpEndpoint, trace_id: str) -> str | None:
    """Return the URL at which a Jaeger on this machine shows a trace that was sent to it; None if none does."""
    if endpoint.is_file or not endpoint.is_this_machine:
        return None
    page = f"http://localhost:{JAEGER_PORT}"
    try:
        for _ in range(5):  # Jaeger stores accepted spans after a short delay
            with requests.get(f"{page}/api/v3/traces/{trace_id}", timeout=1, stream=True) as response:
                if response.status_code == 200:
                    return f"{page}/trace/{trace_id}"
            time.sleep(0.2)
    except requests.exceptions.RequestException:
        pass
    return None
