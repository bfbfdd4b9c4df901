"""Do memory and overhead stay flat over a run of ten thousand steps, and is a budget kept?

The program and the process that stores are looked at after a tenth of the steps and at the end. What one recorded
step costs is what xsp took around it, by its own account. Loading is done in a fresh process.
"""

from __future__ import annotations

import json
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
LOAD = """
import json, resource, sys, time
import xsp
begin = time.perf_counter()
trace = xsp.load(sys.argv[1])
spans = trace.sql("SELECT count(*) FROM spans").fetchall()[0][0]
took = time.perf_counter() - begin
print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, spans]))
"""


class Look(NamedTuple):
    """What is so at one moment."""

    program_mb: float
    storing_mb: float
    around_ns: int
    """What xsp took around recorded steps, until now."""

    recorded: int


def training() -> Callable[[], None]:
    """Return a training step of a small model."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, wanted = torch.randn(64, 256), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), wanted).backward()
        optimizer.step()

    return step


def resident_mb(process: int | str) -> float:
    """Return the resident memory of a process, from `/proc`."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def look(session: xsp.profile) -> Look:
    """Look at both processes and at the account."""
    rungs = session.account.rungs.values()
    return Look(
        resident_mb("self"),
        resident_mb(session._writer.process),
        sum(rung.around_ns for rung in rungs),
        sum(rung.taken for rung in rungs),
    )


def run(out: Path, steps: int, settings: dict[str, Any]) -> tuple[list[Look], float]:
    """Profile the training; return the looks at the beginning, after a tenth and in two more, and at the end."""
    step, looks = training(), []
    places = [0, steps // 10, steps - steps // 10, steps]
    with xsp.profile("long run", out=out, **settings) as session:
        for number in range(steps):
            if number in places:
                looks.append(look(session))
            with session.step():
                step()
        looks.append(look(session))
        begin = time.perf_counter()
    return looks, time.perf_counter() - begin


def cost_ms(before: Look, after: Look) -> float:
    """Return what a recorded step between two looks cost."""
    steps = after.recorded - before.recorded
    return (after.around_ns - before.around_ns) / steps / 1e6 if steps else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--steps", type=int, help="of each run (default: 10000, quick: 400)")
    options = turns.parse(made, arguments)
    steps = options.steps or (400 if options.quick else 10_000)
    if not Path("/proc/self/status").is_file():
        turns.skip("long_run: memory of processes is read from /proc, which is not here")
    columns = ("", "stored", "program, last/first MB", "storing, last/first MB", "a recorded step, last/first ms",
               "overhead %", "end s", "load s", "load MB")  # fmt: skip
    report = turns.Report("long_run", f"A run of {steps:,} steps: the end against a tenth of the way", columns)
    for name, settings in SETTINGS.items():
        turns.say(name)
        with tempfile.TemporaryDirectory() as folder:
            looks, end_s = run(Path(folder) / "run", steps, settings)
            content = json.loads((Path(folder) / "run" / "run.json").read_text(encoding="utf-8"))
            done = subprocess.run([sys.executable, "-c", LOAD, f"{folder}/run"], stdout=subprocess.PIPE, check=True)
        load_s, load_mb, spans = json.loads(done.stdout)
        first, last = cost_ms(looks[0], looks[1]), cost_ms(looks[2], looks[3])
        program, storing = (looks[3][place] / looks[1][place] for place in (0, 1))
        spent = content["budget"]
        report.add(
            [name, f"{content['steps']['stored']:,}",
             f"{program:.2f} of {looks[1].program_mb:.0f}", f"{storing:.2f} of {looks[1].storing_mb:.0f}",
             f"{last / first:.2f} of {first:.1f}", f"{spent['overhead_percent']:.2f}",
             f"{end_s:.1f}", f"{load_s:.1f}", f"{load_mb:.0f}"],
            looks=[each._asdict() for each in looks], budget=spent, spans=spans, end_s=end_s, load_s=load_s,
        )  # fmt: skip
    report.notes.append("Figures of the first tenth hold its trials and warm-up; `end s` merges all steps.")
    report.finish(options)


if __name__ == "__main__":
    main()
