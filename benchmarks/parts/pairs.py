"""The reference of figures: pairs of one process of a program without xsp and one under `xsp run`, in turns.

The order of the two is drawn for the first pair and alternates after it. Figures are medians over pairs. Pairs during
which other processes used the machine are left out where enough are left.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from parts import turns
from parts.apart import Bare, Interval, Profiled, Program, Runner, Stated
from parts.quiet import Patience

DISTURBED_CORES = 0.3
"""Cores that other processes may use during a pair that counts."""

LEAST_PAIRS = 3
"""Minimum number of undisturbed pairs; with fewer, disturbed ones count too."""

SHORT_MS = 1.0
GOALS = (0.05, 0.02)
"""Goals: maximum relative error of iterations below `SHORT_MS`, and of longer ones."""

EXPECTED_S = 25.0
"""Seconds that the first pair of a program is expected to take."""

QUICK_PAIRS, QUICK_S = 2, 1.5
"""Pairs of a program and seconds of a loop with `--quick`."""


class Pair(NamedTuple):
    """One process without xsp and one under it."""

    bare: Bare
    profiled: Profiled

    def ratio(self, kind: str, figure: str = "iteration") -> float | None:
        """Return what xsp states divided by the program's own; None if it states nothing."""
        stated = self.stated(kind, figure)
        return None if stated is None else stated[0] / self.bare.own_s(kind)

    def stated(self, kind: str, figure: str = "iteration") -> Interval | None:
        """Return a figure of `Stated` with its interval."""
        value: Interval | None
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

    def covers_other(self, other: Bare, kind: str, figure: str = "iteration") -> bool:
        """Return whether that interval, put around another process without xsp, contains the program's own figure."""
        stated = self.stated(kind, figure)
        if stated is None or stated[1] is None or stated[2] is None:
            return False
        scale = other.own_s(kind) / stated[0]
        return stated[1] * scale <= self.bare.own_s(kind) <= stated[2] * scale

    def is_disturbed(self) -> bool:
        """Return whether other processes used too much of the machine meanwhile."""
        return self.others() > DISTURBED_CORES

    def others(self) -> float:
        """Return the cores that other processes used, in the process where it was more."""
        return max(self.bare.others, self.profiled.said.others)

    def as_stored(self) -> dict[str, Any]:
        """Return plain data."""
        return {"bare": asdict(self.bare), "profiled": asdict(self.profiled)}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Pair:
        """Return the pair of `as_stored`, which may have been through JSON."""
        profiled = stored["profiled"]
        kinds = {kind: Stated(**figures) for kind, figures in profiled["stated"].items()}
        return cls(Bare(**stored["bare"]), Profiled(**{**profiled, "said": Bare(**profiled["said"]), "stated": kinds}))


# --- measuring --------------------------------------------------------------------------------------------


