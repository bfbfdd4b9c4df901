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

FOLDER = Path(__file__).resolve().parent
TRACES = FOLDER.parents[1] / "shared" / "traces"
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
    available = [Tool("xsp", "xsp", sys.executable)]
    for name, (kind, requirements) in ON_PYPI.items():
        python = environment(requirements) if name in options.peers else None
        if python is not None:
            available.append(Tool(name, kind, python))
    if options.tracelens:
        available.append(Tool("TraceLens", "tracelens", options.tracelens))
    else:
        turns.say("  TraceLens is left out: give the Python of an environment that has it, --tracelens")
    return available


def environment(requirements: Sequence[str]) -> str | None:
    """Return the Python of an environment with packages, created on first use; None if they cannot be installed."""
    place = FOLDER / ".peers" / requirements[0].partition("==")[0]
    python, marker = place / "bin" / "python", place / "installed"
    if not marker.exists():
        turns.say(f"  installing {', '.join(requirements)} into {place}")
        try:
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            turns.say(f"  {requirements[0]} is left out: it could not be installed ({error})")
            return None
        marker.touch()
    return str(python)


# --- turns ------------------------------------------------------------------------------------------------


def rounds_of(trace: Path, participants: Sequence[Tool], rounds: int, seed: int) -> list[dict[str, Turn]]:
    """Run every tool on a trace once per round, in random order."""
    draw = random.Random(seed)
    rounds_taken = []
    for number in range(rounds):
        round_turns = {}
        for tool in draw.sample(list(participants), k=len(participants)):
            round_turns[tool.name] = kineto_turn.run_tool(tool.python, tool.kind, trace)
            turns.say(f"  {trace.name}, round {number + 1}, {tool.name}: {_line(round_turns[tool.name])}")
        rounds_taken.append(round_turns)
    return rounds_taken


def _line(turn: Turn) -> str:
    if turn.load_s is None:
        return f"did not load it: {turn.raised.get('load')}"
    return f"load {turn.load_s:.2f} s, analyses {turn.analyses_s:.2f} s, {turn.peak_bytes / 1e6:,.0f} MB"


def time_ratio(
    turns_by_round: Sequence[Mapping[str, Turn]], peer: str, seconds_of: Callable[[Turn], float | None]
) -> turns.Figure | None:
    """Return the ratio of a peer's time to xsp's, from the pairs of each round; None if the peer failed before."""
    pairs = [(seconds_of(round_turns[peer]), seconds_of(round_turns["xsp"])) for round_turns in turns_by_round]
    ratios = [peer_s / own_s for peer_s, own_s in pairs if peer_s and own_s]
    return turns.middle(ratios) if len(ratios) == len(pairs) else None


# --- tables -----------------------------------------------------------------------------------------------


def add_speed(report: turns.Report, trace: Path, events: int, turns_by_round: Sequence[Mapping[str, Turn]]) -> None:
    """Add a row for each peer with the ratios of its times to xsp's."""
    own_turns = [round_turns["xsp"] for round_turns in turns_by_round]
    failed = next((turn.raised.get("load", "no reason") for turn in own_turns if turn.load_s is None), None)
    if failed is not None:
        report.notes.append(f"{_short_name(trace)}: xsp did not load it: {failed}")
        return
    load, analysis = (
        turns.middle([turn.load_s or 0 for turn in own_turns]),
        turns.middle([turn.analyses_s or 0 for turn in own_turns]),
    )
    for peer in [name for name in turns_by_round[0] if name != "xsp"]:
        load_ratio, analysis_ratio = (
            time_ratio(turns_by_round, peer, lambda turn: turn.load_s),
            time_ratio(turns_by_round, peer, lambda turn: turn.analyses_s),
        )
        report.add(
            [f"{_short_name(trace)} · {peer}", f"{events:,}", load.text(2), _ratio_text(load_ratio),
             analysis.text(2), _ratio_text(analysis_ratio),
             f"{_peak_mb(turns_by_round, 'xsp'):,.0f}", f"{_peak_mb(turns_by_round, peer):,.0f}"],
            turns=[vars(round_turns[peer]) for round_turns in turns_by_round], ours=[vars(turn) for turn in own_turns],
        )  # fmt: skip


