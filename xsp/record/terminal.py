"""Output of xsp in the program's terminal: lines on stderr, and one line that is erased before the program writes.

While that line may be drawn, the program's streams that end in the terminal have a replaced `write`, which erases the
line first. The streams otherwise stay the same objects; output that bypasses them (from C, from another process)
appears beside the line. The line is drawn only if the program's output ended with a newline: after a prompt or a
progress bar there is no room for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from xsp.scrub import plain_lines

_CLEAR = "\r\x1b[2K"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


def say(text: str) -> None:
    """Print a line that begins with `xsp: `; do nothing if stderr is closed or writing to it fails."""
    if sys.stderr is not None:  # print() would take None for stdout
        with contextlib.suppress(Exception):
            print(f"xsp: {plain_lines(text)}", file=sys.stderr)


class LiveLine:
    """The last line of the terminal that stderr writes to."""

    def __init__(self) -> None:
        self._screen = sys.stderr
        self._streams: dict[TextIO, tuple[Any, Any]] = {}
        """The streams with a replaced `write`: the replacement, and the value that the program had set, if any."""

        self._write: Callable[[str], object] = sys.stderr.write
        self._is_drawn = False
        self._is_free = False
        """Whether the cursor is at the beginning of an empty line."""

    def open(self) -> None:
        """Keep the program's lines separate from the drawn line from now on; draw nothing if a stream prevents that."""
        self._is_free = os.environ.get("TERM") != "dumb"
        try:
            for stream in dict.fromkeys((sys.stdout, sys.stderr)):
                if self._is_free and stream.isatty():
                    replacement, original = self._after_clearing(stream.write), vars(stream).get("write")
                    stream.write = replacement  # type: ignore[method-assign]
                    self._streams[stream] = replacement, original
        except (AttributeError, TypeError, ValueError):
            self._is_free = False

    def draw(self, text: str) -> None:
        """Draw text over the line, cut to the width of the terminal. Never raises."""
        if not self._is_free:
            return
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed
            width = os.get_terminal_size(self._screen.fileno()).columns
            self._write(f"{_CLEAR}{_NO_WRAP}{text[: max(0, width - 1)]}{_WRAP}")
            self._screen.flush()
            self._is_drawn = True

    def close(self) -> None:
        """Erase the line, and restore the streams."""
        self._clear()
        for stream, (replacement, original) in self._streams.items():
            # else the program has set its own `write`, which calls the replacement
            if vars(stream).get("write") is replacement:
                del stream.write
                if original is not None:
                    stream.write = original  # type: ignore[method-assign]
        self._streams.clear()
        self._is_free = False

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            with contextlib.suppress(OSError, ValueError):
                self._write(_CLEAR)
                self._screen.flush()

    def _after_clearing(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def clearing_write(text: str) -> int:
            self._clear()
            if text and self._streams:
                self._is_free = text.endswith("\n")
            return write(text)

        return clearing_write
