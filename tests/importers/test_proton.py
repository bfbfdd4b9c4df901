"""Profiles of Proton, Triton's profiler: sums by place, and timelines."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from fuzzing import MUTATIONS, examples, is_read, mutated
from hypothesis import given
from hypothesis import strategies as st

import xsp
from xsp import advise
from xsp.analyses import ANALYSES
from xsp.errors import AnalysisError, TraceError
from xsp.importers.contract import find_importer
from xsp.importers.proton import Proton
from xsp.report.firstscreen import first_screen


def node(name: str, *children: Any, **metrics: Any) -> dict[str, Any]:
    return {"children": list(children), "frame": {"name": name, "type": "function"},
            "metrics": {key.replace("time_ns", "time (ns)"): value for key, value in metrics.items()}}  # fmt: skip


def kernel(name: str, time_ns: int, count: int, device: str = "0", **metrics: Any) -> dict[str, Any]:
    return node(name, count=count, device_id=device, device_type="CUDA", time_ns=time_ns, **metrics)


DEVICES = {"CUDA": {"0": {"arch": "90", "bus_width": 6144, "clock_rate": 1980000, "num_sms": 132}}}
TREE = [
    node(
        "ROOT",
        node("layer", node("matmul [M=64]", kernel("matmul_kernel", 205, 10), flops16=1e9, bytes=1e8)),
        kernel("fill", 100, 1, flops32=50.0),
        count=0,
        time_ns=0,
    ),
    DEVICES,
]
LINES = [
    {"displayTimeUnit": "us", "traceEvents": [
        {"args": {"call_stack": ["ROOT", "layer", "mm"]}, "cat": "kernel", "dur": 2.5, "name": "mm", "ph": "X",
         "tid": stream, "ts": 1.0 * stream}]}
    for stream in (7, 9)
]  # fmt: skip


def write(path: Path, *documents: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(tmp_path / "a.hatchet", TREE)


def test_a_tree_has_its_sums_counts_and_places(tree: Path) -> None:
    trace = xsp.load(tree)
    rows = trace.sql(
        "SELECT s.name, s.kind, s.device, count(*), sum(s.dur_ns)::BIGINT, any_value(s.flops), any_value(p.name) "
        "FROM spans s LEFT JOIN spans p ON p.span_id = s.parent_id WHERE s.kind <> 'step' GROUP BY ALL ORDER BY 1"
    ).fetchall()
    assert rows == [
        ("fill", "kernel", 0, 1, 100, 50, None), ("layer", "user", None, 1, 205, None, "window"),
        ("matmul [M=64]", "op", None, 1, 205, 10**9, "layer"),
        ("matmul_kernel", "kernel", 0, 10, 205, None, "matmul [M=64]"),
    ]  # fmt: skip
    device = trace.run.machine.device_properties[0]
    assert (device.name, device.sms, device.compute) == ("CUDA 90", 132, "9.0")
    assert "matmul [M=64]" in {row[0] for row in ANALYSES["ops"](trace).fetchall()}


def test_without_a_timeline_nothing_is_said_of_moments(tree: Path) -> None:
    trace = xsp.load(tree)
    assert trace.run.timeline is False
    screen = first_screen(trace)
    assert "without a timeline" in screen.heading
    assert "sums by place and no moments" in screen.sentence
    assert (screen.host, screen.device) == ((), ())
    assert not advise.of(trace, max_needs=advise.Needs.TRACE).advice
    with pytest.raises(AnalysisError, match="sums by place without a timeline"):
        ANALYSES["idle-causes"](trace)
    for analysis in ANALYSES.values():
        with contextlib.suppress(AnalysisError):
            analysis(trace).fetchall()


def test_a_timeline_is_a_document_for_each_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.chrome_trace", *LINES)
    assert find_importer(str(path)).name == "proton"
    trace = xsp.load(path)
    assert trace.run.timeline is None
    rows = trace.sql("SELECT name, stream, start_ns, dur_ns, attributes FROM spans WHERE level = 70 ORDER BY stream")
    assert rows.fetchall() == [("mm", 7, 7000, 2500, '{"sources": ["layer"]}'),
                               ("mm", 9, 9000, 2500, '{"sources": ["layer"]}')]  # fmt: skip


def test_too_many_calls_are_one_span_a_place(tmp_path: Path) -> None:
    trace = xsp.load(write(tmp_path / "a.hatchet", [node("ROOT", kernel("k", 10**9, 10**7)), DEVICES]))
    rows = trace.sql("SELECT dur_ns, attributes FROM spans WHERE level = 70").fetchall()
    assert rows == [(10**9, '{"count": 10000000}')]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[]", "without any kernel"),
        (json.dumps(TREE)[:200], "damaged, cut off"),
        ("\x00\x01", "binary form"),
        (json.dumps([node("ROOT", {"frame": 3}), DEVICES]), "damaged"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_a_damaged_file_is_one_error(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "a.hatchet"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TraceError, match=rf"a\.hatchet: a profile of Proton .*{reason}"):
        xsp.load(path)


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 2**63, 1e308, float("nan"), "", "x", [], {}, [[]], {"a": 1}]
)


@pytest.mark.parametrize("content", [json.dumps(TREE), "\n".join(map(json.dumps, LINES))], ids=["tree", "timeline"])
@examples(20)
@given(mutations=MUTATIONS)
def test_no_bytes_lead_to_another_error(
    tmp_path: Path, content: str, mutations: list[tuple[float, str, bytes]]
) -> None:
    path = tmp_path / "fuzzed.hatchet"
    path.write_bytes(mutated(content.encode(), mutations))
    is_read(path, Proton())


@examples(20)
@given(time=ODD, count=ODD, device=ODD, name=ODD, children=ODD)
def test_no_value_leads_to_another_error(
    tmp_path: Path, time: Any, count: Any, device: Any, name: Any, children: Any
) -> None:
    metrics = {"count": count, "time (ns)": time, "device_id": device, "flops8": time, "bytes": count}
    odd = {"frame": {"name": name}, "children": children, "metrics": metrics}
    content = [node("ROOT", odd, kernel("k", 5, 1)), {"CUDA": {"0": children}}]
    is_read(write(tmp_path / "fuzzed.hatchet", content), Proton())
