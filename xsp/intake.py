"""Spans that come from elsewhere, in any order and perhaps twice, become run directories.

Rows arrive in a table `arrived`: the columns of `xsp.span.COLUMNS`, and `run`, the id of the run that a span is
of. From there:

- a span that arrived twice (the same trace and span id) counts once;
- the ranks of a distributed program, which share a trace, are one **job**, and each job is a run directory;
- each step becomes a segment, parents before children, so that merging gives what it gave at the source;
- spans of other programs lie beside the steps whose trace they are in. Where a job has no step of xsp's, each
  trace is one, and its root is the step, so that the tables work.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from xsp import rundir, table
from xsp.correlate import TOLERANCE_NS
from xsp.errors import OutputError, TraceError
from xsp.importers import contract
from xsp.importers.contract import Imported, Losses, Row
from xsp.span import COLUMNS, Column, Kind, Level, Rule
from xsp.store import Store

ARRIVED = (*COLUMNS, Column("run", "VARCHAR", "id of the run that the span is of; empty where it does not say"))
RUNS = "runs"
"""Kind of a directory that holds several runs that were imported together."""

OTHERS = "services"
"""Directory of spans in traces without a run of xsp's: services' own, and what `xsp.instrument` sees in them."""

BATCH = 8192
"""Rows that are in Python at a time."""

SINGLE = 500
"""Steps that have a segment each; beyond that a segment holds several, of `BATCH` spans together."""

_NAMES = ", ".join(column.name for column in COLUMNS)


class Job(NamedTuple):
    """Runs that belong together: one, or the ranks of a distributed program."""

    run: dict[str, Any]
    """Content of its `run.json`; with `ranks`, if it is several."""

    ids: tuple[str, ...]
    """Of its runs; empty for spans of no run."""


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return an engine whose tables lie in a file, so that memory does not grow with them."""
    con = table.connect()
    con.execute(f"ATTACH {table.literal(str(folder / 'arrived.duckdb'))} AS arrived")
    con.execute("USE arrived")
    con.execute("SET threads = 2")
    con.execute("SET memory_limit = '1GB'")
    con.execute(f"SET temp_directory = {table.literal(str(folder / 'spill'))}")
    return con


def take(con: duckdb.DuckDBPyConnection, rows: Iterable[Row]) -> None:
    """Append rows to the table `arrived`, a batch at a time, making it if need be.

    Raises:
        TraceError: a value that the engine does not hold.
    """
    columns = ", ".join(f"{column.name} {column.type}" for column in ARRIVED)
    con.execute(f"CREATE TABLE IF NOT EXISTS arrived ({columns})")
    pending = iter(rows)
    while batch := list(islice(pending, BATCH)):
        try:
            table.insert(con, "arrived", [(*row.span, row.run) for row in batch], ARRIVED)
        except (duckdb.Error, UnicodeError, OverflowError) as error:
            raise TraceError(f"spans that no table holds ({str(error).splitlines()[0]})") from error


def read(con: duckdb.DuckDBPyConnection, sources: Sequence[Imported]) -> tuple[list[dict[str, Any]], list[Losses]]:
    """Take all rows of some sources.

    Returns:
        What they say of their runs, the latest of each, and what each source lost.
    """
    runs: dict[str, dict[str, Any]] = {}
    for source in sources:
        take(con, source.rows)
        for run in source.runs:
            if run.get("end_ns", 0) >= runs.get(run["id"], {}).get("end_ns", 0):
                runs[run["id"]] = run
    return list(runs.values()), [source.losses for source in sources]


def once(con: duckdb.DuckDBPyConnection, source: str = "arrived") -> int:
    """Make the table `distinct_spans` of what arrived, each span once.

    Returns:
        How many came again.
    """
    con.execute(
        f"""
        CREATE OR REPLACE TABLE distinct_spans AS
        SELECT * EXCLUDE (place) FROM (SELECT *, row_number() OVER () AS place FROM {source})
        QUALIFY row_number() OVER (PARTITION BY trace_id, span_id ORDER BY place) = 1
        """
    )
    (arrived,), (kept,) = (
        con.execute(f"SELECT count(*) FROM {name}").fetchall()[0] for name in (source, "distinct_spans")
    )
    return int(arrived - kept)


