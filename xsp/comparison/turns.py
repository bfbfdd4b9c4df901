"""Run two programs in turns under xsp, one process and one run at a time, until their difference is known."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from xsp import processes, rundir, scrub
from xsp.comparison import comparable, evidence, series
from xsp.comparison.commands import ComparedProgram
from xsp.comparison.comparable import have_same_work
from xsp.comparison.evidence import TurnResult
from xsp.comparison.revisions import WorkTree
from xsp.comparison.series import RunSteps
from xsp.errors import AnalysisError, ProgramError, RunError
from xsp.store.trace import Trace

Progress = Callable[[str, int, int], None]
"""Callback before each run: a text on the run and the result so far, number of runs done, number of runs in all."""

OUTPUT = "output"
"""Folder with the output of the programs."""

KIND = "runs"
SHOWN_LINES = 15
PATIENCE_S = 30.0
"""Seconds that an interrupted program has to end on its own."""


@dataclass
class ComparedTurns:
    """The runs of both sides so far, and the result of the last look."""

    out: Path
    max_turns: int
    a: list[Path] = field(default_factory=list)
    b: list[Path] = field(default_factory=list)
    result: TurnResult | None = None


@dataclass(frozen=True)
class ComparedSide:
    """One side of a comparison: its program, and the place where it runs."""

    letter: str
    program: ComparedProgram
    work_tree: WorkTree


def run_turns(
    sides: Sequence[ComparedSide],
    turns: ComparedTurns,
    levels: str,
    progress: Progress,
    seed: int = 0,
    kind: int | str | None = None,
    threshold: float | None = None,
    overwrite: bool = False,
) -> None:
    """Run both sides in turns, until their difference is known or the turns are used up.

    Args:
        sides: A and B.
        turns: the output directory and the maximum number of turns; the runs are added to it in the order of the turns.
        levels: levels to record.
        progress: see `Progress`.
        seed: seed of the order within each turn, and of the programs' runs.
        kind: kind of step, as in `xsp.load`.
        threshold: see `evidence.compare_turn`.
        overwrite: whether to replace an existing comparison.

    Raises:
        UsageError: the number of turns is out of range.
        OutputError: the directory is not empty, or cannot be written.
        ProgramError: a program failed; the message has its exit code and the end of its output.
        AnalysisError: the two do different work, or one of them ran no step.
    """
    repeats = evidence.turn_repeats(turns.max_turns)
    a: list[RunSteps] = []
    b: list[RunSteps] = []
    first_traces: dict[str, Trace] = {}
    draw = random.Random(seed)
    with rundir.runs_directory(turns.out, overwrite) as out, _sigterm_as_interrupt():
        turns.out = out
        (out / OUTPUT).mkdir(exist_ok=True)
        for log in (out / OUTPUT).glob("[ab]-[0-9]*.txt"):
            log.unlink()
        _write(turns, sides, finished=False)
        order: Sequence[ComparedSide] = sides
        for turn in range(1, turns.max_turns + 1):
            # balanced over every two turns, so that neither side always runs second, on a warm machine
            order = draw.sample(sides, k=2) if turn % 2 else order[::-1]
            paths = {side.letter: out / f"{side.letter}-{turn:02d}" for side in sides}
            for index, side in enumerate(order):
                progress(_progress_text(turns, turn, side), 2 * turn - 2 + index, 2 * turns.max_turns)
                _run(side, paths[side.letter], levels, seed + turn)
            for side, steps, runs in zip(sides, (a, b), (turns.a, turns.b), strict=True):
                reference = first_traces.get(side.letter) or next(iter(first_traces.values()), None)
                trace = _load(paths[side.letter], side, reference, kind)
                first_traces.setdefault(side.letter, trace)
                steps.append(_steps(trace, side))
                runs.append(paths[side.letter])
            _write(turns, sides, finished=False)
            if turn == 1 and not have_same_work(list(first_traces.values())):
                raise AnalysisError("the two programs do different work: one trains and the other only predicts")
            if turn >= evidence.MIN_TURNS:
                step_rows, _ = series.best_common_steps([*a, *b])
                figures = [series.figure(row) for row, *_ in step_rows]
                turns.result = evidence.compare_turn(repeats, figures[:turn], figures[turn:], threshold)
                if turns.result.is_enough:
                    break
        _write(turns, sides, finished=True)
    progress(_progress_text(turns, len(turns.a), None), 2 * len(turns.a), 2 * len(turns.a))


def _progress_text(turns: ComparedTurns, turn: int, side: ComparedSide | None) -> str:
    text = f"turn {turn} of at most {turns.max_turns}" if side else f"known after {turn} turns"
    if side is not None:
        text += f": {side.letter.upper()}"
    elif not (turns.result and turns.result.is_enough):
        text = f"{turn} turns"
    if turns.result is None:
        return text
    low, high = 100 * turns.result.low, 100 * turns.result.high
    return f"{text} (B {100 * turns.result.change:+.1f} %, {low:+.1f} to {high:+.1f})"


def _run(side: ComparedSide, path: Path, levels: str, seed: int) -> None:
    """Run one side once, with its output in a file."""
    program, log = side.program, path.parent / OUTPUT / f"{path.name}.txt"
    environment = {**os.environ, **side.work_tree.environment(), **dict(program.settings)}
    command = program.command(path, levels, seed)
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=side.work_tree.folder,
                env=environment,
                start_new_session=True,  # its process group receives an interrupt once, from `_end`
            )  # fmt: skip
        except OSError as error:
            raise ProgramError(f"{program.text!r} cannot be started: {error.strerror}: {command[0]}") from None
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code:
        raise ProgramError(f"{program.text!r} ended with {processes.exit_description(code)}; {_end_of(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program by an interrupt, or by SIGKILL if it does not end in time; then its subprocesses by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(BaseException):  # a timeout, or a second interrupt by the user
        process.wait(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of processes that have ended
        os.killpg(process.pid, signal.SIGKILL)  # a subprocess may ignore interrupts
    process.wait()


def _end_of(log: Path) -> str:
    lines = log.read_bytes().decode(errors="replace").rstrip().splitlines()
    if not lines:
        return "it printed nothing"
    return "\n".join([f"the end of its output ({log}):", *(f"  {line}" for line in lines[-SHOWN_LINES:])])


def _load(path: Path, side: ComparedSide, reference: Trace | None, kind: int | str | None) -> Trace:
    try:
        return comparable.load_like(reference, path, kind)
    except RunError as error:
        log = path.parent / OUTPUT / f"{path.name}.txt"
        raise AnalysisError(f"{side.program.text!r} left no run to compare: {error}; {_end_of(log)}") from None


def _steps(trace: Trace, side: ComparedSide) -> RunSteps:
    steps = series.steps(trace)
    if steps.recorded is None:
        raise AnalysisError(f"{side.program.text!r} left a run without a timed step: run more steps")
    return steps


def _write(turns: ComparedTurns, sides: Sequence[ComparedSide], finished: bool) -> None:
    """Write the contents of the directory to `run.json`, so that every command recognises it as a directory of runs."""
    content: dict[str, Any] = {
        "kind": KIND,
        "name": turns.out.name,
        "parts": [path.name for path in (*turns.a, *turns.b)],
        "sides": {side.letter: shlex.join(scrub.command(shlex.split(side.program.text))) for side in sides},
        "turns": turns.max_turns,
        "finished": finished,
    }
    rundir.write_run(turns.out, content)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM, which `kill` sends, as Ctrl-C, so that it also cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
