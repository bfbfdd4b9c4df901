"""Which of several files are the traces of one program's ranks."""

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
