"""How does xsp scale with ranks on one machine? Import of a folder of traces, and the analyses over all ranks.

The jobs are fabricated by `rank_traces.py`, with traces of the same size for all ranks. Import and analyses run in
separate processes, so that each has its own memory peak. Growth is linear if the ratio of times equals that of ranks.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts import turns
from parts.rank_traces import Job, write

RANKS = (8, 64)
TIMED_ANALYSES = (
    "communication", "collective-skew", "stragglers", "device-activity", "steps", "kernel-classes", "idle-causes",
    "idle-gaps", "launches", "launch-bound", "tensor-cores",
)  # fmt: skip
"""The analyses over all ranks that are timed."""

FULL_JOB = Job(steps=10, layers=24, kernels=16)
QUICK_JOB = Job(steps=2, layers=4, kernels=4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    if (arguments or sys.argv[1:])[:1] == ["turn"]:
        return _turn(*map(Path, sys.argv[2:]))
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="*", help="ranks of the jobs (default: 8 64; quick: 2 8)")
    options = turns.parse(parser, arguments)
    measure(options, options.ranks or ((2, 8) if options.quick else RANKS)).finish(options)
    return None


def measure(options: argparse.Namespace, ranks: Sequence[int]) -> turns.Report:
    """Import and analyse each job `--rounds` times."""
    columns = ("ranks", "spans", "import, s", "import, peak MB", "analyses, s", "analyses, peak MB")
    report = turns.Report("rank_scale", "Jobs of many ranks, imported and analysed on one machine", columns)
    rounds_by_ranks: dict[int, list[dict[str, Any]]] = {}
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            size = QUICK_JOB if options.quick else FULL_JOB
            write(Path(folder) / "job", Job(count, size.steps, size.layers, size.kernels, stragglers={1: 1.5},
                                           seed=options.seed))  # fmt: skip
            rounds_by_ranks[count] = [_run_round(Path(folder), number) for number in range(options.rounds)]
        _add(report, count, rounds_by_ranks[count])
    fewest, most = ranks[0], ranks[-1]
    for quantity in ("import_s", "analyses_s") if len(rounds_by_ranks) > 1 else ():
        pairs = zip(rounds_by_ranks[fewest], rounds_by_ranks[most], strict=True)
        growth = turns.middle([after[quantity] / before[quantity] for before, after in pairs])
        sentence = f"{quantity.removesuffix('_s')}, {fewest} to {most} ranks: {growth.text(2)} times as long"
        report.notes.append(f"{sentence} ({most / fewest:.0f} times the ranks).")
    return report


def _run_round(place: Path, number: int) -> dict[str, Any]:
    run = place / f"run-{number}"
    figures = {}
    for phase, folders in (("import", (place / "job" / "traces", run)), ("analyses", (run,))):
        process = subprocess.run(
            [sys.executable, __file__, "turn", *map(str, folders)], check=True, capture_output=True
        )
        figures |= {f"{phase}_{name}": value for name, value in json.loads(process.stdout).items()}
    return figures


def _add(report: turns.Report, count: int, rounds: Sequence[dict[str, Any]]) -> None:
    imported, analysis = (turns.middle([turn[f"{phase}_s"] for turn in rounds]) for phase in ("import", "analyses"))
    peaks = [max(turn[f"{phase}_peak_bytes"] for turn in rounds) / 1e6 for phase in ("import", "analyses")]
    turns.say(f"  {count} ranks: {imported.text()} s, {analysis.text()} s, {peaks} MB")
    row = [f"{count}", f"{rounds[0]['analyses_spans']:,}", imported.text(), f"{peaks[0]:,.0f}", analysis.text(),
           f"{peaks[1]:,.0f}"]  # fmt: skip
    report.add(row, turns=list(rounds))


def _turn(source: Path, run: Path | None = None) -> None:
    """Import a folder into a run directory, or analyse a run directory, in this process; print time and memory."""
    import xsp
    from xsp.ingest.sources import import_into

    begin, spans = time.perf_counter(), 0
    if run is not None:
        run.mkdir()
        import_into(run, [str(source)])
    else:
        trace = xsp.load(source)
        ((spans,),) = trace.sql("SELECT count(*) FROM spans").fetchall()
        for name in TIMED_ANALYSES:
            xsp.analyses.ANALYSES[name](trace).fetchall()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"s": seconds, "peak_bytes": peak, "spans": spans}))


if __name__ == "__main__":
    main()
