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
ASKED = ("communication", "collective-skew", "stragglers", "device-activity", "steps", "kernel-classes", "idle-causes",
         "idle-gaps", "launches", "launch-bound", "tensor-cores")  # fmt: skip
"""The analyses over all ranks that are timed."""

MANY = Job(steps=10, layers=24, kernels=16)
FEW = Job(steps=2, layers=4, kernels=4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    if (arguments or sys.argv[1:])[:1] == ["turn"]:
        return _turn(*map(Path, sys.argv[2:]))
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--ranks", type=int, nargs="*", help="ranks of the jobs (default: 8 64; quick: 2 8)")
    options = turns.parse(made, arguments)
    measure(options, options.ranks or ((2, 8) if options.quick else RANKS)).finish(options)
    return None


def measure(options: argparse.Namespace, ranks: Sequence[int]) -> turns.Report:
    """Import and analyse each job `--rounds` times."""
    columns = ("ranks", "spans", "import, s", "import, peak MB", "analyses, s", "analyses, peak MB")
    report = turns.Report("rank_scale", "Jobs of many ranks, imported and analysed on one machine", columns)
    taken: dict[int, list[dict[str, Any]]] = {}
    for count in ranks:
        with tempfile.TemporaryDirectory() as place:
            size = FEW if options.quick else MANY
            write(Path(place) / "job", Job(count, size.steps, size.layers, size.kernels, stragglers={1: 1.5},
                                           seed=options.seed))  # fmt: skip
            taken[count] = [_one(Path(place), number) for number in range(options.rounds)]
        _add(report, count, taken[count])
    first, last = ranks[0], ranks[-1]
    for what in ("import_s", "analyses_s") if len(taken) > 1 else ():
        pairs = zip(taken[first], taken[last], strict=True)
        grown = turns.middle([after[what] / before[what] for before, after in pairs])
        said = f"{what.removesuffix('_s')}, {first} to {last} ranks: {grown.shown(2)} times as long"
        report.notes.append(f"{said} ({last / first:.0f} times the ranks).")
    return report


def _one(place: Path, number: int) -> dict[str, Any]:
    run = place / f"run-{number}"
    found = {}
    for what, folders in (("import", (place / "job" / "traces", run)), ("analyses", (run,))):
        done = subprocess.run([sys.executable, __file__, "turn", *map(str, folders)], check=True, capture_output=True)
        found |= {f"{what}_{name}": value for name, value in json.loads(done.stdout).items()}
    return found


def _add(report: turns.Report, count: int, each: Sequence[dict[str, Any]]) -> None:
    imported, asked = (turns.middle([turn[f"{what}_s"] for turn in each]) for what in ("import", "analyses"))
    peaks = [max(turn[f"{what}_peak_bytes"] for turn in each) / 1e6 for what in ("import", "analyses")]
    turns.say(f"  {count} ranks: {imported.shown()} s, {asked.shown()} s, {peaks} MB")
    row = [f"{count}", f"{each[0]['analyses_spans']:,}", imported.shown(), f"{peaks[0]:,.0f}", asked.shown(),
           f"{peaks[1]:,.0f}"]  # fmt: skip
    report.add(row, turns=list(each))


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
        for name in ASKED:
            xsp.analyses.ANALYSES[name](trace).fetchall()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"s": seconds, "peak_bytes": peak, "spans": spans}))


if __name__ == "__main__":
    main()
