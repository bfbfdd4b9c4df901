"""Take secrets and persons out of what a run keeps of its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_SECRET = re.compile(r"(?i)(token|secret|passw|credential|api[-_]?key|access[-_]?key|auth|cookie)")
_IN_URL = re.compile(r"(?i)(://)[^/@\s]+@")
_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:token|secret|passw|key|sig|auth)[^=&\s]*=)[^&\s]+")
HIDDEN = "***"


def command(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets, and with file names instead of absolute paths.

    Hidden are the values of options whose name speaks of a secret (`--api-key X`, `--token=X`), credentials
    in URLs, and the directories of absolute paths, which often name a person.
    """
    shown: list[str] = []
    hide_next = False
    for part in argv:
        if hide_next:
            shown.append(HIDDEN)
            hide_next = False
            continue
        name, equals, _ = part.partition("=")
        if _SECRET.search(name) and (name.startswith("-") or equals):
            shown.append(f"{name}={HIDDEN}" if equals else part)
            hide_next = not equals and name.startswith("-")
            continue
        shown.append(_path(_QUERY.sub(rf"\g<1>{HIDDEN}", _IN_URL.sub(rf"\g<1>{HIDDEN}@", part))))
    return shown


def _path(part: str) -> str:
    name, equals, value = part.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith("/") and len(value) > 1 else part
