"""Power, clocks, memory, temperature and utilisation of NVIDIA devices from NVML (`nvidia-ml-py`, imported as pynvml).

Values that a device or its driver does not report are left out, with a note that quotes NVML's message. NVML sees the
processes of the whole machine; only their number and the memory of the measured process are kept.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xsp.samples.source import Reading, Source

# --- numbering ---------------------------------------------------------------------------------------------------
# Mapping from the device numbers 0, 1, 2 … of the measured process to NVML's devices.
#
# NVML numbers all devices of the machine in order of the bus. CUDA numbers the devices in `CUDA_VISIBLE_DEVICES`, and
# without `CUDA_DEVICE_ORDER=PCI_BUS_ID` the fastest come first (CUDA C++ programming guide, environment variables).
# Devices of the same model are in order of the bus either way.


ORDER_UNKNOWN = (
    "this machine has devices of different models, and CUDA may number them differently from NVML: set "
    "CUDA_DEVICE_ORDER=PCI_BUS_ID, or use the device before the block is entered"
)


@dataclass(frozen=True)
class Devices:
    """NVML's handles of devices by CUDA's numbers."""

    handles: Mapping[int, Any]
    is_certain: bool = True
    """Whether the numbers are certainly those of CUDA."""

    is_complete: bool = False
    """Whether these are all devices of the machine."""


def devices(nvml: Any, uuids: Sequence[str], environment: Mapping[str, str]) -> Devices:
    """Return the devices that the measured process sees.

    Args:
        nvml: the module `pynvml`, initialised.
        uuids: their UUIDs in CUDA's order, if the process has initialised CUDA; never stored.
        environment: environment variables of the process.
    """
    count = int(nvml.nvmlDeviceGetCount())
    if uuids:
        handles = [_by_uuid(nvml, uuid) for uuid in uuids]
        by_number = {number: handle for number, handle in enumerate(handles) if handle is not None}
        return Devices(by_number, is_certain=True, is_complete=len(by_number) == count)
    all_handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    models = {str(nvml.nvmlDeviceGetName(handle)) for handle in all_handles}
    is_certain = len(models) < 2 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Devices(dict(enumerate(all_handles)), is_certain, is_complete=True)
    visible_handles = _visible_devices(nvml, visible, all_handles)
    are_uuids = all(not word.strip().isdigit() for word in visible.split(","))
    return Devices(dict(enumerate(visible_handles)), is_certain or are_uuids, is_complete=len(visible_handles) == count)


def rank_devices(visible: Devices, local_rank: int, local_ranks: int) -> dict[int, Any]:
    """Return the devices that one rank reads; if all ranks see all devices, each device is read by one rank."""
    if not visible.is_complete or local_ranks < 2 or len(visible.handles) < local_ranks:
        return dict(visible.handles)
    return {number: handle for number, handle in visible.handles.items() if number % local_ranks == local_rank}


def _visible_devices(nvml: Any, visible: str, handles: Sequence[Any]) -> list[Any]:
    """Return the devices of a list of numbers or UUID prefixes, up to the first entry that CUDA would not recognise."""
    selected: list[Any] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdigit():
            handle = handles[int(word)] if int(word) < len(handles) else None
        else:
            handle = _by_prefix(nvml, word, handles)
        if handle is None:
            break
        selected.append(handle)
    return selected


def _by_prefix(nvml: Any, word: str, handles: Sequence[Any]) -> Any:
    if word.startswith("GPU-"):
        matches = [handle for handle in handles if str(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
        return matches[0] if len(matches) == 1 else None
    return _handle(nvml, word) if word.startswith("MIG-") else None


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """Return the device, or the MIG part of one, with this UUID; torch omits the prefix of NVML's UUIDs."""
    bare_uuid = uuid.removeprefix("GPU-").removeprefix("MIG-")
    device = _handle(nvml, f"GPU-{bare_uuid}")
    return device if device is not None else _handle(nvml, f"MIG-{bare_uuid}")


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


# --- reasons -----------------------------------------------------------------------------------------------------
# Reasons for lower clocks of a device: the bits of NVML's mask, and which of them mean throttling.
#
# Bits and meanings: NVML API reference, "NvmlClocksEventReasons" (nvml.h: nvmlClocksEventReason…, before driver 535
# nvmlClocksThrottleReason…).


