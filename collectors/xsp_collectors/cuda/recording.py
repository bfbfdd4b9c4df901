"""Switching CUPTI's records on and off, beside a Kineto that records the host.

Kineto registers its own buffers and clock with CUPTI whenever it is switched on, even if it records only the host. So
each step takes over CUPTI after Kineto was switched on: the kinds that Kineto enabled are disabled, its buffers are
flushed back to it, and then xsp's are registered. Kineto does the same when it is next switched on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xsp_collectors.cuda.activities import Activity, Records

LIBRARY_KINDS = (Activity.MARKER,)
DEVICE_KINDS = (
    Activity.CONCURRENT_KERNEL,
    Activity.MEMCPY,
    Activity.MEMCPY2,
    Activity.MEMSET,
    Activity.RUNTIME,
    Activity.DRIVER,
    Activity.SYNCHRONIZATION,
    Activity.OVERHEAD,
)

_EXTERNAL_CORRELATION = 39
_KINETO_KINDS = (Activity.RUNTIME, Activity.DRIVER, _EXTERNAL_CORRELATION)

_FORCED = 1

_NOISE = {
    "runtime": ("cudaGetDevice_v3020",),
    "driver": ("cuKernelGetAttribute", "cuDevicePrimaryCtxGetState", "cuCtxGetCurrent"),
}
"""Calls that only query state, several times for each operator; Kineto leaves them out too, so disabling them does not
affect it."""


class Recording:
    """CUPTI's records, on or off."""

    def __init__(self, cupti: Any, records: Records, clock: HostClock) -> None:
        self._cupti = cupti
        self._clock = clock
        self._records = records
        self._kinds: Sequence[int] = ()
        self.has_native_threads = False
        """Whether records have the operating system's thread ids."""

        self.refused_kinds: list[str] = []
        """Kinds that CUPTI refused to record."""

    def begin(self, kinds: Sequence[Activity]) -> None:
        """Take CUPTI over and record these kinds; refused ones are remembered.

        Raises:
            Exception: an error of the binding, if buffers cannot be registered, or none of the kinds can be recorded.
        """
        cupti = self._cupti
        for kind in _KINETO_KINDS:
            with contextlib.suppress(Exception):
                cupti.activity_disable(int(kind))
        with contextlib.suppress(Exception):  # fails the first time, when no buffers are registered
            cupti.activity_flush_all(_FORCED)
        self._clock.install()
        self._records.register(cupti)
        self._name_threads_natively()
        self._kinds = self._enable(kinds)
        for interface, names in _NOISE.items():
            enable = getattr(self._cupti, f"activity_enable_{interface}_api", None)
            enum_name = f"{interface}_api_trace_cbid"
            numbers = getattr(self._cupti, enum_name, None) or getattr(self._cupti, enum_name.capitalize(), None)
            if enable is None or numbers is None:
                continue
            for name in names:
                number = getattr(numbers, name, None)
                if number is not None:
                    with contextlib.suppress(Exception):
                        enable(int(number), 0)

    def end(self) -> None:
        """Stop recording, and make CUPTI deliver all records.

        Raises:
            Exception: an error of the binding, if the buffers cannot be flushed; recording has stopped then, too.
        """
        for kind in self._kinds:
            with contextlib.suppress(Exception):  # for instance a lost device; the flush reports it
                self._cupti.activity_disable(int(kind))
        self._kinds = ()
        self._cupti.activity_flush_all(0)
        self._cupti.activity_flush_all(_FORCED)

    def restore_thread_ids(self) -> None:
        """Restore the thread ids in records; the host's clock stays, because it is CUPTI's default."""
        if self.has_native_threads:
            self.has_native_threads = False
            with contextlib.suppress(Exception):
                self._cupti.set_thread_id_type(int(self._cupti.ActivityThreadIdType.DEFAULT))

    def dropped_count(self) -> int | None:
        """Return the number of records without a buffer since the last call; None if CUPTI does not report it."""
        count = ctypes.c_size_t()
        try:
            self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(count))
        except Exception:  # a lost device
            return None
        return count.value

    def _enable(self, kinds: Sequence[Activity]) -> list[Activity]:
        """Enable kinds, and return those that CUPTI accepted."""
        enabled: list[Activity] = []
        for kind in kinds:
            try:
                self._cupti.activity_enable(int(kind))
                enabled.append(kind)
            except Exception:
                name = kind.name.lower()
                if name not in self.refused_kinds:
                    self.refused_kinds.append(name)
                if kind is kinds[-1] and not enabled:
                    raise
        return enabled

    def _name_threads_natively(self) -> None:
        kinds: Any = getattr(self._cupti, "ActivityThreadIdType", None)
        if kinds is None or self.has_native_threads:
            return
        with contextlib.suppress(Exception):
            self._cupti.set_thread_id_type(int(kinds.SYSTEM))
            self.has_native_threads = True


_NOW = "_ZNSt6chrono3_V212system_clock3nowEv"


class HostClock:
    """The host's real time as the clock of CUPTI's records, also after Kineto made CUPTI use Kineto's own clock.

    CUPTI takes times from a function that a client can register; it is called for each record and cannot be
    unregistered. Kineto registers one that reads the processor's counter, each time it is switched on. The replacement
    must be native code, or each runtime call would wait for Python. The C++ library that torch brings along has such a
    function: `std::chrono::system_clock::now()` takes no argument and returns nanoseconds since the epoch, in a
    register.
    """

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
