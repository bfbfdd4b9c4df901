"""What is sampled beside the trace: sources, the thread that reads them, the files, and what is asked of them.

There is no GPU here: `fakenvml` stands in for pynvml. The files of /proc are real where the test says so.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakenvml import GIB, KEYS, FakeNvml, h200

import xsp
from xsp import rundir, table
from xsp.analyses.answers import Answers
from xsp.exporters import chrome
from xsp.exporters.contract import Choice
from xsp.health import samples as samplehealth
from xsp.report.charts import charts
from xsp.samples import nvml, sampler
from xsp.samples.host import Host
from xsp.samples.nvml import MAX_FAILURES, Nvml
from xsp.samples.sampler import Sample, Sampler
from xsp.samples.source import Reading, Source
from xsp.schema import SAMPLE_COLUMNS
from xsp.store.write import StepWriter
from xsp.testing import spans, trace_of

# --- the process and the machine --------------------------------------------------------------------------


def test_this_process_and_this_machine_are_read() -> None:
    host = Host(os.getpid())
    assert host.open() is None
    first = {entry.name: entry for entry in host.read(include_slow=True)}
    assert 1 << 20 < first["process.memory.rss"].value < 1 << 40
    assert "process.cpu.use" not in first, "a rate needs two readings"
    end = time.process_time() + 0.1  # of this process: on a busy machine it may get little of a tenth of a second
    while time.process_time() < end:
        pass
    second = {entry.name: entry.value for entry in host.read(include_slow=False)}
    assert 0 < second["process.cpu.use"] < 10 * (os.cpu_count() or 1)
    assert second["host.cpu.use"] > 0


def proc(root: Path, ticks: int = 0) -> Path:
    """Write what a kernel says of process 7, whose name tries to mislead, on a machine with two cores."""
    files = {
        "proc/7/statm": "1000 500 100 1 0 300 0",
        "proc/7/stat": f"7 (a) 9 (b) S 1 7 7 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0 20 0 1 0 0 0 0",
        "proc/stat": f"cpu  {ticks} 0 {ticks} 900 50 {ticks} {ticks} 77 0 0\ncpu0 1 1 1 1",
        "proc/meminfo": "MemTotal: 10 kB\nMemAvailable:    2048 kB\n",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "2400000\n",
        "sys/devices/system/cpu/cpufreq/policy1/scaling_cur_freq": "3000000\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_the_kernel_says_becomes_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("xsp.samples.host.time.monotonic_ns", lambda: now)
    host = Host(7, proc(tmp_path))
    assert host.open() is None
    first = {entry.name: entry.value for entry in host.read(include_slow=True)}
    assert first == {
        "process.memory.rss": 500 * os.sysconf("SC_PAGE_SIZE"),
        "host.memory.available": 2048 * 1024,
        "host.cpu.clock": 2700.0,
        "host.cpu.clock.highest": 3000.0,
    }
    proc(tmp_path, ticks=os.sysconf("SC_CLK_TCK") // 2)  # half a second of each kind
    now = 10**9
    second = {entry.name: (entry.value, entry.unit) for entry in host.read(include_slow=False)}
    assert second["process.cpu.use"] == (1.0, "cores")
    assert second["host.cpu.use"] == (2.0, "cores"), "user, system, irq and softirq"


def test_without_proc_the_reason_is_said_and_a_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert "/proc" in str(Host(7, tmp_path).open())
    host = Host(7, proc(tmp_path))
    assert host.open() is None
    for file in (tmp_path / "proc" / "7").iterdir():
        file.unlink()
    assert [entry.name for entry in host.read(include_slow=False)] == []


# --- devices ----------------------------------------------------------------------------------------------


def opened(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any], **how: Any) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*devices))  # type: ignore[arg-type]
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    source = Nvml(100, **how)
    assert source.open() is None
    return source


def test_a_device_is_read_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    device = h200(processes={100: 29 * GIB, 4711: GIB})
    source = opened(monkeypatch, device)
    result = {entry.name: (entry.value, entry.unit, entry.device) for entry in source.read(include_slow=True)}
    assert result == {
        "gpu.power": (412.5, "W", 0), "gpu.power.mean": (400.0, "W", 0), "gpu.power.limit": (700.0, "W", 0),
        "gpu.clock.sm": (1755, "MHz", 0), "gpu.clock.sm.highest": (1980, "MHz", 0),
        "gpu.clock.memory": (3201, "MHz", 0), "gpu.clock.reasons": (4.0, "mask", 0), "gpu.use": (97, "%", 0),
        "gpu.temperature": (61, "°C", 0), "gpu.memory.used": (30 * GIB, "bytes", 0),
        "gpu.memory.total": (80 * GIB, "bytes", 0), "gpu.memory.process": (29 * GIB, "bytes", 0),
        "gpu.processes": (2, "processes", 0), "gpu.processes.others": (1, "processes", 0), "gpu.energy": (0.0, "J", 0),
    }  # fmt: skip
    device["energy_mj"] += 2_500
    assert {entry.name: entry.value for entry in source.read(include_slow=False)}["gpu.energy"] == 2.5
    assert list(source.notes()) == []
    nvml: Any = sys.modules["pynvml"]
    source.close()
    assert nvml.open == 0


def test_what_a_device_does_not_tell_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = h200(processes={999: GIB}, throttle=0x40)
    for key in ("power_mw", "energy_mj", "reasons"):
        del device[key]
    source = opened(monkeypatch, device)
    for _ in range(MAX_FAILURES + 1):
        result = {entry.name: entry.value for entry in source.read(include_slow=True)}
    assert not {"gpu.power", "gpu.energy", "gpu.processes.others", "gpu.memory.process"} & set(result)
    assert result["gpu.clock.reasons"] == 0x40, "under the name that older drivers have for it"
    assert [note.split(":")[1].split()[0] for note in source.notes()] == ["gpu.power", "gpu.energy", "NVML"]


def test_a_process_that_comes_to_the_device_later_is_known_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = h200(processes={999: GIB})
    source = opened(monkeypatch, device)
    assert "gpu.processes.others" not in {entry.name for entry in source.read(include_slow=True)}
    assert "never the measured one" in next(iter(source.notes()))
    device["processes"][100] = GIB
    assert {entry.name: entry.value for entry in source.read(include_slow=True)}["gpu.processes.others"] == 1
    assert list(source.notes()) == []


def test_why_there_is_no_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in str(Nvml(100).open())
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert Nvml(100).open() == "there is no NVIDIA GPU to read, or its driver is not loaded (NVML: Driver Not Loaded)"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(h200()))  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Nvml(100).open() == "NVML shows no device that the program may use"


THREE = [h200(uuid=f"GPU-{letter}") for letter in "abc"]


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [(None, "abc"), ("2,0", "ca"), ("1", "b"), ("GPU-c,GPU-a", "ca"), ("0,7,1", "a"), ("", ""), ("-1", "")],
)
def test_devices_are_numbered_as_cuda_numbers_them(visible: str | None, numbers: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    result = nvml.devices(FakeNvml(*THREE), [], environment)
    assert "".join(result.handles[place]["uuid"][-1] for place in range(len(result.handles))) == numbers


def test_what_the_program_says_of_its_devices_counts_most_and_doubt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [h200(name="T4", uuid="GPU-a"), h200(uuid="GPU-b")]
    assert not nvml.devices(FakeNvml(*mixed), [], {}).is_certain
    assert nvml.devices(FakeNvml(*mixed), [], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).is_certain
    output = nvml.devices(FakeNvml(*mixed), ["b", "a"], {})
    assert output.is_certain
    assert [output.handles[place]["name"] for place in (0, 1)] == ["H200", "T4"]
    assert list(opened(monkeypatch, *mixed).notes()) == [nvml.ORDER_UNKNOWN]


def test_ranks_that_all_see_all_devices_share_them() -> None:
    every = nvml.devices(FakeNvml(*THREE), [], {})
    assert [list(nvml.rank_devices(every, rank, 2)) for rank in (0, 1)] == [[0, 2], [1]]
    assert list(nvml.rank_devices(every, 0, 1)) == [0, 1, 2]
    own = nvml.devices(FakeNvml(*THREE), [], {"CUDA_VISIBLE_DEVICES": "2"})
    assert list(nvml.rank_devices(own, 1, 3)) == [0], "each rank was given its own"


def test_the_stand_in_has_the_names_and_signatures_of_pynvml() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    ours = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML_"))]
    assert [name for name in [*ours, *KEYS] if not hasattr(real, name)] == []
    assert [name for name in ours if name.startswith("NVML_") and getattr(FakeNvml, name) != getattr(real, name)] == []
    for name in (name for name in ours if name.startswith("nvml")):
        takes = len(inspect.signature(getattr(FakeNvml, name)).parameters) - 1
        needs = list(inspect.signature(getattr(real, name)).parameters.values())
        assert len([entry for entry in needs if entry.default is entry.empty]) <= takes <= len(needs), name


# --- the thread -------------------------------------------------------------------------------------------


class Scripted(Source):
    """A source that says one figure, as often as it is asked."""

    name = "scripted"

    def __init__(self, fails_at: int = -1) -> None:
        self.reads, self.fails_at, self.enough = 0, fails_at, threading.Event()

    def read(self, include_slow: bool) -> Iterator[Reading]:
        self.reads += 1
        if self.reads == self.fails_at:
            raise OSError("gone")
        if self.reads >= 5:
            self.enough.set()
        yield Reading("x", "W", float(self.reads))

    def notes(self) -> Iterator[str]:
        yield "half of it"


class Missing(Source):
    name = "missing"

    def open(self) -> str | None:
        return "not here"


def sampled(run: Path) -> list[tuple[Any, ...]]:
    query = f"SELECT * FROM {table.parquet(rundir.portions(run))} ORDER BY time_ns"
    return table.connect().execute(query).fetchall()


def test_a_sampler_reads_until_it_is_told_and_says_what_it_did(tmp_path: Path) -> None:
    source = Scripted()
    reader = Sampler(tmp_path, [source, Missing()], rank=3, interval_ns=1_000_000)
    before = time.time_ns()
    reader.start()
    assert source.enough.wait(60)
    output = reader.finish()
    rows = sampled(tmp_path)
    assert [row[1:] for row in rows] == [(3, None, "x", "W", float(n + 1)) for n in range(source.reads)]
    assert before <= rows[0][0] < rows[-1][0] <= time.time_ns()
    assert (output["interval_ms"], output["readings"], output["sources"]) == (1.0, source.reads, {"scripted": ["x"]})
    assert output["kept_ms"] > 0
    assert (output["absent"], output["notes"]) == ({"missing": "not here"}, ["half of it"])


def test_a_source_that_fails_ends_sampling_and_nothing_else(tmp_path: Path) -> None:
    reader = Sampler(tmp_path, [Scripted(fails_at=3)], interval_ns=1_000_000)
    reader.start()
    reader._thread.join(60)
    output = reader.finish()
    assert output["readings"] == 2
    assert "sampling ended early: OSError: gone" in output["notes"]
    assert list(tmp_path.rglob("*.parquet"))  # the readings before it are stored


def test_a_long_run_is_sampled_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_READINGS", 4)
    reader = Sampler(tmp_path, [])
    for _ in range(9):
        reader._count(1_000)
    assert reader._interval_ns == 4 * Source.interval_ns
    slow = Sampler(tmp_path, [])
    monkeypatch.setattr(sampler, "MAX_READINGS", 1000)
    for _ in range(20):
        slow._count(Source.interval_ns // 2)
    assert slow._interval_ns == 2 * Source.interval_ns, "a reading takes half of the time"


def test_rows_and_columns_go_together() -> None:
    assert Sample._fields == tuple(column.name for column in SAMPLE_COLUMNS)


# --- a run ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_has_samples_of_its_process(tmp_path: Path) -> None:
    with xsp.profile("s", out=tmp_path / "run", levels="M", warmup=0, collectors=[]) as session:
        with session.step():
            time.sleep(0.12)
        with session.step():
            time.sleep(0.12)
    trace = xsp.load(tmp_path / "run")
    assert trace.run["samples"]["interval_ms"] == Host.interval_ns / 1e6
    assert set(trace.run["samples"]["sources"]) >= {"host"}
    [(names, first, last)] = trace.samples.aggregate("list(DISTINCT name), min(time_ns), max(time_ns)").fetchall()
    assert "process.memory.rss" in names
    assert trace.run["start_ns"] <= first <= last <= time.time_ns()


def test_samples_can_be_switched_off_and_then_leave_nothing(tmp_path: Path) -> None:
    with xsp.profile("s", out=tmp_path / "run", levels="M", warmup=0, collectors=[], samples=False) as session:
        for _ in range(2):
            with session.step():
                pass
    trace = xsp.load(tmp_path / "run")
    assert "samples" not in trace.run
    assert trace.samples.fetchall() == []
    assert not (tmp_path / "run" / "samples").exists()


@pytest.mark.parametrize("command", ["run", "profile", "sweep"])
def test_the_command_line_switches_sampling_off(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"xsp.cli.{command}").arguments(parser)
    more = ["--batch", "1,2"] if command == "sweep" else []
    assert parser.parse_args([*more, "model.py"]).samples
    assert not parser.parse_args([*more, "--no-samples", "model.py"]).samples


@pytest.mark.slow
def test_the_measured_process_runs_no_thread_and_loads_nothing_for_it(tmp_path: Path) -> None:
    before = threading.active_count()
    with xsp.profile("s", out=tmp_path / "run", levels="M", warmup=0, collectors=[]) as session, session.step():
        assert threading.active_count() == before
    code = "import sys, xsp; xsp.profile; print([m for m in sys.modules if m.startswith(('xsp.samples', 'pynvml'))])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_its_samples(tmp_path: Path) -> None:
    code = f"""
