"""Run a user's program as Python would, inside a profile."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from xsp import clock, scrub
from xsp.collector import Listener
from xsp.counters import secondrun
from xsp.errors import XspError
from xsp.launch import children, models, script
from xsp.launch.program import LaunchedProgram
from xsp.otlp import endpoint
from xsp.record import output
from xsp.record.autostep import AutoStep, OneAtATime, StepRule
from xsp.record.session import profile
from xsp.record.settings import Settings


@dataclass(frozen=True)
class Launch:
    """The program to run, and how to run it."""

    program: LaunchedProgram
    settings: Settings
    step: str = StepRule.AUTO.value
    """A `StepRule`, or the function whose calls are steps: `train_one`, `Trainer.fit_batch`, `pkg.mod:function`."""

    names_directory: bool = False
    """Whether the run's directory is printed on stderr if an interrupt ends the program."""

    shows_progress: bool = False
    """Whether a progress line is drawn in the terminal."""

    one_at_a_time: bool = False
    began_ns: int = field(default_factory=clock.monotonic_ns)
    """When the command began, on the monotonic clock."""

    while_finishing: Callable[[int], object] | None = None
    """See `xsp.record.session.profile.while_finishing`."""

    is_counter_run: bool = False
    """Whether Nsight Compute runs this process: only the describing step is recorded, and marked for it."""


def launch(plan: Launch) -> tuple[int, Path | None]:
    """Run the program in this process, and return its exit code, and the run directory if there is a run.

    If the program raises, its traceback is printed and the code is 1, as in Python; the steps that were recorded until
    then are kept. `KeyboardInterrupt` passes through.

    Raises:
        UsageError: there is no such program, or no such function for --step.
        OutputError: the run directory is taken, and `next_free` is not set.
        PluginError: the requested source of device work cannot be used.
    """
    models.set_library_variables(plan.settings.kernels)
    os.environ.pop(endpoint.VARIABLE, None)  # not for the script's own children
    function = plan.step if plan.step not in {rule.value for rule in StepRule} else None
    launch_ns = clock.monotonic_ns() - plan.began_ns
    try:
        main = script.prepare(plan.program, function)
    except XspError:
        raise
    except Exception as error:  # raised by the package that contains the module
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, None
    settings = replace(plan.settings, collectors=secondrun.collectors()) if plan.is_counter_run else plan.settings
    settings = replace(settings, typed=_typed_command(plan))
    session = profile.of(settings, functools.partial(_listener, plan=plan), hosts=True)
    session.account.launch_ns = launch_ns
    session.while_finishing = plan.while_finishing
    if plan.shows_progress:
        session.show_line()
    if plan.is_counter_run:
        session.describe_once()
    with _reporting_directory(session, plan), session, script.function_steps(session, main.function):
        os.environ.pop(output.JOB_VARIABLE, None)
        return script.execute(main, plan.program.args), session.out if session.records else None


def _typed_command(plan: Launch) -> tuple[str, ...]:
    """Return the typed command without directories and possible secrets."""
    program = plan.program
    target = program.target if program.is_module else PurePath(program.target).name or program.target
    step = () if plan.step == StepRule.AUTO.value else ("--step", plan.step)
    return ("run", *step, *(["-m"] if program.is_module else []), target, *scrub.command(("", *program.args))[1:])


@contextlib.contextmanager
def _reporting_directory(session: profile, plan: Launch) -> Iterator[None]:
    with children.report_run_on_interrupt(shows_traceback=True) as directories:
        try:
            yield
        finally:
            directories += [session.out] if session.records and plan.names_directory else []


def _listener(session: profile, plan: Launch) -> Listener:
    """Return the listener for the collectors' signals at the program's boundaries."""
    rules = {rule.value: rule for rule in StepRule}
    steps = AutoStep(session, rules.get(plan.step, StepRule.AUTO))
    return OneAtATime(session, steps) if plan.one_at_a_time else steps
