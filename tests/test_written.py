"""What is written holds no secret and names no person, machine or place; see docs/understand/guarantees.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import duckdb
import pytest
from test_security import run_of_others

import xsp
from xsp import cli, table
from xsp.receiver import loopback
from xsp.report import html

PROGRAM = """
import torch, xsp
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
with xsp.profile("plain", out="run", {to}) as prof:
    for _ in range(prof.schedule.steps_for(repeats=1)):
        with prof.step():
            model(torch.ones(2, 4))
"""
SECRETS = ("S3CRETENV", "S3CRETURL", "S3CRETHEADER", "S3CRETARGV", "S3CRETQUERY", "ada-lovelace")


def everything(place: Path) -> Iterator[tuple[str, str]]:
    """Yield each file's path and content; of Parquet also what it says once it is read."""
    for path in place.rglob("*"):
        if path.is_file():
            yield str(path), path.name + path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            yield str(path), str(duckdb.connect().sql(f"FROM read_parquet({table.literal(str(path))})").fetchall())


NAMED = """
import os, platform, socket
host = "ada-lovelace-host"
named = os.uname_result(("Linux", host, *os.uname()[2:]))
os.uname, socket.gethostname, platform.node = lambda: named, lambda: host, lambda: host
"""


class _Collector(loopback.DeadlineHandler):
    """Takes what is sent."""

    bodies: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode("latin-1"))
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def collector() -> Iterator[int]:
    with loopback.LimitedHTTPServer(("127.0.0.1", 0), _Collector) as door:
        threading.Thread(target=door.serve_forever, args=(0.05,), daemon=True).start()
        yield door.server_port
        door.shutdown()


def test_a_page_of_a_damaged_run_does_not_say_where_it_lies(tmp_path: Path) -> None:
    run = run_of_others(tmp_path / "ada-lovelace" / "run", {"finished": True})
    for name in ("steps/000002.parquet", "merged.parquet", "samples/000000.parquet"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"PAR1damaged")
    page = html.render(xsp.load(run, skip_damaged=True))
    assert page.count("left out: steps/000002.parquet") == page.count("left out: samples/000000.parquet") == 1
    assert "ada-lovelace" not in page


@pytest.mark.slow
def test_nothing_written_names_a_person_or_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: int
) -> None:
    for package in ("torch", "opentelemetry.exporter.otlp"):
        pytest.importorskip(package)
    home = tmp_path / "home" / "ada-lovelace"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "sitecustomize.py").write_text(NAMED)
    otlp = f"otlp='http://ada-lovelace:S3CRETURL@127.0.0.1:{collector}/v1/traces?key=S3CRETQUERY'"
    (home / "train.py").write_text(PROGRAM.format(to=otlp))
    for name in ("USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.setenv(name, "ada-lovelace")
    monkeypatch.setenv("AWS_SECRET", "S3CRETENV")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=S3CRETHEADER")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home / "lib"), *sys.path]))
    monkeypatch.chdir(home)
    command = [sys.executable, str(home / "train.py"), "--token", "S3CRETARGV", f"--data={home}/set"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert cli.main(["report", "run", "--out", "report.html"]) == 0
    for form in ("chrome", "speedscope", "folded", "csv", "parquet"):
        assert cli.main(["export", "run", "--format", form, "-o", f"out.{form}"]) == 0
    assert cli.main(["import", "out.chrome", "-o", "imported"]) == 0
    for path in (home / "train.py", home / "lib" / "sitecustomize.py"):
        path.unlink()
    shutil.rmtree(home / "lib")
    written = [*everything(home), *(("sent", body) for body in _Collector.bodies)]
    assert [(path, name) for path, content in written for name in (*SECRETS, str(tmp_path)) if name in content] == []
    assert _Collector.bodies
    assert (home / "imported" / "run.json").is_file()
