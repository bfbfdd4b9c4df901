"""Runs as a table of configurations: what each run was given, and what its step took."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.analyses.answers import Answers
from xsp.errors import UsageError, XspError
from xsp.ingest import load
from xsp.predict import configurations, recorded
from xsp.run import Run
from xsp.store.iterations import iterations

MOST_RUNS = 5_000
_OF_XSP = {"out", "repeats", "levels", "overwrite", "seed", "budget", "quiet", "steps", "step", "warmup", "device",
           "overhead"}  # fmt: skip
"""Options that say how a run is recorded, and nothing of what it computes."""

_OF_LAUNCHERS = re.compile(
    r"n(proc|odes|node|um)[-_].*|nnodes|(node|machine)[-_]rank|(master|main)[-_].*|rdzv[-_].*|standalone|module|"
    r"run[-_]path|log[-_]dir|max[-_]restarts|start[-_]method"
)
"""Those that say how ranks are started; how many there are is a factor of its own."""

GIVEN, NOT_GIVEN = "yes", "no"
"""The value of an option without one, and of one that other runs were given."""


def rows(sources: Sequence[str]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the rows of tables and runs, and what was left out.

    Of a run: `model`, `batch`, `ranks`, `threads`, `cpu`, `device` and each option `--name value` of its program, with
    `step_s`. An option without a value is "yes", and "no" of the runs that have it not.

    Raises:
        UsageError: nothing can be read, or there is too much.
    """
    found: list[dict[str, Any]] = []
    of_runs: list[dict[str, Any]] = []
    left: list[str] = []
    count = 0
    for source in sources:
        place = Path(source).expanduser()
        if not place.exists():
            raise UsageError(f"{source}: is not there; {configurations.SHAPES}")
        if not place.is_dir():
            found += configurations.read(place)
            continue
        for run in _runs(place):
            count += 1
            if count > MOST_RUNS:
                raise UsageError(f"more than {MOST_RUNS:,} runs: write their times into a table first")
            try:
                of_runs.append(row(run))
            except XspError as error:
                left.append(f"{run} is left out: {error}")
    names = {name: {each[name] for each in of_runs if name in each} for each in of_runs for name in each}
    switches = dict.fromkeys((name for name, values in names.items() if values == {GIVEN}), NOT_GIVEN)
    found += [{**switches, **each} for each in of_runs]
    if not found:
        raise UsageError(left[0] if left else f"there are no rows; {configurations.SHAPES}")
    if len(found) > configurations.MOST_ROWS:
        raise UsageError(f"{len(found):,} rows, more than {configurations.MOST_ROWS:,}: sum up repetitions first")
    return found, tuple(left)


def _runs(place: Path) -> Iterable[Path]:
    """Return the runs that a directory is or holds."""
    if (place / "run.json").is_file():
        return load.parts(place)
    inside = sorted(each for each in place.iterdir() if (each / "run.json").is_file())
    if not inside:
        raise UsageError(f"{place}: is no run, and holds none; {configurations.SHAPES}")
    return [part for each in inside for part in load.parts(each)]


def row(place: Path) -> dict[str, Any]:
    """Return what a run was given, and what its step took.

    Raises:
        XspError: it cannot be read, or nothing tells how long a step is.
    """
    run = rundir.read_job(place)
    trace = load.load(place)
    loop = next((each for each in iterations(trace.con) if (each.rank, each.kind) == (trace.rank, trace.kind)), None)
    step, _ = recorded.measured(Answers(trace), loop, [])
    machine = run.each_rank[0].machine
    known = {
        "model": run.name or None,
        "batch": (loop.samples if loop is not None else None) or trace.run.batch_size,
        "ranks": run.world_size or len(run.each_rank),
        "threads": machine.torch_threads,
        "cpu": machine.cpu,
        "device": machine.devices[0] if machine.devices else None,
        "step_s": step,
    }
    return {**_options(run), **{name: value for name, value in known.items() if value is not None}}


def _options(run: Run) -> dict[str, str]:
    """Return the options `--name value` that a program was given."""
    words = list(run.typed or run.command)
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or name in _OF_XSP or _OF_LAUNCHERS.fullmatch(name):
            continue
        value = value or (GIVEN if after.startswith("-") else after)
        found[name] = value
    return found
