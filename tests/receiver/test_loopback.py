"""What listens on loopback is bounded, and is not let at under another name."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

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


class _Hasty(_Patient):
    """Says yes, to whoever asks within a tenth of a second."""

    seconds = 0.1


@contextlib.contextmanager
def opened(handler: type[loopback.DeadlineHandler], connections: int = 9) -> Iterator[int]:
    with loopback.LimitedHTTPServer(("127.0.0.1", 0), handler, connections) as door:
        threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True).start()
        yield door.server_port
        door.shutdown()


def test_a_door_is_bounded_in_connections_and_headers() -> None:
    with opened(_Patient) as port:
        assert answer(port, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
        assert b" 431 " in answer(port, b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n")
        assert b" 414 " in answer(port, b"GET /" + b"a" * 65536 + b" HTTP/1.0\r\n\r\n")
    with opened(_Patient, connections=2) as port, contextlib.ExitStack() as open_ones:
        *_, third = (open_ones.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(3))
        assert third.recv(100).startswith(b"HTTP/1.1 503")


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
    with opened(_Hasty) as port:
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
