"""Properties that have to be equal for timings to be compared, and circumstances that are only noted.

The environment is what a device answers to `xsp.device.contract.Device.identity`: of the processor its model, memory,
cores, devices beside it, versions of the libraries that contain the kernels, and variables that change which kernel is
chosen. Its hash is part of the path of the stored timings. The number of threads belongs to the spec. Circumstances,
such as the load of the machine, are noted and may differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from xsp.cached import hash_of
from xsp.device import devices
from xsp.device.contract import Device
from xsp.device.processor import Processor


@dataclass(frozen=True)
class Environment:
    """The environment in which timings were taken."""

    properties: Mapping[str, Any]
    """Properties that have to be equal for timings to be compared, as plain values."""

    circumstances: Mapping[str, Any] = field(default_factory=dict)
    """Circumstances that may differ."""

    @cached_property
    def hash(self) -> str:
        """Hash of `equal`, as 16 hexadecimal digits."""
        text = json.dumps(self.properties, sort_keys=True, separators=(",", ":"))
        return hash_of(text, nbytes=8)

    @property
    def processor(self) -> str:
        """The processor and its cores, for display."""
        return f"{self.properties.get('cpu')}, {self.properties.get('cores')} cores"

    @property
    def devices(self) -> str:
        """The devices beside the processor, for display; empty if there are none."""
        entries = [device for device in self.properties.get("devices") or () if isinstance(device, dict)]
        counts = Counter(str(device.get("name")) for device in entries)
        return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())

    @property
    def device(self) -> Mapping[str, Any] | None:
        """The properties of the device that the timings are of; None for the processor."""
        found = self.properties.get("device")
        return found if isinstance(found, dict) else None

    @property
    def device_name(self) -> str:
        """Name of the device that the timings are of, for display."""
        return self.processor if self.device is None else str(self.device.get("name"))

    @property
    def inner_cache_bytes(self) -> int | None:
        """Bytes of the caches of the device, in which a step leaves its weights if they fit; None for the processor."""
        if self.device is None:
            return None
        sizes = [cache[1] for cache in self.device.get("caches") or () if isinstance(cache, list) and len(cache) == 2]
        return max((size for size in sizes if isinstance(size, int)), default=0)

    @property
    def name(self) -> str:
        """One line for display: processor and cores, or the device and its driver, and the version of torch."""
        torch = f"torch {self.properties.get('torch') or 'none'}"
        if self.device is not None:
            driver = self.properties.get("driver")
            return ", ".join([self.device_name, *([f"driver {driver}"] if driver else []), torch])
        return ", ".join(filter(None, [self.processor, self.devices, torch]))

    @property
    def processor_note(self) -> str:
        """Sentence that says that single calls are timed on the processor although there are devices; else empty."""
        if not self.devices:
            return ""
        return (
            f"the calls are timed on the processor ({self.processor}), not on {self.devices}; to choose the "
            f"device: --device {devices.example()} of xsp bench, bound, advise and predict (timings on it), or "
            "xsp bound MODEL --device NAME (its quoted peak rates)"
        )


@lru_cache(maxsize=8)
def current_environment(device: Device | None = None) -> Environment:
    """Return the environment of a device of this machine; PyTorch is loaded if needed.

    Args:
        device: the device; default: the processor.
    """
    device = device or Processor()
    return Environment(device.identity(), device.circumstances())


def circumstances() -> dict[str, Any]:
    """Return the current circumstances of the processor."""
    return Processor().circumstances()
