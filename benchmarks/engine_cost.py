"""What does xsp add to an engine that serves a language model: to its steps, and to the latency of its requests?

`bare_programs/engine.py` serves requests of drawn lengths with its own clock, without xsp and under `xsp run` with
default options. Its steps are compared step by step, in two processes that take turns (`parts/lockstep.py`): the ratio
is of the processor time of steps that are not recorded. Requests are compared in processes of their own, one after the
other; their 99th percentile contains recorded steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from parts import turns
from parts.apart import Program, Runner
from parts.lockstep import CONTROL, STEADY, Try, try_once

PROGRAM = Path(__file__).parent / "bare_programs" / "engine.py"
STEP_GOAL, TAIL_GOAL = 1.01, 1.1
"""Goals for a step that is not recorded, and for the 99th percentile of the latency."""

FIGURES = (("latency, median", None), ("latency, p99", TAIL_GOAL))
COLUMNS = ("figure", "without ms", "with ÷ without", "without ÷ without", "goal")


def run(prefix: Sequence[str], requests: int) -> dict[str, float]:
    """Run the program in a process of its own, and return its figures in milliseconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *prefix, str(PROGRAM), "--requests", str(requests), "--seconds", "1e9"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=300)
    (line,) = (each for each in done.stdout.splitlines() if each.startswith('{"iterations"'))
    latencies = json.loads(line)["latencies"]
    values = statistics.median(latencies), np.percentile(latencies, 99)
    return {name: 1e3 * float(value) for (name, _), value in zip(FIGURES, values, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=5), arguments)
    report = turns.Report("engine_cost", "An engine that serves a language model, under xsp run", COLUMNS)
    requests = 20 if options.quick else 200
    rounds: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []
    runner, program, steps = Runner(1.5 if options.quick else 6.0), Program("engine", "engine.py"), list[Try]()
    with tempfile.TemporaryDirectory() as folder, report.until_interrupted():
        profile = ["-m", "xsp.cli", "run", "--quiet", "--overwrite", "--out", f"{folder}/run"]
        runner.bare(program)
        for number in range(options.rounds):
            turns.say(f"  round {number + 1} of {options.rounds}")
            steps.append(try_once(runner, program, number))
            before, profiled, after = run((), requests), run(profile, requests), run((), requests)
            rounds.append((before, profiled, after))
    _add_steps(report, steps)
    for name, goal in FIGURES if rounds else ():
        without = [(before[name] + after[name]) / 2 for before, _, after in rounds]
        ratio = turns.middle([profiled[name] / own for own, (_, profiled, _) in zip(without, rounds, strict=True)])
        same = turns.middle([after[name] / before[name] for before, _, after in rounds])
        _add(report, name, statistics.median(without), ratio, same, goal)
    report.notes.append(f"{requests} requests a process; `without ÷ without`: two processes without xsp.")
    report.finish(options)


def _add_steps(report: turns.Report, steps: Sequence[Try]) -> None:
    known = [each for each in steps if STEADY in each.compared]
    if known:
        ratio, same = (turns.middle([each.compared[state].cpu for each in known]) for state in (STEADY, CONTROL))
        own_ms = 1e3 * statistics.median(used_s for each in known for _, used_s in each.bare.steps)
        _add(report, "step, not recorded", own_ms, ratio, same, STEP_GOAL)


def _add(
    report: turns.Report, name: str, own_ms: float, ratio: turns.Figure, same: turns.Figure, goal: float | None
) -> None:
    met = "–" if goal is None else f"{goal}: {'met' if ratio.value <= goal else 'missed'}"
    report.add([name, f"{own_ms:.4g}", ratio.text(3), same.text(3), met], ratio=ratio, same=same)


if __name__ == "__main__":
    main()
