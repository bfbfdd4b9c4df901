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

_TRACE_SUFFIXES = (".json", ".json.gz", ".parquet", ".sqlite", ".rpd", ".nsys-rep", ".jsonl", ".pb", ".pickle")


class Readable(NamedTuple):
    """A run or a trace that may be read."""

    name: str
    """Its name for clients."""
    path: Path
    """Its path, with all links resolved."""


class Places:
    """The files and folders named at the start."""

    def __init__(self, sources: Sequence[str]) -> None:
        """Resolve each path now, so that later changes of links have no effect.

        Raises:
            UsageError: a path is a URL, or does not exist.
        """
        self._roots: dict[str, Path] = {}
        for source in sources:
            if "://" in source:
                raise UsageError(
                    f"{source}: give a path; `xsp import {shlex.quote(source)} -o runs/one` imports it as a run"
                )
            path = Path(source).expanduser()
            if not path.exists():
                raise UsageError(f"{source}: there is no such file or directory")
            name = str(path.name or path)
            candidate, number = name, 2
            while candidate in self._roots:
                candidate, number = f"{name}-{number}", number + 1
            self._roots[candidate] = Path(os.path.realpath(path))

    def all(self) -> list[Readable]:
        """Return the runs and traces that exist now, at most `MOST_LISTED`."""
        places: list[Readable] = []
        for name, root in self._roots.items():
            for place in _runs(name, root):
                if len(places) == MOST_LISTED:
                    return places
                places.append(place)
        return places

    def find(self, request: str | None) -> Readable:
        """Return the run that a client requests, by its name or its path.

        Raises:
            UsageError: there is no such run in the places named at the start.
            TraceError: a link in the run leads outside these places.
        """
        if request is None:
            places = self.all()
            if len(places) == 1:
                self._check_inside(places[0].path, places[0].path)
                return places[0]
            raise UsageError(
                f"which run? {', '.join(place.name for place in places[:8])}{', …' if len(places) > 8 else ''}"
                if places
                else "there is no run in what this server may read"
            )
        if "\0" in request or len(request) > 4096:
            raise UsageError("run: not the name of a run; `runs` lists them")
        for candidate in self._candidates(request):
            path = Path(os.path.realpath(candidate))
            root = next((root for root in self._roots.values() if _is_within(path, root)), None)
            if root is not None and path.exists():
                self._check_inside(path, root)
                return Readable(request, path)
        names = [place.name for place in self.all()]
        hint = nearest(request, names) or (f"; there are {', '.join(names[:8])}" if names else "")
        raise UsageError(f"{request[:200]!r} is not a run that this server may read{hint}")

    def _candidates(self, request: str) -> Iterator[str]:
        """Yield the paths that a request may mean: below a named place, absolute, or relative to any place."""
        head, _, remainder = request.partition("/")
        if head in self._roots:
            yield str(self._roots[head] / remainder) if remainder else str(self._roots[head])
        if os.path.isabs(request):
            yield request
        else:
            for root in self._roots.values():
                yield str(root / request)

    @staticmethod
    def _check_inside(path: Path, root: Path) -> None:
        """Raise an error if a link in a run leads outside the place named at the start."""
        if not path.is_dir():
            return
        count = 0
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                count += 1
                if count > MOST_FILES:
                    raise TraceError(f"{path.name}: more than {MOST_FILES} files: this is not a run")
                entry = os.path.join(folder, name)
                if os.path.islink(entry) and not _is_within(Path(os.path.realpath(entry)), root):
                    raise TraceError(f"{path.name}: {name} is a link that leads out of what was named at the start")


def _is_within(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _is_run(folder: Path) -> bool:
    return rundir.is_run_directory(folder) and not _is_set(folder)


def _is_set(folder: Path) -> bool:
    if not (folder / rundir.RUN_FILE).is_file():
        return False
    try:
        return rundir.read_run(folder).kind in SETS
    except TraceError:
        return False


def _runs(name: str, root: Path) -> Iterator[Readable]:
    """Yield a named run or trace; for a folder, the runs and traces in it, and the runs in its subfolders."""
    if root.is_file() or _is_run(root):
        yield Readable(name, root)
        return
    has_runs = False
    for entry in _entries(root):
        if entry.is_dir():
            candidates = (
                [entry] if _is_run(entry) else [child for child in _entries(entry) if child.is_dir() and _is_run(child)]
            )
        else:
            candidates = [entry] if entry.name.endswith(_TRACE_SUFFIXES) else []
        for candidate in candidates:
            if _is_within(Path(os.path.realpath(candidate)), root):
                has_runs = True
                yield Readable(f"{name}/{candidate.relative_to(root)}", candidate)
    if not has_runs and not _is_set(root):
        yield Readable(name, root)  # it may contain traces of a job's ranks, one file each, with any names


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def fingerprint(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return a fingerprint that shows changes of a run or trace: inode, size and modification time of its files."""
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("*"), *path.glob("*/*"), *path.glob("*/*/*")])[:MOST_FILES]  # a rank's steps
    entries = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        if not os.path.isdir(file):
            entries.append((str(file), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(entries)
