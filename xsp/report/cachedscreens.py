"""First screens of files in the user's cache, as texts: a second look at the same trace computes nothing.

A text depends on all that the import of the file depends on (see `xsp.ingest.cachedimports`), on how the user named the
file and on the width of the terminal, and on the lists of devices, that of xsp and the user's. With analyses or
questions of third parties, which may depend on anything, no screen is cached.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xsp import cached, plugins
from xsp.device import ceilings
from xsp.ingest import cachedimports
from xsp.run import MISSING, Run

KIND = "screen"
GROUPS = ("xsp.analyses", "xsp.questions")
"""Entry points of what a first screen is computed with."""


def key_of(path: str, width: int, options: Sequence[object] = ()) -> dict[str, Any] | None:
    """Return everything that the first screen of a file depends on; None if it is not cached.

    Args:
        path: the file, as the user named it; screens of run directories, folders and URLs are not cached.
        width: width of the terminal.
        options: further options of the command that change the screen.
    """
    file = Path(path).expanduser()
    origins = {group: plugins.origins(group) for group in GROUPS}
    own = all(origin.startswith("xsp.") for group in origins.values() for origin in group.values())
    if not own or not file.is_file():
        return None
    key = cachedimports.key_of([str(file)])
    if key is None:
        return None
    added = os.environ.get(ceilings.VARIABLE)
    lists = [Path(ceilings.__file__).with_name("devices.toml"), *([Path(added).expanduser()] if added else [])]
    try:
        devices = [cached.content_hash(each) for each in lists]
    except OSError:  # the screen says what is wrong with it
        return None
    return key | {"path": path, "width": width, "options": list(options), "devices": devices, "origins": origins}


def read(key: dict[str, Any] | None) -> str | None:
    """Return the screen of a key from `key_of`; None if it is not in the cache."""
    text = cached.read(KIND, key)
    return None if text is None else str(json.loads(text))


def store(key: dict[str, Any] | None, screen: str, run: Run) -> None:
    """Store the screen of an imported run, unless it comes with warnings of files that are missing."""
    if run.imported is not None and all(note.source != MISSING for note in run.notes):
        cached.store(KIND, key, json.dumps(screen))