MASK = "gpu.clock.reasons"
"""Name of the sample whose value is the mask."""


class ClockReason(NamedTuple):
    """One bit of the mask."""

    bit: int
    name: str
    is_throttling: bool
    """Whether this reason slows the device down; an idle device and clocks set by the user do not count."""
    is_fault: bool = False
    """Whether cooling or power is faulty; a power cap is normal at full load."""


REASONS: tuple[ClockReason, ...] = (
    ClockReason(0x001, "idle", is_throttling=False),
    ClockReason(0x002, "clocks set by the user", is_throttling=False),
    ClockReason(0x004, "power cap", is_throttling=True),
    ClockReason(0x008, "hardware slowdown", is_throttling=True, is_fault=True),
    ClockReason(0x010, "sync boost group", is_throttling=True),
    ClockReason(0x020, "too hot, driver", is_throttling=True, is_fault=True),
    ClockReason(0x040, "too hot, hardware", is_throttling=True, is_fault=True),
    ClockReason(0x080, "power brake", is_throttling=True, is_fault=True),
    ClockReason(0x100, "display clocks", is_throttling=False),
)

THROTTLING_BITS = sum(reason.bit for reason in REASONS if reason.is_throttling)
"""Mask of the bits that mean throttling."""

ALL_BITS = sum(reason.bit for reason in REASONS)

REASONS_SQL = f"""
    readings AS (
        SELECT rank, device, value::BIGINT AS mask, time_ns AS from_ns,
               lead(time_ns) OVER (PARTITION BY rank, device ORDER BY time_ns) AS to_ns
        FROM samples WHERE name = '{MASK}'
    ),
    reason_bits AS (
        SELECT * FROM (VALUES {", ".join(f"({r.bit}, '{r.name}', {r.is_throttling}, {r.is_fault})" for r in REASONS)},
                              ({1 << 62}, 'unknown to this version of xsp', false, false))
            AS bits(bit, reason, throttles, is_fault)
    ),
    reasons AS (
        SELECT rank, device, from_ns, to_ns, reason, throttles, is_fault
        FROM readings JOIN reason_bits ON mask & bit <> 0 OR (bit = {1 << 62} AND mask & {ALL_BITS} <> mask)
        WHERE to_ns IS NOT NULL
    )
"""
"""SQL for a WITH clause: each reason with the time from its reading to the next one."""


# --------------------------------------------------------------------------------------------------------


MAX_FAILURES = 3
"""Number of failed reads after which a figure is left out for the rest of the run."""

INSTALL = "pip install 'xsp[cuda]'"

NEEDS = f"an NVIDIA GPU, nvidia-ml-py ({INSTALL}) and no --no-samples"
ABSENT = "no NVIDIA device was sampled"


_UNKNOWN_PROCESSES = (
    "NVML lists processes but never the measured one, which does not use the device or is in a container, where its "
    "number is different; how many others use the device is unknown"
)


class _Figure(NamedTuple):
    """One figure of a device."""

    name: str
    unit: str
    read: Callable[[Any, Any], float]
    """Function of the module and the device's handle; raises NVMLError, or AttributeError if the package is too old."""
    is_slow: bool = False


