"""The processor as a device: the host computes, so a call has ended when it returns, and the host's clock times it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xsp import cached, processes
from xsp.device import machine
from xsp.device.contract import Arguments, Device, Elapsed, Fault

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

EXTRA_BYTES = 1 << 30
"""Bytes that libraries may take in addition to the tensors of a block: pools, kernel caches, work space."""


class Processor(Device):
    """The processor of this machine, with all cores that the process may use."""

    kind = "cpu"
    is_host = True
    most_rotated_bytes = 64 << 20

    @property
    def id(self) -> str:
        """`cpu`: there is one."""
        return self.kind

    @classmethod
    def count(cls) -> int:
        """Return 1."""
        return 1

    @property
    def name(self) -> str:
        """The processor's name as reported by the kernel."""
        return machine.cpu_model() or self.kind

    @property
    def torch_name(self) -> str:
        """`cpu`."""
        return self.kind

    def initialise(self) -> None:
        """Return at once: it is there."""

    def sharing_obstacle(self) -> str:
        """Return an empty text: memory of the host is what `xsp share` begins with."""
        return ""

    def synchronize(self) -> None:
        """Return at once: what was called has been done."""

    def timed(
        self, function: Callable[..., Any], arguments: Arguments, before: Callable[[], object] | None = None
    ) -> Elapsed:
        """Time calls by the host's clock."""
        clock = time.perf_counter_ns
        if before is not None:
            elapsed_ns = 0
            for each in arguments:
                before()
                start = clock()
                function(*each)
                elapsed_ns += clock() - start
        elif len(arguments) == 1:
            (only,) = arguments
            start = clock()
            function(*only)
            elapsed_ns = clock() - start
        else:
            start = clock()
            for each in arguments:
                function(*each)
            elapsed_ns = clock() - start
        return Elapsed(elapsed_ns, elapsed_ns)

    def caches(self) -> list[tuple[int, int]]:
        """Return the data caches that a core sees; empty if the system does not report them."""
        sizes = []
        for folder in sorted(CACHES.glob("index[0-9]*")):
            level, size, kind = (_read(folder / name) for name in ("level", "size", "type"))
            if level and size and kind != "Instruction" and size.rstrip("KM").isdecimal():
                unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
                sizes.append((int(level), int(size.rstrip("KM")) * unit))
        return sorted(sizes)

    def free_bytes(self) -> int | None:
        """Return the memory that is available without swapping."""
        return processes.free_memory_bytes()

    def begin(self, limit_bytes: int) -> None:
        """Limit the data of this process beyond what it has now, where the system can (`RLIMIT_DATA`)."""
        try:
            import resource

            status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            current = int(next(line.split()[1] for line in status if line.startswith("VmData"))) * 1024
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (current + limit_bytes + EXTRA_BYTES, hard))
        except (ImportError, OSError, ValueError, StopIteration):  # not on Linux: only the footprint is checked
            return

    def fault(self, error: BaseException) -> Fault | None:
        """Return whether memory ran out."""
        texts = ("can't allocate memory", "not enough memory")
        return Fault.OUT_OF_MEMORY if any(text in str(error) for text in texts) else None

    def identity(self) -> dict[str, Any]:
        """Return processor, memory, cores, devices beside it, versions of libraries, and variables that matter."""
        memory_bytes = processes.total_memory_bytes()
        return {
            "cpu": machine.cpu_model(),
            "machine": os.uname().machine,
            "instructions": _instructions(),
            "cores": processes.cores(),
            "nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
            "memory_gib": None if memory_bytes is None else round(memory_bytes / 2**30),
            "caches": [f"{level} {size}" for level, size in self.caches()],
            "variables": variables(os.environ),
            "onnxruntime": machine.version_of("onnxruntime"),
            **_torch(),
        }

    def circumstances(self) -> dict[str, Any]:
        """Return load, governor and the like."""
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


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change which kernels run, and the libraries that are loaded before others."""
    found = {
        name: value
        for name, value in sorted(environment.items())
        if VARIABLES.fullmatch(name) and not NON_KERNEL_VARIABLES.fullmatch(name)
    }
    loaded = [Path(path).name for path in re.split(r"[:\s]+", environment.get("LD_PRELOAD", "")) if path]
    return {**found, **({"LD_PRELOAD": " ".join(loaded)} if loaded else {})}


def _instructions() -> list[str]:
    """Return the instruction sets of the processor that matter to kernels."""
    lines = processes.system_text("/proc/cpuinfo").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [flag for flag in FLAGS if flag in flags]


def _torch() -> dict[str, Any]:
    """Return versions of PyTorch and its libraries, and the devices beside the processor."""
    from xsp.device import devices

    versions = _versions()
    if versions["torch"] is None:
        return versions
    return {**versions, "devices": [device.described() for device in devices.accelerators()]}


def _versions() -> dict[str, Any]:
    """Return versions of PyTorch and its libraries; from the cache if the software is unchanged."""
    from xsp.device import devices

    software = None if devices.may_be_here() else cached.software_before_torch()
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
    from xsp.device import devices

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
    return {"torch": torch.__version__, "git": torch.version.git_version, **devices.libraries(), **libraries}


def _read(path: Path) -> str | None:
    return processes.system_text(path).strip() or None
