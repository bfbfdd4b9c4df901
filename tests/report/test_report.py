"""The report's page: whole, offline, and deaf to what a trace would have it run."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter
from html import escape
from itertools import groupby
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from xsp import rundir, sections, terminal
from xsp.analyses import ANALYSES
from xsp.analyses.answers import AnswerTable
from xsp.errors import OutputError
from xsp.report import charts, firstscreen, headline, html, lanes, loop, packed, text, timeline
from xsp.report.fitting import shorten_distinctly
from xsp.schema import Level
from xsp.testing import spans, trace_of, with_loop
from xsp.texts import shortened

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


def numbers(text: str) -> list[int]:
    """Read the differences that `packed.differences` writes."""
    found, last, value, shift = [], 0, 0, 0
    for byte in base64.b64decode(text):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            last += -(value + 1) // 2 if value % 2 else value // 2
            found.append(last)
            value = shift = 0
    return found


def unpacked(column: dict, count: int) -> list:
    if "all" in column:
        return [column["all"]] * count
    first = numbers(column["from"])
    lengths = [after - before for before, after in zip(first, [*first[1:], count], strict=True)]
    return [value for value, length in zip(changes(column), lengths, strict=True) for _ in range(length)]


def changes(column: dict) -> list:
    if "hex" in column:
        return [
            base64.b64decode(column["hex"])[place : place + 8].hex()
            for place in range(0, len(column["hex"]) // 4 * 3 - 7, 8)
        ]
    if "values" in column:
        return [column["values"][place] for place in numbers(column["at"])]
    gone = [place % 2 for place, length in enumerate(column["holes"]) for _ in range(length)]
    return [None if missing else number for number, missing in zip(numbers(column["numbers"]), gone, strict=True)]


def packed_of(values: list) -> dict:
    runs = [next(run) for _, run in groupby(enumerate(values), key=lambda each: each[1])]
    places, found = np.array([place for place, _ in runs], dtype=np.int64), [value for _, value in runs]
    if {type(value) for value in found} <= {int, type(None)}:  # as the engine gives them
        numbers = np.array([value or 0 for value in found], dtype=np.int64)
        column = np.ma.MaskedArray(numbers, [value is None for value in found])
    else:
        column = np.array([*found, None], dtype=object)[:-1]
    return json.loads(json.dumps(packed.pack(places, column)))


def column(data: dict, name: str) -> list:
    return unpacked(data["timeline"]["columns"][name], data["timeline"]["count"])


def drawn(given) -> dict:
    """Return what a page's data has of a trace's timeline, without the rest of the page, which takes a second."""
    return {"timeline": json.loads(json.dumps(timeline.timeline(given)))}


def chart(data: dict, title: str) -> dict:
    return next(each for each in data["charts"] if each["title"].startswith(title))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a trace of all rungs."""
    return html.write(trace(*FULL), tmp_path_factory.mktemp("report") / "page.html").read_text()


def test_the_page_holds_everything_and_reaches_out_for_nothing(page):
    ours = page.replace((Path(html.__file__).parent / "assets" / "echarts.min.js").read_text(), "")
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"|https?:', ours) == []
    assert "__DATA__" not in page
    data = payload(page)
    assert [table["id"] for table in data["tables"]][:3] == ["account", "phases", "phases-over-time"]
    assert "loop" in {name for name, _ in data["refused"]}  # only recorded steps are in this trace
    refused = {name for name, _ in data["refused"]}
    assert refused == set(ANALYSES) - {table["id"] for table in data["tables"]} - {"health"}
    assert data["timeline"]["lanes"][0][0] == "thread 1"


@pytest.mark.slow
def test_names_in_a_trace_stay_text(page):
    assert "<script>window" not in page
    assert page.count("</script>") == 1 + len(html.SCRIPTS)
    assert HOSTILE in column(payload(page), "name")


