"""Runs of the same script in separate processes: once per level, or again for what one run cannot determine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xsp import rundir
from xsp.collector import Kernels
from xsp.counters import secondrun
from xsp.device import devices
from xsp.launch import children
from xsp.launch.run import Launch
from xsp.levels import rung_name
from xsp.otlp import endpoint
from xsp.record import description, output
from xsp.record.settings import Settings


def run_levels(plan: Launch) -> tuple[int, Path]:
    """Run the script once per level, each time in a fresh process, into one run.

    Returns:
        0, or the exit code of the first run that failed, and the run directory; earlier recordings are kept.

    Raises:
        OutputError: the run directory is taken, and `next_free` is not set; or it cannot be written.
    """
    with output.claim_for_runs(plan.settings) as out, children.report_run_on_interrupt(out):
        return _run_levels(plan, out), out


def _run_levels(plan: Launch, out: Path) -> int:
    rungs = plan.settings.rungs
    parts: list[str] = []
    content: dict[str, Any] = {
        "name": plan.program.name,
        "levels": plan.settings.levels,
        "parts": parts,
        "finished": False,
    }
    content["rungs"] = [rung_name(rung) for rung in rungs]
    code = 0
    for rung in rungs:
        parts.append(rung.name.lower())
        rundir.write_run(out, content)
        code = _rerun(plan, replace(plan.settings, out=out / parts[-1], only=rung))
        if code:
            break
    runs = [
        rundir.read_run(out / part)
        for part in parts
        if (out / part / rundir.RUN_FILE).is_file()  # a script that could not be started leaves none
    ]
    rundir.write_run(out, {**content, **description.of_parts(runs), "finished": code == 0})
    return code


def resolve(plan: Launch, run: Path) -> tuple[int, int]:
    """Run the script again with all work serialized, and resolve what was ambiguous in its run.

    Returns:
        The number of spans that found a parent, and the exit code of the re-run.
    """
    from xsp.store.write import resolve_run  # the table engine, after the measured program has ended

    serialised = run / rundir.SERIALISED
    settings = replace(plan.settings, out=serialised, only=plan.settings.rungs[-1], otlp=None)
    code = _rerun(plan, settings, ["--one-at-a-time"], {"OMP_NUM_THREADS": "1", **devices.blocking_variables()})
    return (resolve_run(run, serialised) if rundir.segments(serialised) else 0), code


def count(plan: Launch, run: Path) -> dict[str, Any]:
    """Run the script again under Nsight Compute, and join the counters of one step to its run.

    Returns:
        The amounts that were joined, see `xsp.counters.storing.attach`.

    Raises:
        CounterError: there are no counters; the run is unchanged except for a note with the reason.
    """
    settings = replace(plan.settings, otlp=None, samples=False, kernels=Kernels.KINETO.value)  # ncu occupies CUPTI
    return secondrun.count(run, lambda directory: command(plan, replace(settings, out=directory), ["--counting"]))


def _rerun(
    plan: Launch, settings: Settings, extra: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> int:
    """Run this command again in a separate process."""
    variables = {**os.environ, **otlp_environment(settings), **(environment or {})}
    return children.run(command(plan, settings, extra), variables)


def command(plan: Launch, settings: Settings, extra: Sequence[str] = (), launcher: Sequence[str] = ()) -> list[str]:
    """Return the command that runs the program with these settings in a separate process.

    Args:
        plan: the program and how it is run.
        settings: settings of the recording there.
        extra: further options of `xsp run`.
        launcher: words before the module name, in place of `-m`.
    """
    python = [sys.executable, *python_options(), *(launcher or ["-m"]), "xsp.cli", "run"]
    batch_options = ["--batch-size", str(settings.batch_size)] if settings.batch_size is not None else []
    return [*python, *settings.options(), *batch_options, "--step", plan.step, *extra, *plan.program.words]


def python_options() -> list[str]:
    """Return the options that Python itself was started with."""
    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


def otlp_environment(settings: Settings) -> dict[str, str]:
    """Return the variable with the delivery target for another `xsp run`; a command line would show it to everybody."""
    return {endpoint.VARIABLE: settings.otlp} if settings.otlp is not None else {}
