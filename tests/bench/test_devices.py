"""Timings on an accelerator, through the worker process, on the stand-in whose times are stated."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from depth import deep

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from madetimings import make_timing  # noqa: E402

import xsp  # noqa: E402
from xsp import bench, cli  # noqa: E402
from xsp.bench import plan, steps, text, turns  # noqa: E402
from xsp.bench.environment import current_environment  # noqa: E402
from xsp.bench.spec import AS_RUN, CacheState, Loss, Status  # noqa: E402
from xsp.bench.timings import Timings  # noqa: E402
from xsp.device import devices  # noqa: E402
from xsp.errors import BenchError, DeviceError  # noqa: E402
from xsp.sections import Table  # noqa: E402

MODEL = """
import torch

def net(batch):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Softmax(1)
    ), torch.ones(8 * batch, 64)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(MODEL)
    return f"{tmp_path / 'nets.py'}:net"


def filled(model: str, folder: Path, limits: turns.TurnLimits | None = None) -> dict[str, bench.Timing]:
    """Time a model's calls on the stand-in, and return the timings by operator."""
    device = devices.of("standin:0")
    timings = Timings.open(folder, current_environment(device))
    graph = xsp.graph.of(model)
    pairs = bench.specs(graph, environment=timings.environment)
    bench.fill(pairs, timings, 40, device=device, limits=limits)
    kept = Timings.open(folder, current_environment(device))
    return {timing.op.removeprefix("aten::"): timing for timing in kept}


