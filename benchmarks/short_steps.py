"""What xsp says that a step and an iteration take, against the same loop without xsp, from 0.03 to 300 ms.

For each size of step, bare stretches of the loop and whole `xsp.profile` blocks of it take turns. Held against each
other are the step's latency (A1's `latency_ms`, `low_ms`, `high_ms`) and the bare step, and the loop's iteration
(`loop_ms`) and the bare iteration. The bare loop reads the clock as seldom as xsp does: around each step from 1 ms on,
around stretches of some milliseconds of shorter ones, so that what holds the machine up counts alike on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from parts import turns
from parts.turns import Figure

import xsp
from xsp import summary
from xsp.record import quiet

SHORT_MS = 1.0
GOALS = (0.05, 0.02)
"""Below and from `SHORT_MS` on."""

LEAST, LEAST_OF_LONG, LONG_S = 90, 60, 0.06
"""Steps of a stretch and of a block; of steps of so many seconds and more."""

ROUNDS, ROUNDS_OF_LONG = 6, 1
"""That one call measures, unless told otherwise: in about ten minutes. `--out` adds them to those of calls before."""

COLUMNS = (
    "step", "rounds", "bare ms", "xsp's ms", "step: xsp / bare", "goal", "covers bare", "width %",
    "iteration: xsp / bare",
)  # fmt: skip


class Size(NamedTuple):
    """A step of about so many milliseconds."""

    ms: float
    width: int
    depth: int
    batch: int


SIZES = (
    Size(0.03, 32, 1, 1), Size(0.1, 64, 6, 4), Size(0.3, 128, 12, 16), Size(1, 256, 12, 64), Size(3, 512, 8, 128),
    Size(10, 512, 12, 256), Size(30, 1024, 8, 256), Size(100, 1024, 16, 448), Size(300, 2048, 12, 384),
)  # fmt: skip


@dataclass
class Found:
    """What the rounds of one size came to, in nanoseconds."""

    bare: list[tuple[float, float]] = field(default_factory=list)
    """Trimmed mean of the bare stretches before and after each block, over their steps or over parts of them."""

    iteration: list[tuple[float, float]] = field(default_factory=list)
    xsp: list[Figure] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)

    def ratios(self) -> Figure:
        """Return xsp's step over the bare one: of the stretches before and after the block, the mean."""
        pairs = zip(self.xsp, self.bare, strict=True)
        return turns.middle([each.value / statistics.fmean(bare) for each, bare in pairs])

    def iterations(self) -> Figure:
        """Return xsp's iteration over the bare one."""
        pairs = zip(self.loop, self.iteration, strict=True)
        return turns.middle([each / statistics.fmean(bare) for each, bare in pairs])

    def covered(self) -> int:
        """Return in how many rounds xsp's interval holds the bare step, as the stretches around it saw it."""
        pairs = zip(self.xsp, self.bare, strict=True)
        return sum(each.lo <= max(bare) and min(bare) <= each.hi for each, bare in pairs)

    def width(self) -> float:
        """Return the width of xsp's intervals, in percent of the step: their median."""
        return 100 * turns.median([(each.hi - each.lo) / each.value for each in self.xsp])

    def take(self, other: Found) -> None:
        """Take in the rounds of another."""
        self.bare += other.bare
        self.iteration += other.iteration
        self.xsp += other.xsp
        self.loop += other.loop

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Found:
        """Return what a file kept."""
        bare, iteration = ([(before, after) for before, after in kept[name]] for name in ("bare", "iteration"))
        return cls(bare, iteration, [Figure(*each) for each in kept["xsp"]], list(kept["loop"]))


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


