"""What does a recorded step cost a program, compared with a cycle of torch.profiler?

A loop runs bare, under `xsp.profile(every=N)`, and under `torch.profiler.profile` with `schedule(wait=N - 2, warmup=1,
active=1)`, which records equally often: once by default (`torch`), and once with the trace of each cycle written to
disk by `export_chrome_trace`, as xsp writes its own (`torch + file`). The three take turns. The cost of a recorded step
is the time by which the loop exceeds the bare loops around it, divided by the number of recorded steps: switching
collectors on and off, recording, handing over and storing, and the slower steps after it. Entering and leaving the
block is not included.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import torch
from parts import turns
from short_steps import SIZES, Size, workload
from torch.profiler import ProfilerActivity, profile, schedule

import xsp

CYCLE = 10
COLUMNS = ("step", "rounds", "bare ms", "xsp ms", "torch ms", "torch + file ms", "xsp / torch", "xsp / torch + file")


class Loop(NamedTuple):
    """A loop that was run under a profiler."""

    taken_ns: int
    steps: int
    recorded: int

    def cost_ns(self, bare_ns: float) -> float:
        """Return the cost of a recorded step, given the time of a bare one."""
        return (self.taken_ns - self.steps * bare_ns) / self.recorded


def bare(step: Callable[[], object], count: int) -> float:
    """Return the nanoseconds of a step without any profiler."""
    begin = perf_counter_ns()
    for _ in range(count):
        step()
    return (perf_counter_ns() - begin) / count


def under_xsp(step: Callable[[], object], recorded: int) -> Loop:
    """Run the loop under xsp."""
    with (
        tempfile.TemporaryDirectory() as folder,
        xsp.profile("loop", out=Path(folder) / "run", every=CYCLE, samples=False) as prof,
    ):
        while prof.steps_stored < 2:
            with prof.step():
                step()
        steps, before = 0, prof.steps_stored
        begin = perf_counter_ns()
        while prof.steps_stored < before + recorded:
            with prof.step():
                step()
            steps += 1
        return Loop(perf_counter_ns() - begin, steps, recorded)


def under_torch(step: Callable[[], object], recorded: int, write: bool) -> Loop:
    """Run the loop under torch.profiler."""
    with tempfile.TemporaryDirectory() as folder:

        def ready(prof: profile) -> None:
            if write:
                prof.export_chrome_trace(str(Path(folder) / "trace.json"))

        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=CYCLE - 2, warmup=1, active=1),
            on_trace_ready=ready,
            record_shapes=True,
        ) as prof:
            for _ in range(2 * CYCLE):
                step()
                prof.step()
            begin = perf_counter_ns()
            for _ in range(recorded * CYCLE):
                step()
                prof.step()
            return Loop(perf_counter_ns() - begin, recorded * CYCLE, recorded)


def measure(size: Size, rounds: int, recorded: int) -> tuple[list[float], dict[str, list[float]]]:
    """Return the bare step of each round, and the cost of a recorded step in each round by way, in nanoseconds."""
    step = workload(size, train=True)
    ways: dict[str, Callable[[], Loop]] = {
        "xsp": lambda: under_xsp(step, recorded),
        "torch": lambda: under_torch(step, recorded, write=False),
        "torch + file": lambda: under_torch(step, recorded, write=True),
    }
    draw = random.Random(0)
    times, costs = [], dict[str, list[float]]((name, []) for name in ways)
    for _ in range(rounds):
        before = bare(step, CYCLE * recorded)
        for name in draw.sample(list(ways), k=len(ways)):
            loop = ways[name]()
            after = bare(step, CYCLE * recorded)
            costs[name].append(loop.cost_ns((before + after) / 2))
            before = after
        times.append(before)
    return times, costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(turns.parser(__doc__), arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes two lines to stderr in each cycle
    rounds = options.rounds or (3 if options.quick else 7)
    report = turns.Report("step_cost", "Cost of a recorded step for the program, ms [95 %]", COLUMNS)
    for size in SIZES[2:5:2] if options.quick else SIZES[2:5]:
        times, costs = measure(size, rounds, 10 if options.quick else 20)
        ratios = [
            turns.middle([xsp_ns / torch_ns for xsp_ns, torch_ns in zip(costs["xsp"], costs[name], strict=True)])
            for name in ("torch", "torch + file")
        ]
        report.add(
            [
                f"training ~{size.ms:g} ms",
                str(rounds),
                f"{turns.median(times) / 1e6:.2f}",
                *(turns.middle(costs[name]).text(1, 1e-6) for name in costs),
                *(ratio.text(2) for ratio in ratios),
            ],
            bare=times,
            costs=costs,
            ratios=ratios,
        )
    report.finish(options)


if __name__ == "__main__":
    main()
