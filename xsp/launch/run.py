"""Run a user's program as Python would, inside a profile."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from xsp import scrub
from xsp.counters import secondrun
from xsp.errors import XspError
from xsp.launch import children, models, script
from xsp.launch.program import Program
from xsp.otlp import endpoint
from xsp.record import output
from xsp.record.autostep import AutoStep, OneAtATime, StepRule
from xsp.record.collecting import Listener
from xsp.record.session import profile
from xsp.record.settings import Settings


@dataclass(frozen=True)
class Launch:
    """The program to run, and how to run it."""

    program: Program
    settings: Settings
    step: str = StepRule.AUTO.value
    """A `StepRule`, or the function whose calls are steps: `train_one`, `Trainer.fit_batch`, `pkg.mod:function`."""

    says_where: bool = False
    """Print the run's directory on stderr if an interrupt ends the program."""

    shows_line: bool = False
    """Draw a progress line in the terminal."""

    one_at_a_time: bool = False
    counting: bool = False
    """Mark the describing step for Nsight Compute, which runs this process, and record no other step."""


def launch(how: Launch) -> tuple[int, Path | None]:
    """Run the program in this process, and return its exit code, and the run directory if there is a run.

    If the program raises, its traceback is printed and the code is 1, as in Python; the steps that were recorded until
    then are kept. `KeyboardInterrupt` passes through.

    Raises:
        UsageError: there is no such program, or no such function for --step.
        OutputError: the run directory is taken, and `next_free` is not set.
        PluginError: the requested source of device work cannot be used.
    """
    models.before_the_first_use_of_libraries(how.settings.kernels)
    os.environ.pop(endpoint.VARIABLE, None)  # not for the script's own children
    function = how.step if how.step not in {rule.value for rule in StepRule} else None
    try:
        main = script.prepare(how.program, function)
    except XspError:
        raise
    except Exception as error:  # raised by the package that contains the module
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, None
    settings = replace(how.settings, collectors=secondrun.collectors()) if how.counting else how.settings
    settings = replace(settings, typed=_typed(how))
    session = profile.of(settings, functools.partial(_listener, how=how), hosts=True)
    if how.shows_line:
        session.show_line()
    if how.counting:
        session.describe_once()
    with _saying_where(session, how), session, script.stepping(session, main.function):
        os.environ.pop(output.JOB_VARIABLE, None)
        return script.execute(main, how.program.args), session.out if session.records else None


def _typed(how: Launch) -> tuple[str, ...]:
    """Return the typed command without directories and possible secrets."""
    program = how.program
    target = program.target if program.is_module else PurePath(program.target).name or program.target
    step = () if how.step == StepRule.AUTO.value else ("--step", how.step)
    return ("run", *step, *(["-m"] if program.is_module else []), target, *scrub.command(("", *program.args))[1:])


@contextlib.contextmanager
def _saying_where(session: profile, how: Launch) -> Iterator[None]:
    with children.report_run_on_interrupt(shows=True) as places:
        try:
            yield
        finally:
            places += [session.out] if session.records and how.says_where else []


def _listener(session: profile, how: Launch) -> Listener:
    """Return the listener for the collectors' signals at the program's boundaries."""
    rules = {rule.value: rule for rule in StepRule}
    steps = AutoStep(session, rules.get(how.step, StepRule.AUTO))
    return OneAtATime(session, steps) if how.one_at_a_time else steps
