"""A line on stderr for whoever started the program."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Print a line that begins with `xsp: `, unless stderr is closed, or fails as the program made it."""
    if sys.stderr is not None:  # print() would take None for stdout
        with contextlib.suppress(Exception):
            print(f"xsp: {text}", file=sys.stderr)