import os, signal, time, xsp
with xsp.profile("k", out={str(tmp_path / "run")!r}, levels="M", warmup=0, collectors=[]) as session:
    for _ in range(3):
        with session.step():
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=False)
    assert ran.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while not rundir.portions(tmp_path / "run") and time.monotonic() < end:
        time.sleep(0.05)  # the storing process ends a moment after the program
    trace = xsp.load(tmp_path / "run")
    assert trace.run["finished"] is False
    assert len(trace.samples) > 0


def test_a_damaged_portion_is_left_out_and_said(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [sample(1, "x", 1.0)])
    rundir.portion(run, 1).write_bytes(b"no Parquet")
    trace = xsp.load(run)
    assert len(trace.samples) == 1
    assert any("000001.parquet: damaged" in note["text"] for note in trace.run["notes"])


def test_samples_hold_no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(monkeypatch, h200(uuid="GPU-secret", processes={100: GIB, 4711: GIB}))
    rows = list(source.read(include_slow=True))
    assert "secret" not in repr(rows)
    assert "4711" not in repr(rows)


# --- a run that is written by hand ------------------------------------------------------------------------


def sample(at_ms: float, name: str, value: float, unit: str = "W", device: int | None = 0, rank: int = 0) -> Sample:
    return Sample(int(at_ms * 1e6), rank, device, name, unit, value)


