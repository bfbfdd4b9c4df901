"""What xsp says that a step and an iteration take, against the same loop without xsp, from 0.03 to 300 ms.

For each size of step, bare stretches of the loop and whole `xsp.profile` blocks of it take turns. Held against each
other are the step's latency (A1's `latency_ms`, `low_ms`, `high_ms`) and the bare step, and the loop's iteration
(`loop_ms`) and the bare iteration. The bare loop reads the clock as seldom as xsp does: around each step from 1 ms on,
around stretches of some milliseconds of shorter ones, so that what holds the machine up counts alike on both sides.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import torch
from parts import turns
from parts.turns import Figure

import xsp
from xsp import summary
from xsp.record import quiet

SHORT_MS = 1.0
GOALS = (0.05, 0.02)
"""Below and from `SHORT_MS` on."""

COLUMNS = ("step", "rounds", "bare ms", "xsp's ms", "step: xsp / bare", "goal", "covers bare", "iteration: xsp / bare")


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

    bare: list[float] = field(default_factory=list)
    """Trimmed mean of each bare stretch, over its steps or over parts of it."""

    iteration: list[float] = field(default_factory=list)
    xsp: list[Figure] = field(default_factory=list)
    loop: list[float] = field(default_factory=list)

    def around(self, place: int) -> tuple[float, float]:
        """Return the bare step and iteration next to a block: the means of the stretches before and after it."""
        return (
            sum(self.bare[place : place + 2]) / 2,
            sum(self.iteration[place : place + 2]) / 2,
        )

    def ratios(self) -> Figure:
        """Return xsp's step over the bare one."""
        return turns.middle([each.value / self.around(place)[0] for place, each in enumerate(self.xsp)])

    def iterations(self) -> Figure:
        """Return xsp's iteration over the bare one."""
        return turns.middle([each / self.around(place)[1] for place, each in enumerate(self.loop)])

    def covered(self) -> int:
        """Return in how many rounds xsp's interval holds the bare step, as the stretches around it saw it."""
        return sum(
            each.lo <= max(self.bare[place : place + 2]) and min(self.bare[place : place + 2]) <= each.hi
            for place, each in enumerate(self.xsp)
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


def stretch(step: Callable[[], object], count: int, found: Found) -> None:
    """Run the loop without xsp."""
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
    found.iteration.append((perf_counter_ns() - begin) / (count // together * together))
    found.bare.append(summary.trimmed_mean(times))


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
    count = int(min(20_000, max(60, seconds / turns.time_of(step, 20))))
    found = Found()
    stretch(step, count, found)
    for _ in range(rounds):
        block(step, count, found)
        stretch(step, count, found)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = turns.parser(__doc__)
    parser.add_argument("--of-seconds", type=float, default=2.0, metavar="S", help="of each stretch and each block")
    parser.add_argument(
        "--longest", type=float, default=300, metavar="MS", help="leave out longer steps (default: 300)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = turns.parse(_parser(), arguments)
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.quick else 5)
    seconds = 0.5 if options.quick else options.of_seconds
    sizes = [size for size in (SIZES[1:5:3] if options.quick else SIZES) if size.ms <= options.longest]
    report = turns.Report("short_steps", "What xsp says that a step takes, against the bare loop [95 %]", COLUMNS)
    met = covered = blocks = 0
    for train in (False, True):
        for size in sizes:
            one = measure(size, train, rounds, seconds)
            met += _add(report, size, train, one)
            covered, blocks = covered + one.covered(), blocks + len(one.xsp)
    count = 2 * len(sizes)
    report.notes += [
        f"Steps up to {sizes[-1].ms:g} ms. Goal met on {met} of {count}; "
        f"xsp's interval covers the bare step in {covered} of {blocks} blocks."
    ]
    report.finish(options)


def _add(report: turns.Report, size: Size, train: bool, one: Found) -> bool:
    bare, ratio = turns.median(one.bare), one.ratios()
    goal = GOALS[bare / 1e6 >= SHORT_MS]
    met = abs(ratio.value - 1) <= goal
    name = f"{'training' if train else 'inference'} ~{size.ms:g} ms"
    row = [
        name,
        str(len(one.xsp)),
        f"{bare / 1e6:.4f}",
        f"{turns.median([each.value for each in one.xsp]) / 1e6:.4f}",
        ratio.shown(3),
        f"{'met' if met else 'missed'} (≤ {100 * goal:.0f} %)",
        f"{one.covered()} of {len(one.xsp)}",
        one.iterations().shown(3),
    ]
    report.add(row, bare=one.bare, iteration=one.iteration, xsp=one.xsp, loop=one.loop)
    return met


if __name__ == "__main__":
    main()
