"""The report of a trace of devices: which spans, what it says first, and what it leaves out."""

from __future__ import annotations

from collections import Counter

import pytest
from devicetrace import generated
from test_report import chart, column, payload

from xsp.analyses import ANALYSES
from xsp.analyses.answers import Answers
from xsp.report import firstscreen, html, timeline
from xsp.report.charts import CHARTS
from xsp.report.words import devices_text
from xsp.testing import spans, trace_of


@pytest.fixture(scope="module")
def data() -> dict:
    return payload(html.render(generated(steps=2, layers=3, ops=8)))


def test_all_steps_of_an_imported_trace_are_drawn(data):
    assert data["timeline"]["note"] == "152 spans, as recorded."
    tracks = [track for track, *_ in data["timeline"]["lanes"]]
    assert tracks[-2:] == ["device 0, stream 7", "device 0, stream 20"]
    assert data["timeline"]["range"][0] == 0


def test_device_work_knows_its_launch_its_layer_and_what_it_does(data):
    kinds, names = column(data, "kind"), column(data, "name")
    launches, layers, works = (column(data, each) for each in ("launch", "layer", "work"))
    kernels = [place for place, kind in enumerate(kinds) if kind == "kernel"]
    assert {kinds[launches[place]] for place in kernels} == {"launch"}
    assert {names[layers[place]] for place in kernels} == {"layers.0", "layers.1", "layers.2"}
    assert Counter(works) == {None: 104, "elementwise": 12, "gemm": 12, "reduction": 12, "communication": 12}


@pytest.mark.slow
def test_device_work_whose_process_is_not_recorded_knows_its_launch_if_one_process_launches():
    step = (
        "step s 0-100\nlaunch cudaLaunchKernel 10-12 correlation_id=5\nkernel gemm 20-40 correlation_id=5 process=None"
    )
    for further, known in (("", True), ("\nlaunch cudaLaunchKernel 50-52 correlation_id=6 process=2", False)):
        drawn = payload(html.render(trace_of(spans(step + further))))
        place = column(drawn, "kind").index("kernel")
        launch = column(drawn, "launch")[place]
        assert (launch is not None and column(drawn, "kind")[launch] == "launch") == known


def test_what_matters_stands_first(data):
    assert data["screen"]["sentences"][0].startswith(
        "Host and device take nearly the same time: the host takes 240 µs, the device works "
    )
    assert [what for what, *_ in data["headline"]] == [
        "latency of a step", "90th percentile", "device busy", "device time with a layer",
    ]  # fmt: skip
    assert data["health"]["attributed"] == [["exact", 48, pytest.approx(0.384)]]
    assert data["health"]["grade"]["letter"] in "ABCDEF"


def test_parts_that_stand_in_rows_are_put_beside_each_other(data):
    causes = chart(data, "Why devices were idle")
    assert causes["data"]["name"] == ["rank 0, device 0"]
    assert all(len(part["values"]) == 1 for part in causes["series"])


def test_a_chart_says_why_it_is_not_there(data):
    assert "memory" in chart(data, "Device memory over")["missing"]


@pytest.mark.parametrize(
    ("held", "used", "said"),
    [
        (["NVIDIA B200"] * 8, [0], "NVIDIA B200 (of 8 in the machine)"),
        (["NVIDIA B200"] * 2, [0, 1], "2 × NVIDIA B200"),
        (["NVIDIA A100", "NVIDIA V100"], [1], "NVIDIA V100 (of 2 in the machine)"),
        ([], [0, 1], "2 GPUs"),
        ([], [3], "1 GPU"),
        (["NVIDIA B200"], [], "NVIDIA B200 (no work of it in the trace)"),
        ([], [], ""),
    ],
)
def test_devices_are_those_that_worked_and_not_all_of_the_machine(held, used, said):
    step = ["step s 0-100", *(f"kernel gemm 10-20 device={device}" for device in used)]
    assert devices_text(trace_of(spans("\n".join(step)), {"machine": {"devices": held}})) == said


@pytest.mark.slow
def test_a_figure_of_several_devices_says_so():
    step = "step s 0-100\nkernel gemm 10-20\nkernel gemm 30-40\nkernel gemm 10-20 device=1\nkernel gemm 60-70 device=1"
    shown = {what: about for what, _, about in payload(html.render(trace_of(spans(step))))["headline"]}
    assert shown["device busy"] == "20.0 µs of an iteration of 100 µs; the busiest of 2 GPUs"


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(generated(steps=2, layers=3, ops=8, ranks=2))


@pytest.mark.parametrize("drawn", CHARTS, ids=lambda each: each.title)
def test_every_chart_draws_columns_that_its_analysis_has(drawn, answers):
    answer = answers[drawn.analysis]
    assert drawn.analysis in ANALYSES
    asked = {*drawn.columns.values(), *drawn.series, *(drawn.pivot or ()), *drawn.names, *drawn.where}
    assert answer.reason or asked <= set(answer.columns)


def test_of_many_steps_those_next_to_the_merged_one_are_drawn(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 40)
    shown = timeline.timeline(generated(steps=9, layers=1, ops=4))
    assert shown["count"] == 28
    assert shown["note"] == "28 spans: 2 of 9 steps, those next to the merged one."


def test_of_a_single_long_step_the_longest_spans_are_drawn(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 5)
    shown = timeline.timeline(generated(steps=1, layers=1, ops=4))
    assert shown["note"] == "5 spans, as recorded. Left out: 9, the shortest."


def test_a_column_of_endless_text_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_TEXT", 100)
    shown = timeline.timeline(generated())
    assert "Left out for their length: " in shown["note"]
    assert "attributes" not in shown["columns"]


def test_ranks_stand_below_each_other():
    shown = timeline.timeline(generated(steps=1, ranks=2))
    heads = [track for track, _, first, last in shown["lanes"] if first == last]
    assert heads == ["rank 0", "rank 1"]


def test_the_first_screen_fits_and_has_all_parts_in_order():
    shown = firstscreen.text(firstscreen.first_screen(generated(steps=2, layers=3, ops=8), "a.json"), 80).splitlines()
    assert max(map(len, shown)) <= 80
    assert len(shown) <= firstscreen.MOST_LINES
    firsts = [line.split()[0] for line in shown if line[:1].isalpha()]
    assert firsts[0] == "generated,"
    assert firsts.index("host") < firsts.index("grade") < firsts.index("next:")


def test_a_trace_without_devices_has_the_host_alone_on_its_first_screen():
    trace = generated(steps=1)
    trace.con.execute("DELETE FROM spans WHERE device IS NOT NULL")
    screen = firstscreen.first_screen(trace)
    assert screen.device == ()
    assert screen.host
