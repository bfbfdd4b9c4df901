"""Atomic writing of files: new content is written beside a path, then renamed into place, or discarded."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def place(path: Path) -> Path:
    """Return a hidden path beside `path` for its new content; each thread gets a path of its own.

    Raises:
        OSError: `path` is a folder without a name: `.`, `/`.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    name = os.fsencode(path.name).decode("utf-8", "replace")  # the table engine opens only UTF-8 names
    return path.with_name(f".{name}.{os.getpid()}-{threading.get_ident()}.part")


def put(beside: Path, path: Path, flush: bool = True) -> None:
    """Rename a file that was written beside a path into its place.

    Args:
        beside: a file; without `flush`, possibly a folder.
        path: the destination; an existing file is replaced.
        flush: flush the file to disk first, so that a crash of the machine leaves either the old or the new content.

    Raises:
        OSError: the rename failed; an existing file is unchanged.
    """
    if flush:
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(beside, path)


@contextlib.contextmanager
def written(path: Path, flush: bool = True) -> Iterator[Path]:
    """Yield a path to write to, and rename the file to `path` on exit (see `put`). An error removes the file."""
    beside = place(path)
    try:
        yield beside
        put(beside, path, flush)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
