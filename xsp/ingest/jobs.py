"""Remove duplicates among the spans that arrived, and group the spans into jobs.

Rows arrive in a table `arrived`: the columns of `xsp.schema.COLUMNS`, and `run`, the id of the run of the span.
A span that arrived twice (the same trace and span id) counts once. The ranks of a distributed program, which share
a trace, are one **job**.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import duckdb

from xsp import rundir, table
from xsp.errors import TraceError
from xsp.importers.contract import Imported, Losses, Row
from xsp.run import Run
from xsp.schema import COLUMNS, Column, Kind

ARRIVED_COLUMNS = (*COLUMNS, Column("run", "VARCHAR", "id of the run of the span; empty if the span does not state it"))

SERVICES = "services"
"""Name of the directory for traces without a run of xsp: spans of services, and of `xsp.instrument` in services."""

RUNS = "runs"
"""Kind of a directory that holds several runs that were imported together."""

MEMORY = "1GB"
"""Memory limit of the engine; it spills the rest to the disk."""

BATCH = 8192
"""Rows that are held in Python at a time."""


class Job(NamedTuple):
    """Runs that belong together: a single run, or the ranks of a distributed program."""

    run: Run
    """The content of `run.json`; with `ranks` if there are several."""

    ids: tuple[str, ...]
    """Ids of the runs; the empty string means spans of no run."""


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return an engine that keeps its tables in a file, so that memory does not grow with them."""
    con = table.connect_spilling(folder, MEMORY, threads=2)
    con.execute(f"ATTACH {table.path_literal(folder / 'arrived.duckdb')} AS arrived")
    con.execute("USE arrived")
    return con


def append_rows(con: duckdb.DuckDBPyConnection, rows: Iterable[Row]) -> None:
    """Append rows to the table `arrived` in batches; create the table if it does not exist.

    Raises:
        TraceError: a value does not fit its column.
    """
    columns = ", ".join(f"{column.name} {column.type}" for column in ARRIVED_COLUMNS)
    con.execute(f"CREATE TABLE IF NOT EXISTS arrived ({columns})")
    remaining_rows = iter(rows)
    while batch := list(islice(remaining_rows, BATCH)):
        try:
            table.insert(con, "arrived", [(*row.span, row.run) for row in batch], ARRIVED_COLUMNS)
        except duckdb.OperationalError:  # the disk is full
            raise
        except (duckdb.Error, UnicodeError, OverflowError) as error:
            raise TraceError(f"values that do not fit the span table ({str(error).splitlines()[0]})") from error


def append_sources(con: duckdb.DuckDBPyConnection, sources: Sequence[Imported]) -> tuple[list[Run], list[Losses]]:
    """Append all rows of the sources to the table `arrived`.

    Returns:
        The runs of the sources, for each run the latest description, and the losses of each source.
    """
    runs: dict[str | None, Run] = {}
    for source in sources:
        append_rows(con, source.rows)
        for run in map(Run.of, source.runs):
            if run.id not in runs or (run.end_ns or 0) >= (runs[run.id].end_ns or 0):
                runs[run.id] = run
    return list(runs.values()), [source.losses for source in sources]


def deduplicate(con: duckdb.DuckDBPyConnection) -> int:
    """Make the table `distinct_spans` of `arrived`, each span once.

    Returns:
        The number of duplicates.
    """
    con.execute(
        """
        CREATE OR REPLACE TABLE distinct_spans AS
        SELECT * EXCLUDE (position) FROM (SELECT *, row_number() OVER () AS position FROM arrived)
        QUALIFY row_number() OVER (PARTITION BY trace_id, span_id ORDER BY position) = 1
        """
    )
    (arrived,), (remaining,) = (
        con.execute(f"SELECT count(*) FROM {name} WHERE kind <> '{Kind.LOOP}'").fetchall()[0]
        for name in ("arrived", "distinct_spans")
    )
    return int(arrived - remaining)


def jobs(con: duckdb.DuckDBPyConnection, runs: Iterable[Run]) -> list[Job]:
    """Return the jobs of the distinct spans, and assign spans of no run to the job whose trace they are in.

    Args:
        con: holds `distinct_spans`, after `deduplicate`.
        runs: the known runs.
    """
    runs_by_id = {str(run.id): run for run in runs}
    traces = dict(con.execute("SELECT run, min(trace_id) FROM distinct_spans WHERE run <> '' GROUP BY run").fetchall())
    members: dict[str, list[str]] = defaultdict(list)
    for run_id in dict.fromkeys([*runs_by_id, *traces]):
        members[job_of(runs_by_id.get(run_id, _run_with_id(run_id)), traces.get(run_id, ""))].append(run_id)
    all_jobs = [
        merge_runs([runs_by_id.get(run_id, _run_with_id(run_id)) for run_id in ids]) for ids in members.values()
    ]
    con.execute(
        "UPDATE distinct_spans SET run = traces.run FROM "
        "(SELECT trace_id, min(run) AS run FROM distinct_spans WHERE run <> '' GROUP BY trace_id) traces "
        "WHERE distinct_spans.run = '' AND distinct_spans.trace_id = traces.trace_id"
    )
    (unassigned,) = con.execute("SELECT count(*) FROM distinct_spans WHERE run = ''").fetchall()[0]
    if unassigned and len(all_jobs) == 1:
        con.execute("UPDATE distinct_spans SET run = ?", [all_jobs[0].ids[0]])
    elif unassigned:
        all_jobs.append(Job(Run.of({}), ("",)))
    return all_jobs


def _run_with_id(run_id: str) -> Run:
    return Run.of({"id": run_id})


def job_of(run: Run, trace_id: str) -> str:
    """Return the key that the runs of a job share: the trace id of a distributed program, else the id of the run."""
    is_distributed = (run.world_size or 1) > 1 or run.is_job
    return (is_distributed and (run.otel.trace_id if run.otel is not None else trace_id)) or str(run.id)


def merge_runs(runs: Sequence[Run]) -> Job:
    """Return runs as one job: fields come from the lowest rank, and fields of the launcher's run override them."""
    ranks = sorted((run for run in runs if not run.is_job), key=lambda run: run.rank or 0)
    ids = tuple(str(run.id) for run in (*ranks, *runs))
    content = {name: value for run in (*ranks[:1], *runs) if run in ranks[:1] or run not in ranks
               for name, value in run.content.items() if name != "kind"}  # fmt: skip
    if len(ranks) > 1:
        content["ranks"] = ranks
        content["finished"] = all(run.finished for run in ranks)
        content["notes"] = rundir.unique(dict(note) for run in ranks for note in run.notes)
    return Job(Run.of(content), tuple(dict.fromkeys(ids)))


def unique_names(names: Iterable[str]) -> list[str]:
    """Make names unique: repeated names get a number, so that runs with similar names and ids get separate folders."""
    unique: dict[str, None] = {}
    for name in names:
        candidates = (f"{name}-{number}" for number in itertools.count(2))
        unique[next(candidate for candidate in itertools.chain([name], candidates) if candidate not in unique)] = None
    return list(unique)


def name_of(run: Run) -> str:
    """Return a name for a run's directory: the name of the run and the start of its id."""
    name, run_id = (
        "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in part)
        for part in (run.name, run.id or "")
    )
    return "-".join(filter(None, (name[:60].strip("-"), run_id[:8]))) or SERVICES
