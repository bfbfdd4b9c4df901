"""How often does `xsp compare` find a change where there is none, and how reliably does it find one of 5 %?

Each round starts three processes in random order: a program, the same program again, and one whose step does 5 % more
of the same work (42 equal layers instead of 40). Each is a separate run under `xsp profile`. Courses of turns are then
drawn from the rounds: consecutive rounds from a random start, with the two equal programs in random order. Each course
is evaluated after every turn and stops when the evidence is sufficient, as in `xsp compare --turns`.

`single pairs that differ` counts pairs of runs of the same program whose steps alone suggest a change, which is why
several runs are needed. Figures need many rounds on a quiet machine: repeat `--out FILE --seconds 540` until there are
80.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from parts import turns

import xsp
from xsp.comparison import commands, evidence, series
from xsp.comparison.evidence import NO_EVIDENCE, STEPS, Repeats
from xsp.comparison.series import Series

GOAL_FALSE, GOAL_FOUND = 0.05, 0.9
PROGRAM = """
import torch

def net(layers):
    torch.set_num_threads({threads})
    made = [torch.nn.Linear({width}, {width}) for _ in range(layers)]
    return torch.nn.Sequential(*made), torch.ones({batch}, {width})

def before(batch):
    return net(40)

def after(batch):
    return net(42)
