"""Mend the JSON of a trace whose texts hold quotes, backslashes and control characters that are not escaped.

Versions of Kineto wrote names and arguments as they were. A text ends at the first quote that is followed by what may
follow a value: the next key, the end of the line, or a closing bracket. All that lies before it is escaped where it is
not yet. The result is a copy; the file itself is not changed.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from xsp.errors import OutputError
from xsp.importers.contract import open_bytes, read_error

_KEY = rb'"[\w .#/%-]+"\s*:'
_TEXT = re.compile(rb"(" + _KEY + rb'\s*)"((?:.(?!"\s*:))*?)"(?=\s*,\s*' + _KEY + rb"|\s*,?\s*$|\s*[}\]])")
"""A key, and its text up to the first quote that can be its end; on one line, as all that write traces keep it."""

_BACKSLASHES = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|(\\)')
_QUOTES = re.compile(rb'\\.|(")')
_CONTROLS = re.compile(rb"[\x00-\x1f]")


def mend(source: str, target: Path) -> int:
    """Write a copy of a JSON file with its texts escaped, and return how many texts were changed.

    Raises:
        TraceError: the file cannot be read.
        OutputError: the copy cannot be written.
    """
    changed = 0
    try:
        with open_bytes(Path(source)) as file, open(target, "wb") as copy:
            for line in file:
                mended, count = _mended(line.rstrip(b"\r\n"))
                changed += count
                copy.write(mended + b"\n")
    except OSError as error:
        if error.filename is not None and Path(error.filename) != target:
            raise read_error(source, error) from error
        raise OutputError(
            f"{target}: cannot be written ({error.strerror}); set TMPDIR to a folder with room"
        ) from error
    except (EOFError, zlib.error) as error:
        raise read_error(source, error) from error
    return changed


def _mended(line: bytes) -> tuple[bytes, int]:
    changed = 0

    def escaped(match: re.Match[bytes]) -> bytes:
        nonlocal changed
        text = _BACKSLASHES.sub(lambda found: b"\\\\" if found[1] else found[0], match[2])
        if (len(text) - len(text.rstrip(b"\\"))) % 2:  # it would escape the closing quote
            text += b"\\"
        text = _QUOTES.sub(lambda found: b'\\"' if found[1] else found[0], text)
        text = _CONTROLS.sub(lambda found: b"\\u%04x" % found[0][0], text)
        changed += text != match[2]
        return match[1] + b'"' + text + b'"'

    return _TEXT.sub(escaped, line), changed
