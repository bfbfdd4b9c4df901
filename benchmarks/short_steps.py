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

LEAST, LEAST_OF_LONG, LONG_S = 90, 60, 0.06
"""Minimum number of steps in a stretch or a block; the same for long steps; minimum seconds of a long step."""

ROUNDS, ROUNDS_OF_LONG = 6, 1
"""Default rounds of a call, which takes about ten minutes; fewer for long steps. `--out` adds them to earlier ones."""

SPACE = 1.5
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
class Held:
    """Figures with their intervals, and the neighbouring bare steps: trimmed means over single steps or groups."""

    figures: list[Figure] = field(default_factory=list)
    bare: list[Pair] = field(default_factory=list)

    def ratios(self) -> Figure:
        """Return the ratio of the figures to the neighbouring bare steps."""
        pairs = zip(self.figures, self.bare, strict=True)
        return turns.middle([each.value / statistics.fmean(bare) for each, bare in pairs])

    def covered(self) -> int:
        """Return how many intervals overlap the range of the two neighbouring bare steps."""
        pairs = zip(self.figures, self.bare, strict=True)
        return sum(each.lo <= max(bare) and min(bare) <= each.hi for each, bare in pairs)

    def width(self) -> float:
        """Return the median width of the intervals, in percent of the step."""
        return 100 * turns.median([(each.hi - each.lo) / each.value for each in self.figures])

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Held:
        """Return the figures stored in a file."""
        return cls([Figure(*each) for each in kept["figures"]], [(before, after) for before, after in kept["bare"]])


