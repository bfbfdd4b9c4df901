"""Files that appear in one piece: what is written beside a path takes its place at once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path


def place(path: Path) -> Path:
    """Return where to write what is to become `path`: beside it, hidden, and this thread's own.

    Raises:
        OSError: it is a folder without a name of its own: `.`, `/`.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    name = os.fsencode(path.name).decode("utf-8", "replace")  # the table engine opens no other names
    return path.with_name(f".{name}.{os.getpid()}-{threading.get_ident()}.part")


def put(beside: Path, path: Path, flush: bool = True) -> None:
    """Put what was written beside a path into its place.

    Args:
        beside: a file, or without `flush` a folder.
        path: what was there is replaced.
        flush: to the disk first, so that a crash of the machine leaves the one or the other.

    Raises:
        OSError: it cannot be; what was there before is still there.
    """
    if flush:
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(beside, path)


@contextlib.contextmanager
def written(path: Path, flush: bool = True) -> Iterator[Path]:
    """Give a place to write to; what is there in the end becomes `path` (see `put`). After an error nothing is left."""
    beside = place(path)
    try:
        yield beside
        put(beside, path, flush)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
