"""Put received spans in order: make the steps of a run directory whose spans arrive in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb

from xsp import atomic, rundir, table
from xsp.errors import TraceError
from xsp.importers.contract import Losses
from xsp.ingest.jobs import Job, connect, deduplicate, merge_runs
from xsp.ingest.write import has_derived_steps, with_notes, write
from xsp.run import Received, Run
from xsp.schema import COLUMNS, Kind, Level


class OvertakenError(TraceError):
    """Another process put the spans in order while this one read them; they can be read again."""


def put_in_order(
    run: Path,
    out: Path,
    finished: bool | None = None,
    opened: Callable[[duckdb.DuckDBPyConnection], None] = lambda _: None,
) -> Run:
    """Make steps of the received spans, together with the existing steps.

    Args:
        run: a directory that is being received.
        out: directory to write to; `run` itself, or an empty directory to leave `run` unchanged.
        finished: as in `write`.
        opened: called with the engine, which another thread may interrupt. Then, or if the process is killed, the
            received files are still there, and the spans can be put in order again.

    Returns:
        The run, updated.

    Raises:
        TraceError: the received files are damaged; `OvertakenError`: another process put them in order meanwhile.
        OutputError: the disk cannot be written.
    """
    content = rundir.read_run(run)
    read = [*rundir.segments(run), *(run / rundir.INBOX).glob("*.parquet")]
    rundir.check_inside(run, read)
    (out / rundir.STEPS).mkdir(parents=True, exist_ok=True)
    files = sorted((run / rundir.INBOX).glob("*.parquet"))
    with atomic.temporary_folder() as folder:
        con = connect(Path(folder))
        opened(con)
        try:
            con.execute(f"CREATE VIEW arrived AS {_arrived_query(run, files, content)}")
            duplicates = deduplicate(con)
            updated = write(con, _received_job(content, duplicates), out, finished, previous=run)
        except duckdb.Error as error:
            kind = TraceError if all(file.exists() for file in read) else OvertakenError
            raise kind(f"{run / rundir.INBOX}: damaged ({str(error).splitlines()[0]})") from error
        finally:
            con.close()
    if out == run:
        for file in files:
            file.unlink(missing_ok=True)
    return updated


def _received_job(content: Run, duplicates: int) -> Job:
    """Return the job of a directory that is being received, with notes on the losses in transit."""
    counts_so_far = content.received or Received.of({})
    counts = {**counts_so_far, "doubled": counts_so_far.doubled + duplicates}
    counts.pop("runs", None)
    if counts_so_far.runs:
        run = merge_runs(counts_so_far.runs).run
    else:
        run = content.without("format", "received", *(() if content.id is not None else ("finished", "notes")))
    losses = Losses(skipped=Counter(counts_so_far.skipped), changed=Counter(counts_so_far.changed))
    return Job(with_notes(run | {"received": counts}, losses.sentences(), counts["doubled"]), ("",))


def _arrived_query(run: Path, files: Sequence[Path], content: Run) -> str:
    """Return the query for the waiting spans, and after them the spans that are in steps already.

    Waiting spans come first, so that they count where both hold a span: a receiver that was killed while it put them in
    order left some in steps, where their columns may be those of another attempt. The columns that `_make_steps` set on
    spans of other programs are reset, so that they are computed again.
    """
    columns = ", ".join(f"{c.name}::{c.type} AS {c.name}" for c in COLUMNS)
    queries = [f"SELECT {columns}, '' AS run FROM {table.parquet(files)}"] if files else []
    if segments := rundir.segments(run):
        resets = dict.fromkeys(("step", "rung", "timed", "key"), "NULL")
        resets["level"] = f"CASE WHEN kind = '{Kind.STEP}' THEN {int(Level.APPLICATION)} ELSE level END"
        resets["kind"] = f"CASE WHEN kind = '{Kind.STEP}' THEN '{Kind.USER}' ELSE kind END"
        values = resets if has_derived_steps(content) else {}
        expressions = [f"{values.get(c.name, c.name)}::{c.type} AS {c.name}" for c in COLUMNS]
        queries.append(f"SELECT {', '.join(expressions)}, '' AS run FROM {table.parquet(segments)}")
    return " UNION ALL ".join(queries)
