"""The reference of all figures: the same program in another process without xsp, in turns with `xsp run`.

A program of `bare_programs/` reads its own clock at both ends of its loop (`clock.py` there). A pair is one process
without xsp and one under `xsp run`, in a random order, with the same number of iterations; the first process of a
program decides that number. Figures are medians over pairs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import xsp
from parts import turns
from parts.quiet import other_cpu_s
from xsp import summary
from xsp.errors import XspError

PROGRAMS = Path(__file__).resolve().parents[1] / "bare_programs"
LIMIT_S = 400
"""Seconds after which a process counts as hanging, and is killed."""

SHORT_MS = 1.0
GOALS = (0.05, 0.02)
"""Goals: maximum relative error of iterations below `SHORT_MS`, and of longer ones."""

COMPILER = "a C++ compiler"


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

    steps_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of each iteration by kind, if it was asked for them."""

    def own_s(self, kind: str) -> float:
        """Return the mean iteration of a kind; of the only kind by the clock at both ends of the loop."""
        count, total_s = self.kinds[kind]
        return self.loop_s / self.iterations if len(self.kinds) == 1 else total_s / count


@dataclass(frozen=True)
class Stated:
    """Figures of xsp for one kind of iteration, in seconds; None where it states none."""

    iteration: tuple[float, float | None, float | None] | None = None
    """Value, low and high."""

    latency: tuple[float, float | None, float | None] | None = None
    """Of the step, by A1; only of the kind that the figures describe."""

    true: tuple[float, float | None, float | None] | None = None
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


class Pair(NamedTuple):
    """One process without xsp and one under it."""

    bare: Bare
    profiled: Profiled

    def ratio(self, kind: str, figure: str = "iteration") -> float | None:
        """Return what xsp states divided by the program's own; None if it states nothing."""
        stated = self.stated(kind, figure)
        return None if stated is None else stated[0] / self.bare.own_s(kind)

    def stated(self, kind: str, figure: str = "iteration") -> tuple[float, float | None, float | None] | None:
        """Return a figure of `Stated` with its interval."""
        value: tuple[float, float | None, float | None] | None
        value = getattr(self.profiled.stated.get(kind, Stated()), figure)
        return value

    def covers(self, kind: str, figure: str = "iteration") -> bool:
        """Return whether the interval that xsp states contains the program's own figure."""
        stated = self.stated(kind, figure)
        if stated is None or stated[1] is None or stated[2] is None:
            return False
        return stated[1] <= self.bare.own_s(kind) <= stated[2]

    def loop_ratio(self) -> float | None:
        """Return the loop as the iterations that xsp states add up, divided by the program's own."""
        total = 0.0
        for kind, (count, _) in self.bare.kinds.items():
            stated = self.stated(kind)
            if stated is None:
                return None
            total += count * stated[0]
        return total / self.bare.loop_s

    def whole(self) -> float:
        """Return the ratio of the whole process's time with xsp to that without."""
        return self.profiled.said.wall_s / self.bare.wall_s

    def added_s(self) -> float:
        """Return the seconds by which the whole process took longer."""
        return self.profiled.said.wall_s - self.bare.wall_s

    def as_stored(self) -> dict[str, Any]:
        """Return plain data."""
        return {"bare": asdict(self.bare), "profiled": asdict(self.profiled)}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Pair:
        """Return the pair of `as_stored`, which may have been through JSON."""
        profiled = stored["profiled"]
        kinds = {kind: Stated(**figures) for kind, figures in profiled["stated"].items()}
        return cls(Bare(**stored["bare"]), Profiled(**{**profiled, "said": Bare(**profiled["said"]), "stated": kinds}))


@dataclass
class Runner:
    """Starts processes of programs, and keeps the number of iterations of each."""

    seconds: float = 4.0
    """Of a loop; the first process of a program decides how many iterations these are."""

    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    steps: bool = False
    """Whether programs say the time of each iteration."""

    profile: Sequence[str] = ("run",)
    """Command of xsp, with options for all programs."""

    counts: dict[str, int] = field(default_factory=dict)

    def pair(self, program: Program, number: int) -> Pair:
        """Run a pair; of two successive pairs one begins without xsp, the very first always.

        Raises:
            XspError: a process failed, or its run cannot be read.
        """
        first = random.Random(f"{self.seed} {program.name}").random() < 0.5
        if program.name not in self.counts or (number % 2 == 0) == first:
            bare = self.bare(program)
            return Pair(bare, self.profiled(program))
        profiled = self.profiled(program)
        return Pair(self.bare(program), profiled)

    def bare(self, program: Program) -> Bare:
        """Run a program without xsp."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(program, [sys.executable], Path(folder))

    def profiled(self, program: Program) -> Profiled:
        """Run a program under `xsp run`, and read what it states."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            command = [sys.executable, "-m", "xsp.cli", *self.profile, "--out", str(out), *program.options]
            said = self._run(program, command, Path(folder))
            return read(out, said)

    def _run(self, program: Program, prefix: Sequence[str], folder: Path) -> Bare:
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
                [*command, *(["--steps"] if self.steps else [])],
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
            steps_s=said.get("steps_s", {}),
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
    rows = xsp.analyses.program_loop(trace).select(columns).fetchall()
    training = {kind.kind: kind.training for kind in trace.run.kinds}
    matched = _matched(said, [(kind, training.get(kind, False), steps) for kind, steps, *_ in rows])
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


def _mean_iteration(rows: Sequence[tuple[Any, ...]]) -> tuple[float, float | None, float | None] | None:
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


def _figure(row: tuple[Any, ...], unit_s: float) -> tuple[float, float | None, float | None] | None:
    value, low, high = (None if number is None else number * unit_s for number in row)
    return None if value is None else (value, low, high)


# --- figures ----------------------------------------------------------------------------------------------


def ratios(pairs: Sequence[Pair], kind: str, figure: str = "iteration") -> turns.Figure:
    """Return the median over the pairs of stated / own; not a number if nothing is stated."""
    values = [value for value in (pair.ratio(kind, figure) for pair in pairs) if value is not None]
    return middle(values)


def middle(values: Sequence[float]) -> turns.Figure:
    """Return the median with its interval; not a number if there is none."""
    return turns.middle(values) if values else turns.Figure(*3 * (float("nan"),))


def goal(own_s: float) -> float:
    """Return the largest relative error that is aimed at for an iteration."""
    return GOALS[own_s * 1e3 >= SHORT_MS]


def verdict(ratio: turns.Figure, own_s: float) -> str:
    """Return `met` or `missed`, with `?` if the interval says that it could be otherwise; `none` without a figure."""
    allowed = goal(own_s)
    if ratio.value != ratio.value:
        return "none"
    is_met = abs(ratio.value - 1) <= allowed
    is_certain = (
        max(abs(ratio.lo - 1), abs(ratio.hi - 1)) <= allowed
        if is_met
        else not (ratio.lo <= 1 + allowed and ratio.hi >= 1 - allowed)
    )
    return ("met" if is_met else "missed") + ("" if is_certain else "?")


def spread_percent(pairs: Sequence[Pair], kind: str) -> float:
    """Return how much two processes without xsp differ: the median over successive pairs, in percent."""
    own = [pair.bare.own_s(kind) for pair in pairs]
    differences = [100 * abs(after / before - 1) for before, after in pairwise(own)]
    return statistics.median(differences) if differences else float("nan")


def trimmed_own_s(bare: Bare, kind: str) -> float:
    """Return the trimmed mean of the iterations of a kind, of a process that said each."""
    return summary.trimmed_mean(bare.steps_s[kind])
