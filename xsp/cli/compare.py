"""Compare two runs, layer by layer: what the second takes more or less than the first, and how surely.

Says first in what the runs differ beside their times: machine, versions, batch size, levels. A change is called one
only where repeats show it; "no evidence of change" is an answer, and beside it stands the change that such repeats
would have found.

examples:
  xsp compare runs/before runs/after
  xsp compare runs/before runs/after --fail-if-slower 5%      for CI
  xsp compare before.json.gz after.json.gz                    torch.profiler's
  xsp compare runs/before runs/after --format markdown -o comment.md
  xsp compare runs/before runs/after --format csv > rows.csv

exit codes:
  0  no evidence that the step is slower by that much or more
  1  it is slower
  2  it cannot be told, or a wrong call
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xsp.cli import options
from xsp.errors import AnalysisError, UsageError

if TYPE_CHECKING:
    from xsp.comparison import Comparison

SUMMARY = "compare two runs, layer by layer"
WIDTH_OF_A_FILE = 160
FORMATS = ("table", "json", "csv", "markdown")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("a", metavar="A", help="the run before: what `xsp analyze` takes")
    parser.add_argument("b", metavar="B", help="the run after")
    parser.add_argument(
        "--fail-if-slower",
        metavar="PERCENT",
        help="exit with 1 if the step is slower by that much or more, 5%% for instance",
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="table (default), json, csv or markdown")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write here instead of printing")
    parser.add_argument(
        "--limit", type=options.rows, default=30, metavar="N", help="rows of a printed section (default: 30)"
    )
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged segments out")


def run(given: argparse.Namespace) -> int:
    """Load both, compare, print."""
    from xsp import rundir, runs
    from xsp.comparison import compare

    percent = _percent(given.fail_if_slower)
    found = compare(*(runs.load(place, skip_damaged=given.skip_damaged) for place in (given.a, given.b)))
    if found.a == found.b:
        found = replace(found, a=f"{found.a} ({given.a})", b=f"{found.b} ({given.b})")
    text = _text(found, given)
    if given.out is None:
        sys.stdout.write(text)
    else:
        rundir.write_whole(given.out, text.encode())
    return 0 if percent is None else _gate(found, percent)


def _percent(text: str | None) -> float | None:
    """Read `5%` or `5`.

    Raises:
        UsageError: something else.
    """
    if text is None:
        return None
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-if-slower {text!r}: write a percentage, 5%")
    return percent


def _gate(found: Comparison, percent: float) -> int:
    step = found.step
    if step.p_adjusted is None or step.verdict.startswith("cannot tell"):
        raise AnalysisError(
            f"--fail-if-slower: {step.verdict}; A has {step.a_steps or 0} timed steps, B {step.b_steps or 0}: "
            "record three or more of the same work in each"
        )
    if not found.slower_by(percent):
        return 0
    print(
        f"xsp: the step is slower by {step.change_percent:.1f} % "
        f"({step.low_percent:.1f} to {step.high_percent:.1f}), allowed is less than {percent:g} %",
        file=sys.stderr,
    )
    return 1


def _text(found: Comparison, given: argparse.Namespace) -> str:
    if given.format == "json":
        return json.dumps(_plain(found), ensure_ascii=False, indent=1) + "\n"
    if given.format == "csv":
        return _csv(found)
    from xsp.report import comparison

    if given.format == "markdown":
        return comparison.markdown(found, given.limit)
    from rich.console import Console

    printed = io.StringIO()
    width = Console().width if given.out is None else WIDTH_OF_A_FILE
    Console(file=printed, width=width).print(comparison.tables(found, given.limit))
    return printed.getvalue()


def _plain(found: Comparison) -> dict[str, object]:
    from xsp.comparison import RULE

    return {
        "a": found.a,
        "b": found.b,
        "differences": [each._asdict() for each in found.differences],
        "rule": RULE,
        "rows": [asdict(row) for row in found.rows],
    }


def _csv(found: Comparison) -> str:
    with tempfile.TemporaryDirectory() as place:
        written = Path(place) / "rows.csv"
        found.relation().write_csv(str(written), header=True)
        return written.read_text(encoding="utf-8")
