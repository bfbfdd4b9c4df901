"""Atomic writing of files: new content is written beside a path, then renamed into place, or discarded.

A killed process leaves half-written files, and folders in the directory for temporary files. Their names contain their
owner: the process, when it started, and where its id is valid. So the next process that writes to the same folder knows
which of them no process owns, and removes them at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_OWNER = r"(?:([0-9a-f]{8})-(\d+)-)?(\d+)"

TEMPORARY_NAME = re.compile(rf"\..+\.{_OWNER}-\d+\.part")
"""Name of a half-written file or folder, with its owner: the place where process ids are valid, when the process
started, and its id. An older xsp wrote only the id."""

_FOLDER_NAME = re.compile(rf"xsp-{_OWNER}-\w+")

STALE_S = 3600
"""Seconds without a change after which a half-written file of another place is removed, if no process has its id. On a
shared disk it may belong to a process of another machine or container, which is unknown here."""

_cleaned_folders: set[Path] = set()


def temporary_path(path: Path) -> Path:
    """Return a hidden path beside `path` for its new content; each thread gets a path of its own.

    Half-written files of earlier processes are removed, see `remove_stale`.

    Raises:
        OSError: `path` is a folder without a name: `.`, `/`.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    remove_stale(path.parent)
    name = os.fsencode(path.name).decode("utf-8", "replace")  # the table engine opens only UTF-8 names
    return path.with_name(f".{name}.{_owner(os.getpid())}-{threading.get_ident()}.part")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for temporary files, which is removed at its end.

    Those of killed processes are removed.
    """
    remove_stale(Path(tempfile.gettempdir()), _FOLDER_NAME)
    return tempfile.TemporaryDirectory(prefix=f"xsp-{_owner(os.getpid())}-", ignore_cleanup_errors=True)


def move_into_place(temporary: Path, path: Path, flush: bool = True) -> None:
    """Rename a file that was written beside a path into its place.

    Args:
        temporary: a file; without `flush`, possibly a folder.
        path: the destination; an existing file is replaced.
        flush: flush the file to disk first, so that a crash of the machine leaves either the old or the new content.

    Raises:
        OSError: the rename failed; an existing file is unchanged.
    """
    if flush:
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def replacing(path: Path, flush: bool = True) -> Iterator[Path]:
    """Yield a path to write to; on exit rename the file to `path` (see `move_into_place`), after an error remove it."""
    temporary = temporary_path(path)
    try:
        yield temporary
        move_into_place(temporary, path, flush)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_stale(folder: Path, name: re.Pattern[str] = TEMPORARY_NAME) -> None:
    """Remove the half-written files of killed processes from a folder; each process checks a folder only once.

    Args:
        folder: the folder.
        name: pattern of their names, with the owner as its groups.
    """
    if folder in _cleaned_folders:
        return
    _cleaned_folders.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match is None:
                continue
            with contextlib.suppress(OSError):  # another process removes it as well
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or _is_owned(match, status.st_mtime):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _is_owned(name: re.Match[str], changed_s: float) -> bool:
    """Return whether a process may still write a file of a name, which was last changed at a time."""
    place, start, process = name[1], name[2], int(name[3])
    if place is not None and place == _place():
        return _start_of(process) == start
    return _is_running(process) or time.time() - changed_s < STALE_S


@lru_cache(maxsize=4)
def _owner(process: int) -> str:
    place, start = _place(), _start_of(process)
    return f"{place}-{start}-{process}" if place and start else str(process)


@lru_cache(maxsize=1)
def _place() -> str | None:
    """Return a hash of where ids of processes are valid: this start of the machine, and namespace; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return hashlib.sha256(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
    except OSError:
        return None


def _start_of(process: int) -> str | None:
    """Return when a process started, in ticks since the machine did; None if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _is_running(process: int) -> bool:
    """Return whether a process has this id; True if unknown."""
    if os.name != "posix":  # on other systems the call below would end the process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