def jobs(con: duckdb.DuckDBPyConnection, runs: Iterable[Mapping[str, Any]]) -> list[Job]:
    """Return the jobs that the distinct spans are of, and give spans of no run to the job whose trace they are in.

    Args:
        con: holds `distinct_spans`, after `once`.
        runs: what is known of the runs.
    """
    known = {str(run["id"]): dict(run) for run in runs}
    traces = dict(con.execute("SELECT run, min(trace_id) FROM distinct_spans WHERE run <> '' GROUP BY run").fetchall())
    members: dict[str, list[str]] = defaultdict(list)
    for identity in dict.fromkeys([*known, *traces]):
        members[job_of(identity, known.get(identity, {}), traces.get(identity, ""))].append(identity)
    found = [as_one([known.get(identity, {"id": identity}) for identity in ids]) for ids in members.values()]
    con.execute(
        "UPDATE distinct_spans SET run = own.run FROM "
        "(SELECT trace_id, min(run) AS run FROM distinct_spans WHERE run <> '' GROUP BY trace_id) own "
        "WHERE distinct_spans.run = '' AND distinct_spans.trace_id = own.trace_id"
    )
    (others,) = con.execute("SELECT count(*) FROM distinct_spans WHERE run = ''").fetchall()[0]
    if others and len(found) == 1:
        con.execute("UPDATE distinct_spans SET run = ?", [found[0].ids[0]])
    elif others:
        found.append(Job({}, ("",)))
    return found


def job_of(identity: str, run: Mapping[str, Any], trace_id: str) -> str:
    """Return what the runs of one job have in common: a distributed program's trace, else the run itself."""
    together = run.get("world_size", 1) > 1 or run.get("kind") == rundir.RANKS
    return str(run.get("otel", {}).get("trace_id") or trace_id or identity) if together else identity


def as_one(runs: Sequence[dict[str, Any]]) -> Job:
    """Return runs as one: of the ranks the lowest speaks for all, and what the launcher says stands above it."""
    ranks = sorted((run for run in runs if run.get("kind") != rundir.RANKS), key=lambda run: run.get("rank", 0))
    ids = tuple(str(run["id"]) for run in (*ranks, *runs))
    content = {name: value for run in (*ranks[:1], *runs) if run in ranks[:1] or run not in ranks
               for name, value in run.items() if name != "kind"}  # fmt: skip
    if len(ranks) > 1:
        content["ranks"] = ranks
        content["finished"] = all(run.get("finished", False) for run in ranks)
        content["notes"] = _different(note for run in ranks for note in run.get("notes", ()))
    return Job(content, tuple(dict.fromkeys(ids)))


def _different(notes: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for note in notes:
        if note not in found:
            found.append(note)
    return found


def import_into(out: Path, sources: Sequence[str]) -> dict[Path, dict[str, Any]]:
    """Import files and URLs into run directories.

    Args:
        out: an empty directory. One job is written into it; of several, each into a directory of its own in it.
        sources: what importers recognise.

    Returns:
        The run directories with the content of their `run.json`.

    Raises:
        TraceError: a source cannot be read, or holds no span.
        PluginError: an importer needs a package that is not installed.
        OutputError: the disk refuses.
    """
    importing = [contract.find(source).read(source) for source in sources]
    with tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True) as folder:
        con = connect(Path(folder))
        try:
            runs, losses = read(con, importing)
            doubled = once(con)
            found = jobs(con, runs)
            if not con.execute("SELECT 1 FROM distinct_spans LIMIT 1").fetchall():
                raise TraceError("; ".join([f"{_named(sources)}: no span in it", *_sentences(losses)]))
            places = {_place(out, job, len(found)): job for job in found}
            for place, job in places.items():
                job.run.setdefault("name", Path(_shown(sources[0])).stem)
                lost(job.run, list(zip(map(_shown, sources), losses, strict=True)), doubled)
                (place / rundir.STEPS).mkdir(parents=True, exist_ok=True)
            written = {place: write(con, job, place) for place, job in places.items()}
            if len(found) > 1:
                rundir.write_run(
                    out, {"kind": RUNS, "name": out.name, "finished": True, "parts": [p.name for p in places]}
                )
        finally:
            con.close()
    return written


