"""The report's page: whole, offline, and deaf to what a trace would have it run."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from xsp.report import html, optimum, text
from xsp.span import Level
from xsp.testing import spans, trace_of

HOSTILE = "</script><script>window.hacked=1</script>[red]"

STEP = f"""
step  net 0-100 batch_size=4
forward Net 5-95
module Net 6-94 depth=0
module layer1 10-50 type=Conv2d depth=1
op aten::conv2d 12-48
primitive oneDNN 20-40 type=convolution
module {HOSTILE} 55-90 type=Linear depth=1
op aten::addmm 60-85
"""


def trace(*rungs: Level, steps: int = 5):
    """Return a trace with some timed steps at each rung."""
    rows = []
    for number in range(steps * len(rungs)):
        rung = rungs[number % len(rungs)]
        known = [row for row in spans(STEP) if row.level <= rung]
        rows += [row._replace(step=number, rung=int(rung)) for row in known]
    return trace_of(rows, {"name": HOSTILE, "levels": "M/L/G"})


FULL = (Level.MODEL, Level.LAYER, Level.OP, Level.KERNEL)


def printed(renderable) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def payload(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_holds_everything_and_reaches_out_for_nothing(tmp_path):
    page = html.write(trace(*FULL), tmp_path / "page.html").read_text()
    ours = page.replace((Path(html.__file__).parent / "assets" / "echarts.min.js").read_text(), "")
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"|https?:', ours) == []
    assert "__DATA__" not in page
    data = payload(page)
    assert [table["id"] for table in data["tables"]][:3] == ["A1", "A2", "A3"]
    assert {name for name, _ in data["refused"]} == {"A9", "A14", "A15"}
    assert data["lanes"][0][0] == "thread 1"


def test_names_in_a_trace_stay_text(tmp_path):
    page = html.render(trace(*FULL))
    assert "<script>window" not in page
    assert page.count("</script>") == 3
    assert HOSTILE in payload(page)["spans"]["name"]
    shown = printed(text.overview(trace(*FULL)))
    assert "[red]" in shown


def test_lanes_hold_no_two_spans_at_the_same_time():
    data = payload(html.render(trace(*FULL)))
    start, dur = data["spans"]["start"], data["spans"]["dur"]
    for _, first, last in data["lanes"]:
        ends = [start[place] + dur[place] for place in range(first, last)]
        assert all(end <= start[first + place + 1] for place, end in enumerate(ends[:-1]))
    assert len(data["lanes"]) == 6


def test_a_trace_of_the_model_level_alone_says_why_the_rest_is_missing():
    data = payload(html.render(trace(Level.MODEL)))
    assert [table["id"] for table in data["tables"]] == ["A1", "ledger", "ledger-kinds"]
    assert "needs the layer level" in dict(data["refused"])["A2"]
    shown = printed(text.overview(trace(Level.MODEL)))
    assert "needs the layer level" in shown


def test_of_more_spans_than_fit_the_longest_are_shown_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(html, "MOST_SPANS", 3)
    data = payload(html.render(trace(*FULL)))
    assert len(data["spans"]["name"]) == 3
    assert "The 5 shortest spans are left out." in data["timeline_note"]


def test_a_table_says_how_many_rows_it_leaves_out():
    shown = printed(text.table(trace(*FULL).spans, "all", limit=2))
    assert "108 more rows" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (True, "yes"), (12, "12"), (12345, "12,345"), (0.0, "0.000"), (1.23456, "1.235"),
        (12.3456, "12.35"), (123.456, "123.5"), (1234.56, "1235"), (1e-5, "1e-05"),
        ("x" * 50, "x" * 21 + "…" + "x" * 21),
    ],
)  # fmt: skip
def test_cells_are_short(value, shown):
    assert text.cell(value) == shown


def test_a_sweep_names_the_optimum(capsys):
    def at(batch: int, ms: float):
        rows = [spans(f"step net 0-{ms * 1000} batch_size={batch} step={number}")[0] for number in range(3)]
        return trace_of(rows, {"name": "net"})

    Console(width=120).print(optimum.sweep([at(1, 10), at(2, 11), at(4, 21.5)], target_ms=11))
    out = capsys.readouterr().out
    assert "optimal batch size: 2 (" in out
    assert "4 (the highest throughput)" in out
    assert "latency target 11 ms: batch size 2" in out


def test_the_charting_library_is_the_one_that_its_note_says():
    assets = Path(html.__file__).parent / "assets"
    stated = re.search(r"[0-9a-f]{64}", (assets / "README.md").read_text())
    assert stated is not None
    assert hashlib.sha256((assets / "echarts.min.js").read_bytes()).hexdigest() == stated.group()
