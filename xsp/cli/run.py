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
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from xsp import rundir
from xsp.cli import counters, options, progress
from xsp.errors import UsageError
from xsp.record.budget import USE_DEFAULT
from xsp.record.terminal import say

if TYPE_CHECKING:
    from xsp.launch.program import LaunchedProgram, OtherInterpreter
    from xsp.launch.ranks import LauncherCommand

SUMMARY = "profile a program without changing it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.allow_abbrev = False  # argparse also completes, or refuses as ambiguous, options of the program
    options.add_recording_options(parser)
    parser.add_argument(
        "--step",
        default="auto",
        metavar="WHAT",
        help="what a step is: auto (default), call, optimizer, or the name of a function",
    )
    parser.add_argument(
        "--batch-size",
        type=options.positive_int,
        metavar="N",
        help="samples per step and rank (default: the first dimension of the model's inputs)",
    )
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="if parent spans are ambiguous, run the program again, serialised, to find them",
    )
    options.add_counter_options(parser)
    options.add_sampling_options(parser)
    parser.add_argument("--once-each", action="store_true", help="run the script once per level, each in a new process")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print no tables; an empty profile is still reported"
    )
    options.add_advice_option(parser)
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
    visible = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    own = frozenset(name for action in visible for name in action.option_strings if name.startswith("--"))
    parser.set_defaults(own_options=own - {"--help"})


def run(args: argparse.Namespace) -> int:
    """Run the program, print the first tables, return the program's exit code."""
    from xsp.launch import ranks
    from xsp.launch.program import OtherInterpreter
    from xsp.launch.rerun import count, resolve, run_levels
    from xsp.launch.run import Launch, launch
    from xsp.schema import Level

    if args.levels == "once-each":  # the spelling in ADR 006
        args.once_each, args.levels = True, "M/L/G"
    if args.resolve and args.otlp is not None:
        raise UsageError(
            "--resolve finds parents after the run: omit --otlp, and send the run afterwards with `xsp export`"
        )
    options.check_counting(args)
    if args.resolve and args.once_each:
        raise UsageError("--resolve needs the steps of one run: omit --once-each")
    if args.counters and args.once_each:
        raise UsageError("--counters needs the kernels of one run: omit --once-each")
    if args.budget not in (None, "off") and (args.once_each or args.counters or args.resolve):
        raise UsageError("--budget applies to a single run: omit --counters, --resolve and --once-each")
    target = _target(args)
    job = target if isinstance(target, ranks.LauncherCommand) else None
    if job is not None:
        if args.budget is not None:
            raise UsageError(
                "--budget would record different steps on each rank: use --every N, the same on all of them"
            )
        if args.resolve or args.counters or args.once_each:
            raise UsageError(f"--resolve, --counters and --once-each cannot be used with {job.name}: omit them")
    if isinstance(target, OtherInterpreter):
        xsp_options = args.typed[1 : len(args.typed) - len(args.words)]
        target.replace_process(xsp_options[:-1] if xsp_options[-1:] == ["--"] else xsp_options)
    program = target.program if isinstance(target, ranks.LauncherCommand) else target
    args.only = Level[args.only.upper()] if args.only else None
    args.budget = _budget(args)
    ending = progress.Ending()
    plan = Launch(
        program=replace(program, args=(*args.for_program, *program.args)),
        settings=options.recording_settings(args, program.name),
        step=args.step,
        names_directory=not args.quiet,
        shows_progress=not args.quiet and sys.stderr is not None and sys.stderr.isatty(),
        one_at_a_time=args.one_at_a_time,
        is_counter_run=args.counting,
        began_ns=args.began_ns,
        while_finishing=None if args.quiet else ending.prepare,
    )
    if job is not None:
        code, run = ranks.launch(plan, job)
    else:
        code, run = run_levels(plan) if args.once_each else launch(plan)
    misplaced = _misplaced(args.own_options, program)
    if run is None:
        return code
    if args.resolve and code == 0:
        resolved, code = resolve(plan, run)
        say(f"the serialised re-run resolved {resolved} parents")
    if args.counters and code == 0:
        counters.rerun_and_count(lambda: count(plan, run))
    _show(run, args, code, misplaced, ending)
    if misplaced and not code and not args.quiet and not _mentions(program, misplaced.split()[0]):
        say(misplaced)
    return code


def _misplaced(own_options: frozenset[str], program: LaunchedProgram) -> str | None:
    """Return what to type where the program was given an option that is also one of xsp's; None if it was not."""
    word = next((word for word in program.args if word.partition("=")[0] in own_options), None)
    if word is None:
        return None
    option = word.partition("=")[0]
    return f"{option} was given to the program: to give it to xsp, type it before the program, xsp run {option} …"


def _mentions(program: LaunchedProgram, option: str) -> bool:
    """Return whether a script may read an option: its text has the name, or cannot be read here, as a module's."""
    if program.is_module:
        return True
    try:
        text = Path(program.target).read_text(errors="replace")
    except OSError:
        return True
    return re.search(option.lstrip("-").replace("-", "[-_]"), text) is not None


def _budget(args: argparse.Namespace) -> str | None:
    """Return the limit of the overhead; None for no limit."""
    if args.budget is not None:
        return None if args.budget == "off" else str(args.budget)
    explicit = args.every is not None or args.only is not None or args.one_at_a_time or args.counting
    return None if explicit else USE_DEFAULT


def _target(args: argparse.Namespace) -> LaunchedProgram | OtherInterpreter | LauncherCommand:
    """Return what to run: a launcher's job, a program, or a program that needs another interpreter."""
    from xsp.launch import program, ranks

    words = args.words[1:] if args.words[0] == "--" else args.words
    if not words:
        raise UsageError("name the program: xsp run train.py")
    if not args.module and (job := ranks.parse_job(words)) is not None:
        return job
    target = program.parse_program(words, args.module)
    plain_program = target if isinstance(target, program.LaunchedProgram) else target.program
    if plain_program.is_module and (job := ranks.parse_job(plain_program.words)) is not None:
        return job if plain_program is target else target
    return target


def _show(out: Path, args: argparse.Namespace, code: int, misplaced: str | None, ending: progress.Ending) -> None:
    """Print the first tables, or only why there are none; a failure is reported, and the program's exit code stays."""
    from xsp.errors import XspError

    quiet, remarks = args.quiet, code == 0 and not args.no_advice
    can_print = not quiet and sys.stdout is not None and _can_flush(sys.stdout)
    try:
        if code and (steps := rundir.read_job(out).steps) is not None and steps.seen == 0:
            say(f"the program ended with code {code} before its first step{f'; {misplaced}' if misplaced else ''}")
        elif can_print:
            progress.show_result(out, remarks, ending)
        elif quiet and (reason := rundir.read_job(out).empty):
            say(f"{out}: no step was stored: {reason}")
    except XspError as error:
        say(str(error))
    except (Exception, SystemExit) as error:  # rich exits if nobody reads
        reason, command = f"{type(error).__name__}: {error}", f"xsp report {shlex.quote(str(out))}"
        say(f"{out}: the tables could not be printed ({reason}); type `{command}`")
    finally:
        ending.end()
    if can_print and not _can_flush(sys.stdout):
        with contextlib.suppress(OSError, ValueError):  # what xsp printed would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _can_flush(stream: TextIO) -> bool:
    """Flush a stream, and return whether that was possible; if not, Python reports it when it exits."""
    try:
        stream.flush()
    except OSError:
        return False
    except Exception:  # it is closed, or the program's own
        return True
    return True
