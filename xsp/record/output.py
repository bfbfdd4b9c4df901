"""The choice of a run's directory if the requested one is taken.

A second start of a program must not fail or lose a run: it uses the next free name beside the requested one,
`runs/train-2`, and reports it on stderr. If a directory that is named on a command line is taken, it is refused,
because the user will use that name in the next command.

Ranks whose launcher is not xsp's find a directory that belongs to their job alone: the first rank writes a mark of the
job into it, and ranks that find the mark of another job, or other files, try the next name.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from xsp import identity, inside, rundir
from xsp.errors import OutputError, UnwritableError
from xsp.record.settings import Settings
from xsp.record.terminal import say

_T = TypeVar("_T")

MAX_MARK_BYTES = 1 << 16
PATIENCE_S = 1.0
"""Seconds for which a mark may be empty: the process that made it is about to write it."""

JOB_VARIABLE = "XSP_JOB"
"""Environment variable of processes that a launcher of xsp started: each is a rank of a job, even a single one."""

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
"""Variables that are equal in all ranks of a job and differ between jobs."""


def claim(
    path: str | os.PathLike[str], start: Callable[[Path], _T], *, overwrite: bool = False, next_free: bool = False
) -> tuple[Path, _T]:
    """Make a run directory for this process, for a rank inside the directory of its job, and start its holder.

    Args:
        path: the requested directory.
        start: takes the directory and returns the object that holds it from then on (see `xsp.rundir.reserve`).
        overwrite: replace an existing run.
        next_free: if the directory is taken and not to be replaced, use the next free name beside it.

    Returns:
        The directory, absolute, and what `start` returned.

    Raises:
        OutputError: the directory is taken, and `next_free` is not set.
        UnwritableError: the disk refuses; or another process is writing there, and `next_free` is not set.
    """
    process = identity.of_this_process()
    part = part_of(process)
    job = _job(process) if part and next_free else None
    # a rank that torchrun, started by xsp, has started again after a failure
    if not next_free and (JOB_VARIABLE in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"):
        if process.local_rank == 0 and (stale := rundir.remove_ranks(Path(path).expanduser(), process.world_size)):
            say(
                f"the job was restarted with {process.world_size} ranks: "
                f"removed {', '.join(stale)} of the previous attempt"
            )
        if (Path(path) / part / rundir.RUN_FILE).exists():
            say(f"rank {process.rank} was restarted: its run replaces that of the previous attempt")
            overwrite = True
    return _claim(Path(path), part, job, start, overwrite, next_free, reports_choice=process.rank == 0)


@contextlib.contextmanager
def claim_for_runs(settings: Settings) -> Iterator[Path]:
    """Make a directory for several runs that other processes write, and lock it while they do.

    Raises:
        OutputError: as `claim`.
    """
    claimed = _claim(settings.directory, "", None, rundir.reserve, settings.overwrite, settings.next_free)
    with rundir.unlock_after_runs(*claimed) as out:
        yield out


def _claim(
    path: Path,
    part: str,
    job: str | None,
    start: Callable[[Path], _T],
    overwrite: bool,
    next_free: bool,
    reports_choice: bool = True,
) -> tuple[Path, _T]:
    target = path.expanduser().absolute()
    others = (target.with_name(f"{target.name}-{number}") for number in itertools.count(2)) if next_free else ()
    for directory in itertools.chain((target,), others):
        run = directory / part
        try:
            if job is not None and not _belongs_to_job(directory, job, overwrite):
                continue
            claimed = rundir.create(run, overwrite), start(run)
        except OutputError:
            if not (next_free and _is_occupied(run)):
                raise
            continue
        if directory != target and reports_choice:
            say(
                f"{display_path(target)} is taken: this run goes to {display_path(directory)} "
                "(--overwrite, overwrite=True: replace it)"
            )
        return claimed
    raise AssertionError("names do not end")


def part_of(process: identity.Identity) -> str:
    """Return the name of this process's run in the directory of its job; empty for a process on its own."""
    return rundir.rank_name(process.rank) if is_one_of_several() else ""


def is_one_of_several() -> bool:
    """Return whether this is a process of a distributed program."""
    # a single process under torchrun is a job too: xsp's launcher writes its own run.json into the directory
    variables = "TORCHELASTIC_RUN_ID", JOB_VARIABLE
    return identity.of_this_process().world_size > 1 or any(name in os.environ for name in variables)


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _is_occupied(directory: Path) -> bool:
    """Return whether a run cannot be written because of existing files or another writer, not because of the disk."""
    try:
        if not directory.is_dir():
            return directory.exists() or directory.is_symlink()
        if any(entry.name != rundir.STEPS for entry in directory.iterdir()) or any(
            (directory / rundir.STEPS).glob("*")
        ):
            return True
        descriptor = rundir.lock(directory)
    except OSError:
        return False
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


# --- the ranks of a job -----------------------------------------------------------------------------------


def _job(process: identity.Identity) -> str:
    """Return a digest that is equal in all ranks of this job and different in others, as far as variables allow."""
    values = [
        process.trace_id if process.shared else "",
        str(process.world_size),
        *(os.environ.get(name, "") for name in _JOB_VARIABLES),
    ]
    return hashlib.blake2b(os.fsencode("\n".join(values)), digest_size=16).hexdigest()


def _belongs_to_job(directory: Path, job: str, overwrite: bool) -> bool:
    """Return whether a directory is this job's, by its mark; an empty directory gets the mark.

    Raises:
        UnwritableError: the disk refuses.
    """
    mark = directory / rundir.JOB_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if overwrite:
            rundir.write_atomically(mark, os.fsencode(job))
            return True
        while not mark.exists():
            if any(directory.iterdir()):
                if mark.exists():
                    break
                return False
            with contextlib.suppress(FileExistsError), open(mark, "x", encoding="ascii") as file:
                file.write(job)
        deadline = time.monotonic() + PATIENCE_S
        while not (content := inside.read_bytes(mark.parent, mark, MAX_MARK_BYTES)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return content.decode("ascii", "replace") == job
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        raise UnwritableError(f"{directory}: cannot be written ({error.strerror}); choose another directory") from error