@pytest.mark.slow
def test_a_name_that_looks_like_placeholders_is_a_name():
    name = "__DATA__ __JS__ __TITLE__ \\g<0>"
    page = html.render(trace_of(spans(STEP), {"name": name}))
    assert f"<title>{escape(name)} · xsp</title>" in page
    assert payload(page)["name"] == name


def test_only_the_scripts_of_the_page_may_run(page):
    policy = re.search(r"script-src ([^;]*);", page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    sums = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.group(1).split() == [f"'sha256-{each}'" for each in sums]


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        html.write(trace(Level.MODEL), tmp_path / "page.html")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_lanes_hold_no_two_spans_at_the_same_time(page):
    data = payload(page)
    start, dur = column(data, "start"), column(data, "dur_ns")
    for _, _, first, last in data["timeline"]["lanes"]:
        ends = [start[place] + dur[place] for place in range(first, last)]
        assert all(end <= start[first + place + 1] for place, end in enumerate(ends[:-1]))
    assert len(data["timeline"]["lanes"]) == 6


def lanes_of(text: str) -> list[tuple[str, list[str]]]:
    """Return the lanes of a step that is written down: track, and the names from left to right."""
    data = drawn(trace_of(spans(text), {"name": "net"}))
    names = column(data, "name")
    return [(track, names[first:last]) for track, _, first, last in data["timeline"]["lanes"]]


def test_what_runs_outside_its_parent_stands_where_it_runs():
    lanes = lanes_of("""
    data loader 0-15
    step net 20-100
    forward Net 21-60
    module fc 22-50
    op aten::addmm 25-45 sequence_nr=7
    backward backward 61-99
    op AddmmBackward0 62-90 sequence_nr=7 forward_thread=1 thread=2 phase=backward
    op aten::mm 65-80 thread=2
    kernel gemm 110-120
    """)
    assert lanes == [
        ("thread 1", ["loader", "net"]),
        ("thread 1", ["Net", "backward"]),
        ("thread 1", ["fc"]),
        ("thread 1", ["aten::addmm"]),
        ("thread 2", ["AddmmBackward0"]),
        ("thread 2", ["aten::mm"]),
        ("device 0, stream 7", ["gemm"]),
    ]


def test_a_lane_is_named_by_the_levels_that_it_holds():
    data = drawn(trace_of(spans("""
    step net 0-100
    forward Net 1-40
    module fc 2-39
    op aten::addmm 3-38
    backward backward 41-99
    op AddmmBackward0 42-98 sequence_nr=7
    """), {"name": "net"}))  # fmt: skip
    assert [levels for _, levels, _, _ in data["timeline"]["lanes"]] == [[20], [20], [30, 40], [40]]


def test_a_timeline_begins_with_the_wait_for_data_that_precedes_the_step():
    data = drawn(trace_of(spans("data loader 0-15\nstep net 20-100"), {"name": "net"}))
    assert column(data, "start") == [0, 20_000]
    assert data["timeline"]["range"] == [0, 100_000]


def test_a_timeline_shows_no_span_of_another_step():
    one = spans("data loader 0-15\nstep net 20-100")
    rows = [row._replace(step=number, start_ns=row.start_ns + number * 10**6) for number in range(6) for row in one]
    data = drawn(trace_of(rows, {"name": "net"}))
    assert data["timeline"]["range"] == [0, 100_000]
    assert len(set(column(data, "step"))) == 1


def looped(rows, step=STEP, kind=None, **run):
    """Return a trace with a loop of these rows, each from where the one before ended; three recorded steps a kind."""
    found, at, told, seen = [], 0, [], Counter()
    for number, row in enumerate(rows):
        at += row.get("before_ns") or 0
        found.append({"step": number, "start_ns": 10**18 + int(at), **row})
        at += row["dur_ns"]
        rung, of = row.get("rung", 10), row.get("kind", 0)
        seen[of] += rung > 10
        if rung > 10 and seen[of] <= 3:
            told += [each._replace(step=number, rung=rung) for each in spans(step) if each.level <= rung]
    return with_loop(trace_of(told or spans(step), {"name": "net", **run}), found, kind)


def test_a_run_without_a_loop_has_no_chart_of_it(page):
    assert payload(page)["loop"] is None


def test_the_run_over_time_tells_recorded_steps_from_others_and_data_from_gaps():
    bare = {"dur_ns": 10e6, "before_ns": 7e6, "data_ns": 5e6}
    recorded = {**bare, "dur_ns": 20e6, "rung": 70, "steady": False}
    shown = loop.loop(looped([bare] * 12 + [recorded] + [bare] * 12))
    assert shown["points"]["recorded"] == [False] * 12 + [True] + [False] * 12
    assert shown["points"]["ms"][11:14] == [10, 20, 10]
    assert shown["points"]["at_s"][:3] == [0, 0.017, 0.034]
    assert (shown["notes"], shown["left_out"]) == (["25 steps, 1 of them recorded."], 0)
    assert set(zip(*(shown["parts"][each] for each in ("self_ms", "data_ms", "between_ms")), strict=True)) == {
        (10, 5, 2)
    }


def test_a_wait_for_data_inside_a_step_is_no_part_of_the_step_itself():
    inside = {"dur_ns": 30e6, "before_ns": 2e6, "data_ns": 22e6}
    parts = loop.loop(looped([inside] * 10))["parts"]
    assert {each: parts[each][0] for each in ("self_ms", "data_ms", "between_ms")} == {
        "self_ms": 10, "data_ms": 22, "between_ms": 0
    }  # fmt: skip


def test_of_many_steps_the_extremes_are_drawn_and_the_means_are_of_all():
    rows = [{"dur_ns": 1e6 + number % 7, "before_ns": 0.0} for number in range(30_000)]
    rows[12_345] = {"dur_ns": 90e6, "before_ns": 0.0}
    rows[23_456] = {"dur_ns": 0.1e6, "before_ns": 50e6}
    shown = loop.loop(looped(rows))
    assert 500 < len(shown["points"]["step"]) <= loop.MOST_POINTS
    assert {12_345, 23_456} <= set(shown["points"]["step"])
    assert shown["left_out"] == 30_000 - len(shown["points"]["step"])
    assert len(shown["parts"]["step"]) == loop.MOST_PARTS


@pytest.mark.slow
def test_a_long_name_of_a_kind_leaves_room_for_the_time_of_an_iteration():
    """The kinds of a GAN have names of three modules each: of the heading only its names were left."""
    name = "training Sequential 32×64×1×1 + 2× Sequential(2) 32×3×16×16 + 2× BCEWithLogitsLoss 32×1×1×1"
    kinds = [
        {"kind": 0, "name": name, "training": True, "steps": 40},
        {"kind": 1, "name": name + ", SGD", "training": True, "steps": 10},
    ]
    rows = [
        {"dur_ns": 10e6, "kind": int(number % 5 == 4), "rung": 20 if number % 10 < 2 else 10} for number in range(60)
    ]
    trace = looped(rows, kinds=kinds)
    shown = firstscreen.text(firstscreen.first_screen(trace, "a", ()), 80)
    assert "an iteration" in " ".join(shown.splitlines()[:2]), shown


@pytest.mark.parametrize("kinds", [1, 3, 40])
def test_no_number_of_kinds_makes_more_points_than_can_be_drawn(kinds):
    row = {"dur_ns": 1e6}
    rows = [{**row, "kind": number % kinds, "rung": 70 * (number // kinds % 2)} for number in range(9000)]
    shown = loop.loop(looped(rows))
    assert len(shown["points"]["step"]) <= loop.MOST_POINTS
    assert len(shown["kinds"]) == min(kinds, loop.MOST_COLOURS + 1)
    assert max(shown["points"]["colour"]) == len(shown["kinds"]) - 1


@pytest.mark.slow
def test_the_figures_of_the_loop_stand_first_and_are_of_steps_that_ran_as_if_nothing_were_recorded():
    bare = {"dur_ns": 10e6, "before_ns": 10e6, "data_ns": 8e6, "samples": 4}
    slow = {"dur_ns": 90e6, "before_ns": 0.0, "steady": False, "rung": 70, "samples": 4}
    kind = {"kind": 0, "name": "net", "batch_size": 4, "batch_source": "guess"}
    one = looped([bare] * 20 + [slow] * 20, kinds=[kind], budget={"program_percent": 41.0})
    data = payload(html.render(one))
    figures = data["headline"]
    assert [each[:2] for each in figures[:2]] == [
        ["an iteration of the loop", "20.0 ms"], ["the loop's throughput", "200.0 samples/s"],
    ]  # fmt: skip
    (host,) = data["screen"]["sides"]
    assert ["waiting for data", 8.0, "40 %", "8.00 ms"] in host["parts"]
    assert ["between steps", 2.0, "10 %", "2.00 ms"] in host["parts"]
    assert figures[0][2].endswith("; steps that ran as if nothing were recorded")
    assert figures[1][2] == "as the program ran, 4 samples a step, a guess"
    assert ["profiling made the program", "1.41 times as long", "--budget 2% would cost less"] in figures


@pytest.mark.slow
def test_a_page_has_the_figures_of_each_kind_and_says_how_to_see_the_rest():
    names = [{"kind": 0, "name": "generator", "steps": 30}, {"kind": 1, "name": "discriminator", "steps": 30},
             {"kind": 2, "name": HOSTILE, "steps": 1}]  # fmt: skip
    rows = [
        {"dur_ns": 10e6 * (1 + number % 2), "kind": number % 2, "rung": 20 if number % 10 < 2 else 10}
        for number in range(60)
    ]
    page = html.render(looped(rows, kinds=names), [looped(rows, kind=0, kinds=names)])
    shown = payload(page)["kinds"]
    assert [(each["name"], round(each["percent"])) for each in shown["shown"]] == [
        ("discriminator", 67),
        ("generator", 33),
    ]
    assert [(each["name"], each["command"]) for each in shown["others"]] == [(HOSTILE, "xsp report RUN --kind 2")]
    other = re.search(r'<script type="application/json" id="kind-1">(.*?)</script>', page, re.DOTALL)
    assert set(json.loads(other.group(1))) < set(payload(page))
    assert payload(page)["tables"][0]["command"].endswith(" --kind 1")


@pytest.mark.slow
def test_the_timelines_of_several_kinds_share_the_room_of_one(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 12)
    monkeypatch.setattr(html, "LEAST_SPANS", 3)
    one = trace(*FULL)
    page = html.render(one, [one, one])
    counts = re.findall(r'"timeline":\{"count":(\d+)', page)
    assert counts == ["8", "4", "3"]


@pytest.mark.slow
def test_absent_collectors_are_no_findings_of_the_page():
    one = trace_of(spans(STEP), {"name": "net", "absent": {"onednn": "no such library", "cupti": "no GPU"}})
    told = payload(html.render(one))["health"]
    assert told["absent"] == [["onednn", "no such library"], ["cupti", "no GPU"]]
    assert not {"onednn", "cupti"} & {subject for _, subject, _ in told["findings"]}


def test_an_operator_that_another_clock_puts_before_its_layer_stands_below_it():
    assert lanes_of("step net 0-100\nmodule fc 10-50\nop aten::addmm 9.5-48") == [
        ("thread 1", ["net"]),
        ("thread 1", ["fc"]),
        ("thread 1", ["aten::addmm"]),
    ]


def test_what_overlaps_too_deeply_to_be_read_is_counted():
    kernels = "\n".join(f"kernel k{place} {10 + place}-500" for place in range(lanes.MOST_LANES + 6))
    data = drawn(trace_of(spans(f"step net 0-600\n{kernels}"), {"name": "net"}))
    assert len(data["timeline"]["lanes"]) == 1 + lanes.MOST_LANES
    assert "Left out: 6, which overlap more than 64 deep." in data["timeline"]["note"]


@pytest.mark.parametrize(
    "values",
    [
        [], [None, None], ["a", "a"], ["a", "b", "a"], [3, None, 4, 5], [7, 7, 7, 7, 7, 7, 7, 7, 8], [True, False],
        [*range(0, 10**9, 10**7), None, None, -5], [None, *range(40)], [0.25, None, 0.5], [2**51, -(2**60)],
        ["0123456789abcdef", "fedcba9876543210"],
    ],
)  # fmt: skip
def test_a_packed_column_holds_what_was_put_in(values):
    said = [str(value) if type(value) is int and abs(value) >= packed.EXACT_LIMIT else value for value in values]
    assert unpacked(packed_of(values), len(values)) == said


@pytest.mark.slow
@given(st.lists(st.none() | st.integers(-(2**51) + 1, 2**51 - 1), min_size=20))
def test_packed_integers_are_the_integers(values):
    assert unpacked(packed_of(values), len(values)) == values


def test_what_json_cannot_say_is_null():
    assert unpacked(packed_of([1.5, float("nan"), float("inf")]), 3) == [1.5, None, None]


@pytest.mark.slow
def test_charts_show_all_layers_and_a_table_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(html, "MOST_ROWS", 2)
    monkeypatch.setattr(html, "LARGEST_ROWS", {"A8": ("latency_us", 1)})
    data = payload(html.render(trace(*FULL)))
    tables = {table["id"]: table for table in data["tables"]}
    assert (len(tables["A2"]["rows"]), tables["A2"]["total"]) == (2, 3)
    assert tables["A2"]["command"] == "xsp analyze RUN A2 --limit 3"
    assert len(chart(data, "Layer latency")["data"]["name"]) == 3
    (dearest,) = tables["A8"]["rows"]
    assert dearest[tables["A8"]["columns"].index("name")] == "aten::addmm"
    assert "dram_read_bytes" in tables["A8"]["empty"]


@pytest.mark.parametrize(
    ("low", "high", "shown"), [(-1.0, 2.0, "not measurable"), (0.5, 2.0, "+1 ms"), (None, None, "+1 ms")]
)
def test_a_cost_that_cannot_be_told_from_noise_is_not_stated_as_a_figure(low, high, shown):
    ledger = [{"rung": "M", "step_ms": 10.0}, {"rung": "M/L", "step_ms": 11.0, "low_ms": low, "high_ms": high}]
    what, said, about = headline.recording_cost(ledger)
    assert (what, said) == ("recording adds to a step", shown)
    assert "with all down to layers recorded" in about
    assert ("+10.0 % of its latency" in about) == (shown == "+1 ms")


@pytest.mark.slow
def test_a_trace_of_the_model_level_alone_says_why_the_rest_is_missing():
    data = payload(html.render(trace(Level.MODEL)))
    assert {"A1", "ledger", "ledger-kinds"} <= {table["id"] for table in data["tables"]} < set(ANALYSES)
    assert "needs the layer level" in dict(data["refused"])["A2"]


def test_of_more_spans_than_fit_the_longest_are_shown_and_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 3)
    data = drawn(trace(*FULL))
    assert len(column(data, "name")) == 3
    assert "Left out: 5, the shortest." in data["timeline"]["note"]


def test_a_table_says_how_many_rows_it_leaves_out():
    shown = printed(text.table(trace(*FULL).spans, "all", limit=2))
    assert "108 more rows" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (True, "yes"), (12, "12"), (12345, "12,345"), (0.0, "0.000"), (1.23456, "1.235"),
        (12.3456, "12.35"), (123.456, "123.5"), (1234.56, "1235"), (126_017.4, "126,017"),
        (1e9, "1e+09"), (1e-5, "1e-05"),
        ("a\x1b[31mb\n\u202ec", "a␛[31mb␊\ufffdc"),
    ],
)  # fmt: skip
def test_cells_are_short(value, shown):
    assert terminal.cell(value) == shown


def lines(renderable, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_table_fits_and_never_cuts_a_number(width):
    name = "void cutlass::Kernel2<tensorop_bf16_s16816gemm_relu_bf16_128x256_64x3>(Params)"
    query = (
        f"SELECT '{name}' AS name, 'Conv2d' AS type, 12.3456 AS latency_ms, 123456789 AS flops, 0.125 AS added_percent"
    )
    shown = lines(text.table(trace(*FULL).sql(query), "kernels", limit=5), width)
    assert max(map(len, shown)) <= width
    whole, _, left = " ".join(shown).partition("columns that do not fit: ")
    for heading, figure in (("latency", "12.35"), ("flops", "123,456,789"), ("added", "0.125")):
        assert (figure in whole) != (heading in left)
    assert "12.35" in whole
    assert (name in whole) == (width > 140)


def test_a_name_is_shortened_in_the_middle():
    assert shortened("encoder.layer.11.attention.query", 15) == "encoder…n.query"
    assert shortened("名前名前名前", 7) == "名 … 前"  # no letter of two columns is cut in half
    assert shortened("short", 5) == "short"


def test_a_terminal_is_not_told_what_to_do():
    hostile = "a\x1b]0;title\x07\x9b31m\r\n[bold]b"
    rows = [row._replace(name=hostile) if row.kind == "module" else row for row in spans(STEP)]
    one = trace_of(rows, {"name": hostile, "levels": hostile, "notes": [{"source": hostile, "text": hostile}]})
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(text.table(ANALYSES["layers"](one), "layers"))
    shown = console.file.getvalue() + firstscreen.text(firstscreen.first_screen(one), 100)
    assert not {"\x07", "\x9b", "\r"} & set(shown)
    assert "\x1b]" not in shown
    assert "[bold]b" in shown


def test_a_sweep_names_the_optimum(capsys):
    def at(batch: int, ms: float):
        rows = [spans(f"step net 0-{ms * 1000} batch_size={batch} step={number}")[0] for number in range(3)]
        return trace_of(rows, {"name": "net"})

    Console(width=120).print(text.sweep([at(1, 10), at(2, 11), at(4, 21.5)], target_ms=11))
    out = capsys.readouterr().out
    assert "optimal batch size: 2 (" in out
    assert "4 (the highest throughput)" in out
    assert "latency target 11 ms: batch size 2" in out


def test_the_charting_library_is_the_one_that_its_note_says():
    assets = Path(html.__file__).parent / "assets"
    stated = re.search(r"[0-9a-f]{64}", (assets / "README.md").read_text())
    assert stated is not None
    assert hashlib.sha256((assets / "echarts.min.js").read_bytes()).hexdigest() == stated.group()


# --- names that fit -----------------------------------------------------------------------------------------

LAYERS_OF_BERT = [
    name
    for number in range(12)
    for name in (
        f"bert.encoder.layer.{number}.attention.self",
        f"bert.encoder.layer.{number}.attention.output.dense",
        f"bert.encoder.layer.{number}.intermediate.dense",
        f"bert.encoder.layer.{number}.output.dense",
    )
] + ["bert.embeddings.word_embeddings", "bert.pooler.dense"]


@pytest.mark.parametrize("width", [14, 20, 24, 30, 60])
def test_layers_that_differ_have_names_that_differ_however_narrow_the_column(width):
    shown = shorten_distinctly(LAYERS_OF_BERT, width)
    assert max(map(len, shown)) <= width
    assert len(set(shown)) == len(LAYERS_OF_BERT)
    if width >= 20:
        assert all(name.split(".")[3] in text for name, text in zip(LAYERS_OF_BERT[:48], shown, strict=False))


def test_what_is_no_modules_name_loses_its_middle():
    assert shorten_distinctly(["aten::_scaled_dot_product_attention", "void kernel<float, 4>(int)"], 15) == [
        "aten::_…tention", "void ke…4>(int)",
    ]  # fmt: skip


def test_words_that_all_names_begin_with_go_before_their_middle() -> None:
    kinds = ["training of Sequential(2) 32×4", "training of Sequential(2) 32×64", "training of Sequential(2) 4×64"]
    assert shorten_distinctly(kinds, 14) == ["…32×4", "…32×64", "…4×64"]
    assert shorten_distinctly(kinds, 40) == kinds
    assert len(set(shorten_distinctly([*kinds, "inference 2"], 14))) == 4
    assert shorten_distinctly(kinds[:1] * 2, 14) == [shortened(kinds[0], 14)] * 2


def test_a_narrow_table_keeps_what_it_is_sorted_by():
    rows = ", ".join(f"('{name}', 'Linear', 1, '[[1, 2]]', 0.125, 50.0)" for name in LAYERS_OF_BERT[:3])
    relation = duckdb.sql(f"SELECT * FROM (VALUES {rows}) t(name, type, calls, shape, self_ms, percent_of_layers)")
    console = Console(width=44, record=True, file=io.StringIO())
    console.print(text.table(relation, "narrow"))
    shown = console.export_text()
    assert shown.count("0.125") == 3
    assert "columns that do not fit: calls, shape, percent of layers" in " ".join(shown.split())


@pytest.mark.slow
def test_the_page_shows_the_sections_that_lie_in_the_run_directory_and_names_those_that_are_none(tmp_path):
    rundir.write_run(tmp_path, {"name": "run"})
    written = sections.Section(HOSTILE, (sections.Text(HOSTILE), sections.Table((HOSTILE,), ((HOSTILE,),))))
    sections.write(tmp_path, "mine", written)
    (tmp_path / "sections" / "bad.json").write_text("{}", encoding="utf-8")
    found = trace(*FULL)
    found.path = tmp_path
    page = html.render(found)
    shown = payload(page)
    assert shown["sections"] == [{"name": "mine", **sections.plain(written)}]
    assert shown["damaged"] == ["sections/bad.json: xsp_section is None; this xsp reads version 1"]
    assert "window.hacked=1</script>" not in page
    assert payload(html.render(trace(*FULL)))["sections"] == []


@pytest.mark.parametrize(("name", "column"), [("loop", "samples per s"), ("A1", "loop samples per s")])
def test_a_narrow_table_keeps_the_throughput_of_the_loop(name, column):
    kind = {"kind": 0, "name": "training Generator 32×16 + Discriminator 32×784", "batch_size": 32}
    one = looped([{"dur_ns": 2e6, "samples": 32}] * 40, kinds=[kind])
    shown = Console(width=80, record=True, file=io.StringIO())
    shown.print(text.table(ANALYSES[name](one), name, main=text.MAIN_COLUMNS[name]))
    table, _, left = shown.export_text().partition("columns that do not fit: ")
    assert column not in " ".join(left.split()).split(", ")
    assert "per s" in " ".join(table.split())


def test_shapes_that_begin_alike_keep_their_first_sizes():
    assert shorten_distinctly(["[[1, 128, 256]]", "[[1, 128, 64]]"], 14) == ["[[1, 1…, 256]]", "[[1, 128, 64]]"]


def test_a_part_of_the_run_without_a_recorded_step_is_no_bar_of_waiting_alone():
    """Of such a part waiting for data is known, and forward, backward and the rest are not."""
    (chosen,) = [each for each in charts.CHARTS if each.analysis == "phases-over-time"]
    columns = ["first_step", "step_ms", *chosen.series]
    known = [3.0, *([1.0] * len(chosen.series))]
    waits = [None, *(9.0 if column == "data_ms" else None for column in chosen.series)]
    rows = [(0, *known), (10, *waits), (20, *known)]
    data = charts.chart_data(chosen, AnswerTable(columns, rows))
    assert data["data"]["name"] == ["first step 0", "first step 20"]
    assert all(None not in series["values"] for series in data["series"])
    assert "missing" in charts.chart_data(chosen, AnswerTable(columns, rows[:2]))
