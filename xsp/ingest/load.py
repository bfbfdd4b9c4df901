"""Load recorded spans: run directories, programs that were run once per level, Parquet files of spans; and traces of
other tools, through the importers."""

from __future__ import annotations

import os
import shlex
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from xsp import atomic, cached, rundir, table
from xsp.errors import TraceError, UsageError
from xsp.importers import contract
from xsp.ingest import cachedimports, jobs
from xsp.ingest.presence import has_all_segments, with_presence_notes
from xsp.run import Run
from xsp.schema import COLUMNS, MERGED_COLUMNS, SAMPLE_COLUMNS
from xsp.store import loop
from xsp.store.merge import rungs_of, true_trace
from xsp.store.trace import Trace

SETS = ("sweep", jobs.RUNS)
"""Kinds of directories that hold several runs."""


def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    skip_damaged: bool = False,
    trace_id: str | None = None,
    kind: int | str | None = None,
) -> Trace:
    """Load a run directory, a Parquet file of spans, or a trace of another profiler.

    Args:
        path: a run directory; a `.parquet` file with the columns of `xsp.schema.COLUMNS`; a file, a folder with a
            trace per rank, or a URL that one of the importers recognises (see docs/use/importing.md); a list of files
            with a trace per rank.
        skip_damaged: skip damaged segments, with a note in `run["notes"]`, instead of raising.
        trace_id: id of the trace to fetch, if the URL is the address of a Jaeger.
        kind: kind of step to compute figures for, by its number or a part of its name; default: the kind that takes
            most of the time.

    Returns:
        The trace. An interrupted run loads with the steps that were stored.

    Raises:
        TraceError: the path does not exist, is not a run or a trace, is damaged, or was written by a newer xsp.
        PluginError: a required package is not installed.
        UsageError: no step of that kind was recorded.
    """
    if not isinstance(path, (str, os.PathLike)):
        return _load_imported([os.fspath(file) for file in path], kind)
    if contract.is_url(os.fspath(path)):
        return _load_imported([contract.trace_url(os.fspath(path), trace_id)], kind)
    location = Path(path).expanduser()
    if location.is_file():
        if not (location.suffix == ".parquet" or contract.first_bytes(location).startswith(b"PAR1")):
            return _load_imported([str(location)], kind)
        _refuse_kind(kind, path)
        return _load_files(table.connect(), [location], Run.of({"name": location.stem}), location)
    if location.is_dir() and not rundir.is_run_directory(location):
        return _load_imported([str(location)], kind)
    if rundir.has_waiting_spans(location):
        # load received spans that are not in order yet, because the receiver was killed or is still running
        from xsp.ingest import received

        folder = atomic.temporary_folder()
        try:
            received.put_in_order(location, Path(folder.name), finished=False)
        except received.OvertakenError:
            return load(path, skip_damaged=skip_damaged, trace_id=trace_id, kind=kind)
        trace = load(Path(folder.name), kind=kind)
        weakref.finalize(trace.con, folder.cleanup)
        return trace
    run = _with_misfit_notes(rundir.read_job(location))
    if run.parts:
        return _load_parts(location, run, skip_damaged, kind)
    con = table.connect()
    segments = rundir.segments(location)
    run = with_presence_notes(run, location, segments)
    segments, same_columns, run = _readable_segments(con, location, segments, run, skip_damaged)
    if not segments and not _served(location, run):
        raise TraceError(f"{location}: the run holds no step; {_empty_reason(run)}")
    return _load_files(con, segments, run, location, same_columns, kind)


def _refuse_kind(kind: int | str | None, path: object) -> None:
    if kind is not None:
        raise UsageError(
            f"{path}: has no kinds of steps; runs that xsp recorded have them, and traces in which an engine annotated "
            "its steps: omit the kind"
        )


def _number_of(kind: int | str | None, run: Run) -> int | None:
    """Return the number of a kind of step.

    Raises:
        UsageError: no kind has that number or name, or the text is part of several names.
    """
    if kind is None:
        return None
    kinds = {step_kind.kind: step_kind.name for step_kind in run.kinds}
    text = str(kind).strip()
    matches = [number for number in kinds if text == str(number)] or [
        number for number, name in kinds.items() if text == name
    ]
    matches = matches or [number for number, name in kinds.items() if text and text.lower() in name.lower()]
    if len(matches) == 1:
        return int(matches[0])
    listing = "; ".join(f"{number} {name}" for number, name in list(kinds.items())[:10]) or "none is known"
    raise UsageError(f"{'several kinds' if matches else 'no kind'} of step called {text!r}; there are: {listing}")