class Nvml(Source):
    """The devices that the measured process sees."""

    name = "nvml"

    def __init__(self, process: int, uuids: Sequence[str] = (), local_rank: int = 0, local_ranks: int = 1) -> None:
        """Prepare to read the devices of a process.

        Args:
            process: its process id here.
            uuids: UUIDs of its devices in CUDA's order, if it has initialised CUDA.
            local_rank: its index among the ranks on this machine.
            local_ranks: number of ranks on this machine.
        """
        self._process, self._uuids = process, uuids
        self._local_rank, self._local_ranks = local_rank, local_ranks
        self._nvml: Any = None
        self._devices: dict[int, Any] = {}
        self._failures: Counter[tuple[int, str]] = Counter()
        self._notes: dict[str, set[int]] = {}
        self._energy: dict[int, float] = {}
        self._listed: dict[int, bool] = {}
        """Devices on which NVML listed processes → whether the measured process was ever among them."""

    def open(self) -> str | None:
        """Load NVML and find the devices; return None, or the reason why there are none."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return f"the package nvidia-ml-py is not installed: {INSTALL}"
        try:
            nvml.nvmlInit()
            self._nvml = nvml
            visible = devices(nvml, self._uuids, os.environ)
        except (nvml.NVMLError, AttributeError) as error:
            return f"there is no NVIDIA GPU to read, or its driver is not loaded (NVML: {error})"
        self._devices = rank_devices(visible, self._local_rank, self._local_ranks)
        if not visible.is_certain:
            self._notes[ORDER_UNKNOWN] = set()
        return None if visible.handles else "NVML shows no device that the program may use"

    def read(self, include_slow: bool) -> Iterator[Reading]:
        """Yield the figures of each device; once a second also the limit, the highest clock and the processes."""
        for device, handle in self._devices.items():
            for figure in _FIGURES:
                if not figure.is_slow or include_slow:
                    yield from self._figure(device, figure, handle)
            yield from self._energy_used(device, handle)
            if include_slow:
                yield from self._processes(device, handle)

    def notes(self) -> Iterator[str]:
        """Yield notes on figures that could not be read, with their devices."""
        unlisted = {device for device, is_listed in self._listed.items() if not is_listed}
        for text, devices in {**self._notes, **({_UNKNOWN_PROCESSES: unlisted} if unlisted else {})}.items():
            numbers = ", ".join(map(str, sorted(devices)))
            yield f"device {numbers}: {text}" if devices else text

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def _figure(self, device: int, figure: _Figure, handle: Any) -> Iterator[Reading]:
        value = self._try(device, figure.name, lambda: figure.read(self._nvml, handle))
        if value is not None:
            yield Reading(figure.name, figure.unit, value, device)

    def _energy_used(self, device: int, handle: Any) -> Iterator[Reading]:
        """Yield the energy since the first reading; NVML counts since the driver was loaded."""
        joules = self._try(device, "gpu.energy", lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        if joules is not None:
            yield Reading("gpu.energy", "J", joules - self._energy.setdefault(device, joules), device)

    def _processes(self, device: int, handle: Any) -> Iterator[Reading]:
        processes = self._try(device, "gpu.processes", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if processes is None:
            return
        measured = [process for process in processes if process.pid == self._process]
        yield Reading("gpu.processes", "processes", len(processes), device)
        if measured:
            yield Reading("gpu.processes.others", "processes", len(processes) - len(measured), device)
            if measured[0].usedGpuMemory is not None:
                yield Reading("gpu.memory.process", "bytes", measured[0].usedGpuMemory, device)
        if processes:
            self._listed[device] = self._listed.get(device, False) or bool(measured)

    def _try(self, device: int, name: str, function: Callable[[], Any]) -> Any:
        """Return the result of `function`, or None; after `MAX_FAILURES` failures, read it no more and add a note."""
        if self._failures[device, name] >= MAX_FAILURES:
            return None
        try:
            return function()
        except (self._nvml.NVMLError, AttributeError) as error:
            self._failures[device, name] += 1
            if self._failures[device, name] == MAX_FAILURES:
                self._notes.setdefault(f"{name} cannot be read ({error})", set()).add(device)
            return None


def _power(nvml: Any, device: Any) -> float:
    """Return the current power in W; from Ampere on, `nvmlDeviceGetPowerUsage` is the mean over a second."""
    [field] = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return float(field.value.uiVal) / 1e3


def _reasons(nvml: Any, device: Any) -> float:
    """Return the mask of reasons why clocks are not at their highest."""
    getter = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if getter is not None:
        try:
            return float(getter(device))
        except nvml.NVMLError:  # drivers before 535 know only the former name
            pass
    return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


_FIGURES: tuple[_Figure, ...] = (
    _Figure("gpu.power", "W", _power),
    _Figure("gpu.power.mean", "W", lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1e3),
    _Figure("gpu.clock.sm", "MHz", lambda nvml, device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
    _Figure("gpu.clock.memory", "MHz", lambda nvml, device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)),
    _Figure(MASK, "mask", _reasons),
    _Figure(
        "gpu.temperature", "°C", lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    ),
    _Figure("gpu.memory.used", "bytes", lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used),
    _Figure("gpu.use", "%", lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu),
    _Figure("gpu.power.limit", "W", lambda nvml, device: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3, True),
    _Figure(
        "gpu.clock.sm.highest",
        "MHz",
        lambda nvml, device: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        True,
    ),
    _Figure("gpu.memory.total", "bytes", lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).total, True),
)
"""Figures that are read from each device, apart from energy and processes."""
