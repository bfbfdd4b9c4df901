"""A stand-in for the module `pynvml`, since NVML needs a GPU. Names and signatures are pynvml's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30

KEYS = {
    "nvmlDeviceGetName": "name", "nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetPowerUsage": "mean_mw",
    "nvmlDeviceGetTotalEnergyConsumption": "energy_mj", "nvmlDeviceGetEnforcedPowerLimit": "limit_mw",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons", "nvmlDeviceGetCurrentClocksThrottleReasons": "throttle",
}  # fmt: skip
"""Functions whose only argument is a device → the key of the value that they return."""


class NVMLError(Exception):
    """Like pynvml's: created from a number, with NVML's text."""

    def __str__(self) -> str:
        return {3: "Not Supported", 9: "Driver Not Loaded"}.get(self.args[0], f"error {self.args[0]}")


class FakeNvml:
    """Devices as dictionaries; a value without a key is not supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_FI_DEV_POWER_INSTANT = 1, 2, 0, 186

    def __init__(self, *devices: dict[str, Any]) -> None:
        self.devices = devices
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.devices:
            raise NVMLError(9)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        for device in self.devices:
            if device["uuid"] == uuid:
                return device
        raise NVMLError(6)

    def nvmlDeviceGetFieldValues(self, device: dict[str, Any], fields: list[int]) -> list[Any]:
        power = device.get("power_mw")
        return [SimpleNamespace(nvmlReturn=3 * (power is None), value=SimpleNamespace(uiVal=power)) for _ in fields]

    def nvmlDeviceGetClockInfo(self, device: dict[str, Any], clock: int) -> int:
        return int(reported(device, "clocks")[clock])

    def nvmlDeviceGetMaxClockInfo(self, device: dict[str, Any], clock: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, device: dict[str, Any], sensor: int) -> int:
        return int(reported(device, "temperature"))

    def nvmlDeviceGetMemoryInfo(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(used=reported(device, "used"), total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=reported(device, "use"), memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict[str, Any]) -> list[Any]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used_bytes)
            for pid, used_bytes in reported(device, "processes").items()
        ]

    def __getattr__(self, name: str) -> Callable[[dict[str, Any]], Any]:
        if name not in KEYS:
            raise AttributeError(name)
        return lambda device: reported(device, KEYS[name])


def reported(device: dict[str, Any], key: str) -> Any:
    if key not in device:
        raise NVMLError(3)
    return device[key]


def h200(**changes: Any) -> dict[str, Any]:
    """Return a device that supports all values."""
    defaults = {
        "name": "H200", "uuid": "GPU-0123-a", "power_mw": 412_500, "mean_mw": 400_000, "limit_mw": 700_000,
        "energy_mj": 5_000_000, "clocks": {1: 1755, 2: 3201}, "temperature": 61, "used": 30 * GIB, "use": 97,
        "reasons": 0x4, "processes": {100: 29 * GIB},
    }  # fmt: skip
    return {**defaults, **changes}
