"""Programs with a clock of their own, each in a process of its own, without xsp and under `xsp run`.

A program of `bare_programs/` reads its own clock at both ends of its loop (`clock.py` there). All processes of a
program run the same number of iterations; the first one decides that number.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import xsp
from parts.quiet import other_cpu_s
from xsp.errors import XspError
from xsp.store.iterations import iterations

PROGRAMS = Path(__file__).resolve().parents[1] / "bare_programs"
LIMIT_S = 400
"""Seconds after which a process counts as hanging, and is killed."""

COMPILER = "a C++ compiler"


Interval: TypeAlias = "tuple[float, float | None, float | None]"
"""A figure with the ends of its interval, which few steps do not have."""


@dataclass(frozen=True)
class Program:
    """A program with a clock of its own, and how it is started."""

    name: str
    command: str
    """Script of `bare_programs/` with its arguments."""

    options: tuple[str, ...] = ()
    """Options of `xsp run`."""

    needs: str = ""
    """A package, or `COMPILER`."""

    def missing(self) -> str:
        """Return what the program needs and this machine lacks; empty if nothing."""
        if self.needs == COMPILER:
            return "" if shutil.which("g++") or shutil.which("clang++") else COMPILER
        return "" if not self.needs or importlib.util.find_spec(self.needs) else self.needs


@dataclass(frozen=True)
class Bare:
    """What a process said of its loop; times in seconds."""

    iterations: int
    wall_s: float
    """Of the whole process."""

    before_s: float
    """From its start to the beginning of its first iteration."""

    loop_s: float
    """Of the iterations that count, from one reading of the program's clock to the other."""

    after_s: float
    """From the end of its last iteration to its end."""

    used_s: float
    """Processor time of all of its threads in the loop."""

    kinds: Mapping[str, tuple[int, float]]
    """By kind of iteration: how many, and the seconds of all of them."""

    others: float
    """Cores that other processes used meanwhile."""

    clock_s: float = 0.0
    """What reading the clock takes in each iteration."""

    faults: float = 0.0
    """Page faults in each iteration."""

    phases: Mapping[str, float] = field(default_factory=dict)
    """Shares of its phases in a step, of a program that times them."""

    steps: Sequence[tuple[float, float]] = ()
    """Seconds of each iteration, those before the clock is read too, and of processor time in it; if asked for."""

    def own_s(self, kind: str) -> float:
        """Return the mean iteration of a kind; of the only kind by the clock at both ends of the loop."""
        count, total_s = self.kinds[kind]
        return self.loop_s / self.iterations if len(self.kinds) == 1 else total_s / count


@dataclass(frozen=True)
class Stated:
    """Figures of xsp for one kind of iteration, in seconds; None where it states none."""

    iteration: Interval | None = None
    """Value, low and high."""

    latency: Interval | None = None
    """Of the step, by A1; only of the kind that the figures describe."""

    true: Interval | None = None
    """Of the merged step; only of the kind that the figures describe."""

    steps: int = 0


@dataclass(frozen=True)
class Profiled:
    """What a process under `xsp run` said, and what xsp stated of it."""

    said: Bare
    stated: Mapping[str, Stated]
    """By the program's kind of iteration."""

    cost_percent: float | None = None
    """By how much xsp states that profiling made the program longer."""

    cost_s: float = 0.0
    """Seconds that xsp states for it, in steps, at the start and at the end."""


