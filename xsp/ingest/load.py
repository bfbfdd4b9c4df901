"""Load recorded spans: run directories, programs that were run once per level, Parquet files of spans; and traces of
other tools, through the importers."""

from __future__ import annotations

import os
import shlex
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import rundir, table
from xsp.correlate import layers
from xsp.errors import TraceError, UsageError
from xsp.importers import contract
from xsp.ingest import jobs, received, sources
from xsp.run import Run
from xsp.schema import COLUMNS, MERGED_COLUMNS, SAMPLE_COLUMNS
from xsp.store import loop
from xsp.store.merge import rungs_of, true_trace
from xsp.store.trace import Trace

SETS = ("sweep", jobs.RUNS)
"""Kinds of directories that hold several runs."""


def load(
    path: str | os.PathLike[str],
    *,
    skip_damaged: bool = False,
    trace_id: str | None = None,
    kind: int | str | None = None,
) -> Trace:
    """Load a run directory, a Parquet file of spans, or a trace of another profiler.

    Args:
        path: a run directory; a `.parquet` file with the columns of `xsp.schema.COLUMNS`; a file, a folder with a
            trace per rank, or a URL that one of the importers recognises (see docs/use/importing.md).
        skip_damaged: skip damaged segments, with a note in `run["notes"]`, instead of raising.
        trace_id: id of the trace to fetch, if the URL is the address of a Jaeger.
        kind: kind of step to compute figures for, by its number or a part of its name; default: the kind that takes
            most of the loop's time.

    Returns:
        The trace. An interrupted run loads with the steps that were stored.

    Raises:
        TraceError: the path does not exist, is not a run or a trace, is damaged, or was written by a newer xsp.
        PluginError: a required package is not installed.
        UsageError: no step of that kind was recorded.
    """
    if contract.is_url(os.fspath(path)):
        _refuse_kind(kind, path)
        return _load_imported(contract.of_trace(os.fspath(path), trace_id))
    place = Path(path).expanduser()
    if not rundir.is_one(place):
        _refuse_kind(kind, path)
    if place.is_file():
        if not _is_parquet(place):
            return _load_imported(str(place))
        return _load_files(table.connect(), [place], Run.of({"name": place.stem}), place)
    if place.is_dir() and not rundir.is_one(place):
        return _load_imported(str(place))
    if received.is_waiting(place):
        return _load_waiting(place, kind)
    run = _believable(rundir.read_job(place))
    if run.parts:
        return _load_parts(place, run, skip_damaged, kind)
    con = table.connect()
    segments, alike, run = _whole(con, place, rundir.segments(place), run, skip_damaged)
    if not segments:
        raise TraceError(f"{place}: the run holds no step; {_why_empty(run)}")
    return _load_files(con, segments, run, place, alike, kind)


def _refuse_kind(kind: int | str | None, path: object) -> None:
    if kind is not None:
        raise UsageError(f"{path}: has no kinds of steps; only runs that xsp recorded have them: omit the kind")


def _number_of(kind: int | str | None, run: Run) -> int | None:
    """Return the number of a kind of step.

    Raises:
        UsageError: no kind has that number or name, or the text is part of several names.
    """
    if kind is None:
        return None
    kinds = {each.kind: each.name for each in run.kinds}
    text = str(kind).strip()
    found = [number for number in kinds if text == str(number)] or [
        number for number, name in kinds.items() if text == name
    ]
    found = found or [number for number, name in kinds.items() if text and text.lower() in name.lower()]
    if len(found) == 1:
        return int(found[0])
    named = "; ".join(f"{number} {name}" for number, name in list(kinds.items())[:10]) or "none is known"
    raise UsageError(f"{'several kinds' if found else 'no kind'} of step called {text!r}; there are: {named}")


def _why_empty(run: Run) -> str:
    """Return the likely reason why a run holds no step, and what to do about it."""
    if run.empty is not None:
        return run.empty
    if run.finished is False:
        return "it was interrupted before the first one was stored: let it run longer"
    asked = run.budget.asked_percent if run.budget is not None else None
    if asked is not None:
        return f"its steps are so short, or so few, that {asked:g} % of them pay for none: allow a larger budget"
    return f"was prof.step() called more often than the warm-up ({run.warmup} steps)?"


def parts(path: str | os.PathLike[str]) -> list[Path]:
    """Return the run directories in a directory of runs (a sweep); for a single run, the directory itself."""
    place = Path(path).expanduser()
    run = rundir.read_job(place)
    if run.kind in SETS:
        return [_inside(place, part) for part in run.parts]
    return [place]


