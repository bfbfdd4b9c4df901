"""What a receiver took, put in order: the steps of a run directory that grows in any order."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import rundir, table
from xsp.errors import TraceError
from xsp.importers.contract import Losses
from xsp.ingest.jobs import Job, as_one, connect, once
from xsp.ingest.write import NO_STEPS, noted, write
from xsp.schema import COLUMNS, Kind, Level


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
    rundir.check_inside(run, [*rundir.segments(run), *(run / rundir.WAITING).glob("*.parquet")])
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
    return Job({**run, "received": counts, "notes": noted(run, losses.sentences(), counts["doubled"])}, ("",))


def _together(run: Path, files: Sequence[Path], content: Mapping[str, Any]) -> str:
    """Return the query for the spans that wait and those that are in steps already.

    What `_make_steps` added to other programs' spans is forgotten, and made anew.
    """
    ours = ", ".join(f"{c.name}::{c.type} AS {c.name}" for c in COLUMNS)
    parts = [f"SELECT {ours}, '' AS run FROM {table.parquet(files)}"] if files else []
    if steps := rundir.segments(run):
        made = any(note.get("text") == NO_STEPS for note in content.get("notes", ()))
        plain = dict.fromkeys(("step", "rung", "timed"), "NULL")
        plain["level"] = f"CASE WHEN kind = '{Kind.STEP}' THEN {int(Level.APPLICATION)} ELSE level END"
        plain["kind"] = f"CASE WHEN kind = '{Kind.STEP}' THEN '{Kind.USER}' ELSE kind END"
        values = plain if made else {}
        names = [f"{values.get(c.name, c.name)}::{c.type} AS {c.name}" for c in COLUMNS]
        parts.insert(0, f"SELECT {', '.join(names)}, '' AS run FROM {table.parquet(steps)}")
    return " UNION ALL ".join(parts)
