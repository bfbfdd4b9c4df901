"""Write a job as a run directory.

Each step becomes a segment, parents before children, so that merging gives the same result as at the source. Spans of
other programs are stored beside the steps of their trace. If a job has no step of xsp, each trace becomes a step with
the root as the step span, so that the tables work.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import duckdb
import numpy as np

from xsp import rundir, table
from xsp.correlate import layers
from xsp.correlate.evidence import TOLERANCE_NS
from xsp.correlate.parents import depths
from xsp.errors import OutputError
from xsp.ingest.jobs import BATCH, Job, name_of
from xsp.run import Run
from xsp.schema import COLUMNS, Column, Kind, Level, Rule
from xsp.store import loop
from xsp.store.write import StepWriter

MAX_SINGLE_SEGMENTS = 500
"""Maximum number of steps with a segment each; if there are more, a segment holds several, with about `BATCH` spans."""

COLUMN_NAMES = ", ".join(column.name for column in COLUMNS)
SOURCE = "import"
"""Source of the notes of this module."""

NO_STEPS = "no step of xsp's is in it: each trace counts as one, and its root as the step itself"
"""Note of a run whose steps were made of traces."""

_OUTER_FIRST = f"""
    start_ns + CASE WHEN level >= {int(Level.OP)} THEN {TOLERANCE_NS} ELSE 0 END, level, -(start_ns + dur_ns),
    CASE WHEN kind = '{Kind.STEP}' THEN -1 ELSE coalesce(depth, 0) END, span_id
"""
"""The order of siblings; it is the same as in `xsp.correlate`, so that sums agree to the last bit."""


def write(
    con: duckdb.DuckDBPyConnection, job: Job, out: Path, finished: bool | None = None, previous: Path | None = None
) -> Run:
    """Write a job's steps, its merged step and `run.json`.

    Args:
        con: holds `distinct_spans`, after `jobs`.
        job: the job to write.
        out: a run directory, see `xsp.rundir.create`. Existing segments are replaced, each atomically.
        finished: whether the run ended; default: as the run itself states.
        previous: the run directory whose loop is continued; default: `out`.

    Returns:
        The run, updated.

    Raises:
        OutputError: the disk cannot be written.
    """
    is_finished = job.run.finished is not False if finished is None else finished
    run = job.run | {"name": job.run.name or name_of(job.run), "finished": is_finished}
    try:
        con.execute(
            "CREATE OR REPLACE TABLE job AS SELECT * FROM distinct_spans "
            "WHERE run IN (SELECT unnest(?::VARCHAR[])) ORDER BY step, rank",
            [list(job.ids)],
        )
        run = run.with_notes(SOURCE, _write_loop(con, out, previous or out))
        if not con.execute("SELECT 1 FROM job WHERE step IS NOT NULL LIMIT 1").fetchall():
            _make_steps(con)
            run = run.with_notes(SOURCE, [NO_STEPS])
        segment_paths = {
            _write_segment(con, rundir.segment(out, number), condition) for number, condition in _segments(con)
        }
        for stale in set(rundir.segments(out)) - segment_paths:
            stale.unlink()
        StepWriter(out).finish(run)
    except (duckdb.Error, OSError) as error:
        raise OutputError(f"{out}: cannot be written ({str(error).splitlines()[0]})") from error
    return run


def _write_loop(con: duckdb.DuckDBPyConnection, out: Path, previous: Path) -> list[str]:
    """Write the rows of the loop in the job's spans, together with those of `previous`, and delete these spans.

    Returns:
        A sentence on the rows that were left out, if any.
    """
    loop.create_table(con, [previous])
    invalid = loop.add_received(con, "job")
    loop.write(con, out)
    con.execute(f"DELETE FROM job WHERE kind = '{Kind.LOOP}'")
    return [f"{invalid} spans of the loop hold no rows of it, and were left out"] if invalid else []


def _make_steps(con: duckdb.DuckDBPyConnection) -> None:
    """Make each trace of the job a step: numbered by start, with the root as the step span, and keys from names."""
    step_columns = [c for c in COLUMNS if c.name in ("trace_id", "span_id", "step", "rung", "key")]
    step_columns.append(Column("root", "BOOLEAN", "whether it is the step itself"))
    table.create(con, "trace_steps", step_columns)
    rows = con.execute(
        "SELECT trace_id, span_id, parent_id, name, rung FROM (SELECT * EXCLUDE (rung) FROM job) JOIN "
        f"(SELECT trace_id, min(start_ns) AS first_ns, greatest(max(level), {int(Level.MODEL)}) AS rung "
        "FROM job GROUP BY trace_id) USING (trace_id) "
        "ORDER BY first_ns, trace_id, start_ns, dur_ns DESC, span_id"
    )
    placements = _step_rows(iter(rows.fetchone, None))
    with con.cursor() as cursor:  # the first cursor is still yielding rows
        cursor.execute("USE arrived")
        while batch := list(islice(placements, BATCH)):
            table.insert(cursor, "trace_steps", batch, step_columns)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE job AS SELECT job.* REPLACE (
            trace_steps.step AS step, coalesce(job.key, trace_steps.key) AS key, trace_steps.rung AS rung,
            true AS timed,
            CASE WHEN trace_steps.root THEN {int(Level.MODEL)}::SMALLINT ELSE job.level END AS level,
            CASE WHEN trace_steps.root THEN '{Kind.STEP}' ELSE job.kind END AS kind,
            CASE WHEN job.parent_rule IS NULL AND job.parent_id IN (SELECT span_id FROM job) THEN '{Rule.EXPLICIT}'
                 ELSE job.parent_rule END AS parent_rule
        ) FROM job JOIN trace_steps USING (trace_id, span_id) ORDER BY trace_steps.step
        """
    )