def stretch(step: Callable[[], object], count: int) -> tuple[float, float]:
    """Run the loop without xsp, and return what a step and an iteration take."""
    for _ in range(max(3, count // 10)):
        step()
    together = steps_at_once(step)
    times = []
    begin = perf_counter_ns()
    for _ in range(count // together):
        before = perf_counter_ns()
        for _ in range(together):
            step()
        times.append((perf_counter_ns() - before) / together)
    return summary.trimmed_mean(times), (perf_counter_ns() - begin) / (count // together * together)


def steps_at_once(step: Callable[[], object]) -> int:
    """Return how many steps xsp times together."""
    taken_ns = turns.time_of(step, 20) * 1e9
    return max(quiet.LEAST, round(quiet.STRETCH_NS / taken_ns)) if taken_ns < quiet.SHORT_NS else 1


def block(step: Callable[[], object], count: int, found: Found) -> None:
    """Run the loop under xsp, and take in what xsp says of it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with xsp.profile("loop", out=out, samples=False, budget="usual") as prof:
            for _ in range(count):
                with prof.step():
                    step()
        columns = "latency_ms, low_ms, high_ms, loop_ms"
        latency, low, high, loop = xsp.analyses.A1(xsp.load(out)).select(columns).fetchall()[0]
    found.xsp.append(Figure(latency * 1e6, (low or latency) * 1e6, (high or latency) * 1e6))
    found.loop.append((loop or latency) * 1e6)


def measure(size: Size, train: bool, rounds: int, seconds: float) -> Found:
    """Run a bare stretch, then in turns a block and a bare stretch, each of about so many seconds."""
    step = workload(size, train)
    found, taken = Found(), turns.time_of(step, 20)
    count = int(min(20_000, max(LEAST if taken < LONG_S else LEAST_OF_LONG, seconds / taken)))
    before = stretch(step, count)
    for _ in range(rounds):
        block(step, count, found)
        after = stretch(step, count)
        found.bare.append((before[0], after[0]))
        found.iteration.append((before[1], after[1]))
        before = after
    return found


def _parser() -> argparse.ArgumentParser:
    parser = turns.parser(__doc__)
    parser.add_argument("--of-seconds", type=float, default=1.5, metavar="S", help="of each stretch and each block")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the rounds to those in FILE, size by size")
    parser.add_argument(
        "--shortest", type=float, default=0, metavar="MS", help="leave out shorter steps (default: none)"
    )
    parser.add_argument(
        "--longest", type=float, default=300, metavar="MS", help="leave out longer steps (default: 300)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(_parser(), arguments)
    torch.set_num_threads(1)
    seconds = 0.5 if options.quick else options.of_seconds
    sizes = [size for size in (SIZES[1:5:3] if options.quick else SIZES) if size.ms <= options.longest]
    sizes = [size for size in sizes if size.ms >= options.shortest]
    kept = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    report = turns.Report("short_steps", "What xsp says that a step takes, against the bare loop [95 %]", COLUMNS)
    met = covered = blocks = 0
    for train in (False, True):
        for size in sizes:
            name = f"{'training' if train else 'inference'} ~{size.ms:g} ms"
            one = Found.of(kept[name]) if name in kept else Found()
            usual = ROUNDS_OF_LONG if size.ms >= 1000 * LONG_S else ROUNDS
            one.take(measure(size, train, options.rounds or usual, seconds))
            kept[name] = asdict(one)
            if options.out:
                options.out.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            turns.say(f"  {name}: {one.ratios().shown(3)}, covers {one.covered()} of {len(one.xsp)}")
            met += _add(report, name, one)
            covered, blocks = covered + one.covered(), blocks + len(one.xsp)
    count = 2 * len(sizes)
    report.notes += [
        f"Steps up to {sizes[-1].ms:g} ms. Goal met on {met} of {count}; "
        f"xsp's interval covers the bare step in {covered} of {blocks} blocks."
    ]
    report.finish(options)


def _add(report: turns.Report, name: str, one: Found) -> bool:
    bare, ratio = turns.median([each for pair in one.bare for each in pair]), one.ratios()
    goal = GOALS[bare / 1e6 >= SHORT_MS]
    met = abs(ratio.value - 1) <= goal
    row = [
        name,
        str(len(one.xsp)),
        f"{bare / 1e6:.4f}",
        f"{turns.median([each.value for each in one.xsp]) / 1e6:.4f}",
        ratio.shown(3),
        f"{'met' if met else 'missed'} (≤ {100 * goal:.0f} %)",
        f"{one.covered()} of {len(one.xsp)}",
        f"{one.width():.1f}",
        one.iterations().shown(3),
    ]
    report.add(row, bare=one.bare, iteration=one.iteration, xsp=one.xsp, loop=one.loop)
    return met


if __name__ == "__main__":
    main()
