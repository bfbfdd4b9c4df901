"""What does xsp add to an engine that serves a language model: to its steps, and to the latency of its requests?

`bare_programs/engine.py` serves requests of drawn lengths with its own clock, without xsp and under `xsp run` with
default options, in turns, each time in a process of its own. Most steps are not recorded, so their median is what a
step costs that is not; the 99th percentile of the requests contains the recorded ones. Two processes differ by more
than a step's cost on most machines: `unrecorded_steps.py --only engine` compares step by step.
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

PROGRAM = Path(__file__).parent / "bare_programs" / "engine.py"
STEP_GOAL, TAIL_GOAL = 1.01, 1.1
"""Goals for the median step, and for the 99th percentile of the latency."""

FIGURES = (("step, median", STEP_GOAL), ("latency, median", None), ("latency, p99", TAIL_GOAL))
COLUMNS = ("figure", "without ms", "with ÷ without", "without ÷ without", "goal")


def run(prefix: Sequence[str], requests: int) -> dict[str, float]:
    """Run the program in a process of its own, and return its figures in milliseconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *prefix, str(PROGRAM), "--requests", str(requests), "--seconds", "1e9"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=300)
    (line,) = (each for each in done.stdout.splitlines() if each.startswith('{"iterations"'))
    told = json.loads(line)
    values = (
        statistics.median(told["decode_s"]), statistics.median(told["latencies"]), np.percentile(told["latencies"], 99)
    )  # fmt: skip
    return {name: 1e3 * float(value) for (name, _), value in zip(FIGURES, values, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in turns, print, save."""
    options = turns.parse(turns.parser(__doc__, rounds=5), arguments)
    report = turns.Report("engine_cost", "An engine that serves a language model, under xsp run", COLUMNS)
    requests = 20 if options.quick else 200
    rounds: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder, report.until_interrupted():
        profile = ["-m", "xsp.cli", "run", "--quiet", "--overwrite", "--out", f"{folder}/run"]
        for number in range(options.rounds):
            turns.say(f"  round {number + 1} of {options.rounds}")
            before, profiled, after = run((), requests), run(profile, requests), run((), requests)
            rounds.append((before, profiled, after))
    for name, goal in FIGURES if rounds else ():
        without = [(before[name] + after[name]) / 2 for before, _, after in rounds]
        ratio = turns.middle([profiled[name] / own for own, (_, profiled, _) in zip(without, rounds, strict=True)])
        same = turns.middle([after[name] / before[name] for before, _, after in rounds])
        met = "–" if goal is None else f"{goal}: {'met' if ratio.value <= goal else 'missed'}"
        report.add(
            [name, f"{statistics.median(without):.4g}", ratio.text(3), same.text(3), met], ratio=ratio, same=same
        )
    report.notes.append(f"{requests} requests a process; `without ÷ without`: two processes without xsp.")
    report.finish(options)


if __name__ == "__main__":
    main()