def import_whole(out: Path, sources: Sequence[str], overwrite: bool = False) -> dict[Path, dict[str, Any]]:
    """Import files and URLs into run directories that appear when all of it is done, or not at all.

    Args:
        out: where, as in `import_into`.
        sources: what importers recognise.
        overwrite: replace a run that is there already.

    Raises:
        TraceError, PluginError, OutputError: as `import_into` and `xsp.rundir.create`; nothing was written.
    """
    out = out.expanduser().absolute()
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        beside.mkdir(parents=True)
        written = import_into(beside, sources)
        (rundir.create(out, overwrite) / rundir.STEPS).rmdir()
        os.replace(beside, out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {out / place.relative_to(beside): run for place, run in written.items()}


def _place(out: Path, job: Job, count: int) -> Path:
    """Return the directory of a job: the one that was named, or one in it."""
    return out if count == 1 else out / name_of(job.run)


def name_of(run: Mapping[str, Any]) -> str:
    """Return a name for a run's directory: what the run is called, and the start of its id."""
    name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in str(run.get("name", "")))
    identity = str(run.get("id", ""))
    return "-".join(filter(None, (name[:60].strip("-"), identity[:8]))) or OTHERS


def _named(sources: Sequence[str]) -> str:
    return ", ".join(map(contract.without_credentials, sources))


def _sentences(losses: Iterable[Losses]) -> list[str]:
    return [text for each in losses for text in each.sentences()]


def _shown(source: str) -> str:
    """Return what a source is called in a run: the name of a file, the trace id of a URL, neither place nor host."""
    return Path(contract.without_credentials(source)).name


# --- one job → one run directory ------------------------------------------------------------------------


def write(con: duckdb.DuckDBPyConnection, job: Job, out: Path, finished: bool | None = None) -> dict[str, Any]:
    """Write a job's steps, its merged step and `run.json`.

    Args:
        con: holds `distinct_spans`, after `jobs`.
        job: which.
        out: a run directory, see `xsp.rundir.create`. Segments that are there are replaced, each in one piece.
        finished: whether the run ended; as the run itself says, unless told otherwise.

    Returns:
        The content of `run.json`.

    Raises:
        OutputError: the disk refuses.
    """
    run = {"name": name_of(job.run), **job.run}
    run["finished"] = run.get("finished", True) if finished is None else finished
    try:
        con.execute(
            "CREATE OR REPLACE TABLE job AS SELECT * FROM distinct_spans "
            "WHERE run IN (SELECT unnest(?::VARCHAR[])) ORDER BY step, rank",
            [list(job.ids)],
        )
        if not con.execute("SELECT 1 FROM job WHERE step IS NOT NULL LIMIT 1").fetchall():
            _make_steps(con)
            run["notes"] = _different([*run.get("notes", []), {"source": "import", "text": NO_STEPS}])
        written = {_write_segment(con, rundir.segment(out, number), where) for number, where in _segments(con)}
        for stale in set(rundir.segments(out)) - written:
            stale.unlink()
        Store(out).finish(run)
    except (duckdb.Error, OSError) as error:
        raise OutputError(f"{out}: cannot be written ({str(error).splitlines()[0]})") from error
    return run


NO_STEPS = "no step of xsp's is in it: each trace counts as one, and its root as the step itself"


def _make_steps(con: duckdb.DuckDBPyConnection) -> None:
    """Make each trace of the job a step: number it by its start, its root the step, keys from the names."""
    marks = [c for c in COLUMNS if c.name in ("trace_id", "span_id", "step", "rung", "key")]
    marks.append(Column("root", "BOOLEAN", "whether it is the step itself"))
    table.create(con, "placed", marks)
    rows = con.execute(
        "SELECT trace_id, span_id, parent_id, name, rung FROM (SELECT * EXCLUDE (rung) FROM job) JOIN "
        f"(SELECT trace_id, min(start_ns) AS began, greatest(max(level), {int(Level.MODEL)}) AS rung "
        "FROM job GROUP BY trace_id) USING (trace_id) "
        "ORDER BY began, trace_id, start_ns, dur_ns DESC, span_id"
    )
    placed = _placed(iter(rows.fetchone, None))
    with con.cursor() as other:  # the first one is still giving rows
        other.execute("USE arrived")
        while batch := list(islice(placed, BATCH)):
            table.insert(other, "placed", batch, marks)
    con.execute(
        f"""
        CREATE OR REPLACE TABLE job AS SELECT job.* REPLACE (
            placed.step AS step, coalesce(job.key, placed.key) AS key, placed.rung AS rung, true AS timed,
            CASE WHEN placed.root THEN {int(Level.MODEL)}::SMALLINT ELSE job.level END AS level,
            CASE WHEN placed.root THEN '{Kind.STEP}' ELSE job.kind END AS kind,
            CASE WHEN job.parent_rule IS NULL AND job.parent_id IN (SELECT span_id FROM job) THEN '{Rule.EXPLICIT}'
                 ELSE job.parent_rule END AS parent_rule
        ) FROM job JOIN placed USING (trace_id, span_id) ORDER BY placed.step
        """
    )


