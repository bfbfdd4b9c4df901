"""The layout of a run directory, and writing that leaves it readable after a kill at any moment.

```
RUN/
  run.json             what was run, where, with which settings, and what is missing; see `xsp.record.description`
  steps/000004.parquet one segment per step, columns as in `xsp.schema.COLUMNS`
  before/000004.parquet what was recorded before the step, if collectors were on already; the same columns
  samples/000000.parquet samples of power, clocks, memory, in portions; columns `xsp.schema.SAMPLE_COLUMNS`
  serving/000000.parquet requests that engines served, and the steps of these engines, in portions; columns of spans
  loop.parquet         a row for each step that ran, recorded or not; columns `xsp.schema.LOOP_COLUMNS`
  loop3.rows           the same rows while the run goes on, as 64-bit numbers; see `xsp.store.loop`
  merged.parquet       the leveled steps merged into one true step; written when the run ends
  progress.json        the progress of the run, while it goes on; see `xsp.record.progress`
  delivery.json        which steps were delivered to which endpoint; see `xsp.otlp.delivery`
  rank-0000/           a run for each process of a distributed program
  job.txt              the job of these ranks, if no launcher of xsp states it; see `xsp.record.output`
  arrived/             what `xsp serve` received and has not put in order yet
  sections/NAME.json   sections of the report from other writers; see `xsp.sections`
  serialised/          a re-run with one thing at a time, where parents were ambiguous (`xsp run --resolve`)
```

Each file is written to a temporary path, flushed to disk and renamed, so an existing file is complete. `run.json`
has `"finished": false` until the end. A directory without steps whose `run.json` names `parts` is a set of runs
(a sweep, or a program that was run once per level).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xsp import atomic, inside
from xsp.errors import OutputError, TraceError, UnwritableError
from xsp.run import RANKS, Run

FORMAT = 1
MAX_RUN_BYTES = 256 << 20
"""Largest `run.json` in bytes; its checksums take some 60 bytes per step."""

MAX_TABLE_BYTES = 64 << 30
"""Largest table of which a checksum is computed; a file of holes may claim any size."""

RUN_FILE = "run.json"
STEPS = "steps"
BEFORE = "before"
SAMPLES = "samples"
SERVING = "serving"
"""Folder with the requests and the steps of engines, see `xsp.serving`."""

INBOX = "arrived"
"""Folder with what a receiver accepted and has not put in order yet (`xsp.ingest`)."""

MERGED_FILE = "merged.parquet"
LOOP_FILE = "loop.parquet"
LOOP_ROWS, LOOP_ROWS_BEFORE = "loop3.rows", "loop2.rows"
"""The name changes with the columns, because the file itself does not state them; the second one is of earlier
versions, without times of phases."""

SERIALISED = "serialised"
DELIVERY_FILE = "delivery.json"
JOB_FILE = "job.txt"
SECTIONS = "sections"
"""Folder with sections of the report from other writers (`xsp.sections`)."""

PATIENCE_S = 5.0
"""Seconds to wait for the storing process of a killed program, which still writes the steps that it has received."""


def create(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Create an empty run directory.

    Args:
        path: the directory; missing parents are created.
        overwrite: remove an existing run. Anything that is not a run of xsp is never removed.

    Returns:
        The absolute path.

    Raises:
        OutputError: the path is a file, or a directory that is not empty.
        UnwritableError: the disk cannot be written, or another process is writing a run there.
    """
    run = Path(path).expanduser().absolute()
    try:
        if run.exists():
            if not run.is_dir():
                raise OutputError(f"{run}: a file is in the way; choose another output directory")
            if any(entry.name != STEPS for entry in run.iterdir()) or any((run / STEPS).glob("*")):
                if not (run / RUN_FILE).is_file():
                    raise OutputError(f"{run}: the directory is not empty and not a run of xsp's; choose another one")
                _make_room(run, overwrite)
        (run / STEPS).mkdir(parents=True, exist_ok=True)
    except TraceError as error:
        raise OutputError(f"{error}; nothing was removed: choose another directory") from error
    except OSError as error:
        raise UnwritableError(f"{run}: cannot be written ({error.strerror}); choose another directory") from error
    return run