def _empty_reason(run: Run) -> str:
    """Return the likely reason why a run holds no step, and what to do about it."""
    if run.empty is not None:
        return run.empty
    if run.finished is False:
        return "it was interrupted before the first one was stored: let it run longer"
    percent = run.budget.asked_percent if run.budget is not None else None
    if percent is not None:
        return f"its steps are so short, or so few, that {percent:g} % of them pay for none: allow a larger budget"
    return f"was prof.step() called more often than the warm-up ({run.warmup} steps)?"


def parts(path: str | os.PathLike[str]) -> list[Path]:
    """Return the run directories in a directory of runs (a sweep); for a run, or traces of ranks, their directory."""
    location = Path(path).expanduser()
    if not rundir.is_run_directory(location):
        return [location]
    run = rundir.read_job(location)
    if run.kind in SETS:
        return [_part_path(location, part) for part in run.parts]
    return [location]


def _load_parts(run_dir: Path, run: Run, skip_damaged: bool, kind: int | str | None) -> Trace:
    """Load a program that was run once per level, or by several ranks, as a single run."""
    if run.kind in SETS:
        raise TraceError(f"{run_dir}: holds several runs; load one of them: {', '.join(run.parts)}")
    segments = [file for name in run.parts for file in rundir.segments(_part_path(run_dir, name))]
    con = table.connect()
    run = with_presence_notes(run, run_dir, segments)
    segments, same_columns, run = _readable_segments(con, run_dir, segments, run, skip_damaged)
    if not segments and not (run.is_job and _served(run_dir, run)):
        raise TraceError(f"{run_dir}: none of its parts holds a step")
    return _load_files(con, segments, run, run_dir, same_columns, kind, is_sequence=not run.is_job)


def _part_path(run_dir: Path, name: str) -> Path:
    """Return the path of a part; raise TraceError if its name leads out of the directory."""
    part = (run_dir / name).resolve()
    if run_dir.resolve() not in part.parents:
        raise TraceError(f"{run_dir / rundir.RUN_FILE}: the part {name!r} lies outside the run directory")
    return part


def _with_misfit_notes(run: Run) -> Run:
    """Return a run with a note for each field of the wrong type; another program may have written the file."""
    misfits = dict.fromkeys(name for member in (run, *run.ranks) for name in member.misfits)
    return run.with_notes(
        "load", [f"field {name} of run.json left out: not of the type that it has" for name in misfits]
    )


def _readable_segments(
    con: duckdb.DuckDBPyConnection, run_dir: Path, segments: list[Path], run: Run, skip_damaged: bool
) -> tuple[list[Path], bool, Run]:
    """Return the readable segments, whether they are known to have the same columns, and the run with notes.

    Raises:
        TraceError: a segment is damaged, or lies outside the run directory.
    """
    rundir.check_inside(run_dir, segments)
    verified = {segment for segment in segments if _is_verified(run_dir, segment, run)}
    if segments and table.are_intact_and_uniform(
        con, segments, [segment for segment in segments if segment not in verified]
    ):
        table.check_parquet(con, segments[0], COLUMNS, is_intact=True)
        return segments, True, run
    readable = []
    for segment in segments:
        try:
            table.check_parquet(con, segment, COLUMNS, is_intact=segment in verified)
        except TraceError as error:
            if not skip_damaged:
                raise TraceError(
                    f"{error}; {len(segments) - 1} other segments are there: "
                    "load with skip_damaged=True (--skip-damaged) to go on without this one"
                ) from error
            run = _with_notes(run, run_dir, f"left out: {error}")
        else:
            readable.append(segment)
    return readable, False, run


def _with_notes(run: Run, run_dir: Path, *texts: str) -> Run:
    """Return a run with notes on omissions; because reports show them, they name files without their directories."""
    return run.with_notes("load", [text.replace(f"{run_dir}{os.sep}", "") for text in texts])