def _placed(rows: Iterable[tuple[str, str, str | None, str, int]]) -> Iterator[tuple[str, str, int, int, str, bool]]:
    """Yield trace id, span id, step, rung, key, and whether it is the root, of spans that come a trace at a time."""
    for step, (trace_id, group) in enumerate(groupby(rows, key=itemgetter(0))):
        family = list(group)
        keys = _keys([(row[1], row[2]) for row in family], {row[1]: row[3] for row in family})
        root, rung = next(iter(keys)), family[0][4]
        yield from ((trace_id, span_id, step, rung, key, span_id == root) for span_id, key in keys.items())


def _keys(family: Sequence[tuple[str, str | None]], names: Mapping[str, str]) -> dict[str, str]:
    """Return each span's key, parents first, the root of the earliest start foremost.

    A key is made of the parent's key, the name, and the ordinal among siblings of that name.
    """
    parents = dict(family)
    seen: dict[str, int] = defaultdict(int)
    keys: dict[str, str] = {}
    for span_id in _parents_first(family):
        text = f"{keys.get(parents[span_id] or '', '')}/{names[span_id]}"
        seen[text] += 1
        keys[span_id] = hashlib.blake2b(f"{text}#{seen[text]}".encode(), digest_size=8).hexdigest()
    return keys


def _parents_first(family: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return ids so that parents stand before children, siblings in their order; spans that are their own
    ancestors stand last.

    Args:
        family: each span's id and its parent's, siblings in their order.
    """
    parents = dict(family)
    children: dict[str | None, list[str]] = defaultdict(list)
    for span_id, parent_id in parents.items():
        children[parent_id if parent_id in parents else None].append(span_id)
    ordered: list[str] = []
    pending = [children[None]]
    while pending:
        for span_id in pending.pop():
            ordered.append(span_id)
            if span_id in children:
                pending.append(children[span_id])
    return ordered if len(ordered) == len(parents) else [*ordered, *sorted(parents.keys() - set(ordered))]


def _segments(con: duckdb.DuckDBPyConnection) -> Iterator[tuple[int, str]]:
    """Yield the number of each segment and the condition for its spans; what is in no step comes last."""
    steps = con.execute("SELECT step, count(*) FROM job WHERE step IS NOT NULL GROUP BY step ORDER BY step").fetchall()
    most = 1 if len(steps) <= SINGLE else BATCH
    held: list[int] = []
    filled = 0
    for step, spans in steps:
        held.append(step)
        filled += spans
        if filled >= most or step == steps[-1][0]:
            yield held[0], f"step BETWEEN {held[0]} AND {step}"
            held, filled = [], 0
    if con.execute("SELECT 1 FROM job WHERE step IS NULL LIMIT 1").fetchall():
        yield (steps[-1][0] + 1 if steps else 0), "step IS NULL"


_OUTER_FIRST = f"""
    start_ns + CASE WHEN level >= {int(Level.OP)} THEN {TOLERANCE_NS} ELSE 0 END, level, -(start_ns + dur_ns),
    CASE WHEN kind = '{Kind.STEP}' THEN -1 ELSE coalesce(depth, 0) END, span_id
"""
"""The order of siblings; it is that of `xsp.correlate`, so that sums come out the same to the last bit."""


def _write_segment(con: duckdb.DuckDBPyConnection, path: Path, where: str) -> Path:
    con.execute(f"CREATE OR REPLACE TABLE step AS SELECT * FROM job WHERE {where}")
    family = con.execute(f"SELECT span_id, parent_id FROM step ORDER BY {_OUTER_FIRST}").fetchall()
    con.execute(
        f"CREATE OR REPLACE TABLE segment AS SELECT {_NAMES} FROM step "
        "JOIN (SELECT unnest($1::VARCHAR[]) AS span_id, unnest($2::BIGINT[]) AS place) USING (span_id) ORDER BY place",
        [_parents_first(family), list(range(len(family)))],
    )
    table.write_parquet(con, "segment", path)
    return path


def lost(run: dict[str, Any], reports: Sequence[tuple[str, Losses]], doubled: int) -> None:
    """Say in a run what its sources lost: all of it under `imported`, in sentences among the notes.

    Args:
        run: content of `run.json`, which is changed.
        reports: of each source with its name, which has neither directories nor credentials.
        doubled: spans that arrived again.
    """
    run["imported"] = {
        "sources": [{"source": name, **losses.report()} for name, losses in reports],
        "doubled": doubled,
    }
    texts = [f"{name}: {text}" for name, losses in reports for text in losses.sentences()]
    run["notes"] = _noted(run, texts, doubled)


def _noted(run: Mapping[str, Any], texts: Sequence[str], doubled: int) -> list[Any]:
    """Return a run's notes with what was lost on the way."""
    twice = [f"{doubled} spans arrived twice and count once"] if doubled else []
    return _different([*run.get("notes", ()), *({"source": "import", "text": text} for text in (*texts, *twice))])


# --- what a receiver took -------------------------------------------------------------------------------


def is_waiting(run: Path) -> bool:
    """Return whether a directory holds what was received and is not in order yet."""
    return any((run / rundir.WAITING).glob("*.parquet"))


def put_in_order(run: Path, out: Path, finished: bool | None = None) -> dict[str, Any]:
    """Make steps of what a receiver took, together with the steps that are there already.

    Args:
        run: a directory that is being received.
        out: where to write; the same directory, or an empty one to leave the first as it is.
        finished: as in `write`.

    Returns:
        The content of `run.json`.

    Raises:
        TraceError: what was received is damaged.
        OutputError: the disk refuses.
    """
    content = rundir.read_run(run)
    (out / rundir.STEPS).mkdir(parents=True, exist_ok=True)
    files = sorted((run / rundir.WAITING).glob("*.parquet"))
    with tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True) as folder:
        con = connect(Path(folder))
        try:
            con.execute(f"CREATE VIEW arrived AS {_together(run, files, content)}")
            doubled = once(con)
            written = write(con, _received(content, doubled), out, finished)
        except duckdb.Error as error:
            raise TraceError(f"{run / rundir.WAITING}: damaged ({str(error).splitlines()[0]})") from error
        finally:
            con.close()
    if out == run:
        for file in files:
            file.unlink()
    return written