def test_a_model_is_timed_on_a_device_with_its_whole_step(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch, disturbance="its clocks were lowered")
    folder = tmp_path / "timings"
    command = ["bench", model, "--device", "standin:0", "--timings", str(folder), "--budget", "40s"]
    assert cli.main([*command, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["overheads"], found["processor_note"]) == (standin.PRODUCT, [], "")
    timings = {timing["op"]: timing for timing in found["timings"]}
    assert {timing["status"] for timing in timings.values()} == {"ok"}
    linear = timings["aten::linear"]
    launch = standin.LAUNCH_NS + 8 * 64 * 4 / standin.BYTES_PER_NS
    assert linear["device_ns"] == linear["trimmed_ns"] == pytest.approx(launch, abs=1)
    assert linear["cold_ns"] == pytest.approx(2 * launch, abs=1)
    assert linear["host_ns"] == pytest.approx(standin.ISSUE_NS, abs=1)
    assert (linear["workspace_bytes"], linear["kernels"]) == (512, ["standin_linear"])
    assert "its clocks were lowered" in linear["reason"]
    assert (linear["threads"], linear["count"]) == (1, 2)
    waited, replayed = timings[steps.WAITED], timings[steps.REPLAYED]
    assert waited["trimmed_ns"] > waited["host_ns"] >= 5 * standin.ISSUE_NS
    calls = 5 * standin.LAUNCH_NS
    assert calls <= replayed["trimmed_ns"] < calls * 1.2

    assert cli.main(["bench", model, "--device", "standin", "--timings", str(folder)]) == 0
    page = capsys.readouterr().out
    assert "7 taken now" not in page
    assert f"{standin.PRODUCT}, torch {torch.__version__}" in page
    assert re.search(r"cold\s+issue", page)
    assert "its clocks were lowered while 6 of 6 were taken; repeat with --again" in page
    assert cli.main(["bound", model, "--device", "standin", "--timings", str(folder)]) == 0
    assert "timings: its clocks were lowered while 4 of 4 were taken" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["bench", "--list", "--timings", str(folder)]) == 0
    assert standin.PRODUCT in capsys.readouterr().out
    assert not Timings.open(folder), "timings of a device are not those of the processor"


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        deep("memory", Status.TOO_LARGE, "stand-in out of memory"),
        deep("lost", Status.FAILED, "RuntimeError: stand-in error: an illegal address was used"),
        deep("hang", Status.TIMED_OUT, "one batch of calls takes more than 3 s"),
    ],
)
def test_a_block_with_a_fault_is_marked_and_the_others_are_timed(
    fault: str, status: Status, reason: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::sigmoid": fault})
    found = filled(model, tmp_path / "timings", turns.TurnLimits(seconds=3.0))
    assert {op: timing.status for op, timing in found.items()} == {
        "linear": Status.OK, "relu": Status.OK, "sigmoid": status, "softmax": Status.OK,
    }  # fmt: skip
    assert found["sigmoid"].reason.startswith(reason)


@pytest.mark.parametrize("fault", [deep("memory"), deep("lost"), deep("hang")])
def test_a_step_whose_energy_cannot_be_measured_has_its_time(
    fault: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, watts=500, faults={"energy": fault})
    device = devices.of("standin:0")
    timings = Timings.open(tmp_path / "timings", current_environment(device))
    specs = steps.specs(xsp.graph.of(model), model)
    bench.fill(specs, timings, 40, device=device, limits=turns.TurnLimits(seconds=3.0))
    timed = [timing for spec in specs if (timing := timings.get(spec.key)) is not None]
    assert [(timing.status, timing.joules) for timing in timed] == [(Status.OK, None)] * 2
    for timing in timed:
        assert fault == "hang" or timing.reason.startswith("only its time is known ("), timing.reason
        assert fault == "hang" or "stand-in" in timing.reason


@pytest.mark.slow
def test_a_device_that_is_gone_ends_the_timing_and_what_was_timed_is_kept(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::sigmoid": "gone"}, gone=str(gone))
    monkeypatch.setattr(plan, "SITTING_SIZE", 1)
    device = devices.of("standin")
    timings = Timings.open(tmp_path / "timings", current_environment(device))
    specs = [spec for spec, _ in bench.specs(xsp.graph.of(model), environment=timings.environment)]
    bench.fill(specs, timings, 40, device=device, in_order=True)
    assert {timing.op: timing.status for timing in timings} == {
        "aten::linear": Status.OK, "aten::relu": Status.OK, "aten::sigmoid": Status.FAILED,
    }  # fmt: skip
    lost = (
        "standin:0 was lost: standin:0 does not answer; all timings until then are kept; "
        "not timed: 1 block (softmax), run it again"
    )
    assert (timings.untimed, timings.problems) == ([lost], [])
    assert text.problems(timings) == (Table(("not timed",), ((lost,),)),)
    assert text.fill_as_json("net", [], timings, [], 1.0)["problems"] == [lost]
    assert timings.loss == Loss("standin:0", "standin:0 does not answer")
    with pytest.raises(DeviceError, match="standin:0 does not answer"):
        bench.fill(specs, timings, 40, device=device)
    gone.unlink()
    monkeypatch.setenv(standin.VARIABLE, "{}")
    bench.fill(specs, timings, 40, device=device)
    assert [timing.status for timing in timings if timing.op == "aten::softmax"] == [Status.OK]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        deep(
            "memory", "standin:0 cannot be used: it has too little memory free (stand-in out of memory.*; end what else"
        ),
        deep("lost", "standin:0 cannot be used: stand-in error: an illegal address was used; `xsp doctor` says"),
    ],
)
def test_a_device_that_fails_beside_the_blocks_is_named_and_no_block_is_blamed(
    fault: str, says: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::mm": fault})  # of the fixed work only
    device = devices.of("standin")
    timings = Timings.open(tmp_path / "timings", current_environment(device))
    specs = [spec for spec, _ in bench.specs(xsp.graph.of(model), environment=timings.environment)]
    with pytest.raises(DeviceError, match=says.replace("(", r"\(")):
        bench.fill(specs, timings, 40, device=device)
    assert not len(timings)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) != 0
    error = capsys.readouterr().err
    assert error.count("xsp: error: ") == 1
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("values", "words", "message"),
    [
        ({}, ["--device", "standin:4"], "there is no device standin:4 here; here are cpu, standin:0"),
        ({}, ["--device", "H200"], "there is no device 'H200'; here are cpu, standin:0"),
        ({"obstacle": "standin:0 is busy, 97 % by other processes"}, ["--device", "standin"], "is busy, 97 %"),
        ({}, ["--device", "standin", "--threads", "2"], "--threads and --runtime are of the processor"),
        deep({"free_bytes": 1000}, ["--device", "standin"], ""),
    ],
)
def test_a_device_that_cannot_be_used_is_one_error(
    values: dict[str, Any], words: list[str], message: str, model: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    standin.install(tmp_path / "site", monkeypatch, **values)
    command = ["bench", model, "--timings", str(tmp_path / "timings"), *words]
    if message:
        assert message in refused(command, capsys)
        return
    assert cli.main([*command, "--budget", "20s", "--format", "json"]) == 0  # too small is a hole of each block
    found = json.loads(capsys.readouterr().out)
    assert {timing["status"] for timing in found["timings"] if timing["op"].startswith("aten")} == {"too-large"}


def test_weights_that_fit_into_the_cache_of_a_device_are_warm(tmp_path: Path) -> None:
    environment = current_environment(standin.StandIn())
    for width, state in ((64, CacheState.WARM), (1024, CacheState.CHAIN)):
        graph = xsp.graph.of(torch.nn.Linear(width, width), torch.zeros(1, width))
        ((spec, _),) = bench.specs(graph, environment=environment)
        assert (spec.state, spec.threads, spec.variant) == (state, 1, AS_RUN)


def test_variants_are_those_of_the_device() -> None:
    from xsp.bench.variants import PRECISIONS, VARIANTS

    graph = xsp.graph.of(torch.nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 16, 16))
    names = (AS_RUN, *VARIANTS, *PRECISIONS)
    here = {spec.variant for spec, _ in bench.specs(graph, variants=names)}
    there = {
        spec.variant
        for spec, _ in bench.specs(graph, variants=names, environment=current_environment(standin.StandIn()))
    }
    assert here - there == {"onednn-off"}
    assert "autocast-bfloat16" in here & there
    assert there - here == {"cudnn-benchmark", "tf32"}