@dataclass
class Runner:
    """Starts processes of programs, and keeps the number of iterations of each."""

    seconds: float = 4.0
    """Of a loop; the first process of a program decides how many iterations these are."""

    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    profile: Sequence[str] = ("run",)
    """Command of xsp, with options for all programs."""

    counts: dict[str, int] = field(default_factory=dict)

    def bare(self, program: Program, more: Sequence[str] = ()) -> Bare:
        """Run a program without xsp, with more arguments."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(program, [sys.executable], Path(folder), more)

    def profiled(self, program: Program) -> Profiled:
        """Run a program under `xsp run`, and read what it states."""
        with tempfile.TemporaryDirectory() as folder:
            said = self.recorded(program, Path(folder) / "run")
            return read(Path(folder) / "run", said)

    def recorded(self, program: Program, out: Path, more: Sequence[str] = ()) -> Bare:
        """Run a program under `xsp run`, with more arguments; its run is in `out`."""
        command = [sys.executable, "-m", "xsp.cli", *self.profile, "--out", str(out), *program.options]
        return self._run(program, command, out.parent, more)

    def _run(self, program: Program, prefix: Sequence[str], folder: Path, more: Sequence[str]) -> Bare:
        count = self.counts.get(program.name)
        length = ["--seconds", str(self.seconds)] if count is None else ["--iterations", str(count)]
        script, *arguments = program.command.split()
        command = [*prefix, str(PROGRAMS / script), *arguments, *length, "--device", self.device]
        output, errors = folder / "stdout", folder / "stderr"
        env = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        others_s = other_cpu_s()
        with output.open("wb") as out, errors.open("wb") as err:
            launched = time.monotonic()
            process = subprocess.Popen(
                [*command, *more],
                stdout=out, stderr=err, cwd=folder, env=env, start_new_session=True,
            )  # fmt: skip
            # A wait with a timeout would poll, and notice the end up to 50 ms late.
            watchdog = threading.Timer(LIMIT_S, _kill, (process.pid,))
            watchdog.start()
            try:
                code = process.wait()
            finally:
                ended = time.monotonic()
                watchdog.cancel()
                _kill(process.pid)
                process.wait()
        others = (other_cpu_s() - others_s) / (ended - launched)
        lines = [line for line in output.read_text("utf-8", "replace").splitlines() if line.startswith('{"iterations"')]
        if code or not lines:
            last = (errors.read_text("utf-8", "replace").strip().splitlines() or ["nothing was printed"])[-1]
            raise XspError(f"{program.command}: exit status {code}: {last}")
        said = json.loads(lines[-1])
        self.counts.setdefault(program.name, said["iterations"])
        return Bare(
            iterations=said["iterations"],
            wall_s=ended - launched,
            before_s=said["first"] - launched,
            loop_s=said["end"] - said["begin"],
            after_s=ended - said["end"],
            used_s=said["used_s"],
            kinds={kind: (laps["laps"], laps["s"]) for kind, laps in said["kinds"].items()},
            others=others,
            clock_s=said["clock_s"],
            faults=said["faults"],
            phases=said.get("phases", {}),
            steps=[(wall_s, used_s) for wall_s, used_s in said.get("steps", ())],
        )


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def read(out: Path, said: Bare) -> Profiled:
    """Return what a run states of the program's kinds of iterations.

    Raises:
        XspError: the run cannot be read.
    """
    trace = xsp.load(out)
    columns = "kind, steps, iteration_ms, low_ms, high_ms"
    # of several threads the program counts the iterations of all, and an iteration of xsp is one of a thread
    shares = {row.kind: row.pace_ns / row.mean_ns for row in iterations(trace) if row.pace_ns and row.mean_ns}
    rows = [
        (kind, steps, *(None if ms is None else ms * shares.get(kind, 1.0) for ms in times))
        for kind, steps, *times in xsp.analyses.program_loop(trace).select(columns).fetchall()
    ]
    # a kind that only ran before the program read its clock, such as a first step that imports, is none of its own
    last_step = dict(trace.sql("SELECT kind, max(step + steps) FROM loop GROUP BY kind").fetchall())
    before = sum(steps for _, steps, *_ in rows) - said.iterations
    rows = [row for row in rows if last_step[row[0]] > before]
    training = {kind.kind: kind.training for kind in trace.run.kinds}
    matched = _matched(said, [(kind, bool(training.get(kind)), steps) for kind, steps, *_ in rows])
    described = {}
    with contextlib.suppress(XspError):
        described["latency"] = _figure(xsp.analyses.A1(trace).select("latency_ms, low_ms, high_ms").fetchall()[0], 1e-3)
    true = trace.sql("SELECT true_ns, true_lo_ns, true_hi_ns FROM merged WHERE kind = 'step'").fetchall()
    described["true"] = _figure(true[0], 1e-9) if true else None
    stated = {}
    for name, numbers in matched.items():
        own = [row for row in rows if row[0] in numbers]
        more = described if trace.kind in numbers else {}
        stated[name] = Stated(_mean_iteration(own), steps=sum(row[1] for row in own), **more)
    budget = trace.run.budget
    if budget is None:
        return Profiled(said, stated)
    cost_ns = sum(max(0, ns or 0) for ns in (budget.spent_ns, budget.start_ns, budget.end_ns))
    return Profiled(said, stated, budget.program_percent, cost_ns / 1e9)


def _matched(said: Bare, stated: Sequence[tuple[int, bool, int]]) -> dict[str, list[int]]:
    """Return xsp's kinds of steps by the program's: of the same phase, and then of the closest number of steps.

    The program's kinds are of training, except for those that are called otherwise.
    """
    matched: dict[str, list[int]] = {}
    for kind, is_training, steps in stated:
        names = [name for name in said.kinds if (name not in INFERENCE) == is_training] or list(said.kinds)
        closest = min(names, key=lambda name: abs(said.kinds[name][0] - steps))
        matched.setdefault(closest, []).append(kind)
    return matched


INFERENCE = ("inference", "validation", "prefill", "decode")
"""Kinds of iterations in which nothing is trained."""


def _mean_iteration(rows: Sequence[tuple[Any, ...]]) -> Interval | None:
    """Return the mean iteration of rows of the loop by their steps, in seconds; None if one of many is unknown.

    Of a kind with a tenth of the steps or less nothing has to be known.
    """
    total = sum(row[1] for row in rows)
    known = [row for row in rows if row[2] is not None]
    steps = sum(row[1] for row in known)
    if steps < 0.9 * total or not known:
        return None
    value, low, high = (
        sum(row[1] * (row[2] if row[column] is None else row[column]) for row in known) / steps / 1e3
        for column in (2, 3, 4)
    )
    has_interval = any(row[3] is not None for row in known)
    return (value, low, high) if has_interval else (value, None, None)


def _figure(row: tuple[Any, ...], unit_s: float) -> Interval | None:
    value, low, high = (None if number is None else number * unit_s for number in row)
    return None if value is None else (value, low, high)
