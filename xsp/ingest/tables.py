"""Import the files of table importers into run directories: a file becomes a run, the files of ranks become a job."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import duckdb

from xsp import atomic, rundir, table
from xsp.correlate.columns import correlate_table
from xsp.errors import OutputError, TraceError
from xsp.importers import contract, serving
from xsp.importers.contract import Enricher, Losses, SourceInfo, TableImporter
from xsp.ingest import ranks, replays
from xsp.ingest.jobs import RUNS, name_of, unique_names
from xsp.ingest.write import with_notes
from xsp.run import RANKS, Run
from xsp.schema import Level
from xsp.store import merge

_SUFFIXES = re.compile(
    r"(\.(json|jsonl|gz|sqlite|db|rpd|trace|pt|pb|xplane|hatchet|pftrace|perfetto-trace))+$", re.IGNORECASE
)

MEMORY = "500MB"
"""Memory limit of the engine; it spills the rest to the disk."""

MAX_SPANS_IN_MEMORY = 500_000
"""Above this number of spans the engine keeps its tables in a file, compressed."""


def import_tables(
    out: Path, sources: Mapping[str, TableImporter | Enricher], job_name: str, keep_names: bool = False
) -> dict[Path, Run]:
    """Import files into run directories: a single file into `out`; ranks of a job, or several runs, into folders in it.

    Args:
        out: an empty directory.
        sources: importer by path: table importers, or a single table importer with enrichers.
        job_name: name of the job or set of runs, if there are several files.
        keep_names: keep names of people, machines and paths, under `names` in `run.json`.

    Returns:
        The runs, by directory.

    Raises:
        TraceError: a file cannot be read, or the files do not go together.
        OutputError: the disk cannot be written.
    """
    files, enrichers = _split(sources)
    if not files or (enrichers and len(files) > 1):
        raise TraceError(
            f"{', '.join(enrichers)}: an execution trace has no times; give it together with the one trace "
            "that was recorded beside it"
        )
    if len(files) == 1:
        return {out: _import(out, *next(iter(files.items())), enrichers, keep_names)}
    runs: dict[Path, Run] = {}
    are_hosts = _are_hosts(files)
    for number, (source, importer) in enumerate(files.items()):
        rank = number if are_hosts else None
        runs[out / f"{number:04d}"] = _import(out / f"{number:04d}", source, importer, {}, keep_names, rank)
    runs = _join_captures(runs)
    if len(runs) == 1:
        return _move_up(out, runs)
    return _combine_ranks(out, runs, job_name) if _are_ranks(runs.values()) else _rename_runs(out, runs, job_name)


def _are_hosts(files: Mapping[str, TableImporter]) -> bool:
    """Return whether files are the hosts of one recording of XLA's profiler, which writes a file for each into a folder
    that is named after the time."""
    folders = {Path(source).absolute().parent for source in files}
    is_recording = len(folders) == 1 and next(iter(folders)).parent.name == "profile"
    return is_recording and all(importer.name == XSPACE for importer in files.values())


XSPACE = "xplane"
"""Name of the importer of XLA's recordings."""


def open_table(
    folder: Path, sources: Mapping[str, TableImporter | Enricher]
) -> tuple[duckdb.DuckDBPyConnection, Run] | None:
    """Read one file into an engine, without writing a run directory.

    Args:
        folder: directory for the engine's own files; it must exist as long as the engine.
        sources: as in `import_tables`.

    Returns:
        An engine with the tables `spans`, `merged` and `alike`, and the run; None if the sources hold several runs.

    Raises:
        TraceError, OutputError: as `import_tables`.
    """
    files, enrichers = _split(sources)
    if len(files) != 1:
        return None
    return _open_merged(folder, *next(iter(files.items())), enrichers)


def _split(sources: Mapping[str, TableImporter | Enricher]) -> tuple[dict[str, TableImporter], dict[str, Enricher]]:
    """Return the table importers and the enrichers, by source."""
    files = {source: importer for source, importer in sources.items() if isinstance(importer, TableImporter)}
    return files, {source: importer for source, importer in sources.items() if isinstance(importer, Enricher)}