def _make_room(run: Path, overwrite: bool) -> None:
    """Clear a directory that holds a run, if `overwrite` is set and no process writes there; else raise."""
    directory = _wait_for_lock(run) if overwrite else lock(run)
    if directory is None:
        raise _locked_error(run)
    try:
        if not overwrite:
            raise OutputError(
                f"{run}: a run is there already; choose another directory, or say overwrite=True "
                "(--overwrite on the command line)"
            )
        _clear(run)
        (run / STEPS).mkdir(exist_ok=True)
    finally:
        os.close(directory)


@contextlib.contextmanager
def runs_directory(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Create a directory for several runs, and hold it while they are written.

    Raises:
        OutputError: as `create` and `reserve`.
    """
    out = create(path, overwrite)
    with unlock_after_runs(out, reserve(out)):
        yield out


@contextlib.contextmanager
def unlock_after_runs(out: Path, directory: int) -> Iterator[Path]:
    """Unlock a directory of `create` after several runs were written to it; after an error, remove it if none was."""
    try:
        (out / STEPS).rmdir()
        yield out
    except BaseException:
        if not any(entry.name != RUN_FILE for entry in out.iterdir()):
            (out / RUN_FILE).unlink(missing_ok=True)
            _remove_empty(out)
        raise
    finally:
        os.close(directory)


def reserve(run: Path) -> int:
    """Reserve a new run directory for this process until it ends: no other process can write to it or replace it.

    Returns:
        The descriptor that holds the lock until it is closed. On a file system without locks nothing is reserved.

    Raises:
        UnwritableError: another process holds it, or has written a run there since it was created.
    """
    directory = lock(run)
    if directory is None:
        raise _locked_error(run)
    if (run / RUN_FILE).exists() or segments(run):
        os.close(directory)
        raise UnwritableError(f"{run}: another process has just written a run there; choose another directory")
    return directory


def _locked_error(run: Path) -> UnwritableError:
    return UnwritableError(
        f"{run}: another process is writing a run there; wait until it has ended, or choose another directory"
    )


def _wait_for_lock(run: Path) -> int:
    """Wait until no process writes to a run, and return the descriptor that locks it.

    Raises:
        UnwritableError: a process still writes after `PATIENCE_S`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (directory := lock(run)) is None:
        if time.monotonic() > deadline:
            raise _locked_error(run)
        time.sleep(0.05)
    return directory


def lock(folder: Path) -> int | None:
    """Return a descriptor that locks a directory until it is closed; None if another process holds the lock."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return None
    except OSError:  # this file system has no locks
        pass
    return directory


def _clear(run: Path) -> None:
    """Remove the files that xsp wrote, and nothing else."""
    ranks = [part.name for part in rank_parts(run)]
    for part in dict.fromkeys([*read_run(run).parts, *ranks, SERIALISED]):
        child = (run / part).resolve()
        if child.parent == run.resolve() and (child / RUN_FILE).is_file():
            with contextlib.suppress(TraceError):  # keep a part that cannot be read
                _clear(child)
                _remove_empty(child)
    for folder in (run / STEPS, run / BEFORE, run / SAMPLES, run / SERVING, run / INBOX):
        if not folder.is_symlink():
            for file in [*folder.glob("[0-9]*.parquet"), *folder.glob(".*.part")]:
                file.unlink(missing_ok=True)
            _remove_empty(folder)
    if not (run / SECTIONS).is_symlink():
        for file in [*(run / SECTIONS).glob("*.json"), *(run / SECTIONS).glob(".*.part")]:
            file.unlink(missing_ok=True)
        _remove_empty(run / SECTIONS)
    own = (RUN_FILE, MERGED_FILE, LOOP_FILE, LOOP_ROWS, LOOP_ROWS_BEFORE, DELIVERY_FILE, JOB_FILE)
    for name in (*own, "progress.json", "report.html"):
        (run / name).unlink(missing_ok=True)
    for file in [
        entry for entry in run.iterdir() if atomic.TEMPORARY_NAME.fullmatch(entry.name) and not entry.is_dir()
    ]:
        file.unlink(missing_ok=True)


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def write_run(run: Path, content: Mapping[str, Any]) -> None:
    """Write `run.json` atomically; bytes of arguments or other texts that are not UTF-8 become question marks."""
    text = json.dumps({"format": FORMAT, **Run.of(content).content}, indent=2, sort_keys=False, ensure_ascii=False)
    write_atomically(run / RUN_FILE, text.encode("utf-8", "replace"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file to a temporary path, flush it to disk and rename it.

    Raises:
        UnwritableError: it cannot be written; an existing file is unchanged.
    """
    try:
        with atomic.replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written ({error.strerror})") from error


def read_run(run: Path) -> Run:
    """Read `run.json`.

    Raises:
        TraceError: it is missing, damaged, or from a newer version of xsp.
    """
    path = run / RUN_FILE
    if not run.exists():
        raise TraceError(f"{run}: there is no such file or directory")
    if not os.path.lexists(path):
        raise TraceError(
            f"{run}: not a run directory, {RUN_FILE} is missing; give the directory that --out named; traces of other "
            f"tools become one by `xsp import {run} -o RUN`"
        )
    try:
        return parse_run(inside.read_text(run, path, MAX_RUN_BYTES), str(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise TraceError(
            f"{path}: damaged ({error}); the steps in {run / STEPS} can still be loaded one by one"
        ) from error


def parse_run(text: str, label: str) -> Run:
    """Return the run that the text of a `run.json` describes.

    Args:
        text: JSON.
        label: path of the file, for messages.

    Raises:
        TraceError: a newer xsp wrote it, or a field that lists the content of the directory is damaged.
        ValueError: the text does not describe a run.
    """
    try:
        content = json.loads(text)
        version = content["format"]
        run = Run.of(content)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if type(version) is not int or version > FORMAT:
        raise TraceError(f"{label}: written in format {version}, this xsp reads up to {FORMAT}; install a newer xsp")
    damaged = [name for name in _LAYOUT_FIELDS if name in run.misfits]
    if damaged or any("\0" in name for name in run.parts):
        raise TraceError(f"{label}: damaged ({', '.join(damaged) or 'parts'}: not what xsp writes there)")
    return run


_LAYOUT_FIELDS = ("parts", "ranks", "checksums")
"""Fields that list the content of the directory, and tell whether it is intact."""


def check_inside(run: Path, files: Iterable[Path]) -> None:
    """Check that files of a run are plain files inside it: anything may be in a directory that somebody else made.

    Args:
        run: the run directory; it may itself be a link, or lie under one.
        files: files of the run, which the table engine opens by their names; missing ones are skipped.

    Raises:
        TraceError: a file is a link, or lies behind a link, that leads out of the directory, or is not a plain file.
    """
    for file, problem in inside.find_problems(run, files):
        raise TraceError(f"{file}: {problem}; put a copy in its place")


def read_job(job: Path) -> Run:
    """Read the `run.json` of a run or of a distributed program; of the latter, also those of all its ranks.

    A program that was started by torchrun alone leaves the runs of its ranks, and no `run.json` above them.

    Returns:
        As `read_run`; for a distributed program, `ranks` has the `run.json` of each rank.

    Raises:
        TraceError: as `read_run`.
    """
    parts = rank_parts(job)
    run = read_run(job) if (job / RUN_FILE).is_file() or not parts else Run.of({"kind": RANKS})
    if not run.is_job:
        return run
    ranks = [read_run(part) for part in parts]
    return job_of_ranks(run, ranks) | {"parts": [part.name for part in parts]}


def job_of_ranks(job: Run, ranks: Sequence[Run]) -> Run:
    """Return the run of several ranks: the fields of the first rank, overridden by the job's own `run.json`."""
    first_fields = {
        name: value for name, value in (ranks[0].items() if ranks else ()) if name not in ("finished", "notes")
    }
    return Run.of(
        {
            **first_fields,
            **job.content,
            "ranks": ranks,
            "finished": job.finished is not False and all(rank.finished for rank in ranks),
            "notes": unique(dict(note) for rank in ranks for note in rank.notes),
        }
    )


def unique(items: Iterable[Any]) -> list[Any]:
    """Return the items in order, without repetitions."""
    unique: list[Any] = []
    for item in items:
        if item not in unique:
            unique.append(item)
    return unique


def segment(run: Path, step: int) -> Path:
    """Return the path of a step's segment."""
    return run / STEPS / f"{step:06d}.parquet"


def segments(run: Path) -> list[Path]:
    """Return the paths of the existing segments, in the order of their steps.

    Raises:
        TraceError: as `numbered_tables`.
    """
    return numbered_tables(run / STEPS)


def before(run: Path, step: int) -> Path:
    """Return the path of what was recorded before a step."""
    return run / BEFORE / f"{step:06d}.parquet"


def befores(run: Path) -> list[Path]:
    """Return the existing paths of `before`, in the order of their steps.

    Raises:
        TraceError: as `numbered_tables`.
    """
    return numbered_tables(run / BEFORE)


def portion(run: Path, number: int) -> Path:
    """Return the path of a portion of the samples."""
    return run / SAMPLES / f"{number:06d}.parquet"


def portions(run: Path) -> list[Path]:
    """Return the paths of the existing portions of samples, in the order of time.

    Raises:
        TraceError: as `numbered_tables`.
    """
    return numbered_tables(run / SAMPLES)


def numbered_tables(folder: Path) -> list[Path]:
    """Return the numbered tables of a folder of a run in their order; from a million on, the numbers have more digits.

    Copies that a file manager made beside them (`000004 2.parquet`) are left out: their rows would count twice. All of
    them can be given to the table engine, which opens them by their names.

    Raises:
        TraceError: one is not a plain file, or a link leads out of its directory, see `check_inside`.
    """
    names, links = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _TABLE_NAME.fullmatch(entry.name):
                    names.append(entry.name)
                    if not entry.is_file(follow_symlinks=False):
                        links.append(folder / entry.name)
    except OSError:
        return []
    names.sort(key=lambda name: (len(name), name))
    files = [folder / name for name in names]
    check_inside(folder.parent, [*files[:1], *links])  # the first one also stands for the folder
    return files


_TABLE_NAME = re.compile(r"[0-9]+\.parquet")


def has_waiting_spans(run: Path) -> bool:
    """Return whether a directory holds received spans that are not in order yet."""
    return any((run / INBOX).glob("*.parquet"))


def is_run_directory(folder: Path) -> bool:
    """Return whether a folder is a run directory, complete or not, or that of a distributed program."""
    return any((folder / name).exists() for name in (RUN_FILE, STEPS, MERGED_FILE)) or bool(rank_parts(folder))


def checksum(run: Path, file: Path) -> str:
    """Return the CRC-32 of a file of a run, in hexadecimal: it detects damage much faster than reading the tables.

    Raises:
        OSError: the file cannot be opened, see `xsp.inside.open_file`.
    """
    crc = 0
    with inside.open_file(run, file, MAX_TABLE_BYTES) as content:
        while chunk := content.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def checksums(run: Path) -> dict[str, str]:
    """Return the checksums of the tables in a run directory, in the form of `run.json`."""
    files = [*segments(run), run / MERGED_FILE]
    return {str(file.relative_to(run)): checksum(run, file) for file in files if file.is_file()}


def rank_name(rank: int) -> str:
    """Return the name of a rank's run in the directory of its job."""
    return f"rank-{rank:04d}"


def rank_parts(run: Path) -> list[Path]:
    """Return the directories of the ranks' runs in a job's directory, in the order of their ranks."""
    parts = [part for part in run.glob("rank-*") if (part / RUN_FILE).is_file()]
    return sorted(parts, key=lambda part: (len(part.name), part.name))


def remove_ranks(job: Path, ranks: int) -> list[str]:
    """Remove the runs of ranks that a job no longer has, because it was started again with fewer.

    Args:
        job: the job's directory.
        ranks: number of its ranks now.

    Returns:
        The names of the runs that were removed; one that is still written, or that cannot be removed, stays.
    """
    removed = []
    for part in rank_parts(job):
        number = part.name.removeprefix("rank-")
        if not number.isdecimal() or int(number) < ranks:
            continue
        with contextlib.suppress(OutputError, TraceError, OSError):
            directory = _wait_for_lock(part)
            try:
                _clear(part)
            finally:
                os.close(directory)
            _remove_empty(part)
            removed.append(part.name)
    return removed
