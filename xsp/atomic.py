"""Atomic writing of files: new content is written beside a path, then renamed into place, or discarded.

A killed process leaves half-written files. The next process that writes to the same folder removes them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY_NAME = re.compile(r"\..+\.(\d+)-\d+\.part")
"""Name of a half-written file or folder; the first number is the id of the process that writes it."""

STALE_S = 3600
"""Seconds without a change after which a half-written file is removed, if no process has its id. On a shared disk it
may belong to a process of another machine, which is unknown here."""

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
    return path.with_name(f".{name}.{os.getpid()}-{threading.get_ident()}.part")


def move_into_place(temporary: Path, path: Path, flush: bool = True) -> None:
    """Rename a file that was written beside a path into its place.

    Args:
        beside: a file; without `flush`, possibly a folder.
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


def remove_stale(folder: Path) -> None:
    """Remove the half-written files of killed processes from a folder; each process checks a folder only once."""
    if folder in _cleaned_folders:
        return
    _cleaned_folders.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = TEMPORARY_NAME.fullmatch(entry.name)
            if match is None or _is_running(int(match[1])):
                continue
            with contextlib.suppress(OSError):  # another process removes it as well
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < STALE_S:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


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
