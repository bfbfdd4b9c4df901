"""How close are the times that xsp reports for steps and iterations to the same loop without xsp, from 0.03 to 300 ms?

For each size of step, bare stretches of the loop and whole `xsp.profile` blocks of it take turns. The step's latency
(A1's `latency_ms`, `low_ms`, `high_ms`) is compared with the bare step, and the loop's iteration (`loop_ms`) with the
bare iteration. The bare loop reads the clock as rarely as xsp does: around each step from 1 ms on, and around groups of
shorter steps that take some milliseconds, so that interruptions by the machine count alike on both sides.

The control is a bare stretch in place of the block: the same number of steps, of which the ones at the places of xsp's
steady steps count, the same statistic, and an interval by the same code. It shows how much neighbouring bare stretches
differ, and how often such an interval covers them: the best that the machine allows.

Page faults are counted, too: glibc returns memory at the end of its heap to the system, and whether a step's memory is
there depends on earlier allocations. A training step of 40 ms has 0 or 2,000 faults, which take 5 ms. With
`--keep-heap` glibc keeps that memory, in bare stretches and blocks alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from parts import heap, turns
from parts.turns import Figure

import xsp
from xsp import summary
from xsp.record import quiet
from xsp.store.iterations import steady_steps

SHORT_MS = 1.0
GOALS = (0.05, 0.02)
"""Goals: maximum relative error for steps below `SHORT_MS`, and for longer ones."""

LEAST_MS = 0.03
"""Minimum step for the goal to apply; on a fast machine the steps of the smallest program are shorter."""

LEAST_STEPS, LEAST_LONG_STEPS, LONG_S = 90, 60, 0.06
"""Minimum number of steps in a stretch or a block; the same for long steps; minimum seconds of a long step."""

ROUNDS, LONG_ROUNDS = 6, 1
"""Default rounds of a call, which takes about ten minutes; fewer for long steps. `--out` adds them to earlier ones."""

TIME_MARGIN = 1.5
"""Safety factor on the expected time of a round, for `--seconds`."""

LONGEST_MS = 400
"""Maximum length of a step: training takes three times as long as inference of the same size."""

COLUMNS = (
    "step", "rounds", "bare ms", "xsp's ms", "step: xsp / bare", "goal", "covers bare", "width %",
    "control: bare / bare", "control covers", "control's width %", "neighbours differ %", "faults bare", "faults xsp",
    "iteration: xsp / bare",
)  # fmt: skip


class Size(NamedTuple):
    """A program whose inference step takes about `ms` milliseconds."""

    ms: float
    width: int
    depth: int
    batch: int


SIZES = (
    Size(0.03, 32, 1, 1), Size(0.1, 64, 6, 4), Size(0.3, 128, 12, 16), Size(1, 256, 12, 64), Size(3, 512, 8, 128),
    Size(10, 512, 12, 256), Size(30, 1024, 8, 256), Size(100, 1024, 16, 448), Size(300, 2048, 12, 384),
)  # fmt: skip


Pair = tuple[float, float]
"""Times of the bare stretches before and after a block or a control, in nanoseconds."""


@dataclass
class Measurements:
    """Figures with their intervals, and the neighbouring bare steps: trimmed means over single steps or groups."""

    figures: list[Figure] = field(default_factory=list)
    bare: list[Pair] = field(default_factory=list)

    def ratios(self) -> Figure:
        """Return the ratio of the figures to the neighbouring bare steps."""
        pairs = zip(self.figures, self.bare, strict=True)
        return turns.middle([figure.value / statistics.fmean(bare) for figure, bare in pairs])

    def covered_count(self) -> int:
        """Return how many intervals overlap the range of the two neighbouring bare steps."""
        pairs = zip(self.figures, self.bare, strict=True)
        return sum(figure.lo <= max(bare) and min(bare) <= figure.hi for figure, bare in pairs)

    def width(self) -> float:
        """Return the median width of the intervals, in percent of the step."""
        return 100 * turns.median([(figure.hi - figure.lo) / figure.value for figure in self.figures])

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Measurements:
        """Return the figures stored in a file."""
        return cls(
            [Figure(*values) for values in stored["figures"]], [(before, after) for before, after in stored["bare"]]
        )


@dataclass
class Result:
    """The results of the rounds of one program, in nanoseconds."""

    xsp: Measurements = field(default_factory=Measurements)
    control: Measurements = field(default_factory=Measurements)
    loop: list[float] = field(default_factory=list)
    iteration: list[Pair] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    """Places of the steady steps in the last block, as shares of its length."""

    faults: list[tuple[float, float, float]] = field(default_factory=list)
    """Page faults per step in the bare stretch before each block, in the block, and in the stretch after it."""

    def iterations(self) -> Figure:
        """Return the ratio of xsp's iteration to the bare one."""
        pairs = zip(self.loop, self.iteration, strict=True)
        return turns.middle([loop_ns / statistics.fmean(bare) for loop_ns, bare in pairs])

    def bare_differences(self) -> list[float]:
        """Return the differences between the bare stretches before and after each control, in percent."""
        return [100 * abs(after / before - 1) for before, after in self.control.bare]

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Result:
        """Return the results stored in a file."""
        iteration = [(before, after) for before, after in stored["iteration"]]
        return cls(
            Measurements.from_stored(stored["xsp"]),
            Measurements.from_stored(stored["control"]),
            list(stored["loop"]),
            iteration,
            stored["places"],
            stored["faults"],
        )


