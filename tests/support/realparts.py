"""A real `xsp serve`, Jaeger and Collector on free loopback ports; `make jaeger` builds the latter two."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = _REPOSITORY / "deploy"
PATIENCE_S = 60
PROTOBUF = {"Content-Type": "application/x-protobuf"}

Answer = TypeVar("Answer")


def program_path(name: str) -> Path:
    """Return the program of that name, or skip the test."""
    program = _REPOSITORY / ".jaeger" / name
    if not program.exists():
        pytest.skip(f".jaeger/{name} is not built: make jaeger")
    return program


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback, outside the range from which the system chooses ports.

    The system could give a port of that range to another test's connection between its closing and its use.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + (os.getpid() * 37 + next(_ports)) % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


_ports = itertools.count()


def poll(query: Callable[[], Answer]) -> Answer:
    """Repeat a query until its answer is not empty.

    Raises:
        TimeoutError: it never was.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        answer = query()
        if answer:
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"no answer within {PATIENCE_S} s")


def fetch_json(url: str) -> Any:
    """Return the JSON at a URL; None if there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)
    except (OSError, urllib.error.HTTPError, ValueError):
        return None


class ServerProgram:
    """One of the two programs: `start` returns when it is healthy, `stop` asks it to end, `kill` does not ask.

    Attributes:
        otlp_http: base URL of its OTLP receiver over HTTP.
        otlp_grpc: URL of its OTLP receiver over gRPC.
        log: path of what it prints.
    """

    def __init__(self, name: str, folder: Path, configs: list[Path | dict[str, Any]], ports: list[int]) -> None:
        grpc, http, health = ports
        self.otlp_http = f"http://127.0.0.1:{http}"
        self.otlp_grpc = f"http://127.0.0.1:{grpc}"
        self.log = folder / f"{name}.log"
        self._health = f"http://127.0.0.1:{health}/status"
        self._command = [str(program_path(name))]
        for config in configs:
            text = f"yaml:{json.dumps(config)}" if isinstance(config, dict) else str(config)
            self._command += ["--config", text]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with the same ports and folders as before.

        Raises:
            RuntimeError: it ended at once; the message holds the end of its log.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        poll(self._answers)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self._command} ended:\n{self.log.read_text()[-2000:]}")
        return fetch_json(self._health) is not None

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            self._process = None


def _receivers(grpc: int, http: int) -> dict[str, Any]:
    protocols = {"grpc": {"endpoint": f"127.0.0.1:{grpc}"}, "http": {"endpoint": f"127.0.0.1:{http}"}}
    return {"otlp": {"protocols": protocols}}


class ServeProcess:
    """A process of `xsp serve`, which can be ended or killed, and started again at the same addresses."""

    def __init__(self, out: Path, *options: str, most_of_a_file: int | None = None) -> None:
        self.out = out
        self._options = options
        self._most_of_a_file = most_of_a_file
        self._start("127.0.0.1:0", "127.0.0.1:0")

    def _start(self, http: str, grpc: str) -> None:
        command = [sys.executable, "-m", "xsp.cli", "serve", "--out", str(self.out), "--http", http, "--grpc", grpc]
        max_bytes = self._most_of_a_file
        self.process = subprocess.Popen(
            [*command, *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=None if max_bytes is None else lambda: _limit_files(max_bytes),
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.http = lines[0].split()[-1].removesuffix("/v1/traces")
        self.grpc = lines[1].split()[-1]

    def start_again(self) -> None:
        """Start it on the addresses that it had."""
        self._start(self.http.removeprefix("http://"), self.grpc.removeprefix("grpc://"))

    def end(self, number: signal.Signals = signal.SIGTERM, stopped: bool = False) -> str:
        """End it, and return its output; with `stopped`, the signal arrives while the process is stopped."""
        status = Path(f"/proc/{self.process.pid}/stat")
        if stopped:
            self.process.send_signal(signal.SIGSTOP)
            poll(lambda: status.read_text().rpartition(") ")[2][0] == "T")
        self.process.send_signal(number)
        if stopped:
            self.process.send_signal(signal.SIGCONT)
        printed, _ = self.process.communicate(timeout=300)
        return printed

    def post(self, body: bytes, headers: dict[str, str] = PROTOBUF, path: str = "/v1/traces") -> Any:
        """Send a request over HTTP, and return the answer."""
        import requests

        return requests.post(self.http + path, data=body, headers=headers, timeout=30)

    def runs(self) -> list[Path]:
        return sorted(self.out.iterdir())


def _limit_files(size: int) -> None:
    """Limit the size of files, like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


class Jaeger(ServerProgram):
    """A Jaeger with the settings of deploy/jaeger.yaml; only addresses and folders differ.

    Attributes:
        query: base URL of its UI and its query API.
    """

    def __init__(self, folder: Path, *, memory: bool = True) -> None:
        grpc, http, health, query, query_grpc = free_ports(5)
        self.query = f"http://127.0.0.1:{query}"
        stores: dict[str, Any] = {
            "spans": {"badger": {"directories": {"keys": str(folder / "keys"), "values": str(folder / "values")}}},
            "memory": {"memory": {"max_traces": 100_000}},
        }
        storage = "memory" if memory else "spans"
        overlay = {
            "receivers": _receivers(grpc, http),
            "exporters": {"jaeger_storage_exporter": {"trace_storage": storage}},
            "extensions": {
                "healthcheckv2": {"http": {"endpoint": f"127.0.0.1:{health}"}},
                "jaeger_storage": {"backends": stores},
                "jaeger_query": {
                    "storage": {"traces": storage},
                    "ui": {"config_file": str(DEPLOY / "ui.json")},
                    "http": {"endpoint": f"127.0.0.1:{query}"},
                    "grpc": {"endpoint": f"127.0.0.1:{query_grpc}"},
                },
            },
        }
        super().__init__("jaeger", folder, [DEPLOY / "jaeger.yaml", overlay], [grpc, http, health])


class Collector(ServerProgram):
    """A Collector.

    Args:
        folder: folder of its log.
        config: its configuration; the addresses are added.
    """

    def __init__(self, folder: Path, *config: Path | dict[str, Any]) -> None:
        grpc, http, health = ports = free_ports(3)
        place = {"health_check": {"endpoint": f"127.0.0.1:{health}", "path": "/status"}}
        overlay = {"receivers": _receivers(grpc, http), "extensions": place}
        super().__init__("otelcol", folder, [*config, overlay], ports)


def to_file(path: Path, form: str = "json") -> dict[str, Any]:
    """Return a Collector's configuration that appends received spans to a file.

    A rotating file is written without a buffer: what the Collector has accepted survives its kill.

    Args:
        path: path of the file.
        form: "json" (a line a request) or "proto" (each request after its length, in 4 bytes).
    """
    file = {"path": str(path), "format": form, "rotation": {"max_megabytes": 100_000}}
    traces = {"receivers": ["otlp"], "exporters": ["file"]}
    service = {
        "extensions": ["health_check"],
        "telemetry": {"metrics": {"level": "none"}},
        "pipelines": {"traces": traces},
    }
    return {"exporters": {"file": file}, "service": service}
