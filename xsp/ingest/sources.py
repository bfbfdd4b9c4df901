"""Import files and URLs into run directories."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import duckdb

from xsp import atomic, rundir
from xsp.errors import OutputError, TraceError
from xsp.importers import contract
from xsp.importers.contract import Enricher, Imported, Losses, RowImporter, TableImporter
from xsp.ingest import enginespans, ranks
from xsp.ingest.enginespans import RequestSpan
from xsp.ingest.jobs import RUNS, append_sources, connect, deduplicate, jobs, name_of, unique_names
from xsp.ingest.tables import import_tables, open_table
from xsp.ingest.write import with_notes, write
from xsp.run import Run


def import_into(
    out: Path, sources: Sequence[str], keep_names: bool = False, name: str | None = None
) -> dict[Path, Run]:
    """Import files and URLs into run directories.

    Args:
        out: an empty directory. A single job is written into it; several jobs into one subdirectory each.
        sources: files and URLs that importers recognise; for a folder, the files in it are imported.
        keep_names: keep names of people, machines and paths.
        name: name of a job of several files; default: that of the directory.

    Returns:
        The runs, by run directory.

    Raises:
        TraceError: a source cannot be read, or holds no span.
        PluginError: an importer needs a package that is not installed.
        OutputError: the disk cannot be written.
    """
    rows, tables = _find_importers(sources)
    if tables:
        requests, losses = _requests(rows, tables) if rows else ([], [])
        job_name = Path(sources[0]).name if len(sources) == 1 else name or out.name
        runs = import_tables(out, tables, job_name, keep_names)
        return enginespans.join(runs, requests, losses) if requests else runs
    return _import_rows(out, list(rows), [importer.read(source) for source, importer in rows.items()])


def open_tables(folder: Path, sources: Sequence[str]) -> tuple[duckdb.DuckDBPyConnection, Run] | None:
    """Read files into an engine without writing a run directory, if possible: see `tables.open_table`."""
    rows, tables = _find_importers(sources)
    return open_table(folder, tables) if tables and not rows else None


def _find_importers(sources: Sequence[str]) -> tuple[dict[str, RowImporter], dict[str, TableImporter | Enricher]]:
    """Return the importers by source: importers of spans with parents, and importers of spans without."""
    rows: dict[str, RowImporter] = {}
    tables: dict[str, TableImporter | Enricher] = {}
    for source in ranks.files(sources):
        importer = contract.find_importer(source)
        if isinstance(importer, RowImporter):
            rows[source] = importer
        else:
            tables[source] = importer
    return rows, tables


def _requests(rows: Mapping[str, RowImporter], tables: Iterable[str]) -> tuple[list[RequestSpan], list[str]]:
    """Return the requests of an engine in spans that are given together with traces of its steps, and what was lost.

    Raises:
        TraceError: there is none, so the spans have nothing to do with the traces.
    """
    imports = [importer.read(source) for source, importer in rows.items()]
    found = enginespans.spans_of_requests(row for imported in imports for row in imported.rows)
    if not found:
        raise TraceError(
            f"{', '.join(map(_display_name, rows))}: spans with parents do not go together with "
            f"{', '.join(map(_display_name, tables))}, unless they are requests of vLLM or SGLang "
            f"({enginespans.LATENCY}time_to_first_token)"
        )
    return found, [text for imported in imports for text in imported.losses.sentences()]


def _import_rows(out: Path, sources: Sequence[str], imports: Sequence[Imported]) -> dict[Path, Run]:
    """Import spans that have identities and parents."""
    with atomic.temporary_folder() as folder:
        con = connect(Path(folder))
        try:
            runs, losses = append_sources(con, imports)
            duplicates = deduplicate(con)
            all_jobs = jobs(con, runs)
            if not con.execute("SELECT 1 FROM distinct_spans LIMIT 1").fetchall():
                sentences = [text for report in losses for text in report.sentences()]
                raise TraceError("; ".join([f"{_source_names(sources)}: no span in it", *sentences]))
            subfolders = [out / name for name in unique_names(name_of(job.run) for job in all_jobs)]
            jobs_by_directory = dict(zip(subfolders if len(all_jobs) > 1 else [out], all_jobs, strict=True))
            for directory, job in jobs_by_directory.items():
                name_field = {"name": job.run.name or Path(_display_name(sources[0])).stem}
                run = with_losses(
                    job.run | name_field, list(zip(map(_display_name, sources), losses, strict=True)), duplicates
                )
                jobs_by_directory[directory] = job._replace(run=run)
                (directory / rundir.STEPS).mkdir(parents=True, exist_ok=True)
            runs_by_directory = {directory: write(con, job, directory) for directory, job in jobs_by_directory.items()}
            if len(all_jobs) > 1:
                rundir.write_run(
                    out,
                    {"kind": RUNS, "name": out.name, "finished": True, "parts": [p.name for p in jobs_by_directory]},
                )
        except duckdb.OperationalError as error:
            reason = str(error).splitlines()[0]
            raise OutputError(
                f"{_source_names(sources)}: needs more room than {folder} has ({reason}); set TMPDIR"
            ) from error
        finally:
            con.close()
    return runs_by_directory


def import_atomically(
    out: Path, sources: Sequence[str], overwrite: bool = False, keep_names: bool = False
) -> dict[Path, Run]:
    """Import files and URLs into run directories, which appear when the import is complete, or not at all.

    Args:
        out: directory to write, as in `import_into`.
        sources: files and URLs that importers recognise.
        overwrite: replace an existing run.
        keep_names: as in `import_into`.

    Raises:
        TraceError, PluginError, OutputError: as `import_into` and `xsp.rundir.create`; nothing was written.
    """
    out = out.expanduser().absolute()
    staging = atomic.temporary_path(out)
    try:
        staging.mkdir(parents=True)
        staged_runs = import_into(staging, sources, keep_names, out.name)
        with rundir.runs_directory(out, overwrite):
            atomic.move_into_place(staging, out, flush=False)
    except OSError as error:
        raise OutputError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {out / directory.relative_to(staging): run for directory, run in staged_runs.items()}


def _source_names(sources: Sequence[str]) -> str:
    return ", ".join(map(contract.without_credentials, sources))


def _display_name(source: str) -> str:
    """Return the name of a source in `run.json`: for a file its name without folders, for a URL only the trace id."""
    return Path(contract.without_credentials(source)).name


def with_losses(run: Run, reports: Sequence[tuple[str, Losses]], duplicates: int) -> Run:
    """Return a run with the losses of its sources: counts under `imported`, sentences among the notes.

    Args:
        run: the run of the spans.
        reports: name and losses of each source; the names have neither folders nor credentials.
        duplicates: number of spans that were read twice.
    """
    sources = [{"source": name, **losses.report()} for name, losses in reports]
    texts = [f"{name}: {text}" for name, losses in reports for text in losses.sentences()]
    return with_notes(run | {"imported": {"sources": sources, "doubled": duplicates}}, texts, duplicates)