def _load_parts(place: Path, run: Run, skip_damaged: bool, kind: int | str | None) -> Trace:
    """Load a program that was run once per level, or by several ranks, as a single run."""
    if run.kind in SETS:
        raise TraceError(f"{place}: holds several runs; load one of them: {', '.join(run.parts)}")
    segments = [file for name in run.parts for file in rundir.segments(_inside(place, name))]
    con = table.connect()
    segments, alike, run = _whole(con, place, segments, run, skip_damaged)
    if not segments:
        raise TraceError(f"{place}: none of its parts holds a step")
    return _load_files(con, segments, run, place, alike, kind, in_turn=not run.is_job)


def _inside(place: Path, name: str) -> Path:
    """Return the path of a part; raise TraceError if its name leads out of the directory."""
    part = (place / name).resolve()
    if place.resolve() not in part.parents:
        raise TraceError(f"{place / rundir.RUN_FILE}: the part {name!r} lies outside the run directory")
    return part


def _believable(run: Run) -> Run:
    """Return a run with a note for each field of the wrong type; another program may have written the file."""
    wrong = dict.fromkeys(name for each in (run, *run.ranks) for name in each.misfits)
    return run.noted("load", [f"field {name} of run.json left out: not of the type that it has" for name in wrong])


def _whole(
    con: duckdb.DuckDBPyConnection, place: Path, segments: list[Path], run: Run, skip_damaged: bool
) -> tuple[list[Path], bool, Run]:
    """Return the readable segments, whether they are known to have the same columns, and the run with notes.

    Raises:
        TraceError: a segment is damaged, or lies outside the run directory.
    """
    rundir.check_inside(place, segments)
    as_written = {segment for segment in segments if _is_as_written(segment, run)}
    if segments and table.are_whole_and_alike(con, segments, [each for each in segments if each not in as_written]):
        table.check_parquet(con, segments[0], COLUMNS, whole=True)
        return segments, True, run
    whole = []
    for segment in segments:
        try:
            table.check_parquet(con, segment, COLUMNS, whole=segment in as_written)
        except TraceError as error:
            if not skip_damaged:
                raise TraceError(
                    f"{error}; {len(segments) - 1} other segments are there: "
                    "load with skip_damaged=True (--skip-damaged) to go on without this one"
                ) from error
            run = _noted(run, place, f"left out: {error}")
        else:
            whole.append(segment)
    return whole, False, run


def _noted(run: Run, place: Path, *texts: str) -> Run:
    """Return a run with notes on omissions; because reports show them, they name files without their directories."""
    return run.noted("load", [text.replace(f"{place}{os.sep}", "") for text in texts])


def _is_as_written(file: Path, run: Run) -> bool:
    """Return whether a file has the checksum that the `run.json` of its run states."""
    names = (file.name, f"{file.parent.name}/{file.name}")
    stated = [each.checksums[name] for each in (run, *run.ranks) for name in names if name in each.checksums]
    return bool(stated) and rundir.checksum(file) in stated


def _is_parquet(file: Path) -> bool:
    return file.suffix == ".parquet" or contract.first_bytes(file).startswith(b"PAR1")


def _load_imported(source: str) -> Trace:
    """Import a source into a temporary directory that exists as long as the trace."""
    folder = tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True)
    opened = sources.open_whole(Path(folder.name), [source])
    if opened is not None:
        con, run = opened
        weakref.finalize(con, folder.cleanup)
        return Trace(con, run, rungs_of(con, run), Path(source))
    found = sources.import_into(Path(folder.name), [source])
    if len(found) > 1:
        names = ", ".join(run.name for run in found.values())
        raise TraceError(
            f"{contract.without_credentials(source)}: holds {len(found)} runs ({names}); "
            "`xsp import FILE -o DIR` makes a directory of each"
        )
    return _kept(folder, next(iter(found)))


def _load_waiting(place: Path, kind: int | str | None) -> Trace:
    """Load received spans that are not in order yet, because the receiver was killed or is still running."""
    folder = tempfile.TemporaryDirectory(prefix="xsp-", ignore_cleanup_errors=True)
    received.put_in_order(place, Path(folder.name), finished=False)
    return _kept(folder, Path(folder.name), kind)


