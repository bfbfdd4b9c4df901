"""A real Jaeger and a real OpenTelemetry Collector on free loopback ports; `make jaeger` builds them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
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

Found = TypeVar("Found")


def built(name: str) -> Path:
    """Return the program of that name, or skip the test."""
    program = _REPOSITORY / ".jaeger" / name
    if not program.exists():
        pytest.skip(f".jaeger/{name} is not built: make jaeger")
    return program


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(question: Callable[[], Found]) -> Found:
    """Ask until the answer is not empty.

    Raises:
        TimeoutError: it never was.
    """
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        time.sleep(0.1)
    raise TimeoutError(f"no answer within {PATIENCE_S} s")


def fetched(url: str) -> Any:
    """Return the JSON at a URL, or None where there is none (yet)."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)
    except (OSError, urllib.error.HTTPError, ValueError):
        return None


class Part:
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
        self._command = [str(built(name))]
        for config in configs:
            text = f"yaml:{json.dumps(config)}" if isinstance(config, dict) else str(config)
            self._command += ["--config", text]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with the same ports and folders as before.

        Raises:
            RuntimeError: it ended at once; the message holds the end of its log.
        """
        ours = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT, env=ours)
        until(self._answers)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self._command} ended:\n{self.log.read_text()[-2000:]}")
        return fetched(self._health) is not None

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

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_S)
            self._process = None


def _listening(grpc: int, http: int) -> dict[str, Any]:
    protocols = {"grpc": {"endpoint": f"127.0.0.1:{grpc}"}, "http": {"endpoint": f"127.0.0.1:{http}"}}
    return {"otlp": {"protocols": protocols}}


class Jaeger(Part):
    """A Jaeger with the settings of deploy/jaeger.yaml; only addresses and folders are others.

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
        chosen = "memory" if memory else "spans"
        overlay = {
            "receivers": _listening(grpc, http),
            "exporters": {"jaeger_storage_exporter": {"trace_storage": chosen}},
            "extensions": {
                "healthcheckv2": {"http": {"endpoint": f"127.0.0.1:{health}"}},
                "jaeger_storage": {"backends": stores},
                "jaeger_query": {
                    "storage": {"traces": chosen},
                    "ui": {"config_file": str(DEPLOY / "ui.json")},
                    "http": {"endpoint": f"127.0.0.1:{query}"},
                    "grpc": {"endpoint": f"127.0.0.1:{query_grpc}"},
                },
            },
        }
        super().__init__("jaeger", folder, [DEPLOY / "jaeger.yaml", overlay], [grpc, http, health])


class Collector(Part):
    """A Collector.

    Args:
        folder: of its log.
        config: what it shall do with spans; where it listens is added.
    """

    def __init__(self, folder: Path, *config: Path | dict[str, Any]) -> None:
        grpc, http, health = ports = free_ports(3)
        place = {"health_check": {"endpoint": f"127.0.0.1:{health}", "path": "/status"}}
        overlay = {"receivers": _listening(grpc, http), "extensions": place}
        super().__init__("otelcol", folder, [*config, overlay], ports)


def to_file(path: Path, form: str = "json") -> dict[str, Any]:
    """Return a Collector's configuration that appends what it gets to a file.

    A rotating file is written without a buffer: what the Collector has accepted survives its kill.

    Args:
        path: of the file.
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