def _is_verified(run_dir: Path, file: Path, run: Run) -> bool:
    """Return whether a file has the checksum that the `run.json` of its run states."""
    names = (file.name, f"{file.parent.name}/{file.name}")
    expected = [member.checksums[name] for member in (run, *run.ranks) for name in names if name in member.checksums]
    try:
        return bool(expected) and rundir.checksum(run_dir, file) in expected
    except OSError:  # it cannot be read, which the reader of its table reports
        return False


def _load_imported(names: Sequence[str], kind: int | str | None = None) -> Trace:
    """Import sources, which make one run, into a temporary directory that exists as long as the trace."""
    key = cachedimports.key_of(names)
    entry = cached.open_folder(cachedimports.KIND, key)
    if entry is not None:
        try:
            trace = _load_run_of(names, entry.path, kind)
        except BaseException:
            os.close(entry.lock)
            raise
        weakref.finalize(trace.con, os.close, entry.lock)
        return trace
    from xsp.ingest import sources, tables  # their correlation and NumPy are not needed to open a run

    folder = atomic.temporary_folder()
    direct = sources.open_tables(Path(folder.name), names)
    if direct is not None:
        con, run = direct
        weakref.finalize(con, folder.cleanup)
        _refuse_kind(None if run.kinds else kind, names[0])
        cachedimports.store(key, run, lambda out: tables.write_table(con, run, out))
        if (number := _number_of(kind, run)) is None:
            return Trace(con, run, rungs_of(con, run), Path(names[0]))
        con.execute("DROP TABLE merged")
        return true_trace(con, run, Path(names[0]), number)
    runs = sources.import_into(Path(folder.name), names, name=" ".join(Path(name).name for name in names))
    if len(runs) > 1:
        run_names = ", ".join(run.name for run in runs.values())
        raise TraceError(
            f"{', '.join(map(contract.without_credentials, names))}: holds {len(runs)} runs ({run_names}); "
            "`xsp import FILE -o DIR` makes a directory of each"
        )
    run_dir, run = next(iter(runs.items()))
    cachedimports.store(key, run, cachedimports.copy(run_dir))
    trace = _load_run_of(names, run_dir, kind)
    weakref.finalize(trace.con, folder.cleanup)
    return trace


def _load_run_of(names: Sequence[str], run_dir: Path, kind: int | str | None) -> Trace:
    """Load the run directory that sources were imported into."""
    run = rundir.read_job(run_dir)
    _refuse_kind(None if any(each.kinds for each in run.rank_runs) else kind, names[0])
    trace = load(run_dir, kind=kind)
    trace.path = Path(names[0])
    return trace


def _load_files(
    con: duckdb.DuckDBPyConnection,
    files: list[Path],
    run: Run,
    location: Path,
    same_columns: bool = False,
    kind: int | str | None = None,
    is_sequence: bool = False,
) -> Trace:
    """Load the files of a run, none if it has only requests; `is_sequence`: of several runs of one program, one after
    the other."""
    number = _number_of(kind, run)
    folders = _folders(files) or _run_folders(location, run)
    damaged, offsets = (
        loop.create_table_in_sequence(con, folders) if is_sequence else (loop.create_table(con, folders), {})
    )
    loop.mark_compiling(con, run)
    run = _with_notes(run, location, *_create_samples_view(con, location, folders), *damaged)
    stored_columns = {
        name for file in files[:1] for name in table.check_parquet(con, file, COLUMNS, is_intact=location.is_dir())
    }
    if is_sequence:
        _create_sequence_view(con, files, offsets, stored_columns, same_columns)
    else:
        if files:
            _create_view(con, "spans", files, stored_columns, COLUMNS, same_columns)
        else:
            table.create(con, "spans", COLUMNS)
        earlier = [file for folder in folders for file in rundir.befores(folder)] if location.is_dir() else []
        if earlier:
            rundir.check_inside(location, earlier)
            columns = set(table.check_parquet(con, earlier[0], COLUMNS, is_intact=False))
            _create_view(con, "before", earlier, columns, COLUMNS)
        served = _served(location, run)
        if served:
            rundir.check_inside(location, served)
            columns = set(table.check_parquet(con, served[0], COLUMNS, is_intact=False))
            _create_view(con, "serving", served, columns, COLUMNS)
    if files and "layer_id" not in stored_columns:  # written before xsp 0.2
        con.execute("CREATE TABLE with_layers AS FROM spans")
        from xsp.correlate import layers

        layers.fill(con, "with_layers")
        con.execute("CREATE OR REPLACE VIEW spans AS FROM with_layers")
    merged = location / rundir.MERGED_FILE if location.is_dir() else None
    if merged is not None and merged.is_file() and run.finished and number is None and has_all_segments(run):
        rundir.check_inside(location, [merged])
        try:
            is_verified = _is_verified(location, merged, run)
            merged_columns = set(table.check_parquet(con, merged, (*COLUMNS, *MERGED_COLUMNS), is_verified))
        except TraceError as error:
            run = _with_notes(run, location, f"merged again from the steps: {error}")
        else:
            if "layer_id" in merged_columns:  # else it is merged again, from spans that now have a layer_id
                _create_view(con, "merged", [merged], merged_columns, (*COLUMNS, *MERGED_COLUMNS))
    if location.is_dir():
        table.hold(con, ("spans", "merged", "before", "samples"), table.MOST_HELD)
    trace = true_trace(con, run, location, number)
    if number is not None and not con.execute("SELECT 1 FROM merged LIMIT 1").fetchall():
        command = f"xsp analyze {shlex.quote(str(location))} kinds"
        raise UsageError(f"{location}: no step of the kind {kind!r} was recorded; `{command}` lists them")
    return trace


