"""CUPTI's clock: the host's real time, also after Kineto had CUPTI stamp records with a clock of Kineto's own.

CUPTI takes times from a function that a client may register, which it calls for each record, and which cannot be
unregistered. Kineto registers one that reads the processor's counter, each time that it is switched on. What is put
in its place must be native code, or each call of the runtime would wait for Python. The C++ library that torch brings
along has it: `std::chrono::system_clock::now()` takes nothing and returns nanoseconds since the epoch, in a register.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

_NOW = "_ZNSt6chrono3_V212system_clock3nowEv"


class HostClock:
    """Has CUPTI stamp records with the host's real time."""

    def __init__(self, library: Path | None) -> None:
        """Prepare; `library` is the libcupti that this process uses."""
        self._library = library

    def install(self) -> bool:
        """Put it in place, and return whether CUPTI took it. Nothing may be recorded meanwhile."""
        address, cupti = now_address(), self._loaded()
        if address is None or cupti is None:
            return False
        return bool(cupti.cuptiActivityRegisterTimestampCallback(ctypes.c_void_p(address)) == 0)

    def _loaded(self) -> Any:
        try:
            return ctypes.CDLL(str(self._library)) if self._library is not None else None
        except OSError:
            return None


@functools.cache
def now_address() -> int | None:
    """Return where the function lies that returns nanoseconds since the epoch; None where there is none."""
    try:
        function = getattr(ctypes.CDLL("libstdc++.so.6"), _NOW)
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
