"""Run a program on several ranks by its launcher, each rank inside its own profile, all in one trace.

The launcher's command is changed to start `xsp run` with the program, instead of the program: so the way it starts its
processes does not matter. The launcher's own parser determines where its options end and the program begins.

xsp is the root of the trace: it passes its context to the ranks in `TRACEPARENT`, and its own span lasts from before
the first rank starts until after the last one has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from xsp import identity, plugins, rundir, scrub
from xsp.errors import UnwritableError, UsageError
from xsp.launch import children, rerun
from xsp.launch.program import LaunchedProgram, parse_program
from xsp.launch.run import Launch
from xsp.record import output
from xsp.record.terminal import say
from xsp.run import RANKS
from xsp.version import __version__


class _Launcher(NamedTuple):
    """How a launcher is started, and the parser of its command line."""

    module: str
    package: str
    parser: str
    """A function of the module: it parses a command line, or returns a parser."""


_TORCHRUN = _Launcher("torch.distributed.run", "torch", "get_args_parser")
_OLD_TORCHRUN = _Launcher("torch.distributed.launch", "torch", "parse_args")
_ACCELERATE = _Launcher("accelerate.commands.launch", "accelerate", "launch_command_parser")
_DEEPSPEED = _Launcher("deepspeed.launcher.runner", "deepspeed", "parse_args")

_COMMANDS: dict[tuple[str, ...], _Launcher] = {
    ("torchrun",): _TORCHRUN,
    ("accelerate", "launch"): _ACCELERATE,
    ("accelerate-launch",): _ACCELERATE,
    ("deepspeed",): _DEEPSPEED,
    ("-m", "accelerate.commands.accelerate_cli", "launch"): _ACCELERATE,
    **{("-m", launcher.module): launcher for launcher in (_TORCHRUN, _OLD_TORCHRUN, _ACCELERATE, _DEEPSPEED)},
}
_REFUSED = ("no_python", "run_path", "tpu")
"""Options that make a launcher start something else than `python -m` for each rank."""


@dataclass(frozen=True)
class LauncherCommand:
    """A launcher with its options and program."""

    name: str
    """The launcher's command as typed."""

    module: str
    options: tuple[str, ...]
    program: LaunchedProgram


def parse_job(words: Sequence[str]) -> LauncherCommand | None:
    """Return the job that the words after `xsp run` describe; None if they do not begin with a launcher.

    Args:
        words: the words, with `-m` before a module.

    Raises:
        UsageError: the launcher is not installed, does not take its options, or does not start Python programs.
    """
    command_words = [Path(words[0]).name, *words[1:]]
    for command, launcher in _COMMANDS.items():
        if tuple(command_words[: len(command)]) == command:
            return _parse(" ".join(command), launcher, list(words[len(command) :]))
    if command_words[0] == "accelerate":
        raise UsageError("xsp run accelerate: only `accelerate launch … train.py` runs a program")
    return None


def _parse(name: str, launcher: _Launcher, words: list[str]) -> LauncherCommand:
    launcher_options = _parse_options(name, launcher, words)
    unsupported = [option for option in _REFUSED if getattr(launcher_options, option, False)]
    if unsupported:
        option = "--" + unsupported[0].replace("_", "-")
        raise UsageError(f"xsp run {name}: {option} is not supported; give a Python file, or -m and a module")
    target, args = (
        (launcher_options.user_script, launcher_options.user_args)
        if hasattr(launcher_options, "user_script")
        else (launcher_options.training_script, launcher_options.training_script_args)
    )
    for index, word in enumerate(words):
        arguments = words[index + 1 :]
        if word == target and (arguments == list(args) or arguments == ["--", *args]):
            options = words[: index - 1] if index and words[index - 1] == "--" else words[:index]
            if not launcher_options.module:
                options = [*options, "--module"]  # `xsp.cli` is a module
            return LauncherCommand(
                name,
                launcher.module,
                tuple(options),
                LaunchedProgram(target, tuple(arguments), bool(launcher_options.module)),
            )
    raise UsageError(f"xsp run {name}: it is not clear where its options end; write them before the script")