@dataclass
class Found:
    """The results of the rounds of one program, in nanoseconds."""

    xsp: Held = field(default_factory=Held)
    control: Held = field(default_factory=Held)
    loop: list[float] = field(default_factory=list)
    iteration: list[Pair] = field(default_factory=list)
    places: list[float] = field(default_factory=list)
    """Places of the steady steps in the last block, as shares of its length."""

    faults: list[tuple[float, float, float]] = field(default_factory=list)
    """Page faults per step in the bare stretch before each block, in the block, and in the stretch after it."""

    def iterations(self) -> Figure:
        """Return the ratio of xsp's iteration to the bare one."""
        pairs = zip(self.loop, self.iteration, strict=True)
        return turns.middle([each / statistics.fmean(bare) for each, bare in pairs])

    def apart(self) -> list[float]:
        """Return the differences between the bare stretches before and after each control, in percent."""
        return [100 * abs(after / before - 1) for before, after in self.control.bare]

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Found:
        """Return the results stored in a file."""
        iteration = [(before, after) for before, after in kept["iteration"]]
        return cls(
            Held.of(kept["xsp"]),
            Held.of(kept["control"]),
            list(kept["loop"]),
            iteration,
            kept["places"],
            kept["faults"],
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
    together = steps_at_once(step)
    times = []
    had, begin = faults(), perf_counter_ns()
    for _ in range(count // together):
        before = perf_counter_ns()
        for _ in range(together):
            step()
        times.append((perf_counter_ns() - before) / together)
    ran = count // together * together
    return Stretch(times, (perf_counter_ns() - begin) / ran, (faults() - had) / ran)


def steps_at_once(step: Callable[[], object]) -> int:
    """Return the number of steps that xsp times as one group."""
    taken_ns = turns.time_of(step, 20) * 1e9
    return max(quiet.FEWEST_STEPS, round(quiet.STRETCH_NS / taken_ns)) if taken_ns < quiet.SHORT_NS else 1


def block(step: Callable[[], object], count: int, found: Found) -> float:
    """Run the loop under xsp, add xsp's figures to `found`, and return the page faults per step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("loop", out=out, samples=False, budget="usual") as prof:
            had = faults()
            for _ in range(count):
                with prof.step():
                    step()
            taken = (faults() - had) / count
        columns, trace = "latency_ms, low_ms, high_ms, loop_ms", xsp.load(out)
        latency, low, high, loop = xsp.analyses.A1(trace).select(columns).fetchall()[0]
        found.places = [each.step / count for each in steady_steps(trace.con, trace.run)]
    found.xsp.figures.append(Figure(latency * 1e6, (low or latency) * 1e6, (high or latency) * 1e6))
    found.loop.append((loop or latency) * 1e6)
    return taken


def control(times: Sequence[float], places: Sequence[float]) -> Figure:
    """Return the figure of a bare stretch, from its steps at the places of steady ones."""
    there = sorted({int(share * len(times)) for share in places})
    chosen = [times[place] for place in there] if len(there) >= LEAST_OF_CONTROL else times
    ends, value = summary.drifting_interval(chosen), summary.trimmed_mean(chosen)
    return Figure(value, *(ends or (value, value)))


LEAST_OF_CONTROL = 5


def measure(size: Size, train: bool, rounds: int, seconds: float, found: Found) -> None:
    """Add rounds to `found`: a block and a control in alternating order, with bare stretches before and after each.

    Each block, control and stretch takes about `seconds` seconds.
    """
    step = workload(size, train)
    count = _count(step, seconds)
    before = stretch(step, count)
    for _ in range(rounds):
        begins_bare = len(found.loop) % 2 == 1  # the first round starts with a block, which has the steady steps
        for is_block in (not begins_bare, begins_bare):
            if is_block:
                inside = block(step, count, found)
                after = stretch(step, count)
                found.iteration.append((before.iteration, after.iteration))
                found.faults.append((before.faults, inside, after.faults))
            else:
                found.control.figures.append(control(stretch(step, count).times, found.places))
                after = stretch(step, count)
            (found.xsp if is_block else found.control).bare.append((before.mean, after.mean))
            before = after


def _count(step: Callable[[], object], seconds: float) -> int:
    """Return the number of steps of a stretch and of a block."""
    taken = turns.time_of(step, 20)
    return int(min(20_000, max(LEAST if taken < LONG_S else LEAST_OF_LONG, seconds / taken)))


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
    kept = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    every = {each.name: Found.of(kept[each.name]) if each.name in kept else Found() for each in programs}

    def save() -> None:
        if options.out:
            whole = {**kept, **{name: asdict(each) for name, each in every.items() if each.loop}}
            options.out.write_text(json.dumps(whole) + "\n", encoding="utf-8")

    for each, rounds in _visits(programs, every, options):
        measure(each.size, each.train, rounds, 0.5 if options.quick else options.of_seconds, every[each.name])
        save()
        found = every[each.name]
        turns.say(f"  {each.name}: {found.xsp.ratios().shown(3)}, covers {found.xsp.covered()} of {len(found.loop)}")
    _report({name: each for name, each in every.items() if each.loop}).finish(options)


def _visits(
    programs: Sequence[Program], every: Mapping[str, Found], options: argparse.Namespace
) -> Iterator[tuple[Program, int]]:
    """Yield the program to measure next, and the number of rounds."""
    if options.seconds is None:
        for each in programs:
            usual = ROUNDS_OF_LONG if each.size.ms >= 1000 * LONG_S else ROUNDS
            yield each, options.rounds or usual
        return
    begin, took = time.monotonic(), {each.name: _expected_s(each, options.of_seconds) for each in programs}
    while True:
        left = options.seconds - (time.monotonic() - begin)
        fit = [each for each in programs if took[each.name] <= left]
        if not fit:
            return
        chosen = min(fit, key=lambda each: len(every[each.name].loop))
        began = time.monotonic()
        yield chosen, 1
        took[chosen.name] = time.monotonic() - began


def _expected_s(program: Program, seconds: float) -> float:
    """Return the expected seconds of a round, which has five stretches or blocks, times `SPACE`."""
    step_s = program.size.ms * (3 if program.train else 1) / 1e3
    return SPACE * 5 * max(seconds, step_s * (LEAST if step_s < LONG_S else LEAST_OF_LONG))


def _report(every: Mapping[str, Found]) -> turns.Report:
    report = turns.Report("short_steps", "Step time reported by xsp, compared with the bare loop [95 %]", COLUMNS)
    meant = [each for each in every.values() if _bare_ms(each.xsp) >= LEAST_MS]
    met, possible = (sum(_is_met(held(each)) for each in meant) for held in (_xsp, _control))
    for name, one in every.items():
        _add(report, name, one)
    covered, held = (sum(which(each).covered() for each in every.values()) for which in (_xsp, _control))
    blocks, apart = sum(len(each.loop) for each in every.values()), [p for each in every.values() for p in each.apart()]
    if apart:
        report.notes += [
            f"Goal met on {met} of {len(meant)} programs from {LEAST_MS:g} ms on; a bare stretch in its "
            f"place meets it on {possible}.",
            f"xsp's interval covers the bare step in {covered} of {blocks} blocks ({100 * covered / blocks:.0f} %, "
            f"goal 90); that of a bare stretch, by the same code, in {held} of {len(apart)} "
            f"({100 * held / len(apart):.0f} %).",
            f"Neighbouring bare stretches differ by {turns.median(apart):.1f} % at the median, "
            f"{summary.percentile(apart, 0.9):.1f} % at the 90th percentile.",
        ]
    return report


def _xsp(one: Found) -> Held:
    return one.xsp


def _control(one: Found) -> Held:
    return one.control


def _goal(held: Held) -> float:
    return GOALS[_bare_ms(held) >= SHORT_MS]


def _bare_ms(held: Held) -> float:
    return turns.median([each for pair in held.bare for each in pair]) / 1e6


def _is_met(held: Held) -> bool:
    return abs(held.ratios().value - 1) <= _goal(held)


def _add(report: turns.Report, name: str, one: Found) -> None:
    goal = f"{'met' if _is_met(one.xsp) else 'missed'} (≤ {100 * _goal(one.xsp):.0f} %)"
    row = [
        name,
        str(len(one.loop)),
        f"{_bare_ms(one.xsp):.4f}",
        f"{turns.median([each.value for each in one.xsp.figures]) / 1e6:.4f}",
        one.xsp.ratios().shown(3),
        goal if _bare_ms(one.xsp) >= LEAST_MS else "–",
        f"{one.xsp.covered()} of {len(one.xsp.figures)}",
        f"{one.xsp.width():.1f}",
        one.control.ratios().shown(3),
        f"{one.control.covered()} of {len(one.control.figures)}",
        f"{one.control.width():.1f}",
        f"{turns.median(one.apart()):.1f}",
        f"{turns.median([each for before, _, after in one.faults for each in (before, after)]):.0f}",
        f"{turns.median([inside for _, inside, _ in one.faults]):.0f}",
        one.iterations().shown(3),
    ]
    report.add(row, **asdict(one))


if __name__ == "__main__":
    main()