def has_derived_steps(run: Run) -> bool:
    """Return whether the steps of a run were made of traces."""
    return any(note.text == NO_STEPS for note in run.notes)


def _step_rows(
    rows: Iterable[tuple[str, str, str | None, str, int]],
) -> Iterator[tuple[str, str, int, int, str, bool]]:
    """Yield trace id, span id, step, rung, key, and whether it is the root, for spans that are sorted by trace."""
    for step, (trace_id, group) in enumerate(groupby(rows, key=itemgetter(0))):
        spans = list(group)
        keys = _keys([(row[1], row[2]) for row in spans], {row[1]: row[3] for row in spans})
        root, rung = next(iter(keys)), spans[0][4]
        yield from ((trace_id, span_id, step, rung, key, span_id == root) for span_id, key in keys.items())


def _keys(spans: Sequence[tuple[str, str | None]], names: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each span, parents first, beginning with the root that starts first.

    A key is made of the parent's key, the name, and the ordinal among siblings of that name.
    """
    parents = dict(spans)
    counts: dict[str, int] = defaultdict(int)
    keys: dict[str, str] = {}
    for span_id in _parents_first(spans):
        text = f"{keys.get(parents[span_id] or '', '')}/{names[span_id]}"
        counts[text] += 1
        keys[span_id] = hashlib.blake2b(f"{text}#{counts[text]}".encode(), digest_size=8).hexdigest()
    return keys


def _parents_first(spans: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return ids sorted by depth, as `xsp.correlate` does; ids in a cycle come last.

    Args:
        spans: id and parent id of each span; spans of the same depth keep their order.
    """
    parent_ids = dict(spans)
    indices = {span_id: index for index, span_id in enumerate(parent_ids)}
    parents = np.array([indices.get(parent_id or "", -1) for parent_id in parent_ids.values()], dtype=np.int64)
    ids = list(parent_ids)
    return [ids[index] for index in np.argsort(depths(parents), kind="stable").tolist()]


def _segments(con: duckdb.DuckDBPyConnection) -> Iterator[tuple[int, str]]:
    """Yield the number of each segment and the SQL condition for its spans; spans outside all steps come last."""
    steps = con.execute("SELECT step, count(*) FROM job WHERE step IS NOT NULL GROUP BY step ORDER BY step").fetchall()
    limit = 1 if len(steps) <= MAX_SINGLE_SEGMENTS else BATCH
    group: list[int] = []
    span_count = 0
    for step, spans in steps:
        group.append(step)
        span_count += spans
        if span_count >= limit or step == steps[-1][0]:
            yield group[0], f"step BETWEEN {group[0]} AND {step}"
            group, span_count = [], 0
    if con.execute("SELECT 1 FROM job WHERE step IS NULL LIMIT 1").fetchall():
        yield (steps[-1][0] + 1 if steps else 0), "step IS NULL"


def _write_segment(con: duckdb.DuckDBPyConnection, path: Path, condition: str) -> Path:
    con.execute(f"CREATE OR REPLACE TABLE step AS SELECT * FROM job WHERE {condition}")
    layers.fill(con, "step")
    rows = con.execute(f"SELECT span_id, parent_id FROM step ORDER BY {_OUTER_FIRST}").fetchall()
    con.execute(
        f"CREATE OR REPLACE TABLE segment AS SELECT {COLUMN_NAMES} FROM step "
        "JOIN (SELECT unnest($1::VARCHAR[]) AS span_id, unnest($2::BIGINT[]) AS position) "
        "USING (span_id) ORDER BY position",
        [_parents_first(rows), list(range(len(rows)))],
    )
    table.write_parquet(con, "segment", path)
    return path


def with_notes(run: Run, texts: Sequence[str], duplicates: int) -> Run:
    """Return a run with notes on what was lost in transit or by the import."""
    twice = [f"{duplicates} spans arrived twice and count once"] if duplicates else []
    return run.with_notes(SOURCE, [*texts, *twice])