def _parse_options(name: str, launcher: _Launcher, words: list[str]) -> Any:
    """Parse a launcher's command line by its own parser."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # output at import will be repeated when it runs
            function = getattr(importlib.import_module(launcher.module), launcher.parser)
    except ImportError as error:
        raise UsageError(
            f"{name}: not installed in {sys.executable} ({error}); pip install {launcher.package}"
        ) from error
    except Exception as error:  # deepspeed, for instance, looks for a compiler
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name}: cannot be imported ({reason}); try `{name} --help`") from error
    with contextlib.redirect_stderr(sys.stdout), contextlib.suppress(SystemExit):
        options = function(words) if launcher.parser == "parse_args" else function().parse_args(words)
        if (getattr(options, "user_script", None) or getattr(options, "training_script", None)) is not None:
            return options
    raise UsageError(f"xsp run {name}: {name} does not take these options; `{name} --help` lists its own")


def launch(plan: Launch, job: LauncherCommand) -> tuple[int, Path | None]:
    """Run a launcher's job, and return its exit code, and the run directory if there is a run.

    If the disk or another process prevents a run, a line on stderr reports it, and the job runs without xsp.

    Raises:
        UsageError: `otlp` is no endpoint; the program is no Python file.
        PluginError: a requirement of `otlp` is missing.
        OutputError: the run directory is taken, and `next_free` is not set.
        KeyboardInterrupt: the job was interrupted; the steps that were recorded until then are intact.
    """
    settings = plan.settings
    if settings.otlp is not None:
        plugins.sender().check(settings.otlp, settings.otlp_policy)
    if not job.program.is_module:
        parse_program([job.program.target])  # an error here is one line, not one of each rank
    process_identity = identity.of_this_process()
    # of `run.json`, for the job as a whole
    content = {
        "xsp": __version__,
        "kind": RANKS,
        "id": process_identity.id,
        "name": plan.program.name,
        "start_ns": time.time_ns(),
        "otel": process_identity.otel,
        "process": process_identity.process,
        "host": process_identity.host,
        "command": scrub.command(sys.argv),
        "levels": plan.settings.levels,
        "parts": [],
    }
    launcher = ["-m", job.module, *job.options]
    with contextlib.ExitStack() as stack:
        try:
            out = stack.enter_context(output.claim_for_runs(settings))
            rundir.write_run(out, {**content, "finished": False})
        except UnwritableError as error:
            say(f"{error}. The job continues without a profile.")
            options = launcher if job.program.is_module else launcher[:-1]
            python = [sys.executable, *rerun.python_options()]
            return children.run([*python, *options, job.program.target, *job.program.args]), None
        environment = {**os.environ, **rerun.otlp_environment(settings), output.JOB_VARIABLE: str(out)}
        environment["TRACEPARENT"] = identity.traceparent(process_identity.trace_id, process_identity.span_id)
        command = rerun.command(plan, replace(settings, out=out), launcher=launcher)
        code = None
        try:
            with children.report_run_on_interrupt(out):
                code = children.run(command, environment)
        finally:
            _finish(plan, out, content, code)
    return code, out


def _finish(plan: Launch, out: Path, content: dict[str, Any], code: int | None) -> None:
    parts = [part.name for part in rundir.rank_parts(out)]
    try:
        rundir.write_run(out, {**content, "parts": parts, "finished": code == 0, "end_ns": time.time_ns()})
    except UnwritableError as error:  # the job ends as it would have without xsp
        say(f"{error}; what its ranks wrote is kept")
    settings = plan.settings
    if settings.otlp is not None:
        try:
            plugins.sender()(out, settings.otlp, settings.otlp_policy).finish()  # delivers the job's own span
        except Exception as error:
            command = f"xsp export {shlex.quote(str(out))} --to WHERE"
            say(f"the job's own span was not delivered ({error}); `{command}` sends the run")
