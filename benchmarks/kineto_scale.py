"""How do time and memory grow with the size of a GPU trace? xsp on 200 thousand to 2 million events, or on --sizes.

The traces are copies of a real one, one after the other in time. The exponent is the slope of a straight line through
the points on logarithmic axes: 1 is linear.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from math import log
from pathlib import Path

from kineto_peers import TRACES, count_events
from parts import kineto_copies, kineto_turn, turns
from parts.kineto_turn import Turn

SIZES = (200_000, 500_000, 1_000_000, 2_000_000)
GOAL_EXPONENT = 1.0
"""Goal: maximum exponent, linear growth."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("trace", nargs="?", type=Path, help="a trace (default: the largest of ../shared/traces)")
    parser.add_argument("--sizes", type=int, nargs="*", help="events (default: 200 thousand to 2 million)")
    options = turns.parse(parser, arguments)
    traces = [options.trace] if options.trace else sorted(TRACES.rglob("*.json.gz"), key=count_events)
    if not traces:
        turns.skip("give a trace: ../shared/traces does not exist")
    sizes = options.sizes or ((50_000, 200_000) if options.quick else SIZES)
    measure(options, traces[-1], sizes).finish(options)


def measure(options: argparse.Namespace, source: Path, sizes: Sequence[int]) -> turns.Report:
    """Load and analyse each size `--rounds` times, each time in a new process."""
    columns = ("events", "MB", "load, s", "events/s", "all analyses, s", "peak MB")
    report = turns.Report("kineto_scale", f"Copies of {source.name}, read and analysed", columns)
    turns_by_size: dict[int, list[Turn]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "copies.json"
            events = kineto_copies.write(source, trace, size).events
            size_turns = [kineto_turn.run_tool(sys.executable, "xsp", trace) for _ in range(options.rounds)]
            failed = next((turn.raised.get("load", "no reason") for turn in size_turns if turn.load_s is None), None)
            if failed is not None:
                report.notes.append(f"{events:,} events were not loaded: {failed}")
                break
            turns_by_size[events] = size_turns
            _add(report, events, trace.stat().st_size, size_turns)
    if len(turns_by_size) < 2:
        report.notes.append("Fewer than two sizes: there is no exponent.")
        return report
    for field in ("load_s", "analyses_s", "peak_bytes"):
        slope = exponent(turns_by_size, field, options.rounds)
        goal = turns.verdict(slope, GOAL_EXPONENT) if field != "peak_bytes" else ""
        report.notes.append(f"Exponent of {field.rpartition('_')[0]}: {slope.text(2)} {goal}".rstrip())
    return report


def _add(report: turns.Report, events: int, size: int, size_turns: Sequence[Turn]) -> None:
    load = turns.middle([turn.load_s or 0 for turn in size_turns])
    analysis = turns.middle([turn.analyses_s or 0 for turn in size_turns])
    peak = max(turn.peak_bytes for turn in size_turns) / 1e6
    turns.say(f"  {events:,}: {load.text()} s, {analysis.text()} s, {peak:,.0f} MB")
    report.add(
        [
            f"{events:,}",
            f"{size / 1e6:,.0f}",
            load.text(),
            f"{events / load.value:,.0f}",
            analysis.text(),
            f"{peak:,.0f}",
        ],
        turns=[vars(turn) for turn in size_turns],
    )


def exponent(turns_by_size: dict[int, list[Turn]], field: str, rounds: int) -> turns.Figure:
    """Return the exponent of growth with the number of events, from a line through the points of each round."""
    return turns.middle([
        slope([(log(events), log(getattr(size_turns[number], field))) for events, size_turns in turns_by_size.items()])
        for number in range(rounds)
    ])  # fmt: skip


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line."""
    x, y = (sum(coordinate) / len(points) for coordinate in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


if __name__ == "__main__":
    main()
