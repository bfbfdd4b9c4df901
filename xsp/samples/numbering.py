"""Which of NVML's devices are those that the measured process numbers 0, 1, 2 …

NVML numbers all devices of the machine by their place on the bus. CUDA numbers those that `CUDA_VISIBLE_DEVICES`
leaves, and unless `CUDA_DEVICE_ORDER=PCI_BUS_ID` puts the fastest first (CUDA C++ programming guide, environment
variables). Devices of one model stand in the order of the bus either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ORDER_UNKNOWN = (
    "devices of different models are here, and CUDA may number them otherwise than NVML: set "
    "CUDA_DEVICE_ORDER=PCI_BUS_ID, or use the device before the block is entered"
)


@dataclass(frozen=True)
class Devices:
    """What NVML calls the devices, by CUDA's numbers."""

    handles: Mapping[int, Any]
    certain: bool = True
    """Whether the numbers are CUDA's for sure."""

    whole: bool = False
    """Whether these are all devices of the machine."""


def devices(nvml: Any, told: Sequence[str], environment: Mapping[str, str]) -> Devices:
    """Return the devices that the measured process sees.

    Args:
        nvml: the module `pynvml`, initialised.
        told: their UUIDs in CUDA's order, if the process has initialised CUDA; never stored.
        environment: of the process.
    """
    count = int(nvml.nvmlDeviceGetCount())
    if told:
        found = [_by_uuid(nvml, each) for each in told]
        known = {number: handle for number, handle in enumerate(found) if handle is not None}
        return Devices(known, certain=True, whole=len(known) == count)
    every = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(count)]
    models = {str(nvml.nvmlDeviceGetName(handle)) for handle in every}
    certain = len(models) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Devices(dict(enumerate(every)), certain, whole=True)
    chosen = _chosen(nvml, visible, every)
    by_uuid = all(not word.strip().isdigit() for word in visible.split(","))
    return Devices(dict(enumerate(chosen)), certain or by_uuid, whole=len(chosen) == count)


def share(found: Devices, local_rank: int, local_ranks: int) -> dict[int, Any]:
    """Return the devices that one rank reads, so that each of a machine's is read once where all ranks see all."""
    if not found.whole or local_ranks < 2 or len(found.handles) < local_ranks:
        return dict(found.handles)
    return {number: handle for number, handle in found.handles.items() if number % local_ranks == local_rank}


def _chosen(nvml: Any, visible: str, every: Sequence[Any]) -> list[Any]:
    """Return the devices of a list of numbers or beginnings of UUIDs, up to the first that CUDA would not know."""
    chosen: list[Any] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdigit():
            handle = every[int(word)] if int(word) < len(every) else None
        else:
            handle = _by_beginning(nvml, word, every)
        if handle is None:
            break
        chosen.append(handle)
    return chosen


def _by_beginning(nvml: Any, word: str, every: Sequence[Any]) -> Any:
    if word.startswith("GPU-"):
        fitting = [handle for handle in every if str(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        return fitting[0] if len(fitting) == 1 else None
    return _handle(nvml, word) if word.startswith("MIG-") else None


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """Return the device, or the part of one, that has this UUID; torch gives it without what NVML puts before it."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    whole = _handle(nvml, f"GPU-{bare}")
    return whole if whole is not None else _handle(nvml, f"MIG-{bare}")


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
