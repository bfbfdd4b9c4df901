"""How long does it take to open an imported trace again, and to run the first analysis?

The traces are imported once; then fresh processes open the run directories.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kineto_peers import TRACES, count
from parts import kineto_copies, turns

GOAL_S = 0.5
ASK = """
import json, sys, time
begin = time.perf_counter()
import xsp
xsp.load, xsp.analyses
imported = time.perf_counter()
trace = xsp.load(sys.argv[1])
opened = time.perf_counter()
xsp.analyses.ANALYSES["device-activity"](trace).fetchall()
print(json.dumps([imported - begin, opened - imported, time.perf_counter() - opened]))
"""


class Opened(NamedTuple):
    """Times of one process, in seconds."""

    importing: float
    """Import of Python modules."""

    opening: float
    asking: float
    """The analysis `device-activity`."""

    process: float
    """The process from its start to its end."""


def reopen(run: Path) -> Opened:
    """Open a run directory in a fresh process."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", ASK, str(run)], stdout=subprocess.PIPE, check=True)
    return Opened(*json.loads(done.stdout), time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=7)
    made.add_argument("traces", nargs="*", type=Path, help="files (default: the three largest of ../shared/traces)")
    made.add_argument("--events", type=int, nargs="*", help="sizes of synthetic traces (default: 2 million)")
    options = turns.parse(made, arguments)
    traces = options.traces or sorted(TRACES.rglob("*.json.gz"), key=count)[-3:]
    if not traces:
        turns.skip("give a trace: ../shared/traces does not exist")
    sizes = ([] if options.quick else [2_000_000]) if options.events is None else options.events
    measure(options, traces, sizes).finish(options)


def measure(options: argparse.Namespace, traces: Sequence[Path], sizes: Sequence[int]) -> turns.Report:
    """Import each trace, and open it `--rounds` times."""
    columns = ("trace", "events", "import, s", "run, MB", "open, s", "first analysis, s", "whole process, s",
               f"goal: open < {GOAL_S} s")  # fmt: skip
    report = turns.Report("reopen", "An imported trace, opened again", columns)
    for trace in traces:
        _add(report, trace, trace.name.partition(".")[0], count(trace), options.rounds)
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            trace = Path(place) / "copies.json"
            written = kineto_copies.write(traces[-1], trace, size)
            _add(report, trace, f"{written.copies} copies of the last", written.events, options.rounds)
    report.notes.append(
        "Open: xsp.load of the run directory. First analysis: activity per device, over the whole trace. The whole "
        "process also starts Python and imports DuckDB."
    )
    return report


def _add(report: turns.Report, trace: Path, name: str, events: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        begin = time.perf_counter()
        command = [sys.executable, "-m", "xsp.cli", "import", str(trace), "-o", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        imported = time.perf_counter() - begin
        size = sum(each.stat().st_size for each in run.rglob("*") if each.is_file())
        opened = [reopen(run) for _ in range(rounds)]
    opening = turns.middle([each.opening for each in opened])
    asking, process = (turns.middle([getattr(each, what) for each in opened]) for what in ("asking", "process"))
    turns.say(f"  {name}: import {imported:.1f} s, open {opening.shown(3)} s")
    shown = [name, f"{events:,}", f"{imported:.1f}", f"{size / 1e6:,.1f}", opening.shown(3), asking.shown(3),
             process.shown(2), turns.verdict(opening, GOAL_S)]  # fmt: skip
    report.add(shown, opened=[each._asdict() for each in opened])


if __name__ == "__main__":
    main()
