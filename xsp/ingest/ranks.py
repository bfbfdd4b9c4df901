"""Which files are imported together, and which of them are the traces of one program's ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from xsp.errors import TraceError
from xsp.importers import contract

_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_RANK_IN_HEAD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,4096}?"rank"\s*:\s*(\d{1,6})')

Subject = str | os.PathLike[str] | list[str]
"""What `xsp.load` takes: a path or a URL, or a list of files with a trace per rank."""


def rank_in_name(name: str) -> int | None:
    """Return the rank that the name of a file states; None if it states none."""
    found = _RANK_IN_NAME.search(name)
    return int(found.group(1)) if found else None


def subjects(paths: Sequence[str | os.PathLike[str]]) -> list[Subject]:
    """Return what each trace is loaded from: all files together if each is of another rank, else each by itself."""
    if len(paths) > 1 and all(Path(path).is_file() for path in paths):
        stated = [_stated_rank(Path(path)) for path in paths]
        if None not in stated and len(set(stated)) == len(stated):
            return [[os.fspath(path) for path in paths]]
    return list(paths)


def _stated_rank(path: Path) -> int | None:
    try:
        found = _RANK_IN_HEAD.search(contract.first_bytes(path))
    except TraceError:  # it is reported where the file is read
        return None
    return int(found.group(1)) if found else rank_in_name(path.name)


def files(sources: Sequence[str]) -> list[str]:
    """Return the sources with folders replaced by the files in them, each recording once; hidden files are left out.

    Raises:
        TraceError: a folder holds no file.
    """
    found = []
    for source in sources:
        folder = Path(source)
        if contract.is_url(source) or not folder.is_dir():
            found.append(source)
            continue
        if recordings := sorted(entry for entry in folder.glob(_XLA_RECORDINGS) if entry.is_dir()):
            folder = recordings[-1]  # the latest: their names are times
        members = sorted(entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("."))
        if not members:
            raise TraceError(
                f"{source}: not a run directory, and no file in it to import; give a folder with a trace per rank, or "
                "the folder in which `xsp run` wrote"
            )
        found += [str(member) for member in members if not _is_second_copy(member, members)]
    return found


_XLA_RECORDINGS = "plugins/profile/*"
"""Folders of recordings below the folder that a program gives to XLA's profiler."""


def _is_second_copy(file: Path, files: Sequence[Path]) -> bool:
    """Return whether a file has the trace events of a recording whose XSpace is among the files, too."""
    host = file.name.removesuffix(".gz").removesuffix(".trace.json")
    is_of_xla = file.name != host or file.name.startswith("perfetto_trace")
    return is_of_xla and any(
        other.name == f"{host}.xplane.pb" or (host.startswith("perfetto_trace") and other.name.endswith(".xplane.pb"))
        for other in files
    )
