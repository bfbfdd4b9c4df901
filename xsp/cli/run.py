"""Profile a script as it is, without touching its code.

A step is an optimizer step if the script trains, else a call of the outermost module, or what --step names.
Options of xsp's stand before the script; everything after it is the script's own.

examples:
  xsp run train.py --epochs 1
  xsp run --levels M/L --out runs/eval evaluate.py
  xsp run --step train_one train.py                 a function of the script
  xsp run --step mypkg.loop:Trainer.step train.py   a function of a module
  xsp run --once-each train.py                      once per level, not in turns
  xsp run --counters train.py                       kernels' counters (ncu)
  xsp run --budget 1% train.py                      as often as 1 % pays for
  xsp run torchrun --nproc-per-node 2 train.py      all ranks in one trace
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from xsp.cli import counters, options

SUMMARY = "profile a script as it is"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.recording(parser)
    parser.add_argument(
        "--step", default="auto", metavar="WHAT", help="auto (default), call, optimizer, or the name of a function"
    )
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="if spans ran beside others and have no certain parent, run once more with one thing at a time",
    )
    options.counting(parser)
    options.sampling_steps(parser)
    parser.add_argument("--once-each", action="store_true", help="run the script once per level, each time afresh")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no tables")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--one-at-a-time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file, or torchrun with what it takes")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def run(given: argparse.Namespace) -> int:
    """Run the script, print the first tables, return the script's exit code."""
    from xsp.recording import torchrun
    from xsp.recording.again import count, once_each, resolve
    from xsp.recording.launch import Launch, launch
    from xsp.span import Level

    if given.levels == "once-each":  # as the decision on leveled steps writes it (ADR 006)
        given.once_each, given.levels = True, "M/L/G"
    _refuse_what_does_not_go_together(given)
    how = Launch(
        script=given.script,
        args=tuple(given.args),
        out=given.out or Path("runs") / _name(given),
        levels=given.levels,
        step=given.step,
        warmup=given.warmup,
        every=given.every,
        budget=options.budget(given),
        shows_line=not given.quiet and sys.stderr.isatty(),
        seed=given.seed,
        overwrite=given.overwrite,
        next_free=given.out is None,
        only=Level[given.only.upper()] if given.only else None,
        one_at_a_time=given.one_at_a_time,
        counting=given.counting,
        kernels=given.kernels,
        samples=given.samples,
        otlp=given.otlp,
        otlp_policy=given.otlp_policy,
    )
    if str(given.script) == torchrun.COMMAND:
        code, run = torchrun.launch(how)
    else:
        code, run = once_each(how) if given.once_each else launch(how)
    if run is None:
        return code
    if given.resolve and code == 0:
        found, code = resolve(how, run)
        print(f"xsp: the serialised re-run decided {found} parents", file=sys.stderr)
    if given.counters and code == 0:
        counters.once_more(lambda: count(how, run))
    if not given.quiet:
        _show(run)
    return code


def _refuse_what_does_not_go_together(given: argparse.Namespace) -> None:
    from xsp.errors import UsageError
    from xsp.recording import torchrun

    if given.resolve and given.otlp is not None:
        raise UsageError("--resolve finds parents after the run: leave --otlp away, and `xsp export` the run then")
    options.check_counting(given)
    if given.counters and given.once_each:
        raise UsageError("--counters needs the kernels of one run: leave --once-each away")
    if given.budget is not None and (given.once_each or given.counters or given.resolve):
        raise UsageError("--budget is kept in one run: leave --counters, --resolve and --once-each away")
    if str(given.script) != torchrun.COMMAND:
        return
    if given.budget is not None:
        raise UsageError("--budget would record other steps on each rank: say --every N, the same on all of them")
    if given.resolve or given.counters or given.once_each:
        raise UsageError("--resolve, --counters and --once-each do not go with torchrun: leave them away")


def _name(given: argparse.Namespace) -> str:
    """Return what the run directory is called: as the script, also behind torchrun's options."""
    scripts = [Path(part).stem for part in (str(given.script), *given.args) if part.endswith(".py")]
    return scripts[0] if scripts else given.script.stem


def _show(out: Path) -> None:
    """Print the first tables; a script that did no step is a reason to say so, not to fail."""
    from xsp.cli import progress
    from xsp.errors import TraceError

    try:
        progress.show_result(out)
    except TraceError as error:
        print(f"xsp: {error}", file=sys.stderr)
