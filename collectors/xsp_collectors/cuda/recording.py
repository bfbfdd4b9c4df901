"""Switching CUPTI's records on and off, beside a Kineto that records the host.

Kineto registers its own buffers and its own clock with CUPTI whenever it is switched on, also if it is asked for the
host alone. So each step takes CUPTI over after Kineto was switched on: what Kineto asked of CUPTI is switched off, its
buffers are handed back to it, and then ours are registered. It does the same to us the next time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from xsp_collectors.cuda.activities import Activity, Records
from xsp_collectors.cuda.hostclock import HostClock

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
_OF_KINETO = (Activity.RUNTIME, Activity.DRIVER, _EXTERNAL_CORRELATION)

_FORCED = 1

_NOISE = {
    "runtime": ("cudaGetDevice_v3020",),
    "driver": ("cuKernelGetAttribute", "cuDevicePrimaryCtxGetState", "cuCtxGetCurrent"),
}
"""Calls that only ask, several times for each operator; the same that Kineto leaves out, so that nothing is left
switched off for it."""


class Recording:
    """CUPTI's records, on or off."""

    def __init__(self, cupti: Any, records: Records, clock: HostClock) -> None:
        self._cupti = cupti
        self._clock = clock
        self._records = records
        self._kinds: Sequence[int] = ()
        self.threads_are_native = False
        """Whether records name threads as the operating system does."""

        self.refused: list[str] = []
        """Kinds that CUPTI would not record."""

    def begin(self, kinds: Sequence[Activity]) -> None:
        """Take over and record these kinds; those that CUPTI refuses are remembered.

        Raises:
            Exception: of the binding, if buffers cannot be registered, or none of the kinds can be recorded.
        """
        cupti = self._cupti
        for kind in _OF_KINETO:
            with contextlib.suppress(Exception):
                cupti.activity_disable(int(kind))
        with contextlib.suppress(Exception):  # the first time nobody has registered buffers
            cupti.activity_flush_all(_FORCED)
        self._clock.install()
        cupti.activity_register_callbacks(self._records.request, self._records.complete)
        self._name_threads_natively()
        self._kinds = self._enabled(kinds)
        self._leave_out_noise()

    def end(self) -> None:
        """Stop recording, and have everything that was recorded handed over.

        Raises:
            Exception: of the binding, if the buffers cannot be flushed; nothing is recorded then either.
        """
        for kind in self._kinds:
            with contextlib.suppress(Exception):  # of a device that is lost, for instance; the flush tells
                self._cupti.activity_disable(int(kind))
        self._kinds = ()
        self._cupti.activity_flush_all(0)
        self._cupti.activity_flush_all(_FORCED)

    def leave(self) -> None:
        """Have records name threads as they did before; CUPTI keeps the host's clock, which is its own."""
        if self.threads_are_native:
            self.threads_are_native = False
            with contextlib.suppress(Exception):
                self._cupti.set_thread_id_type(int(self._cupti.ActivityThreadIdType.DEFAULT))

    def dropped(self) -> int | None:
        """Return how many records CUPTI had no buffer for since the last call; None if it does not tell."""
        count = ctypes.c_size_t()
        try:
            self._cupti.activity_get_num_dropped_records(0, 0, ctypes.addressof(count))
        except Exception:  # a device that is lost
            return None
        return count.value

    def _enabled(self, kinds: Sequence[Activity]) -> list[Activity]:
        """Switch kinds on, and return those that CUPTI took."""
        taken: list[Activity] = []
        for kind in kinds:
            try:
                self._cupti.activity_enable(int(kind))
                taken.append(kind)
            except Exception:
                name = kind.name.lower()
                if name not in self.refused:
                    self.refused.append(name)
                if kind is kinds[-1] and not taken:
                    raise
        return taken

    def _name_threads_natively(self) -> None:
        kinds: Any = getattr(self._cupti, "ActivityThreadIdType", None)
        if kinds is None or self.threads_are_native:
            return
        with contextlib.suppress(Exception):
            self._cupti.set_thread_id_type(int(kinds.SYSTEM))
            self.threads_are_native = True

    def _leave_out_noise(self) -> None:
        for interface, names in _NOISE.items():
            enable = getattr(self._cupti, f"activity_enable_{interface}_api", None)
            numbers = getattr(self._cupti, f"{interface}_api_trace_cbid", None)
            if enable is None or numbers is None:
                continue
            for name in names:
                number = getattr(numbers, name, None)
                if number is not None:
                    with contextlib.suppress(Exception):
                        enable(int(number), 0)