STEPS = """
    step s 0-100000 step=0
    step s 100000-200000 step=1
    step s 200000-300000 step=2
"""


def beside(rows: list[Sample], steps: str = STEPS) -> xsp.Trace:
    """Return a trace of three steps of 100 ms, one after the other from 0 on, with samples beside them."""
    trace = trace_of(spans(steps), {"name": "s"})
    table.insert(trace.con, "samples", rows, SAMPLE_COLUMNS)
    return trace


def written(run: Path, rows: list[Sample]) -> Path:
    """Write a run of one step, and samples beside it."""
    rundir.create(run)
    store = StepWriter(run)
    step = spans("step s 0-100", trace_id="0" * 32, step=0, rung=20, timed=True)
    store.add(0, list(zip(*step, strict=True)))
    store.finish({"name": "s", "finished": True})
    sampler.write(rundir.portion(run, 0), rows)
    return run


def test_a_run_that_is_replaced_loses_its_samples(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [sample(1, "x", 1.0)])
    rundir.create(run, overwrite=True)
    assert not (run / "samples").exists()


# --- what is asked of samples -----------------------------------------------------------------------------


def held(*masks: int, every_ms: float = 50.0) -> list[Sample]:
    return [sample(every_ms * place, "gpu.clock.reasons", mask, "mask") for place, mask in enumerate(masks)]


