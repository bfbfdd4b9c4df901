"""Runs as a table of configurations: the options of each run, and the time of its step."""

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
"""Options that control how a run is recorded, not what it computes."""

_OF_LAUNCHERS = re.compile(
    r"n(proc|odes|node|um)[-_].*|nnodes|(node|machine)[-_]rank|(master|main)[-_].*|rdzv[-_].*|standalone|module|"
    r"run[-_]path|log[-_]dir|max[-_]restarts|start[-_]method"
)
"""Options that control how ranks are started; the number of ranks is a separate factor."""

_NUMBER = re.compile(r"-[0-9.][0-9._]*(e[+-]?[0-9]+)?", re.IGNORECASE)

GIVEN, NOT_GIVEN = "yes", "no"
"""The value of an option without a value, and of such an option in runs that do not have it."""


def rows(sources: Sequence[str]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the rows of tables and runs, and texts on the runs that were left out.

    The row of a run has `model`, `batch`, `ranks`, `threads`, `cpu`, `device`, each option `--name value` of its
    program, and `step_s`. An option without a value is "yes", and "no" in runs without it.

    Raises:
        UsageError: nothing can be read, or there are too many runs or rows.
    """
    found: list[dict[str, Any]] = []
    of_runs: list[dict[str, Any]] = []
    left: list[str] = []
    count = 0
    for source in sources:
        place = Path(source).expanduser()
        if not place.exists():
            raise UsageError(f"{source}: does not exist; {configurations.SHAPES}")
        if not place.is_dir():
            found += configurations.read(place)
            continue
        for run in _runs(place, left):
            count += 1
            if count > MOST_RUNS:
                raise UsageError(f"more than {MOST_RUNS:,} runs: write their times into a table first")
            try:
                of_runs.append(row(run))
            except XspError as error:
                left.append(f"{run} is left out: {error}")
    names: dict[str, set[Any]] = {}
    for each in of_runs:
        for name, value in each.items():
            names.setdefault(name, set()).add(value)
    switches = dict.fromkeys((name for name, values in names.items() if values == {GIVEN}), NOT_GIVEN)
    found += [{**switches, **each} for each in of_runs]
    if not found:
        raise UsageError(left[0] if left else f"there are no rows; {configurations.SHAPES}")
    if len(found) > configurations.MOST_ROWS:
        raise UsageError(f"{len(found):,} rows, more than {configurations.MOST_ROWS:,}: aggregate repetitions first")
    return found, tuple(left)


def _runs(place: Path, left: list[str]) -> Iterable[Path]:
    """Return the runs of a directory, which is a run itself or contains runs; damaged ones are added to `left`."""
    if rundir.is_one(place):
        return load.parts(place)
    inside = sorted(each for each in place.iterdir() if each.is_dir() and rundir.is_one(each))
    if not inside:
        raise UsageError(f"{place}: not a run, and contains none; {configurations.SHAPES}")
    found: list[Path] = []
    for each in inside:
        try:
            found += load.parts(each)
        except XspError as error:
            left.append(f"{each} is left out: {error}")
    return found


def row(place: Path) -> dict[str, Any]:
    """Return the configuration of a run, and the time of its step.

    Raises:
        XspError: the run cannot be read, or it does not have the time of a step.
    """
    run = rundir.read_job(place)
    trace = recorded.loaded(str(place))
    loop = next((each for each in iterations(trace.con) if (each.rank, each.kind) == (trace.rank, trace.kind)), None)
    step, _ = recorded.measured(Answers(trace), loop, [])
    machine, options = run.each_rank[0].machine, _options(run)
    known = {
        "model": options.get("model") or run.name or None,
        "batch": (loop.samples if loop is not None else None) or trace.run.batch_size,
        "ranks": run.world_size or len(run.each_rank),
        "threads": machine.torch_threads,
        "cpu": machine.cpu,
        "device": machine.devices[0] if machine.devices else None,
        "step_s": step,
    }
    return {**options, **{name: value for name, value in known.items() if value is not None}}


def _options(run: Run) -> dict[str, str]:
    """Return the options `--name value` of a program's command line."""
    words = list(run.typed or run.command)
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=False):  # a run from elsewhere may tell no words
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or name in _OF_XSP or _OF_LAUNCHERS.fullmatch(name):
            continue
        if not equals:
            value = GIVEN if after.startswith("-") and not _NUMBER.fullmatch(after) else after
        found[name] = value
    return found
