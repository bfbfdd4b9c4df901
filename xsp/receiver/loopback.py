"""HTTP on loopback for strangers: so many connections at a time, so long for a request, and no other name than ours."""

from __future__ import annotations

import io
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RETRY_AFTER_S = 1
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def asks_for_loopback(host: str | None) -> bool:
    """Return whether a request names loopback as its host, or none at all.

    A page elsewhere can give its own name the address of loopback, and would then be let at what listens there as at
    its own; the name in the request tells.

    Args:
        host: the request's `Host`, perhaps with a port.
    """
    if host is None:
        return True
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower() in LOOPBACK


class Door(ThreadingHTTPServer):
    """Gives each connection a thread, and of these there are only so many."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], connections: int) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        self._free = threading.BoundedSemaphore(connections)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or say that there is none."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        answer = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_S}\r\nContent-Length: 0\r\n"
        try:
            request.settimeout(1)
            request.sendall(f"{answer}Connection: close\r\n\r\n".encode())
        except OSError:
            pass  # it did not wait for the answer
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is the sender's affair: what it sent was not acknowledged."""


class _Deadline(io.RawIOBase):
    """Reads from a connection, all of a request by one time, however slowly its bytes come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Prompt(BaseHTTPRequestHandler):
    """One connection, whose requests have only so long to arrive."""

    server_version = "xsp"
    sys_version = ""

    @property
    def seconds(self) -> float:
        """How long a request may take to arrive, and its answer to be taken."""
        return 30.0

    def setup(self) -> None:
        """Read through a deadline."""
        super().setup()
        self._deadline = _Deadline(self.connection)
        self.rfile = io.BufferedReader(self._deadline)

    def handle_one_request(self) -> None:
        """Answer a request; one that does not arrive in time ends the connection."""
        self._deadline.until = time.monotonic() + self.seconds
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing of a request goes to a log: it may hold what is nobody's business."""
