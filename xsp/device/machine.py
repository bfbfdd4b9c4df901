"""What machine and which software a run was made on, without a word on whose machine it is.

What a machine can do at most is in `xsp.device.ceilings`.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
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
        "memory_bytes": _memory_bytes(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        **_torch(),
    }


def identities() -> list[str]:
    """Return the UUIDs of devices in CUDA's order, if the program has initialised CUDA; they are never stored."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    found = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    return [str(each.uuid) for each in found if hasattr(each, "uuid")]


def cpu_model() -> str | None:
    """Return the processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


ISA = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16",  # x86
    "asimd", "asimdhp", "bf16", "sve", "i8mm",  # ARM
)  # fmt: skip
"""Extensions of the instruction set that types of tensors depend on, by the names of Linux."""


def isa() -> list[str] | None:
    """Return which of `ISA` the processor has, in their order; None where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    said = next(
        (line for line in text.splitlines() if line.partition("\t")[0].strip(": ") in ("flags", "Features")), ""
    )
    found = set(said.partition(":")[2].split())
    return [each for each in ISA if each in found] if found else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # not for `import xsp`, see `xsp.plugins`

    try:
        return version(package)
    except (PackageNotFoundError, OSError):  # or the program has left no descriptor to read it with
        return None


def _torch() -> dict[str, Any]:
    """Return what torch says, if the program has loaded it; loading it here would be our doing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    devices = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    return {
        "torch_threads": torch.get_num_threads(),
        "torch_seed": torch.initial_seed() if "torch.random" in sys.modules else None,
        "devices": [each.name for each in devices],
        "device_properties": [_properties(each) for each in devices],
    }


def _properties(device: Any) -> dict[str, Any]:
    """Return what the occupancy of a launch depends on, as importers write it."""
    return {
        "name": device.name,
        "sms": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "compute": f"{device.major}.{device.minor}",
        "warp_size": getattr(device, "warp_size", None),
    }
