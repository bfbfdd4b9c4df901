"""How long does it take to open an imported trace again, to run the first analysis, and to print the first screen?

The traces are imported once; then fresh processes open the run directories, and the traces themselves, once without the
user's cache and then, in turns with that, from it. The same for the first screens of the traces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kineto_peers import TRACES, count_events
from parts import kineto_copies, turns

from xsp import cached

GOAL_S = 0.5
CACHED_S = 0.3
"""Goal for opening a trace that is in the cache, in seconds."""

SMALL = 1_000
"""Events of the smallest trace that is taken, at least."""

SCREEN_S, LARGE_SCREEN_S, LARGE = 0.6, 1.5, 20_000
"""Goals for the first screen, in seconds: of a trace, and of one with at least so many events."""

SCRIPT = """
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


def reopen(run: Path, cache: str = "") -> Opened:
    """Open a run directory, or a trace, in a fresh process; `cache` is the folder of its cache, if it has one."""
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, cached.VARIABLE: cache},
    )
    return Opened(*json.loads(process.stdout), time.perf_counter() - begin)


def screen(path: Path, cache: str = "") -> float:
    """Return the seconds of a process that prints the first screen of a run or a trace; `cache` as for `reopen`."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "xsp.cli", "analyze", str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, cached.VARIABLE: cache},
    )
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=7)
    parser.add_argument(
        "traces", nargs="*", type=Path, help="files (default: four of ../shared/traces, the three largest among them)"
    )
    parser.add_argument("--events", type=int, nargs="*", help="sizes of synthetic traces (default: 2 million)")
    options = turns.parse(parser, arguments)
    traces = options.traces
    if not traces:
        found = sorted(TRACES.rglob("*.json.gz"), key=count_events)
        traces = [*[trace for trace in found if count_events(trace) > SMALL][:1], *found[-3:]]
    if not traces:
        turns.skip("give a trace: ../shared/traces does not exist")
    sizes = ([] if options.quick else [2_000_000]) if options.events is None else options.events
    measure(options, traces, sizes).finish(options)


def measure(options: argparse.Namespace, traces: Sequence[Path], sizes: Sequence[int]) -> turns.Report:
    """Import each trace, and open it `--rounds` times."""
    columns = ("trace", "events", "import, s", "run, MB", "open, s", "first analysis, s", "whole process, s",
               f"goal: open < {GOAL_S} s", "the trace, s", "the trace, cached, s", f"goal: < {CACHED_S} s",
               "first screen of the run, s", "of the trace, s", f"goal: < {SCREEN_S} s, of {LARGE:,} events "
               f"{LARGE_SCREEN_S} s", "of the trace, again, s", f"goal: < {CACHED_S} s")  # fmt: skip
    report = turns.Report("reopen", "An imported trace, opened again", columns)
    for trace in traces:
        _add(report, trace, trace.name.partition(".")[0], count_events(trace), options.rounds)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "copies.json"
            copies = kineto_copies.write(traces[-1], trace, size)
            _add(report, trace, f"{copies.copies} copies of the last", copies.events, options.rounds)
    report.notes.append(
        "Open: xsp.load of the run directory. First analysis: activity per device, over the whole trace. The whole "
        "process also starts Python and imports DuckDB."
    )
    return report


def _add(report: turns.Report, trace: Path, name: str, events: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        begin = time.perf_counter()
        command = [sys.executable, "-m", "xsp.cli", "import", str(trace), "-o", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        imported = time.perf_counter() - begin
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        opened = [reopen(run) for _ in range(rounds)]
        screens = turns.middle([screen(run) for _ in range(rounds)])
        cache = str(Path(folder) / "cache")
        reopen(trace, cache)
        pairs = [(reopen(trace).opening, reopen(trace, cache).opening) for _ in range(rounds)]
        screen(trace, cache)
        of_trace = [(screen(trace), screen(trace, cache)) for _ in range(rounds)]
    first, shown_again = (turns.middle(times) for times in zip(*of_trace, strict=True))
    whole, again = (turns.middle(times) for times in zip(*pairs, strict=True))
    opening = turns.middle([opening_times.opening for opening_times in opened])
    first_analysis, process = (
        turns.middle([getattr(opening_times, field) for opening_times in opened]) for field in ("asking", "process")
    )
    turns.say(f"  {name}: import {imported:.1f} s, open {opening.text(3)} s")
    row = [name, f"{events:,}", f"{imported:.1f}", f"{size / 1e6:,.1f}", opening.text(3), first_analysis.text(3),
             process.text(2), turns.verdict(opening, GOAL_S), whole.text(2),
           again.text(3), turns.verdict(again, CACHED_S), screens.text(2), first.text(2),
           turns.verdict(first, LARGE_SCREEN_S if events >= LARGE else SCREEN_S), shown_again.text(2),
           turns.verdict(shown_again, CACHED_S)]  # fmt: skip
    report.add(
        row,
        screens=screens,
        screens_of_trace=of_trace,
        traces=pairs,
        opened=[opening_times._asdict() for opening_times in opened],
    )


if __name__ == "__main__":
    main()
