"""The layout of a run directory, and how to write into it so that a kill at any moment leaves it readable.

```
RUN/
  run.json             what was run, where, with which settings, and what is missing; see `xsp.record.description`
  steps/000004.parquet one segment a step, columns as in `xsp.schema.COLUMNS`
  samples/000000.parquet power, clocks, memory meanwhile, in portions; columns `xsp.schema.SAMPLE_COLUMNS`
  loop.parquet         a row for each step that ran, recorded or not; columns `xsp.schema.LOOP_COLUMNS`
  loop2.rows           the same while the run goes on: 64-bit numbers, see `xsp.store.loop`
  merged.parquet       the leveled steps merged into one true step; written when the run ends
  progress.json        how far the run is, while it goes on; see `xsp.record.progress`
  delivery.json        which steps were delivered to which endpoint; see `xsp.otlp.delivery`
  rank-0000/           a run for each process of a distributed program
  job.txt              which job's ranks these are, where no launcher of xsp's says it; see `xsp.record.output`
  arrived/             what `xsp serve` received and has not put in order yet
  sections/NAME.json   sections of the report that others wrote; see `xsp.sections`
  serialised/          a re-run with one thing at a time, where parents were ambiguous (`xsp run --resolve`)
```

Each file is written beside its place, flushed to the disk, and renamed; so a file that is there is whole.
`run.json` says `"finished": false` until the end. A directory whose `run.json` names `parts` instead of
having steps is a set of runs (a sweep, or a program that was run once per level).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xsp import atomic
from xsp.errors import OutputError, TraceError, UnwritableError
from xsp.run import RANKS, Run

FORMAT = 1
MOST_OF_A_RUN = 256 << 20
"""Bytes of a `run.json`; its checksums are some 60 for each step."""

RUN_FILE = "run.json"
STEPS = "steps"
SAMPLES = "samples"
WAITING = "arrived"
"""Folder with what a receiver took and has not put in order yet (`xsp.ingest`)."""

MERGED_FILE = "merged.parquet"
LOOP_FILE = "loop.parquet"
LOOP_ROWS = "loop2.rows"
"""Its name changes with the columns, which the file itself does not tell."""

SERIALISED = "serialised"
DELIVERY_FILE = "delivery.json"
JOB_FILE = "job.txt"
SECTIONS = "sections"
"""Folder with sections of the report that others wrote (`xsp.sections`)."""

PATIENCE_S = 5.0
"""How long to wait for a process whose program was killed, and which still writes what it was given."""


def create(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Make an empty run directory.

    Args:
        path: where; missing parents are made.
        overwrite: remove a run that is there already. What is no run of xsp's is never removed.

    Returns:
        The absolute path.

    Raises:
        OutputError: something is there.
        UnwritableError: the disk refuses, or another process is writing a run there.
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
    """Clear a directory that holds a run, if that is wanted and nobody writes there."""
    directory = _free(run) if overwrite else lock(run)
    if directory is None:
        raise _held_by_another(run)
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
def created_for_several(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Make a directory of several runs, and hold it while they are written.

    Raises:
        OutputError: as `create` and `hold`.
    """
    out = create(path, overwrite)
    with several(out, hold(out)):
        yield out


@contextlib.contextmanager
def several(out: Path, directory: int) -> Iterator[Path]:
    """Let runs be written into a directory that `create` made and `hold` holds; without any it is gone again."""
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


def hold(run: Path) -> int:
    """Keep a new run directory for this process until it ends: no other one then writes to it, or replaces it.

    Returns:
        The descriptor that holds it until it is closed. A file system without locks holds nothing.

    Raises:
        UnwritableError: another process holds it, or has written a run there since it was made.
    """
    directory = lock(run)
    if directory is None:
        raise _held_by_another(run)
    if (run / RUN_FILE).exists() or segments(run):
        os.close(directory)
        raise UnwritableError(f"{run}: another process has just written a run there; choose another directory")
    return directory


