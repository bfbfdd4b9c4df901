"""Compare two programs by their runs, layer by layer: what became slower or faster, and how certain that is.

Two starts of the same program differ by more than the steps within each. So compare several runs per side; each counts
once. With --turns xsp runs both itself, in turns, until the result is known; what is in quotes is a command, or a
model as for `xsp profile`. One run per side can be compared too, with weaker conclusions.

The output begins with the differences other than times: machine, versions, batch size, levels. A change is reported
only if repeats show it; "no evidence of change" is a possible result, given with the smallest change that would have
been found.

examples:
  xsp compare --turns 20 'python before.py' 'python after.py --fast'
  xsp compare --turns 20 torchvision:resnet18 torchvision:resnet34
  xsp compare --turns 20 --revisions main HEAD 'python train.py'
  xsp compare --turns 20 'python a.py' 'python b.py' --fail-if-slower 5%
  xsp compare a1 a2 a3 --with b1 b2 b3          runs before, and runs after
  xsp compare runs/before runs/after            one run per side
  xsp compare before.json.gz after.json.gz      of torch.profiler
  xsp compare runs/before runs/after --format markdown -o comment.md
  xsp compare runs/before runs/after --format csv > rows.csv

exit codes:
  0  compared; with --fail-if-slower: the step is not slower by that much
  1  it is slower by that much or more
  2  a program failed, there is nothing to compare, or the command line is wrong
  3  undecided; --if-cannot-tell changes the code
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import INTERRUPTED, options, progress
from xsp.errors import UsageError
from xsp.record import output

if TYPE_CHECKING:
    from xsp.comparison import Comparison
    from xsp.comparison.turns import ComparedTurns

SUMMARY = "compare two programs by their runs, layer by layer"
SLOWER, CANNOT_TELL = 1, 3
"""Exit codes."""

MOST_LETTERS = 100
"""Maximum length of a directory name that xsp chooses."""

FORMATS = ("table", "json", "csv", "markdown")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "before",
        nargs="+",
        metavar="RUN",
        help="runs before the change (what `xsp analyze` takes); without --with, also the run after it; with --turns, "
        "commands",
    )
    parser.add_argument("--with", nargs="+", dest="after", metavar="RUN", help="runs after the change, one or more")
    parser.add_argument(
        "--fail-if-slower",
        metavar="PERCENT",
        help="exit with 1 if the step is slower by that much or more, 5%% for example",
    )
    parser.add_argument(
        "--if-cannot-tell", type=int, choices=(0, SLOWER, CANNOT_TELL), metavar="CODE",
        help="exit code of --fail-if-slower if the result is undecided: 0 passes, 1 fails (default: 3)",
    )  # fmt: skip
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default), json, csv or markdown")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="PATH",
        help="write here instead of printing; with --turns the directory of the runs (default: runs/compare-<names>)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=options.positive_int, default=30, metavar="N", help="rows of a printed section (default: 30)"
    )
    parser.add_argument(
        "--kind", metavar="KIND",
        help="kind of step, by number or part of its name (default: the one with most of the loop's time)",
    )  # fmt: skip
    options.add_skip_damaged_option(parser)
    group = parser.add_argument_group("programs that run in turns")
    group.add_argument(
        "--turns",
        type=int,
        metavar="N",
        help="run both commands in turns until the result is clear, at most N times each; 3 to 100; 20 detects a "
        "change of a few percent",
    )
    group.add_argument(
        "--revisions",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="two git revisions: run one command in both, each in its own work tree",
    )
    group.add_argument("--levels", metavar="LEVELS", help="recorded levels (default: M/L): M, M/L, M/L/G, or names")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the order within each turn (default: 0)")
    group.add_argument("--overwrite", action="store_true", help="replace an existing comparison")
    options.add_quiet_option(group)


def run(args: argparse.Namespace) -> int:
    """Load the runs, or record them in turns; compare them, and print the comparison."""
    _check_options(args)
    percent = _percent(args.fail_if_slower)
    if args.turns is None:
        comparison = _compare_runs(*_sides(args), args)
        _show(comparison, args)
        return 0 if percent is None else _gate(comparison, percent, args.if_cannot_tell)
    from xsp.comparison import turns

    recording = turns.ComparedTurns(_directory(args), args.turns)
    try:
        comparison = _record_in_turns(args, recording, percent)
    except KeyboardInterrupt:
        progress.warn(f"xsp: interrupted{_kept_runs_hint(recording)}")
        return INTERRUPTED
    _show(comparison, args)
    progress.warn(f"xsp: the runs are in {output.display_path(recording.out)}")
    return 0 if percent is None else _gate(comparison, percent, args.if_cannot_tell)


def _check_options(args: argparse.Namespace) -> None:
    if args.if_cannot_tell is not None and args.fail_if_slower is None:
        raise UsageError("--if-cannot-tell needs --fail-if-slower PERCENT")
    if args.turns is None:
        turn_options = [("--revisions", args.revisions), ("--levels", args.levels), ("--seed", args.seed)]
        turn_options += [("--overwrite", args.overwrite or None), ("--quiet", args.quiet or None)]
        for option, value in turn_options:
            if value is not None:
                raise UsageError(f"{option} needs --turns N, which runs both programs in turns")
        return
    if args.after is not None:
        raise UsageError("--turns runs commands, --with takes recorded runs: omit one of them")
    expected = 1 if args.revisions else 2
    if len(args.before) != expected:
        raise UsageError(
            "--revisions takes one command, which runs in both: --revisions main HEAD 'python train.py'"
            if args.revisions
            else f"--turns takes two commands, each in quotes, and {len(args.before)} are given: "
            "--turns 20 'python before.py' 'python after.py'"
        )
    from xsp.comparison import commands

    for command in args.before:
        options.check_in_turns(commands.program(command))


def _directory(args: argparse.Namespace) -> Path:
    """Return the directory for the runs: the requested one, or one that does not exist yet."""
    from xsp.comparison import commands

    if args.out is not None:
        return Path(args.out)
    names = dict.fromkeys(commands.program(command).name for command in args.before)
    default = Path("runs") / "-".join(["compare", *names])[:MOST_LETTERS]
    if args.overwrite or not default.exists():
        return default
    return next(path for number in count(2) if not (path := default.with_name(f"{default.name}-{number}")).exists())


def _record_in_turns(args: argparse.Namespace, recording: ComparedTurns, percent: float | None) -> Comparison:
    from xsp.comparison import commands, comparable, compare, revisions, turns

    programs = [commands.program(command) for command in args.before]
    names = [f"{revision}: {programs[0].text}" for revision in args.revisions or ()] or [p.text for p in programs]
    with contextlib.ExitStack() as stack:
        if args.revisions:
            checkouts = stack.enter_context(revisions.checkout(args.revisions))
            programs *= 2
        else:
            checkouts = [revisions.WorkTree(Path.cwd())] * 2
        has_bar = args.quiet or sys.stderr.isatty()
        show = stack.enter_context(progress.progress_bar(args.quiet)) if has_bar else _print_progress
        sides = [turns.ComparedSide(*parts) for parts in zip("ab", programs, checkouts, strict=True)]
        turns.run_turns(
            sides,
            recording,
            args.levels or "M/L",
            show,
            seed=args.seed or 0,
            kind=args.kind,
            threshold=None if percent is None else percent / 100,
            overwrite=args.overwrite,
        )
    return replace(
        compare(*comparable.load(recording.a, recording.b, args.kind), turns=args.turns), a=names[0], b=names[1]
    )


def _print_progress(label: str, completed: int, total: int) -> None:
    """Print progress as lines where no bar can be drawn, such as in a CI log."""
    progress.warn(f"xsp: {label}", flush=True)


def _kept_runs_hint(recording: ComparedTurns) -> str:
    """Return a clause on where the runs of an interrupted comparison are, and how to use them."""
    if not recording.a or not recording.b:
        return ""
    a, b = (shlex.join(output.display_path(path) for path in paths) for paths in (recording.a, recording.b))
    return f"; compare what was recorded with: xsp compare {a} --with {b}"


def _sides(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the runs of both sides.

    Raises:
        UsageError: it is not clear which runs are after.
    """
    if args.after is not None:
        return args.before, args.after
    if len(args.before) != 2:
        runs = shlex.join(args.before)
        raise UsageError(
            f"name the runs after the change: xsp compare {runs} --with RUN …"
            if len(args.before) == 1
            else f"{len(args.before)} runs, and none marked as after the change: xsp compare A1 A2 … --with B1 B2 …"
        )
    return args.before[:1], args.before[1:]


