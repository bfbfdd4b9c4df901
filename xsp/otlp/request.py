"""One request of spans to one endpoint: over HTTP, over gRPC, or into a file.

A sender sends once and says what came of it: what the receiver rejected, or one of three errors, for OTLP says
of each answer whether the same request may be sent again. Trying again is `xsp.otlp.send`'s.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import requests

from xsp.errors import OutputError
from xsp.otlp.answers import Answer, Sender
from xsp.otlp.bodies import as_json
from xsp.otlp.endpoint import Endpoint, Protocol
from xsp.otlp.overgrpc import GrpcSender
from xsp.otlp.overhttp import HttpSender

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
        self._beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
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
                    os.replace(self._beside, self._path)
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
