"""Lengths of requests over HTTP: stated, or of each chunk; what Python alone reads as a number is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto")

from xsp.receiver.http import OtlpHttpServer
from xsp.receiver.journal import RunWriter
from xsp.receiver.limits import MemoryBudget, RequestLimits


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    receiving = RunWriter(tmp_path / "out", lambda text: None)
    with OtlpHttpServer(("127.0.0.1", 0), receiving, MemoryBudget(1 << 20), RequestLimits()) as web:
        threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True).start()
        yield web.server_port
        web.shutdown()
    receiving.close()


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("header", "body", "status"),
    [
        ("Content-Length: 2", "{}", 200),
        ("Content-Length: 12", '{   "a" : 1}', 200),
        (CHUNKED, "2\r\n{}\r\n0\r\n\r\n", 200),
        (CHUNKED, "c\r\n" + '{   "a" : 1}' + "\r\n0\r\n\r\n", 200),
        ("Content-Length: +2", "{}", 400),
        ("Content-Length: 0_2", "{}", 400),
        (CHUNKED, "0x2\r\n{}\r\n0\r\n\r\n", 400),
        (CHUNKED, "+2\r\n{}\r\n0\r\n\r\n", 400),
        (CHUNKED, "\r\n", 400),
    ],
)
def test_a_length_is_made_of_digits_and_may_be_a_single_one(port: int, header: str, body: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = f"POST /v1/traces HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n{header}\r\n\r\n"
        connection.sendall((head + body).encode())
        assert connection.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
