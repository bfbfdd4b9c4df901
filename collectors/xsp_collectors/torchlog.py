"""The log level of torch's C++ half, which has no door in Python.

Recording memory makes torch warn, on the program's own stderr, of every block that is older than the
recording. That is no news to anybody; so while a step is described warnings are held back, errors are not.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_ERROR = 2


class WarningsHeldBack:
    """Raises the level between `begin` and `end`; does nothing where this torch does not let it be found."""

    def __init__(self) -> None:
        self._level = _find()
        self._before: int | None = None

    def begin(self) -> None:
        """Let nothing below an error be logged."""
        if self._level is not None:
            self._before = self._level.value
            self._level.value = max(self._before, _ERROR)

    def end(self) -> None:
        """Restore the level that was there."""
        if self._level is not None and self._before is not None:
            self._level.value, self._before = self._before, None


def _find() -> ctypes.c_int | None:
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            continue
    return None
