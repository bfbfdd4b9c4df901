"""Runs of the same script in processes of their own: once per level, or once more to know what one run cannot tell."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.collector import Kernels
from xsp.counters import secondrun
from xsp.launch import children
from xsp.launch.run import Launch
from xsp.levels import parse_levels, rung_name
from xsp.otlp import endpoint
from xsp.record import description, output


def once_each(how: Launch) -> tuple[int, Path]:
    """Run the script once per level, each time in a fresh process, into one run.

    Returns:
        0, or the exit code of the first run that failed, and the run directory; what was recorded until then is kept.

    Raises:
        OutputError: there is something in it already, and `next_free` was not said; or it cannot be written.
    """
    with output.claimed_for_several(how.out, how.overwrite, how.next_free) as out, children.says_where(out):
        return _each(how, out), out


def _each(how: Launch, out: Path) -> int:
    rungs = parse_levels(how.levels)
    parts: list[str] = []
    content: dict[str, Any] = {"name": how.program.name, "levels": how.levels, "parts": parts, "finished": False}
    content["rungs"] = [rung_name(rung) for rung in rungs]
    code = 0
    for rung in rungs:
        parts.append(rung.name.lower())
        rundir.write_run(out, content)
        code = _again(how, out / parts[-1], ["--only", rung.name.lower()])
        if code:
            break
    recorded = [
        rundir.read_run(out / part)
        for part in parts
        if (out / part / rundir.RUN_FILE).is_file()  # a script that could not be started leaves none
    ]
    rundir.write_run(out, {**content, **description.of_parts(recorded), "finished": code == 0})
    return code


def resolve(how: Launch, run: Path) -> tuple[int, int]:
    """Run the script once more with one thing at a time, and decide what was ambiguous in its run.

    Args:
        how: the script was run.
        run: the directory of its run.

    Returns:
        How many spans found a parent, and the exit code of the re-run.
    """
    from xsp.store.write import resolve_run  # the table engine, after the measured program has ended

    serialised = run / rundir.SERIALISED
    deepest = parse_levels(how.levels)[-1].name.lower()
    code = _again(
        replace(how, otlp=None),
        serialised,
        ["--one-at-a-time", "--only", deepest],
        {"OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "1"},
    )
    return (resolve_run(run, serialised) if rundir.segments(serialised) else 0), code


def count(how: Launch, run: Path) -> dict[str, Any]:
    """Run the script once more under Nsight Compute, and join the counters of one step to its run.

    Args:
        how: the script was run.
        run: the directory of its run.

    Returns:
        How much was joined, see `xsp.counters.storing.attach`.

    Raises:
        CounterError: there are none; the run is as it was, and says why.
    """
    again = replace(how, otlp=None, samples=False, kernels=Kernels.KINETO.value)  # CUPTI is ncu's
    return secondrun.count(run, lambda counted: _command(again, counted, ["--counting"]))


def _again(how: Launch, out: Path, extra: list[str], environment: dict[str, str] | None = None) -> int:
    """Run this command again in a process of its own."""
    environment = {**os.environ, **otlp_environment(how), **(environment or {})}
    return children.run(_command(how, out, extra), environment)


def _command(how: Launch, out: Path, extra: list[str]) -> list[str]:
    """Return this command, for a process of its own."""
    return [sys.executable, *python_options(), "-m", "xsp.cli", "run", *options(how, out), *extra, *how.program.words]


def python_options() -> list[str]:
    """Return the options that Python itself was started with."""
    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


def options(how: Launch, out: Path) -> list[str]:
    """Return the options of a further `xsp run` that records as this one; it prints nothing of its own."""
    given = ["--quiet", "--out", str(out), "--levels", how.levels, "--step", how.step, "--seed", str(how.seed)]
    if how.warmup is not None:
        given += ["--warmup", str(how.warmup)]
    if how.every is not None:
        given += ["--every", str(how.every)]
    given += [] if how.samples else ["--no-samples"]
    return [*given, "--kernels", how.kernels, "--otlp-policy", how.otlp_policy]


def otlp_environment(how: Launch) -> dict[str, str]:
    """Return what tells a further `xsp run` where to deliver to; a command line would show it to everybody."""
    return {endpoint.VARIABLE: how.otlp} if how.otlp is not None else {}
