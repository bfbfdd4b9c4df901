"""Every server has its connections in one place, and clients that do nothing make no other client wait."""

from __future__ import annotations

import ast
import contextlib
import http.client
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from depth import deep
from sources import ROOT, name_of, sources, tree_of

from xsp import connections
from xsp.connections import ConnectionLimits, Connections, State

PATIENCE_S = 30
OWN = [("grpc.use_local_subchannel_pool", 1)]
"""Each channel has a connection of its own, as that of another process has."""

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: "


class Opened(NamedTuple):
    """A server that listens."""

    connect: Callable[[], socket.socket]
    half: bytes
    """What a client sends that then does nothing more."""

    is_answered: Callable[[], bool]
    """Asks as a good client does."""


def tcp(port: int) -> Callable[[], socket.socket]:
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def gets(port: int, path: str) -> bool:
    """Return whether the path is answered; as clients do, ask again where the connection was needed for another."""
    for _ in range(3):
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            client.request("GET", path)
            return client.getresponse().status in (200, 404, 405)
    return False


@contextlib.contextmanager
def receiver(folder: Path, door: str) -> Iterator[Opened]:
    pytest.importorskip("opentelemetry.proto")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from xsp.receiver.limits import RequestLimits
    from xsp.receiver.server import Receiver, address

    place = address("127.0.0.1:0")
    http, grpc = (place if door == name else None for name in ("http", "grpc"))
    server = Receiver(folder / "out", http, grpc, RequestLimits(), lambda _: None)
    server.start()
    try:
        if door == "http":
            port = server._http_server.server_address[1]
            yield Opened(tcp(port), HALF, lambda: gets(port, "/"))
        else:
            grpc = pytest.importorskip("grpc")
            port = server._grpc_server.port

            def is_answered() -> bool:
                with grpc.insecure_channel(f"127.0.0.1:{port}", options=OWN) as channel:
                    export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
                    return bool(
                        export(ExportTraceServiceRequest().SerializeToString(), timeout=PATIENCE_S,
                               wait_for_ready=True) == b""
                    )  # fmt: skip

            yield Opened(tcp(port), b"PRI * HTTP/2.0\r\n", is_answered)
    finally:
        assert server.close()


