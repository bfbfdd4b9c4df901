"""Run a script on several ranks by torchrun, each rank inside a profile of its own, all in one trace.

The launcher is the root of the trace: it names itself to the ranks in `TRACEPARENT`, and its own span lasts
from before the first rank starts until after the last one ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xsp import identity, plugins, rundir, scrub
from xsp.errors import UnwritableError, UsageError
from xsp.recording import again, placing
from xsp.recording.launch import Launch
from xsp.recording.saying import say
from xsp.version import __version__

COMMAND = "torchrun"


def launch(how: Launch) -> tuple[int, Path | None]:
    """Run torchrun with what stands after it, and return its exit code, and the run directory if there is a run.

    Where the disk or another process lets no run be written, a line on stderr says so, and the job runs without xsp.

    Args:
        how: `script` is `torchrun`; `args` are torchrun's options, the script and its arguments.

    Raises:
        UsageError: torchrun's options make no sense, or name no script; `otlp` is no endpoint.
        PluginError: what `otlp` needs is not there.
        OutputError: there is something in the run directory already, and `next_free` was not said.
    """
    options, program = _split(how.args)
    if how.otlp is not None:
        plugins.load("xsp.exporters", "otlp").check(how.otlp, how.otlp_policy)
    job = [sys.executable, "-m", "torch.distributed.run", *options]
    own = identity.of_this_process()
    content = _content(how, Path(program[0]).stem, own)
    with contextlib.ExitStack() as held:
        try:
            out = held.enter_context(placing.claimed_for_several(how.out, how.overwrite, how.next_free))
            rundir.write_run(out, {**content, "finished": False})
        except UnwritableError as error:
            say(f"{error}. The job runs without a profile.")
            return subprocess.run([*job, *program], check=False).returncode, None
        environment = {**os.environ, **again.otlp_environment(how)}
        environment["TRACEPARENT"] = identity.traceparent(own.trace_id, own.span_id)
        command = [*job, "-m", "xsp.cli", "run", *again.options(how, out), *program]
        code = subprocess.run(command, env=environment, check=False).returncode
        _finish(how, out, content, code)
    return code, out


def _finish(how: Launch, out: Path, content: dict[str, Any], code: int) -> None:
    parts = [part.name for part in rundir.rank_parts(out)]
    try:
        rundir.write_run(out, {**content, "parts": parts, "finished": code == 0, "end_ns": time.time_ns()})
    except UnwritableError as error:  # the job has come to its end, and ends as it would have
        say(f"{error}; what its ranks wrote is kept")
    if how.otlp is not None:
        plugins.load("xsp.exporters", "otlp")(out, how.otlp, how.otlp_policy).finish()  # the job's own span


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's own options, and the script with its arguments."""
    from torch.distributed.run import get_args_parser

    with contextlib.redirect_stderr(sys.stdout), contextlib.suppress(SystemExit):
        found = get_args_parser().parse_args(list(args))
        if found.module or found.no_python:
            raise UsageError("xsp run torchrun: give a Python file; -m/--module and --no-python are not supported")
        program = [found.training_script, *found.training_script_args]
        return list(args[: len(args) - len(program)]), program
    raise UsageError("xsp run torchrun: torchrun does not take these options; `torchrun --help` lists its own")


def _content(how: Launch, name: str, own: identity.Identity) -> dict[str, Any]:
    """Return what `run.json` says of the job as a whole."""
    return {
        "xsp": __version__,
        "kind": rundir.RANKS,
        "id": own.id,
        "name": name,
        "start_ns": time.time_ns(),
        "otel": own.otel,
        "process": own.process,
        "host": own.host,
        "command": scrub.command(sys.argv),
        "levels": how.levels,
        "parts": [],
    }
