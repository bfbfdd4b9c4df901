"""How do DuckDB in this process and Spark with two executors compare on the same analyses of jobs of many ranks?

Both read the same Parquet files, on the same machine: this shows the cost of Spark where it is not needed, and how both
scale with ranks. A turn opens the run and runs all analyses in `ASKED`; the cluster is started before, and each answer
of Spark is compared with DuckDB's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from parts import turns
from parts.rank_traces import Job, write
from parts.spark_cluster import differences, two_executors

if TYPE_CHECKING:
    from xsp.store.trace import Trace

RANKS = (8, 64)
ASKED = ("stragglers", "steps", "device-activity", "idle-causes")

MANY = Job(steps=5, layers=16, kernels=12)
FEW = Job(steps=2, layers=2, kernels=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    made = turns.parser(__doc__, rounds=3)
    made.add_argument("--ranks", type=int, nargs="*", help="ranks of the jobs (default: 8 64; quick: 2 4)")
    options = turns.parse(made, arguments)
    for package in ("pyspark", "sqlglot"):
        if importlib.util.find_spec(package) is None:
            turns.skip(f"{package} is not installed: pip install 'xsp[spark]'")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        turns.skip("there is no Java, which Spark needs")
    with two_executors() as engine, tempfile.TemporaryDirectory() as place:
        measure(options, options.ranks or ((2, 4) if options.quick else RANKS), engine, Path(place)).finish(options)


def measure(options: argparse.Namespace, ranks: Sequence[int], engine: str, place: Path) -> turns.Report:
    """Analyse each job `--rounds` times, after rounds that do not count."""
    columns = ("ranks", "spans", "DuckDB, s", "Spark, s", "Spark / DuckDB", "answers")
    report = turns.Report("spark_ranks", "Jobs of many ranks, on DuckDB and on Spark with two executors", columns)
    taken = {}
    for count in ranks:
        run = _imported(place / str(count), count, options)
        taken[count] = _rounds(report, count, run, engine, options)
    first, last = ranks[0], ranks[-1]
    for name in ("DuckDB", "Spark") if len(taken) > 1 else ():
        pairs = zip(taken[first], taken[last], strict=True)
        grown = turns.middle([after[name] / before[name] for before, after in pairs])
        said = f"{name}, {first} to {last} ranks: {grown.shown(2)} times as long"
        report.notes.append(f"{said} ({last / first:.0f} times the ranks).")
    report.notes.append(f"Analyses of each job: {', '.join(ASKED)}.")
    return report


def _imported(place: Path, ranks: int, options: argparse.Namespace) -> Path:
    """Write a job and import it; return the run directory."""
    from xsp.ingest.sources import import_into

    size = FEW if options.quick else MANY
    write(place, Job(ranks, size.steps, size.layers, size.kernels, stragglers={1: 1.5}, seed=options.seed))
    run = place / "run"
    run.mkdir()
    import_into(run, [str(place / "traces")])
    return run


def _rounds(
    report: turns.Report, count: int, run: Path, engine: str, options: argparse.Namespace
) -> Sequence[turns.Round]:
    """Start the cluster and compare the answers, then take the turns of one job."""
    import xsp
    from xsp import spark

    begin = time.perf_counter()
    ours, theirs = xsp.load(run), spark.load(str(run), engine)
    ((spans,),) = ours.sql("SELECT count(*) FROM spans").fetchall()
    analyses = xsp.analyses.ANALYSES
    differing = [name for name in ASKED if differences(analyses[name](ours), analyses[name](theirs))]
    turns.say(f"  {count} ranks, {spans:,} spans: compared after {time.perf_counter() - begin:.0f} s")

    def asking(load: Callable[[], Trace]) -> Callable[[], None]:
        def step() -> None:
            trace = load()
            for name in ASKED:
                analyses[name](trace).fetchall()

        return step

    conditions = [
        turns.Condition("DuckDB", asking(lambda: xsp.load(run))),
        turns.Condition("Spark", asking(lambda: spark.load(str(run), engine))),
    ]
    rounds = turns.turns_of(options).take([turns.Group(conditions)], options.rounds)
    seconds = {name: turns.middle([each[name] / 1e9 for each in rounds]) for name in ("DuckDB", "Spark")}
    row = [f"{count}", f"{spans:,}", *(each.shown() for each in seconds.values()),
           turns.ratio(rounds, "Spark", "DuckDB").shown(1),
           f"differ: {', '.join(differing)}" if differing else "equal"]  # fmt: skip
    report.add(row, rounds=list(rounds), differing=differing)
    return rounds


if __name__ == "__main__":
    main()