def _folders(files: list[Path]) -> list[Path]:
    """Return the run directories that contain the segments."""
    return list(dict.fromkeys(file.parent.parent for file in files if file.parent.name == rundir.STEPS))


def _run_folders(location: Path, run: Run) -> list[Path]:
    """Return the run directories of a run, with those of ranks that recorded no step; none for a file."""
    if not location.is_dir():
        return []
    return [_part_path(location, part) for part in run.parts] if run.is_job else [location]


def _served(location: Path, run: Run) -> list[Path]:
    """Return the tables of requests of a run, also of one that recorded no step."""
    folders = _run_folders(location, run)
    return [file for folder in folders for file in rundir.numbered_tables(folder / rundir.SERVING)]


def _create_samples_view(con: duckdb.DuckDBPyConnection, run_dir: Path, folders: list[Path]) -> list[str]:
    """Make the view `samples` of the samples of these run directories; return a note per damaged portion."""
    notes = []
    columns, readable = ", ".join(f"{column.name}::{column.type} AS {column.name}" for column in SAMPLE_COLUMNS), []
    portions = [file for folder in folders for file in rundir.portions(folder)]
    rundir.check_inside(run_dir, portions)
    for portion in portions:
        try:
            con.execute(
                f"SELECT count(hash(read)) FROM (SELECT {columns} FROM {table.parquet(portion)}) read"
            ).fetchall()
        except duckdb.Error as error:
            notes.append(f"left out: {portion}: damaged ({str(error).splitlines()[0]})")
        else:
            readable.append(portion)
    if readable:
        con.execute(f"CREATE VIEW samples AS SELECT {columns} FROM {table.parquet(readable)}")
    return notes


def _create_sequence_view(
    con: duckdb.DuckDBPyConnection,
    files: list[Path],
    offsets: Mapping[Path, int],
    stored_columns: set[str],
    same_columns: bool,
) -> None:
    """Make the view `spans` of several runs of one program, with the numbers of steps that `loop` has."""
    selection, parts = table.select_list(COLUMNS, stored_columns), []
    for folder, offset in offsets.items():
        source = table.parquet([file for file in files if file.parent.parent == folder], same_columns)
        parts.append(f"SELECT * REPLACE ((step + {offset})::INTEGER AS step) FROM (SELECT {selection} FROM {source})")
    con.execute(f"CREATE VIEW spans AS {' UNION ALL '.join(parts)}")


def _create_view(
    con: duckdb.DuckDBPyConnection,
    name: str,
    files: list[Path],
    stored_columns: set[str],
    columns: Sequence[Any],
    same_columns: bool = False,
) -> None:
    """Make a view of files with all columns; columns that an older xsp did not write have their default value."""
    selected = table.select_list(columns, stored_columns)
    con.execute(f"CREATE VIEW {name} AS SELECT {selected} FROM {table.parquet(files, same_columns)}")
