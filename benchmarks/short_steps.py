"""How close are the times that xsp reports for steps and iterations to the same loop without xsp, from 0.03 to 300 ms?

For each size, a chain of layers runs in a loop: without xsp in one process, under `xsp run` in another, in turns
(`parts/pairs.py`). The step's latency (A1's `latency_ms`, `low_ms`, `high_ms`) is compared with the program's own
iteration less what its clock takes, and the iteration (`loop`) with the program's own.

Page faults are counted, too: glibc returns memory at the end of its heap to the system, and whether a step's memory is
there depends on earlier allocations. A training step of 40 ms has 0 or 2,000 faults, which take 5 ms. With
`--keep-memory` glibc keeps that memory, in all processes alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from parts import pairs, turns
from parts.apart import Program
from parts.pairs import Pair

LEAST_MS = 0.03
"""Minimum iteration for the goal to apply; on a fast machine the steps of the smallest program are shorter."""

LONGEST_MS = 400
"""Maximum length of a step: training takes three times as long as inference of the same size."""

COLUMNS = (
    "step", "pairs", "own ms", "latency ms", "latency / own", "goal", "covers", "width %", "iteration / own", "covers ",
    "processes differ %", "faults without xsp", "faults with xsp",
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


def workload(size: Size, train: bool) -> Callable[[], object]:
    """Return a step of a chain of linear layers, to be run in this process."""
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


def program_of(size: Size, train: bool) -> Program:
    """Return the program of a size, whose step is a function."""
    command = f"mlp.py --width {size.width} --depth {size.depth} --batch {size.batch}"
    if train:
        return Program(f"training ~{size.ms:g} ms", f"{command} --train SGD", ("--step", "learn"))
    return Program(f"inference ~{size.ms:g} ms", command, ("--step", "predict"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = pairs.parser(__doc__, seconds=2.0)
    parser.add_argument("--shortest", type=float, default=0, metavar="MS", help="leave out smaller sizes")
    parser.add_argument("--longest", type=float, default=300, metavar="MS", help="leave out larger sizes")
    options = pairs.parse(parser, arguments)
    sizes = [
        size for size in (SIZES[1:5:3] if options.quick else SIZES) if options.shortest <= size.ms <= options.longest
    ]
    programs = [
        program_of(size, train) for train in (False, True) for size in sizes if not train or 3 * size.ms < LONGEST_MS
    ]
    report = turns.Report("short_steps", "Step time reported by xsp, compared with that without xsp [95 %]", COLUMNS)
    measured = pairs.measure(pairs.selected(programs, options), options, report)
    for name, known in measured.items():
        _add(report, name, known)
    report.notes += _summary(measured)
    report.finish(options)


def _kind(known: Sequence[Pair]) -> str:
    return next(iter(known[0].bare.kinds))


def latency_ratios(known: Sequence[Pair]) -> turns.Figure:
    """Return the latency divided by the program's own step: its iteration less what its clock takes."""
    kind = _kind(known)
    values = [
        stated[0] / (pair.bare.own_s(kind) - pair.bare.clock_s)
        for pair in known
        if (stated := pair.stated(kind, "latency")) is not None
    ]
    return pairs.middle(values)


def _covers(pair: Pair, kind: str) -> bool:
    """Return whether the interval of the latency contains the program's own step."""
    stated = pair.stated(kind, "latency")
    if stated is None or stated[1] is None or stated[2] is None:
        return False
    return stated[1] <= pair.bare.own_s(kind) - pair.bare.clock_s <= stated[2]


def _add(report: turns.Report, name: str, known: Sequence[Pair]) -> None:
    kind = _kind(known)
    own_s, latency = pairs.own_s(known, kind), latency_ratios(known)
    figures = [stated for pair in known if (stated := pair.stated(kind, "latency")) is not None]
    widths = [100 * (high - low) / value for value, low, high in figures if low is not None and high is not None]
    row = [
        name, str(len(known)), f"{1e3 * own_s:.4f}",
        f"{1e3 * statistics.median(value for value, _, _ in figures):.4f}" if figures else "–",
        latency.text(3), pairs.verdict(latency, own_s) if own_s * 1e3 >= LEAST_MS else "–",
        f"{sum(_covers(pair, kind) for pair in known)} of {len(known)}",
        f"{statistics.median(widths):.1f}" if widths else "–",
        pairs.ratios(known, kind).text(3), f"{sum(pair.covers(kind) for pair in known)} of {len(known)}",
        pairs.number(pairs.spread_percent(known, kind), 1),
        f"{statistics.median(pair.bare.faults for pair in known):.0f}",
        f"{statistics.median(pair.profiled.said.faults for pair in known):.0f}",
    ]  # fmt: skip
    report.add(row, latency=latency, pairs=[pair.as_stored() for pair in known])


def _summary(measured: Mapping[str, Sequence[Pair]]) -> list[str]:
    if not measured:
        return ["No program was measured."]
    applicable = [known for known in measured.values() if pairs.own_s(known, _kind(known)) * 1e3 >= LEAST_MS]
    met = sum(
        abs(latency_ratios(known).value - 1) <= pairs.goal(pairs.own_s(known, _kind(known))) for known in applicable
    )
    total = sum(len(known) for known in measured.values())
    covered = sum(_covers(pair, _kind(known)) for known in measured.values() for pair in known)
    return [
        f"Latency: goal met on {met} of {len(applicable)} programs from {LEAST_MS:g} ms on; its interval covers the "
        f"program's own step in {covered} of {total} pairs (goal 9 of 10).",
        *pairs.within(measured),
    ]


if __name__ == "__main__":
    main()
