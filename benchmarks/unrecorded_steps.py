"""What does a step that `xsp run` does not record cost more than without xsp?

A process without xsp and one under `xsp run` run the same program step by step in turns: each waits for the other's
step to end before it begins its own. So both are subject to the same machine, within milliseconds, and small
differences show on a busy one too. Times are of a whole iteration by the program's own clock; `CPU` is the time of its
thread on a processor. Compared are pairs of iterations of equal number, by what xsp did in them: steady steps, which
its figures come from, other unrecorded steps, and those right after a recorded one. The control are two processes
without xsp.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from parts import pairs, turns
from parts.apart import Bare, Program, Runner

import xsp
from xsp.errors import XspError
from xsp.store.loop import BARE

PROGRAMS = (
    Program("forward 1 ms", "mlp.py --width 256 --depth 8 --batch 96"),
    Program("forward 4 ms", "mlp.py --width 512 --depth 6 --batch 128"),
    Program("forward 9 ms", "mlp.py --width 512 --depth 8 --batch 224"),
    Program("forward 30 ms", "mlp.py --width 1024 --depth 8 --batch 192"),
    Program("training 9 ms", "mlp.py --train SGD --width 384 --depth 8 --batch 96"),
    Program("tiny modules", "tiny_modules.py"),
)
QUICK = ("forward 9 ms",)
STEADY, OTHER, AFTER, RECORDED, CONTROL = "steady", "other", "after", "recorded", "control"
LEAST_STEPS = 8
"""Minimum number of iterations for a median."""

COLUMNS = (
    "program", "tries", "own CPU ms", "steady: CPU ×", "steady: time ×", "steady: CPU +µs", "other: CPU ×",
    "after recorded: CPU ×", "control: CPU ×", "control: time ×",
)  # fmt: skip


class Compared(NamedTuple):
    """Medians over pairs of iterations."""

    time: float
    """Ratio of times with xsp and without."""

    cpu: float
    """Ratio of processor times."""

    added_s: float
    """Processor time added."""


def in_turns(first: Callable[[Sequence[str]], Bare], second: Callable[[Sequence[str]], Bare]) -> tuple[Bare, Bare]:
    """Run two processes that take turns; each function gets the arguments that say so.

    Raises:
        XspError: a process failed.
    """
    said: dict[int, Bare | Exception] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [str(Path(folder) / name) for name in ("one", "two")]
        for name in pipes:
            os.mkfifo(name)
        descriptor = os.open(pipes[0], os.O_RDWR)
        os.write(descriptor, b"x")  # the first one's turn

        def start(index: int, run: Callable[[Sequence[str]], Bare]) -> None:
            try:
                said[index] = run(["--turns", *(pipes if index == 0 else reversed(pipes))])
            except Exception as error:
                said[index] = error

        threads = [threading.Thread(target=start, args=arguments) for arguments in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)
    results = []
    for index in (0, 1):
        result = said[index]
        if isinstance(result, Exception):
            raise XspError(str(result)) from result
        results.append(result)
    return results[0], results[1]


def compare(bare: Bare, other: Bare, states: Sequence[str]) -> dict[str, Compared]:
    """Compare iterations of equal number, by their state."""
    by_state: dict[str, list[int]] = defaultdict(list)
    for index, state in enumerate(states):
        by_state[state].append(index)
    compared = {}
    for state, indices in by_state.items():
        both = [(bare.steps[index], other.steps[index]) for index in indices]
        if len(both) >= LEAST_STEPS:
            compared[state] = Compared(
                statistics.median(after[0] / before[0] for before, after in both),
                statistics.median(after[1] / before[1] for before, after in both),
                statistics.median(after[1] - before[1] for before, after in both),
            )
    return compared


def states_of(out: Path, count: int) -> list[str]:
    """Return what xsp did in each of the last iterations of a program; recorded for those that it did not see."""
    states: list[str] = []
    loop = xsp.load(out).sql("SELECT rung, steady, steps FROM loop ORDER BY step").fetchall()
    for rung, steady, steps in loop:
        is_after = bool(states) and states[-1] == RECORDED
        state = RECORDED if rung != BARE else STEADY if steady else AFTER if is_after else OTHER
        states += [state] * steps
    return ([RECORDED] * (count - len(states)) + states)[-count:]


def try_once(runner: Runner, program: Program, number: int) -> tuple[Bare, dict[str, Compared]]:
    """Run a program beside itself under xsp, and beside itself without it."""

    def bare(more: Sequence[str]) -> Bare:
        return runner.bare(program, more)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"

        def recorded(more: Sequence[str]) -> Bare:
            return runner.recorded(program, out, more)

        if number % 2:
            own, profiled = in_turns(bare, recorded)
        else:
            profiled, own = in_turns(recorded, bare)
        compared = compare(own, profiled, states_of(out, len(own.steps)))
    first, second = in_turns(bare, bare)
    compared.update(compare(first, second, [CONTROL] * len(first.steps)))
    return own, compared


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = pairs.parse(pairs.parser(__doc__, pairs=5), arguments)
    report = turns.Report("unrecorded_steps", "Steps that are not recorded, beside those without xsp [95 %]", COLUMNS)
    programs = pairs.selected(PROGRAMS, options, QUICK)
    runner = Runner(options.of_seconds, options.threads)
    tries: dict[str, list[tuple[Bare, dict[str, Compared]]]] = defaultdict(list)
    with report.until_interrupted():
        for number in range(pairs.QUICK_PAIRS if options.quick else options.rounds):
            for program in programs:
                with report.trying(program.name):
                    if program.name not in runner.counts:
                        runner.bare(program)
                    tries[program.name].append(try_once(runner, program, number))
                    turns.say(f"  {program.name}: {_brief(tries[program.name][-1][1])}")
    for name, known in tries.items():
        _add(report, name, known)
    report.finish(options)


def _brief(compared: dict[str, Compared]) -> str:
    return ", ".join(
        f"{state} CPU × {figures.cpu:.3f} time × {figures.time:.3f}" for state, figures in compared.items()
    )


def _add(report: turns.Report, name: str, known: Sequence[tuple[Bare, dict[str, Compared]]]) -> None:
    def middle(state: str, field: str) -> turns.Figure:
        return pairs.middle([getattr(compared[state], field) for _, compared in known if state in compared])

    own_s = statistics.median(used_s for bare, _ in known for _, used_s in bare.steps)
    row = [
        name, str(len(known)), f"{1e3 * own_s:.3f}", middle(STEADY, "cpu").text(3), middle(STEADY, "time").text(3),
        middle(STEADY, "added_s").text(0, 1e6), middle(OTHER, "cpu").text(3), middle(AFTER, "cpu").text(3),
        middle(CONTROL, "cpu").text(3), middle(CONTROL, "time").text(3),
    ]  # fmt: skip
    report.add(row, tries=[compared for _, compared in known])


if __name__ == "__main__":
    main()