def _open_merged(
    folder: Path,
    source: str,
    importer: TableImporter,
    enrichers: Mapping[str, Enricher],
    keep_names: bool = False,
    default_rank: int | None = None,
) -> tuple[duckdb.DuckDBPyConnection, Run]:
    con = table.connect_spilling(folder, MEMORY)
    try:
        info = importer.fill(con, source)
        for enricher_source, enricher in enrichers.items():
            with contract.check_values(enricher_source):
                enricher.enrich(con, enricher_source, info.losses)
        if "kinds" not in info.run and (kinds := serving.take_steps(con, info.losses)):
            info.run["kinds"] = kinds
        if "rank" not in info.run and (rank := ranks.rank_in_name(Path(source).name)) is not None:
            info.run["rank"] = rank
        if "rank" not in info.run and default_rank is not None:
            info.run["rank"] = default_rank
            info.losses.note("the files of the hosts state no rank: hosts are numbered in the order of their names")
        if table.has_table(con, contract.SAMPLES):
            con.execute(
                f"CREATE TABLE samples AS SELECT * REPLACE (?::INTEGER AS rank) FROM {contract.SAMPLES}",
                [int(info.run.get("rank", 0))],
            )
            con.execute(f"DROP TABLE {contract.SAMPLES}")
        identity = _identity(source)
        if info.losses.spans > MAX_SPANS_IN_MEMORY:
            con.execute(
                f"ATTACH {table.path_literal(folder / 'correlated.duckdb')} AS work; SET search_path = 'work,memory'"
            )
        with contract.check_values(source):
            is_table = correlate_table(con, info, identity)
            con.execute("DROP TABLE raw_spans")
            if replays.attribute(con, info.losses):
                con.execute("DROP TABLE correlated" if is_table else "DROP VIEW correlated; DROP TABLE varying")
                con.execute("ALTER TABLE attributed RENAME TO spans")
            else:
                con.execute(f"ALTER {'TABLE' if is_table else 'VIEW'} correlated RENAME TO spans")
            merge.merge(con, Run.of(info.run))
        return con, _run(con, info, source, identity, keep_names)
    except duckdb.OutOfMemoryException as error:
        con.close()
        raise OutputError(f"{source}: needs more room than {tempfile.gettempdir()} has ({error})") from error
    except BaseException:
        con.close()
        raise


def _import(
    out: Path,
    source: str,
    importer: TableImporter,
    enrichers: Mapping[str, Enricher],
    keep_names: bool,
    default_rank: int | None = None,
) -> Run:
    with atomic.temporary_folder() as folder:
        con, run = _open_merged(Path(folder), source, importer, enrichers, keep_names, default_rank)
        try:
            write_table(con, run, out)
        finally:
            con.close()
    return run


def write_table(con: duckdb.DuckDBPyConnection, run: Run, out: Path) -> None:
    """Write what `open_table` returned as a run directory.

    Raises:
        OutputError: the disk cannot be written.
    """
    try:
        (out / rundir.STEPS).mkdir(parents=True, exist_ok=True)
        table.write_parquet(con, "spans", rundir.segment(out, 0))
        table.write_parquet(con, "merged", out / rundir.MERGED_FILE)
        if table.has_table(con, "samples"):
            rundir.portion(out, 0).parent.mkdir()
            table.write_parquet(con, "samples", rundir.portion(out, 0))
    except (duckdb.IOException, OSError) as error:
        raise OutputError(f"{out}: cannot be written ({str(error).splitlines()[0]})") from error
    rundir.write_run(out, run | {"checksums": rundir.checksums(out)})


def _join_captures(runs: Mapping[Path, Run]) -> dict[Path, Run]:
    """Return the runs without traces of captures of graphs, after these gave operators to the replays of the others.

    A trace that contains captures is for those of its rank that contain none, or for all if they are of one rank. If
    its kernels are not those of the replays, it stays a run of its own, and a note says so.
    """
    con = table.connect()
    try:
        segments = {folder: table.parquet(rundir.segment(folder, 0)) for folder in runs}
        captures = [folder for folder in runs if replays.has_captures(con, segments[folder])]
    finally:
        con.close()
    if len(captures) == len(runs):
        return dict(runs)
    joined = {folder: run for folder, run in runs.items() if folder not in captures}
    used: set[Path] = set()
    for folder, run in [*joined.items()]:
        own = [each for each in captures if runs[each].rank == run.rank] or captures
        losses = Losses()
        if own and _attribute(folder, run, [segments[each] for each in own], losses):
            used |= {*own}
        if own:
            names = ", ".join(runs[each].name for each in own)
            run = run | {"notes": [note for note in run.notes if replays.REFUSED not in note.text]}
            notes = losses.notes or ["no graph is replayed"]
            joined[folder] = with_notes(run, [f"with the captures of {names}: {text}" for text in notes], 0)
            rundir.write_run(folder, joined[folder] | {"checksums": rundir.checksums(folder)})
    for folder in used:
        shutil.rmtree(folder)
    return {folder: joined.get(folder, run) for folder, run in runs.items() if folder not in used}


