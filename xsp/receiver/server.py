"""A receiver with its HTTP and gRPC servers, from start to shutdown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from xsp.errors import PluginError, UsageError
from xsp.receiver.journal import RunWriter
from xsp.receiver.limits import Limits, Room

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
TIDY_S = 0.5
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


class Server:
    """A receiver that accepts requests until it is closed."""

    def __init__(
        self, out: Path, http: Address | None, grpc: Address | None, limits: Limits, say: Callable[[str], None]
    ) -> None:
        """Start to listen.

        Args:
            out: folder of the run directories.
            http: address for HTTP; None for no HTTP.
            grpc: address for gRPC; None for no gRPC.
            limits: limits on requests and connections.
            say: callback for messages to the user.

        Raises:
            PluginError: packages are missing.
            UsageError: an address cannot be used.
            OutputError: `out` cannot be written.
        """
        self._say = say
        self._ended = threading.Event()
        self.receiving = RunWriter(out, say)
        room = Room(BODIES * limits.max_body)
        with contextlib.ExitStack() as stack:
            stack.callback(self.receiving.close)
            self._web: Any = self._open_http(http, room, limits) if http else None
            if self._web is not None:
                stack.callback(self._web.server_close)
            self._rpc: Any = self._open_grpc(grpc, room, limits) if grpc else None
            stack.pop_all()

    def start(self) -> None:
        """Start answering requests, in other threads."""
        if self._web is not None:
            threading.Thread(target=self._web.serve_forever, args=(0.1,), name="xsp-http", daemon=True).start()
        if self._rpc is not None:
            self._rpc.start()
        self._tidying = threading.Thread(target=self._tidy, name="xsp-tidy")
        self._tidying.start()

    def close(self) -> None:
        """Stop accepting requests, put the spans of all runs in order, and report the totals."""
        if self._web is not None:
            self._web.shutdown()
            self._web.server_close()
        if self._rpc is not None:
            self._rpc.stop(grace=5).wait()
        self._ended.set()
        self._tidying.join()
        self.receiving.close()
        totals = self.receiving
        self._say(f"{totals.spans} spans received, {totals.rejected} rejected, {totals.finished} runs written")

    def _tidy(self) -> None:
        while not self._ended.wait(TIDY_S):
            try:
                self.receiving.tidy()
            except Exception as error:  # a full disk, for example: the next turn may succeed
                self._say(f"runs could not be put in order yet: {type(error).__name__}: {error}")

    def _open_http(self, endpoint: Address, room: Room, limits: Limits) -> Any:
        web = _module("http")
        try:
            server = web.OtlpHttpServer(tuple(endpoint), self.receiving, room, limits)
        except OSError as error:
            raise UsageError(f"--http {endpoint}: cannot listen there ({error.strerror or error})") from error
        self._say(f"listening for OTLP on http://{endpoint._replace(port=server.server_address[1])}{web.PATH}")
        self._warn(endpoint, "--http")
        return server

    def _open_grpc(self, endpoint: Address, room: Room, limits: Limits) -> Any:
        try:
            server, port = _module("grpc").server(str(endpoint), self.receiving, room, limits)
        except OSError as error:
            raise UsageError(f"--grpc {endpoint}: cannot listen there ({error})") from error
        self._say(f"listening for OTLP on grpc://{endpoint._replace(port=port)}")
        self._warn(endpoint, "--grpc")
        return server

    def _warn(self, endpoint: Address, option: str) -> None:
        if endpoint.host not in LOOPBACK:
            self._say(f"warning: {option} {endpoint}: everybody who can reach this address can send spans")


def _module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"xsp.receiver.{name}")
    except ImportError as error:
        raise PluginError(
            f"receiving needs grpcio and opentelemetry-proto: pip install 'xsp[otel]' ({error})"
        ) from error
