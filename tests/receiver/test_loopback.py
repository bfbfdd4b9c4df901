"""What listens on loopback is bounded, and is not let at under another name."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from xsp.connections import ConnectionLimits
from xsp.receiver import loopback
from xsp.report import serve


def answer(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


class _Patient(loopback.DeadlineHandler):
    """Says yes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@contextlib.contextmanager
def opened(handler: type[loopback.DeadlineHandler], **limits: Any) -> Iterator[int]:
    with loopback.LimitedHTTPServer(("127.0.0.1", 0), handler, ConnectionLimits(**limits)) as door:
        threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True).start()
        yield door.server_port
        door.shutdown()


def test_a_door_is_bounded_in_connections_and_headers() -> None:
    with opened(_Patient) as port:
        assert answer(port, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
        assert b" 431 " in answer(port, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n")
        assert b" 414 " in answer(port, b"GET /" + b"a" * 65536 + b" HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # it is closed, and there may be an answer
            assert not answer(port, b"GET / HTTP/1.0\r\n" + (b"A: " + b"b" * 60_000 + b"\r\n") * 9).startswith(
                b"HTTP/1.0 2"
            )


def test_a_connection_that_gets_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with opened(_Patient, connections=1) as port:
        with monkeypatch.context() as patched:
            patched.setattr(socketserver.ThreadingMixIn, "process_request", fails)
            with contextlib.suppress(ConnectionError):
                assert answer(port, b"GET / HTTP/1.0\r\n\r\n") == b""
        assert answer(port, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")


def test_a_door_is_bounded_in_time() -> None:
    with opened(_Patient, header_s=0.1) as port:
        assert answer(port, b"GET /") == b""


def test_a_report_is_not_let_at_by_another_origin() -> None:
    with serve.server({"plain": b"page"}, 0) as door:
        threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True).start()
        asked = b"GET /plain HTTP/1.0\r\nHost: %s\r\nOrigin: https://evil.example\r\n\r\n"
        assert b" 403 " in answer(door.server_port, asked % b"evil.example")
        granted = answer(door.server_port, asked % b"127.0.0.1")
        assert b" 200 " in granted
        assert b"access-control" not in granted.lower()
        door.shutdown()
