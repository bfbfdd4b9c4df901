"""A stream of progress is delivered while others crowd in, and a watcher that reads nothing holds nobody up."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from test_web import TINY, Fabricated

from xsp.connections import ConnectionLimits
from xsp.evaluate.web import app, routes

PATIENCE_S = 60


@pytest.fixture
def agent(tmp_path: Path) -> Fabricated:
    return Fabricated(tmp_path, lambda: tmp_path / "result-0001")


@pytest.fixture
def port(tmp_path: Path, agent: Fabricated) -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = app.server(tmp_path, "127.0.0.1", 0, [agent], ConnectionLimits(header_s=2, idle_s=2))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        agent.go.set()
        server.should_exit = True
        thread.join(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ask(port: int, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    content = None if body is None else json.dumps(body)
    client.request(method, path, content, {"Content-Type": "application/json"})
    return client.getresponse()


def test_a_stream_of_progress_survives_a_flood_and_tells_the_end(port: int, agent: Fabricated) -> None:
    job = json.load(ask(port, "POST", "/api/jobs", {"manifest": TINY}))["id"]
    stream = ask(port, "GET", f"/api/jobs/{job}/events")
    assert stream.readline().startswith(b"data: ")
    with contextlib.ExitStack() as others:
        for number in range(300):
            other = others.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            with contextlib.suppress(OSError):
                other.sendall(
                    b"GET / HTTP/1.1\r\n" if number % 2 else f"GET /api/jobs/{job}/events HTTP/1.1\r\n".encode()
                )
        silent = [ask(port, "GET", f"/api/jobs/{job}/events") for _ in range(routes.MOST_WATCHERS + 4)]
        assert [answer.status for answer in silent].count(200) <= routes.MOST_WATCHERS
        assert silent[-1].status == 503
        assert ask(port, "GET", f"/api/jobs/{job}").status == 200
        agent.go.set()
        said = [json.loads(line[6:]) for line in stream.read().splitlines() if line.startswith(b"data: ")]
    assert said[-1]["state"] == "done"
    assert ask(port, "GET", f"/api/jobs/{job}").status == 200