def _held_by_another(run: Path) -> UnwritableError:
    return UnwritableError(
        f"{run}: another process is writing a run there; wait until it has ended, or choose another directory"
    )


def _free(run: Path) -> int:
    """Wait until no process writes to a run, and return the descriptor that locks it.

    Raises:
        UnwritableError: one still does.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (directory := lock(run)) is None:
        if time.monotonic() > deadline:
            raise _held_by_another(run)
        time.sleep(0.05)
    return directory


def lock(folder: Path) -> int | None:
    """Lock a directory; None if another process has locked it. The lock ends with the descriptor, or its process."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return None
    except OSError:  # this file system locks nothing
        pass
    return directory


def _clear(run: Path) -> None:
    """Remove what xsp wrote, and nothing else."""
    ranks = [part.name for part in rank_parts(run)]
    for part in dict.fromkeys([*read_run(run).parts, *ranks, SERIALISED]):
        child = (run / part).resolve()
        if child.parent == run.resolve() and (child / RUN_FILE).is_file():
            with contextlib.suppress(TraceError):  # a part that cannot be read stays
                _clear(child)
                _remove_empty(child)
    for folder in (run / STEPS, run / SAMPLES, run / WAITING):
        if not folder.is_symlink():
            for file in [*folder.glob("[0-9]*.parquet"), *folder.glob(".*.part")]:
                file.unlink(missing_ok=True)
            _remove_empty(folder)
    if not (run / SECTIONS).is_symlink():
        for file in [*(run / SECTIONS).glob("*.json"), *(run / SECTIONS).glob(".*.part")]:
            file.unlink(missing_ok=True)
        _remove_empty(run / SECTIONS)
    for name in (RUN_FILE, MERGED_FILE, LOOP_FILE, LOOP_ROWS, DELIVERY_FILE, JOB_FILE, "progress.json", "report.html"):
        (run / name).unlink(missing_ok=True)


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def write_run(run: Path, content: Mapping[str, Any]) -> None:
    """Write `run.json` in one piece; bytes of an argument, or of another text, that are no UTF-8 are question marks."""
    text = json.dumps({"format": FORMAT, **Run.of(content).content}, indent=2, sort_keys=False, ensure_ascii=False)
    write_whole(run / RUN_FILE, text.encode("utf-8", "replace"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, flush it to the disk and rename it into place.

    Raises:
        UnwritableError: it cannot be written; what was there before is still there.
    """
    try:
        with atomic.written(path) as beside:
            beside.write_bytes(content)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written ({error.strerror})") from error


def read_run(run: Path) -> Run:
    """Read `run.json`.

    Raises:
        TraceError: it is missing, damaged, or of a version of xsp that is newer than this one.
    """
    path = run / RUN_FILE
    if not run.exists():
        raise TraceError(f"{run}: there is no such file or directory")
    if not path.is_file():
        raise TraceError(f"{run}: not a run directory, {RUN_FILE} is missing; give the directory that --out named")
    try:
        return parsed(_text(path), str(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise TraceError(
            f"{path}: damaged ({error}); the steps in {run / STEPS} can still be loaded one by one"
        ) from error


def parsed(text: str, place: str) -> Run:
    """Return what the text of a `run.json` says.

    Args:
        text: JSON.
        place: where it stands, for messages.

    Raises:
        TraceError: a newer xsp wrote it, or a field that tells what else is in the directory is damaged.
        ValueError: it is no description of a run.
    """
    try:
        content = json.loads(text)
        found = content["format"]
        described = Run.of(content)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if type(found) is not int or found > FORMAT:
        raise TraceError(f"{place}: written in format {found}, this xsp reads up to {FORMAT}; install a newer xsp")
    wrong = [name for name in _RELIED_ON if name in described.misfits]
    if wrong or any("\0" in name for name in described.parts):
        raise TraceError(f"{place}: damaged ({', '.join(wrong) or 'parts'}: not what xsp writes there)")
    return described


_RELIED_ON = ("parts", "ranks", "checksums")
"""Fields that tell what else is in the directory, and whether it is whole."""


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_OF_A_RUN:
        raise ValueError(f"larger than the {MOST_OF_A_RUN >> 20} MB that are read")
    return path.read_text(encoding="utf-8")


def check_inside(run: Path, files: Iterable[Path]) -> None:
    """Refuse files of a run that are elsewhere: a link may lead out of a directory that somebody else made.

    Args:
        run: the run directory; it may itself be a link, or lie under one.
        files: in it.

    Raises:
        TraceError: one of them is, or lies behind, a link to what is outside.
    """
    inside = run.resolve()
    behind: dict[Path, bool] = {}
    for file in files:
        if file.parent not in behind:
            behind[file.parent] = not file.parent.resolve().is_relative_to(inside)
        if behind[file.parent] or (file.is_symlink() and not file.resolve().is_relative_to(inside)):
            raise TraceError(f"{file}: a link that leads out of the run directory; put a copy in its place")


def read_job(job: Path) -> Run:
    """Read `run.json` of a run or of a distributed program; of the latter, what all its ranks say.

    A program that was started by torchrun alone leaves runs of its ranks and nothing above them.

    Returns:
        As `read_run`; with `ranks`, the `run.json` of each, if it was several.

    Raises:
        TraceError: as `read_run`.
    """
    parts = rank_parts(job)
    own = read_run(job) if (job / RUN_FILE).is_file() or not parts else Run.of({"kind": RANKS})
    if not own.is_job:
        return own
    ranks = [read_run(part) for part in parts]
    return of_ranks(own, ranks) | {"parts": [part.name for part in parts]}


def of_ranks(own: Run, ranks: Sequence[Run]) -> Run:
    """Return the run that several ranks are: the first speaks for all, and what stands above them counts more."""
    first = {name: value for name, value in (ranks[0].items() if ranks else ()) if name not in ("finished", "notes")}
    return Run.of(
        {
            **first,
            **own.content,
            "ranks": ranks,
            "finished": own.finished is not False and all(rank.finished for rank in ranks),
            "notes": different(dict(note) for rank in ranks for note in rank.notes),
        }
    )


def different(items: Iterable[Any]) -> list[Any]:
    """Return items in their order, each once."""
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def segment(run: Path, step: int) -> Path:
    """Return the path of a step's segment."""
    return run / STEPS / f"{step:06d}.parquet"


def segments(run: Path) -> list[Path]:
    """Return the paths of the segments that are there, in the order of their steps."""
    return sorted((run / STEPS).glob("[0-9]*.parquet"))


def portion(run: Path, number: int) -> Path:
    """Return the path of a portion of the samples."""
    return run / SAMPLES / f"{number:06d}.parquet"


def portions(run: Path) -> list[Path]:
    """Return the paths of the portions of samples that are there, in the order of time."""
    return sorted((run / SAMPLES).glob("[0-9]*.parquet"))


def is_one(folder: Path) -> bool:
    """Return whether a folder is a run directory, whole or not, or one of a distributed program."""
    return any((folder / name).exists() for name in (RUN_FILE, STEPS, MERGED_FILE)) or bool(rank_parts(folder))


def checksum(file: Path) -> str:
    """Return the CRC-32 of a file, in hexadecimal: it tells damage, in much less time than reading its tables."""
    value = 0
    with open(file, "rb") as content:
        while piece := content.read(1 << 22):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def checksums(run: Path) -> dict[str, str]:
    """Return the checksums of the tables in a run directory, as they stand in `run.json`."""
    files = [*segments(run), run / MERGED_FILE]
    return {str(file.relative_to(run)): checksum(file) for file in files if file.is_file()}


def rank_part(rank: int) -> str:
    """Return the name of a rank's run in the directory of its job."""
    return f"rank-{rank:04d}"


def rank_parts(run: Path) -> list[Path]:
    """Return the runs of the ranks that are in a job's directory, in the order of their ranks."""
    found = [part for part in run.glob("rank-*") if (part / RUN_FILE).is_file()]
    return sorted(found, key=lambda part: (len(part.name), part.name))
