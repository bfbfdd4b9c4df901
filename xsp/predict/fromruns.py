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

MOST_RUNS = 5_000
_XSP_OPTIONS = {"out", "repeats", "levels", "overwrite", "seed", "budget", "quiet", "steps", "step", "warmup", "device",
           "overhead"}  # fmt: skip
"""Options that control how a run is recorded, not what it computes."""

_LAUNCHER_OPTIONS = re.compile(
    r"n(proc|odes|node|um)[-_].*|nnodes|(node|machine)[-_]rank|(master|main)[-_].*|rdzv[-_].*|standalone|module|"
    r"run[-_]path|log[-_]dir|max[-_]restarts|start[-_]method"
)
"""Options that control how ranks are started; the number of ranks is a separate factor."""

_NUMBER = re.compile(r"-[0-9.][0-9._]*(e[+-]?[0-9]+)?", re.IGNORECASE)

OPTION_SET, OPTION_UNSET = "yes", "no"
"""The value of an option without a value, and of such an option in runs that do not have it."""


def rows(sources: Sequence[str]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the rows of tables and runs, and texts on the runs that were left out.

    The row of a run has `model`, `batch`, `ranks`, `threads`, `cpu`, `device`, each option `--name value` of its
    program, and `step_s`. An option without a value is "yes", and "no" in runs without it.

    Raises:
        UsageError: nothing can be read, or there are too many runs or rows.
    """
    result: list[dict[str, Any]] = []
    run_rows: list[dict[str, Any]] = []
    omitted: list[str] = []
    count = 0
    for source in sources:
        path = Path(source).expanduser()
        if not path.exists():
            raise UsageError(f"{source}: does not exist; {configurations.SHAPES}")
        if not path.is_dir():
            result += configurations.read(path)
            continue
        for run in _runs(path, omitted):
            count += 1
            if count > MOST_RUNS:
                raise UsageError(f"more than {MOST_RUNS:,} runs: write their times into a table first")
            try:
                run_rows.append(row(run))
            except XspError as error:
                omitted.append(f"{run} is left out: {error}")
    names: dict[str, set[Any]] = {}
    for run_row in run_rows:
        for name, value in run_row.items():
            names.setdefault(name, set()).add(value)
    switches = dict.fromkeys((name for name, values in names.items() if values == {OPTION_SET}), OPTION_UNSET)
    result += [{**switches, **run_row} for run_row in run_rows]
    if not result:
        raise UsageError(omitted[0] if omitted else f"there are no rows; {configurations.SHAPES}")
    if len(result) > configurations.MOST_ROWS:
        raise UsageError(f"{len(result):,} rows, more than {configurations.MOST_ROWS:,}: aggregate repetitions first")
    return result, tuple(omitted)


def _runs(path: Path, omitted: list[str]) -> Iterable[Path]:
    """Return the runs of a directory, which is a run itself or contains runs; damaged ones are added to `omitted`."""
    if rundir.is_run_directory(path):
        return load.parts(path)
    directories = sorted(
        directory for directory in path.iterdir() if directory.is_dir() and rundir.is_run_directory(directory)
    )
    if not directories:
        raise UsageError(f"{path}: not a run, and contains none; {configurations.SHAPES}")
    runs: list[Path] = []
    for directory in directories:
        try:
            runs += load.parts(directory)
        except XspError as error:
            omitted.append(f"{directory} is left out: {error}")
    return runs


def row(path: Path) -> dict[str, Any]:
    """Return the configuration of a run, and the time of its step.

    Raises:
        XspError: the run cannot be read, or it does not have the time of a step.
    """
    run = rundir.read_job(path)
    trace = recorded.load_trace(str(path))
    loop = recorded.loop_of(trace)
    step, _ = recorded.measured_step(Answers(trace), loop, [])
    machine, options = run.rank_runs[0].machine, _options(run)
    facts = {
        "model": options.get("model") or run.name or None,
        "batch": (loop.samples if loop is not None else None) or trace.run.batch_size,
        "ranks": run.world_size or len(run.rank_runs),
        "threads": machine.torch_threads,
        "cpu": machine.cpu,
        "device": machine.devices[0] if machine.devices else None,
        "step_s": step,
    }
    return {**options, **{name: value for name, value in facts.items() if value is not None}}


def _options(run: Run) -> dict[str, str]:
    """Return the options `--name value` of a program's command line."""
    words = list(run.typed or run.command)
    options: dict[str, str] = {}
    for word, next_word in zip(words, [*words[1:], "--"], strict=False):  # an imported run may have no command line
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name or name in _XSP_OPTIONS or _LAUNCHER_OPTIONS.fullmatch(name):
            continue
        if not equals:
            value = OPTION_SET if next_word.startswith("-") and not _NUMBER.fullmatch(next_word) else next_word
        options[name] = value
    return options