@contextlib.contextmanager
def evaluations(folder: Path) -> Iterator[Opened]:
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from xsp.evaluate.web import app

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = app.server(folder, "127.0.0.1", port)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield Opened(tcp(port), HALF, lambda: gets(port, "/api/evaluations"))
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def reports(_: Path) -> Iterator[Opened]:
    from xsp.report import serve

    with serve.server({"run": b"page"}, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield Opened(tcp(server.server_port), HALF, lambda: gets(server.server_port, "/run"))
        server.shutdown()


@contextlib.contextmanager
def weights(folder: Path) -> Iterator[Opened]:
    from xsp.share import client
    from xsp.share.store import WeightStore

    store = WeightStore(folder / "store", 1 << 20)
    thread = threading.Thread(target=store.serve)
    thread.start()
    try:
        yield Opened(lambda: client.connect(folder / "store"), b"", lambda: "pid" in client.status(folder / "store"))
    finally:
        store.end()
        thread.join(PATIENCE_S)


SERVERS: dict[str, Callable[[Path], Any]] = {
    "xsp/receiver/loopback.py": lambda folder: receiver(folder, "http"),
    "xsp/receiver/grpc.py": lambda folder: receiver(folder, "grpc"),
    "xsp/evaluate/web/app.py": evaluations,
    "xsp/report/serve.py": reports,
    "xsp/share/serving.py": weights,
}
"""By the module that serves: what opens it."""

LISTENING = {
    "listen", "create_server", "start_server", "start_unix_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer",
    "ThreadingTCPServer", "UnixStreamServer", "make_server", "add_insecure_port", "add_secure_port", "Listener",
    "create_unix_server", "WSGIServer", "XMLRPCServer", "uvicorn.run", "TCPStore",
}  # fmt: skip
"""Calls, and bases of classes, that listen."""

NETWORK = {"socket", "socketserver", "http", "asyncio", "grpc", "uvicorn", "multiprocessing", "torch", "wsgiref",
           "xmlrpc", "selectors", "ssl"}  # fmt: skip

NOT_SERVERS = {
    "xsp/bench/partner.py": "a pair of sockets within one process; the listener is closed before it is used",
    "xsp/cli/evaluate.py": "opens the socket that xsp/evaluate/web/app.py serves",
}


def what_listens(tree: ast.AST) -> set[str]:
    """Return the names in a module that listen; without one of the packages that open sockets there are none."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    packages = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    packages |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    if not {package.partition(".")[0] for package in packages} & NETWORK:
        return set()
    found = set()
    for node in ast.walk(tree):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for each in used:
            name = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
            if name in LISTENING or ast.unparse(each) in LISTENING or ast.unparse(each) == "uvicorn.Server":
                found.add(name)
    return found


def test_whatever_listens_has_its_connections_in_the_one_place() -> None:
    listening = {name_of(path) for path in sources("xsp", "collectors") if what_listens(tree_of(path))}
    assert listening >= {"xsp/receiver/loopback.py", "xsp/receiver/grpc.py", "xsp/share/serving.py"}
    for name in listening - set(NOT_SERVERS):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "xsp.connections import" in text, f"{name} listens without xsp.connections"
        assert ".admit(" in text, f"{name} listens, and admits no connection"
        assert name in SERVERS, f"{name} listens, and no test here opens it"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [80, deep(500)])
@pytest.mark.parametrize("name", SERVERS)
def test_a_good_client_is_answered_beside_many_that_never_finish(
    name: str, count: int, tmp_path: Path, many_descriptors: None
) -> None:
    with SERVERS[name](tmp_path) as opened, contextlib.ExitStack() as others:
        assert opened.is_answered()
        for _ in range(count):
            other = others.enter_context(opened.connect())
            with contextlib.suppress(OSError):  # another one has its place already
                if opened.half:
                    other.sendall(opened.half)
        assert opened.is_answered()
        assert opened.is_answered()


def test_requests_over_grpc_whose_message_never_comes_make_nobody_wait(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    with receiver(tmp_path, "grpc") as opened, contextlib.ExitStack() as others:
        port = opened.connect().getpeername()[1]
        go_on, never = threading.Event(), []
        for _ in range(2):
            channel = others.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=OWN))
            export = channel.stream_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
            never += [export.future(iter(go_on.wait, True)) for _ in range(40)]
        time.sleep(0.5)
        assert opened.is_answered()
        go_on.set()


@pytest.mark.parametrize("name", ["xsp/receiver/loopback.py", "xsp/evaluate/web/app.py", "xsp/report/serve.py"])
def test_a_header_without_an_end_is_bounded(name: str, tmp_path: Path) -> None:
    with SERVERS[name](tmp_path) as opened:
        assert opened.is_answered()
        with opened.connect() as other:
            other.sendall(b"GET / HTTP/1.1\r\n")
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 1 << 26:
                    sent += other.send(b"A: " + b"b" * 8000 + b"\r\n")
                    time.sleep(0.001)
            assert sent < 1 << 24
        assert opened.is_answered()


# --- the table ------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    return now


def test_who_waits_longest_without_a_header_gives_way_and_who_is_worked_for_does_not(clock: list[float]) -> None:
    ended = list[str]()
    table = Connections(ConnectionLimits(connections=3))
    places = {}
    for name, state in (("body", State.BODY), ("work", State.WORK), ("header", State.HEADER)):
        clock[0] += 1
        places[name] = table.admit("one", lambda name=name: ended.append(name))
        places[name].enter(state)
    for name in ("second", "third"):
        clock[0] += 1
        table.admit("one", lambda name=name: ended.append(name)).enter(State.WORK)
    assert ended == ["header", "body"]
    assert table.admit("one", lambda: None) is None
    table.leave(places["work"])
    table.leave(places["work"])
    assert len(table) == 2


def test_the_client_with_most_connections_gives_way(clock: list[float]) -> None:
    ended = list[str]()
    table = Connections(ConnectionLimits(connections=4))
    for peer in ("quiet", "loud", "loud", "loud", "quiet", "loud", "loud"):
        clock[0] += 1
        assert table.admit(peer, lambda peer=peer: ended.append(peer)) is not None
    assert ended == ["loud", "loud", "loud"]


def test_each_state_has_its_time_and_work_has_none(clock: list[float]) -> None:
    ended = list[State]()
    limits = ConnectionLimits(header_s=1, body_s=2, answer_s=3, idle_s=4)
    table = Connections(limits)
    for state in State:
        table.admit("", lambda state=state: ended.append(state)).enter(state)
    for _ in range(10):
        clock[0] += 1.01
        table.sweep()
    assert ended == [State.HEADER, State.BODY, State.ANSWER, State.IDLE]
    assert len(table) == 1