def _received(content: Mapping[str, Any], doubled: int) -> Job:
    """Return the job of a directory that is being received, with what was lost on the way."""
    before = content.get("received", {})
    counts = {name: value for name, value in before.items() if name != "runs"}
    counts["doubled"] = before.get("doubled", 0) + doubled
    if before.get("runs"):
        run = as_one(before["runs"]).run
    else:
        left_out = ("format", "received") if "id" in content else ("format", "received", "finished", "notes")
        run = {name: value for name, value in content.items() if name not in left_out}
    losses = Losses(skipped=Counter(counts.get("skipped", {})), changed=Counter(counts.get("changed", {})))
    return Job({**run, "received": counts, "notes": _noted(run, losses.sentences(), counts["doubled"])}, ("",))


def _together(run: Path, files: Sequence[Path], content: Mapping[str, Any]) -> str:
    """Return the query for the spans that wait and those that are in steps already.

    What `_make_steps` added to other programs' spans is forgotten, and made anew.
    """
    parts = [f"SELECT {_NAMES}, '' AS run FROM {table.parquet(files)}"] if files else []
    if steps := rundir.segments(run):
        made = any(note.get("text") == NO_STEPS for note in content.get("notes", ()))
        plain = dict.fromkeys(("step", "rung", "timed"), "NULL")
        plain["level"] = f"CASE WHEN kind = '{Kind.STEP}' THEN {int(Level.APPLICATION)} ELSE level END"
        plain["kind"] = f"CASE WHEN kind = '{Kind.STEP}' THEN '{Kind.USER}' ELSE kind END"
        names = [f"{plain[c.name]}::{c.type} AS {c.name}" if c.name in plain and made else c.name for c in COLUMNS]
        parts.insert(0, f"SELECT {', '.join(names)}, '' AS run FROM {table.parquet(steps)}")
    return " UNION ALL ".join(parts)
