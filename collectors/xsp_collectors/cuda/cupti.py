"""Device work through CUPTI's activity records (cupti-python)."""

from __future__ import annotations

from xsp.collector import Collector, Kernels
from xsp.span import Level


class CuptiActivities(Collector):
    """Calls of GPU libraries (LIBRARY) and of the runtime (RUNTIME), kernels and copies (KERNEL)."""

    name = "cupti"
    levels = (Level.LIBRARY, Level.RUNTIME, Level.KERNEL)
    epoch = True
    device_work = Kernels.CUPTI
    innermost = True

    def available(self) -> str | None:
        """Return what is missing."""
        return "CUPTI is not read yet"
