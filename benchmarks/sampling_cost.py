"""What does sampling of power, clocks, memory and utilisation add to a program, with it and without it in turns?

Conditions: `without`, the storing process runs and waits; `with`, it also reads its sources every 50 ms. A measured
stretch repeats the bare step until it is ten readings long, so that each stretch contains the cost of readings; no
collector is on. Readings are written every 5 s, in a few milliseconds, which only few stretches contain. `storing
process` is the CPU time of this process meanwhile, as a share of one core.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parts import turns, workloads
from parts.turns import Condition, Group

from xsp import models, rundir
from xsp.device import machine as device
from xsp.launch import models as measure
from xsp.record.writer import Writer
from xsp.samples.host import Host

GOAL = 1.01
READINGS = 10
"""Minimum number of readings in a measured stretch."""

SETTLE_S = 0.5
"""Seconds to wait until the sources are open, a cost that a program pays only once, at its start."""

QUICK = ("torchvision:squeezenet1_1",)
COLUMNS = (
    "model", "steps in a stretch", "rounds", "stretch ms", "adds %", "reading ms", "storing process, % of a core",
    "≤ 1 %",
)  # fmt: skip


@contextlib.contextmanager
def storing_process(folder: Path, sampling: bool, reports: list[dict[str, Any]]) -> Iterator[None]:
    """Run a storing process in the block; append its report on its samples to `reports`."""
    run = rundir.create(folder / "run", overwrite=True)
    writer = Writer(run)
    rundir.write_run(run, {})
    try:
        if sampling and not writer.sample(0, device.device_uuids()):
            raise SystemExit(f"nothing is sampled: {writer.failure}")
        time.sleep(SETTLE_S)
        host = Host(writer.process)
        host.open()
        list(host.read(include_slow=False))
        yield
        usage = {reading.name: reading.value for reading in host.read(include_slow=False)}
        writer.finish({})
        if sampling:
            reports.append({**rundir.read_run(run)["samples"], "cores": usage["process.cpu.use"]})
    finally:
        writer.close()


def on_device(workload: models.Workload, name: str) -> models.Workload:
    """Return the workload with a wait for its device at the end of each step."""
    if not name.startswith("cuda"):
        return workload
    import torch

    def step() -> None:
        workload.step()
        torch.cuda.synchronize()

    return models.Workload(workload.name, step, workload.batch_size)


def rounds_of(
    workload: models.Workload, method: turns.Turns, rounds: int
) -> tuple[list[turns.Round], int, list[dict[str, Any]]]:
    """Return the measured rounds, the steps in a stretch, and the storing processes' reports on their samples."""
    steps = max(1, math.ceil(READINGS * Host.interval_ns / 1e9 / turns.time_of(workload.step)))
    reports: list[dict[str, Any]] = []

    def stretch() -> None:
        for _ in range(steps):
            workload.step()

    with tempfile.TemporaryDirectory(prefix="xsp-") as folder_name:
        folder = Path(folder_name)
        groups = [
            Group([Condition("without", stretch)], lambda: storing_process(folder, False, reports)),
            Group([Condition("with", stretch)], lambda: storing_process(folder, True, reports)),
        ]
        return method.take(groups, rounds, workload.step), steps, reports


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = workloads.add_options(turns.parser(__doc__, rounds=8))
    parser.add_argument("--device", help="cpu, cuda, … (default: cuda if there is one)")
    options = turns.parse(parser, arguments)
    options.device = options.device or measure.default_device()
    names = options.models or (QUICK if options.quick else workloads.TEN_MODELS[:4])
    report = turns.Report("sampling_cost", "Overhead of sampling every 50 ms, % [95 %]", COLUMNS)
    verdicts, method = [], turns.turns_of(options)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(options.threads)
    with report.until_interrupted():
        for text in names:
            spec, settings = workloads.parse(text, options.seed)
            turns.say(f"  {text}")
            workload = on_device(models.load(spec, replace(settings, device=options.device)), options.device)
            workload.step()
            rounds, steps, reports = rounds_of(workload, method, options.rounds)
            added = turns.ratio(rounds, "with", "without")
            readings = [
                sample_report["reading_ms"] for sample_report in reports if sample_report["reading_ms"] is not None
            ]
            reading = turns.median(readings) if readings else None
            cores = turns.median([sample_report["cores"] for sample_report in reports])
            verdicts.append(turns.verdict(added, GOAL))
            stretch = turns.median([round_times["without"] for round_times in rounds]) / 1e6
            row = [workloads.name_of(spec, settings), str(steps), str(len(rounds)), f"{stretch:.0f}"]
            reading_text = "–" if reading is None else f"{reading:.2f}"
            row += [added.text(2, 100, -1), reading_text, f"{100 * cores:.2f}", verdicts[-1]]
            report.add(row, added=added, reading_ms=reading, cores=cores, rounds=rounds, sources=reports[-1]["sources"])
    report.notes += [workloads.summary_line(verdicts, "sampling adds at most 1 %"), method.note()]
    report.finish(options)


if __name__ == "__main__":
    main()
