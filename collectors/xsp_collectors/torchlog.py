"""The log level of torch's C++ code, which has no Python interface.

While memory is recorded, torch warns on the program's stderr of every block that is older than the recording. These
warnings are useless; so warnings, but not errors, are suppressed while a step is described.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_ERROR = 2


class SuppressedWarnings:
    """A raised log level between `begin` and `end`; does nothing if this torch does not expose the level."""

    def __init__(self) -> None:
        self._level = _find()
        self._previous: int | None = None

    def begin(self) -> None:
        """Suppress log messages below errors."""
        if self._level is not None:
            self._previous = self._level.value
            self._level.value = max(self._previous, _ERROR)

    def end(self) -> None:
        """Restore the previous level."""
        if self._level is not None and self._previous is not None:
            self._level.value, self._previous = self._previous, None


def _find() -> ctypes.c_int | None:
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            continue
    return None
