"""A receiver whose clock jumps, or whose sender forks or ends without a word, keeps what it acknowledged."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest
from depth import deep

pytest.importorskip("opentelemetry.proto")

from servicespans import of_service

import xsp
from xsp import connections
from xsp.connections import ConnectionLimits, Connections
from xsp.receiver import directories
from xsp.receiver.journal import RunWriter


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_changes_no_deadline_and_no_order(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the day is set while a receiver runs: every deadline is on the monotonic clock."""
    ended = list[int]()
    table = Connections(ConnectionLimits(connections=2))
    receiving = RunWriter(tmp_path / "out", lambda _: None)
    receiving.store(of_service(1))
    table.admit("", lambda: ended.append(1))
    plain, plain_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: plain() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: plain_ns() + int(jump_s * 1e9))
    table.sweep()
    receiving.store(of_service(2))
    assert ended == []
    assert receiving.close()
    assert xsp.load(tmp_path / "out" / "services").sql("SELECT count(*) FROM spans").fetchall() == [(4,)]
    for module in (connections, directories):
        assert "time.time(" not in Path(module.__file__).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("ending", ["_exit", deep("exec")])
def test_a_forked_sender_that_ends_without_a_word_leaves_its_acknowledged_spans(ending: str, tmp_path: Path) -> None:
    """Parent and child share a connection; the child ends at once, and the parent goes on with it."""
    from realparts import ServeProcess
    from test_serve import body

    receiver = ServeProcess(tmp_path / "received")
    try:
        place = "127.0.0.1", int(receiver.http.rpartition(":")[2])
        with socket.create_connection(place, timeout=60) as shared:
            for number in (1, 2):
                content = body(span_id=number.to_bytes(8, "big"))
                head = f"POST /v1/traces HTTP/1.1\r\nContent-Length: {len(content)}\r\n"
                shared.sendall(head.encode() + b"Content-Type: application/x-protobuf\r\n\r\n" + content)
                assert shared.recv(1000).startswith(b"HTTP/1.1 200")
                if number == 1:
                    child = os.fork()
                    if not child:
                        if ending == "_exit":
                            os._exit(3)
                        os.execv(sys.executable, [sys.executable, "-c", ""])
                    os.waitpid(child, 0)
        receiver.end()
        assert xsp.load(receiver.out / "services").sql("SELECT count(*) FROM spans").fetchall() == [(2,)]
    finally:
        receiver.process.kill()
        receiver.process.communicate()
