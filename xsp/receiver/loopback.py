"""HTTP servers on loopback, with limits on connections and request times; see `xsp.hosts` for the check of names."""

from __future__ import annotations

import io
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RETRY_AFTER_S = 1


class LimitedHTTPServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection, and a limit on their number."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], connections: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address cannot be used.
        """
        self._free = threading.BoundedSemaphore(connections)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection; if there is none left, answer 503."""
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # the system has no thread left
                self._free.release()
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
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection: its request was not acknowledged, so the sender knows."""


class _Deadline(io.RawIOBase):
    """A reader of a connection with one deadline for a whole request, however slowly its bytes arrive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline_s = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self.deadline_s - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class DeadlineHandler(BaseHTTPRequestHandler):
    """A connection whose requests must arrive within a time limit."""

    server_version = "xsp"
    sys_version = ""

    @property
    def seconds(self) -> float:
        """Seconds for a request to arrive, and for its answer to be accepted."""
        return 30.0

    def setup(self) -> None:
        """Set up reading with a deadline."""
        super().setup()
        self._deadline = _Deadline(self.connection)
        self.rfile = io.BufferedReader(self._deadline)

    def handle_one_request(self) -> None:
        """Answer a request; close the connection if it does not arrive in time."""
        self._deadline.deadline_s = time.monotonic() + self.seconds
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Log nothing: a request may contain private data."""
