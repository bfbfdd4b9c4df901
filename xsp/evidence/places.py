"""The files that may be read: those named at the start, and the runs in folders named at the start.

Paths are resolved through all links, so that neither `..` nor a link leads outside the named places.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from xsp import rundir
from xsp.errors import TraceError, UsageError, nearest
from xsp.ingest.load import SETS

MOST_LISTED = 200
"""Maximum number of runs that are listed."""

MOST_FILES = 100_000
"""Maximum number of files that are checked before a run is loaded."""

_TRACES = (".json", ".json.gz", ".parquet", ".sqlite", ".nsys-rep", ".jsonl", ".pb", ".pickle")


class Place(NamedTuple):
    """A run or a trace that may be read."""

    name: str
    """Its name for clients."""
    path: Path
    """Its path, with all links resolved."""


class Places:
    """The files and folders named at the start."""

    def __init__(self, named: Sequence[str]) -> None:
        """Resolve each path now, so that later changes of links have no effect.

        Raises:
            UsageError: a path is a URL, or does not exist.
        """
        self._roots: dict[str, Path] = {}
        for each in named:
            if "://" in each:
                raise UsageError(
                    f"{each}: give a path; `xsp import {shlex.quote(each)} -o runs/one` makes a run of what lies "
                    "elsewhere"
                )
            place = Path(each).expanduser()
            if not place.exists():
                raise UsageError(f"{each}: there is no such file or directory")
            self._roots[_free(str(place.name or place), self._roots)] = Path(os.path.realpath(place))

    def all(self) -> list[Place]:
        """Return the runs and traces that exist now, at most `MOST_LISTED`."""
        found: list[Place] = []
        for name, root in self._roots.items():
            for each in _runs(name, root):
                if len(found) == MOST_LISTED:
                    return found
                found.append(each)
        return found

    def find(self, asked: str | None) -> Place:
        """Return the run that a client requests, by its name or its path.

        Raises:
            UsageError: there is no such run in the places named at the start.
            TraceError: a link in the run leads outside these places.
        """
        if asked is None:
            return self._only()
        if "\0" in asked or len(asked) > 4096:
            raise UsageError("run: that is no name of a run; `runs` lists them")
        for candidate in self._candidates(asked):
            path = Path(os.path.realpath(candidate))
            root = next((root for root in self._roots.values() if _is_within(path, root)), None)
            if root is not None and path.exists():
                self._check_inside(path, root)
                return Place(asked, path)
        known = [place.name for place in self.all()]
        hint = nearest(asked, known) or (f"; there are {', '.join(known[:8])}" if known else "")
        raise UsageError(f"{asked[:200]!r} is none of the runs that this server may read{hint}")

    def _only(self) -> Place:
        found = self.all()
        if len(found) == 1:
            self._check_inside(found[0].path, found[0].path)
            return found[0]
        raise UsageError(
            f"which run? {', '.join(place.name for place in found[:8])}{', …' if len(found) > 8 else ''}"
            if found
            else "there is no run in what this server may read"
        )

    def _candidates(self, asked: str) -> Iterator[str]:
        """Yield the paths that a request may stand for: below a named place, absolute, or relative to any place."""
        first, _, rest = asked.partition("/")
        if first in self._roots:
            yield str(self._roots[first] / rest) if rest else str(self._roots[first])
        if os.path.isabs(asked):
            yield asked
        else:
            for root in self._roots.values():
                yield str(root / asked)

    @staticmethod
    def _check_inside(path: Path, root: Path) -> None:
        """Raise an error if a link in a run leads outside the place named at the start."""
        if not path.is_dir():
            return
        seen = 0
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                seen += 1
                if seen > MOST_FILES:
                    raise TraceError(f"{path.name}: holds more than {MOST_FILES} files, which is no run")
                inside = os.path.join(folder, name)
                if os.path.islink(inside) and not _is_within(Path(os.path.realpath(inside)), root):
                    raise TraceError(f"{path.name}: {name} is a link that leads out of what was named at the start")


def _free(name: str, taken: dict[str, Path]) -> str:
    number = 2
    found = name
    while found in taken:
        found, number = f"{name}-{number}", number + 1
    return found


def _is_within(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _is_run(folder: Path) -> bool:
    return rundir.is_one(folder) and not _is_set(folder)


def _is_set(folder: Path) -> bool:
    if not (folder / rundir.RUN_FILE).is_file():
        return False
    try:
        return rundir.read_run(folder).kind in SETS
    except TraceError:
        return False


def _runs(name: str, root: Path) -> Iterator[Place]:
    """Yield a named run or trace; for a folder, the runs and traces in it, and the runs in its subfolders."""
    if root.is_file() or _is_run(root):
        yield Place(name, root)
        return
    found = False
    for inside in _entries(root):
        if inside.is_dir():
            below = (
                [inside] if _is_run(inside) else [each for each in _entries(inside) if each.is_dir() and _is_run(each)]
            )
        else:
            below = [inside] if inside.name.endswith(_TRACES) else []
        for each in below:
            if _is_within(Path(os.path.realpath(each)), root):
                found = True
                yield Place(f"{name}/{each.relative_to(root)}", each)
    if not found and not _is_set(root):
        yield Place(name, root)  # it may hold traces of a job's ranks, one file each, with any names


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError:
        return []


def stamp(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return a fingerprint that shows changes of a run or trace: inode, size and modification time of its files."""
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*"), *path.glob("*/*"), *path.glob("*/*/*")])[:MOST_FILES]  # a rank's steps
    found = []
    for each in files:
        try:
            state = each.stat()
        except OSError:
            continue
        if not os.path.isdir(each):
            found.append((str(each), state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
