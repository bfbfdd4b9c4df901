"""Profile a program without changes to its code.

Options of xsp come first, then the program as you would start it without xsp. A step ends with the step of the
optimizer if the program trains; otherwise it is one call of the outermost module. --step changes that.

examples:
  xsp run train.py --epochs 1
  xsp run -m mypkg.train --epochs 1                 a module, as python -m
  xsp run python -O train.py                        with options of Python
  xsp run --levels M/L --out runs/eval evaluate.py
  xsp run --step train_one train.py                 a function of the script
  xsp run --step mypkg.loop:Trainer.step train.py   a function of a module
  xsp run --once-each train.py                      one run per level
  xsp run --counters train.py                       hardware counters (ncu)
  xsp run --budget 1% train.py                      at most 1 % overhead
  xsp run torchrun --nproc-per-node 2 train.py      all ranks in one trace
  xsp run accelerate launch train.py                or: deepspeed train.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from xsp import rundir
from xsp.cli import counters, options
from xsp.errors import UsageError
from xsp.record.budget import UNASKED
from xsp.record.terminal import say

if TYPE_CHECKING:
    from xsp.launch.program import Elsewhere, Program
    from xsp.launch.ranks import Job

SUMMARY = "profile a program without changing it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.recording(parser)
    parser.add_argument(
        "--step",
        default="auto",
        metavar="WHAT",
        help="what a step is: auto (default), call, optimizer, or the name of a function",
    )
    parser.add_argument(
        "--batch-size",
        type=options.rows,
        metavar="N",
        help="samples per step and rank (default: the first dimension of the model's inputs)",
    )
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="if parent spans are ambiguous, run the program again, serialised, to find them",
    )
    options.counting(parser)
    options.sampling_steps(parser)
    parser.add_argument("--once-each", action="store_true", help="run the script once per level, each in a new process")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print no tables; an empty profile is still reported"
    )
    options.remarking(parser)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--one-at-a-time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--for-program", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT is a module, run as `python -m` does")
    parser.add_argument(
        "words",
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="the program as it is started without xsp, with its arguments: a Python file, -m and a module, python …, "
        "torchrun …, accelerate launch …, deepspeed …",
    )


def run(given: argparse.Namespace) -> int:
    """Run the program, print the first tables, return the program's exit code."""
    from xsp.launch import ranks
    from xsp.launch.program import Elsewhere
    from xsp.launch.rerun import count, once_each, resolve
    from xsp.launch.run import Launch, launch
    from xsp.schema import Level

    if given.levels == "once-each":  # as the decision on leveled steps writes it (ADR 006)
        given.once_each, given.levels = True, "M/L/G"
    _refuse_what_does_not_go_together(given)
    meant = _meant(given)
    job = meant if isinstance(meant, ranks.Job) else None
    if job is not None:
        _refuse_what_does_not_go_with(job, given)
    if isinstance(meant, Elsewhere):
        own = given.typed[1 : len(given.typed) - len(given.words)]
        meant.go_on(own[:-1] if own[-1:] == ["--"] else own)
    program = meant.program if isinstance(meant, ranks.Job) else meant
    given.only = Level[given.only.upper()] if given.only else None
    given.budget = _budget(given)
    how = Launch(
        program=replace(program, args=(*given.for_program, *program.args)),
        settings=options.recorded(given, program.name),
        step=given.step,
        says_where=not given.quiet,
        shows_line=not given.quiet and sys.stderr is not None and sys.stderr.isatty(),
        one_at_a_time=given.one_at_a_time,
        counting=given.counting,
    )
    if job is not None:
        code, run = ranks.launch(how, job)
    else:
        code, run = once_each(how) if given.once_each else launch(how)
    if run is None:
        return code
    if given.resolve and code == 0:
        found, code = resolve(how, run)
        say(f"the serialised re-run resolved {found} parents")
    if given.counters and code == 0:
        counters.once_more(lambda: count(how, run))
    _show(run, given.quiet, code == 0 and not given.no_advice)
    return code


def _budget(given: argparse.Namespace) -> str | None:
    """Return the limit of the overhead; None for no limit."""
    if given.budget is not None:
        return None if given.budget == "off" else str(given.budget)
    asked = given.every is not None or given.only is not None or given.one_at_a_time or given.counting
    return None if asked else UNASKED


def _meant(given: argparse.Namespace) -> Program | Elsewhere | Job:
    """Return what to run: a launcher's job, a program, or a program that needs another interpreter."""
    from xsp.launch import program, ranks

    words = given.words[1:] if given.words[0] == "--" else given.words
    if not words:
        raise UsageError("name the program: xsp run train.py")
    if not given.module and (found := ranks.found_in(words)) is not None:
        return found
    meant = program.read(words, given.module)
    plain = meant if isinstance(meant, program.Program) else meant.program
    if plain.is_module and (found := ranks.found_in(plain.words)) is not None:
        return found if plain is meant else meant
    return meant


def _refuse_what_does_not_go_together(given: argparse.Namespace) -> None:
    if given.resolve and given.otlp is not None:
        raise UsageError(
            "--resolve finds parents after the run: omit --otlp, and send the run afterwards with `xsp export`"
        )
    options.check_counting(given)
    if given.resolve and given.once_each:
        raise UsageError("--resolve needs the steps of one run: omit --once-each")
    if given.counters and given.once_each:
        raise UsageError("--counters needs the kernels of one run: omit --once-each")
    if given.budget not in (None, "off") and (given.once_each or given.counters or given.resolve):
        raise UsageError("--budget applies to a single run: omit --counters, --resolve and --once-each")


def _refuse_what_does_not_go_with(job: Job, given: argparse.Namespace) -> None:
    if given.budget is not None:
        raise UsageError("--budget would record different steps on each rank: use --every N, the same on all of them")
    if given.resolve or given.counters or given.once_each:
        raise UsageError(f"--resolve, --counters and --once-each cannot be used with {job.name}: omit them")


def _show(out: Path, quiet: bool, remarks: bool) -> None:
    """Print the first tables, or only why there are none; a failure is reported, and the program's exit code stays."""
    from xsp.cli import progress
    from xsp.errors import XspError

    shows = not quiet and sys.stdout is not None and _is_written(sys.stdout)
    try:
        if shows:
            progress.show_result(out, remarks)
        elif quiet and (reason := rundir.read_job(out).empty):
            say(f"{out}: no step was stored: {reason}")
    except XspError as error:
        say(str(error))
    except (Exception, SystemExit) as error:  # rich exits if nobody reads
        reason, again = f"{type(error).__name__}: {error}", f"xsp report {shlex.quote(str(out))}"
        say(f"{out}: the tables could not be printed ({reason}); type `{again}`")
    if shows and not _is_written(sys.stdout):
        with contextlib.suppress(OSError, ValueError):  # what xsp printed would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_written(stream: TextIO) -> bool:
    """Write what a stream buffers, and return whether that was possible; if not, Python reports it at its end."""
    try:
        stream.flush()
    except OSError:
        return False
    except Exception:  # it is closed, or the program's own
        return True
    return True
