"""Add hardware counters to a run, from a report of Nsight Compute: operations, memory traffic and occupancy.

`xsp run --counters` creates such a report itself. This command is for a report that you made, of one step of the same
program. Kernels are matched by layer, if the report has the ranges of `xsp run --counters`, and by name, grid, block
and order. Rows without a matching kernel are counted and left out. Times of a report are not used.

examples:
  ncu --import x.ncu-rep --csv --page raw --print-units base > report.csv
  xsp counters runs/train report.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsp.cli import progress
from xsp.errors import CounterError

SUMMARY = "add hardware counters of Nsight Compute to a run"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, which is changed")
    parser.add_argument("reports", type=Path, nargs="+", metavar="CSV", help="report, see ncu --import … --csv")


def run(args: argparse.Namespace) -> int:
    """Join the reports, and print how much of the device time has counters now."""
    from xsp.counters import storing

    progress.echo(summary_line(storing.attach(args.run, args.reports)))
    return 0


def rerun_and_count(count: Callable[[], dict[str, Any]]) -> None:
    """Count the kernels of a run, and print the result; a failure leaves the run complete without counters."""
    progress.warn("xsp: running again under Nsight Compute, which replays each kernel of one step")
    try:
        progress.warn(summary_line(count()))
    except CounterError as error:
        progress.warn(f"xsp: no counters: {error}")


def summary_line(counts: dict[str, Any]) -> str:
    """Return a line with the share of kernels and rows that were joined."""
    return (
        f"xsp: {counts['with_counters']} of {counts['kernels']} kernels have counters, "
        f"{counts['device_time_percent']} % of device time; "
        f"{counts['rows_joined']} of {counts['rows']} rows were joined"
    )
