"""Show what xsp can record on this machine, what it cannot, why, and what to install.

examples:
  xsp doctor
  xsp doctor --measure                   peak rates of this machine
  xsp doctor --measure runs/demo         also store them in a run, for rooflines
"""

from __future__ import annotations

import argparse

SUMMARY = "show what can be recorded on this machine"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="RUN",
        help="measure the peak rates of this machine, and store them in these runs",
    )


def run(args: argparse.Namespace) -> int:
    """Print the properties of the machine, and every plugin with its state."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from xsp import doctor
    from xsp.scrub import plain

    console = Console()
    for name, value in doctor.machine():
        console.print(Text(plain(f"{name:12} {value}")))
    table = Table("collector", "levels", "state", title="What can be collected", title_justify="left")
    for finding in (*doctor.collectors(), *doctor.samples(), doctor.counters()):
        ready_text = "ready, if asked for by name" if finding.on_request else "ready"
        state = (
            Text(ready_text, style="green") if finding.reason is None else Text(plain(finding.reason), style="yellow")
        )
        table.add_row(Text(plain(finding.name)), Text(plain(finding.levels)), state)
    console.print(table)
    for name, value in doctor.device_work():
        console.print(Text(plain(f"{name:12} {value}")))
    for problem in doctor.broken_plugins():
        console.print(Text(plain(problem), style="yellow"))
    if args.measure is not None:
        for line in doctor.measure(args.measure):
            console.print(Text(plain(line)))
    return 0
