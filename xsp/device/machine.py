"""Hardware and software of the machine of a run, without anything that identifies its owner.

The performance ceilings of a machine are in `xsp.device.ceilings`.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from xsp import processes

_PACKAGES = ("torch", "torchvision", "timm", "transformers", "numpy", "duckdb", "opentelemetry-sdk")


def describe() -> dict[str, Any]:
    """Return hardware and versions: no host name, no user, no path, no environment."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "isa": isa(),
        "cores": processes.cores(),
        "memory_bytes": processes.total_memory_bytes(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        **_torch(),
    }


def device_uuids() -> list[str]:
    """Return the drivers' identifiers of the devices that the program uses, in torch's order; they are never stored."""
    from xsp.device import devices

    return [device.uuid for device in devices.used() if device.uuid]


def cpu_model() -> str | None:
    """Return the processor's name as reported by the kernel."""
    for line in processes.system_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


ISA = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16",  # x86
    "asimd", "asimdhp", "bf16", "sve", "i8mm",  # ARM
)  # fmt: skip
"""Instruction set extensions that matter for tensor types, by their names in Linux."""


def isa() -> list[str] | None:
    """Return the extensions of `ISA` that the processor has, in order; None if the system does not report them."""
    lines = processes.system_text("/proc/cpuinfo").splitlines()
    flags_line = next((line for line in lines if line.partition("\t")[0].strip(": ") in ("flags", "Features")), "")
    flags = set(flags_line.partition(":")[2].split())
    return [extension for extension in ISA if extension in flags] if flags else None


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # not for `import xsp`, see `xsp.plugins`

    try:
        return version(package)
    except (PackageNotFoundError, ValueError, OSError):  # OSError: the program has used up all file descriptors
        return None


def _torch() -> dict[str, Any]:
    """Return properties from torch if the program has loaded it; xsp does not load it itself."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from xsp.device import devices

    used = devices.used()
    return {
        "torch_threads": torch.get_num_threads(),
        "torch_seed": torch.initial_seed() if "torch.random" in sys.modules else None,
        "devices": [device.name for device in used],
        "device_properties": [device.properties() for device in used],
    }
