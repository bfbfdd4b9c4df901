"""Making GPU libraries name their calls: libcupti is injected into NVTX before a library's first call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from xsp_collectors.cuda.libraries import INJECTION, SWITCHES


class Injection:
    """The environment variables that NVTX and the libraries read once."""

    def __init__(self, library: Path | None) -> None:
        self._library = library
        self._previous: dict[str, str | None] = {}
        self._is_too_late = False

    def variables(self) -> dict[str, str]:
        """Return the variables to set, except those that the user has set; none if another tool is injected."""
        if self._library is None or (INJECTION in os.environ and not self._is_set()):
            return {}
        settings = {INJECTION: str(self._library), **SWITCHES}
        return {name: value for name, value in settings.items() if name not in os.environ}

    def install(self, is_too_late: bool) -> None:
        """Set the variables in this process.

        Args:
            is_too_late: whether the libraries may have been used already, and no longer read variables.
        """
        self._is_too_late = is_too_late and not self._is_set()
        if is_too_late:
            return
        for name, value in self.variables().items():
            self._previous[name] = os.environ.get(name)
            os.environ[name] = value

    def remove(self) -> None:
        """Restore the environment."""
        for name, value in self._previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._previous = {}

    def state(self) -> str:
        """Return a short text on whether libraries will name their calls."""
        if self._library is None:
            return "no libcupti"
        if self._is_set():
            return "NVTX"
        return "another tool's NVTX" if INJECTION in os.environ else "NVTX, if set before the libraries are used"

    def notes(self, calls: int, kernels: int) -> Iterator[str]:
        """Yield why calls of libraries are missing, if they are.

        Args:
            calls: number of recorded library calls.
            kernels: number of recorded kernels.
        """
        if calls or not kernels:
            return
        if self._is_too_late:
            yield (
                "no library named its calls: CUDA was in use before the profile began; start the program with "
                "`xsp run`, or enter the block before the model is moved to the device"
            )
        elif INJECTION in os.environ and not self._is_set():
            yield f"no library named its calls: {INJECTION} names another tool's library"
        else:
            yield "no library named its calls: those in use mark none with NVTX, or read their settings earlier"

    def _is_set(self) -> bool:
        return self._library is not None and os.environ.get(INJECTION) == str(self._library)
