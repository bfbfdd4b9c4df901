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
LOOKS = 20
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


class Look(NamedTuple):
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
    inputs, wanted = torch.randn(128, 256), torch.randint(0, 10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()

    return step


def resident_mb(process: int | str) -> float:
    """Return the resident memory of a process, from `/proc`."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def look(session: xsp.profile, step: int) -> Look:
    """Sample the memory of both processes, and the account."""
    rungs = session.account.rungs.values()
    return Look(
        step,
        resident_mb("self"),
        resident_mb(session._writer.process),
        sum(rung.between_ns for rung in rungs),
        sum(rung.steps for rung in rungs),
    )


def run(out: Path, steps: int, settings: dict[str, Any]) -> tuple[list[Look], float]:
    """Profile the training; return the samples from start to end, and the seconds to leave the block."""
    step, looks = training(), []
    with xsp.profile("long run", out=out, **settings) as session:
        for number in range(steps):
            if number % (steps // LOOKS) == 0:
                looks.append(look(session, number))
            with session.step():
                step()
        looks.append(look(session, steps))
        begin = time.perf_counter()
    return looks, time.perf_counter() - begin


def cost_ms(before: Look, after: Look) -> float | None:
    """Return the cost in milliseconds of a step recorded between two samples; None if there was none."""
    steps = after.recorded - before.recorded
    return (after.around_ns - before.around_ns) / steps / 1e6 if steps else None


def slope(looks: Sequence[Look], memory: Callable[[Look], float]) -> float:
    """Return the growth of memory in MB per 1000 steps, without the first tenth."""
    settled = looks[LOOKS // 10 :]
    return statistics.linear_regression([each.step / 1000 for each in settled], list(map(memory, settled))).slope


def loaded(run: str) -> tuple[float, float, int]:
    """Load a run in a fresh process; return the seconds, the peak memory in MB, and the number of spans."""
    done = subprocess.run([sys.executable, "-c", LOAD, run], stdout=subprocess.PIPE, check=True)
    load_s, load_mb, spans = json.loads(done.stdout)
    return load_s, load_mb, spans


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--steps", type=int, help="steps of each run (default: 10000, quick: 400)")
    options = turns.parse(made, arguments)
    steps = options.steps or (400 if options.quick else 10_000)
    if not Path("/proc/self/status").is_file():
        turns.skip("long_run: memory of processes is read from /proc, which does not exist here")
    report = turns.Report("long_run", f"A run of {steps:,} steps of all levels", COLUMNS)
    for name, settings in SETTINGS.items():
        turns.say(name)
        with tempfile.TemporaryDirectory() as folder:
            looks, end_s = run(Path(folder) / "run", steps, settings)
            content = json.loads((Path(folder) / "run" / "run.json").read_text(encoding="utf-8"))
            load_s, load_mb, spans = loaded(f"{folder}/run")
        first, last = cost_ms(looks[0], looks[LOOKS // 10]), cost_ms(looks[-1 - LOOKS // 10], looks[-1])
        program, storing = slope(looks, lambda each: each.program_mb), slope(looks, lambda each: each.storing_mb)
        spent = content["budget"]
        kept = {None: "–", True: "yes", False: "no"}[spent.get("kept")]
        report.add(
            [name, f"{content['steps']['stored']:,}",
             f"{looks[-1].program_mb:.0f}, {program:+.2f}", f"{looks[-1].storing_mb:.0f}, {storing:+.2f}",
             f"{spent['bare_step_ns'] / 1e6:.2f}",
             ", ".join("–" if each is None else f"{each:.1f}" for each in (first, last)),
             f"{spent['overhead_percent']:.2f}", kept,
             f"{end_s:.1f}", f"{load_s:.1f}", f"{load_mb:.0f}"],
            looks=[each._asdict() for each in looks], budget=spent, spans=spans, end_s=end_s, load_s=load_s,
            program_slope_mb=program, storing_slope_mb=storing, first_ms=first, last_ms=last,
        )  # fmt: skip
    report.notes.append("The first tenth holds trials and warm-up; the end calibrates collectors and merges all steps.")
    report.finish(options)


if __name__ == "__main__":
    main()
