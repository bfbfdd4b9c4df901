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
from xsp.errors import UsageError
from xsp.recording import again
from xsp.recording.launch import Launch
from xsp.version import __version__

COMMAND = "torchrun"


def launch(how: Launch) -> int:
    """Run torchrun with what stands after it, and return its exit code.

    Args:
        how: `script` is `torchrun`; `args` are torchrun's options, the script and its arguments.

    Raises:
        UsageError: torchrun's options make no sense, or name no script; `otlp` is no endpoint.
        PluginError: what `otlp` needs is not there.
        OutputError: the run directory exists or cannot be written.
    """
    options, program = _split(how.args)
    if how.otlp is not None:
        plugins.load("xsp.exporters", "otlp").check(how.otlp, how.otlp_policy)
    with rundir.created_for_several(how.out, how.overwrite) as out:
        return _launch(how, out, options, program)


def _launch(how: Launch, out: Path, options: list[str], program: list[str]) -> int:
    own, start_ns = identity.of_this_process(), time.time_ns()
    content = _content(how, Path(program[0]).stem, own, start_ns)
    rundir.write_run(out, {**content, "finished": False})
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "xsp.cli", "run"]
    command += again.options(how, out)
    environment = {**os.environ, **again.otlp_environment(how)}
    environment["TRACEPARENT"] = identity.traceparent(own.trace_id, own.span_id)
    code = subprocess.run([*command, *program], env=environment, check=False).returncode
    parts = [part.name for part in rundir.rank_parts(out)]
    rundir.write_run(out, {**content, "parts": parts, "finished": code == 0, "end_ns": time.time_ns()})
    if how.otlp is not None:
        plugins.load("xsp.exporters", "otlp")(out, how.otlp, how.otlp_policy).finish()  # the job's own span
    return code


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


def _content(how: Launch, name: str, own: identity.Identity, start_ns: int) -> dict[str, Any]:
    """Return what `run.json` says of the job as a whole."""
    return {
        "xsp": __version__,
        "kind": rundir.RANKS,
        "id": own.id,
        "name": name,
        "start_ns": start_ns,
        "otel": own.otel,
        "process": own.process,
        "host": own.host,
        "command": scrub.command(sys.argv),
        "levels": how.levels,
        "parts": [],
    }