def _ratio_text(figure: turns.Figure | None) -> str:
    return "did not" if figure is None else f"{figure.text(1)} ×"


def _peak_mb(turns_by_round: Sequence[Mapping[str, Turn]], tool: str) -> float:
    return statistics.median(round_turns[tool].peak_bytes for round_turns in turns_by_round) / 1e6


def add_robustness(report: turns.Report, trace: Path, turns_by_tool: Mapping[str, Turn]) -> None:
    """Add a row for each tool: number of analyses answered and refused with a reason, and the errors raised."""
    for name, result in turns_by_tool.items():
        analysis_count = len(result.answers_s)
        raised = "; ".join(f"{analysis}: {error}" for analysis, error in result.raised.items())
        answered_count = (
            analysis_count - len(result.refused) - sum(analysis in result.answers_s for analysis in result.raised)
        )
        has_loaded = "yes" if result.load_s is not None else "no"
        report.add(
            [
                f"{_short_name(trace)} · {name}",
                has_loaded,
                f"{answered_count}",
                f"{len(result.refused)}",
                raised.replace("|", "/"),
            ]
        )


def add_figures(report: turns.Report, trace: Path, turns_by_tool: Mapping[str, Turn]) -> None:
    """Add a row with the device's times in milliseconds for each tool that reports some."""
    for name, result in turns_by_tool.items():
        if result.figures:
            cells = [f"{result.figures[figure]:,.3f}" if figure in result.figures else "–" for figure in FIGURES]
            report.add([f"{_short_name(trace)} · {name}", *cells])


def _short_name(trace: Path) -> str:
    return trace.name.removesuffix(".gz").removesuffix(".json")


def count_events(trace: Path) -> int:
    """Return the number of spans, instants and flows in a trace, counted in its text without parsing it."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rb") as file:
        text = file.read()
    return text.count(b'"ph"') - text.count(b'"ph": "M"') - text.count(b'"ph":"M"')


# --- the script -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("traces", nargs="*", type=Path, help="files (default: all Kineto traces of ../shared/traces)")
    parser.add_argument("--peers", nargs="*", default=list(ON_PYPI), choices=list(ON_PYPI), help="(default: all)")
    parser.add_argument("--tracelens", help="Python of an environment that has AMD's TraceLens")
    parser.add_argument(
        "--events", type=int, help="events of the synthetic trace; 0: none (default: 2000000, quick: 0)"
    )
    parser.add_argument("--largest", type=int, default=3, help="number of the largest files to time (default: 3)")
    options = turns.parse(parser, arguments)
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
    participants = tools(options)
    sizes = sorted(((count_events(trace), trace) for trace in traces), reverse=True)
    for rank, (events, trace) in enumerate(sizes):
        is_timed = rank < options.largest and not options.quick
        rounds = rounds_of(trace, participants, options.rounds if is_timed else 1, options.seed)
        add_robustness(robust, trace, rounds[0])
        add_figures(figures, trace, rounds[0])
        if is_timed:
            add_speed(speed, trace, events, rounds)
    events_wanted = (0 if options.quick else 2_000_000) if options.events is None else options.events
    if events_wanted:
        _synthetic(
            speed, sizes[0][1], events_wanted, [tool for tool in participants if tool.name != "HTA 0.5.0"], options
        )
    speed.notes.append(NOTE)
    return [speed, robust, figures]


def _synthetic(
    speed: turns.Report, source: Path, events: int, participants: Sequence[Tool], options: argparse.Namespace
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "copies.json"
        copies = kineto_copies.write(source, trace, events)
        rounds = rounds_of(trace, participants, options.rounds, options.seed)
        add_speed(speed, Path(f"{copies.copies} copies of {_short_name(source)}"), copies.events, rounds)


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
