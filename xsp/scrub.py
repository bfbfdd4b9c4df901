"""Take secrets and persons out of what a run keeps of its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORDS = "token(?!iz)|secret|passw|credential|api[-_]?key|access[-_]?key|auth|cookie"
_SECRET = re.compile(rf"(?i)(?:{_WORDS})")
_HEADER = re.compile(rf"(?i)^([\w-]*(?:{_WORDS})[\w-]*:\s*)(?!//)\S.*")
_IN_URL = re.compile(r"(?i)(://)[^/@\s]+@")
_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:token|secret|passw|key|sig|auth)[^=&\s]*=)[^&\s]+")
_BEFORE_PATH = r"(^-\w(?=/)|^|[=:,;'\"(\[]|file://)"
_HOME = re.compile(_BEFORE_PATH + r"/(?:home|Users)/[^/\s:,;'\"]+/?(?=$|[\s:,;'\"])")
_DIRECTORIES = re.compile(_BEFORE_PATH + r"/(?:[^/\s:,;'\"]+/)*(?=[^/\s:,;'\"])")
HIDDEN = "***"


def command(argv: Sequence[str]) -> list[str]:
    """Return a command line without secrets, and with file names instead of absolute paths.

    Hidden are the values of options and headers whose name speaks of a secret (`--api-key X`, `--token=X`,
    `Authorization: X`), credentials in URLs, the query of `--otlp`, and the directories of absolute
    paths, which often name a person.
    """
    shown: list[str] = []
    hide_next = False
    for part, before in zip(argv, ["", *argv], strict=False):
        if before == "--otlp" or part.startswith("--otlp="):
            part = part.partition("?")[0]
        if hide_next:
            shown.append(HIDDEN)
            hide_next = False
            continue
        name, equals, _ = part.partition("=")
        if _SECRET.search(name) and (name.startswith("-") or equals):
            shown.append(f"{name}={HIDDEN}" if equals else part)
            hide_next = not equals and name.startswith("-")
            continue
        part = _HEADER.sub(rf"\g<1>{HIDDEN}", _IN_URL.sub(rf"\g<1>{HIDDEN}@", part))
        shown.append(_without_directories(_QUERY.sub(rf"\g<1>{HIDDEN}", part)))
    return shown


def _without_directories(part: str) -> str:
    return _DIRECTORIES.sub(r"\g<1>", _HOME.sub(r"\g<1>~", part))
