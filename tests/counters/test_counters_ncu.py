"""A program under Nsight Compute: what is asked of ncu, why it may fail, and that the run is whole all the same.

`ncu` is a fake on the PATH, a script that says and writes what ncu 2025.3 does; the real one needs a GPU (at the end).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ncureports import FULL_REPORT, raw, run_of_kernels

import xsp
from xsp import doctor, models, rundir
from xsp.cli import main
from xsp.counters import joining, ncu, reading, storing
from xsp.device import metrics
from xsp.errors import CounterError
from xsp.ingest import load
from xsp.launch import models as measure
from xsp.launch.program import LaunchedProgram
from xsp.launch.rerun import count
from xsp.launch.run import Launch
from xsp.levels import parse_levels
from xsp.record.schedule import DescribeOnce
from xsp.record.settings import Settings
from xsp.testing import process_state

torch = pytest.importorskip("torch")

FAKE = """#!{python}
import pathlib, sys
given, folder = sys.argv[1:], pathlib.Path({folder!r})
with open(folder / "asked", "a") as asked:
    print(" ".join(given), file=asked)
if "--query-metrics" in given:
    print({known!r})
elif "--import" in given:
    print((folder / "table").read_text())
else:
    option = lambda name: pathlib.Path(given[given.index(name) + 1])
    said = (folder / "said").read_text()
    option("--log-file").write_text(said)
    if {unknown!r} in option("--metrics").name:
        option("--log-file").write_text("==ERROR== Failed to find metric regex:^" + {unknown!r} + "(\\\\.sum)?$")
    elif "ERROR" not in said:
        option("--export").with_suffix(".ncu-rep").write_bytes(b"a report")
    sys.exit(int("ERROR" in said))
"""
KNOWN = "\n".join(f"{name.partition('.')[0]:60} Counter  byte  # of bytes" for name in metrics.requested())


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return what puts a fake ncu on the PATH that says something, and knows these metrics."""

    def put(
        message: str = "==PROF== Connected\n", known: str = KNOWN, unknown: str = "none", table: str = FULL_REPORT
    ) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "ncu"
        program.write_text(FAKE.format(python=sys.executable, folder=str(folder), known=known, unknown=unknown))
        program.chmod(0o755)
        (folder / "said").write_text(message)
        (folder / "table").write_text(table)
        monkeypatch.setenv("PATH", str(folder))
        return folder / "asked"

    return put


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of_kernels(tmp_path / "run")


def test_the_program_runs_under_ncu_and_the_report_becomes_a_table(
    fake_ncu: Callable[..., Path], tmp_path: Path
) -> None:
    requested = fake_ncu()
    report = ncu.collect(["python", "train.py"], tmp_path)
    assert [row.name for row in reading.read(report)] == ["prepare", "void gemm<(int)4>(T1)", "void gemm<(int)4>(T1)"]
    query, collect, table = requested.read_text().splitlines()
    assert query == "--query-metrics"
    assert collect.endswith("--cache-control all --clock-control none python train.py")
    assert "--nvtx --profile-from-start off" in collect
    assert table.endswith("--csv --page raw --print-units base")


def test_only_metrics_that_the_device_has_are_asked_for(fake_ncu: Callable[..., Path], tmp_path: Path) -> None:
    requested = fake_ncu(known="Device H200 (GH100)\ndram__bytes_read   Counter\ndram__bytes_write  Counter")
    ncu.collect(["python"], tmp_path)
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum --nvtx" in requested.read_text()


