"""HTTP servers on loopback, with limits on connections and request times; see `xsp.hosts` for the check of names."""

from __future__ import annotations

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from xsp.connections import Connection, ConnectionLimits, Connections, State

_DEFAULT_LIMITS = ConnectionLimits()
RETRY_AFTER_S = 1


class LimitedHTTPServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection, and limits on them, see `xsp.connections`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[DeadlineHandler], limits: ConnectionLimits = _DEFAULT_LIMITS
    ) -> None:
        """Start to listen.

        Raises:
            OSError: the address cannot be used.
        """
        self.connections = Connections(limits)
        self.admitted: dict[socket.socket, Connection] = {}
        """The connections by their sockets, from their thread's start until its end."""

        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection; if the server works for all others, answer 503."""
        connection = self.connections.admit(client_address[0], lambda: request.shutdown(socket.SHUT_RDWR))
        if connection is not None:
            self.admitted[request] = connection
            try:
                super().process_request(request, client_address)
            except BaseException:  # the system has no thread left
                self._forget(request)
                raise
            return
        response = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_S}\r\nContent-Length: 0\r\n"
        try:
            request.settimeout(1)
            request.sendall(f"{response}Connection: close\r\n\r\n".encode())
        except OSError:
            pass  # the client did not wait for the answer
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        if (connection := self.admitted.pop(request, None)) is not None:
            self.connections.leave(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection: its request was not acknowledged, so the sender knows."""


class _BoundedReader(io.RawIOBase):
    """A reader of a connection until the deadline of its state, however slowly bytes arrive; it bounds the header."""

    def __init__(self, stream: socket.socket, connection: Connection, header_bytes: int) -> None:
        self._stream, self._connection = stream, connection
        self._header_bytes = self._free_bytes = header_bytes

    def readable(self) -> bool:
        return True

    def begin(self) -> None:
        """Begin to count the bytes of another header."""
        self._free_bytes = self._header_bytes

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._connection.remaining_s
        if remaining_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._stream.settimeout(min(remaining_s, threading.TIMEOUT_MAX))
        size = self._stream.recv_into(buffer)
        if self._connection.state is State.IDLE and size:
            self._connection.enter(State.HEADER)
        if self._connection.state is State.HEADER:
            self._free_bytes -= size
            if self._free_bytes < 0:
                raise OSError("the header is too large")
        return size


class DeadlineHandler(BaseHTTPRequestHandler):
    """A connection whose requests must arrive, and whose answers must be read, within the limits of its server."""

    server: LimitedHTTPServer
    server_version = "xsp"
    sys_version = ""

    def setup(self) -> None:
        """Set up reading with deadlines."""
        super().setup()
        self.client = self.server.admitted[self.connection]
        self._reader = _BoundedReader(self.connection, self.client, self.server.connections.limits.header_bytes)
        self.rfile = io.BufferedReader(self._reader)

    def handle(self) -> None:
        """Answer the requests of the connection."""
        self.close_connection = True
        self.handle_one_request()
        while not self.close_connection:
            self.client.enter(State.IDLE)
            self._reader.begin()
            self.handle_one_request()

    def handle_one_request(self) -> None:
        """Answer a request; close the connection if it does not arrive in time."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read the header, after which the body or the answer has its own time."""
        is_complete = super().parse_request()
        if is_complete:
            has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
            self.client.enter(State.BODY if has_body else State.WORK)
        return is_complete

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin the answer, which must be read in time."""
        self.client.enter(State.ANSWER)
        self.connection.settimeout(self.server.connections.limits.answer_s)
        super().send_response(code, message)

    def log_message(self, *_: Any) -> None:
        """Log nothing: a request may contain private data."""