def _attribute(folder: Path, run: Run, captures: Sequence[str], losses: Losses) -> bool:
    """Give replays of graphs in a run the operators of their captures, and store it; return whether any got some."""
    segment = rundir.segment(folder, 0)
    with atomic.temporary_folder() as temporary:
        con = table.connect_spilling(Path(temporary), MEMORY)
        try:
            con.execute(f"CREATE VIEW correlated AS FROM {table.parquet(segment)}")
            if not replays.attribute(con, losses, captures):
                return False
            con.execute("ALTER TABLE attributed RENAME TO spans")
            merge.merge(con, run)
            table.write_parquet(con, "spans", segment)
            table.write_parquet(con, "merged", folder / rundir.MERGED_FILE)
        finally:
            con.close()
    return True


def _move_up(out: Path, runs: Mapping[Path, Run]) -> dict[Path, Run]:
    """Move the only run into the directory that holds its folder."""
    folder, run = next(iter(runs.items()))
    for member in folder.iterdir():
        member.rename(out / member.name)
    folder.rmdir()
    return {out: run}


def _are_ranks(runs: Iterable[Run]) -> bool:
    """Return whether the runs are the ranks of one job: each states a rank, and all ranks differ."""
    ranks = [run.rank for run in runs]
    return None not in ranks and len(set(ranks)) == len(ranks)


def _combine_ranks(out: Path, runs: Mapping[Path, Run], job_name: str) -> dict[Path, Run]:
    """Combine the runs of ranks into a job."""
    for folder, run in runs.items():
        folder.rename(out / rundir.rank_name(run.rank or 0))
    parts = rundir.rank_parts(out)
    first = min(runs.values(), key=lambda run: run.rank or 0)
    kinds = {"kinds": first.content["kinds"]} if first.kinds else {}  # the same numbers on all ranks
    job_run = Run.of({"kind": RANKS, "name": job_name, "finished": True, **kinds})
    rundir.write_run(out, job_run)
    job = rundir.read_job(out)
    segments = [segment for part in parts for segment in rundir.segments(part)]
    con = table.connect()
    try:
        con.execute(f"CREATE VIEW spans AS FROM {table.parquet(segments)}")
        merge.merge(con, job)
        table.write_parquet(con, "merged", out / rundir.MERGED_FILE)
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        raise OutputError(f"{out}: cannot be written ({error})") from error
    finally:
        con.close()
    sources = [source for run in runs.values() if run.imported is not None for source in run.imported.sources]
    imported = {"imported": {"sources": sources, "doubled": 0}}
    rundir.write_run(out, job_run | imported)
    return {out: job | imported}


def _rename_runs(out: Path, runs: Mapping[Path, Run], set_name: str) -> dict[Path, Run]:
    """Rename the folders of runs that do not belong together after the runs."""
    runs_by_folder = {}
    for (folder, run), name in zip(runs.items(), unique_names(map(name_of, runs.values())), strict=True):
        folder.rename(out / name)
        runs_by_folder[out / name] = run
    rundir.write_run(out, {"kind": RUNS, "name": set_name, "finished": True, "parts": [p.name for p in runs_by_folder]})
    return runs_by_folder


def _identity(source: str) -> str:
    """Return the text from which ids are derived: the same for files with the same content, whatever their path."""
    digest = hashlib.blake2b(str(os.path.getsize(source)).encode(), digest_size=8)
    with open(source, "rb") as file:
        digest.update(file.read(contract.HEAD))
        file.seek(max(0, os.path.getsize(source) - contract.HEAD))
        digest.update(file.read(contract.HEAD))
    return digest.hexdigest()


def _run(con: duckdb.DuckDBPyConnection, info: SourceInfo, source: str, identity: str, keep_names: bool) -> Run:
    """Return the run of a file."""
    ((start, end, levels),) = con.execute(
        "SELECT min(start_ns), max(start_ns + dur_ns), list(DISTINCT level) FROM spans"
    ).fetchall()
    if levels is None:
        raise TraceError(f"{source}: no span was found in it, as of a trace that was recorded while nothing ran")
    name = Path(source).name
    content = {
        "id": identity,
        "name": _SUFFIXES.sub("", name) or name,
        "start_ns": start,
        "end_ns": end,
        **info.run,
        "levels": "/".join(level.name.lower() for level in Level if level in levels),
        "finished": True,
        "imported": {"sources": [{"source": name, **info.losses.report()}], "doubled": 0},
    }
    if keep_names:
        content["names"] = info.private
    return with_notes(Run.of(content), [f"{name}: {text}" for text in info.losses.sentences()], 0)
