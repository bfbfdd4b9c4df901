"""Watch a run while it is recorded: progress, duration of steps, overhead of profiling, the slowest layers.

It reads only the run directory, so it can run on any machine that can read the directory. On a terminal it updates
until the run has ended or Ctrl-C; elsewhere, and with --once, it prints once.

examples:
  xsp watch runs/train
  xsp watch runs/train/rank-0000          one rank of a distributed script
  xsp watch runs/train --once
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

SUMMARY = "watch a run while it is recorded"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Show the figures until the run has ended."""
    from rich.console import Console
    from rich.live import Live

    from xsp.errors import UsageError
    from xsp.report.watch import figures_text, read_figures

    if not 0 < args.interval < math.inf:
        raise UsageError(f"--interval {args.interval}: write a number of seconds above 0")
    figures = read_figures(args.run)
    console = Console()
    if args.once or not sys.stdout.isatty():
        console.print(figures_text(figures), end="", soft_wrap=True)
        return 0
    live = Live(figures_text(figures), console=console, auto_refresh=False)
    try:  # around `start` too: an interrupt may come as soon as the first figures are shown
        live.start(refresh=True)
        while not figures.is_finished:
            time.sleep(args.interval)
            figures = read_figures(args.run)
            live.update(figures_text(figures), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        live.stop()
    return 0
