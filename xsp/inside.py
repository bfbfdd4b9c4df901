"""Files of a directory that somebody else may have made, such as a run or a result: how every one of them is opened.

A file there may be a link to something else, a pipe that never ends, a device, or larger than memory. So a file is
opened component by component below its directory, without following a link, without waiting, and it is read only if the
open descriptor belongs to a plain file of limited size. What changes between the check and the opening makes it fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

LINK = "a link that leads out of its directory"
NOT_PLAIN = "not a plain file"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_file(root: Path, file: Path, most_bytes: int) -> BinaryIO:
    """Open a file for reading.

    Args:
        root: the directory that the file must lie in; it may itself be a link, or lie under one.
        file: its path, which begins with that of the directory; a link is followed if it stays in the directory.
        most_bytes: its maximum size.

    Raises:
        OSError: there is no such file, it cannot be opened, it lies outside the directory, it is not a plain file, or
            it is larger; `strerror` says which.
    """
    real_root, target = _resolved(root), _resolved(file)
    if real_root not in target.parents:
        raise OSError(errno.EXDEV, LINK, str(file))
    descriptor = _open_below(real_root, target, file)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, NOT_PLAIN, str(file))
        if status.st_size > most_bytes:
            raise _size_error(file, most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _open_below(root: Path, target: Path, file: Path) -> int:
    """Return a descriptor of a resolved path, of which no component may have become a link since."""
    *folders, name = target.relative_to(root).parts
    parent = os.open(root, _FOLDER)
    try:
        for folder in folders:
            child = os.open(folder, _FOLDER, dir_fd=parent)
            os.close(parent)
            parent = child
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, NOT_PLAIN, str(file))  # opening a device may already have an effect
        return os.open(name, _FILE, dir_fd=parent)
    finally:
        os.close(parent)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle, before Python 3.13; a zero byte
        raise OSError(errno.ELOOP, "not a path", str(path)) from error


def _size_error(file: Path, most_bytes: int) -> OSError:
    size = f"{most_bytes >> 20} MB" if most_bytes >> 20 else f"{most_bytes >> 10} KB"
    return OSError(errno.EFBIG, f"larger than the {size} that are read", str(file))


def read_bytes(root: Path, file: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: as `open_file`; also if it grows beyond the limit while it is read.
    """
    with open_file(root, file, most_bytes) as content:
        result = content.read(most_bytes + 1)
    if len(result) > most_bytes:
        raise _size_error(file, most_bytes)
    return result


def read_text(root: Path, file: Path, most_bytes: int) -> str:
    """Return the content of a file of UTF-8 text.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not UTF-8.
    """
    return read_bytes(root, file, most_bytes).decode("utf-8")


def read_json(root: Path, file: Path, most_bytes: int) -> Any:
    """Return the value in a file of JSON.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(read_text(root, file, most_bytes))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@contextlib.contextmanager
def engine_path(root: Path, file: Path, most_bytes: int) -> Iterator[Path]:
    """Yield a path through which the table engine reads a file that `open_file` has opened, and no other.

    Raises:
        OSError: as `open_file`.
    """
    with open_file(root, file, most_bytes) as content:
        path = Path("/dev/fd") / str(content.fileno())
        yield path if path.exists() else file


def find_problem(root: Path, file: Path) -> str | None:
    """Return why `open_file` would not open a file, without opening it; None if it would, or if there is none.

    For files that another reader opens by their names, such as the table engine.
    """
    return next(find_problems(root, [file]), (file, None))[1]


def find_problems(root: Path, files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file that `open_file` would refuse, with the reason; a missing file inside is not refused."""
    try:
        real_root = _resolved(root)
    except OSError as error:
        yield root, error.strerror or str(error)
        return
    folders: dict[Path, bool] = {}
    for file in files:
        try:
            if file.parent not in folders:
                parent = _resolved(file.parent)
                folders[file.parent] = parent == real_root or real_root in parent.parents
            if not folders[file.parent]:
                yield file, LINK
                continue
            mode = file.lstat().st_mode
            if stat.S_ISLNK(mode) and real_root not in _resolved(file).parents:
                yield file, LINK
            elif not stat.S_ISREG(file.stat().st_mode if stat.S_ISLNK(mode) else mode):
                yield file, NOT_PLAIN
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield file, getattr(error, "strerror", None) or "not a path"


def is_folder(root: Path, folder: Path) -> bool:
    """Return whether there is a folder, and it lies in the directory: no link leads out of it."""
    try:
        return folder.is_dir() and _resolved(root) in _resolved(folder).parents
    except (OSError, ValueError):
        return False


def is_file(root: Path, file: Path) -> bool:
    """Return whether there is a plain file in the directory."""
    return os.path.lexists(file) and find_problem(root, file) is None and file.is_file()