def test_the_timing_of_a_step_is_found_for_its_graph_whatever_built_it(model: str) -> None:
    graph = xsp.graph.of(model)
    built, found = (steps.specs(graph, *how) for how in ((model, {"batch": 1}), ()))
    assert [spec.key for spec in built] == [spec.key for spec in found]
    other = xsp.graph.of(model, train=True)
    assert not {spec.key for spec in steps.specs(other)} & {spec.key for spec in found}


def test_files_of_timings_from_before_the_later_columns_are_read(tmp_path: Path, model: str) -> None:
    from xsp import table
    from xsp.bench import timings as stored

    environment = current_environment()
    timings = Timings.open(tmp_path / "timings", environment)
    ((spec, _), *_) = bench.specs(xsp.graph.of(model))
    timing = replace(make_timing(spec, 1000.0), environment=environment.hash)
    timings.add([timing])
    (part,) = (tmp_path / "timings").glob("environment=*/part-*.parquet")
    columns = [column for column in stored.COLUMNS if column.name not in stored._LATER]
    (row,) = [dict(zip([column.name for column in stored.COLUMNS], stored._row(timing), strict=True))]
    values = [row[column.name] for column in columns if column.name != "seal"]
    con = table.connect()
    table.create(con, "timings", columns)
    table.insert(con, "timings", [(*values, stored._seal(values))], columns)
    part.unlink()
    table.write_parquet(con, "timings", part)
    con.close()
    (found,) = Timings.open(tmp_path / "timings", environment)
    assert found == timing


@pytest.mark.parametrize(
    ("fault", "how"),
    [deep("hang", "did not end within 10 s"), deep("exit", "ended the process that ran it .exit code 9.")],
)
def test_fixed_work_that_hangs_or_ends_its_process_after_blocks_is_named_and_no_block_is_blamed(
    fault: str, how: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "BESIDE_S", 10.0 if fault == "hang" else 60.0, raising=False)
    monkeypatch.setattr(turns, "MOST_FAULTS_IN_VAIN", 1)
    # once a block is ready; later once it is timed, when what is beside its time is measured, with overwritten caches
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::mm": fault}, after="aten::linear")
    device, limits = devices.of("standin"), turns.TurnLimits(seconds=20.0)
    timings = Timings.open(tmp_path / "timings", current_environment(device))
    (spec,) = (
        spec
        for spec, _ in bench.specs(xsp.graph.of(model), environment=timings.environment)
        if spec.block.op == "aten::linear"
    )
    says = f"a matrix product beside the blocks {how}"
    with pytest.raises(DeviceError, match=f"standin:0 cannot be used: {says}; `xsp doctor` says"):
        bench.fill([spec], timings, 120, device=device, limits=limits)
    standin.install(tmp_path / "site", monkeypatch, faults={"aten::mm": fault}, after="aten::add_")
    (timing,) = bench.fill([spec], timings, 120, device=device, limits=limits)
    assert timing.status is Status.OK
    assert re.search(says, timing.reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_name", "says"), [("SIGKILL", "ended unexpectedly .SIGKILL."), ("SIGSTOP", "did not begin to time within")]
)
def test_a_process_that_does_not_begin_its_sitting_is_an_error_with_the_reason(
    signal_name: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec for spec, _ in bench.specs(xsp.graph.of(torch.nn.Linear(4, 4), torch.zeros(1, 4)))]
    with turns.Turns(1) as worker:
        worker.start()
        assert worker._process is not None
        os.kill(worker._process.pid, getattr(signal, signal_name))
        monkeypatch.setattr(turns, "START_S", 0.5)
        with pytest.raises(BenchError, match=says):
            worker.sit(specs, time.monotonic() + 0.1)
