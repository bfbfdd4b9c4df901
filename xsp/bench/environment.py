"""Properties that have to be equal for timings to be compared, and circumstances that are only noted.

The environment is processor, memory, cores, devices, versions of the libraries that contain the kernels, and variables
that change which kernel is chosen. Its hash is part of the path of the stored timings. The number of threads belongs to
the spec. Circumstances, such as the load of the machine, are noted and may differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from xsp import cached, processes
from xsp.device import machine

VARIABLES = re.compile(
    r"(OMP|GOMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|BLIS|ATEN|CUBLAS|CUDNN|MALLOC)_\w+"
    r"|TORCH_(CUDNN|BLAS|CUBLAS|ALLOW_TF32|MKLDNN|USE)\w*|NVIDIA_TF32_OVERRIDE|CUDA_LAUNCH_BLOCKING|GLIBC_TUNABLES"
)
"""Variables that change which kernel runs, or how."""

NON_KERNEL_VARIABLES = re.compile(r"\w*(NUM_THREADS|VERBOSE\w*|_LOG\w*|DISPLAY\w*)")
"""Those of `VARIABLES` that do not change kernels; the number of threads is part of a spec."""

FLAGS = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile", "fma", "asimd", "sve", "bf16")
KIND = "environment"
"""Kind of the cache entries that this module writes."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


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
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

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
    def name(self) -> str:
        """One line for display: processor and cores, devices, and the version of torch."""
        return ", ".join(
            filter(None, [self.processor, self.devices, f"torch {self.properties.get('torch') or 'none'}"])
        )

    @property
    def processor_note(self) -> str:
        """Sentence that says that single calls are timed on the processor although there are devices; else empty."""
        if not self.devices:
            return ""
        return (
            f"the calls are timed on the processor ({self.processor}), not on {self.devices}; to choose the "
            "device: xsp bound MODEL --device NAME (its quoted peak rates), or "
            "xsp profile MODEL and xsp bound RUN (a run on it)"
        )


@lru_cache(maxsize=1)
def current_environment() -> Environment:
    """Return the environment of this process; PyTorch is loaded if it is installed and the cache has no entry."""
    properties = {
        "cpu": machine.cpu_model(),
        "machine": os.uname().machine,
        "instructions": _instructions(),
        "cores": processes.cores(),
        "nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "memory_gib": _memory_gib(),
        "caches": [f"{level} {size}" for level, size in caches()],
        "variables": _variables(os.environ),
        "onnxruntime": _version("onnxruntime"),
        **_torch(),
    }
    return Environment(properties, circumstances())


def circumstances() -> dict[str, Any]:
    """Return the current circumstances."""
    load = next(iter(os.getloadavg()), None) if hasattr(os, "getloadavg") else None
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    turbo = Path("/sys/devices/system/cpu/intel_pstate/no_turbo")
    siblings = Path("/sys/devices/system/cpu/smt/active")
    return {
        "load": None if load is None else round(load, 2),
        "governor": _read(governor),
        "no_turbo": _read(turbo),
        "hyper_threads": _read(siblings),
        "container": Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ,
    }


def caches() -> list[tuple[int, int]]:
    """Return level and bytes of each data cache that a core sees, sorted; empty if the system does not report them."""
    sizes = []
    for folder in sorted(CACHES.glob("index[0-9]*")):
        level, size, kind = (_read(folder / name) for name in ("level", "size", "type"))
        if level and size and kind != "Instruction" and size.rstrip("KM").isdecimal():
            unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
            sizes.append((int(level), int(size.rstrip("KM")) * unit))
    return sorted(sizes)


def _instructions() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [flag for flag in FLAGS if flag in flags]


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    variables = {
        name: value
        for name, value in sorted(environment.items())
        if VARIABLES.fullmatch(name) and not NON_KERNEL_VARIABLES.fullmatch(name)
    }
    loaded = [Path(path).name for path in re.split(r"[:\s]+", environment.get("LD_PRELOAD", "")) if path]
    return {**variables, **({"LD_PRELOAD": " ".join(loaded)} if loaded else {})}


def _torch() -> dict[str, Any]:
    """Return versions of PyTorch and its libraries, and the devices; from the cache if the software is unchanged."""
    software = None if cached.has_devices() else cached.software_before_torch()
    with contextlib.suppress(ValueError):
        versions = json.loads(cached.read(KIND, software) or "null")
        if isinstance(versions, dict) and versions.get("torch"):
            return versions
    versions = _query_torch()
    if versions["torch"] is not None:
        cached.store(KIND, software, json.dumps(versions))
    return versions


def _query_torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"torch": None}
    config = torch.__config__.show()
    libraries = {
        name: match.group(1)
        for name, match in {
            "onednn": re.search(r"(?:MKL-DNN|oneDNN) v(\S+)", config),
            "mkl": re.search(r"Math Kernel Library Version (\S+)", config),
            "blas": re.search(r"BLAS_INFO=(\w+)", config),
            "capability": re.search(r"CPU capability usage: (\S+)", config),
        }.items()
        if match is not None
    }
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "sms": properties.multi_processor_count,
                }
            )
    return {
        "torch": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if devices else None,
        "driver": _driver() if devices else None,
        "devices": devices,
        **libraries,
    }


def _driver() -> str | None:
    match = re.search(r"(\d+\.\d+(\.\d+)?)", _read(Path("/proc/driver/nvidia/version")) or "")
    return None if match is None else match.group(1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
