"""How reliably is device work attributed to layers in eager mode? Shares of device time by grade, forward and backward.

Each model is profiled once, kernels included; the shares are of the time of kernels and copies in its timed steps,
by phase. The interval resamples the steps.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parts import gpu_workloads, turns

import xsp
from xsp.collector import Kernels
from xsp.models import Workload
from xsp.schema import Grade, Level

GOAL = 0.99
COLUMNS = ("model, phase", "source", "steps", "device ms", "exact %", "inferred %", "unknown %", "≥ 99 % exact")
Shares = Mapping[str, float]
"""Nanoseconds of one step by grade."""


@contextlib.contextmanager
def profiled_run(workload: Workload, steps: int, kernels: str) -> Iterator[xsp.Trace]:
    """Yield the trace of a run with all levels."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("attribution", levels="M/L/G", out=out, kernels=kernels) as prof:
            for _ in range(prof.schedule.steps_for(steps)):
                with prof.step():
                    workload.step()
        yield xsp.load(out)


def by_phase(trace: xsp.Trace) -> dict[str, list[Shares]]:
    """Return the time of device work by grade for each step, by phase."""
    rows = trace.sql(
        "SELECT coalesce(phase, 'none'), step, grade, sum(dur_ns) FROM spans "
        f"WHERE timed AND device IS NOT NULL AND level = {int(Level.KERNEL)} GROUP BY ALL"
    ).fetchall()
    steps: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for phase, step, grade, ns in rows:
        steps[phase][step][grade] = float(ns)
    return {phase: list(phase_steps.values()) for phase, phase_steps in sorted(steps.items())}


def share(steps: Sequence[Shares], grade: str) -> float:
    """Return the share of a grade over some steps."""
    total = sum(sum(step_shares.values()) for step_shares in steps)
    return sum(step_shares.get(grade, 0.0) for step_shares in steps) / total if total else float("nan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = gpu_workloads.add_options(turns.parser(__doc__, rounds=5))
    sources = [*map(str, Kernels)]
    parser.add_argument("--kernels", default=sources[0], choices=sources, help="source of device work")
    options = turns.parse(parser, arguments)
    gpu_workloads.require_gpu()
    report = turns.Report("gpu_attribution", "Device time by certainty of its layer, % [95 %]", COLUMNS)
    notes: set[str] = set()
    with report.until_interrupted():
        for workload in gpu_workloads.build_workloads(options):
            with profiled_run(workload, options.rounds, options.kernels) as trace:
                notes.update(str(note["text"]) for note in trace.run.get("notes", []))
                source = str(trace.run.get("kernels", {}).get("source"))
                for phase, steps in by_phase(trace).items():
                    _add(report, f"{workload.name}, {phase}", source, steps)
    report.notes += [*sorted(notes), gpu_workloads.device_line()]
    report.finish(options)


def _add(report: turns.Report, name: str, source: str, steps: Sequence[Shares]) -> None:
    shares = {grade: turns.bootstrap(steps, lambda rows, g=grade: share(rows, g)) for grade in map(str, Grade)}
    total = turns.median([sum(step_shares.values()) for step_shares in steps])
    verdict = "met" if shares[str(Grade.EXACT)].value >= GOAL else "missed"
    percents = [figure.text(2, 100) for figure in shares.values()]
    report.add([name, source, str(len(steps)), f"{total / 1e6:.3f}", *percents, verdict], shares=shares, steps=steps)


if __name__ == "__main__":
    main()
