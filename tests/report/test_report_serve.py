"""The reports that `xsp report --serve` shows on loopback."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from realparts import DEPLOY
from test_report import FULL, HOSTILE, payload, trace

import xsp
from xsp import semconv
from xsp.cli import main
from xsp.errors import UsageError
from xsp.report import serve
from xsp.schema import COLUMNS, Level
from xsp.testing import spans, trace_of


@pytest.fixture(scope="module")
def listening() -> Iterator[int]:
    """Serve two reports and return the port."""
    rendered = serve.pages([[trace(*FULL)], [trace_of(spans("step net 0-10"), {"name": "plain"})]])
    with serve.server(rendered, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def ask(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    asking.putrequest(method, path, skip_host=True)
    asking.putheader("Host", host)
    asking.endheaders()
    answer = asking.getresponse()
    return answer.status, answer.read().decode()


def test_a_run_is_served_under_its_name(listening):
    status, page = ask(listening, "/plain")
    assert (status, payload(page)["name"]) == (200, "plain")


def test_a_name_may_hold_anything(listening):
    with_hostile_name = ask(
        listening, "/%3C%2Fscript%3E%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E%5Bred%5D?from=jaeger"
    )
    assert payload(with_hostile_name[1])["name"] == HOSTILE
    assert "<script>" not in ask(listening, "/")[1]


@pytest.mark.parametrize("path", ["/other", "/../etc/passwd", "/%2e%2e%2fetc%2fpasswd", "//etc/passwd", "/plain/"])
def test_nothing_else_is(listening, path):
    status, text = ask(listening, path)
    assert status == 404
    assert "is served here, only:" in text
    assert "plain" in text


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org:8600", ""])
def test_a_name_that_was_bent_to_loopback_gets_nothing(listening, host):
    assert ask(listening, "/plain", host=host)[0] == 403


def test_it_only_reads(listening):
    assert ask(listening, "/plain", "HEAD") == (200, "")
    assert ask(listening, "/plain", "POST")[0] == 501


def test_two_runs_of_one_name_cannot_both_be_meant():
    with pytest.raises(UsageError, match="two of the runs are called"):
        serve.pages([[trace(Level.MODEL)], [trace(Level.MODEL)]])


@pytest.mark.parametrize("port", [None, 70_000])
def test_a_port_that_cannot_be_had_is_named(listening, port):
    with pytest.raises(UsageError, match="name another port"):
        serve.server({}, listening if port is None else port)


@pytest.mark.parametrize("options", [["--serve", "-o", "x.html"], ["--port", "1"], ["another", "-o", "x.html"]])
def test_options_that_contradict_each_other(options, capsys):
    assert main(["report", "runs/none", *options]) == 2
    assert "xsp: error: -" in capsys.readouterr().err


def test_the_link_on_a_span_in_jaeger_leads_here():
    settings = json.loads((DEPLOY / "ui.json").read_text())
    (pattern,) = settings["linkPatterns"]
    assert pattern["key"] == next(column.attribute for column in COLUMNS if column.name == "key")
    known = {semconv.RUN_NAME: HOSTILE, pattern["key"]: "0123456789abcdef"}
    link = re.sub(r"#\{(.*?)\}", lambda found: quote(known[found[1]], safe=""), pattern["url"])
    assert link == f"http://127.0.0.1:{serve.PORT}/{quote(HOSTILE, safe='')}#key=0123456789abcdef"


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path):
    trace_of(spans("step net 0-10"), {"name": "plain"}).spans.write_parquet(str(tmp_path / "plain.parquet"))
    command = [sys.executable, "-m", "xsp.cli", "report", "plain.parquet", "--serve", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        assert ask(int(url.split(":")[2].split("/")[0]), "/plain")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_the_page_of_a_run_has_its_kinds_of_steps_and_an_option_puts_one_first(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    first, second = torch.nn.Linear(8, 8), torch.nn.Conv1d(4, 4, 3)
    with xsp.profile("two", out=tmp_path / "two", levels="M/L", every=2, warmup=0) as prof:
        for number in range(60):
            with prof.step():
                first(torch.ones(2, 8)) if number % 3 else second(torch.ones(2, 4, 64))
    assert main(["report", str(tmp_path / "two"), "-o", str(tmp_path / "page.html")]) == 0
    shown = payload((tmp_path / "page.html").read_text())["kinds"]["shown"]
    assert {each["name"].split()[0] for each in shown} == {"Linear", "Conv1d"}
    assert main(["report", str(tmp_path / "two"), "-o", str(tmp_path / "page.html"), "--kind", "conv"]) == 0
    data = payload((tmp_path / "page.html").read_text())
    assert data["kinds"]["shown"][0]["name"].startswith("Conv1d")
    assert next(table["command"] for table in data["tables"] if table["id"] == "A2").endswith(" --kind 0")
    assert main(["report", str(tmp_path / "two"), "--kind", "nothing"]) == 2
    assert "no kind of step called 'nothing'" in capsys.readouterr().err
