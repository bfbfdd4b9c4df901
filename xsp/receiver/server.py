"""A receiver with its HTTP and gRPC servers, from start to shutdown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xsp import hosts
from xsp.errors import PluginError, UsageError
from xsp.receiver.journal import RunWriter
from xsp.receiver.limits import MemoryBudget, RequestLimits

TIDY_S = 0.5
GRACE_S = 0.5
"""Seconds for requests over gRPC that are in progress when the receiver ends."""

BODIES = 2
"""Number of bodies of the largest size that fit into memory at a time."""


class Address(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address | None:
    """Return the address in `127.0.0.1:4318` or `[::1]:4318`; None for `off`.

    Raises:
        UsageError: the text has another form.
    """
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{text!r}: write host and port, 127.0.0.1:4318, or off")
    return Address(host, int(port))


class Receiver:
    """A receiver that accepts requests until it is closed."""

    def __init__(
        self,
        out: Path,
        http: Address | None,
        grpc: Address | None,
        limits: RequestLimits,
        report: Callable[[str], None],
    ) -> None:
        """Start to listen.

        Args:
            out: folder of the run directories.
            http: address for HTTP; None for no HTTP.
            grpc: address for gRPC; None for no gRPC.
            limits: limits on requests and connections.
            report: callback for messages to the user.

        Raises:
            PluginError: packages are missing.
            UsageError: an address cannot be used.
            OutputError: `out` cannot be written.
        """
        self._report = report
        self._stop = threading.Event()
        self.writer = RunWriter(out, report)
        budget = MemoryBudget(BODIES * limits.max_body)
        with contextlib.ExitStack() as stack:
            stack.callback(self.writer.close)
            self._http_server: Any = self._open_http(http, budget, limits) if http else None
            if self._http_server is not None:
                stack.callback(self._http_server.server_close)
            self._grpc_server: Any = self._open_grpc(grpc, budget, limits) if grpc else None
            stack.pop_all()

    def start(self) -> None:
        """Start answering requests, in other threads."""
        if self._http_server is not None:
            threading.Thread(target=self._http_server.serve_forever, args=(0.1,), name="xsp-http", daemon=True).start()
        if self._grpc_server is not None:
            self._grpc_server.start()
        threading.Thread(target=self._tidy, name="xsp-tidy", daemon=True).start()

    def close(self) -> bool:
        """Stop accepting requests, put the spans in order within seconds, and report the totals.

        Returns:
            Whether no thread is still at work, see `RunWriter.close`.
        """
        self._stop.set()
        if self._http_server is not None:
            self._http_server.shutdown()
            self._http_server.server_close()
        if self._grpc_server is not None:
            self._grpc_server.stop(GRACE_S)
        has_ended = self.writer.close()
        totals = self.writer
        self._report(f"{totals.spans} spans received, {totals.rejected} rejected, {totals.finished} runs written")
        return has_ended

    def _tidy(self) -> None:
        while not self._stop.wait(TIDY_S):
            try:
                self.writer.tidy()
            except Exception as error:  # a full disk, for example: the next turn may succeed
                self._report(f"runs could not be put in order yet: {type(error).__name__}: {error}")

    def _open_http(self, endpoint: Address, budget: MemoryBudget, limits: RequestLimits) -> Any:
        web = _module("http")
        try:
            server = web.OtlpHttpServer(tuple(endpoint), self.writer, budget, limits)
        except OSError as error:
            raise UsageError(f"--http {endpoint}: cannot listen there ({error.strerror or error})") from error
        self._report(f"listening for OTLP on http://{endpoint._replace(port=server.server_address[1])}{web.PATH}")
        self._warn(endpoint, "--http")
        return server

    def _open_grpc(self, endpoint: Address, budget: MemoryBudget, limits: RequestLimits) -> Any:
        try:
            server = _module("grpc").OtlpGrpcServer(str(endpoint), self.writer, budget, limits)
        except OSError as error:
            raise UsageError(f"--grpc {endpoint}: cannot listen there ({error})") from error
        self._report(f"listening for OTLP on grpc://{endpoint._replace(port=server.port)}")
        self._warn(endpoint, "--grpc")
        return server

    def _warn(self, endpoint: Address, option: str) -> None:
        if not hosts.is_loopback(endpoint.host):
            self._report(f"warning: {option} {endpoint}: everybody who can reach this address can send spans")


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"xsp.receiver.{name}")
    except ImportError as error:
        raise PluginError(
            f"receiving needs grpcio and opentelemetry-proto: pip install 'xsp[otel]' ({error})"
        ) from error
