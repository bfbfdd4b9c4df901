"""Traces of GPUs: xsp against Holistic Trace Analysis and TraceLens, in turns, on the same files.

Three tables: time and memory, the errors of each tool on each file, and the figures of each tool for the same trace.
Peers on PyPI are installed in separate environments under `benchmarks/.peers`; AMD's TraceLens is not on PyPI (the
package `tracelens` is something else) and takes part if `--tracelens` names the Python of an environment that has it.
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from parts import kineto_copies, kineto_turn, turns
from parts.kineto_turn import FIGURES, Turn

HERE = Path(__file__).resolve().parent
TRACES = HERE.parents[1] / "shared" / "traces"
ON_PYPI = {
    "HTA 0.6.1": ("hta", ("traceinsight==0.6.1", "pandas<3")),
    "HTA 0.5.0": ("hta", ("HolisticTraceAnalysis==0.5.0",)),
}
"""Name → tool and requirements; the project changed its name on PyPI. With pandas 3, which pip would install, 0.6.1
does not load traces of many kernels; 0.5.0 is what pip installs under the old name."""


class Tool(NamedTuple):
    """A tool, and the Python of the environment that has it."""

    name: str
    kind: str
    python: str


# --- who takes part ---------------------------------------------------------------------------------------


def tools(options: argparse.Namespace) -> list[Tool]:
    """Return xsp and its peers; report peers that cannot be installed, and leave them out."""
    found = [Tool("xsp", "xsp", sys.executable)]
    for name, (kind, requirements) in ON_PYPI.items():
        python = environment(requirements) if name in options.peers else None
        if python is not None:
            found.append(Tool(name, kind, python))
    if options.tracelens:
        found.append(Tool("TraceLens", "tracelens", options.tracelens))
    else:
        turns.say("  TraceLens is left out: give the Python of an environment that has it, --tracelens")
    return found


def environment(requirements: Sequence[str]) -> str | None:
    """Return the Python of an environment with packages, created on first use; None if they cannot be installed."""
    place = HERE / ".peers" / requirements[0].partition("==")[0]
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        turns.say(f"  installing {', '.join(requirements)} into {place}")
        try:
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            turns.say(f"  {requirements[0]} is left out: it could not be installed ({error})")
            return None
        done.touch()
    return str(python)


# --- turns ------------------------------------------------------------------------------------------------


def rounds_of(trace: Path, those: Sequence[Tool], rounds: int, seed: int) -> list[dict[str, Turn]]:
    """Run every tool on a trace once per round, in random order."""
    draw = random.Random(seed)
    found = []
    for number in range(rounds):
        taken = {}
        for tool in draw.sample(list(those), k=len(those)):
            taken[tool.name] = kineto_turn.take(tool.python, tool.kind, trace)
            turns.say(f"  {trace.name}, round {number + 1}, {tool.name}: {_line(taken[tool.name])}")
        found.append(taken)
    return found


def _line(turn: Turn) -> str:
    if turn.load_s is None:
        return f"did not load it: {turn.raised.get('load')}"
    return f"load {turn.load_s:.2f} s, analyses {turn.analyses_s:.2f} s, {turn.peak_bytes / 1e6:,.0f} MB"


def times(found: Sequence[Mapping[str, Turn]], peer: str, what: Callable[[Turn], float | None]) -> turns.Figure | None:
    """Return the ratio of a peer's time to xsp's, from the pairs of each round; None if the peer failed before."""
    pairs = [(what(each[peer]), what(each["xsp"])) for each in found]
    ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
    return turns.middle(ratios) if len(ratios) == len(pairs) else None


# --- tables -----------------------------------------------------------------------------------------------


def add_speed(report: turns.Report, trace: Path, events: int, found: Sequence[Mapping[str, Turn]]) -> None:
    """Add a row for each peer with the ratios of its times to xsp's."""
    ours = [each["xsp"] for each in found]
    failed = next((turn.raised.get("load", "no reason") for turn in ours if turn.load_s is None), None)
    if failed is not None:
        report.notes.append(f"{_short(trace)}: xsp did not load it: {failed}")
        return
    load, asked = (
        turns.middle([turn.load_s or 0 for turn in ours]),
        turns.middle([turn.analyses_s or 0 for turn in ours]),
    )
    for peer in [name for name in found[0] if name != "xsp"]:
        loading, asking = times(found, peer, lambda turn: turn.load_s), times(found, peer, lambda turn: turn.analyses_s)
        report.add(
            [f"{_short(trace)} · {peer}", f"{events:,}", load.shown(2), _times(loading), asked.shown(2), _times(asking),
             f"{_peak(found, 'xsp'):,.0f}", f"{_peak(found, peer):,.0f}"],
            turns=[vars(each[peer]) for each in found], ours=[vars(turn) for turn in ours],
        )  # fmt: skip