def _compare_runs(before: Sequence[str], after: Sequence[str], args: argparse.Namespace) -> Comparison:
    from xsp.comparison import comparable, compare
    from xsp.ingest.ranks import subjects

    sides = comparable.load(subjects(before), subjects(after), args.kind, args.skip_damaged)
    for trace in (*sides[0], *sides[1]):
        progress.warn_of_missing_files(trace.path, trace.run)
    comparison = compare(*sides)
    if comparison.a == comparison.b:
        comparison = replace(
            comparison, a=f"{comparison.a} ({', '.join(before)})", b=f"{comparison.b} ({', '.join(after)})"
        )
    return comparison


def _show(comparison: Comparison, args: argparse.Namespace) -> None:
    out = args.out if args.turns is None else None
    progress.put(_text(comparison, args, out is not None), out)


def _percent(text: str | None) -> float | None:
    """Return the percentage in `5%` or `5`; None for None.

    Raises:
        UsageError: the text is not a percentage.
    """
    if text is None:
        return None
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-if-slower {text!r}: write a percentage, such as 5%")
    return percent


def _gate(comparison: Comparison, percent: float, if_cannot_tell: int | None) -> int:
    """Return the exit code; print a warning if the step is slower by that much or more, or if this is undecided."""
    from xsp.comparison.conclusion import MORE_RUNS

    step = comparison.step
    if step.low_percent is None or step.high_percent is None or not comparison.has_same_work:
        result = f"{step.verdict}; A has {step.a_steps or 0} timed steps, B {step.b_steps or 0}"
    else:
        result = f"{step.change_percent:+.1f} % ({step.low_percent:+.1f} to {step.high_percent:+.1f})"
    if comparison.slower_by(percent):
        progress.warn(f"xsp: the step is slower by {result}; the limit is {percent:g} %")
        return SLOWER
    if comparison.not_slower_by(percent):
        return 0
    starts = 100 * comparison.repeats.start_spread
    noise = f"; two starts of the same program may differ by {starts:.0f} %" if starts and step.high_percent else ""
    progress.warn(
        f"xsp: undecided whether the step is slower by {percent:g} % or more: {result}{noise}. To decide: {MORE_RUNS}"
    )
    return CANNOT_TELL if if_cannot_tell is None else if_cannot_tell


def _text(result: Comparison, args: argparse.Namespace, for_file: bool) -> str:
    from xsp.report import comparison, tablefiles

    if args.format == "json":
        return json.dumps(_as_dict(result), ensure_ascii=False, indent=1) + "\n"
    if args.format == "csv":
        return tablefiles.text([("", *result.in_engine())], "csv")

    if args.format == "markdown":
        return comparison.markdown(result, args.limit)
    return progress.rendered([comparison.tables(result, args.limit)], for_file)


def _as_dict(comparison: Comparison) -> dict[str, object]:
    from xsp.comparison.conclusion import conclusion

    return {
        "a": comparison.a,
        "b": comparison.b,
        "differences": [difference._asdict() for difference in comparison.differences],
        "rule": comparison.repeats.rule,
        "repeats": comparison.repeats.unit,
        "runs": {"a": comparison.a_runs, "b": comparison.b_runs},
        "conclusion": conclusion(comparison),
        "rows": [asdict(row) for row in comparison.rows],
    }
