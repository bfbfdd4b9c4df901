"""Two processes of a program that run step by step in turns: each waits for the other's step before its own begins.

Both are subject to the same machine, within milliseconds, so small differences show on a busy one too.
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

import xsp
from parts.apart import Bare, Program, Runner
from xsp.errors import XspError
from xsp.store.iterations import IN_BURST, idle_hook_costs
from xsp.store.loop import BARE

STEADY, OTHER, AFTER, RECORDED, CONTROL = "steady", "other", "after", "recorded", "control"
"""States of iterations: steady and other unrecorded ones, those after a recorded one, and recorded ones; and those of
two processes without xsp."""

LEAST_STEPS = 8
"""Minimum number of iterations for a median."""

MOST_TURNS = 30_000
"""Iterations that a process may still run after the other one failed."""


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
        descriptors = [os.open(name, os.O_RDWR) for name in pipes]
        os.write(descriptors[0], b"x")  # the first one's turn

        def start(index: int, run: Callable[[Sequence[str]], Bare]) -> None:
            try:
                said[index] = run(["--turns", *(pipes if index == 0 else reversed(pipes))])
            except Exception as error:
                said[index] = error
                for descriptor in descriptors:  # the other one goes on alone
                    os.write(descriptor, b"x" * MOST_TURNS)

        threads = [threading.Thread(target=start, args=arguments) for arguments in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for descriptor in descriptors:
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
