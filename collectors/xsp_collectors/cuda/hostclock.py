"""CUPTI's clock: the host's real time, also after Kineto made CUPTI use Kineto's own clock.

CUPTI takes times from a function that a client can register; it is called for each record and cannot be unregistered.
Kineto registers one that reads the processor's counter, each time it is switched on. The replacement must be native
code, or each runtime call would wait for Python. The C++ library that torch brings along has such a function:
`std::chrono::system_clock::now()` takes no argument and returns nanoseconds since the epoch, in a register.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

_NOW = "_ZNSt6chrono3_V212system_clock3nowEv"


class HostClock:
    """The host's real time as the clock of CUPTI's records."""

    def __init__(self, library: Path | None) -> None:
        """Prepare; `library` is the libcupti that this process uses."""
        self._library = library

    def install(self) -> bool:
        """Register the clock, and return whether CUPTI accepted it. Nothing may be recorded meanwhile."""
        address, cupti = now_address(), self._load()
        if address is None or cupti is None:
            return False
        return bool(cupti.cuptiActivityRegisterTimestampCallback(ctypes.c_void_p(address)) == 0)

    def _load(self) -> Any:
        try:
            return ctypes.CDLL(str(self._library)) if self._library is not None else None
        except OSError:
            return None


@functools.cache
def now_address() -> int | None:
    """Return the address of the function that returns nanoseconds since the epoch; None if there is none."""
    try:
        function = getattr(ctypes.CDLL("libstdc++.so.6"), _NOW)
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
