"""Steps that engines for language models annotated: their kinds, with figures of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_traces
from enginetraces import box, served

import xsp
from xsp import account
from xsp.account.check import violations
from xsp.account.kinds import kinds
from xsp.errors import UsageError
from xsp.importers.serving import Annotation, parse
from xsp.ingest import sources
from xsp.report import firstscreen, loop
from xsp.store.trace import Trace

FORMS = {
    "execute_context_1(64)_generation_0(0)": Annotation("prefill", 1, 64, 0),
    "execute_context_0(0)_generation_8(8)": Annotation("decode", 8, 0, 8),
    "execute_context_1(64)_generation_8(8)": Annotation("mixed", 9, 64, 8),
    "execute_context_0(0)_generation_0(0)": Annotation("idle", 0, 0, 0),
    "execute_1024_context_1(sq1024sk1024sqsq1048576sqsk1048576)_generation_0(sq0sk0sqsq0sqsk0)": Annotation(
        "prefill", 1, 1024, 0
    ),
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)": Annotation("decode", 32, 0, 32),
    "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)": Annotation(
        "mixed", 46, 8155, 37
    ),
    "execute_new_1_cached_0": Annotation("prefill", 1, None, 0),
    "execute_new_0_cached_8": Annotation("decode", 8, 0, None),
    "execute_new_1_cached_8": Annotation("mixed", 9),
    "step[EXTEND bs=2 toks=14721]": Annotation("prefill", 2, 14721, 0),
    "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]": Annotation("decode", 64, 0, 128),
    "step[MIXED bs=9 c=1 g=8 c_sq=64 c_sk=64 g_sq=8 g_sk=80]": Annotation("mixed", 9, 64, 8),
    "step[mixed bs=9 ext=64 dec=8]": Annotation("mixed", 9, 64, 8),
    "step[MIXED bs=9]": Annotation("mixed", 9),
    "step[idle]": Annotation("idle", 0, 0, 0),
    "step[TARGET_VERIFY bs=4]": Annotation("target verify", 4),
    "prefill[bs=2 tok=14721 ctx=[7803, 6918]]": Annotation("prefill", 2, 14721, 0),
    "decode[bs=117/128 tok=117 d=117]": Annotation("decode", 117, 0, 117),
    "decode[bs=128 tok=384 p=2 d=126 sqsq=132612 sqsk=1114112 sk=258048 tbo=1]": Annotation("mixed", 128),
    "[Executor] _forward_step 25: 1 ctx reqs, 8 gen reqs": Annotation("mixed", 9),
    "execute_diffusion_1_1024x1024": Annotation("diffusion 1024x1024", 1),
    "step[3]": None,
    "decode_step": None,
    "execute_model": None,
}


@pytest.mark.parametrize("name", FORMS)
def test_an_annotation_states_kind_requests_and_tokens_of_its_step(name: str) -> None:
    assert parse(name) == FORMS[name]


PREFILL, DECODE = "execute_context_1(64)_generation_0(0)", "execute_context_0(0)_generation_8(8)"
SYNCHRONOUS = [(PREFILL, 2000.0, 10.0, 1900.0), *[(DECODE, 500.0, 10.0, 400.0)] * 3] * 2


def of_kinds(trace: Trace) -> list[tuple[Any, ...]]:
    columns = "name, iterations, round(iteration_ms, 3), round(median_ms, 3), round(device_ms, 3), tokens_per_s"
    return xsp.analyses.kinds_of_steps(trace).select(columns).fetchall()


def test_prefill_and_decode_are_kinds_of_steps_with_figures_of_each(tmp_path: Path) -> None:
    trace = xsp.load(served(tmp_path / "t.json", SYNCHRONOUS))
    prefill_ms, decode_ms = (1.99 + 2.0) / 2, 0.5  # an iteration begins at the end of the step before
    assert of_kinds(trace) == [
        ("prefill", 2, round(prefill_ms, 3), round(prefill_ms, 3), 1.9, pytest.approx(64 / prefill_ms * 1e3)),
        ("decode", 6, decode_ms, decode_ms, 0.4, pytest.approx(8 / decode_ms * 1e3)),
    ]
    rows = xsp.analyses.kinds_of_steps(trace).select("kind, requests, prefill_tokens, decode_tokens").fetchall()
    assert rows == [(0, 1.0, 64.0, 0.0), (1, 8.0, 0.0, 8.0)]
    assert trace.sql("SELECT DISTINCT batch_size FROM spans WHERE kind = 'step' ORDER BY 1").fetchall() == [(1,), (8,)]


def test_the_account_of_each_kind_closes_and_both_are_the_whole_time(tmp_path: Path) -> None:
    trace = xsp.load(served(tmp_path / "t.json", SYNCHRONOUS))
    accounted = account.of(trace)
    assert [each.name for each in accounted.iterations] == ["prefill", "decode"]
    assert not list(violations(accounted))
    assert sum(each.count * (each.time.ms or 0) for each in accounted.iterations) == pytest.approx(2 * 3.5 - 0.01)
    assert sum(each.share for each in accounted.iterations) == pytest.approx(1.0)


def test_the_first_screen_states_each_kind_and_describes_the_one_with_most_time(tmp_path: Path) -> None:
    trace = xsp.load(served(tmp_path / "t.json", SYNCHRONOUS))
    screen = firstscreen.first_screen(trace)
    assert "prefill (57 % of the loop)" in screen.heading
    assert "prefill: 2 × " in screen.kinds
    assert "decode: 6 × 500 µs (43 % of the time, device 80 %, 16000 tokens/s)" in screen.kinds
    assert len(firstscreen.text(screen, 100).splitlines()) <= firstscreen.MOST_LINES


@pytest.mark.slow
def test_a_kind_that_is_asked_for_is_what_all_tables_describe(tmp_path: Path) -> None:
    path = served(tmp_path / "t.json", SYNCHRONOUS)
    trace = xsp.load(path, kind="decode")
    assert trace.kind == 1
    assert account.of(trace).main.time.ms == pytest.approx(0.5)  # type: ignore[union-attr]
    assert trace.sql("SELECT name, dur_ns FROM merged WHERE level = 70").fetchall() == [("gemm", 400_000)]
    [run_dir] = sources.import_into(tmp_path / "run", [str(path)])
    stored = xsp.load(run_dir, kind="decode")
    assert stored.kind == 1
    assert of_kinds(stored) == of_kinds(xsp.load(path))
    with pytest.raises(UsageError, match="no kind of step called 'mixed'"):
        xsp.load(path, kind="mixed")


def test_device_work_that_runs_while_the_host_launches_the_next_step_is_of_its_own_kind(tmp_path: Path) -> None:
    """The host is ahead by up to one step: a prefill of 3 ms is launched in 0.1 ms and runs during the next two."""
    steps = [(DECODE, 100.0, 10.0, 950.0), (PREFILL, 900.0, 860.0 + 10, 3000.0)]
    at, end = 0.0, 0.0
    made = []
    for name, host, _, device in steps * 3:
        start = max(at + 30, end)
        made.append((name, host, start - at - 20, device))
        end, at = start + device, at + host
    trace = xsp.load(served(tmp_path / "t.json", made))
    found = {each.name: each for each in kinds(trace, account.of(trace))}
    assert found["prefill"].busy_ms == pytest.approx(3.0)
    assert found["decode"].busy_ms == pytest.approx(0.95)
    assert found["prefill"].time.ms == pytest.approx(3.0, rel=0.02)
    assert found["decode"].time.ms == pytest.approx(0.95, rel=0.05)
    assert not list(violations(account.of(trace)))


def test_of_annotations_inside_each_other_the_outer_one_is_the_step(tmp_path: Path) -> None:
    inner = box("user_annotation", "execute_9_context_1(sq64sk64)_generation_8(sq8sk80)", 10, 400)
    trace = xsp.load(served(tmp_path / "t.json", [("step[MIXED bs=9]", 500.0, 10.0, 400.0)], inner))
    attributes = trace.sql("SELECT name, attributes FROM spans WHERE kind = 'step'").fetchall()
    assert [(name, json.loads(text)) for name, text in attributes] == [
        ("step[MIXED bs=9]", {"step_kind": 2, "prefill_tokens": 64, "decode_tokens": 8})
    ]


def test_steps_that_the_profiler_marks_have_the_kind_of_the_annotation_inside(tmp_path: Path) -> None:
    marks = [box("user_annotation", f"ProfilerStep#{number}", start, 490) for number, start in ((1, 0), (2, 500))]
    steps = [("step[DECODE bs=8]", 500.0, 10.0, 400.0), ("step[EXTEND bs=1 toks=64]", 480.0, 10.0, 400.0)]
    trace = xsp.load(served(tmp_path / "t.json", steps, *marks))
    names = trace.sql("SELECT name FROM spans WHERE kind = 'step' ORDER BY start_ns").fetchall()
    assert names == [("ProfilerStep#1",), ("ProfilerStep#2",)]
    assert {(name, count) for name, count, *_ in of_kinds(trace)} == {("decode", 1), ("prefill", 1)}


@pytest.mark.slow
def test_kinds_of_several_ranks_have_the_same_numbers(tmp_path: Path) -> None:
    served(tmp_path / "rank0.json", [(DECODE, 500.0, 10.0, 400.0)] * 2)
    served(tmp_path / "rank1.json", [(PREFILL, 600.0, 10.0, 500.0), *[(DECODE, 500.0, 10.0, 450.0)] * 2], rank=1)
    trace = xsp.load([tmp_path / "rank0.json", tmp_path / "rank1.json"], kind="decode")
    rows = xsp.analyses.kinds_of_steps(trace).select("rank, name, iterations, round(device_ms, 3)").fetchall()
    assert rows == [(0, "decode", 2, 0.4), (1, "decode", 2, 0.45), (1, "prefill", 1, 0.5)]


def test_a_trace_without_annotations_has_no_kinds(tmp_path: Path) -> None:
    path = served(tmp_path / "t.json", [("my block", 500.0, 10.0, 400.0)])
    assert "no kinds of steps are known" in (xsp.analyses.kinds_of_steps.refusal(xsp.load(path)) or "")
    with pytest.raises(UsageError, match="has no kinds of steps"):
        xsp.load(path, kind="decode")


def test_nvtx_ranges_of_an_engine_are_its_steps(tmp_path: Path) -> None:
    names = ["[Executor] _forward_step 1: 1 ctx reqs, 0 gen reqs", "[Executor] _forward_step 2: 0 ctx reqs, 8 gen reqs"]
    tables: dict[str, Any] = {
        **small_traces.START, **small_traces.GPUS,
        small_traces.NVTX: [small_traces.nvtx(1000 * at, 1000 * at + 900, name) for at, name in enumerate(names, 1)],
        small_traces.RUNTIME: [small_traces.call(1000 * at + 10, 1000 * at + 20, at) for at in (1, 2)],
        small_traces.KERNELS: [small_traces.kernel(1000 * at + 100, 1000 * at + 400, at) for at in (1, 2)],
    }  # fmt: skip
    trace = xsp.load(small_traces.nsys(tmp_path / "t.sqlite", tables))
    rows = xsp.analyses.kinds_of_steps(trace).select("name, iterations, requests").fetchall()
    assert sorted(rows) == [("decode", 1, 8.0), ("prefill", 1, 1.0)]


def test_the_page_of_a_trace_has_each_kind(tmp_path: Path) -> None:
    path = served(tmp_path / "t.json", SYNCHRONOUS)
    traces = loop.load(path)
    assert [trace.kind for trace in traces] == [0, 1]
    data = loop.kinds_data(traces[0], traces)
    assert [(entry["name"], round(entry["percent"])) for entry in data["shown"]] == [("prefill", 57), ("decode", 43)]
    assert data["others"] == []
