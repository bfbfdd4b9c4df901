"""What does a step that `xsp run` does not record cost more than without xsp?

A process without xsp and one under `xsp run` run the same program step by step in turns: each waits for the other's
step to end before it begins its own. So both are subject to the same machine, within milliseconds, and small
differences show on a busy one too. Times are of a whole iteration by the program's own clock; `CPU` is the time of its
thread on a processor. Compared are pairs of iterations of equal number, by what xsp did in them: steady steps, which
its figures come from, other unrecorded steps, and those right after a recorded one. `corrected` are steady steps less
the time of idle collectors that xsp subtracts in its figures. `faults` are page faults in an iteration of each try,
without xsp → with it. The control are two processes without xsp.
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
from xsp.store.iterations import IN_BURST, idle_hook_costs
from xsp.store.loop import BARE

PROGRAMS = (
    Program("forward 1 ms", "mlp.py --width 256 --depth 8 --batch 96"),
    Program("forward 4 ms", "mlp.py --width 512 --depth 6 --batch 128"),
    Program("forward 9 ms", "mlp.py --width 512 --depth 8 --batch 224"),
    Program("forward 30 ms", "mlp.py --width 1024 --depth 8 --batch 192"),
    Program("training 9 ms", "mlp.py --train SGD --width 384 --depth 8 --batch 96"),
    Program("tiny modules", "tiny_modules.py"),
    Program("SGD", "mlp.py --train SGD --width 128 --depth 3"),
    Program("AdamW", "mlp.py --train AdamW --depth 8"),
    Program("hooks", "mlp.py --hooks --depth 40 --width 64"),
    Program("sleep", "mlp.py --train SGD --width 64 --sleep-ms 5"),
    Program("scaler skips", "scaler.py"),
    Program("loader", "loader.py"),
    Program("engine", "engine.py", needs="transformers"),
)
QUICK = ("forward 9 ms",)
STEADY, OTHER, AFTER, RECORDED, CONTROL = "steady", "other", "after", "recorded", "control"
LEAST_STEPS = 8
"""Minimum number of iterations for a median."""

COLUMNS = (
    "program", "tries", "own CPU ms", "steady: CPU ×", "steady: time ×", "steady: CPU +µs", "steady: corrected time ×",
    "other: CPU ×", "after recorded: CPU ×", "control: CPU ×", "control: time ×", "faults",
)  # fmt: skip


class Compared(NamedTuple):
    """Medians over pairs of iterations."""

    time: float
    """Ratio of times with xsp and without."""

    cpu: float
    """Ratio of processor times."""

    added_s: float
    """Processor time added."""

    corrected: float
    """Ratio of the time less what xsp subtracts to the time without xsp."""


class Try(NamedTuple):
    """Two processes, one under xsp, and a control of two without it."""

    bare: Bare
    profiled: Bare
    compared: dict[str, Compared]
    """By the state of iterations."""


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


class Seen(NamedTuple):
    """What xsp saw of an iteration."""

    state: str
    subtracted_s: float = 0.0
    """Time of idle collectors that xsp subtracts from the iteration."""


def compare(bare: Bare, other: Bare, seen: Sequence[Seen]) -> dict[str, Compared]:
    """Compare iterations of equal number, by their state."""
    by_state: dict[str, list[tuple[tuple[float, float], tuple[float, float], float]]] = defaultdict(list)
    for before, after, (state, subtracted_s) in zip(bare.steps, other.steps, seen, strict=True):
        by_state[state].append((before, after, subtracted_s))
    return {
        state: Compared(
            statistics.median(after[0] / before[0] for before, after, _ in rows),
            statistics.median(after[1] / before[1] for before, after, _ in rows),
            statistics.median(after[1] - before[1] for before, after, _ in rows),
            statistics.median((after[0] - subtracted_s) / before[0] for before, after, subtracted_s in rows),
        )
        for state, rows in by_state.items()
        if len(rows) >= LEAST_STEPS
    }


def seen_of(out: Path, count: int) -> list[Seen]:
    """Return what xsp saw of each of the last iterations of a program; as recorded those that it missed."""
    seen: list[Seen] = []
    trace = xsp.load(out)
    costs = idle_hook_costs(trace.con, trace.run)
    loop = trace.sql(f"SELECT rank, kind, rung, steady, steps, dur_ns, {IN_BURST} FROM loop ORDER BY step").fetchall()
    for rank, kind, rung, steady, steps, dur_ns, is_in_burst in loop:
        is_after = bool(seen) and seen[-1].state == RECORDED
        state = RECORDED if rung != BARE else STEADY if steady else AFTER if is_after else OTHER
        subtracted_ns = costs[rank, kind].of(dur_ns) if is_in_burst and (rank, kind) in costs else 0.0
        seen += [Seen(state, subtracted_ns / 1e9)] * steps
    return ([Seen(RECORDED)] * (count - len(seen)) + seen)[-count:]


def try_once(runner: Runner, program: Program, number: int) -> Try:
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
        compared = compare(own, profiled, seen_of(out, len(own.steps)))
    first, second = in_turns(bare, bare)
    compared.update(compare(first, second, [Seen(CONTROL)] * len(first.steps)))
    return Try(own, profiled, compared)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = pairs.parse(pairs.parser(__doc__, pairs=5), arguments)
    report = turns.Report("unrecorded_steps", "Steps that are not recorded, beside those without xsp [95 %]", COLUMNS)
    programs = pairs.selected(PROGRAMS, options, QUICK)
    runner = Runner(options.of_seconds, options.threads)
    tries: dict[str, list[Try]] = defaultdict(list)
    with report.until_interrupted():
        for number in range(pairs.QUICK_PAIRS if options.quick else options.rounds):
            for program in programs:
                with report.trying(program.name):
                    if program.name not in runner.counts:
                        runner.bare(program)
                    tries[program.name].append(try_once(runner, program, number))
                    turns.say(f"  {program.name}: {_brief(tries[program.name][-1].compared)}")
    for name, known in tries.items():
        _add(report, name, known)
    report.finish(options)


def _brief(compared: dict[str, Compared]) -> str:
    return ", ".join(
        f"{state} CPU × {each.cpu:.3f} time × {each.time:.3f} corrected × {each.corrected:.3f}"
        for state, each in compared.items()
    )


def _add(report: turns.Report, name: str, known: Sequence[Try]) -> None:
    def middle(state: str, field: str) -> turns.Figure:
        return pairs.middle([getattr(each.compared[state], field) for each in known if state in each.compared])

    own_s = statistics.median(used_s for each in known for _, used_s in each.bare.steps)
    row = [
        name, str(len(known)), f"{1e3 * own_s:.3f}", middle(STEADY, "cpu").text(3), middle(STEADY, "time").text(3),
        middle(STEADY, "added_s").text(0, 1e6), middle(STEADY, "corrected").text(3),
        middle(OTHER, "cpu").text(3), middle(AFTER, "cpu").text(3),
        middle(CONTROL, "cpu").text(3), middle(CONTROL, "time").text(3),
        "; ".join(f"{each.bare.faults:.0f} → {each.profiled.faults:.0f}" for each in known),
    ]  # fmt: skip
    report.add(row, tries=[each.compared for each in known])


if __name__ == "__main__":
    main()
