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
from xsp.comparison.series import RowTimes

GOAL_FALSE, GOAL_DETECTED = 0.05, 0.9
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

BASE, REPEAT, SLOWER = "first", "again", "slower"
COLUMNS = (
    "program", "rounds", "step ms", "within a run %", "between runs %", "single pairs that differ", "courses",
    "false alarms %", "≤ 5 %", "5 % slower found %", "≥ 90 %", "turns until then",
)  # fmt: skip

MANY_ROUNDS = 1000
"""Number of rounds that no call reaches if `--seconds` limits it."""

Round = dict[str, RowTimes]
"""Name of a run → the series of its steps."""


class Course(NamedTuple):
    """One comparison in turns."""

    verdict: str
    turns: int


def measure_rounds(
    place: Path, rounds: int, repeats: int, seed: int, stored_rounds: list[Round], seconds: float
) -> Iterator[list[Round]]:
    """Measure rounds, and after each one yield the steps of all rounds, stored ones first.

    No round starts that would end after `seconds`, judged by the duration of the previous round.
    """
    draw, all_rounds = random.Random(f"{seed} {len(stored_rounds)}"), list(stored_rounds)
    begin = round_start = time.monotonic()
    for turn in range(rounds):
        now = time.monotonic()
        if 2 * now - round_start - begin >= seconds:
            return
        round_start = now
        round_steps = {}
        for name in draw.sample((BASE, REPEAT, SLOWER), k=3):
            command = f"{place / 'program.py'}:{'after' if name is SLOWER else 'before'} --repeats {repeats}"
            out = place / f"{name}-{turn}"
            subprocess.run(commands.program(command).command(out, "M/L", seed), check=True, stdin=subprocess.DEVNULL)
            round_steps[name] = series.steps(xsp.load(out))
        common_steps, _ = series.best_common_steps(list(round_steps.values()))
        all_rounds.append({name: run_steps[0] for name, run_steps in zip(round_steps, common_steps, strict=True)})
        turns.say(f"  round {turn + 1} of {rounds}, {len(all_rounds)} in total")
        yield all_rounds


def course(
    repeats: Repeats, rounds: Sequence[Round], names: Sequence[str], max_turns: int, draw: random.Random
) -> Course:
    """Compare two programs in turns, with turns drawn from the measured rounds."""
    begin = draw.randrange(len(rounds))
    sides: tuple[list[float], list[float]] = ([], [])
    for turn in range(1, max_turns + 1):
        turn_steps = rounds[(begin + turn) % len(rounds)]
        for side, name in zip(sides, names if SLOWER in names else draw.sample(names, k=2), strict=True):
            side.append(series.figure(turn_steps[name]))
        if turn >= evidence.MIN_TURNS and (evidence.compare_turn(repeats, *sides).is_enough or turn == max_turns):
            return Course(verdict_of(repeats, *sides), turn)
    raise AssertionError("a course ends with its last turn")


def verdict_of(repeats: Repeats, a: Sequence[float], b: Sequence[float]) -> str:
    """Return the verdict on two series of figures."""
    difference = repeats.evidence(a, b)
    return repeats.verdict(difference, repeats.adjusted([difference.p])[0], min(len(a), len(b)))


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, in percent of the mean."""
    return 100 * statistics.stdev(values) / statistics.fmean(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=12)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="sizes of the program (default: small, quick: small)")
    parser.add_argument("--turns", type=int, default=evidence.USUAL_TURNS, help="most turns of a course (default: 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="add the rounds to those in FILE")
    parser.add_argument("--seconds", type=float, metavar="S", help="start no round that may end later (needs --out)")
    parser.add_argument("--courses", type=int, default=40, help="pairs of programs to compare (default: 40)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run at each level (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    options = turns.parse(parser, arguments)
    options.sizes = options.sizes or ["small"]
    report = turns.Report("compare_runs", "Error rate of xsp compare, and what it finds", COLUMNS)
    stored = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
    for size in options.sizes:
        turns.say(f"  {size}")
        width, batch = SIZES[size]
        with tempfile.TemporaryDirectory(prefix="xsp-") as folder:
            place = Path(folder)
            text = PROGRAM.format(threads=options.threads, width=width, batch=batch)
            (place / "program.py").write_text(text, encoding="utf-8")
            old = [{name: RowTimes("step", "step", None, steps, 1) for name, steps in entry.items()}
                   for entry in stored.get(size, [])]  # fmt: skip
            rounds, most_s = old, options.seconds if options.seconds is not None else float("inf")
            most_rounds = options.rounds if options.seconds is None else MANY_ROUNDS
            for rounds in measure_rounds(place, most_rounds, options.steps, options.seed, old, most_s):
                stored[size] = [{name: list(entry[name].values) for name in entry} for entry in rounds]
                if options.out:
                    options.out.write_text(json.dumps(stored) + "\n", encoding="utf-8")
        if len(rounds) < evidence.MIN_TURNS:
            turns.say(f"  {len(rounds)} rounds, but a result needs at least {evidence.MIN_TURNS}")
            continue
        max_turns = min(options.turns, len(rounds))
        repeats = evidence.turn_repeats(max_turns)
        draw = random.Random(options.seed)
        equal = [course(repeats, rounds, (BASE, REPEAT), max_turns, draw) for _ in range(options.courses)]
        slower = [course(repeats, rounds, (BASE, SLOWER), max_turns, draw) for _ in range(options.courses)]
        pairs = [verdict_of(STEPS, entry[BASE].values, entry[REPEAT].values) != NO_EVIDENCE for entry in rounds]
        figures = [series.figure(entry[name]) for entry in rounds for name in (BASE, REPEAT)]
        false = sum(entry.verdict != NO_EVIDENCE for entry in equal) / len(equal)
        detected = sum(entry.verdict == "slower" for entry in slower) / len(slower)
        row = [size, str(len(rounds)), f"{statistics.fmean(figures) / 1e6:.2f}"]
        row += [f"{statistics.median(spread(result[BASE].values) for result in rounds):.1f}", f"{spread(figures):.1f}"]
        row += [f"{sum(pairs)} of {len(pairs)}", f"{len(equal)} + {len(slower)}"]
        row += [f"{100 * false:.0f}", "met" if false <= GOAL_FALSE else "missed"]
        row += [f"{100 * detected:.0f}", "met" if detected >= GOAL_DETECTED else "missed"]
        report.add(
            [*row, f"{statistics.fmean(entry.turns for entry in slower):.1f}"],
            rounds=[{name: series.figure(entry[name]) for name in entry} for entry in rounds],
        )
    report.notes += [
        f"At most {options.turns} turns; courses that share rounds are not independent of each other: more --rounds "
        "give more evidence.",
    ]
    report.finish(options)


if __name__ == "__main__":
    main()