def found(trace: xsp.Trace, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return xsp.analyses.ANALYSES[name](trace).select(*columns).fetchall()


def test_a_figure_is_summed_up_with_its_unit() -> None:
    rows = [sample(t, "gpu.power", w) for t, w in [(10, 100.0), (20, 200.0), (30, 300.0), (900, 0.0)]]
    rows += [sample(10, "process.memory.rss", 3 << 20, "bytes", None), *held(4)]
    trace = beside(rows)
    columns = ("device", "name", "unit", "samples", "min", "mean", "p95", "max", "in_steps_mean")
    assert found(trace, "samples", *columns) == [
        (0, "gpu.power", "W", 4, 0.0, 150.0, pytest.approx(285.0), 300.0, 200.0),
        (None, "process.memory.rss", "MiB", 1, 3.0, 3.0, 3.0, 3.0, 3.0),
    ]


def test_the_line_of_a_figure_has_so_many_points_and_their_steps() -> None:
    rows = [sample(t, "gpu.power", float(t)) for t in range(1200)]
    trace = beside(rows)
    points = found(trace, "samples-timeline", "at_s", "value", "highest", "samples", "step")
    assert len(points) == 300
    assert points[0] == (pytest.approx(0.0015), 1.5, 3.0, 4, 0)
    assert points[-1][4] is None, "after the last step"


def test_time_and_steps_in_which_clocks_were_held_down() -> None:
    # steps 0-100, 100-200, 200-300 ms; a reading stands for the time up to the next one
    trace = beside(held(0x1, 0x1, 0x4, 0x44, 0x0, 0x800, 0x0))
    columns = ("device", "reason", "held_down", "time_ms", "percent_of_sampled_time", "timed_steps", "first_steps")
    assert found(trace, "throttling", *columns) == [
        (0, "power cap", True, 100.0, pytest.approx(100 / 3), 1, "1"),
        (0, "too hot, hardware", True, 50.0, pytest.approx(50 / 3), 1, "1"),
        (0, "idle", False, 100.0, pytest.approx(100 / 3), 1, "0"),
        (0, "unknown to this version of xsp", False, 50.0, pytest.approx(50 / 3), 1, "2"),
    ]


def test_without_samples_the_analyses_say_why() -> None:
    empty = beside([])
    analyses = xsp.analyses.ANALYSES
    assert "nothing was sampled while 's' ran; record with xsp" in str(analyses["samples"].refusal(empty))
    empty.run |= {"samples": {"absent": {"nvml": "no driver"}}}
    assert str(analyses["samples-timeline"].refusal(empty)).endswith("nvml: no driver")
    assert str(analyses["throttling"].refusal(empty)).endswith("(no driver)")


def said(trace: xsp.Trace) -> list[tuple[str, str, str]]:
    return [(entry.subject, entry.best_grade, entry.text) for entry in samplehealth.findings(trace)]


@pytest.mark.slow
def test_health_names_devices_whose_clocks_were_held_down() -> None:
    hot = beside(held(0x1, 0x1, 0x20, 0x0, 0x0))
    text = "device 0: clocks were throttled (too hot, driver) in 1 of 3 timed steps; see `throttling`"
    assert said(hot) == [("throttling", "B", text)]
    full = beside(held(0x4, 0x4))
    assert [(subject, best) for subject, best, _ in said(full)] == [("throttling", "A")], (
        "a power cap is how devices work"
    )
    later = beside(held(0, 0, 0, 0, 0, 0, 0, 0x20, 0))
    assert said(later) == [], "no step ran then"


def test_health_names_the_rank_where_there_are_several() -> None:
    rows = [row._replace(rank=rank) for rank in (0, 1) for row in held(0x20, 0x0, 0x20 * rank, 0x0)]
    both = beside(rows, STEPS + STEPS.replace("step=", "rank=1 step="))
    both.run |= {"ranks": [{}, {}]}
    assert [text.partition(";")[0] for _, _, text in said(both)] == [
        "rank 0, device 0: clocks were throttled (too hot, driver) in 1 of 3 timed steps",
        "rank 1, device 0: clocks were throttled (too hot, driver) in 2 of 3 timed steps",
    ]


def test_health_names_others_on_the_device_and_on_the_machine() -> None:
    rows = [sample(t, "gpu.processes.others", n, "processes") for t, n in [(0, 0), (150, 2), (190, 0)]]
    rows += [sample(50, "process.cpu.use", 1.5, "cores", None), sample(50, "host.cpu.use", 3.0, "cores", None)]
    assert said(beside(rows)) == [
        ("device", "B", "device 0: up to 2 other processes used it in 1 of 3 timed steps"),
        ("machine", "A", "other processes used 1.5 cores during timed steps on average: "
                         "other programs, or children of this one"),
    ]  # fmt: skip


def test_health_says_what_could_not_be_sampled() -> None:
    trace = beside([])
    trace.run |= {"samples": {"absent": {"nvml": "no driver"}, "notes": ["half"], "readings": 10, "missed": 10}}
    assert [text for _, _, text in said(trace)] == ["half", "10 of 20 readings were late and were left out"]
    trace.run |= {"machine": {"devices": ["H200"]}}
    assert said(trace)[0][2] == "devices were not sampled: no driver"


def test_samples_are_counters_of_their_process_and_device_in_a_chrome_file(tmp_path: Path) -> None:
    rows = [sample(50, "gpu.power", 412.5), *held(0x1, 0x4, every_ms=60), sample(900, "gpu.power", 1.0)]
    rows += [sample(70, "process.memory.rss", 4096, "bytes", None), sample(80, "gpu.power", 90.5, device=1)]
    trace = beside(rows, STEPS + "kernel gemm 20000-30000")
    chrome.write(trace, tmp_path / "trace.json", Choice())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    pids = {entry["args"]["name"]: entry["pid"] for entry in events if entry["name"] == "process_name"}
    shown = [(entry["ts"], entry["name"], entry["args"], entry["pid"]) for entry in events if entry["ph"] == "C"]
    assert shown == [
        (0, "gpu.clock.held", {"held": 0.0}, pids["device 0"]),
        (50_000, "gpu.power", {"W": 412.5}, pids["device 0"]),
        (60_000, "gpu.clock.held", {"held": 1.0}, pids["device 0"]),
        (70_000, "process.memory.rss", {"bytes": 4096.0}, pids["process 1"]),
        (80_000, "gpu.power of device 1", {"W": 90.5}, pids["process 1"]),
    ]


def test_the_page_draws_what_was_sampled_and_says_what_was_not() -> None:
    rows = [sample(t, "gpu.power", 100.0 + t, device=t % 2) for t in range(4)]
    drawn = {entry["title"]: entry for entry in charts(Answers(beside(rows))) if entry["section"] == "machine"}
    power = drawn["Power of devices"]
    assert (power["kind"], power["unit"]) == ("readings", "W")
    assert power["data"]["value"] == [100.0, 102.0, 101.0, 103.0]
    assert power["data"]["device"] == [0, 0, 1, 1]
    assert drawn["Memory of the process"]["missing"] == "Memory of the process: there is none in this trace"
    assert "reasons for lower clocks were not sampled" in drawn["Why clocks were not at their highest"]["missing"]


# --- on a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_device_is_read() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from xsp.device import machine as device

    torch.zeros(1, device="cuda")
    source = sampler.sources_for(os.getpid(), device.device_uuids())[1]
    assert source.open() is None
    list(source.read(include_slow=True))
    result = {entry.name: entry.value for entry in source.read(include_slow=True) if entry.device == 0}
    source.close()
    assert {"gpu.power.mean", "gpu.clock.sm", "gpu.memory.used", "gpu.temperature", "gpu.clock.reasons"} <= set(result)
    assert 0 < result["gpu.memory.used"] < result["gpu.memory.total"]