def workload(size: Size, train: bool) -> Callable[[], object]:
    """Return a step of a chain of linear layers."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(size.depth):
        layers += [torch.nn.Linear(size.width, size.width), torch.nn.ReLU()]
    net, x = torch.nn.Sequential(*layers), torch.randn(size.batch, size.width)
    if not train:
        net.eval()

        def predict() -> None:
            with torch.no_grad():
                net(x)

        return predict
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

    def learn() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    return learn


class Stretch(NamedTuple):
    """The times of a bare stretch of the loop."""

    times: list[float]
    iteration: float
    faults: float
    """Page faults per step."""

    @property
    def mean(self) -> float:
        """The trimmed mean of the step times."""
        return summary.trimmed_mean(self.times)


def faults() -> int:
    """Return the page faults of this process so far, except faults that read a file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def stretch(step: Callable[[], object], count: int) -> Stretch:
    """Run the loop without xsp."""
    for _ in range(max(3, count // 10)):
        step()
    group = steps_at_once(step)
    times = []
    faults_before, begin = faults(), perf_counter_ns()
    for _ in range(count // group):
        before = perf_counter_ns()
        for _ in range(group):
            step()
        times.append((perf_counter_ns() - before) / group)
    step_count = count // group * group
    return Stretch(times, (perf_counter_ns() - begin) / step_count, (faults() - faults_before) / step_count)


def steps_at_once(step: Callable[[], object]) -> int:
    """Return the number of steps that xsp times as one group."""
    step_ns = turns.time_of(step, 20) * 1e9
    return max(quiet.FEWEST_STEPS, round(quiet.STRETCH_NS / step_ns)) if step_ns < quiet.SHORT_NS else 1


def block(step: Callable[[], object], count: int, result: Result) -> float:
    """Run the loop under xsp, add xsp's figures to `result`, and return the page faults per step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("loop", out=out, samples=False, budget="usual") as prof:
            faults_before = faults()
            for _ in range(count):
                with prof.step():
                    step()
            fault_rate = (faults() - faults_before) / count
        columns, trace = "latency_ms, low_ms, high_ms, loop_ms", xsp.load(out)
        latency, low, high, loop = xsp.analyses.A1(trace).select(columns).fetchall()[0]
        result.places = [steady.step / count for steady in steady_steps(trace.con, trace.run)]
    result.xsp.figures.append(Figure(latency * 1e6, (low or latency) * 1e6, (high or latency) * 1e6))
    result.loop.append((loop or latency) * 1e6)
    return fault_rate


def control(times: Sequence[float], places: Sequence[float]) -> Figure:
    """Return the figure of a bare stretch, from its steps at the places of steady ones."""
    indices = sorted({int(share * len(times)) for share in places})
    selected = [times[place] for place in indices] if len(indices) >= LEAST_CONTROL_STEPS else times
    interval, value = summary.drifting_interval(selected), summary.trimmed_mean(selected)
    return Figure(value, *(interval or (value, value)))


LEAST_CONTROL_STEPS = 5


def measure(size: Size, train: bool, rounds: int, seconds: float, result: Result) -> None:
    """Add rounds to `result`: a block and a control in alternating order, with bare stretches before and after each.

    Each block, control and stretch takes about `seconds` seconds.
    """
    step = workload(size, train)
    count = _count(step, seconds)
    before = stretch(step, count)
    for _ in range(rounds):
        begins_bare = len(result.loop) % 2 == 1  # the first round starts with a block, which has the steady steps
        for is_block in (not begins_bare, begins_bare):
            if is_block:
                block_faults = block(step, count, result)
                after = stretch(step, count)
                result.iteration.append((before.iteration, after.iteration))
                result.faults.append((before.faults, block_faults, after.faults))
            else:
                result.control.figures.append(control(stretch(step, count).times, result.places))
                after = stretch(step, count)
            (result.xsp if is_block else result.control).bare.append((before.mean, after.mean))
            before = after


def _count(step: Callable[[], object], seconds: float) -> int:
    """Return the number of steps of a stretch and of a block."""
    step_s = turns.time_of(step, 20)
    return int(min(20_000, max(LEAST_STEPS if step_s < LONG_S else LEAST_LONG_STEPS, seconds / step_s)))


def _parser() -> argparse.ArgumentParser:
    parser = heap.add_options(turns.parser(__doc__))
    parser.add_argument("--of-seconds", type=float, default=1.5, metavar="S", help="time of a stretch or block")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add each round to FILE when it ends")
    parser.add_argument(
        "--seconds", type=float, metavar="S",
        help="take rounds for S seconds, first of the programs with the fewest (default: --rounds)",
    )  # fmt: skip
    parser.add_argument("--shortest", type=float, default=0, metavar="MS", help="leave out smaller sizes")
    parser.add_argument(
        "--longest", type=float, default=300, metavar="MS", help="leave out larger sizes (default: 300)"
    )
    return parser


class Program(NamedTuple):
    """A size of step, for training or inference."""

    size: Size
    train: bool

    @property
    def name(self) -> str:
        """Name in tables and files."""
        return f"{'training' if self.train else 'inference'} ~{self.size.ms:g} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(_parser(), arguments)
    torch.set_num_threads(1)
    if options.keep_heap:
        heap.keep()
    sizes = [size for size in (SIZES[1:5:3] if options.quick else SIZES) if size.ms <= options.longest]
    sizes = [size for size in sizes if size.ms >= options.shortest]
    programs = [
        Program(size, train) for train in (False, True) for size in sizes if not train or 3 * size.ms < LONGEST_MS
    ]
    stored = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    results = {
        program.name: Result.from_stored(stored[program.name]) if program.name in stored else Result()
        for program in programs
    }

    def save() -> None:
        if options.out:
            content = {**stored, **{name: asdict(entry) for name, entry in results.items() if entry.loop}}
            options.out.write_text(json.dumps(content) + "\n", encoding="utf-8")

    for program, rounds in _visits(programs, results, options):
        measure(
            program.size, program.train, rounds, 0.5 if options.quick else options.of_seconds, results[program.name]
        )
        save()
        result = results[program.name]
        turns.say(
            f"  {program.name}: {result.xsp.ratios().text(3)}, "
            f"covers {result.xsp.covered_count()} of {len(result.loop)}"
        )
    _report({name: entry for name, entry in results.items() if entry.loop}).finish(options)


def _visits(
    programs: Sequence[Program], results: Mapping[str, Result], options: argparse.Namespace
) -> Iterator[tuple[Program, int]]:
    """Yield the program to measure next, and the number of rounds."""
    if options.seconds is None:
        for program in programs:
            default = LONG_ROUNDS if program.size.ms >= 1000 * LONG_S else ROUNDS
            yield program, options.rounds or default
        return
    begin, round_s = time.monotonic(), {program.name: _expected_s(program, options.of_seconds) for program in programs}
    while True:
        seconds_left = options.seconds - (time.monotonic() - begin)
        affordable = [program for program in programs if round_s[program.name] <= seconds_left]
        if not affordable:
            return
        next_program = min(affordable, key=lambda program: len(results[program.name].loop))
        start = time.monotonic()
        yield next_program, 1
        round_s[next_program.name] = time.monotonic() - start


def _expected_s(program: Program, seconds: float) -> float:
    """Return the expected seconds of a round, which has five stretches or blocks, times `TIME_MARGIN`."""
    step_s = program.size.ms * (3 if program.train else 1) / 1e3
    return TIME_MARGIN * 5 * max(seconds, step_s * (LEAST_STEPS if step_s < LONG_S else LEAST_LONG_STEPS))


def _report(results: Mapping[str, Result]) -> turns.Report:
    report = turns.Report("short_steps", "Step time reported by xsp, compared with the bare loop [95 %]", COLUMNS)
    applicable = [result for result in results.values() if _bare_ms(result.xsp) >= LEAST_MS]
    xsp_met, control_met = (sum(_is_met(select(result)) for result in applicable) for select in (_xsp, _control))
    for name, result in results.items():
        _add(report, name, result)
    covered, control_covered = (
        sum(select(result).covered_count() for result in results.values()) for select in (_xsp, _control)
    )
    blocks, differences = (
        sum(len(result.loop) for result in results.values()),
        [difference for result in results.values() for difference in result.bare_differences()],
    )
    if differences:
        report.notes += [
            f"Goal met on {xsp_met} of {len(applicable)} programs from {LEAST_MS:g} ms on; a bare stretch in its "
            f"place meets it on {control_met}.",
            f"xsp's interval covers the bare step in {covered} of {blocks} blocks ({100 * covered / blocks:.0f} %, "
            f"goal 90); that of a bare stretch, by the same code, in {control_covered} of {len(differences)} "
            f"({100 * control_covered / len(differences):.0f} %).",
            f"Neighbouring bare stretches differ by {turns.median(differences):.1f} % at the median, "
            f"{summary.percentile(differences, 0.9):.1f} % at the 90th percentile.",
        ]
    return report


def _xsp(result: Result) -> Measurements:
    return result.xsp


def _control(result: Result) -> Measurements:
    return result.control


def _goal(measurements: Measurements) -> float:
    return GOALS[_bare_ms(measurements) >= SHORT_MS]


def _bare_ms(measurements: Measurements) -> float:
    return turns.median([ns for pair in measurements.bare for ns in pair]) / 1e6


def _is_met(measurements: Measurements) -> bool:
    return abs(measurements.ratios().value - 1) <= _goal(measurements)


def _add(report: turns.Report, name: str, result: Result) -> None:
    goal = f"{'met' if _is_met(result.xsp) else 'missed'} (≤ {100 * _goal(result.xsp):.0f} %)"
    row = [
        name,
        str(len(result.loop)),
        f"{_bare_ms(result.xsp):.4f}",
        f"{turns.median([figure.value for figure in result.xsp.figures]) / 1e6:.4f}",
        result.xsp.ratios().text(3),
        goal if _bare_ms(result.xsp) >= LEAST_MS else "–",
        f"{result.xsp.covered_count()} of {len(result.xsp.figures)}",
        f"{result.xsp.width():.1f}",
        result.control.ratios().text(3),
        f"{result.control.covered_count()} of {len(result.control.figures)}",
        f"{result.control.width():.1f}",
        f"{turns.median(result.bare_differences()):.1f}",
        f"{turns.median([step_faults for before, _, after in result.faults for step_faults in (before, after)]):.0f}",
        f"{turns.median([block_faults for _, block_faults, _ in result.faults]):.0f}",
        result.iterations().text(3),
    ]
    report.add(row, **asdict(result))


if __name__ == "__main__":
    main()