def _kept(folder: tempfile.TemporaryDirectory[str], place: Path, kind: int | str | None = None) -> Trace:
    trace = load(place, kind=kind)
    weakref.finalize(trace.con, folder.cleanup)
    return trace


def _load_files(
    con: duckdb.DuckDBPyConnection,
    files: list[Path],
    run: Run,
    place: Path,
    alike: bool = False,
    kind: int | str | None = None,
    in_turn: bool = False,
) -> Trace:
    """Load the files of a run; `in_turn`: of several runs of one program, one after the other."""
    number = _number_of(kind, run)
    folders = _folders(files)
    damaged, added = loop.show_in_turn(con, folders) if in_turn else (loop.show(con, folders), {})
    run = _noted(run, place, *_show_samples(con, place, files), *damaged)
    found = {name for file in files[:1] for name in table.check_parquet(con, file, COLUMNS, whole=place.is_dir())}
    if in_turn:
        _view_in_turn(con, files, added, found, alike)
    else:
        _view(con, "spans", files, found, COLUMNS, alike)
    if "layer_id" not in found:  # written before xsp 0.2
        con.execute("CREATE TABLE with_layers AS FROM spans")
        layers.fill(con, "with_layers")
        con.execute("CREATE OR REPLACE VIEW spans AS FROM with_layers")
    merged = place / rundir.MERGED_FILE if place.is_dir() else None
    if merged is not None and merged.is_file() and run.finished and number is None:
        rundir.check_inside(place, [merged])
        try:
            whole = _is_as_written(merged, run)
            held = set(table.check_parquet(con, merged, (*COLUMNS, *MERGED_COLUMNS), whole))
        except TraceError as error:
            run = _noted(run, place, f"merged again from the steps: {error}")
        else:
            if "layer_id" in held:  # else it is merged again, from spans that now have a layer_id
                _view(con, "merged", [merged], held, (*COLUMNS, *MERGED_COLUMNS))
    trace = true_trace(con, run, place, number)
    if number is not None and not con.execute("SELECT 1 FROM merged LIMIT 1").fetchall():
        command = f"xsp analyze {shlex.quote(str(place))} kinds"
        raise UsageError(f"{place}: no step of the kind {kind!r} was recorded; `{command}` lists them")
    return trace


def _folders(files: list[Path]) -> list[Path]:
    """Return the run directories that contain the segments."""
    return list(dict.fromkeys(file.parent.parent for file in files if file.parent.name == rundir.STEPS))


def _show_samples(con: duckdb.DuckDBPyConnection, place: Path, segments: list[Path]) -> list[str]:
    """Make the view `samples` of the samples of the runs with these segments; return a note per damaged portion."""
    folders, damaged = _folders(segments), []
    names, whole = ", ".join(f"{column.name}::{column.type} AS {column.name}" for column in SAMPLE_COLUMNS), []
    portions = [each for folder in folders for each in rundir.portions(folder)]
    rundir.check_inside(place, portions)
    for portion in portions:
        try:
            con.execute(f"SELECT count(hash(read)) FROM (SELECT {names} FROM {table.parquet(portion)}) read").fetchall()
        except duckdb.Error as error:
            damaged.append(f"left out: {portion}: damaged ({str(error).splitlines()[0]})")
        else:
            whole.append(portion)
    if whole:
        con.execute(f"CREATE VIEW samples AS SELECT {names} FROM {table.parquet(whole)}")
    return damaged


def _view_in_turn(
    con: duckdb.DuckDBPyConnection, files: list[Path], added: Mapping[Path, int], found: set[str], alike: bool
) -> None:
    """Make the view `spans` of several runs of one program, with the numbers of steps that `loop` has."""
    shown, parts = table.shown(COLUMNS, found), []
    for folder, number in added.items():
        own = table.parquet([file for file in files if file.parent.parent == folder], alike)
        parts.append(f"SELECT * REPLACE ((step + {number})::INTEGER AS step) FROM (SELECT {shown} FROM {own})")
    con.execute(f"CREATE VIEW spans AS {' UNION ALL '.join(parts)}")


def _view(
    con: duckdb.DuckDBPyConnection,
    name: str,
    files: list[Path],
    found: set[str],
    columns: Sequence[Any],
    alike: bool = False,
) -> None:
    """Make a view of files with all columns; columns that an older xsp did not write have their default value."""
    con.execute(f"CREATE VIEW {name} AS SELECT {table.shown(columns, found)} FROM {table.parquet(files, alike)}")