def _times(figure: turns.Figure | None) -> str:
    return "did not" if figure is None else f"{figure.shown(1)} ×"


def _peak(found: Sequence[Mapping[str, Turn]], tool: str) -> float:
    return statistics.median(each[tool].peak_bytes for each in found) / 1e6


def add_robustness(report: turns.Report, trace: Path, turn: Mapping[str, Turn]) -> None:
    """Add a row for each tool: number of analyses answered and refused with a reason, and the errors raised."""
    for name, each in turn.items():
        asked = len(each.answers_s)
        raised = "; ".join(f"{what}: {error}" for what, error in each.raised.items())
        answered = asked - len(each.refused) - sum(what in each.answers_s for what in each.raised)
        loaded = "yes" if each.load_s is not None else "no"
        report.add(
            [f"{_short(trace)} · {name}", loaded, f"{answered}", f"{len(each.refused)}", raised.replace("|", "/")]
        )


def add_figures(report: turns.Report, trace: Path, turn: Mapping[str, Turn]) -> None:
    """Add a row with the device's times in milliseconds for each tool that reports some."""
    for name, each in turn.items():
        if each.figures:
            shown = [f"{each.figures[what]:,.3f}" if what in each.figures else "–" for what in FIGURES]
            report.add([f"{_short(trace)} · {name}", *shown])


def _short(trace: Path) -> str:
    return trace.name.removesuffix(".gz").removesuffix(".json")


def count(trace: Path) -> int:
    """Return the number of spans, instants and flows in a trace, counted in its text without parsing it."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rb") as file:
        text = file.read()
    return text.count(b'"ph"') - text.count(b'"ph": "M"') - text.count(b'"ph":"M"')


# --- the script -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("traces", nargs="*", type=Path, help="files (default: all Kineto traces of ../shared/traces)")
    made.add_argument("--peers", nargs="*", default=list(ON_PYPI), choices=list(ON_PYPI), help="(default: all)")
    made.add_argument("--tracelens", help="Python of an environment that has AMD's TraceLens")
    made.add_argument("--events", type=int, help="events of the synthetic trace; 0: none (default: 2000000, quick: 0)")
    made.add_argument("--largest", type=int, default=3, help="number of the largest files to time (default: 3)")
    options = turns.parse(made, arguments)
    traces = options.traces or sorted(TRACES.rglob("*.json.gz"))
    if not traces:
        turns.skip("name traces: ../shared/traces is not there")
    for report in measure(traces, options):
        report.finish(options)
        print()


def measure(traces: Sequence[Path], options: argparse.Namespace) -> list[turns.Report]:
    """Return the three tables."""
    speed = turns.Report("kineto_peers", "Reading and analysing GPU traces, compared with peers", SPEED)
    robust = turns.Report("kineto_peers_raised", "Which tools answer, and which raise", ROBUST)
    figures = turns.Report(
        "kineto_peers_figures", "Figures of each tool for the same trace, milliseconds", ("trace", *FIGURES)
    )
    those = tools(options)
    counted = sorted(((count(trace), trace) for trace in traces), reverse=True)
    for place, (events, trace) in enumerate(counted):
        timed = place < options.largest and not options.quick
        found = rounds_of(trace, those, options.rounds if timed else 1, options.seed)
        add_robustness(robust, trace, found[0])
        add_figures(figures, trace, found[0])
        if timed:
            add_speed(speed, trace, events, found)
    wanted = (0 if options.quick else 2_000_000) if options.events is None else options.events
    if wanted:
        _synthetic(speed, counted[0][1], wanted, [tool for tool in those if tool.name != "HTA 0.5.0"], options)
    speed.notes.append(NOTE)
    return [speed, robust, figures]


def _synthetic(
    speed: turns.Report, source: Path, events: int, those: Sequence[Tool], options: argparse.Namespace
) -> None:
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "copies.json"
        written = kineto_copies.write(source, trace, events)
        found = rounds_of(trace, those, options.rounds, options.seed)
        add_speed(speed, Path(f"{written.copies} copies of {_short(source)}"), written.events, found)


SPEED = ("trace · peer", "events", "xsp: load, s", "peer: load", "xsp: all analyses, s", "peer: its analyses",
         "xsp: peak MB", "peer: peak MB")  # fmt: skip
ROBUST = ("trace · tool", "loaded", "answered", "refused with a reason", "raised")
NOTE = (
    "`×`: time of the peer over that of xsp, from the pairs of each round. Each tool reads the file in a separate "
    "process, in random order; starting Python and importing the tool is not included; the peak memory is that of the "
    "whole process. xsp computes all its analyses, HTA nine, TraceLens its report."
)


if __name__ == "__main__":
    main()