"""
SIZES = {"small": (128, 64), "large": (512, 256)}
"""Size of the program → width of a layer, and rows of its input."""

FIRST, AGAIN, SLOWER = "first", "again", "slower"
COLUMNS = (
    "program", "rounds", "step ms", "within a run %", "between runs %", "single pairs that differ", "courses",
    "false alarms %", "≤ 5 %", "5 % slower found %", "≥ 90 %", "turns until then",
)  # fmt: skip

MANY_ROUNDS = 1000
"""Number of rounds that no call reaches if `--seconds` limits it."""

Round = dict[str, Series]
"""Name of a run → the series of its steps."""


class Course(NamedTuple):
    """One comparison in turns."""

    verdict: str
    turns: int


def measured(
    place: Path, rounds: int, repeats: int, seed: int, kept: list[Round], seconds: float
) -> Iterator[list[Round]]:
    """Measure rounds, and after each one yield the steps of all rounds, stored ones first.

    No round starts that would end after `seconds`, judged by the duration of the previous round.
    """
    draw, found = random.Random(f"{seed} {len(kept)}"), list(kept)
    begin = began = time.monotonic()
    for turn in range(rounds):
        now = time.monotonic()
        if 2 * now - began - begin >= seconds:
            return
        began = now
        of_round = {}
        for name in draw.sample((FIRST, AGAIN, SLOWER), k=3):
            typed = f"{place / 'program.py'}:{'after' if name is SLOWER else 'before'} --repeats {repeats}"
            out = place / f"{name}-{turn}"
            subprocess.run(commands.program(typed).command(out, "M/L", seed), check=True, stdin=subprocess.DEVNULL)
            of_round[name] = series.steps(xsp.load(out))
        alike, _ = series.best_common_steps(list(of_round.values()))
        found.append({name: each[0] for name, each in zip(of_round, alike, strict=True)})
        turns.say(f"  round {turn + 1} of {rounds}, {len(found)} in total")
        yield found


def course(how: Repeats, rounds: Sequence[Round], names: Sequence[str], most: int, draw: random.Random) -> Course:
    """Compare two programs in turns, with turns drawn from the measured rounds."""
    begin = draw.randrange(len(rounds))
    sides: tuple[list[float], list[float]] = ([], [])
    for turn in range(1, most + 1):
        of_turn = rounds[(begin + turn) % len(rounds)]
        for side, name in zip(sides, names if SLOWER in names else draw.sample(names, k=2), strict=True):
            side.append(series.figure(of_turn[name]))
        if turn >= evidence.MIN_TURNS and (evidence.compare_turn(how, *sides).is_enough or turn == most):
            return Course(said(how, *sides), turn)
    raise AssertionError("a course ends with its last turn")


def said(how: Repeats, a: Sequence[float], b: Sequence[float]) -> str:
    """Return the verdict on two series of figures."""
    found = how.evidence(a, b)
    return how.verdict(found, how.adjusted([found.p])[0], min(len(a), len(b)))


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, in percent of the mean."""
    return 100 * statistics.stdev(values) / statistics.fmean(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=12)
    made.add_argument("--sizes", nargs="+", choices=SIZES, help="sizes of the program (default: small, quick: small)")
    made.add_argument("--turns", type=int, default=evidence.USUAL_TURNS, help="maximum turns of a course (default: 20)")
    made.add_argument("--out", type=Path, metavar="FILE", help="add the rounds to those in FILE")
    made.add_argument("--seconds", type=float, metavar="S", help="start no round that may end later (needs --out)")
    made.add_argument("--courses", type=int, default=40, help="pairs of programs to compare (default: 40)")
    made.add_argument("--steps", type=int, default=12, help="steps of a run at each level (default: 12)")
    made.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = turns.parse(made, arguments)
    options.sizes = options.sizes or ["small"]
    report = turns.Report("compare_runs", "Error rate of xsp compare, and what it finds", COLUMNS)
    kept = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    for size in options.sizes:
        turns.say(f"  {size}")
        width, batch = SIZES[size]
        with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            place = Path(folder)
            text = PROGRAM.format(threads=options.threads, width=width, batch=batch)
            (place / "program.py").write_text(text, encoding="utf-8")
            old = [{name: Series("step", "step", None, steps, 1) for name, steps in each.items()}
                   for each in kept.get(size, [])]  # fmt: skip
            rounds, most_s = old, options.seconds if options.seconds is not None else float("inf")
            most_rounds = options.rounds if options.seconds is None else MANY_ROUNDS
            for rounds in measured(place, most_rounds, options.steps, options.seed, old, most_s):
                kept[size] = [{name: list(each[name].values) for name in each} for each in rounds]
                if options.out:
                    options.out.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        if len(rounds) < evidence.MIN_TURNS:
            turns.say(f"  {len(rounds)} rounds, but a result needs at least {evidence.MIN_TURNS}")
            continue
        most = min(options.turns, len(rounds))
        how = evidence.turn_repeats(most)
        draw = random.Random(options.seed)
        equal = [course(how, rounds, (FIRST, AGAIN), most, draw) for _ in range(options.courses)]
        slower = [course(how, rounds, (FIRST, SLOWER), most, draw) for _ in range(options.courses)]
        pairs = [said(STEPS, each[FIRST].values, each[AGAIN].values) != NO_EVIDENCE for each in rounds]
        figures = [series.figure(each[name]) for each in rounds for name in (FIRST, AGAIN)]
        false = sum(each.verdict != NO_EVIDENCE for each in equal) / len(equal)
        found = sum(each.verdict == "slower" for each in slower) / len(slower)
        row = [size, str(len(rounds)), f"{statistics.fmean(figures) / 1e6:.2f}"]
        row += [f"{statistics.median(spread(each[FIRST].values) for each in rounds):.1f}", f"{spread(figures):.1f}"]
        row += [f"{sum(pairs)} of {len(pairs)}", f"{len(equal)} + {len(slower)}"]
        row += [f"{100 * false:.0f}", "met" if false <= GOAL_FALSE else "missed"]
        row += [f"{100 * found:.0f}", "met" if found >= GOAL_FOUND else "missed"]
        report.add(
            [*row, f"{statistics.fmean(each.turns for each in slower):.1f}"],
            rounds=[{name: series.figure(each[name]) for name in each} for each in rounds],
        )
    report.notes += [
        f"At most {options.turns} turns; courses that share rounds are not independent of each other: more --rounds "
        "give more evidence.",
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
