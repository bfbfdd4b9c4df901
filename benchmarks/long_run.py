"""Do memory and overhead stay flat over a run of ten thousand steps, and is a budget kept?

The memory of the program and of the storing process is sampled twenty times; its slope is that of a least-squares line
through the last nine tenths. The cost of a recorded step, in the first and in the last tenth, is the time of xsp around
it according to xsp's own account. The run is loaded in a fresh process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parts import turns

import xsp

SETTINGS: dict[str, dict[str, Any]] = {
    "every second step (default)": {},
    "every=100": {"every": 100},
    'budget="1%"': {"budget": "1%"},
}
COLUMNS = (
    "", "stored", "program MB, more per 1000 steps", "storing MB, more per 1000 steps",
    "a bare step ms", "a recorded step more, first tenth, last tenth", "overhead %", "budget kept",
    "end s", "load s", "load MB",
)  # fmt: skip
SAMPLES = 20
"""Number of samples of memory and account, at equal distances."""

LOAD = """
import json, sys, time
import xsp
begin = time.perf_counter()
trace = xsp.load(sys.argv[1])
spans = trace.sql("SELECT count(*) FROM spans").fetchall()[0][0]
took = time.perf_counter() - begin
status = open("/proc/self/status").read()  # the largest memory that `resource` knows is that of the parent, too
largest_mb = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([took, largest_mb, spans]))
"""


class Sample(NamedTuple):
    """A sample of memory and account at one moment."""

    step: int
    program_mb: float
    storing_mb: float
    around_ns: int
    """Time of xsp around the steps recorded so far."""

    recorded: int


def training() -> Callable[[], None]:
    """Return a training step of a small model."""
    import torch
    from torch import nn

    torch.set_num_threads(1)  # the storing process needs a core too
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(128, 256), torch.randint(0, 10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def resident_mb(process: int | str) -> float:
    """Return the resident memory of a process, from `/proc`."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def take_sample(session: xsp.profile, step: int) -> Sample:
    """Sample the memory of both processes, and the account."""
    rungs = session.account.rungs.values()
    return Sample(
        step,
        resident_mb("self"),
        resident_mb(session._writer.process),
        sum(rung.between_ns for rung in rungs),
        sum(rung.steps for rung in rungs),
    )


def run(out: Path, steps: int, settings: dict[str, Any]) -> tuple[list[Sample], float]:
    """Profile the training; return the samples from start to end, and the seconds to leave the block."""
    step, samples = training(), []
    with xsp.profile("long run", out=out, **settings) as session:
        for number in range(steps):
            if number % (steps // SAMPLES) == 0:
                samples.append(take_sample(session, number))
            with session.step():
                step()
        samples.append(take_sample(session, steps))
        begin = time.perf_counter()
    return samples, time.perf_counter() - begin


def cost_ms(before: Sample, after: Sample) -> float | None:
    """Return the cost in milliseconds of a step recorded between two samples; None if there was none."""
    steps = after.recorded - before.recorded
    return (after.around_ns - before.around_ns) / steps / 1e6 if steps else None


def slope(samples: Sequence[Sample], memory: Callable[[Sample], float]) -> float:
    """Return the growth of memory in MB per 1000 steps, without the first tenth."""
    settled = samples[SAMPLES // 10 :]
    return statistics.linear_regression([sample.step / 1000 for sample in settled], list(map(memory, settled))).slope


def load_fresh(run: str) -> tuple[float, float, int]:
    """Load a run in a fresh process; return the seconds, the peak memory in MB, and the number of spans."""
    process = subprocess.run([sys.executable, "-c", LOAD, run], stdout=subprocess.PIPE, check=True)
    load_s, load_mb, spans = json.loads(process.stdout)
    return load_s, load_mb, spans


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, help="steps of each run (default: 10000, quick: 400)")
    options = turns.parse(parser, arguments)
    steps = options.steps or (400 if options.quick else 10_000)
    if not Path("/proc/self/status").is_file():
        turns.skip("long_run: memory of processes is read from /proc, which does not exist here")
    report = turns.Report("long_run", f"A run of {steps:,} steps of all levels", COLUMNS)
    for name, settings in SETTINGS.items():
        turns.say(name)
        with tempfile.TemporaryDirectory() as folder:
            samples, end_s = run(Path(folder) / "run", steps, settings)
            content = json.loads((Path(folder) / "run" / "run.json").read_text(encoding="utf-8"))
            load_s, load_mb, spans = load_fresh(f"{folder}/run")
        first_ms, last_ms = (
            cost_ms(samples[0], samples[SAMPLES // 10]),
            cost_ms(samples[-1 - SAMPLES // 10], samples[-1]),
        )
        program, storing = (
            slope(samples, lambda sample: sample.program_mb),
            slope(samples, lambda sample: sample.storing_mb),
        )
        budget = content["budget"]
        kept_text = {None: "–", True: "yes", False: "no"}[budget.get("kept")]
        report.add(
            [name, f"{content['steps']['stored']:,}",
             f"{samples[-1].program_mb:.0f}, {program:+.2f}", f"{samples[-1].storing_mb:.0f}, {storing:+.2f}",
             f"{budget['bare_step_ns'] / 1e6:.2f}",
             ", ".join("–" if cost_value is None else f"{cost_value:.1f}" for cost_value in (first_ms, last_ms)),
             f"{budget['overhead_percent']:.2f}", kept_text,
             f"{end_s:.1f}", f"{load_s:.1f}", f"{load_mb:.0f}"],
            looks=[sample._asdict() for sample in samples], budget=budget, spans=spans, end_s=end_s, load_s=load_s,
            program_slope_mb=program, storing_slope_mb=storing, first_ms=first_ms, last_ms=last_ms,
        )  # fmt: skip
    report.notes.append("The first tenth holds trials and warm-up; the end calibrates collectors and merges all steps.")
    report.finish(options)


if __name__ == "__main__":
    main()