def test_a_metric_that_ncu_does_not_know_is_left_out(fake_ncu: Callable[..., Path], tmp_path: Path) -> None:
    requested = fake_ncu(known="", unknown="dram__bytes_op_read")
    ncu.collect(["python"], tmp_path)
    _, first, second, _ = requested.read_text().splitlines()
    assert ("dram__bytes_op_read" in first, "dram__bytes_op_read" in second, "dram__bytes_read" in second) == (1, 0, 1)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "==PROF== Connected to process 7 (/home/ann/python)\n==ERROR== ERR_NVGPUCTRPERM - The user does not have "
            "permission to access NVIDIA GPU Performance Counters on the target device 0.\n",
            "may not read the device's performance counters (ERR_NVGPUCTRPERM): run as root",
        ),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool (like "
            "DCGM) is concurrently collecting profiling data.\n",
            "another program holds the device's counters",
        ),
        ("==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock\nInterprocessLockFailed", "set TMPDIR"),
        ("==ERROR== Unknown Error on device 0, see /home/ann/log.\n", "ncu failed: Unknown Error on device 0, see …"),
        ("==WARNING== No kernels were profiled.\n", "ncu saw no kernel in the step"),
    ],
)
def test_a_failure_is_one_clear_reason(fake_ncu: Callable[..., Path], tmp_path: Path, said: str, reason: str) -> None:
    fake_ncu(said)
    with pytest.raises(CounterError) as caught:
        ncu.collect(["python"], tmp_path)
    assert reason in str(caught.value)
    assert "ann" not in str(caught.value)


def test_without_ncu_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "_FOLDERS", ())
    with pytest.raises(CounterError, match="install NVIDIA Nsight Compute"):
        ncu.find()
    assert "install NVIDIA Nsight Compute" in (doctor.counters().reason or "")


def test_doctor_says_that_ncu_is_there(fake_ncu: Callable[..., Path]) -> None:
    fake_ncu()
    assert doctor.counters().reason is None


# --- the rung -----------------------------------------------------------------------------------------


def test_counters_of_a_second_run_join_the_first(fake_ncu: Callable[..., Path], run: Path) -> None:
    requested = fake_ncu()
    assert count(Launch(LaunchedProgram("train.py", ("--epochs", "1")), Settings(out=run)), run)["with_counters"] == 3
    assert load.load(run).run["counters"]["rows_joined"] == 3
    again = requested.read_text().splitlines()[1]
    assert all(option in again for option in ("--counting", "--no-samples", "--kernels kineto"))
    assert again.endswith("train.py --epochs 1")


def test_a_model_is_built_again_as_it_was(fake_ncu: Callable[..., Path], run: Path) -> None:
    requested = fake_ncu()
    settings = models.Settings(batch=4, train=True, seed=3, shape=(3, 32, 32), sequence=16, device="cuda")
    assert (
        measure.count("timm:vit", settings, measure.ModelRecording(Settings(out=run, warmup=2, seed=3)), run)[
            "with_counters"
        ]
        == 3
    )
    again = requested.read_text().splitlines()[1].partition("xsp.cli ")[2]
    assert re.sub(r" --out \S+", "", again) == (
        "profile timm:vit --quiet --levels M/L/G --seed 3 --kernels kineto --otlp-policy wait --warmup 2 --no-samples "
        "--counting --batch 4 --sequence 16 --device cuda --train --input 3x32x32"
    )


def test_without_counters_the_run_is_as_it_was_and_says_why(fake_ncu: Callable[..., Path], run: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*.parquet")}
    fake_ncu(table=raw({"name": "other", metrics.READ_BYTES[0]: "1"}))
    with pytest.raises(CounterError, match=r"^report\.csv: none of its 1 kernels"):
        count(Launch(LaunchedProgram("train.py"), Settings(out=run)), run)
    assert {file: file.read_bytes() for file in run.rglob("*.parquet")} == before
    assert rundir.read_run(run)["absent"]["counters"].startswith("report.csv: none of its 1 kernels")


@pytest.mark.slow
def test_a_script_whose_kernels_cannot_be_counted_is_profiled_all_the_same(
    fake_ncu: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n")
    script = tmp_path / "infer.py"
    script.write_text("import torch\nnet = torch.nn.Linear(2, 2)\nfor _ in range(20):\n    net(torch.ones(1, 2))\n")
    options = ["run", "-q", "--no-samples", "--counters", "--out", str(tmp_path / "run"), str(script)]
    assert subprocess.run([sys.executable, "-m", "xsp.cli", *options], check=False).returncode == 0
    result = rundir.read_run(tmp_path / "run")
    assert result["finished"]
    assert result["steps"]["stored"] > 0
    assert "ERR_NVGPUCTRPERM" in result["absent"]["counters"]


def test_counters_of_several_batches_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["profile", "torchvision:resnet18", "--counters", "--batch", "1,2", "--out", str(tmp_path / "run")]
    assert main(options) == 2
    assert "a single batch size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--levels", "M/L"], ["--once-each"], ["--otlp", "http://localhost:1"]], ids=lambda entry: entry[0]
)
def test_counters_without_kernels_of_one_run_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--counters", *options, "--out", str(tmp_path / "run"), "train.py"]) == 2
    assert "--counters" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_step_describes_and_the_others_are_bare() -> None:
    schedule = DescribeOnce(parse_levels("M/L/G"), warmup=2)
    assert [schedule.next().is_kept for _ in range(8)] == [False, False, False, True, False, False, False, False]


