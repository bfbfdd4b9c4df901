"""Bring requests to an endpoint: try again where that makes sense, in halves where they are too large, and count.

OTLP says of each answer whether the same request may be sent again. Between two attempts there is a pause, which
grows, and has chance in it, so that many senders do not come back at the same moment.
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
from urllib.parse import urlsplit

import requests

from xsp import atomic
from xsp.errors import DeliveryError, OutputError
from xsp.otlp import encode, transport
from xsp.otlp.encode import Request
from xsp.otlp.endpoint import Endpoint, Protocol
from xsp.otlp.transport import Answer, Busy, GrpcSender, HttpSender, Nobody, Refused, Sender, TooLarge, as_json

PATIENCE_S = 60.0
"""How long a request is tried again, unless told otherwise."""

STARTING_S = 1.0
"""How long where nothing listens on this machine."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SHORTEST_S = 1.0
"""The last attempt has as long, whatever is left of the patience: one that no receiver can answer in tells nothing."""


@dataclass
class Counts:
    """What became of what was sent."""

    steps: int = 0
    spans: int = 0
    requests: int = 0
    bytes: int = 0
    rejected: int = 0
    """Spans that the receiver did not take."""

    retries: int = 0
    seconds: float = 0.0
    left: int = 0
    """Steps, and runs' own spans, that are still to be delivered."""

    messages: list[str] = field(default_factory=list)
    """Why something was rejected or is left, each reason once."""

    trace_id: str | None = None
    """Of the first step that was delivered."""

    def say(self, message: str) -> None:
        """Keep a reason."""
        if message and message not in self.messages:
            self.messages.append(message)


class Exporter:
    """Brings requests to one endpoint, and tries again for as long as its patience lasts."""

    def __init__(
        self, to: Endpoint, patience_s: float, stop: threading.Event | None = None, starting_s: float | None = None
    ) -> None:
        """Make the sender; nothing is sent yet.

        Args:
            to: where to.
            patience_s: how long a request is tried again.
            stop: ends the pauses between attempts, and with them the patience.
            starting_s: how long where nothing listens on this machine; as long unless told otherwise.
        """
        self.to = to
        self.counts = Counts()
        self.max_bytes = encode.MAX_BYTES
        self._patience_s = patience_s
        self._starting_s = patience_s if starting_s is None else starting_s
        self._stop = stop or threading.Event()
        self._sender = sender(to)

    def close(self, complete: bool = True) -> None:
        """Let go of the endpoint; a file appears if it is `complete`."""
        self._sender.close(complete)

    def bring(self, request: Request) -> bool:
        """Bring one request, in smaller ones if need be, and count what became of it.

        Returns:
            Whether the receiver took it, possibly but for spans that it rejected.

        Raises:
            DeliveryError: it could not be brought for as long as the patience lasted, or nothing can be.
        """
        try:
            answer = self._send(request.body)
        except TooLarge as error:
            return self._bring_halves(request, error)
        except Refused as error:
            if error.always:
                raise
            self._reject(Answer(request.spans, str(error)))
            return False
        answer = answer._replace(rejected=min(max(answer.rejected, 0), request.spans))
        self._reject(answer)
        self.counts.requests += 1
        self.counts.bytes += len(request.body)
        self.counts.spans += request.spans - answer.rejected
        return True

    def _bring_halves(self, request: Request, error: TooLarge) -> bool:
        halves = transport.halves(request.body)
        if len(halves) < 2:
            self._reject(Answer(request.spans, str(error)))
            return False
        self.max_bytes = min(self.max_bytes, max(len(request.body) // 2, 4096))
        taken = [self.bring(Request(*half)) for half in halves]
        return all(taken)

    def _reject(self, answer: Answer) -> None:
        self.counts.rejected += answer.rejected
        self.counts.say(answer.message)

    def _send(self, body: bytes) -> Answer:
        begin = time.monotonic()
        end = begin + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return self._sender.send(body, min(self.to.timeout_s, max(end - time.monotonic(), _SHORTEST_S)))
            except Busy as error:
                wait = max(error.after_s or 0.0, pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                patience = self._starting_s if isinstance(error, Nobody) else self._patience_s
                if time.monotonic() + wait >= begin + patience or self._stop.wait(wait):
                    raise DeliveryError(f"{error}; tried for {patience:.3g} s") from error
                self.counts.retries += 1


# --- request -----------------------------------------------------------------------------------------------------
# One request of spans to one endpoint: over HTTP, over gRPC, or into a file.
#
# A sender sends once and says what came of it: what the receiver rejected, or one of three errors, for OTLP says of
# each answer whether the same request may be sent again. Trying again is `xsp.otlp.send`'s.


_LENGTH = struct.Struct(">I")


def sender(to: Endpoint) -> Sender:
    """Return the sender for an endpoint. It connects when it sends.

    Raises:
        UsageError: certificates that cannot be used.
        OutputError: the file cannot be written.
    """
    if to.is_file:
        return _FileSender(to)
    return GrpcSender(to) if to.protocol is Protocol.GRPC else HttpSender(to)


# --- files --------------------------------------------------------------------------------------------


class _FileSender:
    """A file as the Collector's file exporter writes it: a request a line, or length and message."""

    def __init__(self, to: Endpoint) -> None:
        self._path, self._lines = Path(to.url), to.protocol is Protocol.JSON_LINES
        self._beside = atomic.place(self._path)
        with self._writing():
            self._file: IO[bytes] = open(self._beside, "wb")  # noqa: SIM115 — closed by close()

    def send(self, body: bytes, timeout_s: float) -> Answer:
        with self._writing():
            self._file.write(as_json(body).encode() + b"\n" if self._lines else _LENGTH.pack(len(body)) + body)
        return Answer()

    def close(self, complete: bool) -> None:
        try:
            with self._writing():
                self._file.close()
                if complete:
                    atomic.put(self._beside, self._path, flush=False)
        finally:
            self._beside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written ({error.strerror})") from error


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
