"""The first sentence and the first advice on traces and runs of others, and on small traces of the same kinds."""

from __future__ import annotations

import functools
import importlib.util
import tarfile
from pathlib import Path

import pytest
from depth import deep

from xsp import account
from xsp.account import entries as names
from xsp.account.sentences import limit
from xsp.advise import advisor
from xsp.advise.advice import Advice, Needs
from xsp.health import grade, health
from xsp.ingest.load import load
from xsp.ingest.sources import import_atomically
from xsp.report import firstscreen
from xsp.store.trace import Trace
from xsp.testing import spans, trace_of

SHARED = Path(__file__).resolve().parents[3] / "shared"
RUNS, REPORTS, TRACES = SHARED / "gpu" / "runs", SHARED / "reports" / "traces", SHARED / "traces"


def needs(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path.name} does not lie in ../shared")
    return path


@functools.cache
def best_advice(trace: Trace) -> Advice:
    return next(
        piece for piece in advisor.of(trace, max_needs=Needs.TRACE).advice if piece.gain_known and not piece.option
    )


def screen_of(trace: Trace) -> str:
    shown = firstscreen.text(firstscreen.first_screen(trace, "a"), 80)
    assert len(shown.splitlines()) <= firstscreen.MOST_LINES
    return shown


def test_a_device_that_is_idle_while_the_host_prepares_is_not_busy() -> None:
    trace = load(needs(REPORTS / "h100_timesformer.json.gz"))
    assert limit(account.of(trace)) == (
        "The host limits: the device works 158 of 383 ms (41 %) and is idle the first 218 ms of a step, the host in "
        "video_classification.py(129): preprocess."
    )
    assert "preprocess" in best_advice(trace).what
    screen_of(trace)


def test_each_iteration_has_the_work_that_it_launched() -> None:
    trace = load(needs(TRACES / "kineto_amd" / "tracelens_mi300x_resnet_ddp_rank0of8.json.gz"))
    main = account.of(trace).main
    assert main is not None
    assert main.device is not None
    assert 18.6 <= main.device.ms(names.BUSY) <= 19.0
    assert 18.6 <= (main.time.ms or 0.0) <= 19.8
    assert main.limit is not None
    assert main.limit.side == "device"


@pytest.mark.slow
def test_the_rank_that_others_wait_for_is_named_first(tmp_path: Path) -> None:
    with tarfile.open(needs(REPORTS / "param_dlrm_kineto.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    import_atomically(tmp_path / "job", sorted(map(str, tmp_path.rglob("*.json"))))
    trace = load(tmp_path / "job")
    assert trace.name == "job"
    assert limit(account.of(trace)) == (
        "Rank 7 is late by 7.62 ms at the first all_to_all: 35.6 of 46.9 ms (76 %) of exposed communication on 8 ranks "
        "wait for it."
    )
    assert best_advice(trace).what.startswith("rank 7 is late by 7.62 ms")
    screen_of(trace)


@pytest.mark.parametrize(
    ("name", "sentence", "worst"),
    [
        ("lost", "What limits is unknown: 20 of 48 launches have no device work in the trace", "D"),
        ("no_kernels", "What limits is unknown: 32 of 36 launches have no device work in the trace", "D"),
        ("no_launches", "The device limits: the device works 800 of 882 µs (91 %)", "C"),
        ("overlap", "What limits is unknown: one kernel lasts beyond 10 later kernels of the same stream", "D"),
    ],
)
def test_impossible_and_missing_records_are_not_believed(name: str, sentence: str, worst: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("made_traces", needs(REPORTS / "made_traces.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(tmp_path)
    trace = load(tmp_path / f"{name}.json")
    assert limit(account.of(trace)).startswith(sentence)
    assert grade(health(trace)).letter == worst
    assert not any("launched before" in finding.text for finding in health(trace))
    screen_of(trace)


@pytest.mark.parametrize(
    ("name", "sentence", "advice"),
    [
        ("f01_sync_item", "The host limits: the device works 1.50 of 9.2", "48 single values are read"),
        deep("f02_pageable", "The host limits: the device works 19.1 of ", "29.7 ms of an iteration of "),
        deep("f03_fp32_matmul", "The device limits", "gemm, 97 % of GPU time"),
        deep("f04_layout", "The device limits", "345 changes of layout"),
        ("f05_attention", "The device limits: the device works 67.2 of 67.",
         "eager attention"),
        deep("f06_optimizer", "The host limits", "Adam updates 240 parameters one by one"),
        ("f08_pointwise", "The device limits", "chains of elementwise kernels"),
        deep("u03_nccl", "The device limits: the device works 4.18 of ", "gemm, 86 % of GPU time"),
    ],
)  # fmt: skip
def test_a_program_on_a_gpu_with_one_flaw_gets_that_advice_first(
    name: str, sentence: str, advice: str, tmp_path: Path
) -> None:
    with tarfile.open(needs(RUNS / f"{name}.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    trace = load(tmp_path / name)
    accounted = account.of(trace)
    assert accounted.violations == ()
    assert firstscreen.first_screen(trace).sentence.startswith(sentence)
    assert best_advice(trace).what.startswith(advice)
    for piece in advisor.of(trace, max_needs=Needs.TRACE).advice:
        assert accounted.main is not None
        assert piece.gain.value <= accounted.main.bound_ms(piece.side, 1e9) + 1e-6, piece.what
    screen_of(trace)


# --- small traces of the same kinds -------------------------------------------------------------------------------


def ranked(late_us: int) -> Trace:
    """Return two ranks with three collectives each; rank 1 arrives late at the first one."""
    rows = []
    for rank in (0, 1):
        arrival = 100 + late_us * rank
        end = 100 + late_us + 50
        text = f"step s 0-{end + 300}\nlaunch cudaLaunchKernel 10-15 correlation_id=1\nkernel sgemm 20-60 "
        text += f"correlation_id=1\nlaunch cudaLaunchKernel {arrival - 20}-{arrival - 15} correlation_id=2\n"
        text += f"kernel ncclDevKernel_AllReduce_Sum_f32 {arrival}-{end} correlation_id=2\n"
        for place in (1, 2):
            begin = end + 20 + 100 * place
            text += f"launch cudaLaunchKernel {begin - 10}-{begin - 5} correlation_id={2 + place}\n"
            text += f"kernel ncclDevKernel_AllReduce_Sum_f32 {begin}-{begin + 50} correlation_id={2 + place}\n"
        rows += spans(text, rank=rank, process=rank + 1)
    return trace_of(rows, {"imported": {"sources": []}})


def test_a_small_job_with_a_late_rank() -> None:
    assert limit(account.of(ranked(900))).startswith("Rank 1 is late by 900 µs at the first all_reduce: ")
    assert account.of(ranked(0)).late_rank is None


def test_a_call_of_python_is_the_place_of_time_without_operators() -> None:
    text = """
        step s                  0-1000
        launch cudaLaunchKernel 800-805 correlation_id=1
        kernel sgemm            810-1000 correlation_id=1
    """
    frames = [
        {"name": "main.py(3): main", "thread": 1, "start_ns": 0, "dur_ns": 1_000_000},
        {"name": "load.py(9): decode", "thread": 1, "start_ns": 10_000, "dur_ns": 780_000},
    ]
    trace = trace_of(spans(text), {"imported": {"sources": []}, "frames": frames})
    assert limit(account.of(trace)).endswith("is idle the first 810 µs of a step, the host in load.py(9): decode.")