# --- the marks ----------------------------------------------------------------------------------------


def marked(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> list[str]:
    """Return what a step pushes and pops; a fake stands for NVTX and for the device."""
    from xsp_collectors.cuda.profilerrange import ProfilerRange

    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("profile"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    before, collector = process_state(), ProfilerRange()
    collector.open()
    for describe in (False, True):
        collector.start(parse_levels("M/L/G")[-1], describe)
        work()
        collector.settle()
        collector.stop()
    work()
    collector.close()
    assert process_state() == before
    return seen


def test_calls_of_modules_are_ranges_named_as_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    relu = torch.nn.ReLU()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), relu, relu)
    layers = [joining.layer_range(*entry) for entry in ((0, "Sequential"), (0, "0"), (0, "1"), (1, "1"))]
    ends = [layers[0], layers[1], "end", layers[2], "end", layers[3], "end", "end"]
    assert marked(monkeypatch, lambda: net(torch.ones(1, 2))) == ["profile", *ends, "stop"]


def test_ranges_are_those_of_the_layers_of_a_timed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    net = torch.nn.Sequential(inner, torch.nn.Sequential(inner, torch.nn.Identity()))

    def work() -> None:
        torch.nn.functional.mse_loss(net(torch.ones(1, 2)), torch.ones(1, 2))
        inner(torch.ones(1, 2))

    how = {"levels": "M/L", "collectors": ["modules"], "samples": False, "settle": 0}
    with xsp.profile("net", out=tmp_path / "run", **how) as profile:
        for _ in range(12):
            with profile.step():
                work()
    ranges = [name for name in marked(monkeypatch, work) if name.startswith(joining.LAYER)]
    assert sorted(storing.layers_of(xsp.load(tmp_path / "run")).values()) == sorted(ranges)
    assert joining.layer_range(2, "0.0") in ranges


def test_a_call_that_raises_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with pytest.raises(RuntimeError):
            torch.nn.Linear(2, 2)(torch.ones(3))

    assert marked(monkeypatch, work) == ["profile", joining.layer_range(0, "Linear"), "end", "stop"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("ncu") is None, reason="needs a CUDA device and ncu")
def test_real_counters_join_a_real_run(tmp_path: Path) -> None:
    """A product of 1024×1024×1024 in bfloat16 does 2·1024³ operations on tensor cores."""
    script = tmp_path / "product.py"
    script.write_text(
        "import torch\nnet = torch.nn.Linear(1024, 1024, bias=False).cuda().bfloat16()\n"
        "x = torch.ones(1024, 1024, device='cuda').bfloat16()\nwith torch.no_grad():\n    for _ in range(40): net(x)\n"
    )
    options = ["run", "-q", "--counters", "--out", str(tmp_path / "run"), str(script)]
    assert subprocess.run([sys.executable, "-m", "xsp.cli", *options], check=False).returncode == 0
    trace = load.load(tmp_path / "run")
    assert trace.run["absent"].get("counters") is None
    assert trace.run["counters"]["device_time_percent"] > 99
    products = trace.sql(
        "SELECT flops, flops_source, dram_read_bytes, occupancy FROM merged WHERE flops > 1e9"
    ).fetchall()
    ((flops, _, read, occupancy),) = [row for row in products if row[1] == "counter"]
    assert flops == pytest.approx(2 * 1024**3, rel=0.01)
    assert read > 1024 * 1024
    assert 0 < occupancy <= 1