def parser(documentation: str | None, pairs: int = 6, seconds: float = 4.0) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts with pairs of processes have."""
    argument_parser = turns.parser(documentation, rounds=pairs)
    argument_parser.add_argument("--only", nargs="+", metavar="NAME", help="programs, by their names in the table")
    argument_parser.add_argument(
        "--of-seconds", type=float, metavar="S", help=f"time of a loop (default: {seconds:g}, quick: {QUICK_S:g})"
    )
    argument_parser.add_argument("--threads", type=int, default=1, help="threads of torch in a process (default: 1)")
    argument_parser.add_argument("--minutes", type=float, metavar="M", help="start no pair that may end later")
    argument_parser.add_argument(
        "--out", type=Path, metavar="FILE", help="append pairs to FILE when they end, and report all that are in it"
    )
    argument_parser.set_defaults(default_seconds=seconds)
    return argument_parser


def parse(argument_parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    options = turns.parse(argument_parser, arguments)
    default_s = options.__dict__.pop("default_seconds")
    if options.of_seconds is None:
        options.of_seconds = QUICK_S if options.quick else default_s
    return options


def selected(programs: Sequence[Program], options: argparse.Namespace, quick: Collection[str] = ()) -> list[Program]:
    """Return the programs of `--only`; else with `--quick` those named in `quick`, if any; else all.

    Raises:
        SystemExit: there is no such program.
    """
    names = [program.name for program in programs]
    if options.only and (unknown := set(options.only) - set(names)):
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = options.only or (options.quick and quick) or names
    return [program for program in programs if program.name in wanted]


def measure(
    programs: Sequence[Program], options: argparse.Namespace, report: turns.Report, runner: Runner | None = None
) -> dict[str, list[Pair]]:
    """Run pairs of the programs: all of them once, in a random order, then again.

    Notes which programs did not run and why, and how many pairs were left out.

    Args:
        programs: programs, as `selected`.
        options: of `parser`.
        report: receives the notes.
        runner: starts the processes; one without a device by default.

    Returns:
        The pairs that count by the name of the program, of all that have one, in their order; those of `--out` too.
    """
    pairs: dict[str, list[Pair]] = {program.name: [] for program in programs}
    for row in turns.stored_rows(options.out).values():
        if row["program"] in pairs:
            pairs[row["program"]].append(Pair.from_stored(row))
    runner = runner or Runner()
    runner.seconds, runner.threads = options.of_seconds, options.threads
    runner.counts.update({name: known[0].bare.iterations for name, known in pairs.items() if known})
    with report.until_interrupted():
        for program in _visits(programs, pairs, options, report):
            known = pairs[program.name]
            with report.trying(program.name):
                known.append(_pair(runner, program, len(known), options.seed))
                row = {"program": program.name, **known[-1].as_stored()}
                turns.store_row(options.out, f"{program.name} {len(known)}", row)
                turns.say(f"  {program.name}: {_brief(known[-1])}")
    measured = {name: known for name, known in pairs.items() if known}
    counted = {name: undisturbed(known) for name, known in measured.items()}
    if measured:
        report.notes.append(_disturbance(counted, sum(map(len, measured.values()))))
    return counted


def _pair(runner: Runner, program: Program, number: int, seed: int) -> Pair:
    """Run a pair; the very first one begins without xsp, because its first process decides the iterations.

    Raises:
        XspError: a process failed, or its run cannot be read.
    """
    is_even_bare = random.Random(f"{seed} {program.name}").random() < 0.5
    if program.name not in runner.counts or (number % 2 == 0) == is_even_bare:
        bare = runner.bare(program)
        return Pair(bare, runner.profiled(program))
    profiled = runner.profiled(program)
    return Pair(runner.bare(program), profiled)


def _visits(
    programs: Sequence[Program], pairs: Mapping[str, Sequence[Pair]], options: argparse.Namespace, report: turns.Report
) -> Iterator[Program]:
    """Yield the program to run next, when the machine is quiet or the patience ends."""
    able = []
    for program in programs:
        if lacking := program.missing():
            report.notes.append(f"{program.name}: left out, it needs {lacking}.")
        else:
            able.append(program)
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    draw = random.Random(options.seed)
    for number in range(QUICK_PAIRS if options.quick else options.rounds):
        for program in draw.sample(able, k=len(able)):
            known = pairs[program.name]
            if len(known) != number:  # one failed, or they were stored
                continue
            expected_s = known[-1].bare.wall_s + known[-1].profiled.said.wall_s if known else EXPECTED_S
            if time.monotonic() + expected_s > end:
                report.notes.append(f"{program.name}: {number} pairs, further ones would not have ended in time.")
                continue
            Patience(options.patience).wait()
            yield program


def _brief(pair: Pair) -> str:
    """Return one line on a pair, for progress."""
    kinds = ", ".join(
        f"{kind} {1e3 * pair.bare.own_s(kind):.4g} ms, stated / own {number(pair.ratio(kind), 3)}"
        for kind in pair.bare.kinds
    )
    whole = f"whole process {pair.whole():.2f} ×, {pair.added_s():+.1f} s"
    return f"{kinds}; {whole}; others used {pair.bare.others:.1f} and {pair.profiled.said.others:.1f} cores"


def _disturbance(counted: Mapping[str, Sequence[Pair]], measured: int) -> str:
    known = [pair for pairs in counted.values() for pair in pairs]
    disturbed = sum(pair.is_disturbed() for pair in known)
    return (
        f"{len(known)} of {measured} pairs count; {disturbed} of them although other processes used more than "
        f"{DISTURBED_CORES:g} cores meanwhile ({statistics.median(pair.others() for pair in known):.2f} in the median "
        f"of all that count)."
    )


# --- figures ----------------------------------------------------------------------------------------------


def undisturbed(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs during which other processes used little of the machine; all, if these are too few."""
    quiet = [pair for pair in pairs if not pair.is_disturbed()]
    return quiet if len(quiet) >= LEAST_PAIRS else list(pairs)


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


def number(value: float | None, digits: int) -> str:
    """Return a number as text; a dash if there is none."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def own_s(pairs: Sequence[Pair], kind: str) -> float:
    """Return the median of the program's own iteration."""
    return statistics.median(pair.bare.own_s(kind) for pair in pairs)


def within(programs: Mapping[str, Sequence[Pair]], figure: str = "iteration") -> list[str]:
    """Return notes on the goals over all kinds of iterations of all programs: errors, and intervals that cover."""
    kinds = [(pairs, kind) for pairs in programs.values() for kind in pairs[0].bare.kinds]
    notes = []
    for is_long, allowed in enumerate(GOALS):
        chosen = [(pairs, kind) for pairs, kind in kinds if (own_s(pairs, kind) * 1e3 >= SHORT_MS) == bool(is_long)]
        count = sum(abs(ratios(pairs, kind, figure).value - 1) <= allowed for pairs, kind in chosen)
        side = f"of {SHORT_MS:g} ms and more" if is_long else f"below {SHORT_MS:g} ms"
        notes.append(f"Iterations {side}: stated within {100 * allowed:g} % in {count} of {len(chosen)}.")
    total = sum(len(pairs) for pairs, _ in kinds)
    covered = sum(pair.covers(kind, figure) for pairs, kind in kinds for pair in pairs)
    others = [
        pair.covers_other(other.bare, kind, figure)
        for pairs, kind in kinds
        for pair, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True)
        if pair is not other
    ]
    notes.append(
        f"The interval covers the program's own iteration in {covered} of {total} pairs (goal 9 of 10). Put around "
        f"another process without xsp, it does in {sum(others)} of {len(others)}: as often as the machine allows."
    )
    return notes
