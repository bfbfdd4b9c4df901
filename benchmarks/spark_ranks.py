"""How do DuckDB in this process and Spark with two executors compare on the same analyses of jobs of many ranks?

Both read the same Parquet files, on the same machine: this shows the cost of Spark where it is not needed, and how both
scale with ranks. A turn opens the run and runs all analyses in `TIMED_ANALYSES`; the cluster is started before, and
each answer of Spark is compared with DuckDB's.
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
TIMED_ANALYSES = ("stragglers", "steps", "device-activity", "idle-causes")

FULL_JOB = Job(steps=5, layers=16, kernels=12)
QUICK_JOB = Job(steps=2, layers=2, kernels=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="*", help="ranks of the jobs (default: 8 64; quick: 2 4)")
    options = turns.parse(parser, arguments)
    for package in ("pyspark", "sqlglot"):
        if importlib.util.find_spec(package) is None:
            turns.skip(f"{package} is not installed: pip install 'xsp[spark]'")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        turns.skip("there is no Java, which Spark needs")
    with two_executors() as engine, tempfile.TemporaryDirectory() as folder:
        measure(options, options.ranks or ((2, 4) if options.quick else RANKS), engine, Path(folder)).finish(options)


def measure(options: argparse.Namespace, ranks: Sequence[int], engine: str, folder: Path) -> turns.Report:
    """Analyse each job `--rounds` times, after rounds that do not count."""
    columns = ("ranks", "spans", "DuckDB, s", "Spark, s", "Spark / DuckDB", "answers")
    report = turns.Report("spark_ranks", "Jobs of many ranks, on DuckDB and on Spark with two executors", columns)
    rounds_by_ranks = {}
    for count in ranks:
        run = _import_job(folder / str(count), count, options)
        rounds_by_ranks[count] = _rounds(report, count, run, engine, options)
    fewest, most = ranks[0], ranks[-1]
    for name in ("DuckDB", "Spark") if len(rounds_by_ranks) > 1 else ():
        pairs = zip(rounds_by_ranks[fewest], rounds_by_ranks[most], strict=True)
        growth = turns.middle([after[name] / before[name] for before, after in pairs])
        sentence = f"{name}, {fewest} to {most} ranks: {growth.text(2)} times as long"
        report.notes.append(f"{sentence} ({most / fewest:.0f} times the ranks).")
    report.notes.append(f"Analyses of each job: {', '.join(TIMED_ANALYSES)}.")
    return report


def _import_job(folder: Path, ranks: int, options: argparse.Namespace) -> Path:
    """Write a job and import it; return the run directory."""
    from xsp.ingest.sources import import_into

    size = QUICK_JOB if options.quick else FULL_JOB
    write(folder, Job(ranks, size.steps, size.layers, size.kernels, stragglers={1: 1.5}, seed=options.seed))
    run = folder / "run"
    run.mkdir()
    import_into(run, [str(folder / "traces")])
    return run


def _rounds(
    report: turns.Report, count: int, run: Path, engine: str, options: argparse.Namespace
) -> Sequence[turns.Round]:
    """Start the cluster and compare the answers, then take the turns of one job."""
    import xsp
    from xsp import spark

    begin = time.perf_counter()
    duckdb_trace, spark_trace = xsp.load(run), spark.load(str(run), engine)
    ((spans,),) = duckdb_trace.sql("SELECT count(*) FROM spans").fetchall()
    analyses = xsp.analyses.ANALYSES
    different_names = [
        name for name in TIMED_ANALYSES if differences(analyses[name](duckdb_trace), analyses[name](spark_trace))
    ]
    turns.say(f"  {count} ranks, {spans:,} spans: compared after {time.perf_counter() - begin:.0f} s")

    def analysing(load: Callable[[], Trace]) -> Callable[[], None]:
        def step() -> None:
            trace = load()
            for name in TIMED_ANALYSES:
                analyses[name](trace).fetchall()

        return step

    conditions = [
        turns.Condition("DuckDB", analysing(lambda: xsp.load(run))),
        turns.Condition("Spark", analysing(lambda: spark.load(str(run), engine))),
    ]
    rounds = turns.turns_of(options).take([turns.Group(conditions)], options.rounds)
    seconds = {name: turns.middle([round_times[name] / 1e9 for round_times in rounds]) for name in ("DuckDB", "Spark")}
    row = [f"{count}", f"{spans:,}", *(figure.text() for figure in seconds.values()),
           turns.ratio(rounds, "Spark", "DuckDB").text(1),
           f"differ: {', '.join(different_names)}" if different_names else "equal"]  # fmt: skip
    report.add(row, rounds=list(rounds), differing=different_names)
    return rounds


if __name__ == "__main__":
    main()
